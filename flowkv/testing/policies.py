"""`check_policy`: check the rules of `Policy` on random stories made by Hypothesis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, cast

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from flowkv.policy.base import DEFAULT_RANK, NEVER_NS, Learner, Lease, Policy, Slots, Visit
from flowkv.testing.stories import require, tell_machine


def check_policy(
    make: Callable[[], Policy],
    *,
    leases: Sequence[str | Lease] = ("",),
    leaf_first: bool = True,
    key_order: bool = True,
    heeds: Collection[str] = ("queue", "rank"),
    max_examples: int = 150,
    steps: int = 50,
    shrink: bool = True,
) -> None:
    """Run the conformance suite on a policy; return if it found no fault. Deterministic.

    The rules are those of `Policy`. A fault is shown with the calls that lead to it, as a program.

    Args:
        make: Makes a fresh policy: its class, or any callable without arguments.
        leases: Lease classes and leases that inserts draw from.
        leaf_first: Also demand that a block goes after its resident children.
        key_order: Also demand that the smallest priority goes first.
        heeds: "queue": queued blocks go last, if `enqueue` is overridden; "rank": lower ranks go
            first, if one of the leases has a rank.
        max_examples: Number of stories to run.
        steps: Calls per story.
        shrink: Search for the shortest story that shows a fault, rather than report the first.

    Raises:
        AssertionError: A rule is broken, or the policy raised; a note has the calls.
    """
    said = {"make": staticmethod(make), "leases": tuple(leases), "leaf_first": leaf_first}
    said |= {"key_order": key_order, "heeds": frozenset(heeds)}
    tell_machine(type("Story", (PolicyStory,), said), max_examples, steps, shrink)


# A model over a dozen slots of the rules that hold for every policy's next victim.


class PolicyModel:
    """Model of residency: the resident blocks, their tree, and those that must stay.

    Args:
        leaf_first: Whether a block must go after its resident children.

    Attributes:
        parent: Resident slot -> resident parent, or -1.
        gone: Resident slots that had expired at the last query.
        pins: Slot -> pins.
        queued: Request -> its chain.
        rank: Resident slot -> the rank it was inserted with.
        hinted: Slots with a hint, and the slots above them.
        tenant: Resident slot -> tenant.
    """

    def __init__(self, leaf_first: bool) -> None:
        self.leaf_first = leaf_first
        self.parent: dict[int, int] = {}
        self.gone: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.queued: dict[int, list[int]] = {}
        self.rank: dict[int, int] = {}
        self.hinted: set[int] = set()
        self.tenant: dict[int, int] = {}

    def add(self, slot: int, parent: int, tenant: int, rank: int) -> None:
        """Add a block that became resident."""
        self.parent[slot] = parent if parent in self.parent and parent not in self.gone else -1
        self.tenant[slot], self.rank[slot] = tenant, rank

    def drop(self, slots: Collection[int]) -> None:
        """Remove blocks that are no longer resident; their children become roots."""
        for s in slots:
            del self.parent[s], self.tenant[s], self.rank[s]
            self.gone.discard(s)
        for child, p in self.parent.items():
            if p in slots:
                self.parent[child] = -1

    def path(self, slot: int) -> list[int]:
        """Return a resident slot and those above it, root to leaf; empty for other slots."""
        found: list[int] = []
        while slot in self.parent:
            found.insert(0, slot)
            slot = self.parent[slot]
        return found

    def below(self, slot: int) -> set[int]:
        """Return a slot and its resident descendants."""
        return {s for s in self.parent if slot in self.path(s)}

    def stuck(self, protected: Collection[int]) -> set[int]:
        """Return the resident slots that must stay: pinned, protected, or above those."""
        held = {s for s in (*self.pins, *protected) if s in self.parent}
        if self.leaf_first:
            held |= {above for s in held for above in self.path(s)}
        return held

    def stale_of(self, tenant: int) -> set[int]:
        """Return the slots that must have expired once a tenant's blocks are invalid."""
        return {s for s in self.parent if all(self.tenant[x] == tenant for x in self.below(s))}

    def judge(
        self, victim: int, free: set[int], worth: Mapping[int, float], heeded: Collection[str]
    ) -> None:
        """Check that it was this slot's turn.

        Args:
            victim: The evicted slot.
            free: Slots that could have been evicted, leaves or not.
            worth: Priorities of all slots; empty if unknown.
            heeded: Properties that the policy respects: "queue", "rank".
        """
        has_child = set(self.parent.values())
        turn = free - has_child if self.leaf_first else free
        if self.leaf_first:
            require(victim not in has_child, "a block went before its resident child")
        if victim not in self.gone:
            require(not turn & self.gone, "a live block went before an expired one")
        for s in turn if worth else ():
            if (s in self.gone) == (victim in self.gone):
                require(worth[victim] <= worth[s], "a smaller priority must go earlier")
        rivals = turn - self.gone - {victim}
        certain = {s for chain in self.queued.values() for s in chain}
        if "queue" in heeded and victim in certain - self.gone:
            require(rivals <= certain, "a queued block went before one without a queued request")
        plain = rivals - self.hinted - certain
        if "rank" in heeded and victim not in self.gone | self.hinted | certain:
            least = min((self.rank[s] for s in plain), default=DEFAULT_RANK)
            if plain:
                require(self.rank[victim] <= least, "a block went before one of lower rank")


