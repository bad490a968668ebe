"""Recurrent layers' states as named tensors and numbers, one row at a time, and back.

A state has no tokens: it can be continued only where it was taken. It is taken when a cache is
released and every so many tokens, and put into fresh native layers when a prompt begins with
exactly the tokens it was taken after.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from flowkv.hooks.huggingface.layers import PagedHybridLayer
from flowkv.hooks.huggingface.plan import ModelPlan
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.sequences import close_all
from flowkv.hooks.huggingface.versions import LinearAttentionCacheLayerMixin, LinearAttentionLayer

PLAIN = (bool, int, float, str)
_MAKER = "transformers"
"""Name of the version in a state: another one may keep its layers' states otherwise."""


class Recurrent:
    """The recurrent layers of one cache; refers to its rows and layers, never to the cache.

    Args:
        plan: All layers.
        rows: The sequences.
        layers: Layers of the cache.
    """

    def __init__(self, plan: ModelPlan, rows: Rows, layers: Sequence[Any]) -> None:
        self.plan, self.rows = plan, rows
        self.layers = {
            index: layer
            for index, layer in enumerate(layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        }
        self._saved = rows.base
        self._marks: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.mark()

    def mark(self) -> None:
        """The states are what the model made of the tokens: who writes to them now edits them."""
        self._marks = [(weakref.ref(state), _version(state)) for state in self._tensors()]

    def edited(self) -> bool:
        """Whether torch has seen a state replaced or written to since."""
        now = self._tensors()
        return len(now) != len(self._marks) or any(
            known() is not state or _version(state) != version
            for state, (known, version) in zip(now, self._marks, strict=True)
        )

    def _tensors(self) -> list[torch.Tensor]:
        return [
            value
            for layer in self.layers.values()
            for name in _state_names(layer)
            for _, value in _items(name, getattr(layer, name))
            if isinstance(value, torch.Tensor)
        ]

    def due(self, every: int) -> bool:
        """Whether `every` tokens were seen since a state was saved."""
        return self.rows.base - self._saved >= every

    def save(self) -> None:
        """Keeps the state of every row after exactly its tokens, if they are known.

        Not while a row is suspended: its pages are not there to be published.
        """
        rows = self.rows
        if rows.step is not None or rows.blind or rows.kv.closed or self._saved == rows.base:
            return
        if any(seq.suspended is not None for seq in rows.seqs):
            return
        if self.edited():
            rows.go_blind()
            return
        rows.flush()
        self._saved = rows.base
        for row, (seq, pad) in enumerate(zip(rows.seqs, rows.pads.tolist(), strict=True)):
            if not rows.blind and not pad and not seq.closed and rows.trusted(rows):
                rows.kv.save_state(seq, self._take(row))

    def _take(self, row: int) -> dict[str, Any]:
        values: dict[str, Any] = {_MAKER: transformers.__version__}
        for index, layer in self.layers.items():
            for name in _state_names(layer):
                for key, value in _items(name, getattr(layer, name)):
                    if isinstance(value, torch.Tensor):
                        values[f"{index}.{key}"] = value[row : row + 1].detach().cpu()
                    elif isinstance(value, PLAIN):
                        values[f"{index}.{key}"] = value
        return values

    def restore(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Puts one state per row into the layers, which must be fresh; False if they do not fit."""
        first = states[0]
        if any(state.keys() != first.keys() for state in states):
            return False
        for name, value in first.items():
            if name == _MAKER:
                continue
            index, _, key = name.partition(".")
            layer = self.layers.get(int(index)) if index.isdigit() else None
            if layer is None:
                return False
            if isinstance(value, torch.Tensor):
                rows = [state[name] for state in states]
                if any(row.shape != value.shape or row.dtype != value.dtype for row in rows):
                    return False
                device = self.plan.devices.get(int(index), torch.device("cpu"))
                value = torch.cat(rows).to(device)
                layer.device, layer.dtype = device, value.dtype
            elif any(state[name] != value for state in states):
                return False
            _put(layer, key, value)
        self.mark()
        return True


def readable(state: Mapping[str, Any]) -> bool:
    """Whether a state was taken by this version of transformers."""
    return state.get(_MAKER) == transformers.__version__


def _state_names(layer: Any) -> list[str]:
    if isinstance(layer, PagedHybridLayer):
        return list(vars(LinearAttentionLayer()))
    return list(vars(layer))


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}.{part}", found) for part, found in value.items()]
    return [(name, value)]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _put(layer: Any, key: str, value: Any) -> None:
    name, _, part = key.partition(".")
    if part:
        getattr(layer, name)[int(part)] = value
    else:
        setattr(layer, name, value)


def release(rows: Rows, seqs: list[Any], recurrent: Recurrent | None) -> None:
    """What is left of a cache that nobody holds: its states are kept, its pages released.

    Runs as a finalizer, at any moment and in any thread, so that all work waits until the KV lock
    is free of its own thread.
    """
    if rows.kv.inherited:
        return  # the pages are the parent's

    def work() -> None:
        try:
            if not rows.kv.closed:
                rows.abandon()
                if recurrent is not None:
                    recurrent.save()
        finally:
            close_all(seqs)

    rows.kv.lock.defer(work)
