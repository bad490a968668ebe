"""Reports of work that takes longer than a second: a line on a terminal, log records elsewhere.

The line is on standard error, dim if rich is installed, and is wiped out behind the work. Records
have the level INFO and the logger "flowkv".
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowkv.core.reaper import begin as begin_thread

_EVERY_S = 1.0
"""Interval between two reports."""

_log = logging.getLogger("flowkv")


class ProgressLine:
    """Work under way, reported by one thread for as long as there is some. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may begin work as well
        self._work = dict[object, Callable[[], str]]()
        self._running, self._woken = False, threading.Event()

    def begin(self, work: object, describe: Callable[[], str]) -> None:
        """Report work every second until its end; the newest work is the one described."""
        with self._lock:
            self._work[work] = describe
            if self._running:
                return
            # if no thread can start, the work goes on without reports
            self._running = begin_thread(self._run, name="flowkv-progress") is not None

    def end(self, work: object, *, last: bool = True) -> None:
        """End the reports of work; a surplus end does nothing.

        Args:
            work: What was begun.
            last: Whether no more of its kind follows at once; else the thread waits for that.
        """
        with self._lock:
            self._work.pop(work, None)
            if last and not self._work:
                self._woken.set()

    def _run(self) -> None:
        line = ""
        while True:
            woken = self._woken.wait(_EVERY_S)
            with self._lock:
                self._woken.clear()
                if not self._work:
                    self._running = False
                    break
                describe = list(self._work.values())[-1]
            if woken:  # by the end of work behind which other work began
                continue
            wide, line = len(line), f"flowkv: {describe()}"
            if not _write(line.ljust(wide)):
                _log.info(line)
        if line:
            _write(" " * len(line))

    def forked(self) -> None:
        """Reset after `fork`: in the child the other threads and their work are gone."""
        self._lock, self._woken, self._running = threading.RLock(), threading.Event(), False
        self._work.clear()


LINE = ProgressLine()
os.register_at_fork(after_in_child=LINE.forked)


@contextmanager
def during(text: str) -> Iterator[None]:
    """Report the context as work, if it takes longer than a second."""
    work, begun_s = object(), time.monotonic()
    try:
        LINE.begin(work, lambda: f"{text}: {time.monotonic() - begun_s:.0f} s")
        yield
    finally:
        LINE.end(work)


def _write(line: str) -> bool:
    """Write over the terminal's line, if standard error is one; return whether that worked."""
    try:
        if not sys.stderr.isatty():
            return False
        try:
            from rich.console import Console
        except ImportError:
            print(line, end="", file=sys.stderr)
        else:
            dim = Console(file=sys.stderr, highlight=False, markup=False, style="dim")
            dim.print(line, end="", no_wrap=True, crop=True)
        print("\r", end="", file=sys.stderr, flush=True)
        return True
    except Exception:  # standard error may be closed, or any other object
        _log.debug("standard error cannot be written", exc_info=True)
    return False
