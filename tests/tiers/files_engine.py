"""An engine over `FileIO`: in the caller's thread, so that a test decides what fails and when."""

from __future__ import annotations

import ctypes
import errno
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.tiers.disk import DiskTier
from tests.inside import READ, SYNC, WRITE, FileIO, Operations, Reports, StateError
from tests.inside import engine_Completions as Completions


class FilesEngine:
    """An `IOEngine` that has done everything when `submit` returns, in the order given.

    What a `FileIO` raises becomes a negative errno if it is an `OSError`, and leaves `submit`
    otherwise: a simulated power loss ends the batch where it struck.

    Args:
        files: File operations; default the system's own.
    """

    name = "files"
    direct = False
    depth = 1

    def __init__(self, files: FileIO | None = None) -> None:
        self.files = files or FileIO()
        self._reports, self._one, self._closed = Reports(), threading.Lock(), False

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file through `FileIO`.

        Raises:
            OSError: It cannot be opened.
        """
        return self.files.open(path, write=write)

    def submit(self, operations: Operations) -> None:
        """Does the operations, one after the other.

        Raises:
            StateError: The engine is closed.
        """
        if self._closed:
            raise StateError("the engine is closed", "Open another one")
        for op, fd, offset, address, length, tag in operations.tolist():
            with self._one:
                result = self._do(op, fd, offset, address, length)
            self._reports.post([(tag, result)])

    def wait(self, timeout_s: float = 0.0) -> Completions:
        """Completions that are there; waits up to `timeout_s` for the first one."""
        return self._reports.reap(timeout_s)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Comes too late: everything submitted is done."""

    def close(self) -> bool:
        """Takes no more operations; nothing can be under way."""
        self._closed = True
        self._reports.close()
        return True

    def _do(self, op: int, fd: int, offset: int, address: int, length: int) -> int:
        try:
            if op == SYNC:
                self.files.sync(fd)
                return 0
            if op not in (READ, WRITE):
                return -errno.EINVAL
            return self._move(op, fd, offset, memory(address, length))
        except OSError as error:
            return -(error.errno or errno.EIO)

    def _move(self, op: int, fd: int, offset: int, view: memoryview) -> int:
        done = 0
        while done < len(view):
            rest = view[done:]
            if op == READ:
                count = self.files.read(fd, [rest], offset + done)
                if count <= 0:
                    break
            else:
                count = self.files.write(fd, [rest], offset + done)
                if count <= 0:
                    return -errno.ENOSPC
            done += count
        return done


def memory(address: int, n_bytes: int) -> memoryview:
    """The bytes at an address, which whoever named it keeps alive."""
    return memoryview((ctypes.c_ubyte * n_bytes).from_address(address)).cast("B")


def tier_over(files: FileIO, directory: Any, capacity_bytes: int, **options: Any) -> DiskTier:
    """A disk tier all of whose operations go through `files`."""
    return DiskTier(directory, capacity_bytes, files=files, engine=FilesEngine(files), **options)
