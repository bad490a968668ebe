"""Intervals in which this process compiles, which no deadline and no measured time includes.

A function is compiled, or read from a cache of compiled ones, when it is first called: for seconds,
in whatever was under way just then, and whoever needs numba's lock meanwhile waits as long. `watch`
hears of all of it from numba itself, so that functions count that nobody here knows of; what is
compiled otherwise says so by `around`. Deadlines are set by `now_ns`, which stands still meanwhile,
but for a nanosecond from call to call; a time that was measured goes through `measured_s` before
anybody believes it. What takes longer than a second is told to whoever waits: in a line on a
terminal, as log records elsewhere.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

MOST_S = 600.0
"""What is said to take longer is believed no more: an end that nobody was told of."""

MOST_SHARE = 0.1
"""Of a time that was measured; where more of it went into compiling, nobody knows the rest."""

_KEPT = 1 << 10

_TOLD_EVERY_S = 1.0
"""Between two words about what is compiled."""

_log = logging.getLogger("flowkv")


def _write(text: str) -> bool:
    """Writes to the terminal, if standard error is one; it may be closed, or anything else."""
    try:
        if sys.stderr.isatty():
            print(text, end="", file=sys.stderr, flush=True)
            return True
    except Exception:  # of whatever stands in its place
        _log.debug("standard error cannot be written", exc_info=True)
    return False


class Intervals:
    """Times at which any thread of a process compiled. Thread-safe; of `time.monotonic_ns`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may compile as well
        self._depths: dict[int, int] = {}  # of threads that compile
        self._begun_ns = self._spent_ns = self._last_ns = 0
        self._past: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._told = False  # a thread watches, to tell what takes long

    def begin(self) -> None:
        """The calling thread compiles from now on; nests."""
        with self._lock:
            if not self._depths:
                self._begun_ns = time.monotonic_ns()
            me = threading.get_ident()
            self._depths[me] = self._depths.get(me, 0) + 1

    def tell(self) -> None:
        """Says so every second, from a thread of its own, for as long as something is compiled."""
        with self._lock:
            if self._told:
                return
            teller = threading.Thread(target=self._tell, name="flowkv-compiling", daemon=True)
            with suppress(RuntimeError):  # no thread can begin: nobody compiles worse for that
                teller.start()
                self._told = True

    def end(self) -> None:
        """The calling thread is done with what it began last; more ends than beginnings are not."""
        with self._lock:
            me = threading.get_ident()
            depth = self._depths.pop(me, 0) - 1
            if depth > 0:
                self._depths[me] = depth
            elif depth == 0 and not self._depths:
                self._close(time.monotonic_ns())

    def at(self) -> tuple[int, int]:
        """This moment, and the time until now in which something was compiled."""
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
        """This moment less the time in which something was compiled, later with every call.

        What happens while that stands still has an order all the same: policies go by it.
        """
        with self._lock:
            now_ns, spent_ns = self.at()
            self._last_ns = max(self._last_ns + 1, now_ns - spent_ns)
            return self._last_ns

    def within_ns(self, begun_ns: int, ended_ns: int) -> int:
        """How much of a stretch of time something was compiled."""
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

    def _tell(self) -> None:
        line = ""
        while True:
            time.sleep(_TOLD_EVERY_S)
            with self._lock:
                if not self._depths:
                    self._told = False
                    break
                spent_s = self.at()[1] / 1e9
            line = f"flowkv: compiling, once on this machine: {spent_s:.0f} s"
            if not _write(f"\r{line}"):
                _log.info(line)
        if line:
            _write(f"\r{' ' * len(line)}\r")

    def _close(self, ended_ns: int) -> None:
        self._spent_ns += ended_ns - self._begun_ns
        self._past.append((self._begun_ns, ended_ns))

    def forked(self) -> None:
        """In a child of `fork` the other threads are gone, and with them what they compiled."""
        self._lock, self._told = threading.RLock(), False
        if self._depths:
            self._depths.clear()
            self._close(time.monotonic_ns())


_INTERVALS = Intervals()
os.register_at_fork(after_in_child=_INTERVALS.forked)
_WATCHING: list[Any] = []


def watch() -> None:
    """Hears of all that numba compiles from now on. Imports numba; safe to call again.

    What other threads than the main one compile leaves filters of warnings alone from then on: all
    threads share them, so numba's would hide what others say meanwhile, and could stay for good.
    """
    if _WATCHING:
        return
    from numba.core import errors, event

    fixer: Any = errors.WarningsFixer  # type: ignore[attr-defined]

    class Listener(event.Listener):
        def on_start(self, event: object) -> None:
            _INTERVALS.begin()

        def on_end(self, event: object) -> None:
            _INTERVALS.end()

    class Teller(event.Listener):
        def on_start(self, event: object) -> None:
            _INTERVALS.tell()

        def on_end(self, event: object) -> None:
            pass

    # The lock, rather than what is done under it: caches are read under it too, and waited for it.
    _WATCHING.append(Listener())
    event.register("numba:compiler_lock", _WATCHING[0])
    event.register("numba:compile", Teller())  # not for what only comes out of the cache
    caught = fixer.catch_warnings

    def catch_warnings(*given: Any, **named: Any) -> Any:
        main = threading.current_thread() is threading.main_thread()
        return caught(*given, **named) if main else nullcontext()

    fixer.catch_warnings = catch_warnings


def begin() -> None:
    """The calling thread compiles, or loads what was compiled, from now on; nests."""
    _INTERVALS.begin()


def end() -> None:
    """The calling thread is done with what it began last."""
    _INTERVALS.end()


@contextmanager
def around() -> Iterator[None]:
    """What runs in it compiles, or loads what was compiled."""
    begin()
    try:
        yield
    finally:
        end()


def now_ns() -> int:
    """`time.monotonic_ns` less all the time in which this process compiled; no two are equal."""
    if not _WATCHING:
        watch()
    return _INTERVALS.stopped_ns()


def spent_ns() -> int:
    """Time until now in which this process compiled; the same twice: it did not in between."""
    return _INTERVALS.at()[1]


def now_s() -> float:
    """`now_ns` in seconds."""
    return now_ns() / 1e9


def within_s(begun_s: float, ended_s: float) -> float:
    """How much of the time between two moments of `time.perf_counter` was spent compiling."""
    return _INTERVALS.within_ns(round(begun_s * 1e9), round(ended_s * 1e9)) / 1e9


def measured_s(begun_s: float, ended_s: float) -> float:
    """Seconds between two moments of `time.perf_counter`, as far as they say anything.

    Returns:
        Without what was spent compiling; 0.0, which no estimate takes, where that is too much.
    """
    seconds = ended_s - begun_s
    compiled_s = within_s(begun_s, ended_s)
    return seconds - compiled_s if compiled_s <= MOST_SHARE * seconds else 0.0
