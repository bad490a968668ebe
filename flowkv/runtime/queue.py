"""Requests that wait to be served: policies know what they will use, and it may come nearer."""

from __future__ import annotations

from collections.abc import Callable

from flowkv.core.keys import ROOT
from flowkv.runtime.guard import Guard
from flowkv.runtime.prefetch import Prefetch
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.visits import Visits

MOST_WAITING = 1 << 14
"""Requests that wait at most; the oldest is called off for one more: nobody came to open it."""


class Queued:
    """A request that waits, as `KV.enqueue` returns it.

    Opening its prompt serves it; `cancel` it if that is not going to happen.

    Attributes:
        request: The number by which policies know it.
        prefetch: Pages on their way to the device for it; None if none were asked for.
    """

    def __init__(self, queue: Queue, key: bytes, request: int) -> None:
        self._queue, self._key, self.request = queue, key, request
        self.prefetch: Prefetch | None = None

    @property
    def waiting(self) -> bool:
        """Whether it was neither opened nor cancelled."""
        return self in self._queue.handles(self._key)

    def cancel(self) -> None:
        """It will not be served. Safe to call again, and after it was opened."""
        self._queue.cancel(self)

    def __repr__(self) -> str:
        return f"<flowkv.Queued: {'waiting' if self.waiting else 'served or cancelled'}>"


class Queue:
    """The requests that wait, by the last full page of their prompts.

    Args:
        visits: Tells policies.
        guard: The KV lock; `cancel` takes it, the others' callers hold it.
    """

    def __init__(self, visits: Visits, guard: Guard) -> None:
        self._visits, self._guard = visits, guard
        self._waiting: dict[bytes, list[Queued]] = {}

    def add(self, seq: Sequence) -> Queued:
        """A request for the prompt of a sequence waits now."""
        key = self._name(seq)
        queued = Queued(self, key, self._visits.enqueue(seq))
        self._waiting.setdefault(key, []).append(queued)
        if len(self._waiting) > MOST_WAITING:
            self.cancel(next(iter(self._waiting.values()))[0])
        return queued

    def take(self, seq: Sequence) -> int:
        """The number of the request that has waited longest for this prompt, -1 if none has."""
        if not self._waiting:
            return -1
        handles = self.handles(self._name(seq))
        return self._remove(handles[0]) if handles else -1

    def handles(self, key: bytes) -> list[Queued]:
        """What waits for a prompt with this last page, the longest waiting first."""
        return self._waiting.get(key, [])

    def cancel(self, queued: Queued) -> None:
        """Takes a request out that will not be served."""
        with self._guard:
            if queued.waiting:
                self._visits.abort(self._remove(queued))
                if queued.prefetch is not None:
                    queued.prefetch.cancel()

    def purge(self, slot: Callable[[bytes], int]) -> None:
        """Calls off what waits for a prompt whose last page nobody knows: it may be an erased one.

        Args:
            slot: The slot of a key, -1 if it has none.
        """
        for key in [key for key in self._waiting if slot(key) < 0]:
            for queued in list(self.handles(key)):
                self.cancel(queued)

    def _remove(self, queued: Queued) -> int:
        handles = self._waiting[queued._key]
        handles.remove(queued)
        if not handles:
            del self._waiting[queued._key]
        return queued.request

    def _name(self, seq: Sequence) -> bytes:
        pages = seq.known // seq.chains[0].page_size
        return seq.key(0, pages - 1) if pages else ROOT + seq.tenant
