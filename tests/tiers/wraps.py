"""Envelopes of every kind, and frames in them; for tests that hold of all kinds."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest

from flowkv.tiers import BadFrame, Envelope, FrameInfo, Header
from tests.inside import Integrity, Keyring, Lossless, SealedFrame

from .frames import info_of, key_of

TARGET_BYTES = 1 << 22
SECRET = bytes(range(32))
KINDS = ("xxh3", "aead", "xxh3 lossless", "aead lossless")


class Stored(NamedTuple):
    """A sealed frame: what was wrapped, by what, and the bytes that a tier keeps."""

    envelope: Envelope
    key: bytes
    info: FrameInfo
    body: bytes
    sealed: SealedFrame
    data: bytes

    @property
    def header(self) -> Header:
        return self.sealed.head


def envelope_of(kind: str, secret: bytes = SECRET) -> Envelope:
    lossless = Lossless(lambda: 1.0) if kind.endswith("lossless") else None
    integrity: Integrity = "aead" if kind.startswith("aead") else "xxh3"
    return Envelope(integrity=integrity, keyring=Keyring(secret), lossless=lossless)


def refused_as(reason: str) -> pytest.RaisesExc[BadFrame]:
    """Expects that a frame is refused for this reason."""
    return pytest.raises(BadFrame, check=lambda error: error.reason == reason)


def bfloat16(name: object, n_bytes: int) -> bytes:
    """Normally distributed numbers: high bytes compress, low bytes do not."""
    seed = random.Random(f"body {name}").randrange(1 << 32)
    x = np.random.default_rng(seed).standard_normal(n_bytes // 2 + 1, np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:n_bytes]


def store(
    kind: str,
    name: object = "frame",
    stripes: int = 2,
    step: int = 16384,
    generation: int = 0,
    secret: bytes = SECRET,
    **changes: object,
) -> Stored:
    envelope, body = envelope_of(kind, secret), bfloat16(name, stripes * step)
    key, info = key_of(name), info_of(step, **changes)
    sealed = envelope.seal(key, info, body, generation=generation)
    data = b"".join([sealed.header, *sealed.parts])
    return Stored(envelope, key, info, body, sealed, data)


def load(
    envelope: Envelope,
    data: bytes | bytearray,
    key: bytes,
    first: int = 0,
    stripes: int = 0,
    generation: int | None = None,
) -> bytes:
    """What a reader gets: header first, then the stripes that it names."""
    header = envelope.head(data, key, generation=generation)
    count = stripes or header.stripes - first
    offset, n_bytes = envelope.place(header, first, count)
    size = count * header.info.stripe_bytes
    if offset + n_bytes > len(data) or size > TARGET_BYTES:  # as a tier must, before it reads
        raise BadFrame("truncated", f"{size} bytes of a frame that ends after {len(data)}")
    target = memoryview(bytearray(size))
    stored = memoryview(data)[offset : offset + n_bytes]
    assert envelope.open(header, stored, target, first, count) == len(target)
    return bytes(target)
