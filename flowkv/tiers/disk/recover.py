"""From a disk tier's files to its index: replay of the journal, or of the slots if it is lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import JOURNAL, Superblock
from flowkv.tiers.disk.journal import STORED, Held, Journal, Record, Slot
from flowkv.tiers.disk.slab import Slabs, slot_granules
from flowkv.tiers.frame import (
    BadFrame,
    Header,
    decode_header,
    header_bytes,
    peek_header_bytes,
    verify,
)


def replay(
    records: Iterable[Record], index: dict[bytes, Held], owners: dict[Slot, bytes] | None = None
) -> None:
    """Applies journal records: the newest of a key wins, and of a slot where `owners` are given."""
    for op, key, held in records:
        old = index.pop(key, None)
        if old is not None and owners is not None:
            owners.pop(old.slot, None)
        if op != STORED:
            continue
        if owners is not None:
            index.pop(owners.pop(held.slot, b""), None)
            owners[held.slot] = key
        index[key] = held


def check_frame(data: memoryview, key: bytes, held: Held) -> tuple[Header, memoryview]:
    """Header and body of the frame that should lie in a slot, verified.

    Raises:
        BadFrame: It does not lie there, or is damaged.
    """
    header = decode_header(data)
    if header.key != key:
        raise BadFrame("key", "the slot holds the frame of another key")
    if header.stripes != held.stripes or header.info != held.info:
        raise BadFrame("foreign", "the slot holds another frame of this key")
    start = header_bytes(held.stripes)
    body = data[start : start + header.body_bytes]
    verify(header, body)
    return header, body


def open_journal(files: FileIO, directory: Path, superblock: Superblock, *, write: bool) -> Journal:
    """The journal of a directory.

    Raises:
        OSError: It cannot be opened; a reader finds none before the owner made one.
    """
    if write:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(directory / f"{JOURNAL}.tmp")  # of a compaction that did not end
    store_id = bytes.fromhex(superblock.store_id)
    return Journal(files, str(directory / JOURNAL), store_id, write=write)


def recover(slabs: Slabs, journal: Journal, index: dict[bytes, Held]) -> None:
    """Fills the index of an owner that opens the directory, and tells the slabs what is used.

    Raises:
        OSError: The files cannot be read.
    """
    owners: dict[Slot, bytes] = {}
    replay(journal.read_new(), index, owners)
    if not journal.sound_pages:
        for key, held in frames_in_slots(slabs, journal.next_seq):
            index[key] = held
        if index:
            journal.rewrite(index.items())
    ends = {granules: slabs.end_bytes(granules) for granules in slabs.sizes()}
    for key, held in list(index.items()):
        granules, number = held.slot
        if number * granules * GRANULE_BYTES + held.frame_bytes > ends.get(granules, 0):
            del index[key]  # the slab file was cut off
    slabs.occupy(held.slot for held in index.values())


def frames_in_slots(slabs: Slabs, next_seq: Callable[[], int]) -> Iterator[tuple[bytes, Held]]:
    """What the headers of all slots say; for when the journal is lost.

    Slots are blanked when their frames are deleted, so those do not come back.
    """
    for granules in slabs.sizes():
        for number in range(slabs.slots(granules)):
            slot = Slot(granules, number)
            with contextlib.suppress(BadFrame):
                header = read_header(slabs, slot)
                size = header_bytes(header.stripes)
                if slot_granules(size, header.body_bytes) == granules:
                    yield header.key, Held(next_seq(), slot, header.stripes, header.info)


def read_header(slabs: Slabs, slot: Slot) -> Header:
    """The header in a slot.

    Raises:
        BadFrame: There is none.
    """
    first = memoryview(bytearray(GRANULE_BYTES))
    if slabs.read(slot, first) < GRANULE_BYTES:
        raise BadFrame("truncated", "the slot ends within the header")
    size = peek_header_bytes(first)
    if size == GRANULE_BYTES:
        return decode_header(first)
    if size > slot.granules * GRANULE_BYTES:
        raise BadFrame("foreign", "the header is longer than the slot")
    whole = memoryview(bytearray(size))
    return decode_header(whole[: slabs.read(slot, whole)])
