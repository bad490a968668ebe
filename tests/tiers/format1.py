"""Frames as they were written before NH-128: digests by xxh3_128, and `integrity` 0."""

from __future__ import annotations

import struct
from typing import Any

import xxhash

from flowkv.tiers import BadFrame, Envelope, FrameInfo, Header
from tests.inside import SealedFrame

KINDS = ("page", "state", "weights", "memo")


def header_of(key: bytes, info: FrameInfo, body: bytes, generation: int = 0) -> bytes:
    """The header, byte by byte."""
    step = info.stripe_bytes
    digests = [xxhash.xxh3_128_digest(body[at : at + step]) for at in range(0, len(body), step)]
    covered = b"".join(
        (
            struct.pack("<5B3x", KINDS.index(info.kind), info.codec, info.fidelity, 0, 0),
            *(key, info.parent, info.namespace, info.tenant, info.layout),
            struct.pack("<2I", info.group, info.tokens),
            struct.pack("<4I", info.rank, info.world, info.head_start, info.head_stop),
            struct.pack("<I4xQQ24x", len(digests), step, generation),
            *digests,
        )
    )
    pages = -(-(32 + len(covered)) // 4096)
    covered = covered.ljust(4096 * pages - 32, b"\0")
    first = struct.pack("<8sHH4x", b"FKVFRAME", 2, pages)
    return first + xxhash.xxh3_128_digest(covered) + covered


class Format1Envelope(Envelope):
    """Seals plain frames as they were then."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = False  # one by one, by this

    def seal(self, key: bytes, info: FrameInfo, body: Any, *, generation: int = 0,
             known: object = None) -> SealedFrame:  # fmt: skip
        data = memoryview(body).cast("B")
        head, step = header_of(key, info, data.tobytes(), generation), info.stripe_bytes
        if len(data) % step:
            raise BadFrame("invalid", "a part of a stripe")
        end = 256 + 16 * (len(data) // step)
        said = Header(key, info, head[256:end], generation, 0)
        return SealedFrame(head, [data], len(head) + len(data), said)
