"""Primitives that numba lacks: 16-bit floats, memcpy, a fast exp2.

A 16-bit float travels under the integer type of its width, so that one kernel source serves all:
uint16 is bfloat16, int16 is float16 (`widen` and `narrow` convert; LLVM vectorises both).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from flowkv.compiled.digest import digest_of, mix
from flowkv.compiled.machine_code import PART, ahead, instruction, pointer
from flowkv.core.digest import STEP

FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Without "ninf" and "nnan": masks are -inf, and NaN in a cache must show in the answer."""

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_BYTES = _I8.as_pointer()


@intrinsic
def widen(context, x):
    """Return a stored element as float32."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        if signature.args[0] == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)

    return types.float32(x), codegen


@intrinsic
def narrow(context, x, like):
    """Return a float32 as a stored element of the type of `like`, rounded to nearest even."""

    def codegen(context, builder, signature, args):
        if signature.return_type == types.float32:
            return args[0]
        if signature.return_type == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), odd), _I32(16))
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(nan, _I32(0x7FC0), rounded), ir.IntType(16))

    return like(x, like), codegen


@instruction(types.int32)
def bits_of(builder, x):
    """Return the bits of a float32 as int32."""
    return builder.bitcast(x, _I32)


@instruction(types.float32)
def float_of(builder, x):
    """Return the float32 with these bits."""
    return builder.bitcast(x, _F32)


@instruction()
def memcpy(builder, target, source, n_bytes):
    """Copy bytes between addresses (int64) that do not overlap."""
    to, of = (builder.inttoptr(x, _BYTES) for x in (target, source))
    cgutils.raw_memcpy(builder, to, of, n_bytes, 1)


@instruction()
def memzero(builder, target, n_bytes):
    """Set bytes at an address (int64) to zero."""
    cgutils.memset(builder, builder.inttoptr(target, _BYTES), n_bytes, 0)


@instruction(types.int64)
def draw(builder, p):
    """Add one to p[0] atomically, and return its value from before."""
    return builder.atomic_rmw("add", p, ir.IntType(64)(1), "seq_cst")


@instruction()
def call(builder, function, argument):
    """Call the C function `void (int64)` at an address."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


