"""Brings what is expected next onto its device before anybody asks, at the edges of steps.

The `Prefetcher` of each device decides (`flowkv.policy.prefetch`): requests that wait, hints, and
what the place's policy has learned. Here it is told what happens, and a `Lookout` carries out what
it says: room comes from free pages and from what the policy gives up for it, bytes come from the
tiers that hold the chain, by the same lanes as everything else. When nothing is expected, an edge
costs one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowkv.policy.base import NEVER_NS, Slots
from flowkv.runtime.guard import Guard
from flowkv.runtime.index import Block
from flowkv.runtime.lookout import Lookout
from flowkv.runtime.prefetch import Prefetch
from flowkv.runtime.store import Store


class Foresight:
    """The prefetchers of all devices. Callers hold the KV lock.

    Args:
        store: Where everything lies.
        guard: The KV lock.
        windows: See `Lookout`.
        options: Fields of `PrefetchConfig`.

    Attributes:
        due_ns: Before that an edge has nothing to do; `NEVER_NS` while nothing is expected.
    """

    def __init__(
        self,
        store: Store,
        guard: Guard,
        windows: Sequence[int | None],
        options: Mapping[str, Any],
    ) -> None:
        self._store, self._guard = store, guard
        self._lookouts = {
            device: Lookout(store, guard, device, windows, options) for device in store.pools
        }
        self._groups = [self._lookouts[store.device(g)] for g in range(len(windows))]
        store.unproven.on_leave, store.on_drop = self._left, self._dropped
        self.due_ns = NEVER_NS
        self._expect()

    def edge(self) -> None:
        """Looks ahead if that is due. Ask only while `due_ns` is not `NEVER_NS`."""
        now = self._store.now_ns()
        if now < self.due_ns:
            return
        for lookout in self._lookouts.values():
            if now >= lookout.due_ns:
                lookout.look(now)
        self._expect()

    def accessed(self, now_ns: int, request: int, group: int, slots: Slots) -> None:
        """A request arrived, whose chain of a group has these slots; nothing is loaded yet."""
        self._groups[group].accessed(now_ns, request, group, slots)
        self._expect()

    def hint(self, now_ns: int, group: int, slots: Slots, eta_ns: int, sigma: float) -> None:
        """The next use of a group's chain is expected in about `eta_ns`."""
        self._groups[group].hint(now_ns, group, slots, eta_ns, sigma)
        self._expect()

    def enqueue(self, request: int, chains: Sequence[Slots]) -> Prefetch:
        """A request waits that will use these chains; what comes for it is what is returned."""
        now = self._store.now_ns()
        handle = Prefetch(self._store, self._guard, self._told)
        for group, slots in enumerate(chains):
            self._groups[group].enqueue(now, request + group, group, slots, handle)
        self._expect()
        self.edge()
        return handle

    def abort(self, now_ns: int, request: int, group: int) -> None:
        """A request that waited will not run."""
        self._groups[group].abort(now_ns, request)

    def report(self) -> dict[str, Any]:
        """Plain numbers, by device."""
        return {device: lookout.report() for device, lookout in self._lookouts.items()}

    def _told(self, block: Block, arrived: bool) -> None:
        self._groups[block.group].told(block, arrived)
        self._expect()

    def _left(self, block: Block) -> None:
        self._groups[block.group].left(self._store.now_ns(), block)

    def _dropped(self, slots: Sequence[int]) -> None:
        for lookout in self._lookouts.values():
            lookout.dropped(slots)

    def _expect(self) -> None:
        self.due_ns = min(lookout.due_ns for lookout in self._lookouts.values())
