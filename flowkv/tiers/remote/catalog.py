"""Small objects that say which frames there are, so that opening need not read every header.

An object holds what one process stored in a while, a few hundred bytes a frame:

    magic 8s | version u16 | 6 zeros | xxh3_128 of the rest | msgpack: [key, bytes, time, info], ...

It is a hint and no more: a frame is used only after its own header was checked. So a catalog that
is damaged, foreign or out of date is skipped, or costs a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec
import xxhash

from flowkv.core.keys import KEY_BYTES
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.frame import BadFrame, count_stripes
from flowkv.tiers.remote.known import Fact

MAGIC, VERSION = b"FKVINDEX", 1
MOST_BYTES = 16 << 20
MOST_FRAMES = 1 << 12
_HEAD = struct.Struct("<8sH6x16s")


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One frame.

    Attributes:
        key: 32 bytes.
        n_bytes: Bytes it occupies.
        stored_ns: When it was stored, in nanoseconds since 1970.
        info: Its description.
    """

    key: bytes
    n_bytes: int
    stored_ns: int
    info: FrameInfo


_DECODER = msgspec.msgpack.Decoder(list[Line])


def encode_catalog(facts: Iterable[tuple[bytes, Fact]]) -> bytes:
    """A catalog of these frames; those without a description are left out."""
    lines = [
        Line(key, fact.n_bytes, fact.stored_ns, fact.info)
        for key, fact in facts
        if fact.info is not None
    ]
    body = msgspec.msgpack.encode(lines)
    return _HEAD.pack(MAGIC, VERSION, xxhash.xxh3_128_digest(body)) + body


def decode_catalog(data: bytes | bytearray | memoryview) -> list[tuple[bytes, Fact]]:
    """What a catalog says; nothing if it is none, or damaged."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        return []
    magic, version, digest = _HEAD.unpack_from(view)
    body = view[_HEAD.size :]
    if (magic, version, digest) != (MAGIC, VERSION, xxhash.xxh3_128_digest(body)):
        return []
    try:
        lines = _DECODER.decode(body)
    except msgspec.MsgspecError:
        return []
    names: dict[bytes, bytes] = {}  # most frames name the same namespace, tenant and layout
    return [
        (line.key, Fact(line.n_bytes, _interned(line.info, names), line.stored_ns))
        for line in lines
        if _sound(line)
    ]


def _interned(info: FrameInfo, names: dict[bytes, bytes]) -> FrameInfo:
    return info._replace(
        layout=names.setdefault(info.layout, info.layout),
        namespace=names.setdefault(info.namespace, info.namespace),
        tenant=names.setdefault(info.tenant, info.tenant),
    )


def _sound(line: Line) -> bool:
    if len(line.key) != KEY_BYTES or not 0 < line.n_bytes < 1 << 62 or line.stored_ns < 0:
        return False
    try:
        count_stripes(line.key, line.info, max(1, line.info.stripe_bytes))
    except BadFrame:
        return False
    return True
