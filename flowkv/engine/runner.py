"""Runners: open rows of requests, step them through a model together, and close them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.block_table import Planner
from flowkv.cache.kv import KV, PagedRow, Tokens, open_row, plan
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import Step
from flowkv.core.errors import GeometryError
from flowkv.engine.request import Request
from flowkv.kernels.operands import sent


class Runner(Protocol):
    """Interface of an object that runs a model over rows.

    Attributes:
        together: Rows of any lengths go through the model in one forward. Otherwise the engine
            steps each row by itself.
    """

    together: bool

    def open(self, request: Request, tokens: NDArray[np.uint32], *, wait: bool) -> OpenRow:
        """Open a row with its known prefix in place or, with `wait=False`, on its way.

        Args:
            request: The request that the row serves.
            tokens: Its prompt, and the tokens made before its row was last dropped.
            wait: See `KV.open`.

        Raises:
            CapacityError: Too many sequences are open.
        """

    def step(self, rows: Items[OpenRow], tokens: Items[Tokens]) -> torch.Tensor:
        """Run the model over the next tokens of some rows.

        If the step raises, no row has moved.

        Args:
            rows: Rows outside any step; a single one unless `together`.
            tokens: The next ids of each, one at least.

        Returns:
            `[B, V]`: logits behind the last token of each row.

        Raises:
            CapacityError: The pages do not fit.
        """


class OpenRow(Protocol):
    """Interface of a request's row in the model's cache.

    Attributes:
        seq: Its sequence.
    """

    seq: Sequence

    def suspend(self) -> int:
        """Move the row's pages off the device and return the bytes copied, see `KV.suspend`."""

    def resume(self) -> None:
        """Put the row's pages back on the device, see `KV.resume`."""

    def close(self, stop: str = "") -> None:
        """Release the row's pages; published pages stay known."""


Forward = Callable[[Step, torch.Tensor], torch.Tensor]
"""Runs a model in a step: (step, int64 `[B]` places in its tokens) -> logits `[B, V]` there."""


class PackedRunner:
    """Runner that packs rows of any lengths one after the other: no padding, no mask.

    Args:
        kv: The cache.
        forward: Runs the model, with ids from the step alone.
        blend: Puts known documents in place in a sequence, within the first n tokens of its prompt.
    """

    together = True

    def __init__(
        self, kv: KV, forward: Forward, blend: Callable[[Sequence, int], object] | None = None
    ) -> None:
        self._kv, self._forward, self._blend = kv, forward, blend
        self._last: Step | None = None
        self._ends = torch.arange(0)  # for steps with one token a row

    def open(self, request: Request, tokens: NDArray[np.uint32], *, wait: bool) -> PagedRow:
        """Open a row with its known prefix in place or, with `wait=False`, on its way."""
        self._last = None  # the model, and with it the pools, may have changed
        row = open_row(self._kv, request, tokens, wait=wait or self._blend is not None)
        if self._blend is not None:
            try:
                self._blend(row.seq, len(tokens) - 1)
            except BaseException:
                row.close()
                raise
        return row

    def step(self, rows: Items[OpenRow], tokens: Items[Tokens] | torch.Tensor) -> torch.Tensor:
        """Run the model over the next tokens of some rows.

        Args:
            rows: Rows in no step.
            tokens: The next ids of each row; or int64 `[B]` on the device, one id a row, not read
                yet: `PackedRunner.append_ids` must receive them later, for rows that go on.
        """
        unread, before = isinstance(tokens, torch.Tensor), self._last
        counts = [1] * len(rows) if unread else list(map(len, tokens))
        self._last = step = plan(self._kv, [row.seq for row in rows], counts, before)
        if set(counts) == {1}:  # all rows decode
            if isinstance(tokens, torch.Tensor):
                step.give_later(tokens)
            else:
                step.give(np.array([ids[0] for ids in tokens], np.uint32))
            if len(self._ends) != len(rows):
                self._ends = torch.arange(len(rows))
            last = self._ends
        else:
            step.give(np.concatenate([np.asarray(ids, np.uint32) for ids in tokens]))
            last = torch.from_numpy(step.counts.cumsum() - 1)
        with step, torch.no_grad():
            return self._forward(step, last)

    def append_ids(self, rows: Items[OpenRow], places: Items[int], tokens: Items[int]) -> None:
        """Record tokens of rows stepped before they were read, see `Planner.append_ids`."""
        seqs = [row.seq for row in rows]
        if seqs:
            Planner.of(seqs[0]).append_ids(seqs, places, tokens)


def own_model(model: Callable[[torch.Tensor | None, torch.Tensor], Any]) -> Forward:
    """Return the forward of your own `model(tokens [1, N], positions [1, N]) -> [1, N, V]`.

    The model's attention calls `flowkv.attention`, or the model runs inside `flowkv.intercept()`.
    """

    def forward(step: Step, last: torch.Tensor) -> torch.Tensor:
        logits = model(step.tokens, step.positions)
        count = 0 if step.tokens is None else step.tokens.shape[1]
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != (1, count):
            raise GeometryError(
                f"the model returned {tuple(getattr(logits, 'shape', ()))} for {count} tokens",
                "Return logits [1, tokens, vocabulary], or pass a Runner of your own",
            )
        return logits[0] if len(last) == count else logits[0, sent(last, logits.device)]

    return forward
