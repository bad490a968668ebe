"""Repairs a disk tier's directory that nobody owns: damage goes, what was lost returns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from flowkv.core.errors import StoreError
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import Superblock
from flowkv.tiers.disk.inspect import Check, known_superblock, unreadable
from flowkv.tiers.disk.records import (
    RECORD_BYTES,
    ROW,
    STORED,
    Held,
    Record,
    Slot,
    newest,
    pack_record,
    sensible,
)
from flowkv.tiers.disk.recover import frames_in_slots, open_journal
from flowkv.tiers.disk.slab import Slabs
from flowkv.tiers.disk.store import DiskStore
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.keyring import Keyring

Progress = Callable[[int, int], None]


class RepairReport(msgspec.Struct, kw_only=True):
    """What a repair found and did.

    Attributes:
        frames: Frames that are there now.
        bad: Damaged ones that were dropped.
        recovered: Frames that the journal had lost.
        locked: Encrypted ones, which could not be checked without their secret, and stay; all of
            them, if the secret given opens none.
        bytes: Bytes read.
        seconds: How long it took.
    """

    frames: int
    bad: int
    recovered: int
    bytes: int
    seconds: float
    locked: int = 0


def repair(
    directory: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    keyring: Keyring | None = None,
) -> RepairReport:
    """Finds the frames that a damaged journal lost, drops every damaged frame, and rewrites it.

    Args:
        directory: The store.
        progress: Called with the frames checked so far and their number.
        keyring: Of encrypted frames; without it they are neither checked nor recovered.

    Raises:
        StoreError: There is no store, another process owns it, it cannot be read or written, or its
            journal is damaged and there is no keyring for encrypted frames.
    """
    path, start_s = Path(os.path.abspath(directory)), time.monotonic()
    superblock = known_superblock(path)
    check = Check(keyring)
    store = DiskStore(
        os.fspath(directory), superblock.capacity_bytes, exclusive=True, envelope=check.envelope
    )
    try:
        recovered = _mend(store.path, superblock, check.envelope)
        store.open()
        frames, slabs = store.entries(), Slabs(FileIO(), store.path)
        locked, read_bytes, suspects = 0, 0, list[tuple[bytes, Held]]()
        for number, (key, held) in enumerate(frames, 1):
            verdict = check(slabs, key, held)
            read_bytes += held.stored_bytes if verdict is not None else 0
            locked += verdict is None
            if verdict is False:
                suspects.append((key, held))
            if progress is not None:
                progress(number, len(frames))
        suspects, foreign = check.judged(suspects)
        for key, held in suspects:
            store.condemn(key, held)
        slabs.close()
    except StoreError:
        raise
    except (OSError, MemoryError) as error:
        raise unreadable(path, error) from error
    finally:
        store.close()
    return RepairReport(
        frames=len(frames) - len(suspects),
        bad=len(suspects),
        recovered=recovered,
        locked=locked + foreign,
        bytes=read_bytes,
        seconds=time.monotonic() - start_s,
    )


def _mend(path: Path, superblock: Superblock, envelope: Envelope) -> int:
    """Writes a journal without damage, with what the slots know; frames that it had lost.

    Sequence numbers grow with time, in records and in the headers of frames alike, so both kinds
    of words about a key or a slot can be put in order.
    """
    files = FileIO()
    journal = open_journal(files, path, superblock, write=True)
    slabs = Slabs(files, path)
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
        packed = [pack_record(Record(STORED, key, held)) for key, held in frames]
        there = sensible(np.frombuffer(b"".join(packed), ROW))
        rows = np.concatenate([said, there])
        rows = rows[np.argsort(rows["seq"], kind="stable")]
        rows = rows[newest(rows)]
        data = rows.tobytes()
        journal.rewrite(data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES))
        return max(0, len(rows) - known)
    finally:
        slabs.close()
        journal.close()
