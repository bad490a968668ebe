"""The `Engine` protocol: reads and writes of files in batches, completed later.

    submit(operations) -> ... -> wait(timeout_s) -> completions

Three engines implement it, and a tier takes the first that this machine allows (`open_engine`):
io_uring, positional system calls on threads with O_DIRECT, and the same through the page cache. A
fourth, over `FileIO`, runs in the caller's thread, so that tests and the simulator decide what
fails, what is torn, and when.

Memory named by an operation belongs to the engine until its completion is reported, whatever
happens meanwhile: neither a deadline nor `cancel` makes it free before (DESIGN D10).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

READ, WRITE, SYNC = 0, 1, 2

OPERATION = np.dtype(
    [
        ("op", "<u4"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u8"),
        ("tag", "<u8"),
    ]
)
"""One operation: `READ` or `WRITE` `length` bytes at `offset` of `fd`, from or to memory at
`address`; or `SYNC` (fdatasync). With a direct file all three are multiples of `ALIGNMENT`. `tag`
names it in its completion, and is unique among the operations in flight."""

COMPLETION = np.dtype([("tag", "<u8"), ("result", "<i8")])
"""One completion: bytes moved in all (short reads and writes are continued; fewer than `length`
only where a file ends), or a negative errno."""

ALIGNMENT = 4096

Operations = NDArray[Any]  # of dtype OPERATION
Completions = NDArray[Any]  # of dtype COMPLETION


class Engine(Protocol):
    """Moves bytes between memory and files. Thread-safe.

    Attributes:
        name: "io_uring", "threads", "buffered", or "files".
        direct: Whether files that it opens bypass the page cache.
        depth: Operations that it has the system work on at a time; more may be submitted.
    """

    name: str
    direct: bool
    depth: int

    def open(self, path: str, *, write: bool) -> int:
        """Opens a regular file for this engine; as `FileIO.open`, with O_DIRECT where `direct`.

        Raises:
            OSError: It cannot be opened.
        """
        ...

    def submit(self, operations: Operations) -> None:
        """Starts operations; the array may be reused at once.

        Raises:
            StateError: The engine is closed.
        """
        ...

    def wait(self, timeout_s: float = 0.0, *, least: int = 1) -> Completions:
        """Completions that are there; waits up to `timeout_s` for the first `least` of them."""
        ...

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Asks for an end of operations; each still completes, with -ECANCELED if that worked."""
        ...

    def in_flight(self) -> int:
        """Operations submitted and not yet reported."""
        ...

    def close(self) -> bool:
        """Ends what is in flight; False if something never ended: its memory must never be reused.

        Safe to call again. Files stay open: they belong to whoever asked for them.
        """
        ...
