"""What the attention kernels do alike with one tile of K and V: find it, load it, scale scores."""

from __future__ import annotations

import triton
import triton.language as tl

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
def cap(b_s, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores b_s' such that `b_s' * unit` is the logit, capped, in units of log 2."""
    if SOFTCAP:  # cap * tanh(s / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)
        b_exp = tl.math.exp2(b_s * (2.0 * LOG2E * scale / softcap))
        return softcap - 2.0 * softcap / (b_exp + 1.0)
    else:
        return b_s


@triton.jit
def unit_of(scale, SOFTCAP: tl.constexpr):
    """The unit of `cap`."""
    if SOFTCAP:
        return LOG2E
    else:
        return scale * LOG2E
