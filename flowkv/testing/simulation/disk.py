"""A disk that is no disk: files in memory that tear, forget, lie and fill up, all by one seed."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator, Sequence

from flowkv.tiers.disk.files import Buffer, FileIO

SECTOR_BYTES = 512
BLOCK_BYTES = 4096
_LOG_MOST = 256
_FIRST_FD = 1000


class _Inode:
    """One file: what programs see, what the device has for certain, and what is on its way."""

    def __init__(self) -> None:
        self.data, self.durable = bytearray(), bytearray()
        self.log: list[tuple[str, int, bytes | int]] = []  # not synced, oldest first
        self.blocks: set[int] = set()  # that the file system gave it


def _put(data: bytearray, offset: int, content: bytes) -> None:
    data.extend(bytes(max(0, offset + len(content) - len(data))))
    data[offset : offset + len(content)] = content


def _cut(data: bytearray, size: int) -> None:
    data[size:] = bytes(max(0, size - len(data)))


def _blank(data: bytearray, offset: int, size: int) -> None:
    data[offset : offset + size] = bytes(len(data[offset : offset + size]))


class SimulatedFiles(FileIO):
    """A file system in memory, for one directory tree and one process at a time.

    What was written and not synced is lost by `lose_power`, sector by sector and name by name, in
    any combination; a sector may also come back as it was some writes ago. `troubles` makes calls
    fail. A file that could not be synced loses what was to be synced, and says so only once, as
    Linux does.

    Args:
        chance: Source of every accident.
        space_bytes: Of all blocks on the device. A write that needs more ends where they do, and
            one that gets none fails with ENOSPC.

    Attributes:
        space_bytes: The same; others may take it and give it back.
        troubles: Probability by name: "write", "enospc", "short", "torn", "read", "short read",
            "sync", "open", "names" (removing, renaming and resizing).
        harmed: Whether a call was made to fail since the last `kill`.
    """

    def __init__(self, chance: random.Random, space_bytes: int = 1 << 40) -> None:
        self.chance, self.space_bytes = chance, space_bytes
        self.troubles: dict[str, float] = {}
        self.harmed = False
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._renames: list[tuple[str, str, _Inode | None]] = []
        self._open: dict[int, _Inode] = {}
        self._locked: dict[int, str] = {}
        self._next_fd = _FIRST_FD

    # ---- what a program may do

    def open(self, path: str, *, write: bool) -> int:
        """Opens or makes a file."""
        self._trouble("open", errno.EIO)
        if path not in self._names:
            if not write:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self._names[path] = _Inode()
            self._renames.append((path, "", self._names[path]))
        self._next_fd += 1
        self._open[self._next_fd] = self._names[path]
        return self._next_fd

    def close(self, fd: int) -> None:
        """Closes a file."""
        del self._open[fd]

    def size(self, fd: int) -> int:
        """Length of a file."""
        return len(self._file(fd).data)

    def next_data(self, fd: int, offset: int) -> int:
        """Where the next block that the file has got begins, from `offset` on."""
        inode = self._file(fd)
        first = offset // BLOCK_BYTES
        block = min((block for block in inode.blocks if block >= first), default=None)
        return len(inode.data) if block is None else max(offset, block * BLOCK_BYTES)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads; perhaps less than was asked for."""
        self._trouble("read", errno.EIO)
        data, done = self._file(fd).data, 0
        short = self._happens("short read")
        for buffer in buffers:
            part = data[offset + done : offset + done + len(buffer)]
            if short and len(part) > 1:
                part = part[: self.chance.randrange(1, len(part))]
            buffer[: len(part)] = part
            done += len(part)
            if len(part) < len(buffer):
                break
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Writes; perhaps less than was asked for, perhaps before it fails."""
        self._trouble("write", errno.EIO)
        self._trouble("enospc", errno.ENOSPC)
        content = b"".join(bytes(buffer) for buffer in buffers)
        torn = self._happens("torn")
        if torn or self._happens("short"):
            content = content[: self.chance.randrange(len(content) + 1)]
        written = self._write(self._file(fd), offset, content)
        if torn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return written

    def truncate(self, fd: int, size: int) -> None:
        """Sets the length of a file."""
        self._trouble("names", errno.EIO)
        inode = self._file(fd)
        _cut(inode.data, size)
        inode.blocks = {block for block in inode.blocks if block * BLOCK_BYTES < size}
        self._note(inode, ("cut", size, 0))

    def punch(self, fd: int, offset: int, size: int) -> None:
        """Makes a hole of whole blocks."""
        self._trouble("names", errno.EIO)
        inode = self._file(fd)
        _blank(inode.data, offset, size)
        inode.blocks -= set(range(offset // BLOCK_BYTES, (offset + size) // BLOCK_BYTES))
        self._note(inode, ("punch", offset, size))

    def sync(self, fd: int) -> None:
        """Makes a file's content durable; or loses what was not, and says so once."""
        inode = self._file(fd)
        if self._happens("sync"):
            self._settle(inode, self.chance.choice((0.0, 0.5)))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._settle(inode, 1.0)

    def replace(self, source: str, target: str, *, durable: bool = True) -> None:
        """Renames."""
        self._trouble("names", errno.EIO)
        inode = self._names.pop(source)
        self._names[target] = inode
        self._renames.append((target, source, inode))
        if durable:
            self.sync_directory(os.path.dirname(target))

    def sync_directory(self, path: str) -> None:
        """Makes names durable."""
        self._trouble("sync", errno.EIO)
        self._durable_names = dict(self._names)
        self._renames.clear()

    def make_directory(self, path: str) -> None:
        """Directories are no more than the beginnings of names."""

    def status(self, path: str) -> tuple[int, int]:
        """A directory of our own."""
        return os.geteuid(), stat.S_IFDIR | 0o700

    def restrict(self, path: str) -> None:
        """It is ours already."""

    def names(self, path: str) -> list[str]:
        """What is in a directory."""
        start = path.rstrip("/") + "/"
        return sorted(
            {name[len(start) :].split("/")[0] for name in self._names if name.startswith(start)}
        )

    def remove(self, path: str) -> None:
        """Removes a file."""
        self._trouble("names", errno.EIO)
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        del self._names[path]
        self._renames.append(("", path, None))

    def same(self, fd: int, path: str) -> bool:
        """Whether a path leads to an open file."""
        return self._names.get(path) is self._file(fd)

    def lock(self, path: str, *, patient: bool = True) -> int:
        """Locks; -1 if the lock is taken."""
        if path in self._locked.values():
            return -1
        fd = self.open(path, write=True)
        self._locked[fd] = path
        return fd

    def lock_directory(self, path: str, *, patient: bool = True) -> int:
        """Locks; -1 if the lock is taken."""
        if path in self._locked.values():
            return -1
        self._next_fd += 1
        self._open[self._next_fd], self._locked[self._next_fd] = _Inode(), path
        return self._next_fd

    def unlock(self, fd: int) -> None:
        """Gives a lock up."""
        del self._locked[fd]
        self.close(fd)

    # ---- what fate may do

    def kill(self) -> None:
        """The process is gone; what it wrote stays in the page cache."""
        self._open.clear()
        self._locked.clear()
        self.harmed = False

    def lose_power(self) -> None:
        """The machine is gone: of what was not synced, any part may be there."""
        self.kill()
        for target, source, inode in self._renames[: self.chance.randint(0, len(self._renames))]:
            self._durable_names.pop(source, None)
            if inode is not None:
                self._durable_names[target] = inode
        self._renames.clear()
        self._names = dict(self._durable_names)
        for inode in self._names.values():
            self._settle(inode, None)
            inode.data = bytearray(inode.durable)
            inode.blocks = {
                at // BLOCK_BYTES
                for at in range(0, len(inode.data), BLOCK_BYTES)
                if any(inode.data[at : at + BLOCK_BYTES])
            }

    def flip(self) -> str:
        """Turns one bit of one file, on the device and in the cache; says which."""
        files = [(name, inode) for name, inode in sorted(self._names.items()) if inode.blocks]
        if not files:
            return ""
        name, inode = self.chance.choice(files)
        block = self.chance.choice(sorted(inode.blocks))
        at, bit = block * BLOCK_BYTES + self.chance.randrange(BLOCK_BYTES), self.chance.randrange(8)
        for data in (inode.data, inode.durable):
            if at < len(data):
                data[at] ^= 1 << bit
        return f"{os.path.basename(name)} {at} {bit}"

    def used_bytes(self) -> int:
        """Blocks that all files occupy."""
        return BLOCK_BYTES * sum(len(inode.blocks) for inode in self._names.values())

    def images(self, *, device: bool = False) -> Iterator[tuple[str, bytes]]:
        """All files as programs see them, or as the device has them."""
        for name, inode in sorted(self._names.items()):
            yield name, bytes(inode.durable if device else inode.data)

    # ---- inside

    def _file(self, fd: int) -> _Inode:
        if fd not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._open[fd]

    def _happens(self, name: str) -> bool:
        happens = name in self.troubles and self.chance.random() < self.troubles[name]
        self.harmed = self.harmed or happens
        return happens

    def _trouble(self, name: str, code: int) -> None:
        if self._happens(name):
            raise OSError(code, os.strerror(code))

    def _write(self, inode: _Inode, offset: int, content: bytes) -> int:
        """As much as there are blocks for, as Linux does; nothing at all is an error."""
        if not content:
            return 0
        free = (self.space_bytes - self.used_bytes()) // BLOCK_BYTES
        for block in range(offset // BLOCK_BYTES, (offset + len(content) - 1) // BLOCK_BYTES + 1):
            if block not in inode.blocks:
                if free <= 0:
                    self.harmed = True
                    content = content[: max(0, block * BLOCK_BYTES - offset)]
                    break
                inode.blocks.add(block)
                free -= 1
        if not content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _put(inode.data, offset, content)
        self._note(inode, ("write", offset, content))
        return len(content)

    def _note(self, inode: _Inode, change: tuple[str, int, bytes | int]) -> None:
        inode.log.append(change)
        if len(inode.log) > _LOG_MOST:  # the kernel writes back on its own
            late, inode.log = inode.log[: _LOG_MOST // 2], inode.log[_LOG_MOST // 2 :]
            for each in late:
                self._persist(inode.durable, each, 1.0)

    def _settle(self, inode: _Inode, keep: float | None) -> None:
        for change in inode.log:
            part = self.chance.choice((0.0, 0.5, 0.9, 1.0)) if keep is None else keep
            self._persist(inode.durable, change, part)
        inode.log.clear()

    def _persist(
        self, durable: bytearray, change: tuple[str, int, bytes | int], keep: float
    ) -> None:
        what, offset, content = change
        if isinstance(content, bytes):
            if keep >= 1.0:
                _put(durable, offset, content)
                return
            for at in range(0, len(content), SECTOR_BYTES):
                if self.chance.random() < keep:
                    _put(durable, offset + at, content[at : at + SECTOR_BYTES])
        elif self.chance.random() < keep:
            if what == "cut":
                _cut(durable, offset)
            else:
                _blank(durable, offset, content)
