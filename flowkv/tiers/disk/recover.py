"""From a disk tier's files to its index: replay of the journal, or of the slots if it is lost."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import JOURNAL, Superblock, write_superblock
from flowkv.tiers.disk.index import Index
from flowkv.tiers.disk.journal import Journal, peek_store_id
from flowkv.tiers.disk.records import (
    ROW,
    STORED,
    UNBOUNDED,
    Held,
    Record,
    Rows,
    Slot,
    in_order,
    newest,
    pack_record,
    sensible,
)
from flowkv.tiers.disk.slab import Slabs
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import BadFrame, Header, peek_header_bytes

_KEY_AT = slice(40, 72)  # of a header
_MOST_STRIPE_BYTES = 1 << 31  # of a compressed frame that is checked where it lies


def open_journal(files: FileIO, directory: Path, superblock: Superblock, *, write: bool) -> Journal:
    """The journal of a directory.

    Raises:
        OSError: It cannot be opened; a reader finds none before the owner made one.
    """
    if write:
        with contextlib.suppress(FileNotFoundError):
            files.remove(str(directory / f"{JOURNAL}.tmp"))  # of a compaction that did not end
    path, store_id = str(directory / JOURNAL), store_id_of(superblock)
    if store_id is None:
        store_id = peek_store_id(files, path) or (files.random(16) if write else bytes(16))
        if write:  # what is appended from now on must be found at the next opening
            superblock.store_id = store_id.hex()
            write_superblock(files, directory, superblock)
    capacity_bytes = superblock.capacity_bytes
    return Journal(files, path, store_id, write=write, capacity_bytes=capacity_bytes)


def store_id_of(superblock: Superblock) -> bytes | None:
    """The 16 bytes that pages of a store carry; None if the superblock names something else."""
    try:
        store_id = bytes.fromhex(superblock.store_id)
    except ValueError:
        return None
    return store_id if len(store_id) == 16 else None


def recover(slabs: Slabs, journal: Journal, index: Index, envelope: Envelope) -> Rows:
    """Fills the index of an owner that opens the directory, and tells the slabs what is used.

    Returns:
        The rows of what is there.

    Raises:
        OSError: The files cannot be read.
    """
    rows = journal.read_new()
    good = newest(rows)
    rows = rows[good] if len(good) < len(rows) else rows
    if journal.lost:
        rows = rows_in_slots(slabs, envelope, journal.capacity_bytes)
        for seq in rows["seq"].tolist():
            journal.seq_seen(seq)
        if len(rows):
            index.load(rows)
            journal.rewrite(index.lines())
    rows = within(slabs, rows)
    index.load(rows)
    slabs.occupy(rows["granules"], rows["number"])
    return rows


def within(slabs: Slabs, rows: Rows) -> Rows:
    """Those frames that lie inside of their slab files; a file may have been cut off."""
    ends = {granules: slabs.end_bytes(granules) for granules in slabs.sizes()}
    good = np.zeros(len(rows), np.bool_)
    for granules, end_bytes in ends.items():
        mine = rows["granules"] == granules
        size = granules * GRANULE_BYTES
        whole, rest = divmod(end_bytes, size)
        numbers, stored = rows["number"], rows["stored_bytes"]
        good |= mine & ((numbers < whole) | ((numbers == whole) & (stored <= rest)))
    return rows if good.all() else rows[good]


def rows_in_slots(slabs: Slabs, envelope: Envelope, capacity_bytes: int = UNBOUNDED) -> Rows:
    """What the headers of all slots say; for when the journal is lost.

    Of a key that two slots claim, the one that was stored last counts.
    """
    rows = in_order(sensible(packed_rows(frames_in_slots(slabs, envelope))), capacity_bytes)
    return rows[newest(rows)]


def packed_rows(frames: Iterable[tuple[bytes, Held]]) -> Rows:
    """What a journal would say of these frames."""
    packed = b"".join(pack_record(Record(STORED, key, held)) for key, held in frames)
    return np.frombuffer(packed, ROW)


def frames_in_slots(
    slabs: Slabs, envelope: Envelope, locked: list[Slot] | None = None
) -> Iterator[tuple[bytes, Held]]:
    """What the headers of all slots say.

    Slots are blanked when their frames are deleted, so those do not come back.

    Args:
        slabs: Where to look.
        envelope: How headers are checked.
        locked: Gets the slots of frames that are checked in another way.
    """
    page = aligned_memory(GRANULE_BYTES)
    for slot in (Slot(g, number) for g in slabs.sizes() for number in slabs.written(g)):
        try:
            header = _read_header(slabs, slot, envelope, page)
        except BadFrame as error:
            if error.reason == "integrity" and locked is not None:
                locked.append(slot)
            continue
        stored_bytes = header.frame_bytes
        if stored_bytes <= slot.n_bytes:
            yield header.key, held_of(header, slot, stored_bytes)


def held_of(header: Header, slot: Slot, stored_bytes: int) -> Held:
    """The journal's words for a frame in a slot."""
    return Held(
        header.generation,
        slot,
        header.stripes,
        header.info,
        stored_bytes,
        header.integrity,
        bool(header.sizes),
    )


def _read_header(slabs: Slabs, slot: Slot, envelope: Envelope, page: memoryview) -> Header:
    if slabs.read(slot, page) < GRANULE_BYTES:
        raise BadFrame("truncated", "the slot ends within the header")
    size = peek_header_bytes(page)
    if size > slot.n_bytes:
        raise BadFrame("foreign", "the header is longer than the slot")
    if size > GRANULE_BYTES:
        page = aligned_memory(size)
        page = page[: slabs.read(slot, page)]
    return envelope.head(page, bytes(page[_KEY_AT]))


def aligned_memory(n_bytes: int) -> memoryview:
    """Zeros that a file opened for direct I/O can be read into."""
    return memoryview(mmap.mmap(-1, n_bytes))


def check_frame(data: memoryview, key: bytes, held: Held, envelope: Envelope) -> Header:
    """The header of the frame that should lie in a slot, once all of its stripes are verified.

    Raises:
        BadFrame: It does not lie there, or is damaged.
    """
    header = agree(envelope.head(data, key, generation=held.seq), held)
    if header.sizes and header.info.stripe_bytes > _MOST_STRIPE_BYTES:
        raise BadFrame("foreign", f"a compressed stripe of {header.info.stripe_bytes} bytes")
    scratch = memoryview(bytearray(header.info.stripe_bytes))  # of one: compressed ones are small
    for number in range(header.stripes):
        offset, n_bytes = envelope.place(header, number, 1)
        envelope.open(header, data[offset : offset + n_bytes], scratch, number, 1)
    return header


def agree(header: Header, held: Held) -> Header:
    """A header, if it is the one that the journal speaks of.

    Raises:
        BadFrame: "foreign": the slot holds another frame of this key.
    """
    said = held.stripes, held.info, held.integrity, held.lossless
    found = header.stripes, header.info, header.integrity, bool(header.sizes)
    if found != said or header.frame_bytes != held.stored_bytes:
        raise BadFrame("foreign", "the slot holds another frame of this key")
    return header
