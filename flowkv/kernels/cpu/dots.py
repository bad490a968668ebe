"""The inner loop of attention over sealed pages on the CPU: dot products with rows of codes.

V of a sealed page lies transposed, so both of its products are dots along rows as they lie in
memory: scores of query rows with the tokens of K, outputs of weight rows with the dims of V^T.
What lies in a row is widened in registers, once for all rows of the other side.

LLVM would reduce every sum on its own, which costs as much as the products. So the loop is written
in vectors of `LANES` floats here, `LANES` sums at a time (4 x 4 of them, 2 x 8, ...), which then
fold into one vector in log2(LANES) steps. Zero points are a constant per row on the other side,
`bias`, and scales are the callers'.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from flowkv.kernels.cpu.bits import LINE_BYTES, ahead, prefetch


def _lanes() -> int:
    try:
        wide = llvm.get_host_cpu_features().get("avx512f", False)
    except RuntimeError:  # unknown on this platform, to LLVM as well
        wide = False
    return 16 if wide else 8


LANES = _lanes()
"""Floats of a vector, and sums of a block: what fits into the registers with room to spare."""

SIGNED, UNSIGNED, NIBBLES = range(3)
"""Bytes as int8, as uint8, and as two numbers 0 to 15: byte i of n is i | (i + n) << 4."""

_PLAIN = {"error_model": "numpy"}
_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _vector(like: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(like, lanes)


def _mask(lanes: list[int]) -> ir.Constant:
    return ir.Constant(_vector(_I32, len(lanes)), lanes)


def _folded(lanes: int) -> list[int]:
    """Of which sum the halving steps of `_fold` leave the total in each lane."""
    sums, step = [[i] * lanes for i in range(lanes)], lanes // 2
    while len(sums) > 1:
        half = len(sums) // 2
        pairs = zip(sums[:half], sums[half:], strict=True)
        groups = range(0, lanes, 2 * step)
        sums = [[n for g in groups for n in x[g : g + step] + y[g : g + step]] for x, y in pairs]
        step //= 2
    return sums[0]


def _fold(builder, sums, lanes):
    """One vector of the totals of `lanes` vectors, in their order."""
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
    """The vector that begins at p[i], at whatever address."""
    x = builder.load(builder.bitcast(builder.gep(p, [i]), kind.as_pointer()))
    x.align = 1 if kind.element is _I8 else 4
    return x


def block_of(lanes: int, rows: int, kind: int, adds: bool):
    """An intrinsic that fills (or adds to) `rows` rows and `lanes // rows` columns of dots.

    Its arguments: `a`, float32 (pointer, elements from row to row), of as many elements as codes,
    those of each half of nibbles padded with zeros to whole vectors; `b`, (pointer, bytes from row
    to row, rows that there are), where missing rows are replaced by the last; vectors of bytes in
    a row of b; `bias`, float32 to be added to each row; `out`, (pointer, elements from row to row).
    """
    columns, planes = lanes // rows, 2 if kind == NIBBLES else 1
    floats, codes, ints = (_vector(x, lanes) for x in (_F32, _I8, _I32))

    def widened(builder, x, plane):
        if kind == NIBBLES and plane:
            x = builder.lshr(x, ir.Constant(ints, [4] * lanes))
        elif kind == NIBBLES:
            x = builder.and_(x, ir.Constant(ints, [15] * lanes))
        return builder.sitofp(x, floats)

    def codegen(context, builder, signature, args):
        (a, a_stride), (b, b_stride, there) = (cgutils.unpack_tuple(builder, x) for x in args[:2])
        vectors, bias, (out, out_stride) = args[2], args[3], cgutils.unpack_tuple(builder, args[4])
        multiply = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(floats, [floats] * 3), f"llvm.fmuladd.v{lanes}f32"
        )
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
            to = builder.bitcast(
                builder.gep(out, [builder.mul(_I64(r), out_stride)]), part.as_pointer()
            )
            if adds:
                old = builder.load(to)
                old.align = 4
                value = builder.fadd(old, value)
            builder.store(value, to).align = 4
        return context.get_dummy_value()

    @intrinsic
    def block(context, a, b, vectors, bias, out):
        return types.none(a, b, vectors, bias, out), codegen

    return block


def dots_of(lanes: int, kind: int, adds: bool):
    """A numba function of dots of `count` rows of floats with all rows of a matrix of codes.

    Its arguments: rows of a; a, b, vectors, bias and out as for `block_of`, except that b has all
    its rows; and a pointer into the matrix that will be wanted next, for which it asks meanwhile.
    Rows of out are padded to whole vectors, with anything.
    """
    four, two, one = (block_of(lanes, rows, kind, adds) for rows in (4, 2, 1))

    @njit(**_PLAIN)
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
