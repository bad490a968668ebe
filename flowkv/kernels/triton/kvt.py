"""Decoding of cold pages (codec kvt, see `flowkv.kvt`) on GPUs, in Triton: two launches a batch.

The first decodes the coefficients of each chunk of each page, one stream a lane, its four states
side by side. The second multiplies them with the basis, rotates keys to their positions and writes
raw elements. Streams are bound by latency, so that programs are small and many.
"""

# ruff: noqa: PLR0913, PLR0915, PLR0917 - kernels have many operands

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from flowkv.core.geometry import PageLayout
from flowkv.kernels.operands import sent
from flowkv.kernels.triton.codec import narrow, widen
from flowkv.kernels.triton.launch import Constants, launch, power, strides

LANES = 8
"""Streams of a program: with four states each, the threads of one warp."""
FINE, COARSE = 64, 16
"""Axes that are multiplied at once; rows of both kinds of axes are padded to multiples of these."""
_ELEMENTS = 2048
_FINE, _COARSE = tl.constexpr(FINE), tl.constexpr(COARSE)
_PART, _PAGE, _CHUNK, _TILE = (tl.constexpr(n) for n in (4, 3, 6, 8))  # fields of each table


class CodedPart(NamedTuple):
    """Layers of a coded page that are decoded.

    Attributes:
        data: The coded page.
        first: First layer.
        layers: Number of layers.
        start: Position of its first token.
        chunks: First byte, words, literals and whole tokens `[chunks, 4]`; all within `data`. A
            page without words is bad.
    """

    data: bytes
    first: int
    layers: int
    start: int
    chunks: NDArray[np.int64]


class BasisTables(NamedTuple):
    """A basis on a device. E elements a token, in the order of chunks; axes are padded.

    Attributes:
        slots: i32 `[classes * 2048]`, see `SymbolTables`.
        axes: i32 `[axes of all chunks]`: class of an axis, and its shift above the lowest byte.
        chunks: i32 `[chunks, 6]`: first entry in `axes`, axes, coarse axes, first layer, last layer
            + 1, elements.
        tiles: i32 `[tiles, 8]`, a head of a layer of keys or values each: chunk, side, layer, head,
            first element, the same within the chunk, line of `pairs`, rotated pairs.
        pairs: i32 `[kinds, 2, P]`: two dims each, the rotated ones first; -1 for none.
        coarse: float32 `[E, coarse axes]`.
        fine: i8 `[E, fine axes]`.
        mean: float32 `[E]`.
        scale: float32 `[E]`, units of the products with `fine`.
        speeds: float64 `[turns, P]`, inverse frequencies; 0 where none.
    """

    slots: torch.Tensor
    axes: torch.Tensor
    chunks: torch.Tensor
    tiles: torch.Tensor
    pairs: torch.Tensor
    coarse: torch.Tensor
    fine: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor
    speeds: torch.Tensor

    def page_bytes(self, layout: PageLayout, layers: int) -> int:
        """Return the bytes beside its code that a page takes while layers of it are decoded."""
        coefficients = 4 * self.coarse.shape[1] + self.fine.shape[1]
        token_bytes = len(self.chunks) * coefficients + 32 * self.speeds.numel()
        return layers * layout.stripe_stride_bytes + layout.page_size * token_bytes


class CodedBatch(NamedTuple):
    """Coded pages on a device.

    Attributes:
        data: u8 `[bytes]`.
        parts: i32 `[pages, chunks, 4]`: first byte, words, literals, whole tokens; all within
            `data`.
        pages: i32 `[pages, 3]`: first layer, last layer + 1, place of the first in `out`.
        cos: float32 `[turns, pages, tokens, P]`.
        sin: The same of sines.
    """

    data: torch.Tensor
    parts: torch.Tensor
    pages: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Coefficients(NamedTuple):
    """Decoded coefficients.

    Attributes:
        coarse: float32 `[pages, chunks, tokens, coarse axes]`, padded with zeros.
        fine: i8 `[pages, chunks, tokens, fine axes]`, padded with any.
        bad: i32 `[pages]`: not 0 where the bytes are no such page.
    """

    coarse: torch.Tensor
    fine: torch.Tensor
    bad: torch.Tensor


