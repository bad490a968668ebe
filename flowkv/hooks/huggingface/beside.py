"""Runs rows beside each other in left-padded rectangles, for models whose rows cannot be packed.

The padding is virtual: pages hold no column of it, the model is shown a mask and, where it takes
them, each row's own positions. Rows that are given equally many tokens share a rectangle, so that
all that decode run together, and chunks of prompts run beside none or their equals.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.hooks.huggingface.cache import PagedCache
from flowkv.hooks.huggingface.door import Door
from flowkv.hooks.huggingface.inputs import rectangle_inputs
from flowkv.hooks.huggingface.packing import exact
from flowkv.hooks.huggingface.rows import Rows
from flowkv.runtime.cache import KV
from flowkv.runtime.row import Asked, PagedRow, open_row
from flowkv.runtime.sequence import Sequence


class Rectangle(PagedCache):
    """The cache of some rows for one forward, which is over when those beside it are, too."""

    def finish(self) -> None:
        """Waits for the others: a step of the engine happens for all of its rows or for none."""


class Beside:
    """Runs rows in rectangles, see `engine.runner.Runner`.

    Args:
        model: The model, without recurrent layers.
        kv: The cache that it is attached to.
        door: Its door; held by the model's hooks.
    """

    together = True

    def __init__(self, model: Any, kv: KV, door: Door) -> None:
        self._model, self._kv, self._door = model, kv, door

    def open(self, request: Asked, tokens: NDArray[np.uint32], *, wait: bool) -> PagedRow:
        """See `engine.runner.Runner.open`."""
        self._door.refresh()
        return open_row(self._kv, request, tokens, wait=wait)

    def step(self, rows: Items[Any], tokens: Items[Any]) -> torch.Tensor:
        """See `engine.runner.Runner.step`."""
        given = [np.asarray(fresh, np.uint32) for fresh in tokens]
        return self.run([row.seq for row in rows], given)

    def run(self, seqs: Items[Sequence], tokens: Items[NDArray[np.uint32]]) -> torch.Tensor:
        """Runs the model over the next tokens of some sequences.

        Args:
            seqs: Sequences in no step.
            tokens: The next ids of each, one at least.

        Returns:
            `[B, V]`: logits behind the last of them.
        """
        groups: dict[int, list[int]] = {}
        for row, fresh in enumerate(tokens):
            groups.setdefault(len(fresh), []).append(row)
        caches: list[Rectangle] = []
        found: list[torch.Tensor | None] = [None] * len(seqs)
        try:
            for new, some in groups.items():  # what does not fit is known before anything runs
                cache = self._rectangle([seqs[row] for row in some], new)
                caches.append(cache)
                cache.rows.begin(new)
                assert cache.rows.step is not None
                cache.rows.step.give(np.concatenate([tokens[row] for row in some]))
            for cache, some in zip(caches, groups.values(), strict=True):
                fresh = np.stack([tokens[row] for row in some]).astype(np.int64)
                ids = torch.from_numpy(fresh)
                for row, logits in zip(some, self._forward(cache, ids), strict=True):
                    found[row] = logits
            for cache in caches:
                assert cache.rows.step is not None
                cache.rows.step.check()  # of none, if one of them left something out
            for cache in caches:
                cache.rows.finish()
        finally:
            for cache in caches:
                cache.rows.abandon()  # nothing, unless something failed
        return torch.stack([logits for logits in found if logits is not None])

    def _rectangle(self, seqs: list[Sequence], new: int) -> Rectangle:
        door, plan = self._door, self._door.plan
        lengths = [seq.length for seq in seqs]
        base = max(lengths)
        rows = Rows(
            self._kv,
            seqs,
            [base - length for length in lengths],
            base,
            layers=len(plan.placed),
            trusted=door.trusted,
        )
        rows.switch, rows.by_column = door.identity.switch, False
        if self._model.training:
            rows.go_blind()
        cache = Rectangle(rows, plan, door)
        cache.close.detach()  # the sequences are somebody else's
        return cache

    def _forward(self, cache: Rectangle, ids: torch.Tensor) -> torch.Tensor:
        rows, device = cache.rows, self._model.get_input_embeddings().weight.device
        given = rectangle_inputs(self._door.names, ids, rows.base, rows.pads, device)
        with self._door.aside(), torch.no_grad(), exact(device):
            logits: torch.Tensor = self._model(past_key_values=cache, **given).logits[:, -1]
        return logits
