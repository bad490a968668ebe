"""Write-behind of memo rows into tiers: callers do not wait until their rows are stored."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from flowkv.core.files import renew_lock
from flowkv.core.interrupts import unbroken
from flowkv.core.reaper import begin
from flowkv.residency.keeper import Caller, Keeper
from flowkv.tensors.nested import StoredRow
from flowkv.tiers import FrameInfo, Store, TierAnswer

PART_BYTES = 1 << 16
"""Most bytes of a stripe; the first one has the whole row, or at least its length."""
_GRANULE = 4096
_PENDING_BYTES = 64 << 20
_BATCH_BYTES = 16 << 20
_STORE_S = 10.0
_READING_SHARE = 0.005  # share of time for reading weights again before rows are stored
_log = logging.getLogger("flowkv")


class WriteBehind:
    """Queue of rows that a thread stores in tiers; queued rows can be read from it.

    Args:
        keeper: The keeper of the tiers.
        proven: Return whether a computation still fits its name, by all bytes of its weights.

    Attributes:
        pending_bytes: Bytes of queued rows; bounded.
        dropped: Rows that did not fit into the queue.
    """

    def __init__(self, keeper: Keeper, proven: Callable[[bytes], bool]) -> None:
        self.dropped = self.pending_bytes = 0
        self._keeper, self._proven = keeper, proven
        self._waiting: deque[tuple[bytes, FrameInfo]] = deque()
        self._fresh: dict[bytes, StoredRow] = {}
        self._changed = threading.Condition()
        renew_lock(self, self._changed)
        self._hurried = self._closing = False
        self._next_s = 0.0  # time at which weights may be read again
        self._thread: threading.Thread | None = None

    def get(self, key: bytes) -> StoredRow | None:
        """Return a queued row, or None."""
        return self._fresh.get(key)

    @unbroken
    def add(self, rows: Mapping[bytes, StoredRow], info: FrameInfo) -> None:
        """Queue rows to be stored later, as far as there is room."""
        with self._changed:
            if self._thread is None:
                self._thread = begin(self._run, name="flowkv memo")
                if self._thread is None:
                    self.dropped += len(rows)
                    return
            for key, row in rows.items():
                full = self.pending_bytes + row.n_bytes > _PENDING_BYTES
                if full or self._closing or key in self._fresh:
                    self.dropped += full
                    continue
                self._fresh[key] = row
                self.pending_bytes += row.n_bytes
                self._waiting.append((key, info))
            self._changed.notify_all()

    def flush(self, timeout_s: float = _STORE_S) -> bool:
        """Wait until all queued rows are stored or dropped; return whether they are."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._fresh, timeout_s)
            self._hurried = False
            return done

    def close(self) -> None:
        """Store the queued rows, and end the thread."""
        self.flush()
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STORE_S)

    def _run(self) -> None:
        caller = self._keeper.caller()
        while batch := self._take():
            began_s = time.monotonic()
            try:
                sound = {name for name in {i.namespace for _, i in batch} if self._proven(name)}
                ended_s = time.monotonic()
                self._next_s = ended_s + (ended_s - began_s) / _READING_SHARE
                self._store(caller, [item for item in batch if item[1].namespace in sound])
            except Exception:  # the rows are only computed again later
                _log.warning("%d rows could not be stored", len(batch), exc_info=True)
            finally:
                with self._changed:
                    for key, _ in batch:
                        self.pending_bytes -= self._fresh.pop(key).n_bytes
                    self._changed.notify_all()

    def _take(self) -> list[tuple[bytes, FrameInfo]]:
        """Return the next batch to store; empty once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(
                lambda: self._hurried or self._closing or self.pending_bytes > _PENDING_BYTES // 2,
                max(0.0, self._next_s - time.monotonic()),
            )
            batch, n_bytes = [], 0
            while self._waiting and n_bytes < _BATCH_BYTES:
                batch.append(self._waiting.popleft())
                n_bytes += self._fresh[batch[-1][0]].n_bytes
            return batch

    def _store(self, caller: Caller, batch: Sequence[tuple[bytes, FrameInfo]]) -> None:
        if not batch or not self._keeper.open:
            return
        operations = []
        for key, info in batch:
            pieces = self._fresh[key].encode()
            length = sum(map(len, pieces))
            stripes, step = stripes_of(length)
            body = b"".join((*pieces, bytes(stripes * step - length)))
            operations.append(Store(key, info._replace(stripe_bytes=step), memoryview(body)))
        job = caller.submit_store(operations, deadline_s=_STORE_S)
        answers_of(caller, job, len(operations), time.monotonic() + 2 * _STORE_S)


def stripes_of(n_bytes: int) -> tuple[int, int]:
    """Return the stripes of a body of so many bytes, and the bytes of each."""
    count = -(-n_bytes // PART_BYTES)
    return count, n_bytes if count == 1 else -(-n_bytes // (count * _GRANULE)) * _GRANULE


def answers_of(caller: Caller, job: int, count: int, until_s: float) -> list[TierAnswer]:
    """Return a job's answers that come in time; late answers to earlier jobs are dropped."""
    answers: list[TierAnswer] = []
    while len(answers) < count and (left_s := until_s - time.monotonic()) > 0:
        answers += [answer for answer in caller.poll(left_s) if answer.job == job]
    return answers
