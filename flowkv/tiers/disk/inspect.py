"""Inspection of a disk tier's directory, without owning or changing it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from flowkv.core.errors import StoreError, stating
from flowkv.core.geometry import FIDELITIES
from flowkv.tiers.base import BadFrame
from flowkv.tiers.disk.home import (
    ERASED,
    RECORD_BYTES,
    Held,
    Journal,
    Slot,
    Superblock,
    in_order,
    newest,
    owned,
    read_superblock,
    sensible,
)
from flowkv.tiers.disk.store import (
    DiskStore,
    Index,
    Slabs,
    check_frame,
    frames_in_slots,
    open_journal,
    packed_rows,
    rows_in_slots,
)
from flowkv.tiers.erasure_log import MOST_KEYS, ErasureLog, new_entry, realm_name
from flowkv.tiers.frame import AES_256_GCM, Envelope, Keyring
from flowkv.tiers.io.engine import FileIO

Progress = Callable[[int, int], None]


class FrameShare(msgspec.Struct):
    """Number of frames of one kind, codec or namespace, and the bytes of their bodies."""

    frames: int = 0
    bytes: int = 0


class Inspection(msgspec.Struct, kw_only=True):
    """Content of a directory.

    Attributes:
        format: Version of the store's format.
        readable: Whether this version of FlowKV reads that format; else all fields below are unset.
        owned: Whether a living process owns the directory.
        capacity_bytes: Capacity that the owner gave it last.
        disk_bytes: Bytes that it occupies on the disk, everything included.
        free_bytes: Rest of the capacity.
        frames: Frames in the journal.
        bytes: Bytes of their bodies.
        kinds: By kind of frame.
        codecs: By codec.
        namespaces: By namespace digest, in hex.
        names: Names of models, by namespace digest in hex; frames of namespaces without a name were
            made by an earlier version, or by a program that gave none.
        encrypted: Frames that need a secret to be read.
        compressed: Frames with compressed stripes.
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
    kinds: dict[str, FrameShare] = {}
    codecs: dict[str, FrameShare] = {}
    namespaces: dict[str, FrameShare] = {}
    names: dict[str, str] = {}
    encrypted: int = 0
    compressed: int = 0
    bad_pages: int = 0
    journal_lost: bool = False


class ScrubReport(msgspec.Struct, kw_only=True):
    """Result of reading every frame.

    Attributes:
        frames: Frames read.
        bad: Damaged frames; the owner will find each at its next load, and forget it.
        locked: Encrypted frames, which could not be checked without their secret.
        bytes: Bytes read.
        seconds: Time taken.
        namespaces: Frames by namespace digest, in hex.
        names: Names of models, by namespace digest in hex, where they are known.
    """

    frames: int
    bad: int
    bytes: int
    seconds: float
    locked: int = 0
    namespaces: dict[str, FrameShare] = {}
    names: dict[str, str] = {}


def inspect(directory: str | os.PathLike[str]) -> Inspection:
    """Count the frames of a directory; may run beside its owner.

    Raises:
        StoreError: There is no store, or it cannot be read.
    """
    path = Path(os.path.abspath(directory))
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
    with reading(path, superblock, Envelope()) as (_, index, journal):
        frames = [held for _, held in index.items()]
        found.frames = len(frames)
        found.bytes = sum(held.body_bytes for held in frames)
        found.kinds = _shares(frames, lambda held: held.info.kind)
        found.codecs = _shares(frames, lambda held: FIDELITIES[held.info.codec])
        found.namespaces = by_namespace(frames)
        found.names = names(superblock)
        found.encrypted = sum(held.integrity == AES_256_GCM for held in frames)
        found.compressed = sum(held.lossless for held in frames)
        found.bad_pages = journal.bad_pages if journal else 0
        found.journal_lost = journal is None
    return found