@triton.jit
def _word(p, m):
    """Load words of two bytes, at any address."""
    b_low = tl.load(p, mask=m, other=0).to(tl.uint32)
    return b_low | (tl.load(p + 1, mask=m, other=0).to(tl.uint32) << 8)


@triton.jit
def _signed(b):
    """Return the values of words that are signed."""
    return (b << 16).to(tl.int32, bitcast=True) >> 16


@triton.jit(do_not_specialize=["n_pages", "n_chunks"])
def symbols_kernel(p_data, p_parts, p_pages, p_chunks, p_axes, p_slots, p_coarse, p_fine, p_bad,
                   n_pages, n_chunks, s_coarse, s_fine, C: tl.constexpr):  # fmt: skip
    """Decode a chunk of BLOCK pages, as `entropy._decode` does. Grid (chunks, cdiv(n, BLOCK)).

    A stream that goes on behind its words reads the last one again, and is bad.
    """
    i_chunk = tl.program_id(0)
    o_page = tl.program_id(1) * C.BLOCK + tl.arange(0, C.BLOCK)
    o_s = tl.arange(0, 4)[None, :]
    p_chunk = p_chunks + i_chunk * _CHUNK
    p_codes = p_axes + tl.load(p_chunk)
    n_axes = tl.load(p_chunk + 1)
    n_coarse = tl.load(p_chunk + 2)
    m_page = o_page < n_pages
    b_first = tl.load(p_pages + o_page * _PAGE, mask=m_page, other=0)
    b_stop = tl.load(p_pages + o_page * _PAGE + 1, mask=m_page, other=0)
    m_page = (b_first < tl.load(p_chunk + 4)) & (b_stop > tl.load(p_chunk + 3)) & m_page
    o_run = o_page * n_chunks + i_chunk
    p_part = p_parts + o_run * _PART
    b_at = tl.load(p_part, mask=m_page, other=0)
    b_words = tl.load(p_part + 1, mask=m_page, other=0)
    b_literals = tl.load(p_part + 2, mask=m_page, other=0)
    b_tokens = tl.load(p_part + 3, mask=m_page, other=0)
    m_long = m_page & (b_words >= 8)
    p_words = (p_data + b_at)[:, None]
    p_literals = p_words + 2 * b_words[:, None]
    b_end = b_words[:, None] - 1
    m = m_long[:, None] & (o_s < 4)
    b_x = _word(p_words + 4 * o_s, m) | (_word(p_words + 4 * o_s + 2, m) << 16)
    b_next = tl.full((C.BLOCK,), 8, tl.int32)
    b_used = tl.full((C.BLOCK,), 0, tl.int32)
    b_bad = tl.full((C.BLOCK, 4), 0, tl.int32)
    o_out = o_run.to(tl.int64)[:, None] * C.PAGE + o_s
    for i in tl.range(n_axes):
        code = tl.load(p_codes + i)
        shift = code >> 8
        most = tl.where(i < n_coarse, 32768, 127)
        p_table = p_slots + (code & 255) * 2048
        for t in tl.range(0, C.PAGE, 4):
            b_e = tl.load(p_table + (b_x & 2047).to(tl.int32)).to(tl.uint32, bitcast=True)
            b_y = ((b_e >> 8) & 4095) * (b_x >> 11) + (b_e >> 20)
            # Whether a state takes a word, and, without its low bits, one more.
            m_escape = ((b_e & 32) != 0) & m
            m_one = (b_y < 65536) & m
            limit = tl.where(m_one, 1, 65536).to(tl.uint32) << shift.to(tl.uint32)
            m_two = m & (b_y < limit) & ((b_e & 32) < shift.to(tl.uint32))
            b_count = m_one.to(tl.int32) + m_two.to(tl.int32) + (m_escape.to(tl.int32) << 8)
            b_sum = tl.cumsum(b_count, 1)
            o_w = b_next[:, None] + ((b_sum - b_count) & 255)
            o_l = b_used[:, None] + ((b_sum - b_count) >> 8)
            b_all = tl.sum(b_count, 1)
            b_next += b_all & 255
            b_used += b_all >> 8
            b_w = _word(p_words + 2 * tl.minimum(o_w, b_end), m_one)
            b_x = tl.where(m_one, (b_y << 16) | b_w, b_y)
            m_literal = m_escape & (o_l < b_literals[:, None])
            b_l = _signed(_word(p_literals + 2 * o_l, m_literal))
            b_bad |= (m_escape & (tl.abs(b_l) > most)).to(tl.int32)
            b_low = b_x & ((1 << shift) - 1).to(tl.uint32)
            b_q = (((b_e & 31).to(tl.int32) - 15) << shift) | b_low.to(tl.int32)
            b_q = tl.where(m_escape, b_l, b_q)
            b_x = tl.where(m_escape, b_x, b_x >> shift.to(tl.uint32))
            o_w = tl.minimum(o_w + m_one.to(tl.int32), b_end)
            b_x = tl.where(m_two, (b_x << 16) | _word(p_words + 2 * o_w, m_two), b_x)
            if i < n_coarse:
                tl.store(p_coarse + (o_out + t) * s_coarse + i, b_q.to(tl.float32), mask=m)
            else:
                tl.store(p_fine + (o_out + t) * s_fine + (i - n_coarse), b_q.to(tl.int8), mask=m)
    b_wrong = tl.max(b_bad, 1) + (b_next != b_words) + (b_used != b_literals)
    p_tokens = p_data + b_at + 2 * (b_words + b_literals)
    for j in tl.range(tl.max(b_tokens, 0)):
        b_token = tl.load(p_tokens + j, mask=m_page & (j < b_tokens), other=0)
        b_wrong += b_token.to(tl.int32) >= C.PAGE
    b_one = tl.full((C.BLOCK,), 1, tl.int32)
    tl.store(p_bad + o_page, b_one, mask=m_page & (b_wrong > 0))


