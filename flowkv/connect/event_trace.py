"""Recordings made of KV events, for the simulator."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from flowkv.connect.wire import DEVICE, BlockStored, EventBatch, Hash
from flowkv.observe.events import Closing
from flowkv.observe.recording import Writer

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
