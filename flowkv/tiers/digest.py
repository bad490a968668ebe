"""XXH3-128 in compiled code, over memory by address; frames checked and copied by it."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from llvmlite import ir
from numba import njit, objmode, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.machine_code import kept
from flowkv.tiers import frame
from flowkv.tiers.frame import DIGEST_BYTES, DIGESTED_FROM, FIXED_BYTES, MAGIC, VERSION

_I8, _I32, _I64, _I128 = (ir.IntType(n) for n in (8, 32, 64, 128))
_PREFETCH = [_I8.as_pointer(), _I32, _I32, _I32]  # address, to read, into all caches, data


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """What lies at an address, wherever that is; for other intrinsics."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Asks for a line of memory, which need not exist; for other intrinsics."""
    pointer, kind = _I8.as_pointer(), ir.FunctionType(ir.VoidType(), _PREFETCH)
    ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    builder.call(ask, [builder.inttoptr(address, pointer), _I32(0), _I32(3), _I32(1)])


def _reader(kind: ir.IntType) -> Any:
    @intrinsic
    def read(context, address):
        """What lies at an address, as uint64."""

        def codegen(context, builder, signature, args):
            found = load(builder, args[0], kind)
            return found if kind is _I64 else builder.zext(found, _I64)

        return types.uint64(types.uint64), codegen

    return read


def _writer(kind: ir.IntType) -> Any:
    @intrinsic
    def write(context, address, value):
        """Write the low bytes of a uint64 to an address."""

        def codegen(context, builder, signature, args):
            data = args[1] if kind is _I64 else builder.trunc(args[1], kind)
            builder.store(data, builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), codegen

    return write


word, half_word, byte = map(_reader, (_I64, _I32, _I8))
put_word, put = map(_writer, (_I64, _I8))


