"""An engine, memory for it, and what its completions say."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.inside import (
    OPERATION,
    READ,
    SYNC,
    WRITE,
    Arena,
    ArenaSlot,
    IOEngine,
    ThreadsEngine,
    UringEngine,
)
from tests.tiers.files_engine import FilesEngine

BLOCK = 4096
ARENA_BYTES = 8 << 20
WAIT_S = 60.0

MAKERS: dict[str, Callable[[Arena], IOEngine]] = {
    "files": lambda arena: FilesEngine(),
    "buffered": lambda arena: ThreadsEngine(direct=False, threads=4),
    "threads": lambda arena: ThreadsEngine(threads=4),
    "io_uring": lambda arena: UringEngine(depth=8),
    "registered": lambda arena: UringEngine(depth=8, arena=arena),
}
"""All engines; "registered" is io_uring with its memory registered, where that is allowed."""


class Rig:
    """Runs operations on one engine and matches their completions."""

    def __init__(self, engine: IOEngine, arena: Arena) -> None:
        self.engine, self.arena = engine, arena
        self.tags = itertools.count(1 << 63)  # all 64 bits travel
        self.fds: list[int] = []
        self.owed = 0  # operations whose completion was not taken yet

    def open(self, path: Path, *, write: bool = True) -> int:
        fd = self.engine.open(str(path), write=write)
        self.fds.append(fd)
        return fd

    def submit(self, *operations: tuple[int, int, int, int, int]) -> list[int]:
        """Submits (op, fd, offset, address, length); returns the tags."""
        tags = [next(self.tags) for _ in operations]
        rows = [(*operation, tag) for operation, tag in zip(operations, tags, strict=True)]
        self.owed += len(rows)
        self.engine.submit(np.array(rows, OPERATION))
        return tags

    def wait(self, timeout_s: float = 0.0) -> list[tuple[int, int]]:
        """Completions that are there: tags and results."""
        rows = self.engine.wait(timeout_s).tolist()
        self.owed -= len(rows)
        return rows

    def finish(self, count: int, within_s: float = WAIT_S) -> dict[int, int]:
        """Waits for so many completions: results by tag."""
        end_s, results = time.monotonic() + within_s, {}
        while len(results) < count:
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"{count - len(results)} operations never completed"
            for tag, result in self.wait(left_s):
                assert tag not in results, "completed twice"
                results[tag] = result
        return results

    def run(self, *operations: tuple[int, int, int, int, int]) -> list[int]:
        """Results in the order of the operations."""
        tags = self.submit(*operations)
        results = self.finish(len(tags))
        assert set(results) == set(tags)
        return [results[tag] for tag in tags]

    def write(self, fd: int, offset: int, data: bytes) -> int:
        with self.slot(len(data)) as slot:
            slot.view[:] = data
            return self.run((WRITE, fd, offset, slot.address, len(data)))[0]

    def read(self, fd: int, offset: int, length: int) -> tuple[int, bytes]:
        with self.slot(length) as slot:
            slot.view[:] = b"\xee" * length
            (result,) = self.run((READ, fd, offset, slot.address, length))
            return result, bytes(slot.view)

    def sync(self, fd: int) -> int:
        return self.run((SYNC, fd, 0, 0, 0))[0]

    @contextmanager
    def slot(self, n_bytes: int) -> Iterator[ArenaSlot]:
        slot = self.arena.acquire(n_bytes)
        assert slot is not None
        yield slot
        self.arena.give_back(slot)


@contextmanager
def rigged(name: str) -> Iterator[Rig]:
    """A rig for one engine; skips where this machine forbids io_uring."""
    arena = Arena(ARENA_BYTES)
    try:
        engine = MAKERS[name](arena)
    except OSError as error:
        arena.close()
        pytest.skip(f"io_uring is not allowed here: {error}", allow_module_level=True)
    rig = Rig(engine, arena)
    try:
        yield rig
    finally:
        assert engine.close()
        for fd in rig.fds:
            os.close(fd)
        arena.close()
