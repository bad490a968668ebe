"""Checks before a kernel reads memory: cheap ones always, page by page while debugging.

Kernels address memory through page tables and check nothing themselves. These functions look at
dtypes, devices and shapes, in about a microsecond; inside `checking()` every granule that a call
may touch is compared with the arena as well, which reads the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from flowkv.core.errors import GeometryError
from flowkv.core.geometry import CODEC_SHIFT, CODECS, GRANULE_BYTES, GRANULE_MASK, PageLayout
from flowkv.kernels.operands import Pages, Ragged, Rotary, Scoring

_depth = 0


@contextmanager
def checking() -> Iterator[None]:
    """Check page tables against the arena in every kernel call made inside (all threads)."""
    global _depth  # noqa: PLW0603 - a counter, so that nested uses end in the right order
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_checking() -> bool:
    """Whether the values of tables and lists are to be compared with what they point into."""
    return _depth > 0


def _need(condition: bool, problem: str, remedy: str) -> None:
    if not condition:
        raise GeometryError(problem, remedy)


def check_packed(name: str, x: torch.Tensor, pages: Pages, heads: int, dim: int) -> None:
    """Check a packed `[N, heads, dim]` tensor against the arena's device.

    Raises:
        GeometryError: Another shape or device.
    """
    if x.dim() != 3 or x.shape[1] != heads or x.shape[2] != dim:
        raise GeometryError(
            f"{name} has shape {tuple(x.shape)}",
            f"Pass all rows' new tokens packed as [N, {heads}, {dim}]",
        )
    if x.device != pages.arena.device:
        raise GeometryError(
            f"{name} lies on {x.device}, its pages on {pages.arena.device}",
            "Give each device's layers a group, and a pool, of their own",
        )


def check_arena(arena: torch.Tensor) -> None:
    """Check that an arena is contiguous bytes, a whole number of granules.

    Raises:
        GeometryError: It is not.
    """
    if (
        arena.dtype is not torch.uint8
        or arena.dim() != 1
        or arena.numel() % GRANULE_BYTES
        or not arena.is_contiguous()
    ):
        raise GeometryError(
            f"the arena is {arena.dtype} {tuple(arena.shape)}",
            "Allocate one contiguous uint8 tensor of a whole number of 4096-byte granules",
        )


_PASSED: list[tuple[Ragged | None, int, int]] = [(None, 0, -1)]


def check_batch(pages: Pages, batch: Ragged, tokens: int | None, writes: bool = False) -> None:
    """Check a batch against the pages and, if given, the number of packed tokens.

    Raises:
        GeometryError: A wrong dtype, device, shape, or (while `checking`) a page outside the arena.
    """
    arena, layout, layer, _ = pages
    if not 0 <= layer < layout.layers:
        raise GeometryError(
            f"layer {layer} of a group of {layout.layers}",
            "Count layers within their group, from 0",
        )
    # A step's batch is checked by its first layer; the others, which are most calls, compare names.
    passed, address, total = _PASSED[0]
    if batch is passed and arena.data_ptr() == address and not _depth:
        _check_total(tokens, total)
        return
    check_arena(arena)
    count = batch.rows.shape[0]
    if batch.lengths.shape[0] != count or batch.starts.shape[0] != count + 1:
        raise GeometryError(
            f"{count} rows, {batch.lengths.shape[0]} lengths, {batch.starts.shape[0]} starts",
            "Give every row one length, and starts one element more",
        )
    for name in ("table", "rows", "lengths", "starts"):
        x = getattr(batch, name)
        if x.dtype is not torch.int32 or x.device != arena.device or x.stride(-1) != 1:
            raise GeometryError(
                f"{name} is {x.dtype} on {x.device} with strides {x.stride()}",
                f"Make it torch.int32 on {arena.device}, neighbours in its last dimension",
            )
    if _depth:
        _check_pages(pages, batch, tokens, writes)
    total = int(batch.starts[-1]) if batch.starts.is_cpu else -1  # nobody waits for a GPU here
    _check_total(tokens, total)
    _PASSED[0] = batch, arena.data_ptr(), total


def _check_total(tokens: int | None, total: int) -> None:
    if tokens is not None and tokens < total:  # more are of no row, as in a captured graph
        raise GeometryError(
            f"{tokens} packed tokens for a batch of {total}",
            "Pass the new tokens of all rows of the step, packed",
        )


def check_queries(q: torch.Tensor, pages: Pages, batch: Ragged) -> None:
    """Check packed queries against the pages and the batch.

    Raises:
        GeometryError: A wrong shape, dtype or device, or heads that do not divide.
    """
    layout, heads = pages.layout, q.shape[1] if q.dim() == 3 else 0
    check_packed("q", q, pages, heads, layout.head_dim)
    check_batch(pages, batch, q.shape[0])
    if heads % layout.kv_heads:
        raise GeometryError(
            f"{heads} query heads over {layout.kv_heads} KV heads",
            "Query heads must be a multiple of KV heads",
        )


def check_scoring(how: Scoring, q: torch.Tensor, pages: Pages, batch: Ragged) -> None:
    """Check the switches of an attention call.

    Raises:
        GeometryError: A wrong shape, dtype or device, or switches that exclude each other.
    """
    heads = q.shape[1]
    for name, logits in (("sinks", how.sinks), ("alibi", how.alibi)):
        if logits is not None and (logits.shape != (heads,) or logits.device != q.device):
            raise GeometryError(
                f"{name} are {tuple(logits.shape)} on {logits.device}",
                f"Pass one number per query head, [{heads}] on {q.device}",
            )
    if (how.window is not None and how.window < 1) or (
        how.softcap is not None and how.softcap <= 0
    ):
        raise GeometryError(
            f"window={how.window}, softcap={how.softcap}",
            "Pass positive values, or None for neither",
        )
    if how.tree is not None:
        _need(
            how.tree.dtype is torch.int64
            and how.tree.shape == q.shape[:1]
            and how.tree.device == q.device
            and batch.most_new <= 64,
            f"tree is {how.tree.dtype} {tuple(how.tree.shape)}, {batch.most_new} new tokens",
            f"Make it torch.int64 [{q.shape[0]}] on {q.device}, for at most 64 new tokens a row",
        )
    if how.mass is not None:
        layout, mass = pages.layout, how.mass
        least = batch.rows.shape[0], -(-batch.most_length // layout.page_size), layout.kv_heads
        _need(
            mass.dtype is torch.float32
            and mass.dim() == 3
            and mass.is_contiguous()
            and mass.device == q.device
            and mass.shape[::2] == least[::2]
            and mass.shape[1] >= least[1],
            f"mass is {mass.dtype} {tuple(mass.shape)} on {mass.device}",
            f"Make it contiguous float32 {list(least)} on {q.device}",
        )
    _need(
        how.causal or (how.window is None and how.tree is None and how.alibi is None),
        "cross-attention with a window, a tree or ALiBi",
        "These compare positions, which queries from elsewhere do not have: leave them out",
    )


def check_granules(arena: torch.Tensor, granules: int, **lists: torch.Tensor) -> None:
    """Check lists of starting granules of pages of `granules` granules.

    Raises:
        GeometryError: A wrong dtype or device, or (while `checking`) a page outside the arena.
    """
    check_arena(arena)
    for name, x in lists.items():
        if x.dtype is not torch.int32 or x.dim() != 1 or x.device != arena.device:
            raise GeometryError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}",
                f"Make it a torch.int32 vector on {arena.device}",
            )
        if _depth and x.numel():
            last = arena.numel() // GRANULE_BYTES - granules
            low, high = int(x.min()), int(x.max())
            _need(
                low >= 0 and high <= last,
                f"{name} holds granules {low} to {high}, pages begin at 0 to {last}",
                "Take granules from the pool that owns this arena",
            )


def check_staging(name: str, x: torch.Tensor, arena: torch.Tensor, n: int, granules: int) -> None:
    """Check a staging tensor, uint8 `[n, granules * 4096]` contiguous, for its arena.

    It lies on the arena's device, or in pinned host memory, which a GPU reaches too.

    Raises:
        GeometryError: It is another shape, dtype, layout or device.
    """
    width = granules * GRANULE_BYTES
    if (
        x.dtype is not torch.uint8
        or x.shape != (n, width)
        or not x.is_contiguous()
        or (x.device != arena.device and not (arena.is_cuda and x.is_pinned()))
    ):
        raise GeometryError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}",
            f"Make it contiguous torch.uint8 [{n}, {width}] on {arena.device} or in pinned memory",
        )


def _check_pages(pages: Pages, batch: Ragged, tokens: int | None, writes: bool) -> None:
    layout = pages.layout
    end = pages.arena.numel() // GRANULE_BYTES
    last = {CODECS.index(x.codec): end - x.granules for x in (layout, *pages.sealed)}
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    news = [b - a for a, b in itertools.pairwise(starts)]
    _need(
        starts[0] == 0 and min(news, default=0) >= 0 and tokens in (None, starts[-1]),
        f"starts are {starts} for {tokens} packed tokens",
        "Let starts rise from 0 to the number of new tokens",
    )
    _need(
        batch.most_new >= max(news, default=0) and batch.most_length >= max(lengths, default=0),
        f"most_new={batch.most_new}, most_length={batch.most_length} are exceeded",
        "Plan the step again after a row has grown",
    )
    for row, length, new in zip(batch.rows.tolist(), lengths, news, strict=True):
        _need(
            length <= batch.table.shape[1] * layout.page_size and (new <= length or not writes),
            f"a row of {length} tokens, {new} of them new, in {batch.table.shape[1]} pages",
            "Give the row a page for every token before the step",
        )
        _need(
            0 <= row < batch.table.shape[0],
            f"row {row} of a table of {batch.table.shape[0]} lines",
            "Pass the line of the table that belongs to the row",
        )
        line = batch.table[row, : -(-length // layout.page_size)].tolist()
        written = line[(length - new) // layout.page_size :] if writes and new else []
        _need(
            all(page == -1 or 0 <= page & GRANULE_MASK <= _last(page, last) for page in line)
            and all(page >> CODEC_SHIFT == 0 for page in written),
            f"row {row} names pages {line}, which begin at granules 0 to {last} by codec",
            "Allocate the row's pages from the pool that owns this arena; open ones are raw",
        )


def _last(page: int, last: dict[int, int]) -> int:
    return last.get(page >> CODEC_SHIFT, -1)


# Checks of rotations and of lists of tokens, before kernels read them; see `bounds`.


def check_rotary(rope: Rotary, layout: PageLayout, device: torch.device, lines: int) -> None:
    """Check rotations of keys of `layout`, of which at least `lines` will be read.

    Raises:
        GeometryError: A wrong shape, dtype or device, or too few lines.
    """
    cos, sin = rope.cos, rope.sin
    for name, x in (("cos", cos), ("sin", sin)):
        if (
            x.dtype is not torch.float32
            or x.dim() != 2
            or x.shape != cos.shape
            or not x.is_contiguous()
            or x.device != device
        ):
            raise GeometryError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}",
                f"Make cos and sin contiguous torch.float32 [positions, R/2] on {device}",
            )
    if cos.shape[0] < lines:
        raise GeometryError(
            f"{cos.shape[0]} lines of rotations for {lines} positions",
            "Make cos and sin as long as the longest row may become",
        )
    if rope.start < 0 or rope.start + 2 * cos.shape[1] > layout.head_dim or not cos.shape[1]:
        raise GeometryError(
            f"{2 * cos.shape[1]} rotated dims from {rope.start} on, of {layout.head_dim}",
            "Pass cos and sin once per pair, [positions, R/2], for R rotated dims within a head",
        )
    if layout.latent and rope.start < layout.value_dim:
        raise GeometryError(
            f"rotated dims from {rope.start} on, of which {layout.value_dim} are the value",
            f"Rotate what stands behind a latent: start={layout.value_dim}",
        )


def check_lines(
    name: str, x: torch.Tensor, shape: Sequence[int], device: torch.device, low: int, end: int
) -> None:
    """Check a list of numbers from `low` to `end` - 1; their values only while `checking`.

    Raises:
        GeometryError: A wrong shape, dtype or device, or (while `checking`) a number outside.
    """
    if x.dtype is not torch.int32 or x.shape != tuple(shape) or x.device != device:
        raise GeometryError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}",
            f"Make it torch.int32 {list(shape)} on {device}",
        )
    if is_checking() and x.numel():
        least, most = int(x.min()), int(x.max())
        if least < low or most >= end:
            raise GeometryError(
                f"{name} holds {least} to {most}", f"Pass numbers from {low} to {end - 1}"
            )
