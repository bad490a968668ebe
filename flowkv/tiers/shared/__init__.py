"""Shared host tier: frames in memory that processes of one user share and that outlives them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from flowkv.compiled.compiling import SystemClock
from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError, StoreError, stating
from flowkv.core.files import drop_in_children, lock_byte
from flowkv.core.keys import KEY_BYTES
from flowkv.tiers.base import BadFrame, Entry, Load, Outcome, Store, TierAnswer
from flowkv.tiers.frame import (
    Header,
    count_stripes,
    decode_header,
    describe,
    most_header_bytes,
    pack_header,
    peek_header_bytes,
)
from flowkv.tiers.host import copied, failed, missed
from flowkv.tiers.shared import table
from flowkv.tiers.shared.table import GRANULE, USED, VERSION
from flowkv.tiers.worker import Completions, Handle

__all__ = ["SharedTier"]

# The file in shared memory: found or made, checked, mapped, and cleared of the leftovers of dead
# processes.
#
#     superblock 4 KiB | index | links | arena            (see `shared.table`)
#
# The file belongs to one user and is closed to all others. It is never truncated: a file of another
# format, or one that is damaged or contradicts itself, is set aside by making a new one under its
# name. A process that has a damaged file mapped finds it no longer `sound`, and opens the new one;
# processes of another version continue with theirs. Two locks, both released by the kernel when
# their holder dies: `flock` for changes, and one byte range for each open handle, its *seat*, which
# shows whether the writer of an incomplete frame is still alive.

MAGIC, FORMAT = b"FKVSHARE", 3
LEAST_BYTES = 256 << 10
GROW_BYTES = 16 << 20
_SEATS, _SEAT_AT = 4096, 1 << 60
_COUNTERS_AT, _COUNTERS = 512, 64
INDEX_AT = GRANULE
# Magic, format, granules, slots, bytes of the file: of the same size in all versions, so that each
# recognizes the others.
_FIXED = struct.Struct("<8sI4xQQ8xQ")
_PAUSE_S = 0.005
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]


class FileLayout(NamedTuple):
    """Layout of a shared file."""

    granules: int
    slots: int

    @property
    def links_at(self) -> int:
        """Return the offset of the links."""
        return INDEX_AT + 64 * self.slots

    @property
    def arena_at(self) -> int:
        """Return the offset of the arena."""
        return -(-(self.links_at + 8 * self.granules) // GRANULE) * GRANULE

    @property
    def file_bytes(self) -> int:
        """Return the bytes of the file."""
        return self.arena_at + GRANULE * self.granules


def divided(granules: int) -> FileLayout:
    """Return the layout for so many granules; a frame takes two at least."""
    return FileLayout(granules, granules * 5 // 8 + 8)


def plan(capacity_bytes: int) -> FileLayout:
    """Return the largest layout that fits into a capacity.

    Raises:
        ConfigError: The capacity is too small.
    """
    if capacity_bytes < LEAST_BYTES:
        raise ConfigError(
            f"{capacity_bytes} bytes are too few to share", f"Give the tier at least {LEAST_BYTES}"
        )
    granules = capacity_bytes // GRANULE
    while (over := divided(granules).file_bytes - capacity_bytes) > 0:
        granules -= -(-over // (GRANULE + 64))
    return divided(granules)


def file_name(name: str) -> str:
    """Return the file's name: the tier's own if that is plain, else a cleaned one with a digest.

    Raises:
        ConfigError: The name is empty.
    """
    if not name:
        raise ConfigError("a shared host tier has no name", 'Name it: "host:NAME:8GiB"')
    if not _PLAIN.fullmatch(name):
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:40].lstrip(".-") + "-" + digest
    return f"flowkv-{os.getuid()}-{name}"


class SharedFile:
    """Mapped shared file.

    Args:
        path: The file; made if it is missing.
        wanted: Its layout, if it is made.
        patience_s: Longest wait for a process that has locked it.

    Attributes:
        path: Path of the file.
        plan: Layout of the file.
        arrays: counters, index and links.
        arena: uint8: the granules.
        seat: Number of this handle, from 1.
        set_aside: Whether an unusable file was replaced.
        left: Rows of frames left incomplete by a dead process on the same seat.
        owed: Rows of abandoned frames that are still to be withdrawn.

    Raises:
        StoreError: The file belongs to another user, or cannot be made.
    """

    def __init__(self, path: Path, wanted: FileLayout, patience_s: float = 5.0) -> None:
        self.path, self.set_aside, self.fd = path, False, -1
        self.owed: list[Row] = []
        # nothing to release yet
        self._let_go: weakref.finalize[..., object] = weakref.finalize(self, int)
        remedy = "Give the tier fewer bytes, another directory, or remove that file"
        try:
            with stating(f"shared memory {path} cannot be used", remedy):
                end_s = time.monotonic() + patience_s
                while not self._open(wanted, end_s):
                    pass
                self._map()
                self.seat = self._sit()
                self.left = [row for row in self.writing() if row[1] == self.seat]
        except StoreError:
            self.close()
            raise
        drop_in_children(self, SharedFile._forget)

    # ---- opening

    def _open(self, wanted: FileLayout, end_s: float) -> bool:
        """Open or make the file; False if it must be tried again."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o600)
        self._let_go = weakref.finalize(self, os.close, self.fd)
        self._let_go.atexit = False
        self._check_owner()
        found = self._read_superblock()
        if found is not None and os.fstat(self.fd).st_nlink:
            self.plan = found
            return True
        self._lock(end_s)
        try:
            if os.fstat(self.fd).st_nlink == 0:  # the file was replaced meanwhile
                self.close()
                return False
            found = self._read_superblock()
            if found is None and os.fstat(self.fd).st_size:
                self._set_aside()
                return False
            if found is None:
                self._make(wanted)
            else:
                self.plan = found
        finally:
            if self.fd >= 0:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def _set_aside(self) -> None:
        """Remove the file's name, once, under its lock; condemn it unless of another format."""
        data = os.pread(self.fd, _FIXED.size, 0)
        version = _FIXED.unpack(data)[1] if len(data) == _FIXED.size else 0
        if version == FORMAT or not self._digested():
            os.pwrite(self.fd, bytes(8), _COUNTERS_AT + 8 * table.STATE)
        os.unlink(self.path)
        self.set_aside = True
        self.close()

    def _check_owner(self) -> None:
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise StoreError(
                f"{self.path} belongs to another user, or is no file",
                "Choose another name or directory for the shared host tier",
            )
        if status.st_mode & 0o077:
            raise StoreError(
                f"others may open {self.path}", f"Run chmod 600 {self.path}, or remove it"
            )

    def _lock(self, end_s: float) -> None:
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise StoreError(
                        f"{self.path} is locked by a process that does not go on",
                        "Continue or end that process, or choose another name",
                    ) from None
                time.sleep(_PAUSE_S)

    def _digested(self) -> bool:
        """Return whether the digest of the superblock is right."""
        data = os.pread(self.fd, _FIXED.size + 16, 0)
        return xxhash.xxh3_128_digest(data[: _FIXED.size]) == data[_FIXED.size :]

    def _read_superblock(self) -> FileLayout | None:
        """Return the file's layout; None if it is to be made, or made anew."""
        if not self._digested():
            return None
        magic, version, *parts, n_bytes = _FIXED.unpack(os.pread(self.fd, _FIXED.size, 0))
        state = os.pread(self.fd, 8, _COUNTERS_AT + 8 * table.STATE)
        sound = int.from_bytes(state, sys.byteorder) == table.SOUND
        if (magic, version, sound) != (MAGIC, FORMAT, True):
            return None
        found = divided(parts[0])
        same = found.file_bytes == n_bytes == os.fstat(self.fd).st_size
        return found if same and list(found) == parts else None

    def _make(self, made: FileLayout) -> None:
        self.plan, counters = made, np.zeros(_COUNTERS, np.int64)
        os.ftruncate(self.fd, made.file_bytes)
        try:
            os.posix_fallocate(self.fd, 0, made.arena_at)
        except OSError:
            os.unlink(self.path)
            raise
        table.begin(counters)
        os.pwrite(self.fd, counters.tobytes(), _COUNTERS_AT)
        fixed = _FIXED.pack(MAGIC, FORMAT, *made, made.file_bytes)
        # The superblock comes last, so that half a file is never taken for a whole one.
        os.pwrite(self.fd, fixed + xxhash.xxh3_128_digest(fixed), 0)

    def _map(self) -> None:
        # Mapping this descriptor would duplicate it, and its locks would live as long as the
        # mapping.
        try:
            other = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # no /proc here
            other = os.dup(self.fd)
        try:
            self._mapping = mmap.mmap(other, self.plan.file_bytes)
        finally:
            os.close(other)
        # The seat ends with the mapping, not before: a thread may still write from there.
        self._let_go.detach()
        self._let_go = weakref.finalize(self._mapping, os.close, self.fd)
        self._let_go.atexit = False  # the kernel closes it then
        with contextlib.suppress(OSError):  # a kernel without huge pages in shared memory
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        granules, slots = self.plan
        self.arrays: Arrays = (
            np.frombuffer(self._mapping, np.int64, _COUNTERS, _COUNTERS_AT),
            np.frombuffer(self._mapping, np.int64, 8 * slots, INDEX_AT).reshape(-1, 8),
            np.frombuffer(self._mapping, np.uint64, granules, self.plan.links_at),
        )
        self.arena = np.frombuffer(self._mapping, np.uint8, offset=self.plan.arena_at)

    # ---- soundness

    def sound(self) -> bool:
        """Return whether no process has found that the table contradicts itself."""
        return bool(self.arrays[0][table.STATE] == table.SOUND)

    def condemn(self) -> None:
        """Mark the table as not sound, so that every process leaves it."""
        self.arrays[0][table.STATE] = 0

    # ---- seats

    def _sit(self) -> int:
        for seat in range(1, _SEATS):
            if self._try_seat(seat):
                return seat
        raise StoreError(f"{_SEATS} handles of {self.path} are open", "Close some")

    def _try_seat(self, seat: int) -> bool:
        """Take a seat if no living process has it; return whether that worked."""
        return lock_byte(self.fd, _SEAT_AT + seat, fcntl.F_WRLCK)

    def writing(self) -> list[Row]:
        """Return the rows of frames that are being written, or were when their writers died."""
        index = self.arrays[1]
        found = index[(index[:, 2] == table.WRITING) & (index[:, 3] == table.WRITING)]
        most = GRANULE * self.plan.granules
        checked = (row for row in found if row[4] and row[7] == table.check_of(row))
        return [row for row in checked if GRANULE < row[6] <= most]

    def deserted(self) -> list[int]:
        """Take the seats from which dead processes were writing; `abandon` releases them."""
        seats = {int(row[1]) for row in self.writing()} - {self.seat}
        return [seat for seat in sorted(seats) if 0 < seat < _SEATS and self._try_seat(seat)]

    def abandon(self, seat: int) -> None:
        """Release a seat taken by `deserted`."""
        lock_byte(self.fd, _SEAT_AT + seat, fcntl.F_UNLCK)

    # ---- memory

    def back(self) -> int:
        """Allocate memory for some more granules; return their number afterwards.

        Raises:
            OSError: There is no more memory.
        """
        grown = max(0, int(table.grown_of(self.arrays)))
        more = min(GROW_BYTES // GRANULE, self.plan.granules - grown)
        if more > 0:
            os.posix_fallocate(self.fd, self.plan.arena_at + GRANULE * grown, GRANULE * more)
        return grown + max(more, 0)

    # ---- closing

    def remove(self) -> None:
        """Remove the file's name; processes that have it open continue with it."""
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(self.fd).st_ino == os.stat(self.path, follow_symlinks=False).st_ino:
                os.unlink(self.path)

    def close(self) -> None:
        """Close the file; mapping and seat end with the last reference to the arrays.

        A file without references closes itself.
        """
        if not hasattr(self, "_mapping"):
            self._let_go()
        self.fd = -1

    def _forget(self) -> None:
        self.fd = -1
        self._let_go()


PATIENCE_S = 0.25
"""Longest wait for the lock; a process that is not stopped holds it for microseconds."""
_MOVES = 4  # times that a frame may be replaced while it is read

_AGAIN_S = 1.0  # wait before another file is looked for, or dead processes, if there were none
# wait until the next search of the index, as a multiple of the last one's duration
_BURY_SHARE = 50
_REASONS = {table.FULL: "full", table.LOST: "lost"}
_log = logging.getLogger("flowkv")

Row: TypeAlias = NDArray[np.int64]
"""Copy of the index entry of a frame: eight words, see `shared.table`."""


class SharedTier(Handle):
    """Host tier in one file in shared memory, for several processes; it survives all of them.

    Frames are chains of 4 KiB granules, so that memory never fragments. Readers take no lock: they
    copy a frame to their target, verify the copy, and look again if the frame was replaced
    meanwhile; a torn copy is a miss, never an answer. Changes hold a lock for microseconds. A
    process killed in the middle of a change leaves a mark, and the next process repairs the table;
    frames that it was writing are freed. While a peer is *stopped* in the middle of a change, loads
    go on, and stores are `FAILED` with reason "busy".

    A stray pointer of any process can write into the memory, so no number in it is trusted: every
    process leaves a table that contradicts itself, once, and an empty one is made in its place.
    Items in flight are then a miss, or `FAILED` with reason "lost".

    The memory stays taken when all processes are gone: `remove` frees it, or delete the file
    (`flowkv-UID-NAME`). Bytes of deleted frames stay until they are overwritten; `erase` does that.

    Args:
        name: Name of the memory: equal names share. A long name, or one with unusual characters, is
            cleaned and completed by a digest.
        capacity_bytes: Bytes of the file, everything included; at least 256 KiB. If it exists with
            another size, that size stays, with a warning.
        directory: Directory of the file; its file system should be memory.
        clock: Source of time.

    Attributes:
        corrupt: Frames found damaged so far.
        renewed: Times that the table contradicted itself, and this handle left it for another.

    Raises:
        ConfigError: The capacity is too small, or the name is empty.
        StoreError: The file belongs to another user, or cannot be made.
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
        super().__init__(f"host:{name}", Completions())
        self.corrupt, self.renewed, self._stuck = 0, 0, False
        self._again_s = self._bury_s = 0.0
        self._clock = clock or SystemClock()
        self._lock, self._burying = threading.Lock(), threading.Lock()
        wanted = plan(capacity_bytes)
        self._memory = SharedFile(Path(directory).absolute() / file_name(name), wanted)
        self.capacity_bytes = self._memory.plan.file_bytes
        if self._memory.set_aside:
            warnings.warn(
                f"{self._memory.path} had another format or was damaged: starting empty",
                stacklevel=2,
            )
        if self._memory.plan != wanted:
            warnings.warn(
                f"{self._memory.path} has {self.capacity_bytes} bytes already, not "
                f"{capacity_bytes}: the size stays. Remove the file to change it.",
                stacklevel=2,
            )
        self._move_in(self._memory)

    @property
    def erasure_log(self) -> Path:
        """Return the path of the log of erasures that caches share, see `tiers.erasure_log`."""
        path = self._memory.path
        return path.with_name(f"{path.name}.erased")

    # ---- content

    def used_bytes(self) -> int:
        """Return the bytes of all frames, also of incomplete ones, and of the table."""
        if not self._usable():
            return 0
        memory = self._current()
        used = min(max(0, int(memory.arrays[0][USED])), memory.plan.granules)
        return memory.plan.arena_at + GRANULE * used

    def frame_bytes(self, body_bytes: int) -> int:
        """Return an upper bound of the bytes of such a frame."""
        return GRANULE * -(-(most_header_bytes(body_bytes) + body_bytes) // GRANULE)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are present."""
        if not self._usable():
            return [False] * len(keys)
        memory = self._current()
        self._mend(memory)
        return [self._row(memory, key) is not None for key in keys]

    def scan(self) -> Iterator[Entry]:
        """Yield all frames, oldest store first, without damaged ones."""
        if not self._usable():
            return
        memory = self._current()
        self._mend(memory)
        index = memory.arrays[1]
        slots = np.flatnonzero(index[:, 4])
        rows = index[slots]
        for at in np.argsort(rows[:, 4], kind="stable"):
            row = rows[at]
            key = row[:4].tobytes()
            if not memory.sound():
                return
            if row[7] != table.check_of(row):  # the row was changed during the copy, or is damaged
                self._change(memory, table.settle, slots[at])
                continue
            try:
                header = self._header(memory, key, row)
            except BadFrame:
                continue
            yield Entry(key, header.info, GRANULE * -(-int(row[6]) // GRANULE))

    # ---- taking frames out

    def delete(self, keys: Sequence[bytes]) -> int:
        """Free frames, none while a stopped peer holds the lock; return how many were present."""
        if not self._usable():
            return 0
        memory, out = self._current(), _row()
        return sum(
            self._change(memory, table.withdraw, _words(key), 0, 0, out) == 0
            for key in keys
            if len(key) == KEY_BYTES
        )

    def erase(self, keys: Sequence[bytes]) -> int:
        """Free frames and overwrite their bytes; return how many were present.

        Frames of a table that was left as unsound disappear when the last process has left it.

        Raises:
            StoreError: A stopped peer holds the lock: some may still be there.
        """
        if not self._usable():
            return 0
        memory, gone = self._current(), 0
        for key in (key for key in keys if len(key) == KEY_BYTES):
            out = _row()
            answer = self._change(memory, table.withdraw, _words(key), 0, memory.seat, out)
            if answer == 0:
                self._overwrite(memory, out)
                gone += 1
            elif answer == table.BUSY:
                raise StoreError(
                    f"{self.name} cannot be changed: it is locked by a process that does not go on",
                    "Continue or end that process, then erase again",
                )
        return gone

    def remove(self) -> None:
        """Close the tier; its memory is freed once no other process uses it any more."""
        if self._usable():
            self._memory.remove()
            self.erasure_log.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close this handle; the frames stay for other processes, and for the next time."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with self._lock:  # the mapping ends with this object: a thread may be reading
            self._memory.close()
        self._answers.close()

    def cancel(self, job: int) -> None:
        """Do nothing: all items were answered when they were submitted."""

    # ---- loads

    def _run(self, items: Sequence[Load] | Sequence[Store], deadline_s: float) -> int:
        self._require_usable()
        job, start_ns = self._answers.new_job(), self._clock.now_ns()
        end_ns, answers = start_ns + round(min(deadline_s, 1e9) * 1e9), []
        for index, item in enumerate(cast(Sequence[Load | Store], items)):
            if self._clock.now_ns() >= end_ns:
                reply = failed(item.key, "deadline")
            elif isinstance(item, Load):
                reply = self._load(item, end_ns)
            else:
                reply = self._store(item, end_ns)
            seconds = (self._clock.now_ns() - start_ns) / 1e9
            answers.append(reply._replace(job=job, item=index, seconds=seconds))
        self._answers.post(answers)
        return job

    def _load(self, item: Load, end_ns: int) -> TierAnswer:
        memory, suspect = self._current(), 0
        self._mend(memory)
        for _ in range(_MOVES):
            row = self._row(memory, item.key)
            if row is None:
                break
            try:
                return self._read(memory, item, row)
            except BadFrame as error:
                if error.reason in ("layout", "fidelity", "stripes"):
                    return missed(item.key, error.reason)
                sequence = int(row[4])
                if sequence == suspect and self._condemn(memory, item.key, sequence, end_ns):
                    return missed(item.key, error.reason)
                # The frame was replaced during the read, or is damaged: look again, after the lock
                # has made all of its writer's bytes visible.
                suspect = sequence
                self._change(memory, table.settle, -1, end_ns=end_ns)
        return missed(item.key)

    def _row(self, memory: SharedFile, key: bytes) -> Row | None:
        """Return the unverified index entry of a frame; None if there is none."""
        row = _row()
        if len(key) != KEY_BYTES or not memory.sound():
            return None
        found = table.look(memory.arrays, _words(key), row)
        if found == table.LOST:
            self._change(memory, table.settle, row[7])
        return row if found >= 0 else None

    def _read(self, memory: SharedFile, item: Load, row: Row) -> TierAnswer:
        header = self._header(memory, item.key, row)
        body_at = int(row[6]) - header.body_bytes
        return copied(
            header, item, lambda target, at: self._copy(memory, row, body_at + at, target)
        )

    def _header(self, memory: SharedFile, key: bytes, row: Row) -> Header:
        """Return a private, checked copy of a frame's header.

        Raises:
            BadFrame: It is no header, or that of another frame.
        """
        page = memoryview(bytearray(GRANULE))
        self._copy(memory, row, 0, page)
        size = peek_header_bytes(page)
        if size > GRANULE:
            page = memoryview(bytearray(size))
            self._copy(memory, row, 0, page)
        header = decode_header(page)
        if header.key != key or size + header.body_bytes != row[6]:
            raise BadFrame("key", "the frame belongs to another key")
        return header

    def _copy(self, memory: SharedFile, row: Row, skip: int, target: memoryview) -> None:
        sink = np.frombuffer(target, np.uint8)
        if not table.gather(memory.arena, memory.arrays[2], row, skip, sink):
            raise BadFrame("truncated", "the frame's chain ends before the frame")

    def _condemn(self, memory: SharedFile, key: bytes, sequence: int, end_ns: int) -> bool:
        """Remove a damaged frame; False if it was replaced meanwhile."""
        withdrawn = (_words(key), sequence, 0, _row())
        gone = self._change(memory, table.withdraw, *withdrawn, end_ns=end_ns) == 0
        self.corrupt += gone
        return gone

    # ---- stores

    def _store(self, item: Store, end_ns: int) -> TierAnswer:
        key, there = item.key, TierAnswer(0, 0, item.key, Outcome.STORED)
        memory, row = self._current(), _row()
        try:
            count_stripes(key, item.info, item.body.nbytes)
            words = _words(key)
            if self._row(memory, key) is not None:
                return there
            head = pack_header(describe(key, item.info, item.body, known=item.digests))
            answer = self._claim(memory, words, len(head) + item.body.nbytes, row, end_ns)
        except BadFrame as error:
            return failed(key, error.reason)
        except OSError as error:  # no memory behind the file
            return failed(key, errno.errorcode.get(error.errno or 0, "memory"))
        if answer < 0:
            return there if answer == table.THERE else failed(key, _REASONS.get(answer, "busy"))
        # Digests come from the caller's memory: should it change during the copy, against the
        # contract, then the copy will not match them and never be served.
        answer = table.BUSY
        try:
            body = item.body.cast("B")
            if self._put(memory, row, 0, head) and self._put(memory, row, len(head), body):
                answer = self._change(memory, table.commit, row, words, end_ns=end_ns)
            else:
                answer = table.LOST
        finally:
            if answer == table.BUSY:
                memory.owed.append(row)  # withdrawn before the next store
        if answer < 0 and answer != table.THERE:
            return failed(key, _REASONS.get(answer, "busy"))
        return there._replace(n_bytes=item.body.nbytes)

    def _claim(
        self, memory: SharedFile, words: NDArray[np.int64], n_bytes: int, row: Row, end_ns: int
    ) -> int:
        self._repay(memory)
        while True:
            wish = words, memory.seat, n_bytes, row
            answer = self._change(memory, table.claim, *wish, end_ns=end_ns)
            if answer == table.GROW:
                answer = self._change(memory, table.grow, memory.back(), end_ns=end_ns)
                if answer == 0:
                    continue
            elif answer == table.FULL and time.monotonic() >= self._bury_s:
                begun_s = time.monotonic()
                buried = self._bury(memory)  # this looks at all of the index
                now_s = time.monotonic()
                self._bury_s = now_s + max(_AGAIN_S, _BURY_SHARE * (now_s - begun_s))
                if buried:
                    continue
            return answer

    def _repay(self, memory: SharedFile) -> None:
        """Withdraw the frames that could not be withdrawn while the lock was held elsewhere."""
        with contextlib.suppress(IndexError):
            while self._drop(memory, memory.owed.pop()):
                pass

    def _drop(self, memory: SharedFile, row: Row) -> bool:
        """Free the granules of an abandoned frame; False if that must wait for the lock."""
        name = row[:4].copy(), int(row[4])
        freed = self._change(memory, table.withdraw, *name, 0, _row()) != table.BUSY
        if not freed:
            memory.owed.append(row)
        return freed

    def _put(self, memory: SharedFile, row: Row, skip: int, data: bytes | memoryview) -> bool:
        """Write into a claimed chain; an incomplete chain condemns the table."""
        source = np.frombuffer(data, np.uint8)
        whole = bool(table.scatter(memory.arena, memory.arrays[2], row, skip, source))
        if not whole:
            memory.condemn()
        return whole

    # ---- the file: its lock, leftovers of dead processes, and replacement

    def _current(self) -> SharedFile:
        """Return the mapped file; a new one if the old one is not sound any more."""
        memory = self._memory
        return memory if memory.sound() else self._leave(memory)

    def _leave(self, lost: SharedFile) -> SharedFile:
        if not self._lock.acquire(timeout=PATIENCE_S):
            return lost
        try:
            if self._memory is not lost or self._closed or time.monotonic() < self._again_s:
                return self._memory
            self._again_s = time.monotonic() + _AGAIN_S
            try:
                found = SharedFile(lost.path, lost.plan, PATIENCE_S)
            except StoreError as error:  # there is none for now: every load is a miss
                _log.warning("%s", error)
                return lost
            self._memory, self.capacity_bytes = found, found.plan.file_bytes
            self.renewed, self._again_s = self.renewed + 1, 0.0
            _log.warning("%s contradicted itself: another one is used", lost.path)
        finally:
            self._lock.release()
        self._move_in(found)
        return found

    def _move_in(self, memory: SharedFile) -> None:
        self._change(memory, table.audit)
        for row in memory.left:  # left by a dead process on this seat
            self._inherit(memory, row)
        memory.left = []
        self._bury(memory)

    def _change(
        self,
        memory: SharedFile,
        operation: Callable[..., int],
        *arguments: object,
        end_ns: int | None = None,
    ) -> int:
        """Run a change under the lock; BUSY if the lock cannot be taken in time.

        A peer that holds the lock for long is stopped: until it continues, later changes do not
        wait.
        """
        now_s = time.monotonic()
        patience_s = 0.0 if self._stuck else PATIENCE_S
        if end_ns is not None:
            patience_s = min(patience_s, (end_ns - self._clock.now_ns()) / 1e9)
        if not self._lock.acquire(timeout=max(0.0, patience_s)):
            return table.BUSY
        try:
            while not self._closed:
                answer = int(operation(memory.fd, memory.arrays, *arguments))
                if answer != table.BUSY:
                    self._stuck = False
                    return answer
                if time.monotonic() - now_s >= patience_s:
                    self._stuck = True
                    return table.BUSY
            return table.BUSY
        finally:
            self._lock.release()

    def _mend(self, memory: SharedFile) -> None:
        """Repair the table if a peer was killed in mid-change; never wait for a living peer."""
        if memory.arrays[0][VERSION] & 1 and self._lock.acquire(blocking=False):
            table.settle(memory.fd, memory.arrays, -1)
            self._lock.release()

    def _overwrite(self, memory: SharedFile, row: Row) -> bool:
        """Overwrite the granules of an incomplete frame, and free them, perhaps later."""
        self._put(memory, row, 0, bytes(GRANULE * -(-int(row[6]) // GRANULE)))
        return self._drop(memory, row)

    def _inherit(self, memory: SharedFile, row: Row) -> bool:
        """Free an incomplete frame of a dead process, unless another process did meanwhile."""
        # the row is taken over before it is blanked: its former owner may still withdraw it at any
        # time
        out = _row()
        wish = row[:4].copy(), int(row[4]), memory.seat, out
        taken = self._change(memory, table.withdraw, *wish) == 0
        return taken and self._overwrite(memory, out)

    def _bury(self, memory: SharedFile) -> bool:
        """Free the incomplete frames of dead processes; return whether there were any."""
        if not self._burying.acquire(blocking=False):
            return False  # another thread does it
        try:
            seats = memory.deserted()
            left = [row for row in memory.writing() if row[1] in seats]
            found = [self._inherit(memory, row) for row in left]
            for seat in seats:
                memory.abandon(seat)
            return any(found)
        finally:
            self._burying.release()


def _words(key: bytes) -> NDArray[np.int64]:
    return np.frombuffer(key, np.int64)


def _row() -> Row:
    return np.zeros(8, np.int64)
