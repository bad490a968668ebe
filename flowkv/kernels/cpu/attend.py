"""Attention over pages on the CPU: one slice of a step's work, and the merge of its partials.

It also holds the loops over the elements of a head, raw and in codes, the merge of whole results,
and dense rows from pages of several codecs.
"""

from __future__ import annotations

import math

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from flowkv.compiled.machine_code import (
    LINE_BYTES,
    PART,
    ahead,
    data,
    instruction,
    pointer,
    prefetch,
)
from flowkv.core.geometry import CODEC_SHIFT, CODECS, GRANULE_MASK
from flowkv.kernels.cpu.bits import (
    FAST,
    exp2,
    float_of,
    memcpy,
    memzero,
    narrow,
    order,
    tanh,
    transpose,
    unorder,
    widen,
)
from flowkv.kernels.cpu.transcode import (
    EXACT,
    GRANULE,
    K8V4,
    KV4C,
    KV4H,
    KV8,
    RAW,
    key_row,
    rotate,
    store_row,
    value_row,
)

# The two inner loops of CPU attention, over the elements of a head: scores and mix.
#
# Both serve a block of 4, 2 or 1 query rows at once, so that an element of K or V is loaded and
# widened once for all of them, and two (scores) or four (mix) tokens, so that the query rows and
# accumulators are loaded less often than they are used. LLVM vectorises the loops over d. Query
# rows, scores and accumulators are float32 scratch; k and v point into a page.

_PLAIN = {**PART, "fastmath": FAST}
_INLINE = {**_PLAIN, "forceinline": True}
ZERO = np.float32(0)


@njit(**_INLINE)
def _scores4(q, k, dim, s, size):
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
    k1 = ahead(k, dim)
    q1, q2, q3 = ahead(q, dim), ahead(q, 2 * dim), ahead(q, 3 * dim)
    for d in range(dim):
        x, y = widen(k[d]), widen(k1[d])
        a0 += q[d] * x
        b0 += q[d] * y
        a1 += q1[d] * x
        b1 += q1[d] * y
        a2 += q2[d] * x
        b2 += q2[d] * y
        a3 += q3[d] * x
        b3 += q3[d] * y
    s[0], s[1] = a0, b0
    s[size], s[size + 1] = a1, b1
    s[2 * size], s[2 * size + 1] = a2, b2
    s[3 * size], s[3 * size + 1] = a3, b3


@njit(**_INLINE)
def _scores2(q, k, dim, s, size):
    a0 = a1 = b0 = b1 = ZERO
    k1, q1 = ahead(k, dim), ahead(q, dim)
    for d in range(dim):
        x, y = widen(k[d]), widen(k1[d])
        a0 += q[d] * x
        b0 += q[d] * y
        a1 += q1[d] * x
        b1 += q1[d] * y
    s[0], s[1] = a0, b0
    s[size], s[size + 1] = a1, b1


@njit(**_INLINE)
def _scores1(q, k, dim, s):
    a = b = ZERO
    k1 = ahead(k, dim)
    for d in range(dim):
        a += q[d] * widen(k[d])
        b += q[d] * widen(k1[d])
    s[0], s[1] = a, b


@njit(**_INLINE)
def scores(rows, q, k, dim, s, size):
    """Set s[r * size + t] = q[r] .

    k[t] for `rows` (4, 2 or 1) query rows and the tokens t = 0, 1.
    """
    if rows == 4:
        _scores4(q, k, dim, s, size)
    elif rows == 2:
        _scores2(q, k, dim, s, size)
    else:
        _scores1(q, k, dim, s)


@njit(**_INLINE)
def _mix4(p, size, v, dim, o, stride):
    v0, v1, v2, v3 = v
    p1, p2, p3 = ahead(p, size), ahead(p, 2 * size), ahead(p, 3 * size)
    a0, a1, a2, a3 = p[0], p[1], p[2], p[3]
    b0, b1, b2, b3 = p1[0], p1[1], p1[2], p1[3]
    c0, c1, c2, c3 = p2[0], p2[1], p2[2], p2[3]
    d0, d1, d2, d3 = p3[0], p3[1], p3[2], p3[3]
    o1, o2, o3 = ahead(o, stride), ahead(o, 2 * stride), ahead(o, 3 * stride)
    for d in range(dim):
        w, x, y, z = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
        o[d] += a0 * w + a1 * x + a2 * y + a3 * z
        o1[d] += b0 * w + b1 * x + b2 * y + b3 * z
        o2[d] += c0 * w + c1 * x + c2 * y + c3 * z
        o3[d] += d0 * w + d1 * x + d2 * y + d3 * z


@njit(**_INLINE)
def _mix2(p, size, v, dim, o, stride):
    v0, v1, v2, v3 = v
    p1, o1 = ahead(p, size), ahead(o, stride)
    a0, a1, a2, a3 = p[0], p[1], p[2], p[3]
    b0, b1, b2, b3 = p1[0], p1[1], p1[2], p1[3]
    for d in range(dim):
        w, x, y, z = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
        o[d] += a0 * w + a1 * x + a2 * y + a3 * z
        o1[d] += b0 * w + b1 * x + b2 * y + b3 * z


@njit(**_INLINE)
def _mix1(p, v0, v1, v2, v3, dim, o):
    a0, a1, a2, a3 = p[0], p[1], p[2], p[3]
    for d in range(dim):
        o[d] += a0 * widen(v0[d]) + a1 * widen(v1[d]) + a2 * widen(v2[d]) + a3 * widen(v3[d])