def scrub(
    directory: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    keyring: Keyring | None = None,
) -> ScrubReport:
    """Read and verify every frame, changing nothing; may run beside the owner.

    Args:
        directory: The store.
        progress: Called with the frames read so far and their number.
        keyring: Derives the keys of encrypted frames; without it they are counted, not checked.

    Raises:
        StoreError: There is no store, or it cannot be read.
    """
    path, start_s = Path(os.path.abspath(directory)), time.monotonic()
    superblock = known_superblock(path)
    check = Check(keyring, superblock.capacity_bytes)
    with reading(path, superblock, check.envelope) as (slabs, index, _):
        suspects = check.suspects(slabs, list(index.items()), progress)
        frames = len(index)
        namespaces = by_namespace([held for _, held in index.items()])
    with reading(path, superblock, check.envelope) as (_, index, _):
        # The owner may have dropped or moved a frame while it was read here.
        now = [index.get(key) for key, _ in suspects]
    bad = sum(
        held is not None and held.seq == seen.seq
        for held, (_, seen) in zip(now, suspects, strict=True)
    )
    return ScrubReport(
        frames=frames,
        bad=bad,
        locked=check.locked,
        bytes=check.read_bytes,
        seconds=time.monotonic() - start_s,
        namespaces=namespaces,
        names=names(superblock),
    )


class Check:
    """Reader that checks whether frames are whole in their slots.

    Args:
        keyring: Derives the keys of encrypted frames.
        most_bytes: Largest size of a frame, even if the journal has a larger one.

    Attributes:
        envelope: Checks headers of frames that are not in the journal.
        locked: Encrypted frames that could not be checked.
        read_bytes: Bytes of the others.
    """

    def __init__(self, keyring: Keyring | None = None, most_bytes: int = 1 << 62) -> None:
        self._most_bytes, self.locked, self.read_bytes = most_bytes, 0, 0
        self._plain, self._keyed = Envelope(), None
        if keyring is not None:
            self._keyed = Envelope(integrity="aead", keyring=keyring)
        self.envelope = self._keyed or self._plain

    def suspects(
        self, slabs: Slabs, frames: list[tuple[bytes, Held]], progress: Progress | None
    ) -> list[tuple[bytes, Held]]:
        """Return the damaged ones of some frames.

        A damaged tag looks like another secret's. If no encrypted frame opened at all, the secret
        is taken to be wrong: the encrypted frames count as locked.
        """
        found, opened = [], False
        for number, (key, held) in enumerate(frames, 1):
            envelope = self._keyed if held.integrity == AES_256_GCM else self._plain
            if envelope is None:
                self.locked += 1
            else:
                self.read_bytes += held.stored_bytes
                if not self._sound(slabs, key, held, envelope):
                    found.append((key, held))
                elif envelope is self._keyed:
                    opened = True
            if progress is not None:
                progress(number, len(frames))
        if opened:
            return found
        damaged = [frame for frame in found if frame[1].integrity != AES_256_GCM]
        self.locked += len(found) - len(damaged)
        return damaged

    def _sound(self, slabs: Slabs, key: bytes, held: Held, envelope: Envelope) -> bool:
        if held.stored_bytes > self._most_bytes or not slabs.reaches(held.slot, held.stored_bytes):
            return False
        data = memoryview(bytearray(held.stored_bytes))
        try:
            check_frame(data[: slabs.read(held.slot, data)], key, held, envelope)
        except (BadFrame, OSError):
            return False
        return True


def known_superblock(path: Path) -> Superblock:
    """Return the superblock of a directory that this version reads.

    Raises:
        StoreError: There is none, or it is of another format.
    """
    superblock = _superblock(path)
    if not superblock.known:
        raise StoreError(
            f"{path} has format {superblock.format}", "Scrub it with the version that wrote it"
        )
    return superblock


def _superblock(path: Path) -> Superblock:
    with _stating(path):
        superblock = read_superblock(FileIO(), path)
    if superblock is None:
        raise StoreError(
            f"there is no readable store in {path}",
            "Name the directory given as disk=, or open it once: that repairs its superblock",
        )
    return superblock


@contextmanager
def reading(
    path: Path, superblock: Superblock, envelope: Envelope
) -> Iterator[tuple[Slabs, Index, Journal | None]]:
    """Yield slabs, index and journal; the journal is None if it is lost and the slots were read.

    Raises:
        StoreError: The files cannot be read.
    """
    files, journal = FileIO(), None
    slabs, index = Slabs(files, path, files.open), Index()
    try:
        with _stating(path):
            with suppress(FileNotFoundError):
                journal = open_journal(files, path, superblock, write=False)
                rows = journal.read_new()
                index.rebuild(rows[newest(rows)])
            sound = journal is not None and not journal.lost
            if not sound:
                index.rebuild(rows_in_slots(slabs, envelope))
            yield slabs, index, journal if sound or not len(index) else None
    finally:
        slabs.close()
        if journal is not None:
            journal.close()


