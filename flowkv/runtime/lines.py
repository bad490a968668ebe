"""The pages in each sequence's line of the tables: placed, shared, cut, given back."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from flowkv import kernels
from flowkv.core.errors import CapacityError, NonFiniteError, StateError
from flowkv.core.layout import CODEC_SHIFT
from flowkv.runtime.compaction import Compactor
from flowkv.runtime.guard import Guard
from flowkv.runtime.sealer import Sealer
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

    Attributes:
        sealer: Encodes full pages; None if all stay raw.
        compactor: Moves pages out of sparse slabs.
        aside_bytes: Most host memory that suspended sequences take, or may come to take.
        copied_bytes: Bytes that suspending and resuming have copied so far.
    """

    def __init__(self, store: Store, tables: Tables, guard: Guard) -> None:
        self.store, self.tables, self.guard = store, tables, guard
        self.geometry = store.geometry
        self.page_size = store.geometry.page_size
        self._windows = [
            group.window if group.kind == "sliding" else None for group in self.geometry.groups
        ]
        self._slides = any(window is not None for window in self._windows)
        self._leaving: list[Sequence] = []
        self.aside_bytes = self.copied_bytes = 0
        encodes = any(forms.ladder.rungs for forms in store.forms)
        self.sealer = Sealer(store, tables) if encodes else None
        self.compactor = Compactor(store, tables, store.defragment_bytes)

    def window(self, group: int) -> int | None:
        """Sliding window of a group."""
        return self._windows[group]

    def idle(self, seq: Sequence) -> None:
        """Makes sure that a sequence is open, in no step, and has all its pages.

        Raises:
            StateError: It is not.
        """
        self.ready(seq)
        if seq.restoration is not None and seq.restoration.settled:
            raise StateError(
                "part of the sequence is still on its way",
                "Call its restoration's complete() and finish() first, or KV.restore",
            )

    def ready(self, seq: Sequence) -> None:
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

    def allocate_raw(self, counts: Items[int]) -> list[list[int]]:
        """Private raw pages, `counts[g]` of each group, or none at all.

        Raises:
            CapacityError: They do not fit.
        """
        return list(self.allocate({(g, 0): n for g, n in enumerate(counts)}).values())

    def allocate(self, counts: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], list[int]]:
        """Private pages, so many of each (group, codec index), or none at all.

        Raises:
            CapacityError: They do not fit.
        """
        with self.guard:
            self.store.require(counts)
            self.compactor.make_room(counts)
            try:
                return self._allocate(counts)
            except CapacityError:
                if not self.defragment():
                    raise
                return self._allocate(counts)

    def _allocate(self, counts: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], list[int]]:
        taken: dict[tuple[int, int], list[int]] = {}
        try:
            for (g, codec), count in counts.items():
                taken[g, codec] = self.store.allocate(g, count, codec)
        except CapacityError:
            for (g, _), pages in taken.items():
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

    def put(self, seq: Sequence, group: int, page_no: int, page: int) -> None:
        """Puts a page into a sequence's line, right behind the others; -1 leaves a hole."""
        with self.guard:
            self.tables.reserve(page_no + 1)
            self._place(seq, group, page_no, page)

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

    def thaw_tail(self, seq: Sequence) -> None:
        """Makes sure that the page which the next token goes to is raw.

        Raises:
            CapacityError: It does not fit.
        """
        with self.guard:
            if self.sealer and self.tables.shared[seq.row]:
                self._own_tail(seq, seq.length)

    def _own_tail(self, seq: Sequence, length: int) -> None:
        """Copies the page that the next token goes to where it belongs to others, or is sealed."""
        page_no = length // self.page_size
        if length % self.page_size:
            fixed = [self._fixed(seq, g, page_no) for g in range(len(seq.blocks))]
            own = [(g, page) for g, pages in enumerate(self.allocate_raw(fixed)) for page in pages]
            try:
                for g, page in own:
                    self.thaw(g, int(self.tables.pages[g][seq.row, page_no]), page)
            except NonFiniteError:
                for g, page in own:
                    self.store.pool(g).release(page)
                raise
            for g, page in own:
                self._let_go(seq, g, page_no)
                self._place(seq, g, page_no, page)
        self.tables.shared[seq.row] = False

    def _fixed(self, seq: Sequence, group: int, page_no: int) -> bool:
        page, pool = int(self.tables.pages[group][seq.row, page_no]), self.store.pool(group)
        sealed = page >> CODEC_SHIFT > 0
        return sealed or seq.blocks[group][page_no] is not None or pool.references(page) > 1

    def thaw(self, group: int, old: int, page: int) -> None:
        """Writes what a page holds into a raw one.

        Raises:
            NonFiniteError: It cannot be decoded into the group's dtype.
        """
        pool, forms = self.store.pool(group), self.store.forms[group]
        if not old >> CODEC_SHIFT:
            pool.copy([old], [page], forms.raw.granules)
            return
        source, target = pool.granules([old]), pool.granules([page])
        if kernels.transcode(pool.arena, source, target, forms.of(old), forms.raw).any():
            raise NonFiniteError(
                f"a page cannot be decoded from {forms.of(old).codec} into {forms.raw.dtype}",
                "Open the prompt anew with reuse=False",
            )

    def stepping(self, seq: Sequence) -> bool:
        """Whether a step is under way with a sequence."""
        return int(self.tables.state[seq.row]) == STEPPING

    def _drop_behind(self, seq: Sequence, length: int) -> None:
        for g, window in enumerate(self._windows):
            if window is not None:
                keep = max(0, length - window - WINDOW_SLACK_TOKENS) // self.page_size
                self.drop_before(seq, g, keep)

    def drop_before(self, seq: Sequence, group: int, page_no: int) -> None:
        """Lets go of a group's pages before a number: they lie behind its window."""
        with self.guard:
            for number in range(seq.first_page[group], page_no):
                self._let_go(seq, group, number)
            seq.first_page[group] = max(seq.first_page[group], page_no)

    # ---- cutting, forking, releasing

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drops tokens from position `length` on, also those that are not computed yet.

        Raises:
            StateError: The sequence is shorter, sparsified, or the cut reaches behind a sliding
                window.
        """
        with self.guard:
            now = seq.length
            if seq.dropped:
                raise StateError(
                    "a sequence that lost tokens in between cannot be cut",
                    "Fork it before, and go on with the fork",
                )
            if not 0 <= length <= now:
                raise StateError(
                    f"a sequence of {now} tokens cannot be cut to {length}",
                    f"Choose a length from 0 to {now}",
                )
            if length < now:  # else no page changes, and a step may be under way
                self.idle(seq)
                self._shorten(seq, now, length)
            if seq.restoration is not None and not seq.restoration.settled:
                seq.restoration.cancel()  # what it brings lies behind the cut
            seq.forget_tokens(length)

    def shorten(self, seq: Sequence, pages: int) -> None:
        """Gives back the pages from number `pages` on; their tokens are to be computed again.

        Raises:
            StateError: The sequence is closed, suspended or in a step, or lost that behind a
                sliding window.
        """
        with self.guard:
            self.idle(seq)
            if pages * self.page_size < seq.length:
                self._shorten(seq, seq.length, pages * self.page_size)

    def _shorten(self, seq: Sequence, now: int, length: int) -> None:
        size = self.page_size
        for window, first in zip(self._windows, seq.first_page, strict=True):
            if length and window and max(0, length - window + 1) // size < first:
                raise StateError(
                    f"cutting {now - length} tokens reaches behind the sliding window",
                    f"Cut at most {WINDOW_SLACK_TOKENS} tokens, or open the prompt anew",
                )
        self._cut(seq, -(-length // size))
        self._unsealed(seq, length // size)
        self.tables.lengths[seq.row] = length
        self.tables.shared[seq.row] = length % size != 0
        seq.published = [min(done, length // size) for done in seq.published]
        if not length:
            seq.first_page = [0] * len(seq.first_page)

    def _unsealed(self, seq: Sequence, pages: int) -> None:
        if self.sealer:
            self.sealer.rewind(seq.row, pages)

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
            if self.sealer:
                self.sealer.copy(seq.row, child.row)

    def vacate(self, seq: Sequence) -> None:
        """Gives back all pages of a sequence, but not its line, length or tokens."""
        with self.guard:
            self._cut(seq, 0)
            self._unsealed(seq, 0)
            seq.first_page = [0] * len(seq.first_page)
            seq.published = [0] * len(seq.published)

    def release(self, seq: Sequence) -> None:
        """Gives back all pages and the line of a sequence, once no step uses them."""
        with self.guard:
            if self.tables.state[seq.row] == STEPPING:
                self._leaving.append(seq)
                return
            try:
                if self.sealer:
                    self.sealer.retire(seq)
            finally:
                self._cut(seq, 0)
                self._unsealed(seq, 0)
                self.tables.close_row(seq.row)
                seq.row = self.tables.nowhere

    def defragment(self) -> int:
        """Empties sparse slabs by moving pages; returns the moves. Nothing while a step runs."""
        with self.guard:
            return self.compactor.everything()
