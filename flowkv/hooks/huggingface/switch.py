"""Switches the decoder's attention implementation to FlowKV's, and back."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch

from flowkv.hooks.huggingface.attention import FALLBACKS, PREFIX, register
from flowkv.hooks.huggingface.versions import PreTrainedModel

_COMPARED = re.compile(
    r"_attn_implementation\s*(?:==|!=|not in|in)\s*(\([^)]*\)|\[[^\]]*\]|[\"']\w+[\"'])"
)


class _StandIn(str):
    """The name of FlowKV's function; copied or pickled, that of the one it stands in for."""

    _previous: str

    def __new__(cls, previous: str) -> _StandIn:
        name = super().__new__(cls, PREFIX + previous)
        name._previous = previous
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self._previous

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (self._previous,)


class Switch:
    """The attention implementation of one model's decoder.

    Args:
        model: The model.

    Attributes:
        reason: Why it cannot be switched, so that layers are read dense; "" if it can.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        decoder = decoder_of(model)
        self._before: list[tuple[Any, str]] = []
        self._configs = _configs(decoder)
        self.reason = _obstacle(decoder, self._configs)

    def on(self) -> None:
        """Lets FlowKV stand in, if it can."""
        if self.reason or self._before:
            return
        register()
        for config in self._configs:
            previous = str(config._attn_implementation)
            if previous.startswith(PREFIX):
                continue
            self._before.append((config, previous))
            # The property would set it for sub-configurations (a vision tower's) as well.
            config._attn_implementation_internal = _StandIn(previous)

    def off(self) -> None:
        """Puts back what was there, unless somebody else has changed it since."""
        while self._before:
            config, previous = self._before.pop()
            if config._attn_implementation == PREFIX + previous:
                config._attn_implementation_internal = previous


def decoder_of(model: Any) -> torch.nn.Module:
    """The part of a model whose layers use the cache."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    return found if isinstance(found, torch.nn.Module) else model


def _configs(decoder: torch.nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


def _obstacle(decoder: torch.nn.Module, configs: list[Any]) -> str:
    names = {str(config._attn_implementation) for config in configs}
    names = {name.removeprefix(PREFIX) for name in names}
    for name in sorted(names):
        if name not in FALLBACKS:
            return f"its attention implementation is {name!r}; {FALLBACKS[0]!r} reads pages"
    for module in decoder.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            return "its attention is not chosen by configuration"
    for source in {sys.modules.get(type(module).__module__) for module in decoder.modules()}:
        if _compares(source, names):
            return "its source asks for the name of its attention implementation"
    return "" if configs else "it has no configuration of its attention"


def _compares(source: Any, names: set[str]) -> bool:
    """Whether a modeling file treats one of these implementations in a special way."""
    if source is None or source.__name__.startswith("torch."):
        return False
    try:
        text = inspect.getsource(source)
    except (OSError, TypeError):
        return True
    asked = " ".join(_COMPARED.findall(text))
    return any(re.search(rf"[\"']{name}[\"']", asked) for name in names)
