"""Stories of a `Ledger` and a policy that decides for it, and what must hold in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowkv import Lease, Policy
from flowkv.residency import Ledger, Meta, Move, Place, Plan
from flowkv.testing.stories import require
from tests.inside import Ids, Quota, Tenants, requests, steps_ns
from tests.inside import policies_SECOND as SECOND

# What must be true of a `Ledger` whatever its policies decide, counted anew from its answers.

Key = tuple[int, int, tuple[int, ...]]
"""(namespace, generation, tokens from the root on)."""


def ids_of(tokens: tuple[int, ...]) -> Ids:
    """An id for each prefix; the same for every namespace."""
    numbers = [int("1" + "".join(map(str, tokens[: i + 1]))) for i in range(len(tokens))]
    return np.array([(n, 7 * n) for n in numbers], np.uint64).reshape(-1, 2)


class LedgerModel:
    """Where every block lies, and who needs it.

    Args:
        capacities: Bytes of the places.

    Attributes:
        here: By place, the blocks in it.
        flight: Those on their way to the first place.
        fresh: Those that came to the first place in the present call.
        live: Request -> its blocks.
        slots: Block -> slot, while it is known to be known.
        bytes: Block -> bytes, while it lies anywhere.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = list(capacities)
        self.generation = [0, 0]
        self.here: list[set[Key]] = [set() for _ in capacities]
        self.flight: set[Key] = set()
        self.fresh: set[Key] = set()
        self.live: dict[int, list[Key]] = {}
        self.pins: Counter[Key] = Counter()
        self.slots: dict[Key, int] = {}
        self.names: dict[int, Key] = {}
        self.bytes: dict[Key, int] = {}

    # ---- identity

    def keys(self, namespace: int, tokens: tuple[int, ...]) -> list[Key]:
        """The blocks of a chain, as of the present generation."""
        generation = self.generation[namespace]
        return [(namespace, generation, tokens[: i + 1]) for i in range(len(tokens))]

    def learn(self, keys: list[Key], slots: Sequence[int]) -> None:
        """A plan named slots: one for each block, and the old one where the block lies anywhere."""
        require(len(set(slots)) == len(keys), "two blocks have one slot")
        for key, slot in zip(keys, slots, strict=True):
            if self.needed(key):
                require(self.slots[key] == slot, "a block that is there has another slot now")
            old = self.names.get(slot)
            if old is not None and old != key:
                require(not self.needed(old), "a slot was reused while its block was needed")
                del self.slots[old]
            self.names.pop(self.slots.get(key, slot), None)
            self.slots[key], self.names[slot] = slot, key

    def needed(self, key: Key) -> bool:
        """Whether a block lies anywhere or is in use."""
        return self.pins[key] > 0 or any(key in place for place in self.here)

    # ---- what can be read

    def source(self, key: Key, stale: Sequence[set[int]]) -> int:
        """The fastest place it can be read in; -2 while it is only on its way, -1 if nowhere."""
        present = [k for k, place in enumerate(self.here) if key in place]
        slot = self.slots.get(key, -1)
        for k in present:
            if slot not in stale[k] and not (k == 0 and key in self.flight):
                return k
        return -2 if present else -1

    def run(self, keys: list[Key], stale: Sequence[set[int]]) -> int:
        """Leading blocks that can be read."""
        can = [self.source(key, stale) >= 0 for key in keys]
        return can.index(False) if False in can else len(can)

    # ---- what changes

    def serve(self, keys: list[Key], plan: Plan, size: int, stale: Sequence[set[int]]) -> None:
        """A plan was made: it must be what the present state asks for."""
        require(plan.hits == self.run(keys, stale), f"{plan.hits} hits were counted wrongly")
        self.learn(keys, plan.slots.tolist())
        want = [self.source(key, stale) for key in keys]
        require(plan.sources.tolist() == want, "the sources are not where the blocks are")
        require(0 <= plan.kept <= len(keys), "kept more than there is")
        self.fresh = set(keys[: plan.kept]) - self.here[0]
        for key in keys[: plan.kept]:
            self.add(key, 0, size)

    def add(self, key: Key, k: int, size: int = 0) -> None:
        """A block lies in a place."""
        if size:
            self.bytes.setdefault(key, size)
        self.here[k].add(key)

    def apply(self, moves: Sequence[Move]) -> None:
        """Carries out what goes, in this order: only from where it is."""
        for move in moves:
            keys = [self.names[s] for s in move.slots.tolist()]
            require(len(set(keys)) == len(keys), "a move names a block twice")
            for key in keys:
                if move.target >= 0:
                    require(key in self.here[move.source], "a copy was made of what is not there")
                    require(key not in self.here[move.target], "a copy was there already")
                    self.add(key, move.target)
                    continue
                k = move.source
                require(key in self.here[k], "what left was not there")
                declined = k == 0 and key in self.fresh  # it came in this call, for another
                require(self.pins[key] == 0 or declined, "a pinned block left")
                self.here[k].discard(key)
                if k == 0:
                    self.flight.discard(key)
                if not any(key in place for place in self.here):
                    self.bytes.pop(key, None)
        self.fresh = set()

    def pin(self, keys: list[Key]) -> None:
        """In use."""
        self.pins.update(keys)

    def unpin(self, keys: list[Key], done: bool) -> set[Key]:
        """No longer; returns what never came and so is not there."""
        self.pins.subtract(keys)
        if done:
            self.flight -= set(keys)
        return {key for key in keys if key in self.flight and self.pins[key] <= 0}

    # ---- what is always true

    def audit(self, ledger: Ledger, leaf_first: bool, quotas: Mapping[int, Quota]) -> None:
        """Room, residence, chains, ghosts."""
        for k, place in enumerate(self.here):
            used, pinned = Counter[int](), Counter[int]()
            for key in place:
                used[key[0]] += self.bytes[key]
                pinned[key[0]] += self.bytes[key] * (self.pins[key] > 0)
            stays = [max(pinned[t], min(used[t], quotas[t].reserve_bytes)) for t in quotas]
            least = sum(stays) if quotas else pinned.total()
            require(ledger.used_bytes(k) == used.total(), "bytes in use were counted wrongly")
            require(used.total() <= max(self.capacities[k], least), "more than the place holds")
            believed = set(ledger.policy(k).resident())
            require(believed == {self.slots[key] for key in place}, "a policy lost count")
            for namespace, generation, tokens in place if leaf_first and k == 0 else ():
                parent = namespace, generation, tokens[:-1]
                if len(tokens) > 1 and generation == self.generation[namespace]:
                    require(parent in place, "a block is there without its parent")
        require(len(ledger) == len(set().union(*self.here)), "resident blocks counted wrongly")
        require(0 <= ledger.ghosts <= ledger.ghost_bound, "too many ghosts")


