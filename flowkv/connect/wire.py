"""KV events as engines write them: batches of blocks that a cache has stored and removed.

A message has three parts: a topic, a number that counts up (u64, big-endian), and msgpack of a
batch, `[time, [event, ...], rank]`. Events are maps with a "type" (vLLM 0.32,
`vllm/distributed/kv_events.py`) or arrays that begin with it (earlier vLLM, SGLang, Dynamo); both
are read, maps are written.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED
from flowkv.observe.recording import MOST_BLOCK_TOKENS

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
