"""Encoders of attached models remember: of images, of sound, of what a decoder attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowkv.cache.kv import KV, follow, warn
from flowkv.core.errors import FlowKVError
from flowkv.hooks.memo import Memo
from flowkv.observe.events import Remembered
from flowkv.residency.keeper import Keeper, open_keeper

_MODALITIES = ("image", "audio")


class RememberedForward:
    """The forward of an encoder, which its module runs instead of its own.

    What cannot be remembered is left to the module from then on, with one warning.

    Args:
        module: The encoder.
        kv: Of the model.
        keeper: Where rows lie.

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
        """Stands in for the module's forward."""
        self._module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward gives."""
        if not self._off and not self._kv.closed:
            try:
                return self._memo(*args, **kwargs)
            except FlowKVError as error:
                self._off = str(error)
                name = type(self._module).__name__
                warn(self._kv, f"memo: {name}", f"FlowKV remembers nothing of {name}: {error}")
        return self.around(*args, **kwargs)

    def forget(self, tenant: str) -> int:
        """Erases what it remembers, if it is for that tenant; how many rows."""
        own = tenant == self._kv.config.tenant and self._memo.keeper.open
        return self._memo.forget() if own else 0

    def close(self) -> None:
        """Leaves the module as it was."""
        if vars(self._module).get("forward") == self.forward:
            if self._own:
                self._module.forward = self.around
            else:
                del self._module.forward
        self._memo.close()


def remember(model: Any, kv: KV, places: str | Sequence[str]) -> None:
    """Has the encoders of a model remember what they computed, until the cache is detached.

    Args:
        model: An encoder-decoder, or a model that reads more than text; others have none.
        kv: Its cache, whose tenant this is.
        places: Where rows lie, fastest first.

    Raises:
        ConfigError: A place is none.
    """
    encoders = [model.get_encoder()] if model.config.is_encoder_decoder else []
    encoders += [model.get_encoder(modality=each) for each in _MODALITIES]
    none = model, model.base_model  # is what a model says that has no such encoder
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
