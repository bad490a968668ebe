"""Plain frames checked and copied many at a time, in one compiled call that needs no interpreter.

    checks = np.array([(header, header_bytes, data, data_bytes, target, step, all, first, n), ...],
                      CHECK)                                          one row a frame
    expected = np.frombuffer(b"".join(fields), np.uint8)              256 bytes a frame
    reasons = check_frames(checks, expected.reshape(-1, 256))         0 where all is right

`fields` are `tiers.frame.fixed_fields(header)` of the frame that should be there. What a row says
is checked before anything is looked at, so a frame that lies about itself leads nowhere. In this
order: magic, version, integrity, pages and digest of the header, all fixed fields, then each wished
stripe. A stripe is read once, digested and copied in the same pass, so that checking costs next to
nothing beside copying, and what was digested is what was copied, whoever else writes to the source.
The names of the reasons are `REASONS`.

The caller has claimed all items: a target is undefined where the reason is not 0.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers import frame, words, xxh3
from flowkv.tiers.frame import DIGEST_BYTES, DIGESTED_FROM, FIXED_BYTES, MAGIC, VERSION
from flowkv.tiers.words import byte, fence, half_word, word
from flowkv.tiers.xxh3 import matches, matches_copied

CHECK = np.dtype(
    [
        ("header", "<u8"),
        ("header_bytes", "<u8"),
        ("data", "<u8"),
        ("data_bytes", "<u8"),
        ("target", "<u8"),
        ("step", "<u8"),
        ("all", "<u4"),
        ("first", "<u4"),
        ("stripes", "<u4"),
    ]
)
"""One frame: address of its header and bytes that are there; address of the first wished stripe and
bytes that are there; address of the target, which may be `data` itself, or 0 if nothing is copied;
bytes of a stripe, stripes of the frame, first wished stripe and how many are wished for."""

REASONS = ("", "foreign", "version", "truncated", "digest", "key", "integrity", "stripes")
"""Names of the reasons; those of `BadFrame`."""

STREAMED_BYTES = 4 << 20
"""A call that copies so much writes past the caches: they are too small for it, and need not read
lines that will be overwritten, which is two fifths of the time."""

_OK, _FOREIGN, _VERSION, _TRUNCATED, _DIGEST, _KEY, _INTEGRITY, _STRIPES = range(len(REASONS))
_MAGIC = np.uint64(int.from_bytes(MAGIC, "little"))
_DIGEST_AT, _INTEGRITY_AT, _KEY_AT, _KEY_END = 16, 35, 40, 72
_JIT = {"error_model": "numpy"}


@njit(**_JIT)
def _same(address, expected, start, end):  # type: ignore[no-untyped-def]
    differ = np.uint64(0)
    for at in range(start, end):
        differ |= byte(address + np.uint64(at)) ^ np.uint64(expected[at])
    return differ == 0


@njit(**_JIT)
def _check_header(header, there, stripes, expected):  # type: ignore[no-untyped-def]
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
    if not matches(header + digested, size - digested, header + np.uint64(_DIGEST_AT)):
        return _DIGEST
    if not _same(header, expected, _KEY_AT, _KEY_END):
        return _KEY
    if not _same(header, expected, DIGESTED_FROM, FIXED_BYTES):
        return _FOREIGN
    return _OK


@njit(**_JIT)
def check_frame(row, expected, streams):  # type: ignore[no-untyped-def]
    """Check one row of `CHECK`; for compiled code, which owes a `fence` if it `streams`."""
    step, first, n = np.uint64(row.step), np.uint64(row.first), np.uint64(row.stripes)
    if n == 0 or first + n > row.all or step == 0:
        return _STRIPES
    reason = _check_header(row.header, row.header_bytes, np.uint64(row.all), expected)
    if reason != _OK:
        return reason
    if row.data_bytes // n < step:
        return _TRUNCATED
    digests = row.header + np.uint64(FIXED_BYTES) + np.uint64(DIGEST_BYTES) * first
    for i in range(n):
        at, digest = row.data + step * i, digests + np.uint64(DIGEST_BYTES) * i
        if row.target and row.target != row.data:
            sound = matches_copied(at, step, digest, row.target + step * i, streams)
        else:
            sound = matches(at, step, digest)
        if not sound:
            return _DIGEST
    return _OK


def _entry(stamp: int, *, cache: bool) -> Any:
    # numba keeps machine code until the function's own file changes, whatever becomes of those it
    # calls: a constant that it closes over makes their sources part of the key.
    @njit(cache=cache, nogil=True, **_JIT)
    def check_all(checks, expected, reasons):  # type: ignore[no-untyped-def]
        n_bytes = np.uint64(0)
        for i in range(len(checks) if stamp else 0):
            n_bytes += np.uint64(checks[i].step) * np.uint64(checks[i].stripes)
        streams = n_bytes >= np.uint64(STREAMED_BYTES)
        for i in range(len(checks) if stamp else 0):
            reasons[i] = check_frame(checks[i], expected[i], streams)
        if streams:
            fence()

    return check_all


_SOURCES = b"".join(Path(str(m.__file__)).read_bytes() for m in (frame, words, xxh3))
_STAMP = 1 + zlib.crc32(_SOURCES)
try:
    _check_all = _entry(_STAMP, cache=True)
except RuntimeError:  # no directory to write to: some seconds of compilation in every process
    _check_all = _entry(_STAMP, cache=False)


def check_frames(checks: NDArray[np.void], expected: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Checks frames and copies what was wished for; holds no lock of the interpreter meanwhile.

    The first call on a machine compiles for seconds, the first in a process loads what was
    compiled; with empty arrays that can be done before anybody waits.

    Args:
        checks: `[n]` of dtype `CHECK`. All memory named must stay until the call returns.
        expected: `[n, 256]`, the fixed fields of each frame; their digests are not looked at.

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
