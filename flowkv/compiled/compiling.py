"""Intervals of compilation in this process, excluded from every deadline and measured time.

A function is compiled, or read from a cache of compiled ones, at its first call: for seconds, in
the middle of other work, while every thread that needs numba's lock waits. `watch` subscribes to
numba's events, so that functions of other packages count too; other compilers report by `around`.
Deadlines are set by `now_ns`, which stands still meanwhile, but for a nanosecond from call to call;
a measured time goes through `measured_s` before it is used. Compilation that takes longer than a
second is reported to the user (`core.progress`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from flowkv.core.progress import LINE

MOST_S = 600.0
"""Longest interval that counts; one that seems longer has lost its end."""

MOST_SHARE = 0.1
"""Largest share of compilation in a usable measured time; with more, the rest is unreliable."""

_KEPT = 1 << 10
_THREAD = threading.local()


class Intervals:
    """Times at which any thread of a process compiled. Thread-safe; by `time.monotonic_ns`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may compile as well
        self._depths: dict[int, int] = {}  # nesting depths of compiling threads
        self._begun_ns = self._spent_ns = self._last_ns = 0
        self._past: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    def begin(self) -> None:
        """Begin an interval of the calling thread; nests."""
        with self._lock:
            if not self._depths:
                self._begun_ns = time.monotonic_ns()
            me = threading.get_ident()
            self._depths[me] = self._depths.get(me, 0) + 1

    def start_reports(self) -> None:
        """Report every second for as long as compilation goes on."""
        LINE.begin(self, self._describe)

    def end(self) -> None:
        """End the calling thread's last interval; a surplus end does nothing."""
        with self._lock:
            me = threading.get_ident()
            depth = self._depths.pop(me, 0) - 1
            if depth > 0:
                self._depths[me] = depth
            elif depth == 0 and not self._depths:
                self._close(time.monotonic_ns())

    def at(self) -> tuple[int, int]:
        """Return the present time, and the time spent compiling until now."""
        with self._lock:
            now_ns = time.monotonic_ns()
            if not self._depths:
                return now_ns, self._spent_ns
            if now_ns - self._begun_ns > MOST_S * 1e9:
                self._depths.clear()
                self._close(self._begun_ns + round(MOST_S * 1e9))
                return now_ns, self._spent_ns
            return now_ns, self._spent_ns + now_ns - self._begun_ns

    def stopped_ns(self) -> int:
        """Return the present time less the time spent compiling, larger with every call.

        Events during compilation thus keep their order, which policies depend on.
        """
        if not _WATCHING:
            watch()
        with self._lock:
            compiles = bool(self._depths)
            now_ns, spent_ns = self.at() if compiles else (time.monotonic_ns(), self._spent_ns)
            self._last_ns = max(self._last_ns + 1, now_ns - spent_ns)
            return self._last_ns

    def within_ns(self, begun_ns: int, ended_ns: int) -> int:
        """Return the time spent compiling between two moments."""
        total_ns = 0
        with self._lock:
            now_ns, _ = self.at()
            if self._depths:
                total_ns = max(0, min(now_ns, ended_ns) - max(self._begun_ns, begun_ns))
            for begun, ended in reversed(self._past):
                if ended <= begun_ns:
                    break
                total_ns += max(0, min(ended, ended_ns) - max(begun, begun_ns))
        return total_ns

    def _describe(self) -> str:
        return f"compiling, once on this machine: {self.at()[1] / 1e9:.0f} s"

    def _close(self, ended_ns: int) -> None:
        self._spent_ns += ended_ns - self._begun_ns
        self._past.append((self._begun_ns, ended_ns))
        LINE.end(self, last=False)

    def forked(self) -> None:
        """Reset after `fork`: in the child the other threads and their compilation are gone."""
        self._lock = threading.RLock()
        if self._depths:
            self._depths.clear()
            self._close(time.monotonic_ns())


_INTERVALS = Intervals()
os.register_at_fork(after_in_child=_INTERVALS.forked)

FORK_WAIT_S = 10.0
"""Longest wait of a fork for the end of a compilation, whose locks a child would hold for ever."""
_HELD = threading.local()  # threads may fork at once


