"""Coming and going in a ledger's places: room, victims, demotion, ghosts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.base import NO_SLOTS, Slots
from flowkv.policy.config import Lease
from flowkv.policy.ledger import blocks as at
from flowkv.policy.ledger import calls
from flowkv.policy.ledger.blocks import BLOCK, FRESH, GHOSTS, LARGEST, PINNED, RESIDENT
from flowkv.policy.ledger.places import Move, Place, Shelf, Terms
from flowkv.policy.ledger.table import buckets_for, factors, rehash
from flowkv.policy.order.compiled import SLOT_LIMIT
from flowkv.policy.order.leaf import as_slots

LEAST_GHOSTS = 1 << 16
GHOSTS_PER_RESIDENT = 4
GHOSTS_AT_ONCE = 32  # this part of them is forgotten in one call
FIRST_CAPACITY = 1024
FIRST_TIME = -(1 << 61)

TERMS = np.dtype([("cost_ns", np.int64), ("lease", np.int32), ("tenant", np.int32)])


class Residence:
    """The records of blocks and the places; `Ledger` is what drivers use.

    Args:
        places: Policies and their room, fastest first.
        block_bytes: Bytes of a block, unless a request says otherwise.
        ghosts: Most ghosts, or None for as many as `Ledger` says.
        seed: Of the table of ids.
    """

    def __init__(
        self, places: Iterable[Place], block_bytes: int, ghosts: int | None, seed: int
    ) -> None:
        self._shelves = [Shelf(place, k) for k, place in enumerate(places)]
        if not 1 <= len(self._shelves) <= at.MAX_PLACES:
            raise ConfigError(
                f"a ledger over {len(self._shelves)} places", f"Use 1 to {at.MAX_PLACES}"
            )
        if block_bytes < 1 or (ghosts is not None and ghosts < 0):
            raise ConfigError(
                f"block_bytes={block_bytes}, ghosts={ghosts}",
                "Use at least one byte a block, and no fewer than 0 ghosts",
            )
        self.block_bytes = block_bytes
        self._ghosts = ghosts
        self._alone = len(self._shelves) == 1
        self._clock = FIRST_TIME
        self._moves: list[Move] = []
        self._state = np.zeros(at.STATE_SIZE, np.int64)
        self._state[[at.FREE, at.YOUNGEST, at.OLDEST]] = -1
        self._state[LARGEST] = 1
        self._blocks = np.zeros(0, BLOCK)
        self._terms = np.zeros(0, TERMS)  # used only with several places
        self._leases: list[str | Lease] = [""]
        self._buckets, self._mix = buckets_for(1), factors(seed)
        self._grow(FIRST_CAPACITY)
        self._widen(64)

    # ---- memory

    def _grow(self, room: int) -> None:
        """Makes room for slots below `room`: doubles, so that growing costs O(1) per slot."""
        old = len(self._blocks)
        new = min(max(room, 2 * old), SLOT_LIMIT)
        if room > new:
            raise ConfigError(
                f"a ledger cannot know {room} blocks", f"Bound ghosts=; {SLOT_LIMIT} is the most"
            )
        blocks = np.zeros(new, BLOCK)
        blocks[:old] = self._blocks
        blocks["space"][old:] = -1
        buckets = buckets_for(new)
        rehash(self._buckets, buckets)
        self._blocks, self._buckets = blocks, buckets
        self._index = blocks, buckets, self._mix, self._state
        if not self._alone:
            terms = np.zeros(new, TERMS)
            terms[:old] = self._terms
            self._terms = terms

    def _widen(self, n: int) -> None:
        """Makes room for requests of `n` blocks."""
        self._widest = 2 * n
        self._rows = np.empty((4, 2 * n), np.int64)  # a chain, and what `land_all` writes of it
        self._sources = np.empty(2 * n, np.int8)
        self._out = self._rows[1:]

    # ---- coming

    def _land(self, now: int, k: int, slots: Slots, terms: Terms, flying: bool = False) -> int:
        """Blocks take up room in a place; those that are new there are inserted. How many."""
        if len(slots) > self._widest:
            self._widen(len(slots))
        said = (k, terms.n_bytes, int(flying))
        n = int(calls.land(self._blocks, self._state, slots, said, self._out))
        if n:
            self._insert(now, k, n, terms)
        return n

    def _insert(self, now: int, k: int, n: int, terms: Terms) -> None:
        """Tells a place's policy of what has just landed there."""
        size, cost, lease, tenant = terms
        new, parents = self._out[0, :n], self._out[1, :n]
        self._shelves[k].insert(
            now, new, parents, n_bytes=size, cost_ns=cost, lease=lease, tenant=tenant
        )
        if not self._alone:
            self._terms[new] = (cost, self._lease_number(lease), tenant)

    def _bring(self, now: int, k: int, slots: Slots, flying: bool = False) -> None:
        """Known blocks, root to leaf, take up room in a place on the terms they had."""
        size, kept = self._blocks["bytes"][slots], self._terms[slots]
        cuts = np.flatnonzero((size[1:] != size[:-1]) | (kept[1:] != kept[:-1])) + 1
        for first, last in zip([0, *cuts], [*cuts, len(slots)], strict=True):
            cost, lease, tenant = kept[first].item()
            terms = Terms(int(size[first]), cost, self._leases[lease], tenant)
            self._land(now, k, slots[first:last], terms, flying)

    def _lease_number(self, lease: str | Lease) -> int:
        if lease not in self._leases:
            self._leases.append(lease)
        return self._leases.index(lease)

    # ---- going

    def _advance(self, now_ns: int) -> int:
        """Time passes, and never backwards."""
        self._clock = now = max(now_ns, self._clock)
        self._settle(now)
        return now

    def _settle(self, now: int) -> None:
        """What expired goes, or waits for its pins."""
        for shelf in self._shelves:
            run_out = as_slots(shelf.expired(now)) if shelf.expired is not None else NO_SLOTS
            if len(run_out):
                gone = np.empty(len(run_out), np.int64)
                n = calls.expire(self._blocks, self._state, shelf.number, run_out, gone)
                if n:
                    shelf.policy.remove(gone[:n])
                    self._moves.append(Move(gone[:n], shelf.number, -1))

    def _relieve(self, now: int, k: int) -> None:
        """What is too much in a place leaves it."""
        shelf, state = self._shelves[k], self._state
        if shelf.shed is not None:
            victims = shelf.shed(now, self._protected(shelf))
            if len(victims):
                self._give_up(now, k, victims)
        while (over := int(state[shelf.used_at]) - shelf.capacity) > 0:
            n = -(-over // int(state[LARGEST]))
            victims = shelf.victims(now, n, self._protected(shelf))
            if not len(victims):
                return
            self._give_up(now, k, victims)

    def _give_up(self, now: int, k: int, victims: Slots) -> None:
        """Blocks that a policy gave up go one place down, where they are admitted, or away.

        Raises:
            StateError: They are not there, or named twice: the policy lost count.
        """
        victims = as_slots(victims)
        if not calls.held(self._blocks, k, victims):
            raise StateError(
                f"policy {self._shelves[k].policy.name!r} gave up blocks that do not lie in place "
                f"{k}, or one of them twice: {victims[:8].tolist()}",
                "Check it with flowkv.testing.check_policy",
            )
        if k + 1 < len(self._shelves):
            self._lower(now, k + 1, victims)
        calls.leave(self._blocks, self._state, k, victims)
        self._moves.append(Move(victims, k, -1))

    def _lower(self, now: int, k: int, victims: Slots) -> None:
        """Copies what is admitted of the victims of the place above, and their ancestors."""
        missing = victims[(self._blocks["here"][victims] >> k & 1) == 0]
        shelf = self._shelves[k]
        if len(missing) and shelf.admit is not None:
            admitted = np.asarray(shelf.admit(now, missing))
            if admitted.dtype != np.bool_ or admitted.shape != missing.shape:
                raise StateError(
                    f"policy {shelf.policy.name!r} admitted {admitted.dtype} "
                    f"{list(admitted.shape)} of {len(missing)} blocks",
                    "Answer admit() with one bool for each block",
                )
            missing = missing[admitted]
        if not len(missing):
            return
        chain = np.empty(int(self._state[RESIDENT]), np.int64)
        chain = chain[: calls.lower(self._blocks, k, missing, chain)]
        start = len(self._moves)
        self._bring(now, k, chain)
        self._relieve(now, k)
        if self._state[shelf.used_at] > shelf.capacity:  # others' reserves and pins
            self._shrink(k, chain[self._blocks["here"][chain] >> k & 1 == 1])
        stays = self._blocks["here"][chain] >> k & 1 == 1
        if len(self._moves) > start:
            self._pass_by(start, k, chain)
        if stays.any():
            self._copied(chain[stays], k, 0)

    def _copied(self, slots: Slots, target: int, absent: int) -> None:
        """Notes where copies come from: the place above, if they are there, or any but `absent`."""
        here = self._blocks["here"][slots] & ~np.uint8(1 << target | absent)
        for k in (target - 1, *range(len(self._shelves))):
            there = here >> k & 1 == 1
            if there.any():
                self._moves.append(Move(slots[there], k, target))
                here[there] = 0

    def _pass_by(self, start: int, k: int, slots: Slots) -> None:
        """What left place `k` before the blocks that came in this call are there: not those."""
        moves = self._moves[start:]
        del self._moves[start:]
        for move in moves:
            passed = np.isin(move.slots, slots) & (move.source == k)
            if not passed.all():
                self._moves.append(Move(move.slots[~passed], move.source, move.target))
            if passed.any() and move.target >= 0:
                self._copied(move.slots[passed], move.target, 1 << k)

    def _protected(self, shelf: Shelf) -> Slots:
        """What a policy that knows no pins must be told not to give up."""
        if shelf.pins:
            return NO_SLOTS
        pins = self._blocks["pins"][: self._state[FRESH]]
        found: Slots = np.flatnonzero((pins > 0) & self._lies_in(shelf.number))
        return found

    def _lies_in(self, k: int) -> NDArray[np.bool_]:
        here: NDArray[np.uint8] = self._blocks["here"][: self._state[FRESH]]
        return here >> k & 1 == 1

    # ---- pins

    def _pin(self, slots: Slots) -> None:
        calls.pin(self._blocks, self._state, slots)
        for shelf in self._shelves:
            if shelf.pins:
                shelf.policy.pin(slots)

    def _unpin(self, now: int, slots: Slots, done: bool) -> None:
        """Ends pins; what was only waited for, or expired meanwhile, goes."""
        if len(slots) > self._widest:
            self._widen(len(slots))
        n = calls.unpin(self._blocks, self._state, slots, done, self._out)
        left = self._out[:, :n].copy()
        for shelf in self._shelves:
            if shelf.pins:
                shelf.policy.unpin(slots)
            if n:
                gone = left[0, (left[1] >> shelf.number & 1) == 1]
                if len(gone):
                    shelf.policy.remove(gone)
                    self._moves.append(Move(gone, shelf.number, -1))
            if self._state[shelf.used_at] > shelf.capacity:
                self._relieve(now, shelf.number)

    def _arrived(self, n: int) -> Slots:
        """Those of the `n` blocks that have just landed that took up room by it."""
        return self._out[0, :n][self._out[2, :n] == 1]

    def _shrink(self, k: int, fresh: Slots) -> int:
        """Takes back the last of what has just landed until the place holds what it can."""
        shelf, n = self._shelves[k], len(fresh)
        while n and self._state[shelf.used_at] > shelf.capacity:
            n -= 1
            shelf.policy.remove(fresh[n : n + 1])
            calls.leave(self._blocks, self._state, k, fresh[n : n + 1])
        return n

    # ---- ghosts

    @property
    def ghost_bound(self) -> int:
        """Most ghosts after a call."""
        if self._ghosts is not None:
            return self._ghosts
        return max(LEAST_GHOSTS, GHOSTS_PER_RESIDENT * int(self._state[RESIDENT]))

    def _flush(self) -> list[Move]:
        """Ends a call, and hands out what moved."""
        self._trim()
        moves, self._moves = self._moves, []
        return moves

    def _trim(self) -> None:
        """Forgets ghosts, where they are too many."""
        bound = self.ghost_bound
        if self._state[GHOSTS] <= bound:
            return
        bound -= bound // GHOSTS_AT_ONCE
        out = np.empty(int(self._state[GHOSTS]) - bound, np.int64)
        at.lay_ghosts(*self._index, bound, out)
        for shelf in self._shelves:
            shelf.policy.forget(out)

    def _room(self, k: int) -> int:
        """Bytes of a place that are not pinned."""
        return self._shelves[k].capacity - int(self._state[PINNED + k])
