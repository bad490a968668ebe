from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from flowkv.tiers import BadFrame, decode_header, verify
from tests.inside import (
    CHECK,
    NH_128,
    REASONS,
    STREAMED_BYTES,
    StateError,
    check_frames,
    digest_of,
    fixed_fields,
    header_bytes,
    pack_header,
)
from tests.inside import frame_describe as describe

from .frames import body_of, info_of, key_of


class Scene:
    """Frames in memory, one after the other, each with a row that says where."""

    def __init__(self, count: int = 3, stripes: int = 3, step: int = 4096) -> None:
        self.stripes, self.step, self.size = stripes, step, stripes * step
        self.bodies = [body_of((n, stripes), self.size) for n in range(count)]
        heads = [
            describe(key_of(n), info_of(step, group=n), body, n)
            for n, body in enumerate(self.bodies)
        ]
        self.head_bytes = header_bytes(stripes)
        data = b"".join(
            pack_header(head) + body for head, body in zip(heads, self.bodies, strict=True)
        )
        self.memory = np.frombuffer(data, np.uint8).copy()
        self.target = np.full(count * self.size + 64, 0xAA, np.uint8)
        self.expected = np.frombuffer(b"".join(map(fixed_fields, heads)), np.uint8)
        self.expected = self.expected.reshape(count, 256).copy()
        at, frame = self.memory.ctypes.data, self.head_bytes + self.size
        self.rows = np.array(
            [
                (
                    *(at + n * frame, self.head_bytes, at + n * frame + self.head_bytes, self.size),
                    *(self.target.ctypes.data + n * self.size, step, stripes, 0, stripes, 0),
                )
                for n in range(count)
            ],
            CHECK,
        )

    def frame(self, n: int) -> NDArray[np.uint8]:
        size = self.head_bytes + self.size
        return self.memory[n * size : (n + 1) * size]

    def reasons(self) -> list[str]:
        return [REASONS[code] for code in check_frames(self.rows, self.expected)]

    def copied(self, n: int) -> bytes:
        return self.target[n * self.size : (n + 1) * self.size].tobytes()


@pytest.mark.parametrize(
    ("stripes", "step"), [(1, 1), (1, 100), (1, 5000), (3, 4096), (240, 4096), (241, 4096)]
)
def test_sound_frames_are_copied(stripes: int, step: int) -> None:
    scene = Scene(2, stripes, step)
    assert scene.reasons() == ["", ""]
    assert [scene.copied(n) for n in range(2)] == scene.bodies
    assert set(scene.target[-64:]) == {0xAA}


@pytest.mark.parametrize(
    ("step", "shift"), [(65536, 0), (65536, 1), (65536, 32), (65536 + 4096, 0), (32 * 4097, 0)]
)
def test_much_is_copied_past_the_caches_wherever_it_lies(step: int, shift: int) -> None:
    """Also where the target is not aligned, or a stripe does not end with a line of the cache."""
    scene = Scene(2, 1 if step % 4096 else 48, step)
    times = -(-STREAMED_BYTES // (2 * scene.size)) if step % 4096 else 1
    scene.target = np.full(2 * scene.size + 256, 0xAA, np.uint8)
    start = -scene.target.ctypes.data % 64 + shift
    scene.rows["target"] = scene.target.ctypes.data + start + np.arange(2) * scene.size
    scene.rows = np.tile(scene.rows, times)
    scene.expected = np.tile(scene.expected, (times, 1))
    assert scene.reasons() == [""] * len(scene.rows)
    assert scene.target[start : start + 2 * scene.size].tobytes() == b"".join(scene.bodies)
    assert set(scene.target[:start]) | set(scene.target[start + 2 * scene.size :]) == {0xAA}
    scene.frame(1)[-1] ^= 128
    assert scene.reasons() == ["", "digest"] * times


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (0, 3)])
def test_some_stripes_are_checked_alone(first: int, count: int) -> None:
    scene = Scene()
    row = scene.rows[1]
    row["data"] += 4096 * first
    row["data_bytes"] = 4096 * count
    row["first"], row["stripes"] = first, count
    for other in set(range(3)) - set(range(first, first + count)):
        scene.frame(1)[scene.head_bytes + 4096 * other] ^= 1  # nobody asked
    assert scene.reasons() == ["", "", ""]
    part = scene.bodies[1][4096 * first : 4096 * (first + count)]
    assert scene.copied(1) == part + b"\xaa" * (scene.size - len(part))


def test_frames_may_be_checked_where_they_lie_or_not_copied_at_all() -> None:
    scene = Scene()
    scene.rows[0]["target"] = 0
    scene.rows[1]["target"] = scene.rows[1]["data"]
    before = scene.memory.copy()
    assert scene.reasons() == ["", "", ""]
    assert scene.copied(0) == scene.copied(1) == b"\xaa" * scene.size
    assert (scene.memory == before).all()
    scene.frame(0)[-1] ^= 1
    scene.frame(1)[-1] ^= 1
    assert scene.reasons() == ["digest", "digest", ""]


