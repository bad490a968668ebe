from __future__ import annotations

import contextlib
import functools
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv.tiers import BadFrame, Envelope
from tests.inside import ConfigError, digest_of, fixed_fields, header_bytes

from .frames import OTHERS, info_of, key_of
from .wraps import KINDS, bfloat16, envelope_of, load, refused_as, store

fuzzed = functools.cache(lambda kind: store(kind, stripes=2, step=4096))
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize(
    ("stripes", "step"), [(1, 1), (1, 37), (1, 4096), (1, 50002), (3, 4096), (5, 8192), (300, 4096)]
)
def test_round_trip(kind: str, stripes: int, step: int) -> None:
    frame = store(kind, stripes=stripes, step=step)
    assert load(frame.envelope, frame.data, frame.key) == frame.body
    assert frame.sealed.n_bytes == len(frame.data) == frame.header.frame_bytes
    assert len(frame.data) <= frame.envelope.most_bytes(len(frame.body))
    assert frame.envelope.head(frame.data, frame.key) == frame.header
    assert len(frame.sealed.header) == frame.header.header_bytes
    rng = random.Random(stripes)
    for _ in range(8):
        first = rng.randrange(stripes)
        count = rng.randint(1, stripes - first)
        part = load(frame.envelope, frame.data, frame.key, first, count)
        assert part == frame.body[first * step : (first + count) * step]


@pytest.mark.parametrize("kind", ["xxh3 lossless", "aead lossless"])
def test_some_stripes_of_a_compressed_frame_are_whole(kind: str) -> None:
    noise, envelope = random.Random(0).randbytes(16384), envelope_of(kind)
    good = bfloat16("x", 3 * 16384)
    body = good[:16384] + noise + good[16384:]
    sealed = envelope.seal(key_of("x"), info_of(16384), body)
    sizes = struct.unpack("<4I", sealed.head.sizes)
    assert sizes[1] == 16384 > max(sizes[0], *sizes[2:])
    data = b"".join([sealed.header, *sealed.parts])
    assert load(envelope, data, key_of("x")) == body
    assert load(envelope, data, key_of("x"), 1, 2) == body[16384 : 3 * 16384]


@each_kind
def test_targets_and_bodies_of_any_shape(kind: str) -> None:
    body = np.frombuffer(bfloat16("x", 2 * 8192), np.uint16).reshape(2, 64, 64)
    target, envelope = np.zeros_like(body), envelope_of(kind)
    sealed = envelope.seal(key_of("x"), info_of(8192), memoryview(body))
    stored = b"".join(sealed.parts)
    assert envelope.open(sealed.head, stored, memoryview(target), 0, 2) == body.nbytes
    assert (target == body).all()


@each_kind
def test_headers_may_be_opened_in_any_order(kind: str) -> None:
    frames = [store(kind, n) for n in range(3)]
    envelope = envelope_of(kind)
    heads = [envelope.head(frame.data, frame.key) for frame in frames]
    for n in (2, 0, 1, 1, 2):
        target = memoryview(bytearray(32768))
        stored = frames[n].data[heads[n].header_bytes :]
        envelope.open(heads[n], stored, target, 0, 2)
        assert target == frames[n].body


def test_a_plain_body_is_not_copied() -> None:
    body = memoryview(bytearray(8192))
    sealed = envelope_of("xxh3").seal(key_of(1), info_of(4096), body)
    (part,) = sealed.parts
    body[0] = 7
    assert part[0] == 7


def test_plain_stripes_can_be_checked_where_they_lie() -> None:
    frame = store("xxh3")
    stored = memoryview(bytearray(frame.data))[4096:]
    assert frame.envelope.open(frame.header, stored, stored, 0, 2) == len(frame.body)
    stored[100] ^= 1
    with pytest.raises(BadFrame):
        frame.envelope.open(frame.header, stored, stored, 0, 2)


def test_kinds_say_whether_they_are_plain() -> None:
    assert [envelope_of(kind).plain for kind in KINDS] == [True, False, False, False]


def test_compressed_frames_are_smaller_and_read_by_those_that_do_not_compress() -> None:
    for integrity in ("xxh3", "aead"):
        frame = store(f"{integrity} lossless")
        assert frame.header.sizes
        assert len(frame.data) < len(frame.body)
        assert load(envelope_of(integrity), frame.data, frame.key) == frame.body


@pytest.mark.parametrize("kind", ["xxh3", "aead"])
def test_every_bit_of_a_small_frame_counts(kind: str) -> None:
    frame = store(kind, stripes=1, step=61)
    for bit in range(8 * len(frame.data)):
        data = bytearray(frame.data)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            load(frame.envelope, data, frame.key)


@pytest.mark.parametrize("kind", ["xxh3 lossless", "aead lossless"])
def test_bits_of_a_compressed_frame_never_make_wrong_bytes(kind: str) -> None:
    """Padding between stripes, and what zstd does not look at, may change; what is read may not."""
    frame, rng, noticed = store(kind), random.Random(3), 0
    for _ in range(1500):
        data = bytearray(frame.data)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            assert load(frame.envelope, data, frame.key) == frame.body
        except BadFrame:
            noticed += 1
    padding = sum(-size % 4096 for size in struct.unpack("<2I", frame.header.sizes)[:1])
    assert noticed >= 1500 * (1 - padding / len(frame.data)) * 0.95


