"""`Ledger`: identity, residence, pins and fills, for drivers without an index of their own.

It numbers blocks, knows in which of several places each lies, and lets one policy per place decide
what stays: so a simulator, or an engine's plug-in, has to tell it nothing but requests. Pure, as
policies are: no I/O, no clock, no randomness; equal calls give equal answers.

The first place is the fastest. A block that is used is in the first place afterwards, if it fits,
and copies in slower ones stay there. What a place gives up goes to the next, if that one's policy
admits it, along with those of its ancestors that are not there yet: so chains are whole in every
place, as far as its policy is leaf-first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.base import Policy, Slots, Visit
from flowkv.policy.ledger import calls, chains
from flowkv.policy.ledger import image as ledger_image
from flowkv.policy.ledger.blocks import BIRTHS, DIGEST, FRESH, GHOSTS, LARGEST, RESIDENT
from flowkv.policy.ledger.places import Move, Place, Terms
from flowkv.policy.ledger.request import PLAIN, Meta, Plan
from flowkv.policy.ledger.residence import GHOSTS_PER_RESIDENT, LEAST_GHOSTS, Residence
from flowkv.policy.ledger.table import Ids, as_ids
from flowkv.policy.order.leaf import as_slots

__all__ = ["PLAIN", "Ledger", "Meta", "Move", "Place", "Plan"]

UNNAMED = 1 << 61  # numbers of requests that came without one
MASK = (1 << 64) - 1


class Ledger(Residence):
    """See the module. `now_ns` is clamped, as in `Policy`.

    Args:
        places: Policies and their room, fastest first; eight at most.
        block_bytes: Bytes of a block, unless `Meta` says otherwise.
        ghosts: Blocks that lie nowhere and stay known nevertheless; four times as many as are
            resident, and 65,536 at least, unless it is given. The oldest are forgotten.
        seed: Of the table of ids; changes no decision. Keep it secret where strangers choose ids.

    Raises:
        ConfigError: If there is no place, or too many, or a value is out of range.
    """

    def __init__(
        self,
        places: Iterable[Place],
        *,
        block_bytes: int = 1,
        ghosts: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(places, block_bytes, ghosts, seed)
        self._names: dict[bytes, int] = {}
        self._spaces: list[int] = []
        self._generations: list[int] = []
        self._next_space = 0
        self._unnamed = UNNAMED
        self._live: dict[int, Slots] = {}
        self._queued: dict[int, Slots] = {}
        self._tips: dict[int, tuple[int, int]] = {}

    # ---- whose blocks

    def namespace(self, name: bytes, generation: int = 0) -> int:
        """The number of a namespace: of a tenant, model, adapter, or all of them.

        Ids of two namespaces are never the same block. Policies know the number as `tenant`.

        Args:
            name: Anything.
            generation: What was stored under a lower one is stale, at the cost of one call.

        Raises:
            ConfigError: If the generation was a higher one already.
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
                f"namespace {name!r} is of generation {self._generations[number]} already, "
                f"not {generation}",
                "Count generations upwards",
            )
        return number

    def invalidate(self, now_ns: int, namespace: int) -> None:
        """No block of a namespace is ever a hit again; O(1), policies reclaim them in time."""
        now = self._advance(now_ns)
        self._spaces[namespace] = self._next_space
        self._next_space += 1
        for shelf in self._shelves:
            shelf.policy.invalidate(now, namespace)

    # ---- requests

    def lookup(self, namespace: int, ids: Ids, *, chained: bool = True) -> int:
        """Leading blocks that could be read, as of the last call; has no effect."""
        space = self._spaces[namespace]
        return int(chains.run_of(*self._index[:3], as_ids(ids), space, chained))

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
        """A request that takes no time: as `begin` and `complete` in one.

        With one difference: all of it enters the first place, and what is too much leaves only
        afterwards; its own blocks may be among it, so that a policy can decline to keep them.

        Args:
            now_ns: Time.
            namespace: Of the blocks.
            ids: u64 [n, 2], root to leaf.
            meta: What else is known.
            request: Its number, if it was enqueued.
            stop: Why its response ended; see `flowkv.policy.base`.
            output_tokens: Tokens of the response.
        """
        now = self._advance(now_ns)
        if request < 0:
            request = self._unnamed = self._unnamed + 1
        terms = Terms(meta.n_bytes or self.block_bytes, meta.cost_ns, meta.lease, namespace)
        ids = self._prepare(ids)
        where = (self._spaces[namespace], meta.chained, terms.n_bytes)
        chain, sources = self._rows[0, : len(ids)], self._sources[: len(ids)]
        hits, n = chains.follow_and_land(*self._index, ids, where, self._rows, self._sources)
        self._visit(now, request, chain, meta)
        if n:
            self._insert(now, 0, n, terms)
        for shelf in self._shelves:
            if shelf.complete is not None:
                shelf.complete(now, request, stop=stop, output_tokens=output_tokens)
        first = self._shelves[0]
        if self._state[first.used_at] > first.capacity or first.shed is not None:
            fresh = self._arrived(n)
            self._relieve(now, 0)
            if self._state[first.used_at] > first.capacity:  # others' reserves and pins
                fresh = fresh[self._blocks["here"][fresh] & 1 == 1]
                declined = fresh[self._shrink(0, fresh) :]
                if len(declined):
                    self._moves.append(Move(declined, 0, -1))
        return Plan(hits, chain, sources, len(chain), self._flush())

    def begin(
        self, now_ns: int, request: int, namespace: int, ids: Ids, meta: Meta = PLAIN
    ) -> Plan:
        """A request arrives. Its blocks stay, and stay known, until `complete` or `abort`.

        Args:
            now_ns: Time.
            request: Its number, 0 or more.
            namespace: Of the blocks.
            ids: u64 [n, 2], root to leaf.
            meta: What else is known.

        Raises:
            StateError: If a request of this number is under way.
        """
        if request in self._live or request < 0:
            raise StateError(f"request {request} is under way", "Number requests from 0 upwards")
        now = self._advance(now_ns)
        ids = self._prepare(ids)
        where = (self._spaces[namespace], meta.chained)
        sources = self._sources[: len(ids)]  # of this request, also if more room is needed below
        hits = chains.follow(*self._index, ids, where, self._rows, self._sources)
        chain = self._rows[0, : len(ids)].copy()
        self._visit(now, request, chain, meta)
        self._live[request] = chain
        self._pin(chain)
        size = meta.n_bytes or self.block_bytes
        kept = calls.fitting(self._blocks, chain, 0, size, self._room(0))
        terms = Terms(size, meta.cost_ns, meta.lease, namespace)
        n = self._land(now, 0, chain[:kept], terms, flying=True)
        first = self._shelves[0]
        if self._state[first.used_at] > first.capacity or first.shed is not None:
            fresh = self._arrived(n)
            self._relieve(now, 0)
            left = self._shrink(0, fresh)
            if left < len(fresh):
                kept = int(np.flatnonzero(chain == fresh[left])[0])
        return Plan(hits, chain, sources, int(kept), self._flush())

    def complete(
        self, now_ns: int, request: int, *, stop: int = 0, output_tokens: int = 0
    ) -> Sequence[Move]:
        """A request has ended, and what it was to bring is there.

        Raises:
            StateError: If no request of this number is under way.
        """
        if request not in self._live:
            raise StateError(f"request {request} is not under way", "Begin it first")
        now = self._advance(now_ns)
        for shelf in self._shelves:
            if shelf.complete is not None:
                shelf.complete(now, request, stop=stop, output_tokens=output_tokens)
        self._unpin(now, self._live.pop(request), done=True)
        return self._flush()

    def abort(self, now_ns: int, request: int) -> Sequence[Move]:
        """A request that was begun or enqueued will not go on; what it did not bring is gone."""
        now = self._advance(now_ns)
        self._unqueue(request)
        for shelf in self._shelves:
            shelf.policy.abort(now, request)
        if request in self._live:
            self._unpin(now, self._live.pop(request), done=False)
        return self._flush()

    def tick(self, now_ns: int) -> Sequence[Move]:
        """Time passes: what expired goes. Every call that decides does so first."""
        self._advance(now_ns)
        return self._flush()

    def pin(self, namespace: int, ids: Ids) -> Slots:
        """The known leading blocks of a chain stay until `unpin` of what this returns; nests."""
        slots = self._known(namespace, ids)
        self._pin(slots)
        return slots

    def unpin(self, now_ns: int, slots: Slots) -> Sequence[Move]:
        """Ends one `pin`.

        Raises:
            StateError: Not all of these are pinned.
        """
        slots, pins = as_slots(slots), self._blocks["pins"][: self._state[FRESH]]
        here = slots[(slots >= 0) & (slots < len(pins))]
        if len(here) != len(slots) or (pins[here] <= 0).any():
            raise StateError(
                f"blocks {slots[:8].tolist()} are not all pinned", "Pass what pin() returned, once"
            )
        self._unpin(self._advance(now_ns), slots, done=False)
        return self._flush()

    # ---- what is to come

    def hint(self, now_ns: int, session: int, eta_ns: int, sigma: float = 0.5) -> None:
        """See `Policy.hint`: about the last chain of a session; unknown ones are ignored."""
        now = self._advance(now_ns)
        tip, births = self._tips.get(session, (0, -1))
        if not 0 <= self._blocks["birth"][tip] <= births or self._blocks["space"][tip] < 0:
            return
        chain = np.empty(int(self._state[FRESH]), np.int64)
        chain = chain[: chains.climb(self._blocks, tip, chain)][::-1].copy()
        for shelf in self._shelves:
            shelf.policy.hint(now, chain, eta_ns, sigma)

    def enqueue(self, now_ns: int, request: int, namespace: int, ids: Ids) -> None:
        """A queued request will use this chain, until its `begin`, `serve` or `abort`."""
        now = self._advance(now_ns)
        self._unqueue(request)
        self._queued[request] = slots = self._known(namespace, ids)
        calls.watch(self._blocks, self._state, slots, 1)
        for shelf in self._shelves:
            shelf.policy.enqueue(now, request, slots)
        self._trim()

    # ---- as it is

    def resize(self, now_ns: int, place: int, capacity_bytes: int) -> Sequence[Move]:
        """A place gets another room. What is pinned stays, also where it is too much then."""
        now = self._advance(now_ns)
        self._shelves[place].resize(capacity_bytes)
        self._relieve(now, place)
        return self._flush()

    def digest(self) -> int:
        """64-bit hash of every decision so far, those of the policies included."""
        value = int(self._state[DIGEST]) & MASK
        for shelf in self._shelves:
            value = (value * 0x9E37_79B9_7F4A_7C15 ^ shelf.policy.digest()) & MASK
        return value

    def policy(self, place: int) -> Policy:
        """The policy of a place, to be asked; only the ledger tells it things."""
        return self._shelves[place].policy

    @property
    def ghosts(self) -> int:
        """Blocks that lie nowhere, are needed by nobody, and are still known."""
        return int(self._state[GHOSTS])

    def used_bytes(self, place: int) -> int:
        """Bytes that are taken in a place."""
        return int(self._state[self._shelves[place].used_at])

    def __len__(self) -> int:
        """Blocks that lie anywhere."""
        return int(self._state[RESIDENT])

    # ---- carrying it over

    def snapshot(self) -> bytes:
        """All state, those of the policies included; see `Policy.snapshot`."""
        state = self._state
        book = ledger_image.Book(
            fresh=int(state[FRESH]),
            births=int(state[BIRTHS]),
            largest=int(state[LARGEST]),
            digest=int(state[DIGEST]),
            clock=self._clock,
            next_space=self._next_space,
            unnamed=self._unnamed,
            capacities=[shelf.capacity for shelf in self._shelves],
            names=list(zip(self._names, self._spaces, self._generations, strict=True)),
            leases=self._leases,
            live={request: slots.tolist() for request, slots in self._live.items()},
            queued={request: slots.tolist() for request, slots in self._queued.items()},
            tips=[(session, *tip) for session, tip in self._tips.items()],
        )
        return ledger_image.dump(self, book)

    def restore(self, snapshot: bytes) -> None:
        """Takes over what `snapshot` gave. On a fresh ledger only, of as many places.

        Raises:
            ConfigError: If it comes from elsewhere or is damaged; use another ledger then.
        """
        book = ledger_image.load(self, snapshot)
        self._names = {name: i for i, (name, _, _) in enumerate(book.names)}
        self._spaces = [space for _, space, _ in book.names]
        self._generations = [generation for _, _, generation in book.names]
        self._next_space, self._unnamed = book.next_space, book.unnamed
        self._live = {r: np.array(slots, np.int64) for r, slots in book.live.items()}
        self._queued = {r: np.array(slots, np.int64) for r, slots in book.queued.items()}
        self._tips = {session: (slot, births) for session, slot, births in book.tips}

    # ---- parts

    def _prepare(self, ids: Ids) -> Ids:
        """Makes room for what a request may bring."""
        ids = as_ids(ids)
        n = len(ids)
        if n > self._widest:
            self._widen(n)
        if self._state[FRESH] + n > len(self._blocks):
            self._grow(int(self._state[FRESH]) + n)
        return ids

    def _visit(self, now: int, request: int, chain: Slots, meta: Meta) -> None:
        """Tells the policies of a request."""
        visit = Visit(request, meta.session, meta.tokens, len(chain))
        for shelf in self._shelves:
            shelf.access(now, chain, visit)
        if self._queued:
            self._unqueue(request)
        if meta.session >= 0 and len(chain):
            self._remember(meta.session, int(chain[-1]))

    def _remember(self, session: int, tip: int) -> None:
        """The chain that a hint about this session means."""
        tips = self._tips
        tips.pop(session, None)
        tips[session] = (tip, int(self._state[BIRTHS]))
        if len(tips) > max(LEAST_GHOSTS, GHOSTS_PER_RESIDENT * len(self)):
            del tips[next(iter(tips))]

    def _known(self, namespace: int, ids: Ids) -> Slots:
        """Slots of the known leading blocks."""
        out = np.empty(len(ids), np.int64)
        space = self._spaces[namespace]
        n = chains.known_of(*self._index[:3], as_ids(ids), space, out)
        return out[:n]

    def _unqueue(self, request: int) -> None:
        slots = self._queued.pop(request, None)
        if slots is not None:
            calls.watch(self._blocks, self._state, slots, -1)
