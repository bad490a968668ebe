"""The file in shared memory: found or made, checked, mapped, and freed of what the dead left.

    superblock 4 KiB | claims | index | links | arena            (see `shared.table`)

The file belongs to one user and nobody else may open it. It is never truncated: a file of another
format, or one that is damaged or contradicts itself, is set aside by making a new one under its
name. Who has a damaged one mapped sees that it is not `sound` any more, and opens the new one;
those of another version go on with theirs. Two locks, both given up by the kernel when their
holder dies: `flock` for changes, and one byte range for each open handle, its *seat*, which says
whether the writer of a claimed frame is still alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import stat
import struct
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StoreError
from flowkv.tiers.shared import table
from flowkv.tiers.shared.table import GRANULE

MAGIC, FORMAT = b"FKVSHARE", 2
LEAST_BYTES = 256 << 10
GROW_BYTES = 16 << 20
_ROWS, _SEATS, _SEAT_AT = 512, 4096, 1 << 60
_COUNTERS_AT, _COUNTERS = 512, 64
_FIXED = struct.Struct("<8sI4xQQQQ")  # magic, format, granules, slots, rows, bytes of the file
_PAUSE_S = 0.005
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]


class Plan(NamedTuple):
    """How a file is divided."""

    granules: int
    slots: int
    rows: int

    @property
    def index_at(self) -> int:
        """Offset of the index."""
        return GRANULE + 64 * self.rows

    @property
    def links_at(self) -> int:
        """Offset of the links."""
        return self.index_at + 64 * self.slots

    @property
    def arena_at(self) -> int:
        """Offset of the arena."""
        return -(-(self.links_at + 8 * self.granules) // GRANULE) * GRANULE

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.arena_at + GRANULE * self.granules


def divided(granules: int) -> Plan:
    """The plan of so many granules; a frame takes two at least."""
    return Plan(granules, granules * 5 // 8 + 8, min(_ROWS, granules // 4))


def plan(capacity_bytes: int) -> Plan:
    """The largest plan that fits into a capacity.

    Raises:
        ConfigError: The capacity is too small.
    """
    if capacity_bytes < LEAST_BYTES:
        raise ConfigError(
            f"a shared host tier of {capacity_bytes} bytes", f"Give it at least {LEAST_BYTES}"
        )
    granules = capacity_bytes // GRANULE
    while (over := divided(granules).file_bytes - capacity_bytes) > 0:
        granules -= -(-over // (GRANULE + 64))
    return divided(granules)


def file_name(name: str) -> str:
    """The file's name: the tier's own if that is plain, else cleaned and told apart by a digest.

    Raises:
        ConfigError: The name is empty.
    """
    if not name:
        raise ConfigError("a shared host tier has no name", 'Name it: "host:NAME:8GiB"')
    if not _PLAIN.fullmatch(name):
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:40].lstrip(".-") + "-" + digest
    return f"flowkv-{os.getuid()}-{name}"


class Memory:
    """A shared file, mapped.

    Args:
        path: The file; made if it is not there.
        wanted: How it is divided, if it is made.
        patience_s: Longest wait for a process that has locked it.

    Attributes:
        path: Where it lies.
        plan: How it is divided.
        arrays: counters, index, links and claims.
        arena: uint8: the granules.
        seat: Number of this handle, from 1.
        set_aside: Whether another file lay there that could not be used.
        owed: Places in `claims`, with their rows, that this handle has still to give back.

    Raises:
        StoreError: The file is somebody else's, or cannot be made.
    """

    def __init__(self, path: Path, wanted: Plan, patience_s: float = 5.0) -> None:
        self.path, self.set_aside, self.fd = path, False, -1
        self.owed: list[tuple[int, NDArray[np.int64]]] = []
        self._let_go: Callable[[], object] = lambda: None
        try:
            end_s = time.monotonic() + patience_s
            while not self._open(wanted, end_s):
                pass
            self._map()
            self.seat = self._sit()
        except StoreError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise StoreError(
                f"shared memory {path} cannot be used ({error.strerror})",
                "Give the tier fewer bytes, another directory, or remove that file",
            ) from error
        os.register_at_fork(after_in_child=_Forget(self))

    # ---- opening

    def _open(self, wanted: Plan, end_s: float) -> bool:
        """Opens or makes the file; False if it has to be looked at again."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o600)
        closing = self._let_go = weakref.finalize(self, os.close, self.fd)
        closing.atexit = False  # the kernel does it then
        self._check_owner()
        found = self._read_superblock()
        if found is not None and os.fstat(self.fd).st_nlink:
            self.plan = found
            return True
        self._lock(end_s)
        try:
            if os.fstat(self.fd).st_nlink == 0:  # another one was put in its place meanwhile
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
        """Takes the file's name away, once: under its lock. Who has it mapped is told to leave."""
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
        """Whether the superblock says what its writer wrote."""
        data = os.pread(self.fd, _FIXED.size + 16, 0)
        return xxhash.xxh3_128_digest(data[: _FIXED.size]) == data[_FIXED.size :]

    def _read_superblock(self) -> Plan | None:
        """How the file is divided; None if it is to be made, or made anew."""
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

    def _make(self, made: Plan) -> None:
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
        # Last, so that nobody takes half a file for a whole one.
        os.pwrite(self.fd, fixed + xxhash.xxh3_128_digest(fixed), 0)

    def _map(self) -> None:
        self._mapping = mmap.mmap(self.fd, self.plan.file_bytes)
        with contextlib.suppress(OSError):  # a kernel without huge pages in shared memory
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        granules, slots, rows = self.plan
        self.arrays: Arrays = (
            np.frombuffer(self._mapping, np.int64, _COUNTERS, _COUNTERS_AT),
            np.frombuffer(self._mapping, np.int64, 8 * slots, self.plan.index_at).reshape(-1, 8),
            np.frombuffer(self._mapping, np.uint64, granules, self.plan.links_at),
            np.frombuffer(self._mapping, np.int64, 8 * rows, GRANULE).reshape(-1, 8),
        )
        self.arena = np.frombuffer(self._mapping, np.uint8, offset=self.plan.arena_at)

    # ---- whether it can be used

    def sound(self) -> bool:
        """Whether nobody found that it contradicts itself."""
        return bool(self.arrays[0][table.STATE] == table.SOUND)

    def condemn(self) -> None:
        """Throws it away: everybody who has it leaves it."""
        self.arrays[0][table.STATE] = 0

    # ---- seats

    def _sit(self) -> int:
        for seat in range(1, _SEATS):
            if self._try_seat(seat):
                return seat
        raise StoreError(f"{_SEATS} handles of {self.path} are open", "Close some")

    def _try_seat(self, seat: int) -> bool:
        """Takes a seat if nobody living has it."""
        wish = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _SEAT_AT + seat, 1, 0)
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, wish)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _leave_seat(self, seat: int) -> None:
        wish = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, _SEAT_AT + seat, 1, 0)
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, wish)

    def deserted(self) -> list[int]:
        """Seats with claims whose writers are dead; taken, until `abandon`."""
        seats = set(self.arrays[3][:, 0].tolist()) - {0, self.seat}
        if not all(0 < seat < _SEATS for seat in seats):
            self.condemn()
            return []
        return [seat for seat in sorted(seats) if self._try_seat(seat)]

    def abandon(self, seat: int) -> None:
        """Gives a seat of the dead free."""
        self._leave_seat(seat)

    # ---- memory

    def back(self) -> int:
        """Has the kernel give memory for some more granules; returns how many there are then.

        Raises:
            OSError: There is no more.
        """
        grown = max(0, int(table.grown_of(self.arrays)))
        more = min(max(GROW_BYTES // GRANULE, 1), self.plan.granules - grown)
        if more > 0:
            os.posix_fallocate(self.fd, self.plan.arena_at + GRANULE * grown, GRANULE * more)
        return grown + max(more, 0)

    # ---- closing

    def remove(self) -> None:
        """Takes the file's name away; who has it open goes on with it."""
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(self.fd).st_ino == os.stat(self.path, follow_symlinks=False).st_ino:
                os.unlink(self.path)

    def close(self) -> None:
        """Lets go of the file and the seat; the mapping goes with the last who uses the arrays.

        A memory that nobody uses any more closes itself.
        """
        self._let_go()
        self.fd = -1


class _Forget:
    """Closes a child's copy of the file: else the locks of a dead parent would live on in it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = weakref.ref(memory)

    def __call__(self) -> None:
        memory = self._memory()
        if memory is not None:
            with contextlib.suppress(OSError):
                memory.close()
