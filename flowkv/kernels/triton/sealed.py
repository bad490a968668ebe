"""Paged attention for few new tokens per row over sealed pages of one codec, in Triton.

It works as `triton.few`, but over the pages of one list (`triton.task`), which are full and before
all new tokens, so that only windows need masks. A program is one warp where 8 columns suffice:
without barriers, in a loop that does not wait for other warps, 64 slots of 128 dims fill its
registers.
"""

# ruff: noqa: PLR0913, PLR0915, PLR0917

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flowkv.core.geometry import PageLayout
from flowkv.kernels.triton.flight import decoding, room_of, stream
from flowkv.kernels.triton.launch import (
    Constants,
    Traits,
    coded,
    given,
    interpreted,
    launch,
    padded,
    traits,
)
from flowkv.kernels.triton.task import FIELDS, REGISTERS, TAG, Lists, Task
from flowkv.kernels.triton.tile import (
    HIGH_BITS,
    LOG2E,
    LOWEST,
    MAGIC,
    MAGIC_BITS,
    MOST,
    cap,
    digits,
    few_rows,
    joined,
    list_range,
    load,
    nibbles,
    rounded,
    row_at,
    share_begin,
    share_next,
    share_take,
    sight_of,
    signed,
    store_mass,
    store_partial,
    tiles,
)

# Addition of one tile of a sealed page to a running softmax, by integer tensor cores, in Triton.
#
# Eight- and four-bit pages are read two to four times as fast as raw ones, so there is that much
# less time for an element. As much as possible is done once per token, column or page instead:
#
# * K and V^T bytes travel to shared memory by asynchronous copies and are unpacked behind it, in
#   the layout in which tensor cores take them. Nibbles are split by halves (of D for K, of the
#   page for V), so that each half is an operand of its own and nothing is ever reordered;
# * queries, and the probabilities of a tile, become numbers of two digits (`triton.tile`), so
#   scores and outputs are exact sums of int8 products: four times the tensor-core work of one
#   digit, which waits for memory anyway, for 256 times less rounding;
# * accumulators begin at the bits of 1.5 * 2**23 (256 times that for high digits): their float32 is
#   one subtraction away, or none where an FMA takes it along. Zero points of nibbles (-8) are a
#   correction per column: `-8 sum(q)` in the accumulators of scores, `-8 sum(p)` after those of
#   outputs. Scales of K and V multiply scores and probabilities; those of kv4c, which belong to
#   channels, multiply the query once per page.
#
# Rounding. Beside float32 operations, each as in the raw kernel, two values are rounded:
#
# * a query component, to a multiple of max|q| / 32512: with kv8, k8v4 and kv4h (q and k rotated)
#   a logit moves by at most `|scale| max|q| (sum_d |k_d| + 4 s) / 65024`, s the token's scale:
#   half a unit a component, and two units for sums that are rounded to float32. With kv4c it is q
#   times the channel's scale that is rounded: `|scale| max_d |q_d r_d| (D + 4) / 65024`, r_d the
#   range of the channel within the page;
# * a probability times its token's scale of V, to a multiple of its tile's largest over 32512.
#   With w the share of a tile's weight, the tile moves the output by at most `w max|v| (TILE + 8)
#   / 65024`: half a unit and at most max|v| each, four units for rounded sums. All tiles together
#   have w = 1.
#
# Logits that move by e move the output by 2 e max|v|, so it moves by less than `max|v| (2 e +
# (TILE + 8) / 65024)`, TILE <= 128: 0.2 % of the largest value if every error were the worst and
# of one sign; measured on normal data, 1e-4. The tests assert these bounds.


