"""Files and messages of others: a reader answers, or refuses with a sentence, in bounded memory.

Each reader gets valid bytes with a few changes, structures with one odd value, and bombs by hand.
What is no regular file is not opened by any of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowkv
from flowkv.connect.events import (
    AllBlocksCleared,
    EventBatch,
    EventSubscription,
    Recorder,
    decode,
    encode,
)
from flowkv.connect.routing import Router
from flowkv.sim import read_trace
from flowkv.tiers import BadFrame, Envelope, decode_header, encode_header
from tests.cache.toy import make_kv, published
from tests.inside import (
    ArchiveReader,
    Checkpoint,
    ConfigError,
    EmbeddingTable,
    StoreError,
    Writer,
    decode_state,
    encode_state,
    fingerprint,
    load_config,
    open_regular,
    read_prompts,
    write_table,
)
from tests.sim.stories import told
from tests.sim.writers import write_npz
from tests.tiers.frames import info_of, key_of

FLOOR_BYTES, FACTOR = 16 << 20, 64
FUZZ = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
DEEP = 100_000


class Reader(NamedTuple):
    """A reader, what it may raise, and a valid file.

    Attributes:
        read: Reads a file, wherever it must lie.
        refuses: What it may raise.
        make: Writes a valid file to a path.
    """

    read: Callable[[Path], object]
    refuses: tuple[type[Exception], ...]
    make: Callable[[Path], object]


TURNS = [{"t": 0.0, "in": 520, "out": 9, "stop": "tool_use", "runs": [[1, 8]]}]
SESSION = {"block_size": 64, "tool_tokens": 256, "system_tokens": 128, "requests": TURNS}
LINE = {"timestamp": 3, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2], "session": 4}
STORED = {
    "type": "BlockStored",
    "block_hashes": [b"12345678", 7],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "extra_keys": [["salt"], [["image", 3]]],
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
EVENTS = [1.5, [STORED, REMOVED, {"type": "AllBlocksCleared"}, STORED], 0]


def write_lines(path: Path, *lines: object) -> None:
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def write_recording(path: Path) -> None:
    with Writer(path, block_tokens=16, salt=b"x") as writer:
        for n in range(6):
            ids = np.arange(2 * (2 + n % 3), dtype=np.uint64).reshape(-1, 2)
            writer.request(n * 1000, ids, input_tokens=40, session=b"s", tenant=b"t", stop=1)


def write_export(path: Path) -> None:
    kv = make_kv()
    published(kv, [1] * 24)
    kv.export(path)
    kv.close()


def read_export(path: Path) -> None:
    with ArchiveReader(path, Envelope()) as archive:
        for frame in archive.frames():
            if frame.header is not None and frame.header.body_bytes <= 1 << 16:
                archive.read(frame, memoryview(bytearray(frame.header.body_bytes)))


def write_weights(path: Path, *more: tuple[str, object]) -> None:
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    text = json.dumps(dict([("a", tensor), ("__metadata__", {"format": "pt"}), *more])).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))


def read_weights(path: Path) -> None:
    Checkpoint(path, path.parent / "manifests").close()


def read_indexed(index: Path) -> None:
    folder = index.parent / "indexed"
    folder.mkdir(exist_ok=True)
    write_weights(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(index.read_bytes())
    Checkpoint(folder, index.parent / "manifests").close()


def write_manifest(path: Path) -> None:
    write_table(path.parent / "table", [torch.ones(40, 8)])
    path.write_bytes((path.parent / "table" / "manifest").read_bytes())


def read_manifest(path: Path) -> None:
    (path.parent / "table" / "manifest").write_bytes(path.read_bytes())
    EmbeddingTable(path.parent / "table", host="4MiB").close()


def read_events(path: Path) -> None:
    batch, router = decode(path.read_bytes()), Router(["a", "b"])
    router.feed("a", [batch, batch])
    router.choose([1, 2, 3, 4], "salt")
    with Recorder(path.with_name("events.rec")) as recorder:
        recorder.feed([batch, batch])
    with contextlib.suppress(ConfigError):  # without a request there is no recording
        read_trace(path.with_name("events.rec"))


def write_arrays(path: Path) -> None:
    made = path.with_name("made.npz")
    write_npz(made, told([(1, [i % 3, i % 2, 1], i % 2) for i in range(6)]))
    made.replace(path)


def header_bytes() -> bytes:
    return encode_header(key_of(1), info_of(64), bytes(64))


def line(**fields: object) -> bytes:
    return json.dumps(LINE | fields).encode() + b"\n"


READERS = {
    "mooncake": Reader(read_trace, (ConfigError,), lambda path: write_lines(path, LINE, LINE)),
    "sessions": Reader(read_trace, (ConfigError,), lambda path: write_lines(path, SESSION)),
    "packed": Reader(
        read_trace, (ConfigError,), lambda path: path.write_bytes(zstandard.compress(line() * 9))
    ),
    "npz": Reader(read_trace, (ConfigError,), write_arrays),
    "recording": Reader(read_trace, (ConfigError,), write_recording),
    "events": Reader(
        read_events, (ConfigError,), lambda path: path.write_bytes(msgspec.msgpack.encode(EVENTS))
    ),
    "export": Reader(read_export, (StoreError,), write_export),
    "weights": Reader(read_weights, (StoreError,), write_weights),
    "index": Reader(
        read_indexed,
        (StoreError,),
        lambda path: write_lines(path, {"weight_map": {"a": "part.safetensors"}}),
    ),
    "manifest": Reader(read_manifest, (StoreError, ConfigError), write_manifest),
    "config": Reader(
        load_config, (ConfigError,), lambda path: path.write_text('gpu = "1GiB"\npage_size = 64\n')
    ),
    "prompts": Reader(
        lambda path: read_prompts(str(path)),
        (ConfigError,),
        lambda path: write_lines(path, {"prompt": "one"}, {"prompt": "two"}),
    ),
    "header": Reader(
        lambda path: decode_header(path.read_bytes()),
        (BadFrame,),
        lambda path: path.write_bytes(header_bytes()),
    ),
    "state": Reader(
        lambda path: decode_state(path.read_bytes()),
        (StoreError,),
        lambda path: path.write_bytes(encode_state({"n": 3, "x": torch.ones(2, 3)})),
    ),
}


def check(reader: Reader, path: Path) -> bool:
    """Reads a file; whether that was answered. What it allocates is bounded by its length."""
    tracemalloc.start()
    try:
        reader.read(path)
        return True
    except reader.refuses as error:
        assert str(error)
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= FLOOR_BYTES + FACTOR * path.stat().st_size


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, bytes]]:
    """Files that are read, once each: what is imported and compiled for that is not counted."""
    made: dict[str, tuple[Path, bytes]] = {}

    def make(name: str) -> tuple[Path, bytes]:
        if name not in made:
            path = tmp_path_factory.mktemp(name) / "file"
            READERS[name].make(path)
            READERS[name].read(path)
            made[name] = path, path.read_bytes()
        return made[name]

    return make


ODD_WORDS = [
    *(b"-1", b"0", b"NaN", b"1e400", b"-1e400", b"1e18", b"9" * 5000, b"2147483648", b"null"),
    *(b"9223372036854775807", b"18446744073709551616", b'"\\ud800"', b"[" * 5000, b'"\xff"'),
    *(b'{"a":' * 5000, b"inf", b"true", b'"../../x"', b"\x00"),
]


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(data=st.data())
def test_changed_bytes(
    valid: Callable[[str], tuple[Path, bytes]], name: str, data: st.DataObject
) -> None:
    path, whole = valid(name)
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "again", "number"]))
        if kind == "flip" and at < len(changed):
            changed[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, len(whole)))]
        elif kind == "insert":
            changed[at:at] = data.draw(st.binary(max_size=9) | st.sampled_from(ODD_WORDS))
        elif kind == "again":
            changed[at:at] = changed[at : at + data.draw(st.integers(1, 200))] * 3
        elif numbers := list(re.finditer(rb"-?\d+", changed)):
            found = data.draw(st.sampled_from(numbers))
            changed[found.start() : found.end()] = data.draw(st.sampled_from(ODD_WORDS))
    path.write_bytes(changed)
    check(READERS[name], path)


# ---- what is well formed, digests included, and says what cannot be


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


ODD = [
    *(
        *(None, True, -1, 0, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 1e300, "", "x" * 999),
        *([], {}),
    ),
    *(
        *(float("nan"), float("inf"), nested(300), "../../x", "/etc/passwd", "\0"),
        [[0, 2**24 - 1]] * 9,
    ),
    *([-1], [2**63], [None], ["a"], [1] * 70, [0] * 70, [2**31] * 70),
]


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the parts of a structure are."""
    inner = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if type(tree) is list else ()
    )
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def replaced(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[at[0]] = replaced(tree[at[0]], at[1:], value)
    return copy


def lay_recording(path: Path, frames: Any) -> None:
    body = b"FLOWKV recording 1\n"
    for frame in frames if isinstance(frames, list) else [frames]:
        raw = msgspec.msgpack.encode(frame)
        packed = zstandard.compress(raw)
        head = (len(packed).to_bytes(4, "little"), len(raw).to_bytes(4, "little"))
        body += b"".join(head) + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little") + packed
    path.write_bytes(body)


def lay_state(path: Path, tree: Any) -> None:
    head = msgspec.msgpack.encode(tree)
    path.write_bytes(len(head).to_bytes(4, "little") + head + bytes(64))


def lay_manifest(path: Path, tree: Any) -> None:
    body = json.dumps(tree).encode()
    raw = b"FKVTABLE" + len(body).to_bytes(4, "little") + body + bytes(8)
    path.write_bytes(raw + xxhash.xxh3_128_digest(raw))


ABOUT = {"block_tokens": 16, "version": 1, "fields": ["time_ns"]}
ASKED = [[5, -1, b"0123456789abcdef" * 2, 32, 5, -1, 0, 1], [9, 1, b"", 32, 5, 3, 0, 1]]
TABLE = {"version": 1, "table": "t", "rows": 1, "width": 8, "dtype": "float32"}
SHAPES: dict[str, tuple[Any, Callable[[Path, Any], object]]] = {
    "mooncake": (LINE, write_lines),
    "sessions": (SESSION, write_lines),
    "index": ({"weight_map": {"a": "part.safetensors"}}, write_lines),
    "prompts": ({"prompt": "one"}, write_lines),
    "weights": (
        {"b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}},
        lambda path, tree: write_weights(path, *tree.items()) if type(tree) is dict else None,
    ),
    "events": (EVENTS, lambda path, tree: path.write_bytes(msgspec.msgpack.encode(tree))),
    "recording": ([ABOUT, ASKED], lay_recording),
    "state": (
        {"tensors": [{"name": "x", "dtype": "float32", "shape": [2, 3]}], "plain": {"n": 3}},
        lay_state,
    ),
    "manifest": ({**TABLE, "block_rows": 128, "block_bytes": 4096}, lay_manifest),
}


@pytest.mark.parametrize("name", SHAPES)
def test_odd_values(valid: Callable[[str], tuple[Path, bytes]], name: str) -> None:
    """Each part of a structure in turn, by each odd value."""
    path, _ = valid(name)
    tree, lay = SHAPES[name]
    for at in places(tree):
        for odd in ODD:
            if at == () and name == "weights":
                continue
            lay(path, replaced(tree, at, odd))
            check(READERS[name], path)


# ---- bombs


LONG = json.dumps({"block_size": 1, "requests": [{"in": 1, "runs": [[0, 2**24 - 1]] * 8}]}).encode()
BOMBS = {
    "runs": ("sessions", LONG),
    "runs that are joined": ("sessions", LONG.replace(b'size": 1', b'size": 512')),
    "packed spaces": ("packed", zstandard.compress(b" " * (1 << 26) + line())),
    "packed lines": ("packed", zstandard.compress(line(hash_ids=list(range(50))) * 200_000)),
    "packed ids": ("packed", zstandard.compress(line(hash_ids=[0] * (1 << 22)))),
    "deep": ("mooncake", b"[" * DEEP),
    "deep in a field": ("mooncake", b'{"timestamp": 1, "hash_ids": ' + b"[" * DEEP),
    "deep where nobody looks": (
        "mooncake",
        b'{"timestamp": 1, "hash_ids": [], "z": ' + b"[" * DEEP,
    ),
    "digits": ("mooncake", line().replace(b"1024", b"9" * 5000)),
    "infinite": ("mooncake", line().replace(b"1024", b"1e400")),
    "late": ("mooncake", line(timestamp=1e13)),
    "half a pair": ("mooncake", line(session="\ud800")),
    "deep events": ("events", b"\x93\x01\x91" + b"\x91" * DEEP),
    "many events": ("events", b"\x93\x01\xdd\xff\xff\xff\xff"),
    "long bytes": ("events", b"\x93\x01\x91\x92\xabBlockStored\xc6\xff\xff\xff\xff"),
    "deep configuration": ("config", b"gpu = " + b"[" * DEEP),
    "digits in a configuration": ("config", b"page_size = " + b"9" * 5000),
    "binary configuration": ("config", b"gpu = '\xff'"),
    "an endless size": ("config", b"gpu = '1e400GiB'"),
    "digits of a size": ("config", b"gpu = '" + b"9" * 5000 + b"GiB'"),
    "deep index": ("index", b'{"weight_map": ' + b"[" * DEEP),
    "surrogates in an index": ("index", b'{"weight_map": {"a": "\\ud800"}}'),
    "deep header": ("weights", DEEP.to_bytes(8, "little") + b"[" * DEEP),
    "deep prompts": ("prompts", b'{"prompt": "one"}\n{"prompt": ' + b"[" * DEEP),
    "surrogate in a prompt": ("prompts", b'{"prompt": "\\ud800"}'),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs(valid: Callable[[str], tuple[Path, bytes]], bomb: str) -> None:
    name, data = BOMBS[bomb]
    path, _ = valid(name)
    path.write_bytes(data)
    assert not check(READERS[name], path)


def test_a_recording_that_asks_for_one_long_chain_often(
    valid: Callable[[str], tuple[Path, bytes]],
) -> None:
    path, _ = valid("recording")
    ids = os.urandom(16 * 4000)
    lay_recording(path, [ABOUT, [[0, -1, ids], *([[0, 3999, b""]] * 20_000)]])
    assert not check(READERS["recording"], path)


def test_an_export_whose_index_names_a_frame_often(
    valid: Callable[[str], tuple[Path, bytes]],
) -> None:
    path, whole = valid("export")
    magic, at, length, _ = whole[-40:-32], *np.frombuffer(whole[-32:-16], "<u8").tolist(), 0
    version, entries = msgspec.msgpack.decode(whole[at : at + length])
    index = msgspec.msgpack.encode([version, entries[:1] * 1000])
    end = len(index).to_bytes(8, "little") + xxhash.xxh3_128_digest(index)
    path.write_bytes(whole[:at] + index + magic + at.to_bytes(8, "little") + end)
    with ArchiveReader(path, Envelope()) as archive:
        assert len(list(archive.frames())) <= len(entries) + 1


def test_a_router_goes_on_behind_messages_that_are_none() -> None:
    good = encode(EventBatch(1.0, []))
    with EventSubscription("tcp://127.0.0.1:9") as heard:
        for number, payload in enumerate((good, b"\x91" * DEEP, b"", good)):
            (batch,) = heard._take(number, payload)
            cleared = any(isinstance(event, AllBlocksCleared) for event in batch.events)
            assert cleared == (payload != good)
        assert heard.lost == 2


# ---- what is no regular file


def quickly(call: Callable[[], object], *refuses: type[Exception]) -> None:
    """Makes a call that refuses; one that waits fails."""
    said: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            said.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), "it waits"
    assert said and isinstance(said[0], refuses), said


BY_PATH = [
    name for name in READERS if name not in ("events", "header", "state", "index", "manifest")
]


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "nothing"])
@pytest.mark.parametrize("name", BY_PATH)
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "directory":
        path.mkdir()
    quickly(lambda: READERS[name].read(path), *READERS[name].refuses)


