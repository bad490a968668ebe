"""Frames in a directory on a local disk: they survive the process, and other processes may read.

Two threads move the bytes. A load is read and verified in the thread's own memory and copied to its
target last, so an overdue answer never lands in memory that its owner has used again, and a target
sees verified bytes or none. Likewise a store whose deadline passes while it is written is undone.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

from flowkv.core.clock import Clock, SystemClock
from flowkv.core.errors import ConfigError, StateError, StoreError
from flowkv.tiers.base import Completion, Entry, Load, Outcome, Store
from flowkv.tiers.disk.files import FileIO, reason_of
from flowkv.tiers.disk.store import DiskStore, Refused, Written
from flowkv.tiers.frame import BadFrame, span
from flowkv.tiers.worker import Item, Staging, Workers

THREADS = 2
SYNC_BATCH = 32
CLOSE_S = 60.0


class DiskTier:
    """A `Tier` in one directory. The first process to open it owns it; others only read.

    `STORED` means: header, body and journal record were handed to the operating system, so that the
    frame survives `kill -9`; with `durability="sync"` the device confirmed it, and it survives the
    machine. A frame whose bytes are wrong is a `MISS` with the reason "digest", "key", "foreign",
    "version" or "truncated"; it is forgotten, and its slot stays unused until the directory is
    opened again. A reader answers stores with "read-only", and sees new frames as they come.

    Args:
        directory: A directory of its own; made if it is not there.
        capacity_bytes: Most bytes that the directory may occupy on the disk, everything included.
            If it was larger when the directory was open last, the oldest frames are dropped.
        name: Shown in statistics; default "disk:" and the directory.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durability: "none" leaves it to the operating system when the device is written, "sync"
            waits for that.
        queue_bytes: Stores waiting beyond this many bytes are `FAILED` with reason "busy".
        files: File operations, for tests.
        clock: Source of time.

    Attributes:
        dropped: Stores refused because another process owns the directory.

    Raises:
        ConfigError: The capacity is too small.
        StoreError: The directory cannot be used.
    """

    kind = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        name: str = "",
        exclusive: bool = False,
        durability: Literal["none", "sync"] = "none",
        queue_bytes: int = 1 << 28,
        files: FileIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        path, durable = os.fspath(directory), durability == "sync"
        if durability not in ("none", "sync"):
            raise ConfigError(f"durability={durability!r}", "Use 'none' or 'sync'")
        self.name, self.capacity_bytes, self.dropped = name or f"disk:{path}", capacity_bytes, 0
        self._store = DiskStore(
            path, capacity_bytes, exclusive=exclusive, durable=durable, files=files
        )
        self.writable, self.shared = self._store.owner, not self._store.owner
        self._pid, self._open, self._closing = os.getpid(), True, threading.Lock()
        self._workers = Workers(
            self.name,
            self._load,
            self._write,
            clock or SystemClock(),
            threads=THREADS,
            batch=SYNC_BATCH if durable else 1,
            queue_bytes=queue_bytes,
        )
        if not self.writable:
            warnings.warn(
                f"another process owns {path}: this one reads it and stores nothing there",
                UserWarning,
                stacklevel=2,
            )

    @property
    def corrupt(self) -> int:
        """Frames found damaged since the directory was opened."""
        return self._store.corrupt

    def used_bytes(self) -> int:
        """Bytes charged for frames, and for managing them."""
        return self._store.used_bytes() if self._usable() else 0

    def frame_bytes(self, body_bytes: int) -> int:
        """Upper bound of what one more frame is charged."""
        return self._store.frame_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are in the index; a reader looks at the journal first."""
        if not self._usable():
            return [False] * len(keys)
        self._store.refresh()
        return self._store.contains(keys)

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Queues reads; they go before stores.

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        self._require_usable()
        self._store.refresh()
        return self._workers.submit(items, deadline_s)

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Queues writes; what does not fit into the queue is `FAILED` with reason "busy".

        Raises:
            StateError: The tier is closed, or was opened before a fork.
        """
        self._require_usable()
        return self._workers.submit(items, deadline_s)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Answers that are ready; waits up to `timeout_s` for the first one."""
        return self._workers.poll(timeout_s) if self._pid == os.getpid() else []

    def fileno(self) -> int:
        """An eventfd that is readable while answers wait.

        Only `poll` notices a passed deadline, so call it by then, whatever the descriptor says.
        """
        return self._workers.answers.fileno()

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets frames. Their bytes stay in the slab files until the space is used again."""
        return self._store.delete(keys) if self._usable() else 0

    def cancel(self, job: int) -> None:
        """Answers what is not under way any more."""
        self._workers.cancel(job)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Forgets frames and overwrites their slots.

        Raises:
            StoreError: Another process owns the directory, or a slot could not be overwritten.
        """
        if not self._usable():
            return 0
        if not self.writable:
            raise StoreError(f"another process owns {self.name}", "Erase there")
        try:
            return self._store.delete(keys, wipe=True)
        except OSError as error:
            raise StoreError(
                f"{self.name} could not overwrite a frame ({error.strerror})",
                "Check the disk, and delete the directory if the frames must not stay",
            ) from error

    def scan(self) -> Iterator[Entry]:
        """All frames, oldest store first."""
        if self._usable():
            self._store.refresh()
            for key, held in self._store.entries():
                yield Entry(key, held.info, held.charge_bytes)

    def close(self) -> None:
        """Works off what is queued, for a minute at most, and gives up the directory."""
        if self._pid != os.getpid():
            return
        with self._closing:
            if self._open:
                self._open = False
                if self._workers.close(CLOSE_S):  # else a thread is stuck with the files
                    self._store.close()

    def _usable(self) -> bool:
        return self._open and self._pid == os.getpid()

    def _require_usable(self) -> None:
        if not self._usable():
            why = "is closed" if self._pid == os.getpid() else "was opened before a fork"
            raise StateError(f"tier {self.name!r} {why}", "Open the directory again, here")

    def _load(self, item: Item, staging: Staging) -> None:
        wish, workers = item.wish, self._workers
        if not isinstance(wish, Load):
            return  # answered meanwhile
        try:
            found = self._store.read(wish.key, wish.layout, wish.fidelity, staging)
        except BadFrame as error:
            workers.answer(item, Outcome.MISS, error.reason)
        except OSError as error:
            workers.answer(item, Outcome.FAILED, reason_of(error))
        else:
            if found is None:
                workers.answer(item, Outcome.MISS)
                return
            header, body = found
            try:
                stripes, step = span(header, wish.first, wish.stripes), header.info.stripe_bytes
            except BadFrame as error:
                workers.answer(item, Outcome.MISS, error.reason)
                return
            part = body[stripes.start * step : stripes.stop * step]
            if wish.target.readonly or wish.target.nbytes < len(part):
                workers.answer(item, Outcome.FAILED, "target")
            elif workers.claim(item):
                wish.target.cast("B")[: len(part)] = part
                workers.answer(item, Outcome.HIT, "", header.info, len(part))

    def _write(self, items: list[Item]) -> None:
        written: list[tuple[Item, Written]] = []
        for item in items:
            wish = item.wish
            if isinstance(wish, Store):
                try:
                    frame = self._store.write(wish.key, wish.info, wish.body.cast("B"))
                except (BadFrame, Refused) as error:
                    self.dropped += error.reason == "read-only"
                    self._workers.answer(item, Outcome.FAILED, error.reason)
                except OSError as error:
                    self._workers.answer(item, Outcome.FAILED, reason_of(error))
                else:
                    if frame is None:
                        self._workers.answer(item, Outcome.STORED)
                    else:
                        written.append((item, frame))
        self._commit(written)

    def _commit(self, written: list[tuple[Item, Written]]) -> None:
        self._store.abandon([frame for item, frame in written if item.done])
        written = [pair for pair in written if not pair[0].done]
        if not written:
            return
        try:
            self._store.commit([frame for _, frame in written])
        except OSError as error:
            for item, _ in written:
                self._workers.answer(item, Outcome.FAILED, reason_of(error))
            return
        for item, frame in written:
            if self._workers.claim(item):
                self._workers.answer(item, Outcome.STORED, "", None, item.n_bytes)
            else:
                self._store.delete([frame.key])
