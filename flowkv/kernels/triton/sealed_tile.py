"""One tile of a sealed page, taken into a running softmax by integer tensor cores, in Triton.

Eight- and four-bit pages are read two to four times as fast as raw ones, so there is that much less
time for an element. Whatever can be is done once per token, column or page instead:

* K and V^T bytes travel to shared memory by asynchronous copies and are unpacked behind it, in the
  layout in which tensor cores take them. Nibbles are split by halves (of D for K, of the page for
  V), so that each half is an operand of its own and nothing is ever reordered;
* queries, and the probabilities of a tile, become numbers of two digits (`triton.bits`), so scores
  and outputs are exact sums of int8 products: four times the tensor-core work of one digit, which
  waits for memory anyway, for 256 times less rounding;
* accumulators begin at the bits of 1.5 * 2**23 (256 times that for high digits): their float32 is
  one subtraction away, or none where an FMA takes it along. Zero points of nibbles (-8) are a
  correction per column: `-8 sum(q)` in the accumulators of scores, `-8 sum(p)` after those of
  outputs. Scales of K and V multiply scores and probabilities; those of kv4c, which belong to
  channels, multiply the query once per page.

Rounding. Beside float32 operations, each as in the raw kernel, two values are rounded:

* a query component, to a multiple of max|q| / 32512: with kv8, k8v4 and kv4h (q and k rotated) a
  logit moves by at most `|scale| max|q| (sum_d |k_d| + 4 s) / 65024`, s the token's scale: half a
  unit a component, and two units for sums that are rounded to float32. With kv4c it is q times the
  channel's scale that is rounded: `|scale| max_d |q_d r_d| (D + 4) / 65024`, r_d the range of the
  channel within the page;
* a probability times its token's scale of V, to a multiple of its tile's largest over 32512. With w
  the share of a tile's weight, the tile moves the output by at most `w max|v| (TILE + 8) / 65024`:
  half a unit and at most max|v| each, four units for rounded sums. All tiles together have w = 1.

Logits that move by e move the output by 2 e max|v|, so it moves by less than
`max|v| (2 e + (TILE + 8) / 65024)`, TILE <= 128: 0.2 % of the largest value if every error were the
worst and of one sign; measured on normal data, 1e-4. The tests assert these bounds.
"""

# ruff: noqa: PLR0913, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from flowkv.kernels.triton.bits import (
    HIGH_BITS,
    MAGIC,
    MAGIC_BITS,
    MOST,
    digits,
    joined,
    nibbles,
    rounded,
    signed,
)
from flowkv.kernels.triton.lists import TAG
from flowkv.kernels.triton.tile import LOG2E, cap, load, store_mass


