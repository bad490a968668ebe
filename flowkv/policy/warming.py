"""Plain LRU that stands in for a policy until its compiled code is loaded.

Compiling a policy takes tens of seconds once on a machine, and loading compiled code half a second
in each process. No call waits for either. A place begins with an order in plain Python
(`Warming`). A thread loads the code after some requests or at the first eviction; missing code is
compiled by a separate process (`flowkv.compiled.compile_process`).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from flowkv.compiled import compile_process, machine_code
from flowkv.core.errors import ConfigError
from flowkv.policy import make_policy
from flowkv.policy.base import NEVER_NS, NO_VISIT, Learner, Lease, Policy, Slots, Visit
from flowkv.policy.order.compiled import SLOT_LIMIT
from flowkv.policy.order.leaf import FIRST_CAPACITY, LeafOrder, as_slots, no_slot

FEW_VISITS = 32
"""Requests after which a policy is worth loading, if there was no eviction before."""

_MASK = (1 << 64) - 1
_LATER = 2.0**70  # offset of expired blocks' priorities below the others
_MOST_USES = 64  # for a lease to reach the last use; a block that needs more is passed as expired
_MOST_RENEWALS = 16  # of different leases for a block; then those of the lowest rank are dropped

_log = logging.getLogger("flowkv")


@dataclass(slots=True, eq=False)
class _Resident:
    """Block, with the terms of its insert."""

    slot: int
    begun_ns: int
    last_ns: int
    first_ns: int
    lease_ns: int
    limit_ns: int
    terms: dict[str, Any]
    above: _Resident | None = None
    renewals: dict[str | Lease, int] | None = None  # leases named later, with their times


class Warming(Policy):
    """Stand-in that answers as leaf-first LRU until the code of another policy is loaded.

    The switch comes once, with the first request (`access`) after the code is loaded. Then the
    policy is given the resident state: inserts, last uses, leases, pins and queued requests.
    Before the switch, ranks and hints have no effect, and nothing is prefetched.

    Args:
        policy: A fresh policy, without calls so far.
        ready: Returns whether its compiled code is loaded, and starts loading if not.

    Attributes:
        policy: The same; empty before the switch.
        plain: Whether LRU answers.
    """

    def __init__(self, policy: LeafOrder, ready: Callable[[], bool]) -> None:
        self.name, self.policy, self.plain = policy.name, policy, True
        self._ready, self._visits = ready, 0
        self._order = OrderedDict[int, _Resident]()  # next victim first; children before parents
        self._expired = dict[int, None]()
        self._due_ns: float = math.inf  # no lease ends before
        self._now = -math.inf
        self._pins = Counter[int]()
        self._queued = dict[int, Slots]()
        self._stale = dict[int, int]()  # tenants, and the time before which their blocks are stale
        self._digest, self._brought = 0, b""

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Add blocks that became resident, root to leaf; `parents[i]` is a slot or -1."""
        slots, parents = as_slots(slots), as_slots(parents)
        lease, tenant = said.get("lease", ""), said.get("tenant", 0)
        lease_ns, age_ns = self.policy.terms(slots, parents, lease, tenant)[:2].tolist()
        if len(slots) and not 0 <= slots.min() <= slots.max() < SLOT_LIMIT:
            raise no_slot()
        now, order, expired = self._tick(now_ns), self._order, self._expired
        for slot, parent in zip(slots.tolist(), parents.tolist(), strict=True):
            if slot in expired:
                self._drop(slot)
            above = None if parent in expired else order.get(parent)
            block = order.get(slot)
            if block is None:
                times = now, now, lease_ns, lease_ns, now + age_ns
                order[slot] = _Resident(slot, *times, said, above)
                continue
            if lease:
                block.lease_ns = max(block.lease_ns, lease_ns)
                block.limit_ns = max(block.limit_ns, now + age_ns)
                block.renewals = renewals = {**(block.renewals or {}), lease: now}
                if len(renewals) > _MOST_RENEWALS:
                    del renewals[min(renewals, key=_rank)]
            if self._above(block) is None and block not in self._chain(above):
                block.above = above
        if len(slots) and min(lease_ns, age_ns) < NEVER_NS:
            self._due_ns = min(self._due_ns, now + min(lease_ns, age_ns))
        self._use(slots.tolist(), now)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks; the first with the code loaded switches.

        Uses of non-resident blocks are not recorded.
        """
        self._visits += 1
        if self._visits >= FEW_VISITS and self._ready():
            self._switch()
            self.policy.access(now_ns, slots, visit)
            return
        now = self._tick(now_ns)
        self._queued.pop(visit.request, None)
        self._use([s for s in slots.tolist() if s not in self._expired], now)

    def remove(self, slots: Slots) -> None:
        """Remove blocks that left for another reason than `evict`; their children become roots."""
        for slot in slots.tolist():
            self._drop(slot)

    def abort(self, now_ns: int, request: int) -> None:
        """Cancel a request that was enqueued or accessed."""
        self._queued.pop(request, None)

    def pin(self, slots: Slots) -> None:
        """Pin blocks, resident or not, against eviction until as many `unpin`; nests."""
        self._pins.update(slots.tolist())

    def unpin(self, slots: Slots) -> None:
        """Release one `pin` of each block."""
        self._pins.subtract(slots.tolist())
        self._pins = +self._pins

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """Record a queued request's chain; it takes effect at the switch."""
        self._queued[request] = as_slots(slots).copy()

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """Expire all present blocks of a tenant at once, as if their leases had run out."""
        self._stale[tenant] = self._tick(now_ns)
        for block in self._order.values():
            if block.terms.get("tenant", 0) == tenant:
                block.limit_ns, self._due_ns = now_ns - NEVER_NS, -math.inf
        self._tick(now_ns)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Remove and return `n` victims, none pinned or protected; None if there are fewer."""
        if n < 0:
            raise ConfigError(f"cannot evict {n} blocks", "Ask for none or more")
        self._visits = FEW_VISITS
        self._ready()
        self._tick(now_ns)
        found = list(islice(self._free(protected), n)) if n <= len(self._order) else []
        if len(found) < n:
            return None
        for slot in found:
            self._drop(slot)
        return self._answer(found)

    def expired(self, now_ns: int) -> Slots:
        """Return resident blocks with an expired lease: they never hit again and go first."""
        self._tick(now_ns)
        return self._answer(sorted(self._expired)) if self._expired else as_slots([])

    def priority(self, slot: int) -> float:
        """Return the priority of a slot: smaller is evicted earlier; -inf if it is not resident."""
        block = self._order.get(slot)
        if block is None:
            return -math.inf
        return block.last_ns - (_LATER if slot in self._expired else 0.0)

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """Return the slot that `evict` of one would choose, for comparisons; -1 if none."""
        self._tick(now_ns)
        return next(self._free(protected), -1)

    def resident(self) -> Sequence[int]:
        """Return the slots that the policy records as resident, in no particular order."""
        return list(self._order)

    def digest(self) -> int:
        """Return a 64-bit rolling hash of every decision, before the switch and after it."""
        return self._digest ^ self.policy.digest()

    # ---- carrying it over

    def save_model(self) -> bytes:
        """Return the policy's model (before the switch the loaded one); empty if none."""
        if isinstance(self.policy, Learner) and not self.plain:
            return self.policy.save_model()
        return self._brought

    def load_model(self, saved: bytes) -> None:
        """Load a saved model, if the policy learns.

        Raises:
            ConfigError: The model comes from another version or is damaged.
        """
        if isinstance(self.policy, Learner):
            self.policy.load_model(saved)
            self._brought, self._visits = saved, FEW_VISITS

    # ---- the order

    def _tick(self, now_ns: int) -> int:
        """Advance the clock, and record expired blocks: a parent after its children."""
        self._now = max(self._now, now_ns)
        if self._now >= self._due_ns:
            self._due_ns, live = math.inf, set[_Resident | None]()
            for slot, block in self._order.items():
                due_ns = min(block.last_ns + block.lease_ns, block.limit_ns)
                if due_ns > self._now or block in live:
                    live.add(self._above(block))
                    self._due_ns = min(self._due_ns, due_ns if due_ns > self._now else NEVER_NS)
                else:
                    self._expired[slot] = None
        return int(self._now)

    def _above(self, block: _Resident) -> _Resident | None:
        """Return a block's parent, if it is still resident."""
        above = block.above
        return above if above is not None and self._order.get(above.slot) is above else None

    def _chain(self, block: _Resident | None) -> Iterator[_Resident]:
        """Yield a block and all above it."""
        while block is not None:
            yield block
            block = self._above(block)

    def _use(self, slots: list[int], now: int) -> None:
        """Move blocks to the end, the deepest first, then all that lie above them."""
        used = [block for slot in reversed(slots) if (block := self._order.get(slot)) is not None]
        for block in used:
            block.last_ns = now
            self._order.move_to_end(block.slot)
        for block in self._chain(self._above(used[-1]) if used else None):
            self._order.move_to_end(block.slot)

    def _free(self, protected: Collection[int]) -> Iterator[int]:
        """Yield evictable slots in order: not pinned, not protected, and not above such."""
        kept, free = set(protected), list[int]()
        for slot, block in self._order.items():
            if slot in kept or slot in self._pins:
                above = self._above(block)
                kept.add(above.slot if above is not None else -1)
            elif not self._expired or slot in self._expired:
                yield slot
            else:
                free.append(slot)
        yield from free

    def _drop(self, slot: int) -> None:
        if self._order.pop(slot, None) is not None:
            self._expired.pop(slot, None)
            if self._due_ns < math.inf or self._expired:
                self._due_ns = -math.inf  # a block above may have waited for this one

    def _answer(self, slots: list[int]) -> Slots:
        for value in (len(slots), *slots):
            self._digest = ((self._digest ^ value + 1) * 0xBF58_476D_1CE4_E5B9 + 1) & _MASK
        return as_slots(slots)

    # ---- the switch

    def _switch(self) -> None:
        """Pass the resident state to the policy, and redirect all later calls to it."""
        for call in self._calls():
            call()
        for name in vars(Policy):
            if not name.startswith("_") and name not in ("name", "digest"):
                setattr(self, name, getattr(self.policy, name))
        self.plain = False
        self._order.clear()

    def _calls(self) -> Iterator[Callable[[], None]]:
        """Yield the fewest calls that give a fresh policy the same state, in order of time."""
        policy, told = self.policy, list[_Told]()
        between = dict[int, list[_Resident]]()  # uses without which a lease would end early
        last: _Resident | None = None
        for block in reversed(self._order.values()):  # parents first, and chains in one piece
            above = block.above = self._above(block)
            alone = last is None or not (above is last or above is last.above is None)
            if (
                alone
                or last is None
                or (block.begun_ns, block.terms) != (last.begun_ns, last.terms)
            ):
                told.append(_Told(block.begun_ns, 0, came := list[_Resident](), block.terms))
            came.append(block)
            if alone or last is None or block.last_ns != last.last_ns:
                told.append(_Told(block.last_ns, 1, used := list[_Resident]()))
            used.append(block)
            step_ns = max(1, block.first_ns - 1)
            for at_ns in range(block.begun_ns + step_ns, block.last_ns, step_ns)[:_MOST_USES]:
                between.setdefault(at_ns, []).append(block)
            again = dict(block.renewals) if block.renewals else {}
            if above is not None and above.begun_ns > block.begun_ns:
                again[""] = above.begun_ns  # the parent came later
            for lease, at_ns in again.items():
                told.append(_Told(at_ns, 0, [block], block.terms | {"lease": lease}))
            last = block
        told += [_Told(at_ns, 1, blocks) for at_ns, blocks in between.items()]
        told += [_Told(at_ns, 2, [], {"tenant": tenant}) for tenant, at_ns in self._stale.items()]
        for now, kind, blocks, terms in sorted(told, key=lambda call: call[:2]):
            slots = as_slots([block.slot for block in blocks])
            if kind == 0:
                parents = [-1 if b.above is None else b.above.slot for b in blocks]
                yield partial(policy.insert, now, slots, as_slots(parents), **terms)
            elif kind == 1:
                yield partial(policy.access, now, slots)
            else:
                yield partial(policy.invalidate, now, **terms)
        if self._pins:
            yield partial(policy.pin, as_slots(list(self._pins.elements())))
        for request, slots in self._queued.items():
            yield partial(policy.enqueue, int(self._now), request, slots)


