from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from flowkv.tiers import BadFrame, Envelope, Header
from tests.inside import (
    AGAIN,
    SAMPLES,
    Lossless,
    ManualClock,
    aligned,
    digest_of,
    pack_header,
    unpack_stripe,
)
from tests.inside import layout_CODECS as CODECS

from .frames import info_of, key_of
from .wraps import bfloat16, load, refused_as

ROOT = Path(__file__).resolve().parents[2]
STEP = 32768
SLOW = 1.0  # bytes a second: anything is faster


def stripes_of(packed: object, count: int) -> list[memoryview]:
    sizes = struct.unpack(f"<{count}I", packed.sizes)  # type: ignore[attr-defined]
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += aligned(size)
    data = packed.data  # type: ignore[attr-defined]
    return [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def measured(gain: float = 1.4, decode: float = 2e9, io: float = SLOW) -> Lossless:
    """One that has seen pages shrink so much, restored at that rate."""
    made = Lossless(lambda: io, decode_bytes_per_s=lambda: decode)
    body = bfloat16("x", 2 * STEP) if gain > 1.05 else random.Random(0).randbytes(2 * STEP)
    made.pack(info_of(STEP), memoryview(body))
    return made


@given(values=st.lists(st.integers(0, 65535), min_size=1, max_size=40), times=st.integers(1, 400))
def test_round_trip(values: list[int], times: int) -> None:
    body = memoryview(np.array(values * times, np.uint16).tobytes())
    packed = Lossless(lambda: SLOW).pack(info_of(len(body)), body)
    if packed is None:
        return
    assert aligned(len(packed.data)) < len(body)
    (stripe,) = stripes_of(packed, 1)
    target = memoryview(bytearray(len(body)))
    unpack_stripe(stripe, target)
    assert target == body


def test_high_and_low_bytes_go_apart() -> None:
    """Bfloat16 noise: the exponents shrink, the mantissas are stored as they are."""
    body = memoryview(bfloat16("x", STEP))
    packed = Lossless(lambda: SLOW).pack(info_of(STEP), body)
    assert packed is not None
    (stripe,) = stripes_of(packed, 1)
    high, low = struct.unpack_from("<II", stripe)
    assert high < 0.55 * low
    assert low == STEP // 2
    assert stripe[8 + high :] == body[::2].tobytes()
    assert zstandard.decompress(stripe[8 : 8 + high]) == body[1::2].tobytes()


def test_stripes_that_do_not_shrink_are_stored_whole() -> None:
    noise = random.Random(0).randbytes(STEP)
    body = memoryview(bfloat16("x", 3 * STEP)[: 2 * STEP] + noise)
    packed = Lossless(lambda: SLOW).pack(info_of(STEP), body)
    assert packed is not None
    pieces = stripes_of(packed, 3)
    assert pieces[2] == noise
    assert len(pieces[0]) < 0.8 * STEP


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"codec": CODECS.index("kv8"), "fidelity": 1}, STEP),
        ({"codec": len(CODECS) - 1, "fidelity": len(CODECS) - 1}, STEP),
        *(({"kind": "state"}, STEP), ({"kind": "weights"}, STEP), ({}, STEP + 1)),
    ],
)
def test_only_raw_pages_are_candidates(changes: dict[str, object], step: int) -> None:
    lossless = Lossless(lambda: SLOW)
    assert lossless.pack(info_of(step, **changes), memoryview(bfloat16("x", step))) is None
    assert lossless._layouts.get(info_of(step).layout) is None


@pytest.mark.parametrize(
    ("gain", "decode", "io", "worth"),
    [
        (1.4, 2e9, 0.0, False),  # not known how fast the tier is
        (1.4, 2e9, 1.3e9, True),
        (1.4, 2e9, 1.4e9, False),  # also if it is the decoder that loads wait for
        (1.4, 8e9, 5.3e9, True),
        (1.4, 8e9, 5.4e9, False),
        (1.4, 0.0, 5e9, False),  # not known how fast a core is
        (1.0, 8e9, 0.1e9, False),
    ],
)
def test_what_pays(gain: float, decode: float, io: float, worth: bool) -> None:
    lossless, layout = measured(gain, decode, io), info_of(STEP).layout
    assert lossless.worth(layout) is worth
    packed = lossless.pack(info_of(STEP), memoryview(bfloat16("y", STEP)))
    assert (packed is not None) is (worth or gain == 1.0)  # a good page among bad samples