@contextmanager
def _stating(path: Path) -> Iterator[None]:
    """Raise a `StoreError` for files of a store that cannot be read or written in the context."""
    remedy = "Check that the directory is there and belongs to this user"
    try:
        with stating(f"the store in {path} cannot be read", remedy):
            yield
    except MemoryError as error:
        raise StoreError(
            f"there is no memory to read the store in {path}",
            "Free memory, or raise its limit (ulimit -v)",
        ) from error


def by_namespace(frames: list[Held]) -> dict[str, FrameShare]:
    """Return the share of each namespace, by its digest in hex."""
    return _shares(frames, lambda held: held.info.namespace.hex())


def names(superblock: Superblock) -> dict[str, str]:
    """Return names of models by namespace digest, in hex, as far as caches gave them."""
    return {
        digest: "".join(letter if letter.isprintable() else "?" for letter in named.name)
        for digest, named in superblock.namespaces.items()
    }


def _shares(frames: list[Held], name: Callable[[Held], str]) -> dict[str, FrameShare]:
    shares: dict[str, FrameShare] = {}
    for held in frames:
        share = shares.setdefault(name(held), FrameShare())
        share.frames += 1
        share.bytes += held.body_bytes
    return dict(sorted(shares.items()))


def _disk_bytes(path: Path) -> int:
    blocks = 0
    with _stating(path):
        for each in [path, *path.iterdir()]:
            with suppress(FileNotFoundError):  # the owner just replaced it
                blocks += os.stat(each, follow_symlinks=False).st_blocks
    return blocks * 512


# Repair of a disk tier's directory without an owner, and erasure of one model's frames in it.

UNKNOWN = "unknown"
"""All frames of namespaces without a name, such as those of earlier versions."""


class DropReport(msgspec.Struct, kw_only=True):
    """Result of an erasure.

    Attributes:
        namespaces: Digests, in hex.
        frames: Number of erased frames.
        bytes: Bytes of their bodies.
    """

    namespaces: list[str]
    frames: int
    bytes: int


class RepairReport(ScrubReport, kw_only=True):
    """Result of a repair: frames that are there now; damaged ones were dropped, locked ones stay.

    Attributes:
        recovered: Frames that the journal had lost.
    """

    recovered: int


def repair(
    directory: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    keyring: Keyring | None = None,
) -> RepairReport:
    """Recover frames that a damaged journal lost, drop damaged frames, and rewrite the journal.

    Args:
        directory: The store.
        progress: Called with the frames checked so far and their number.
        keyring: Derives the keys of encrypted frames; without it they are neither checked nor
            recovered.

    Raises:
        StoreError: There is no store, another process owns it, it cannot be read or written, or its
            journal is damaged and there is no keyring for encrypted frames.
    """
    path, start_s = Path(os.path.abspath(directory)), time.monotonic()
    superblock = known_superblock(path)
    check = Check(keyring, superblock.capacity_bytes)
    with _mended(directory, superblock, check.envelope) as (store, recovered):
        frames, files = store.entries(), FileIO()
        slabs = Slabs(files, store.path, files.open)
        suspects = check.suspects(slabs, frames, progress)
        for key, held in suspects:
            store.condemn(key, held)
        slabs.close()
    return RepairReport(
        frames=len(frames) - len(suspects),
        bad=len(suspects),
        recovered=recovered,
        locked=check.locked,
        bytes=check.read_bytes,
        seconds=time.monotonic() - start_s,
    )


