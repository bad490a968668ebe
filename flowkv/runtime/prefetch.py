"""Brings a known prompt onto its device in the background, ahead of its use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flowkv.core import compiling
from flowkv.observe.events import Promoted
from flowkv.runtime.guard import Guard
from flowkv.runtime.index import Block
from flowkv.runtime.loader import Landing, land, landings, wish
from flowkv.runtime.store import Store
from flowkv.tiers.base import Completion

Allocate = Callable[[int, int, int], list[int] | None]
_LONGEST_S = 0.1


class Prefetch:
    """Pages on their way to the device, as `KV.prefetch` returns them.

    They arrive while others compute: at the edges of steps, or in `wait`. Who opens the prompt
    before that waits for what is under way, and loads the rest.

    Args:
        store: Where pages are known.
        guard: The KV lock; `cancel` and `wait` take it.
        told: Called with each block that was asked for, and whether it came by this.

    Attributes:
        pages: Pages that were asked for.
        arrived: Those of them that came.
        left: Those of them that are still on their way.
    """

    def __init__(
        self,
        store: Store,
        guard: Guard,
        told: Callable[[Block, bool], None] = lambda block, arrived: None,
    ) -> None:
        self._store, self._guard, self._told = store, guard, told
        self.pages = self.arrived = self.left = 0

    def start(self, blocks: Sequence[Block], allocate: Allocate | None = None) -> None:
        """Asks for blocks, as far as there is room for them. Callers hold the KV lock.

        Args:
            blocks: Blocks that are not on their device.
            allocate: Makes room, see `landings`; by default idle pages are given up for it.
        """
        store = self._store
        allocate = allocate or store.spare
        prepared = landings(store, [(b, store.sources(b)) for b in blocks], allocate)
        placed = {one.block for one, _ in prepared}
        for block in blocks:
            if block not in placed:
                self._told(block, False)
        tiers: dict[int, list[Landing]] = {}
        for landing, _ in prepared:
            tiers.setdefault(landing.source.tier, []).append(landing)
        for tier, those in tiers.items():
            items = [(wish(store, one), partial(self._done, one)) for one in those]
            for one in those:  # until it is answered, only the transfer has the page
                store.lend(one.block.group, one.page)
                store.pool(one.block.group).release(one.page)
            self.pages, self.left = self.pages + len(those), self.left + len(those)
            for one in those[store.mover.prefetch(tier, items, self) :]:  # too much waits already
                store.give_back(one.block.group, one.page)
                self.pages, self.left = self.pages - 1, self.left - 1
                self._told(one.block, False)
        store.drain()

    def cancel(self) -> None:
        """Calls off what is on its way and nobody else waits for. Safe to call again."""
        with self._guard:
            self._store.mover.cancel(self)
            self._store.drain()

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Waits until everything was answered; False if that took too long."""
        end_s = compiling.now_s() + timeout_s
        while self.left:
            left_s = end_s - compiling.now_s()
            if left_s <= 0:
                return False
            with self._guard:
                self._store.drain(min(left_s, _LONGEST_S))
        return True

    def _done(self, landing: Landing, answer: Completion) -> None:
        store, group = self._store, landing.block.group
        self.left -= 1
        came = False
        store.pool(group).share(landing.page)
        if answer.reason == "cancelled":
            store.pool(group).release(landing.page)
        elif land(store, landing, answer):
            self.arrived, came = self.arrived + 1, True
            store.insert([landing.block])
            store.count_loaded(landing.source.tier, answer.n_bytes)
            store.unproven.add(landing.block, landing.source.tier, answer.n_bytes)
            name = store.tiers[landing.source.tier].name
            event = Promoted(source=name, tier="device", pages=1, n_bytes=answer.n_bytes)
            store.bus.emit(event)
        store.give_back(group, landing.page)
        self._told(landing.block, came)

    def __repr__(self) -> str:
        return f"<flowkv.Prefetch: {self.arrived} of {self.pages} pages arrived, {self.left} left>"