@each_kind
@pytest.mark.parametrize(
    ("change", "value"),
    [*OTHERS, ("stripe_bytes", 8192), ("generation", 8), ("key", key_of("other"))],
)
def test_fields_cannot_be_mutated(kind: str, change: str, value: object) -> None:
    """F9: the field alone, and in `aead` also with everything that needs no key recomputed."""
    frame = store(kind, fidelity=1, generation=7)
    header = frame.header
    if change in ("generation", "key"):
        other = header._replace(**{change: value})  # type: ignore[arg-type]
    else:
        other = header._replace(info=header.info._replace(**{change: value}))  # type: ignore[arg-type]
    data = bytearray(frame.data)
    fields = fixed_fields(other)
    data[:16], data[32:256] = fields[:16], fields[32:]
    assert data != frame.data
    for recomputed in (False, True):
        if recomputed:
            data[16:32] = digest_of(bytes(data[32 : header.header_bytes]))
            if kind.startswith("xxh3"):
                break  # accidents do not recompute digests
        for key in (frame.key, other.key):
            with pytest.raises(BadFrame):
                load(frame.envelope, data, key)


@each_kind
def test_another_key_or_generation_is_refused(kind: str) -> None:
    frame = store(kind, generation=7)
    load(frame.envelope, frame.data, frame.key, generation=7)
    for key, generation, reason in ((key_of("x"), 7, "key"), (frame.key, 8, "foreign")):
        with refused_as(reason):
            load(frame.envelope, frame.data, key, generation=generation)


@each_kind
def test_lengths_are_checked(kind: str) -> None:
    frame = store(kind, stripes=3)
    header, envelope = frame.header, frame.envelope
    offset, n_bytes = envelope.place(header, 0, 3)
    stored, target = frame.data[offset:], memoryview(bytearray(3 * 16384))
    reasons = []
    for piece, into, first, count in (
        *((stored[: n_bytes - 1], target, 0, 3), (b"", target, 0, 1)),
        *((stored, target[:-1], 0, 3), (stored, target, 0, 4), (stored, target, 3, 1)),
        *((stored, target, -1, 1), (stored, target, 0, 0)),
    ):
        with pytest.raises(BadFrame) as caught:
            envelope.open(header, piece, into, first, count)
        reasons.append(caught.value.reason)
    assert reasons == ["truncated", "truncated", "invalid", *["stripes"] * 4]


@each_kind
def test_stale_bytes_of_reused_places_are_never_returned(kind: str) -> None:
    """S8: what lies behind a stripe, in a slot or in a target, neither matters nor moves."""
    frame = store(kind, stripes=2, step=8192)
    offset, n_bytes = frame.envelope.place(frame.header, 0, 2)
    stale = b"another tenant's bytes" * 1000
    stored = bytearray(frame.data[offset : offset + n_bytes] + stale)
    target = bytearray(b"\xaa" * (16384 + 999))
    frame.envelope.open(frame.header, memoryview(stored), memoryview(target), 0, 2)
    assert target == frame.body + b"\xaa" * 999
    assert stored == frame.data[offset : offset + n_bytes] + stale  # also where a tag was laid


@each_kind
@given(noise=st.binary(max_size=600), at=st.integers(0, 12000), cut=st.integers(0, 13000))
def test_noise_raises_nothing_but_bad_frames(kind: str, noise: bytes, at: int, cut: int) -> None:
    """S10: bytes overwritten anywhere, with digests made right again where no key is needed."""
    frame = fuzzed(kind)
    data = bytearray(frame.data)
    data[at : at + len(noise)] = noise
    del data[max(0, len(data) - cut) :]
    for _ in range(2):
        with contextlib.suppress(BadFrame):  # a header may leave stripes out
            assert frame.body.startswith(load(frame.envelope, data, frame.key))
        if len(data) < 4096:
            break
        data[16:32] = digest_of(bytes(data[32:4096]))


@pytest.mark.parametrize("kind", ["xxh3", "xxh3 lossless"])
def test_headers_that_lie_about_lengths_reserve_no_memory(kind: str) -> None:
    """S10: 2^16 stripes of 2^63 bytes, in a header whose digest is right."""
    frame = store(kind)
    for at, form, value in (
        *((208, "<I", 1 << 16), (208, "<I", 0), (216, "<Q", 1 << 63), (216, "<Q", 0)),
        (10, "<H", 257),
    ):
        data = bytearray(frame.data).ljust(header_bytes(1 << 16, lossless=True))
        struct.pack_into(form, data, at, value)
        size = 4096 * struct.unpack_from("<H", data, 10)[0]
        data[16:32] = digest_of(bytes(data[32:size]))
        with pytest.raises(BadFrame):
            load(frame.envelope, data, frame.key)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="Use 'xxh3' or 'aead'"):
        Envelope(integrity="md5")  # type: ignore[arg-type]


@pytest.mark.deep
@pytest.mark.timeout(1200)
@each_kind
def test_a_hundred_thousand_lies_raise_nothing_but_bad_frames(kind: str) -> None:
    """S10: fields of the header set to anything, with digests made right where no key is needed."""
    frame, rng, served = fuzzed(kind), random.Random(7), 0
    edges = (0, 1, 2, 255, 256, 4095, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 64) - 1)
    for _ in range(100_000):
        data = bytearray(frame.data)
        for _ in range(rng.randint(1, 3)):
            at, size = rng.choice((0, 184)) + rng.randrange(72), rng.choice((1, 2, 4, 8))
            value = rng.choice((rng.choice(edges), rng.getrandbits(64))) % (1 << 8 * size)
            data[at : at + size] = value.to_bytes(size, "little")
        if rng.randrange(8):
            data[:16] = frame.data[:16]
        data[16:32] = digest_of(bytes(data[32:4096]))
        with contextlib.suppress(BadFrame):  # a header may leave stripes out
            assert frame.body.startswith(load(frame.envelope, data, frame.key))
            served += 1
    assert (served > 0) is kind.startswith("xxh3")