def _rank(lease: str | Lease) -> float:
    return lease.rank if isinstance(lease, Lease) else math.inf


class _Told(NamedTuple):
    """Call at the switch: an insert (0), a last use (1), or an invalidation of a tenant (2)."""

    now_ns: int
    kind: int
    blocks: list[_Resident]
    terms: Mapping[str, Any] = MappingProxyType({})


# Compiled code: loaded by a thread, compiled by a process.


class CompiledPolicies:
    """Catalogue policies with compiled code loaded in this process. Thread-safe."""

    def __init__(self) -> None:
        self._loaded, self._ended = set[str](), False
        self._threads = dict[str, threading.Thread]()
        atexit.register(self.end)  # a working thread must not outlive the process
        os.register_at_fork(after_in_child=self._threads.clear)

    def loaded(self, name: str) -> bool:
        """Return whether a policy's code is loaded."""
        return name in self._loaded

    def ready(self, name: str) -> bool:
        """Return whether a policy's code is loaded; if not, start a thread that loads it."""
        if name not in self._loaded and name not in self._threads and not self._ended:
            thread = threading.Thread(
                target=self._load, args=(name,), name=f"flowkv {name}", daemon=True
            )
            if self._threads.setdefault(name, thread) is thread:
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no thread left
                    _stays(name, error)
        return name in self._loaded

    def wait(self) -> None:
        """Wait until every load under way has ended or failed."""
        for thread in list(self._threads.values()):
            if thread.ident is not None:
                thread.join()

    def end(self) -> None:
        """Stop all loads, as soon as the function being loaded is done."""
        self._ended = True
        compile_process.end()
        self.wait()

    def _load(self, name: str) -> None:
        try:
            if not self._complete(name):
                lock = machine_code.lock_file()
                process = None if lock is None else compile_process.begin(lock, __name__, name)
                if self._ended:  # perhaps before that process began
                    compile_process.end()
                code = process.wait() if process is not None else None
                if not ((code == 0 and self._complete(name)) or self._ended):
                    _stays(name, "no process" if code is None else f"exit status {code}")
        except Exception as error:  # from an unknown compiler release
            _stays(name, error)

    def _complete(self, name: str) -> bool:
        """Make every call of a policy once without compiling; return whether all code was there."""
        try:
            with machine_code.only_kept():
                for call in every_call(name):
                    if self._ended:
                        return False
                    call()
        except machine_code.NotKept:
            return False
        self._loaded.add(name)
        return True


