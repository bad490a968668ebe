from __future__ import annotations

import copy
import hashlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv.tiers import BadFrame, Header, decode_header, encode_header, verify
from tests.inside import (
    GRANULE_BYTES,
    MAX_STRIPES,
    NH_128,
    accept,
    aligned,
    digest_of,
    fixed_fields,
    header_bytes,
    lay_out,
    most_header_bytes,
    pack_header,
    place,
    stored_sizes,
    verify_stripes,
)
from tests.inside import frame_KINDS as KINDS
from tests.inside import layout_CODECS as CODECS

from .frames import LAYOUT, body_of, info_of, key_of
from .wraps import refused_as

U32 = st.integers(0, 2**32 - 1)
GOLDEN = "0c467acd9f5f6c6c227f94a3054c11cf6ac5f58321c2cd223497f4a678d69020"


def frame(stripes: int = 3, step: int = GRANULE_BYTES, **changes: object) -> tuple[bytes, bytes]:
    body = body_of("frame", stripes * step)
    return encode_header(key_of("frame"), info_of(step, **changes), body), body


@given(
    kind=st.sampled_from(KINDS),
    codec=st.integers(0, len(CODECS) - 1),
    numbers=st.tuples(U32, U32, U32, U32),
    world=st.integers(1, 2**32 - 1),
    stripes=st.sampled_from((1, 2, 240, 241, 496, 497)),
    odd=st.integers(1, 9000),
)
def test_round_trip(
    kind: str, codec: int, numbers: tuple[int, int, int, int], world: int, stripes: int, odd: int
) -> None:
    step = odd if stripes == 1 else GRANULE_BYTES
    group, tokens, start, stop = numbers
    info = info_of(step, kind=kind, codec=codec, fidelity=len(CODECS) - 1)._replace(
        group=group, tokens=tokens, rank=world - 1, world=world, head_start=start, head_stop=stop
    )
    body = body_of(odd, step * stripes)
    data = encode_header(key_of(odd), info, body)
    assert len(data) == header_bytes(stripes) <= most_header_bytes(len(body))
    header = decode_header(data + body)
    assert (header.key, header.info, header.body_bytes) == (key_of(odd), info, len(body))
    assert pack_header(header) == data
    verify(header, body)


def test_golden_bytes() -> None:
    """The format stands: other bytes for the same frame need another version."""
    body = bytes(range(256)) * 32
    data = encode_header(key_of("golden"), info_of(4096), body)
    assert hashlib.sha256(data).hexdigest() == GOLDEN
    assert data[:12] == b"FKVFRAME\2\0\1\0"
    assert struct.unpack_from("<5B", data, 32) == (0, 0, 0, NH_128, 0)
    assert data[40:72] == key_of("golden")
    assert data[72:184] == b"".join(map(key_of, ("parent", "namespace", "tenant"))) + LAYOUT
    assert struct.unpack_from("<7I", data, 184) == (1, 64, 1, 4, 2, 4, 2)
    assert struct.unpack_from("<QQ", data, 216) == (4096, 0)
    digests = [digest_of(body[at : at + 4096]) for at in (0, 4096)]
    assert data[256:] == b"".join(digests).ljust(4096 - 256, b"\0")
    assert data[16:32] == digest_of(data[32:])


@given(
    sizes=st.lists(st.integers(1, 8192), min_size=1, max_size=300),
    generation=st.integers(0, 2**64 - 1),
    salt=st.binary(min_size=16, max_size=16),
    data=st.data(),
)
def test_sizes_generation_and_salt(
    sizes: list[int], generation: int, salt: bytes, data: st.DataObject
) -> None:
    n = len(sizes)
    described = Header(key_of(n), info_of(8192), bytes(16 * n), generation, NH_128, salt)
    header = described._replace(sizes=struct.pack(f"<{n}I", *sizes))
    packed = pack_header(header)
    assert len(packed) == header_bytes(n, lossless=True) == header.header_bytes
    assert len(packed) <= most_header_bytes(8192 * n, lossless=True)
    assert decode_header(packed) == header
    assert fixed_fields(header) == bytes(lay_out(header)[:256])
    assert stored_sizes(header) == tuple(sizes)
    first = data.draw(st.integers(0, n - 1))
    count = data.draw(st.integers(1, n - first))
    at, starts = len(packed), []
    for size in sizes:
        starts.append(at)
        at += aligned(size)
    end = starts[first + count - 1] + sizes[first + count - 1]
    assert place(header, first, count) == (starts[first], end - starts[first])
    assert header.frame_bytes == starts[-1] + sizes[-1]
    assert place(described, first, count) == (described.header_bytes + first * 8192, count * 8192)


@pytest.mark.parametrize("sizes", [(0, 1), (4097, 1), (1, 4097)])
def test_stripes_cannot_be_stored_in_more_than_they_have(sizes: tuple[int, int]) -> None:
    header = Header(key_of("x"), info_of(4096), bytes(32), sizes=struct.pack("<2I", *sizes))
    with refused_as("foreign"):
        decode_header(pack_header(header))


