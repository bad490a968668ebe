"""The pages in each sequence's line of the tables: placed, shared, cut, given back."""

from __future__ import annotations

from collections.abc import Sequence as Items

from flowkv.core.errors import CapacityError, StateError
from flowkv.runtime.compaction import defragment
from flowkv.runtime.guard import Guard
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.store import Store
from flowkv.runtime.tables import CLOSED, READY, STEPPING, SUSPENDED, Tables

WINDOW_SLACK_TOKENS = 128
"""Tokens kept behind a sliding window, so that rejected drafts can be taken back."""

_STATES = {CLOSED: "closed", STEPPING: "in a step already", SUSPENDED: "suspended"}


class Lines:
    """What the lines of sequences hold.

    Args:
        store: Blocks and pools.
        tables: Lines of all sequences.
        guard: The KV lock; every public method takes it.
    """

    def __init__(self, store: Store, tables: Tables, guard: Guard) -> None:
        self.store, self.tables, self.guard = store, tables, guard
        self.geometry = store.geometry
        self.page_size = store.geometry.page_size
        self._windows = [
            group.window if group.kind == "sliding" else None for group in self.geometry.groups
        ]
        self._leaving: list[Sequence] = []

    def window(self, group: int) -> int | None:
        """Sliding window of a group."""
        return self._windows[group]

    def idle(self, seq: Sequence) -> None:
        """Makes sure that a sequence is open and in no step.

        Raises:
            StateError: It is not.
        """
        state = CLOSED if seq.closed else int(self.tables.state[seq.row])
        if state != READY:
            raise StateError(
                f"the sequence is {_STATES[state]}",
                "Open or resume it first, and end a step before the next one begins",
            )

    # ---- pages

    def allocate(self, counts: Items[int]) -> list[list[int]]:
        """Private pages, `counts[g]` of each group, or none at all.

        Raises:
            CapacityError: They do not fit.
        """
        with self.guard:
            try:
                return self._allocate(counts)
            except CapacityError:
                if not self.defragment():
                    raise
                return self._allocate(counts)

    def _allocate(self, counts: Items[int]) -> list[list[int]]:
        taken: list[list[int]] = []
        try:
            for g, count in enumerate(counts):
                taken.append(self.store.allocate(g, count))
        except CapacityError:
            for g, pages in enumerate(taken):
                for page in pages:
                    self.store.pool(g).release(page)
            raise
        return taken

    def occupy(self, seq: Sequence, pages: Items[Items[int]]) -> None:
        """Appends private pages to a sequence, -1 for those that lie behind its window.

        Args:
            seq: The sequence.
            pages: For each group.
        """
        with self.guard:
            for g, fresh in enumerate(pages):
                first = len(seq.blocks[g])
                self.tables.reserve(first + len(fresh))
                for page_no, page in enumerate(fresh, first):
                    self._place(seq, g, page_no, page)

    def _place(self, seq: Sequence, group: int, page_no: int, page: int) -> None:
        blocks = seq.blocks[group]
        if page_no == len(blocks):
            blocks.append(None)
        else:
            blocks[page_no] = None
        self.tables.pages[group][seq.row, page_no] = page
        self.tables.touch()

    def _let_go(self, seq: Sequence, group: int, page_no: int) -> None:
        table = self.tables.pages[group]
        page, block = int(table[seq.row, page_no]), seq.blocks[group][page_no]
        table[seq.row, page_no] = -1
        self.tables.touch()
        seq.blocks[group][page_no] = None
        if block is not None:
            self.store.drop(block)
        elif page >= 0:
            self.store.pool(group).release(page)

    def _own_tail(self, seq: Sequence, length: int) -> None:
        """Copies the page that the next token goes to where it belongs to others too."""
        page_no = length // self.page_size
        if length % self.page_size:
            shared = [self._shared(seq, g, page_no) for g in range(len(seq.blocks))]
            for g, own in enumerate(self.allocate(shared)):
                for page in own:
                    old = int(self.tables.pages[g][seq.row, page_no])
                    self.store.pool(g).copy([old], [page], self.store.layouts[g].granules)
                    self._let_go(seq, g, page_no)
                    self._place(seq, g, page_no, page)
        self.tables.shared[seq.row] = False

    def _shared(self, seq: Sequence, group: int, page_no: int) -> bool:
        page = int(self.tables.pages[group][seq.row, page_no])
        return seq.blocks[group][page_no] is not None or self.store.pool(group).references(page) > 1

    def _drop_behind(self, seq: Sequence, length: int) -> None:
        for g, window in enumerate(self._windows):
            if window is not None:
                keep = max(0, length - window - WINDOW_SLACK_TOKENS) // self.page_size
                for page_no in range(seq.first_page[g], keep):
                    self._let_go(seq, g, page_no)
                seq.first_page[g] = max(seq.first_page[g], keep)

    # ---- cutting, forking, releasing

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drops tokens from position `length` on, also those that are not computed yet.

        Raises:
            StateError: The sequence is shorter, or the cut reaches behind a sliding window.
        """
        with self.guard:
            now = seq.length
            if not 0 <= length <= now:
                raise StateError(
                    f"a sequence of {now} tokens cannot be cut to {length}",
                    f"Choose a length from 0 to {now}",
                )
            if length < now:  # else no page changes, and a step may be under way
                self.idle(seq)
                self._shorten(seq, now, length)
            seq.forget_tokens(length)

    def _shorten(self, seq: Sequence, now: int, length: int) -> None:
        size = self.page_size
        for window, first in zip(self._windows, seq.first_page, strict=True):
            if length and window and max(0, length - window + 1) // size < first:
                raise StateError(
                    f"cutting {now - length} tokens reaches behind the sliding window",
                    f"Cut at most {WINDOW_SLACK_TOKENS} tokens, or open the prompt anew",
                )
        self._cut(seq, -(-length // size))
        self.tables.lengths[seq.row] = length
        self.tables.shared[seq.row] = length % size != 0
        seq.published = [min(done, length // size) for done in seq.published]
        if not length:
            seq.first_page = [0] * len(seq.first_page)

    def _cut(self, seq: Sequence, pages: int) -> None:
        for g, blocks in enumerate(seq.blocks):
            for page_no in range(pages, len(blocks)):
                self._let_go(seq, g, page_no)
            del blocks[pages:]

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Lets `child`, freshly opened, share every page of `seq`.

        Raises:
            StateError: `seq` is closed, suspended or in a step.
        """
        with self.guard:
            self.idle(seq)
            seq.copy_onto(child)
            tables = self.tables
            for g, blocks in enumerate(seq.blocks):
                child.blocks[g] = list(blocks)
                line = tables.pages[g][seq.row, : len(blocks)]
                for block, page in zip(blocks, line.tolist(), strict=True):
                    if block is not None:
                        self.store.hold(block)
                    elif page >= 0:
                        self.store.pool(g).share(page)
                tables.pages[g][child.row, : len(blocks)] = line
            tables.touch()
            tables.lengths[child.row] = tables.lengths[seq.row]
            tables.shared[[seq.row, child.row]] = True

    def vacate(self, seq: Sequence) -> None:
        """Gives back all pages of a sequence, but not its line, length or tokens."""
        with self.guard:
            self._cut(seq, 0)
            seq.first_page = [0] * len(seq.first_page)
            seq.published = [0] * len(seq.published)

    def release(self, seq: Sequence) -> None:
        """Gives back all pages and the line of a sequence, once no step uses them."""
        with self.guard:
            if self.tables.state[seq.row] == STEPPING:
                self._leaving.append(seq)
                return
            self._cut(seq, 0)
            self.tables.close_row(seq.row)
            seq.row = self.tables.nowhere

    def defragment(self) -> int:
        """Empties sparse slabs by moving pages; returns the moves. Nothing while a step runs."""
        with self.guard:
            return defragment(self.store, self.tables)