def test_one_page_that_does_not_shrink_stays_as_it_is() -> None:
    lossless = measured()
    noise = memoryview(random.Random(0).randbytes(STEP))
    assert lossless.pack(info_of(STEP), noise) is None
    assert lossless.worth(info_of(STEP).layout)


def test_low_planes_that_do_not_shrink_are_not_tried_again() -> None:
    lossless, body = Lossless(lambda: SLOW), memoryview(bfloat16("x", STEP))
    tried = []
    for _ in range(SAMPLES + 3):
        assert lossless.pack(info_of(STEP), body) is not None
        seen = lossless._layouts.get(info_of(STEP).layout)
        assert seen is not None
        tried.append(seen.low_bytes)
    assert tried == [STEP // 2 * min(n + 1, SAMPLES) for n in range(SAMPLES + 3)]


def test_rates_may_change() -> None:
    io = [1e9]
    lossless = Lossless(lambda: io[0], decode_bytes_per_s=lambda: 2e9)
    body, answers = memoryview(bfloat16("x", STEP)), []
    for io[0] in (1e9, 3e9, 1e9):
        answers.append(lossless.pack(info_of(STEP), body) is not None)
    assert answers == [True, False, True]


def test_what_does_not_shrink_is_tried_seldom() -> None:
    lossless, info = Lossless(lambda: SLOW), info_of(STEP)
    noise, tried = memoryview(random.Random(0).randbytes(STEP)), 0
    for _ in range(2 * AGAIN):
        assert lossless.pack(info, noise) is None
    seen = lossless._layouts.get(info.layout)
    assert seen is not None
    tried = seen.frames
    assert tried == SAMPLES + 1
    assert seen.gain == 1.0
    assert lossless._layouts.get(bytes(16)) is None


def test_the_rate_is_measured_on_a_stripe_that_shrank() -> None:
    noise, good = random.Random(0).randbytes(STEP), bfloat16("x", 3 * STEP)
    lossless = Lossless(lambda: SLOW)
    packed = lossless.pack(info_of(STEP), memoryview(noise + good))
    assert packed is not None
    assert len(stripes_of(packed, 4)[0]) == STEP
    seen = lossless._layouts.get(info_of(STEP).layout)
    assert seen is not None
    assert seen.decoded_bytes == STEP


def test_layouts_are_judged_apart_and_their_number_is_bounded() -> None:
    lossless = Lossless(lambda: SLOW)
    noise, good = random.Random(0).randbytes(8192), bfloat16("x", STEP)
    for n in range(1100):
        info = info_of(8192, layout=n.to_bytes(16, "little"))
        lossless.pack(info, memoryview(noise))
    assert lossless._layouts.get(bytes(16)) is None
    assert lossless._layouts.get(info.layout) is not None
    assert lossless.pack(info_of(STEP, layout=b"\xff" * 16), memoryview(good)) is not None


def test_the_rate_is_measured_by_the_clock() -> None:
    clock = ManualClock()
    lossless = Lossless(lambda: 1e6, clock=clock)
    assert lossless.pack(info_of(STEP), memoryview(bfloat16("x", STEP))) is not None
    seen = lossless._layouts.get(info_of(STEP).layout)
    assert seen is not None
    assert (seen.decode_s, seen.decoded_bytes) == (0.0, STEP)  # the clock stood still
    assert seen.decode_bytes_per_s == math.inf


def rle_frame(size: int, window_log: int = 0, declared: int | None = None) -> bytes:
    """A zstd frame of `size` zeros in blocks of one repeated byte, with a header of our choice."""
    declared = size if declared is None else declared
    head = bytes([0xA0]) if not window_log else bytes([0x80, (window_log - 10) << 3])
    blocks, left = [], size
    while left:
        part = min(left, 1 << 17)
        left -= part
        blocks.append(struct.pack("<I", (part << 3) | 2 | (not left))[:3] + b"\0")
    return b"\x28\xb5\x2f\xfd" + head + struct.pack("<I", declared) + b"".join(blocks)


def lossless_stripe(high: bytes, low: bytes) -> bytes:
    return struct.pack("<II", len(high), len(low)) + high + low


HALF = STEP // 2
GOOD = rle_frame(HALF)
STREAMED = zstandard.ZstdCompressor().compressobj()
UNSIZED = STREAMED.compress(bytes(HALF)) + STREAMED.flush()


def test_the_frames_of_these_tests_are_sound() -> None:
    target = memoryview(bytearray(b"\xff" * STEP))
    unpack_stripe(lossless_stripe(GOOD, rle_frame(HALF)), target)
    assert target == bytes(STEP)
    assert zstandard.decompress(rle_frame(1 << 20, declared=1 << 20)) == bytes(1 << 20)
    assert zstandard.decompress(rle_frame(HALF, window_log=27)) == bytes(HALF)


@pytest.mark.parametrize(
    "bad",
    [
        rle_frame(1 << 24),  # what it holds is more, and it says so
        rle_frame(1 << 24, declared=HALF),  # it holds more than it says
        rle_frame(HALF - 1, declared=HALF),  # it holds less than it says
        rle_frame(HALF, declared=HALF + 1),
        rle_frame(HALF, declared=(1 << 32) - 1),
        rle_frame(HALF, window_log=27),  # asks for a window of 128 MiB
        UNSIZED,
        GOOD[:-1],
        GOOD[:7],
        b"\0",
        b"not zstd at all",
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + GOOD,  # behind a skippable frame
    ],
)
def test_bombs_and_lies_are_refused(bad: bytes) -> None:
    """S6: whatever zstd would do, only a plane of the right size is decompressed."""
    target = memoryview(bytearray(STEP))
    for stripe in (lossless_stripe(bad, GOOD), lossless_stripe(GOOD, bad)):
        with refused_as("digest"):
            unpack_stripe(stripe, target)


@pytest.mark.parametrize(
    "stored",
    [
        *(b"", bytes(7), bytes(8), struct.pack("<II", 1 << 31, 1 << 31)),
        struct.pack("<II", 4, HALF + 1) + bytes(HALF + 5),
        struct.pack("<II", HALF, HALF) + bytes(STEP - 1),
        struct.pack("<II", HALF, HALF) + bytes(STEP + 1),
        *(struct.pack("<II", HALF, 0) + bytes(HALF), lossless_stripe(GOOD, GOOD) + b"\0"),
    ],
)
def test_planes_that_do_not_fit_are_refused(stored: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack_stripe(stored, memoryview(bytearray(STEP)))


def test_stripes_of_odd_length_cannot_be_compressed() -> None:
    with pytest.raises(BadFrame):
        unpack_stripe(lossless_stripe(GOOD, GOOD), memoryview(bytearray(STEP + 1)))


@given(noise=st.binary(max_size=64), at=st.integers(0, 30000))
def test_damaged_stripes_raise_nothing_but_bad_frames(noise: bytes, at: int) -> None:
    packed = Lossless(lambda: SLOW).pack(info_of(STEP), memoryview(bfloat16("x", STEP)))
    assert packed is not None
    data = bytearray(packed.data)
    data[at : at + len(noise)] = noise
    target = memoryview(bytearray(STEP))
    try:
        unpack_stripe(data, target)
    except BadFrame as error:
        assert error.reason == "digest"


def test_a_bomb_takes_no_memory() -> None:
    """S6: a frame with a right header, and two planes that would be 256 MiB each."""
    bomb = rle_frame(1 << 28)
    assert len(bomb) < STEP // 2
    stripe = lossless_stripe(bomb, bomb)
    header = Header(
        key_of("bomb"), info_of(STEP), digest_of(bytes(STEP)), sizes=struct.pack("<I", len(stripe))
    )
    data = pack_header(header) + stripe
    with pytest.raises(BadFrame):
        load(Envelope(), data, key_of("bomb"))
    program = (
        "import resource, sys\n"
        "from flowkv.tiers.frame import Envelope\n"
        "from flowkv.tiers.frame import BadFrame\n"
        "from flowkv.tiers.lossless import unpack_stripe\n"
        f"good = bytes.fromhex({lossless_stripe(GOOD, GOOD).hex()!r})\n"
        f"target = memoryview(bytearray({STEP}))\n"
        "unpack_stripe(good, target)\n"  # everything is loaded now
        "data, envelope = sys.stdin.buffer.read(), Envelope()\n"
        f"header = envelope.head(data, bytes.fromhex({key_of('bomb').hex()!r}))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    envelope.open(header, data[4096:], target, 0, 1)\n"
        "except BadFrame as error:\n    print(error.reason)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, check=True, cwd=ROOT
    )
    reason, grown_kib = done.stdout.decode().split()
    assert reason == "digest"
    assert int(grown_kib) <= 1024  # a slot, and what the allocator rounds up to
