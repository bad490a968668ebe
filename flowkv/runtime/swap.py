"""Takes an open sequence off its device, and puts it back bit for bit."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from flowkv.core.errors import StateError
from flowkv.core.layout import CODEC_SHIFT
from flowkv.runtime.index import Block
from flowkv.runtime.keepsake import Keepsake, download, upload
from flowkv.runtime.lines import Lines
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.tables import READY, SUSPENDED


class Copy(NamedTuple):
    """A page that nobody else knew.

    Attributes:
        codec: Index of its codec.
        content: Its bytes.
    """

    codec: int
    content: torch.Tensor


Saved = list[list[Copy | Keepsake | None]]
"""Per group what brings each page back, None for those behind the window."""


def weigh(lines: Lines, seq: Sequence) -> int:
    """Most bytes of host memory that suspending a sequence may come to take."""
    total = 0
    for g, blocks in enumerate(seq.blocks):
        line = lines.tables.pages[g][seq.row, : len(blocks)].tolist()
        for page, block in zip(line, blocks, strict=True):
            if page >= 0 and (block is None or block.gone or block.keepsake is None):
                total += lines.store.forms[g].of(page).page_bytes
    return total


def suspend(lines: Lines, seq: Sequence) -> int:
    """Gives a sequence's pages back to the pools; what others do not know of them is copied.

    Known pages stay where they are until they are needed for others, and are copied then.
    Callers hold the KV lock.

    Returns:
        Most bytes of host memory that this may come to take.

    Raises:
        StateError: The sequence is closed, suspended or in a step.
    """
    lines.idle(seq)
    n_bytes, saved = weigh(lines, seq), list[list[Copy | Keepsake | None]]()
    placed = [
        lines.tables.pages[g][seq.row, : len(blocks)].tolist()
        for g, blocks in enumerate(seq.blocks)
    ]
    # Copies of all groups first: one may fail, and nothing is to be undone then.
    copied = [_copies(lines, g, line, seq.blocks[g]) for g, line in enumerate(placed)]
    for line, blocks, copies in zip(placed, seq.blocks, copied, strict=True):
        found = list[Copy | Keepsake | None]()
        for page, block in zip(line, blocks, strict=True):
            if page in copies:
                found.append(copies[page])
            else:
                found.append(None if block is None else Keepsake.of(block))
        saved.append(found)
    lines.vacate(seq)
    seq.suspended = saved
    lines.aside_bytes += n_bytes
    lines.tables.state[seq.row] = SUSPENDED
    return n_bytes


def _copies(
    lines: Lines, group: int, line: list[int], blocks: list[Block | None]
) -> dict[int, Copy]:
    """Copies of those pages that have no block, or one that is erased."""
    by_codec: dict[int, list[int]] = {}
    for page, block in zip(line, blocks, strict=True):
        if page >= 0 and (block is None or block.gone):
            by_codec.setdefault(page >> CODEC_SHIFT, []).append(page)
    copies = {
        page: Copy(codec, content)
        for codec, pages in by_codec.items()
        for page, content in zip(pages, download(lines.store, group, pages), strict=True)
    }
    lines.copied_bytes += sum(copy.content.numel() for copy in copies.values())
    return copies


def resume(lines: Lines, seq: Sequence) -> None:
    """Puts a suspended sequence's pages back: those that are still there, the others as its own.

    Callers hold the KV lock.

    If it raises, the sequence stays suspended, and holds no page.

    Raises:
        CapacityError: The pages do not fit now.
        StateError: The sequence is not suspended.
    """
    saved = seq.suspended
    if seq.closed or saved is None:
        raise StateError("the sequence is not suspended", "Resume what was suspended")
    known = [[_there(page) for page in pages] for pages in saved]
    held = [block for blocks in known for block in blocks if block is not None]
    for block in held:  # before room is made, which might take them
        lines.store.hold(block)
    fresh: dict[tuple[int, int], list[int]] = {}
    try:
        fresh = lines.allocate(_wanted(saved))
        placed = [_place(lines, g, pages, fresh) for g, pages in enumerate(saved)]
    except BaseException:  # the device may have no memory for a transfer, for instance
        _give_back(lines, held, fresh)
        raise
    for g, pages in enumerate(saved):
        seq.first_page[g] = next((n for n, page in enumerate(pages) if page), len(pages))
    lines.occupy(seq, placed)
    for g, blocks in enumerate(known):
        seq.blocks[g][:] = blocks
    discard(lines, seq)
    lines.tables.state[seq.row] = READY


def _give_back(lines: Lines, held: list[Block], fresh: dict[tuple[int, int], list[int]]) -> None:
    for block in held:
        lines.store.drop(block)
    for (g, _), pages in fresh.items():
        for page in pages:
            lines.store.pool(g).release(page)


def _there(page: Copy | Keepsake | None) -> Block | None:
    """The block of a page that is where it was."""
    return page.block if isinstance(page, Keepsake) and page.content is None else None


def _wanted(saved: Saved) -> Counter[tuple[int, int]]:
    return Counter(
        (g, page.codec)
        for g, pages in enumerate(saved)
        for page in pages
        if page is not None and _there(page) is None
    )


def _place(
    lines: Lines,
    group: int,
    pages: list[Copy | Keepsake | None],
    fresh: dict[tuple[int, int], list[int]],
) -> list[int]:
    """The line of a group, its contents in place."""
    line: list[int] = []
    free = {codec: iter(taken) for (g, codec), taken in fresh.items() if g == group}
    work: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
    for page in pages:
        block = _there(page)
        if page is None or block is not None:
            line.append(-1 if block is None else block.page)
            continue
        line.append(next(free[page.codec]))
        assert page.content is not None  # else its block were there
        targets, contents = work.setdefault(page.codec, ([], []))
        targets.append(line[-1])
        contents.append(page.content)
    for targets, contents in work.values():
        upload(lines.store, group, targets, contents)
        lines.copied_bytes += sum(content.numel() for content in contents)
    return line


def discard(lines: Lines, seq: Sequence) -> None:
    """Lets go of what a suspended sequence needed. Callers hold the KV lock."""
    for g, pages in enumerate(seq.suspended or ()):
        layouts = lines.store.forms[g].layouts
        for page in pages:
            if page is not None and (isinstance(page, Copy) or page.let_go()):
                lines.aside_bytes -= layouts[page.codec].page_bytes
    seq.suspended = None
