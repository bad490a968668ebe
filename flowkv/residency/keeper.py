"""`Keeper`: tiers that make room by policy, for callers that have no cache of FlowKV's.

A tier that is full says so, and keeps what came first: what to give up is for its user to say. The
keeper knows by key what lies in each of its tiers, lets one policy per tier decide what goes, and
hands every answer to the caller that asked. It needs no torch.

Tiers stack, fastest first. A frame is stored in all of them, so that the loss of one loses nothing
and giving up is deleting. It is loaded from the fastest that has it, from the next where that does
not serve, and comes back into the faster ones then.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import compress, groupby, islice
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.config import Config
from flowkv.core.errors import ConfigError, StateError
from flowkv.core.keys import tenant_salt
from flowkv.core.reaper import REAPER
from flowkv.observe.events import Bus, Closing, Evicted, Failed, Forgotten, Quarantined, Stored
from flowkv.policy import Policy, make_policy
from flowkv.policy.restore.costs import LoadGate, Rates
from flowkv.policy.tenants import Tenants
from flowkv.residency.keyed import KeyedPolicy
from flowkv.residency.places import open_tiers, policy_of
from flowkv.tiers.base import UNBOUNDED, Entry, FrameInfo, Load, Outcome, Store, Tier, TierAnswer
from flowkv.tiers.erasure_log import MOST_KEYS, Erased, ErasureLog
from flowkv.tiers.worker import Completions

_log = logging.getLogger("flowkv")
HOLD_S = 60.0
"""Longest that what was looked up is kept from being given up."""

_POLL_S = 0.25
_TRIES = 3  # of a store that a tier calls full, each with more room
_CLOSE_POLLS = 40
_MOST_LISTED = 1 << 16  # frames of a remote tier
_MOST_KNOWN = 1 << 20  # frames of a tier in which nothing has to go
_MOST_ASKED = 1 << 10  # keys at a time
_RESCAN_S = 10.0
LONG_S = 1.0  # of a load, where nobody knows what computing takes
_REFILL_BYTES = 1 << 26  # on their way back into faster tiers at a time
_UNFIT = ("layout", "fidelity", "stripes")  # for this reader: the frame is there
_BENIGN = ("", "absent", *_UNFIT)


class _Item:
    """One operation of a caller on its way through the tiers.

    Attributes:
        caller: Whose; None of what comes back into a faster tier.
        job: The caller's number; the item's place in it is `index`.
        operation: The load or the store.
        end_ns: When it must be answered.
        begun_ns: When it was submitted.
        request: Whose later look-ups are told if a load fails.
        left: Tiers that owe an answer to a store.
        news: How often others had erased something, as far as was heard then.
        best: The answer so far.
        over: Cancelled: no other tier is asked.
    """

    __slots__ = tuple(
        "begun_ns best caller end_ns index job left news operation over request".split()
    )

    def __init__(
        self,
        caller: Caller | None,
        job: int,
        index: int,
        operation: Load | Store,
        request: Hashable = None,
    ) -> None:
        self.caller, self.job, self.index = caller, job, index
        self.operation: Any = operation
        self.request, self.left, self.over = request, 0, False
        self.begun_ns = self.end_ns = self.news = 0
        self.best = TierAnswer(job, index, operation.key, Outcome.MISS)


class _Flight:
    """An item at one tier: the bytes it may take there, and whether it brings a new frame.

    One that is `erased` meanwhile does not stay.
    """

    __slots__ = ("erased", "fresh", "item", "n_bytes", "tries")

    def __init__(self, item: _Item, n_bytes: int = 0, fresh: bool = False) -> None:
        self.item, self.n_bytes, self.fresh, self.tries = item, n_bytes, fresh, 0
        self.erased = False


class _Level:
    """One tier: what is known to lie in it, and what is under way.

    Attributes:
        tier: The tier.
        book: What lies in it, and what goes first.
        loads: What loads take, job by job.
        hit_bytes: Bytes that each job has brought so far.
        flights: Job numbers of the tier -> what it has not answered, by index.
        storing: Keys that are being stored, and how often.
        incoming_bytes: Most that those will take.
        scanned_s: When it was asked last what others have stored.
        local: Whether it says at once what is there.
        log: What others who share it erased, if it says so.
        sweeps: How many look through it, far away, for what was erased: nothing is there meanwhile.
        pump: The thread that fetches its answers.
    """

    def __init__(self, tier: Tier, policy: Policy, loads: Rates) -> None:
        self.tier, self.book, self.loads = tier, KeyedPolicy(policy), loads
        self.flights: dict[int, dict[int, _Flight]] = {}
        self.storing: Counter[bytes] = Counter()
        self.hit_bytes: Counter[int] = Counter()
        self.incoming_bytes, self.scanned_s = 0, -_RESCAN_S
        self.local, self.sweeps = tier.kind != "remote", 0
        found = getattr(tier, "erasure_log", None)
        self.log = ErasureLog(found) if isinstance(found, Path) else found
        self.pump: threading.Thread | None = None

    @property
    def bounded(self) -> bool:
        """Whether something may have to go."""
        return self.tier.capacity_bytes < UNBOUNDED

    def excess_bytes(self, need: int) -> int:
        """Bytes that must go before so many may come."""
        return self.tier.used_bytes() + self.incoming_bytes + need - self.tier.capacity_bytes

    def has(self, key: bytes) -> bool:
        """Whether a key is believed to be there, as far as is known without asking far away."""
        if self.sweeps:
            return False
        return self.tier.contains([key])[0] if self.local else key in self.book


class _Hold:
    """A look-up for one request: its names, those asked for, and those that failed to load.

    Attributes:
        since_ns: When it was looked at last.
        pinned: Tiers in which each key is kept.
        failed: Keys that are misses for this request from now on.
        asked: Whether keys are far away; None while that is not known.
    """

    __slots__ = ("asked", "failed", "pinned", "since_ns")

    def __init__(self) -> None:
        self.since_ns = 0
        self.pinned: dict[bytes, list[_Level]] = {}
        self.failed: set[bytes] = set()
        self.asked: dict[bytes, bool | None] = {}

    def let_go(self) -> bool:
        """Ends the pins; whether there were any."""
        pinned, self.pinned = self.pinned, {}
        by_level: dict[_Level, list[bytes]] = {}
        for key, levels in pinned.items():
            for level in levels:
                by_level.setdefault(level, []).append(key)
        for level, keys in by_level.items():
            level.book.unpin(keys)
        return bool(pinned)


class Keeper(Closing):
    """Keeps frames in a stack of tiers and gives up by policy what does not fit. Thread-safe.

    Ask it through a `caller()`; each of an engine's threads may have its own.

    Args:
        tiers: Open tiers, fastest first, for this keeper alone, which closes them.
        policies: Makes the policy of a tier, given its kind and its capacity in bytes.
        rates: What loads take, by the names of tiers; the keeper adds what it measures.
        tenants: `tenant_salt` of those with quotas, in the order in which policies number them.
        bus: Is told what is stored, given up, refused, and what failed.
        clock: Source of time.

    Attributes:
        name: Of the stack, for statistics.
        bus: Where events go.
        gate: What loads take, and what computing takes if somebody says so.
        counts: How often loads and stores ended how: "hit", "miss:digest", "failed:deadline", ...
        on_evicted: Is called with what was given up and lies in no tier any more, under the
            keeper's lock: it must not wait.

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
            raise ConfigError(f"a keeper of the tiers {names}", "Give it some, of different names")
        self.name, self.bus = " > ".join(names), bus or Bus()
        self.counts: Counter[str] = Counter()
        self.on_evicted: Callable[[list[bytes]], object] = lambda keys: None
        self._clock, self._lock = clock or SystemClock(), threading.RLock()
        self._tenants = {salt: number for number, salt in enumerate(tenants)}
        self._open, self._refill_bytes, self._news, self.gate = True, 0, 0, LoadGate()
        self.gate.rates = rates if rates is not None else {}
        self._levels = [
            _Level(tier, policies(tier.kind, tier.capacity_bytes), self._rates(tier))
            for tier in tiers
        ]
        self._questions: SimpleQueue[tuple[Caller, Hashable, bytes] | None] = SimpleQueue()
        self._asker: threading.Thread | None = None
        self._holds: dict[tuple[Caller, Hashable], _Hold] = {}
        self._finalizer = weakref.finalize(self, REAPER.put, partial(_shut, self._levels))
        self._finalizer.atexit = False
        REAPER.start()
        for level in self._levels:
            if level.local or level.bounded:  # elsewhere nothing has to go, and look-ups ask
                self._enter(level)

    def _rates(self, tier: Tier) -> Rates:
        return self.gate.rates.setdefault(tier.name, Rates())

    def caller(self) -> Caller:
        """Somebody new who asks, and whose answers nobody else gets."""
        return Caller(self)

    @property
    def open(self) -> bool:
        """Whether it was not closed yet."""
        return self._open

    @property
    def levels(self) -> Sequence[_Level]:
        """The tiers and what is known of them, fastest first; only to be looked at."""
        return tuple(self._levels)

    def close(self) -> None:
        """Closes the tiers, which finish or fail what is under way. Safe to call again."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._finalizer.detach()
        _shut(self._levels)
        self._questions.put(None)
        for thread in (self._asker, *(level.pump for level in self._levels)):
            if thread is not None and thread is not threading.current_thread():
                thread.join()

    def knows(self, key: bytes) -> bool:
        """Whether a frame lies, or will lie, in one of the tiers, as far as was heard here."""
        return any(key in level.book for level in self._levels)

    def worth(self, keys: Sequence[bytes], n_bytes: int, tokens: int) -> bool:
        """Whether loading frames of so many bytes each beats computing so many tokens.

        By what was measured: loads here, and `gate.computed` by whoever computes. While nobody has
        computed anything, because all is found here, what takes long to load is not worth it: it is
        computed then, and that is measured.
        """
        where = Counter[str]()
        for key in keys:
            near = next((one for one in self._levels if one.has(key)), self._levels[-1])
            where[near.tier.name] += n_bytes
        if not self.gate.seconds_per_token and self.gate.load_s(where) > LONG_S:
            return False
        return self.gate.worth(where, tokens)

    def report(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        with self._lock:
            tiers = {
                level.tier.name: {
                    "kind": level.tier.kind,
                    "writable": level.tier.writable,
                    "frames": len(level.book),
                    "used_bytes": level.tier.used_bytes(),
                    "capacity_bytes": level.tier.capacity_bytes,
                    "incoming_bytes": level.incoming_bytes,
                    "policy": level.book.policy.name,
                    "load_bytes_per_s": level.loads.bytes_per_s,
                }
                for level in self._levels
            }
            return {"answers": dict(self.counts), "tiers": tiers}

    # ---- what lies where

    def _enter(self, level: _Level) -> bool:
        """What a tier holds becomes known, oldest first; whether any of it was not."""
        found = level.tier.scan()
        listed = list(found if level.local else islice(found, _MOST_LISTED))
        with self._lock:
            new = [entry for entry in listed if entry.key not in level.book]
            now = self._clock.now_ns()
            for (n_bytes, salt), run in groupby(new, lambda e: (e.n_bytes, e.info.tenant)):
                keys, infos = zip(*((entry.key, entry.info) for entry in run), strict=True)
                parents, tenant = [info.parent for info in infos], self._tenant(salt)
                level.book.insert(now, keys, parents, n_bytes=n_bytes, tenant=tenant)
        return bool(new)

    def _rescan(self, level: _Level) -> bool:
        """What others have stored becomes known: of a far tier later, for that may take long."""
        now_s = self._clock.now_ns() / 1e9
        if level.local:
            return self._enter(level)
        if now_s - level.scanned_s >= _RESCAN_S:
            level.scanned_s = now_s
            threading.Thread(target=self._enter, args=(level,), daemon=True).start()
        return False

    def _tenant(self, salt: bytes) -> int:
        return self._tenants.get(salt, len(self._tenants))

    # ---- what was erased

    def _hear(self) -> None:
        """Drops from everywhere what others erased, before anything else is looked up."""
        for level in self._levels:
            if level.log is None or not level.log.changed() or not (erased := level.log.news()):
                continue
            self._news += 1
            for other in self._levels:
                if other.local:
                    self._drop(other, erased)
                elif other is not level or not erased.proven:
                    other.sweeps += 1
                    sweep = threading.Thread(target=self._sweep, args=(other, erased), daemon=True)
                    sweep.start()

    def _sweep(self, level: _Level, erased: Erased) -> None:
        """Looks for what was erased where that may take long."""
        try:
            meant = _meant(erased, level.tier.scan())
        except Exception:  # of a client that may be anybody's: what is known of it goes
            _log.warning("%s cannot be looked through", level.tier.name, exc_info=True)
            with self._lock:
                meant = set(level.book)
        with self._lock:
            try:
                self._drop(level, erased, meant)
            finally:
                level.sweeps -= 1

    def _drop(self, level: _Level, erased: Erased, meant: Collection[bytes] | None = None) -> None:
        meant = _meant(erased, level.tier.scan()) if meant is None else meant
        known = [key for key in level.book if key in meant or erased.everything or erased.has(key)]
        self._withdraw(level, lambda store: _means(erased, store.key, store.info, meant))
        level.tier.delete(list(meant))
        self.bus.emit(Forgotten(tier=level.tier.name, blocks=len(known)))
        level.book.remove([key for key in known if not level.storing[key]])
        self._lost(known)

    def _withdraw(self, level: _Level, meant: Callable[[Store], bool]) -> bool:
        """What is being stored of it does not stay; whether there is any."""
        found = [
            flight
            for flights in level.flights.values()
            for flight in flights.values()
            if isinstance(flight.item.operation, Store) and meant(flight.item.operation)
        ]
        for flight in found:
            flight.erased = True
        return bool(found)

    def _erase(self, keys: Sequence[bytes]) -> int:
        """Erases frames from all tiers, and tells others who share those."""
        with self._lock, ExitStack() as held:
            logs = [level.log for level in self._levels if level.log is not None]
            for log in sorted(logs, key=lambda log: log.path):  # no two wait for each other
                held.enter_context(log.erasing())
            named, proven, most = set(keys), True, 0
            for level in self._levels:
                proven &= not self._withdraw(level, lambda store: store.key in named)
                level.book.remove([key for key in keys if not level.storing[key]])
            for level in self._levels:
                most = max(most, level.tier.erase(keys))
                proven &= level.tier.writable
            for log in logs:
                for at in range(0, len(keys), MOST_KEYS):
                    log.publish(keys[at : at + MOST_KEYS], proven=proven)
            self._news += 1
            return most

    def _make_room(self, level: _Level, need: int, kept: Collection[bytes] = ()) -> bool:
        """Gives up what the policy would until so many bytes fit; False if it cannot."""
        if need > level.tier.capacity_bytes:
            return False
        if level.excess_bytes(need) > 0:  # what has arrived is not to be counted twice
            self._settle(level, level.tier.poll(0.0))
        while (excess := level.excess_bytes(need)) > 0:
            now, most = self._clock.now_ns(), -(-excess // level.book.largest_bytes)
            victims = level.book.evict(now, most, kept) or level.book.evict(now, 1, kept)
            if victims:
                self._give_up(level, victims, "space")
            elif not self._let_go_late() and not self._rescan(level):
                return False
        return True

    def _give_up(self, level: _Level, keys: Sequence[bytes], reason: str) -> None:
        if keys:
            before = level.tier.used_bytes()
            level.tier.delete(keys)
            gone = max(0, before - level.tier.used_bytes())
            told = Evicted(tier=level.tier.name, pages=len(keys), n_bytes=gone, reason=reason)
            self.bus.emit(told)
            self._lost(keys)

    def _lost(self, keys: Iterable[bytes]) -> None:
        """Tells what lies in no tier any more."""
        if gone := [key for key in keys if not self.knows(key)]:
            self.on_evicted(gone)

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
        now, kept = self._clock.now_ns(), {item.operation.key for item in items}
        kept.update(item.operation.info.parent for item in items)
        level.book.access(now, [item.operation.key for item in items])
        first = {
            item.operation.key: item
            for item in reversed(items)
            if item.operation.key not in level.book
        }
        flights, fresh = list[_Flight](), [item for item in items if item in first.values()]
        for (need, salt), run in groupby(fresh, partial(self._terms, level)):
            new, tenant = list[_Flight](), self._tenant(salt)
            for item in run:
                if self._make_room(level, need * (len(new) + 1), kept):
                    new.append(_Flight(item, need, fresh=True))
            keys = [flight.item.operation.key for flight in new]
            if keys:
                parents = [flight.item.operation.info.parent for flight in new]
                level.book.insert(now, keys, parents, n_bytes=need, tenant=tenant)
                if not level.bounded and len(level.book) > _MOST_KNOWN:  # they stay, unheard of
                    level.book.evict(now, len(level.book) - _MOST_KNOWN // 2)
                level.incoming_bytes += need * len(keys)
                self._take_off(level, new)
                self._give_up(level, level.book.shed(now), "quota")
                self._keep_to_quota(level, tenant, new)
                flights += new
        flown = {flight.item for flight in flights}
        for item in items:
            if item in flown:
                continue
            if item.operation.key in level.book:  # there, or on its way: the tier says which
                flights.append(flight := _Flight(item))
                self._take_off(level, [flight])
            else:
                self._stored(item, "full")
        self._send(level, sorted(flights, key=lambda flight: flight.item.index))

    def _take_off(self, level: _Level, flights: Sequence[_Flight]) -> None:
        keys = [flight.item.operation.key for flight in flights]
        level.book.pin(keys)
        level.storing.update(keys)

    def _terms(self, level: _Level, item: _Item) -> tuple[int, bytes]:
        return level.tier.frame_bytes(item.operation.body.nbytes), item.operation.info.tenant

    def _keep_to_quota(self, level: _Level, tenant: int, new: list[_Flight]) -> None:
        """Takes back the last of what comes while its tenant has more than it may."""
        policy = level.book.policy
        while isinstance(policy, Tenants) and new and policy.excess_bytes(tenant) > 0:
            self._landed(level, new.pop(), there=False)

    def _send(self, level: _Level, flights: list[_Flight]) -> None:
        if not flights:
            return
        log = level.log
        with log.storing() if log else nullcontext(True) as free:
            free = free and not (log and log.changed())  # else others erased what may be among it
            if free:
                left_s = (flights[0].item.end_ns - self._clock.now_ns()) / 1e9
                operations = [flight.item.operation for flight in flights]
                number = level.tier.submit_store(operations, deadline_s=max(0.0, left_s))
                level.flights[number] = dict(enumerate(flights))
                self._start(level)
        for flight in () if free else flights:
            self._landed(level, flight, there=False)
            self._stored(flight.item, "busy")

    def _landed(self, level: _Level, flight: _Flight, *, there: bool) -> None:
        """A store is over at a tier."""
        key = flight.item.operation.key
        level.incoming_bytes -= flight.n_bytes
        level.storing[key] -= 1
        if not level.storing[key]:
            del level.storing[key]
        level.book.unpin([key])
        if flight.fresh and not there and not level.storing[key]:
            level.book.remove([key])
            self._lost([key])

    def _stored(self, item: _Item, reason: str, n_bytes: int = 0) -> None:
        """A tier answered a store; the caller is answered once all have."""
        if not reason:
            item.best = item.best._replace(outcome=Outcome.STORED, reason="", n_bytes=n_bytes)
        elif item.best.outcome is not Outcome.STORED:
            item.best = item.best._replace(reason=reason)
        item.left -= 1
        if not item.left:
            self._answer(item)

    # ---- loads

    def _load(self, items: Sequence[_Item], first: int = 0) -> None:
        """Each item goes to the fastest tier from `first` on that is believed to have it."""
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
            level, now = self._levels[nearest], self._clock.now_ns()
            left_s = max(0.0, (flights[0].item.end_ns - now) / 1e9)
            operations = [flight.item.operation for flight in flights]
            number = level.tier.submit_load(operations, deadline_s=left_s)
            level.flights[number] = dict(enumerate(flights))
            self._start(level)

    def _loaded(self, level: _Level, item: _Item, answer: TierAnswer, copy: bytes | None) -> None:
        key, number = item.operation.key, self._levels.index(level)
        if answer.outcome is Outcome.HIT:
            level.hit_bytes[answer.job] += answer.n_bytes
            current = self._open and item.news == self._news
            if copy is not None and answer.info is not None and current:
                self._refill(number, Store(key, answer.info, memoryview(copy)))
        elif answer.outcome is Outcome.FAILED:
            self.bus.emit(Failed(tier=level.tier.name, operation="load", reason=answer.reason))
        else:
            if answer.reason not in _BENIGN:
                told = Quarantined(tier=level.tier.name, key=key, reason=answer.reason)
                self.bus.emit(told)
            if not level.storing[key] and answer.reason not in _UNFIT and key in level.book:
                level.book.remove([key])
                self._lost([key])
        if answer.outcome is Outcome.HIT or not item.best.reason:  # the first reason says most
            item.best = TierAnswer(item.job, item.index, *answer[2:])
        over = item.over or not self._open or self._clock.now_ns() >= item.end_ns
        if answer.outcome is Outcome.HIT or over or number + 1 == len(self._levels):
            self._answer(item)
        else:
            self._load([item], number + 1)

    def _refill(self, below: int, store: Store) -> None:
        """What was found in one tier comes back into the faster ones."""
        levels = [level for level in self._levels[:below] if level.tier.writable]
        item = _Item(None, 0, 0, store)
        item.begun_ns, item.news = self._clock.now_ns(), self._news
        item.end_ns = item.begun_ns + round(HOLD_S * 1e9)
        self._refill_bytes += store.body.nbytes
        self._store([item], [level for level in levels if not level.has(store.key)])

    # ---- look-ups

    def _hold(self, caller: Caller, request: Hashable) -> _Hold:
        hold = self._holds.setdefault((caller, request), _Hold())
        hold.since_ns = self._clock.now_ns()
        return hold

    def _lookup(self, key: bytes, caller: Caller, request: Hashable) -> bool | None:
        hold = self._hold(caller, request) if request is not None else _Hold()
        if key in hold.failed or not self._open:
            return False
        there = [level for level in self._levels if level.has(key)]
        if there:
            if request is not None and key not in hold.pinned:
                hold.pinned[key] = [level for level in there if key in level.book]
                for level in hold.pinned[key]:
                    level.book.pin([key])
            return True
        if request is None or all(level.local for level in self._levels):
            return False
        if key not in hold.asked:
            hold.asked[key] = None
            questions = self._questions
            questions.put((caller, request, key))
            if self._asker is None:
                told = weakref.ref(self, lambda _: questions.put(None)), questions
                self._asker = threading.Thread(
                    target=_answer, args=told, name="flowkv ask", daemon=True
                )
                self._asker.start()
        return hold.asked[key]

    def _ask(self, asked: list[tuple[Caller, Hashable, bytes]]) -> None:
        """Asks far tiers what they hold, for look-ups that must not wait."""
        keys, far = [key for _, _, key in asked], set[bytes]()
        for level in self._levels:
            for i in range(0, 0 if level.local else len(keys), _MOST_ASKED):
                part = keys[i : i + _MOST_ASKED]
                try:
                    far |= set(compress(part, level.tier.contains(part)))
                except Exception:  # of a client that may be anybody's: nothing is there
                    _log.warning("%s does not say what it holds", level.tier.name, exc_info=True)
        with self._lock:
            for caller, request, key in asked:
                hold = self._holds.get((caller, request))
                if hold is not None:
                    hold.asked[key] = key in far

    def _let_go_late(self) -> bool:
        """Ends the pins of look-ups that nobody came back to; whether there were any."""
        before = self._clock.now_ns() - round(HOLD_S * 1e9)
        return any([hold.let_go() for hold in self._holds.values() if hold.since_ns < before])

    # ---- answers

    def _start(self, level: _Level) -> None:
        if level.pump is None:
            name = f"flowkv keeper {level.tier.name}"
            told = weakref.ref(self), level
            level.pump = threading.Thread(target=_pump, args=told, name=name, daemon=True)
            level.pump.start()

    def _take(self, level: _Level, answers: list[TierAnswer]) -> None:
        """Passes on what a tier has answered."""
        copies = {} if level is self._levels[0] else self._copies(level, answers)
        with self._lock:
            self._settle(level, answers, copies)

    def _fail_rest(self, level: _Level) -> None:
        """Answers what a closed tier owes."""
        with self._lock:
            owed = [
                (job, i, one.item) for job, of in level.flights.items() for i, one in of.items()
            ]
            rest = [
                TierAnswer(job, i, item.operation.key, Outcome.FAILED, "closed")
                for job, i, item in owed
            ]
            self._settle(level, rest)

    def _copies(self, level: _Level, answers: Iterable[TierAnswer]) -> dict[_Item, bytes]:
        """What came of whole frames, for faster tiers, while it may still be looked at."""
        found: dict[_Item, bytes] = {}
        room = _REFILL_BYTES - self._refill_bytes
        for answer in answers:
            flight = level.flights.get(answer.job, {}).get(answer.item)
            room -= answer.n_bytes
            if flight is None or answer.outcome is not Outcome.HIT or room < 0:
                continue
            operation = flight.item.operation
            if not operation.first and not operation.stripes:
                found[flight.item] = bytes(operation.target.cast("B")[: answer.n_bytes])
        return found

    def _settle(
        self,
        level: _Level,
        answers: Iterable[TierAnswer],
        copies: Mapping[_Item, bytes] = MappingProxyType({}),
    ) -> None:
        """What a tier answered reaches those who asked, or another tier."""
        for answer in answers:
            flights = level.flights.get(answer.job, {})
            flight = flights.pop(answer.item, None)
            if flight is None:
                continue
            item = flight.item
            if isinstance(item.operation, Load):
                self._loaded(level, item, answer, copies.get(item))
                if not flights:  # the last one came when all had
                    level.loads.add(level.hit_bytes.pop(answer.job, 0), answer.seconds)
            elif answer.reason == "full" and self._again(level, flight):
                self._send(level, [flight])
            else:
                there = answer.outcome is Outcome.STORED
                if there and flight.erased:
                    level.tier.delete([item.operation.key])
                    there, answer = False, answer._replace(reason="busy")
                self._landed(level, flight, there=there)
                name, n_bytes = level.tier.name, answer.n_bytes
                if there:
                    told = Stored(tier=name, pages=1, n_bytes=n_bytes, seconds=answer.seconds)
                    self.bus.emit(told)
                else:
                    self.bus.emit(Failed(tier=name, operation="store", reason=answer.reason))
                self._stored(item, "" if there else answer.reason, n_bytes)
            if not flights:
                level.flights.pop(answer.job, None)

    def _again(self, level: _Level, flight: _Flight) -> bool:
        """Whether a tier that says it is full has more room now: frames lie in it in slabs."""
        item, now = flight.item, self._clock.now_ns()
        flight.tries += 1
        over = item.over or flight.erased or not self._open
        if over or flight.tries > _TRIES or now >= item.end_ns:
            return False
        victims = level.book.evict(now, 1 << flight.tries) or level.book.evict(now, 1) or ()
        self._give_up(level, victims, "space")
        return bool(victims)

    def _answer(self, item: _Item) -> None:
        best, caller = item.best, item.caller
        seconds = (self._clock.now_ns() - item.begun_ns) / 1e9
        if caller is None:
            self._refill_bytes -= item.operation.body.nbytes
            return
        self.counts[":".join(filter(None, (best.outcome.value, best.reason)))] += 1
        hold = self._holds.get((caller, item.request))
        if (
            hold is not None
            and isinstance(item.operation, Load)
            and best.outcome is not Outcome.HIT
        ):
            hold.failed.add(best.key)
        caller.answers.put([best._replace(seconds=seconds)])


# Threads hold a keeper only while they have something for it: one that is dropped goes.


def _shut(levels: Iterable[_Level]) -> None:
    """Closes the tiers of a keeper that is closed, or gone."""
    for level in levels:
        level.tier.close()
        if level.log is not None:
            level.log.close()


def _pump(whose: weakref.ref[Keeper], level: _Level) -> None:
    """Fetches a tier's answers until the end, and until nothing is under way then."""
    left = _CLOSE_POLLS
    while left:
        answers = level.tier.poll(_POLL_S)
        keeper = whose()
        if keeper is None:
            return
        if answers:
            keeper._take(level, answers)
        if not keeper._open:
            left = left - 1 if level.flights else 0
        if not left:
            keeper._fail_rest(level)
        del keeper


