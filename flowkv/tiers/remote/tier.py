"""`RemoteTier`: any engine behind the `Tier` protocol, so that it can fail only by missing.

An engine is a `Backend` of six blocking calls. Everything else is here, once for all of them:
threads that move frames (`transfer`), the index of what is believed to be there (`known`), and one
thread that lists, deletes and looks after the index behind everybody's back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.errors import ConfigError, StateError, StoreError
from flowkv.tiers.base import UNBOUNDED, Completion, Entry, Load, Store
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.remote.aside import Aside, Event
from flowkv.tiers.remote.backend import Backend
from flowkv.tiers.remote.guard import Rates, State, attempt
from flowkv.tiers.remote.known import MOST_KNOWN, Fact, Known
from flowkv.tiers.remote.limits import Limits
from flowkv.tiers.remote.lookup import Lookup
from flowkv.tiers.remote.transfer import Transfer
from flowkv.tiers.worker import Patience, Workers

__all__ = ["Limits", "RemoteTier"]

DELETES = 1000
LISTED = 1000


class RemoteTier:
    """A `Tier` over an engine that others run and share.

    A load is received and checked in a thread's own memory and copied to its target last; a store
    is copied before it is sent. So a call that hangs is abandoned at its deadline with memory that
    nobody else uses. After three failures in a row the breaker opens: items are `FAILED` with
    reason "breaker" at once, and a probe now and then finds out whether the engine is back.

    A store that `FAILED` may still be found later, whole, or not at all. A damaged frame is a
    `MISS`; this process does not ask for it again before it stored it anew.

    Args:
        backend: The engine.
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the backend's.
        envelope: How frames are wrapped and checked; default xxh3 and nothing else.
        clock: Source of time.
        limits: How much it may do, and how long it may take.

    Raises:
        ConfigError: The capacity is too small.
        StoreError: The engine refuses us; one that does not answer is only warned of.
    """

    kind = "remote"
    writable = True
    shared = True

    def __init__(
        self,
        backend: Backend,
        capacity_bytes: int = UNBOUNDED,
        *,
        name: str = "",
        envelope: Envelope | None = None,
        clock: Clock | None = None,
        limits: Limits | None = None,
    ) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"a remote tier of {capacity_bytes} bytes", "Give it a few pages")
        self.name, self.capacity_bytes = name or backend.name, capacity_bytes
        self.backend, self.limits = backend, limits or Limits()
        self.envelope, self._clock = envelope or Envelope(), clock or SystemClock()
        self._moves = Transfer(
            backend,
            self.envelope,
            self._clock,
            undo=self._undo,
            capacity_bytes=capacity_bytes,
            limits=self.limits,
        )
        self.known: Known = self._moves.known
        self._workers = self._moves.workers = Workers(
            self.name,
            self._moves.load,
            self._moves.store,
            self._clock,
            threads=self.limits.threads,
            batch=1,
            queue_bytes=self.limits.queue_bytes,
            patience=Patience(
                self.limits.spares, max(1, self.limits.threads // 2), self._moves.late
            ),
        )
        self._aside, self._pid, self._open = Aside(self.name), os.getpid(), True
        self._lookup = Lookup(backend, self.known, self._clock, self._aside)
        self._closing, self._wake, self._listed = threading.Lock(), threading.Event(), Event()
        self._keeper = threading.Thread(target=self._keep, name=f"flowkv {self.name}", daemon=True)
        self._keeper.start()
        self._begin()

    @property
    def corrupt(self) -> int:
        """Frames found damaged since the tier was opened."""
        return self._moves.corrupt

    @property
    def state(self) -> State:
        """What the breaker lets through now."""
        return self._moves.breaker.state

    @property
    def trips(self) -> int:
        """How often the breaker opened."""
        return self._moves.breaker.trips

    @property
    def reading(self) -> Rates:
        """How fast single loads are, for those who plan them or choose a deadline."""
        return self._moves.reading

    @property
    def writing(self) -> Rates:
        """How fast single stores are."""
        return self._moves.writing

    @property
    def retired_bytes(self) -> int:
        """Memory in the hands of calls that hang."""
        return self._workers.retired_bytes

    def used_bytes(self) -> int:
        """Bytes of the frames that this process knows of."""
        return self.known.used_bytes() if self._usable() else 0

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what such a frame occupies."""
        return self.envelope.most_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are known; of the others some are asked for, for 50 ms at most.

        While the engine is left alone, nothing is believed to be there.
        """
        if not self._usable() or not self._moves.ready():
            return [False] * len(keys)
        unknown = [key for key in keys if self.known.get(key) is None]
        if unknown and self.backend.asks:
            self._lookup.ask(unknown)
        return [self.known.get(key) is not None for key in keys]

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Queues reads; they go before stores.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        self._require_usable()
        return self._workers.submit(items, deadline_s)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Queues writes.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        self._require_usable()
        return self._workers.submit(items, deadline_s)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Answers that are ready; waits up to `timeout_s` for the first one."""
        return self._workers.poll(timeout_s) if self._pid == os.getpid() else []

    def fileno(self) -> int:
        """An eventfd that is readable while answers wait; only `poll` notices a passed deadline."""
        return self._workers.answers.fileno()

    def cancel(self, job: int) -> None:
        """Answers what is not about to be answered."""
        self._workers.cancel(job)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets frames at once; the engine is told in the background, until it confirms."""
        if not self._usable():
            return 0
        gone = self._forget(keys)
        self._wake.set()
        return gone

    def erase(self, keys: Sequence[bytes]) -> int:
        """Removes frames from the engine, and asks it whether they are gone.

        Raises:
            StoreError: The engine did not confirm it.
        """
        if not self._usable():
            raise StoreError(f"tier {self.name!r} is closed", "Open it again and erase then")
        if not keys:
            return 0
        limit_s, known = self.limits.erase_s * (1 + len(keys) / DELETES), self.known
        strange = [key for key in keys if known.get(key) is None and not known.is_shunned(key)]
        gone = self._forget(keys)
        try:
            return gone + self._aside.call(lambda: self._remove(keys, strange, limit_s), limit_s)
        except OSError as error:
            raise StoreError(
                f"{self.name} did not confirm that {len(keys)} frames are gone ({error})",
                "Erase again when the engine answers, or delete the frames there",
            ) from error

    def scan(self) -> Iterator[Entry]:
        """All frames known, oldest store first; headers not seen yet are read now, for a while."""
        if not self._usable():
            return
        self._describe(self.limits.open_s)
        for key, fact in self.known.facts():
            if fact.info is not None:
                yield Entry(key, fact.info, fact.n_bytes)

    def survey(self) -> None:
        """Looks anew at what others wrote, so that `scan` leaves nothing out that is there now.

        Raises:
            StoreError: The engine did not list everything, or headers could not be read.
        """
        try:
            self._aside.call(self.refresh, self.limits.erase_s)
            self._aside.call(lambda: self._list({}), self.limits.erase_s)
            self._describe(self.limits.erase_s)
            unseen = sum(fact.info is None for _, fact in self.known.facts())
            if unseen or len(self.known) >= MOST_KNOWN:
                raise OSError(f"the headers of {unseen or 'some'} frames could not be read")
        except OSError as error:
            raise StoreError(
                f"{self.name} cannot say what it holds ({error})", "Try again when it answers"
            ) from error

    def close(self) -> None:
        """Works off what is queued, as long as the engine answers, and lets go of it."""
        if self._pid != os.getpid():
            return
        with self._closing:
            if not self._open:
                return
            if not self._moves.ready():
                self._workers.fail_waiting("breaker")
            ended = self._workers.close(self.limits.close_s)
            self._open = False
            self._wake.set()
            self._keeper.join(self.limits.close_s if self._moves.ready() else 0.1)
            if ended and not self._keeper.is_alive():
                self.backend.close()  # else a call still uses it

    # ---- behind everybody's back

    def recall(self) -> dict[bytes, Fact]:
        """What was written down about frames, some of which may be gone: asked before a listing.

        Raises:
            OSError: The engine failed.
        """
        return {}

    def learn(self) -> None:
        """Lists what is there.

        Raises:
            OSError: The engine failed.
        """
        self._list(self.recall())

    def _list(self, told: dict[bytes, Fact]) -> None:
        facts: list[tuple[bytes, Fact]] = []
        for name, n_bytes, stored_ns in self.backend.list(self.limits.call_s):
            key = bytes.fromhex(name)
            fact = told.get(key) or Fact(stored_ns=stored_ns)
            facts.append((key, fact._replace(n_bytes=n_bytes)))
            if len(facts) == LISTED:
                self.known.learn(facts)
                facts.clear()
            if not self._open:
                break
        self.known.learn(facts)

    def refresh(self) -> None:
        """Called every `Limits.every_s` seconds: looks at what others wrote, where that is cheap.

        Raises:
            OSError: The engine failed.
        """

    def flush(self) -> None:
        """Called soon after stores and at the end: writes down what helps the next opening.

        Raises:
            OSError: The engine failed.
        """

    def _begin(self) -> None:
        if not self._listed.wait(self.limits.open_s):
            return  # a long listing; it goes on
        error = self._listed.error
        if isinstance(error, PermissionError):
            self._open = False
            self._wake.set()
            raise StoreError(
                f"{self.name} refuses access ({error})",
                "Check the address, the credentials and their rights",
            ) from error
        if error is not None:
            warnings.warn(
                f"{self.name} does not answer ({error}): it will be tried again",
                UserWarning,
                stacklevel=3,
            )

    def _keep(self) -> None:
        """The life of the tier's own thread: lists, then deletes, looks and writes down."""
        learnt = self._listed.run(self.learn)
        looked_ns = self._clock.now_ns()
        while self._open:
            self._wake.wait(min(self.limits.every_s, 1.0))
            self._wake.clear()
            if not self._open or not self._moves.ready():
                continue
            due = (self._clock.now_ns() - looked_ns) / 1e9 >= self.limits.every_s
            try:
                self._delete_condemned()
                self.flush()
                if due:
                    looked_ns = self._clock.now_ns()
                    self.refresh() if learnt else self.learn()
                    learnt = True
            except Exception:  # a client library may raise anything, and this thread must go on
                continue  # loads and stores find out by themselves
        if self._moves.ready():
            with contextlib.suppress(Exception):
                self._delete_condemned()
                self.flush()

    def _forget(self, keys: Sequence[bytes]) -> int:
        for key in keys:
            self._moves.heads.drop(key)
        return self.known.condemn(keys)

    def _remove(self, keys: Sequence[bytes], strange: Sequence[bytes], timeout_s: float) -> int:
        """Deletes frames and sees that they are gone; returns how many strange ones there were."""
        end_ns = self._clock.now_ns() + round(timeout_s * 1e9)

        def left_s() -> float:
            return (end_ns - self._clock.now_ns()) / 1e9

        if not self.known.seize(keys, left_s()):
            raise TimeoutError("a store or a deletion of them hangs")
        gone = False
        names = [key.hex() for key in keys]
        try:
            others = [key.hex() for key in strange]
            before = attempt(partial(self.backend.exists, others), left_s) if others else []
            attempt(partial(self.backend.delete, names), left_s)
            left = sum(attempt(partial(self.backend.exists, names), left_s))
            if left:
                raise OSError(f"{left} are still there")
            gone = True
            return sum(before)
        finally:
            (self.known.acquit if gone else self.known.keep_condemned)(keys)

    def _delete_condemned(self) -> None:
        while keys := self.known.take_condemned(DELETES):
            gone = False
            try:
                self.backend.delete([key.hex() for key in keys], self.limits.call_s)
                gone = True
            finally:
                (self.known.acquit if gone else self.known.keep_condemned)(keys)

    def _describe(self, limit_s: float) -> None:
        """Reads the headers of frames of which only the name is known."""
        missing = [pair for pair in self.known.facts() if pair[1].info is None]
        if missing and self._moves.ready():
            with contextlib.suppress(OSError):
                self._aside.call(lambda: self._moves.describe(missing, limit_s), limit_s)

    def _undo(self, key: bytes) -> None:
        self.delete([key])

    def _usable(self) -> bool:
        return self._open and self._pid == os.getpid()

    def _require_usable(self) -> None:
        if not self._usable():
            why = "is closed" if self._pid == os.getpid() else "was opened before a fork"
            raise StateError(f"tier {self.name!r} {why}", "Open it again, here")
