"""Requests: prefetches for them, their events for policies, the waiting queue, and traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flowkv.cache.block_table import Planner
from flowkv.cache.index import Block
from flowkv.cache.load import Allocate, LayerSlice, LoadBatch, PageLoad, PageLoader, reserve, ways
from flowkv.cache.mover import IOPriority
from flowkv.cache.sequence import NO_CARE, Guard, Sequence
from flowkv.cache.store import PageStore
from flowkv.compiled import compiling
from flowkv.core.errors import ConfigError
from flowkv.core.keys import ROOT
from flowkv.observe.events import Closing, Promoted
from flowkv.observe.recording import Writer
from flowkv.policy.base import NEVER_NS, NO_SLOTS, Policy, Slots, Visit
from flowkv.policy.order.leaf import as_slots
from flowkv.policy.prefetch import Fetch, Prefetcher
from flowkv.policy.prefetch.prefetcher import KINDS, QUEUE
from flowkv.policy.warming import behind

# Prefetches of known prompts onto their device, in the background, ahead of their use.

_LONGEST_S = 0.1


class Prefetch:
    """Pages on their way to the device, as `KV.prefetch` returns them.

    They arrive while others compute: at the edges of steps, or in `wait`. If the prompt is opened
    earlier, it waits for the pages under way, and loads the rest.

    Args:
        store: Store of the pages.
        loader: Loads the pages.
        guard: The KV lock; `cancel` and `wait` take it.
        told: Called with each requested block, and whether this prefetch loaded it.

    Attributes:
        pages: Number of requested pages.
        arrived: Requested pages that arrived.
        left: Requested pages that are still on their way.
    """

    def __init__(
        self,
        store: PageStore,
        loader: PageLoader,
        guard: Guard,
        told: Callable[[Block, bool], None] = lambda block, arrived: None,
    ) -> None:
        self._store, self._loader, self._guard, self._told = store, loader, guard, told
        self.pages = self.arrived = self.left = 0

    def issue(self, blocks: Items[Block], allocate: Allocate | None = None) -> None:
        """Start loading blocks, as far as there is room for them. Callers hold the KV lock.

        Args:
            blocks: Known blocks; those on their device already need no load.
            allocate: Allocates device pages; by default idle pages are evicted for them.
        """
        store = self._store
        absent = [block for block in blocks if block.page < 0]
        for block in blocks:
            if block.page >= 0:
                self._told(block, False)
        loads = PageLoad.several(store, [(b, -1) for b in absent], awaited=False, allocate=allocate)
        codecs = ways(store, loads)
        reserve(loads, codecs, allocate or store.allocator.spare)
        for one in loads:
            if one.page >= 0:
                self.pages, self.left = self.pages + 1, self.left + 1
                batch = LoadBatch(self, partial(self._done, one), priority=IOPriority.PREFETCH)
                self._loader.submit(batch, [LayerSlice(one, 0, one.stripes)], -1)
            else:
                one.drop()
                self._told(one.block, False)
        store.writes.drain()

    def cancel(self) -> None:
        """Cancel the pages under way that nothing else waits for. Safe to call again."""
        with self._guard:
            self._store.stack.mover.cancel(self)
            self._store.writes.drain()

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Wait until all pages are answered; return False on timeout."""
        end_s = compiling.now_s() + timeout_s
        while self.left:
            left_s = end_s - compiling.now_s()
            if left_s <= 0:
                return False
            with self._guard:
                self._store.writes.drain(min(left_s, _LONGEST_S))
        return True

    def _done(self, load: PageLoad, batch: LoadBatch) -> None:
        store, block = self._store, load.block
        self.left -= 1
        self.pages -= batch.refused
        load.drop()  # no sequence holds the page yet
        for tier, _ in batch.pages:
            n_bytes = batch.n_bytes[tier]
            self.arrived += 1
            store.prefetched_unused.add(block, tier, n_bytes)
            name = store.stack.tiers[tier].name
            store.bus.emit(Promoted(source=name, tier="device", pages=1, n_bytes=n_bytes))
        self._told(block, bool(batch.pages))

    def __repr__(self) -> str:
        return f"<flowkv.Prefetch: {self.arrived} of {self.pages} pages arrived, {self.left} left>"


