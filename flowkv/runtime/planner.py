"""Plans steps: reserves their pages, commits or undoes them, and tells kernels where pages lie."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import GeometryError, StateError
from flowkv.kernels.operands import Pages, Ragged
from flowkv.observe.events import StepPlanned
from flowkv.policy.base import NEVER_NS
from flowkv.runtime import advance
from flowkv.runtime.advance import FILLS, GROWS, REFUSED, SHARES, Advance
from flowkv.runtime.guard import Guard
from flowkv.runtime.lines import Lines
from flowkv.runtime.publisher import Publisher
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.store import Store
from flowkv.runtime.tables import READY, STEPPING, Tables

if TYPE_CHECKING:  # it lies above
    from flowkv.runtime.foresight import Foresight


class Follower(Protocol):
    """Who follows steps layer by layer."""

    def appended(self, step: Any, layer: int) -> None:
        """A layer has written the new tokens of a step."""
        ...

    def close(self) -> None:
        """Follows no longer."""
        ...


class Planner(Lines):
    """Steps over the lines of sequences.

    Args:
        store: Blocks and pools.
        tables: Lines of all sequences.
        guard: The KV lock; every public method takes it.
        measured: Told the tokens and seconds of each committed step.

    Attributes:
        foresight: Brings what is expected next, where there are tiers to bring it from.
        sender: Told which layers have written the new tokens of a step, see `runtime.handover`.
    """

    def __init__(
        self,
        store: Store,
        tables: Tables,
        guard: Guard,
        measured: Callable[[int, float], None],
    ) -> None:
        super().__init__(store, tables, guard)
        self.measured = measured
        self.publisher = Publisher(store, tables)
        self.sender: Follower | None = None
        self.foresight: Foresight | None = None
        self._places = {
            layer: (g, i)
            for g, group in enumerate(self.geometry.groups)
            for i, layer in enumerate(group.layers)
        }
        self._pages = {
            layer: Pages(store.pool(g).arena, store.forms[g].raw, i, store.forms[g].sealed)
            for layer, (g, i) in self._places.items()
        }

    # ---- what a step reads

    @property
    def layers(self) -> frozenset[int]:
        """All model layers with pages."""
        return frozenset(self._pages)

    def locate(self, layer: int) -> tuple[int, int]:
        """(group, position within it) of a model layer.

        Raises:
            GeometryError: No group holds the layer.
        """
        return self._places.get(layer) or self.geometry.locate(layer)

    def pages(self, layer: int) -> Pages:
        """The pages of a model layer.

        Raises:
            GeometryError: No group holds the layer.
        """
        self.locate(layer)
        return self._pages[layer]

    def ragged(self, group: int, step: Advance) -> Ragged:
        """The kernels' view of a step's rows."""
        with self.guard:
            table = self.tables.table(group)
        parts = [torch.from_numpy(part) for part in (step.rows, step.after, step.starts)]
        prompts = -1
        if table.device.type != "cpu":  # elsewhere nobody asks
            parts = [part.to(table.device) for part in parts]
            prompts = int(np.count_nonzero(np.diff(step.starts) > 1))
        line, length, start = parts
        return Ragged(table, line, length, start, step.most_new, step.most_length, prompts)

    # ---- a step

    def reserve(self, seqs: Items[Sequence], counts: NDArray[np.int64]) -> Advance:
        """Makes room for new tokens: pages, and copies of tails that are shared.

        Until `commit` or `undo`, nothing moves or frees the pages of these sequences.

        Raises:
            CapacityError: The pages do not fit.
            GeometryError: Rows and counts do not fit.
            StateError: A sequence is closed, suspended, in a step, or another cache's.
        """
        with self.guard:
            rows = [seq.row for seq in seqs if seq.planner is self]
            if len(rows) != len(seqs) or len(counts) != len(rows):
                self._refuse(seqs, counts)
            step = advance.begin(self.tables, rows, counts, self.page_size)
            if step.flags & REFUSED:
                self._refuse(seqs, counts)
            if step.flags & (SHARES | GROWS):
                self.tables.state[step.rows] = READY  # until all pages are there
                step = self._make_room(seqs, step)
                self.tables.state[step.rows] = STEPPING
            if self.store.bus.wants(StepPlanned):
                new, context = int(step.starts[-1]), int(step.before.sum())
                planned = StepPlanned(rows=len(rows), new_tokens=new, context_tokens=context)
                self.store.bus.emit(planned)
            return step

    def _make_room(self, seqs: Items[Sequence], step: Advance) -> Advance:
        size, tables = self.page_size, self.tables
        new = step.after > step.before
        for b in np.flatnonzero(tables.shared[step.rows] & new).tolist():
            self._own_tail(seqs[b], int(step.before[b]))
        have = -(-step.before // size)
        wanted = -(-step.after // size) - have
        grown = np.flatnonzero(wanted).tolist()
        if grown:
            tables.reserve(int((have + wanted).max()))
            self._grow([seqs[b] for b in grown], have[grown].tolist(), wanted[grown].tolist())
        return step._replace(grown=[(seqs[b], int(have[b])) for b in grown])

    def commit(self, seqs: Items[Sequence], step: Advance) -> None:
        """Advances lengths, publishes pages that became full, drops pages behind windows."""
        with self.guard:
            if step.flags & FILLS:
                self.tables.lengths[step.rows] = step.after
                full = step.after // self.page_size > step.before // self.page_size
                try:
                    filled = [seqs[b] for b in np.flatnonzero(full).tolist()]
                    self.publisher.publish(filled)
                    for b in np.flatnonzero(full).tolist() if self._slides else ():
                        self._drop_behind(seqs[b], int(step.after[b]))
                finally:
                    self._end(step.rows)
                if self.sealer:
                    self.store.drain()  # what a tier has taken by now can be encoded
                    self.sealer.seal(filled)
                self.compactor.edge()
            else:
                advance.finish(self.tables, step)
                self._let_leave()
            self.store.drain()
            if self.foresight is not None and self.foresight.due_ns < NEVER_NS:
                self.foresight.edge()

    def undo(self, step: Advance) -> None:
        """Gives back the pages of a step that did not happen."""
        with self.guard:
            for seq, have in step.grown:
                self._cut(seq, have)
            self._end(step.rows)

    def publish(self, seq: Sequence, *, exact: bool = False) -> None:
        """Makes the sequence's full pages with known tokens known to the index.

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
            with ExitStack() as stack:  # what one of them raises does not keep the others
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

    def _grow(self, seqs: list[Sequence], have: list[int], wanted: list[int]) -> None:
        pages = self.allocate_raw([sum(wanted)] * len(self.geometry.groups))
        for g, fresh in enumerate(pages):
            for seq, first, count in zip(seqs, have, wanted, strict=True):
                for page_no in range(first, first + count):
                    self._place(seq, g, page_no, fresh.pop())