# A Hypothesis state machine of all calls that a policy may receive.
#
# Three copies of the policy go through the same story. One gets the times as they come,
# backwards too; one gets the clamped times; one gets only calls that must have an effect: no
# queries, no refused evictions. All three must answer alike.

SLOTS = 12
SECOND = 10**9
steps_ns = st.sampled_from([0, 0, 1, SECOND, 7 * SECOND, 100 * SECOND, -1, -3 * SECOND])
masks = st.integers(0, (1 << SLOTS + 2) - 1)
slot_sets = st.builds(  # about a quarter of all slots
    lambda a, b: [s for s in range(SLOTS + 2) if a & b & 1 << s], masks, masks
)
few_slots = st.lists(st.integers(0, SLOTS + 2), max_size=2)
requests = st.integers(0, 3)


def array(slots: Sequence[int]) -> Slots:
    """Return slots as the array that policies get."""
    return np.array(slots, dtype=np.int64)


class Narrated:
    """Policy with a record of its calls, as lines of Python.

    Args:
        policy: The policy.
        calls: Gets the lines. Queries that follow every call are left out, and learned models.
    """

    def __init__(self, policy: Policy, calls: list[str]) -> None:
        self._policy, self._calls = policy, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._policy, name)
        if name in _UNTOLD:
            return method

        def call(*args: Any, **named: Any) -> Any:
            words = [*map(_shown, args), *(f"{key}={_shown(one)}" for key, one in named.items())]
            self._calls.append(f"policy.{name}({', '.join(words)})")
            answer = method(*args, **named)
            if answer is not None:
                self._calls[-1] += f"  # {_shown(answer)}"
            return answer

        return call


_UNTOLD = {"name", "priority", "resident", "digest", "weakest", "save_model", "load_model"}


def _shown(value: object) -> str:
    return f"np.array({value.tolist()})" if isinstance(value, np.ndarray) else repr(value)


def overrides(policy: Policy, *methods: str) -> bool:
    """Return whether a policy overrides all of these methods."""
    return all(getattr(type(policy), m) is not getattr(Policy, m) for m in methods)