def _answer(
    whose: weakref.ref[Keeper], questions: SimpleQueue[tuple[Caller, Hashable, bytes] | None]
) -> None:
    """Answers questions, as many at once as there are, until the end."""
    while True:
        asked = [questions.get()]
        while not questions.empty():
            asked.append(questions.get())
        keeper = whose()
        if keeper is None or None in asked:
            return
        keeper._ask([one for one in asked if one is not None])
        del keeper, asked


def _means(erased: Erased, key: bytes, info: FrameInfo, gone: Collection[bytes]) -> bool:
    """Whether a frame was erased; `gone` are keys of others that were."""
    if key in gone or info.parent in gone or erased.has(key) or erased.ends(info.parent):
        return True
    return erased.covers(info.tenant, info.namespace)


def _meant(erased: Erased, entries: Iterable[Entry]) -> set[bytes]:
    """Keys of what was erased, and of what continues it."""
    gone, rest = set[bytes](), list(entries)
    while True:
        left = list[Entry]()
        for entry in rest:  # root to leaf mostly, so that once is enough
            if _means(erased, entry.key, entry.info, gone):
                gone.add(entry.key)
            else:
                left.append(entry)
        if len(left) == len(rest):
            return gone
        rest = left


class Caller:
    """A `Tier` over a keeper's stack, whose answers go to whoever made it. Thread-safe.

    Beyond the protocol, `lookup` is for engines that ask first, and load later: until `release`
    what was found is not given up, and what failed to load is a miss, so that nobody asks for it
    for ever.
    """

    def __init__(self, keeper: Keeper) -> None:
        tiers = [level.tier for level in keeper.levels]
        self.keeper, self.name, self.kind = keeper, keeper.name, tiers[-1].kind
        self.capacity_bytes = min(UNBOUNDED, sum(tier.capacity_bytes for tier in tiers))
        self.answers = Completions()
        self._tiers = tiers
        self._items: dict[int, list[_Item]] = {}

    def lookup(self, keys: Sequence[bytes], request: Hashable) -> list[bool | None]:
        """Which keys can be loaded, as far as anybody knows; never waits.

        Args:
            keys: 32 bytes each.
            request: On whose behalf, until `release`; with the same one, failures are remembered.

        Returns:
            None for what a remote tier is being asked about: ask again in a moment.
        """
        with self.keeper._lock:
            self.keeper._hear()
            return [self.keeper._lookup(key, self, request) for key in keys]

    def release(self, request: Hashable) -> None:
        """A request needs no more loads: what it looked up may go, what failed is forgotten."""
        with self.keeper._lock:
            hold = self.keeper._holds.pop((self, request), None)
            if hold is not None:
                hold.let_go()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Frames were used without being loaded: by whoever holds a copy nearer by."""
        keeper, keys = self.keeper, list(keys)
        with keeper._lock:
            for level in keeper.levels:
                level.book.access(keeper._clock.now_ns(), keys)

    # ---- Tier

    @property
    def writable(self) -> bool:
        """Whether any tier takes frames."""
        return any(tier.writable for tier in self._tiers)

    @property
    def shared(self) -> bool:
        """Whether others may write to any of the tiers."""
        return any(tier.shared for tier in self._tiers)

    def used_bytes(self) -> int:
        """Bytes occupied in all tiers."""
        return sum(tier.used_bytes() for tier in self._tiers)

    def frame_bytes(self, body_bytes: int) -> int:
        """Most bytes that a frame occupies in all tiers."""
        return sum(tier.frame_bytes(body_bytes) for tier in self._tiers)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are believed to be there; asks remote tiers, for 50 ms at most."""
        with self.keeper._lock:
            self.keeper._hear()
            asked = [level.tier for level in self.keeper.levels if not level.sweeps]
        there = [tier.contains(keys) for tier in asked] or [[False] * len(keys)]
        return [any(one) for one in zip(*there, strict=True)]

    def submit_load(
        self, items: Sequence[Load], *, deadline_s: float = 10.0, request: Hashable = None
    ) -> int:
        """Starts reading, root to leaf; see `Tier`.

        Args:
            items: What to load.
            deadline_s: Until all are answered.
            request: Whose later look-ups are told of what failed.

        Raises:
            StateError: The keeper is closed.
        """
        return self._submit(items, deadline_s, request)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Starts writing, root to leaf, and gives up what must go; see `Tier`.

        `STORED` says that one tier of the stack has it at least; "full", that pinned frames, or a
        quota, leave no room in any.

        Raises:
            StateError: The keeper is closed.
        """
        return self._submit(items, deadline_s)

    def _submit(
        self, operations: Sequence[Any], deadline_s: float, request: Hashable = None
    ) -> int:
        keeper = self.keeper
        with keeper._lock:
            if not keeper.open:
                raise StateError(f"{self.name} is closed", "Open a keeper anew")
            keeper._hear()
            job, now = self.answers.new_job(), keeper._clock.now_ns()
            items = [
                _Item(self, job, i, operation, request) for i, operation in enumerate(operations)
            ]
            for item in items:
                item.begun_ns, item.end_ns = now, now + round(min(deadline_s, 1e9) * 1e9)
                item.news = keeper._news
            if operations and isinstance(operations[0], Load):
                for level in keeper.levels:
                    level.book.access(now, [operation.key for operation in operations])
                keeper._load(items)
            else:
                keeper._store(items, [level for level in keeper.levels if level.tier.writable])
            return job

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """This caller's answers that are ready; waits up to `timeout_s` for the first one."""
        return self.answers.take(timeout_s)

    def fileno(self) -> int:
        """An eventfd that is readable while answers wait; -1 once closed."""
        return self.answers.fileno()

    def cancel(self, job: int) -> None:
        """Cancels what tiers have not answered of a job; no other tier is asked."""
        with self.keeper._lock:
            for level in self.keeper.levels:
                for number, flights in list(level.flights.items()):
                    mine = [
                        f.item
                        for f in flights.values()
                        if (f.item.caller, f.item.job) == (self, job)
                    ]
                    for item in mine:
                        item.over = True
                    if mine:
                        level.tier.cancel(number)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets frames in all tiers; returns how many were there."""
        with self.keeper._lock:
            for level in self.keeper.levels:
                level.book.remove([key for key in keys if not level.storing[key]])
        return max([tier.delete(keys) for tier in self._tiers])

    def erase(self, keys: Sequence[bytes]) -> int:
        """Forgets frames in all tiers, leaves no copy of their bytes, and tells who shares a tier.

        Raises:
            StoreError: Some may still be there; the message says which tier and why.
        """
        return self.keeper._erase(keys)

    def scan(self) -> Iterator[Entry]:
        """All frames, each once as a load would find it; oldest store of the slowest tier first."""
        found = dict[bytes, Entry]()
        for tier in reversed(self._tiers):
            found.update((entry.key, entry) for entry in tier.scan())
        yield from found.values()

    def close(self) -> None:
        """Closes the keeper, for all its callers."""
        self.keeper.close()


def open_keeper(*places: str, bus: Bus | None = None, **options: Any) -> Keeper:
    """Opens a keeper over places as users write them.

    Args:
        *places: "disk:./kv:200GiB", "host:8GiB", "s3://bucket/kv", ...: fastest first.
        bus: Is told what happens.
        **options: Fields of `Config`: policy, policy_options, quotas, durability, integrity,
            secret, lossless, exclusive.

    Returns:
        The keeper, which knows what the places held before.

    Raises:
        ConfigError: A place or an option is none.
        MissingDependencyError: A tier needs an extra that is not installed.
        StoreError: A directory or an engine cannot be used.
    """
    if unknown := options.keys() - set(Config.__struct_fields__):
        raise ConfigError(
            f"options of a keeper named {', '.join(sorted(unknown))}",
            "Use policy, policy_options, quotas, durability, integrity, secret or lossless",
        )
    config, rates, clock = Config(tiers=places, **options), dict[str, Rates](), SystemClock()
    tiers = open_tiers(config, (), clock, rates, on_cpu=False)
    try:
        salts = [tenant_salt(name, config.secret_bytes) for name in config.quotas]
        return Keeper(
            tiers, partial(policy_of, config), rates=rates, tenants=salts, bus=bus, clock=clock
        )
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