def test_pipes_in_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    os.mkfifo(folder / "model.safetensors")
    quickly(lambda: flowkv.load(folder), ConfigError)
    quickly(lambda: read_weights(folder), StoreError)
    quickly(lambda: fingerprint(str(folder)), ConfigError)
    os.mkfifo(tmp_path / "manifest")
    quickly(lambda: EmbeddingTable(tmp_path), StoreError)
    os.mkfifo(tmp_path / "prompts")
    quickly(lambda: make_kv().load(tmp_path / "prompts"), StoreError)


def test_a_regular_file_behind_a_link_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"some" and file.seekable() is not None


# ---- checkpoints stay in their directory


@pytest.mark.parametrize("name", ["../out.safetensors", "absolute", "link.safetensors", ".", ""])
def test_a_checkpoint_does_not_leave_its_directory(tmp_path: Path, name: str) -> None:
    folder, out = tmp_path / "model", tmp_path / "out.safetensors"
    folder.mkdir()
    write_weights(out)
    (folder / "link.safetensors").symlink_to(out)
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": str(out) if name == "absolute" else name}}
    write_lines(folder / "model.safetensors.index.json", index)
    with pytest.raises(StoreError):
        read_weights(folder)
    with pytest.raises(ConfigError):
        flowkv.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(StoreError, match="outside"):  # by the link alone
        read_weights(folder)


def test_snapshots_of_the_hub_link_to_its_blobs(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--x" / "snapshots" / "0a1b", tmp_path / "models--x" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    write_weights(blobs / "77")
    (folder / "part.safetensors").symlink_to("../../blobs/77")
    write_lines(folder / "model.safetensors.index.json", {"weight_map": {"a": "part.safetensors"}})
    read_weights(folder)


def test_tensors_share_no_place(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    write_weights(tmp_path / "w.safetensors", ("b", tensor))
    with pytest.raises(StoreError, match="one place"):
        read_weights(tmp_path / "w.safetensors")
