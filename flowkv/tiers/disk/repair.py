"""Repairs a disk tier's directory that nobody owns, or erases what one model left in it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from flowkv.core.errors import StoreError
from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.home import Superblock, owned
from flowkv.tiers.disk.inspect import (
    Check,
    Share,
    by_namespace,
    inspect,
    known_superblock,
    names,
    unreadable,
)
from flowkv.tiers.disk.records import (
    RECORD_BYTES,
    Held,
    Slot,
    in_order,
    newest,
    sensible,
)
from flowkv.tiers.disk.recover import frames_in_slots, open_journal, packed_rows
from flowkv.tiers.disk.slab import Slabs
from flowkv.tiers.disk.store import DiskStore
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.keyring import Keyring

Progress = Callable[[int, int], None]
UNKNOWN = "unknown"
"""All frames whose namespace no cache has named, such as those of earlier versions."""


class DropReport(msgspec.Struct, kw_only=True):
    """What was erased.

    Attributes:
        namespaces: Digests, in hex.
        frames: How many frames.
        bytes: Bytes of their bodies.
    """

    namespaces: list[str]
    frames: int
    bytes: int


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
    check = Check(keyring, superblock.capacity_bytes)
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


def drop(
    directory: str | os.PathLike[str], namespace: str, *, keyring: Keyring | None = None
) -> DropReport:
    """Erases the frames of a namespace, and proves that nothing of them is left.

    Args:
        directory: The store.
        namespace: The beginning of its digest in hex (8 digits or more), the name of its model, or
            `UNKNOWN` for all frames whose namespace no cache has named.
        keyring: Of encrypted frames, for where the journal is damaged.

    Raises:
        StoreError: There is no store or no such namespace, another process owns the store, or some
            may still be there.
    """
    path = Path(os.path.abspath(directory))
    superblock = known_superblock(path)
    if owned(path):
        raise StoreError(f"another process owns {path}", "Close it there, then drop again")
    check = Check(keyring)
    store = DiskStore(
        os.fspath(directory), superblock.capacity_bytes, exclusive=True, envelope=check.envelope
    )
    try:
        _mend(store.path, superblock, check.envelope)
        store.open()
        entries = store.entries()
        shares = by_namespace([held for _, held in entries])
        found = _meant(path, namespace, shares, names(superblock))
        doomed = {bytes.fromhex(digest) for digest in found}
        store.delete([key for key, held in entries if held.info.namespace in doomed])
        store.wipe(0.0)
        store.forget(doomed)
        if aside := store.aside():
            raise StoreError(
                f"the frames are erased, but {path / aside[0]} holds a store of another format",
                "Delete that directory",
            )
    except StoreError:
        raise
    except (OSError, MemoryError) as error:
        raise unreadable(path, error) from error
    finally:
        store.close()
    if left := inspect(path).namespaces.keys() & found:
        raise StoreError(f"frames of {min(left)[:12]} are there again", "Drop them again")
    return DropReport(
        namespaces=sorted(found),
        frames=sum(shares[digest].frames for digest in found),
        bytes=sum(shares[digest].bytes for digest in found),
    )


def _meant(path: Path, namespace: str, shares: dict[str, Share], names: dict[str, str]) -> set[str]:
    """Digests of the namespaces that are meant, which have frames.

    Raises:
        StoreError: There is none, or it is not clear which one is meant.
    """
    if namespace == UNKNOWN:
        found = shares.keys() - names.keys()
    else:
        found = {digest for digest in shares if names.get(digest) == namespace}
        if re.fullmatch("[0-9a-fA-F]{8,64}", namespace):
            found |= {digest for digest in shares if digest.startswith(namespace.lower())}
    if not found:
        raise StoreError(
            f"{path} holds no frames of the namespace {namespace!r}",
            "`flowkv inspect` lists them",
        )
    if len(found) > 1 and namespace != UNKNOWN:
        listed = ", ".join(sorted(digest[:16] for digest in found))
        raise StoreError(f"{namespace!r} may be {listed}", "Name one of these")
    return found


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
        there = sensible(packed_rows(frames))
        rows = in_order(np.concatenate([said, there]), journal.capacity_bytes)
        rows = rows[newest(rows)]
        data = rows.tobytes()
        journal.rewrite(data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES))
        return max(0, len(rows) - known)
    finally:
        slabs.close()
        journal.close()
