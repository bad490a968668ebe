"""`Keeper`: tiers that make room by policy, for callers without a FlowKV cache.

A full tier refuses stores and keeps its oldest frames: its user has to evict. The keeper records
the keys in each of its tiers, evicts by one policy per tier, and returns every answer to the caller
that submitted the request. It needs no torch.

Tiers stack, fastest first. A frame is stored in all of them, so that the loss of one tier loses no
frame, and an eviction is a deletion. A load goes to the fastest tier that has the frame, and to the
next one if that fails; the frame is then copied back into the faster tiers.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, groupby
from queue import SimpleQueue
from typing import Any

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError, StateError, StoreError
from flowkv.core.files import renew_lock
from flowkv.core.keys import tenant_salt
from flowkv.core.reaper import REAPER, begin
from flowkv.observe.events import Bus, Closing, Evicted, Failed, Forgotten, Quarantined, Stored
from flowkv.policy import Policy, make_policy
from flowkv.policy.base import Lease
from flowkv.policy.restore.costs import LoadGate, Rates
from flowkv.policy.tenants import Tenants
from flowkv.residency.places import KeyedPolicy, open_tiers, policy_of
from flowkv.tiers import Entry, Load, Outcome, Store, Tier, TierAnswer
from flowkv.tiers.base import UNBOUNDED, listed
from flowkv.tiers.erasure_log import MOST_KEYS, Erased, ErasureLogs, new_entry
from flowkv.tiers.worker import Completions

_log = logging.getLogger("flowkv")
HOLD_S = 60.0
"""Time after which a look-up that was not released no longer protects its frames from eviction."""

_POLL_S = 0.25
_TRIES = 3  # retries of a store that a tier refuses as full, each with more room
_CLOSE_POLLS = 40
_MOST_KNOWN = 1 << 20  # known frames of an unbounded tier
_MOST_ASKED = 1 << 10  # keys in one `contains` of a remote tier
_RESCAN_S = 10.0
LONG_S = 1.0  # time of a load that does not pay, while the time of computing is unknown
_REFILL_BYTES = 1 << 26  # bytes on their way back into faster tiers at a time
_UNFIT = ("layout", "fidelity", "stripes")  # the frame is there, but unreadable for this caller
_BENIGN = ("", "absent", *_UNFIT)


@dataclass(slots=True, eq=False)
class _Item:
    """One operation of a caller on its way through the tiers.

    Attributes:
        caller: The caller; None for a copy back into a faster tier.
        operation: The load or the store.
        best: The best answer so far; it names the caller's job, and the position in it.
        begun_ns: Time of the submission.
        end_ns: Deadline of the answer.
        news: Count of known erasures at the submission.
        request: Request for which a failed load makes later look-ups misses.
        left: Number of tiers that have not answered a store.
        over: Whether it was cancelled: no further tier is tried.
        lease: Lease of the frame; "" for the default.
    """

    caller: Caller | None
    operation: Any
    best: TierAnswer
    begun_ns: int
    end_ns: int
    news: int
    request: Hashable = None
    left: int = 0
    over: bool = False
    lease: str | Lease = ""


@dataclass(slots=True, eq=False)
class _Flight:
    """An item under way at one tier.

    Attributes:
        item: The item.
        n_bytes: Most bytes that it takes there as a new frame, else 0.
        tries: Retries so far, of a store that the tier refused as full.
        erased: Whether its key was erased meanwhile, so that the frame must not stay.
    """

    item: _Item
    n_bytes: int = 0
    tries: int = 0
    erased: bool = False


class _Level:
    """One tier: its known frames, and its operations under way.

    Attributes:
        tier: The tier.
        book: Known keys of the tier, in the order of its policy.
        loads: Measured rates of loads, job by job.
        left: Unanswered loads of each job.
        hit_bytes: Bytes that each job has loaded so far.
        flights: Unanswered items, by the tier's number of the job and the position in it.
        storing: Keys that are being stored, with their number of stores.
        incoming_bytes: Most bytes that the stores under way will take.
        scanned_s: Time of the last scan for frames of other writers.
        local: Whether look-ups in the tier are fast.
        bounded: Whether the tier has a capacity, so that frames may have to be evicted.
        number: Number of the tier, from the fastest on.
        sweeps: Scans of a remote tier for erased frames under way; look-ups miss meanwhile.
        pump: The thread that fetches the tier's answers.
    """

    def __init__(self, number: int, tier: Tier, policy: Policy, rates: dict[str, Rates]) -> None:
        self.number, self.tier, self.book = number, tier, KeyedPolicy(policy)
        self.loads = rates.setdefault(tier.name, Rates())
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.storing: Counter[bytes] = Counter()
        self.left, self.hit_bytes = Counter[int](), Counter[int]()
        self.incoming_bytes, self.scanned_s = 0, -_RESCAN_S
        self.local, self.sweeps = tier.kind != "remote", 0
        self.bounded = tier.capacity_bytes < UNBOUNDED
        self.pump: threading.Thread | None = None

    def excess_bytes(self, need: int) -> int:
        """Return the bytes to evict before `need` more bytes fit."""
        return self.tier.used_bytes() + self.incoming_bytes + need - self.tier.capacity_bytes

    def has(self, key: bytes) -> bool:
        """Return whether the tier has a key; of a remote tier, whether the key is known there."""
        if self.sweeps:
            return False
        return self.tier.contains([key])[0] if self.local else key in self.book


@dataclass(slots=True)
class _Hold:
    """The look-ups of one request: pinned keys, pending questions and failed loads.

    Attributes:
        since_ns: Time of the last look-up.
        pinned: Pinned keys, each with the tiers that it is pinned in.
        failed: Keys that are misses for this request from now on.
        asked: Whether each key is on a remote tier; None until that is answered.
    """

    since_ns: int = 0
    pinned: dict[bytes, list[_Level]] = field(default_factory=dict)
    failed: set[bytes] = field(default_factory=set)
    asked: dict[bytes, bool | None] = field(default_factory=dict)

    def let_go(self) -> bool:
        """End the pins; return whether there were any."""
        pinned, self.pinned = self.pinned, {}
        for key, levels in pinned.items():
            for level in levels:
                level.book.unpin([key])
        return bool(pinned)


class Keeper(Closing):
    """Frames in a stack of tiers, with eviction by policy. Thread-safe.

    Use it through a `caller()`; each of an engine's threads may have its own.

    Args:
        tiers: Open tiers, fastest first, for this keeper alone, which closes them.
        policies: Makes the policy of a tier, given its kind and its capacity in bytes.
        rates: Load rates by tier name; the keeper adds its measurements.
        tenants: `tenant_salt` of the tenants with quotas, in the order of their policy numbers.
        bus: Bus for the events of stores, evictions, refused frames and failures.
        clock: Source of time.

    Attributes:
        name: Name of the stack, for statistics.
        logs: Erasure logs of the tiers that others use too.
        bus: Bus that events are emitted on.
        gate: Rates of loads, and of computation if `gate.computed` is called.
        counts: Number of answers by result: "hit", "miss:digest", "failed:deadline", ...
        on_evicted: Called with keys that lie in no tier any more, under the keeper's lock: it must
            not wait.

    Raises:
        ConfigError: There is no tier, or two have one name.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policies: Callable[[str, int], Policy] = lambda kind, capacity_bytes: make_policy("auto"),
        *,
        rates: dict[str, Rates] | None = None,
        tenants: Iterable[bytes] = (),
        bus: Bus | None = None,
        clock: Clock | None = None,
    ) -> None:
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) < len(names):
            problem = f"a keeper cannot have the tiers {names}"
            raise ConfigError(problem, "Name one or more of host, disk or remote, each once")
        self.name, self.bus = " > ".join(names), bus or Bus()
        self.counts: Counter[str] = Counter()
        self.on_evicted: Callable[[list[bytes]], object] = lambda keys: None
        self._clock, self._lock = clock or SystemClock(), threading.RLock()
        renew_lock(self, self._lock)
        self._tenants = {salt: number for number, salt in enumerate(tenants)}
        self._open, self._refill_bytes, self._news, self.gate = True, 0, 0, LoadGate()
        self.gate.rates = rates if rates is not None else {}
        self._levels, self.logs = list[_Level](), ErasureLogs()
        for number, tier in enumerate(tiers):
            policy = policies(tier.kind, tier.capacity_bytes)
            self._levels.append(_Level(number, tier, policy, self.gate.rates))
            self.logs.open_log(number, tier)
        self._questions: SimpleQueue[tuple[_Hold, bytes] | None] = SimpleQueue()
        self._asker: threading.Thread | None = None
        self._holds: dict[tuple[Caller, Hashable], _Hold] = {}
        self._shut = partial(_shut, self._levels, self.logs)
        self._finalizer = weakref.finalize(self, REAPER.put, self._shut)
        self._finalizer.atexit = False
        REAPER.start()
        for level in self._levels:
            if level.local or level.bounded:  # other tiers never evict, and are looked up by key
                self._enter(level)

    def caller(self) -> Caller:
        """Return a new caller, with a queue of answers of its own."""
        return Caller(self)

    @property
    def open(self) -> bool:
        """Return whether the keeper was not closed yet."""
        return self._open

    @property
    def levels(self) -> Sequence[_Level]:
        """Return the tiers and their known frames, fastest first; for reading only."""
        return tuple(self._levels)

    def close(self) -> None:
        """Close the tiers, which finish or fail operations under way. Safe to call again."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._finalizer.detach()
        self._shut()
        self._questions.put(None)
        for thread in (self._asker, *(level.pump for level in self._levels)):
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    def knows(self, key: bytes) -> bool:
        """Return whether a frame is known to lie in a tier, or is being stored there."""
        return any(key in level.book for level in self._levels)

    def worth(self, keys: Sequence[bytes], n_bytes: int, tokens: int) -> bool:
        """Return whether loading frames of `n_bytes` each beats computing so many tokens.

        The decision uses measured rates: of loads here, and of computation by `gate.computed`.
        While no computation was measured, a load longer than `LONG_S` does not pay: the caller then
        computes, and measures that.
        """
        where = Counter[str]()
        for key in keys:
            near = next((one for one in self._levels if one.has(key)), self._levels[-1])
            where[near.tier.name] += n_bytes
        if not self.gate.seconds_per_token and self.gate.load_s(where) > LONG_S:
            return False
        return self.gate.worth(where, tokens)

    def report(self) -> dict[str, Any]:
        """Return counts of answers, and the state of each tier, ready for JSON."""
        with self._lock:
            now = self._clock.now_ns()
            tiers = {
                level.tier.name: {
                    "kind": level.tier.kind,
                    "writable": level.tier.writable,
                    "frames": len(level.book),
                    "used_bytes": level.tier.used_bytes(),
                    "capacity_bytes": level.tier.capacity_bytes,
                    "incoming_bytes": level.incoming_bytes,
                    "retained_bytes": level.book.retained_bytes(now),
                    "policy": level.book.policy.name,
                    "load_bytes_per_s": level.loads.bytes_per_s,
                }
                for level in self._levels
            }
            return {"answers": dict(self.counts), "tiers": tiers}

    # ---- known frames

    def _enter(self, level: _Level) -> bool:
        """Enter a tier's frames into its book, oldest first; return whether any was unknown."""
        found = listed(level.tier)
        with self._lock:
            new = [entry for entry in found if entry.key not in level.book]
            now = self._clock.now_ns()
            for (n_bytes, salt), run in groupby(new, lambda e: (e.n_bytes, e.info.tenant)):
                keys, infos = zip(*((entry.key, entry.info) for entry in run), strict=True)
                parents, tenant = [info.parent for info in infos], self._tenant(salt)
                level.book.insert(now, keys, parents, n_bytes=n_bytes, tenant=tenant)
        return bool(new)

    def _rescan(self, level: _Level) -> bool:
        """Enter frames of other writers: of a remote tier in a thread, as that may take long.

        Return whether any became known now.
        """
        now_s = self._clock.now_ns() / 1e9
        if level.local:
            return self._enter(level)
        if now_s - level.scanned_s >= _RESCAN_S:
            level.scanned_s = now_s
            begin(self._enter, level, name="flowkv keeper")
        return False

    def _tenant(self, salt: bytes) -> int:
        return self._tenants.get(salt, len(self._tenants))

    # ---- erasures

    def _hear(self) -> None:
        """Drop the frames that others erased from all tiers, before any other look-up."""
        for number, erased in self.logs.all_news():
            self._news += 1
            for level in self._levels:
                if level.local:
                    self._drop(level, erased, erased.among(level.tier.scan()))
                elif level.number != number or not erased.proven:
                    level.sweeps += 1
                    if begin(self._sweep, level, erased, name="flowkv keeper") is None:
                        self._swept(level, erased)

    def _sweep(self, level: _Level, erased: Erased) -> None:
        """Scan a remote tier for erased frames and drop them; runs in a thread of its own."""
        meant: Collection[bytes] | None = None
        try:
            meant = erased.among(level.tier.scan())
        except Exception:  # a third-party client may raise anything: all known frames go
            _log.warning("the frames of %s cannot be scanned", level.tier.name, exc_info=True)
        with self._lock:
            self._swept(level, erased, meant)

    def _swept(self, level: _Level, erased: Erased, meant: Collection[bytes] | None = None) -> None:
        level.sweeps -= 1
        self._drop(level, erased, set(level.book) if meant is None else meant)

    def _drop(self, level: _Level, erased: Erased, meant: Collection[bytes]) -> None:
        """Delete the erased frames of a tier and forget their keys; `meant` are those it lists."""
        known = [key for key in level.book if key in meant or erased.everything or erased.has(key)]
        self._withdraw(level, lambda store: erased.means(store.key, store.info, meant))
        if drop_copies := getattr(level.tier, "drop_copies", None):  # in memory
            drop_copies(list(meant))
        level.tier.delete(list(meant))
        self.bus.emit(Forgotten(tier=level.tier.name, blocks=len(known)))
        level.book.remove([key for key in known if not level.storing[key]])
        self._lost(known)

    def _withdraw(self, level: _Level, meant: Callable[[Store], bool]) -> bool:
        """Mark the stores under way that `meant` selects as erased; return whether any is."""
        under_way = [(flight, flight.item.operation) for flight in level.flights.values()]
        found = [one for one, said in under_way if isinstance(said, Store) and meant(said)]
        for flight in found:
            flight.erased = True
        return bool(found)

    def _erase(self, keys: Sequence[bytes]) -> int:
        """Erase frames from all tiers, and record that for others who share them."""
        with self._lock, self.logs.erasing() as failed:
            named, proven, most, errors = set(keys), True, 0, [*failed.values()]
            for level in self._levels:
                proven &= not self._withdraw(level, lambda store: store.key in named)
                level.book.remove([key for key in keys if not level.storing[key]])
            for level in self._levels:
                try:
                    most = max(most, level.tier.erase(keys))
                except StoreError as error:  # the other tiers erase all the same
                    errors.append(error)
                proven &= level.tier.writable and not errors
            for log in (log for log in self.logs.values() if log.alone):
                try:
                    for at in range(0, len(keys), MOST_KEYS):
                        log.publish(new_entry(keys[at : at + MOST_KEYS], proven=proven))
                except StoreError as error:
                    errors.append(error)
            self._news += 1
        if errors:
            raise StoreError("; ".join(error.problem for error in errors), errors[0].remedy)
        return most

    def _make_room(self, level: _Level, need: int, kept: Collection[bytes] = ()) -> bool:
        """Evict by policy until `need` bytes fit; return False if they cannot."""
        if need > level.tier.capacity_bytes:
            return False
        if level.excess_bytes(need) > 0:  # arrived frames must not count as incoming, too
            self._settle(level, level.tier.poll(0.0))
        while (excess := level.excess_bytes(need)) > 0:
            now, most = self._clock.now_ns(), -(-excess // level.book.largest_bytes)
            victims = level.book.evict(now, most, kept) or level.book.evict(now, 1, kept)
            if victims and not self._give_up(level, victims, "space"):
                return False
            if not (victims or self._let_go_late() or self._rescan(level)):
                return False
        return True

    def _give_up(self, level: _Level, keys: Sequence[bytes] | None, reason: str) -> bool:
        """Delete evicted frames; return whether any went. Those that stay become known again."""
        if not keys:
            return False
        before = level.tier.used_bytes()
        try:
            level.tier.delete(keys)
        except Exception:  # a third-party client may raise anything
            _log.warning("frames of %s cannot be deleted", level.tier.name, exc_info=True)
            self._rescan(level)
            return False
        gone = max(0, before - level.tier.used_bytes())
        told = Evicted(tier=level.tier.name, pages=len(keys), n_bytes=gone, reason=reason)
        self.bus.emit(told)
        self._lost(keys)
        return True

    def _lost(self, keys: Iterable[bytes]) -> None:
        """Call `on_evicted` with those of the keys that lie in no tier any more."""
        if gone := [key for key in keys if not self.knows(key)]:
            try:
                self.on_evicted(gone)
            except Exception:  # of an engine: the thread goes on with the other answers
                _log.exception("the callback for evicted frames failed")

    # ---- stores

    def _store(self, items: Sequence[_Item], levels: Sequence[_Level]) -> None:
        for item in items:
            item.left = len(levels)
            item.best = item.best._replace(outcome=Outcome.FAILED, reason="read-only")
            if not levels:
                self._answer(item)
        for level in levels:
            self._store_at(level, items)

    def _store_at(self, level: _Level, items: Sequence[_Item]) -> None:
        now, keys = self._clock.now_ns(), [item.operation.key for item in items]
        kept = {*keys, *(item.operation.info.parent for item in items)}
        level.book.access(now, keys)
        level.book.retain(now, {i.operation.key: i.lease for i in items if i.lease})
        unknown, flights = dict[bytes, _Item](), dict[_Item, _Flight]()
        for item in items:
            if item.operation.key not in level.book:
                unknown.setdefault(item.operation.key, item)
        for (need, salt, lease), run in groupby(unknown.values(), partial(self._terms, level)):
            new, tenant = list[_Flight](), self._tenant(salt)
            for item in run:
                if self._make_room(level, need * (len(new) + 1), kept):
                    new.append(_Flight(item, need))
            if new:
                stores = [flight.item.operation for flight in new]
                parents = [store.info.parent for store in stores]
                keys = [store.key for store in stores]
                level.book.insert(now, keys, parents, n_bytes=need, lease=lease, tenant=tenant)
                if not level.bounded and len(level.book) > _MOST_KNOWN:  # frames stay, unlisted
                    level.book.evict(now, len(level.book) - _MOST_KNOWN // 2)
                level.incoming_bytes += need * len(new)
                self._take_off(level, keys)
                self._give_up(level, level.book.shed(now), "quota")
                policy = level.book.policy
                while isinstance(policy, Tenants) and new and policy.excess_bytes(tenant) > 0:
                    self._landed(level, new.pop(), there=False)  # the last ones exceed the quota
                flights.update((flight.item, flight) for flight in new)
        for item in items:
            if item in flights:
                continue
            if item.operation.key in level.book:  # stored, or on its way: the tier's answer counts
                flights[item] = _Flight(item)
                self._take_off(level, [item.operation.key])
            else:
                self._stored(item, "full")
        self._send(level, [flights[item] for item in items if item in flights])

    def _take_off(self, level: _Level, keys: Sequence[bytes]) -> None:
        level.book.pin(keys)
        level.storing.update(keys)

    def _terms(self, level: _Level, item: _Item) -> tuple[int, bytes, str | Lease]:
        store = item.operation
        return level.tier.frame_bytes(store.body.nbytes), store.info.tenant, item.lease

    def _send(self, level: _Level, flights: list[_Flight]) -> None:
        if not flights:
            return
        with self.logs.storing(self.logs.get(level.number)) as free:
            reason = "" if free else "busy"
            try:
                if free:
                    self._submit(level, level.tier.submit_store, flights)
            except Exception:  # of a tier
                _log.exception("%s failed to begin a store", level.tier.name)
                reason = "error"
        for flight in flights if reason else ():
            self._landed(level, flight, there=False)
            self._stored(flight.item, reason)

    def _landed(self, level: _Level, flight: _Flight, *, there: bool) -> None:
        """End a store at a tier: release its room and pin; drop its key if no frame is there."""
        key = flight.item.operation.key
        level.incoming_bytes -= flight.n_bytes
        level.storing[key] -= 1
        if not level.storing[key]:
            del level.storing[key]
        level.book.unpin([key])
        if flight.n_bytes and not there and not level.storing[key]:
            level.book.remove([key])
            self._lost([key])

    def _stored(self, item: _Item, reason: str, n_bytes: int = 0) -> None:
        """Record one tier's answer to a store; answer the caller once all tiers have answered."""
        if not reason:
            item.best = item.best._replace(outcome=Outcome.STORED, reason="", n_bytes=n_bytes)
        elif item.best.outcome is not Outcome.STORED:
            item.best = item.best._replace(reason=reason)
        item.left -= 1
        if not item.left:
            self._answer(item)

    # ---- loads

    def _load(self, items: Sequence[_Item], first: int = 0) -> None:
        """Submit each load to the fastest tier from `first` on that has its key, else the last."""
        wanted: dict[int, list[_Flight]] = {}
        last = len(self._levels) - 1
        for item in items:
            nearest = first
            while nearest < last and not self._levels[nearest].has(item.operation.key):
                nearest += 1
            if self._levels[nearest].sweeps:
                self._answer(item)
                continue
            wanted.setdefault(nearest, []).append(_Flight(item))
        for nearest, flights in wanted.items():
            level = self._levels[nearest]
            try:
                job = self._submit(level, level.tier.submit_load, flights)
            except MemoryError:
                for flight in flights:
                    self._answer(flight.item)
            else:
                level.left[job] = len(flights)

    def _submit(self, level: _Level, start: Callable[..., int], flights: Sequence[_Flight]) -> int:
        """Start a job of a tier, and the thread that fetches the tier's answers."""
        left_s = max(0.0, (flights[0].item.end_ns - self._clock.now_ns()) / 1e9)
        if level.pump is None:
            name = f"flowkv keeper {level.tier.name}"
            level.pump = begin(_pump, weakref.ref(self), level, name=name)
            if level.pump is None:
                raise MemoryError("no thread can start")
        job = start([flight.item.operation for flight in flights], deadline_s=left_s)
        level.flights.update(((job, i), flight) for i, flight in enumerate(flights))
        return job

    def _loaded(self, level: _Level, item: _Item, answer: TierAnswer) -> None:
        key, number = item.operation.key, level.number
        level.left[answer.job] -= 1
        if answer.outcome is Outcome.HIT:
            level.hit_bytes[answer.job] += answer.n_bytes
            if self._open and item.news == self._news:
                self._refill(number, item, answer)
        elif answer.outcome is Outcome.FAILED:
            self.bus.emit(Failed(tier=level.tier.name, operation="load", reason=answer.reason))
        else:
            if answer.reason not in _BENIGN:
                told = Quarantined(tier=level.tier.name, key=key, reason=answer.reason)
                self.bus.emit(told)
            if not level.storing[key] and answer.reason not in _UNFIT and key in level.book:
                level.book.remove([key])
                self._lost([key])
        if answer.outcome is Outcome.HIT or not item.best.reason:  # the first reason is kept
            item.best = answer._replace(job=item.best.job, item=item.best.item)
        over = item.over or not self._open or self._clock.now_ns() >= item.end_ns
        if answer.outcome is Outcome.HIT or over or number + 1 == len(self._levels):
            self._answer(item)
        else:
            self._load([item], number + 1)
        if not level.left[answer.job]:  # the last answer's time is that of the whole job
            del level.left[answer.job]
            level.loads.add(level.hit_bytes.pop(answer.job, 0), answer.seconds)

    def _refill(self, below: int, item: _Item, answer: TierAnswer) -> None:
        """Store a whole frame that was loaded from one tier in the faster ones that lack it."""
        load: Load = item.operation
        faster = [level for level in self._levels[:below] if level.tier.writable]
        lacking = [level for level in faster if not level.has(load.key)]
        fits = self._refill_bytes + answer.n_bytes <= _REFILL_BYTES
        if not (lacking and fits and answer.info) or load.first or load.stripes:
            return
        body = memoryview(bytes(load.target.cast("B")[: answer.n_bytes]))
        now, best = self._clock.now_ns(), TierAnswer(0, 0, load.key, Outcome.MISS)
        store, end_ns = Store(load.key, answer.info, body), now + round(HOLD_S * 1e9)
        self._refill_bytes += body.nbytes
        self._store([_Item(None, store, best, now, end_ns, self._news, lease=item.lease)], lacking)

    # ---- look-ups

    def _lookup(self, key: bytes, caller: Caller, request: Hashable) -> bool | None:
        hold = _Hold() if request is None else self._holds.setdefault((caller, request), _Hold())
        hold.since_ns = self._clock.now_ns()
        if key in hold.failed or not self._open:
            return False
        there = [level for level in self._levels if level.has(key)]
        if there:
            known = [level for level in there if key in level.book]
            if known and request is not None and key not in hold.pinned:
                hold.pinned[key] = known
                for level in known:
                    level.book.pin([key])
            return True
        if request is None or all(level.local for level in self._levels):
            return False
        if key not in hold.asked:
            hold.asked[key] = None
            questions = self._questions
            questions.put((hold, key))
            if self._asker is None:
                told = weakref.ref(self, lambda _: questions.put(None)), questions
                self._asker = begin(_answer, *told, name="flowkv ask")
                if self._asker is None:
                    hold.asked[key] = False
        return hold.asked[key]

    def _ask(self, asked: list[tuple[_Hold, bytes]]) -> None:
        """Look keys up on remote tiers, for look-ups that must not wait."""
        keys, far = [key for _, key in asked], set[bytes]()
        for level in self._levels:
            for i in range(0, 0 if level.local else len(keys), _MOST_ASKED):
                part = keys[i : i + _MOST_ASKED]
                try:
                    far |= set(compress(part, level.tier.contains(part)))
                except Exception:  # a third-party client may raise anything: nothing is there
                    _log.warning("look-ups in %s failed", level.tier.name, exc_info=True)
        with self._lock:
            for hold, key in asked:
                hold.asked[key] = key in far

    def _let_go_late(self) -> bool:
        """End the pins of look-ups older than `HOLD_S`; return whether there were any."""
        before = self._clock.now_ns() - round(HOLD_S * 1e9)
        return any([hold.let_go() for hold in self._holds.values() if hold.since_ns < before])

    # ---- answers

    def _settle(self, level: _Level, answers: Iterable[TierAnswer]) -> None:
        """Pass a tier's answers to their callers, or the operations to another tier."""
        for answer in answers:
            with self._lock:  # for one answer at a time, as copies of large frames take long
                flight = level.flights.pop((answer.job, answer.item), None)
                if flight is None:
                    continue
                if isinstance(flight.item.operation, Load):
                    self._loaded(level, flight.item, answer)
                elif answer.reason == "full" and self._again(level, flight):
                    self._send(level, [flight])
                else:
                    self._ended(level, flight, answer)

    def _fail_rest(self, level: _Level) -> None:
        """Fail all unanswered operations of a closed tier."""
        with self._lock:
            rest = [
                TierAnswer(*at, flight.item.operation.key, Outcome.FAILED, "closed")
                for at, flight in level.flights.items()
            ]
            self._settle(level, rest)

    def _ended(self, level: _Level, flight: _Flight, answer: TierAnswer) -> None:
        """Handle a tier's last answer to a store."""
        name, reason = level.tier.name, answer.reason
        there = answer.outcome is Outcome.STORED
        if there and flight.erased:
            level.tier.delete([answer.key])
            there, reason = False, "busy"
        self._landed(level, flight, there=there)
        if there:
            told = Stored(tier=name, pages=1, n_bytes=answer.n_bytes, seconds=answer.seconds)
            self.bus.emit(told)
        else:
            self.bus.emit(Failed(tier=name, operation="store", reason=reason))
        self._stored(flight.item, "" if there else reason, answer.n_bytes)

    def _again(self, level: _Level, flight: _Flight) -> bool:
        """Evict more for a store that a tier refused as full; return whether to retry it.

        A tier that holds frames in slabs can be full below its capacity.
        """
        item, now = flight.item, self._clock.now_ns()
        flight.tries += 1
        over = item.over or flight.erased or not self._open
        if over or flight.tries > _TRIES or now >= item.end_ns:
            return False
        victims = level.book.evict(now, 1 << flight.tries) or level.book.evict(now, 1)
        return self._give_up(level, victims, "space")

    def _answer(self, item: _Item) -> None:
        best, caller = item.best, item.caller
        seconds = (self._clock.now_ns() - item.begun_ns) / 1e9
        if caller is None:
            self._refill_bytes -= item.operation.body.nbytes
            return
        self.counts[":".join(filter(None, (best.outcome.value, best.reason)))] += 1
        hold = self._holds.get((caller, item.request))
        failed = isinstance(item.operation, Load) and best.outcome is not Outcome.HIT
        if hold is not None and failed:
            hold.failed.add(best.key)
        caller.answers.post([best._replace(seconds=seconds)])


# Threads refer to a keeper only while they handle its answers, so that a dropped one is collected.


def _shut(levels: Iterable[_Level], logs: ErasureLogs) -> None:
    """Close the tiers and logs of a keeper that is closed, or gone."""
    for level in levels:
        level.tier.close()
    logs.close()


def _pump(whose: weakref.ref[Keeper], level: _Level) -> None:
    """Pass a tier's answers to its keeper until that is closed and nothing is under way."""
    left = _CLOSE_POLLS
    while left:
        answers = level.tier.poll(_POLL_S)
        keeper = whose()
        if keeper is None:
            return
        if answers:
            keeper._settle(level, answers)
        if not keeper._open:
            left = left - 1 if level.flights else 0
        if not left:
            keeper._fail_rest(level)
        del keeper


def _answer(whose: weakref.ref[Keeper], questions: SimpleQueue[tuple[_Hold, bytes] | None]) -> None:
    """Answer queued look-ups of remote tiers, all at once, until the keeper is closed or gone."""
    while True:
        asked = [questions.get()]
        while not questions.empty():
            asked.append(questions.get())
        keeper = whose()
        if keeper is None or None in asked:
            return
        keeper._ask([one for one in asked if one is not None])
        del keeper, asked


class Caller:
    """A `Tier` over a keeper's stack, with answers of its own. Thread-safe.

    Beyond the protocol, `lookup` is for engines that look up first, and load later: until `release`
    the found frames are not evicted, and frames that failed to load are misses, so that an engine
    does not request them for ever.
    """

    def __init__(self, keeper: Keeper) -> None:
        tiers = [level.tier for level in keeper.levels]
        self.keeper, self.name, self.kind = keeper, keeper.name, tiers[-1].kind
        self.capacity_bytes = min(UNBOUNDED, sum(tier.capacity_bytes for tier in tiers))
        self.answers = Completions()
        self._tiers = tiers

    def lookup(self, keys: Sequence[bytes], request: Hashable) -> list[bool | None]:
        """Return for each key whether it can be loaded, as far as that is known; never wait.

        Args:
            keys: 32 bytes each.
            request: Request of the look-up, until `release`; its failed loads are misses.

        Returns:
            One value for each key; None while remote tiers are being asked: call again later.
        """
        with self.keeper._lock:
            self.keeper._hear()
            return [self.keeper._lookup(key, self, request) for key in keys]

    def release(self, request: Hashable) -> None:
        """End a request's look-ups: unpin its frames, and forget its failed loads."""
        with self.keeper._lock:
            hold = self.keeper._holds.pop((self, request), None)
            if hold is not None:
                hold.let_go()

    def touch(self, keys: Iterable[bytes], leases: Mapping[bytes, Lease] | None = None) -> None:
        """Record a use of frames without a load, as by a caller with a nearer copy.

        Args:
            keys: The frames.
            leases: Leases of frames by key, absent ones among them; see `submit_store`.
        """
        keeper, keys = self.keeper, list(keys)
        with keeper._lock:
            for level in keeper.levels:
                now = keeper._clock.now_ns()
                level.book.access(now, keys)
                level.book.retain(now, leases or {})

    # ---- Tier

    @property
    def writable(self) -> bool:
        """Return whether any tier takes frames."""
        return any(tier.writable for tier in self._tiers)

    @property
    def shared(self) -> bool:
        """Return whether others may write to any of the tiers."""
        return any(tier.shared for tier in self._tiers)

    def used_bytes(self) -> int:
        """Return the bytes occupied in all tiers."""
        return sum(tier.used_bytes() for tier in self._tiers)

    def frame_bytes(self, body_bytes: int) -> int:
        """Return the most bytes that a frame occupies in all tiers."""
        return sum(tier.frame_bytes(body_bytes) for tier in self._tiers)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a tier has it; remote tiers are asked, for 50 ms at most."""
        with self.keeper._lock:
            self.keeper._hear()
            asked = [level.tier for level in self.keeper.levels if not level.sweeps]
        there = [tier.contains(keys) for tier in asked] or [[False] * len(keys)]
        return [any(one) for one in zip(*there, strict=True)]

    def submit_load(
        self, items: Sequence[Load], *, deadline_s: float = 10.0, request: Hashable = None,
        leases: Mapping[bytes, Lease] | None = None,
    ) -> int:  # fmt: skip
        """Start loading frames, root to leaf; see `Tier`.

        Args:
            items: The loads.
            deadline_s: Longest time until all are answered.
            request: Request for which failed loads become misses.
            leases: See `submit_store`.

        Raises:
            StateError: The keeper is closed.
        """
        return self._submit(items, deadline_s, leases or {}, request)

    def submit_store(
        self,
        items: Sequence[Store],
        *,
        deadline_s: float = 60.0,
        leases: Mapping[bytes, Lease] | None = None,
    ) -> int:
        """Start storing frames, root to leaf, evicting others where needed; see `Tier`.

        `STORED` means that at least one tier of the stack has the frame; "full", that pinned
        frames, or a quota, leave no room in any.

        Args:
            items: The stores.
            deadline_s: Longest time until all are answered.
            leases: Leases of frames by key. One that is stored already keeps the stronger lease.

        Raises:
            StateError: The keeper is closed.
        """
        return self._submit(items, deadline_s, leases or {})

    def _submit(
        self,
        operations: Sequence[Any],
        deadline_s: float,
        leases: Mapping[bytes, Lease],
        request: Hashable = None,
    ) -> int:
        keeper = self.keeper
        with keeper._lock:
            if not keeper.open:
                raise StateError(f"{self.name} is closed", "Open a keeper anew")
            keeper._hear()
            job, now = self.answers.new_job(), keeper._clock.now_ns()
            end, miss = now + round(min(deadline_s, 1e9) * 1e9), Outcome.MISS
            items = list[_Item]()
            for i, one in enumerate(operations):
                best, lease = TierAnswer(job, i, one.key, miss), leases.get(one.key, "")
                items.append(_Item(self, one, best, now, end, keeper._news, request, lease=lease))
            if operations and isinstance(operations[0], Load):
                for level in keeper.levels:
                    level.book.access(now, [operation.key for operation in operations])
                    level.book.retain(now, leases)
                keeper._load(items)
            else:
                keeper._store(items, [level for level in keeper.levels if level.tier.writable])
            return job

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return this caller's ready answers, waiting up to `timeout_s` for the first one."""
        return self.answers.poll(timeout_s)

    def fileno(self) -> int:
        """Return an eventfd that is readable while answers wait; -1 once closed."""
        return self.answers.fileno()

    def cancel(self, job: int) -> None:
        """Cancel the unanswered operations of a job; no further tier is tried."""
        with self.keeper._lock:
            for level in self.keeper.levels:
                numbers = dict[int, None]()
                for (number, _), flight in level.flights.items():
                    if flight.item.caller is self and flight.item.best.job == job:
                        flight.item.over, numbers[number] = True, None
                for number in numbers:
                    level.tier.cancel(number)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete frames from all tiers; return the most that one tier had."""
        with self.keeper._lock:
            for level in self.keeper.levels:
                level.book.remove([key for key in keys if not level.storing[key]])
        return max([tier.delete(keys) for tier in self._tiers])

    def erase(self, keys: Sequence[bytes]) -> int:
        """Erase frames with their bytes from all tiers, and record that for others who share one.

        Raises:
            StateError: The keeper is closed.
            StoreError: Frames may still be there; the message names the tier and the reason.
        """
        if not self.keeper.open:
            raise StateError(f"{self.name} is closed", "Open a keeper anew")
        return self.keeper._erase(keys)

    def scan(self) -> Iterator[Entry]:
        """Yield each frame once, as a load would find it; the slowest tier's oldest store first."""
        found = dict[bytes, Entry]()
        for tier in reversed(self._tiers):
            found.update((entry.key, entry) for entry in tier.scan())
        yield from found.values()

    def close(self) -> None:
        """Close the keeper, for all its callers."""
        self.keeper.close()


def open_keeper(
    *places: str, bus: Bus | None = None, over: Callable[[Tier], Tier] | None = None, **options: Any
) -> Keeper:
    """Open a keeper over places in the form of `Config.tiers`.

    Args:
        *places: "disk:./kv:200GiB", "host:8GiB", "s3://bucket/kv", ...: fastest first.
        bus: Bus that events are emitted on.
        over: Puts another tier over each one, such as a codec.
        **options: Fields of `Config`: policy, policy_options, quotas, durability, integrity,
            secret, lossless, exclusive.

    Returns:
        The keeper, with the frames that the places held before.

    Raises:
        ConfigError: A place or an option is invalid.
        MissingDependencyError: A tier needs an extra that is not installed.
        StoreError: A directory or an engine cannot be used.
    """
    if unknown := options.keys() - set(Config.__struct_fields__):
        raise ConfigError(
            f"a keeper has no options named {', '.join(sorted(unknown))}",
            "Use policy, policy_options, quotas, durability, integrity, secret or lossless",
        )
    config, rates, clock = Config(tiers=places, **options), dict[str, Rates](), SystemClock()
    tiers = open_tiers(config, (), clock, rates, on_cpu=False)
    try:
        tiers = [over(tier) for tier in tiers] if over else tiers
        salts = [tenant_salt(name, config.secret_bytes) for name in config.quotas]
        return Keeper(
            tiers, partial(policy_of, config), rates=rates, tenants=salts, bus=bus, clock=clock
        )
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
