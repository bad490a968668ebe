"""KV events: blocks that a cache has stored and removed, as engines publish them over ZeroMQ.

Messages are those of `flowkv.connect.wire`. A publisher may replay missed messages: a socket that
is sent a number answers with all messages from that number on that it still has, and ends with -1.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flowkv.connect.event_trace import ANSWERING_S, CHUNK_S, Recorder
from flowkv.connect.wire import (
    DEVICE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Hash,
    KVEvent,
    decode,
    encode,
)
from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.core.keys import ROOT, tenant_salt
from flowkv.observe.events import Closing

if TYPE_CHECKING:
    from flowkv.cache.index import Block
    from flowkv.cache.kv import KV

__all__ = [
    "ANSWERING_S", "CHUNK_S", "DEVICE", "AllBlocksCleared", "BlockRemoved", "BlockStored",
    "EventBatch", "EventPublisher", "EventSubscription", "Hash", "KVEvent", "Recorder", "decode",
    "encode",
]  # fmt: skip

# Subscriptions.

_NUMBER_BYTES = 8


class EventSubscription(Closing):
    """Subscription to the events of a publisher from now on. For one thread.

    Messages missing in the sequence are requested again if the publisher replays them. A message
    that stays missing, or is no batch of events, may have removed any block, so it is replaced by
    an `AllBlocksCleared`, and so is a restart of the publisher.

    Args:
        endpoint: "tcp://host:5557".
        replay: Address to request missed messages from; "" for none.
        topic: Prefix of the topics to receive.
        patience_s: Longest wait for missed messages.

    Attributes:
        lost: Messages that were missed for good, or are no batches of events.

    Raises:
        MissingDependencyError: pyzmq is not installed.
        ConfigError: The address is invalid.
    """

    def __init__(
        self, endpoint: str, *, replay: str = "", topic: str = "", patience_s: float = 5.0
    ) -> None:
        self._zmq, self._context = _zmq(), _zmq().Context()
        self._replay, self._patience_s = replay, patience_s
        self._next: int | None = None
        self.lost = 0
        self._socket = self._context.socket(self._zmq.SUB)
        self._socket.set_hwm(100_000)
        self._socket.setsockopt_string(self._zmq.SUBSCRIBE, topic)
        try:
            self._socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{endpoint!r} is no address ({error})", "Write tcp://host:port, as the engine does"
            ) from None

    def poll(self, timeout_s: float = 0.0) -> list[EventBatch]:
        """Return the batches received, in order; wait up to `timeout_s` for the first."""
        found: list[EventBatch] = []
        while self._socket.poll(0 if found else round(timeout_s * 1e3)):
            parts = self._socket.recv_multipart()
            if len(parts) == 3 and len(parts[1]) == _NUMBER_BYTES:
                found += self._take(int.from_bytes(parts[1], "big"), parts[2])
        return found

    def close(self) -> None:
        """Close the subscription; a second call does nothing."""
        self._context.destroy(linger=0)

    def _take(self, number: int, payload: bytes) -> Iterator[EventBatch]:
        batch, due = self._read(payload), self._next
        if due is None:  # request messages from before the subscription
            due = 0 if self._replay else number
        self._next, missed = number + 1, self._ask(due, number)
        yield from (self._read(missed[n]) for n in sorted(missed))
        lost = number - due - len(missed)
        if due:
            self.lost += max(0, lost)
        if lost:  # below 0 after a restart of the publisher
            batch.events.insert(0, AllBlocksCleared())
        yield batch

    def _read(self, payload: bytes) -> EventBatch:
        """Return the batch in a message, or an `AllBlocksCleared` if it is damaged."""
        try:
            return decode(payload)
        except ConfigError:
            self.lost += 1
            return EventBatch(time.time(), [AllBlocksCleared()])

    def _ask(self, first: int, last: int) -> dict[int, bytes]:
        """Request messages from `first` to before `last`; return those the publisher still has."""
        found: dict[int, bytes] = {}
        if not self._replay or first >= last:
            return found
        end_s = time.monotonic() + self._patience_s
        with self._context.socket(self._zmq.DEALER) as socket:
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.connect(self._replay)
            socket.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
            while socket.poll(max(0, round((end_s - time.monotonic()) * 1e3))):
                *_, number, payload = (b"", b"", *list[bytes](socket.recv_multipart()))
                if len(number) != _NUMBER_BYTES or len(found) >= MOST_QUEUED:
                    break
                if (n := int.from_bytes(number, "big", signed=True)) < 0:
                    break
                if first <= n < last:
                    found[n] = payload
        return found


def _zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise MissingDependencyError("KV events", "events", "pyzmq") from None
    return zmq


# Publishing the blocks of a FlowKV cache.

MOST_QUEUED = 1 << 16
MOST_EVENTS = 1 << 10
"""Most events of a batch."""
_TICK_S = 0.05


class EventPublisher(Closing):
    """Publisher of the pages in a cache's index, on the device or in a tier, until it is closed.

    A page counts as stored once its tokens are known here, and as removed when the cache forgets
    it; moves between tiers are no events. Names of blocks are chain keys, so replicas of one model
    name equal pages alike. Callers never wait: a thread sends within a twentieth of a second.
    Token ids leave the process: bind to an address that only trusted processes can reach.

    Args:
        kv: The cache.
        endpoint: "tcp://*:5557" binds; an address without a star or "ipc://" connects.
        replay: Address to replay missed messages at; "" for none.
        topic: Topic of the messages.
        kept: Most messages kept for replay.

    Attributes:
        endpoint: Bound address, with the port that was chosen for port 0.
        replay: Bound address of the replay socket, likewise.

    Raises:
        MissingDependencyError: pyzmq is not installed.
        ConfigError: The address cannot be bound, or the cache serves no model.
    """

    def __init__(
        self, kv: KV, endpoint: str, *, replay: str = "", topic: str = "", kept: int = 10_000
    ) -> None:
        if kv.planner is None:
            raise ConfigError(f"{kv!r} serves no model, so it has no pages", "Attach one first")
        self._guard, self._index = kv.lock, kv.planner.store.index
        self._topic, self._zmq = topic.encode(), _zmq()
        self._context, self._wake = self._zmq.Context(), threading.Event()
        self._queue: collections.deque[tuple[Block, bool] | None] = collections.deque()
        self._past: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=kept)
        self._number, self._open = 0, True
        self._usual = tenant_salt("", kv.config.secret_bytes)
        try:
            self._out, self.endpoint = self._bound(self._zmq.PUB, endpoint)
            self._asked, self.replay = self._bound(self._zmq.ROUTER, replay)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"events cannot be published at {endpoint} ({error})",
                "Choose a free port: tcp://*:0 takes any",
            ) from None
        with kv.lock:
            for block in sorted(self._index, key=lambda block: block.depth):
                self._note(block, True)
            self._index.watchers.append(self._note)
        self._thread = threading.Thread(target=self._run, name="flowkv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the remaining events and close; a second call does nothing."""
        with self._guard:
            if not self._open:
                return
            self._open = False
            self._index.watchers.remove(self._note)
        self._wake.set()
        self._thread.join()
        self._context.destroy(linger=500)

    def _bound(self, kind: int, endpoint: str) -> tuple[Any, str]:
        socket = self._context.socket(kind)
        if not endpoint:
            return socket, ""
        if "*" in endpoint or endpoint.startswith("ipc:"):
            socket.bind(endpoint)
            return socket, socket.getsockopt_string(self._zmq.LAST_ENDPOINT)
        socket.connect(endpoint)
        return socket, endpoint

    def _note(self, block: Block, there: bool) -> None:
        """Queue a block that was stored or removed; the index calls this under the cache's lock."""
        if block.kind != "page" or block.tokens is None:
            return
        if len(self._queue) >= MOST_QUEUED:  # too many: clear the receivers, and go on from here
            self._queue = collections.deque([None])
        self._queue.append((block, there))
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while self._open or self._queue:
            if self._wake.wait(_TICK_S):
                self._wake.clear()
                if self._open:
                    time.sleep(_TICK_S)  # collect events that belong together
            while events := self._events():
                payload = encode(EventBatch(time.time(), events, 0))
                self._past.append((self._number, payload))
                self._send(self._out, self._number, payload)
                self._number += 1
            while self.replay and self._asked.poll(0):
                who, *_, first = self._asked.recv_multipart()
                for number, payload in list(self._past):
                    if number >= int.from_bytes(first, "big"):
                        self._send(self._asked, number, payload, who, b"")
                self._send(self._asked, -1, b"", who, b"")

    def _send(self, socket: Any, number: int, payload: bytes, *before: bytes) -> None:
        numbered = number.to_bytes(_NUMBER_BYTES, "big", signed=True)
        with contextlib.suppress(self._zmq.ZMQError):  # the receiver may be gone
            socket.send_multipart([*before, self._topic, numbered, payload])

    def _events(self) -> list[KVEvent]:
        """Return the next events; consecutive pages are merged into one event."""
        events: list[KVEvent] = []
        while (queue := self._queue) and len(events) < MOST_EVENTS:
            if (said := queue.popleft()) is None:
                events.append(AllBlocksCleared())
            else:
                self._add(events, *said)
        return events

    def _add(self, events: list[KVEvent], block: Block, there: bool) -> None:
        """Add a block to the last event, if both are alike, else as an event of its own."""
        event, group = events[-1] if events else None, block.group
        root, tokens = block.parent == ROOT, [] if block.tokens is None else block.tokens.tolist()
        if isinstance(event, AllBlocksCleared) or (event and event.group_idx != group):
            event = None
        if not there:
            if not isinstance(event, BlockRemoved):
                events.append(event := BlockRemoved([], group_idx=group))
        elif isinstance(event, BlockStored) and event.block_hashes[-1] == block.parent:
            event.token_ids += tokens
            if event.extra_keys is not None:
                event.extra_keys.append(None)
        else:
            event = BlockStored([], None if root else block.parent, tokens, len(tokens))
            if root and block.tenant != self._usual:
                event.extra_keys = [(block.tenant.hex(),)]
            event.group_idx = group
            events.append(event)
        event.block_hashes.append(block.key)