@triton.jit
def _line(p, element, b_dim, m_dim):
    """Load a float of each dim, `[1, P]`."""
    return tl.load(p + element + b_dim, mask=m_dim, other=0.0)[None, :]


@triton.jit
def _whole(p, b_x, b_dim, m_dim, m_token, C: tl.constexpr):
    """Return elements with those of a token that is stored whole, from `p` on."""
    b = _signed(_word(p + 2 * b_dim, m_dim)).to(tl.int16)
    if C.BF16:
        b_kept = widen(b, True)
    else:
        b_kept = b.to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(m_token, b_kept[None, :], b_x)


@triton.jit(do_not_specialize=["n_chunks"])
def elements_kernel(p_out, p_data, p_parts, p_pages, p_chunks, p_tiles, p_pairs, p_x_coarse,
                    p_x_fine, p_coarse, p_fine, p_mean, p_scale, p_cos, p_sin, n_chunks, s_coarse,
                    s_fine, C: tl.constexpr):  # fmt: skip
    """Write BLOCK tokens of a tile. Grid (tiles, pages, cdiv(PAGE, BLOCK)).

    Dims come in pairs, `_u` and `_v`, which a rotation mixes: D of them.
    """
    i_page = tl.program_id(1)
    p_tile = p_tiles + tl.program_id(0) * _TILE
    i_chunk = tl.load(p_tile)
    layer = tl.load(p_tile + 2)
    first = tl.load(p_pages + i_page * _PAGE)
    if (layer < first) | (layer >= tl.load(p_pages + i_page * _PAGE + 1)):
        return
    element = tl.load(p_tile + 4).to(tl.int64)
    kind = tl.load(p_tile + 6)
    n_turned = tl.load(p_tile + 7)
    o_t = tl.program_id(2) * C.BLOCK + tl.arange(0, C.BLOCK)
    m_t = o_t < C.PAGE
    o_j = tl.arange(0, C.D)
    b_u = tl.load(p_pairs + kind * 2 * C.D + o_j)
    b_v = tl.load(p_pairs + (kind * 2 + 1) * C.D + o_j)
    m_u = b_u >= 0
    m_v = b_v >= 0
    o_run = i_page * n_chunks + i_chunk
    o_row = (o_run.to(tl.int64) * C.PAGE + o_t)[:, None]
    n_coarse = tl.load(p_chunks + i_chunk * _CHUNK + 2)
    n_fine = tl.load(p_chunks + i_chunk * _CHUNK + 1) - n_coarse
    b_xu = tl.full((C.BLOCK, C.D), 0.0, tl.float32)
    b_xv = tl.full((C.BLOCK, C.D), 0.0, tl.float32)
    o_k = tl.arange(0, _COARSE)
    p_a = p_x_coarse + o_row * s_coarse + o_k[None, :]
    p_u = p_coarse + (element + b_u)[None, :] * s_coarse + o_k[:, None]
    p_v = p_coarse + (element + b_v)[None, :] * s_coarse + o_k[:, None]
    for k in tl.range(0, n_coarse, _COARSE):
        b_a = tl.load(p_a + k, mask=m_t[:, None], other=0.0)
        b_bu = tl.load(p_u + k, mask=m_u[None, :], other=0.0)
        b_bv = tl.load(p_v + k, mask=m_v[None, :], other=0.0)
        b_xu = tl.dot(b_a, b_bu, acc=b_xu, input_precision="ieee", out_dtype=tl.float32)
        b_xv = tl.dot(b_a, b_bv, acc=b_xv, input_precision="ieee", out_dtype=tl.float32)
    b_su = tl.full((C.BLOCK, C.D), 0, tl.int32)
    b_sv = tl.full((C.BLOCK, C.D), 0, tl.int32)
    o_n = tl.arange(0, _FINE)
    p_b = p_x_fine + o_row * s_fine + o_n[None, :]
    p_fu = p_fine + (element + b_u)[None, :] * s_fine + o_n[:, None]
    p_fv = p_fine + (element + b_v)[None, :] * s_fine + o_n[:, None]
    for k in tl.range(0, n_fine, _FINE):
        b_b = tl.load(p_b + k, mask=m_t[:, None], other=0)
        b_bu = tl.load(p_fu + k, mask=m_u[None, :], other=0)
        b_bv = tl.load(p_fv + k, mask=m_v[None, :], other=0)
        b_su = tl.dot(b_b, b_bu, acc=b_su, out_dtype=tl.int32)
        b_sv = tl.dot(b_b, b_bv, acc=b_sv, out_dtype=tl.int32)
    b_xu += _line(p_mean, element, b_u, m_u)
    b_xv += _line(p_mean, element, b_v, m_v)
    b_xu += _line(p_scale, element, b_u, m_u) * b_su.to(tl.float32)
    b_xv += _line(p_scale, element, b_v, m_v) * b_sv.to(tl.float32)
    p_part = p_parts + o_run * _PART
    n_tokens = tl.load(p_part + 3)
    p_token = p_data + tl.load(p_part) + 2 * (tl.load(p_part + 1) + tl.load(p_part + 2))
    n = tl.load(p_chunks + i_chunk * _CHUNK + 5)
    p_kept = p_token + n_tokens + 2 * tl.load(p_tile + 5)
    for j in tl.range(n_tokens):
        m_token = (o_t == tl.load(p_token + j).to(tl.int32))[:, None]
        b_xu = _whole(p_kept + 2 * j * n, b_xu, b_u, m_u, m_token, C)
        b_xv = _whole(p_kept + 2 * j * n, b_xv, b_v, m_v, m_token, C)
    if n_turned > 0:
        o_line = ((kind * tl.num_programs(1) + i_page) * C.PAGE + o_t) * C.D
        o_angle = o_line[:, None] + o_j[None, :]
        m_turned = (o_j < n_turned)[None, :]
        b_cos = tl.load(p_cos + o_angle, mask=m_t[:, None], other=0.0)
        b_sin = tl.load(p_sin + o_angle, mask=m_t[:, None], other=0.0)
        b_yu = tl.where(m_turned, b_xu * b_cos - b_xv * b_sin, b_xu)
        b_xv = tl.where(m_turned, b_xv * b_cos + b_xu * b_sin, b_xv)
        b_xu = b_yu
    stripe = tl.load(p_pages + i_page * _PAGE + 2) + layer - first
    side = tl.load(p_tile + 1)
    p_to = p_out + stripe.to(tl.int64) * C.STRIPE + tl.load(p_tile + 3) * C.RUN + side * C.VALUES
    p_to += o_t[:, None] * tl.where(side > 0, C.VALUE_DIM, C.HEAD_DIM)
    dtype: tl.constexpr = p_out.dtype.element_ty
    tl.store(p_to + b_u[None, :], narrow(b_xu, dtype, C.BF16), mask=m_t[:, None] & m_u[None, :])
    tl.store(p_to + b_v[None, :], narrow(b_xv, dtype, C.BF16), mask=m_t[:, None] & m_v[None, :])


