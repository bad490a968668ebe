"""Who a model is, for the names of its pages, and whether it is still the same.

Pages are valid for exactly the weights, adapter and configuration that computed them. A change is
noticed when a cache is made, and (cheaply) before pages are published: parameters are replaced,
moved or written to (`_version`), adapters are switched, foreign hooks are added. Writes through
`.data` leave no trace but their content, which is read anew for every cache.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import torch

from flowkv.core.keys import Namespace
from flowkv.hooks.huggingface.fingerprint import Content, fingerprint
from flowkv.hooks.huggingface.watch import Watch, active_adapters, changes

_UNIMPORTANT = frozenset(
    """_name_or_path _commit_hash transformers_version architectures dtype torch_dtype id2label
    label2id problem_type use_cache return_dict output_attentions output_hidden_states
    task_specific_params chunk_size_feed_forward""".split()
)
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class Identity:
    """The identity of one model at one moment.

    Args:
        model: The model.
        name: Name given by the user, which replaces the model's own and is trusted as long as
            nothing changes; "" for the model's own, with a fingerprint of its weights.

    Attributes:
        namespace: Its name, for the keys of pages.
        switch: Length from which positions are encoded otherwise, if there is one.
        n_bytes: Bytes of its weights.
    """

    def __init__(self, model: Any, name: str = "") -> None:
        self.switch = _switch(model.config)
        # Encodings that depend on length rewrite these in every forward.
        self._passing = "inv_freq" if self.switch is not None else ""
        self._watch = Watch(model, self._passing)
        self._name, self._changed = name, False
        self._read(model)
        weakref.finalize(model, self._forget).atexit = False

    def read(self, model: Any) -> None:
        """Takes the model as it is now, after it has changed."""
        self._changed = True
        self._watch.see(model)
        self._read(model)

    def _read(self, model: Any) -> None:
        tensors = self._watch.tensors
        self._content = Content(tensors)
        self.n_bytes = self._content.n_bytes
        self._places = {(tensor.dtype, tensor.device) for tensor in tensors}
        config: Any = model.config
        own_name = str(getattr(config, "_name_or_path", "")) or type(model).__name__
        self.namespace = Namespace(
            model=self._name or own_name,
            revision="" if self._name else str(getattr(config, "_commit_hash", None) or ""),
            weights="" if self._name and not self._changed else fingerprint(self._named(model)),
            adapter=_adapter(model),
            rope=_settings(config),
        )

    @property
    def compiled(self) -> bool:
        """Whether parts of the model are compiled."""
        return self._watch.compiled

    def same(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced, moved, written to in the open, or switched."""
        return self._watch.same(model)

    def same_content(self) -> bool:
        """Whether the weights still hold what they held; reads them."""
        return self._content.same()

    def moved(self, model: torch.nn.Module) -> bool:
        """Whether a dtype or device is new."""
        return {(t.dtype, t.device) for t in self._named(model).values()} != self._places

    def _named(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        every = [*model.named_parameters(), *model.named_buffers()]
        passing = self._passing
        return {name: t for name, t in every if not (passing and name.endswith(passing))}

    def _forget(self) -> None:
        self._watch.forget()
        self._content = Content([])


def _adapter(model: torch.nn.Module) -> str:
    """Everything that was put on the model and changes what it computes."""
    found = [active_adapters(model)] + [
        f"{path}: {change}"
        for path, module in model.named_modules()
        for change in changes(module.__dict__)
    ]
    return "; ".join(part for part in found if part)


def _switch(config: Any) -> int | None:
    """Length from which positions are encoded otherwise, for encodings that depend on length."""
    text = config.get_text_config(decoder=True)
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, dict):
        return None
    trained = getattr(text, "max_position_embeddings", None)
    lengths = []
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type", part.get("type"))
        if isinstance(kind, str) and any(name in kind for name in _ROPE_BY_LENGTH):
            lengths.append(part.get("original_max_position_embeddings") or trained or 1)
    return min(int(n) for n in (*lengths, trained or lengths[0])) if lengths else None


def _settings(config: Any) -> str:
    """Everything in the configuration that can change what is computed, as canonical text."""
    return json.dumps(_plain(config.to_dict()), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _UNIMPORTANT}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