class PolicyStory(RuleBasedStateMachine):
    """Calls of all kinds to a policy and a slow model of it; `check_policy` sets the attributes."""

    make: Callable[[], Policy]
    leases: tuple[str | Lease, ...]
    leaf_first: bool
    key_order: bool
    heeds: frozenset[str]
    calls: ClassVar[list[str]] = []  # of the last story

    @initialize(start=st.sampled_from([0, 5 * SECOND, 10**18, -SECOND]))
    def begin(self, start: int) -> None:
        """Make the three copies."""
        type(self).calls = ["policy = make()"]
        self.make_copies()
        require(isinstance(self.twin, Policy), "it must have every method of Policy")
        require(bool(self.raw.name), "its name must not be empty")
        self.clock = self.clamped = start
        self.heeded = set(self.heeds)
        if not overrides(self.twin, "enqueue"):
            self.heeded.discard("queue")
        if not any(isinstance(x, Lease) and x.rank != DEFAULT_RANK for x in self.leases):
            self.heeded.discard("rank")
        for first in (0, 3):
            self.insert(SECOND, 3, first, True, first, (1, 0, 0))

    def make_copies(self) -> None:
        """Make the three copies, without blocks."""
        self.raw: Any = Narrated(self.make(), self.calls)
        self.twin, self.quiet = self.make(), self.make()
        self.model = PolicyModel(self.leaf_first)

    # --- changes --------------------------------------------------------------------------------

    @rule(
        dt=steps_ns,
        n=st.integers(1, 4),
        first=st.integers(0, SLOTS),
        known=st.booleans(),
        lease=st.integers(0, 7),
        said=st.tuples(st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1)),
    )
    def insert(
        self, dt: int, n: int, first: int, known: bool, lease: int, said: tuple[int, int, int]
    ) -> None:
        """Insert a chain, below `first` if that is resident and parents are known."""
        self.ask_expired(dt)
        order = [(first + 5 * i) % SLOTS for i in range(SLOTS)]
        slots = [s for s in order if s not in self.model.parent][:n]
        above = [first, *slots][: len(slots)] if known else [-1] * len(slots)
        word = self.leases[lease % len(self.leases)]
        rank = word.rank if isinstance(word, Lease) else DEFAULT_RANK
        n_bytes, cost_ns, tenant = said
        for s, p in zip(slots, above, strict=True):
            mine = p if self.model.tenant.get(p, tenant) == tenant else -1
            self.model.add(s, mine, tenant, rank)
        above = [self.model.parent[s] for s in slots]
        more: dict[str, Any] = {"n_bytes": n_bytes, "cost_ns": cost_ns, "tenant": tenant}
        self.call_all(lambda x, now, a, b: x.insert(now, a, b, lease=word, **more), slots, above)

    @rule(
        dt=steps_ns,
        end=st.integers(0, SLOTS),
        strangers=slot_sets,
        request=st.integers(-1, 3),
        session=st.integers(-1, 1),
        tokens=st.sampled_from([0, 1, 10**6]),
        tenant=st.integers(-1, 1),
    )
    def access(
        self, dt: int, end: int, strangers: list[int], request: int, session: int, tokens: int,
        tenant: int,
    ) -> None:  # fmt: skip
        """Let a request use the chain down to `end`, and name some slots that are not resident."""
        self.pass_time(dt, silently=True)
        path = self.model.path(end) + [s for s in strangers if s not in self.model.parent]
        visit = Visit(request, session, tokens, len(path), tenant)
        self.call_all(lambda x, now, a: x.access(now, a, visit), path)
        self.model.queued.pop(request, None)

    @rule(dt=steps_ns, request=requests, stop=st.integers(0, 3), tokens=st.integers(0, 10**6))
    def complete(self, dt: int, request: int, stop: int, tokens: int) -> None:
        """Complete a request, known or not."""
        self.pass_time(dt)
        self.call_all(lambda x, now: x.complete(now, request, stop=stop, output_tokens=tokens))

    @rule(slots=few_slots)
    def remove(self, slots: list[int]) -> None:
        """Remove blocks, resident or not; their children stay as roots."""
        here = sorted(set(slots) & set(self.model.parent))
        self.call_all(lambda x, now, a: x.remove(a), slots, quiet=here)
        self.model.drop(here)

    @rule(slots=few_slots)
    def forget(self, slots: list[int]) -> None:
        """Forget some blocks that are neither resident, pinned nor queued for."""
        queued = chain.from_iterable(self.model.queued.values())
        busy = {*self.model.parent, *self.model.pins, *queued}
        self.call_all(lambda x, now, a: x.forget(a), [s for s in slots if s not in busy])

    @rule(slot=st.integers(0, SLOTS - 1))
    def reuse(self, slot: int) -> None:
        """Reuse a slot for another block, which has none of the children of the last one."""
        self.remove([slot])
        self.forget([slot])
        self.model.add(slot, -1, 0, DEFAULT_RANK)
        self.call_all(lambda x, now, a, b: x.insert(now, a, b), [slot], [-1])

    @precondition(lambda self: overrides(self.twin, "pin", "unpin"))
    @rule(end=st.integers(0, SLOTS), others=few_slots)
    def pin(self, end: int, others: list[int]) -> None:
        """Pin a chain, and some other slots, resident or not."""
        slots = self.model.path(end) + others
        self.call_all(lambda x, now, a: x.pin(a), slots)
        self.model.pins.update(slots)

    @precondition(lambda self: self.model.pins)
    @rule(which=slot_sets)
    def unpin(self, which: list[int]) -> None:
        """Release some pins."""
        slots = [s for s in which if self.model.pins[s]] or [min(self.model.pins)]
        self.call_all(lambda x, now, a: x.unpin(a), slots)
        self.model.pins.subtract(slots)
        self.model.pins += type(self.model.pins)()

    @rule(
        dt=steps_ns,
        end=st.integers(0, SLOTS),
        eta_ns=st.sampled_from([0, 1, SECOND, 50 * SECOND, NEVER_NS]),
        sigma=st.sampled_from([0.0, 0.5, 2.0]),
    )
    def hint(self, dt: int, end: int, eta_ns: int, sigma: float) -> None:
        """Announce the next use of a chain, or of a slot that is not resident."""
        self.pass_time(dt)
        path = self.model.path(end) or [end]
        self.call_all(lambda x, now, a: x.hint(now, a, eta_ns, sigma), path)
        self.model.hinted.update(path)

    @rule(dt=steps_ns, request=requests, end=st.integers(0, SLOTS))
    def enqueue(self, dt: int, request: int, end: int) -> None:
        """Queue a request, which may be queued already, for another chain."""
        self.pass_time(dt)
        path = self.model.path(end) or [end]
        self.call_all(lambda x, now, a: x.enqueue(now, request, a), path)
        self.model.queued[request] = path

    @rule(dt=steps_ns, request=requests)
    def abort(self, dt: int, request: int) -> None:
        """Abort a request, known or not."""
        self.pass_time(dt)
        self.call_all(lambda x, now: x.abort(now, request))
        self.model.queued.pop(request, None)

    @rule(dt=steps_ns, tenant=st.integers(0, 2))
    def invalidate(self, dt: int, tenant: int) -> None:
        """Invalidate all blocks of a tenant; the third tenant has none."""
        self.ask_expired(dt)
        self.call_all(lambda x, now: x.invalidate(now, tenant))
        stale = self.model.stale_of(tenant)
        self.ask_expired(0)
        if overrides(self.twin, "invalidate"):
            require(stale <= self.model.gone, "an invalid block had not expired")

    @precondition(lambda self: isinstance(self.twin, Learner))
    @rule(first=st.integers(0, SLOTS))
    def restart(self, first: int) -> None:
        """Go on with fresh copies, without blocks, that start from the learned model."""
        self.calls.append("saved, policy = policy.save_model(), make()")
        saved, same = (cast("Learner", x).save_model() for x in (self.raw, self.twin))
        require(saved == same, "equal stories must give equal answers")
        self.make_copies()
        if saved:
            self.calls.append("policy.load_model(saved)")
            for copy in (self.raw, self.twin, self.quiet):
                cast("Learner", copy).load_model(saved)
        self.insert(0, 3, first, True, 0, (1, 0, 0))

    # --- decisions ------------------------------------------------------------------------------

    @rule(
        dt=steps_ns,
        n=st.sampled_from([1, 1, 2, 3, 5, 0, -1, -2, -2, -3]),
        protected=slot_sets,
        box=st.sampled_from([list, set, tuple, frozenset, array]),
    )
    def evict(
        self, dt: int, n: int, protected: list[int], box: Callable[..., Collection[int]]
    ) -> None:
        """Evict `n` blocks or, if negative, about as many as possible."""
        self.ask_expired(dt)
        model = self.model
        most = len(model.parent) - len(model.stuck(protected))
        n = n if n >= 0 else max(0, most + n + 2)
        free = set(model.parent) - set(protected) - set(model.pins)
        worth = {s: self.raw.priority(s) for s in model.parent}
        before, weakest = self.raw.digest(), self.raw.weakest(self.clock, box(protected))
        got = self.raw.evict(self.clock - abs(dt), n, box(protected))  # as late as the last call
        same = self.twin.evict(self.clamped, n, box(protected))
        if got is None or same is None:
            require(got is None and same is None, "equal stories must give equal answers")
            require(n > most, f"evict({n}) was refused; {most} can be freed leaf by leaf")
            return
        quiet = self.quiet.evict(self.clamped, n, box(protected))
        victims = self.agreed(got, same)
        require(quiet is not None and victims == quiet.tolist(), "a call without effect had one")
        require(len(victims) == n, f"evict({n}) gave {len(victims)} victims")
        require(n == 0 or before != self.raw.digest(), "the digest must tell of every decision")
        if n == 1 and overrides(self.twin, "weakest"):
            require(victims == [weakest], "the weakest was not the one that went")
        self.check_victims(victims, free, worth if n == 1 and self.key_order else {})

    @rule(
        dt=steps_ns,
        n=st.integers(0, 3),
        rate=st.sampled_from([0.0, 1e-3, 1.0, math.inf]),
        protected=slot_sets,
    )
    def displace(self, dt: int, n: int, rate: float, protected: list[int]) -> None:
        """Make room for a prefetch."""
        self.ask_expired(dt)
        free = set(self.model.parent) - set(protected) - set(self.model.pins)
        worth = {s: self.raw.priority(s) for s in free - self.model.gone}
        got = self.raw.displace(self.clock - abs(dt), n, rate, protected)
        same = self.twin.displace(self.clamped, n, rate, protected)
        quiet = self.quiet.displace(self.clamped, n, rate, protected)
        victims = self.agreed(got, same)
        require(victims == quiet.tolist(), "a call without effect had one")
        require(len(victims) <= n, f"displace({n}) gave {len(victims)} victims")
        low = all(worth.get(victim, -math.inf) < rate for victim in victims[:1])
        require(low or rate == math.inf, "a block was displaced for a rate below its own")
        self.check_victims(victims, free, {})

    @rule(dt=steps_ns)
    def ask_expired(self, dt: int) -> None:
        """Query the expired slots."""
        self.pass_time(dt)
        got = self.agreed(self.raw.expired(self.clock), self.twin.expired(self.clamped))
        require(len(set(got)) == len(got), "expired named a slot twice")
        require(set(got) <= set(self.model.parent), "expired named a slot that is not resident")
        require(self.model.gone <= set(got), "an expired block came back without an insert")
        self.model.gone = set(got)

    @rule(dt=steps_ns, slots=slot_sets)
    def ask_admit(self, dt: int, slots: list[int]) -> None:
        """Query which slots are worth their bytes."""
        self.pass_time(dt)
        news = [s for s in slots if s not in self.model.parent]
        got = self.raw.admit(self.clock, array(news))
        same = self.twin.admit(self.clamped, array(news))
        require(got.dtype == np.bool_ and got.shape == (len(news),), "admit: one bool per slot")
        require(bool(np.array_equal(got, same)), "equal stories must give equal answers")

    @rule(dt=steps_ns, n=st.integers(0, 4))
    def ask_wanted(self, dt: int, n: int) -> None:
        """Query which slots should come back."""
        self.pass_time(dt)
        got, rates = self.raw.wanted(self.clock, n)
        same, equal = self.twin.wanted(self.clamped, n)
        tips = self.agreed(got, same)
        require(bool(np.array_equal(rates, equal)), "equal stories must give equal answers")
        require(len(tips) <= n and len(tips) == len(rates), "wanted: at most n, one rate each")
        require(not set(tips) & set(self.model.parent), "wanted named a resident slot")
        require(bool(np.all(np.diff(rates) <= 0)), "wanted: the best first")
        require(bool(np.all(rates >= 0)), "wanted: rates are numbers from 0 upwards")

    @invariant()
    def agrees(self) -> None:
        """Compare residence, priorities and digests, after every call."""
        here = list(self.raw.resident())
        require(len(set(here)) == len(here), "resident names a slot twice")
        require(set(here) == set(self.model.parent), "resident lists other slots than the story")
        for s in range(-1, SLOTS + 3):
            value = self.raw.priority(s)
            require(not math.isnan(value), "a priority must be a number")
            is_here = value > -math.inf
            require(is_here == (s in self.model.parent), "priority is -inf where not resident")
        digest = self.raw.digest()
        require(0 <= digest < 1 << 64, "digest is an unsigned number of 64 bits")
        require(digest == self.raw.digest() == self.twin.digest(), "equal stories: equal digests")

    # --- parts ----------------------------------------------------------------------------------

    def pass_time(self, dt: int, silently: bool = False) -> None:
        """Move the raw clock, perhaps backwards, and the clamped one.

        A call that a policy ignores does not pass it the time; an eviction of nothing does.
        """
        self.clock = self.clamped + dt
        self.clamped = max(self.clamped, self.clock)
        if not silently:
            self.raw.evict(self.clock, 0)
            self.twin.evict(self.clamped, 0)

    def call_all(
        self, call: Callable[..., None], *arrays: list[int], quiet: list[int] | None = None
    ) -> None:
        """Pass one call to all three copies; arrays that are kept or written are detected."""
        mine = [array(a) for a in arrays]
        call(self.raw, self.clock, *mine)
        for a, given in zip(mine, arrays, strict=True):
            require(a.tolist() == given, "an argument was written to")
            a[:] = -7
        call(self.twin, self.clamped, *[array(a) for a in arrays])
        if quiet is None:
            call(self.quiet, self.clamped, *[array(a) for a in arrays])
        elif quiet:
            call(self.quiet, self.clamped, array(quiet))

    def agreed(self, got: NDArray[Any], same: NDArray[Any]) -> list[int]:
        """Return the answer of two copies, which must be equal; overwrite one of them."""
        answer: list[int] = got.tolist()
        require(got.ndim == 1 and got.dtype.kind == "i", "an answer is a vector of integers")
        require(answer == same.tolist(), "equal stories must give equal answers")
        if got.flags.writeable:
            got[:] = -7
        return answer

    def check_victims(self, victims: list[int], free: set[int], worth: dict[int, float]) -> None:
        """Remove victims from the model, after checking each of them."""
        require(len(set(victims)) == len(victims), "a slot was evicted twice")
        require(set(victims) <= set(self.model.parent), "a victim was not resident")
        require(set(victims) <= free, "a protected or pinned slot was evicted")
        for victim in victims:
            self.model.judge(victim, free, worth, self.heeded)
            self.model.drop([victim])
            free.discard(victim)
