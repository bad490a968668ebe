"""Requests: what policies are told of them, those that wait, and their recording as a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from flowkv.cache.block_table import Planner
from flowkv.cache.index import Block
from flowkv.cache.prefetch import Prefetch, PrefetchManager
from flowkv.cache.sequence import NO_CARE, Guard, Sequence
from flowkv.cache.store import as_slots
from flowkv.core.errors import ConfigError
from flowkv.core.keys import ROOT
from flowkv.policy.base import Slots, Visit
from flowkv.sim.formats import Writer

# Requests, as the policies of all places are told of them: once each, by the slots of its chain.
#
# Every policy sees every request, whichever place the pages come from, and pages that lie nowhere
# any more as well: so that it learns from what it gave up. Where a model has several layer
# groups, each has a chain of its own, and is a request (and a conversation) of its own to the
# policies.

MOST_SESSIONS = 1 << 14
"""Conversations whose last page is remembered, so that a hint can name them."""
_LARGEST = (1 << 62) - 1


class RequestTracker:
    """Numbers requests and tells policies of them. Callers hold the KV lock.

    Args:
        planner: Groups and store.
        foresight: Told of requests, too; None where nothing is prefetched.

    Attributes:
        followers: Told of every request that ended: its sequence, the whole pages of its prompt,
            and when it arrived.
    """

    def __init__(self, planner: Planner, foresight: PrefetchManager | None) -> None:
        self.store, self.page_size = planner.store, planner.page_size
        self.foresight = foresight
        self._windows = [planner.window(g) for g in range(len(planner.geometry.groups))]
        self.followers: list[Callable[[Sequence, int, int], None]] = []
        self._requests = 0
        self._sessions: dict[int, tuple[bytes, ...]] = {}

    # ---- requests

    def number(self) -> int:
        """A number for a request; the groups' are this one and those after it."""
        first = self._requests
        self._requests += len(self._windows)
        return first

    def begin(self, seq: Sequence, request: int = -1) -> None:
        """A request with these tokens arrived.

        Args:
            seq: Opened just now; nothing of it is attached or computed.
            request: Its number, if it was enqueued.
        """
        seq.request = self.number() if request < 0 else request
        now, tokens = self.store.now_ns(), seq.known
        tenant, pages = self.store.tenant(seq.tenant), seq.known // self.page_size
        seq.arrived_ns = now
        for g, slots in enumerate(self.chains(seq)):
            session = self._of(seq.care.session, g)
            visit = Visit(seq.request + g, session, tokens, pages, tenant)
            for place in self.store.places:
                place.policy.access(now, slots, visit)
            if self.foresight is not None:
                self.foresight.accessed(now, visit.request, g, slots)
        if seq.care is not NO_CARE:
            self._care(seq)

    def end(self, seq: Sequence) -> None:
        """A request ended; only what `begin` was told of has an end."""
        if seq.request < 0:
            return
        now, output = self.store.now_ns(), max(0, seq.known - seq.prompted)
        for g in range(len(self._windows)):
            for place in self.store.places:
                place.policy.complete(now, seq.request + g, stop=seq.stop, output_tokens=output)
        seq.request = -1
        for follower in list(self.followers):
            follower(seq, seq.prompted // self.page_size, seq.arrived_ns)
        if seq.care.session >= 0 and seq.publishable:
            self._remember(seq, min(seq.length, seq.known) // self.page_size)

    def abort(self, request: int) -> None:
        """A request that was enqueued, or began, will not go on."""
        now = self.store.now_ns()
        for g in range(len(self._windows) if request >= 0 else 0):
            for place in self.store.places:
                place.policy.abort(now, request + g)
            if self.foresight is not None:
                self.foresight.abort(now, request + g, g)

    def enqueue(self, seq: Sequence) -> int:
        """A request with these tokens waits to be served; returns its number."""
        request, now = self.number(), self.store.now_ns()
        for g, slots in enumerate(self.chains(seq)):
            for place in self.store.places:
                place.policy.enqueue(now, request + g, slots)
        return request

    # ---- chains

    def chains(self, seq: Sequence) -> list[Slots]:
        """For each group, the slots of the prompt's known pages from the first one on.

        Ghosts are among them. Groups that forget what lies behind their window may begin later.
        """
        most, found = seq.known // self.page_size, dict[int, Slots]()
        groups = range(len(self._windows))
        for g in sorted(groups, key=lambda g: self._windows[g] is not None):
            slots = self._known(seq, g, most)
            if self._windows[g] is None:
                most = min(most, len(slots))
            found[g] = as_slots(slots)
        return [found[g] for g in groups]

    def _known(self, seq: Sequence, group: int, most: int) -> list[int]:
        slots, whole = [], self._windows[group] is None
        for page in range(most):
            slot = self.store.index.slot(seq.key(group, page))
            if slot >= 0:
                slots.append(slot)
            elif whole:
                break
        return slots

    def _of(self, session: int, group: int) -> int:
        return (session + group) & _LARGEST if session >= 0 else -1

    # ---- how pages should be kept

    def check(self, seq: Sequence) -> None:
        """Asks every policy whether it knows the lease of a request.

        Raises:
            ConfigError: One does not.
        """
        if seq.care.lease:
            for place in self.store.places:
                none = as_slots(())
                place.policy.insert(self.store.now_ns(), none, none, lease=seq.care.lease)

    def _care(self, seq: Sequence) -> None:
        """What is known of the prompt already is kept as the request says from now on."""
        if seq.care.session >= 0:
            self._remember(seq, seq.known // self.page_size)
        if not seq.care.lease and not seq.care.retain:
            return
        for g in range(len(self._windows)):
            blocks = list[Block]()
            for page in range(seq.known // self.page_size):
                block = self.store.index.find(seq.key(g, page))
                lease = seq.care.of(page * self.page_size, (page + 1) * self.page_size)
                if block is not None and lease:
                    block.lease = lease
                    blocks.append(block)
            self.store.insert([block for block in blocks if block.page >= 0])
            for number in range(len(self.store.tiers)):
                self.store.insert([b for b in blocks if b.tiers >> number & 1], number)

    # ---- hints

    def hint(self, chains: Iterable[Slots], eta_ns: int, sigma: float) -> int:
        """The next use of chains, one a group, is expected; returns slots of the longest."""
        now, longest = self.store.now_ns(), 0
        for g, slots in enumerate(chains):
            if len(slots):
                longest = max(longest, len(slots))
                for place in self.store.places:
                    place.policy.hint(now, slots, eta_ns, sigma)
                if self.foresight is not None:
                    self.foresight.hint(now, g, slots, eta_ns, sigma)
        return longest

    def session(self, session: int) -> list[Slots]:
        """The chains of a conversation, as far as they are remembered."""
        keys = self._sessions.get(session, ())
        return [as_slots(self.store.index.chain(key)) for key in keys]

    def _remember(self, seq: Sequence, pages: int) -> None:
        if not pages:
            return
        keys = tuple(self._deepest(seq, g, pages) for g in range(len(self._windows)))
        self._sessions.pop(seq.care.session, None)
        self._sessions[seq.care.session] = keys
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def _deepest(self, seq: Sequence, group: int, pages: int) -> bytes:
        known = (seq.key(group, page) for page in range(pages - 1, 0, -1))
        first = seq.key(group, 0)
        return next((key for key in known if self.store.index.slot(key) >= 0), first)

    def purge(self) -> None:
        """Forgets conversations whose last page is not known any more."""
        slot = self.store.index.slot
        for session, keys in list(self._sessions.items()):
            if any(slot(key) < 0 for key in keys):
                del self._sessions[session]


MOST_WAITING = 1 << 14
"""Requests that wait at most; the oldest is called off for one more: nobody came to open it."""


class WaitingRequest:
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

    def __init__(self, visits: RequestTracker, guard: Guard) -> None:
        self._visits, self._guard = visits, guard
        self._waiting: dict[bytes, list[WaitingRequest]] = {}

    def add(self, seq: Sequence) -> WaitingRequest:
        """A request for the prompt of a sequence waits now."""
        key = self._name(seq)
        queued = WaitingRequest(self, key, self._visits.enqueue(seq))
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

    def handles(self, key: bytes) -> list[WaitingRequest]:
        """What waits for a prompt with this last page, the longest waiting first."""
        return self._waiting.get(key, [])

    def cancel(self, queued: WaitingRequest) -> None:
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

    def _remove(self, queued: WaitingRequest) -> int:
        handles = self._waiting[queued._key]
        handles.remove(queued)
        if not handles:
            del self._waiting[queued._key]
        return queued.request

    def _name(self, seq: Sequence) -> bytes:
        pages = seq.known // seq.chains[0].page_size
        return seq.key(0, pages - 1) if pages else ROOT + seq.tenant


# Writes the requests of a live cache as a trace, for the simulator. Salted ids only, no tokens.


class Recording:
    """A trace that is being written, as `KV.record` returns it. Ends with `close`, or the cache.

    A request is written when its sequence is closed: its arrival, the whole pages of its prompt as
    hashes of their keys, lengths, tenant, conversation, and why it ended. What cannot be written
    ends the recording, with a warning, and nothing else.

    Args:
        path: A new file; an old one is replaced.
        visits: Knows the requests.
        guard: The KV lock.
        page_size: Tokens per page.
        warn: Told what went wrong.

    Raises:
        ConfigError: The file cannot be made.

    Attributes:
        requests: Requests written so far.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        visits: RequestTracker,
        guard: Guard,
        *,
        page_size: int,
        warn: Callable[[str], None],
    ) -> None:
        self.path, self.requests = Path(path), 0
        self._visits, self._guard, self._warn = visits, guard, warn
        try:
            self._writer = Writer(self.path, block_tokens=page_size)
        except OSError as error:
            raise ConfigError(
                f"a trace cannot be written to {self.path} ({error.strerror or error})",
                "Name a file in a directory that can be written",
            ) from error
        with guard:
            visits.followers.append(self.note)

    def note(self, seq: Sequence, pages: int, arrived_ns: int) -> None:
        """A request ended; see `RequestTracker.followers`."""
        keys = b"".join(seq.key(0, page)[:16] for page in range(pages))
        session = seq.care.session
        try:
            self._writer.request(
                arrived_ns,
                keys,
                input_tokens=seq.prompted,
                output_tokens=max(0, seq.known - seq.prompted),
                session=session.to_bytes(8, "little") if session >= 0 else b"",
                tenant=seq.tenant,
                stop=seq.stop,
            )
            self.requests += 1
        except OSError as error:
            self._leave()
            self._warn(f"The trace {self.path} ends here, as it cannot be written ({error}).")

    def close(self) -> None:
        """Writes what is left. Safe to call again."""
        with self._guard:
            self._leave()

    def _leave(self) -> None:
        if self.note in self._visits.followers:
            self._visits.followers.remove(self.note)
            try:
                self._writer.close()
            except OSError as error:
                self._warn(f"The end of the trace {self.path} was not written ({error}).")

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<flowkv.Recording: {self.requests} requests to {self.path}>"
