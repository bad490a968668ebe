"""`Ledger`: identity, residency, pins and fills of blocks, for drivers without their own index.

A ledger numbers blocks, records the places that hold each of them, and evicts by one policy per
place: so a simulator, or an engine's plug-in, only passes it requests. Pure, as policies are: no
I/O, no clock, no randomness; equal calls give equal answers.

The first place is the fastest. A used block is in the first place afterwards, if it fits, and its
copies in slower places stay there. Victims of the first place go to the next one that lacks and
admits them; those of a slower place likewise, unless the first place or one below has them. A place
makes room before they come. These are the decisions of a cache with tiers (`flowkv.cache`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.admission import WriteAdmission
from flowkv.policy.base import NO_SLOTS, Lease, Policy, Slots, Visit, counts_pins
from flowkv.policy.order.compiled import SLOT_LIMIT
from flowkv.policy.order.leaf import as_slots
from flowkv.policy.tenants import Tenants
from flowkv.residency import blocks as at
from flowkv.residency.blocks import Ids

__all__ = ["PLAIN", "Ledger", "Meta", "Move", "Place", "Plan"]


# One place of a ledger: a policy, its room, and its optional abilities.


class Place(NamedTuple):
    """A place for blocks.

    Attributes:
        policy: A fresh policy, used by this place alone.
        capacity_bytes: Capacity of the place.
        lasts: Whether the process may end before it. Computed blocks are written at once to the
            first place that lasts; with write admission, the chosen ones when they leave memory.
    """

    policy: Policy
    capacity_bytes: int
    lasts: bool = False


class Move(NamedTuple):
    """A copy of blocks from one place to another, or their removal from a place.

    Attributes:
        slots: The blocks, in the order of the move.
        source: Number of the place that they are copied or removed from.
        target: Number of the place that they are copied to; -1 for a removal.
    """

    slots: Slots
    source: int
    target: int


class Terms(NamedTuple):
    """Terms of a block for its policy, besides its place in the tree."""

    n_bytes: int = 1
    cost_ns: int = 0
    lease: str | Lease = ""
    tenant: int = 0


class Shelf:
    """Ledger's view of a place: its policy, capacity and abilities.

    Args:
        place: The policy and its capacity.
        number: Number of the place in the ledger.
    """

    def __init__(self, place: Place, number: int) -> None:
        policy = place.policy
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise ConfigError(
                f"the policy of place {number} is {policy!r}, not a Policy object",
                "Pass Place(make_policy(name), capacity_bytes)",
            )
        self.policy = policy
        self.number, self.lasts = number, place.lasts
        self.used_at = at.USED + number
        self.resize(place.capacity_bytes)
        self.shed = policy.shed if isinstance(policy, Tenants) else None
        self.pins = counts_pins(policy)

    def resize(self, capacity_bytes: int) -> None:
        """Set the capacity; the ledger then evicts the surplus."""
        if capacity_bytes < 0:
            raise ConfigError(
                f"place {self.number} cannot hold {capacity_bytes} bytes", "Pass 0 bytes or more"
            )
        if isinstance(self.policy, Tenants) and self.policy.reserved_bytes > capacity_bytes:
            raise ConfigError(
                f"tenants have {self.policy.reserved_bytes} bytes in reserve in place "
                f"{self.number}, which holds {capacity_bytes}",
                "Lower the reserves, or give the place more room",
            )
        self.capacity = int(capacity_bytes)

    def victims(self, now_ns: int, n: int, protected: Collection[int]) -> Slots:
        """Return up to `n` victims; fewer, or none, where the policy has no more."""
        while n > 0:
            got = self.policy.evict(now_ns, n, protected)
            if got is not None:
                if len(got) != n:
                    raise StateError(
                        f"policy {self.policy.name!r} returned {len(got)} victims instead of {n}",
                        "Check it with flowkv.testing.check_policy",
                    )
                return got
            n //= 2
        return np.empty(0, np.int64)


# Arrival and departure of blocks in a ledger's places: room, victims, demotion, ghosts.

LEAST_GHOSTS = 1 << 16
GHOSTS_PER_RESIDENT = 4
GHOSTS_AT_ONCE = 32  # one part in 32 of the bound is forgotten in one call
FIRST_CAPACITY = 1024
FIRST_TIME = -(1 << 61)

TERMS = np.dtype([("cost_ns", np.int64), ("lease", np.int32), ("tenant", np.int32)])


# A request's input to a ledger, and the resulting plan.


class Meta(NamedTuple):
    """Facts about a request and its blocks; every field may be left out.

    Attributes:
        session: See `Visit.session`.
        tokens: Input tokens.
        n_bytes: Bytes of each new block; 0 for the ledger's `block_bytes`.
        cost_ns: Time to compute each block anew; 0 if unknown.
        lease: Lease class of the new blocks, or a lease.
        chained: Whether each block is the parent of the next; not so for weights or memo rows,
            of which any one may be used without the others.
        tenant: Tenant for the policies, where it is not the namespace; -1 for that.
    """

    session: int = -1
    tokens: int = 0
    n_bytes: int = 0
    cost_ns: int = 0
    lease: str | Lease = ""
    chained: bool = True
    tenant: int = -1


PLAIN = Meta()


class Plan(NamedTuple):
    """The moves to make for a request. The arrays change at the ledger's next call.

    Attributes:
        hits: Leading blocks that can be read.
        slots: i8 [n], slots of all its blocks.
        sources: i1 [n], the fastest place in which each can be read; -1: nowhere, compute it;
            -2: another request is bringing it.
        kept: Leading blocks that are, or will be, in the first place. Fewer than `n` where the
            place has too little room for the request.
        moves: Copies and removals to make, in this order, before the first place is written.
    """

    hits: int
    slots: Slots
    sources: NDArray[np.int8]
    kept: int
    moves: Sequence[Move]


def _computed(sources: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Return which blocks behind a request's hits it computes: those in slower places as well."""
    return (sources != 0) & (sources != at.IN_FLIGHT)


