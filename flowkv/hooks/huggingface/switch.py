"""Switches the decoder's attention implementation to FlowKV's for forwards over pages.

Between them the configuration says what it said before: callers read it, save it and set it, and
compiled code is made of it.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from typing import Any

import torch

from flowkv.hooks.huggingface.attention import FALLBACKS, PREFIX, register
from flowkv.hooks.huggingface.versions import PreTrainedModel

_COMPARED = re.compile(
    r"_attn_implementation\s*(?:==|!=|not in|in)\s*(\([^)]*\)|\[[^\]]*\]|[\"']\w+[\"'])"
)


class Switch:
    """The attention implementation of one model's decoder. Thread-safe.

    Args:
        model: The model.

    Attributes:
        reason: Why it is not switched, so that layers are read dense; "" if it is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        decoder = decoder_of(model)
        self._configs = [(config, own(config)) for config in _configs(decoder)]
        self.reason = _obstacle(decoder, {name for _, name in self._configs})
        self._switched: list[tuple[Any, str]] = []
        self._forwards, self._lock = 0, threading.Lock()

    def on(self) -> None:
        """A forward over pages begins: FlowKV stands in, if it can."""
        with self._lock:
            self._forwards += 1
            if self._forwards > 1 or self.reason:
                return
            register()
            for config, known in self._configs:
                # What somebody else has set meanwhile was not asked for an obstacle.
                if config._attn_implementation == known:
                    self._switched.append((config, known))
                    # The property would set it for sub-configurations (a vision tower's) as well.
                    config._attn_implementation_internal = PREFIX + known

    def off(self) -> None:
        """It is over: with the last one, what was there is put back, unless it was set anew."""
        with self._lock:
            self._forwards -= 1
            while self._switched and not self._forwards:
                config, known = self._switched.pop()
                if config._attn_implementation == PREFIX + known:
                    config._attn_implementation_internal = known


def own(config: Any) -> str:
    """The attention implementation that a configuration has when FlowKV does not stand in."""
    return str(config._attn_implementation).removeprefix(PREFIX)


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


def _obstacle(decoder: torch.nn.Module, names: set[str]) -> str:
    for name in sorted(names):
        if name not in FALLBACKS:
            return f"its attention implementation is {name!r}; {FALLBACKS[0]!r} reads pages"
    for module in decoder.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            return "its attention is not chosen by configuration"
    for source in {sys.modules.get(type(module).__module__) for module in decoder.modules()}:
        if _compares(source, names):
            return "its source asks for the name of its attention implementation"
    return "" if names else "it has no configuration of its attention"


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