def send_batch(basis: BasisTables, parts: Sequence[CodedPart], layout: PageLayout) -> CodedBatch:
    """Return pages on the device of their basis, which then are decoded to lie behind each other.

    Angles are computed as float64, as `KeyTurn.angles` does.
    """
    device, start, stripe = basis.mean.device, 0, 0
    data = torch.frombuffer(bytearray().join(one.data for one in parts), dtype=torch.uint8)
    places, spans = list[Any](), list[tuple[int, ...]]()
    for one in parts:
        places.append(one.chunks + np.array([start, 0, 0, 0]))
        spans.append((one.first, one.first + one.layers, stripe))
        start, stripe = start + len(one.data), stripe + one.layers
    tables = (np.array(one, np.int32) for one in (places, spans))
    first = sent(torch.tensor([one.start for one in parts], dtype=torch.int64), device)
    at = first[:, None] + torch.arange(layout.page_size, device=device)
    angles = at.double()[..., None] * basis.speeds[:, None, None]
    there = (sent(torch.from_numpy(one), device) for one in tables)
    both = angles.cos().float(), angles.sin().float()
    return CodedBatch._make((sent(data, device), *there, *both))


def decode_symbols(basis: BasisTables, batch: CodedBatch, page_size: int) -> Coefficients:
    """Decode the coefficients of coded pages, in the chunks of the layers that are asked for."""
    (n_pages, n_chunks), device = batch.parts.shape[:2], batch.data.device
    shape = n_pages, n_chunks, page_size
    found = Coefficients(
        torch.zeros(*shape, basis.coarse.shape[1], dtype=torch.float32, device=device),
        torch.empty(*shape, basis.fine.shape[1], dtype=torch.int8, device=device),
        torch.zeros(n_pages, dtype=torch.int32, device=device),
    )
    launch(
        symbols_kernel,
        (n_chunks, triton.cdiv(n_pages, LANES)),
        *(batch.data, batch.parts, batch.pages, basis.chunks, basis.axes, basis.slots, *found),
        *(n_pages, n_chunks, basis.coarse.shape[1], basis.fine.shape[1]),
        C=Constants(PAGE=page_size, BLOCK=LANES),
        num_warps=1,
    )
    return found