def drop(
    directory: str | os.PathLike[str], namespace: str, *, keyring: Keyring | None = None
) -> DropReport:
    """Erase the frames of a namespace, and prove that none of them is left.

    Args:
        directory: The store.
        namespace: The beginning of its digest in hex (8 digits or more), the name of its model, or
            `UNKNOWN` for all frames of namespaces without a name.
        keyring: Derives the keys of encrypted frames, for a damaged journal.

    Raises:
        StoreError: There is no store or no such namespace, another process owns the store, or some
            frames may still be there.
    """
    path = Path(os.path.abspath(directory))
    superblock = known_superblock(path)
    if owned(path):
        raise StoreError(f"another process owns {path}", "Close it there, then drop again")
    with _mended(directory, superblock, Check(keyring).envelope) as (store, _):
        entries = store.entries()
        shares = by_namespace([held for _, held in entries])
        found = _meant(path, namespace, shares, names(superblock))
        doomed, log = [bytes.fromhex(digest) for digest in found], ErasureLog(path / ERASED)
        with closing(log), log.erasing():
            store.delete([key for key, held in entries if held.info.namespace in doomed])
            store.wipe(0.0)
            for at in range(0, len(doomed), MOST_KEYS // 2):  # for caches that read here
                part = doomed[at:][: MOST_KEYS // 2]
                log.publish(new_entry(realms=[realm_name(None, one) for one in part]))
        store.home.unbind(doomed)
        if aside := store.home.aside():
            raise StoreError(
                f"the frames are erased, but {path / aside[0]} holds a store of another format",
                "Delete that directory",
            )
    if left := inspect(path).namespaces.keys() & found:
        raise StoreError(f"frames of {min(left)[:12]} are there again", "Drop them again")
    return DropReport(
        namespaces=sorted(found),
        frames=sum(shares[digest].frames for digest in found),
        bytes=sum(shares[digest].bytes for digest in found),
    )


def _meant(
    path: Path, namespace: str, shares: dict[str, FrameShare], names: dict[str, str]
) -> set[str]:
    """Return the digests of the matching namespaces with frames.

    Raises:
        StoreError: There is none, or more than one matches.
    """
    if namespace == UNKNOWN:
        found = shares.keys() - names.keys()
    else:
        found = {digest for digest in shares if names.get(digest) == namespace}
        if re.fullmatch("[0-9a-fA-F]{8,64}", namespace):
            found |= {digest for digest in shares if digest.startswith(namespace.lower())}
    if not found:
        raise StoreError(
            f"{path} holds no frames of the namespace {namespace!r}", "`flowkv inspect` lists them"
        )
    if len(found) > 1 and namespace != UNKNOWN:
        listed = ", ".join(sorted(digest[:16] for digest in found))
        raise StoreError(f"{namespace!r} may be {listed}", "Name one of these")
    return found


@contextmanager
def _mended(
    directory: str | os.PathLike[str], superblock: Superblock, envelope: Envelope
) -> Iterator[tuple[DiskStore, int]]:
    """Yield an owned store with a repaired journal, and the number of frames recovered.

    Raises:
        StoreError: Another process owns it, or it cannot be read or written.
    """
    store = DiskStore(
        os.fspath(directory), superblock.capacity_bytes, exclusive=True, envelope=envelope
    )
    try:
        with _stating(store.path):
            recovered = _mend(store.path, superblock, envelope)
            store.open()
            yield store, recovered
    finally:
        store.close()


def _mend(path: Path, superblock: Superblock, envelope: Envelope) -> int:
    """Write a journal without damage from itself and the slots; return the frames recovered.

    Sequence numbers grow with time, in records and in the headers of frames alike, so records and
    headers of a key or a slot can be put in one order.
    """
    files = FileIO()
    journal = open_journal(files, path, superblock, write=True)
    slabs = Slabs(files, path, files.open)
    try:
        said = journal.read_new()
        known = len(newest(said))
        if not journal.lost and not journal.bad_pages:
            return 0
        locked: list[Slot] = []
        frames = list(frames_in_slots(slabs, Envelope(), locked))
        if envelope.integrity == "aead":
            frames += frames_in_slots(slabs, envelope)
        elif locked:
            raise StoreError(
                f"{path} has a damaged journal and {len(locked)} encrypted frames",
                "Name their secret: without it the repair would lose them",
            )
        there = sensible(packed_rows(frames))
        rows = in_order(np.concatenate([said, there]), journal.capacity_bytes)
        rows = rows[newest(rows)]
        data = rows.tobytes()
        journal.rewrite(data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES))
        return max(0, len(rows) - known)
    finally:
        slabs.close()
        journal.close()
