"""The file in shared memory: found or made, checked, mapped, and freed of what the dead left.

    superblock 4 KiB | claims | index | links | arena            (see `shared.table`)

The file belongs to one user and nobody else may open it. It is never truncated: a file of another
format, or one whose superblock is damaged, is set aside by making a new one under its name, and
those who have the old one mapped go on with it. Two locks, both given up by the kernel when their
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
import time
import warnings
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StoreError
from flowkv.tiers.shared import table
from flowkv.tiers.shared.table import GRANULE

MAGIC, FORMAT = b"FKVSHARE", 1
LEAST_BYTES = 256 << 10
GROW_BYTES = 16 << 20
_ROWS, _SEATS, _SEAT_AT = 512, 4096, 1 << 60
_COUNTERS_AT, _COUNTERS = 512, 64
_FIXED = struct.Struct("<8sI4xQQQQ")  # magic, format, granules, slots, rows, bytes of the file
_OPEN_S, _PAUSE_S = 5.0, 0.005
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Arrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], NDArray[np.int64]]


class Plan(NamedTuple):
    """How a file is divided."""

    granules: int
    slots: int
    rows: int

    @property
    def index_at(self) -> int:
        """Offset of the index."""
        return GRANULE + 32 * self.rows

    @property
    def links_at(self) -> int:
        """Offset of the links."""
        return self.index_at + 64 * self.slots

    @property
    def arena_at(self) -> int:
        """Offset of the arena."""
        return -(-(self.links_at + 4 * self.granules) // GRANULE) * GRANULE

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.arena_at + GRANULE * self.granules


def plan(capacity_bytes: int) -> Plan:
    """The largest division that fits into a capacity; a frame takes two granules at least."""
    granules = capacity_bytes // GRANULE
    while True:
        found = Plan(granules, granules * 5 // 8 + 8, min(_ROWS, granules // 4))
        over = found.file_bytes - capacity_bytes
        if over <= 0:
            return found
        granules -= -(-over // (GRANULE + 64))


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
        capacity_bytes: Its size, if it is made.

    Attributes:
        path: Where it lies.
        plan: How it is divided.
        arrays: counters, index, links and claims.
        arena: uint8: the granules.
        seat: Number of this handle, from 1.
        found: Whether it was there before.

    Raises:
        ConfigError: The capacity is too small.
        StoreError: The file is somebody else's, or cannot be made.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise ConfigError(
                f"a shared host tier of {capacity_bytes} bytes", f"Give it at least {LEAST_BYTES}"
            )
        self.path, self.found, self.fd = path, True, -1
        try:
            end_s = time.monotonic() + _OPEN_S
            while not self._open(capacity_bytes, end_s):
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

    def _open(self, capacity_bytes: int, end_s: float) -> bool:
        """Opens or makes the file; False if it has to be looked at again."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o600)
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
                os.unlink(self.path)
                self.close()
                return False
            if found is None:
                self.found = False
                self._make(plan(capacity_bytes))
            else:
                self.plan = found
        finally:
            if self.fd >= 0:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

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

    def _read_superblock(self) -> Plan | None:
        data = os.pread(self.fd, _COUNTERS_AT, 0)
        if len(data) < _COUNTERS_AT or data[:8] != MAGIC:
            return None
        _, version, granules, slots, rows, n_bytes = _FIXED.unpack_from(data)
        found = Plan(granules, slots, rows)
        digest = xxhash.xxh3_128_digest(data[: _FIXED.size])
        sound = digest == data[_FIXED.size : _FIXED.size + 16] and version == FORMAT
        if not sound:
            warnings.warn(
                f"{self.path} has another format or is damaged: starting empty",
                UserWarning,
                stacklevel=5,
            )
            return None
        same = found.file_bytes == n_bytes == os.fstat(self.fd).st_size
        return found if same and slots > granules // 2 else None

    def _make(self, made: Plan) -> None:
        self.plan = made
        os.ftruncate(self.fd, made.file_bytes)
        try:
            os.posix_fallocate(self.fd, 0, made.arena_at)
        except OSError:
            os.unlink(self.path)
            raise
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
            np.frombuffer(self._mapping, np.uint32, granules, self.plan.links_at),
            np.frombuffer(self._mapping, np.int64, 4 * rows, GRANULE).reshape(-1, 4),
        )
        self.arena = np.frombuffer(self._mapping, np.uint8, offset=self.plan.arena_at)

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
        claims = self.arrays[3]
        seats = {int(seat) for seat in claims[claims[:, 0] != 0, 0]} - {self.seat}
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
        grown = int(self.arrays[0][table.GROWN])
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
        """Lets go of the file and the seat; the mapping goes with the last who uses the arrays."""
        if self.fd >= 0:
            os.close(self.fd)
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
