"""Files that fail on purpose."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from tests.inside import Buffer, FileIO

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

    def replace(self, source: str, target: str, *, durable: bool = True) -> None:
        self._due("replace")
        super().replace(source, target, durable=durable)


class NeverFiles(FileIO):
    """Fails every operation from the one of a number on, but those that only close or compare."""

    def __init__(self, code: int) -> None:
        self.code, self.left = code, 1 << 40

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("code", "left", "close", "unlock", "same") or name.startswith("_"):
            return found
        self.left -= 1
        if self.left < 0:
            raise OSError(self.code, os.strerror(self.code))
        return found


class Solid(FileIO):
    """A file system without holes."""

    def punch(self, fd: int, offset: int, size: int) -> None:
        raise OSError(95, "Operation not supported")


class FastFiles(FileIO):
    """Skips what only a device can confirm."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass
