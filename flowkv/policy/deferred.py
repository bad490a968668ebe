"""A policy that is told what happened once there is something to decide.

The compiled code of an order, and of what learns beside it, takes tens of seconds to make on a new
machine and half a second to load later. A cache that has room for everything needs none of it: no
call before the first choice has an answer that depends on those before it. So the calls are kept,
and the policy hears all of them, in their order, before it first has to answer. A thread has
another policy of its kind rehearse, once some requests have come or something must be given up. No
call waits for that: victims are chosen by plain LRU, and what may be left unanswered is.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial, wraps
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.order.compiled import SLOT_LIMIT
from flowkv.policy.order.leaf import TENANT_LIMIT, LeafOrder, as_slots

MOST_KEPT = 1 << 17
"""Numbers in calls that are kept; about a megabyte."""
_CALL = 32  # numbers that a call weighs besides its slots

_DEEPEST = 1 << 14  # blocks of a chain

FEW_VISITS = 32
"""What fewer requests teach is not worth a compiler's work when the cache is closed."""


def _later(name: str) -> Any:
    """A method that only says what happened: kept, or passed on."""

    @wraps(getattr(Policy, name), updated=())  # which is abstract
    def tell(self: Deferred, *said: Any, **more: Any) -> None:
        if self._calls is None:
            getattr(self.policy, name)(*said, **more)
        else:
            self._keep(name, *(x.copy() if isinstance(x, np.ndarray) else x for x in said), **more)

    return tell


def _now(name: str) -> Any:
    """A method that asks for what depends on everything before it."""

    @wraps(getattr(Policy, name), updated=())  # which is abstract
    def ask(self: Deferred, *said: Any, **more: Any) -> Any:
        return getattr(self.caught_up(), name)(*said, **more)

    return ask


