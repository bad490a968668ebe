"""A disk in memory that loses power: of what was not synced, any subset of sectors survives.

Model: creations, renames and lengths survive in order up to the moment of the crash; of the data,
holes included, any subset of the 512-byte sectors that were not synced. It has so many blocks: a
write that needs more ends where they do, and one that gets none fails.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Sequence

from tests.inside import Buffer, FileIO

SECTOR = 512
BLOCK = 4096
_FIRST_FD = 1 << 20


class _File:
    __slots__ = ("blocks", "data", "pending", "safe")

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self.data, self.safe = bytearray(data), bytearray(data)
        self.pending: list[tuple[int, bytes]] = []
        self.blocks = set(range(-(-len(data) // BLOCK)))

    def room(self, offset: int, size: int, free: int) -> int:
        """How many of these bytes can be written with so many free blocks, which are taken."""
        for block in range(offset // BLOCK, -(-(offset + size) // BLOCK)):
            if block not in self.blocks:
                if free <= 0:
                    return max(0, block * BLOCK - offset)
                self.blocks.add(block)
                free -= 1
        return size

    def write(self, offset: int, content: bytes) -> None:
        self._grow(offset + len(content))
        self.data[offset : offset + len(content)] = content
        self.pending.append((offset, content))

    def _grow(self, size: int) -> None:
        if size > len(self.data):
            self.data.extend(bytes(size - len(self.data)))
            self.safe.extend(bytes(size - len(self.safe)))

    def truncate(self, size: int) -> None:
        self._grow(size)
        del self.data[size:], self.safe[size:]
        self.blocks = {block for block in self.blocks if block * BLOCK < size}

    def sync(self) -> None:
        self.safe[:] = self.data
        self.pending.clear()

    def survivor(self, rng: random.Random) -> _File:
        """What the device may have kept."""
        kept, size = bytearray(self.safe), len(self.safe)
        for offset, content in self.pending:
            chance = rng.random()
            if chance < 0.4:  # all of it, as far as the file reaches
                kept[offset : offset + len(content)] = content
            elif chance < 0.8:
                share = rng.choice((0.5, 0.9))
                for at in range(0, len(content), SECTOR):
                    if rng.random() < share:
                        part = content[at : at + SECTOR]
                        kept[offset + at : offset + at + len(part)] = part
        del kept[size:]
        return _File(kept)


class MemoryFiles(FileIO):
    """Files in memory. `on_change` is called before every change; `space` is in blocks."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self.files: dict[str, _File] = {}
        self.space = 1 << 40
        self.on_change = on_change or (lambda: None)
        self._open: dict[int, _File] = {}
        self._next = _FIRST_FD
        self._locked: dict[int, str] = {}

    def crash(self, rng: random.Random) -> MemoryFiles:
        """What a machine that lost power right now comes back with."""
        after = MemoryFiles()
        after.files = {name: file.survivor(rng) for name, file in self.files.items()}
        return after

    def used(self) -> int:
        """Blocks that all files have."""
        return sum(len(file.blocks) for file in self.files.values())

    def copy(self) -> MemoryFiles:
        """The same files once more, all safe."""
        twin = MemoryFiles()
        twin.files = {name: _File(file.data) for name, file in self.files.items()}
        return twin

    def open(self, path: str, *, write: bool) -> int:
        if path not in self.files:
            if not write:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self.on_change()
            self.files[path] = _File()
        self._next += 1
        self._open[self._next] = self.files[path]
        return self._next

    def close(self, fd: int) -> None:
        del self._open[fd]

    def size(self, fd: int) -> int:
        return len(self._open[fd].data)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data, done = self._open[fd].data, 0
        for buffer in buffers:
            part = data[offset + done : offset + done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.on_change()
        content, file = b"".join(bytes(buffer) for buffer in buffers), self._open[fd]
        content = content[: file.room(offset, len(content), self.space - self.used())]
        if not content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(offset, content)
        return len(content)

    def truncate(self, fd: int, size: int) -> None:
        self.on_change()
        self._open[fd].truncate(size)

    def punch(self, fd: int, offset: int, size: int) -> None:
        self.on_change()
        file = self._open[fd]
        file.write(offset, bytes(max(0, min(size, len(file.data) - offset))))
        file.blocks -= set(range(offset // BLOCK, (offset + size) // BLOCK))

    def sync(self, fd: int) -> None:
        self.on_change()
        self._open[fd].sync()

    def replace(self, source: str, target: str, *, durable: bool = True) -> None:
        self.on_change()
        self.files[target] = self.files.pop(source)

    def sync_directory(self, path: str) -> None:
        pass

    def make_directory(self, path: str) -> None:
        pass

    def status(self, path: str) -> tuple[int, int]:
        return os.geteuid(), stat.S_IFDIR | 0o700

    def names(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        return [name[len(start) :] for name in self.files if name.startswith(start)]

    def remove(self, path: str) -> None:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.on_change()
        del self.files[path]

    def same(self, fd: int, path: str) -> bool:
        return self.files.get(path) is self._open[fd]

    def lock(self, path: str, *, patient: bool = True) -> int:
        if path in self._locked.values():
            return -1
        fd = self.open(path, write=True)
        self._locked[fd] = path
        return fd

    def lock_directory(self, path: str, *, patient: bool = True) -> int:
        if path in self._locked.values():
            return -1
        self._next += 1
        self._open[self._next], self._locked[self._next] = _File(), path
        return self._next

    def unlock(self, fd: int) -> None:
        del self._locked[fd], self._open[fd]
