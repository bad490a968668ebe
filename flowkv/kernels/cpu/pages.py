"""The numba twin: what all of it shares, moves of whole pages, and merges.

The functions here turn tensors into addresses (no views, so that a call costs microseconds), decide
whether the work is worth more than one thread, and call the kernels of `cpu.move` and `cpu.merge`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from flowkv.core.errors import GeometryError
from flowkv.core.layout import GRANULE_BYTES
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.pool import slices, spread

LIKE = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
"""Under which type the elements of a dtype travel through numba; see `cpu.bits`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LEAST_ELEMENTS = 1 << 18
"""Elements of K and V that are worth a thread: 50 to 100 us, far more than waking one."""
LEAST_BYTES = 1 << 20
"""Bytes moved that are worth a thread."""
HUGE_BYTES = 1 << 22
"""From this size on numpy's arrays want huge pages."""
_HERE = torch.from_numpy(np.empty(0, np.uint8))
"""On the CPU, as what it makes is, whatever torch's default device and patches of torch say."""


def address(x: torch.Tensor) -> int:
    """Where a tensor's elements begin, for compiled code, which reads and writes there unasked.

    Raises:
        GeometryError: The tensor is not in this process's memory.
    """
    if not x.is_cpu:
        raise GeometryError(
            f"a tensor on {x.device} was given to a kernel of the CPU",
            "Pass tensors on the CPU, and none made under torch.device(...) or set_default_device",
        )
    return x.data_ptr()


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if the elements of its last dimension are neighbours, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fresh(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor, aligned to 64 bytes.

    Large ones come from numpy, which asks Linux for huge pages: their first writes fault once in
    2 MiB instead of 4 KiB, which makes filling a new tensor nearly twice as fast.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < HUGE_BYTES:
        return _HERE.new_empty(shape, dtype=dtype)
    memory = np.empty(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + n_bytes]).view(dtype).view(shape)


def copy_pages(
    arena: torch.Tensor, source: torch.Tensor, target: torch.Tensor, granules: int
) -> None:
    """Copy pages within the arena; see `movement.copy_pages`."""
    _move((arena, target.contiguous()), (arena, source.contiguous()), granules)


def gather_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    granules: int,
    out: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy pages of the arena, or a part of each, side by side; see `movement.gather_pages`."""
    first, count = part or (0, granules)
    _move((out, None), (arena[GRANULE_BYTES * first :], source.contiguous()), count)


def scatter_pages(
    arena: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    data: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy lines of a staging tensor to pages, or a part of each; see `movement.scatter_pages`."""
    first, count = part or (0, granules)
    _move((arena[GRANULE_BYTES * first :], target.contiguous()), (data, None), count)


_Side = tuple[torch.Tensor, torch.Tensor | None]


def _move(target: _Side, source: _Side, granules: int) -> None:
    places = target[1] if target[1] is not None else source[1]
    count, page = 0 if places is None else places.shape[0], granules * GRANULE_BYTES
    four = (target[0], target[1], source[0], source[1])
    addresses = [0 if x is None else address(x) for x in four]
    if count:
        run(entries.move_pages, count * page, np.array([*addresses, count, page], np.int64))


def run(kernel, n_bytes: int, *operands: object) -> None:
    """Call `kernel(*operands, part, parts)` for all parts, as many as moving `n_bytes` is worth."""
    parts = slices(n_bytes, LEAST_BYTES)
    if parts == 1:
        kernel(*operands, 0, 1)
    else:
        spread(lambda i: kernel(*operands, i, parts), parts)


def checksum(words: torch.Tensor, block_words: int) -> torch.Tensor:
    """Two sums over each block; see `sums.checksum`."""
    sums = words.new_empty(-(-len(words) // block_words), 2, dtype=torch.int64)
    a = np.array([address(words), len(words), block_words, address(sums)], np.int64)
    run(entries.checksum, 8 * len(words), a)
    return sums


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of tokens; see `dispatch.merge`."""
    parts = [(o.contiguous(), lse.float().contiguous()) for o, lse in parts]
    first = parts[0][0]
    o, lse = torch.empty_like(first), first.new_empty(first.shape[:2], dtype=torch.float32)
    addresses = [(address(o), address(lse)) for o, lse in [*parts, (o, lse)]]
    a = np.array([(lse.numel(), first.shape[2]), *addresses], np.int64)
    count, like = slices(first.numel() * len(parts), LEAST_ELEMENTS), LIKE[first.dtype]
    if count == 1:
        entries.merge(a, like, 0, 1)
    else:
        spread(lambda i: entries.merge(a, like, i, count), count)
    return o, lse
