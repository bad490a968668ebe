"""Files that fail on purpose, and files that forget what was not synced."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

from flowkv.tiers.disk.files import Buffer, FileIO

CHANGES = ("open", "write", "truncate", "punch", "sync", "replace")


class FaultyFiles(FileIO):
    """Fails the operation of a number; counts the operations that change something.

    Modes: an errno name raises before anything happens; "torn" writes half and raises EIO; "short"
    writes half, without an error; "stuck" writes nothing, without an error.
    """

    def __init__(self, at: int = -1, mode: str = "ENOSPC", count: int = 1) -> None:
        self.at, self.mode, self.left = at, mode, count
        self.done: list[str] = []
        self.armed = True

    def _due(self, name: str) -> bool:
        if not self.armed:
            return False
        self.done.append(name)
        due = 0 <= self.at < len(self.done) and self.left > 0
        self.left -= due
        if due and self.mode.startswith("E"):
            raise OSError(getattr(errno, self.mode), os.strerror(getattr(errno, self.mode)))
        return due

    def open(self, path: str, *, write: bool) -> int:
        if write:
            self._due("open")
        return super().open(path, write=write)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._due("write"):
            data = b"".join(bytes(buffer) for buffer in buffers)
            half = (
                0 if self.mode == "stuck" else super().write(fd, [data[: len(data) // 2]], offset)
            )
            if self.mode == "torn":
                raise OSError(errno.EIO, "torn")
            return half
        return super().write(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._due("truncate")
        super().truncate(fd, size)

    def punch(self, fd: int, offset: int, size: int) -> None:
        self._due("punch")
        super().punch(fd, offset, size)

    def sync(self, fd: int) -> None:
        self._due("sync")

    def sync_directory(self, path: str) -> None:
        self._due("sync")

    def replace(self, source: str, target: str) -> None:
        self._due("replace")
        super().replace(source, target)


class FastFiles(FileIO):
    """Skips what only a device can confirm."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


class RecordingFiles(FileIO):
    """Notes every change, so that `after_power_loss` can make what a machine might come back with.

    Model: creations, renames and lengths survive in order up to the moment of the crash; of the
    data, any subset of the 512-byte sectors that were not synced.
    """

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.names: dict[int, str] = {}

    def open(self, path: str, *, write: bool) -> int:
        fd = super().open(path, write=write)
        if write:
            self.names[fd] = os.path.basename(path)
            self.log.append(("open", fd, self.names[fd]))
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        self.log.append(("write", fd, offset, data))
        return super().write(fd, [data], offset)

    def truncate(self, fd: int, size: int) -> None:
        self.log.append(("truncate", fd, size))
        super().truncate(fd, size)

    def punch(self, fd: int, offset: int, size: int) -> None:
        self.log.append(("punch", fd, offset, size))
        super().punch(fd, offset, size)

    def sync(self, fd: int) -> None:
        self.log.append(("sync", fd))

    def sync_directory(self, path: str) -> None:
        pass

    def replace(self, source: str, target: str) -> None:
        self.log.append(("replace", os.path.basename(source), os.path.basename(target)))
        super().replace(source, target)

    def note(self, *what: object) -> None:
        """A line of the test itself, such as an acknowledgement."""
        self.log.append(("note", *what))


SECTOR = 512


def after_power_loss(log: list[tuple], cut: int, rng: random.Random, directory: Path) -> None:
    """Writes what a machine that stopped after `cut` lines of the log may find on its disk."""
    files: dict[str, bytearray] = {}
    by_fd: dict[int, bytearray] = {}
    for number, (what, *rest) in enumerate(log[:cut]):
        if what == "open":
            by_fd[rest[0]] = files.setdefault(rest[1], bytearray())
        elif what == "truncate":
            data = by_fd[rest[0]]
            data[rest[1] :] = bytes(max(0, rest[1] - len(data)))
        elif what == "replace":
            files[rest[1]] = files.pop(rest[0])
        elif what == "punch":
            data, (offset, size) = by_fd[rest[0]], rest[1:]
            data[offset : offset + size] = bytes(len(data[offset : offset + size]))
        elif what == "write":
            fd, offset, content = rest
            later = log[number:cut]
            safe = any(line[:2] == ("sync", fd) for line in later)
            keep = 1.0 if safe else rng.choice((0.0, 0.5, 0.9, 1.0))
            data = by_fd[fd]
            data.extend(bytes(max(0, offset + len(content) - len(data))))
            for at in range(0, len(content), SECTOR):
                if rng.random() < keep:
                    part = content[at : at + SECTOR]
                    data[offset + at : offset + at + len(part)] = part
    for name, data in files.items():
        (directory / name).write_bytes(data)
