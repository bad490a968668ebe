"""Plain frames sealed many at a time: copied into staging memory and digested in the same pass.

One compiled call holds no lock of the interpreter while it reads gigabytes a second. What is
digested is what lies in staging memory, whoever else writes to the body.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowkv.tiers.base import FrameInfo
from flowkv.tiers.frame import (
    DIGEST_AT,
    DIGEST_BYTES,
    DIGESTED_FROM,
    FIXED_BYTES,
    Header,
    describe,
    lay_out,
    pack_header,
)
from flowkv.tiers.io.staging import Slot, address_of

COMPILED_BYTES = 1 << 20
"""Batches at least so large are worth the compiled call, and once in a process its loading."""
STREAMED_BYTES = 4 << 20

SEAL = np.dtype(
    [(name, "<u8") for name in ("header", "header_bytes", "body", "data", "step", "stripes")]
)
"""One frame: address and length of its header, address of its body, and where that is copied."""

_entries: list[Any] = []


class Unsealed(NamedTuple):
    """A frame whose place is known: `memory` begins with its header, the body follows."""

    key: bytes
    info: FrameInfo
    body: memoryview
    memory: Slot
    header_bytes: int
    seq: int


def seal_all(frames: list[Unsealed]) -> None:
    """Puts headers and bodies into their memory; descriptions and lengths were checked before."""
    if sum(frame.body.nbytes for frame in frames) < COMPILED_BYTES:
        for frame in frames:
            _seal(frame)
        return
    rows = []
    for frame in frames:
        stripes = frame.body.nbytes // frame.info.stripe_bytes
        header = Header(frame.key, frame.info, bytes(DIGEST_BYTES * stripes), frame.seq)
        frame.memory.view[: frame.header_bytes] = lay_out(header)
        address, body = frame.memory.address, address_of(frame.body)
        start, step = address + frame.header_bytes, frame.info.stripe_bytes
        rows.append((address, frame.header_bytes, body, start, step, stripes))
    if not _entries:
        _entries.append(_compiled())
    _entries[0](np.array(rows, SEAL))


def _seal(frame: Unsealed) -> None:
    start = frame.header_bytes
    copy = frame.memory.view[start : start + frame.body.nbytes]
    copy[:] = frame.body
    header = describe(frame.key, frame.info, copy, frame.seq)
    frame.memory.view[:start] = pack_header(header)


def _compiled() -> Any:
    from numba import njit

    from flowkv.tiers import words, xxh3
    from flowkv.tiers.words import fence, put_word, swapped
    from flowkv.tiers.xxh3 import digest_copied, xxh3_128

    digest_at, digested_from = np.uint64(DIGEST_AT.start), np.uint64(DIGESTED_FROM)
    digests_at, eight = np.uint64(FIXED_BYTES), np.uint64(8)
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (words, xxh3))
    stamp = 1 + zlib.crc32(sources)  # part of what the cached code is for

    def seal_rows(rows):  # type: ignore[no-untyped-def]
        n_bytes = np.uint64(0)
        for i in range(len(rows) if stamp else 0):
            n_bytes += rows[i].step * rows[i].stripes
        streams = n_bytes >= np.uint64(STREAMED_BYTES)
        for i in range(len(rows)):
            row = rows[i]
            at = row.header + digests_at
            for stripe in range(row.stripes):
                skip = row.step * np.uint64(stripe)
                low, high = digest_copied(row.body + skip, row.step, row.data + skip, streams)
                put_word(at, swapped(high))
                put_word(at + eight, swapped(low))
                at += np.uint64(DIGEST_BYTES)
            low, high = xxh3_128(row.header + digested_from, row.header_bytes - digested_from)
            put_word(row.header + digest_at, swapped(high))
            put_word(row.header + digest_at + eight, swapped(low))
        if streams:
            fence()

    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(seal_rows)
    except RuntimeError:  # no directory to write to: compiled anew in every process
        return njit(**options)(seal_rows)
