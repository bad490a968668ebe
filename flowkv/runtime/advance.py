"""The part of a step's bookkeeping that every step pays, compiled: one pass over its rows.

A decode step changes a few integers per row. In Python that costs more than the attention of a
small model; here it costs a call, whatever the context length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from flowkv.runtime.sequence import Sequence
from flowkv.runtime.tables import READY, STEPPING, Tables

REFUSED, SHARES, GROWS, FILLS = 1, 2, 4, 8
"""A row cannot step; a row's tail may belong to others; a row needs pages; a row fills a page."""


class Advance(NamedTuple):
    """What a step does to its rows.

    Attributes:
        rows: int32 `[B]`: lines.
        before: int64 `[B]`: lengths before the step.
        after: int32 `[B]`: lengths after it.
        starts: int32 `[B + 1]`: first new token of each row when packed.
        grown: (sequence, pages before) of the rows that got pages.
        most_new: Largest number of new tokens of a row.
        most_length: Largest length after the step.
        flags: Of `SHARES`, `GROWS`, `FILLS`.
    """

    rows: NDArray[np.int32]
    before: NDArray[np.int64]
    after: NDArray[np.int32]
    starts: NDArray[np.int32]
    grown: list[tuple[Sequence, int]]
    most_new: int
    most_length: int
    flags: int


def begin(tables: Tables, rows: list[int], counts: NDArray[np.int64], page_size: int) -> Advance:
    """Marks lines as stepping and says what the step does; marks nothing if it is `REFUSED`."""
    n = len(rows)
    lines, before = np.array(rows, np.int32), np.empty(n, np.int64)
    after, starts = np.empty(n, np.int32), np.empty(n + 1, np.int32)
    state = (tables.lengths, tables.shared, tables.state)
    flags, new, length = _begin(lines, counts, state, page_size, (before, after, starts))
    return Advance(lines, before, after, starts, [], new, length, flags)


def finish(tables: Tables, step: Advance) -> None:
    """Lengths are what the step made them, and its lines are ready for the next one."""
    _finish(step.rows, step.after, tables.lengths, tables.state)


@njit(cache=True, nogil=True)
def _begin(rows, counts, state, page_size, out):  # type: ignore[no-untyped-def]
    lengths, shared, states = state
    before, after, starts = out
    flags, most_new, most_length, total = 0, 0, 0, 0
    starts[0] = 0
    for b in range(len(rows)):
        row, new = rows[b], counts[b]
        if states[row] != READY or new < 0:
            for c in range(b):
                states[rows[c]] = READY
            return REFUSED, 0, 0
        states[row] = STEPPING
        old = lengths[row]
        length = old + new
        before[b], after[b] = old, length
        total += new
        starts[b + 1] = total
        most_new, most_length = max(most_new, new), max(most_length, length)
        if new and shared[row]:
            flags |= SHARES
        if (length + page_size - 1) // page_size > (old + page_size - 1) // page_size:
            flags |= GROWS
        if length // page_size > old // page_size:
            flags |= FILLS
    return flags, most_new, most_length


@njit(cache=True, nogil=True)
def _finish(rows, after, lengths, states):  # type: ignore[no-untyped-def]
    for b in range(len(rows)):
        lengths[rows[b]] = after[b]
        states[rows[b]] = READY
