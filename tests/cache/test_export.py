"""Warmed prompts in a file: written once, read elsewhere, damaged in every way."""

from __future__ import annotations

import json
import os
import secrets
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings

from flowkv import KV
from flowkv.testing import MemoryTier
from flowkv.tiers import Envelope, FrameInfo
from tests.cache.audit import audit
from tests.cache.fakes import lasting
from tests.cache.toy import check_content, geometry, make_kv, opened, prefill, published, simple
from tests.inside import MAGIC, ArchiveReader, ArchiveWriter, HostTier, StoreError

ROOT = Path(__file__).resolve().parents[2]
P, Q = [1] * 24, [2] * 40


def reused(kv: KV, tokens: list[int], **options: Any) -> int:
    with kv.open([*tokens, 0], **options) as seq:
        check_content(kv, seq, tokens[: seq.length])
        audit(kv)
        return seq.reused


@pytest.fixture
def file(tmp_path: Path) -> Path:
    kv = make_kv()
    published(kv, P)
    published(kv, Q)
    kv.export(tmp_path / "warm.kv")
    return tmp_path / "warm.kv"


@pytest.mark.parametrize("name", ["n" * 255, "\u00fc" * 127, os.fsdecode(b"a\xff b")])
def test_names_of_any_length(tmp_path: Path, name: str) -> None:
    kv = make_kv()
    published(kv, P)
    frames = kv.export(tmp_path / name).frames
    assert make_kv().load(tmp_path / name).frames == frames > 0
    assert os.listdir(tmp_path) == [name]


def test_what_was_exported_is_known_elsewhere(tmp_path: Path) -> None:
    kv = make_kv()
    published(kv, P)
    published(kv, Q)
    done = kv.export(tmp_path / "warm.kv", P)
    assert (done.frames, done.missing) == (6, 0) and done.n_bytes > 6 * 4096
    assert done.n_bytes == (tmp_path / "warm.kv").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["warm.kv"]
    assert (tmp_path / "warm.kv").stat().st_mode & 0o077 == 0
    other = make_kv()
    assert other.load(tmp_path / "warm.kv") == (6, 0, 0, 0, 0)
    assert other.load(tmp_path / "warm.kv") == (0, 6, 0, 0, 0)
    assert reused(other, P) == 24 and reused(other, Q) == 0


def test_what_killed_exports_left_goes_with_the_next(tmp_path: Path) -> None:
    left, young, ahead = (tmp_path / f".warm.kv.{16 * x}.part" for x in "012")
    other = tmp_path / f".other.kv.{16 * '0'}.part"
    for path in (left, young, ahead, other):
        path.write_bytes(b"of a prompt")
    kv = make_kv()
    published(kv, P)
    with ArchiveWriter(tmp_path / "warm.kv", Envelope()):
        (live,) = {*tmp_path.glob(".warm.kv.*")} - {left, young, ahead}
        os.utime(ahead, (9e9, 9e9))  # of a clock that was wrong
        for path in (left, other, live):
            os.utime(path, (1e9, 1e9))
        kv.export(tmp_path / "warm.kv")
        assert set(tmp_path.glob(".*")) == {young, other, live}
    assert make_kv().load(tmp_path / "warm.kv").frames == 0, "the last one that ended"


@pytest.mark.parametrize("held", [False, True])
def test_pages_that_another_thread_publishes_meanwhile_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    kv, other, seqs = make_kv(simple()), make_kv(simple()), list[Any]()
    published(kv, P)
    kv.export(tmp_path / "warm.kv")
    real = ArchiveReader.read

    def read(*given: Any) -> bool:
        if not seqs:
            seqs.append(opened(other, [*P, 0]))
            if not held:
                seqs[0].close()
        return real(*given)

    monkeypatch.setattr(ArchiveReader, "read", read)
    assert other.load(tmp_path / "warm.kv") == (0, 3, 0, 0, 0)
    audit(other)
    seqs[0].close()
    assert reused(other, P) == 24


