"""Frames in memory that several processes of one user share, and that outlives each of them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.errors import StoreError
from flowkv.core.keys import KEY_BYTES
from flowkv.tiers.base import Completion, Entry, Load, Outcome, Store
from flowkv.tiers.frame import (
    BadFrame,
    Header,
    accept,
    count_stripes,
    decode_header,
    describe,
    most_header_bytes,
    pack_header,
    peek_header_bytes,
    span,
    verify,
    verify_stripe,
)
from flowkv.tiers.immediate import Immediate, failed, missed
from flowkv.tiers.shared import changes, table
from flowkv.tiers.shared.memory import Memory, file_name, plan
from flowkv.tiers.shared.table import GRANULE, USED, VERSION

PATIENCE_S = 0.25
"""Longest wait for the lock, which is held for microseconds by whoever is not stopped."""
_MOVES = 4  # times that a frame may be replaced while it is read

Place = tuple[int, int, int]
"""Sequence number, first granule and bytes of a frame."""


class SharedTier(Immediate):
    """A host tier in one file in shared memory, for several processes; it survives all of them.

    Frames lie in chains of 4 KiB granules, so that memory never fragments. Readers take no lock:
    they copy a frame to their target, verify the copy, and look again if it was replaced meanwhile;
    what is torn is a miss, never an answer. Changes hold a lock for microseconds. A process that is
    killed in the middle of one leaves a mark, and the next one repairs; what it was writing is
    freed. While a peer is *stopped* in the middle of a change, loads go on, and stores are `FAILED`
    with reason "busy".

    The memory stays taken when all processes are gone: `remove` gives it back, or delete the file
    (`flowkv-UID-NAME`). Bytes of deleted frames stay until they are overwritten; `erase` does that.

    Args:
        name: Which memory: equal names share. Of a hostile or long one only a digest is used.
        capacity_bytes: Bytes of the file, everything included; at least 256 KiB. If it exists with
            another size, that size stays, with a warning.
        directory: Where the file lies; its file system should be memory.
        clock: Source of time.

    Attributes:
        corrupt: Frames found damaged so far.

    Raises:
        ConfigError: The capacity is too small, or the name is empty.
        StoreError: The file belongs to somebody else, or cannot be made.
    """

    kind = "host"
    writable = True
    shared = True

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        *,
        directory: str | os.PathLike[str] = "/dev/shm",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(f"host:{name}", clock or SystemClock())
        self.corrupt, self._stuck = 0, False
        self._lock, self._burying = threading.Lock(), threading.Lock()
        self._owed: list[int] = []
        self._memory = Memory(Path(directory) / file_name(name), capacity_bytes)
        self._arrays, self._arena = self._memory.arrays, self._memory.arena
        self.capacity_bytes = self._memory.plan.file_bytes
        if self._memory.plan != plan(capacity_bytes):
            warnings.warn(
                f"{self._memory.path} has {self.capacity_bytes} bytes already, not "
                f"{capacity_bytes}: the size stays. Remove the file to change it.",
                UserWarning,
                stacklevel=2,
            )
        self._empty(self._memory.seat)  # of whoever died on this seat
        self._bury()

    # ---- what it holds

    def used_bytes(self) -> int:
        """Bytes of all frames, of those being written, and of what manages them."""
        if not self._usable():
            return 0
        return self._memory.plan.arena_at + GRANULE * int(self._arrays[0][USED])

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what such a frame takes."""
        return GRANULE * -(-(most_header_bytes(body_bytes) + body_bytes) // GRANULE)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there."""
        if not self._usable():
            return [False] * len(keys)
        self._mend()
        return [self._place(key) is not None for key in keys]

    def scan(self) -> Iterator[Entry]:
        """All frames, oldest store first; damaged ones are left out."""
        if not self._usable():
            return
        self._mend()
        rows = self._arrays[1][self._arrays[1][:, 4] != 0]
        for row in rows[np.argsort(rows[:, 4], kind="stable")]:
            key, place = row[:4].tobytes(), (int(row[4]), int(row[5]), int(row[6]))
            try:
                header = self._header(key, place)
            except BadFrame:
                continue
            yield Entry(key, header.info, GRANULE * -(-place[2] // GRANULE))

    # ---- taking frames out

    def delete(self, keys: Sequence[bytes]) -> int:
        """Frees frames; none while a stopped peer holds the lock."""
        if not self._usable():
            return 0
        there = [key for key in keys if len(key) == KEY_BYTES]
        return sum(self._change(changes.withdraw, _words(key), 0, 0) >= 0 for key in there)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Frees frames and overwrites their bytes.

        Raises:
            StoreError: A stopped peer holds the lock: some may still be there.
        """
        if not self._usable():
            return 0
        gone = 0
        for key in (key for key in keys if len(key) == KEY_BYTES):
            row = self._change(changes.withdraw, _words(key), 0, self._memory.seat)
            if row >= 0:
                self._overwrite(row)
                gone += 1
            elif row != table.ABSENT:
                raise StoreError(
                    f"{self.name} cannot be changed: a process that does not go on has locked it",
                    "Continue or end that process, then erase again",
                )
        return gone

    def remove(self) -> None:
        """Closes the tier and gives its memory back, once no other process uses it any more."""
        if self._usable():
            self._memory.remove()
        self.close()

    def close(self) -> None:
        """Lets go of the memory; the frames stay for others, and for the next time."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with self._lock:  # the mapping goes with this object: a thread may be reading
            self._memory.close()
        self._answers.close()

    # ---- loads

    def _load(self, item: Load, end_ns: int) -> Completion:
        suspect = 0
        self._mend()
        for _ in range(_MOVES):
            place = self._place(item.key)
            if place is None:
                break
            try:
                return self._read(item, place)
            except BadFrame as error:
                if error.reason in ("layout", "fidelity", "stripes"):
                    return missed(item.key, error.reason)
                if place[0] == suspect and self._condemn(item.key, suspect, end_ns):
                    return missed(item.key, error.reason)
                # Replaced while it was read, or damaged: look again, after the lock made sure that
                # all is seen which its writer wrote.
                suspect = place[0]
                self._change(changes.settle, end_ns=end_ns)
        return missed(item.key)

    def _place(self, key: bytes) -> Place | None:
        """Where a frame is believed to lie."""
        out = np.empty(3, np.int64)
        if len(key) != KEY_BYTES or not table.look(self._arrays, _words(key), out):
            return None
        return int(out[0]), int(out[1]), int(out[2])

    def _read(self, item: Load, place: Place) -> Completion:
        header = self._header(item.key, place)
        accept(header, item.key, item.layout, item.fidelity)
        stripes, step = span(header, item.first, item.stripes), header.info.stripe_bytes
        n_bytes = len(stripes) * step
        if item.target.readonly or item.target.nbytes < n_bytes:
            return failed(item.key, "target")
        target = item.target.cast("B")[:n_bytes]
        skip = place[2] - header.body_bytes + stripes.start * step
        self._copy(place[1], skip, target)
        if len(stripes) == header.stripes:
            verify(header, target)
        else:
            for number, stripe in enumerate(stripes):
                verify_stripe(header, stripe, target[number * step : (number + 1) * step])
        return Completion(0, 0, item.key, Outcome.HIT, "", header.info, n_bytes)

    def _header(self, key: bytes, place: Place) -> Header:
        """A private, checked copy of a frame's header.

        Raises:
            BadFrame: It is none, or that of another frame.
        """
        page = memoryview(bytearray(GRANULE))
        self._copy(place[1], 0, page)
        size = peek_header_bytes(page)
        if size > GRANULE:
            page = memoryview(bytearray(size))
            self._copy(place[1], 0, page)
        header = decode_header(page)
        if header.key != key or size + header.body_bytes != place[2]:
            raise BadFrame("key", "the frame belongs to another key")
        return header

    def _copy(self, first: int, skip: int, target: memoryview) -> None:
        sink = np.frombuffer(target, np.uint8)
        if not table.gather(self._arena, self._arrays, first, skip, sink):
            raise BadFrame("truncated", "the frame's chain ends before the frame")

    def _condemn(self, key: bytes, sequence: int, end_ns: int) -> bool:
        """Takes a damaged frame out; False if it is another one by now."""
        gone = self._change(changes.withdraw, _words(key), sequence, 0, end_ns=end_ns) >= 0
        self.corrupt += gone
        return gone

    # ---- stores

    def _store(self, item: Store, end_ns: int) -> Completion:
        key, there = item.key, Completion(0, 0, item.key, Outcome.STORED)
        try:
            count_stripes(key, item.info, item.body.nbytes)
            if self._place(key) is not None:
                return there
            head = pack_header(describe(key, item.info, item.body))
            out, words = np.empty(1, np.int64), _words(key)
            row = self._claim(words, len(head) + item.body.nbytes, out, end_ns)
        except BadFrame as error:
            return failed(key, error.reason)
        except OSError as error:  # no memory behind the file
            return failed(key, errno.errorcode.get(error.errno or 0, "memory"))
        if row == table.THERE:
            return there
        if row < 0:
            return failed(key, "full" if row == table.FULL else "busy")
        # Digests come from the caller's memory: should it change while it is copied, against the
        # contract, then the copy will not match them and never be served.
        known = False
        try:
            self._put(int(out[0]), 0, head)
            self._put(int(out[0]), len(head), item.body.cast("B"))
            known = self._change(changes.commit, row, words, end_ns=end_ns) != table.BUSY
        finally:
            if not known:
                self._owed.append(row)  # given back with the next store
        if not known:
            return failed(key, "busy")
        return there._replace(n_bytes=item.body.nbytes)

    def _claim(
        self, words: NDArray[np.int64], n_bytes: int, out: NDArray[np.int64], end_ns: int
    ) -> int:
        buried = False
        self._repay()
        while True:
            row = self._change(changes.claim, words, self._memory.seat, n_bytes, out, end_ns=end_ns)
            if row == table.GROW:
                row = self._change(changes.grow, self._memory.back(), end_ns=end_ns)
                if row == 0:
                    continue
            elif row in (table.FULL, table.CROWDED) and not buried:
                buried = True
                if self._bury():
                    continue
            return row

    def _repay(self) -> None:
        """Gives back claims that could not be when the lock was not to be had."""
        with contextlib.suppress(IndexError):
            while True:
                row = self._owed.pop()  # no other thread gives the same one back
                if self._change(changes.release, row) == table.BUSY:
                    self._owed.append(row)
                    return

    def _put(self, first: int, skip: int, data: bytes | memoryview) -> None:
        table.scatter(self._arena, self._arrays, first, skip, np.frombuffer(data, np.uint8))

    # ---- the lock, and what the dead left

    def _change(
        self, operation: Callable[..., int], *arguments: object, end_ns: int | None = None
    ) -> int:
        """Runs a change under the lock; BUSY if the lock is not to be had.

        A peer that holds it for long is stopped: until it goes on, nobody waits for it again.
        """
        now_s = time.monotonic()
        patience_s = 0.0 if self._stuck else PATIENCE_S
        if end_ns is not None:
            patience_s = min(patience_s, (end_ns - self._clock.now_ns()) / 1e9)
        if not self._lock.acquire(timeout=max(0.0, patience_s)):
            return table.BUSY
        try:
            while not self._closed:
                answer = int(operation(self._memory.fd, self._arrays, *arguments))
                if answer != table.BUSY:
                    self._stuck = False
                    return answer
                if time.monotonic() - now_s >= patience_s:
                    self._stuck = True
                    return table.BUSY
            return table.BUSY
        finally:
            self._lock.release()

    def _mend(self) -> None:
        """Repairs what a peer left that was killed in mid-change, but waits for no living one."""
        if self._arrays[0][VERSION] & 1 and self._lock.acquire(blocking=False):
            changes.settle(self._memory.fd, self._arrays)
            self._lock.release()

    def _overwrite(self, row: int) -> bool:
        """Blanks the granules of a claim, and frees them; False if they are to be freed later."""
        _, first, n_bytes = (int(word) for word in self._arrays[3][row, :3])
        self._put(first, 0, bytes(GRANULE * -(-n_bytes // GRANULE)))
        freed = self._change(changes.release, row) != table.BUSY
        if not freed:
            self._owed.append(row)
        return freed

    def _empty(self, seat: int) -> bool:
        """Frees what was claimed from a seat that is held here; whether there was anything."""
        rows = 0
        while (row := self._change(changes.adopt, seat, self._memory.seat)) >= 0:
            rows += 1
            if not self._overwrite(row):
                break
        return rows > 0

    def _bury(self) -> bool:
        """Frees what dead processes were writing; whether there was anything."""
        if not self._burying.acquire(blocking=False):
            return False  # another thread does
        try:
            seats = self._memory.deserted()
            found = [self._empty(seat) for seat in seats]
            for seat in seats:
                self._memory.abandon(seat)
            return any(found)
        finally:
            self._burying.release()


def _words(key: bytes) -> NDArray[np.int64]:
    return np.frombuffer(key, np.int64)