@triton.jit
def slots_of(BLOCK: tl.constexpr, C: tl.constexpr):
    """Return `[BLOCK]` slots, in the order that `in_order` inverts.

    Tensor cores leave a thread with rows 8 apart of a score tile, one byte each as probabilities,
    and need four neighbours of one column in a register: byte by byte through shared memory. So
    keys are read in an order that makes a thread's rows neighbours.
    """
    REPEATS: tl.constexpr = BLOCK // (16 * C.WARPS)
    o = tl.arange(0, BLOCK)
    if REPEATS >= 2:
        o_row = o // (16 * C.WARPS)
        o_thread = (o_row // 2 * C.WARPS + o // 16 % C.WARPS) * 8 + o % 8
        o = o_thread * 4 + o_row % 2 * 2 + o // 8 % 2
    return o


@triton.jit
def in_order(b, C: tl.constexpr):
    """Sort a tile `[BLOCK, COLUMNS]` over `slots_of` by slot, without moves between registers."""
    REPEATS: tl.constexpr = b.shape[0] // (16 * C.WARPS)
    if REPEATS >= 2:
        COLUMNS: tl.constexpr = b.shape[1]
        b_rows = tl.reshape(b, [REPEATS // 2, 2, C.WARPS, 2, 8, COLUMNS])
        b_rows = tl.permute(b_rows, (0, 2, 4, 1, 3, 5))
        return tl.reshape(b_rows, [b.shape[0], COLUMNS])
    else:
        return b


@triton.jit
def key_products(q_hi, q_lo, q_hi1, q_lo1, b_hi, b_lo, p_k, o_slot, m_t, MASK: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """Return `[tokens, COLUMNS]` products of keys of some slots with queries, as of `joined`."""
    STRIDE: tl.constexpr = C.HEAD_DIM * C.K_BITS // 8
    o_d = tl.arange(0, C.D)
    m_k = m_t[:, None] & (o_d < STRIDE)[None, :]
    b_k = load(p_k + o_slot[:, None] * STRIDE + o_d[None, :], m_k, MASK or C.D != STRIDE, False)
    b_hi = tl.zeros([o_slot.shape[0], q_hi.shape[1]], tl.int32) + b_hi[None, :]
    b_lo = tl.zeros([o_slot.shape[0], q_hi.shape[1]], tl.int32) + b_lo[None, :]
    if C.K_BITS == 8:
        b_k = b_k.to(tl.int8, bitcast=True)
        b_hi = tl.dot(b_k, q_hi, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_k, q_lo, acc=b_lo, out_dtype=tl.int32)
    else:
        b_0, b_1 = nibbles(b_k, C)
        b_hi = tl.dot(b_0, q_hi, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_0, q_lo, acc=b_lo, out_dtype=tl.int32)
        b_hi = tl.dot(b_1, q_hi1, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_1, q_lo1, acc=b_lo, out_dtype=tl.int32)
    return joined(b_hi, b_lo)


@triton.jit
def halves(b_0, b_1, BOTH: tl.constexpr, C: tl.constexpr):
    """Return queries as numbers of two digits, and the value of one unit of these.

    Args:
        b_0: float32 `[D, COLUMNS]`, the dims that meet the low nibbles of K, or all dims.
        b_1: The dims that meet the high nibbles.
        BOTH: Whether b_1 counts.
        C: Constants of the kernel (`launch.Constants`).
    """
    b_most = tl.max(tl.abs(b_0), axis=0)
    if BOTH:
        b_most = tl.maximum(b_most, tl.max(tl.abs(b_1), axis=0))
    b_most = tl.maximum(b_most, 1e-30)
    b_r = (1.0 / b_most * MOST)[None, :]
    b_hi, b_lo = digits(rounded(b_0 * b_r), C)
    if BOTH:
        b_hi1, b_lo1 = digits(rounded(b_1 * b_r), C)
    else:
        b_hi1, b_lo1 = b_hi, b_lo
    return b_hi, b_lo, b_hi1, b_lo1, b_most * (1.0 / MOST)


@triton.jit
def zero_points(b_0, b_1):
    """Return `[COLUMNS]` -8 sum(q), the correction of products with nibbles, 8 too large."""
    return -8 * (tl.sum(b_0.to(tl.int32), axis=0) + tl.sum(b_1.to(tl.int32), axis=0))


@triton.jit
def sealed_tile(q_hi, q_lo, q_hi1, q_lo1, b_step, z_hi, z_lo, p_0, m_q, b_m, b_l, b_acc, b_acc1, t,
                p_run, p_line, p_numbers, p_mass, b_seen, b_slope, softcap, MASK: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Add a tile, which is cut into PARTS, to the running softmax of all columns."""
    granule = tl.load(p_line + t // tiles(C))
    p_page = p_run + granule.to(tl.int64) * C.GRANULE
    number = t * 0
    if MASK or C.ALIBI or C.MASS > 0:
        number = tl.load(p_numbers + t // tiles(C))
    b_shift = b_step
    if C.CHANNELS:
        HALF: tl.constexpr = C.HEAD_DIM // 2
        p_ks = (p_page + C.K_SCALES).to(tl.pointer_type(tl.float16))
        o_d = tl.arange(0, C.D)
        m_d = o_d < HALF
        b_s0 = load(p_ks + o_d, m_d, C.D != HALF, True)
        b_s1 = load(p_ks + HALF + o_d, m_d, C.D != HALF, True)
        b_m0 = load(p_ks + C.HEAD_DIM + o_d, m_d, C.D != HALF, True)
        b_m1 = load(p_ks + C.HEAD_DIM + HALF + o_d, m_d, C.D != HALF, True)
        # There are no registers to hold queries in, so they are read again for each page. The
        # offset is always 0, but unknown to the compiler, which would else read them ahead of the
        # loop.
        o_0 = (granule >> TAG) * 64
        b_0 = tl.load(p_0 + o_0, mask=m_q, other=0.0).to(tl.float32)
        b_1 = tl.load(p_0 + o_0 + HALF, mask=m_q, other=0.0).to(tl.float32)
        b_shift = tl.sum(b_0 * b_m0[:, None] + b_1 * b_m1[:, None], axis=0) * b_step
        q_hi, q_lo, q_hi1, q_lo1, b_size = halves(b_0 * b_s0[:, None], b_1 * b_s1[:, None], True, C)
        b_step *= b_size
    PARTS: tl.constexpr = C.PARTS
    for part in tl.static_range(PARTS):
        b_m, b_l, b_acc, b_acc1 = sealed_part(
            q_hi, q_lo, q_hi1, q_lo1, b_step, b_shift, z_hi, z_lo, b_m, b_l, b_acc, b_acc1,
            t % tiles(C) * C.PARTS + part, p_page, number, p_mass, b_seen, b_slope, softcap,
            C.TILE // C.PARTS, MASK, C)  # fmt: skip
    return b_m, b_l, b_acc, b_acc1


@triton.jit
def sealed_part(q_hi, q_lo, q_hi1, q_lo1, b_step, b_shift, z_hi, z_lo, b_m, b_l, b_acc, b_acc1,
                part, p_page, number, p_mass, b_seen, b_slope, softcap, TILE: tl.constexpr,
                MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Add a part of a tile to the running softmax of all columns.

    A part is BLOCK slots of a page, and with 4-bit values also those half a page later, with their
    nibbles in the same bytes. b_l is `[BLOCK, COLUMNS]`, summed over slots at the end only.
    """
    PAIR: tl.constexpr = C.V_BITS == 4
    SLOTS: tl.constexpr = C.PAGE // 2 if PAIR else C.PAGE
    BLOCK: tl.constexpr = TILE // 2 if PAIR else TILE
    RAGGED: tl.constexpr = SLOTS % BLOCK != 0
    o_t = part * BLOCK + tl.arange(0, BLOCK)
    o_a = part * BLOCK + slots_of(BLOCK, C)
    o_b = o_a + SLOTS
    m_t = o_a < SLOTS
    p_ks = (p_page + C.K_SCALES).to(tl.pointer_type(tl.float16))
    p_vs = (p_page + C.V_SCALES).to(tl.pointer_type(tl.float16))

    b_sa = key_products(q_hi, q_lo, q_hi1, q_lo1, z_hi, z_lo, p_page, o_a, m_t, RAGGED, C)
    b_sb = b_sa
    if PAIR:
        b_sb = key_products(q_hi, q_lo, q_hi1, q_lo1, z_hi, z_lo, p_page, o_b, m_t, RAGGED, C)
    b_va = load(p_vs + o_a, m_t, RAGGED, True)
    b_vb = load(p_vs + SLOTS + o_a, m_t, RAGGED and PAIR, True) if PAIR else b_va

    b_sa = logits(b_sa, p_ks, o_a, m_t, number * C.PAGE + o_a, b_step, b_shift, b_seen, b_slope,
                  softcap, RAGGED, MASK, C)  # fmt: skip
    b_max = tl.max(b_sa, axis=0)
    if PAIR:
        b_sb = logits(b_sb, p_ks, o_b, m_t, number * C.PAGE + o_b, b_step, b_shift, b_seen, b_slope,
                      softcap, RAGGED, MASK, C)  # fmt: skip
        b_max = tl.max(tl.maximum(b_sa, b_sb), axis=0)
    b_unit = sealed_unit(b_step, C)
    b_top = tl.maximum(b_m, b_max)
    b_fade = tl.math.exp2((b_m - b_top) * b_unit)
    b_off = (b_top * b_unit)[None, :]
    b_pa = tl.math.exp2(b_sa * b_unit[None, :] - b_off)
    b_sum = b_pa
    b_xa = b_pa * b_va[:, None]
    b_most = tl.max(b_xa, axis=0)
    if PAIR:
        b_pb = tl.math.exp2(b_sb * b_unit[None, :] - b_off)
        b_sum = b_pa + b_pb
        b_xb = b_pb * b_vb[:, None]
        b_most = tl.max(tl.maximum(b_xa, b_xb), axis=0)
    if C.MASS > 0:
        store_mass(p_mass, number * C.MASS + part, b_top * b_unit, tl.sum(b_sum, axis=0))
    b_l = b_l * b_fade[None, :] + b_sum

    b_most = tl.maximum(b_most, 1e-30)
    b_r = (1.0 / b_most * MOST)[None, :]
    b_na = in_order(rounded(b_xa * b_r), C)
    b_ha, b_la = digits(b_na, C)
    b_hb, b_lb = b_ha, b_la
    b_most *= 1.0 / MOST
    b_less = b_most * MAGIC
    if PAIR:
        b_nb = in_order(rounded(b_xb * b_r), C)
        b_hb, b_lb = digits(b_nb, C)
        RAISED: tl.constexpr = (TILE * (MAGIC_BITS + 128) + (1 << 31)) % (1 << 32) - (1 << 31)
        b_n = tl.sum(b_na + b_nb, axis=0) - RAISED  # sums wrap around, and back
        b_less = ((8 * b_n).to(tl.float32) + MAGIC) * b_most
    p_v = p_page + C.VALUES
    m_t = o_t < SLOTS
    b_acc = add_values(b_acc, b_ha, b_la, b_hb, b_lb, b_fade, b_less, b_most, p_v, o_t, m_t, 0,
                       RAGGED, C)  # fmt: skip
    if C.DV >= 128:
        b_acc1 = add_values(b_acc1, b_ha, b_la, b_hb, b_lb, b_fade, b_less, b_most, p_v, o_t, m_t,
                            C.DV // 2, RAGGED, C)  # fmt: skip
    return b_top, b_l, b_acc, b_acc1


@triton.jit
def add_values(b_acc, b_ha, b_la, b_hb, b_lb, b_fade, b_less, b_most, p_v, o_t, m_t,
               FROM: tl.constexpr, RAGGED: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Add the values of some slots, from dim FROM on, to faded `[dims, COLUMNS]` accumulators.

    High digits are finished before low ones begin: there are not registers for both.
    """
    ROW: tl.constexpr = C.PAGE * C.V_BITS // 8
    DIMS: tl.constexpr = b_acc.shape[0]
    o_v = FROM + tl.arange(0, DIMS)
    m_v = (o_v < C.VALUE_DIM)[:, None] & m_t[None, :]
    b_v = load(p_v + o_v[:, None] * ROW + o_t[None, :], m_v, RAGGED or FROM + DIMS > C.VALUE_DIM,
               False)  # fmt: skip
    b_hi = tl.full([DIMS, b_acc.shape[1]], HIGH_BITS, tl.int32)
    b_lo = tl.full([DIMS, b_acc.shape[1]], MAGIC_BITS, tl.int32)
    if C.V_BITS == 4:
        b_va, b_vb = nibbles(b_v, C)
        b_hi = tl.dot(b_va, b_ha, acc=b_hi, out_dtype=tl.int32)
        b_hi = tl.dot(b_vb, b_hb, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_va, b_la, acc=b_lo, out_dtype=tl.int32)
        b_lo = tl.dot(b_vb, b_lb, acc=b_lo, out_dtype=tl.int32)
    else:
        b_va = signed(b_v, C)
        b_hi = tl.dot(b_va, b_ha, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_va, b_la, acc=b_lo, out_dtype=tl.int32)
    b_acc = b_acc * b_fade[None, :] - b_less[None, :]
    b_acc += (b_hi.to(tl.float32, bitcast=True) - MAGIC * 256.0) * b_most[None, :]
    return b_acc + b_lo.to(tl.float32, bitcast=True) * b_most[None, :]


@triton.jit
def sealed_unit(b_step, C: tl.constexpr):
    """Return the `[COLUMNS]` units of `logits`."""
    if C.SOFTCAP or C.ALIBI:
        return b_step * 0.0 + LOG2E
    elif C.CHANNELS:
        return b_step * 0.0 + 1.0
    else:
        return b_step


@triton.jit
def logits(b_s, p_ks, o_t, m_t, b_at, b_step, b_shift, b_seen, b_slope, softcap,
           RAGGED: tl.constexpr, MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Return scores b_s' such that `b_s' * unit` is the logit in units of log 2."""
    if C.CHANNELS:
        b_s = b_s * b_step[None, :] + (b_shift - b_step * MAGIC)[None, :]
    else:
        b_scale = load(p_ks + o_t, m_t, RAGGED, True)
        b_s = b_s * b_scale[:, None] - (b_scale * MAGIC)[:, None]
        if C.SOFTCAP or C.ALIBI:
            b_s = b_s * b_step[None, :]
    b_s = cap(b_s, 1.0, softcap, C)
    if C.ALIBI:
        b_s += b_slope[None, :] * (b_at[:, None] - (b_seen - 1)[None, :]).to(tl.float32)
    if RAGGED:
        b_s = tl.where(m_t[:, None], b_s, -float("inf"))
    if MASK:
        b_s = tl.where(b_at[:, None] >= (b_seen - C.WINDOW)[None, :], b_s, -float("inf"))
    return b_s


@triton.jit
def sealed_share(i_share, n_shares, p_q, p_arena, p_lengths, p_starts, p_part, p_part_lse,
                 stride_token, stride_head, layer, n_rows, scale, softcap, p_alibi, p_lists,
                 p_granules, p_numbers, i_list, n_segments, stride_list, p_mass, stride_mass,
                 C: tl.constexpr):  # fmt: skip
    """Write the partials of one KV head over one share of the pages of list i_list.

    It works as `few_share` with LISTED; D and DV cover the bytes of a line of K and V, p_arena and
    all offsets are in bytes. K of kv4h needs p_q rotated.
    """
    i_head = tl.program_id(1)
    p_lists += i_list * FIELDS * n_rows
    b_pages = few_rows(p_lists, p_starts, n_rows, C)
    i_item, left, i_row, skip = share_begin(b_pages, i_share, n_shares, C)
    p_run = p_arena + layer.to(tl.int64) * C.STRIPE + i_head * C.RUN
    PAIR: tl.constexpr = C.V_BITS == 4
    BLOCK: tl.constexpr = (C.TILE // 2 if PAIR else C.TILE) // C.PARTS
    HALF: tl.constexpr = C.HEAD_DIM // 2 if C.K_BITS == 4 else C.HEAD_DIM
    o_c = tl.arange(0, C.COLUMNS)
    o_d = tl.arange(0, C.D)
    while left > 0:
        start, n_new, n_tokens = row_at(i_row, p_starts, p_lengths)
        n_pages = tl.load(p_lists + i_row)
        take, segment = share_take(i_share, i_item, left, i_row, skip, n_pages, C)
        few = (n_new > 0) & (n_new <= C.FEW) & (take > 0)
        if few:
            o_token = start + o_c // C.GROUP
            o_head = i_head * C.GROUP + o_c % C.GROUP
            m_c = o_c < n_new * C.GROUP
            m_q = m_c[None, :] & (o_d < HALF)[:, None]
            p_0 = p_q + (o_token.to(tl.int64) * stride_token + o_head * stride_head)[None, :]
            p_0 += o_d[:, None]
            b_0 = tl.load(p_0, mask=m_q, other=0.0)
            b_1 = b_0
            if C.K_BITS == 4:
                b_1 = tl.load(p_0 + HALF, mask=m_q, other=0.0)
            b_bad = tl.sum((b_0.to(tl.float32) + b_1.to(tl.float32)) * 0.0, axis=0)  # NaN stays
            b_factor = b_bad + scale * (1.0 if C.SOFTCAP or C.ALIBI else LOG2E)
            z_hi = tl.full([C.COLUMNS], HIGH_BITS, tl.int32)
            z_lo = tl.full([C.COLUMNS], MAGIC_BITS, tl.int32)
            if C.CHANNELS:  # the scales of a page come first
                q_hi, q_lo, q_hi1, q_lo1, b_step = b_0, b_0, b_0, b_0, b_factor
            else:
                q_hi, q_lo, q_hi1, q_lo1, b_step = halves(
                    b_0.to(tl.float32), b_1.to(tl.float32), C.K_BITS == 4, C)  # fmt: skip
                b_step *= b_factor
                if C.K_BITS == 4:
                    z_hi += zero_points(q_hi, q_hi1)
                    z_lo += zero_points(q_lo, q_lo1)
            b_m = tl.full([C.COLUMNS], LOWEST, tl.float32)
            b_l = tl.full([BLOCK, C.COLUMNS], 0, tl.float32)
            b_acc = tl.full([C.DV // 2 if C.DV >= 128 else C.DV, C.COLUMNS], 0, tl.float32)
            b_acc1 = b_acc
            b_seen, b_slope, _, _, _ = sight_of(
                o_c, o_token, o_head, m_c, n_tokens - n_new, n_tokens, p_alibi, None, C
            )  # fmt: skip
            p_to = p_mass
            if C.MASS > 0:
                p_to += i_row.to(tl.int64) * stride_mass + i_head * C.COLUMNS + o_c
            o_list = i_row.to(tl.int64) * stride_list + tl.load(p_lists + n_rows + i_row)
            n_edge = tl.load(p_lists + 2 * n_rows + i_row)
            t0, f0, _, t1 = list_range(skip, take, n_pages, n_edge, 0, C)
            p_line = p_granules + o_list
            p_pages = p_numbers + o_list
            for t in tl.range(f0, t1, num_stages=C.STAGES):
                b_m, b_l, b_acc, b_acc1 = sealed_tile(
                    q_hi, q_lo, q_hi1, q_lo1, b_step, z_hi, z_lo, p_0, m_q, b_m, b_l, b_acc, b_acc1,
                    t, p_run, p_line, p_pages, p_to, b_seen, b_slope, softcap, False,
                    C)  # fmt: skip
            if C.WINDOW > 0:
                for t in tl.range(t0, f0, num_stages=1):
                    b_m, b_l, b_acc, b_acc1 = sealed_tile(
                        q_hi, q_lo, q_hi1, q_lo1, b_step, z_hi, z_lo, p_0, m_q, b_m, b_l, b_acc,
                        b_acc1, t, p_run, p_line, p_pages, p_to, b_seen, b_slope, softcap, True,
                        C)  # fmt: skip
            o_part = segment.to(tl.int64) + i_list * n_segments
            o_part = (o_part * tl.num_programs(1) + i_head) * C.COLUMNS + o_c
            b_unit = sealed_unit(b_step, C)
            b_l = tl.sum(b_l, axis=0)
            store_partial(p_part, p_part_lse, o_part, m_c, b_m * b_unit, b_l, b_acc, 0, C)
            if C.DV >= 128:
                store_partial(p_part, p_part_lse, o_part, m_c, b_m * b_unit, b_l, b_acc1, C.DV // 2,
                              C)  # fmt: skip
        i_item, left, i_row, skip = share_next(i_item, left, i_row, skip, few, take, n_pages, C)


@triton.jit(do_not_specialize=["layer", "n_rows", "i_list", "n_segments"])
def attend_sealed(p_q, p_arena, p_lengths, p_starts, p_part, p_part_lse, stride_token, stride_head,
                  layer, n_rows, scale, softcap, p_alibi, p_lists, p_granules, p_numbers, i_list,
                  n_segments, stride_list, p_mass, stride_mass, C: tl.constexpr):  # fmt: skip
    """Attend over list i_list alone. Grid (shares, Hk)."""
    sealed_share(tl.program_id(0), tl.num_programs(0), p_q, p_arena, p_lengths, p_starts, p_part,
                 p_part_lse, stride_token, stride_head, layer, n_rows, scale, softcap, p_alibi,
                 p_lists, p_granules, p_numbers, i_list, n_segments, stride_list, p_mass,
                 stride_mass, C)  # fmt: skip


# Queries in the rotated coordinates of kv4h keys, in Triton.
#
# Scores do not change when keys and queries are rotated alike. The rotation is a matrix of signs,
# so that tensor cores multiply it exactly with 16-bit queries; sums are float32.

BLOCK = 16
"""Queries of a program."""


@triton.jit(do_not_specialize=["n_heads", "n_queries"])
def turn_queries(p_q, p_turn, p_out, stride_token, stride_head, n_heads, n_queries,
                 NORM: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Set p_out float32 `[N, Hq, D]` to p_q times p_turn `[D, D]` times NORM. Grid (blocks,)."""
    o_r = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    o_d = tl.arange(0, C.D)
    m_r = o_r < n_queries
    m_q = m_r[:, None] & (o_d < C.HEAD_DIM)[None, :]
    o_q = (o_r // n_heads).to(tl.int64) * stride_token + o_r % n_heads * stride_head
    b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=m_q, other=0.0)
    if C.UPCAST:
        b_q = b_q.to(tl.float32)
    D: tl.constexpr = C.D
    TILE: tl.constexpr = C.TILE
    for e in tl.static_range(0, D, TILE):
        o_e = e + tl.arange(0, C.TILE)
        m_turn = (o_d < C.HEAD_DIM)[:, None] & (o_e < C.HEAD_DIM)[None, :]
        b_turn = tl.load(p_turn + o_d[:, None] * C.HEAD_DIM + o_e[None, :], mask=m_turn, other=0.0)
        b_out = tl.dot(b_q, b_turn.to(b_q.dtype), out_dtype=tl.float32, input_precision="ieee")
        p_to = p_out + o_r.to(tl.int64)[:, None] * C.HEAD_DIM + o_e[None, :]
        tl.store(p_to, b_out * NORM, mask=m_r[:, None] & (o_e < C.HEAD_DIM)[None, :])


def turned(q: torch.Tensor) -> torch.Tensor:
    """Return queries `[N, Hq, D]`, neighbours in their last dimension, rotated as kv4h keys are."""
    tokens, heads, dim = q.shape
    out = q.new_empty(q.shape, dtype=torch.float32)
    width = padded(dim)
    launch(
        turn_queries,
        (-(-tokens * heads // BLOCK),),
        *(q, turn(dim, q.device), out, q.stride(0), q.stride(1), heads, tokens * heads),
        C=Constants(
            HEAD_DIM=dim,
            D=width,
            TILE=min(width, 64 if q.element_size() == 2 else 16),
            BLOCK=BLOCK,
            UPCAST=q.dtype is torch.bfloat16 and interpreted(turn_queries),
        ),
        NORM=rotation(dim)[1],
    )
    return out


def rotation(dim: int) -> tuple[int, float]:
    """Return (dims that kv4h rotates together, the factor that preserves their length)."""
    block = dim & -dim
    return block, block**-0.5


@cache
def turn(dim: int, device: torch.device) -> torch.Tensor:
    """Return the rotation of kv4h without its factor: Hadamard matrices of `rotation(dim)` dims."""
    block, _ = rotation(dim)
    matrix = torch.ones(1, 1, dtype=torch.float16, device="cpu")
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix] * (dim // block)).to(device)


# Launches of `attend_sealed`: tile sizes and warps of each codec.


class Work(NamedTuple):
    """Operands that the launches of one decoding call share.

    Attributes:
        lists: Pages by codec, if any may be sealed.
        segments: Segments of one list in the partials.
        part: float32 `[lists * segments, Hk, COLUMNS, Dv]`.
        part_lse: float32 `[lists * segments, Hk, COLUMNS]`.
        mass: Weights of tiles, `[B, pages, tiles, Hk, COLUMNS]`, and their stride, if requested.
        tiles: Tiles of a page in `mass`; 0 without.
        common: Constants of all kernels.
    """

    lists: Lists | None
    segments: int
    part: torch.Tensor
    part_lse: torch.Tensor
    mass: tuple[torch.Tensor | None, int | None]
    tiles: int
    common: dict[str, Any]


def sealed_constants(task: Task, work: Work, codec: PageLayout) -> tuple[Constants, int]:
    """Return the constants of a call over pages of a sealed codec, and the warps of a program."""
    device, columns = traits(task.out.device), work.part.shape[2]
    shape, tune = sealed_config(codec, columns, device)
    constants = given(
        shape,
        task.batching,
        **work.common,
        SOFTCAP=task.switches.SOFTCAP,
        ALIBI=task.switches.ALIBI,
        CAUSAL=task.switches.CAUSAL,
        MASS=work.tiles,
        ASM=device.ptx,
    )
    return constants, tune["warps"]


def attend_list(task: Task, work: Work, i_list: int, codec: PageLayout, shares: int) -> None:
    """Attend over the pages of one sealed codec, beside others."""
    constants, warps = sealed_constants(task, work, codec)
    q = turned(task.q) if codec.spec.rotates else task.q
    assert work.lists is not None
    launch(
        attend_sealed,
        (shares, codec.kv_heads),
        *(q, task.pages.arena, *task.operands[4:], work.part, work.part_lse),
        *(q.stride(0), q.stride(1), task.pages.layer, task.rows, *task.softmax, task.how.alibi),
        *(*work.lists, i_list, work.segments, task.most_pages, *work.mass),
        C=constants,
        num_warps=warps,
        **REGISTERS,
    )


@lru_cache(maxsize=256)
def sealed_config(
    layout: PageLayout, columns: int, device: Traits
) -> tuple[Constants, dict[str, int]]:
    """Return the constants of `attend_sealed`, and its warps, programs, tile and room."""
    spec = layout.spec
    pair = 2 if spec.v_bits == 4 else 1  # slots of a tile with values in one byte
    tiling = decoding(stream(layout, columns), device)
    tile = tiling.block * pair
    shape = coded(layout)._replace(
        D=max(32, padded(layout.head_dim * spec.k_bits // 8)),
        DV=padded(layout.value_dim),
        TILE=tile * tiling.parts,
        PARTS=tiling.parts,
        CHANNELS=spec.by_channel,
        STAGES=tiling.stages,
        WARPS=tiling.warps,
    )
    room = room_of(tiling, stream(layout, columns))
    tune = {"warps": tiling.warps, "programs": tiling.programs, "tile": tile, "room": room}
    return shape, tune