@instruction()
def call_team(builder, team, function, argument, threads):
    """Let all threads of a team call a function; `team` is the address of `GOMP_parallel`."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _I32, _I32])
    parallel = builder.inttoptr(team, kind.as_pointer())
    two = (builder.inttoptr(x, _BYTES) for x in (function, argument))
    builder.call(parallel, [*two, builder.trunc(threads, _I32), _I32(0)])


_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


# The flags are explicit because numba lets callers pass their own flags down to a function without
# any, and under "reassoc" (x + _ROUND) - _ROUND folds to x.
_EXACT = {**PART, "fastmath": {"contract"}, "forceinline": True}


@njit(**_EXACT)
def exp2(x):
    """Return 2**x for x <= 127, to 2 ulp; exactly 0 below -126.5. NaN stays NaN."""
    x = np.float32(-127) if x < np.float32(-127) else x
    r = x + _ROUND
    f = x - (r - _ROUND)
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1)
    return p * float_of(np.int32((bits_of(r) - bits_of(_ROUND) + np.int32(127)) << np.int32(23)))


@njit(**_EXACT)
def tanh(x):
    """Return the hyperbolic tangent to 3 ulp (near 0 as Cephes: 1 - 2 / (e**2x + 1) cancels)."""
    a = abs(x)
    a = np.float32(10) if a > np.float32(10) else a
    z = a * a
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z + np.float32(-5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z + np.float32(-3.33332819422e-1)
    near = p * z * a + a
    far = np.float32(1) - np.float32(2) / (exp2(a * np.float32(2.885390082)) + np.float32(1))
    y = near if a < np.float32(0.625) else far
    return -y if x < np.float32(0) else y


@njit(**_EXACT)
def order(x):
    """Return the bits of a float32, changed to compare as it does, with +NaN above all.

    A maximum of integers vectorises; one of floats does only where NaN may be ignored.
    """
    bits = bits_of(x)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(**_EXACT)
def unorder(bits):
    """Return the float32 of bits that `order` returned."""
    return float_of(np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))


# numba kernels that move bytes without reading them, so that one compile serves all dtypes.
#
# Each takes one int64 vector of addresses and sizes (made by `operations`) and its slice of the
# work.

GRANULE = 4096


@njit(**PART)
def _int32_at(address, i):
    return np.int64(pointer(address, np.int32(0))[i])


@njit(**PART)
def _page(a, side, n):
    """Return the address of page n of a side of a copy."""
    line = a[side + 1]
    return a[side] + (GRANULE * _int32_at(line, n) if line else n * a[5])


@njit(**PART)
def digest_pages(a, part, parts):
    """Digest stripes of pages; the slice is a range of all.

    a: as for `move_pages`, with a target of 0 for no copy; stripes of a page, digests.
    """
    stripes, step = a[6], a[5] // a[6]
    digests = pointer(a[7], np.uint64(0))
    low, high = a[4] * stripes * part // parts, a[4] * stripes * (part + 1) // parts
    for i in range(low, high):
        n, offset = i // stripes, i % stripes * step
        target = _page(a, 0, n) + offset if a[0] else 0
        digests[2 * i], digests[2 * i + 1] = digest_of(_page(a, 2, n) + offset, step, target, 0)
    return high


@njit(**PART)
def move_pages(a, part, parts):
    """Copy n pages; each side is a pool with a list of granules, or staging when its list is 0.

    a: target, target list, source, source list, n, bytes of a page. The slice is a range of all
    granules, so that few large pages split well too.
    """
    page = a[5]
    granules = a[4] * (page // GRANULE)
    low = GRANULE * (granules * part // parts)
    high = GRANULE * (granules * (part + 1) // parts)
    while low < high:
        n, offset = low // page, low % page
        count = min(high - low, page - offset)
        memcpy(_page(a, 0, n) + offset, _page(a, 2, n) + offset, count)
        low += count
    return high


@njit(**PART)
def drop_tokens(a, part, parts):
    """Gather tokens of pages into fresh pages; the slice is a range of (layer, head, target page).

    a: arena, source, target, keep; L, Hk, P, n kept, target pages, bytes of a K row and a V row,
    run bytes, V offset, stripe bytes.
    """
    heads, size, kept, k_bytes, v_bytes = a[5], a[6], a[7], a[9], a[10]
    units = a[4] * heads * a[8]
    for unit in range(units * part // parts, units * (part + 1) // parts):
        page, line = unit % a[8], unit // a[8]  # line: (layer, head)
        run = line // heads * a[13] + line % heads * a[11]
        to = a[0] + GRANULE * _int32_at(a[2], page) + run
        for t in range(min(size, kept - page * size)):
            token = _int32_at(a[3], line * kept + page * size + t)
            of = a[0] + GRANULE * _int32_at(a[1], token // size) + run
            slot = token % size
            memcpy(to + t * k_bytes, of + slot * k_bytes, k_bytes)
            memcpy(to + a[12] + t * v_bytes, of + a[12] + slot * v_bytes, v_bytes)
    return units


# The numba kernel of `checksum`.

_STEP = np.uint64(STEP)


@njit(**PART)
def sum_blocks(a, part, parts):
    """Sum up every block of a slice; a: words, their number, words of a block, sums."""
    words = pointer(a[0], np.uint64(0))
    sums = pointer(a[3], np.uint64(0))
    blocks = (a[1] + a[2] - 1) // a[2]
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        first = block * a[2]
        key, one, two = np.uint64(0), np.uint64(0), np.uint64(0)
        for at in range(first, min(first + a[2], a[1])):
            key += _STEP
            x = mix(words[at] ^ key)
            one += x
            two += x * (key | np.uint64(1))
        sums[2 * block] = one
        sums[2 * block + 1] = two
    return blocks


# numba kernels that rotate keys (RoPE): on their way into pages, and in pages.
#
# The functions set no fast-math flags, so that every product and sum is rounded by itself, as the
# contract of `operands.Rotary` requires; their operands are packed as above.

_ROTARY_JIT = {**PART, "fastmath": False}
_INLINE = {**_ROTARY_JIT, "forceinline": True}


@njit(**_INLINE)
def _rotate(to, of, cos, sin, pairs, interleaved, like):
    """Write the rotation of the 2 * pairs elements at `of` to `to`: elsewhere, or in place.

    It is inlined, so that LLVM sees when both are one pointer and vectorises the loops then, too.
    """
    if interleaved:
        for i in range(pairs):
            x, y, c, s = widen(of[2 * i]), widen(of[2 * i + 1]), cos[i], sin[i]
            to[2 * i] = narrow(x * c - y * s, like)
            to[2 * i + 1] = narrow(y * c + x * s, like)
        return
    of_y, to_y = ahead(of, pairs), ahead(to, pairs)
    for i in range(pairs):
        x, y, c, s = widen(of[i]), widen(of_y[i]), cos[i], sin[i]
        to[i] = narrow(x * c - y * s, like)
        to_y[i] = narrow(y * c + x * s, like)


@njit(**_INLINE)
def _rotate_key(target, source, position, n_bytes, turn, likes):
    """Write the key at address `source` to `target`, rotated by the line of a position."""
    like_of, like = likes
    pairs, start = turn[2], turn[3]
    cos = pointer(turn[0] + 4 * pairs * position, np.float32(0))
    sin = pointer(turn[1] + 4 * pairs * position, np.float32(0))
    of, to = pointer(source, like_of), pointer(target, like)
    for d in range(start):
        to[d] = narrow(widen(of[d]), like)
    _rotate(ahead(to, start), ahead(of, start), cos, sin, pairs, turn[4] != 0, like)
    for d in range(start + 2 * pairs, n_bytes // turn[5]):
        to[d] = narrow(widen(of[d]), like)


@njit(**_ROTARY_JIT)
def append(a, turn, likes, part, parts):
    """Write packed tokens into pages; the slice is a range of all tokens of the batch.

    a: k, v, arena (with layer offset), table, rows, lengths, starts; B, Hk, P, bytes of a K row and
    a V row, run bytes, V offset, table stride, then byte strides of k and v by token and head.
    turn: addresses of cos and sin, pairs, first rotated dim, whether interleaved, bytes of an
    element of a page; None (a constant) for keys that stay as they are. `likes` are the types of an
    element of a packed key and of a page.
    """
    starts, size, k_bytes, v_bytes = a[6], a[9], a[10], a[11]
    tokens = _int32_at(starts, a[7])
    low, high = tokens * part // parts, tokens * (part + 1) // parts
    for b in range(a[7]):
        first, end = _int32_at(starts, b), _int32_at(starts, b + 1)
        shift = _int32_at(a[5], b) - end  # position of packed token n is n + shift
        line = a[3] + 4 * a[14] * _int32_at(a[4], b)
        for n in range(max(first, low), min(end, high)):
            page, t = (n + shift) // size, (n + shift) % size
            run = a[2] + GRANULE * _int32_at(line, page)
            for h in range(a[8]):
                key = a[0] + n * a[15] + h * a[16]
                if turn is None:
                    memcpy(run + t * k_bytes, key, k_bytes)
                else:
                    _rotate_key(run + t * k_bytes, key, n + shift, k_bytes, turn, likes)
                memcpy(run + a[13] + t * v_bytes, a[1] + n * a[17] + h * a[18], v_bytes)
                run += a[12]
    return high - low


@njit(**_ROTARY_JIT)
def reposition(a, turn, like, part, parts):
    """Rotate the keys of pages in place; the slice is a range of (page, layer, head).

    a: arena (with layer offset), pages, turns; n, layers, Hk, P, bytes of a K row, run bytes,
    stripe bytes. `turn` as for `append`.
    """
    pairs, interleaved = turn[2], turn[4] != 0
    units = a[3] * a[4] * a[5]
    for unit in range(units * part // parts, units * (part + 1) // parts):
        head, layer = unit % a[5], unit // a[5] % a[4]
        n = unit // (a[5] * a[4])
        line = _int32_at(a[2], n)
        if line < 0:
            continue
        cos = pointer(turn[0] + 4 * pairs * line, np.float32(0))
        sin = pointer(turn[1] + 4 * pairs * line, np.float32(0))
        key = a[0] + GRANULE * _int32_at(a[1], n) + layer * a[9] + head * a[8]
        key += turn[3] * turn[5]
        for _ in range(a[6]):
            keys = pointer(key, like)
            _rotate(keys, keys, cos, sin, pairs, interleaved, like)
            key += a[7]
    return units


# Transposition of bytes: sealed pages hold V as `[Dv, P]`, rows are tokens everywhere else.

_WORDS = ir.IntType(64).as_pointer()


@njit(**PART)
def transpose(to, of, rows, columns):
    """Transpose bytes `[rows, columns]`: 8 x 8 at a time in eight words, the edges one by one.

    `to` and `of` are pointers to bytes.
    """
    whole, wide = rows // 8 * 8, columns // 8 * 8
    a, b, c = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
    s8, s16, s32 = np.uint64(8), np.uint64(16), np.uint64(32)
    for i in range(0, whole, 8):
        for j in range(0, wide, 8):
            p = ahead(of, i * columns + j)
            x0, x1 = _word(p), _word(ahead(p, columns))
            x2, x3 = _word(ahead(p, 2 * columns)), _word(ahead(p, 3 * columns))
            x4, x5 = _word(ahead(p, 4 * columns)), _word(ahead(p, 5 * columns))
            x6, x7 = _word(ahead(p, 6 * columns)), _word(ahead(p, 7 * columns))
            x0, x1 = _swapped(x0, x1, a, s8)
            x2, x3 = _swapped(x2, x3, a, s8)
            x4, x5 = _swapped(x4, x5, a, s8)
            x6, x7 = _swapped(x6, x7, a, s8)
            x0, x2 = _swapped(x0, x2, b, s16)
            x1, x3 = _swapped(x1, x3, b, s16)
            x4, x6 = _swapped(x4, x6, b, s16)
            x5, x7 = _swapped(x5, x7, b, s16)
            x0, x4 = _swapped(x0, x4, c, s32)
            x1, x5 = _swapped(x1, x5, c, s32)
            x2, x6 = _swapped(x2, x6, c, s32)
            x3, x7 = _swapped(x3, x7, c, s32)
            p = ahead(to, j * rows + i)
            _put(p, x0)
            _put(ahead(p, rows), x1)
            _put(ahead(p, 2 * rows), x2)
            _put(ahead(p, 3 * rows), x3)
            _put(ahead(p, 4 * rows), x4)
            _put(ahead(p, 5 * rows), x5)
            _put(ahead(p, 6 * rows), x6)
            _put(ahead(p, 7 * rows), x7)
    for i in range(rows):
        for j in range(wide if i < whole else 0, columns):
            to[j * rows + i] = of[i * columns + j]


@instruction(types.uint64)
def _word(builder, p):
    """Return the eight bytes from p on as uint64, at any alignment."""
    return builder.load(builder.bitcast(p, _WORDS), align=1)


@instruction()
def _put(builder, p, x):
    """Write the eight bytes of x from p on."""
    builder.store(x, builder.bitcast(p, _WORDS), align=1)


@njit(**_INLINE)
def _swapped(x, y, mask, shift):
    """Exchange the bits of x above `mask` with the bits of y under it."""
    z = ((x >> shift) ^ y) & mask
    return x ^ (z << shift), y ^ z
