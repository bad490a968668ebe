"""Looks into the directory of a disk tier, without owning or changing it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from flowkv.core.errors import StoreError
from flowkv.core.layout import CODECS
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import Superblock, owned, read_superblock
from flowkv.tiers.disk.journal import Held, Journal
from flowkv.tiers.disk.recover import check_frame, frames_in_slots, open_journal, replay
from flowkv.tiers.disk.slab import Slabs
from flowkv.tiers.frame import BadFrame


class Share(msgspec.Struct):
    """Frames of one kind, codec or namespace, and the bytes of their bodies."""

    frames: int = 0
    bytes: int = 0


class Inspection(msgspec.Struct, kw_only=True):
    """What lies in a directory.

    Attributes:
        format: Version of the store's format.
        readable: Whether this version of FlowKV reads that format; else nothing below is known.
        owned: Whether a living process owns the directory.
        capacity_bytes: Capacity that the owner gave it last.
        disk_bytes: Bytes that it occupies on the disk, everything included.
        free_bytes: What is left of the capacity.
        frames: Frames that the journal knows.
        bytes: Bytes of their bodies.
        kinds: By kind of frame.
        codecs: By codec.
        namespaces: By namespace digest, in hex.
        bad_pages: Damaged pages of the journal.
        journal_lost: Whether there is no journal, so that the slots had to be read.
    """

    format: int
    readable: bool = True
    owned: bool = False
    capacity_bytes: int = 0
    disk_bytes: int = 0
    free_bytes: int = 0
    frames: int = 0
    bytes: int = 0
    kinds: dict[str, Share] = {}
    codecs: dict[str, Share] = {}
    namespaces: dict[str, Share] = {}
    bad_pages: int = 0
    journal_lost: bool = False


class ScrubReport(msgspec.Struct, kw_only=True):
    """What reading every frame found.

    Attributes:
        frames: Frames read.
        bad: Those that are damaged; the owner will find each at its next load, and forget it.
        bytes: Bytes read.
        seconds: How long it took.
    """

    frames: int
    bad: int
    bytes: int
    seconds: float


def inspect(directory: str | os.PathLike[str]) -> Inspection:
    """Counts what lies in a directory; may run beside its owner.

    Raises:
        StoreError: There is no store, or it cannot be read.
    """
    path = Path(directory)
    superblock = _superblock(path)
    disk_bytes = _disk_bytes(path)
    found = Inspection(
        format=superblock.format,
        readable=superblock.known,
        owned=owned(path),
        capacity_bytes=superblock.capacity_bytes,
        disk_bytes=disk_bytes,
        free_bytes=max(0, superblock.capacity_bytes - disk_bytes),
    )
    if not superblock.known:
        return found
    with _reading(path, superblock) as (_, index, journal):
        found.frames = len(index)
        found.bytes = sum(held.body_bytes for held in index.values())
        found.kinds = _shares(index, lambda held: held.info.kind)
        found.codecs = _shares(index, lambda held: CODECS[held.info.codec])
        found.namespaces = _shares(index, lambda held: held.info.namespace.hex())
        found.bad_pages = journal.bad_pages if journal else 0
        found.journal_lost = journal is None
    return found


def scrub(
    directory: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> ScrubReport:
    """Reads and verifies every frame, changes nothing; may run beside the owner.

    Args:
        directory: The store.
        progress: Called with the frames read so far and their number.

    Raises:
        StoreError: There is no store, or it cannot be read.
    """
    path, start_s = Path(directory), time.monotonic()
    superblock = _superblock(path)
    if not superblock.known:
        raise StoreError(
            f"{path} has format {superblock.format}", "Scrub it with the version that wrote it"
        )
    read_bytes, suspects = 0, []
    with _reading(path, superblock) as (slabs, index, _):
        for number, (key, held) in enumerate(index.items(), 1):
            size = held.frame_bytes
            read_bytes += size
            if not _sound(slabs, key, held, size):
                suspects.append((key, held.seq))
            if progress is not None:
                progress(number, len(index))
        frames = len(index)
    with _reading(path, superblock) as (_, index, _):
        # the owner may have dropped or moved a frame while it was read here
        bad = sum(key in index and index[key].seq == seq for key, seq in suspects)
    return ScrubReport(frames=frames, bad=bad, bytes=read_bytes, seconds=time.monotonic() - start_s)


def _sound(slabs: Slabs, key: bytes, held: Held, size: int) -> bool:
    if not slabs.reaches(held.slot, size):
        return False
    data = memoryview(bytearray(size))
    try:
        check_frame(data[: slabs.read(held.slot, data)], key, held)
    except (BadFrame, OSError):
        return False
    return True


def _superblock(path: Path) -> Superblock:
    try:
        superblock = read_superblock(FileIO(), path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if superblock is None:
        raise StoreError(
            f"there is no readable store in {path}",
            "Name the directory given as disk:..., or open it once: that repairs a superblock",
        )
    return superblock


@contextmanager
def _reading(
    path: Path, superblock: Superblock
) -> Iterator[tuple[Slabs, dict[bytes, Held], Journal | None]]:
    """Slabs, index and journal; the journal is None if it is lost and the slots were read."""
    files, journal = FileIO(), None
    slabs = Slabs(files, path)
    index: dict[bytes, Held] = {}
    try:
        try:
            journal = open_journal(files, path, superblock, write=False)
            replay(journal.read_new(), index, {})
        except FileNotFoundError:
            pass
        sound = journal is not None and journal.sound_pages > 0
        if not sound:
            index.update(frames_in_slots(slabs, itertools.count(1).__next__))
        yield slabs, index, journal if sound or not index else None
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        slabs.close()
        if journal is not None:
            journal.close()


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the store in {path} cannot be read ({error.strerror})",
        "Check that the directory is there and belongs to this user",
    )


def _shares(index: dict[bytes, Held], name: Callable[[Held], str]) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    for held in index.values():
        share = shares.setdefault(name(held), Share())
        share.frames += 1
        share.bytes += held.body_bytes
    return dict(sorted(shares.items()))


def _disk_bytes(path: Path) -> int:
    blocks = 0
    try:
        for each in [path, *path.iterdir()]:
            with suppress(FileNotFoundError):  # the owner just replaced it
                blocks += os.stat(each, follow_symlinks=False).st_blocks
    except OSError as error:
        raise _unreadable(path, error) from error
    return blocks * 512
