"""Plain frames checked and copied, or sealed, many at a time by address, in compiled code."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from flowkv.core.addresses import fence, pointer
from flowkv.core.compiled_digest import PIECE_BYTES, STAMP, digest_of
from flowkv.core.errors import StateError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.machine_code import kept
from flowkv.core.parts import PART
from flowkv.tiers import frame
from flowkv.tiers.frame import DIGEST_BYTES, DIGESTED_FROM, FIXED_BYTES, MAGIC, VERSION

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
_PAGE, _EACH = np.uint64(GRANULE_BYTES), np.uint64(DIGEST_BYTES)
_WORD, _U16, _BYTE = np.uint64(0), np.uint16(0), np.uint8(0)
_FORMAT = zlib.crc32(Path(str(frame.__file__)).read_bytes())
_ENTRY: dict[str, Any] = {"stamp": (STAMP, _FORMAT), "nogil": True, "error_model": "numpy"}


@njit(**PART)
def _digest(address, n_bytes, target, scratch):  # of unsigned addresses
    return digest_of(np.int64(address), np.int64(n_bytes), np.int64(target), scratch)


@njit(**PART)
def _same(address, expected, start, end):
    found, differ = pointer(address, _BYTE), np.uint8(0)
    for at in range(start, end):
        differ |= found[at] ^ expected[at]
    return differ == 0


@njit(**PART)
def _agrees(digest, at):
    """Whether a digest is that whose 16 bytes lie at an address."""
    found = pointer(at, _WORD)
    return digest[0] == found[0] and digest[1] == found[1]


@njit(**PART)
def _put(digest, at):
    found = pointer(at, _WORD)
    found[0] = digest[0]
    found[1] = digest[1]


@njit(**PART)
def _digest_header(header, n_bytes):
    start = np.uint64(DIGESTED_FROM)
    return _digest(header + start, n_bytes - start, 0, 0)


@njit(**PART)
def _check_header(header, there, stripes, expected):
    """Check a header; `there` bytes are readable."""
    size = (np.uint64(FIXED_BYTES) + _EACH * stripes + _PAGE - np.uint64(1)) // _PAGE * _PAGE
    if there < _PAGE:
        return _TRUNCATED
    if pointer(header, _WORD)[0] != _MAGIC:
        return _FOREIGN
    if pointer(header, _U16)[4] != VERSION:
        return _VERSION
    if not _same(header, expected, 8, _DIGEST_AT):
        return _FOREIGN
    if not _same(header, expected, _INTEGRITY_AT, _INTEGRITY_AT + 1):
        return _INTEGRITY
    if there < size:
        return _TRUNCATED
    if not _agrees(_digest_header(header, size), header + np.uint64(_DIGEST_AT)):
        return _DIGEST
    if not _same(header, expected, _KEY_AT, _KEY_END):
        return _KEY
    if not _same(header, expected, DIGESTED_FROM, FIXED_BYTES):
        return _FOREIGN
    return _OK


@njit(**PART)
def _check_frame(row, expected, scratch):
    step, first, n = np.uint64(row.step), np.uint64(row.first), np.uint64(row.stripes)
    if n == 0 or first + n > row.all or step == 0:
        return _STRIPES
    digests = row.header + _EACH * first
    if not row.known:
        reason = _check_header(row.header, row.header_bytes, np.uint64(row.all), expected)
        if reason != _OK:
            return reason
        digests += np.uint64(FIXED_BYTES)
    if row.data_bytes // n < step:
        return _TRUNCATED
    copies = bool(row.target) and row.target != row.data
    for i in range(n):
        target = row.target + step * i if copies else np.uint64(0)
        if not _agrees(_digest(row.data + step * i, step, target, scratch), digests + _EACH * i):
            return _DIGEST
    return _OK


@njit(**PART)
def _scratch(rows, held):
    """Where pieces are held that go past the caches; 0 where too little is copied for that."""
    n_bytes = np.uint64(0)
    for i in range(len(rows)):
        n_bytes += np.uint64(rows[i].step) * np.uint64(rows[i].stripes)
    return held.ctypes.data if n_bytes >= np.uint64(STREAMED_BYTES) else 0


@kept(**_ENTRY)
def _check_all(rows, expected, reasons, held):
    scratch = np.int64(_scratch(rows, held))
    for i in range(len(rows)):
        reasons[i] = _check_frame(rows[i], expected[i], scratch)
    fence()


@kept(**_ENTRY)
def _seal_all(rows, held):
    scratch = np.int64(_scratch(rows, held))
    for i in range(len(rows)):
        row = rows[i]
        at = row.header + np.uint64(FIXED_BYTES)
        copies = row.data != row.body
        for stripe in range(row.stripes):
            skip = row.step * stripe
            data = row.data + skip if copies else np.uint64(0)
            _put(_digest(row.body + skip, row.step, data, scratch), at + _EACH * stripe)
        at = row.header + np.uint64(_DIGEST_AT)
        _put(_digest_header(row.header, row.header_bytes), at)
    fence()


def _held() -> NDArray[np.uint8]:
    return np.empty(PIECE_BYTES, np.uint8)


def checks_of(rows: Sequence[tuple[int, ...]]) -> NDArray[np.void]:
    """Rows of `CHECK`, several times as fast as `np.array(rows, CHECK)`."""
    return np.array(rows, np.uint64).reshape(-1, CHECK.itemsize // 8).view(CHECK).reshape(-1)


def check_frames(checks: NDArray[np.void], expected: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Checks frames and copies what was wished for; holds no lock of the interpreter meanwhile.

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
    _check_all(checks, expected, reasons, _held())
    return reasons


def compile_frames() -> None:
    """Compiles what checks and seals, or loads what was compiled: before anybody waits for it."""
    check_known(())
    seal_frames(np.zeros(0, SEAL))


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
and where that is copied, which may be the body itself."""


def seal_frames(rows: NDArray[np.void]) -> None:
    """Copies bodies, and puts all digests into the headers, `[n]` of dtype `SEAL`."""
    _seal_all(rows, _held())
