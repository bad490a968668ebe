"""KV events: blocks that a cache has stored and removed, as engines publish them over ZeroMQ.

A message has three parts: a topic, a number that counts up (u64, big-endian), and msgpack of a
batch, `[time, [event, ...], rank]`. Events are maps with a "type" (vLLM 0.32,
`vllm/distributed/kv_events.py`) or arrays that begin with it (earlier vLLM, SGLang, Dynamo); both
are read, maps are written.

A publisher may replay missed messages: a socket that is sent a number answers with all messages
from that number on that it still has, and ends with -1. A `Recorder` makes recordings for the
simulator of them.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.core.files import MALFORMED
from flowkv.core.keys import ROOT, tenant_salt
from flowkv.observe.events import Closing
from flowkv.observe.recording import MOST_BLOCK_TOKENS, Writer

if TYPE_CHECKING:
    from flowkv.cache.index import Block
    from flowkv.cache.kv import KV

ANSWERING_S, CHUNK_S = 30.0, 2.0
MOST_KNOWN = 1 << 20
MOST_TOKENS = (1 << 31) - 1
"""Most tokens of a prompt or an answer in a recording."""


class _Request:
    """Request that may not be over."""

    __slots__ = ("answered", "began_s", "chain", "last_s", "session")

    def __init__(self, began_s: float, chain: list[bytes], session: str) -> None:
        self.began_s = self.last_s = began_s
        self.chain, self.session, self.answered = chain, session, 0


class Recorder(Closing):
    """Writer of a recording of an engine's requests, from the events of its device blocks.

    Events name no requests, so these are inferred from chains of blocks: a request is its new
    blocks and all those above them. More blocks right below its last, within `CHUNK_S`, are the
    next chunk of its prompt; a single one, within `ANSWERING_S`, is a block of its answer. Requests
    without any new block, and tokens that fill no block, are not visible.

    Args:
        path: A new file; an old one is replaced. `flowkv.sim.read_trace` reads it.

    Attributes:
        requests: Requests written so far.

    Raises:
        OSError: The file cannot be written; any call may.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.requests = Path(path), 0
        self._writer: Writer | None = None
        self._above: dict[bytes, bytes | None] = {}
        self._open: dict[bytes, _Request] = {}  # by their last block; the longest idle one first
        self._now_s = 0.0
        self.path.touch()

    def feed(self, batches: Iterable[EventBatch]) -> None:
        """Apply the next events, and write requests that are over."""
        for batch in batches:
            self._now_s = max(self._now_s, batch.ts)
            for event in batch.events:
                if not isinstance(event, BlockStored) or event.group_idx or not event.block_hashes:
                    continue
                if event.medium in (None, DEVICE):
                    self._stored(event)
            while (last := next(iter(self._open), None)) is not None:
                if self._now_s - self._open[last].last_s <= ANSWERING_S:
                    break
                self._write(self._open.pop(last))

    def close(self) -> None:
        """Write the remaining requests and close the file; a second call does nothing."""
        while self._open:
            self._write(self._open.pop(next(iter(self._open))))
        if self._writer is not None:
            self._writer.close()

    def _stored(self, event: BlockStored) -> None:
        if self._writer is None:
            self._writer = Writer(self.path, block_tokens=event.block_size)
        if event.block_size != self._writer.block_tokens:
            return
        parent = None if event.parent_block_hash is None else _name(event.parent_block_hash)
        names, above = [*map(_name, event.block_hashes)], parent
        for name in names:
            self._above.pop(name, None)  # reinserted, so that the oldest block goes first
            self._above[name], above = above, name
        while len(self._above) > MOST_KNOWN:
            del self._above[next(iter(self._above))]
        one, single = self._open.get(parent or b""), len(names) == 1
        limit_s = ANSWERING_S if single else 0.0 if one and one.answered else CHUNK_S
        if one is None or self._now_s - one.last_s > limit_s:
            one = _Request(self._now_s, self._chain(parent), event.session_id or "")
        else:
            del self._open[one.chain[-1]]
            one.answered += single
        one.chain += names
        one.last_s = self._now_s
        if (other := self._open.pop(names[-1], None)) is not None:
            self._write(other)
        self._open[names[-1]] = one

    def _chain(self, name: bytes | None) -> list[bytes]:
        found: dict[bytes, None] = {}
        while name is not None and name not in found:
            found[name] = None
            name = self._above.get(name)
        return [*reversed(found)]

    def _write(self, request: _Request) -> None:
        assert self._writer is not None
        size, prompt = self._writer.block_tokens, len(request.chain) - request.answered
        self._writer.request(
            round(request.began_s * 1e9),
            b"".join(request.chain),
            input_tokens=min(prompt * size, MOST_TOKENS),
            output_tokens=min(request.answered * size, MOST_TOKENS),
            session=request.session.encode(),
        )
        self.requests += 1