@triton.jit
def slots_of(BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """`[BLOCK]` slots, in the order in which `in_order` finds them.

    Tensor cores leave a thread with rows 8 apart of a score tile, one byte each as probabilities,
    and want four neighbours of one column in a register: byte by byte through shared memory. So
    keys are read in an order that makes a thread's rows neighbours.
    """
    REPEATS: tl.constexpr = BLOCK // (16 * WARPS)
    o = tl.arange(0, BLOCK)
    if REPEATS >= 2:
        o_row = o // (16 * WARPS)
        o_thread = (o_row // 2 * WARPS + o // 16 % WARPS) * 8 + o % 8
        o = o_thread * 4 + o_row % 2 * 2 + o // 8 % 2
    return o


@triton.jit
def in_order(b, WARPS: tl.constexpr):
    """A tile `[BLOCK, COLUMNS]` over `slots_of`, by slot: no data moves between registers."""
    REPEATS: tl.constexpr = b.shape[0] // (16 * WARPS)
    if REPEATS >= 2:
        COLUMNS: tl.constexpr = b.shape[1]
        b_rows = tl.reshape(b, [REPEATS // 2, 2, WARPS, 2, 8, COLUMNS])
        b_rows = tl.permute(b_rows, (0, 2, 4, 1, 3, 5))
        return tl.reshape(b_rows, [b.shape[0], COLUMNS])
    else:
        return b


@triton.jit
def key_products(q_hi, q_lo, q_hi1, q_lo1, b_hi, b_lo, p_k, o_slot, m_t, HEAD_DIM: tl.constexpr,
                 D: tl.constexpr, K_BITS: tl.constexpr, MASK: tl.constexpr,
                 ASM: tl.constexpr):  # fmt: skip
    """`[tokens, COLUMNS]` products of keys of some slots with queries, as `joined` returns them."""
    STRIDE: tl.constexpr = HEAD_DIM * K_BITS // 8
    o_d = tl.arange(0, D)
    m_k = m_t[:, None] & (o_d < STRIDE)[None, :]
    b_k = load(p_k + o_slot[:, None] * STRIDE + o_d[None, :], m_k, MASK or D != STRIDE, False)
    b_hi = tl.zeros([o_slot.shape[0], q_hi.shape[1]], tl.int32) + b_hi[None, :]
    b_lo = tl.zeros([o_slot.shape[0], q_hi.shape[1]], tl.int32) + b_lo[None, :]
    if K_BITS == 8:
        b_k = b_k.to(tl.int8, bitcast=True)
        b_hi = tl.dot(b_k, q_hi, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_k, q_lo, acc=b_lo, out_dtype=tl.int32)
    else:
        b_0, b_1 = nibbles(b_k, ASM)
        b_hi = tl.dot(b_0, q_hi, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_0, q_lo, acc=b_lo, out_dtype=tl.int32)
        b_hi = tl.dot(b_1, q_hi1, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_1, q_lo1, acc=b_lo, out_dtype=tl.int32)
    return joined(b_hi, b_lo)


@triton.jit
def halves(b_0, b_1, ASM: tl.constexpr, BOTH: tl.constexpr):
    """Queries as numbers of two digits, and what one unit of these is worth.

    Args:
        b_0: float32 `[D, COLUMNS]`, the dims that meet the low nibbles of K, or all dims.
        b_1: The dims that meet the high nibbles.
        ASM: Whether to use PTX.
        BOTH: Whether b_1 counts.
    """
    b_most = tl.max(tl.abs(b_0), axis=0)
    if BOTH:
        b_most = tl.maximum(b_most, tl.max(tl.abs(b_1), axis=0))
    b_most = tl.maximum(b_most, 1e-30)
    b_r = (1.0 / b_most * MOST)[None, :]
    b_hi, b_lo = digits(rounded(b_0 * b_r), ASM)
    if BOTH:
        b_hi1, b_lo1 = digits(rounded(b_1 * b_r), ASM)
    else:
        b_hi1, b_lo1 = b_hi, b_lo
    return b_hi, b_lo, b_hi1, b_lo1, b_most * (1.0 / MOST)


@triton.jit
def zero_points(b_0, b_1):
    """`[COLUMNS]` -8 sum(q): by so much products with nibbles, 8 above their integers, differ."""
    return -8 * (tl.sum(b_0.to(tl.int32), axis=0) + tl.sum(b_1.to(tl.int32), axis=0))


@triton.jit
def sealed_tile(q_hi, q_lo, q_hi1, q_lo1, b_step, z_hi, z_lo, p_0, m_q, b_m, b_l, b_acc, b_acc1, t,
                p_run, p_line, p_numbers, p_mass, b_seen, b_slope, softcap,
                HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
                DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
                GRANULE: tl.constexpr, VALUES: tl.constexpr, K_SCALES: tl.constexpr,
                V_SCALES: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
                CHANNELS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                ALIBI: tl.constexpr, MASS: tl.constexpr, MASK: tl.constexpr, SPLIT: tl.constexpr,
                WARPS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Take a tile, which is cut into PARTS, into the running softmax of all columns."""
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    granule = tl.load(p_line + t // TILES)
    p_page = p_run + granule.to(tl.int64) * GRANULE
    number = t * 0
    if MASK or ALIBI or MASS > 0:
        number = tl.load(p_numbers + t // TILES)
    b_shift = b_step
    if CHANNELS:
        HALF: tl.constexpr = HEAD_DIM // 2
        p_ks = (p_page + K_SCALES).to(tl.pointer_type(tl.float16))
        o_d = tl.arange(0, D)
        m_d = o_d < HALF
        b_s0 = load(p_ks + o_d, m_d, D != HALF, True)
        b_s1 = load(p_ks + HALF + o_d, m_d, D != HALF, True)
        b_m0 = load(p_ks + HEAD_DIM + o_d, m_d, D != HALF, True)
        b_m1 = load(p_ks + HEAD_DIM + HALF + o_d, m_d, D != HALF, True)
        # There are no registers to keep queries in, so they are read anew for each page. The offset
        # is always 0, which the compiler cannot know; or it would read them ahead of the loop.
        o_0 = (granule >> TAG) * 64
        b_0 = tl.load(p_0 + o_0, mask=m_q, other=0.0).to(tl.float32)
        b_1 = tl.load(p_0 + o_0 + HALF, mask=m_q, other=0.0).to(tl.float32)
        b_shift = tl.sum(b_0 * b_m0[:, None] + b_1 * b_m1[:, None], axis=0) * b_step
        q_hi, q_lo, q_hi1, q_lo1, b_size = halves(
            b_0 * b_s0[:, None], b_1 * b_s1[:, None], ASM, True)  # fmt: skip
        b_step *= b_size
    for part in tl.static_range(PARTS):
        b_m, b_l, b_acc, b_acc1 = sealed_part(
            q_hi, q_lo, q_hi1, q_lo1, b_step, b_shift, z_hi, z_lo, b_m, b_l, b_acc, b_acc1,
            t % TILES * PARTS + part, p_page, number, p_mass, b_seen, b_slope, softcap, HEAD_DIM,
            VALUE_DIM, D, DV, PAGE, TILE // PARTS, VALUES, K_SCALES, V_SCALES, K_BITS, V_BITS,
            CHANNELS, WINDOW, SOFTCAP, ALIBI, MASS, MASK, SPLIT, WARPS,
            ASM)  # fmt: skip
    return b_m, b_l, b_acc, b_acc1


@triton.jit
def sealed_part(q_hi, q_lo, q_hi1, q_lo1, b_step, b_shift, z_hi, z_lo, b_m, b_l, b_acc, b_acc1,
                part, p_page, number, p_mass, b_seen, b_slope, softcap,
                HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
                DV: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
                K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, K_BITS: tl.constexpr,
                V_BITS: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr,
                SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASS: tl.constexpr,
                MASK: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr,
                ASM: tl.constexpr):  # fmt: skip
    """Take a part of a tile into the running softmax of all columns.

    A part is BLOCK slots of a page, and with 4-bit values also those half a page later, whose
    nibbles lie in the same bytes. b_l is `[BLOCK, COLUMNS]`, summed over slots at the end only.
    """
    PAIR: tl.constexpr = V_BITS == 4
    SLOTS: tl.constexpr = PAGE // 2 if PAIR else PAGE
    BLOCK: tl.constexpr = TILE // 2 if PAIR else TILE
    RAGGED: tl.constexpr = SLOTS % BLOCK != 0
    o_t = part * BLOCK + tl.arange(0, BLOCK)
    o_a = part * BLOCK + slots_of(BLOCK, WARPS)
    o_b = o_a + SLOTS
    m_t = o_a < SLOTS
    p_ks = (p_page + K_SCALES).to(tl.pointer_type(tl.float16))
    p_vs = (p_page + V_SCALES).to(tl.pointer_type(tl.float16))

    b_sa = key_products(q_hi, q_lo, q_hi1, q_lo1, z_hi, z_lo, p_page, o_a, m_t, HEAD_DIM, D,
                        K_BITS, RAGGED, ASM)  # fmt: skip
    b_sb = b_sa
    if PAIR:
        b_sb = key_products(q_hi, q_lo, q_hi1, q_lo1, z_hi, z_lo, p_page, o_b, m_t, HEAD_DIM, D,
                            K_BITS, RAGGED, ASM)  # fmt: skip
    b_va = load(p_vs + o_a, m_t, RAGGED, True)
    b_vb = load(p_vs + SLOTS + o_a, m_t, RAGGED and PAIR, True) if PAIR else b_va

    b_sa = logits(b_sa, p_ks, o_a, m_t, number * PAGE + o_a, b_step, b_shift, b_seen, b_slope,
                  softcap, CHANNELS, RAGGED, WINDOW, SOFTCAP, ALIBI, MASK)  # fmt: skip
    b_max = tl.max(b_sa, axis=0)
    if PAIR:
        b_sb = logits(b_sb, p_ks, o_b, m_t, number * PAGE + o_b, b_step, b_shift, b_seen, b_slope,
                      softcap, CHANNELS, RAGGED, WINDOW, SOFTCAP, ALIBI, MASK)  # fmt: skip
        b_max = tl.max(tl.maximum(b_sa, b_sb), axis=0)
    b_unit = sealed_unit(b_step, CHANNELS, SOFTCAP, ALIBI)
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
    if MASS > 0:
        store_mass(p_mass, number * MASS + part, b_top * b_unit, tl.sum(b_sum, axis=0))
    b_l = b_l * b_fade[None, :] + b_sum

    b_most = tl.maximum(b_most, 1e-30)
    b_r = (1.0 / b_most * MOST)[None, :]
    b_na = in_order(rounded(b_xa * b_r), WARPS)
    b_ha, b_la = digits(b_na, ASM)
    b_hb, b_lb = b_ha, b_la
    b_most *= 1.0 / MOST
    b_less = b_most * MAGIC
    if PAIR:
        b_nb = in_order(rounded(b_xb * b_r), WARPS)
        b_hb, b_lb = digits(b_nb, ASM)
        RAISED: tl.constexpr = (TILE * (MAGIC_BITS + 128) + (1 << 31)) % (1 << 32) - (1 << 31)
        b_n = tl.sum(b_na + b_nb, axis=0) - RAISED  # sums wrap around, and back
        b_less = ((8 * b_n).to(tl.float32) + MAGIC) * b_most
    p_v = p_page + VALUES
    m_t = o_t < SLOTS
    b_acc = add_values(b_acc, b_ha, b_la, b_hb, b_lb, b_fade, b_less, b_most, p_v, o_t, m_t, 0,
                       VALUE_DIM, PAGE, V_BITS, RAGGED, ASM)  # fmt: skip
    if SPLIT:
        b_acc1 = add_values(b_acc1, b_ha, b_la, b_hb, b_lb, b_fade, b_less, b_most, p_v, o_t, m_t,
                            DV // 2, VALUE_DIM, PAGE, V_BITS, RAGGED, ASM)  # fmt: skip
    return b_top, b_l, b_acc, b_acc1


@triton.jit
def add_values(b_acc, b_ha, b_la, b_hb, b_lb, b_fade, b_less, b_most, p_v, o_t, m_t,
               FROM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
               V_BITS: tl.constexpr, RAGGED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Add the values of some slots, from dim FROM on, to `[dims, COLUMNS]`, which fades.

    High digits are done with before low ones begin: there are not registers for both.
    """
    ROW: tl.constexpr = PAGE * V_BITS // 8
    DIMS: tl.constexpr = b_acc.shape[0]
    o_v = FROM + tl.arange(0, DIMS)
    m_v = (o_v < VALUE_DIM)[:, None] & m_t[None, :]
    b_v = load(p_v + o_v[:, None] * ROW + o_t[None, :], m_v, RAGGED or FROM + DIMS > VALUE_DIM,
               False)  # fmt: skip
    b_hi = tl.full([DIMS, b_acc.shape[1]], HIGH_BITS, tl.int32)
    b_lo = tl.full([DIMS, b_acc.shape[1]], MAGIC_BITS, tl.int32)
    if V_BITS == 4:
        b_va, b_vb = nibbles(b_v, ASM)
        b_hi = tl.dot(b_va, b_ha, acc=b_hi, out_dtype=tl.int32)
        b_hi = tl.dot(b_vb, b_hb, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_va, b_la, acc=b_lo, out_dtype=tl.int32)
        b_lo = tl.dot(b_vb, b_lb, acc=b_lo, out_dtype=tl.int32)
    else:
        b_va = signed(b_v, ASM)
        b_hi = tl.dot(b_va, b_ha, acc=b_hi, out_dtype=tl.int32)
        b_lo = tl.dot(b_va, b_la, acc=b_lo, out_dtype=tl.int32)
    b_acc = b_acc * b_fade[None, :] - b_less[None, :]
    b_acc += (b_hi.to(tl.float32, bitcast=True) - MAGIC * 256.0) * b_most[None, :]
    return b_acc + b_lo.to(tl.float32, bitcast=True) * b_most[None, :]


@triton.jit
def sealed_unit(b_step, CHANNELS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """`[COLUMNS]` units of `logits`."""
    if SOFTCAP or ALIBI:
        return b_step * 0.0 + LOG2E
    elif CHANNELS:
        return b_step * 0.0 + 1.0
    else:
        return b_step


@triton.jit
def logits(b_s, p_ks, o_t, m_t, b_at, b_step, b_shift, b_seen, b_slope, softcap,
           CHANNELS: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr,
           SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Scores b_s' such that `b_s' * unit` is the logit in units of log 2."""
    if CHANNELS:
        b_s = b_s * b_step[None, :] + (b_shift - b_step * MAGIC)[None, :]
    else:
        b_scale = load(p_ks + o_t, m_t, RAGGED, True)
        b_s = b_s * b_scale[:, None] - (b_scale * MAGIC)[:, None]
        if SOFTCAP or ALIBI:
            b_s = b_s * b_step[None, :]
    b_s = cap(b_s, 1.0, softcap, SOFTCAP)
    if ALIBI:
        b_s += b_slope[None, :] * (b_at[:, None] - (b_seen - 1)[None, :]).to(tl.float32)
    if RAGGED:
        b_s = tl.where(m_t[:, None], b_s, -float("inf"))
    if MASK:
        b_s = tl.where(b_at[:, None] >= (b_seen - WINDOW)[None, :], b_s, -float("inf"))
    return b_s
