"""The end of a cache that was not closed: at the end of the process, or with its last reference.

Queued pages are then written for at most `exit_s` seconds; one line on stderr counts the others.
An `Ending` refers to the store and the lock, but not to the cache, which may be collected any time.
The garbage collector may run in the middle of any change: it only queues the ending for a thread,
which writes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

from flowkv.cache.sequence import Guard
from flowkv.cache.store import PageStore
from flowkv.core.reaper import REAPER

_now_s = time.monotonic  # this clock does not stop during compilation


class Ending:
    """Writer of a cache's queued pages when the cache is collected, or the process ends.

    Args:
        kv: The cache, referenced weakly.
        store: Its pages and tiers.
        lock: The KV lock.
        exit_s: Longest time for writing.
        given: Tiers that were passed as objects: only `KV.close` closes them.
        over: Returns whether the model that a cache was attached to is gone, or was detached.
        prepare: Proves pages and saves models; returns False if a time of `time.monotonic` came
            before all pages were proven.
    """

    def __init__(
        self,
        kv: Any,
        store: PageStore,
        lock: Guard,
        exit_s: float,
        *,
        given: Iterable[Any],
        over: Callable[[Any], bool],
        prepare: Callable[[Any, float], bool],
    ) -> None:
        self._store, self._lock, self.exit_s, self._pid = store, lock, exit_s, os.getpid()
        self._over, self._prepare, self._lost = over, prepare, 0
        self._given = set(map(id, given))
        self._finalizer = weakref.finalize(kv, REAPER.put, self.end)
        self._finalizer.atexit = False
        _ENDINGS.add(self)
        REAPER.start()
        _end_with(self._pid)

    @property
    def kv(self) -> Any:
        """The cache; None once it is gone."""
        found = self._finalizer.peek()
        return found[0] if found else None

    @property
    def over(self) -> bool:
        """Return whether the cache is gone, or detached from its model."""
        kv = self.kv
        return kv is None or self._over(kv)

    @property
    def inherited(self) -> bool:
        """Return whether the process was forked since: then the parent process writes."""
        return os.getpid() != self._pid

    def cancel(self) -> None:
        """Unregister the ending: the cache is closed, or has another store."""
        self._finalizer.detach()
        _ENDINGS.discard(self)

    def begin(self, end_s: float) -> int:
        """Prove pages and send them to the tiers; return the pages that are not proven in time."""
        kv, proven, self._lost = self.kv, True, self._store.stack.lost
        with contextlib.suppress(Exception):
            proven = kv is None or self._prepare(kv, end_s)
        with self._lock.within(end_s - _now_s()) as held, contextlib.suppress(Exception):
            if held and _now_s() < end_s:
                self._store.writes.write_chosen(self._store.index)
                self._store.writes.drain()
        return 0 if proven else self._store.writes.unproven

    def write(self, end_s: float) -> int:
        """Wait until all pages are written, or until `end_s`; return the pages that are not.

        Tiers that rest are tried once more.
        """
        with self._lock.within(end_s - _now_s()) as held, contextlib.suppress(Exception):
            if held and _now_s() < end_s:
                for lane in self._store.stack.mover.lanes:
                    lane.rest(0.0)
                self._store.writes.flush(end_s - _now_s(), _now_s)
        return self._store.stack.lost - self._lost + self._store.writes.unsaved

    def finish(self, lost: int) -> None:
        """Write the pages that still wait; one line counts those not written or lost.

        Args:
            lost: The number of pages that were lost before the end began, see `TierStack.lost`.
        """
        self._lost = lost
        _tell(self.write(_now_s() + self.exit_s), self.exit_s)

    def end(self) -> None:
        """Write the queued pages of a collected cache, and release its tiers and pools."""
        if self.inherited or self not in _ENDINGS:
            return
        with ExitStack() as last:  # an error in one of these calls does not skip the others
            last.callback(self.cancel)
            for tier in self._store.stack.tiers:
                if self._given.isdisjoint((id(tier), id(getattr(tier, "inner", tier)))):
                    last.callback(tier.close)
            last.callback(self._store.stack.erasure_logs.close)
            last.callback(self._store.stack.mover.cancel)
            end_s = _now_s() + self.exit_s
            self.begin(end_s)
            _tell(self.write(end_s), self.exit_s)

    def cede(self, directory: str) -> None:
        """Write the queued pages, then release a directory so that another cache can own it."""
        end_s = _now_s() + self.exit_s
        self.begin(end_s)
        self.write(end_s)
        for tier in self._owning(directory):
            tier.cede(max(end_s - _now_s(), 0.0))

    def owns(self, directory: str) -> bool:
        """Return whether a tier of the cache writes to a directory."""
        return not self.inherited and bool(self._owning(directory))

    def _owning(self, directory: str) -> list[Any]:
        found = list[Any]()
        for tier in self._store.stack.tiers:
            disk: Any = tier
            with contextlib.suppress(OSError):
                if hasattr(disk, "cede") and disk.writable:
                    found += [disk] if os.path.samefile(disk.path, directory) else []
        return found


_ENDINGS: set[Ending] = set()


@functools.cache
def _end_with(pid: int) -> None:
    """Register `_exit` in a process of `multiprocessing`, which ends without `atexit` calls."""
    if parent_process() is not None:
        Finalize(None, _exit, exitpriority=0)


def make_way(directories: Iterable[str]) -> None:
    """Release directories that collected or detached caches of this process still own.

    Args:
        directories: Directories that another cache is about to open.
    """
    for directory in directories:
        owners = [one for one in list(_ENDINGS) if one.owns(directory)]
        if not all(one.over for one in owners):
            gc.collect()  # the cache may be garbage that is not collected yet
        if any(one.kv is None for one in owners):
            REAPER.join(max(one.exit_s for one in owners))
        for one in owners:
            if one.over and one.owns(directory):
                one.cede(directory)


def _tell(lost: int, exit_s: float) -> None:
    if lost:
        with contextlib.suppress(Exception):  # stderr may be closed, or None
            print(
                f"flowkv: {lost} pages were not written by the end (exit_s={exit_s:g}): they are"
                " computed anew. Call kv.flush() or kv.close() while tiers answer, or raise exit_s",
                file=sys.stderr,
            )


@atexit.register
def _exit() -> None:
    """Write the queued pages of all caches, concurrently."""
    mine, begun_s = [one for one in list(_ENDINGS) if not one.inherited], _now_s()
    lost = 0
    for work in (Ending.begin, Ending.write):
        for one in mine:
            with contextlib.suppress(Exception):
                lost += work(one, begun_s + one.exit_s)
    _tell(lost, max((one.exit_s for one in mine), default=0.0))
    for one in mine:
        one.cancel()