def write_elements(
    basis: BasisTables,
    batch: CodedBatch,
    found: Coefficients,
    out: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Write raw layers of pages into u8 `out`, each where `batch.pages` places it."""
    pairs = basis.pairs.shape[2]
    block = max(16, min(power(layout.page_size), _ELEMENTS // pairs))
    bits = layout.dtype == "bfloat16"  # as bits, rounded by hand: see `widen`
    constants = strides(layout)._replace(D=pairs, BLOCK=block, BF16=bits)
    launch(
        elements_kernel,
        (len(basis.tiles), len(batch.pages), triton.cdiv(layout.page_size, block)),
        out.view(torch.int16 if bits else getattr(torch, layout.dtype)),
        *(batch.data, batch.parts, batch.pages, basis.chunks, basis.tiles, basis.pairs),
        *(found.coarse, found.fine, basis.coarse, basis.fine, basis.mean, basis.scale),
        *(batch.cos, batch.sin, batch.parts.shape[1], basis.coarse.shape[1], basis.fine.shape[1]),
        C=constants,
        enable_fp_fusion=False,
    )


def decode_pages(
    basis: BasisTables, parts: Sequence[CodedPart], layout: PageLayout
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Decode layers of coded pages, one or more; queue all work.

    Returns:
        The raw layers of each, u8, and i32 `[pages]`, not 0 for bytes that are no such page.
    """
    batch = send_batch(basis, parts, layout)
    sizes = [one.layers * layout.stripe_stride_bytes for one in parts]
    out = torch.zeros(sum(sizes), dtype=torch.uint8, device=batch.data.device)
    found = decode_symbols(basis, batch, layout.page_size)
    write_elements(basis, batch, found, out, layout)
    return out.split(sizes), found.bad
