"""A memo for the encoders of attached models: of images, of sound, and of encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowkv.cache.kv import KV, follow, warn
from flowkv.core.errors import FlowKVError
from flowkv.observe.events import Remembered
from flowkv.residency.keeper import Keeper, open_keeper
from flowkv.tensors.memo import Memo

_MODALITIES = ("image", "audio")


class RememberedForward:
    """Forward of an encoder with a memo, which its module runs in place of its own forward.

    After a result that cannot be remembered, the module runs without the memo, with one warning.

    Args:
        module: The encoder.
        kv: The model's cache.
        keeper: The store of the remembered rows.

    Attributes:
        around: The module's own forward.
    """

    def __init__(self, module: Any, kv: KV, keeper: Keeper) -> None:
        self.around = module.forward
        self._module, self._kv, self._off = module, kv, ""
        self._memo = Memo(
            self.around, keeper, tenant=kv.config.tenant, secret=kv.config.secret_bytes
        )
        self._own = "forward" in vars(module)

    def hang(self) -> None:
        """Replace the module's forward by this one."""
        self._module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's forward, from the memo where it is known."""
        if not self._off and not self._kv.closed:
            try:
                return self._memo(*args, **kwargs)
            except FlowKVError as error:
                self._off = str(error)
                name = type(self._module).__name__
                warn(self._kv, f"memo: {name}", f"FlowKV remembers nothing of {name}: {error}")
        return self.around(*args, **kwargs)

    def forget(self, tenant: str) -> int:
        """Erase the remembered rows if they belong to that tenant; return how many there were."""
        own = tenant == self._kv.config.tenant and self._memo.keeper.open
        return self._memo.forget() if own else 0

    def close(self) -> None:
        """Restore the module's own forward and close the memo."""
        if vars(self._module).get("forward") == self.forward:
            if self._own:
                self._module.forward = self.around
            else:
                del self._module.forward
        self._memo.close()


def remember(model: Any, kv: KV, places: str | Sequence[str]) -> None:
    """Give the encoders of a model a memo of their results, until the cache is detached.

    Args:
        model: An encoder-decoder, or a model that reads more than text; others have no encoders.
        kv: The model's cache; its tenant owns the rows.
        places: Places of the remembered rows, fastest first.

    Raises:
        ConfigError: A place is invalid.
    """
    encoders = [model.get_encoder()] if model.config.is_encoder_decoder else []
    encoders += [model.get_encoder(modality=each) for each in _MODALITIES]
    none = model, model.base_model  # a model without such an encoder returns one of these
    found = {id(each): each for each in encoders if all(each is not one for one in none)}.values()
    listed = (places,) if isinstance(places, str) else tuple(places)
    keeper = open_keeper(*listed, secret=kv.config.secret)
    keeper.bus.subscribe(kv.bus.emit, Remembered)
    forwards = []
    try:
        for encoder in found:
            forwards.append(RememberedForward(encoder, kv, keeper))
    except FlowKVError as error:
        warn(kv, "memo", f"FlowKV remembers nothing of what encoders compute: {error}")

    def end() -> None:
        for each in forwards:
            each.close()
        keeper.close()

    for each in forwards:
        each.hang()
        follow(kv, forget=each.forget)
    follow(kv, detach=end)
