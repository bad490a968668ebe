"""Stores of a prefix's keys and values before a restore: host memory, or a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from flowkv.core.errors import ConfigError, StoreError
from flowkv.policy.restore import RestoreLoad

ALIGNED_BYTES = 4096

Mark = Callable[[], None]
"""Returns when what was copied so far has left its buffer."""


class Store(Protocol):
    """One request's prefix, in one form.

    Attributes:
        cell_bytes: Of one token of one layer, as they travel.
    """

    cell_bytes: float

    def fill(self, kv: torch.Tensor, op: RestoreLoad, mark: Callable[[], Mark]) -> None:
        """Copies an op's cells, or gives their copies to the stream that is current.

        Args:
            kv: `[L, >= N, 2, Hk, D]`, what is restored.
            op: Which cells.
            mark: Called when copies were given out, for buffers that are used again.
        """
        ...


class HostStore:
    """Host memory, from which copies go straight away.

    Args:
        kv: `[L, N, 2, Hk, D]` on any device.
        pin: Whether a GPU is to copy from it without the processor.

    Attributes:
        kv: The same, here.
        cell_bytes: See `Store`.
    """

    def __init__(self, kv: torch.Tensor, *, pin: bool = False) -> None:
        self.kv = torch.empty(kv.shape, dtype=kv.dtype, pin_memory=pin)
        self.kv.copy_(kv)
        self.cell_bytes = float(self.kv[0, 0].nbytes)

    def fill(self, kv: torch.Tensor, op: RestoreLoad, mark: Callable[[], Mark]) -> None:
        where = slice(*op.tokens)
        for layer in range(*op.layers):  # tokens of a layer lie side by side: one copy each
            kv[layer, where].copy_(self.kv[layer, where], non_blocking=True)


class FileStore:
    """A file, read past the page cache where the file system allows, through a ring of buffers.

    Args:
        path: It is written, and removed by `close`.
        kv: `[L, N, 2, Hk, D]` on any device.
        ring: Buffers on the way.
        unit: Tokens at whose multiples spans begin and end.

    Attributes:
        cell_bytes: See `Store`.
        direct: Whether reads go past the page cache; if not, figures say nothing about the disk.

    Raises:
        ConfigError: The buffers are too small.
        StoreError: The file cannot be written.
    """

    def __init__(self, path: Path, kv: torch.Tensor, ring: Ring, unit: int) -> None:
        self.path, self._ring, self._shape, self._dtype = path, ring, kv.shape[2:], kv.dtype
        self._tokens, self._cell_bytes, self._unit = kv.shape[1], kv[0, 0].nbytes, unit
        self.cell_bytes = float(self._cell_bytes)
        if ring.n_bytes < unit * self._cell_bytes:
            raise ConfigError(
                f"{unit} tokens of {self._cell_bytes} bytes do not fit a buffer of {ring.n_bytes}",
                "Give the ring larger buffers",
            )
        try:
            with path.open("wb") as file:
                for layer in kv:
                    file.write(layer.cpu().contiguous().view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
            self._fd, self.direct = self._open(kv[0].nbytes)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror or error})",
                "Name a folder with room for the prefix",
            ) from error

    def fill(self, kv: torch.Tensor, op: RestoreLoad, mark: Callable[[], Mark]) -> None:
        most = self._ring.n_bytes // (self._unit * self._cell_bytes) * self._unit
        for layer in range(*op.layers):
            for first in range(op.tokens.first, op.tokens.stop, most):
                stop = min(op.tokens.stop, first + most)
                buffer = self._ring.take((stop - first) * self._cell_bytes)
                self._read(buffer, (layer * self._tokens + first) * self._cell_bytes)
                rows = buffer.view(self._dtype).view(stop - first, *self._shape)
                kv[layer, first:stop].copy_(rows, non_blocking=True)
                self._ring.given(mark())

    def close(self) -> None:
        """Removes the file."""
        os.close(self._fd)
        self.path.unlink()

    def _open(self, layer_bytes: int) -> tuple[int, bool]:
        direct = getattr(os, "O_DIRECT", 0)
        step = self._unit * self._cell_bytes
        if direct and layer_bytes % ALIGNED_BYTES == 0 and step % ALIGNED_BYTES == 0:
            try:
                return os.open(self.path, os.O_RDONLY | direct), True
            except OSError:  # tmpfs, among others
                pass
        return os.open(self.path, os.O_RDONLY), False

    def _read(self, buffer: torch.Tensor, offset: int) -> None:
        room, done = buffer.numpy().data, 0
        while done < len(room):
            count = os.preadv(self._fd, [room[done:]], offset + done)
            if not count:
                raise StoreError(f"{self.path} ends early", "Write it again")
            done += count


class Ring:
    """Buffers that are used in turn.

    Args:
        n_bytes: Of each.
        count: How many.
        pin: Whether a GPU is to copy from them without the processor.
    """

    def __init__(self, n_bytes: int, count: int, *, pin: bool = False) -> None:
        size = n_bytes + ALIGNED_BYTES  # there is an aligned place in it, for direct reads
        self.n_bytes = n_bytes
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _ in range(count)]
        self._busy: list[Mark | None] = [None] * count
        self._next = 0

    def take(self, n_bytes: int) -> torch.Tensor:
        """The next buffer, once nobody copies from it any more."""
        buffer, left = self._buffers[self._next], self._busy[self._next]
        if left is not None:
            left()
        start = -buffer.data_ptr() % ALIGNED_BYTES
        return buffer[start : start + n_bytes]

    def given(self, mark: Mark) -> None:
        """What was taken last is being copied, until `mark` returns."""
        self._busy[self._next] = mark
        self._next = (self._next + 1) % len(self._buffers)
