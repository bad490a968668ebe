"""All schedules of two threads, up to so many switches that nothing forced.

Threads run one at a time. They may be switched where a lock is taken or given back, and wherever a
test says `point`. A schedule is a list of choices; after a run, the last choice that can still be
made otherwise is, until there is none left. So every interleaving of critical sections with at most
`switches` preemptions is run, once (iterative context bounding, Musuvathi and Qadeer, 2007).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_Semaphore, _Thread = threading.Semaphore, threading.Thread


class Deadlock(AssertionError):
    """All threads wait for each other."""


class _Worker:
    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.go = work, _Semaphore(0)
        self.ended = self.rests = False
        self.waits_for: _Lock | None = None
        self.thread = _Thread(target=lambda: None)
        self.error: BaseException | None = None


class Turns:
    """Whose turn it is, in one run."""

    def __init__(self, schedule: list[int], switches: int) -> None:
        self.schedule, self.switches = schedule, switches
        self.trace: list[tuple[int, int]] = []  # options, chosen
        self._workers: list[_Worker] = []
        self._main = _Semaphore(0)
        self._now: _Worker | None = None

    def point(self) -> None:
        """Another thread may go on here."""
        worker = self._now
        if worker is not None and worker.thread is threading.current_thread():
            self._main.release()
            worker.go.acquire()

    def rest(self) -> None:
        """Another thread goes on here, if there is one: who runs can only wait for it."""
        if self._now is not None:
            self._now.rests = True
        self.point()

    @property
    def me(self) -> object:
        """Who runs: a worker, or the test itself."""
        return self._now

    def run(self, works: list[Callable[[], None]]) -> None:
        """Runs all of them to their end."""
        self._workers = [_Worker(work) for work in works]
        for worker in self._workers:
            worker.thread = _Thread(target=self._body, args=(worker,), daemon=True)
            worker.thread.start()
        last: _Worker | None = None
        while any(not worker.ended for worker in self._workers):
            ready = [w for w in self._workers if not w.ended and not self._blocked(w)]
            if not ready:
                raise Deadlock("all threads wait")
            if last is not None and last.rests:
                last.rests = False
                ready = [w for w in ready if w is not last] or ready
            if last in ready and self.switches == 0:
                ready = [last]
            elif last in ready:
                ready = [last, *(w for w in ready if w is not last)]
            at = len(self.trace)
            chosen = self.schedule[at] if at < len(self.schedule) else 0
            self.trace.append((len(ready), chosen))
            self.switches -= last in ready and chosen > 0
            last = self._now = ready[chosen]
            last.go.release()
            self._main.acquire()
            self._now = None
        for worker in self._workers:
            worker.thread.join()
            if worker.error is not None:
                raise worker.error

    def _blocked(self, worker: _Worker) -> bool:
        lock = worker.waits_for
        return lock is not None and lock.owner not in (None, worker)

    def _body(self, worker: _Worker) -> None:
        worker.go.acquire()
        try:
            worker.work()
        except BaseException as error:
            worker.error = error
        worker.ended = True
        self._main.release()


class _Lock:
    """Like `threading.RLock`, in turns."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.owner, self.depth = turns, None, 0
        self.owner: object = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self.turns.me
        if me is None or self.owner is me:
            self.depth += 1
            return True
        self.turns.point()
        while self.owner is not None:
            if not blocking:
                return False
            assert isinstance(me, _Worker)
            me.waits_for = self
            self.turns.point()
        me.waits_for = None  # type: ignore[attr-defined]
        self.owner, self.depth = me, 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if self.depth == 0 and self.owner is not None:
            self.owner = None
            self.turns.point()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Condition(_Lock):
    """Like `threading.Condition`; waking up for no reason, as conditions may."""

    def __init__(self, turns: Turns, lock: _Lock | None = None) -> None:
        super().__init__(turns)
        self.lock = lock or _Lock(turns)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self.lock.acquire(blocking, timeout)

    def release(self) -> None:
        self.lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self.lock.depth = self.lock.depth, 1
        self.lock.release()
        self.lock.acquire()
        self.lock.depth = depth
        return True

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        if not ready() and timeout != 0:
            self.wait()
        return ready()

    def notify_all(self) -> None:
        pass

    notify = notify_all


@contextmanager
def locks_in(turns: Turns) -> Iterator[None]:
    """Objects made in here get locks that take turns."""
    replacements: dict[str, Any] = {
        "Lock": lambda: _Lock(turns),
        "RLock": lambda: _Lock(turns),
        "Condition": lambda lock=None: _Condition(turns, lock),
    }
    with mock.patch.multiple(threading, **replacements):
        yield


Scene = tuple[list[Callable[[], None]], Callable[[], None]]


def explore(scene: Callable[[Turns], Scene], *, switches: int, most: int = 1 << 20) -> int:
    """Runs all schedules of a scene.

    Args:
        scene: Makes fresh objects; returns what the threads do, and what is checked at the end.
        switches: Most switches that nothing forced.
        most: Stop after so many schedules.

    Returns:
        Schedules that were run.
    """
    schedule: list[int] = []
    for number in range(1, most + 1):
        turns = Turns(schedule, switches)
        works, check = scene(turns)
        try:
            turns.run(works)
            check()
        except BaseException as error:
            switched = [at for at, (_, chosen) in enumerate(turns.trace) if chosen]
            raise AssertionError(f"schedule {number}, switched at {switched}: {error}") from error
        trace = turns.trace
        while trace and trace[-1][1] + 1 >= trace[-1][0]:
            trace.pop()
        if not trace:
            return number
        schedule = [*(chosen for _, chosen in trace[:-1]), trace[-1][1] + 1]
    return most