def test_other_kinds_of_frames_are_told_apart() -> None:
    """Unknown values of the bytes that say how to read the rest, each with a right digest."""
    data, _ = frame()
    cases = [(32, 4, "version"), (36, 2, "version"), (35, 1, "integrity")]
    cases += [(at, 1, "foreign") for at in (*range(37, 40), *range(212, 216), *range(248, 256))]
    for at, value, reason in cases:
        other = bytearray(data)
        other[at] = value
        other[16:32] = digest_of(bytes(other[32:]))
        with refused_as(reason):
            decode_header(other)


def test_every_bit_of_an_overflowing_header_counts() -> None:
    data, _ = frame(stripes=300)
    assert len(data) == 2 * GRANULE_BYTES
    rng = random.Random(1)
    for _ in range(2000):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(BadFrame):
            decode_header(flipped)


def test_bits_of_a_body_count() -> None:
    data, body = frame()
    header, rng = decode_header(data), random.Random(2)
    for _ in range(3000):
        bit = rng.randrange(8 * len(body))
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        with refused_as("digest"):
            verify(header, flipped)


def test_stripes_cannot_change_places() -> None:
    data, body = frame()
    header, first, second = decode_header(data), body[:4096], body[4096:8192]
    with pytest.raises(BadFrame):
        verify(header, second + first + body[8192:])
    verify_stripes(header, 1, second)
    with pytest.raises(BadFrame):
        verify_stripes(header, 1, first)


@pytest.mark.parametrize(
    "changes",
    [
        *({"kind": "letter"}, {"codec": len(CODECS) + 1, "fidelity": len(CODECS) + 1}),
        *({"codec": 2, "fidelity": 1}, {"codec": -1}, {"layout": b"short"}, {"parent": b""}),
        *({"namespace": bytes(33)}, {"tenant": bytes(31)}, {"group": -1}, {"tokens": 2**32}),
        *({"rank": 4}, {"stripe_bytes": 0}, {"stripe_bytes": 4095}, {"stripe_bytes": 2048}),
    ],
)
def test_unsound_descriptions_are_refused(changes: dict[str, object]) -> None:
    info = info_of(4096)._replace(**changes)
    with refused_as("invalid"):
        encode_header(key_of("x"), info, bytes(8192))


def test_empty_bodies_and_short_keys_are_refused() -> None:
    for key, body in ((key_of("x"), b""), (b"short", bytes(4096))):
        with pytest.raises(BadFrame):
            encode_header(key, info_of(4096), body)


def test_bytes_that_are_no_frame() -> None:
    data, _ = frame(stripes=300)
    reasons = []
    for bad in (
        *(b"", data[:4095], data[:4096], bytes(4096), b"FKVFRAME" + b"\3\0" + data[10:]),
        *(data[:10] + b"\xff\xff" + data[12:], data[:10] + b"\0\0" + data[12:]),
        data[:10] + b"\1\0" + data[12:],
    ):
        with pytest.raises(BadFrame) as caught:
            decode_header(bad)
        reasons.append(caught.value.reason)
    assert reasons == [
        *("truncated", "truncated", "truncated"),
        *("foreign", "version", "foreign", "foreign", "digest"),
    ]


@given(st.binary(max_size=5000))
def test_noise_is_no_frame(data: bytes) -> None:
    for prefix in (b"", b"FKVFRAME\2\0\1\0\0\0\0\0"):
        with pytest.raises(BadFrame):
            decode_header(prefix + data)


def test_a_body_of_another_length() -> None:
    data, body = frame()
    with pytest.raises(BadFrame, match="12287 bytes of a body of 12288"):
        verify(decode_header(data), body[:-1])


@pytest.mark.parametrize(
    ("key", "layout", "fidelity", "reason"),
    [
        (key_of("other"), LAYOUT, 4, "key"),
        (key_of("frame"), bytes(16), 4, "layout"),
        (key_of("frame"), LAYOUT, 1, "fidelity"),
    ],
)
def test_accept(key: bytes, layout: bytes, fidelity: int, reason: str) -> None:
    header = decode_header(frame(fidelity=2)[0])
    accept(header, key_of("frame"), LAYOUT, 2)
    with refused_as(reason):
        accept(header, key, layout, fidelity)


def test_headers_are_bounded() -> None:
    assert header_bytes(MAX_STRIPES) < 2 << 20
    assert [header_bytes(n) // 4096 for n in (1, 240, 241, 496, 497)] == [1, 1, 2, 2, 3]


def test_the_error_can_be_copied() -> None:
    error = copy.copy(BadFrame("digest", "the header does not match"))
    assert (error.reason, str(error)) == (
        "digest",
        "the header does not match. Treat the frame as absent.",
    )
