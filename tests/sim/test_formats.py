"""Files: what is written is read, and what is damaged is refused with a sentence."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.sim import generate, read_trace
from tests.inside import ConfigError, read_mooncake, read_sessions
from tests.sim.stories import TRACES, S, chains, needs_traces, public, same, told, traces
from tests.sim.writers import write_mooncake, write_npz


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@settings(max_examples=12)
@given(trace=traces, name=st.sampled_from(["a.npz", "a.jsonl", "a.jsonl.zst"]))
def test_what_is_written_is_read(folder, trace, name):
    path = folder / name
    (write_npz if name == "a.npz" else write_mooncake)(path, trace)
    if name != "a.npz":  # sessions are numbered anew, in order of appearance
        got = read_mooncake(path, block_tokens=trace.block_tokens)
        assert chains(got) == chains(trace)
        assert np.array_equal(got.times_ns, trace.times_ns)
        assert np.array_equal(got.stops, trace.stops)
        known = trace.sessions >= 0
        assert np.array_equal(got.sessions < 0, ~known)
        pairs = set(zip(got.sessions[known].tolist(), trace.sessions[known].tolist(), strict=True))
        assert len(pairs) == len(set(trace.sessions[known].tolist()))
    else:
        got = read_trace(path)
        assert same(got, trace)
    assert got.name == "a"


def test_tenants_survive_lines(tmp_path):
    trace = generate("chat", requests=200, seed=1, tenants=3)
    write_mooncake(tmp_path / "t.jsonl.zst", trace)
    got = read_trace(tmp_path / "t.jsonl.zst")
    assert got.block_tokens == 512  # as the lengths suggest
    first = {tenant: i for i, tenant in reversed(list(enumerate(trace.tenants.tolist())))}
    order = sorted(first, key=first.__getitem__)
    assert got.tenants.tolist() == [order.index(tenant) for tenant in trace.tenants.tolist()]


def test_ids_need_not_be_chain_correct(tmp_path):
    """Equal ids below different blocks are different blocks."""
    lines = [{"timestamp": 5, "hash_ids": [1, 9]}, {"timestamp": 0, "hash_ids": [2, 9]}]
    path = tmp_path / "loose.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    trace = read_trace(path)
    assert chains(trace) == [[0, 1], [2, 3]]
    assert trace.times_ns.tolist() == [0, 5_000_000]
    assert trace.parents.tolist() == [-1, 0, -1, 2]


def test_ids_of_64_bits(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "hash_ids": [2**64 - 1, 2**63, 5]}))
    assert read_trace(path).unique == 3
    path.write_text(json.dumps({"timestamp": 0, "hash_ids": [2**64]}))
    with pytest.raises(ConfigError, match="64 bits"):
        read_trace(path)


SESSIONS = [
    {
        "id": "a",
        "block_size": 64,
        "tool_tokens": 256,
        "system_tokens": 128,
        "requests": [
            {"t": 0.0, "in": 520, "out": 9, "stop": "tool_use", "runs": [[1, 8]]},
            {"t": 5.0, "in": 640, "out": 9, "stop": "end_turn", "runs": [[1, 9], [30, 1]]},
            {
                "t": 7.0,
                "tool_tokens": 256,
                "system_tokens": 0,
                "requests": [{"t": 1.0, "in": 400, "out": 9, "stop": None, "runs": [[90, 6]]}],
            },
        ],
    },
    {
        "id": "b",
        "block_size": 64,
        "tool_tokens": 256,
        "system_tokens": 128,
        "requests": [{"t": 0.0, "in": 520, "out": 9, "stop": "tool_use", "runs": [[1, 8]]}],
    },
]


def test_sessions_start_at_random(tmp_path):
    path = tmp_path / "some.jsonl.zst"
    body = "".join(json.dumps(line) + "\n" for line in SESSIONS).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(body))
    one, again = read_trace(path), read_sessions(path, seed=1)
    assert same(one, again)
    trace = read_sessions(path, seed=2, span_s=100.0, block_tokens=128)
    assert trace.times_ns[-1] <= 108 * S
    assert not np.array_equal(trace.times_ns, one.times_ns)
    by_session = {s: [] for s in (0, 1)}
    for session, chain in zip(trace.sessions.tolist(), chains(trace), strict=True):
        by_session[session].append(chain)
    first, second, helper = by_session[0]
    (other,) = by_session[1]
    assert [len(c) for c in (first, second, helper, other)] == [4, 5, 3, 4]
    assert second[:4] == first
    assert first[:3] == other[:3]  # 384 tokens of prompts: three blocks of 128
    assert first[3] != other[3]
    assert helper[:2] == first[:2]  # its own prompts end after the tools' 256 tokens
    assert helper[2] != first[2]
    gaps = np.diff(trace.times_ns[trace.sessions == 0])
    assert gaps.tolist() == [5 * S, 3 * S]
    with pytest.raises(ConfigError, match="multiple of 64"):
        read_sessions(path, block_tokens=100)
    with pytest.raises(ConfigError, match="cannot start within"):
        read_sessions(path, span_s=0.0)


def test_a_packed_trace_is_read_to_the_end_of_its_last_frame(tmp_path):
    path, pack = tmp_path / "t.jsonl.zst", zstandard.ZstdCompressor(level=1).compress
    lines = [json.dumps({"timestamp": i, "hash_ids": [i, -i]}).encode() for i in range(3000)]
    frames = [pack(b"\n".join(part) + b"\n") for part in (lines[:1000], [], lines[1000:])]
    whole = b"".join(frames)
    path.write_bytes(whole)
    assert len(read_trace(path).times_ns) == 3000
    for length in (len(frames[0]) + 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="is damaged: its last frame is cut"):
            read_trace(path)


def weka(session, start=0.0, absolute=False):
    """A session as kv-cache-tester and AgentX write it: ids one by one, helpers with a type."""
    turns = []
    for turn in session.get("requests") or ():
        turn = dict(turn)
        helper = "requests" in turn
        turn |= {"type": "nested", "name": "a"} if helper else {"type": "n"}
        if absolute:
            turn["t"] += start
        runs = turn.pop("runs", [])
        turn["hash_ids"] = [first + i for first, count in runs for i in range(count)]
        turns.append(turn | (weka(turn, turn["t"], absolute) if helper else {}))
    scope = {"hash_id_scope": "local", "models": ["a"]} if "block_size" in session else {}
    return session | scope | {"requests": turns}


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("ending", ["json", "jsonl", "jsonl.zst"])
def test_a_folder_of_sessions_is_the_file_of_them(tmp_path, ending, absolute):
    """Helpers' times from their own beginning or the session's, ids one by one or as runs."""
    one = write_lines(tmp_path / "some.jsonl", *SESSIONS)
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "README.md").write_text("Not read.")
    for session in reversed(SESSIONS):  # read by name
        body = json.dumps(weka(session, absolute=absolute)).encode()
        packed = zstandard.ZstdCompressor().compress(body) if ending.endswith("zst") else body
        (folder / f"{session['id']}.{ending}").write_bytes(packed)
    got = read_trace(folder)
    got.check()
    assert got.name == "some:1" and same(got, read_trace(one))
    for tokens in (64, 128):
        want = read_sessions(one, block_tokens=tokens, seed=3)
        assert same(read_sessions(folder, block_tokens=tokens, seed=3), want)


def test_blocks_are_joined_by_all_their_ids(tmp_path):
    """Ids may name the tokens of a block alone: two that end alike are different blocks."""
    turns = [{"hash_ids": ids} for ids in ([1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4, 5], [2, 1])]
    path = write_lines(tmp_path / "a.jsonl", {"block_size": 64, "requests": turns})
    assert sorted(chains(read_sessions(path, block_tokens=128))) == [[0, 1], [0, 1], [2, 3], [4]]


def test_ids_of_one_scope_are_the_same_in_all_sessions(tmp_path):
    session = {"block_size": 64, "tool_tokens": 64, "requests": [{"hash_ids": [1, 2]}]}
    other = session | {"tool_tokens": 128, "requests": [{"hash_ids": [1, 3]}]}
    for scope, unique in (("local", 4), ("global", 3)):
        lines = [line | {"hash_id_scope": scope} for line in (session, other)]
        path = write_lines(tmp_path / f"{scope}.jsonl", *lines)
        assert read_sessions(path, block_tokens=64).unique == unique


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (None, "there is no file of sessions in .*Name a folder of JSON files"),
        ("{}", "b.json, line 1: .*requests.*Pass another file"),
        ('{"requests": [{"t": 0}]}', "b.json, line 1: .*block_size"),
        ('{"block_size": 64, "requests": [{"hash_ids": ["x"]}]}', "b.json, line 1: .*hash_ids"),
        ('{"block_size": 64, "requests": [{"hash_ids": [1', "b.json, line 1"),
        (f'{{"block_size": 64, "requests": [{{"hash_ids": [{2**64}]}}]}}', "line 1: .*64 bits"),
        ('{"block_size": 60, "requests": [{}]}', "session 1 has blocks of 60 .*of 60"),
        ('{"block_size": 64, "hash_id_scope": "x", "requests": []}', "hash_id_scope"),
        (
            '{"block_size": 64, "requests": [{"runs": [[0, 16777215]]}]}',
            "b.json, session 1 names too many blocks",
        ),
    ],
)
def test_a_bad_session_of_a_folder_is_named(tmp_path, body, problem):
    if body is not None:
        write_lines(tmp_path / "a.json", SESSIONS[0])
        (tmp_path / "b.json").write_text(body)
    with pytest.raises(ConfigError, match=problem):
        read_trace(tmp_path)


def test_what_is_no_file_in_a_folder(tmp_path):
    (tmp_path / "more.json").mkdir()
    with pytest.raises(ConfigError, match=r"more\.json cannot be read"):
        read_trace(tmp_path)


# ---- damage


def test_what_is_no_trace(tmp_path):
    with pytest.raises(ConfigError, match=r"the trace .*missing\.npz cannot be read"):
        read_trace(tmp_path / "missing.npz")
    with pytest.raises(ConfigError, match="there is no file"):
        read_trace(tmp_path)
    for body in (b"", b"\n\n", b"{}", b'{"a": 1}\n', b"[1]", b"\x00\x01\x02", b"text", b"\xff{}"):
        (tmp_path / "x").write_bytes(body)
        with pytest.raises(ConfigError):
            read_trace(tmp_path / "x")


@pytest.mark.parametrize(
    "line",
    [
        *('{"timestamp": -1, "hash_ids": [1]}', '{"timestamp": 1e300, "hash_ids": [1]}'),
        *('{"hash_ids": [1]}', '{"timestamp": 0, "hash_ids": ["a"]}'),
        '{"timestamp": 0, "hash_ids": [18446744073709551616]}',
        '{"timestamp": 0, "hash_ids": [1.5]}',
        '{"timestamp": 0, "hash_ids": [1], "input_length": -4}',
        '{"timestamp": 0, "hash_ids": [1], "output_length": 1e20}',
        *('{"timestamp": 0, "hash_ids": [1', '{"requests": [{"t": 0}]}'),
        '{"requests": [], "block_size": 0}',
        '{"requests": [{"runs": [[0, 99999999999]]}], "block_size": 64}',
        '{"requests": [{"runs": [[-1, 4]]}], "block_size": 64}',
    ],
)
def test_bad_lines_name_their_number(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "hash_ids": [1]}\n' if "hash_ids" in line else ""
    path.write_text(good + line + "\n")
    with pytest.raises(ConfigError, match=f"line {2 if good else 1}"):
        read_trace(path)


def test_a_time_that_no_clock_reaches_is_refused(tmp_path):
    lines = [{"timestamp": time, "hash_ids": [1]} for time in (0, 1 << 42)]
    with pytest.raises(ConfigError, match=r"t.jsonl, request 2 has a time"):
        read_trace(write_lines(tmp_path / "t.jsonl", *lines))


def test_gzip_is_read_and_damage_of_it_named(tmp_path):
    lines = [{"timestamp": time, "hash_ids": [1, time]} for time in range(400)]
    plain = write_lines(tmp_path / "t.jsonl", *lines)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert same(read_trace(packed), read_trace(plain)) and read_trace(packed).name == "t"
    for damaged in (packed.read_bytes()[:-8], packed.read_bytes()[:-8] + bytes(8)):
        packed.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"t.jsonl.gz is damaged: "):
            read_trace(packed)


@settings(max_examples=25)
@given(data=st.data())
def test_damaged_files_end_in_a_sentence(folder, data):
    """Bytes are changed or cut off: the file is read, as something, or refused; never more."""
    name = data.draw(st.sampled_from(["d.npz", "d.jsonl", "d.jsonl.zst"]))
    path = folder / name
    trace = told([(1, [i % 3, i % 2, 1], i % 2) for i in range(12)])
    (write_npz if name == "d.npz" else write_mooncake)(path, trace)
    body = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        del body[at:]
    else:
        body[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(body))
    try:
        read_trace(path).check()
    except ConfigError as error:
        assert str(path) in str(error) or "trace" in str(error)


def test_an_array_is_not_believed_before_it_is_there(tmp_path):
    """A header that promises terabytes costs nothing."""
    path = tmp_path / "bomb.npz"
    write_npz(path, told([(0, [0, 1], 0)]))
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    head = parts["blk.npy"]
    parts["blk.npy"] = head.replace(b"(2,)", b"(4000000000000,)").replace(b" " * 13, b"  ", 1)
    with zipfile.ZipFile(path, "w") as file:
        for name, body in parts.items():
            file.writestr(name, body)
    with pytest.raises(ConfigError, match="blk"):
        read_trace(path)


@pytest.mark.parametrize(
    "change", ["missing", "objects", "floats", "short", "nan", "matrix", "inl", "kind", "sess"]
)
def test_arrays_of_another_kind(tmp_path, change):
    path = tmp_path / "odd.npz"
    trace = told([(0, [0, 1], 0), (1, [0], 1)])
    write_npz(path, trace)
    with np.load(path) as file:
        arrays = dict(file)
    if change == "missing":
        del arrays["off"]
    elif change == "objects":
        arrays["blk"] = np.array(["x", "y", "z"])
    elif change == "floats":
        arrays["blk"] = arrays["blk"].astype(np.float64)
    elif change == "short":
        arrays["sess"] = arrays["sess"][:1]
    elif change in arrays:  # of which the low bits look right
        arrays[change] = arrays[change].astype(np.uint64) + np.uint64(1 << 63)
    elif change == "nan":
        arrays["ts"] = arrays["ts"] * np.nan
    else:
        arrays["parent"] = arrays["parent"][None]
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(path)


# ---- published files


@needs_traces
def test_formats_of_one_published_trace_agree():
    lines = read_trace(Path(TRACES) / "blocks" / "lmc_agent.jsonl.zst")
    arrays = public("lmc_agent")
    assert chains(lines) == chains(arrays)
    assert lines.block_tokens == arrays.block_tokens == 16
    verbatim = read_trace(Path(TRACES) / "mooncake" / "conversation_trace.jsonl.zst")
    assert np.array_equal(verbatim.blocks, public("moon_conv").blocks)
    assert verbatim.unique == 182_790  # chain ids: as many as raw ones


@needs_traces
@pytest.mark.slow
def test_raw_sessions_are_the_published_trace_but_for_their_starts():
    path = Path(TRACES) / "raw" / "kct_sessions_even.jsonl.zst"
    raw, trace = read_sessions(path, seed=1), public("kct_dev")
    assert (len(raw), len(raw.blocks), raw.unique) == (len(trace), len(trace.blocks), trace.unique)
    assert np.array_equal(np.bincount(raw.stops), np.bincount(trace.stops))
    assert sorted(raw.input_tokens.tolist()) == sorted(trace.input_tokens.tolist())
    other = read_sessions(path, seed=7, span_s=7200.0)
    assert other.unique == raw.unique
    assert other.times_ns[-1] < raw.times_ns[-1]


# ---- units


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def of_chats(n):
    """As Bailian publishes them: seconds, and which chat goes on from which."""
    for i in range(n):
        blocks = 3 + i % 5
        yield {
            "chat_id": i,
            "parent_chat_id": i - 1 if i % 5 else -1,
            "timestamp": 36.5 * i,
            "input_length": 16 * blocks - 7,
            "output_length": 20,
            "type": "text",
            "turn": 1 + i % 5,
            "hash_ids": [i // 5 * 10 + k for k in range(blocks)],
        }


def test_chats_are_in_seconds_and_are_sessions(tmp_path):
    trace = read_trace(write_lines(tmp_path / "chats.jsonl", *of_chats(50)))
    assert trace.times_ns[-1] == 49 * 36.5 * S and trace.block_tokens == 16
    assert trace.sessions.tolist() == [i // 5 for i in range(50)]
    trace.check()


EPOCH = 1_764_000_000
TIMES = {  # as they are written, and the second one after the first
    "whole": ([0, 1500], 1.5),
    "seconds since 1970": ([EPOCH, EPOCH + 90], 90.0),
    "seconds since 1970, in parts": ([EPOCH + 0.25, EPOCH + 90.5], 90.25),
    "milliseconds since 1970": ([EPOCH * 1000, EPOCH * 1000 + 90], 0.09),
    "milliseconds since 1970, in parts": ([EPOCH * 1e3 + 0.25, EPOCH * 1e3 + 90.5], 0.09025),
}


@pytest.mark.parametrize("times", TIMES)
def test_units_are_seen(tmp_path, times):
    written, gap_s = TIMES[times]
    lines = [{"timestamp": time, "hash_ids": [1]} for time in written]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", *lines))
    assert abs(int(np.diff(trace.times_ns)[0]) / S - gap_s) < 1e-3


@pytest.mark.parametrize("times", [[0.0, 36.0], [0, 7.25], [0.5, 5e8]])
def test_units_that_cannot_be_seen_are_asked_for(tmp_path, times):
    path = tmp_path / "t.jsonl"
    lines = [{"timestamp": time, "hash_ids": [1]} for time in times]
    with pytest.raises(ConfigError, match=r"milliseconds or seconds.*timestamp_s"):
        read_trace(write_lines(path, *lines))
    for name, unit_ns in (("timestamp_ms", 10**6), ("timestamp_s", S)):
        lines = [{name: time, "hash_ids": [1]} for time in times]
        found = read_trace(write_lines(path, *lines)).times_ns
        assert found.tolist() == [round(time * unit_ns) for time in times]


@given(
    size=st.integers(1, 4096),
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=30),
    whole=st.booleans(),
)
def test_the_size_of_blocks_fits_all_lengths(folder, size, lengths, whole):
    """Whether a rest that fills no block has an id, or not."""
    lines = [
        {
            "timestamp": i,
            "input_length": tokens,
            "hash_ids": [0] * (tokens // size if whole else -(-tokens // size)),
        }
        for i, tokens in enumerate(lengths)
    ]
    found = read_trace(write_lines(folder / "sizes.jsonl", *lines)).block_tokens
    if any(line["hash_ids"] for line in lines):
        for line in lines:
            blocks, tokens = len(line["hash_ids"]), line["input_length"]
            assert tokens // found <= blocks <= max(1, -(-tokens // found))
    if size.bit_count() == 1 and max(lengths) > size * size * 4:
        assert found == size


@pytest.mark.parametrize(
    "lengths", [[(10, 3), (10, 7)], [(10, 40)], [(5000, 10), (5000, 1)], [(1, 1), (1, 2)]]
)
def test_lengths_that_no_block_fits(tmp_path, lengths):
    lines = [
        {"timestamp": i, "input_length": tokens, "hash_ids": list(range(blocks))}
        for i, (tokens, blocks) in enumerate(lengths)
    ]
    with pytest.raises(ConfigError, match="blocks of no size fit"):
        read_trace(write_lines(tmp_path / "t.jsonl", *lines))