class Recency:
    """Residents in the order of their last use, a block behind those above it: a plain LRU."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}  # the first goes first
        self._said: dict[int, tuple[int, dict[str, Any]]] = {}  # parents, and more of the insert
        self._pins: Counter[int] = Counter()

    def hear(self, name: str, said: tuple[Any, ...], more: dict[str, Any]) -> None:
        """Follow a call that was kept for the policy."""
        if name == "insert":
            slots, parents = said[1].tolist(), said[2].tolist()
            self._said |= {s: (above, more) for s, above in zip(slots, parents, strict=True)}
            self._order |= dict.fromkeys(slots)
            self._use(slots)
        elif name == "access":
            self._use(said[1].tolist())
        elif name in ("remove", "forget"):
            for slot in said[0].tolist():
                self._order.pop(slot, None)
                if name == "forget":
                    self._said.pop(slot, None)
        elif name in ("pin", "unpin"):
            self._pins.update(dict.fromkeys(said[0].tolist(), 1 if name == "pin" else -1))

    def choose(self, n: int, protected: Collection[int]) -> list[int] | None:
        """Return `n` victims, none pinned or protected; None where there are not so many."""
        free = (s for s in self._order if self._pins[s] <= 0 and s not in protected)
        found = list(islice(free, n))
        return found if len(found) == n else None

    def calls(self, now_ns: int) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """Return the fewest calls after which a fresh policy keeps the same."""
        found: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for slot in reversed(self._order):  # whatever lies above comes before
            above, more = self._said[slot]
            slots = as_slots([slot]), as_slots([above if above in self._order else -1])
            found.append(("insert", (now_ns, *slots), more))
        pinned = [slot for slot, count in self._pins.items() for _ in range(count)]
        return [*found, *(("pin", (as_slots([slot]),), {}) for slot in pinned)]

    def _use(self, slots: list[int]) -> None:
        """Put a chain last, from the deepest block up to the top."""
        chain, at = list(reversed(slots)), slots[0] if slots else -1
        while (at := self._said[at][0] if at in self._said else -1) >= 0 and len(chain) < _DEEPEST:
            chain.append(at)
        for slot in chain:
            if slot in self._order:
                del self._order[slot]
                self._order[slot] = None


class Deferred(Policy):
    """Answers as the policy behind it would, and has it compiled only where that matters.

    While nothing was ever given up, orders admit everything, wish for nothing but what was named
    and is not here, and hold nothing expired unless a lease was said: that is answered here. The
    policy catches up for any other question, for what is unusual, and when many calls are kept.
    What few requests taught is not saved.

    Args:
        policy: Fresh: it was not called yet.
        ready: Whether the policy could answer at once; asked before it is told of anything for the
            sake of an answer that LRU can give, or that could as well be none.

    Attributes:
        policy: The same; while calls are kept, it does not know of them.
    """

    def __init__(self, policy: LeafOrder, ready: Callable[[], bool] = lambda: True) -> None:
        self.name, self.policy, self._ready = policy.name, policy, ready
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] | None = []
        self._kept = self._visits = 0
        self._brought = b""
        default = policy.config.classes()[""]
        self._expires = min(default.lease_s, default.max_age_s) < np.inf
        self._wishes = type(policy).wanted is not Policy.wanted
        self._here, self._away = set[int](), set[int]()  # slots that were named
        self._recency: Recency | None = None  # since something had to be given up too soon

    def caught_up(self) -> LeafOrder:
        """The policy, which has heard everything."""
        calls, self._calls, self._recency = self._calls, None, None
        for name, said, more in calls or ():
            getattr(self.policy, name)(*said, **more)
        return self.policy

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Blocks became resident here, root to leaf; `parents[i]` is a slot or -1."""
        slots, parents = as_slots(slots), as_slots(parents)
        usual = len(slots) == len(parents) and 0 <= said.get("tenant", 0) < TENANT_LIMIT
        usual = usual and (len(slots) == 0 or 0 <= slots.min() <= slots.max() < SLOT_LIMIT)
        if self._calls is None or said.get("lease") or not usual:
            self.caught_up().insert(now_ns, slots, parents, **said)
        else:
            self._keep("insert", now_ns, slots.copy(), parents.copy(), **said)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """A request uses these known blocks, root to leaf."""
        if self._calls is None:
            self.policy.access(now_ns, slots, visit)
        else:
            self._visits += 1
            if self._visits == FEW_VISITS:
                self._ready()
            self._keep("access", now_ns, as_slots(slots).copy(), visit)

    remove, forget, pin, unpin = map(_later, ("remove", "forget", "pin", "unpin"))
    complete, abort, hint, enqueue = map(_later, ("complete", "abort", "hint", "enqueue"))
    invalidate = _now("invalidate")

    # ---- what is decided

    priority, weakest, resident = map(_now, ("priority", "weakest", "resident"))

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims; None, and nothing changed, where there are too few."""
        if self._calls is None or self._ready():
            return self.caught_up().evict(now_ns, n, protected)
        found = self._lru().choose(n, protected)
        if found is None:
            return None
        self._keep("remove", as_slots(found))
        self._pass(now_ns)
        return as_slots(found)

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Gives up to `n` victims to a prefetch: only what is worth less than that."""
        if self._calls is not None and ((not self._wishes and rate != np.inf) or not self._ready()):
            return NO_SLOTS.copy()
        return self.caught_up().displace(now_ns, n, rate, protected)

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Everything: these policies choose what leaves, not what enters."""
        if self._calls is None:
            return self.policy.admit(now_ns, slots)
        self._pass(now_ns)
        return np.ones(len(slots), np.bool_)

    def expired(self, now_ns: int) -> Slots:
        """Resident blocks whose lease has run out: never a hit again, reclaimed first."""
        if self._calls is None or self._expires:
            return self.caught_up().expired(now_ns)
        self._pass(now_ns)
        return NO_SLOTS.copy()

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Up to `n` ends of chains that are not resident and worth bringing here, best first."""
        if self._calls is not None and not (self._wishes and self._away and self._ready()):
            return NO_SLOTS.copy(), np.empty(0)
        return self.caught_up().wanted(now_ns, n)

    def digest(self) -> int:
        """64-bit rolling hash of every decision so far."""
        return (self.caught_up() if self._brought else self.policy).digest()

    # ---- carrying it over

    def save_model(self) -> bytes:
        """What the policy learned, or what was brought; nothing if it is none that learns."""
        if self._calls is not None and (self._visits < FEW_VISITS or not self._ready()):
            return self._brought
        save: Callable[[], bytes] | None = getattr(self.caught_up(), "save_model", None)
        return b"" if save is None else save()

    def load_model(self, saved: bytes) -> None:
        """Starts warm, if the policy learns.

        Raises:
            ConfigError: The model comes from another version or is damaged.
        """
        policy = self.caught_up() if self._calls else self.policy  # it may begin with a model
        load: Callable[[bytes], None] | None = getattr(policy, "load_model", None)
        if load is not None:
            load(saved)
            self._brought = saved

    # ---- calls that are kept

    def _pass(self, now_ns: int) -> None:
        """Time passes; what happens by then does so whether or not anybody asked in between."""
        assert self._calls is not None
        if self._calls and self._calls[-1][0] == "admit":
            now_ns = max(now_ns, self._calls.pop()[1][0])
        else:
            self._kept += _CALL
        self._calls.append(("admit", (now_ns, NO_SLOTS), {}))

    def _keep(self, name: str, *said: Any, **more: Any) -> None:
        assert self._calls is not None
        self._calls.append((name, said, more))
        if self._wishes:
            self._look(name, said)
        if self._recency is not None:
            self._recency.hear(name, said, more)
        self._kept += _CALL + sum(len(x) for x in said if isinstance(x, np.ndarray))
        if self._kept > MOST_KEPT and self._ready():
            self.caught_up()
        elif self._kept > MOST_KEPT:  # what they taught is lost, what is resident is not
            times = (said[0] for _, said, _ in self._calls if not isinstance(said[0], np.ndarray))
            self._calls, self._kept = self._lru().calls(max(times, default=0)), 0

    def _lru(self) -> Recency:
        """Return what chooses until the policy can, which heard the calls that are kept."""
        if self._recency is None:
            self._recency = Recency()
            for call in self._calls or ():
                self._recency.hear(*call)
        return self._recency

    def _look(self, name: str, said: tuple[Any, ...]) -> None:
        """Keeps in mind which of the slots that were named are not here."""
        named = next((x for x in said if isinstance(x, np.ndarray)), NO_SLOTS).tolist()
        if name == "insert":
            self._here.update(named)
            self._away.difference_update(named)
        elif name in ("remove", "forget"):
            self._here.difference_update(named)
            self._away.update(named)
        else:
            self._away.update(s for s in named if s not in self._here)


