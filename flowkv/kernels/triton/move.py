"""Moves of pages on GPUs, in Triton: copies of whole pages or of their stripes.

Nothing here computes: every byte arrives unchanged. Grids depend on shapes alone, so that calls
can be captured in CUDA graphs.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from flowkv.core.digest import FIRST, KEYS, SECOND, STEP, WORDS
from flowkv.core.geometry import GRANULE_BYTES, PageLayout
from flowkv.kernels.operands import Pages, Ragged, Rotary, Side
from flowkv.kernels.triton.launch import given, launch, padded, power, strides, traits
from flowkv.kernels.triton.tile import row_of_token

_STEP, _FIRST, _SECOND = map(tl.constexpr, (STEP, FIRST, SECOND))

GRANULES = 4
"""Granules a program moves at once: 16 KiB, or eight 16-byte vectors a thread."""


@triton.jit(do_not_specialize=["n_granules", "granules"])
def copy_kernel(p_source, p_target, p_from, p_to, n_granules, granules, SOURCE: tl.constexpr,
                TARGET: tl.constexpr, GRANULES: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Copy `n_granules`, GRANULES at a time and program after program.

    Granule i is number i % granules of page i // granules, which begins at its entry in the list,
    or, without SOURCE or TARGET, right behind the page before it.
    """
    o_w = tl.arange(0, WORDS)
    step = tl.num_programs(0) * GRANULES
    for i in tl.range(tl.program_id(0) * GRANULES, n_granules, step):
        o_g = i + tl.arange(0, GRANULES)
        m_g = o_g < n_granules
        g_from = o_g
        g_to = o_g
        if SOURCE:
            g_from = tl.load(p_source + o_g // granules, mask=m_g, other=0) + o_g % granules
        if TARGET:
            g_to = tl.load(p_target + o_g // granules, mask=m_g, other=0) + o_g % granules
        p_read = p_from + g_from.to(tl.int64)[:, None] * WORDS + o_w[None, :]
        p_write = p_to + g_to.to(tl.int64)[:, None] * WORDS + o_w[None, :]
        tl.store(p_write, tl.load(p_read, mask=m_g[:, None], other=0), mask=m_g[:, None])


@triton.jit
def mixed(x):
    """Mix the bits of uint64; see `core.digest.mix`."""
    x = (x ^ (x >> 32)) * _FIRST
    x = (x ^ (x >> 29)) * _SECOND
    return x ^ (x >> 32)


@triton.jit
def products(b_x):
    """Return the sum of the products of the halves of uint64."""
    return tl.sum(((b_x & 0xFFFFFFFF) * (b_x >> 32)).to(tl.int64, bitcast=True), 0)


@triton.jit(do_not_specialize=["granules", "each", "stripes"])
def digest_kernel(p_source, p_target, p_from, p_to, p_keys, p_digests, granules, each, stripes,
                  SOURCE: tl.constexpr, TARGET: tl.constexpr, COPY: tl.constexpr,
                  WORDS: tl.constexpr):  # fmt: skip
    """Digest a stripe of `each` granules, and copy it with COPY. Grid (n * stripes,).

    Pages of `granules` begin at the list's entries, as those of `copy_kernel`.
    """
    i_page = tl.program_id(0) // stripes
    g_skip = tl.program_id(0) % stripes * each
    g_from = (i_page * granules + g_skip).to(tl.int64)
    g_to = g_from
    if SOURCE:
        g_from = tl.load(p_source + i_page).to(tl.int64) + g_skip
    if TARGET:
        g_to = tl.load(p_target + i_page).to(tl.int64) + g_skip
    o_w = tl.arange(0, WORDS)
    b_keys = tl.load(p_keys + o_w)
    b_others = tl.load(p_keys + WORDS + o_w)
    one = tl.full((), 0, tl.uint64)
    two = tl.full((), 0, tl.uint64)
    place = tl.full((), 0, tl.uint64) + _STEP
    for i in tl.range(each):
        b_w = tl.load(p_from + (g_from + i) * WORDS + o_w)
        if COPY:
            tl.store(p_to + (g_to + i) * WORDS + o_w, b_w)
        h = products((b_w + b_keys).to(tl.uint64, bitcast=True))
        k = products((b_w + b_others).to(tl.uint64, bitcast=True))
        u = mixed(h.to(tl.uint64, bitcast=True) + place)
        one += u
        two += mixed(k.to(tl.uint64, bitcast=True) + u)
        place += _STEP
    n_bytes = each.to(tl.uint64) * (8 * WORDS)
    low = mixed(one + two + (n_bytes + 1) * _STEP)
    p_out = p_digests + 2 * tl.program_id(0).to(tl.int64)
    tl.store(p_out, low.to(tl.int64, bitcast=True))
    tl.store(p_out + 1, mixed(two + low).to(tl.int64, bitcast=True))


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(KEYS.view(np.int64)).to(device)


def move_pages(
    source: Side, target: Side | None, count: int, granules: int, digests: torch.Tensor | None
) -> None:
    """Copy pages, digest their stripes, or both; see `dispatch.move_pages`."""
    to = Side(source.data, None) if target is None else target
    some = source.places if to.places is None else to.places
    assert some is not None
    lists = [(some if x.places is None else x.places).contiguous() for x in (source, to)]
    words = torch.int32 if digests is None else torch.int64
    memory = [x.data.view(-1).view(words) for x in (source, to)]
    listed = {"SOURCE": source.places is not None, "TARGET": to.places is not None}
    if digests is None and count * granules:
        # A pinned host tensor is reached over a bus that few programs fill; others stay free.
        near = source.data.device == to.data.device
        programs = 4 * traits(some.device).processors if near else 16
        launch(
            copy_kernel,
            (min(programs, triton.cdiv(count * granules, GRANULES)),),
            *(*lists, *memory, count * granules, granules),
            **listed,
            GRANULES=GRANULES,
            WORDS=GRANULE_BYTES // 4,
        )
    elif digests is not None and digests.numel():
        stripes = digests.shape[1]
        launch(
            digest_kernel,
            (count * stripes,),
            *(*lists, *memory, _keys(some.device), digests, granules, granules // stripes, stripes),
            **listed,
            COPY=target is not None,
            WORDS=WORDS,
            num_warps=1,
        )


# Filling of pages with chosen tokens of other pages on GPUs (sparsification).

MOST_ELEMENTS = 4096
"""Elements of K or V that a program holds."""


@triton.jit(do_not_specialize=["n_kept"])
def drop_kernel(p_arena, p_source, p_target, p_keep, n_kept, C: tl.constexpr):
    """Copy BLOCK kept tokens of one layer and head. Grid (cdiv(n_kept, BLOCK), Hk, L)."""
    i_head = tl.program_id(1)
    i_layer = tl.program_id(2).to(tl.int64)
    o_t = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    m_t = o_t < n_kept
    p_line = p_keep + (i_layer * tl.num_programs(1) + i_head) * n_kept
    token = tl.load(p_line + o_t, mask=m_t, other=0)
    p_run = p_arena + i_layer * C.STRIPE + i_head * C.RUN
    g_from = tl.load(p_source + token // C.PAGE, mask=m_t, other=0).to(tl.int64)
    g_to = tl.load(p_target + o_t // C.PAGE, mask=m_t, other=0).to(tl.int64)
    p_from = p_run + g_from * C.GRANULE
    p_to = p_run + g_to * C.GRANULE
    s_from = token % C.PAGE
    s_to = o_t % C.PAGE
    o_d = tl.arange(0, C.D)[None, :]
    o_v = tl.arange(0, C.DV)[None, :]
    m_k = m_t[:, None] & (o_d < C.HEAD_DIM)
    m_v = m_t[:, None] & (o_v < C.VALUE_DIM)
    b_k = tl.load((p_from + s_from * C.HEAD_DIM)[:, None] + o_d, mask=m_k, other=0.0)
    b_v = tl.load((p_from + C.VALUES + s_from * C.VALUE_DIM)[:, None] + o_v, mask=m_v, other=0.0)
    tl.store((p_to + s_to * C.HEAD_DIM)[:, None] + o_d, b_k, mask=m_k)
    tl.store((p_to + C.VALUES + s_to * C.VALUE_DIM)[:, None] + o_v, b_v, mask=m_v)


def drop_tokens(
    arena: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Fill pages with chosen tokens of others; see `dispatch.drop_tokens`."""
    kept, shape = keep.shape[2], strides(layout)
    block = max(1, MOST_ELEMENTS // max(shape.D, shape.DV))
    if kept:
        launch(
            drop_kernel,
            (triton.cdiv(kept, block), layout.kv_heads, layout.layers),
            arena.view(getattr(torch, layout.dtype)),
            *(source.contiguous(), target.contiguous(), keep.contiguous(), kept),
            C=shape._replace(BLOCK=block),
        )


# Rotation of keys (RoPE) on GPUs: device code, and pages that move to other positions.
#
# Compiled without FP fusion: each product and sum is rounded by itself (`operands.Rotary`).


@triton.jit
def load_pairs(p_rows, m_rows, stride, R: tl.constexpr):
    """Load the rotated dims of BLOCK rows as pairs: x `[BLOCK, P]` and y `[BLOCK, P]`."""
    if R.INTERLEAVED:
        o_d = tl.arange(0, 2 * R.P)
        m_d = m_rows[:, None] & (o_d < 2 * R.PAIRS)[None, :]
        b = tl.load(p_rows[:, None] + o_d[None, :] * stride, mask=m_d, other=0.0)
        b_x, b_y = tl.split(tl.reshape(b, (b.shape[0], R.P, 2)))
    else:
        o_i = tl.arange(0, R.P)
        m_i = m_rows[:, None] & (o_i < R.PAIRS)[None, :]
        p_x = p_rows[:, None] + o_i[None, :] * stride
        b_x = tl.load(p_x, mask=m_i, other=0.0)
        b_y = tl.load(p_x + R.PAIRS * stride, mask=m_i, other=0.0)
    return b_x, b_y


@triton.jit
def store_turned(p_rows, m_rows, b_x, b_y, b_cos, b_sin, R: tl.constexpr):
    """Rotate pairs by `b_cos` and `b_sin`, `[1, P]` of float32, and store them as rows."""
    element: tl.constexpr = p_rows.dtype.element_ty
    wide: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    b_x, b_y, b_cos, b_sin = b_x.to(wide), b_y.to(wide), b_cos.to(wide), b_sin.to(wide)
    b_u = (b_x * b_cos - b_y * b_sin).to(element)
    b_v = (b_y * b_cos + b_x * b_sin).to(element)
    if R.INTERLEAVED:
        o_d = tl.arange(0, 2 * R.P)
        m_d = m_rows[:, None] & (o_d < 2 * R.PAIRS)[None, :]
        b = tl.reshape(tl.join(b_u, b_v), (b_u.shape[0], 2 * R.P))
        tl.store(p_rows[:, None] + o_d[None, :], b, mask=m_d)
    else:
        o_i = tl.arange(0, R.P)
        m_i = m_rows[:, None] & (o_i < R.PAIRS)[None, :]
        p_u = p_rows[:, None] + o_i[None, :]
        tl.store(p_u, b_u, mask=m_i)
        tl.store(p_u + R.PAIRS, b_v, mask=m_i)


@triton.jit
def load_turn(p_cos, p_sin, line, R: tl.constexpr):
    """Load a line of cosines and one of sines, `[1, P]`."""
    o_i = tl.arange(0, R.P)[None, :]
    o_from = line.to(tl.int64) * R.PAIRS + o_i
    m_i = o_i < R.PAIRS
    b_cos = tl.load(p_cos + o_from, mask=m_i, other=0.0)
    return b_cos, tl.load(p_sin + o_from, mask=m_i, other=0.0)


@triton.jit(do_not_specialize=["layer"])
def reposition_kernel(p_arena, p_pages, p_turns, p_cos, p_sin, layer, R: tl.constexpr,
                      C: tl.constexpr):  # fmt: skip
    """Rotate BLOCK keys of a page, in place. Grid (n * cdiv(PAGE, BLOCK), Hk, layers)."""
    BLOCKS: tl.constexpr = (C.PAGE + C.BLOCK - 1) // C.BLOCK
    i_page = tl.program_id(0) // BLOCKS
    turn = tl.load(p_turns + i_page)
    if turn < 0:
        return
    o_slot = tl.program_id(0) % BLOCKS * C.BLOCK + tl.arange(0, C.BLOCK)
    m_slot = o_slot < C.PAGE
    p_run = p_arena + tl.load(p_pages + i_page).to(tl.int64) * C.GRANULE
    p_run += (layer + tl.program_id(2)).to(tl.int64) * C.STRIPE + tl.program_id(1) * C.RUN
    p_rows = p_run + R.START + o_slot * C.HEAD_DIM
    b_cos, b_sin = load_turn(p_cos, p_sin, turn, R)
    b_x, b_y = load_pairs(p_rows, m_slot, 1, R)
    store_turned(p_rows, m_slot, b_x, b_y, b_cos, b_sin, R)


class Turned(NamedTuple):
    """Rotated dims of a key, as in `Rotary`; P, a power of two, covers the pairs."""

    PAIRS: int
    P: int
    INTERLEAVED: bool
    START: int


def turned(rope: Rotary) -> Turned:
    """Return the constants by which kernels find the pairs of a key."""
    pairs = rope.cos.shape[1]
    return Turned(pairs, power(pairs), rope.interleaved, rope.start)


def reposition(
    arena: torch.Tensor,
    pages: torch.Tensor,
    turns: torch.Tensor,
    rope: Rotary,
    layout: PageLayout,
    layer: int | None = None,
) -> None:
    """Rotate the keys of pages in place; see `dispatch.reposition`."""
    constants, page = turned(rope), layout.page_size
    block = min(max(1, MOST_ELEMENTS // (2 * constants.P)), power(page))
    blocks, layers = triton.cdiv(page, block), layout.layers if layer is None else 1
    if pages.shape[0]:
        launch(
            reposition_kernel,
            (pages.shape[0] * blocks, layout.kv_heads, layers),
            arena.view(getattr(torch, layout.dtype)),
            *(pages.contiguous(), turns.contiguous(), rope.cos, rope.sin, layer or 0),
            R=constants,
            C=strides(layout)._replace(BLOCK=block),
            enable_fp_fusion=False,
        )


# Writing of new tokens into open pages on GPUs, in Triton, unchanged or rotated (RoPE).
#
# Grids depend on shapes alone, so that calls can be captured in CUDA graphs.


@triton.jit
def _copy_heads(p_from, stride_head, stride_dim, p_to, o_h, o_d, m, RUN: tl.constexpr):
    """Copy `[heads, dims]` of one token where `m` is set, cast to the dtype of the page."""
    p_read = p_from + o_h[:, None] * stride_head + o_d[None, :] * stride_dim
    b = tl.load(p_read, mask=m, other=0.0).to(p_to.dtype.element_ty)
    tl.store(p_to + o_h[:, None] * RUN + o_d[None, :], b, mask=m)


@triton.jit(do_not_specialize=["layer", "n_rows"])
def append_kernel(p_k, p_v, p_arena, p_table, p_rows, p_lengths, p_starts, k_token, k_head, k_dim,
                  v_token, v_head, v_dim, stride_table, layer, n_rows, p_cos, p_sin,
                  R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Write BLOCK heads of one new token into its page. Grid (N, cdiv(Hk, BLOCK)).

    With R, the key is rotated by line `position` of cos and sin.
    """
    i_token = tl.program_id(0)
    i_row = row_of_token(i_token, p_starts, n_rows, C)
    m_row = i_row < n_rows  # tokens of no row pad a captured graph
    b_end = tl.load(p_starts + i_row + 1, mask=m_row, other=0)
    position = tl.load(p_lengths + i_row, mask=m_row, other=0) - b_end + i_token
    o_line = tl.load(p_rows + i_row, mask=m_row, other=0).to(tl.int64) * stride_table
    granule = tl.load(p_table + o_line + position // C.PAGE, mask=m_row, other=-1)
    p_stripe = p_arena + granule.to(tl.int64) * C.GRANULE + layer.to(tl.int64) * C.STRIPE
    position = tl.where(granule < 0, -1, position)  # -1: already dropped behind a window
    if position < 0:
        return
    o_slot = position % C.PAGE
    o_h = tl.program_id(1) * C.BLOCK + tl.arange(0, C.BLOCK)
    o_d = tl.arange(0, C.D)
    o_v = tl.arange(0, C.DV)
    m_h = o_h < C.HEADS
    m_d = o_d < C.HEAD_DIM
    p_from = p_k + i_token.to(tl.int64) * k_token
    p_to = p_stripe + o_slot * C.HEAD_DIM
    if R is not None:
        b_cos, b_sin = load_turn(p_cos, p_sin, position, R)
        p_pairs = p_from + R.START * k_dim + o_h * k_head
        b_x, b_y = load_pairs(p_pairs, m_h, k_dim, R)
        store_turned(p_to + R.START + o_h * C.RUN, m_h, b_x, b_y, b_cos, b_sin, R)
        m_d = m_d & ((o_d < R.START) | (o_d >= R.START + 2 * R.PAIRS))
    if R is None or 2 * R.PAIRS < C.HEAD_DIM:
        _copy_heads(p_from, k_head, k_dim, p_to, o_h, o_d, m_h[:, None] & m_d[None, :], C.RUN)
    p_from = p_v + i_token.to(tl.int64) * v_token
    p_to = p_stripe + C.VALUES + o_slot * C.VALUE_DIM
    m_v = m_h[:, None] & (o_v < C.VALUE_DIM)[None, :]
    _copy_heads(p_from, v_head, v_dim, p_to, o_h, o_v, m_v, C.RUN)


def append(
    k: torch.Tensor, v: torch.Tensor, pages: Pages, batch: Ragged, rope: Rotary | None = None
) -> None:
    """Write new tokens into the open pages; see `dispatch.append`."""
    tokens, heads, _ = k.shape
    block, rows = _heads(pages.layout), batch.rows.shape[0]
    if not tokens:
        return
    launch(
        append_kernel,
        (tokens, -(-heads // block)),
        *(k, v, pages.arena.view(getattr(torch, pages.layout.dtype)), *batch[:4]),
        *(*k.stride(), *v.stride(), batch.table.stride(0), pages.layer, rows),
        *((None, None) if rope is None else (rope.cos, rope.sin)),
        R=None if rope is None else turned(rope),
        C=given(strides(pages.layout), HEADS=heads, ROWS=padded(rows), BLOCK=block),
        enable_fp_fusion=rope is None,
    )


@cache
def _heads(layout: PageLayout) -> int:
    """Return the KV heads with keys or values of one token that fit a program: a power of two."""
    most = max(1, MOST_ELEMENTS // padded(max(layout.head_dim, layout.value_dim)))
    return min(most, power(layout.kv_heads))


# `checksum` on GPUs, in Triton: every byte is read once, in place.

TILE = 1024
TILES = 16
"""Tiles of a program: 128 KiB, so that a model's weights make thousands of programs."""


@triton.jit(do_not_specialize=["n_words", "block_words", "splits"])
def checksum_kernel(p_words, p_sums, n_words, block_words, splits, TILE: tl.constexpr,
                    TILES: tl.constexpr):  # fmt: skip
    """Store two sums over one of the `splits` parts of a block."""
    i_p = tl.program_id(0)
    i_b = (i_p // splits).to(tl.int64)
    first = (i_p % splits).to(tl.int64) * TILE * TILES
    begin = i_b * block_words
    stop = tl.minimum(begin + block_words, n_words)
    b_one = tl.zeros([TILE], tl.uint64)
    b_two = tl.zeros([TILE], tl.uint64)
    for i in tl.range(TILES):
        o_j = first + i * TILE + tl.arange(0, TILE)
        m_j = (o_j < block_words) & (begin + o_j < stop)
        b_w = tl.load(p_words + begin + o_j, mask=m_j, other=0).to(tl.uint64, bitcast=True)
        b_key = (o_j + 1).to(tl.uint64, bitcast=True) * _STEP
        b_x = mixed(b_w ^ b_key)
        b_one += tl.where(m_j, b_x, 0)
        b_two += tl.where(m_j, b_x * (b_key | 1), 0)
    p_out = p_sums + 2 * i_p.to(tl.int64)
    tl.store(p_out, tl.sum(b_one.to(tl.int64, bitcast=True), 0))
    tl.store(p_out + 1, tl.sum(b_two.to(tl.int64, bitcast=True), 0))


def checksum(words: torch.Tensor, block_words: int) -> torch.Tensor:
    """Return two sums over each block; see `dispatch.checksum`."""
    blocks = triton.cdiv(len(words), block_words)
    splits = triton.cdiv(min(block_words, len(words)), TILE * TILES)
    sums = words.new_empty(blocks, splits, 2)
    launch(
        checksum_kernel,
        (blocks * splits,),
        *(words, sums, len(words), block_words, splits),
        TILE=TILE,
        TILES=TILES,
    )
    return sums.sum(1)  # modulo 2**64, the same in any order