@pytest.mark.parametrize(
    "prompts",
    [[P, Q], np.array([P, P]), torch.tensor(P), np.array(P), (tuple(P), Q)],
    ids=["lists", "matrix", "tensor", "array", "tuples"],
)
def test_one_prompt_or_several(tmp_path: Path, prompts: Any) -> None:
    kv = make_kv()
    published(kv, P)
    published(kv, Q)
    several = not hasattr(prompts, "shape")
    assert kv.export(tmp_path / "warm.kv", prompts).frames == (16 if several else 6)


def test_pages_are_exported_from_wherever_they_lie(tmp_path: Path) -> None:
    kv = make_kv(simple(), pages=4, tiers=[HostTier(1 << 20)])
    published(kv, P)
    published(kv, Q[:24])
    assert set(kv.explain([*P, 0]).residency) & {"host"}
    assert kv.export(tmp_path / "warm.kv").frames == 6
    other = make_kv(simple())
    assert other.load(tmp_path / "warm.kv").frames == 6
    assert reused(other, P) == 24 and reused(other, Q[:24]) == 24


def test_tenants_are_exported_apart(tmp_path: Path) -> None:
    kv = make_kv()
    published(kv, P, tenant="alice")
    published(kv, Q, tenant="bob")
    assert kv.export(tmp_path / "a", tenant="alice").frames == 6
    assert kv.export(tmp_path / "none").frames == 0
    other = make_kv()
    assert other.load(tmp_path / "none").frames == 0
    other.load(tmp_path / "a")
    assert reused(other, P, tenant="alice") == 24
    assert reused(other, P) == reused(other, Q, tenant="bob") == 0


def test_where_the_device_is_full_the_tiers_take_the_rest(tmp_path: Path, file: Path) -> None:
    disk = lasting()
    kv = make_kv(pages=5, tiers=[disk])
    done = kv.load(file)
    assert done.frames == 16 and kv.flush() and len(disk.frames) == 16
    assert reused(kv, P) == 24
    alone = make_kv(pages=2)
    done = alone.load(file)
    assert done.no_room == 16 - done.frames > 0


def test_codecs_and_states_are_carried_too(tmp_path: Path) -> None:
    shape = geometry(heads=16)
    options = {"codec": "kv8", "recent_tokens": 0}
    kv = make_kv(shape, **options)
    seq = opened(kv, [*Q, 5, 6, 7])
    assert kv.save_state(seq, {"ssm": torch.arange(6.0), "step": 43})
    seq.close()
    kv.flush()
    kv.planner.store.tails.drop()
    assert set(kv.stats()["devices"]["cpu"]["codecs"]) == {"kv8"}
    done = kv.export(tmp_path / "warm.kv", [*Q, 5, 6, 7])
    assert done.frames == 11
    other = make_kv(shape, **options)
    assert other.load(tmp_path / "warm.kv").frames == 11
    assert set(other.stats()["devices"]["cpu"]["codecs"]) == {"kv8"}
    with other.open([*Q, 5, 6, 7, 8], state=True) as seq:
        assert seq.reused == 43 and seq.state is not None
        assert torch.equal(seq.state["ssm"], torch.arange(6.0)) and seq.state["step"] == 43
        check_content(other, seq, [*Q, 5, 6, 7], within=0.005)
    raw = make_kv(shape)
    assert raw.load(tmp_path / "warm.kv").foreign == 11, "too lossy for raw"


@pytest.mark.parametrize(
    "options",
    [
        {"namespace": "other"},
        {"shape": geometry(page_size=16)},
        {"shape": geometry(window=13)},
        {"shape": geometry(layers=4)},
    ],
    ids=str,
)
def test_whatever_differs_is_refused_and_counted(file: Path, options: dict[str, Any]) -> None:
    kv = make_kv(**options)
    assert kv.load(file) == (0, 0, 16, 0, 0) and kv.stats()["blocks"] == 0