UNNAMED = 1 << 61  # first number of requests that have none
MASK = (1 << 64) - 1


class Ledger:
    """Index of the blocks in several places. `now_ns` is clamped, as in `Policy`.

    Args:
        places: Policies and their capacities, fastest first; eight at most.
        block_bytes: Bytes of a block, unless `Meta` gives them.
        ghosts: Most blocks that lie nowhere and stay known nevertheless, the oldest forgotten
            first. By default four times as many as are resident, and 65,536 at least.
        seed: Seed of the table of ids; changes no decision. Keep it secret where strangers choose
            ids.
        admission: Chooses the blocks that leave memory for places that last; all by default.

    Raises:
        ConfigError: If there is no place, or too many, or a value is out of range.

    Attributes:
        declined: Blocks that left memory and that write admission declined.
    """

    def __init__(
        self,
        places: Iterable[Place],
        *,
        block_bytes: int = 1,
        ghosts: int | None = None,
        seed: int = 0,
        admission: WriteAdmission | None = None,
    ) -> None:
        self._shelves = [Shelf(place, k) for k, place in enumerate(places)]
        if not 1 <= len(self._shelves) <= at.MAX_PLACES:
            raise ConfigError(
                f"a ledger cannot have {len(self._shelves)} places", f"Use 1 to {at.MAX_PLACES}"
            )
        if block_bytes < 1 or (ghosts is not None and ghosts < 0):
            raise ConfigError(
                f"block_bytes={block_bytes} or ghosts={ghosts} is out of range",
                "Use block_bytes of 1 or more, and ghosts of 0 or more",
            )
        self.block_bytes = block_bytes
        self._ghosts, self._admission, self.declined = ghosts, admission, 0
        self._alone = len(self._shelves) == 1
        self._clock = FIRST_TIME
        self._moves: list[Move] = []
        self._state = np.zeros(at.STATE_SIZE, np.int64)
        self._state[at.FREE] = -1
        self._state[at.LARGEST] = 1
        self._blocks = np.zeros(0, at.BLOCK)
        self._terms = np.zeros(0, TERMS)  # used only with several places
        self._leases: list[str | Lease] = [""]
        self._buckets, self._mix = at.buckets_for(1), at.factors(seed)
        self._grow(FIRST_CAPACITY)
        self._widen(64)
        self._names: dict[bytes, int] = {}
        self._spaces: list[int] = []
        self._generations: list[int] = []
        self._next_space = 0
        self._unnamed = UNNAMED
        self._live: dict[int, tuple[Slots, Slots]] = {}

    def _grow(self, room: int) -> None:
        """Make room for slots below `room`: doubles, so that growing costs O(1) per slot."""
        old = len(self._blocks)
        new = min(max(room, 2 * old), SLOT_LIMIT)
        if room > new:
            raise ConfigError(
                f"a ledger cannot hold {room} blocks, only {SLOT_LIMIT}", "Pass a smaller ghosts="
            )
        blocks = np.append(self._blocks, np.zeros(new - old, at.BLOCK))
        blocks["space"][old:] = -1
        buckets = at.buckets_for(new)
        at.rehash(self._buckets, buckets)
        self._blocks, self._buckets = blocks, buckets
        self._index = blocks, buckets, self._mix, self._state
        if not self._alone:
            self._terms = np.append(self._terms, np.zeros(new - old, TERMS))

    def _widen(self, n: int) -> None:
        """Make room in the buffers for requests of `n` blocks."""
        self._widest = 2 * n
        self._rows = np.empty((4, 2 * n), np.int64)  # a chain, and the three outputs of `land`
        self._sources = np.empty(2 * n, np.int8)
        self._out = self._rows[1:]

    def _land(self, now: int, k: int, slots: Slots, terms: Terms, flying: bool = False) -> int:
        """Give blocks room in a place and insert the new ones in its policy; return how many."""
        if len(slots) > self._widest:
            self._widen(len(slots))
        said = (k, terms.n_bytes, int(flying))
        n = int(at.land(self._blocks, self._state, slots, said, self._out))
        if n:
            new, parents = self._out[0, :n], self._out[1, :n]
            if self._admission is not None:
                self._admission.insert(new, parents)
            self._shelves[k].policy.insert(now, new, parents, **terms._asdict())
            if not self._alone:
                if terms.lease not in self._leases:
                    self._leases.append(terms.lease)
                lease = self._leases.index(terms.lease)
                self._terms[new] = (terms.cost_ns, lease, terms.tenant)
        return n

    def _bring(self, now: int, k: int, slots: Slots, flying: bool = False) -> None:
        """Give known blocks, root to leaf, room in a place on their former terms."""
        size, kept = self._blocks["bytes"][slots], self._terms[slots]
        other = self._blocks["parent"][slots[1:]] != slots[:-1]  # a chain begins a call
        cuts = np.flatnonzero((size[1:] != size[:-1]) | (kept[1:] != kept[:-1]) | other) + 1
        for first, last in zip([0, *cuts], [*cuts, len(slots)], strict=True):
            cost, lease, tenant = kept[first].item()
            terms = Terms(int(size[first]), cost, self._leases[lease], tenant)
            self._land(now, k, slots[first:last], terms, flying)

    def _advance(self, now_ns: int) -> int:
        """Advance the clock, never backwards, and return the time.

        Blocks with expired leases are removed; pinned ones leave with their last pin.
        """
        self._clock = now = max(now_ns, self._clock)
        for shelf in self._shelves:
            run_out = as_slots(shelf.policy.expired(now))
            if len(run_out):
                gone = np.empty(len(run_out), np.int64)
                n = at.expire(self._blocks, self._state, shelf.number, run_out, gone)
                if n:
                    shelf.policy.remove(gone[:n])
                    self._moves.append(Move(gone[:n], shelf.number, -1))
        return now

    def _give_up(self, now: int, k: int, victims: Slots) -> None:
        """Evict a policy's victims from a place, demoting those that live caches demote.

        Raises:
            StateError: A victim is not in the place, or named twice: the policy is wrong.
        """
        victims, blocks = as_slots(victims), self._blocks
        if not at.held(blocks, k, victims):
            raise StateError(
                f"policy {self._shelves[k].policy.name!r} gave up blocks that do not lie in place "
                f"{k}, or one of them twice: {victims[:8].tolist()}",
                "Check it with flowkv.testing.check_policy",
            )
        at.leave(blocks, self._state, k, victims)
        left = victims
        if k:  # those in the first place, or below this one, need no other
            left = victims[blocks["here"][victims] & np.uint8((1 | -2 << k) & 0xFF) == 0]
        for shelf in self._shelves[k + 1 :]:
            left = self._lacking(shelf, left)
            if len(left) and shelf.lasts and self._admission and not self._shelves[k].lasts:
                chosen = self._admission.depart(left)
                self.declined += len(left) - int(np.count_nonzero(chosen))
                left = left[chosen]
            if not len(left):
                break
            admitted = np.asarray(shelf.policy.admit(now, left))
            if admitted.dtype != np.bool_ or admitted.shape != left.shape:
                raise StateError(
                    f"policy {shelf.policy.name!r} admitted {admitted.dtype} "
                    f"{list(admitted.shape)} of {len(left)} blocks",
                    "Answer admit() with one bool for each block",
                )
            self._store(now, k, shelf, left[admitted])
            left = left[~admitted]
        self._moves.append(Move(victims, k, -1))

    def _lacking(self, shelf: Shelf, slots: Slots) -> Slots:
        """Return the blocks that are not in a place."""
        return slots[self._blocks["here"][slots] >> shelf.number & 1 == 0]

    def _write(self, now: int, slots: Slots) -> None:
        """Write computed blocks to the first place that lasts, unless write admission chooses."""
        if self._admission is None:
            for shelf in [shelf for shelf in self._shelves[1:] if shelf.lasts][:1]:
                once = np.sort(np.unique(slots, return_index=True)[1])  # of an unchained request
                self._store(now, 0, shelf, self._lacking(shelf, slots[once]))

    def _store(self, now: int, k: int, shelf: Shelf, slots: Slots) -> None:
        """Copy blocks from place `k` to a slower one, one by one if not all of them find room."""
        sizes = self._blocks["bytes"][slots]
        whole = not len(slots) or self._make_room(now, shelf, int(sizes.sum()))
        for some, size in [(slots, 0)] if whole else zip(slots[:, None], sizes, strict=True):
            if len(some) and (whole or self._make_room(now, shelf, int(size))):
                chain = np.empty(len(some), np.int64)
                at.chains(self._blocks, shelf.number, some, chain)
                self._bring(now, shelf.number, chain)
                self._moves.append(Move(some, k, shelf.number))

    def _make_room(self, now: int, shelf: Shelf, need: int) -> bool:
        """Evict from a place until so many bytes are free; return whether they are."""
        state = self._state
        while need <= shelf.capacity:
            over = int(state[shelf.used_at]) + need - shelf.capacity
            if over <= 0:
                return True
            n = -(-over // int(state[at.LARGEST]))
            victims = shelf.victims(now, n, self._protected(shelf))
            if not len(victims):
                break
            self._give_up(now, shelf.number, victims)
        return False

    def _protected(self, shelf: Shelf) -> Slots:
        """Return the pinned blocks of a place, for a policy that does not track pins itself."""
        if shelf.pins:
            return NO_SLOTS
        known, k = self._blocks[: self._state[at.FRESH]], shelf.number
        return as_slots(np.flatnonzero((known["pins"] > 0) & (known["here"] >> k & 1 == 1)))

    def _pin(self, slots: Slots) -> None:
        at.pin(self._blocks, self._state, slots)
        for shelf in self._shelves:
            if shelf.pins:
                shelf.policy.pin(slots)

    def _unpin(self, now: int, slots: Slots, done: bool) -> None:
        """Unpin blocks once; blocks that did not arrive, or expired meanwhile, leave.

        The caller then evicts what was pinned beyond a place's room.
        """
        if len(slots) > self._widest:
            self._widen(len(slots))
        n = at.unpin(self._blocks, self._state, slots, done, self._out)
        left = self._out[:, :n].copy()
        for shelf in self._shelves:
            if shelf.pins:
                shelf.policy.unpin(slots)
            if n:
                gone = left[0, (left[1] >> shelf.number & 1) == 1]
                if len(gone):
                    shelf.policy.remove(gone)
                    self._moves.append(Move(gone, shelf.number, -1))

    def _overflow(self, now: int, landed: Slots) -> Slots:
        """Make room in the first place for what `land` wrote; return those beyond it."""
        first, used = self._shelves[0], self._state
        if used[first.used_at] <= first.capacity:
            return NO_SLOTS
        fresh = landed[0, landed[2] == 1]
        self._make_room(now, first, 0)
        if used[first.used_at] <= first.capacity:
            return NO_SLOTS
        fresh = fresh[self._blocks["here"][fresh] & 1 == 1]  # others' reserves and pins
        return fresh[self._shrink(0, fresh) :]

    def _shrink(self, k: int, fresh: Slots) -> int:
        """Remove the last of the just landed blocks until the rest fits; return how many stay."""
        shelf, n = self._shelves[k], len(fresh)
        while n and self._state[shelf.used_at] > shelf.capacity:
            n -= 1
            shelf.policy.remove(fresh[n : n + 1])
            at.leave(self._blocks, self._state, k, fresh[n : n + 1])
        return n

    @property
    def ghost_bound(self) -> int:
        """Return the most ghosts that stay after a call."""
        if self._ghosts is not None:
            return self._ghosts
        return max(LEAST_GHOSTS, GHOSTS_PER_RESIDENT * int(self._state[at.RESIDENT]))

    def _end(self, now: int) -> list[Move]:
        """End pins: evict what exceeds a place, or limits of tenants; return the moves."""
        for shelf in self._shelves:
            self._make_room(now, shelf, 0)
            if shelf.shed and len(victims := shelf.shed(now, self._protected(shelf))):
                self._give_up(now, shelf.number, victims)
        return self._flush()

    def _flush(self) -> list[Move]:
        """End a call: keep the bound of ghosts, and return the moves."""
        bound = self.ghost_bound
        if self._state[at.GHOSTS] > bound:
            bound -= bound // GHOSTS_AT_ONCE
            out = np.empty(int(self._state[at.GHOSTS]) - bound, np.int64)
            at.lay_ghosts(*self._index, bound, out)
            for shelf in self._shelves:
                shelf.policy.forget(out)
            if self._admission is not None:
                self._admission.forget(out)
        moves, self._moves = self._moves, []
        return moves

    def namespace(self, name: bytes, generation: int = 0) -> int:
        """Return the number of a namespace: of a tenant, model, adapter, or all of them.

        Ids of two namespaces are never the same block. Policies get the number as `tenant`.

        Args:
            name: Any bytes.
            generation: Blocks stored under a lower generation become stale, by one O(1) call.

        Raises:
            ConfigError: If the namespace has a higher generation already.
        """
        number = self._names.setdefault(name, len(self._spaces))
        if number == len(self._spaces):
            self._spaces.append(self._next_space)
            self._generations.append(generation)
            self._next_space += 1
        elif generation > self._generations[number]:
            self._generations[number] = generation
            self.invalidate(self._clock, number)
        elif generation < self._generations[number]:
            raise ConfigError(
                f"namespace {name!r} has generation {self._generations[number]} already, "
                f"above {generation}",
                "Increase the generation with each change",
            )
        return number

    def invalidate(self, now_ns: int, namespace: int) -> None:
        """Make all blocks of a namespace stale, in O(1); policies evict them in time."""
        now = self._advance(now_ns)
        self._spaces[namespace] = self._next_space
        self._next_space += 1
        for shelf in self._shelves:
            shelf.policy.invalidate(now, namespace)

    def lookup(self, namespace: int, ids: Ids, *, chained: bool = True) -> int:
        """Return the number of leading blocks that can be read now, without any effect."""
        space = self._spaces[namespace]
        return int(at.run_of(*self._index[:3], at.as_ids(ids), space, chained))

    def serve(
        self,
        now_ns: int,
        namespace: int,
        ids: Ids,
        meta: Meta = PLAIN,
        *,
        request: int = -1,
        stop: int = 0,
        output_tokens: int = 0,
    ) -> Plan:
        """Serve a request that takes no time: `begin` and `complete` in one.

        One difference: all its blocks enter the first place, and the surplus leaves only
        afterwards. Its own blocks may be victims, so that a policy can decline to keep them; so
        make its moves once they are there.

        Args:
            now_ns: Time.
            namespace: Namespace of the blocks.
            ids: u64 [n, 2], root to leaf.
            meta: Further facts about the request.
            request: Its number, if it has one.
            stop: Reason why its response ended; see `flowkv.policy.base`.
            output_tokens: Tokens of the response.
        """
        now = self._advance(now_ns)
        if request < 0:
            request = self._unnamed = self._unnamed + 1
        terms = self._terms_of(meta, namespace)
        chain, sources, hits = self._follow(now, request, namespace, ids, meta, terms.tenant)
        n = self._land(now, 0, chain, terms)
        landed = self._out[:, :n]
        if not self._alone:
            landed = landed.copy()  # arrivals in the next place use the buffer, too
            self._write(now, chain[hits:][_computed(sources[hits:])])
        for shelf in self._shelves:
            shelf.policy.complete(now, request, stop=stop, output_tokens=output_tokens)
        declined = self._overflow(now, landed)
        if len(declined):
            self._moves.append(Move(declined, 0, -1))
        return Plan(hits, chain, sources, len(chain), self._end(now))

    def begin(
        self, now_ns: int, request: int, namespace: int, ids: Ids, meta: Meta = PLAIN
    ) -> Plan:
        """Begin a request, and pin its blocks until `complete` or `abort`.

        Args:
            now_ns: Time.
            request: Its number, 0 or more.
            namespace: Namespace of the blocks.
            ids: u64 [n, 2], root to leaf.
            meta: Further facts about the request.

        Raises:
            StateError: If a request of this number is under way.
        """
        if request in self._live or request < 0:
            raise StateError(f"request {request} is under way", "Number requests from 0 upwards")
        now = self._advance(now_ns)
        terms = self._terms_of(meta, namespace)
        row, sources, hits = self._follow(now, request, namespace, ids, meta, terms.tenant)
        chain = row.copy()
        self._pin(chain)
        first, size, self._live[request] = self._shelves[0], terms.n_bytes, (chain, NO_SLOTS)
        free_bytes = first.capacity - int(self._state[at.PINNED])
        kept = int(at.fitting(self._blocks, chain, 0, size, free_bytes))
        loaded = 0 if self._alone else min(hits, kept)
        for part in (chain[:loaded], chain[loaded:kept])[loaded == 0 :]:  # the loaded ones first
            self._make_room(now, first, int(at.needed(self._blocks, part, 0, size)))
            n = self._land(now, 0, part, terms, flying=True)
            declined = self._overflow(now, self._out[:, :n])
            if len(declined):
                kept = int(np.flatnonzero(chain == declined[0])[0])
                break
        self._live[request] = chain, chain[hits:kept][_computed(sources[hits:kept])]
        return Plan(hits, chain, sources, kept, self._flush())

    def complete(
        self, now_ns: int, request: int, *, stop: int = 0, output_tokens: int = 0
    ) -> Sequence[Move]:
        """End a request; the blocks that it was to bring are there.

        Raises:
            StateError: If no request of this number is under way.
        """
        if request not in self._live:
            raise StateError(f"request {request} is not under way", "Begin it first")
        self._clock = now = max(now_ns, self._clock)
        chain, computed = self._live.pop(request)
        self._unpin(now, chain, done=True)
        self._write(now, computed[self._blocks["here"][computed] & 1 == 1])
        for shelf in self._shelves:
            shelf.policy.complete(now, request, stop=stop, output_tokens=output_tokens)
        return self._end(now)

    def abort(self, now_ns: int, request: int) -> Sequence[Move]:
        """End a begun request that will not go on; the blocks that it did not bring leave."""
        now = self._advance(now_ns)
        for shelf in self._shelves:
            shelf.policy.abort(now, request)
        if request in self._live:
            self._unpin(now, self._live.pop(request)[0], done=False)
        return self._end(now)

    def tick(self, now_ns: int) -> Sequence[Move]:
        """Advance the time and remove expired blocks, as all deciding calls but `complete` do."""
        self._advance(now_ns)
        return self._flush()

    def pin(self, namespace: int, ids: Ids) -> Slots:
        """Pin the known leading blocks of a chain, and return their slots for `unpin`; nests."""
        out = np.empty(len(ids), np.int64)
        n = at.known_of(*self._index[:3], at.as_ids(ids), self._spaces[namespace], out)
        self._pin(out[:n])
        return out[:n]

    def unpin(self, now_ns: int, slots: Slots) -> Sequence[Move]:
        """End one `pin` of these slots.

        Raises:
            StateError: Not all of the slots are pinned.
        """
        slots, pins = as_slots(slots), self._blocks["pins"][: self._state[at.FRESH]]
        here = slots[(slots >= 0) & (slots < len(pins))]
        if len(here) != len(slots) or (pins[here] <= 0).any():
            raise StateError(
                f"blocks {slots[:8].tolist()} are not all pinned", "Pass what pin() returned, once"
            )
        self._unpin(now := self._advance(now_ns), slots, done=False)
        return self._end(now)

    def resize(self, now_ns: int, place: int, capacity_bytes: int) -> Sequence[Move]:
        """Change the capacity of a place. Pinned blocks stay, even if they exceed it."""
        now = self._advance(now_ns)
        self._shelves[place].resize(capacity_bytes)
        self._make_room(now, self._shelves[place], 0)
        return self._flush()

    def digest(self) -> int:
        """Return a 64-bit hash of every decision so far, those of the policies included."""
        value = int(self._state[at.DIGEST]) & MASK
        for shelf in self._shelves:
            value = (value * 0x9E37_79B9_7F4A_7C15 ^ shelf.policy.digest()) & MASK
        return value

    def policy(self, place: int) -> Policy:
        """Return the policy of a place, for queries only: the ledger alone changes its state."""
        return self._shelves[place].policy

    @property
    def ghosts(self) -> int:
        """Return the number of ghosts: known blocks in no place, without pins."""
        return int(self._state[at.GHOSTS])

    def used_bytes(self, place: int) -> int:
        """Return the bytes in use in a place."""
        return int(self._state[self._shelves[place].used_at])

    def __len__(self) -> int:
        """Return the number of blocks that lie in any place."""
        return int(self._state[at.RESIDENT])

    def _terms_of(self, meta: Meta, namespace: int) -> Terms:
        tenant = namespace if meta.tenant < 0 else meta.tenant
        return Terms(meta.n_bytes or self.block_bytes, meta.cost_ns, meta.lease, tenant)

    def _follow(
        self, now: int, request: int, namespace: int, ids: Ids, meta: Meta, tenant: int
    ) -> tuple[Slots, NDArray[np.int8], int]:
        """Number a request's blocks, and report it to all policies.

        Returns:
            The slots and the fastest places of the blocks, in buffers that the next request uses,
            too; and the number of leading blocks that can be read.
        """
        ids = at.as_ids(ids)
        n = len(ids)
        if n > self._widest:
            self._widen(n)
        if self._state[at.FRESH] + n > len(self._blocks):
            self._grow(int(self._state[at.FRESH]) + n)
        chain, sources = self._rows[0, :n], self._sources[:n]
        where, births = (self._spaces[namespace], meta.chained), int(self._state[at.BIRTHS])
        hits = int(at.follow(*self._index, ids, where, chain, sources))
        visit = Visit(request, meta.session, meta.tokens, n, tenant)
        known = chain[self._blocks["birth"][chain] <= births]
        for shelf in self._shelves:
            shelf.policy.access(now, known, visit)
        if self._admission is not None:
            self._admission.access(chain)
        return chain, sources, hits
