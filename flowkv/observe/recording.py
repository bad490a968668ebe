"""Recordings: the requests of a live cache, written to a file for later replay.

A recording has chains of block ids, lengths and times, but no text, token or name. Ids are hashed
again with a salt that is not kept, so a recording cannot be matched with another one or a store.
`flowkv.sim.read_trace` reads it.
"""

from __future__ import annotations

import bisect
import hashlib
import secrets
import struct
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash
import zstandard
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.observe.events import Closing

# A file is a magic line and frames. A frame is 16 bytes (u32 compressed length, u32 length, u64
# xxh3_64 of the uncompressed bytes) and zstd-compressed msgpack. The first frame is a map that
# describes the file, fields of a request included; each further one a list of requests. A request
# names the deepest block that was written before (a number, counting from 0; -1 for none) and, of
# 16 bytes each, the ids of the blocks below it.
#
# A file that ends within a frame, after a crash, is read up to that frame.

MAGIC = b"FLOWKV recording 1\n"
FRAME_HEAD = struct.Struct("<IIQ")
MOST_BLOCK_TOKENS = 1 << 20
Tokens = Annotated[int, Meta(ge=0, lt=2**31)]
_MOST_KNOWN = 1 << 19  # some 60 MB; beyond that, ids are written again
_FRAME_REQUESTS, _FRAME_BLOCKS = 4096, 1 << 16
ID_BYTES = 16


class RecordedRequest(msgspec.Struct, array_like=True, frozen=True):
    """One request as written in a recording.

    Attributes:
        time_ns: Arrival, on any clock.
        above: Number of the deepest block that was written before, or -1.
        ids: Ids of the blocks below that one, root to leaf.
        input_tokens: Tokens of the prompt.
        output_tokens: Tokens of the answer.
        session: A hash of the conversation's name, or -1.
        tenant: Numbered in the order of appearance.
        stop: See `flowkv.policy.base`.
    """

    time_ns: Annotated[int, Meta(ge=-(2**62), lt=2**62)]
    above: int
    ids: bytes
    input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    session: Annotated[int, Meta(ge=-1, lt=2**62)] = -1
    tenant: Tokens = 0
    stop: Annotated[int, Meta(ge=0, lt=2**7)] = 0


class About(msgspec.Struct, frozen=True):
    """First frame of a recording, which describes the file."""

    block_tokens: int
    version: int = 1
    fields: tuple[str, ...] = RecordedRequest.__struct_fields__


class Writer(Closing):
    """Writer of a recording. For one thread.

    Args:
        path: A new file; an old one is replaced.
        block_tokens: Tokens of a block.
        salt: Salt of the hashes; by default a random one that is not kept.

    Raises:
        OSError: The file cannot be written; any call may.
    """

    def __init__(self, path: str | Path, *, block_tokens: int, salt: bytes | None = None) -> None:
        self.path = Path(path)
        self.block_tokens = block_tokens
        self._salt = (secrets.token_bytes(16) if salt is None else salt)[:64]
        self._known: dict[bytes, int] = {}
        self._tenants: dict[bytes, int] = {}
        self._count = self._blocks = 0
        self._pending: list[RecordedRequest] = []
        self._file = self.path.open("wb")
        self._file.write(MAGIC)
        self._write(msgspec.msgpack.encode(About(block_tokens)))

    def request(
        self,
        time_ns: int,
        ids: NDArray[np.uint64] | bytes,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        session: bytes = b"",
        tenant: bytes = b"",
        stop: int = 0,
    ) -> None:
        """Add a request, best once it is complete.

        Args:
            time_ns: Its arrival, on any clock that does not jump.
            ids: Chain ids of its whole blocks, root to leaf: u64 [n, 2], or 16 bytes each. Equal
                ids mean equal whole prefixes.
            input_tokens: Tokens of the prompt.
            output_tokens: Tokens of the answer.
            session: Name of the conversation; empty if unknown.
            tenant: Name of the tenant.
            stop: Why the answer ended; see `flowkv.policy.base`.

        Raises:
            StateError: After `close`.
        """
        raw = ids if isinstance(ids, bytes) else np.ascontiguousarray(ids, "<u8").tobytes()
        chain = [raw[i : i + ID_BYTES] for i in range(0, len(raw) - ID_BYTES + 1, ID_BYTES)]
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        # All ancestors of a known block are known.
        above = bisect.bisect(chain, 0, key=lambda block: block not in self._known)
        new = chain[above:]
        first = self._known[chain[above - 1]] if above else -1
        for i, block in enumerate(new):
            self._known[block] = self._count + i
        self._count += len(new)
        self._blocks += len(new)
        hashed = b"".join(self._hash(block, b"block") for block in new)
        whose = self._tenants.setdefault(tenant, len(self._tenants))
        number = int.from_bytes(self._hash(session, b"session")[:8], "little") >> 2
        self._pending.append(
            RecordedRequest(
                int(time_ns),
                first,
                hashed,
                int(input_tokens),
                int(output_tokens),
                number if session else -1,
                whose,
                int(stop),
            )
        )
        if len(self._pending) >= _FRAME_REQUESTS or self._blocks >= _FRAME_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Write all added requests to the file."""
        if self._file.closed:
            raise StateError(f"recording {self.path} is closed", "Open another Writer")
        if self._pending:
            pending, self._pending, self._blocks = self._pending, [], 0
            self._write(msgspec.msgpack.encode(pending))
        self._file.flush()

    def close(self) -> None:
        """Write the remaining requests and close the file; a second call does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()
                self._known.clear()  # some 60 MB; caches keep their recordings

    def _hash(self, name: bytes, what: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=ID_BYTES, key=self._salt, person=what).digest()

    def _write(self, body: bytes) -> None:
        packed = zstandard.ZstdCompressor(level=3).compress(body)
        self._file.write(FRAME_HEAD.pack(len(packed), len(body), xxhash.xxh3_64_intdigest(body)))
        self._file.write(packed)
