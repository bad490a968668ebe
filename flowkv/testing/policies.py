"""`check_policy`: what every `Policy` must do, as a Hypothesis state machine over a dozen slots.

Three copies of the policy live through the same story. One gets the times as they come, backwards
too; one gets the clamped times; one hears nothing but what must have an effect: no queries, no
refused evictions, no mention of slots that are not resident. All three must answer alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import MissingDependencyError
from flowkv.policy.base import Policy, Slots

try:
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        initialize,
        invariant,
        rule,
        run_state_machine_as_test,
    )
except ImportError:  # pragma: no cover
    raise MissingDependencyError("flowkv.testing", "dev") from None

SLOTS = 12
SECOND = 10**9
steps_ns = st.sampled_from([0, 0, 1, SECOND, 7 * SECOND, 100 * SECOND, -1, -3 * SECOND])
masks = st.integers(0, (1 << SLOTS + 2) - 1)
slot_sets = st.builds(  # about a quarter of all slots
    lambda a, b: [s for s in range(SLOTS + 2) if a & b & 1 << s], masks, masks
)
few_slots = st.lists(st.integers(0, SLOTS + 2), max_size=2)


def check_policy(
    make: Callable[[], Policy],
    *,
    leases: Sequence[str] = ("",),
    leaf_first: bool = True,
    max_examples: int = 150,
    steps: int = 50,
    shrink: bool = True,
) -> None:
    """Runs the conformance suite on a policy; returns if it found no fault. Deterministic.

    Checked: victims are resident, distinct, unprotected and as many as asked for; an eviction that
    is refused, a query and a slot that is not resident change nothing; nothing is refused that
    could be had leaf by leaf; expired blocks go first, stay expired and are resident; the smallest
    priority goes first; time that runs backwards stands still; removal and reuse of slots; equal
    stories give equal answers and digests; arrays are neither kept nor written.

    Args:
        make: Makes a fresh policy: its class, or any callable without arguments.
        leases: Lease classes that inserts draw from.
        leaf_first: Also demand that a block goes after its resident children.
        max_examples: Stories to tell.
        steps: Calls per story.
        shrink: Look for the shortest story that shows a fault, rather than tell the first.

    Raises:
        AssertionError: With a story that shows the fault.
    """
    machine = type(
        "PolicyStory",
        (_Story,),
        {"make": staticmethod(make), "leases": tuple(leases), "leaf_first": leaf_first},
    )
    how = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(machine, settings=how)
    except Flaky as error:
        raise AssertionError("the same story told again ended differently") from error


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _array(slots: Sequence[int]) -> Slots:
    return np.array(slots, dtype=np.int64)


class _Story(RuleBasedStateMachine):
    """The machine. The model is `parent`: resident slot -> resident parent, or -1."""

    make: Callable[[], Policy]
    leases: tuple[str, ...]
    leaf_first: bool

    @initialize(start=st.sampled_from([0, 5 * SECOND, 10**18, -SECOND]))
    def begin(self, start: int) -> None:
        """Makes the three copies."""
        self.raw, self.twin, self.quiet = self.make(), self.make(), self.make()
        _require(isinstance(self.raw, Policy), "it must have every method of Policy")
        _require(bool(self.raw.name), "its name must not be empty")
        self.clock = self.clamped = start
        self.parent: dict[int, int] = {}
        self.gone: set[int] = set()  # expired when last asked
        for first in (0, 3):
            self.insert(dt=SECOND, n=3, first=first, known=True, lease=first, n_bytes=1)

    # --- the calls -----------------------------------------------------------------------------

    @rule(
        dt=steps_ns,
        n=st.integers(1, 4),
        first=st.integers(0, SLOTS),
        known=st.booleans(),
        lease=st.integers(0, 7),
        n_bytes=st.integers(1, 1 << 40),
    )
    def insert(self, dt: int, n: int, first: int, known: bool, lease: int, n_bytes: int) -> None:
        """A chain becomes resident, below `first` if that is resident and parents are known."""
        self.ask_expired(dt)
        order = [(first + 5 * i) % SLOTS for i in range(SLOTS)]
        slots = [s for s in order if s not in self.parent][:n]
        above = [first, *slots][: len(slots)] if known else [-1] * len(slots)
        for s, p in zip(slots, above, strict=True):
            self.parent[s] = p if p in self.parent and p not in self.gone else -1
        word = self.leases[lease % len(self.leases)]

        def call(policy: Policy, now: int, a: Slots, b: Slots) -> None:
            policy.insert(now, a, b, n_bytes=n_bytes, lease=word)

        self.tell(call, slots, above)

    @rule(dt=steps_ns, end=st.integers(0, SLOTS), strangers=slot_sets)
    def access(self, dt: int, end: int, strangers: list[int]) -> None:
        """A request uses the chain down to `end`, and names some slots that are not resident."""
        self.pass_time(dt)
        path: list[int] = []
        while end in self.parent:
            path.insert(0, end)
            end = self.parent[end]
        strange = [s for s in strangers if s not in self.parent]
        self.tell(lambda policy, now, a: policy.access(now, a), path + strange, quiet=[path])

    @rule(slots=few_slots)
    def remove(self, slots: list[int]) -> None:
        """Blocks vanish, resident or not; their children stay as roots."""
        here = sorted(set(slots) & set(self.parent))
        self.tell(lambda policy, now, a: policy.remove(a), slots, quiet=[here])
        self.forget(here)

    @rule(slot=st.integers(0, SLOTS - 1))
    def reuse(self, slot: int) -> None:
        """Another block takes the slot, and has none of the children of the last one."""
        self.remove([slot])
        self.parent[slot] = -1
        self.tell(lambda policy, now, a, b: policy.insert(now, a, b), [slot], [-1])

    @rule(
        dt=steps_ns,
        n=st.sampled_from([1, 1, 2, 3, 5, 0, -1, -2, -2, -3]),
        protected=slot_sets,
        box=st.sampled_from([list, set, tuple, frozenset, _array]),
    )
    def evict(
        self, dt: int, n: int, protected: list[int], box: Callable[..., Collection[int]]
    ) -> None:
        """Room is needed: for `n` blocks or, if negative, for about all that can be had."""
        self.ask_expired(dt)
        most = len(self.parent) - len(self.at_or_above(protected))
        n = n if n >= 0 else max(0, most + n + 2)
        free = set(self.parent) - set(protected)
        worth = {s: self.raw.priority(s) for s in self.parent}
        before = self.raw.digest()
        got = self.raw.evict(self.clock, n, box(protected))
        same = self.twin.evict(self.clamped, n, box(protected))
        if got is None or same is None:
            _require(got is None and same is None, "equal stories must give equal answers")
            _require(n > most, f"evict({n}) was refused; {most} can be freed leaf by leaf")
            return
        quiet = self.quiet.evict(self.clamped, n, box(protected))
        victims = self.take(got, same)
        _require(quiet is not None and victims == quiet.tolist(), "a call without effect had one")
        _require(len(victims) == n, f"evict({n}) gave {len(victims)} victims")
        _require(len(set(victims)) == n, "a slot was given up twice")
        _require(set(victims) <= set(self.parent), "a victim was not resident")
        _require(set(victims) <= free, "a protected slot was given up")
        _require(n == 0 or before != self.raw.digest(), "the digest must tell of every decision")
        for victim in victims:
            self.judge(victim, free, worth if n == 1 else {})
            self.forget([victim])
            free.discard(victim)

    @rule(dt=steps_ns)
    def ask_expired(self, dt: int) -> None:
        """What has run out?"""
        self.pass_time(dt)
        got = self.take(self.raw.expired(self.clock), self.twin.expired(self.clamped))
        _require(len(set(got)) == len(got), "expired named a slot twice")
        _require(set(got) <= set(self.parent), "expired named a slot that is not resident")
        _require(self.gone <= set(got), "an expired block came back without an insert")
        self.gone = set(got)

    @rule(dt=steps_ns, slots=slot_sets)
    def ask_admit(self, dt: int, slots: list[int]) -> None:
        """What would be worth its bytes?"""
        self.pass_time(dt)
        news = [s for s in slots if s not in self.parent]
        got = self.raw.admit(self.clock, _array(news))
        same = self.twin.admit(self.clamped, _array(news))
        _require(got.dtype == np.bool_ and got.shape == (len(news),), "admit: one bool per slot")
        _require(bool(np.array_equal(got, same)), "equal stories must give equal answers")

    @invariant()
    def agrees(self) -> None:
        """Residence, priorities and digests, after every call."""
        here = list(self.raw.resident())
        _require(len(set(here)) == len(here), "resident names a slot twice")
        _require(set(here) == set(self.parent), "resident is not what was inserted and not lost")
        for s in range(-1, SLOTS + 3):
            is_here = self.raw.priority(s) > -math.inf
            _require(is_here == (s in self.parent), "priority is -inf where not resident, only")
        digest = self.raw.digest()
        _require(0 <= digest < 1 << 64, "digest is an unsigned number of 64 bits")
        _require(digest == self.raw.digest() == self.twin.digest(), "equal stories: equal digests")

    # --- helpers -------------------------------------------------------------------------------

    def pass_time(self, dt: int) -> None:
        """Moves the raw clock, perhaps backwards, and the clamped one."""
        self.clock = self.clamped + dt
        self.clamped = max(self.clamped, self.clock)

    def tell(
        self, call: Callable[..., None], *arrays: list[int], quiet: list[list[int]] | None = None
    ) -> None:
        """One call to all three; arrays that are kept or written show up."""
        mine = [_array(a) for a in arrays]
        call(self.raw, self.clock, *mine)
        for a, given in zip(mine, arrays, strict=True):
            _require(a.tolist() == given, "an argument was written to")
            a[:] = -7
        call(self.twin, self.clamped, *[_array(a) for a in arrays])
        if quiet is None or quiet[0]:
            call(self.quiet, self.clamped, *[_array(a) for a in quiet or arrays])

    def take(self, got: NDArray[Any], same: NDArray[Any]) -> list[int]:
        """The answer of two copies, which must be equal; scribbles over one of them."""
        answer: list[int] = got.tolist()
        _require(got.ndim == 1 and got.dtype.kind == "i", "an answer is a vector of integers")
        _require(answer == same.tolist(), "equal stories must give equal answers")
        if got.flags.writeable:
            got[:] = -7
        return answer

    def judge(self, victim: int, free: set[int], worth: dict[int, float]) -> None:
        """Whether it was this one's turn."""
        has_child = set(self.parent.values())
        turn = free - has_child if self.leaf_first else free
        if self.leaf_first:
            _require(victim not in has_child, "a block went before its resident child")
        if victim not in self.gone:
            _require(not turn & self.gone, "a live block went before an expired one")
        for s in turn if worth else ():
            if (s in self.gone) == (victim in self.gone):
                _require(worth[victim] <= worth[s], "a smaller priority must go earlier")

    def at_or_above(self, slots: Collection[int]) -> set[int]:
        """These and their ancestors, as far as resident."""
        found: set[int] = set()
        for s in slots:
            while s in self.parent and s not in found:
                found.add(s)
                s = self.parent[s]
        return found

    def forget(self, slots: Collection[int]) -> None:
        """No longer resident; children become roots."""
        for s in slots:
            del self.parent[s]
            self.gone.discard(s)
        for child, p in self.parent.items():
            if p in slots:
                self.parent[child] = -1
