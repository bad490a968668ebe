"""Who a model is, for the names of its pages, and whether it is still the same.

Pages are valid for exactly the weights and the computation that made them (DESIGN D13). The name is
made of both (`weights`, `computation`), so it is the same in another process, on another device,
and again when a change was undone. Whether anything changed is asked when a cache is made and
before pages become known, by comparing what was met with what is there.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

import torch

from flowkv.core.keys import Namespace
from flowkv.hooks.huggingface.computation import Walk
from flowkv.hooks.huggingface.versions import chosen_functions, library_release
from flowkv.hooks.huggingface.weights import Weights

SMALL_BYTES = 8 << 20
"""Weights up to this size are read whole for every cache and before pages become known."""
CALLS = 32
"""Within so many calls a write to weights that PyTorch does not count is found."""
_SHARE = 0.01
"""Of the time of a call, what reading weights may take, beyond the part that `CALLS` asks for."""
_SLICE_BYTES = 16 << 20
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class Identity:
    """The identity of one model at one moment.

    Args:
        model: The model.
        name: Name given by the user, which replaces the model's own and its weights', as long as
            those are what they were; "" for the model's own, with a digest of its weights.

    Attributes:
        namespace: Its name, for the keys of pages.
        switch: Length from which positions are encoded otherwise, if there is one.
        unnamed: What cannot be named, and why; then nothing outlives the process.
        unshared: Why nothing may be shared; "" if it may.
        foreign: What takes part that is neither torch's nor transformers'.
    """

    def __init__(self, model: Any, name: str = "") -> None:
        self.switch = _switch(model.config)
        # Encodings that depend on length rewrite these in every forward.
        self._passing = "inv_freq" if self.switch is not None else ""
        self._name, self._first_weights = name, ""
        self._written: dict[str, tuple[tuple[str, str], ...]] = {}
        self._numbers: dict[Any, tuple[Any, Any]] = {}
        self._weights, self._walk = Weights(), Walk(model, {}, "", {})
        self.unshared = ""
        self.namespace = Namespace(model=name)
        self.read(model)
        weakref.finalize(model, self._forget).atexit = False

    def read(self, model: Any, *, anew: bool = False) -> bool:
        """Takes the model as it is now; whether that gave it another name.

        Args:
            model: The model.
            anew: Weights were written to without a count: all of them are read.
        """
        if anew:
            self._weights.forget()
        self._walk = walk = Walk(model, self._written, self._passing, self._numbers)
        weights = self._weights.read(walk.tensors)
        self._first_weights = self._first_weights or weights
        self._places = _places(model)
        config: Any = model.config
        own_name = str(getattr(config, "_name_or_path", "")) or type(model).__name__
        trusted = bool(self._name) and weights == self._first_weights
        name = Namespace(
            model=self._name or own_name,
            revision="" if self._name else str(getattr(config, "_commit_hash", None) or ""),
            weights="" if trusted else weights,
            computation=f"{library_release()} {walk.digest}",
        )
        self.weights_changed = weights != getattr(self, "_last_weights", weights)
        self._last_weights = weights
        changed, self.namespace = name != self.namespace, name
        return changed

    def learn(self, model: Any, *, named: bool = True) -> bool:
        """Notes, right after a forward, what that forward wrote itself, and will write again.

        Counters, masks and activations that are kept, tables that grow: they say nothing about what
        the next forward computes that its inputs do not say. Parameters do.

        Args:
            model: The model.
            named: What it wrote stays in the name as it was before; otherwise it is in no name.

        Returns:
            Whether the name is another one.
        """
        if self.same(model):
            return False
        before, after = self._walk, Walk(model, self._written, self._passing, self._numbers)
        leaves = before.leaves.keys() | after.leaves.keys()
        written = {path for path in leaves if before.leaves.get(path) != after.leaves.get(path)}
        written |= {  # replaced by another with the same content, and so again
            path for path, value in after.held.items() if before.held.get(path, value) is not value
        }
        for path, tensor in after.tensors.items():
            old = before.tensors.get(path)
            if old is not tensor or not self._weights.counted(tensor):
                if isinstance(tensor, torch.nn.Parameter):
                    self.unshared = f"its forward writes to its parameter {path}"
                else:
                    written.add(path)
        for path in written:
            kept = [(q, t) for q, t in before.leaves.items() if _within(q, path)]
            self._written[path] = tuple(kept) if named else ()
        return self.read(model)

    def attends(self, model: Any) -> list[Any]:
        """The functions that attend: FlowKV's own stands in only for those that were tried."""
        own = [
            getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
            for module in model.modules()
        ]
        return [*(f for _, _, f in chosen_functions(model)), *dict.fromkeys(own)]

    @property
    def n_bytes(self) -> int:
        """Bytes of its weights."""
        return self._weights.n_bytes

    @property
    def unnamed(self) -> list[str]:
        """See the class."""
        return self._walk.unnamed

    @property
    def foreign(self) -> list[str]:
        """See the class."""
        return self._walk.foreign

    @property
    def draws(self) -> bool:
        """Whether a forward may draw random numbers: something trains, or is not transformers'."""
        return self._walk.training or bool(self._walk.foreign)

    @property
    def random(self) -> bool:
        """Whether code draws random numbers where torch's own generator does not show it."""
        return self._walk.random

    @property
    def compiled(self) -> bool:
        """Whether parts of the model are compiled."""
        return self._walk.compiled

    def same(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced, moved, set, patched, hooked or written to in the open."""
        return self._walk.same() and self._weights.counted()

    def same_content(self) -> bool:
        """Whether small weights still hold what they held; larger ones take `roll`."""
        return self.n_bytes > SMALL_BYTES or self._weights.same()

    def roll(self, seconds: float) -> bool:
        """Reads on in the weights, so that `CALLS` calls read all; False if they changed.

        Args:
            seconds: How long the call before took.
        """
        least = -(-self.n_bytes // CALLS)
        end_s = time.monotonic() + _SHARE * seconds
        done = 0
        while True:
            passes = self._weights.passes
            part = least if not done else min(_SLICE_BYTES, least)
            if not self._weights.roll(part):
                return False
            done += part
            if self._weights.passes > passes or time.monotonic() >= end_s:
                return True

    @property
    def weights(self) -> Weights:
        """Its weights as they were read."""
        return self._weights

    def moved(self, model: torch.nn.Module) -> bool:
        """Whether a dtype or device is new."""
        return _places(model) != self._places

    def _forget(self) -> None:
        self._weights.forget()
        self._walk.forget()
        self._numbers.clear()


def _places(model: torch.nn.Module) -> set[tuple[torch.dtype, torch.device]]:
    return {(t.dtype, t.device) for t in (*model.parameters(), *model.buffers())}


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith((f"{above}.", f"{above}[", f"{above}/"))


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