def test_encrypted_files_need_the_secret(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    options = {"integrity": "aead", "secret": secrets.token_hex(32)}
    kv = make_kv(**options)
    published(kv, P)
    kv.export(tmp_path / "warm.kv")
    same, other, none = make_kv(**options), make_kv(**options | {"secret": "ab" * 16}), make_kv()
    assert same.load(tmp_path / "warm.kv").frames == 6 and reused(same, P) == 24
    assert other.load(tmp_path / "warm.kv").damaged == none.load(tmp_path / "warm.kv").damaged == 6
    plain = make_kv()
    published(plain, P)
    plain.export(tmp_path / "plain.kv")
    assert same.load(tmp_path / "plain.kv").damaged == 6, "what is not encrypted is not believed"


# ---- damage


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    kv = make_kv(lossless="off")
    published(kv, P)
    kv.export(folder / "warm.kv")
    return folder / "warm.kv"


def check_damaged(data: bytes, path: Path) -> None:
    """Whatever is left of a file gives the right bytes, or none."""
    path.write_bytes(data)
    kv = make_kv()
    try:
        done = kv.load(path)
    except StoreError:
        return
    assert done.frames <= 6
    assert reused(kv, P) in (0, 8, 16, 24)
    kv.close()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_a_wrong_byte(sample: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = sample.read_bytes()
    kind = data.draw(st.sampled_from(("flip", "cut", "zeros", "swap", "more")))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        found = bytearray(whole)
        found[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        found = bytearray(whole[:at])
    elif kind == "zeros":
        found = bytearray(whole)
        found[at : at + 4096] = bytes(len(found[at : at + 4096]))
    elif kind == "swap":
        other = data.draw(st.integers(0, len(whole) // 4096 - 1)) * 4096
        here = at // 4096 * 4096
        found = bytearray(whole)
        found[here : here + 4096], found[other : other + 4096] = (
            whole[other : other + 4096],
            whole[here : here + 4096],
        )
    else:
        found = bytearray(whole) + data.draw(st.binary(min_size=1, max_size=99))
    check_damaged(bytes(found), tmp_path / "damaged.kv")


def test_every_flipped_bit_of_a_frame_is_noticed(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    step = 193  # every 193rd byte of each frame's meaningful parts
    for at in range(4096, 4096 + 8192, step):
        found = bytearray(whole)
        found[at] ^= 4
        (tmp_path / "flipped.kv").write_bytes(found)
        with ArchiveReader(tmp_path / "flipped.kv", Envelope()) as archive:
            good = 0
            for frame in archive.frames():
                if frame.header is not None:
                    body = memoryview(bytearray(frame.header.body_bytes))
                    good += archive.read(frame, body)
        assert good == 5, f"byte {at}"


def test_without_an_index_frames_are_found_one_after_the_other(
    sample: Path, tmp_path: Path
) -> None:
    whole = sample.read_bytes()
    (tmp_path / "cut.kv").write_bytes(whole[:-100])
    kv = make_kv()
    assert kv.load(tmp_path / "cut.kv").frames == 6 and reused(kv, P) == 24


@pytest.mark.parametrize("offset", [1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_an_index_that_leads_nowhere(sample: Path, tmp_path: Path, offset: int) -> None:
    whole = sample.read_bytes()
    index = msgspec.msgpack.encode([1, [[bytes(32), offset, 4096]]])
    digest = xxhash.xxh3_128_digest(index)
    end = struct.pack("<8sQQ16s", MAGIC, len(whole), len(index), digest)
    (tmp_path / "lie.kv").write_bytes(whole + index + end)
    assert make_kv().load(tmp_path / "lie.kv").damaged == 1


@pytest.mark.parametrize(
    "content", [b"", b"PK\3\4" + bytes(5000), MAGIC + b"\7\0\0\0" + bytes(9000)]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(StoreError, match=r"no exported cache|of version 7"):
        make_kv().load(tmp_path / "other")


def test_what_cannot_be_written_or_read_says_so(tmp_path: Path) -> None:
    kv = make_kv()
    published(kv, P)
    with pytest.raises(StoreError, match=r"cannot be written \(No such file"):
        kv.export(tmp_path / "none" / "warm.kv")
    with pytest.raises(StoreError, match=r"cannot be read \(No such file"):
        kv.load(tmp_path / "warm.kv")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")  # as /dev/stdout is one
    for name in ("folder", "pipe", "link"):  # no other thing is replaced, /dev/null neither
        with pytest.raises(StoreError, match=r"cannot be written \(not a regular file"):
            kv.export(tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "pipe").unlink()
    (tmp_path / "link").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    kv.export(tmp_path / "warm.kv")
    before = (tmp_path / "warm.kv").read_bytes()
    kv.planner.store.forms[0].describe = None  # fails in the middle
    with pytest.raises(TypeError):
        kv.export(tmp_path / "warm.kv")
    assert (tmp_path / "warm.kv").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "warm.kv"]


def test_frames_whose_tier_lost_them_are_counted(tmp_path: Path) -> None:
    memory = MemoryTier()
    kv = make_kv(simple(), pages=4, tiers=[memory])
    published(kv, P)
    published(kv, Q[:24])
    memory.frames.clear()
    done = kv.export(tmp_path / "warm.kv")
    assert done.missing > 0 and done.frames + done.missing == 6


FRESH = """
import json, sys
from tests.cache.toy import make_kv, check_content
kv = make_kv()
done = kv.load(sys.argv[1])
with kv.open([2] * 40 + [0]) as seq:
    check_content(kv, seq, [2] * 40)
    print(json.dumps([done.frames, seq.reused]))
"""


def test_a_fresh_process_goes_on_where_this_one_was(file: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FRESH, str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    assert json.loads(run.stdout) == [16, 40]


def test_others_go_on_meanwhile(tmp_path: Path) -> None:
    """The lock is held for one page at a time: who opens a prompt waits for no file."""
    kv = make_kv()
    published(kv, Q)
    seen = []

    write = ArchiveWriter._write

    def writing(self: Any, *parts: Any) -> None:
        seen.append(kv.lock._owner if hasattr(kv.lock, "_owner") else None)
        with kv.open([9] * 9) as seq:
            prefill(kv, seq)
        write(self, *parts)

    ArchiveWriter._write = writing
    try:
        assert kv.export(tmp_path / "warm.kv", Q).frames == 10
    finally:
        ArchiveWriter._write = write
    assert len(seen) == 12


@pytest.mark.parametrize("first", range(2))
def test_two_exports_to_one_path_are_both_whole(tmp_path: Path, first: int) -> None:
    """Two threads, or processes of one number in two containers: the last one stays."""
    kv, path = make_kv(), tmp_path / "warm.kv"
    published(kv, Q)
    info = FrameInfo("state", 0, 0, bytes(16), bytes(32), kv.namespace, 0, 8, 4096, bytes(32))
    with ArchiveWriter(path, Envelope()) as other:
        for number in range(2):
            if number == first:
                assert kv.export(path, Q).frames == 10
            other.append(bytes([number]) * 32, info, bytes(4096))
        assert kv.load(path).known == 10
    with ArchiveReader(path, Envelope()) as archive:
        assert [found.header is not None for found in archive.frames()] == [True] * 2
    assert [one.name for one in tmp_path.iterdir()] == ["warm.kv"]


@pytest.mark.parametrize(
    "change",
    [{"layout": b"x" * 16}, {"group": 9}, {"codec": 1, "fidelity": 1}, {"kind": "memo"}],
    ids=str,
)
def test_frames_that_only_claim_to_be_ours_are_refused(tmp_path: Path, change: Any) -> None:
    """Of our namespace, and soundly written; but not as our pages lie."""
    kv = make_kv(simple())
    layout = kv.planner.store.forms[0].raw
    info = FrameInfo(
        "page", 0, 0, layout.fingerprint(), bytes(32), kv.namespace, 0, 8, 4096, bytes(32)
    )
    with ArchiveWriter(tmp_path / "made.kv", Envelope()) as archive:
        archive.append(b"k" * 32, info._replace(**change), bytes(4096))
        archive.append(b"l" * 32, info, bytes(8192))
    assert kv.load(tmp_path / "made.kv") == (0, 0, 2, 0, 0)