@njit(**_INLINE)
def mix(rows, p, size, v, tokens, dims, o, stride):
    """Add the sum over i < 4 of p[r * size + i] * v[t + i] to o[r], for `rows` (4, 2, 1) rows.

    `dims` is (elements of a value, elements from one to the next). Lines of o begin `stride`
    elements from each other.

    `tokens` is (t, low, high): tokens outside [low, high), which have p = 0, must not be read, for
    0 * NaN is NaN: the nearest one inside stands in.
    """
    t, low, high = tokens
    dim, row = dims
    v0 = ahead(v, max(t, low) * row)
    v1 = ahead(v, min(max(t + 1, low), high - 1) * row)
    v2 = ahead(v, min(max(t + 2, low), high - 1) * row)
    v3 = ahead(v, min(max(t + 3, low), high - 1) * row)
    if rows == 4:
        _mix4(p, size, (v0, v1, v2, v3), dim, o, stride)
    elif rows == 2:
        _mix2(p, size, (v0, v1, v2, v3), dim, o, stride)
    else:
        _mix1(p, v0, v1, v2, v3, dim, o)


(
    Q, Q_TOKEN, Q_HEAD, OUT, LSE, LAYER, SINKS, ALIBI, TREE, MASS, SHARES, PAGES, SLOTS, CHUNK,
    PARTS, NEXT, DONE, SCALE, SOFTCAP, ARENA, TABLE, TABLE_ROW, ROWS, LENGTHS, STARTS, BATCH,
    GROUP, HEADS, DIM, DIM_V, V_ROW, SIZE, ITEM, WINDOW, CAUSAL, MOST_NEW, MOST_ROWS, WORK, TEAM,
    FORMATS,
) = range(40)  # fmt: skip
STRIPE, RUN, V_AT, K_SCALES, V_SCALES = range(5)
FORMAT_FIELDS = 5
FIELDS = FORMATS + FORMAT_FIELDS * len(CODECS)
"""Indices in the int64 vector `a` that describes a call.

Q, OUT, LSE, SINKS, ALIBI, TREE, MASS, ARENA and TABLE to STARTS are addresses of operands (0:
absent) with strides in elements, SINKS and ALIBI of float32. ITEM are the bytes of an element of a
page, V_ROW the elements from one token's value to the next one's, SCALE and SOFTCAP (0: none) the
bits of a float32. Rows with more than MOST_NEW new tokens are skipped; MOST_ROWS are the query rows
of the largest item. SHARES is the address of float32 [B, Hk, PAGES, MOST_ROWS, 2], the maximum and
the sum of a query row in a page, or 0. CHUNK are the pages of a piece, and SLOTS is the address of
partials of items of several pieces: float32 [., MOST_ROWS * (Dv + 2)], Dv in whole vectors. Of
PARTS slices, NEXT is drawn next and DONE are done; WORK is the C function that draws them, TEAM the
function that calls it in several threads. From FORMATS on follow, for each codec of
`core.geometry.CODECS`, the bytes from layer to layer, those of a run (0: no such pages), and the
offsets in it of V, of the scales of K and of those of V.
"""

LOG2_E, LN_2 = np.float32(math.log2(math.e)), np.float32(math.log(2))
NONE = np.float32(-np.inf)


@njit(**_INLINE)
def cost(a, new):
    """Return the cost of a page for all query rows: reading it costs about as much as 4 of them."""
    return max(np.int64(4), new * a[GROUP])