class Rehearsals:
    """Policies that call what there is to compile of their kind, each in a thread of its own."""

    def __init__(self) -> None:
        self._done: dict[type[LeafOrder], bool] = {}
        self._threads: list[threading.Thread] = []
        self._ended = False
        atexit.register(self.end)  # a compiler at work must not see the process go
        os.register_at_fork(after_in_child=self._forked)

    def ready(self, kind: type[LeafOrder], make: Callable[[], Policy]) -> bool:
        """Whether such policies were rehearsed; if nobody has begun to, a thread does."""
        if kind not in self._done and not self._ended:
            self._done[kind] = False
            thread = threading.Thread(
                target=self._rehearse, args=(make(),), name=f"flowkv {kind.name}", daemon=True
            )
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # the system has none now: compiled when it must be
                self._done[kind] = True
        return self._done.get(kind, False)

    def wait(self) -> None:
        """Until all that began are done."""
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Ends those under way, as soon as the function that they compile is compiled."""
        self._ended = True
        self.wait()

    def _rehearse(self, policy: LeafOrder) -> None:
        try:
            for call in _story(policy):
                if self._ended:
                    return
                call()
        finally:
            self._done[type(policy)] = True

    def _forked(self) -> None:
        self._threads.clear()
        self._done = {kind: True for kind, done in self._done.items() if done}


def _story(policy: LeafOrder) -> list[Callable[[], object]]:
    """Every call there is, once."""
    both = as_slots([0, 1])
    root, leaf = both[:1], both[1:]
    return [
        partial(policy.access, 0, both, Visit(1)),
        partial(policy.insert, 0, root, as_slots([-1])),
        partial(policy.insert, 1, leaf, root),
        partial(policy.complete, 2, 1, stop=0, output_tokens=1),
        partial(policy.hint, 3, both, 1),
        partial(policy.enqueue, 4, 2, both),
        partial(policy.abort, 5, 2),
        partial(policy.pin, both),
        partial(policy.unpin, both),
        partial(policy.remove, leaf),
        partial(policy.wanted, 6, 1),
        partial(policy.displace, 7, 1, 0.0),
        partial(policy.expired, 8),
        partial(policy.weakest, 9),
        partial(policy.evict, 10, 1),
        partial(policy.forget, both),
        getattr(policy, "save_model", bytes),
    ]


_REHEARSALS = Rehearsals()


def deferred(make: Callable[[], Policy]) -> Policy:
    """A fresh policy, deferred if it is one that can be."""
    policy = make()
    if not isinstance(policy, LeafOrder):
        return policy
    kind = type(policy)
    return Deferred(policy, lambda: _REHEARSALS.ready(kind, make))


def behind(policy: Policy) -> Policy:
    """The policy that another one stands for, or itself."""
    return policy.policy if isinstance(policy, Deferred) else policy
