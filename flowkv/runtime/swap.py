"""Takes an open sequence off its device, and puts it back bit for bit."""

from __future__ import annotations

from collections import Counter

import torch

from flowkv.core.errors import StateError
from flowkv.core.layout import CODEC_SHIFT
from flowkv.runtime.lines import Lines
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.tables import READY, SUSPENDED

Saved = list[list[tuple[int, torch.Tensor] | None]]
"""Per group the codec and bytes of each page, None for those behind the window."""


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
        line = lines.tables.pages[g][seq.row, : len(blocks)].tolist()
        saved.append([None if page < 0 else _copy(lines, g, page) for page in line])
    lines.vacate(seq)
    seq.suspended = saved
    lines.tables.state[seq.row] = SUSPENDED
    return sum(page[1].numel() for pages in saved for page in pages if page is not None)


def _copy(lines: Lines, group: int, page: int) -> tuple[int, torch.Tensor]:
    n_bytes = lines.store.forms[group].of(page).page_bytes
    content = lines.store.pool(group).page_bytes(page, n_bytes)
    return page >> CODEC_SHIFT, content.to("cpu", copy=True)


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
    wanted = Counter((g, page[0]) for g, pages in enumerate(saved) for page in pages if page)
    fresh = lines.allocate(wanted)
    placed: list[list[int]] = []
    for g, contents in enumerate(saved):
        pool, line = lines.store.pool(g), list[int]()
        for content in contents:
            line.append(-1 if content is None else fresh[g, content[0]].pop())
            if content is not None:
                pool.page_bytes(line[-1], content[1].numel()).copy_(content[1])
        placed.append(line)
        seq.first_page[g] = sum(page < 0 for page in line)
    lines.occupy(seq, placed)
    seq.suspended = None
    lines.tables.state[seq.row] = READY