def _name(block: Hash) -> bytes:
    """Return 16 bytes for a block's hash."""
    raw = (block & (1 << 64) - 1).to_bytes(8, "little") if isinstance(block, int) else block
    return hashlib.blake2b(raw, digest_size=16).digest()


Hash: TypeAlias = bytes | int
"""An engine's name of a block and all above it; a publisher uses one of the two types."""

TokenId: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

DEVICE = "GPU"
"""The medium of blocks that attention reads, whatever the device is."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks of one chain, root to leaf, were stored.

    Attributes:
        block_hashes: Their names.
        parent_block_hash: The block above the first; None if that is a root.
        token_ids: Tokens of all blocks.
        block_size: Tokens of each block.
        lora_id: No longer used.
        medium: Medium of the blocks: `DEVICE`, "CPU", "STORAGE"; None if unknown.
        lora_name: Adapter.
        extra_keys: Further identity of each block beside its tokens: adapter, images, salt.
        group_idx: Layer group.
        kv_cache_spec_kind: Kind of attention of the group.
        kv_cache_spec_sliding_window: Its window in tokens.
        session_id: Conversation that the blocks were stored for.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, Meta(ge=1, lt=MOST_BLOCK_TOKENS)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks were removed; see `BlockStored`."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """All blocks were removed."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[str, type[KVEvent]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of one moment, in their order.

    Attributes:
        ts: Seconds since 1970.
        events: `KVEvent`s.
        rank: Number of the engine's data-parallel replica.
    """

    ts: float
    events: list[Any]
    rank: int | None = None


MOST_S = 2.0**32
"""Upper bound of times (year 2106), so that nanoseconds fit into a recording."""


def encode(batch: EventBatch) -> bytes:
    """Return a batch as the third part of a message."""
    return msgspec.msgpack.encode(batch)


def decode(payload: bytes) -> EventBatch:
    """Return the batch in a message; events of unknown kinds are left out.

    Raises:
        ConfigError: The payload is no batch of events.
    """
    try:
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        batch.events = [event for raw in batch.events if (event := _event(raw)) is not None]
        if not 0 <= batch.ts < MOST_S:  # refuses NaN, too
            raise ValueError(f"its time is {batch.ts}")
    except (*MALFORMED, TypeError) as error:
        raise ConfigError(
            f"these are no KV events ({error})",
            "Subscribe to what vLLM, SGLang, Dynamo or FlowKV publish",
        ) from None
    return batch


def _event(raw: Any) -> KVEvent | None:
    if isinstance(raw, dict):
        kind, said = _KINDS.get(raw.pop("type", "")), raw
    else:
        name, *values = raw
        kind = _KINDS.get(name)
        said = dict(zip(kind.__struct_fields__ if kind else (), values, strict=False))
    event = None if kind is None else msgspec.convert(said, kind)
    if isinstance(event, BlockStored):
        keys = [key for keys in event.extra_keys or () for key in keys or ()]
        parts = [part for key in keys for part in (key if isinstance(key, list) else [key])]
        if any(isinstance(part, list | dict) for part in parts):
            raise ValueError("keys within keys within keys")
    return event


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