def test_every_bit_counts() -> None:
    scene = Scene(1, 1, 61)
    frame = scene.frame(0)
    wanted = {"foreign": 0, "version": 0, "integrity": 0, "digest": 0}
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        (reason,) = scene.reasons()
        wanted[reason] += 1
        frame[bit // 8] ^= 1 << bit % 8
    assert scene.reasons() == [""]
    assert wanted["foreign"] == 64 + 16 + 32  # magic, pages, zeros
    assert (wanted["version"], wanted["integrity"]) == (16, 8)


def test_one_bad_frame_harms_no_other() -> None:
    scene = Scene(5)
    scene.frame(2)[5000] ^= 4
    assert scene.reasons() == ["", "", "digest", "", ""]
    assert [scene.copied(n) == scene.bodies[n] for n in (0, 1, 3, 4)] == [True] * 4


@pytest.mark.parametrize("at", [*range(32, 35), *range(36, 256)])
def test_every_fixed_field_is_compared(at: int) -> None:
    """F9: a frame whose digest is right, but that is not the one expected."""
    scene = Scene(1)
    scene.expected[0, at] ^= 1
    assert scene.reasons() == ["key" if 40 <= at < 72 else "foreign"]
    frame = scene.frame(0)[: scene.head_bytes]
    frame[at] ^= 1
    assert scene.reasons() == ["digest"]
    frame[16:32] = np.frombuffer(digest_of(frame[32:]), np.uint8)
    assert scene.reasons() == [""]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("header_bytes", 0, "truncated"),
        ("header_bytes", 4095, "truncated"),
        ("data_bytes", 3 * 4096 - 1, "truncated"),
        ("data_bytes", 0, "truncated"),
        ("step", 1 << 63, "truncated"),
        ("step", 4097, "truncated"),
        ("step", 0, "stripes"),
        ("stripes", 0, "stripes"),
        ("stripes", 4, "stripes"),
        ("stripes", (1 << 32) - 1, "stripes"),
        ("first", 1, "stripes"),
        ("first", (1 << 32) - 1, "stripes"),
        ("all", 2, "stripes"),
        ("all", 241, "truncated"),  # a longer header than is there
        ("all", (1 << 32) - 1, "truncated"),
    ],
)
def test_rows_that_lie_lead_nowhere(field: str, value: int, reason: str) -> None:
    """S10: nothing outside the memory that a row names is looked at."""
    scene = Scene()
    scene.rows[1][field] = value
    assert scene.reasons() == ["", reason, ""]
    assert scene.copied(1) == b"\xaa" * scene.size


def test_it_agrees_with_the_format_in_python() -> None:
    """Mutated frames, some with a digest made right: accepted exactly where Python accepts them."""
    scene, rng, reasons = Scene(1, 2), random.Random(5), set()
    sound, frame = scene.frame(0).copy(), scene.frame(0)
    header = decode_header(sound)
    for _ in range(3000):
        frame[:] = sound
        at = rng.choice((rng.randrange(40), rng.randrange(300), rng.randrange(len(frame))))
        frame[at] ^= rng.choice((0, 1 << rng.randrange(8)))
        if rng.randrange(2):
            frame[16:32] = np.frombuffer(digest_of(frame[32:4096]), np.uint8)
        try:
            found = decode_header(frame)
            verify(found, frame[4096:])
            same = found == header
        except BadFrame:
            same = False
        (said,) = scene.reasons()
        assert (said == "") is same
        reasons.add(said)
    assert reasons == {"", "foreign", "version", "digest", "key", "integrity"}


def test_noise_is_no_frame() -> None:
    scene = Scene(1)
    frame, rng = scene.frame(0), np.random.default_rng(0)
    for _ in range(200):
        frame[:] = rng.integers(0, 256, len(frame), np.uint8)
        assert scene.reasons() == ["foreign"]
        frame[: scene.head_bytes] = rng.integers(0, 256, scene.head_bytes, np.uint8)
        frame[:16] = scene.expected[0, :16]
        frame[35] = NH_128
        assert scene.reasons() == ["digest"]


def test_arrays_of_another_kind_are_refused() -> None:
    scene = Scene()
    for rows, expected in (
        (scene.rows.view(np.uint8), scene.expected),
        (scene.rows, scene.expected[:2]),
        (scene.rows, scene.expected.astype(np.int8)),
        (scene.rows, scene.expected[:, :255]),
    ):
        with pytest.raises(StateError, match="dtype CHECK"):
            check_frames(rows, expected)
    assert len(check_frames(scene.rows[:0], scene.expected[:0])) == 0


def test_the_interpreter_runs_meanwhile() -> None:
    """Counts turns of another thread during one call: with its lock held there would be none."""
    scene = Scene(256, 1, 1 << 18)
    turns, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    check_frames(scene.rows[:1], scene.expected[:1])
    thread.start()
    try:
        before = turns[0]
        for _ in range(20):
            assert not check_frames(scene.rows, scene.expected).any()
        assert turns[0] - before > 100
    finally:
        done.set()
        thread.join()
