"""One line of a disk tier's journal: a fixed record of everything a frame says about itself.

    key, parent, namespace, tenant (32 each), layout (16) | sequence number u64
    slot: granules u32, number u64 | stripes u32, stripe bytes u64
    group, tokens, rank, world, head start, head stop (u32) | op, kind, codec, fidelity
    stored bytes u64 | integrity, lossless | 6 zeros | crc32

224 bytes, little endian. Thousands are read at once, as rows of a numpy array; a row becomes a
`Held` when somebody asks for it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.layout import CODECS, GRANULE_BYTES
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.frame import (
    AES_256_GCM,
    DIGEST_BYTES,
    FIXED_BYTES,
    KINDS,
    MAX_STRIPES,
    SIZE_BYTES,
    XXH3_128,
    header_bytes,
)

RECORD_BYTES = 224
STORED, DELETED = 1, 2

_RECORD = struct.Struct("<32s32s32s32s16s Q IQI Q 6I 4B Q 2B 6x I")
_CRC = struct.Struct("<I")
_MOST_SLOTS, _MOST_GRANULES = 1 << 40, 1 << 23
_MOST_SEQ = 10**16  # more than a million a second for three hundred years
UNBOUNDED = (1 << 63) - 1
"""Capacity of a store of which nobody knows it; no file reaches further."""
_NAMES = tuple((name, "V32") for name in ("key", "parent", "namespace", "tenant"))
_COUNTS = tuple(
    (name, "<u4") for name in ("group", "tokens", "rank", "world", "head_start", "head_stop")
)
_BYTES = tuple((name, "u1") for name in ("op", "kind", "codec", "fidelity"))
ROW = np.dtype(
    [
        *_NAMES,
        ("layout", "V16"),
        ("seq", "<u8"),
        ("granules", "<u4"),
        ("number", "<u8"),
        ("stripes", "<u4"),
        ("stripe_bytes", "<u8"),
        *_COUNTS,
        *_BYTES,
        ("stored_bytes", "<u8"),
        ("integrity", "u1"),
        ("lossless", "u1"),
        ("zeros", "V6"),
        ("crc", "<u4"),
    ]
)
"""A record as numpy sees it."""

Rows = NDArray[Any]  # of dtype ROW


class Slot(NamedTuple):
    """A place for a frame: size in granules, and position in the slab file of that size."""

    granules: int
    number: int

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return self.granules * GRANULE_BYTES

    @property
    def offset(self) -> int:
        """Where it begins in its file."""
        return self.number * self.granules * GRANULE_BYTES


class Held(NamedTuple):
    """Where a frame lies and what it says about itself.

    Attributes:
        seq: Sequence number, unique in the store: the slot's generation, which the header repeats.
        slot: Where it lies.
        stripes: Stripes of the body.
        info: The frame's description.
        stored_bytes: Header and stripes as they are stored.
        integrity: How the frame is checked (`frame.XXH3_128`, `frame.AES_256_GCM`).
        lossless: Whether its stripes are compressed.
    """

    seq: int
    slot: Slot
    stripes: int
    info: FrameInfo
    stored_bytes: int
    integrity: int = XXH3_128
    lossless: bool = False

    @property
    def body_bytes(self) -> int:
        """Length of the body, uncompressed."""
        return self.stripes * self.info.stripe_bytes

    @property
    def header_bytes(self) -> int:
        """Length of the header."""
        return header_bytes(self.stripes, lossless=self.lossless)


class Record(NamedTuple):
    """One line of the journal: `op` is `STORED` or `DELETED`."""

    op: int
    key: bytes
    held: Held


class Written(NamedTuple):
    """A frame that lies in its slot, or will, but is not yet known to the journal."""

    key: bytes
    held: Held


def pack_record(record: Record) -> bytes:
    """224 bytes."""
    op, key, (seq, slot, stripes, info, stored_bytes, integrity, lossless) = record
    data = _RECORD.pack(
        *(key, info.parent, info.namespace, info.tenant, info.layout, seq, *slot, stripes),
        *(info.stripe_bytes, info.group, info.tokens, info.rank, info.world),
        *(info.head_start, info.head_stop, op, KINDS.index(info.kind), info.codec, info.fidelity),
        *(stored_bytes, integrity, lossless, 0),
    )
    return data[:-4] + _CRC.pack(zlib.crc32(data[:-4]))


def record_sound(line: bytes | memoryview) -> bool:
    """Whether 224 bytes match their own crc."""
    return line[-4:] == _CRC.pack(zlib.crc32(line[:-4]))


def unpack_row(data: bytes | memoryview, row: int = 0) -> Record:
    """The record in a row; `sensible` rows only."""
    fields = _RECORD.unpack_from(data, row * RECORD_BYTES)
    key, parent, namespace, tenant, layout, seq, granules, number, stripes = fields[:9]
    step, group, tokens, rank, world, start, stop, op, kind, codec, fidelity = fields[9:20]
    stored_bytes, integrity, lossless, _ = fields[20:]
    info = FrameInfo(
        KINDS[kind],
        codec,
        fidelity,
        layout,
        parent,
        namespace,
        group,
        tokens,
        step,
        tenant,
        rank,
        world,
        start,
        stop,
    )
    held = Held(seq, Slot(granules, number), stripes, info, stored_bytes, integrity, bool(lossless))
    return Record(op, key, held)


def sensible(rows: Rows) -> Rows:
    """Those rows that can be true; every number that is used later is bounded here."""
    stripes, step = rows["stripes"].astype(np.uint64), rows["stripe_bytes"]
    slot_bytes = rows["granules"].astype(np.uint64) * np.uint64(GRANULE_BYTES)
    lossless = rows["lossless"] == 1
    each = np.where(lossless, DIGEST_BYTES + SIZE_BYTES, DIGEST_BYTES).astype(np.uint64)
    granule = np.uint64(GRANULE_BYTES)
    head = (np.uint64(FIXED_BYTES) + each * stripes + granule - np.uint64(1)) // granule * granule
    stored = rows["stored_bytes"]
    good: NDArray[np.bool_] = (
        ((rows["op"] == STORED) | (rows["op"] == DELETED))
        & (rows["kind"] < len(KINDS))
        & (rows["codec"] <= rows["fidelity"])
        & (rows["fidelity"] < len(CODECS))
        & ((rows["integrity"] == XXH3_128) | (rows["integrity"] == AES_256_GCM))
        & (rows["lossless"] <= 1)
        & (stripes >= 1)
        & (stripes <= MAX_STRIPES)
        & (step >= 1)
        & (step <= _MOST_SLOTS)
        & ((stripes == 1) | (step % granule == 0))
        & (rows["rank"] < rows["world"])
        & (rows["number"] < _MOST_SLOTS)
        & (rows["granules"] < _MOST_GRANULES)
        & (stored <= slot_bytes)
        & np.where(lossless, stored > head, stored == head + stripes * step)
    )
    return rows if good.all() else rows[good]


def in_order(rows: Rows, capacity_bytes: int = UNBOUNDED) -> Rows:
    """Those of sensible rows that a store can have come to, in the order of their numbers.

    Writes that failed half-way, repairs and crashes leave records anywhere in a file; but a store
    counts upwards, so their numbers tell which word about a key or a slot is the last one.

    Args:
        rows: Sensible rows.
        capacity_bytes: Of the store; a slot is no larger.
    """
    seqs, slot_bytes = rows["seq"], rows["granules"].astype(np.uint64) * np.uint64(GRANULE_BYTES)
    # Who goes on counting from a number that no store comes to would run out of numbers. Where such
    # are found, those a little below are not believed either: they may have been counted from one.
    most = _MOST_SEQ if not len(rows) or seqs.max() < _MOST_SEQ else _MOST_SEQ // 2
    good: NDArray[np.bool_] = (
        (seqs < most)
        & (slot_bytes <= np.uint64(min(max(capacity_bytes, 0), UNBOUNDED)))
        & (rows["number"] < np.uint64(UNBOUNDED) // slot_bytes)
    )
    rows = rows if good.all() else rows[good]
    seqs = rows["seq"]
    ordered = bool((seqs[1:] >= seqs[:-1]).all())
    return rows if ordered else rows[np.argsort(seqs, kind="stable")]


def newest(rows: Rows) -> NDArray[np.int64]:
    """Of rows in order those that still hold: the last word about a key, and about a slot, wins."""
    order = range(len(rows))
    last = dict(zip(rows["key"].tolist(), order, strict=True))
    found: NDArray[np.int64] = np.sort(np.fromiter(last.values(), np.int64, len(last)))
    stored: NDArray[np.bool_] = rows["op"] == STORED
    found = found[stored[found]]
    slots = (rows["number"] << np.uint64(23)) ^ rows["granules"]
    if len(found) == len(rows) == len(np.unique(slots)):
        return found  # nothing was ever deleted or stored anew
    stores = np.flatnonzero(stored)
    owner = dict(zip(slots[stores].tolist(), stores.tolist(), strict=True))
    owners = np.fromiter(map(owner.__getitem__, slots[found].tolist()), np.int64, len(found))
    kept: NDArray[np.int64] = found[owners == found]
    return kept
