"""The numba twin: what all of it shares, moves of whole pages, and merges.

The functions here turn tensors into addresses (no views, so that a call costs microseconds), decide
whether the work is worth more than one thread, and call the kernels of `cpu.bits` and `cpu.attend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from flowkv.core.errors import ConfigError, GeometryError
from flowkv.core.geometry import CODECS, GRANULE_BYTES, ITEMSIZE, PageLayout
from flowkv.kernels.cpu import entries
from flowkv.kernels.cpu.pool import slices, spread
from flowkv.kernels.operands import Pages, Ragged, Rotary

LIKE = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
"""Under which type the elements of a dtype travel through numba; see `cpu.bits`."""
TOP = {dtype: np.float32(torch.finfo(dtype).max) for dtype in LIKE}
"""Where raw elements saturate. Of the three, decoded elements can only exceed float16."""
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
    """Copy pages within the arena; see `dispatch.copy_pages`."""
    _move((arena, target.contiguous()), (arena, source.contiguous()), granules)


def gather_pages(
    arena: torch.Tensor,
    source: torch.Tensor,
    granules: int,
    out: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy pages of the arena, or a part of each, side by side; see `dispatch.gather_pages`."""
    first, count = part or (0, granules)
    _move((out, None), (arena[GRANULE_BYTES * first :], source.contiguous()), count)


def scatter_pages(
    arena: torch.Tensor,
    target: torch.Tensor,
    granules: int,
    data: torch.Tensor,
    part: tuple[int, int] | None = None,
) -> None:
    """Copy lines of a staging tensor to pages, or a part of each; see `dispatch.scatter_pages`."""
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
    """Two sums over each block; see `dispatch.checksum`."""
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


# The numba twin of `append`: packed new tokens into open pages, as they are or rotated (RoPE).


def append(
    k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged, rope: Rotary | None = None
) -> None:
    """Write new tokens into the open pages; see `dispatch.append`."""
    arena, layout, layer, _ = pages
    dtype = DTYPES[layout.dtype]
    v = dense_rows(v if v.dtype is dtype else v.to(dtype))
    if rope is None:
        k = dense_rows(k if k.dtype is dtype else k.to(dtype))
    else:  # rounded once, after the rotation
        k = dense_rows(k if k.dtype is dtype else k.float())
    a = append_operands(layout, batch)
    a[0], a[1] = address(k), address(v)
    a[2] = address(arena) + layer * layout.stripe_stride_bytes
    k_item, item, k_strides, v_strides = k.itemsize, dtype.itemsize, k.stride(), v.stride()
    a[15], a[16] = k_strides[0] * k_item, k_strides[1] * k_item
    a[17], a[18] = v_strides[0] * item, v_strides[1] * item
    n_bytes = k.shape[0] * layout.kv_heads * int(a[10] + a[11])
    if rope is None:
        run(entries.append, n_bytes, a)
        return
    turn, likes = rotary_operands(rope, item), (LIKE[k.dtype], LIKE[dtype])
    run(entries.append_rotary, n_bytes, a, turn, likes)


def append_operands(layout: PageLayout, batch: Ragged) -> np.ndarray:
    """The operands that all layers of a step share; the others are left 0."""
    item = DTYPES[layout.dtype].itemsize
    a = np.zeros(19, np.int64)
    a[3:15] = (
        address(batch.table),
        address(batch.rows),
        address(batch.lengths),
        address(batch.starts),
        batch.rows.shape[0],
        layout.kv_heads,
        layout.page_size,
        layout.head_dim * item,
        layout.stored_value_dim * item,
        layout.run_bytes,
        layout.v_offset_bytes,
        batch.table.stride(0),
    )
    return a


def rotary_operands(rope: Rotary, item_bytes: int) -> np.ndarray:
    """The addresses and sizes of `rope` as `cpu.bits` reads them."""
    return np.array(
        [
            address(rope.cos),
            address(rope.sin),
            rope.cos.shape[1],
            rope.start,
            rope.interleaved,
            item_bytes,
        ],
        np.int64,
    )


# The numba twins of the operations that remake pages: `drop_tokens` and `reposition`.


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Make pages of chosen tokens of others; see `dispatch.drop_tokens`."""
    source, target, keep = source.contiguous(), target.contiguous(), keep.contiguous()
    kept, item = keep.shape[2], ITEMSIZE[layout.dtype]
    k_bytes, v_bytes = layout.head_dim * item, layout.stored_value_dim * item
    a = np.array(
        [
            address(arena),
            address(source),
            address(target),
            address(keep),
            layout.layers,
            layout.kv_heads,
            layout.page_size,
            kept,
            target.shape[0],
            k_bytes,
            v_bytes,
            layout.run_bytes,
            layout.v_offset_bytes,
            layout.stripe_stride_bytes,
        ],
        np.int64,
    )
    run(entries.drop_tokens, keep.numel() * (k_bytes + v_bytes), a)


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    layer: int | None = None,
) -> None:
    """Rotate the keys of pages in place; see `dispatch.reposition`."""
    pages, turns = pages.contiguous(), turns.contiguous()
    item, layers = ITEMSIZE[layout.dtype], layout.layers if layer is None else 1
    a = np.array(
        [
            address(arena) + (layer or 0) * layout.stripe_stride_bytes,
            address(pages),
            address(turns),
            pages.shape[0],
            layers,
            layout.kv_heads,
            layout.page_size,
            layout.head_dim * item,
            layout.run_bytes,
            layout.stripe_stride_bytes,
        ],
        np.int64,
    )
    turn, like = rotary_operands(rope, item), LIKE[DTYPES[layout.dtype]]
    n_bytes = 4 * pages.shape[0] * layers * layout.kv_heads * layout.page_size * rope.cos.shape[1]
    run(entries.reposition, item * n_bytes, a, turn, like)


# The numba twin of the codecs: the layers of pages are dealt out.


def transcode(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    old: PageLayout,
    new: PageLayout,
) -> torch.Tensor:
    """Write full pages once more in another codec; see `dispatch.transcode`."""
    if old.dtype not in DTYPES:
        raise ConfigError(f"pages of {old.dtype} have no numba codec", "Pass backend='reference'")
    count, dtype = len(source), DTYPES[old.dtype]
    status = arena.new_empty(count, old.layers, dtype=torch.int32)
    source, target = source.contiguous(), target.contiguous()
    a = np.array(
        [
            *(address(x) for x in (arena, source, target, status)),
            *(count, old.layers, old.kv_heads, old.page_size, old.head_dim, old.value_dim),
            *_offsets(old),
            *_offsets(new),
        ],
        np.int64,
    )
    run(entries.recode, count * old.page_bytes, a, (LIKE[dtype], TOP[dtype]))
    return status


def _offsets(layout: PageLayout) -> tuple[int, ...]:
    return (
        CODECS.index(layout.codec),
        layout.stripe_stride_bytes,
        layout.run_bytes,
        layout.v_offset_bytes,
        layout.k_scale_offset_bytes,
        layout.v_scale_offset_bytes,
    )