def _compiler_locks() -> list[Any]:
    numba, llvm = map(sys.modules.get, ("numba.core.compiler_lock", "llvmlite.binding.ffi"))
    last = getattr(getattr(llvm, "lib", None), "_lock", None)
    owners = getattr(numba, "global_compiler_lock", None), last
    # Its contexts, made once by the first thread, which may want the lock of compilation then.
    target = getattr(sys.modules.get("numba.core.registry"), "CPUTarget", None)
    made = [one for one in vars(target).values() if hasattr(one, "_lock")] if target else []
    inner = [one.lock for one in made if hasattr(one, "lock")]  # of Python 3.11
    return [one._lock for one in (*owners, *made) if one is not None] + inner


def _hold_compilers() -> None:
    _HELD.locks = held = []
    end_s = time.monotonic() + FORK_WAIT_S
    for lock in _compiler_locks():
        if lock.acquire(timeout=max(0.0, end_s - time.monotonic())):
            held.append(lock)


def _free_compilers() -> None:
    for lock in _HELD.locks:
        lock.release()


def _inherit_compilers() -> None:
    for lock in _compiler_locks():
        if lock not in _HELD.locks:  # of a thread that is not in the child
            lock._at_fork_reinit()
    _free_compilers()


os.register_at_fork(
    before=_hold_compilers, after_in_parent=_free_compilers, after_in_child=_inherit_compilers
)
_WATCHING: list[Any] = []


def watch() -> None:
    """Record all compilation of numba from now on. Imports numba; safe to call again.

    From then on, compilation in threads other than the main one leaves filters of warnings alone:
    all threads share them, so numba's would hide warnings of other threads, and could stay for
    good.
    """
    if _WATCHING:
        return
    from numba.core import errors, event, registry

    fixer: Any = errors.WarningsFixer  # type: ignore[attr-defined]

    class Listener(event.Listener):
        def on_start(self, event: object) -> None:
            _INTERVALS.begin()

        def on_end(self, event: object) -> None:
            _INTERVALS.end()

    class Teller(event.Listener):
        def on_start(self, event: object) -> None:
            _INTERVALS.start_reports()

        def on_end(self, event: object) -> None:
            pass

    # The lock, not only the work under it, is an interval: reading caches and waiting take it too.
    _WATCHING.append(Listener())
    event.register("numba:compiler_lock", _WATCHING[0])
    event.register("numba:compile", Teller())  # not for functions that come out of the cache
    _ = registry.cpu_target.target_context  # before any other thread does
    caught = fixer.catch_warnings

    def catch_warnings(*given: Any, **named: Any) -> Any:
        main = threading.current_thread() is threading.main_thread()
        return caught(*given, **named) if main else nullcontext()

    fixer.catch_warnings = catch_warnings


def begin() -> None:
    """Begin an interval in which the calling thread compiles, or loads compiled code; nests."""
    if not getattr(_THREAD, "aside", False):
        _INTERVALS.begin()


def end() -> None:
    """End the calling thread's last interval."""
    _INTERVALS.end()


@contextmanager
def aside() -> Iterator[None]:
    """Let time pass while the calling thread compiles what no call waits for."""
    _THREAD.aside = True
    try:
        yield
    finally:
        _THREAD.aside = False


@contextmanager
def around() -> Iterator[None]:
    """Count the context as compilation, or as loading of compiled code."""
    begin()
    try:
        yield
    finally:
        end()


now_ns = _INTERVALS.stopped_ns
"""Returns `time.monotonic_ns` less all time spent compiling; no two results are equal."""


class SystemClock:
    """The machine's monotonic clock, which stands still while this process compiles."""

    now_ns = staticmethod(now_ns)


def spent_ns() -> int:
    """Return the time spent compiling until now; equal results mean no compilation in between."""
    return _INTERVALS.at()[1]


def now_s() -> float:
    """Return `now_ns` in seconds."""
    return now_ns() / 1e9


def within_s(begun_s: float, ended_s: float) -> float:
    """Return the seconds spent compiling between two moments of `time.perf_counter`."""
    return _INTERVALS.within_ns(round(begun_s * 1e9), round(ended_s * 1e9)) / 1e9


def measured_s(begun_s: float, ended_s: float) -> float:
    """Return the seconds between two moments of `time.perf_counter` without compilation.

    Returns:
        The rest of the time; 0.0, which no estimate takes, where compilation took too much of it.
    """
    seconds = ended_s - begun_s
    compiled_s = within_s(begun_s, ended_s)
    return seconds - compiled_s if compiled_s <= MOST_SHARE * seconds else 0.0
