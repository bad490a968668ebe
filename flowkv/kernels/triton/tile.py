"""What the attention kernels do alike with one tile of K and V: find it, load it, scale scores."""

from __future__ import annotations

import triton
import triton.language as tl

# ruff: noqa: PLR0913, PLR0917


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # finite: "nothing seen yet" needs no guards against NaN


@triton.jit
def locate(t, p_run, p_line, PAGE: tl.constexpr, TILE: tl.constexpr, GRANULE: tl.constexpr):
    """(Pointer to the page's run, slot of the tile's first token, position of that token).

    Args:
        t: Number of the tile; pages are cut into cdiv(PAGE, TILE) tiles.
        p_run: Run of the head in a page at granule 0.
        p_line: The row's line of the page table.
        PAGE: Tokens of a page.
        TILE: Tokens of a tile.
        GRANULE: Elements of a granule; a constant, it tells the compiler the alignment.
    """
    TILES: tl.constexpr = (PAGE + TILE - 1) // TILE
    i_page = t // TILES
    o_slot = t % TILES * TILE
    p_page = p_run + tl.load(p_line + i_page).to(tl.int64) * GRANULE
    return p_page, o_slot, i_page * PAGE + o_slot


@triton.jit
def load(p, m, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """A tile; elements outside of `m` are 0 and not read.

    UPCAST is for the interpreter, whose bfloat16 arithmetic is wrong.
    """
    if MASKED:
        b = tl.load(p, mask=m, other=0.0)
    else:
        b = tl.load(p)
    if UPCAST:
        b = b.to(tl.float32)
    return b


@triton.jit
def cap(b_s, scale, softcap, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr = False):
    """Scores b_s' such that `b_s' * unit` is the logit, capped, in units of log 2.

    NATURAL asks for the logit itself, so that a bias may be added to it.
    """
    if SOFTCAP:  # cap * tanh(s / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)
        b_exp = tl.math.exp2(b_s * (2.0 * LOG2E * scale / softcap))
        return softcap - 2.0 * softcap / (b_exp + 1.0)
    elif NATURAL:
        return b_s * scale
    else:
        return b_s


@triton.jit
def unit_of(scale, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr = False):
    """The unit of `cap`."""
    if SOFTCAP or NATURAL:
        return LOG2E
    else:
        return scale * LOG2E


@triton.jit
def visible(b_at, b_seen, b_tree, context, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """Whether queries see positions b_at, as far as causality, a tree and a window say.

    Args:
        b_at: Positions, broadcast against the queries.
        b_seen: Number of positions up to each query's own; of the row, without causality.
        b_tree: int64, bit j of a query's: it sees new token j of its row.
        context: Position of the row's first new token.
        WINDOW: Positions that a query sees, its own included; 0 for all.
        TREE: Whether b_tree decides about the new tokens.
    """
    if TREE:
        b_new = tl.minimum(tl.maximum(b_at - context, 0), 63).to(tl.int64)
        m = (b_at < context) | (((b_tree >> b_new) & 1) != 0)
    else:
        m = b_at < b_seen
    if WINDOW > 0:
        m = m & (b_at >= b_seen - WINDOW)
    return m


@triton.jit
def store_mass(p_mass, i_tile, b_top, b_sum):
    """Store log 2 of the weight of a tile, before normalisation: `b_sum * 2**b_top` by column.

    Args:
        p_mass: `[COLUMNS]` pointers for tile 0; tiles follow at the distance of all KV heads.
        i_tile: Number of the tile within the row.
        b_top: In units of log 2.
        b_sum: Weights relative to it.
    """
    COLUMNS: tl.constexpr = b_sum.shape[0]
    o_tile = i_tile.to(tl.int64) * tl.num_programs(1) * COLUMNS
    b_log = b_top + tl.math.log2(tl.where(b_sum == 0.0, 1.0, b_sum))  # NaN stays NaN
    tl.store(p_mass + o_tile, tl.where(b_sum == 0.0, -float("inf"), b_log))


@triton.jit
def store_partial(p_part, p_part_lse, o_part, m_c, b_m, b_l, b_acc, FROM: tl.constexpr,
                  VALUE_DIM: tl.constexpr):  # fmt: skip
    """Store a running softmax as a partial: m in units of log 2, acc from dim FROM on."""
    o_v = FROM + tl.arange(0, b_acc.shape[0])
    b_some = tl.where(b_l == 0.0, 1.0, b_l)  # NaN stays NaN
    b_lse = tl.where(b_l == 0.0, -float("inf"), b_m + tl.math.log2(b_some))
    tl.store(p_part_lse + o_part, b_lse, mask=m_c)
    m_o = m_c[None, :] & (o_v < VALUE_DIM)[:, None]
    tl.store(p_part + o_part[None, :] * VALUE_DIM + o_v[:, None], b_acc / b_some[None, :], mask=m_o)


# Integers in the registers of sealed kernels: nibbles, signed bytes, and numbers of two digits.
#
# Four bytes fill a register, and a compiler that does not know it takes them apart: as plain code
# these few lines cost as much as everything else in a decode kernel. With ASM they are the two or
# three PTX instructions that they ought to be. Without (AMD, the interpreter) they are plain Triton
# of the same meaning; a test runs the PTX in a model of its four instructions to compare them.
#
# A *number of two digits* is an integer n of at most 127 * 256 in magnitude, kept as two int8 `hi`
# and `lo` with n = 256 hi + lo: tensor cores multiply both with 8- or 4-bit integers, exactly, and
# the second product costs little beside the loads it waits for (`triton.sealed_tile`).

MOST = tl.constexpr(32512.0)
"""The largest number of two digits, 127 * 256."""

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds a float32 below 2**22 to an integer, the low bits of the sum."""

MAGIC_BITS = tl.constexpr(0x4B400000)
"""The bits of MAGIC: an int32 accumulator that begins here ends as the bits of MAGIC + its sum."""

HIGH_BITS = tl.constexpr(0x4F400000)
"""The bits of 256 * MAGIC: sums of high digits that begin here count 256 times."""

SPLIT_NIBBLES = tl.constexpr("""{
    .reg .b32 t;
    and.b32 $0, $2, 0x0F0F0F0F;
    shr.u32 t, $2, 4;
    and.b32 $1, t, 0x0F0F0F0F;
}""")
FLIP_SIGNS = tl.constexpr("xor.b32 $0, $1, 0x80808080;")
SPLIT_DIGITS = tl.constexpr("""{
    .reg .b32 s, t;
    prmt.b32 s, $2, $3, 0x0051;
    prmt.b32 t, $4, $5, 0x0051;
    prmt.b32 $0, s, t, 0x5410;
    prmt.b32 s, $2, $3, 0x0040;
    prmt.b32 t, $4, $5, 0x0040;
    prmt.b32 s, s, t, 0x5410;
    xor.b32 $1, s, 0x80808080;
}""")


@triton.jit
def nibbles(b, ASM: tl.constexpr):
    """(Low, high) nibbles of bytes, as int8 of 0 to 15."""
    if ASM:
        return tl.inline_asm_elementwise(
            SPLIT_NIBBLES, "=r,=r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        return (b & 15).to(tl.int8), (b >> 4).to(tl.int8)


@triton.jit
def signed(b, ASM: tl.constexpr):
    """Bytes u as int8 u - 128."""
    if ASM:
        return tl.inline_asm_elementwise(
            FLIP_SIGNS, "=r,r", [b], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return (b ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def rounded(x):
    """Float32 of at most MOST in magnitude as integers, 128 and MAGIC_BITS above themselves."""
    return (x + (MAGIC + 128.0)).to(tl.int32, bitcast=True)


@triton.jit
def digits(b, ASM: tl.constexpr):
    """(hi, lo) of what `rounded` returned: byte 1, and byte 0 less the 128."""
    if ASM:
        return tl.inline_asm_elementwise(
            SPLIT_DIGITS, "=r,=r,r,r,r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        return (b >> 8).to(tl.int8), (b ^ 128).to(tl.int8)


@triton.jit
def joined(b_hi, b_lo):
    """Float32 MAGIC + 256 hi + lo of accumulators that began at HIGH_BITS and MAGIC_BITS.

    Both sums are below 2**22. What is left of MAGIC goes where the result is multiplied: an FMA
    with a constant costs less than to subtract it. The error is half a unit, or 2**-24 of the sum.
    """
    b_hi = b_hi.to(tl.float32, bitcast=True) - 256.0 * MAGIC
    return b_hi + b_lo.to(tl.float32, bitcast=True)
