"""The page store: residency of blocks on the devices, and eviction for new pages.

Identity and residency are decided here, by one writer at a time (the KV lock); policies only order
slots. `PageStore` has the block on each page, `Eviction` makes pages leave, `Allocator` makes room.
`TierStack` manages the tiers below the devices, and `WriteBack` writes pages to them early.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from itertools import groupby, islice
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.index import Beginnings, Block, PolicyContext, PrefixIndex, chains
from flowkv.cache.mover import CopyMark, Mover
from flowkv.cache.pinned import BATCH_BYTES
from flowkv.cache.pool import AT_ONCE_BYTES, PagePool, SwappedCopies, make_forms
from flowkv.cache.tier_stack import Frame, TierStack
from flowkv.compiled import compiling
from flowkv.core import interrupts
from flowkv.core.clock import Clock
from flowkv.core.config import Config, format_size
from flowkv.core.errors import CapacityError
from flowkv.core.geometry import CODEC_SHIFT, GRANULE_BYTES, GRANULE_MASK, Geometry
from flowkv.core.keys import tenant_salt
from flowkv.observe.events import Bus, Evicted, Warned
from flowkv.policy.admission import WriteAdmission
from flowkv.policy.base import Policy
from flowkv.policy.order.leaf import as_slots
from flowkv.policy.pages import Samples
from flowkv.policy.restore import LoadGate
from flowkv.residency.places import PolicyPlace, device_lease
from flowkv.tiers.base import FrameInfo, Tier, no_room
from flowkv.tiers.host import HostTier

_HOST_BYTES = 1 << 30
_LONGEST_S = 0.1
_MOST_TAILS = 16


def _alike(block: Block, number: int) -> bool:
    """Return whether a tier has a page in the codec that it has on its device."""
    return bool(block.tiers >> number & 1) and (block.codec_on(number) == block.page >> CODEC_SHIFT)


class WriteBack:
    """Writer of pages, tails and states to the tier that lasts. Callers hold the KV lock.

    Args:
        stack: The tiers, and the pages that wait.
        put: Stores device pages in a tier; returns those that it refuses.

    Attributes:
        give_up_late: Gives up overdue loads, so that nothing waits behind them.
    """

    def __init__(self, stack: TierStack, put: Callable[[list[Block], int], list[Block]]) -> None:
        self._stack, self._admission, self._put = stack, stack.admission, put
        self.give_up_late: Callable[[], None] = lambda: None
        self._held_back = False  # until the first page that would not pay

    def write_filled(self, *blocks: Block) -> None:
        """Write pages down that became final, as far as they need not wait to leave memory."""
        some = self._admission.at_once(blocks)
        self._held_back |= len(some) < len(blocks)
        self.write_down(*some)

    def write_chosen(self, blocks: Iterable[Block]) -> None:
        """Write the pages in memory down that write admission would let leave it now."""
        number = self._admission.writes_to()
        if number >= 0 and not self._admission.writes_all:
            self.write_down(
                *self._admission.chosen(b for b in blocks if self._may_write(b, number))
            )

    def write_down(self, *blocks: Block) -> None:
        """Write full pages to the first persistent tier, in the background.

        While that tier is busy or away, the pages wait. Pages of a prompt that was too short to be
        worth storing are written as well, once a longer prompt continues them.
        """
        stack, number = self._stack, self._admission.writes_to()
        final = [b for b in blocks if number >= 0 and b not in stack.provisional]
        fresh = [block for block in final if block.lacked_by(number)]
        worth = self._admission.worth_storing(fresh, number) if fresh else []
        self._held_back |= len(worth) < len(fresh)
        for block in worth:
            chain = [block]
            while self._held_back:
                above = stack.index.find(chain[-1].parent)
                if above is None or not self._may_write(above, number):
                    break
                chain.append(above)
            stack.unwritten |= dict.fromkeys(reversed(chain))
        if stack.unwritten:
            self._write_out()

    def confirm(self) -> None:
        """Write the pages and tails that the finished reading of all weights has proven."""
        stack, number = self._stack, self._admission.writes_to()
        for block, tail in stack.provisional.confirm().items():
            if number < 0:
                stack.settle(block)
            elif tail is not None:
                self._store_or_miss(block, number, *tail)
            elif block.page >= 0:
                if self._may_write(block, number):
                    self.write_filled(block)
            elif block.lacked_by(number) and self._admission.worth_storing(
                self._admission.at_once([block]), number
            ):
                stack.wait(block)

    def _may_write(self, block: Block, number: int) -> bool:
        """Return whether memory has a final page that is neither on a tier nor queued for it."""
        stack = self._stack
        if block.kind != "page" or block in stack.provisional or block in stack.unwritten:
            return False
        if block.page < 0:
            final = block.tiers > 0 and stack.tiers[block.nearest].kind == "host"
        else:
            coming = block.sealable and bool(stack.forms[block.group].ladder.rungs)
            final = block.page >> CODEC_SHIFT > 0 or not coming
        return final and block.lacked_by(number)

    def _write_out(self) -> None:
        """Store waiting pages in the persistent tier, as far as it takes them now.

        A page that has left its device is read from host memory, one block at a time.
        """
        stack, number = self._stack, self._admission.lasting()
        lane = stack.mover.lanes[number] if number >= 0 else None
        while stack.unwritten and lane and not lane.rests:
            waiting, n_bytes = list[Block](), 0
            for block in stack.unwritten:
                if block.lacked_by(number):
                    if not block.somewhere:
                        continue  # its copy below is still on the way
                    own_bytes = stack.copies.nearest_size(block)
                    if not lane.takes(own_bytes, n_bytes) or n_bytes > AT_ONCE_BYTES:
                        break
                    n_bytes += own_bytes
                waiting.append(block)
                if block.page < 0:
                    break
            there = [block for block in waiting if block.page >= 0 and block.lacked_by(number)]
            refused = {*self._put(there, number)}
            for block in waiting:
                lacked = block.lacked_by(number)
                if lacked and block.page >= 0 and block not in refused:
                    continue  # an answer has come, which has counted it, or queued it again
                if lacked and not (block.page < 0 and self._bring(block, number)):
                    if not lane.takes(stack.copies.nearest_size(block)):
                        return  # the tier is away by now: the others wait
                    if block in stack.unwritten and block not in stack.provisional:
                        stack.miss_out(number)
                stack.unwritten.pop(block, None)
            if not waiting or waiting[-1].page < 0:
                break

    def _bring(self, block: Block, number: int) -> bool:
        """Copy a block that waited from memory to its tier; return whether the tier takes it."""
        near = self._stack.tiers[block.nearest].kind == "host"  # others take too long for a request
        return near and bool(self._stack.copy([block], block.nearest, number))

    def put_below(self, blocks: Sequence[Block], serves: Callable[[int], bool]) -> list[Block]:
        """Write pages to the nearest tiers that take them, and wait for the answers.

        Args:
            blocks: Pages on their device.
            serves: Returns whether the tier of a number may be used.

        Returns:
            The blocks that such a tier holds now as they are encoded on their device.
        """
        stack, deadline_s = self._stack, self._stack.mover.deadline_s
        usable = [number for number in range(len(stack.tiers)) if serves(number)]
        for block in blocks:
            for number in usable:
                if block.tiers >> number & 1 and not _alike(block, number):
                    continue  # that copy has another codec
                if stack.still_holds(block, number) or self._puts(block, number):
                    break
        while any(block.going for block in blocks) and self.drain(deadline_s):
            pass
        return [b for b in blocks if not b.going and any(_alike(b, n) for n in usable)]

    def _puts(self, block: Block, number: int) -> bool:
        stack = self._stack
        if stack.mover.lanes[number].rests or not self._admission.storable([block], number):
            return False
        stack.mover.await_room(number, stack.copies.nearest_size(block))
        return not self._put([block], number)

    def drain(self, timeout_s: float = 0.0) -> int:
        """Advance the transfers (see `Mover.drain`) and send waiting pages; return the answers."""
        stack, handled = self._stack, 0
        if stack.mover.lanes and stack.mover.busy:
            handled = stack.mover.drain(timeout_s)
            self.give_up_late()
        if stack.unwritten:
            self._write_out()
        for lane in stack.mover.lanes:
            place = getattr(getattr(lane.tier, "inner", lane.tier), "path", os.sep)
            if lane.stored_bytes and not (lane.tier.writable or os.path.exists(place)):
                stack.troubles.setdefault(lane.tier.name, "its directory was moved or removed")
        if stack.troubles:
            self._say_troubles()
        return handled

    def flush(self, timeout_s: float, now_s: Callable[[], float] = compiling.now_s) -> int:
        """Wait until no page is being stored or waits to be.

        Pages that wait for a tier which is away keep waiting.

        Args:
            timeout_s: Longest wait.
            now_s: Clock of the wait; the default one stands still during compilation.

        Returns:
            Number of pages that still wait, or are on their way.
        """
        stack, lanes, end_s = self._stack, self._stack.mover.lanes, now_s() + timeout_s
        self.drain()
        while stack.mover.storing or (
            stack.unwritten and (n := self._admission.lasting()) >= 0 and not lanes[n].rests
        ):
            left_s = end_s - now_s()
            if left_s <= 0 or interrupts.waiting():
                break
            waiting = len(stack.unwritten)
            self._write_out()
            if len(stack.unwritten) == waiting:
                self.drain(min(left_s, _LONGEST_S))
        return self.unsaved

    @property
    def unsaved(self) -> int:
        """Return the number of pages that wait to be written, or are on their way."""
        return self._stack.mover.storing + len(self._stack.unwritten)

    def store_tail(self, block: Block, number: int, info: FrameInfo, body: memoryview) -> bool:
        """Write a tail to a persistent tier: now, or once its weights are proven; see `confirm`.

        Return False if the tier refuses it.
        """
        provisional = self._stack.provisional
        provisional.add(block)
        if block not in provisional:
            return self._store_or_miss(block, number, info, body)
        provisional.tails[block] = info, body
        if len(provisional.tails) > _MOST_TAILS:
            oldest = next(iter(provisional.tails))
            self._stack.miss_out(number)
            self._stack.delete(oldest)
            self._stack.dismiss(oldest)
        return True

    def _store_or_miss(self, block: Block, number: int, info: FrameInfo, body: memoryview) -> bool:
        refused = self._stack.store([(block, info, body)], number)
        if refused:
            self._stack.miss_out(number)
        self._stack.settle(block)
        return not refused

    def store_state(self, block: Block, info: FrameInfo, body: bytes) -> bool:
        """Store a state on the nearest tier and the first persistent one.

        Without a writable tier, a host tier of 1 GiB is added for states. Return False if no tier
        has room.
        """
        stack = self._stack
        stack.provisional.add(block)
        open_ones = [n for n in range(len(stack.tiers)) if self._admission.storable([block], n)]
        if not open_ones:
            stack.add(HostTier(_HOST_BYTES, name="states"), states_only=True)
            open_ones.append(len(stack.tiers) - 1)
        lasting = [n for n in open_ones if stack.tiers[n].kind != "host"]
        block.n_bytes = len(body)
        numbers = sorted({*open_ones[:1], *lasting[:1]})
        frame = block, info, memoryview(body)
        refused = [stack.store([frame], number) for number in numbers]
        if refused[-1]:
            stack.wait(block)
        stack.settle(block)
        return not all(refused)

    def _say_troubles(self) -> None:
        """Warn once of each tier that cannot store.

        Called between changes of state, as a warning may raise.
        """
        for name, reason in self._stack.troubles.items():
            if reason:
                self._stack.troubles[name] = ""
                code = getattr(errno, reason, None)
                why = reason if code is None else f"{reason}: {os.strerror(code)}"
                self._complain(
                    "store",
                    f"{name} stores no page now ({why}): what it lacks is computed anew after a"
                    ' restart. Make room or mend it; kv.stats()["tiers"] counts such pages as'
                    ' "dropped".',
                )

    def _complain(self, code: str, message: str) -> None:
        self._stack.bus.emit(Warned(code=code, message=message))
        warnings.warn(message, stacklevel=2)

    @property
    def unproven(self) -> int:
        """Return the number of pages that wait for proven weights to be written."""
        return len(self._stack.provisional) if self._admission.writes_to() >= 0 else 0

    def check_room(self) -> None:
        """Warn of each writable tier that can store no page of this model."""
        n_bytes = max(forms.likely_bytes for forms in self._stack.forms)
        for tier in self._stack.tiers:
            if tier.writable and (why := no_room(tier, n_bytes)):
                self._complain(
                    "room",
                    f"{tier.name} can store no page of this model: {why}. Give it more room, a"
                    " larger size, or leave it out.",
                )


Frames = tuple[list[Frame], Callable[[Iterable[Block]], None], CopyMark | None]


def _by_form(blocks: Iterable[Block]) -> dict[tuple[int, int], list[Block]]:
    """Return blocks with a device page by their layer group and codec."""
    found = dict[tuple[int, int], list[Block]]()
    for block in blocks:
        found.setdefault((block.group, block.page >> CODEC_SHIFT), []).append(block)
    return found


# Tails that closed sequences leave on their devices, for prompts that begin with their tokens.


class ClosedTails(dict[Block, list[int]]):
    """Partly filled last pages of closed sequences, the oldest first, with the page of each group.

    No policy orders them: they go before any other page where room is needed. Tiers get copies, see
    `WriteBack.store_tail`. Callers hold the KV lock.

    Args:
        pools: The page pool of each group.
        beginnings: Index of blocks by their tokens.

    Attributes:
        ends: End of the lease of each tail that has one, in nanoseconds.
    """

    def __init__(self, pools: Sequence[PagePool], beginnings: Beginnings) -> None:
        super().__init__()
        self._pools, self._beginnings = pools, beginnings
        self.ends = dict[Block, float]()

    def keep(self, tail: Block, pages: list[int], end_ns: float) -> None:
        """Keep the pages of a tail until their memory is needed, or until `end_ns`."""
        self.outgrow(tail.place, tail.tokens)  # type: ignore[arg-type]
        self[tail] = pages
        self.ends |= {tail: end_ns} if end_ns < inf else {}
        self._beginnings.add(tail)
        for pool, page in zip(self._pools, pages, strict=True):
            pool.share(page)

    def outgrow(self, place: bytes, tokens: NDArray[np.uint32]) -> None:
        """Drop the tails below a place that are prefixes of these tokens; see `Block.place`."""
        near = self._beginnings.near(place, tokens) if self else ()
        self.drop([one for shared, one in near if one in self and shared == len(one.tokens)])  # type: ignore[arg-type]

    def held_bytes(self, pool: PagePool) -> int:
        """Return the bytes of tails in a pool."""
        pages = zip(self._pools, next(iter(self.values()), ()), strict=False)
        return len(self) * sum(one.size_bytes(page) for one, page in pages if one is pool)

    def drop(self, tails: Iterable[Block] | None = None) -> None:
        """Drop tails; None drops all, after an erasure or where content does not match its key."""
        for tail in list(self if tails is None else tails):
            self._beginnings.discard(tail)
            self.ends.pop(tail, None)
            for pool, page in zip(self._pools, self.pop(tail), strict=True):
                pool.release(page)


# Prefetched pages, until they are used or evicted.


class PrefetchedUnused(dict[Block, tuple[int, int]]):
    """Prefetched pages that have not been used yet, by block. Callers hold the KV lock.

    Each use and each unused eviction is reported to the guard of the page's tier of origin, which
    stops prefetching where it costs more than it saves.

    Args:
        mover: Transfers, with a guard for each tier.
        on_leave: Called with each page that left its device unused.
    """

    def __init__(self, mover: Mover, on_leave: Callable[[Block], None]) -> None:
        super().__init__()
        self._mover, self._on_leave = mover, on_leave

    def add(self, block: Block, tier: int, n_bytes: int) -> None:
        """Record a page that a prefetch brought from a tier."""
        self[block] = tier, n_bytes

    def end(self, block: Block, *, used: bool) -> None:
        """Record the first use of a page, or its unused eviction; ignore pages not prefetched."""
        tier, n_bytes = self.pop(block, (-1, 0))
        if 0 <= tier < len(self._mover.lanes):
            lane = self._mover.lanes[tier]
            (lane.guard.used if used else lane.guard.wasted)(lane.clock_ns(), n_bytes)
            if not used:
                self._on_leave(block)


# Pages that leave a device for host memory while no request waits for their room.

_WINDOW_NS = 8 * 10**9
_POOL_SHARE, _TIER_SHARE, _WASTE = 8, 32, 20
"""Greatest part of the pool, and of what a tier has beyond the pools' size, that is held in both;
and of the stored bytes that may be wasted: one part in so many."""


class NextVictims(dict[Block, None]):
    """Pages of one device that its policy has evicted, and that stay until their room is needed.

    The policy chooses them at the end of requests, and of steps behind first tokens. Each has a
    copy in the host tier, or on the way there, so that to free it copies nothing. A use before that
    makes it an ordinary page again.

    Their bytes, with those of pages that were used again and still have their copy, are at most
    those that the device allocated within the last seconds. Older copies of used pages make room
    for new ones; these are wasted, as are those that the tier loses before the page has left. No
    page is copied while too many bytes are wasted. Callers hold the KV lock.

    Args:
        store: The store of the pages.
        device: The device.

    Attributes:
        twice: Pages with a copy made here, and the bytes of each.
        wasted_bytes: Bytes of wasted copies.
    """

    def __init__(self, store: PageStore, device: str) -> None:
        super().__init__()
        self._store, self._pool = store, store.pools[device]
        self._place, self._tier = store.device_places[device], -1
        self._largest = max(one.raw.page_bytes for one in store.forms)
        self.twice, self.wasted_bytes = dict[Block, int](), 0
        self._seen, self._windows = 0, ((0, 0), (0, 0))

    def left(self, *blocks: Block) -> None:
        """Forget blocks that have left the device."""
        for block in blocks:
            block.ahead = False
            self.pop(block, None)
            self.twice.pop(block, None)

    def copy_ahead(self, served: Callable[[], bool] | None) -> None:
        """Evict pages ahead, as many as the last seconds took, as far as the host tier is idle.

        Args:
            served: Returns whether all requests of a step, which just ended, had their first token
                before it; None at the end of a request. Steps leave few pages to a later one.
        """
        store, pool, self._tier = self._store, self._pool, self._store.stack.admission.near()
        if pool.copies is None or pool.allocated == self._seen or self._tier < 0:
            return  # a CPU has its pages in the memory of the host, or all was done last time
        now_ns, lane = store.context.now_ns(), store.stack.mover.lanes[self._tier]
        if now_ns - self._windows[1][0] >= _WINDOW_NS:
            self._windows = self._windows[1], (now_ns, pool.allocated)  # begin, allocated before
        mark = min(pool.allocated - self._windows[0][1], pool.capacity_granules // _POOL_SHARE)
        short = GRANULE_BYTES * (mark + pool.used_granules - pool.capacity_granules)
        if short <= 0 or lane.rests or not all(request.stores for request in lane.schedule):
            return
        if served is not None and (4 * (pool.allocated - self._seen) < mark or not served()):
            return
        short -= sum(map(store.size, self))
        left, count = min(short, self._room(mark * GRANULE_BYTES, short)), 1
        while left >= self._largest:
            n_bytes = count * self._largest
            if not (pool.copies.has_room(n_bytes) and lane.takes(n_bytes)):
                return
            if (found := self._place.evict(now_ns, count)) is None:
                break
            blocks = [store.index.at(slot) for slot in found.tolist()]
            for block in blocks:
                block.ahead, self[block] = True, None
            left -= sum(map(store.size, blocks))
            fresh = [block for block in blocks if block.lacked_by(self._tier)]
            for those in _by_form(blocks).values():  # one may make the tier give up the next ones
                if there := [block for block in those if block.ahead]:
                    store.eviction.leave_together(there, "space", ahead=True)
            fresh = [one for one in fresh if one.page >= 0 and one.going >> self._tier & 1]
            self.twice |= {block: store.size(block) for block in fresh}
            if any(block.page < 0 for block in blocks):
                break
            count = min(BATCH_BYTES, left) // self._largest
        self._seen = pool.allocated

    def _room(self, most: int, wished: int) -> int:
        """Return the bytes that may be copied now; take older copies of used pages back for them.

        Args:
            most: Most bytes in both places.
            wished: Bytes to copy.
        """
        stack, tier, twice, devices = self._store.stack, self._tier, self.twice, self._store.pools
        for block in [one for one in twice if one.lacked_by(tier)]:
            self.wasted_bytes += twice.pop(block)
        beyond = stack.tiers[tier].capacity_bytes // len(devices) - self._pool.capacity_bytes()
        most = min(most, beyond // _TIER_SHARE)
        used = [one for one in twice if not (one in self or one.going or one.kept)]
        held = sum(twice.values())
        while used and held + wished > most:
            held -= twice[used[0]]
            self.wasted_bytes += twice.pop(used[0])
            stack.take_back(used.pop(0), tier)
        stored = stack.mover.lanes[tier].stored_bytes
        return min(most, stored - _WASTE * len(devices) * self.wasted_bytes) - held


# Pages leave the devices for the tiers, or to make room for others.


_BATCH_SHARE, _BATCH_PAGES = 64, 32
"""Pages are evicted in batches of at most one part in 64 of the pool and at most 32 pages, since
one call of the policy costs as much as the choice of several pages."""
_ATTEMPTS = 4


class Eviction:
    """Evictions of pages from their devices, with copies to tiers. Callers hold the KV lock.

    Args:
        store: The pages.
    """

    def __init__(self, store: PageStore) -> None:
        self._store, self._stack = store, store.stack

    def make_room(self, group: int, short: int, *, evicts: bool = True) -> bool:
        """Free some pages of a group's device; return whether there were any to free.

        Args:
            group: Layer group.
            short: Number of its pages that are missing.
            evicts: Whether to evict pages, too, that their policy still orders.
        """
        store, tails = self._store, self._store.tails
        if tails:
            tails.drop(islice(tails, max(short, 1)))
            return True
        device, now_ns = store.devices[group], store.context.now_ns()
        place, granules = store.device_places[device], store.pools[device].capacity_granules
        share = granules // store.forms[group].raw.granules // _BATCH_SHARE
        some = max(short, min(share, _BATCH_PAGES))
        if ahead := _by_form(islice(store.next_victims[device], some)):
            for those in ahead.values():
                store.free_pages(those, "space")
            return True
        for n in dict.fromkeys((some, short, 1)) if evicts else ():
            victims = place.evict(now_ns, n)
            if victims is not None:
                self.leave(store.index.those(victims.tolist()), "space")
                return True
        return False

    def copy_ahead(self, served: Callable[[], bool] | None = None) -> None:
        """Evict pages of each device ahead of their time, see `NextVictims.copy_ahead`."""
        for victims in self._store.next_victims.values():
            victims.copy_ahead(served)

    def expire(self) -> None:
        """Evict blocks from the places where their lease has run out.

        A page in use is forgotten, unless it is pinned or a tier has it: later requests compute it.
        """
        self._relieve(PolicyPlace.expired, "lease")
        store, now_ns = self._store, self._store.context.now_ns()
        store.tails.drop([tail for tail, end_ns in store.tails.ends.items() if end_ns <= now_ns])
        slots = [slot for place in store.device_places.values() for slot in place.overdue]
        used = filter(None, store.index.get_all(slots))
        if late := [b for b in used if not (b.kept or b.tiers or b.going)]:
            store.forget(*late)

    def shed(self) -> None:
        """Evict the blocks of tenants that exceed their quotas."""
        self._relieve(PolicyPlace.surplus, "quota")

    def _relieve(self, chosen: Callable[[PolicyPlace, int], list[int]], reason: str) -> None:
        now_ns, index = self._store.context.now_ns, self._store.index
        for place in self._store.device_places.values():
            self.leave(index.those(chosen(place, now_ns())), reason)
        self._stack.relieve(chosen, reason)

    def leave(self, blocks: Iterable[Block], reason: str) -> None:
        """Evict blocks from their device, a few at a time, and store those that a tier wants.

        A page stays that a load holds when its turn comes, or that has no turn after an error.

        Args:
            blocks: Blocks with a device page that their policy does not order any more.
            reason: Reason in the event `Evicted`. For "space" room in memory is waited for; for
                "lease" nothing is stored.
        """
        store, mover, blocks, waits = self._store, self._stack.mover, [*blocks], reason == "space"
        try:
            for those in _by_form(blocks).values():
                n_bytes, copies = store.size(those[0]), store.pool(those[0].group).copies
                most = max(1, BATCH_BYTES // n_bytes)
                for part in (those[at : at + most] for at in range(0, len(those), most)):
                    need = n_bytes * sum([not (b.tiers | b.going) & 1 for b in part])
                    while waits and need and copies and not copies.has_room(need):
                        waits &= mover.drain(mover.deadline_s) > 0
                    if still := [b for b in part if b.page >= 0 and not b.holds]:
                        self.leave_together(still, reason)
                    mover.drain()
        finally:
            stay = [block for block in blocks if block.page >= 0 and not block.gone]
            store.insert([block for chain in chains(stay) for block in chain])

    def leave_together(self, blocks: list[Block], reason: str, *, ahead: bool = False) -> None:
        """Evict blocks of one form from their device; `ahead` keeps those that lie below."""
        store, stack, n_bytes = self._store, self._stack, self._store.size(blocks[0])
        wanted = [b for b in blocks if not b.going and reason != "lease"]
        takers = stack.takers(wanted, leaves={b for b in wanted if not b.tiers})
        leaving = {block for some in takers.values() for block in some}
        stack.leaving |= leaving
        try:
            with ExitStack() as over:
                going = {n: over.enter_context(self._frames(some, n)) for n, some in takers.items()}
                # Before tiers make room, so that they pass on what they evict of these blocks.
                if not ahead:
                    store.free_pages(blocks, reason)
                for number, (frames, done, mark) in going.items():
                    waits = reason == "space" and not (ahead or stack.admission.outlives(number))
                    refused = stack.store(frames, number, done, mark, waits=waits, leaves=True)
                    if pages := len(frames) - len(refused):
                        stack.demoted("device", number, n_bytes * pages, pages)
        except BaseException:  # pages that left ahead stay where they have no copy
            there = reversed(store.next_victims[store.devices[blocks[0].group]])
            store.insert([block for block in there if not (block.tiers or block.going)])
            raise
        finally:
            stack.leaving -= leaving
            stack.settle(*blocks)

    def store_pages(self, blocks: Iterable[Block], number: int) -> list[Block]:
        """Store device pages in a tier; return those that it refuses."""
        refused = list[Block]()
        for those in _by_form(blocks).values():
            with self._frames(those, number) as (frames, done, mark):
                refused += self._stack.store(frames, number, done, mark)
        return refused

    @contextmanager
    def _frames(self, blocks: Sequence[Block], number: int) -> Iterator[Frames]:
        """Yield the frames of device pages of one form, for a `TierStack.store` in the block.

        Their bytes are copies under way to host memory; on a CPU the pages themselves, which are
        lent until `done` is called, or the block ends without a store under way.
        """
        pool, n_bytes = self._store.pool(blocks[0].group), self._store.size(blocks[0])
        pages, mark = {block: block.page for block in blocks}, None
        infos = self._store.forms[blocks[0].group].describe(blocks)
        known = list[memoryview | None]([None]) * len(blocks)
        if pool.copies is not None:
            where = [page & GRANULE_MASK for page in pages.values()]
            made = pool.copies.digest(where, n_bytes, n_bytes // infos[0].stripe_bytes)
            known = [row.data for row in made.numpy()]
            rows, mark = pool.copies.download(where, n_bytes)
            pages.clear()
        else:
            rows = [pool.page_bytes(page, n_bytes).cpu() for page in pages.values()]
            pool.lend(*pages.values())

        def done(ended: Iterable[Block]) -> None:
            if pages:
                pool.give_back(*[pages.pop(block) for block in ended if block in pages])

        try:
            bodies = [row.numpy().data for row in rows]
            yield [*zip(blocks, infos, bodies, known, strict=True)], done, mark
        finally:
            done([block for block in blocks if not block.going >> number & 1])


class Allocator:
    """Allocation of private pages, with evictions for those missing. Callers hold the KV lock.

    Args:
        store: The pages that may be evicted.
    """

    def __init__(self, store: PageStore) -> None:
        self._store, self._eviction = store, store.eviction

    def room(self, device: str) -> int:
        """Return the granules of a device that are free or idle (neither held nor pinned)."""
        pool = self._store.pools[device]
        idle = self._store.idle[device] + self._store.tails.held_bytes(pool) // GRANULE_BYTES
        return pool.capacity_granules - pool.used_granules + idle

    def lacking(self, counts: Mapping[tuple[int, int], int]) -> dict[str, int]:
        """Return the granules that devices lack for so many pages of each (group, codec).

        Idle granules count as available, and so do those that transfers hold, although some of
        the latter may stay in use.
        """
        store, wanted = self._store, dict.fromkeys(self._store.pools, 0)
        for (g, codec), count in counts.items():
            wanted[store.devices[g]] += count * store.forms[g].layouts[codec].granules
        for device, pool in store.pools.items():
            wanted[device] -= sum(map(pool.size_bytes, pool.lent)) // GRANULE_BYTES
        short = {device: granules - self.room(device) for device, granules in wanted.items()}
        return {device: granules for device, granules in short.items() if granules > 0}

    def require(self, counts: Mapping[tuple[int, int], int]) -> None:
        """Refuse a demand for pages that cannot fit, before anything is evicted for it.

        Args:
            counts: Pages of each (group, codec index).

        Raises:
            CapacityError: Too much of a pool is in use.
        """
        if self.lacking(counts):
            (group, codec), count = max(counts.items(), key=lambda item: item[1])
            raise self._short(group, count, codec)

    def _short(self, group: int, count: int, codec: int) -> CapacityError:
        store, pool = self._store, self._store.pool(group)
        used = (pool.capacity_granules - self.room(store.devices[group])) * GRANULE_BYTES
        page = format_size(store.forms[group].layouts[codec].page_bytes)
        return CapacityError(
            f"{count} pages of {page} do not fit: {format_size(used)} of "
            f"{format_size(pool.capacity_bytes())} are in use by open sequences",
            "Close or suspend sequences, or give the device pool more bytes",
        )

    def allocate(self, group: int, count: int, codec: int = 0) -> list[int]:
        """Return private pages, evicting idle ones where that is needed.

        Args:
            group: Layer group.
            count: Number of pages.
            codec: Index of their codec.

        Raises:
            CapacityError: Too much of the pool is in use.
        """
        pages = self.try_allocate(group, count, codec)
        if pages is None:
            raise self._short(group, count, codec)
        return pages

    def try_allocate(self, group: int, count: int, codec: int = 0) -> list[int] | None:
        """Return private pages like `allocate`, but None if they do not fit."""
        pool, granules = self._store.pool(group), self._store.forms[group].layouts[codec].granules
        mover = self._store.stack.mover
        while (pages := pool.allocate(granules, count, codec)) is None:
            short = count - pool.available(granules)
            leaving = pool.leaving()
            if leaving >= short and mover.await_end():
                continue  # enough pages wait only for their stores to end
            if self._eviction.make_room(group, max(1, short - leaving)):
                continue
            if not mover.storing or not mover.await_end():
                return None
        return pages

    def spare(self, group: int, count: int, codec: int) -> list[int]:
        """Return up to `count` private pages, evicting a few idle ones where pages are missing."""
        pool, granules = self._store.pool(group), self._store.forms[group].layouts[codec].granules
        for _ in range(_ATTEMPTS):  # victims may be of another size
            short = count - pool.available(granules)
            if short <= 0 or not self._eviction.make_room(group, short):
                break
        return self.free(group, count, codec)

    def free(self, group: int, count: int, codec: int) -> list[int]:
        """Return up to `count` private pages; only tails and pages evicted ahead make room."""
        pool, granules = self._store.pool(group), self._store.forms[group].layouts[codec].granules
        while pool.available(granules) < count and self._eviction.make_room(group, 1, evicts=False):
            pass
        return pool.allocate(granules, min(count, pool.available(granules)), codec) or []


# The devices: the block on each page there, and its users.


class PageStore:
    """Blocks on the devices: their pages, users and policies. Callers hold the KV lock.

    Args:
        geometry: The model's layer groups.
        pools: One pool per device name.
        tiers: The stack below them, nearest first.
        policies: `policies(kind, capacity_bytes)` makes the policy of one place.
        clock: Time for the policies.
        bus: Bus that events are emitted on.
        config: The codec of sealed pages (and the lossiest that readers accept, DESIGN D6),
            write-back on or off, and the deadline of a load.
        gate: Rates of loads and steps, from which it decides whether a page can be worth loading.
        sends: Returns whether other processes read the pages, at rates that are unknown here.
        on_drop: Called with slots that no longer name a block.
        on_unused: Called with prefetched pages that left their device unused.

    Raises:
        ConfigError: A layer group cannot have the codec, or two tiers have one name.

    Attributes:
        forms: The codecs and layouts of each group's pages.
        devices: Name of each group's device.
        index: The known blocks.
        lease: Returns the lease of a class on devices.
        context: Time, tenants and costs, shared by the policies of all places.
        idle: Granules of each device whose blocks may be evicted.
        stack: The tiers.
        eviction: What evicts pages from the devices.
        allocator: What makes room for private pages, and returns them.
        writes: What writes pages to the persistent tier.
        next_victims: Each device's pages that no policy orders any more, with a copy below.
        swapped: Pages that suspended sequences need as they are now.
        tails: The tails of closed sequences.
        samples: Restored pages that are to be audited.
        coming: Loads under way (`load.PageLoad`) that have a device page for a block.
    """

    def __init__(  # noqa: PLR0913 - what a store stands on is named where it is made
        self, geometry: Geometry, pools: dict[str, PagePool], tiers: Sequence[Tier], *,
        policies: Callable[[str, int], Policy], clock: Clock, bus: Bus, config: Config,
        gate: LoadGate, sends: Callable[[], bool], on_drop: Callable[[Sequence[int]], None],
        on_unused: Callable[[Block], None],
    ) -> None:  # fmt: skip
        self.geometry, self.pools, self.bus, self._on_drop = geometry, pools, bus, on_drop
        self.forms = make_forms(geometry, config)
        self.overflows, self.defragment_bytes = config.overflow, config.defragment_bytes
        self.index = PrefixIndex(self._drop)
        salts = {tenant_salt(name, config.secret_bytes): n for n, name in enumerate(config.quotas)}
        writes = None if config.admit == "all" else WriteAdmission(config.admit)
        self.context = PolicyContext(self.index, clock, gate, geometry.page_size, salts, writes)
        self.samples, self.lease = Samples(config.audit), lru_cache(partial(device_lease, config))
        self.coming: dict[Block, list[Any]] = {}
        made = [(device, policies("gpu", pool.capacity_bytes())) for device, pool in pools.items()]
        self.device_places = {device: PolicyPlace(device, "gpu", one) for device, one in made}
        self.devices = [group.device for group in geometry.groups]
        self._pools = [pools[device] for device in self.devices]
        self._places = [self.device_places[device] for device in self.devices]
        self._orphans, self.idle = set[Block](), dict.fromkeys(pools, 0)
        self.tails = ClosedTails(self._pools, self.index.beginnings)
        self.swapped = SwappedCopies(self._pools, self.forms)
        self.stack = TierStack(
            self.context, tiers, self.forms, policies=policies, bus=bus, config=config, sends=sends,
            on_forget=self._let_go,
        )  # fmt: skip
        self.eviction = Eviction(self)
        self.allocator = Allocator(self)
        self.writes = WriteBack(self.stack, self.eviction.store_pages)
        self.next_victims = {device: NextVictims(self, device) for device in pools}
        self.prefetched_unused = PrefetchedUnused(self.stack.mover, on_unused)

    def insert(self, blocks: Sequence[Block]) -> None:
        """Insert blocks that became resident on their devices, see `PolicyContext.insert`."""
        for block in [one for one in blocks if one.ahead]:
            block.ahead = False
            del self.next_victims[self.devices[block.group]][block]
        for group, some in groupby(blocks, attrgetter("group")):
            self.context.insert(self._places[group], some, self.size)

    def size(self, block: Block) -> int:
        """Return the bytes of a block's device page."""
        return self.forms[block.group].layouts[block.page >> CODEC_SHIFT].page_bytes

    def keep(self, *blocks: Block) -> None:
        """Protect blocks from eviction in every place until `unkeep`."""
        for block in blocks:
            block.kept += 1
        self._protect(*blocks)

    def unkeep(self, *blocks: Block) -> None:
        """End one `keep` of blocks."""
        for block in blocks:
            block.kept -= 1
        self._protect(*blocks)

    def _protect(self, *blocks: Block) -> None:
        self.stack.protect(*blocks)
        groups = len(self._places)  # blocks of others have no page
        self._guard(*[block for block in blocks if not block.gone and block.group < groups])

    def _let_go(self, block: Block) -> None:
        if block.group < len(self._places):
            self._places[block.group].let_go(block.slot)
            if block.ahead:
                self.free_pages([block], "space")

    def _drop(self, slots: Sequence[int]) -> None:
        for place in self.places:
            place.forget(slots)
        if self.context.writes is not None:
            self.context.writes.forget(as_slots(slots))
        self._on_drop(slots)

    def pool(self, group: int) -> PagePool:
        """Return the page pool of a group's device."""
        return self._pools[group]

    def views(self, group: int, page: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first tokens of a raw page, views `[layers, heads, count, dim]`."""
        forms = self.forms[group]
        return forms.views(self.pool(group).page_bytes(page, forms.raw.page_bytes), count)

    def find(self, key: bytes) -> Block | None:
        """Return the block of a key if it is stored or on its way, and exact enough; else None."""
        return self.find_all([key])[0]

    def find_all(self, keys: Iterable[bytes]) -> list[Block | None]:
        """Return what `find` returns for each key."""
        found, most = map(self.index.find, keys), self.stack.fidelity
        return [
            b if b and (b.page >= 0 or b.tiers or b.going) and b.fidelity <= most else None
            for b in found
        ]

    def touch(self, blocks: Sequence[Block]) -> None:
        """Record an access to these blocks, root to leaf, with every policy.

        Accesses of a model's requests go through `flowkv.cache.requests` instead.
        """
        now, slots = self.context.now_ns(), as_slots([block.slot for block in blocks])
        for place in self.places:
            place.policy.access(now, slots)
        if self.context.writes is not None:
            self.context.writes.access(slots)

    @property
    def places(self) -> Iterable[PolicyPlace]:
        """Return all places that have a policy, nearest first."""
        return (*self.device_places.values(), *self.stack.places)

    def blocks_on(self, device: str) -> list[Block]:
        """Return the blocks with a page on a device, forgotten ones in use included."""
        groups = {g for g, name in enumerate(self.devices) if name == device}
        known = [*self.index, *self._orphans]
        return [block for block in known if block.page >= 0 and block.group in groups]

    def hold(self, *blocks: Block) -> None:
        """Hold the device pages of blocks in place until `drop`."""
        unheld = [block for block in blocks if not (block.holds or block.gone)]
        pages = dict[int, list[int]]()
        for block in blocks:
            pages.setdefault(block.group, []).append(block.page)
            if self.prefetched_unused:
                self.prefetched_unused.end(block, used=True)
            block.holds += 1
        for group, those in pages.items():
            self._pools[group].share(*those)
        self._guard(*unheld)

    def drop(self, *blocks: Block) -> None:
        """End one `hold` of blocks; a forgotten block loses its page with the last one.

        Args:
            blocks: The blocks, all of one layer group, and each of them once.

        Raises:
            StateError: A block has no page.
        """
        pages = [block.page for block in blocks]
        for block in blocks:
            block.holds -= 1
            if block.gone and not block.holds:
                self._orphans.discard(block)
                block.page = -1
        self._guard(*[block for block in blocks if not (block.holds or block.gone)])
        if blocks:
            self._pools[blocks[0].group].release(*pages)

    def pin(self, block: Block, pinned: bool) -> None:
        """Pin a block against eviction in every place, or unpin it."""
        if pinned != block.pinned:
            block.pinned = pinned
            (self.keep if pinned else self.unkeep)(block)

    def _guard(self, *blocks: Block) -> None:
        self.insert([one for one in blocks if one.ahead and (one.holds or one.kept)])
        slots = dict[tuple[int, bool], list[int]]()
        for block in blocks:
            held = block.holds > 0 or block.kept > 0
            slots.setdefault((block.group, held), []).append(block.slot)
        for (group, held), those in slots.items():
            place = self._places[group]
            (place.hold if held else place.let_go)(*those)
        self._recount(*blocks)

    def _recount(self, *blocks: Block) -> None:
        """Update the count of idle granules after changes of blocks' pages, holds or pins."""
        for block in blocks:
            now = 0
            if block.page >= 0 and not (block.holds or block.kept or block.gone):
                now = self.forms[block.group].layouts[block.page >> CODEC_SHIFT].granules
            if now != block.idle:
                self.idle[self.devices[block.group]] += now - block.idle
                block.idle = now

    def change(self, block: Block, page: int) -> None:
        """Set a block's device page, -1 for none; suspended sequences get a copy of the old one."""
        self.swapped.copy_out(block)
        block.page = page
        self._recount(block)

    def join(self) -> None:
        """Order all later computation on the devices after the copies to them."""
        for pool in self.pools.values():
            if pool.copies is not None:
                pool.copies.join()

    def free_pages(self, blocks: Sequence[Block], reason: str) -> None:
        """Free the device pages of blocks of one form."""
        pages, n_bytes = [block.page for block in blocks], len(blocks) * self.size(blocks[0])
        for block in blocks if self.swapped else ():
            self.swapped.copy_out(block)
        for block in blocks:
            if self.prefetched_unused:
                self.prefetched_unused.end(block, used=False)
            block.page = -1
        self.next_victims[self.devices[blocks[0].group]].left(*blocks)
        self._recount(*blocks)
        self._pools[blocks[0].group].release(*pages)
        self.bus.emit(Evicted(tier="device", pages=len(pages), n_bytes=n_bytes, reason=reason))

    def publish_held(self, group: int, pages: Mapping[Block, int]) -> None:
        """Publish private pages of a sequence that keeps using them, and hold each for it."""
        place, pool = self._places[group], self.pool(group)
        for block, page in pages.items():
            pool.share(page)
            block.page = page
            block.holds += 1
            place.hold(block.slot)
            self.stack.provisional.add(block)

    def forget(self, *blocks: Block) -> None:
        """Delete blocks everywhere; open sequences keep their own use of the pages."""
        for block in blocks:
            self.stack.unwritten.pop(block, None)
        self.stack.mover.retract({block.key for block in blocks})
        for block in blocks:
            if not block.gone:
                self._forget(block)

    def _forget(self, block: Block) -> None:
        self.stack.delete(block)
        self.prefetched_unused.end(block, used=False)
        page = block.page
        if page >= 0:
            self._places[block.group].remove(block)
            self.next_victims[self.devices[block.group]].left(block)
            self.swapped.copy_out(block)
            if block.holds:
                self._orphans.add(block)
            else:
                block.page = -1
            self.pool(block.group).release(page)
        self.stack.dismiss(block)
        self._recount(block)
