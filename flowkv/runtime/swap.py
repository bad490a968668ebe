"""Takes an open sequence off its device, and puts it back bit for bit."""

from __future__ import annotations

import torch

from flowkv.core.errors import StateError
from flowkv.runtime.lines import Lines
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.tables import READY, SUSPENDED

Saved = list[list[torch.Tensor | None]]
"""Per group the bytes of each page, None for those behind the window."""


def suspend(lines: Lines, seq: Sequence) -> int:
    """Copies a sequence's pages to host memory and gives them back to the pools.

    Callers hold the KV lock.

    Returns:
        Bytes of host memory taken.

    Raises:
        StateError: The sequence is closed, suspended or in a step.
    """
    lines.idle(seq)
    saved: Saved = []
    for g, blocks in enumerate(seq.blocks):
        pool, n_bytes = lines.store.pool(g), lines.store.layouts[g].page_bytes
        line = lines.tables.pages[g][seq.row, : len(blocks)].tolist()
        saved.append(
            [None if p < 0 else pool.page_bytes(p, n_bytes).to("cpu", copy=True) for p in line]
        )
    lines.vacate(seq)
    seq.suspended = saved
    lines.tables.state[seq.row] = SUSPENDED
    return sum(page.numel() for pages in saved for page in pages if page is not None)


def resume(lines: Lines, seq: Sequence) -> None:
    """Puts a suspended sequence's pages back, as private pages.

    Callers hold the KV lock.

    Raises:
        CapacityError: The pages do not fit now; the sequence stays suspended.
        StateError: The sequence is not suspended.
    """
    if seq.closed or seq.suspended is None:
        raise StateError("the sequence is not suspended", "Resume what was suspended")
    saved: Saved = seq.suspended
    fresh = lines.allocate([sum(page is not None for page in pages) for pages in saved])
    placed: list[list[int]] = []
    for g, (contents, pages) in enumerate(zip(saved, fresh, strict=True)):
        pool, line = lines.store.pool(g), list[int]()
        for content in contents:
            line.append(-1 if content is None else pages.pop())
            if content is not None:
                pool.page_bytes(line[-1], content.numel()).copy_(content)
        placed.append(line)
        seq.first_page[g] = sum(page < 0 for page in line)
    lines.occupy(seq, placed)
    seq.suspended = None
    lines.tables.state[seq.row] = READY