# A ledger's life with a policy as a Hypothesis state machine: requests, and what disturbs them.
#
# Chains over three tokens, six deep at most, two namespaces and a dozen bytes, so that prefixes and
# evictions collide. Three ledgers live through the same story: one gets the times as they come; one
# gets clamped times, and has another seed for its table of ids; one is never asked anything.

chains = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
namespaces = st.integers(0, 1)
GHOSTS = 5


class LedgerStory(RuleBasedStateMachine):
    """Stories of a ledger; `make`, `leases` and `leaf_first` as in `check_policy`."""

    make: Callable[[], Policy]
    leases: tuple[str | Lease, ...]
    leaf_first: bool
    quotas: dict[int, Quota] | None = None
    ledger_class: type[Ledger] = Ledger

    @initialize(
        start=st.sampled_from([0, 10**18, -SECOND]),
        capacities=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    )
    def begin_life(self, start: int, capacities: list[int]) -> None:
        """Makes the three ledgers."""
        self.clock = self.clamped = start
        if self.quotas is not None:
            capacities = [max(capacity, 8) for capacity in capacities]
        self.model = LedgerModel(capacities)
        self.raw, self.twin, self.quiet = (self.new(seed) for seed in (0, 8, 0))
        self.tick(0)

    def new(self, seed: int) -> Ledger:
        """A fresh ledger."""
        places = [Place(self.fresh_policy(), capacity) for capacity in self.model.capacities]
        ledger = self.ledger_class(places, ghosts=GHOSTS, seed=seed)
        require([ledger.namespace(name) for name in (b"a", b"b", b"a")] == [0, 1, 0], "namespaces")
        return ledger

    def fresh_policy(self) -> Policy:
        """Of one place."""
        return self.make() if self.quotas is None else Tenants(self.make, self.quotas)

    # --- requests -------------------------------------------------------------------------------

    @rule(
        dt=steps_ns,
        namespace=namespaces,
        tokens=chains,
        said=st.tuples(st.integers(-1, 1), st.integers(1, 3), st.integers(0, 7)),
        stop=st.integers(0, 3),
    )
    def serve(
        self,
        dt: int,
        namespace: int,
        tokens: tuple[int, ...],
        said: tuple[int, int, int],
        stop: int,
    ) -> None:
        """A request that takes no time."""
        self.tick(dt)
        keys, before = self.model.keys(namespace, tokens), self.guard(namespace)
        meta, stale = self.meta(said), self.stale()
        call = [
            ledger.serve(now, namespace, ids_of(tokens), meta, stop=stop, output_tokens=9)
            for ledger, now in self.all()
        ]
        plan = self.same(call)
        require(plan.kept == len(keys), "serve admits a request whole")
        self.model.serve(keys, plan, meta.n_bytes, stale)
        self.model.flight -= set(keys)
        self.model.apply(plan.moves)
        self.unharmed(before)

    @rule(
        dt=steps_ns,
        request=requests,
        namespace=namespaces,
        tokens=chains,
        said=st.tuples(st.integers(-1, 1), st.integers(1, 3), st.integers(0, 7)),
    )
    def begin(
        self,
        dt: int,
        request: int,
        namespace: int,
        tokens: tuple[int, ...],
        said: tuple[int, int, int],
    ) -> None:
        """A request that takes time; `complete` or `abort` ends it."""
        if request in self.model.live:
            return
        self.tick(dt)
        keys, before = self.model.keys(namespace, tokens), self.guard(namespace)
        meta, stale = self.meta(said), self.stale()
        call = [
            ledger.begin(now, request, namespace, ids_of(tokens), meta)
            for ledger, now in self.all()
        ]
        plan = self.same(call)
        new = [
            key
            for key in keys[: plan.kept]
            if key not in self.model.here[0] or self.model.slots[key] in stale[0]
        ]
        self.model.serve(keys, plan, meta.n_bytes, stale)
        self.model.flight.update(new)
        self.model.live[request] = keys
        self.model.pin(keys)
        self.model.apply(plan.moves)
        self.unharmed(before)

    @rule(dt=steps_ns, request=requests, stop=st.integers(0, 3), done=st.booleans())
    def end(self, dt: int, request: int, stop: int, done: bool) -> None:
        """A request ends well, or does not; one that is unknown is aborted."""
        self.tick(dt)
        keys = self.model.live.pop(request, None)
        stale, there = self.stale(), set(keys or ()) & self.model.here[0]
        there = {key for key in there if self.model.slots[key] not in stale[0]}
        fits = self.raw.used_bytes(0) <= self.model.capacities[0]
        if keys is not None and done:
            calls = [
                ledger.complete(now, request, stop=stop, output_tokens=9)
                for ledger, now in self.all()
            ]
        else:
            calls = [ledger.abort(now, request) for ledger, now in self.all()]
        lost = self.model.unpin(keys, done) if keys is not None else set()
        self.model.apply(self.same_moves(calls))
        require(not lost & self.model.here[0], "what never came is still said to be there")
        if done and fits:
            require(there <= self.model.here[0], "what a request brought went when it ended")

    @precondition(lambda self: not self.quotas)
    @rule(namespace=namespaces, tokens=chains)
    def pin_for_a_moment(self, namespace: int, tokens: tuple[int, ...]) -> None:
        """A chain is pinned while a place shrinks to nothing and grows back."""
        keys = self.model.keys(namespace, tokens)
        slots = [ledger.pin(namespace, ids_of(tokens)) for ledger, _ in self.all()]
        keys = keys[: len(slots[0])]
        self.model.pin(keys)
        old = self.model.capacities[0]
        for capacity in (0, old):
            self.resize(0, 0, capacity)
        self.model.unpin(keys, done=False)
        calls = [x.unpin(now, s) for (x, now), s in zip(self.all(), slots, strict=True)]
        self.model.apply(self.same_moves(calls))

    # --- what disturbs --------------------------------------------------------------------------

    @rule(dt=steps_ns)
    def tick(self, dt: int) -> None:
        """Time passes."""
        self.clock = self.clamped + dt
        self.clamped = max(self.clamped, self.clock)
        self.model.apply(self.same_moves([x.tick(now) for x, now in self.all()]))

    @rule(dt=steps_ns, place=st.integers(0, 2), capacity=st.integers(0, 12))
    def resize(self, dt: int, place: int, capacity: int) -> None:
        """A place gets another room."""
        if self.quotas is not None:
            capacity = max(capacity, 8)
        self.tick(dt)
        place %= len(self.model.here)
        self.model.capacities[place] = capacity
        calls = [ledger.resize(now, place, capacity) for ledger, now in self.all()]
        self.model.apply(self.same_moves(calls))

    @rule(dt=steps_ns, namespace=namespaces)
    def invalidate(self, dt: int, namespace: int) -> None:
        """A namespace gets a new generation: nothing of it is found any more, at once."""
        self.tick(dt)
        self.model.generation[namespace] += 1
        generation = self.model.generation[namespace]
        for ledger, _ in self.all():
            ledger.namespace(b"ab"[namespace : namespace + 1], generation)
            require(ledger.lookup(namespace, ids_of((0, 0))) == 0, "a stale block was found")
        self.tick(0)

    @rule(namespace=namespaces, tokens=chains)
    def look_up(self, namespace: int, tokens: tuple[int, ...]) -> None:
        """Two of them are asked what they have."""
        want = self.model.run(self.model.keys(namespace, tokens), self.stale())
        for ledger in (self.raw, self.twin):
            got = ledger.lookup(namespace, ids_of(tokens))
            require(got == want, f"a look-up found {got} blocks of {want}")

    @invariant()
    def is_whole(self) -> None:
        """Room, residence, chains, ghosts, digests."""
        for ledger in (self.raw, self.twin, self.quiet):
            self.model.audit(ledger, self.leaf_first, self.quotas or {})
        digest = self.raw.digest()
        require(digest == self.twin.digest(), "equal stories must give equal digests")
        require(digest == self.quiet.digest(), "a question changed a decision")

    # --- parts ----------------------------------------------------------------------------------

    def all(self) -> list[tuple[Ledger, int]]:
        """The ledgers, and what time each believes it is."""
        return [(self.raw, self.clock), (self.twin, self.clamped), (self.quiet, self.clamped)]

    def meta(self, said: tuple[int, int, int]) -> Meta:
        """What a request says about itself."""
        session, size, lease = said
        size = size if self.quotas is None else 1  # reserves are whole numbers of blocks
        return Meta(session, 100, size, lease=self.leases[lease % len(self.leases)])

    def stale(self) -> list[set[int]]:
        """By place, what has expired and is still there, since it is pinned."""
        found = []
        for k, place in enumerate(self.model.here):
            gone = set(self.raw.policy(k).expired(self.clock).tolist())
            self.twin.policy(k).expired(self.clock)
            self.quiet.policy(k).expired(self.clock)
            pinned = {self.model.slots[key] for key in place if self.model.pins[key] > 0}
            require(gone <= pinned, "an expired block that nobody needs is still there")
            found.append(gone)
        return found

    def guard(self, namespace: int) -> dict[Key, int]:
        """What the other namespace can read, and the bytes it has."""
        other = 1 - namespace
        found = {key: 0 for key in self.model.slots if key[0] == other and self.model.needed(key)}
        for key in found:
            if key[1] == self.model.generation[other]:
                found[key] = self.raw.lookup(other, ids_of(key[2]))
        self.bytes_before = self.bytes_of(other)
        return found

    def bytes_of(self, namespace: int) -> int:
        """Bytes of a namespace in the first place."""
        return sum(self.model.bytes[key] for key in self.model.here[0] if key[0] == namespace)

    def unharmed(self, before: dict[Key, int]) -> None:
        """Nobody's blocks can be found because of somebody else's; reserves hold."""
        for (namespace, generation, tokens), run in before.items():
            if generation == self.model.generation[namespace]:
                now = self.raw.lookup(namespace, ids_of(tokens))
                require(now <= run, "somebody else's request made a look-up find more")
        for namespace in {key[0] for key in before} if self.quotas else ():
            reserve = self.quotas[namespace].reserve_bytes if self.quotas else 0
            least = min(self.bytes_before, reserve)
            require(self.bytes_of(namespace) >= least, "a reserve was touched")

    def same(self, plans: Sequence[Plan]) -> Plan:
        """Equal plans."""
        first = plans[0]
        self.same_moves([plan.moves for plan in plans])
        for plan in plans[1:]:
            require((plan.hits, plan.kept) == (first.hits, first.kept), "plans differ")
            require(plan.slots.tolist() == first.slots.tolist(), "plans name different slots")
            require(plan.sources.tolist() == first.sources.tolist(), "plans differ in sources")
        return first

    def same_moves(self, calls: Sequence[Sequence[Move]]) -> Sequence[Move]:
        """Equal moves."""
        plain = [[(m.slots.tolist(), m.source, m.target) for m in moves] for moves in calls]
        require(all(moves == plain[0] for moves in plain), "equal stories must move equal blocks")
        return calls[0]