@njit(**_INLINE)
def load_rows(a, like, first, new, head, factor, q):
    """Load an item's query rows, [T * G, D], as float32 times `factor`."""
    dim, group = a[DIM], a[GROUP]
    source = pointer(a[Q], like)
    for r in range(new * group):
        at = (first + r // group) * a[Q_TOKEN] + (head * group + r % group) * a[Q_HEAD]
        row, to = ahead(source, at), ahead(q, r * dim)
        for d in range(dim):
            to[d] = widen(row[d]) * factor


@njit(**_INLINE)
def block_rows(rows):
    """Return how many of the remaining query rows are served at once."""
    return 4 if rows >= 4 else 2 if rows >= 2 else 1


@njit(**_INLINE)
def add_partial(dim, rows, to, part):
    """Merge a partial, (accumulators, maxima, sums) of `rows` query rows, into another."""
    o, m, z = to
    o_part, m_part, z_part = part
    for r in range(rows):
        top = max(m[r], m_part[r])
        if top == NONE:
            continue  # neither has seen a token
        keep, other = exp2(m[r] - top), exp2(m_part[r] - top)
        m[r], z[r] = top, z[r] * keep + z_part[r] * other
        row, row_part = ahead(o, r * dim), ahead(o_part, r * dim)
        for d in range(dim):
            row[d] = row[d] * keep + row_part[d] * other


# The inner loop of attention over sealed pages on the CPU: dot products with rows of codes.
#
# V of a sealed page is transposed, so both of its products are dots along rows in memory order:
# scores of query rows with the tokens of K, outputs of weight rows with the dims of V^T. A row's
# codes are widened in registers, once for all rows of the other side.
#
# LLVM would reduce every sum on its own, which costs as much as the products. So the loop is
# written in vectors of `LANES` floats here, `LANES` sums at a time (4 x 4 of them, 2 x 8, ...),
# which then fold into one vector in log2(LANES) steps. Zero points are a constant per row on the
# other side, `bias`, and scales are applied by the callers.


def _lanes() -> int:
    try:
        wide = llvm.get_host_cpu_features().get("avx512f", False)
    except RuntimeError:  # unknown on this platform, to LLVM as well
        wide = False
    return 16 if wide else 8


LANES = _lanes()
"""Floats of a vector, and sums of a block: as many as fit into the registers with room to spare."""

SIGNED, UNSIGNED, NIBBLES = range(3)
"""Bytes as int8, as uint8, and as two numbers 0 to 15: byte i of n is i | (i + n) << 4."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _vector(like: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(like, lanes)


def _mask(lanes: list[int]) -> ir.Constant:
    return ir.Constant(_vector(_I32, len(lanes)), lanes)


def _folded(lanes: int) -> list[int]:
    """Return the index of the sum that the halving steps of `_fold` leave in each lane."""
    sums, step = [[i] * lanes for i in range(lanes)], lanes // 2
    while len(sums) > 1:
        half = len(sums) // 2
        pairs = zip(sums[:half], sums[half:], strict=True)
        groups = range(0, lanes, 2 * step)
        sums = [[n for g in groups for n in x[g : g + step] + y[g : g + step]] for x, y in pairs]
        step //= 2
    return sums[0]


def _fold(builder, sums, lanes):
    """Return one vector of the totals of `lanes` vectors, in their order."""
    order = _folded(lanes)
    sums = [sums[order.index(i)] for i in range(lanes)]
    step = lanes // 2
    while len(sums) > 1:
        groups = range(0, lanes, 2 * step)
        low = [g + i + side for g in groups for side in (0, lanes) for i in range(step)]
        low, high = _mask(low), _mask([i + step for i in low])
        half = len(sums) // 2
        sums = [
            builder.fadd(builder.shuffle_vector(x, y, low), builder.shuffle_vector(x, y, high))
            for x, y in zip(sums[:half], sums[half:], strict=True)
        ]
        step //= 2
    return sums[0]


def _load(builder, kind, p, i):
    """Load the vector that begins at p[i], at any alignment."""
    x = builder.load(builder.bitcast(builder.gep(p, [i]), kind.as_pointer()))
    x.align = 1 if kind.element is _I8 else 4
    return x


def block_of(lanes: int, rows: int, kind: int, adds: bool):
    """Return an intrinsic that fills (or adds to) `rows` rows, `lanes // rows` columns of dots.

    Its arguments: `a`, float32 (pointer, elements from row to row), of as many elements as codes,
    those of each half of nibbles padded with zeros to whole vectors; `b`, (pointer, bytes from row
    to row, existing rows), where missing rows are replaced by the last; vectors of bytes in a row
    of b; `bias`, float32 to be added to each row; `out`, (pointer, elements from row to row).
    """
    columns, planes = lanes // rows, 2 if kind == NIBBLES else 1
    floats, codes, ints = (_vector(x, lanes) for x in (_F32, _I8, _I32))

    def widened(builder, x, plane):
        if kind == NIBBLES and plane:
            x = builder.lshr(x, ir.Constant(ints, [4] * lanes))
        elif kind == NIBBLES:
            x = builder.and_(x, ir.Constant(ints, [15] * lanes))
        return builder.sitofp(x, floats)

    @instruction()
    def block(builder, a, b, vectors, bias, out):
        a, a_stride = cgutils.unpack_tuple(builder, a)
        b, b_stride, there = cgutils.unpack_tuple(builder, b)
        out, out_stride = cgutils.unpack_tuple(builder, out)
        signature, name = ir.FunctionType(floats, [floats] * 3), f"llvm.fmuladd.v{lanes}f32"
        multiply = cgutils.get_or_insert_function(builder.module, signature, name)
        zero = ir.Constant(floats, [0.0] * lanes)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(lanes)]
        for total in sums:
            builder.store(zero, total)
        last = builder.sub(there, _I64(1))
        rows_b = []
        for j in range(columns):
            inside = builder.icmp_signed("<", _I64(j), last)
            at = builder.mul(builder.select(inside, _I64(j), last), b_stride)
            rows_b.append(builder.gep(b, [at]))
        rows_a = [builder.gep(a, [builder.mul(_I64(r), a_stride)]) for r in range(rows)]
        widen = builder.sext if kind == SIGNED else builder.zext
        with cgutils.for_range(builder, vectors) as loop:
            i = builder.mul(loop.index, _I64(lanes))
            loaded = [widen(_load(builder, codes, p, i), ints) for p in rows_b]
            for plane in range(planes):
                at = builder.add(i, builder.mul(vectors, _I64(lanes * plane)))
                x = [_load(builder, floats, p, at) for p in rows_a]
                for j in range(columns):
                    y = widened(builder, loaded[j], plane)
                    for r in range(rows):
                        total = sums[r * columns + j]
                        builder.store(builder.call(multiply, [x[r], y, builder.load(total)]), total)
        folded = _fold(builder, [builder.load(total) for total in sums], lanes)
        part = _vector(_F32, columns)
        for r in range(rows):
            mine = _mask([r * columns + j for j in range(columns)])
            value = builder.shuffle_vector(folded, folded, mine)
            constant = builder.load(builder.gep(bias, [_I64(r)]))
            spread = builder.insert_element(ir.Constant(part, ir.Undefined), constant, _I32(0))
            spread = builder.shuffle_vector(spread, spread, _mask([0] * columns))
            value = builder.fadd(value, spread)
            to = builder.gep(out, [builder.mul(_I64(r), out_stride)])
            to = builder.bitcast(to, part.as_pointer())
            if adds:
                old = builder.load(to)
                old.align = 4
                value = builder.fadd(old, value)
            builder.store(value, to).align = 4

    return block


def dots_of(lanes: int, kind: int, adds: bool):
    """Return a numba function of dots of `count` rows of floats with all rows of a matrix of codes.

    Its arguments: rows of a; a, b, vectors, bias and out as for `block_of`, except that b has all
    its rows; and a pointer into the matrix that is needed next, which it prefetches meanwhile. The
    padding of rows of out to whole vectors is undefined.
    """
    four, two, one = (block_of(lanes, rows, kind, adds) for rows in (4, 2, 1))

    @njit(**PART)
    def dots(count, a, b, vectors, bias, out, after):
        (p_a, a_stride), (p_b, b_stride, n), (p_out, out_stride) = a, b, out
        r = 0
        while r < count:
            rows = 4 if count - r >= 4 else 2 if count - r >= 2 else 1
            columns = lanes // rows
            x, y, bias_r = ahead(p_a, r * a_stride), ahead(p_out, r * out_stride), ahead(bias, r)
            for j in range(0, n, columns):
                if r == 0:
                    for i in range(j * b_stride, (j + columns) * b_stride, LINE_BYTES):
                        prefetch(after, i)
                left, right = (x, a_stride), (ahead(p_b, j * b_stride), b_stride, n - j)
                to = (ahead(y, j), out_stride)
                if rows == 4:
                    four(left, right, vectors, bias_r, to)
                elif rows == 2:
                    two(left, right, vectors, bias_r, to)
                else:
                    one(left, right, vectors, bias_r, to)
            r += rows
        return r

    return dots


score_bytes = dots_of(LANES, SIGNED, False)
score_nibbles = dots_of(LANES, NIBBLES, False)
mix_bytes = dots_of(LANES, UNSIGNED, True)
mix_nibbles = dots_of(LANES, NIBBLES, True)


# Weights of a page from its logits on the CPU, under every option of `operands.Scoring`.


@njit(**_INLINE)
def weigh(a, s, r, place, scales, m, cap):
    """Turn logits of query row r for a page's tokens into probabilities; 0 for invisible tokens.

    `place` is (first new token, packed; head; place of the page's token 0 counted from the first
    new one; first token of the page that any row sees; the first that no row sees; the page's
    shares). `scales` is the address of float16 scales of the logits, or 0; m the row's maximum so
    far.

    Return the new maximum, the sum, and the factor for accumulators under the old maximum.
    """
    first, head, offset, low, high, _ = place
    end, j = high, r // a[GROUP]
    last = j - offset  # place of the query row's own token, counted from the page's first
    if a[CAUSAL]:
        low = max(low, last - a[WINDOW] + 1)
        if not a[TREE]:
            high = min(high, last + 1)
    if scales:
        factors = pointer(scales, np.int16(0))
        for t in range(low, high):
            s[t] *= widen(factors[t])
    if cap > ZERO:
        for t in range(low, high):
            s[t] = tanh(s[t]) * cap
    if a[ALIBI]:
        slope = pointer(a[ALIBI], ZERO)[head * a[GROUP] + r % a[GROUP]] * LOG2_E
        for t in range(low, high):
            s[t] += slope * np.float32(t - last)
    if a[TREE]:
        bits = pointer(a[TREE], np.int64(0))[first + j]
        for t in range(max(low, -offset), high):
            if not (bits >> (t + offset)) & 1:
                s[t] = NONE
    most = order(m)
    for t in range(low, high):
        most = max(most, order(s[t]))
    top = unorder(most)
    if top == NONE or high <= low:
        high = low  # nothing of this page
    total = ZERO
    for t in range(min(low, end)):
        s[t] = ZERO
    for t in range(low, high):
        p = exp2(s[t] - top)
        s[t] = p
        total += p
    for t in range(max(low, high), (end + 3) // 4 * 4):  # values are mixed in fours
        s[t] = ZERO
    keep = np.float32(1) if high <= low else exp2(m - top)
    return top, total, keep


@njit(**_INLINE)
def share(shares, rows, m, z):
    """Return the weight that finished query rows give to a page, from their shares in it."""
    total = ZERO
    for r in range(rows):
        if z[r] != ZERO:
            total += shares[2 * r + 1] * exp2(shares[2 * r] - m[r]) / z[r]
    return total


@njit(**_INLINE)
def shares_of(a, item, page):
    """Return the pointer to the shares of a page of an item (row * Hk + head)."""
    return ahead(pointer(a[SHARES], ZERO), (item * a[PAGES] + page) * 2 * a[MOST_ROWS])


# Scores and outputs of sealed pages on the CPU, computed from codes without decoding to memory.
#
# Scales that differ by token multiply scores (K) and weights (V); those of `kv4c`, which differ
# by dim, multiply the query once a page, and its minima add a constant to each query row's
# scores; the rotation of `kv4h` is applied to the query once. Queries and weights are float32, as
# for raw pages.


@njit(**_INLINE)
def padded(n):
    """Round n up to whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@njit(**_INLINE)
def format_of(a, codec, field):
    """Return a field of a codec's format."""
    return a[FORMATS + FORMAT_FIELDS * codec + field]


@njit(**_INLINE)
def code_floats(a):
    """Return the floats of scratch that a query row needs for sealed pages; see `codes_of`."""
    half_d, half_p = 2 * padded(a[DIM] // 2), 2 * padded(a[SIZE] // 2)
    return padded(a[DIM]) + 2 * half_d + max(padded(a[SIZE]), half_p) + 2


@njit(**_INLINE)
def codes_of(a, scratch, rows):
    """Return the scratch of `rows` query rows for sealed pages, as lines of rows.

    The parts are the query in order; rotated, in two halves; times the channel scales of a page, in
    two halves; weights times the scales of V; sums of the rotated query; constants of a product.
    """
    half_d, half_p = 2 * padded(a[DIM] // 2), 2 * padded(a[SIZE] // 2)
    turned = ahead(scratch, rows * padded(a[DIM]))
    scaled = ahead(turned, rows * half_d)
    w = ahead(scaled, rows * half_d)
    sums = ahead(w, rows * max(padded(a[SIZE]), half_p))
    return scratch, turned, scaled, w, sums, ahead(sums, rows)


@njit(**_PLAIN)
def prepare(a, count, q, codes):
    """Lay the query rows of an item out for the codecs in use, with pads of zeros."""
    plain, turned, scaled, _, sums, _ = codes
    dim, wide, plane = a[DIM], padded(a[DIM]), padded(a[DIM] // 2)
    for r in range(count):
        row, to = ahead(q, r * dim), ahead(plain, r * wide)
        for d in range(dim):
            to[d] = row[d]
        for d in range(dim, wide):
            to[d] = ZERO
        to, free = ahead(turned, r * 2 * plane), ahead(scaled, r * 2 * plane)
        for i in range(2 * plane):
            to[i] = ZERO
        if format_of(a, KV4H, RUN):
            _turn(row, free, to, dim)
            total = ZERO
            for i in range(2 * plane):
                total += to[i]
            sums[r] = np.float32(-8) * total
        for i in range(2 * plane):
            free[i] = ZERO


@njit(**_PLAIN)
def _turn(row, free, to, dim):
    """Rotate a row, with `free` as scratch, into two padded halves."""
    half, second = dim // 2, ahead(to, padded(dim // 2))
    for d in range(dim):
        free[d] = row[d]
    rotate(free, dim)
    for d in range(half):
        to[d] = free[d]
        second[d] = free[d + half]


@njit(**_PLAIN)
def _scale_channels(a, run, count, q, codes):
    """Scale query rows by the channels of a `kv4c` page, and compute their dots with its minima."""
    _, _, scaled, _, _, bias = codes
    dim, half, plane = a[DIM], a[DIM] // 2, padded(a[DIM] // 2)
    scales = pointer(run + format_of(a, KV4C, K_SCALES), np.int16(0))
    least = ahead(scales, dim)
    for r in range(count):
        total = ZERO
        for part in range(2):
            row, to = ahead(q, r * dim + part * half), ahead(scaled, (2 * r + part) * plane)
            factor, low = ahead(scales, part * half), ahead(least, part * half)
            for d in range(half):
                to[d] = row[d] * widen(factor[d])
                total += row[d] * widen(low[d])
        bias[r] = total


@njit(**_PLAIN)
def score(a, codec, runs, count, q, codes, s):
    """Score query rows with a sealed page's tokens, without the scales of its keys.

    Args:
        a: The call.
        codec: Number of the page's codec.
        runs: Addresses of the page's run and of the next one.
        count: Query rows.
        q: The query rows.
        codes: See `codes_of`.
        s: Output, lines of `padded(P)`.

    Returns:
        The address of the scales, float16 by token; 0 if there are none.
    """
    plain, turned, scaled, _, sums, bias = codes
    run, after = runs[0], pointer(runs[1], np.uint8(0))
    dim, size, half = a[DIM], a[SIZE], a[DIM] // 2
    out, wide, plane = (s, padded(size)), padded(dim), padded(half)
    if codec in (KV8, K8V4):
        for r in range(count):
            bias[r] = ZERO
        k = pointer(run, np.int8(0)), dim, size
        score_bytes(count, (plain, wide), k, wide // LANES, bias, out, after)
        return run + format_of(a, codec, K_SCALES)
    k_halves = pointer(run, np.uint8(0)), half, size
    if codec == KV4H:
        score_nibbles(count, (turned, 2 * plane), k_halves, plane // LANES, sums, out, after)
        return run + format_of(a, codec, K_SCALES)
    _scale_channels(a, run, count, q, codes)
    score_nibbles(count, (scaled, 2 * plane), k_halves, plane // LANES, bias, out, after)
    return np.int64(0)


@njit(**_PLAIN)
def mix_sealed(a, codec, runs, count, s, codes, o):
    """Add to `o`, lines of `padded(Dv)`, the values of a sealed page weighted by rows of `s`."""
    _, _, _, w, _, bias = codes
    run, size, dim = runs[0], a[SIZE], a[DIM_V]
    v_at = format_of(a, codec, V_AT)
    scales = pointer(run + format_of(a, codec, V_SCALES), np.int16(0))
    planes = 1 if codec == KV8 else 2
    tokens, zero = size // planes, np.float32(-128) if codec == KV8 else np.float32(-8)
    plane = padded(tokens)
    for r in range(count):
        total = ZERO
        for part in range(planes):
            p = ahead(s, r * padded(size) + part * tokens)
            to = ahead(w, (r * planes + part) * plane)
            factor = ahead(scales, part * tokens)
            for t in range(tokens):
                x = p[t] * widen(factor[t])
                to[t] = x
                total += x
            for t in range(tokens, plane):
                to[t] = ZERO
        bias[r] = zero * total
    v, after = pointer(run + v_at, np.uint8(0)), pointer(runs[1] + v_at, np.uint8(0))
    out, vectors = (o, padded(dim)), plane // LANES
    if codec == KV8:
        mix_bytes(count, (w, plane), (v, tokens, dim), vectors, bias, out, after)
    else:
        mix_nibbles(count, (w, 2 * plane), (v, tokens, dim), vectors, bias, out, after)


# Attention on the CPU over pages, with every option.
#
# The unit of work is a *piece*: up to CHUNK pages of one item (row, KV head), with all query rows
# that read them (T new tokens x G query heads). The pieces of a call form one line, weighted by
# cost; a slice takes those that begin in its stretch of it, so ragged batches balance, and a single
# long row splits like many short ones. The cuts of an item depend on the item and CHUNK alone, so
# with a constant CHUNK a row's result has the same bits in any batch. An item of one piece is
# finished at once; others leave a partial (accumulator, maximum, sum) of each piece in a slot,
# which `combine` merges in order. Softmax is online per page, in base 2.


@njit(**_INLINE)
def _row(a, b):
    """Return (first packed token, new, length, first page, pages) of a row; new = 0: no work."""
    starts, length = pointer(a[STARTS], np.int32(0)), np.int64(pointer(a[LENGTHS], np.int32(0))[b])
    first, size, page = np.int64(starts[b]), a[SIZE], np.int64(0)
    new = np.int64(starts[b + 1]) - first
    if a[CAUSAL]:
        page = max(page, length - new - a[WINDOW] + 1) // size
    return first, new if new <= a[MOST_NEW] else 0, length, page, (length + size - 1) // size - page


@njit(**_INLINE)
def _pieces(a, new, pages):
    """Return the pieces of each item of a row; one even if it sees no page."""
    return max(np.int64(1), (pages + a[CHUNK] - 1) // a[CHUNK]) if new else np.int64(0)


@njit(**_INLINE)
def _reset(a, rows, head, with_sinks, lines):
    """Empty the accumulators; the sinks, if any, initialise the maximum and sum."""
    _, _, o, m, z = lines
    for i in range(rows * padded(a[DIM_V])):
        o[i] = ZERO
    sinks = pointer(a[SINKS], ZERO)
    for r in range(rows):
        m[r], z[r] = NONE, ZERO
        if with_sinks and a[SINKS]:
            m[r] = sinks[head * a[GROUP] + r % a[GROUP]] * LOG2_E
            z[r] = np.float32(1)


@njit(**_PLAIN)
def _score_raw(a, k, after, span, count, q, s):
    """Score query rows with tokens [low, high) of a raw page; other entries are undefined."""
    low, high = span
    dim, size, row_bytes = a[DIM], padded(a[SIZE]), a[DIM_V] * a[ITEM]
    r = 0
    while r < count:
        rows = block_rows(count - r)
        for t in range(low // 2 * 2, high, 2):
            if r == 0:
                for i in range(t * row_bytes, (t + 2) * row_bytes, LINE_BYTES):
                    prefetch(after, i)
            scores(rows, ahead(q, r * dim), ahead(k, t * dim), dim, ahead(s, r * size + t), size)
        r += rows


@njit(**_PLAIN)
def _mix_raw(a, v, after, span, count, s, o):
    """Add the values of a raw page, weighted by rows of `s`, to `o`."""
    low, high = span
    dim, size, row_bytes = a[DIM_V], padded(a[SIZE]), a[DIM] * a[ITEM]
    r = 0
    while r < count:
        rows = block_rows(count - r)
        for t in range(low // 4 * 4, high, 4):
            if r == 0:
                for i in range(t * row_bytes, (t + 4) * row_bytes, LINE_BYTES):
                    prefetch(after, i)
            p, to = ahead(s, r * size + t), ahead(o, r * padded(dim))
            mix(rows, p, size, v, (t, low, high), (dim, a[V_ROW]), to, padded(dim))
        r += rows


@njit(**_PLAIN)
def _weigh_page(a, place, scales, count, lines, cap):
    """Turn a page's logits into weights, and rescale the accumulators to the new maximum."""
    _, s, o, m, z = lines
    shares, stride = place[5], padded(a[DIM_V])
    for r in range(count):
        m[r], total, keep = weigh(a, ahead(s, r * padded(a[SIZE])), r, place, scales, m[r], cap)
        z[r] = z[r] * keep + total
        if a[MASS]:
            shares[2 * r], shares[2 * r + 1] = m[r], total
        if keep != np.float32(1):
            row_o = ahead(o, r * stride)
            for d in range(stride):
                row_o[d] *= keep


@njit(**_PLAIN)
def _raw_page(a, like, page, place, count, lines, codes, cap):
    """Attend with an item's query rows over a raw page; arguments as of `_any_page`."""
    _, run, then = page
    q, s, o, _, _ = lines
    span, v_at = (place[3], place[4]), format_of(a, RAW, V_AT)
    v, byte = pointer(run + v_at, like), np.uint8(0)
    # V is prefetched behind the scores, the next page's K behind the mix.
    _score_raw(a, pointer(run, like), pointer(run + v_at, byte), span, count, q, s)
    _weigh_page(a, place, np.int64(0), count, lines, cap)
    _mix_raw(a, v, pointer(then, byte), span, count, s, o)


@njit(**_PLAIN)
def _any_page(a, like, page, place, count, lines, codes, cap):
    """Attend with an item's query rows over a page.

    `page` is its codec, the address of its run and that of the next page's; `place` as for `weigh`.
    """
    codec, run, then = page
    if codec == RAW:
        _raw_page(a, like, page, place, count, lines, codes, cap)
        return
    q, s, o, _, _ = lines
    scales = score(a, codec, (run, then), count, q, codes, s)
    _weigh_page(a, place, scales, count, lines, cap)
    mix_sealed(a, codec, (run, then), count, s, codes, o)


@njit(**_INLINE)
def _run(a, page, head):
    """Return the address of a head's run in a page."""
    codec = np.int64(page) >> CODEC_SHIFT
    start = a[ARENA] + a[LAYER] * format_of(a, codec, STRIPE)
    start += GRANULE * (np.int64(page) & GRANULE_MASK)
    return start + head * format_of(a, codec, RUN)


@njit(**_PLAIN)
def _finish(a, like, b, row, head, lines):
    """Write an item's finished rows, normalised, their log-sum-exp, and its pages' mass."""
    o, m, z = lines
    first, new, _, first_page, pages = row
    group, dim, heads = a[GROUP], a[DIM_V], a[HEADS]
    out, lse, mass = pointer(a[OUT], like), pointer(a[LSE], ZERO), pointer(a[MASS], ZERO)
    for r in range(new * group):
        at = ((first + r // group) * heads + head) * group + r % group
        inverse = np.float32(1) / z[r] if z[r] != ZERO else ZERO
        to, row_o = ahead(out, at * dim), ahead(o, r * padded(dim))
        for d in range(dim):
            to[d] = narrow(row_o[d] * inverse, like)
        if a[LSE]:
            lse[at] = (m[r] + np.log2(z[r])) * LN_2 if z[r] != ZERO else NONE
    if a[MASS]:
        for page in range(first_page, first_page + pages):
            shares = shares_of(a, b * heads + head, page)
            mass[(b * a[PAGES] + page) * heads + head] += share(shares, new * group, m, z)


@njit(**_INLINE)
def _slot(a, i):
    """Return the scratch of partial i, as (accumulators, maxima, sums)."""
    most, dim = a[MOST_ROWS], padded(a[DIM_V])
    o = ahead(pointer(a[SLOTS], ZERO), i * most * (dim + 2))
    return o, ahead(o, most * dim), ahead(o, most * (dim + 1))


@njit(**_INLINE)
def _no_floats(a):
    return np.int64(0)


@njit(**_INLINE)
def _no_codes(a, count, q, codes):
    return None


def _attention(attend_page, code_floats, prepare):
    """Return the function that does a slice of attention, over the pages of `attend_page`.

    Args:
        attend_page: Attends over one page.
        code_floats: Floats of scratch that a query row needs for codes.
        prepare: Lays query rows out for codes.
    """

    @njit(**_PLAIN)
    def attend_piece(a, like, item, pages, lines, codes, cap):
        """Attend with the query rows of an item, (row number, row, head), over some pages."""
        b, row, head = item
        first, new, length, first_page, _ = row
        size, seen = a[SIZE], np.int64(0)  # the first token that any row sees
        if a[CAUSAL]:
            seen = max(seen, length - new - a[WINDOW] + 1)
        table = pointer(a[TABLE], np.int32(0))
        line = ahead(table, a[TABLE_ROW] * pointer(a[ROWS], np.int32(0))[b] + first_page)
        prepare(a, new * a[GROUP], lines[0], codes)
        for p in range(pages[0], pages[1]):
            start = (first_page + p) * size
            then = _run(a, line[min(p + 1, pages[1] - 1)], head)
            page = np.int64(line[p]) >> CODEC_SHIFT, _run(a, line[p], head), then
            low, high = max(np.int64(0), seen - start), min(size, length - start)
            shares = shares_of(a, b * a[HEADS] + head, first_page + p)
            place = first, head, start - (length - new), low, high, shares
            attend_page(a, like, page, place, new * a[GROUP], lines, codes, cap)

    @njit(**_PLAIN)
    def attend(a, likes, part):
        """Do slice `part`; `likes` are the types under which elements of q and of pages travel."""
        like_q, like = likes
        scale, softcap = float_of(np.int32(a[SCALE])), float_of(np.int32(a[SOFTCAP]))
        rows, dim_v = a[MOST_ROWS], padded(a[DIM_V])
        q_floats, s_floats = rows * padded(a[DIM]), rows * padded(a[SIZE])
        code = rows * code_floats(a)
        scratch = np.empty(q_floats + s_floats + code + rows * (dim_v + 2) + 16, np.float32)
        q = pointer((np.int64(scratch.ctypes.data) + 63) // 64 * 64, ZERO)
        s = ahead(q, q_floats)
        own = ahead(s, s_floats)
        codes = codes_of(a, ahead(own, rows * dim_v), rows)
        own_m = ahead(own, rows * dim_v + code)
        factor, cap = scale * LOG2_E, softcap * LOG2_E
        if softcap > 0:
            factor = scale / softcap
        total = np.int64(0)
        for b in range(a[BATCH]):
            _, new, _, _, pages = _row(a, b)
            total += a[HEADS] * max(pages, np.int64(1)) * cost(a, new) if new else np.int64(0)
        low, high = total * part // a[PARTS], total * (part + 1) // a[PARTS]
        before = slot = np.int64(0)
        for b in range(a[BATCH]):
            row = _row(a, b)
            first, new, _, _, pages = row
            pieces = _pieces(a, new, pages)
            for i in range(a[HEADS] * pieces):
                head, start = i // pieces, i % pieces * a[CHUNK]
                end = min(pages, start + a[CHUNK])
                if low <= before < high:
                    o, m, z = own, own_m, ahead(own_m, rows)
                    if pieces > 1:
                        o, m, z = _slot(a, slot)
                    lines = (q, s, o, m, z)
                    load_rows(a, like_q, first, new, head, factor, q)
                    _reset(a, new * a[GROUP], head, start == 0, lines)
                    attend_piece(a, like, (b, row, head), (start, end), lines, codes, cap)
                    if pieces == 1:
                        _finish(a, like_q, b, row, head, (o, m, z))
                before += max(end - start, np.int64(1)) * cost(a, new)
                slot += pieces > 1
        return np.int64(scratch.size)  # so that the scratch outlives the pointers into it

    return attend


attend_raw = _attention(_raw_page, _no_floats, _no_codes)
attend_any = _attention(_any_page, code_floats, prepare)


@njit(**_PLAIN)
def combine(a, like_q):
    """Merge the partials of items of several pieces, after all slices are done."""
    slot = np.int64(0)
    for b in range(a[BATCH]):
        row = _row(a, b)
        _, new, _, _, pages = row
        pieces = _pieces(a, new, pages)
        if pieces > 1:
            for head in range(a[HEADS]):
                lines = _slot(a, slot)
                for i in range(1, pieces):
                    add_partial(padded(a[DIM_V]), new * a[GROUP], lines, _slot(a, slot + i))
                _finish(a, like_q, b, row, head, lines)
                slot += pieces
    return slot


# Merge of partials on the CPU: outputs weighted by their shares of the softmax's sum.


@njit(**_PLAIN)
def merge(a, like, part, parts):
    """Merge slice `part` of `parts` of the lines (token, head).

    `a` is int64 [1 + inputs + 1, 2]: first lines and Dv; then the addresses of o (with elements
    under the type `like`) and lse (float32) of each input, last of the result.
    """
    count, lines, dim = a.shape[0] - 2, a[0, 0], a[0, 1]
    addresses = a[1:]
    sums, weights = np.empty(dim, np.float32), np.empty(count, np.float32)
    to, to_lse = pointer(addresses[count, 0], like), pointer(addresses[count, 1], ZERO)
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        top = NONE
        for i in range(count):
            top = max(top, pointer(addresses[i, 1], ZERO)[line])
        total = ZERO
        for i in range(count):
            lse = pointer(addresses[i, 1], ZERO)[line]
            weights[i] = ZERO if lse == NONE else exp2((lse - top) * LOG2_E)
            total += weights[i]
        sums[:] = ZERO
        for i in range(count):
            if weights[i] != ZERO:  # a part without tokens may hold anything
                o = ahead(pointer(addresses[i, 0], like), line * dim)
                for d in range(dim):
                    sums[d] += weights[i] * widen(o[d])
        inverse = ZERO if total == ZERO else np.float32(1) / total
        row = ahead(to, line * dim)
        for d in range(dim):
            row[d] = narrow(sums[d] * inverse, like)
        to_lse[line] = NONE if total == ZERO else top + np.log(total)
    return count


# Dense rows on the CPU from pages of several codecs: raw ones are copied, the others decoded.

DENSE_FORMATS, DENSE_FORMAT_FIELDS = 15, 6


@njit(**EXACT)
def _decode(run, form, span, shape, raw, room, to):
    """Write tokens [span[0], span[1]) of a run of a sealed page as raw rows of K and V."""
    (size, dim, dim_v), (like, top), (x, byte) = shape, raw, room
    k, v = to
    for t in range(span[0], span[1]):
        key_row(run, form, t, dim, like, x)
        store_row(x, dim, like, top, ahead(k, (t - span[0]) * dim))
    whole = size if form[0] == KV8 else size // 2
    transpose(byte, pointer(run + form[3], np.uint8(0)), dim_v, whole)
    for t in range(span[0], span[1]):
        value_row(run, form, t, size, dim_v, like, byte, x)
        store_row(x, dim_v, like, top, ahead(v, (t - span[0]) * dim_v))


@njit(**EXACT)
def gather(a, raw, part, parts):
    """Write rows into right-aligned dense K and V; the slice is a range of (row, head, block).

    a: k, v, table, rows, lengths; B, Hk, P, D, Dv, bytes of a raw element, table stride, columns,
    columns of a block, blocks of a row; then for each codec: its number, the address of the layer
    in granule 0, run bytes, starts of V, of the scales of K and of those of V.
    raw: type of raw elements, and their saturation.
    """
    heads, size, dim, dim_v, item, columns = a[6], a[7], a[8], a[9], a[10], a[12]
    k_bytes, v_bytes = dim * item, dim_v * item
    rows, bytes_v = np.empty(max(dim, dim_v), np.float32), np.empty(size * dim_v, np.uint8)
    room, shape = (data(rows), data(bytes_v)), (size, dim, dim_v)
    units = a[5] * heads * a[14]
    for unit in range(units * part // parts, units * (part + 1) // parts):
        block, head, b = unit % a[14], unit // a[14] % heads, unit // (a[14] * heads)
        line = ahead(pointer(a[2], np.int32(0)), a[11] * pointer(a[3], np.int32(0))[b])
        column, end = block * a[13], min(columns, (block + 1) * a[13])
        shift = pointer(a[4], np.int32(0))[b] - columns  # position of column c is c + shift
        while column < end:
            t, page, count = np.int64(0), np.int64(-1), min(end, -shift) - column
            position = column + shift
            if position >= 0:
                t = position % size
                page, count = np.int64(line[position // size]), min(end - column, size - t)
            at = (b * heads + head) * columns + column
            k, v = a[0] + at * k_bytes, a[1] + at * v_bytes
            column += count
            if page < 0:
                memzero(k, count * k_bytes)
                memzero(v, count * v_bytes)
                continue
            start = DENSE_FORMATS + DENSE_FORMAT_FIELDS * (page >> CODEC_SHIFT)
            form = a[start : start + DENSE_FORMAT_FIELDS]
            run = form[1] + GRANULE * (page & GRANULE_MASK) + head * form[2]
            if form[0] == RAW:
                memcpy(k, run + t * k_bytes, count * k_bytes)
                memcpy(v, run + form[3] + t * v_bytes, count * v_bytes)
            else:
                to = pointer(k, raw[0]), pointer(v, raw[0])
                _decode(run, form, (t, t + count), shape, raw, room, to)
    return rows.size + bytes_v.size  # addresses do not keep arrays alive; this does