@intrinsic
def fence(context):
    """Everything written before is there for others before anything written after."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def upper(context, a, b):
    """The upper 64 bits of a product."""

    def codegen(context, builder, signature, args):
        product = builder.mul(*(builder.zext(arg, _I128) for arg in args))
        return builder.trunc(builder.lshr(product, _I128(64)), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def swapped(context, x):
    """The bytes of x in the other order."""

    def codegen(context, builder, signature, args):
        return builder.bswap(args[0])

    return types.uint64(types.uint64), codegen


# XXH3-128 in numba: the digest of the `xxhash` library, bit for bit, without the interpreter.
#
# Code that stays in one compiled call while the interpreter is busy cannot call the library.
# Above 240 bytes the hash is eight 64-bit lanes that LLVM keeps in vector registers, written here
# as vectors of its own language. No stripe of a page is shorter; the odd blob that is waits for
# the interpreter and the library. The specification is
# https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md; the seed is 0, the secret its
# own.

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_START = (_P32_3, *_P64[:4], _P32_2, _P64[4], _P32_1)
_STRIPE, _BLOCK = 64, 1024
_AHEAD = 512  # bytes; the library's own distance
_P1, _P2 = np.uint64(_P64[0]), np.uint64(_P64[1])
_MX1 = np.uint64(0x165667919E3779F9)
_S8, _S16, _S24, _S32, _S37 = (np.uint64(n) for n in (8, 16, 24, 32, 37))

_LANES = ir.VectorType(_I64, 8)
_JIT = {"error_model": "numpy"}
_INLINE = {**_JIT, "forceinline": True}


def _vector(value: int) -> ir.Constant:
    return ir.Constant(_LANES, [value] * 8)


def _secret_of(builder: ir.IRBuilder) -> ir.Value:
    data = ir.Constant(ir.ArrayType(_I8, len(SECRET)), bytearray(SECRET))
    return builder.ptrtoint(cgutils.global_constant(builder.module, "xxh3_secret", data), _I64)


@intrinsic
def secret(context):
    """Address of the secret."""
    return types.uint64(), lambda context, builder, signature, args: _secret_of(builder)


def _stripe_of(
    keep: str, builder: ir.IRBuilder, state: ir.Value, at: tuple[ir.Value, ...]
) -> ir.Value:
    """Lanes after one more stripe: to each its neighbour's word, and a product of its own."""
    data, key, target = at
    words = load(builder, data, _LANES)
    prefetch(builder, builder.add(data, _I64(_AHEAD)))
    if keep:
        place, streams = builder.inttoptr(target, _LANES.as_pointer()), keep == "stream"
        stored = builder.store(words, place, align=_STRIPE if streams else 1)
        if streams:
            stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
    mixed = builder.xor(words, load(builder, key, _LANES))
    pairs = ir.Constant(ir.VectorType(_I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
    crossed = builder.shuffle_vector(words, ir.Constant(_LANES, ir.Undefined), pairs)
    product = builder.mul(
        builder.and_(mixed, _vector(0xFFFFFFFF)), builder.lshr(mixed, _vector(32))
    )
    return builder.add(builder.add(state, crossed), product)


def _scrambled(builder: ir.IRBuilder, state: ir.Value, key: ir.Value) -> ir.Value:
    mixed = builder.xor(state, builder.lshr(state, _vector(47)))
    return builder.mul(builder.xor(mixed, load(builder, key, _LANES)), _vector(_P32_1))


def _lanes_kept(keep: str) -> Any:
    """Makes the loop over more than 240 bytes, which keeps what it reads: not, or in a copy."""

    @intrinsic
    def lanes(context, address, length, target):
        """The eight lanes, as a tuple of uint64."""
        signature = types.UniTuple(types.uint64, 8)(types.uint64, types.uint64, types.uint64)

        def codegen(context, builder, signature, args):
            key, held = _secret_of(builder), cgutils.alloca_once(builder, _LANES)
            builder.store(ir.Constant(_LANES, list(_START)), held)

            def add(state: ir.Value, offset: ir.Value, secret: ir.Value) -> ir.Value:
                at = builder.add(args[0], offset), secret, builder.add(args[2], offset)
                return _stripe_of(keep, builder, state, at)

            last = builder.sub(args[1], _I64(1))
            blocks = builder.udiv(last, _I64(_BLOCK))
            with cgutils.for_range(builder, blocks) as loop:
                start, state = builder.mul(loop.index, _I64(_BLOCK)), builder.load(held)
                for n in range(_BLOCK // _STRIPE):
                    offset = builder.add(start, _I64(n * _STRIPE))
                    state = add(state, offset, builder.add(key, _I64(8 * n)))
                end = builder.add(key, _I64(len(SECRET) - _STRIPE))
                builder.store(_scrambled(builder, state, end), held)
            start = builder.mul(blocks, _I64(_BLOCK))
            stripes = builder.udiv(builder.sub(last, start), _I64(_STRIPE))
            with cgutils.for_range(builder, stripes) as loop:
                offset = builder.add(start, builder.mul(loop.index, _I64(_STRIPE)))
                secret = builder.add(key, builder.mul(loop.index, _I64(8)))
                builder.store(add(builder.load(held), offset, secret), held)
            secret = builder.add(key, _I64(len(SECRET) - _STRIPE - 7))
            state = add(builder.load(held), builder.sub(args[1], _I64(_STRIPE)), secret)
            values = [builder.extract_element(state, _I32(n)) for n in range(8)]
            return context.make_tuple(builder, signature.return_type, values)

        return signature, codegen

    return lanes


_lanes, _lanes_copied, _lanes_streamed = map(_lanes_kept, ("", "copy", "stream"))


@njit(**_INLINE)
def _avalanche(x):
    x = (x ^ (x >> _S37)) * _MX1
    return x ^ (x >> _S32)


@njit(**_INLINE)
def _folded(a, b):
    return (a * b) ^ upper(a, b)


def _by_library(address: int, n_bytes: int) -> int:
    return xxhash.xxh3_128_intdigest(ctypes.string_at(address, n_bytes))


@njit(**_JIT)
def _shorter(data, n):
    """Up to 240 bytes, which are hashed in four other ways: by the library, in the interpreter."""
    with objmode(low="uint64", high="uint64"):
        both = _by_library(data, n)
        low, high = both & 0xFFFFFFFFFFFFFFFF, both >> 64
    return low, high


@njit(**_INLINE)
def _merged(lanes, key, total):
    total += _folded(lanes[0] ^ word(key), lanes[1] ^ word(key + _S8))
    total += _folded(lanes[2] ^ word(key + _S16), lanes[3] ^ word(key + _S24))
    total += _folded(lanes[4] ^ word(key + _S32), lanes[5] ^ word(key + np.uint64(40)))
    total += _folded(lanes[6] ^ word(key + np.uint64(48)), lanes[7] ^ word(key + np.uint64(56)))
    return _avalanche(total)


@njit(**_INLINE)
def _ended(lanes, n):
    key = secret()
    low = _merged(lanes, key + np.uint64(11), n * _P1)
    return low, _merged(lanes, key + np.uint64(117), ~(n * _P2))


@njit(**_JIT)
def xxh3_128(address, n_bytes):
    """The digest of memory.

    Args:
        address: uint64.
        n_bytes: uint64.

    Returns:
        The low and the high half, uint64; the library's 16 bytes are both as big endian, the high
        half first.
    """
    if n_bytes > np.uint64(240):
        return _ended(_lanes(address, n_bytes, address), n_bytes)
    return _shorter(address, n_bytes)


@njit(**_INLINE)
def agrees(digest, at):
    """Whether a digest is that whose 16 bytes lie at an address."""
    return digest[1] == swapped(word(at)) and digest[0] == swapped(word(at + _S8))


@njit(**_INLINE)
def put_digest(at, digest):
    """Write the 16 bytes of a digest to an address."""
    put_word(at, swapped(digest[1]))
    put_word(at + _S8, swapped(digest[0]))


@njit(**_JIT)
def digest_copied(address, n_bytes, target, streams):
    """The digest of memory, as `xxh3_128` gives it; at `target` lies then what was digested.

    Args:
        address: uint64.
        n_bytes: uint64.
        target: Address of memory that does not overlap.
        streams: Write past the caches, where alignment allows it; for more than they hold. The
            caller then needs a `fence` before it tells anybody.
    """
    if n_bytes <= np.uint64(240):
        for i in range(n_bytes):
            put(target + i, byte(address + i))
        return xxh3_128(target, n_bytes)
    if streams and (target | n_bytes) % np.uint64(_STRIPE) == 0:
        return _ended(_lanes_streamed(address, n_bytes, target), n_bytes)
    return _ended(_lanes_copied(address, n_bytes, target), n_bytes)


# Plain frames checked and copied many at a time, in one compiled call that needs no interpreter.
#
#     checks = np.array([(header, header_bytes, data, data_bytes, target, step, all, first, n, 0)],
#                       CHECK)                                          one row a frame
#     expected = np.frombuffer(b"".join(fields), np.uint8)              256 bytes a frame
#     reasons = check_frames(checks, expected.reshape(-1, 256))         0 where all is right
#
# `fields` are `tiers.frame.fixed_fields(header)` of the frame that should be there. What a row
# says is checked before anything is looked at, so a frame that lies about itself leads nowhere.
# In this order: magic, version, integrity, pages and digest of the header, all fixed fields, then
# each wished stripe. A stripe is read once, digested and copied in the same pass, so that
# checking costs next to nothing beside copying, and what was digested is what was copied, whoever
# else writes to the source. The names of the reasons are `REASONS`.
#
# The caller has claimed all items: a target is undefined where the reason is not 0.

CHECK = np.dtype(
    [
        (name, "<u8")
        for name in (
            *("header", "header_bytes", "data", "data_bytes", "target", "step"),
            *("all", "first", "stripes", "known"),
        )
    ]
)
"""One frame: address of its header and bytes that are there; address of the first wished stripe and
bytes that are there; address of the target, which may be `data` itself, or 0 if nothing is copied;
bytes of a stripe, stripes of the frame, first wished stripe and how many are wished for; and 1
where the header was checked before and its digests alone lie at that address, else 0."""

REASONS = ("", "foreign", "version", "truncated", "digest", "key", "integrity", "stripes")
"""Names of the reasons; those of `BadFrame`."""

STREAMED_BYTES = 4 << 20
"""A call that copies so much writes past the caches: they are too small for it, and need not read
lines that will be overwritten, which is two fifths of the time."""

_OK, _FOREIGN, _VERSION, _TRUNCATED, _DIGEST, _KEY, _INTEGRITY, _STRIPES = range(len(REASONS))
_MAGIC = np.uint64(int.from_bytes(MAGIC, "little"))
_DIGEST_AT, _INTEGRITY_AT, _KEY_AT, _KEY_END = 16, 35, 40, 72


@njit(**_JIT)
def _same(address, expected, start, end):
    differ = np.uint64(0)
    for at in range(start, end):
        differ |= byte(address + np.uint64(at)) ^ np.uint64(expected[at])
    return differ == 0


@njit(**_JIT)
def _check_header(header, there, stripes, expected):
    """Check a header; `there` bytes are readable."""
    used = np.uint64(FIXED_BYTES) + np.uint64(DIGEST_BYTES) * stripes
    granule = np.uint64(GRANULE_BYTES)
    size = (used + granule - np.uint64(1)) // granule * granule
    if there < granule:
        return _TRUNCATED
    if word(header) != _MAGIC:
        return _FOREIGN
    if half_word(header + np.uint64(8)) & np.uint64(0xFFFF) != np.uint64(VERSION):
        return _VERSION
    if not _same(header, expected, 8, _DIGEST_AT):
        return _FOREIGN
    if not _same(header, expected, _INTEGRITY_AT, _INTEGRITY_AT + 1):
        return _INTEGRITY
    if there < size:
        return _TRUNCATED
    digested = np.uint64(DIGESTED_FROM)
    digest = xxh3_128(header + digested, size - digested)
    if not agrees(digest, header + np.uint64(_DIGEST_AT)):
        return _DIGEST
    if not _same(header, expected, _KEY_AT, _KEY_END):
        return _KEY
    if not _same(header, expected, DIGESTED_FROM, FIXED_BYTES):
        return _FOREIGN
    return _OK


@njit(**_JIT)
def check_frame(row, expected, streams):
    """Check one row of `CHECK`; for compiled code, which owes a `fence` if it `streams`."""
    step, first, n = np.uint64(row.step), np.uint64(row.first), np.uint64(row.stripes)
    if n == 0 or first + n > row.all or step == 0:
        return _STRIPES
    digests = row.header + np.uint64(DIGEST_BYTES) * first
    if not row.known:
        reason = _check_header(row.header, row.header_bytes, np.uint64(row.all), expected)
        if reason != _OK:
            return reason
        digests += np.uint64(FIXED_BYTES)
    if row.data_bytes // n < step:
        return _TRUNCATED
    for i in range(n):
        at = row.data + step * i
        if row.target and row.target != row.data:
            digest = digest_copied(at, step, row.target + step * i, streams)
        else:
            digest = xxh3_128(at, step)
        if not agrees(digest, digests + np.uint64(DIGEST_BYTES) * i):
            return _DIGEST
    return _OK


def _entries(stamp: int) -> tuple[Any, Any]:
    # numba keeps machine code until the function's own file changes, whatever becomes of those it
    # calls: a constant that it closes over makes the format's source part of the key.
    @kept(nogil=True, **_JIT)
    def check_all(checks, expected, reasons):
        n_bytes = np.uint64(0)
        for i in range(len(checks) if stamp else 0):
            n_bytes += np.uint64(checks[i].step) * np.uint64(checks[i].stripes)
        streams = n_bytes >= np.uint64(STREAMED_BYTES)
        for i in range(len(checks)):
            reasons[i] = check_frame(checks[i], expected[i], streams)
        if streams:
            fence()

    @kept(nogil=True, **_JIT)
    def seal_all(rows):
        n_bytes = np.uint64(0)
        for i in range(len(rows) if stamp else 0):
            n_bytes += rows[i].step * rows[i].stripes
        streams = n_bytes >= np.uint64(STREAMED_BYTES)
        for i in range(len(rows)):
            row = rows[i]
            at = row.header + np.uint64(FIXED_BYTES)
            for stripe in range(row.stripes):
                skip = row.step * np.uint64(stripe)
                put_digest(at, digest_copied(row.body + skip, row.step, row.data + skip, streams))
                at += np.uint64(DIGEST_BYTES)
            start = np.uint64(DIGESTED_FROM)
            digest = xxh3_128(row.header + start, row.header_bytes - start)
            put_digest(row.header + np.uint64(_DIGEST_AT), digest)
        if streams:
            fence()

    return check_all, seal_all


_STAMP = 1 + zlib.crc32(Path(str(frame.__file__)).read_bytes())
_check_all, _seal_all = _entries(_STAMP)


def checks_of(rows: Sequence[tuple[int, ...]]) -> NDArray[np.void]:
    """Rows of `CHECK`, several times as fast as `np.array(rows, CHECK)`."""
    return np.array(rows, np.uint64).reshape(-1, CHECK.itemsize // 8).view(CHECK).reshape(-1)


def check_frames(checks: NDArray[np.void], expected: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Checks frames and copies what was wished for; holds no lock of the interpreter meanwhile.

    The first call on a machine compiles for seconds, the first in a process loads what was
    compiled; with empty arrays that can be done before anybody waits.

    Args:
        checks: `[n]` of dtype `CHECK`. All memory named must stay until the call returns.
        expected: `[n, 256]`, the fixed fields of each frame; their digests are not looked at, and
            nothing of those whose header was checked before.

    Returns:
        uint8 `[n]`: indices into `REASONS`; 0 where the wished stripes lie verified in the target.

    Raises:
        StateError: The arrays do not have these types and shapes.
    """
    n = len(checks)
    if checks.dtype != CHECK or expected.dtype != np.uint8 or expected.shape != (n, FIXED_BYTES):
        raise StateError(
            f"checks of {checks.dtype} with fields of shape {expected.shape}",
            "Pass an array of dtype CHECK and 256 bytes of fields per row",
        )
    reasons = np.empty(n, np.uint8)
    _check_all(checks, expected, reasons)
    return reasons


def is_compiled() -> bool:
    """Whether `check_frames` can be called in this process without compiling or loading it."""
    return bool(getattr(_check_all, "signatures", ()))


def check_known(rows: Sequence[tuple[int, ...]]) -> list[int]:
    """`check_frames` of rows whose headers were checked before."""
    return check_frames(checks_of(rows), np.zeros((len(rows), FIXED_BYTES), np.uint8)).tolist()


# Plain frames sealed many at a time: their bodies copied and digested in the same pass.

SEAL = np.dtype(
    [(name, "<u8") for name in ("header", "header_bytes", "body", "data", "step", "stripes")]
)
"""One frame: address and length of its header, whose digests are zeros still, address of its body,
and where that is copied."""


def seal_frames(rows: NDArray[np.void]) -> None:
    """Copies bodies, and puts all digests into the headers, `[n]` of dtype `SEAL`."""
    _seal_all(rows)
