"""Recordings: what a live cache was asked for comes back as a trace, without anything secret."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.sim import generate, read_trace
from tests.inside import ConfigError, Reader, StateError, Writer, recording
from tests.sim.stories import chains, same, stories, told

SALT = b"salt"


def chain_ids(word: list[int]) -> bytes:
    """16 bytes per prefix."""
    return b"".join(
        hashlib.blake2b(bytes(word[: i + 1]), digest_size=16).digest() for i in range(len(word))
    )


def record(path, story, **more):
    now = 0
    with Writer(path, block_tokens=4, **more) as writer:
        for gap, word, session in story:
            now += gap * 10**9
            writer.request(
                now,
                chain_ids(word),
                input_tokens=4 * len(word),
                output_tokens=3 * len(word),
                session=b"" if session < 0 else b"s%d" % session,
                stop=len(word) % 4,
            )


@settings(max_examples=20)
@given(story=stories, most=st.sampled_from([2, 1 << 19]), frame=st.sampled_from([3, 4096]))
def test_what_is_recorded_is_replayed(tmp_path_factory, story, most, frame):
    """Also when the writer forgets what it wrote, and frames are short."""
    path = tmp_path_factory.mktemp("r") / "story.rec"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_MOST_KNOWN", most)
        patch.setattr(recording, "_FRAME_REQUESTS", frame)
        record(path, story)
    got, want = read_trace(path), told(story)
    got.check()
    assert chains(got) == chains(want)
    assert np.array_equal(got.times_ns, want.times_ns - want.times_ns[0])
    assert np.array_equal(got.stops, want.stops)
    assert np.array_equal(got.output_tokens, want.output_tokens)
    assert np.array_equal(got.sessions < 0, want.sessions < 0)
    for session in set(want.sessions.tolist()):
        assert len(set(got.sessions[want.sessions == session].tolist())) == 1
    assert len(set(got.sessions.tolist())) == len(set(want.sessions.tolist()))


def test_requests_are_noted_when_they_end(tmp_path):
    """So they come in another order than they arrived in."""
    path = tmp_path / "late.rec"
    with Writer(path, block_tokens=16, salt=SALT) as writer:
        writer.request(9 * 10**9, chain_ids([1, 2, 3]))
        writer.request(5 * 10**9, chain_ids([1]), tenant=b"b")
        writer.request(7 * 10**9, np.frombuffer(chain_ids([1, 2]), "<u8").reshape(-1, 2))
    trace = read_trace(path)
    assert chains(trace) == [[0], [0, 1], [0, 1, 2]]
    assert trace.times_ns.tolist() == [0, 2 * 10**9, 4 * 10**9]
    assert trace.tenants.tolist() == [1, 0, 0]
    assert (trace.block_tokens, trace.name) == (16, "late")


def test_nothing_secret_is_written(tmp_path):
    ids, body = chain_ids([1, 2, 3]), b""
    for name in ("a", "b"):
        with Writer(tmp_path / name, block_tokens=16) as writer:
            writer.request(0, ids, session=b"conversation of Ada", tenant=b"Ada")
        frames = b"".join(bytes(r.ids) for r in Reader(tmp_path / name))
        assert len(frames) == 48
        for i in range(0, 48, 8):
            assert ids[i : i + 8] not in frames
        assert b"Ada" not in (tmp_path / name).read_bytes()
        assert frames != body  # another salt, other hashes
        body = frames
    with Writer(tmp_path / "c", block_tokens=16, salt=SALT) as writer:
        writer.request(0, ids)
    with Writer(tmp_path / "d", block_tokens=16, salt=SALT) as writer:
        writer.request(0, ids)
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()


def test_a_recording_is_small_and_says_what_it_is(tmp_path):
    trace = generate("agents", requests=600, seed=1)
    path = tmp_path / "agents.rec"
    with Writer(path, block_tokens=512) as writer:
        for r, chain in enumerate(chains(trace)):
            words = b"".join(b.to_bytes(16, "little") for b in chain)
            writer.request(
                int(trace.times_ns[r]),
                words,
                input_tokens=int(trace.input_tokens[r]),
                output_tokens=int(trace.output_tokens[r]),
                session=b"%d" % trace.sessions[r],
                stop=int(trace.stops[r]),
            )
    got = read_trace(path)
    assert chains(got) == chains(trace)
    assert same(got.head(0), got.head(0))
    assert path.stat().st_size < 20 * trace.unique + 40 * len(trace)
    assert Reader(path).about.block_tokens == 512
    assert "time_ns" in Reader(path).about.fields
    assert path.read_bytes().startswith(b"FLOWKV recording")


def test_a_crash_costs_what_was_not_flushed(tmp_path):
    path = tmp_path / "crash.rec"
    writer = Writer(path, block_tokens=4)
    writer.request(0, chain_ids([1]))
    writer.flush()
    writer.request(1, chain_ids([1, 2]))
    writer.close()
    writer.close()
    whole = path.read_bytes()
    assert len(read_trace(path)) == 2
    path.write_bytes(whole[:-1])
    assert chains(read_trace(path)) == [[0]]
    with pytest.raises(StateError, match="closed"):
        writer.flush()


def test_an_empty_recording(tmp_path):
    record(tmp_path / "none.rec", [])
    assert len(read_trace(tmp_path / "none.rec")) == 0


@settings(max_examples=30)
@given(at=st.integers(0, 10**6), flip=st.integers(0, 255))
def test_damage_is_noticed(tmp_path_factory, at, flip):
    path = tmp_path_factory.mktemp("d") / "x.rec"
    record(path, [(1, [i % 3, i % 2, i % 5], i % 2) for i in range(9)], salt=SALT)
    whole = path.read_bytes()
    trace = read_trace(path)
    body = bytearray(whole)
    body[at % len(body)] ^= flip
    path.write_bytes(bytes(body))
    try:
        got = read_trace(path)
    except ConfigError as error:
        assert flip
        assert str(path) in str(error)
    else:  # nothing changed, or a length that makes the last frame end after the file
        assert chains(got) == chains(trace)[: len(got)]
        assert len(got) == len(trace) or flip
