"""Block tables: plan steps, reserve their pages, commit or undo them, and compact slabs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack, suppress
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv import kernels
from flowkv.cache.overflow import Overflow, Scan
from flowkv.cache.seal import Pending, Publisher, Refusal, Sealer, Tails
from flowkv.cache.sequence import (
    CLOSED,
    READY,
    STEPPING,
    SUSPENDED,
    Guard,
    Sequence,
    Tables,
    extend_each,
)
from flowkv.cache.store import PageStore
from flowkv.compiled.machine_code import kept
from flowkv.core.errors import CapacityError, GeometryError, NonFiniteError, StateError
from flowkv.core.geometry import CODEC_SHIFT, GRANULE_BYTES
from flowkv.kernels.operands import DeviceTimer, Pages, Ragged, sent
from flowkv.observe.events import Defragmented, StepPlanned
from flowkv.policy.base import NEVER_NS
from flowkv.policy.pages import Defragmentation

# Defragmentation: pages are moved out of sparse slabs, and all references to them rewritten.
#
# `policy.pages` decides when, and how much. Pages move at the edges of steps only, while no step
# is under way: kernels read tables and pages without the lock.


class Compactor:
    """Defragmenter of a store's pools. Callers hold the KV lock.

    Callers must not hold ids of pages that are in no table and no block: pages get new ids.

    Args:
        store: Blocks and pools.
        tables: Block tables of all sequences.
        most_bytes: Most bytes to copy at the edge of a step; 0 disables it.
    """

    def __init__(self, store: PageStore, tables: Tables, most_bytes: int) -> None:
        self.store, self.tables = store, tables
        self.policies = {
            device: Defragmentation(most_bytes=most_bytes) for device in store.pools if most_bytes
        }

    def edge(self) -> int:
        """Move as many pages as the policy allows at a step's edge; return the pages moved."""
        moved = 0
        for device, policy in self.policies.items():
            pool = self.store.pools[device]
            budget = policy.budget(pool.occupancy(), len(self.store.index))
            if budget and not self._stepping():
                pages = self._move(
                    device,
                    most_granules=budget // GRANULE_BYTES,
                    least_gain=policy.config.least_gain,
                )
                policy.record(pages, pool.occupancy())
                moved += pages
        return moved

    def make_room(self, wanted: Mapping[tuple[int, int], int]) -> None:
        """Empty as many slabs as these pages lack, before pages are evicted for them.

        Args:
            wanted: Number of pages of each (group, codec index) that are about to be allocated.
        """
        for (group, codec), count in wanted.items():
            device, pool = self.store.devices[group], self.store.pool(group)
            granules = self.store.forms[group].layouts[codec].granules
            short = count - pool.available(granules)
            if short > 0 and device in self.policies and pool.occupancy().reclaimable:
                if self._stepping():
                    return
                slabs = -(-short // (pool.slab_granules // granules))
                self._move(device, most_slabs=slabs, wanted=granules)

    def everything(self) -> int:
        """Defragment all devices without a budget; return the number of pages moved."""
        if self._stepping():
            return 0
        return sum(self._move(device) for device in self.store.pools)

    def _stepping(self) -> bool:
        return bool((self.tables.state == STEPPING).any())

    def _move(self, device: str, **limits: Any) -> int:
        pool, started = self.store.pools[device], time.perf_counter()
        empty = pool.occupancy().empty
        moves = pool.plan_defragmentation(pool.lent, **limits)
        if moves:
            n_bytes = sum(pool.size_bytes(page) for page in moves)
            relocate(self.store, self.tables, device, moves)
            now = pool.occupancy()
            event = Defragmented(
                device=device,
                pages=len(moves),
                n_bytes=n_bytes,
                slabs=now.empty - empty,
                seconds=time.perf_counter() - started,
                fragmentation=now.fragmentation,
            )
            self.store.bus.emit(event)
        return len(moves)


def relocate(store: PageStore, tables: Tables, device: str, moves: Mapping[int, int]) -> None:
    """Move pages of a device and update tables, blocks and tails, see `PagePool.relocate`.

    Args:
        store: Blocks and pools.
        tables: Block tables of all sequences.
        device: Device of the pages.
        moves: New page of each old one.
    """
    if not moves:
        return
    store.pools[device].relocate(moves)
    old = np.array(sorted(moves), np.int32)
    new = np.array([moves[page] for page in old.tolist()], np.int32)
    for g, group in enumerate(store.geometry.groups):
        if group.device == device:
            table = tables.pages[g]
            at = np.searchsorted(old, table).clip(0, len(old) - 1)
            table[:] = np.where(old[at] == table, new[at], table)
    tables.mark_changed()
    for block in store.blocks_on(device):
        block.page = moves.get(block.page, block.page)
    for pages in store.tails.values():
        here = (moves if store.devices[g] == device else {} for g in range(len(pages)))
        pages[:] = [moved.get(page, page) for moved, page in zip(here, pages, strict=True)]


# Planning of steps over the rows of the block tables.

WINDOW_SLACK_TOKENS = 128
"""Tokens kept behind a sliding window, so that rejected drafts can be taken back."""

_ROW, _PLANNER = attrgetter("row"), attrgetter("planner")
_STATES = {CLOSED: "closed", STEPPING: "in a step already", SUSPENDED: "suspended"}


# The bookkeeping that every step needs, compiled: one pass over its rows.
#
# A decode step changes a few integers per row. In Python that costs more than the attention of a
# small model; compiled it costs one call, at any context length.

REFUSED, SHARES, GROWS, FILLS = 1, 2, 4, 8
"""A row cannot step; a row's tail may belong to others; a row needs pages; a row fills a page."""


class Advance(NamedTuple):
    """The advance of rows by one step.

    Attributes:
        rows: int32 `[B]`: rows of the block tables.
        before: int64 `[B]`: lengths before the step.
        after: int32 `[B]`: lengths after it.
        starts: int32 `[B + 1]`: first new token of each row when packed.
        ends: int32 `[groups, B]`: tokens in pages of each group after the step.
        grown: (sequence, pages of each group before) of the rows that got pages.
        most_new: Largest number of new tokens of a row.
        most_length: Largest of `ends`.
        flags: Of `SHARES`, `GROWS`, `FILLS`.
    """

    rows: NDArray[np.int32]
    before: NDArray[np.int64]
    after: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    grown: list[tuple[Sequence, list[int]]]
    most_new: int
    most_length: int
    flags: int


@kept(nogil=True)
def _begin(rows, counts, state, page_size, out):  # type: ignore[no-untyped-def]
    # Marks the rows as stepping and computes the advance; marks none if the step is `REFUSED`.
    lengths, lost, shared, states = state
    before, after, starts, ends = out
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
        most_new = max(most_new, new)
        if new and shared[row]:
            flags |= SHARES
        for g in range(len(lost)):
            end = length - lost[g, row]
            ends[g, b], most_length = end, max(most_length, end)
            if (end + page_size - 1) // page_size > (end - new + page_size - 1) // page_size:
                flags |= GROWS
            if end // page_size > (end - new) // page_size:
                flags |= FILLS
    return flags, most_new, most_length


@kept(nogil=True)
def _finish(rows, after, lengths, states):  # type: ignore[no-untyped-def]
    # Writes the lengths after the step, and marks its rows as ready for the next one.
    for b in range(len(rows)):
        lengths[rows[b]] = after[b]
        states[rows[b]] = READY


Fronts = Items[Callable[[float], None]]
"""Calls that record the seconds of a token in a step; 0 if unknown."""


class EdgePrefetcher(Protocol):
    """Prefetcher of the pages that are expected next, called at the edges of steps."""

    due_ns: int

    def edge(self) -> None:
        """Start prefetches if any are due."""


class Planner:
    """Planner of steps, and owner of the pages in the block tables' rows.

    Attributes:
        layers: All model layers with pages.

    Args:
        store: Blocks and pools.
        tables: Block tables of all sequences.
        guard: The KV lock; every public method takes it.
        measured: Called with the tokens, seconds and mean position of each committed step.
        prefetchers: Prefetchers of the pages expected next; none without tiers to load from.
        tails: Partial pages of closed sequences; decides which sequences may publish.
        on_non_finite: See `Publisher`.
        on_refusal: See `Sealer`.
    """

    def __init__(
        self,
        store: PageStore,
        tables: Tables,
        guard: Guard,
        measured: Callable[[int, float, float], None],
        prefetchers: Collection[EdgePrefetcher],
        *,
        tails: Tails,
        on_non_finite: Callable[[int, int], None],
        on_refusal: Callable[[Refusal], None],
    ) -> None:
        self.store, self.tables, self.guard = store, tables, guard
        self.geometry = store.geometry
        self.page_size = store.geometry.page_size
        self._windows = [
            group.window if group.kind == "sliding" else None for group in self.geometry.groups
        ]
        self.slides = any(window is not None for window in self._windows)
        self.chunked = any(group.kind == "chunked" for group in self.geometry.groups)
        self._leaving: list[Sequence] = []
        self.aside_bytes = self.copied_bytes = 0
        encodes = any(forms.ladder.rungs for forms in store.forms)
        self.pending = Pending(store)
        self.sealer = Sealer(store, tables, self.pending, on_refusal) if encodes else None
        self.compactor = Compactor(store, tables, store.defragment_bytes)
        self.overflow = Overflow(store, tables, guard) if store.overflows else None
        self.measured, self._prefetchers = measured, prefetchers
        self._timers = deque[tuple[DeviceTimer, float, int, float | None, Fronts]]()
        self.publisher = Publisher(
            store,
            tables,
            tails.allowed,
            self.pending,
            on_non_finite=on_non_finite,
            on_late=self._publish_late,
        )
        self.tails = tails
        self._places = {
            layer: (g, i)
            for g, group in enumerate(self.geometry.groups)
            for i, layer in enumerate(group.layers)
        }
        self._pages = {
            layer: Pages(store.pool(g).arena, store.forms[g].raw, i, store.forms[g].sealed)
            for layer, (g, i) in self._places.items()
        }
        self.layers = frozenset(self._pages)

    @staticmethod
    def of(seq: Sequence) -> Planner:
        """Return the planner that owns the pages of a sequence."""
        return cast(Planner, seq.planner)

    def window(self, group: int) -> int | None:
        """Return the sliding window of a group in tokens; None if it has none."""
        return self._windows[group]

    def idle(self, seq: Sequence) -> None:
        """Check that a sequence is open, in no step, and has all its pages.

        Raises:
            StateError: The sequence fails one of these checks.
        """
        self.check_ready(seq)
        if seq.restoration is not None and seq.restoration.settled:
            raise StateError(
                "part of the sequence is still on its way",
                "Call its restoration's complete() and finish() first, or KV.restore",
            )

    def check_ready(self, seq: Sequence) -> None:
        """Publish pending full pages, then check that a sequence is open and in no step.

        Raises:
            StateError: The sequence is closed, suspended or in a step.
        """
        self.publish_pending()
        state = CLOSED if seq.closed else int(self.tables.state[seq.row])
        if state != READY:
            raise StateError(
                f"the sequence is {_STATES[state]}",
                "Open or resume it first, and end a step before the next one begins",
            )

    def allocate_raw(self, counts: Items[int]) -> list[list[int]]:
        """Allocate private raw pages, `counts[g]` of each group, or none at all.

        Raises:
            CapacityError: The pages do not fit.
        """
        return list(self.allocate({(g, 0): n for g, n in enumerate(counts)}).values())

    def allocate(self, counts: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], list[int]]:
        """Allocate private pages, `counts` of each (group, codec index), or none at all.

        Raises:
            CapacityError: The pages do not fit.
        """
        with self.guard:
            if self.pending.work and self.store.allocator.lacking(counts):
                self.publish_pending()  # closed sequences hold their pages until then
            self.store.allocator.require(counts)
            self.compactor.make_room(counts)
            try:
                return self._allocate(counts)
            except CapacityError:
                if not (self.publish_pending() or self.defragment()):
                    raise
                return self._allocate(counts)

    def whole(self, seq: Sequence) -> None:
        """Check that all pages of a sequence are on the device.

        Raises:
            StateError: Some pages are on a tier below the device.
        """
        if seq.away:
            raise StateError(
                f"{seq.away} pages of the sequence lie below its device (overflow=True)",
                "Only steps, forks and cuts behind them go on past the pool; give the device pool "
                "more bytes",
            )

    def _allocate(self, counts: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], list[int]]:
        taken: dict[tuple[int, int], list[int]] = {}
        try:
            for (g, codec), count in counts.items():
                taken[g, codec] = self.store.allocator.allocate(g, count, codec)
        except CapacityError:
            for (g, _), pages in taken.items():
                self.store.pool(g).release(*pages)
            raise
        return taken

    def occupy(self, seq: Sequence, pages: Items[Items[int]]) -> None:
        """Append private pages to a sequence, -1 for pages behind its window.

        Args:
            seq: The sequence.
            pages: For each group.
        """
        with self.guard:
            for g, fresh in enumerate(pages):
                first = len(seq.blocks[g])
                self.tables.reserve(first + len(fresh))
                for page_no, page in enumerate(fresh, first):
                    self.put(seq, g, page_no, page)

    def put(self, seq: Sequence, group: int, page_no: int, page: int) -> None:
        """Put a page at `page_no` into a sequence's row, behind its other pages; -1 is a hole."""
        with self.guard:
            self.tables.reserve(page_no + 1)
            blocks = seq.blocks[group]
            blocks += [None] * (page_no == len(blocks))
            blocks[page_no] = None
            self.tables.pages[group][seq.row, page_no] = page
            self.tables.mark_changed()

    def _let_go(self, seq: Sequence, group: int, first: int, stop: int) -> None:
        line, blocks = self.tables.pages[group][seq.row, first:stop], seq.blocks[group][first:stop]
        pages, pool = line.tolist(), self.store.pool(group)
        line[:] = -1
        self.tables.mark_changed()
        seq.blocks[group][first:stop] = [None] * len(blocks)
        both = [*zip(pages, blocks, strict=True)]
        if over := self.overflow:
            for block in [b for page, b in both if b is not None and page < 0]:
                over.let_go(seq, block)
        self.store.drop(*[b for page, b in both if b is not None and (page >= 0 or not over)])
        pool.release(*[page for page, block in both if block is None and page >= 0])

    def thaw_tail(self, seq: Sequence) -> None:
        """Make the page that the next token is written to raw: copy it if shared or encoded.

        Raises:
            CapacityError: The copy does not fit.
        """
        with self.guard:
            if self.sealer and self.tables.shared[seq.row]:
                self._own_tail(seq)

    def _own_tail(self, seq: Sequence) -> None:
        """Copy the page that the next token is written to if it is shared or encoded."""
        page_nos, filled = (part.tolist() for part in np.divmod(seq.lengths, self.page_size))
        if any(filled):
            fixed = [int(n and self._fixed(seq, g, page_nos[g])) for g, n in enumerate(filled)]
            taken = self._most_raw([seq], fixed)
            own = [(g, page) for g, pages in enumerate(taken) for page in pages]
            try:
                for g, page in own:
                    self.thaw(g, int(self.tables.pages[g][seq.row, page_nos[g]]), page)
            except BaseException:
                for g, page in own:
                    self.store.pool(g).release(page)
                raise
            for g, page in own:
                self._let_go(seq, g, page_nos[g], page_nos[g] + 1)
                self.put(seq, g, page_nos[g], page)
        self.tables.shared[seq.row] = False

    def _fixed(self, seq: Sequence, group: int, page_no: int) -> bool:
        page, pool = int(self.tables.pages[group][seq.row, page_no]), self.store.pool(group)
        sealed = page >> CODEC_SHIFT > 0
        return sealed or seq.blocks[group][page_no] is not None or pool.references(page) > 1

    def thaw(self, group: int, old: int, page: int) -> None:
        """Copy the contents of a page into a raw one, decoded.

        Raises:
            NonFiniteError: The page cannot be decoded into the group's dtype.
        """
        status, forms = self.copy(group, old, page), self.store.forms[group]
        if status is not None and status.any():
            raise NonFiniteError(
                f"a page cannot be decoded from {forms.layout(old).codec} into {forms.raw.dtype}",
                "Open the prompt anew with reuse=False",
            )

    def copy(self, group: int, old: int, page: int) -> torch.Tensor | None:
        """Copy the contents of a page into a raw one, decoded.

        Returns:
            Status of each layer if the page was encoded, else None. The copy may be used if all
            are zero, see `kernels.transcode`.
        """
        pool, forms = self.store.pool(group), self.store.forms[group]
        if not old >> CODEC_SHIFT:
            pool.copy([old], [page], forms.raw.granules)
            return None
        source, target = pool.granules([old]), pool.granules([page])
        status: torch.Tensor = kernels.transcode(
            pool.arena, source, target, forms.layout(old), forms.raw
        )
        return status

    def stepping(self, seq: Sequence) -> bool:
        """Return whether a step with this sequence is under way."""
        return int(self.tables.state[seq.row]) == STEPPING

    def _drop_behind(self, seq: Sequence, length: int) -> None:
        for g, window in enumerate(self._windows):
            if window is not None:
                keep = max(0, length - window - WINDOW_SLACK_TOKENS) // self.page_size
                self.drop_before(seq, g, keep)

    def drop_before(self, seq: Sequence, group: int, page_no: int) -> None:
        """Release a group's pages before number `page_no`, which are behind its window."""
        with self.guard:
            if page_no > seq.first_page[group]:
                self._let_go(seq, group, seq.first_page[group], page_no)
                seq.first_page[group] = page_no

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drop tokens from position `length` on, also those that are not computed yet.

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
                seq.restoration.cancel()  # the pages it loads are behind the cut
            seq.forget_tokens(length)

    def shorten(self, seq: Sequence, pages: int) -> None:
        """Release the pages from number `pages` on; their tokens must be computed again.

        Raises:
            StateError: The sequence is closed, suspended or in a step, or the cut reaches behind
                a sliding window.
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
        if length % size and any(page[seq.row, length // size] < 0 for page in self.tables.pages):
            self.whole(seq)
        for g in range(len(seq.blocks)):
            self._cut(seq, g, -(-length // size))
        if self.sealer:
            self.sealer.rewind(seq.row, length // size)
        self.tables.lengths[seq.row] = length
        seq.vouched = min(seq.vouched, length)
        self.tables.shared[seq.row] = length % size != 0
        seq.published = [min(done, length // size) for done in seq.published]
        if not length:
            seq.first_page = [0] * len(seq.first_page)

    def _cut(self, seq: Sequence, group: int, pages: int) -> None:
        blocks = seq.blocks[group]
        if pages < len(blocks):
            self._let_go(seq, group, pages, len(blocks))
            del blocks[pages:]

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Share every page of `seq` with `child`, a freshly opened sequence.

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
                    if block is not None and page < 0 and self.overflow is not None:
                        self.overflow.share(child, block)
                    elif block is not None:
                        self.store.hold(block)
                    elif page >= 0:
                        self.store.pool(g).share(page)
                tables.pages[g][child.row, : len(blocks)] = line
            tables.mark_changed()
            tables.lengths[child.row] = tables.lengths[seq.row]
            tables.lost[:, child.row] = tables.lost[:, seq.row]
            tables.shared[[seq.row, child.row]] = True
            if self.sealer:
                self.sealer.fork_row(seq.row, child.row)

    def vacate(self, seq: Sequence, groups: Items[int] | None = None) -> None:
        """Release all pages of a sequence, but not its row, length or tokens.

        Args:
            seq: The sequence.
            groups: Layer groups; all by default.
        """
        with self.guard:
            seq.vouched = 0
            for g in range(len(seq.blocks)) if groups is None else groups:
                self._cut(seq, g, 0)
                seq.first_page[g] = seq.published[g] = 0
            if self.sealer:
                self.sealer.rewind(seq.row, 0)

    def release(self, seq: Sequence) -> None:
        """Release all pages and the row of a sequence, once no step uses them."""
        with self.guard:
            if self.tables.state[seq.row] == STEPPING or self.publisher.checks(seq):
                self._leaving.append(seq)
                return
            try:
                if self.tails.allowed(seq) and self.tails.vouched(seq):
                    self.tails.keep(seq)
                    with suppress(MemoryError, RuntimeError):  # torch's: no memory for the tail
                        self.tails.save(seq)
                if self.sealer:
                    self.sealer.retire(seq)
            finally:
                for g in range(len(seq.blocks)):
                    self._cut(seq, g, 0)
                self.tables.close_row(seq.row)
                seq.row = self.tables.nowhere

    def defragment(self) -> int:
        """Empty sparse slabs by moving pages; return the moves, 0 while a step is under way."""
        with self.guard:
            return self.compactor.everything()

    def locate(self, layer: int) -> tuple[int, int]:
        """Return (group, position within the group) of a model layer.

        Raises:
            GeometryError: No group holds the layer.
        """
        return self._places.get(layer) or self.geometry.locate(layer)

    def pages(self, layer: int) -> Pages:
        """Return the pages of a model layer.

        Raises:
            GeometryError: No group holds the layer.
        """
        if layer not in self._pages:
            self.locate(layer)
        return self._pages[layer]

    def ragged(self, group: int, step: Advance) -> Ragged:
        """Return a step's rows for the kernels, on the group's device."""
        with self.guard:
            table = self.tables.table(group)
        parts = [torch.from_numpy(part) for part in (step.rows, step.ends[group], step.starts)]
        prompts = -1
        if table.device.type != "cpu":  # CPU kernels do not use the count
            parts = [sent(part, table.device) for part in parts]
            prompts = int(np.count_nonzero(np.diff(step.starts) > 1))
        line, length, start = parts
        return Ragged(table, line, length, start, step.most_new, step.most_length, prompts)

    def scan(self, group: int, seqs: Items[Sequence], batch: Ragged) -> Scan | None:
        """Return the scan of a group with pages below the device; None if all are on it."""
        with self.guard:
            lines = (self.tables.pages[group][s.row, : len(s.blocks[group])] for s in seqs)
            over = self.overflow
            if over is None or not over.sees_all(group) or not any((x < 0).any() for x in lines):
                return None
            return Scan(over, group, seqs, batch)

    def reserve(
        self, seqs: Items[Sequence], counts: NDArray[np.int64], last: Advance | None = None
    ) -> Advance:
        """Reserve pages for new tokens, and copy shared tails.

        Until `commit` or `undo`, nothing moves or frees the pages of these sequences.

        Args:
            seqs: The sequences.
            counts: New tokens of each.
            last: A finished step; its arrays are reused if it had the same rows.

        Raises:
            CapacityError: The pages do not fit.
            GeometryError: `seqs` and `counts` differ in length, or a count is negative.
            StateError: A sequence is closed, suspended, in a step, or of another cache.
        """
        if self.guard.deferred:
            self.guard.run_deferred()
        with self.guard:
            rows = [*map(_ROW, seqs)]
            if {*map(_PLANNER, seqs)} - {self} or len(counts) != len(rows):
                self._refuse(seqs, counts)
            if last is not None and last.rows.tolist() == rows:
                lines, before, after, starts, ends = last[:5]
            else:
                n, lines = len(rows), np.array(rows, np.int32)
                before, after = np.empty(n, np.int64), np.empty(n, np.int32)
                starts = np.empty(n + 1, np.int32)
                ends = np.empty((len(self.geometry.groups), n), np.int32)
            tables, out = self.tables, (before, after, starts, ends)
            state = tables.lengths, tables.lost, tables.shared, tables.state
            flags, new, length = _begin(lines, counts, state, self.page_size, out)
            if flags & REFUSED:
                self._refuse(seqs, counts)
            step = Advance(lines, *out, [], new, length, flags)
            if flags & (SHARES | GROWS):
                tables.state[lines] = READY  # until all pages are there
                step = self._make_room(seqs, step)
                tables.state[lines] = STEPPING
            if self.store.bus.routes[StepPlanned]:
                new = int(step.starts[-1])
                context = int(step.ends.max(0).sum()) - new
                self.store.bus.emit(
                    StepPlanned(rows=len(step.rows), new_tokens=new, context_tokens=context)
                )
            return step

    def _make_room(self, seqs: Items[Sequence], step: Advance) -> Advance:
        size, tables, new = self.page_size, self.tables, step.after - step.before
        if step.flags & SHARES:
            for b in np.flatnonzero(tables.shared[step.rows] & (new > 0)).tolist():
                self._own_tail(seqs[b])
        have = -((new - step.ends) // size)
        wanted = -(-step.ends // size) - have
        grown = np.flatnonzero(wanted.any(0)).tolist()
        if grown:
            tables.reserve(int((have + wanted).max()))
            rows = [seqs[b] for b in grown]
            self._grow(rows, have[:, grown].tolist(), wanted[:, grown].tolist())
        return step._replace(grown=[(seqs[b], have[:, b].tolist()) for b in grown])

    def commit(self, seqs: Items[Sequence], step: Advance, *, told: bool = True) -> None:
        """Advance lengths, publish pages that became full, and drop pages behind windows.

        Args:
            seqs: The rows.
            step: Their advance, from `reserve`.
            told: Whether their token ids are known. Otherwise `append_ids` publishes the pages.
        """
        with self.guard:
            if step.flags & FILLS:
                self.tables.lengths[step.rows] = step.after
                size, new = self.page_size, step.after - step.before
                full = (step.ends // size > (step.ends - new) // size).any(0)
                try:
                    filled = [seqs[b] for b in np.flatnonzero(full).tolist()] if told else []
                    self.publisher.start_checks(filled)
                    for b in np.flatnonzero(full).tolist() if self.slides else ():
                        self._drop_behind(seqs[b], int(step.after[b]))
                finally:
                    self._end(step.rows)
                self._seal(filled)
                self.compactor.edge()
            else:
                _finish(step.rows, step.after, self.tables.lengths, self.tables.state)
                if self._leaving:
                    self._let_leave()
            if self.pending.work:
                self.pending.end_step()
            if self._timers:
                self._read_timers()
            stack = self.store.stack
            used = any(lane.schedule.used for lane in stack.mover.lanes)
            if used or stack.unwritten or stack.troubles:
                self.store.writes.drain()
            if step.flags & FILLS:
                ahead = self.store.eviction.copy_ahead
                ahead(lambda: all(seq.length > seq.prompted for seq in seqs))
            self.look_ahead()
        if self.guard.deferred:
            self.guard.run_deferred()

    def measure(
        self, tokens: int, seconds: float, middle: float | None, fronts: Fronts = ()
    ) -> None:
        """Record the seconds of computing tokens; 0 if unknown.

        Args:
            tokens: New tokens of a step.
            seconds: Time to compute them.
            middle: Mean position of the tokens; None if their rate is not that of a prompt.
            fronts: Further calls that record the time.
        """
        if seconds > 0 and middle is not None:
            self.measured(tokens, seconds, middle)
        for record in fronts:
            record(max(seconds, 0.0) / tokens)

    def measure_later(
        self, timer: DeviceTimer, tokens: int, idle_s: float, middle: float | None,
        fronts: Fronts = (),
    ) -> None:  # fmt: skip
        """Stop the timer of a device, and record its seconds but `idle_s` once they are known."""
        timer.stop()
        self._timers.append((timer, idle_s, tokens, middle, fronts))

    def _read_timers(self) -> None:
        while self._timers and (took_s := self._timers[0][0].seconds()) is not None:
            _, idle_s, tokens, middle, fronts = self._timers.popleft()
            self.measure(tokens, took_s - idle_s, middle, fronts)

    def append_ids(self, seqs: Items[Sequence], places: Items[int], tokens: Items[int]) -> None:
        """Append the ids of steps that were committed without them, and publish full pages.

        Args:
            seqs: Sequences.
            places: Position of each id; ids are skipped unless they follow the known ones.
            tokens: The ids, one for each sequence.
        """
        with self.guard:
            each = zip(seqs, places, tokens, strict=True)
            fresh = [(seq, place, token) for seq, place, token in each if seq.known == place]
            if fresh:
                seqs, places, tokens = zip(*fresh, strict=True)
                extend_each(seqs, [*places], tokens)
            filled = [seq for seq, place, _ in fresh if not (place + 1) % self.page_size]
            if filled:
                self.publisher.start_checks(filled)
                self._seal(filled)

    def _seal(self, seqs: list[Sequence]) -> None:
        if self.sealer and seqs:
            self.store.writes.drain()  # pages that a tier has stored by now can be encoded
            self.sealer.seal(seqs)

    def publish_pending(self) -> bool:
        """Publish and encode the full pages that wait for a device; return whether any did."""
        with self.guard:
            return self.pending.run_all()

    def _publish_late(self, seqs: list[Sequence]) -> None:
        self._let_leave()
        self._seal(seqs)

    def look_ahead(self) -> None:
        """Start prefetches if any are due. Callers hold the KV lock."""
        for one in self._prefetchers:
            if one.due_ns < NEVER_NS and one.due_ns <= self.store.context.clock.now_ns():
                one.edge()

    def undo(self, step: Advance) -> None:
        """Release the pages that `reserve` allocated for a step that is rolled back."""
        with self.guard:
            for seq, have in step.grown:
                for g, pages in enumerate(have):
                    self._cut(seq, g, pages)
            self._end(step.rows)

    def publish(self, seq: Sequence, *, exact: bool = False) -> None:
        """Publish the sequence's full pages with known tokens to the index.

        Args:
            seq: The sequence.
            exact: See `Publisher.publish`.
        """
        with self.guard:
            self.publisher.publish([seq], exact=exact)

    def _end(self, rows: NDArray[np.int32]) -> None:
        self.tables.state[rows] = READY
        self._let_leave()

    def _let_leave(self) -> None:
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            with ExitStack() as stack:  # an error in one release does not skip the others
                for seq in leaving:
                    stack.callback(self.release, seq)

    def _refuse(self, seqs: Items[Sequence], counts: NDArray[np.int64]) -> NoReturn:
        if len(seqs) != len(counts) or (counts < 0).any():
            raise GeometryError(
                f"{len(seqs)} rows with {len(counts)} counts of new tokens",
                "Give each row its new tokens, none of them negative",
            )
        if any(seq.planner is not self for seq in seqs):
            raise StateError(
                "the sequences of a step belong to different models or caches",
                "Step each model's sequences on their own",
            )
        for seq in seqs:
            self.idle(seq)
        raise StateError("a sequence is in the step twice", "Fork it to have two rows")

    def _grow(self, seqs: list[Sequence], have: list[list[int]], wanted: list[list[int]]) -> None:
        counts = [sum(of_rows) for of_rows in wanted]
        for g, fresh in enumerate(self._most_raw(seqs, counts)):
            for seq, first, count in zip(seqs, have[g], wanted[g], strict=True):
                taken, fresh = fresh[:count], fresh[count:]
                self.tables.pages[g][seq.row, first : first + count] = taken
                seq.blocks[g][first : first + count] = [None] * count
        self.tables.mark_changed()

    def _most_raw(self, seqs: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Allocate raw pages for sequences; move others below the device while it is full.

        Raises:
            CapacityError: The pages do not fit.
        """
        if self.overflow is not None:
            self.overflow.make_room(seqs, {(g, 0): n for g, n in enumerate(counts)})
        while True:
            try:
                return self.allocate_raw(counts)
            except CapacityError:
                if self.overflow is None or not self.overflow.shed():
                    raise
