"""Compiled batch checking, copying and sealing of plain frames by address."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from flowkv.compiled.digest import PIECE_BYTES, STAMP, digest_of
from flowkv.compiled.machine_code import PART, fence, kept, pointer
from flowkv.core.errors import StateError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.tiers import frame
from flowkv.tiers.frame import DIGEST_BYTES, DIGESTED_FROM, FIXED_BYTES, MAGIC, VERSION

# Check and copy many plain frames in one compiled call that needs no interpreter.
#
#     checks = np.array([(header, header_bytes, data, data_bytes, target, step, all, first, n, 0)],
#                       CHECK)                                          one row a frame
#     expected = np.frombuffer(b"".join(fields), np.uint8)              256 bytes a frame
#     reasons = check_frames(checks, expected.reshape(-1, 256))         0 where all is right
#
# `fields` are `tiers.frame.fixed_fields(header)` of the expected frame. The numbers of a row are
# validated before any address is read, so that a frame with wrong sizes leads nowhere. The order of
# checks: magic, version, integrity, pages and digest of the header, all fixed fields, then each
# requested stripe. A stripe is read once, digested and copied in the same pass, so that checking
# costs next to nothing beside copying, and the digested bytes are the copied bytes even if another
# thread writes to the source. The names of the reasons are `REASONS`.
#
# The caller has claimed all items: a target is undefined where the reason is not 0.

_FIELDS = "header header_bytes data data_bytes target step all first stripes known"
CHECK = np.dtype([(name, "<u8") for name in _FIELDS.split()])
"""Row of one frame: address of its header and readable bytes there; address of the first requested
stripe (0 to check the header alone) and readable bytes there; address of the target, which may be
`data` itself, or 0 to copy nothing; bytes of a stripe, stripes of the frame, first requested stripe
and number of requested stripes; and 1 if the header was checked before and its address is that of
the digests, else 0."""

REASONS = ("", "foreign", "version", "truncated", "digest", "key", "integrity", "stripes")
"""Names of the reasons, as in `BadFrame`."""

STREAMED_BYTES = 4 << 20
"""Bytes from which on a call writes past the caches: they are too small for the copy, and lines
that will be overwritten need not be read, which saves two fifths of the time."""

_OK, _FOREIGN, _VERSION, _TRUNCATED, _DIGEST, _KEY, _INTEGRITY, _STRIPES = range(len(REASONS))
_MAGIC = np.uint64(int.from_bytes(MAGIC, "little"))
_DIGEST_AT, _INTEGRITY_AT, _KEY_AT, _KEY_END = 16, 35, 40, 72
_PAGE, _EACH = np.uint64(GRANULE_BYTES), np.uint64(DIGEST_BYTES)
_WORD, _U16, _BYTE = np.uint64(0), np.uint16(0), np.uint8(0)
_FORMAT = zlib.crc32(Path(str(frame.__file__)).read_bytes())
_ENTRY: dict[str, Any] = {"stamp": (STAMP, _FORMAT), "nogil": True, "error_model": "numpy"}


@njit(**PART)
def _digest(address, n_bytes, target, scratch):  # all addresses and lengths are unsigned
    return digest_of(np.int64(address), np.int64(n_bytes), np.int64(target), scratch)


@njit(**PART)
def _same(address, expected, start, end):
    found, differ = pointer(address, _BYTE), np.uint8(0)
    for at in range(start, end):
        differ |= found[at] ^ expected[at]
    return differ == 0


@njit(**PART)
def _agrees(digest, at):
    """Return whether `digest` equals the 16 bytes at an address."""
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
    """Check a header with `there` readable bytes; return the index of the reason."""
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
    if not row.data:
        return _OK
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
    """Return the address of `held` for streaming copies; 0 where too little is copied for them."""
    n_bytes = np.uint64(0)
    for i in range(len(rows)):
        n_bytes += np.uint64(rows[i].step) * np.uint64(rows[i].stripes)
    return held.ctypes.data if n_bytes >= np.uint64(STREAMED_BYTES) else 0


@kept(**_ENTRY)
def check_all(rows, expected, reasons, held):
    """Check frames, as `check_frames` does; it has `overloads` once it is compiled."""
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


def checks_of(rows: Sequence[tuple[int, ...]]) -> NDArray[np.void]:
    """Return rows of dtype `CHECK`, several times as fast as `np.array(rows, CHECK)`."""
    return np.array(rows, np.uint64).reshape(-1, CHECK.itemsize // 8).view(CHECK).reshape(-1)


def check_frames(checks: NDArray[np.void], expected: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Check frames and copy the requested stripes, without the interpreter's lock.

    Args:
        checks: `[n]` of dtype `CHECK`. All addressed memory must stay until the call returns.
        expected: `[n, 256]`, the fixed fields of each frame; their digests are ignored, and so is
            the whole row of a frame with a header that was checked before.

    Returns:
        uint8 `[n]`: indices into `REASONS`; 0 where the requested stripes are in the target,
            verified.

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
    check_all(checks, expected, reasons, np.empty(PIECE_BYTES, np.uint8))
    return reasons


def compile_frames() -> None:
    """Compile checking and sealing, or load them from the cache, ahead of their first use."""
    check_known(())
    seal_frames(np.zeros(0, SEAL))


def check_known(rows: Sequence[tuple[int, ...]]) -> list[int]:
    """Call `check_frames` for rows with headers that were checked before; return the reasons."""
    return check_frames(checks_of(rows), np.zeros((len(rows), FIXED_BYTES), np.uint8)).tolist()


# Seal many plain frames: copy and digest their bodies in the same pass.

SEAL = np.dtype([(name, "<u8") for name in "header header_bytes body data step stripes".split()])
"""Row of one frame: address and length of its header, with zeros for the digests; address of the
body, and address of the copy, which may be the body itself."""


def seal_frames(rows: NDArray[np.void]) -> None:
    """Copy bodies, and write all digests into the headers; `rows` is `[n]` of dtype `SEAL`."""
    _seal_all(rows, np.empty(PIECE_BYTES, np.uint8))