def _stays(name: str, why: object) -> None:
    what = "policy %r is not compiled (%s): plain LRU stands in for it. Run `flowkv doctor "
    _log.warning(what + "--compile`, with a cache directory that can be written", name, why)


def every_call(name: str) -> Iterator[Callable[[], object]]:
    """Yield calls that use, once, every compiled function of a policy of the catalogue."""
    policy = make_policy(name)
    assert isinstance(policy, LeafOrder)
    both, many = as_slots([0, 1]), as_slots(range(1, 3 * FIRST_CAPACITY))
    root, leaf = both[:1], both[1:]
    yield from [
        partial(policy.access, 0, both, Visit(1)),
        partial(policy.insert, 0, root, as_slots([-1])),
        partial(policy.insert, 1, leaf, root),
        partial(policy.complete, 2, 1, stop=0, output_tokens=1),
        partial(policy.hint, 3, both, 1),
        partial(policy.hint, 3, both, NEVER_NS),
        partial(policy.enqueue, 4, 2, both),
        partial(policy.abort, 5, 2),
        partial(policy.pin, both),
        partial(policy.unpin, both),
        partial(policy.priority, 0),
        partial(policy.wanted, 6, 1),
        partial(policy.displace, 7, 1, 0.0),
        partial(policy.weakest, 8),
        partial(policy.evict, 9, 1),
        partial(policy.access, 10, both + SLOT_LIMIT // 2**12),
        partial(policy.remove, both),
        partial(policy.forget, both),
        partial(policy.insert, 11, root, as_slots([-1]), lease=Lease(1e-9)),
        partial(policy.expired, 20),
        partial(policy.insert, 21, many, many * 0 - 1),
        partial(policy.invalidate, 22, 0),
        *policy.seldom(),
        getattr(policy, "save_model", bytes),
    ]


def main(name: str) -> None:
    """Compile a policy of the catalogue by making every call once."""
    for call in every_call(name):
        call()


_COMPILED = CompiledPolicies()


def warming(name: str, **options: object) -> Policy:
    """Return a fresh policy, behind plain LRU unless its compiled code is loaded."""
    policy = make_policy(name, **options)
    if not isinstance(policy, LeafOrder) or _COMPILED.loaded(name):
        return policy
    return Warming(policy, partial(_COMPILED.ready, name))


def behind(policy: Policy) -> Policy:
    """Return the policy that this one warms up for, or the policy itself."""
    return policy.policy if isinstance(policy, Warming) else policy
