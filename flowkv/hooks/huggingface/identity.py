"""Who a model is, for the names of its pages, and whether it is still the same.

Pages are valid for exactly the weights, adapter and configuration that computed them. A change is
noticed when a cache is made, and (cheaply) before pages are published: parameters are replaced,
moved or written to (`_version`), adapters are switched, foreign hooks are added. Writes through
`.data` leave no trace but their content, which is read anew for every cache.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from flowkv.core.keys import Namespace
from flowkv.hooks.huggingface.fingerprint import PROCESS, content, fingerprint, tensor_bytes

_ADAPTER_STATE = frozenset(
    (
        "active_adapter",
        "active_adapters",
        "_active_adapter",
        "_active_adapters",
        "_disable_adapters",
        "disable_adapters",
        "_adapters_disabled",
        "merged_adapters",
        "scaling",
    )
)
"""Attributes by which adapter libraries say which of their weights count."""

_UNIMPORTANT = frozenset(
    """_name_or_path _commit_hash transformers_version architectures dtype torch_dtype id2label
    label2id problem_type use_cache return_dict output_attentions output_hidden_states
    task_specific_params chunk_size_feed_forward is_encoder_decoder tie_word_embeddings""".split()
)
_OWN_HOOKS = ("transformers.", "accelerate.", "flowkv.")
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class Identity:
    """The identity of one model at one moment.

    Args:
        model: The model.
        name: Name given by the user, which replaces the model's own and is trusted as long as
            nothing changes; "" for the model's own, with a fingerprint of its weights.
    """

    def __init__(self, model: torch.nn.Module, name: str = "") -> None:
        self.config: Any = model.config
        self.rope = _rope(self.config)
        self.switch = _switch(self.config, self.rope)
        self._name, self._first = name, True
        self.read(model)

    def read(self, model: torch.nn.Module) -> None:
        """Takes the model as it is now."""
        self._stamp = self._stamp_of(model)
        self._tensors = [tensor for _, tensor in self._named(model)]
        self._content, self.n_bytes = content(self._tensors), tensor_bytes(self._tensors)
        self._places = {(tensor.dtype, tensor.device) for tensor in self._tensors}
        trusted = self._name and self._first
        self._first = False
        weights = "" if trusted else fingerprint(dict(self._named(model)))
        self.namespace = Namespace(
            model=self._name or str(getattr(self.config, "_name_or_path", "")) or _kind(model),
            revision="" if self._name else str(getattr(self.config, "_commit_hash", None) or ""),
            weights=weights,
            adapter=_adapter(model),
            rope=_settings(self.config),
        )

    def same(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced, moved, written to in the open, or switched."""
        return self._stamp_of(model) == self._stamp

    def moved(self, model: torch.nn.Module) -> bool:
        """Whether a dtype or device is new."""
        return {(t.dtype, t.device) for _, t in self._named(model)} != self._places

    def same_content(self) -> bool:
        """Whether the weights still hold what they held; reads them."""
        return content(self._tensors) == self._content

    def _named(self, model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        by_length = self.switch is not None
        buffers = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if not (by_length and name.endswith("inv_freq"))  # rewritten by every forward
        ]
        return [*model.named_parameters(), *buffers]

    def _stamp_of(self, model: torch.nn.Module) -> list[Any]:
        stamp: list[Any] = [_active(model)]
        by_length = self.switch is not None
        for module in model.modules():
            held = module.__dict__
            for kind in ("_parameters", "_buffers"):
                for name, tensor in held[kind].items():
                    if tensor is not None and not (by_length and name.endswith("inv_freq")):
                        stamp += _tensor_stamp(tensor)
            stamp += _changes(held)
        return stamp


def _tensor_stamp(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        version = tensor._version
    except RuntimeError:  # made in inference mode: no versions are counted
        version = 0
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a wrapper without storage of its own
        address = 0
    return id(tensor), address, version, tensor.dtype, tensor.device


def _changes(held: dict[str, Any]) -> list[str]:
    """What adapter libraries and foreign hooks did to a module, by its `__dict__`."""
    found = [
        f"{name}={held[name]}"
        for name in _ADAPTER_STATE.intersection(held)
        if held[name] and not isinstance(held[name], float)  # a plain scale is no adapter's
    ]
    hooks = [*held["_forward_hooks"].values(), *held["_forward_pre_hooks"].values()]
    if "forward" in held:
        hooks.append(held["forward"])
    for hook in hooks:
        if not str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS):
            found.append(f"{hook.__class__.__name__} {id(hook)} of {PROCESS}")
    return sorted(found)


def _active(model: torch.nn.Module) -> str:
    """Names of the adapters that the model as a whole says are active."""
    active = set()
    for name in ("active_adapters", "active_adapter"):
        found = getattr(model, name, None)
        try:
            value = found() if callable(found) else found
        except (ValueError, ImportError, AttributeError):  # none was ever loaded
            continue
        if value:
            active.add(f"{name}={value}")
    return "; ".join(sorted(active))


def _adapter(model: torch.nn.Module) -> str:
    """Everything that was put on the model and changes what it computes."""
    found = [_active(model)] + [
        f"{path}: {change}"
        for path, module in model.named_modules()
        for change in _changes(module.__dict__)
    ]
    return "; ".join(part for part in found if part)


def _kind(model: torch.nn.Module) -> str:
    return type(model).__name__


def _rope(config: Any) -> dict[str, Any]:
    text = config.get_text_config(decoder=True)
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(text, name, None)
        if isinstance(found, dict):
            return dict(found)
    return {}


def _switch(config: Any, rope: dict[str, Any]) -> int | None:
    """Length from which positions are encoded otherwise, for encodings that depend on length."""
    text = config.get_text_config(decoder=True)
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    found = []
    for part in parts:
        kind = part.get("rope_type", part.get("type"))
        if isinstance(kind, str) and any(name in kind for name in _ROPE_BY_LENGTH):
            length = part.get("original_max_position_embeddings")
            found.append(int(length or getattr(text, "max_position_embeddings", 1) or 1))
    if not found:
        return None
    return min([*found, int(getattr(text, "max_position_embeddings", None) or min(found))])


def _settings(config: Any) -> str:
    """Everything in the configuration that can change what is computed, as canonical text."""
    return json.dumps(_plain(config.to_dict()), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _UNIMPORTANT}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
