"""Recordings: what a live cache was asked for, to be replayed later.

No text, no token and no name is written: chains of block ids, hashed once more with a salt that is
kept nowhere, lengths, times. So a recording cannot be matched with another one, or with a store.

A file is a magic line and frames. A frame is 16 bytes (u32 compressed length, u32 length, u64
xxh3_64 of what is compressed) and zstd-compressed msgpack. The first frame is a map that describes
the file, fields of a request included; each further one a list of requests. A request names the
deepest block that was written before (a number, counting from 0; -1 for none) and, of 16 bytes
each, the ids of the blocks below it.

What a crash leaves, a file that ends within a frame, is read up to there.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StateError
from flowkv.sim.chains import build_trace
from flowkv.sim.trace import Trace

MAGIC = b"FLOWKV recording 1\n"
_HEAD = struct.Struct("<IIQ")
_MOST_BYTES = 1 << 26
_MOST_KNOWN = 1 << 19  # some 60 MB; beyond that, ids are written anew
_FRAME_REQUESTS, _FRAME_BLOCKS = 4096, 1 << 16
_ID_BYTES = 16
T = TypeVar("T")
_REMEDY = "Record it anew, or pass another file"


class Request(msgspec.Struct, array_like=True, frozen=True):
    """One request, as it is written.

    Attributes:
        time_ns: Arrival, on any clock.
        above: Number of the deepest block that was written before, or -1.
        ids: Ids of the blocks below it, root to leaf.
        input_tokens: Of the prompt.
        output_tokens: Of the answer.
        session: A hash of the conversation's name, or -1.
        tenant: Numbered in the order of appearance.
        stop: See `flowkv.policy.base`.
    """

    time_ns: int
    above: int
    ids: bytes
    input_tokens: int = 0
    output_tokens: int = 0
    session: int = -1
    tenant: int = 0
    stop: int = 0


class About(msgspec.Struct, frozen=True):
    """The first frame."""

    block_tokens: int
    version: int = 1
    fields: tuple[str, ...] = Request.__struct_fields__


class Writer:
    """Writes a recording. For one thread.

    Args:
        path: A new file; an old one is replaced.
        block_tokens: Tokens of a block.
        salt: Of the hashes; a random one, kept nowhere, by default.

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
        self._pending: list[Request] = []
        self._file: BinaryIO | None = self.path.open("wb")
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
        """Notes a request, best when it is complete.

        Args:
            time_ns: When it arrived, on any clock that does not jump.
            ids: Chain ids of its whole blocks, root to leaf: u64 [n, 2], or 16 bytes each. Equal
                ids mean equal whole prefixes.
            input_tokens: Of the prompt.
            output_tokens: Of the answer.
            session: Name of the conversation, if it is known.
            tenant: Name of the tenant.
            stop: Why the answer ended; see `flowkv.policy.base`.

        Raises:
            StateError: After `close`.
        """
        raw = ids if isinstance(ids, bytes) else np.ascontiguousarray(ids, "<u8").tobytes()
        chain = [raw[i : i + _ID_BYTES] for i in range(0, len(raw) - _ID_BYTES + 1, _ID_BYTES)]
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        above = self._deepest(chain)
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
            Request(
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
        """Writes what was noted so far."""
        if self._file is None:
            raise StateError(f"recording {self.path} is closed", "Open another Writer")
        if self._pending:
            pending, self._pending, self._blocks = self._pending, [], 0
            self._write(msgspec.msgpack.encode(pending))
        self._file.flush()

    def close(self) -> None:
        """Writes the rest; a second call does nothing."""
        if self._file is not None:
            try:
                self.flush()
            finally:
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _deepest(self, chain: list[bytes]) -> int:
        """How many leading blocks are known: whoever is known, all above it are."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self._known:
                low = middle
            else:
                high = middle - 1
        return low

    def _hash(self, name: bytes, what: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=_ID_BYTES, key=self._salt, person=what).digest()

    def _write(self, body: bytes) -> None:
        if self._file is None:
            raise StateError(f"recording {self.path} is closed", "Open another Writer")
        packed = zstandard.ZstdCompressor(level=3).compress(body)
        self._file.write(_HEAD.pack(len(packed), len(body), xxhash.xxh3_64_intdigest(body)))
        self._file.write(packed)


class Reader:
    """Reads a recording.

    Args:
        path: The file.

    Attributes:
        about: Its first frame.

    Raises:
        ConfigError: If it is none, or damaged.
        OSError: The file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        frame = next(self._frames(), None)
        if frame is None:
            raise ConfigError(f"{path} is no recording", _REMEDY)
        self.about = self._decode(frame, About)
        if self.about.version != 1 or self.about.block_tokens < 1:
            raise ConfigError(
                f"{path} is a recording of version {self.about.version}, "
                f"with {self.about.block_tokens} tokens a block",
                "Read it with the FlowKV that wrote it",
            )

    def __iter__(self) -> Iterator[Request]:
        """The requests, in the order in which they were noted."""
        frames = self._frames()
        next(frames)
        for frame in frames:
            yield from self._decode(frame, list[Request])

    def trace(self) -> Trace:
        """The recording as a trace; times count from the first request.

        Raises:
            ConfigError: If it is damaged.
        """
        parents: list[int] = []
        ids: list[bytes] = []
        chains: list[NDArray[np.int64]] = []
        requests = list(self)
        for request in requests:
            above, count = request.above, len(ids)
            if not -1 <= above < count or len(request.ids) % _ID_BYTES:
                raise ConfigError(f"{self.path} names a block before its time", _REMEDY)
            for at in range(0, len(request.ids), _ID_BYTES):
                ids.append(request.ids[at : at + _ID_BYTES])
                parents.append(above)
                above = len(ids) - 1
            chain = []
            while above >= 0:
                chain.append(above)
                above = parents[above]
            chains.append(np.array(chain[::-1], np.int64))
        pairs = np.frombuffer(b"".join(ids), "<u8").reshape(-1, 2).astype(np.uint64)
        times = np.array([request.time_ns for request in requests], np.int64)
        _, sessions = np.unique([request.session for request in requests], return_inverse=True)
        unknown = int(any(request.session < 0 for request in requests))
        return build_trace(
            self.path.stem,
            times - times.min(initial=times[0]) if len(times) else times,
            [len(chain) for chain in chains],
            pairs[np.concatenate([*chains, np.empty(0, np.int64)])],
            self.about.block_tokens,
            input_tokens=[request.input_tokens for request in requests],
            output_tokens=[request.output_tokens for request in requests],
            sessions=sessions.ravel() - unknown,
            stops=[request.stop for request in requests],
            tenants=[request.tenant for request in requests],
        )

    def _frames(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"{self.path} is no recording of FlowKV", _REMEDY)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                packed_bytes, n_bytes, digest = _HEAD.unpack(head)
                if max(packed_bytes, n_bytes) > _MOST_BYTES:
                    raise ConfigError(f"{self.path} has a frame of {n_bytes} bytes", _REMEDY)
                packed = file.read(packed_bytes)
                if len(packed) < packed_bytes:
                    return  # a crash cut it off
                yield self._unpack(packed, n_bytes, digest)

    def _unpack(self, packed: bytes, n_bytes: int, digest: int) -> bytes:
        try:
            said = zstandard.get_frame_parameters(packed).content_size
            body = zstandard.ZstdDecompressor().decompress(packed) if said == n_bytes else b""
        except zstandard.ZstdError as error:
            raise ConfigError(f"{self.path} is damaged: {error}", _REMEDY) from None
        if len(body) != n_bytes or xxhash.xxh3_64_intdigest(body) != digest:
            raise ConfigError(f"{self.path} is damaged: a frame is not what was written", _REMEDY)
        return body

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path} is no recording: {error}", _REMEDY) from None