# One device's prefetcher: its view of the cache, its events, and the execution of its plans.

_LEAST_FLYING, _MOST_FLYING = 1 << 26, 1 << 28
"""Bounds of the bytes in flight at once; between them, the bytes that a period can load."""
_SOON = 16  # parts of a period


class DevicePrefetcher:
    """The prefetcher of one device, and its view of the cache (`Reach`). Callers hold the KV lock.

    Args:
        store: The page store.
        loader: Loads pages.
        guard: The KV lock.
        device: Name of the device.
        windows: Pages that each layer group needs before the end of a chain; None for all.
        options: Fields of `PrefetchConfig`.

    Attributes:
        capacity_bytes: Capacity of the device's pool.
        prefetcher: Plans the prefetches.
        due_ns: Time before which an edge has nothing to do; `NEVER_NS` if nothing is expected.
    """

    def __init__(
        self,
        store: PageStore,
        loader: PageLoader,
        guard: Guard,
        device: str,
        windows: Items[int | None],
        options: Mapping[str, Any],
    ) -> None:
        self._store, self._loader, self._guard, self._windows = store, loader, guard, windows
        self._place, self._pool = store.device_places[device], store.pools[device]
        self._groups = {g for g in range(len(windows)) if store.devices[g] == device}
        self.capacity_bytes = self._pool.capacity_bytes()
        self.prefetcher = Prefetcher(self.capacity_bytes, **options)
        self._config = self.prefetcher.config
        self._period_ns = round(self._config.period_s * 1e9)
        learned = type(behind(self._place.policy)).wanted is not Policy.wanted
        self._learns = learned or self._config.learned == "markov"
        self._queued: dict[int, tuple[int, Prefetch]] = {}  # last block of a chain, and its handle
        self._arrived, self._failed, self._dropped = list[int](), list[int](), list[int]()
        self._tip, self.due_ns = -1, NEVER_NS
        if self._learns:
            self.due_ns = store.context.now_ns()

    # ---- the view of the cache (`Reach`)

    def room_bytes(self) -> int:
        """Return the free bytes of the device, those of tails and pages evicted ahead included."""
        store, used = self._store, self._pool.used_bytes()
        used -= sum(map(store.size, store.next_victims[self._place.name]))
        return self.capacity_bytes - used + store.tails.held_bytes(self._pool)

    def sizes(self, slots: Slots) -> Slots:
        """Return the bytes of each block's page on the device, or of its copy on a tier."""
        found, copies = self._store.index.get_all(slots.tolist()), self._store.stack.copies
        return np.array([1 if one is None else copies.nearest_size(one) for one in found], int)

    def missing(self, tip: int) -> tuple[int, Slots]:
        """Return the deepest ancestor of `tip` on the device, or -1, and the blocks between.

        A sliding window ends the list at its first page.
        """
        self._tip = tip
        index, block = self._store.index, self._store.index.get_all([tip])[0]
        if block is None or block.kind != "page" or block.group not in self._groups:
            return -1, NO_SLOTS
        window, path = self._windows[block.group], dict[int, Block]()
        while block is not None and block.page < 0 and block.slot not in path:
            path[block.slot] = block
            if window is not None and len(path) == window:
                break
            above = index.find(block.parent)
            if above is None and block.parent != ROOT and window is None:
                return -1, NO_SLOTS  # the parent is gone, so the chain cannot be reused
            block = above
        anchor = block.slot if block is not None and block.page >= 0 else -1
        slots, open_tiers = [], dict[int, bool]()
        for one in reversed(path.values()):
            number = one.tier
            if number not in open_tiers:
                open_tiers[number] = number >= 0 and self._gives(number)
            if not open_tiers[number] or one.fidelity > self._store.stack.fidelity:
                break
            slots.append(one.slot)
        return anchor, as_slots(slots)

    def _gives(self, number: int) -> bool:
        lane = self._store.stack.mover.lanes[number]
        return lane.answering and lane.guard.allows(lane.clock_ns())

    # ---- events

    def accessed(self, now_ns: int, request: int, group: int, slots: Slots) -> None:
        """Record the arrival of a request with this chain of a group."""
        self._settle(now_ns)
        window = self._windows[group]
        chain = slots if window is None else slots[-window:]
        hits, away = 0, list[Block]()
        for at, block in enumerate(self._store.index.get_all(chain.tolist())):
            if block is not None and block.page >= 0:
                hits += hits == at
            elif block is not None and block.tiers:
                away.append(block)
        demanded = sum(self._store.stack.copies.nearest_bytes(away).values())
        self._queued.pop(request, None)
        self.prefetcher.accessed(now_ns, chain, hits, demanded, request)
        self._plan_ahead(now_ns)

    def hint(self, now_ns: int, group: int, slots: Slots, eta_ns: int, sigma: float) -> None:
        """Pass on the expected next use of a group's chain in about `eta_ns`."""
        self._settle(now_ns)
        known = self._known(group, slots)
        if len(known):
            block = self._store.index.at(int(known[-1]))
            number = block.nearest
            if number >= 0:
                self.prefetcher.rates = self._store.stack.mover.lanes[number].loads
            self.prefetcher.hint(now_ns, known, eta_ns, sigma)
            self._plan_ahead(now_ns)

    def enqueue(
        self, now_ns: int, request: int, group: int, slots: Slots, handle: Prefetch
    ) -> None:
        """Queue a waiting request that will use a group's chain."""
        self._settle(now_ns)
        known = self._known(group, slots)
        if len(known):
            self._queued[request] = int(known[-1]), handle
            self.prefetcher.enqueue(now_ns, request, known)
            self.due_ns = now_ns

    def abort(self, now_ns: int, request: int) -> None:
        """Remove a waiting request that will not run."""
        if self._queued.pop(request, None) is not None:
            self.prefetcher.abort(now_ns, request)

    def left(self, now_ns: int, block: Block) -> None:
        """Record that a prefetched page left its device unused."""
        self._settle(now_ns)
        self.prefetcher.left(now_ns, as_slots([block.slot]))

    def dropped(self, slots: Items[int]) -> None:
        """Collect slots that no longer name a block."""
        self._dropped += slots

    def told(self, block: Block, arrived: bool) -> None:
        """Record whether a requested page arrived."""
        (self._arrived if arrived else self._failed).append(block.slot)
        if self._queued and not block.gone:
            self.due_ns = min(self.due_ns, self._store.context.now_ns() + self._period_ns // _SOON)

    def _known(self, group: int, slots: Slots) -> Slots:
        """Return the known blocks of a chain, up to the first gap if all pages are needed."""
        known = [block is not None for block in self._store.index.get_all(slots.tolist())]
        if self._windows[group] is None:
            return as_slots(slots[: [*known, False].index(False)])
        return as_slots(slots[known])

    def _settle(self, now_ns: int) -> None:
        """Pass the collected arrivals, failures and dropped slots to the prefetcher."""
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

    # ---- execution

    def edge(self) -> None:
        """Start the prefetches that are due, as far as there is room."""
        now_ns = self._store.context.now_ns()
        if now_ns < self.due_ns:
            return
        self._settle(now_ns)
        self.due_ns = NEVER_NS
        self._bound()
        for fetch in self.prefetcher.plan(now_ns, self._place, self):
            self._carry_out(fetch)
            self._settle(now_ns)
        self._plan_ahead(now_ns)

    def _bound(self) -> None:
        """Limit the bytes in flight to those that the fastest tier loads in a period."""
        rates = (lane.loads.bytes_per_s for lane in self._store.stack.mover.lanes)
        flying = round(max(rates, default=0.0) * self._config.period_s)
        flying = min(max(flying, _LEAST_FLYING), _MOST_FLYING)
        most = min(flying, self._config.flying_bytes)
        self.prefetcher.config = msgspec.structs.replace(self._config, flying_bytes=most)

    def _carry_out(self, fetch: Fetch) -> None:
        store = self._store
        blocks = store.index.those(fetch.slots.tolist())
        store.keep(*blocks)  # the victims' write-back may evict other blocks from a tier
        try:
            store.eviction.leave(store.index.those(fetch.victims.tolist()), "prefetch")
            if blocks:
                self._handle(fetch.kind).issue(blocks, store.allocator.free)
        finally:
            store.unkeep(*blocks)

    def _handle(self, kind: int) -> Prefetch:
        """Return the handle for a fetch: a waiting request's own, so that it can cancel it."""
        waiting = (handle for tip, handle in self._queued.values() if tip == self._tip)
        handle = next(waiting, None) if kind == QUEUE else None
        return handle or Prefetch(self._store, self._loader, self._guard, self.told)

    def counters(self) -> dict[str, Any]:
        """Return the counters of the prefetcher as plain numbers."""
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


# Prefetching at the edges of steps, ahead of expected requests.
#
# The `Prefetcher` of each device decides (`flowkv.policy.prefetch`) from waiting requests, hints,
# and the patterns that the place's policy has learned. A `DevicePrefetcher` passes it the events
# and executes its plans: room comes from free pages and from victims of the policy, bytes come from
# the tiers that hold the chain, through the same lanes as all transfers. When nothing is expected,
# an edge costs one comparison.


class PrefetchManager:
    """The prefetchers of all devices. Callers hold the KV lock.

    Args:
        store: The page store.
        loader: Loads pages.
        guard: The KV lock.
        windows: See `DevicePrefetcher`.
        options: Fields of `PrefetchConfig`.

    Attributes:
        devices: The prefetchers by device.
        groups: That of each layer group.
    """

    def __init__(
        self,
        store: PageStore,
        loader: PageLoader,
        guard: Guard,
        windows: Items[int | None],
        options: Mapping[str, Any],
    ) -> None:
        self._store, self._loader, self._guard = store, loader, guard
        self.devices = {
            device: DevicePrefetcher(store, loader, guard, device, windows, options)
            for device in store.pools
        }
        self.groups = [self.devices[store.devices[g]] for g in range(len(windows))]

    def enqueue(self, request: int, chains: Items[Slots]) -> Prefetch:
        """Queue a waiting request that will use these chains; return the handle of its prefetch."""
        now = self._store.context.now_ns()
        handle = Prefetch(self._store, self._loader, self._guard, self._told)
        for group, slots in enumerate(chains):
            self.groups[group].enqueue(now, request + group, group, slots, handle)
        for device in self.devices.values():
            device.edge()
        return handle

    def counters(self) -> dict[str, Any]:
        """Return the counters of each device's prefetcher."""
        return {name: device.counters() for name, device in self.devices.items()}

    def _told(self, block: Block, arrived: bool) -> None:
        self.groups[block.group].told(block, arrived)

    def unused(self, block: Block) -> None:
        """Record that a prefetched page left its device unused."""
        self.groups[block.group].left(self._store.context.now_ns(), block)

    def dropped(self, slots: Items[int]) -> None:
        """Pass on slots that no longer name a block."""
        for device in self.devices.values():
            device.dropped(slots)


# Requests as events for the policies of all places: once each, by the slots of its chain.
#
# Every policy sees every request, whichever place the pages come from, and the ghosts of forgotten
# pages as well: so that it learns from its evictions. Where a model has several layer groups, each
# has a chain of its own, and is a request (and a conversation) of its own to the policies.

FEW_SESSIONS, MOST_SESSIONS = 1 << 8, 1 << 14
"""Conversations with a remembered last page, so that a hint can name them: beyond the first number,
those with forgotten pages go as others come; the second is the limit."""
_LARGEST = (1 << 62) - 1


class RequestTracker:
    """Numbers of requests, and their events for all policies. Callers hold the KV lock.

    Args:
        planner: Planner with the layer groups and the store.
        prefetches: Prefetchers that get the events, too; None where nothing is prefetched.

    Attributes:
        followers: Called for every request that ended, with its sequence, the number of whole pages
            of its prompt, and its arrival time.
    """

    def __init__(self, planner: Planner, prefetches: PrefetchManager | None) -> None:
        self.store, self.page_size = planner.store, planner.page_size
        self.prefetches = prefetches
        self._windows = [planner.window(g) for g in range(len(planner.geometry.groups))]
        self.followers: list[Callable[[Sequence, int, int], None]] = []
        self._requests = 0
        self._sessions: dict[int, tuple[bytes, ...]] = {}

    # ---- requests

    def number(self) -> int:
        """Return a new request number; layer group g of the request has this number plus g."""
        first = self._requests
        self._requests += len(self._windows)
        return first

    def begin(self, seq: Sequence, request: int = -1) -> None:
        """Report the arrival of a request to all policies.

        Args:
            seq: Its sequence, just opened; no page of it is attached or computed.
            request: Its number, if it was enqueued.
        """
        seq.request = self.number() if request < 0 else request
        now, tokens = self.store.context.now_ns(), seq.known
        tenant, pages = self.store.context.tenant(seq.tenant), seq.known // self.page_size
        seq.arrived_ns = now
        for g, slots in enumerate(self.chains(seq)):
            session = seq.care.session
            session = (session + g) & _LARGEST if session >= 0 else -1
            visit = Visit(seq.request + g, session, tokens, pages, tenant)
            for place in self.store.places:
                place.policy.access(now, slots, visit)
            if self.store.context.writes is not None:
                self.store.context.writes.access(slots)
            if self.prefetches is not None:
                self.prefetches.groups[g].accessed(now, visit.request, g, slots)
        if seq.care is not NO_CARE:
            self._care(seq)

    def end(self, seq: Sequence) -> None:
        """Report the end of a request that `begin` reported; ignore others."""
        if seq.request < 0:
            return
        now, output = self.store.context.now_ns(), max(0, seq.known - seq.prompted)
        for g in range(len(self._windows)):
            for place in self.store.places:
                place.policy.complete(now, seq.request + g, stop=seq.stop, output_tokens=output)
        seq.request = -1
        for follower in list(self.followers):
            follower(seq, seq.prompted // self.page_size, seq.arrived_ns)
        if seq.care.session >= 0 and seq.publishable:
            self._remember(seq, min(seq.length, seq.known) // self.page_size)

    def abort(self, request: int) -> None:
        """Report that an enqueued or begun request will not go on."""
        now = self.store.context.now_ns()
        for g in range(len(self._windows) if request >= 0 else 0):
            for place in self.store.places:
                place.policy.abort(now, request + g)
            if self.prefetches is not None:
                self.prefetches.groups[g].abort(now, request + g)

    def enqueue(self, seq: Sequence) -> int:
        """Report a request that waits to be served; return its number."""
        request, now = self.number(), self.store.context.now_ns()
        for g, slots in enumerate(self.chains(seq)):
            for place in self.store.places:
                place.policy.enqueue(now, request + g, slots)
        return request

    # ---- chains

    def chains(self, seq: Sequence) -> list[Slots]:
        """Return for each group the slots of the prompt's known pages, from the first one on.

        Ghosts are among them. Chains of groups with a sliding window may begin later.
        """
        most, found = seq.known // self.page_size, dict[int, Slots]()
        groups = range(len(self._windows))
        for g in sorted(groups, key=lambda g: self._windows[g] is not None):
            slots = self._known(seq, g, most)
            if self._windows[g] is None:
                most = min(most, len(slots))
            found[g] = as_slots(slots)
        return [found[g] for g in groups]

    def _known(self, seq: Sequence, group: int, most: int) -> list[int]:
        slots = self.store.index.slots(seq.keys(group, most)[:most])
        if self._windows[group] is None:
            return slots[: [*slots, -1].index(-1)]
        return [slot for slot in slots if slot >= 0]

    # ---- how pages should be kept

    def check_lease(self, seq: Sequence) -> None:
        """Check that every policy supports the lease of a request.

        Raises:
            ConfigError: A policy does not.
        """
        if seq.care.lease:
            for place in self.store.places:
                none = as_slots(())
                place.policy.insert(self.store.context.now_ns(), none, none, lease=seq.care.lease)

    def _care(self, seq: Sequence) -> None:
        """Apply a request's session and leases to the known pages of its prompt."""
        if seq.care.session >= 0:
            self._remember(seq, seq.known // self.page_size)
        if not seq.care.lease and not seq.care.retain:
            return
        for g in range(len(self._windows)):
            blocks = list[Block]()
            for page in range(seq.known // self.page_size):
                block = self.store.index.find(seq.key(g, page))
                lease = seq.care.lease_for(page * self.page_size, (page + 1) * self.page_size)
                if block is not None and lease:
                    block.lease = lease
                    blocks.append(block)
            self.store.insert([block for block in blocks if block.page >= 0])
            self.store.writes.write_chosen(self.store.stack.admission.at_once(blocks))
            for number in range(len(self.store.stack.tiers)):
                self.store.stack.insert([b for b in blocks if b.tiers >> number & 1], number)

    # ---- hints

    def hint(self, chains: Iterable[Slots], eta_ns: int, sigma: float) -> int:
        """Report the expected next use of chains, one a group; return the longest one's length."""
        now, longest = self.store.context.now_ns(), 0
        for g, slots in enumerate(chains):
            if len(slots):
                longest = max(longest, len(slots))
                for place in self.store.places:
                    place.policy.hint(now, slots, eta_ns, sigma)
                if self.prefetches is not None:
                    self.prefetches.groups[g].hint(now, g, slots, eta_ns, sigma)
        return longest

    def session(self, session: int) -> list[Slots]:
        """Return the chains of a conversation, as far as they are remembered."""
        keys = self._sessions.get(session, ())
        return [as_slots(self.store.index.chain(key)) for key in keys]

    def _remember(self, seq: Sequence, pages: int) -> None:
        if not pages:
            return
        keys = tuple(self._deepest(seq, g, pages) for g in range(len(self._windows)))
        self._sessions.pop(seq.care.session, None)
        self._sessions[seq.care.session] = keys
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        if len(self._sessions) > FEW_SESSIONS:  # two checks per addition: stale ones never pile up
            for session in list(islice(self._sessions, 2)):
                keys = self._sessions.pop(session)
                if self._known_still(keys):
                    self._sessions[session] = keys

    def _known_still(self, keys: Iterable[bytes]) -> bool:
        return all(self.store.index.slot(key) >= 0 for key in keys)

    def _deepest(self, seq: Sequence, group: int, pages: int) -> bytes:
        known = (seq.key(group, page) for page in range(pages - 1, 0, -1))
        first = seq.key(group, 0)
        return next((key for key in known if self.store.index.slot(key) >= 0), first)

    def purge(self) -> None:
        """Forget the conversations with a last page that is not known any more."""
        known = self._known_still
        self._sessions = {name: keys for name, keys in self._sessions.items() if known(keys)}


MOST_WAITING = 1 << 14
"""Most waiting prompts; beyond it the oldest request is cancelled, as it was never opened."""


class WaitingRequest:
    """A waiting request, as `KV.enqueue` returns it.

    Opening its prompt serves it; `cancel` it if that is not going to happen.

    Attributes:
        request: Number of the request for the policies.
        prefetch: Prefetch of its pages to the device; None if there is none.
    """

    def __init__(self, queue: Queue, key: bytes, request: int) -> None:
        self._queue, self._key, self.request = queue, key, request
        self.prefetch: Prefetch | None = None

    @property
    def waiting(self) -> bool:
        """Return whether the request was neither opened nor cancelled."""
        return self in self._queue.handles(self._key)

    def cancel(self) -> None:
        """Cancel the request. Safe to call again, and after it was opened."""
        self._queue.cancel(self)

    def __repr__(self) -> str:
        return f"<flowkv.WaitingRequest: {'waiting' if self.waiting else 'served or cancelled'}>"


class Queue:
    """Queue of waiting requests, by the last full page of their prompts.

    Args:
        visits: Reports requests to policies.
        guard: The KV lock; `cancel` takes it, callers of the other methods hold it.
    """

    def __init__(self, visits: RequestTracker, guard: Guard) -> None:
        self._visits, self._guard = visits, guard
        self._waiting: dict[bytes, list[WaitingRequest]] = {}

    def push(self, seq: Sequence) -> WaitingRequest:
        """Enqueue a request for the prompt of a sequence, and return it."""
        key = self._name(seq)
        queued = WaitingRequest(self, key, self._visits.enqueue(seq))
        self._waiting.setdefault(key, []).append(queued)
        if len(self._waiting) > MOST_WAITING:
            self.cancel(next(iter(self._waiting.values()))[0])
        return queued

    def pop(self, seq: Sequence) -> int:
        """Remove the request that has waited longest for a prompt; return its number, or -1."""
        if not self._waiting:
            return -1
        handles = self.handles(self._name(seq))
        return self._remove(handles[0]) if handles else -1

    def handles(self, key: bytes) -> list[WaitingRequest]:
        """Return the waiting requests for a prompt with this last page, the oldest first."""
        return self._waiting.get(key, [])

    def cancel(self, queued: WaitingRequest) -> None:
        """Remove a request that will not be served, and cancel its prefetch."""
        with self._guard:
            if queued.waiting:
                self._visits.abort(self._remove(queued))
                if queued.prefetch is not None:
                    queued.prefetch.cancel()

    def purge(self, slot: Callable[[bytes], int]) -> None:
        """Cancel the requests for prompts with an unknown last page, which may be an erased one.

        Args:
            slot: Returns the slot of a key, -1 if it has none.
        """
        for key in [key for key in self._waiting if slot(key) < 0]:
            for queued in list(self.handles(key)):
                self.cancel(queued)

    def _remove(self, queued: WaitingRequest) -> int:
        handles = self._waiting[queued._key]
        handles.remove(queued)
        if not handles:
            del self._waiting[queued._key]
        return queued.request

    def _name(self, seq: Sequence) -> bytes:
        pages = seq.known // seq.chains[0].page_size
        return seq.key(0, pages - 1) if pages else ROOT + seq.tenant


# Traces of a live cache's requests, for the simulator. They hold salted ids only, no tokens.


class Recording(Closing):
    """A trace that is being written, as `KV.record` returns it. Ends with `close`, or the cache.

    A request is written when its sequence is closed: its arrival, the whole pages of its prompt as
    hashes of their keys, lengths, tenant, conversation, and the reason of its end. A failed write
    ends the recording with a warning, and has no other effect.

    Args:
        path: The file to write; an existing one is replaced.
        visits: Reports the requests that end.
        guard: The KV lock.
        page_size: Tokens per page.
        warn: Called with the message of a failed write.

    Raises:
        ConfigError: The file cannot be created.

    Attributes:
        requests: Requests written so far.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        visits: RequestTracker,
        guard: Guard,
        *,
        page_size: int,
        warn: Callable[[str], None],
    ) -> None:
        self.path, self.requests = Path(path), 0
        self._visits, self._guard, self._warn = visits, guard, warn
        try:
            self._writer = Writer(self.path, block_tokens=page_size)
        except OSError as error:
            raise ConfigError(
                f"a trace cannot be written to {self.path} ({error.strerror or error})",
                "Name a file in a directory that can be written",
            ) from error
        with guard:
            visits.followers.append(self.write_request)

    def write_request(self, seq: Sequence, pages: int, arrived_ns: int) -> None:
        """Write a request that ended; see `RequestTracker.followers`."""
        keys = b"".join(seq.key(0, page)[:16] for page in range(pages))
        session = seq.care.session
        try:
            self._writer.request(
                arrived_ns,
                keys,
                input_tokens=seq.prompted,
                output_tokens=max(0, seq.known - seq.prompted),
                session=session.to_bytes(8, "little") if session >= 0 else b"",
                tenant=seq.tenant,
                stop=seq.stop,
            )
            self.requests += 1
        except OSError as error:
            self._leave()
            self._warn(f"The trace {self.path} ends here, as it cannot be written ({error}).")

    def close(self) -> None:
        """End the recording and write the rest. Safe to call again."""
        with self._guard:
            self._leave()

    def _leave(self) -> None:
        if self.write_request in self._visits.followers:
            self._visits.followers.remove(self.write_request)
            try:
                self._writer.close()
            except OSError as error:
                self._warn(f"The end of the trace {self.path} was not written ({error}).")

    def __repr__(self) -> str:
        return f"<flowkv.Recording: {self.requests} requests to {self.path}>"
