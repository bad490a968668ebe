"""One device's prefetcher: what it asks, what it is told, and what carries out its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flowkv.core.keys import ROOT
from flowkv.policy.base import NEVER_NS, NO_SLOTS, Policy, Slots
from flowkv.policy.prefetch import Fetch, Prefetcher
from flowkv.policy.prefetch.credit import KINDS, QUEUE
from flowkv.runtime.guard import Guard
from flowkv.runtime.index import Block
from flowkv.runtime.places import as_slots
from flowkv.runtime.prefetch import Prefetch
from flowkv.runtime.store import Store

MOST_QUEUED = 256
"""So many requests that wait are looked at; the others come when these were served."""
_LEAST_FLYING, _MOST_FLYING = 1 << 26, 1 << 28
"""Bytes that may be on their way at once; between these, what a period brings."""
_SOON = 16  # parts of a period


class _Queued(NamedTuple):
    tip: int
    handle: Prefetch


class Lookout:
    """What one device's prefetcher asks (`Reach`), is told, and has done. Callers hold the KV lock.

    Args:
        store: Where everything lies.
        guard: The KV lock.
        device: Name of the device.
        windows: Pages that each layer group needs before the end of a chain; None for all.
        options: Fields of `PrefetchConfig`.

    Attributes:
        capacity_bytes: Of the device's pool.
        prefetcher: Decides.
        due_ns: When to look again.
    """

    def __init__(
        self,
        store: Store,
        guard: Guard,
        device: str,
        windows: Sequence[int | None],
        options: Mapping[str, Any],
    ) -> None:
        self._store, self._guard, self._windows = store, guard, windows
        self._place, self._pool = store.device_places[device], store.pools[device]
        self._groups = {g for g in range(len(windows)) if store.device(g) == device}
        self.capacity_bytes = self._pool.capacity_bytes()
        self.prefetcher = Prefetcher(self.capacity_bytes, **options)
        self._config = self.prefetcher.config
        self._period_ns = round(self._config.period_s * 1e9)
        self._learns = type(self._place.policy).wanted is not Policy.wanted
        self._queued: dict[int, _Queued] = {}
        self._arrived, self._failed, self._dropped = list[int](), list[int](), list[int]()
        self._tip, self.due_ns = -1, NEVER_NS
        if self._learns:  # compiled now, and not at the edge of a step
            self.due_ns = now = store.now_ns()
            self._place.wanted(now, 1)
            self._place.displace(now, 0, 0.0)

    # ---- what it asks

    def room_bytes(self) -> int:
        """See `Reach`."""
        return self.capacity_bytes - self._pool.used_bytes()

    def sizes(self, slots: Slots) -> Slots:
        """See `Reach`; as they lie on the device, or would."""
        return np.array([self._size(self._store.index.get(slot)) for slot in slots.tolist()], int)

    def _size(self, block: Block | None) -> int:
        if block is None:
            return 1
        number = self._store.source(block) if block.page < 0 else -1
        return self._store.size(block, number)

    def missing(self, tip: int) -> tuple[int, Slots]:
        """See `Reach`. Where a window hides the beginning, only what it still shows."""
        self._tip = tip
        index, block = self._store.index, self._store.index.get(tip)
        if block is None or block.kind != "page" or block.group not in self._groups:
            return -1, NO_SLOTS
        window, path = self._windows[block.group], dict[int, Block]()
        while block is not None and block.page < 0 and block.slot not in path:
            path[block.slot] = block
            if window is not None and len(path) == window:
                break
            above = index.find(block.parent)
            if above is None and block.parent != ROOT and window is None:
                return -1, NO_SLOTS  # what lies above is gone, so this is of no use
            block = above
        anchor = block.slot if block is not None and block.page >= 0 else -1
        slots, open_tiers = [], dict[int, bool]()
        for one in reversed(path.values()):
            number = self._store.source(one)
            if number not in open_tiers:
                open_tiers[number] = number >= 0 and self._gives(number)
            if not open_tiers[number] or one.fidelity > self._store.fidelity:
                break
            slots.append(one.slot)
        return anchor, as_slots(slots)

    def _gives(self, number: int) -> bool:
        lane = self._store.mover.lanes[number]
        return self._store.answers(number) and lane.guard.allows(lane.clock_ns())

    # ---- what it is told

    def accessed(self, now_ns: int, request: int, group: int, slots: Slots) -> None:
        """A request arrived, whose chain of a group has these slots."""
        self._settle(now_ns)
        window = self._windows[group]
        chain = slots if window is None else slots[-window:]
        hits, demanded = 0, 0
        for at, slot in enumerate(chain.tolist()):
            block = self._store.index.get(slot)
            if block is not None and block.page >= 0:
                hits += hits == at
            elif block is not None and block.tiers:
                demanded += self._size(block)
        self._queued.pop(request, None)
        self.prefetcher.accessed(now_ns, chain, hits, demanded, request)
        self._plan_ahead(now_ns)

    def hint(self, now_ns: int, group: int, slots: Slots, eta_ns: int, sigma: float) -> None:
        """The next use of a group's chain is expected."""
        self._settle(now_ns)
        known = self._known(group, slots)
        if len(known):
            block = self._store.index.at(int(known[-1]))
            number = block.nearest
            if number >= 0:
                self.prefetcher.rates = self._store.mover.lanes[number].loads
            self.prefetcher.hint(now_ns, known, eta_ns, sigma)
            self._plan_ahead(now_ns)

    def enqueue(
        self, now_ns: int, request: int, group: int, slots: Slots, handle: Prefetch
    ) -> None:
        """A request waits that will use a group's chain."""
        self._settle(now_ns)
        known = self._known(group, slots)
        if len(known) and len(self._queued) < MOST_QUEUED:
            self._queued[request] = _Queued(int(known[-1]), handle)
            self.prefetcher.enqueue(now_ns, request, known)
            self.due_ns = now_ns

    def abort(self, now_ns: int, request: int) -> None:
        """A request that waited will not run."""
        if self._queued.pop(request, None) is not None:
            self.prefetcher.abort(now_ns, request)

    def left(self, now_ns: int, block: Block) -> None:
        """A page that was prefetched left its device unused."""
        self._settle(now_ns)
        self.prefetcher.left(now_ns, as_slots([block.slot]))

    def dropped(self, slots: Sequence[int]) -> None:
        """Slots that name nothing any more."""
        self._dropped += slots

    def told(self, block: Block, arrived: bool) -> None:
        """What became of a page that was on its way."""
        (self._arrived if arrived else self._failed).append(block.slot)
        if self._queued and self._store.index.get(block.slot) is not None:
            self.due_ns = min(self.due_ns, self._store.now_ns() + self._period_ns // _SOON)

    def _known(self, group: int, slots: Slots) -> Slots:
        """The blocks of a chain that lie somewhere, up to the first gap if all are needed."""
        found = []
        for slot in slots.tolist():
            if self._store.index.get(slot) is not None:
                found.append(slot)
            elif self._windows[group] is None:
                break
        return as_slots(found)

    def _settle(self, now_ns: int) -> None:
        """Passes on what happened meanwhile."""
        arrived, self._arrived = self._arrived, []
        failed, self._failed = self._failed, []
        dropped, self._dropped = self._dropped, []
        if arrived:
            self.prefetcher.landed(now_ns, as_slots(arrived))
        if failed:
            self.prefetcher.failed(now_ns, as_slots(failed))
        if dropped:
            self.prefetcher.forget(as_slots(dropped))

    def _plan_ahead(self, now_ns: int) -> None:
        if self._learns or not self.prefetcher.idle:
            self.due_ns = min(self.due_ns, self.prefetcher.due_ns(now_ns))

    # ---- what is done

    def look(self, now_ns: int) -> None:
        """Brings what the prefetcher says, as far as there is room."""
        self._settle(now_ns)
        self.due_ns = NEVER_NS
        self._bound()
        for fetch in self.prefetcher.plan(now_ns, self._place, self):
            self._carry_out(fetch)
            self._settle(now_ns)
        self._plan_ahead(now_ns)

    def _bound(self) -> None:
        """Lets no more be on its way than what the fastest tier gives in a period."""
        rates = (lane.loads.bytes_per_s for lane in self._store.mover.lanes)
        flying = round(max(rates, default=0.0) * self._config.period_s)
        flying = min(max(flying, _LEAST_FLYING), _MOST_FLYING)
        most = min(flying, self._config.flying_bytes)
        self.prefetcher.config = msgspec.structs.replace(self._config, flying_bytes=most)

    def _carry_out(self, fetch: Fetch) -> None:
        store = self._store
        blocks = [store.index.at(slot) for slot in fetch.slots.tolist()]
        for block in blocks:  # what leaves for them may push something off a tier
            store.keep(block)
        try:
            store.displace(fetch.victims.tolist())
            if blocks:
                self._handle(fetch.kind).start(blocks, self._free)
        finally:
            for block in blocks:
                store.unkeep(block)

    def _handle(self, kind: int) -> Prefetch:
        """Those who wait may call off what comes for them."""
        waiting = (one.handle for one in self._queued.values() if one.tip == self._tip)
        handle = next(waiting, None) if kind == QUEUE else None
        return Prefetch(self._store, self._guard, self.told) if handle is None else handle

    def _free(self, group: int, count: int, codec: int) -> list[int]:
        """Pages that are free; nothing goes for them that the prefetcher did not choose."""
        granules = self._store.forms[group].layouts[codec].granules
        count = min(count, self._pool.available(granules))
        return self._pool.allocate(granules, count, codec) or []

    def report(self) -> dict[str, Any]:
        """Plain numbers."""
        one, report = self.prefetcher, dict[str, Any]()
        for number, kind in enumerate(KINDS):
            report[kind] = {
                "fetched_bytes": one.fetched_bytes[number],
                "used_bytes": one.used_bytes[number],
                "wasted_bytes": one.wasted_bytes[number],
                "precision": one.precision(number),
            }
        report["displaced_bytes"] = one.displaced_bytes
        report["unproven_bytes"] = one.unproven_bytes
        report["rests"] = one.guard.rests
        return report
