"""Erasure log of a remote tier, shared by caches of all nodes: one small object beside the frames.

The object has the entries of `tiers.erasure_log`. A cache that erases adds an entry to those which
it read, if no other node wrote since (`swap`), and puts it back for some minutes if it is lost all
the same. All others read the object now and then (`RemoteLimits.every_s`). As in the log of a place
on the host, damage counts as an erasure of everything, and so does an object with only new entries.
"""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowkv.core.clock import Clock
from flowkv.core.errors import stating
from flowkv.tiers.erasure_log import ALL, Erased, joined, pack_entries, unpack_entries
from flowkv.tiers.remote.backend import Backend

NAME = "erased"
"""Name of the object; no listing of frames has it, as it is no key."""
MOST_ENTRIES, _MOST_BYTES = 64, 1 << 20
AGAIN_S = 75.0
"""Time after which stores under way during an erasure have ended or failed."""
_KEPT_S = 600.0
_TRIES, _PAUSE_S = 50, 0.05
"""Most tries of a change while other nodes change the object, and longest pause between two."""


class RemoteErasures:
    """Log of a remote tier, with the interface of an `ErasureLog`.

    Args:
        backend: The engine.
        call: `call(work, timeout_s)` runs work that may hang.
        call_s: Seconds for one request.
        clock: Source of time.
    """

    def __init__(
        self,
        backend: Backend,
        call: Callable[[Callable[[], Any], float], Any],
        call_s: float,
        clock: Clock,
    ) -> None:
        self.path, self._backend = Path(backend.name), backend
        self._call, self._call_s, self._clock = call, call_s, clock
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._heard = list[Erased]()
        self._seen = set[bytes]()
        self._mine: dict[bytes, tuple[Erased, int]] = {}
        self._again: list[tuple[int, Erased]] = []
        self.alone = self._unread = False

    def mark_seen(self) -> None:
        """Take the present entries as known; if the engine fails, all of them are news later."""
        with contextlib.suppress(OSError):
            if (there := self._call(self._read, min(1.0, self._call_s))[1]) is not None:
                self._seen = set(there)

    # ---- interface for caches

    def changed(self) -> bool:
        """Return whether others erased frames, as far as is known here."""
        return bool(self._heard)

    def news(self) -> Erased:
        """Return the frames that others erased since the last call."""
        with self._lock:
            heard, self._heard = self._heard, []
        return joined(heard)

    @contextlib.contextmanager
    def storing(self) -> Iterator[bool]:
        """Yield True: erasures cannot be held off here; late stores are erased later, see `due`."""
        yield True

    @contextlib.contextmanager
    def erasing(self) -> Iterator[None]:
        """Allow `publish` within the context."""
        self.alone = True
        try:
            yield
        finally:
            self.alone = False

    def publish(self, entry: Erased) -> None:
        """Publish an erasure to the caches of all nodes; see `ErasureLog.publish`.

        Raises:
            StoreError: The engine did not confirm it.
        """
        now_ns = self._clock.now_ns()
        with self._lock:
            self._mine[entry.lot] = entry, now_ns
            self._again.append((now_ns + round(AGAIN_S * 1e9), entry))
        problem = f"{self.path} did not confirm the erasure for other nodes"
        with stating(problem, "Forget again when it answers"):
            self._call(self.look, 4 * self._call_s)

    def close(self) -> None:
        """Do nothing: no file is open here."""

    # ---- work of the tier's own thread

    def look(self) -> None:
        """Read the erasures of others, and put back our missing entries.

        Raises:
            OSError: The engine failed.
        """
        with self._looking:
            for left in reversed(range(_TRIES)):
                try:
                    return self._look()
                except OSError as error:
                    if error.errno != errno.EBUSY or not left:
                        raise
                time.sleep(random.random() * _PAUSE_S)

    def _look(self) -> None:
        data, told = self._read()
        there = told or {}
        oldest_ns = self._clock.now_ns() - round(_KEPT_S * 1e9)
        with self._lock:
            self._mine = {lot: one for lot, one in self._mine.items() if one[1] > oldest_ns}
            mine, seen = {lot: one[0] for lot, one in self._mine.items()}, self._seen
        old, full = seen | mine.keys(), len(there) >= MOST_ENTRIES
        made_room = seen if full else set()  # once there: others know that something is gone
        lacking = mine.keys() - there.keys() - made_room
        entries = [*there.values(), *(mine[lot] for lot in mine if lot in lacking)][-MOST_ENTRIES:]
        if told is None:
            self._unread = True  # also if another node writes it first
            self._swap(data, entries)
        fresh = [entry for lot, entry in there.items() if lot not in old]
        # If none of the known entries of others is left, or one before the first of a full object
        # may be unknown, an unknown number went with them.
        theirs = seen - mine.keys()
        gone = bool(theirs) and not theirs & there.keys()
        lost = self._unread or gone or (full and next(iter(there)) not in old)
        with self._lock:
            self._heard += [ALL] if lost else fresh
            self._seen, self._unread = {*there} | (seen & mine.keys()), False
        if lacking and told is not None:  # after the news, which a failed write must not hide
            self._swap(data, entries)

    def repeat(self, erase: Callable[[list[Erased]], None]) -> None:
        """Repeat erasures, as stores may have ended late: each once, unless that fails.

        Args:
            erase: Erases once more; an error keeps them for the next call, for some minutes.
        """
        now_ns = self._clock.now_ns()
        with self._lock:
            self._again = [one for one in self._again if one[0] > now_ns - round(_KEPT_S * 1e9)]
            due = [one for one in self._again if one[0] <= now_ns]
        if due:
            erase([erased for _, erased in due])
        with self._lock:
            self._again = [one for one in self._again if one not in due]

    def _read(self) -> tuple[bytes | None, dict[bytes, Erased] | None]:
        """Return the object and its entries; None if it is missing, or for damaged entries."""
        data = self._backend.get(NAME, 0, memoryview(bytearray(_MOST_BYTES)), self._call_s)
        return (None, {}) if data is None else (whole := bytes(data), unpack_entries(whole))

    def _swap(self, was: bytes | None, entries: list[Erased]) -> None:
        data, swap = memoryview(pack_entries(entries)), getattr(self._backend, "swap", None)
        if swap is None or len(was or b"") == _MOST_BYTES:  # this is no log, nor read as a whole
            self._backend.put(NAME, data, self._call_s)
        else:
            swap(NAME, was, data, self._call_s)
