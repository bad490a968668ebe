"""Caches that are not closed: what is queued is written, directories go on to the next owner."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowkv import KV, Namespace
from tests.cache.departing import CASES, PAGES, Hung
from tests.cache.fakes import Deferred, lasting
from tests.cache.toy import evict_all, make_kv, opened, published, simple
from tests.inside import REAPER, ConfigError, bind, follow, stack


@pytest.fixture
def ended() -> None:
    """Nothing holds the caches of these tests."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each process of `departing` left."""
    command = [sys.executable, "-m", "tests.cache.departing", str(tmp_path_factory.mktemp("ends"))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    assert found.keys() == {case.__name__ for case in CASES}
    return found


STATUS = {"leaves": 3, "raises": 1, "terminated": 4}
QUIET = ("returns", "leaves", "in_prefill", "terminated", "detached", "several", "dropped")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*QUIET, "raises", "closed", "unproven", "forks", "works"])
def test_every_way_to_end_writes_what_is_queued(ends: dict[str, dict[str, Any]], name: str) -> None:
    found = ends[name]
    assert found["status"] == STATUS.get(name, 0), found["stderr"]
    assert set(found["pages"].values()) == {PAGES}, found
    assert len(found["pages"]) == (3 if name == "several" else 1)
    assert "flowkv:" not in found["stderr"]
    assert ("of the user's own" in found["stderr"]) == (name == "raises")
    if name in QUIET:
        assert not found["stderr"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "pages"), [("nothing", 0), ("locked", 0), ("out_of_time", 0), ("hangs", PAGES)]
)
def test_what_is_not_written_in_time_is_counted_in_one_line(
    ends: dict[str, dict[str, Any]], name: str, pages: int
) -> None:
    found = ends[name]
    assert found["status"] == 0 and found["pages"] == {"kv": pages}
    (line,) = found["stderr"].splitlines()
    assert line.startswith(f"flowkv: {PAGES} pages were not written by the end")
    assert "kv.close()" in line and "exit_s" in line
    assert found["seconds"] < 30


def test_exit_s_is_a_time() -> None:
    with pytest.raises(ConfigError, match="exit_s"):
        make_kv(simple(), exit_s=-1.0)
    with pytest.raises(ConfigError, match="exit_s"):
        make_kv(simple(), exit_s=float("inf"))


def parts(kv: KV) -> list[weakref.ref[Any]]:
    store = kv.planner.store
    return [weakref.ref(one) for one in (kv, store, *store.pools.values(), store.index)]


def alive(refs: list[weakref.ref[Any]]) -> list[Any]:
    gc.collect()
    return [type(found).__name__ for one in refs if (found := one()) is not None]


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("tiers", [[], ["host:1MiB"], "disk"], ids=["none", "host", "disk"])
def test_a_cache_goes_with_its_pools(tmp_path: Path, tiers: Any, close: bool) -> None:
    kv = make_kv(simple(), tiers=[f"disk:{tmp_path}:4MiB"] if tiers == "disk" else tiers)
    published(kv, list(range(40)))
    left = parts(kv)
    if close:
        kv.close()
        assert not stack._ENDINGS or all(one.kv is not kv for one in stack._ENDINGS)
    del kv
    gc.collect()
    REAPER.join(30.0)
    assert not alive(left)


def test_the_interpreter_waits_for_what_ends_a_cache() -> None:
    """A thread that works with tensors at the interpreter's end aborts the process."""
    program = """
from tests.inside import REAPER
import torch

def work():
    rows = torch.zeros(1 << 16)
    for _ in rows:
        rows[1:]
    print("done", flush=True)

REAPER.start()
REAPER.put(work)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def writable(kv: KV) -> bool:
    (tier,) = kv.stats()["tiers"].values()
    return bool(tier["writable"])


def open_at(path: Path, **options: Any) -> KV:
    return make_kv(simple(), disk=f"{path}:4MiB", **options)


def test_a_directory_of_garbage_is_taken_over(tmp_path: Path) -> None:
    kv = open_at(tmp_path)
    kv.own_cycle = kv
    published(kv, list(range(40)))
    del kv  # and no collection
    with open_at(tmp_path) as heir:
        assert writable(heir)
        assert opened(heir, [*range(40), 1]).reused == 40


@pytest.mark.parametrize("gone", ["model", "detached"])
def test_a_directory_of_a_cache_that_is_over_is_taken_over(tmp_path: Path, gone: str) -> None:
    class Model:
        pass

    model, kv = Model(), open_at(tmp_path)
    follow(kv, model=weakref.ref(model))
    published(kv, list(range(40)))
    if gone == "model":
        del model
    else:
        kv.detach()
    with open_at(tmp_path) as heir:
        assert writable(heir) and not writable(kv)
        assert opened(heir, [*range(40), 1]).reused == 40
        published(kv, list(range(100, 140)))  # it goes on, as a reader
        published(heir, list(range(200, 240)))
        assert heir.flush() and kv.flush()
    assert writable(kv) or opened(kv, [*range(40), 1]).reused == 40
    kv.close()


def test_a_cache_in_use_keeps_its_directory_and_the_warning_is_true(tmp_path: Path) -> None:
    class Model:
        pass

    model, kv = Model(), open_at(tmp_path, namespace="first-of-all")
    follow(kv, model=weakref.ref(model))
    truth = r"another cache of this process \(of first-of-all.*\) owns .* until the other one is"
    with pytest.warns(UserWarning, match=truth):
        reader = open_at(tmp_path)
    assert writable(kv) and not writable(reader)
    with pytest.raises(Exception, match="another cache of this process"):
        open_at(tmp_path, exclusive=True)
    kv.close()
    published(reader, list(range(40)))
    assert opened(reader, [*range(40), 1]).reused == 40 and writable(reader)  # the remedy works
    reader.close()


def failing(reason: str) -> Deferred:
    """A disk that answers no store before it is told to, and then with a reason."""
    return Deferred(lasting(capacity_bytes=1 << 20))


@pytest.mark.parametrize("reason", ["ENOSPC", "EDQUOT", "EFBIG", "EIO"])
def test_a_disk_that_cannot_store_is_said_once_and_counted(reason: str) -> None:
    tier = failing(reason)
    kv = make_kv(simple(), tiers=[tier])
    assert kv.flush()
    with pytest.warns(UserWarning, match=f"lasting stores no page now .{reason}: ") as said:
        for first in (0, 100):
            published(kv, list(range(first, first + 40)))
            tier.work(reason)
            assert not kv.flush()
    assert len(said) == 1
    assert kv.stats()["tiers"]["lasting"]["dropped"] == 10
    assert kv.flush()  # nothing more was lost
    published(kv, list(range(200, 240)))
    tier.work()
    assert kv.flush()
    kv.close()


@pytest.mark.parametrize("change", [shutil.rmtree, lambda path: path.rename(f"{path}-moved")])
def test_a_directory_that_is_gone_is_said(change: Callable[[Path], Any], tmp_path: Path) -> None:
    kv = make_kv(simple(), tiers=[f"disk:{tmp_path / 'kv'}:64MiB"], namespace="model")
    published(kv, list(range(40)))
    assert kv.flush()
    change(tmp_path / "kv")
    with pytest.warns(UserWarning, match="kv stores no page now .its directory was moved or re"):
        published(kv, list(range(100, 140)))
        kv.flush()
    assert opened(kv, [*range(100, 140), 1]).reused == 40
    kv.close()


def test_a_directory_in_the_place_of_another_is_stored_to(tmp_path: Path) -> None:
    there, other = (
        make_kv(simple(), tiers=[f"disk:{tmp_path / name}:64MiB"], namespace="model")
        for name in ("kv", "other")
    )
    published(other, list(range(40)))
    other.close()
    (tmp_path / "kv").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "other", tmp_path / "kv")
    for first in (100, 200, 300):
        published(there, list(range(first, first + 40)))
        there.flush()
    there.close()
    with make_kv(simple(), tiers=[f"disk:{tmp_path / 'kv'}:64MiB"], namespace="model") as kv:
        assert kv.explain([*range(300, 340), 1]).known == kv.explain([*range(40), 1]).known == 40


@pytest.mark.parametrize("reason", ["cancelled", "busy", "deadline"])
def test_what_passes_is_not_warned_of(reason: str) -> None:
    tier = failing(reason)
    kv = make_kv(simple(), tiers=[tier])
    published(kv, list(range(40)))
    tier.work(reason)
    assert kv.flush() == (reason == "cancelled")
    kv.close()


def test_a_page_that_left_its_device_meanwhile_is_counted_too() -> None:
    tier = failing("EIO")
    kv = make_kv(simple(), tiers=[tier])
    published(kv, list(range(40)))
    evict_all(kv)  # the tier has the bodies, and nothing else has
    tier.work("EIO")
    with pytest.warns(UserWarning, match="EIO"):
        assert not kv.flush()
    assert kv.stats()["tiers"]["lasting"]["dropped"] == 5
    kv.close()


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.tiers.io.engine.FileIO.free_bytes", lambda self, path: 4096)


def test_a_tier_that_can_store_nothing_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = simple(head_dim=256, page_size=256)
    for place in ("host:100KiB", f"disk:{tmp_path / 'small'}:400KiB"):
        with pytest.warns(UserWarning, match="can store no page of this model: a frame takes"):
            make_kv(large, tiers=[place], pages=4).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kv = open_at(tmp_path / "kv")
        published(kv, list(range(40)))
        kv.close()
    full_disk(monkeypatch)
    open_at(tmp_path / "kv").close()  # what lies there may give way
    with pytest.warns(UserWarning, match="and the disk has 4KiB left"):
        open_at(tmp_path / "other").close()


def test_used_bytes_are_those_of_frames(tmp_path: Path) -> None:
    with make_kv(simple(), disk=f"{tmp_path}:1GiB") as kv:
        (empty,) = kv.stats()["tiers"].values()
        assert empty["used_bytes"] == 0
        published(kv, list(range(40)))
        assert kv.flush()
        (found,) = kv.stats()["tiers"].values()
        tier = kv.planner.store.stack.tiers[0]
        assert 5 * 8192 <= found["used_bytes"] <= 5 * tier.frame_bytes(4096)
        assert found["capacity_bytes"] == 1 << 30


def test_a_hung_tier_does_not_hold_up_the_collector() -> None:
    kv = make_kv(simple(), tiers=[Hung(lasting(capacity_bytes=1 << 20))], exit_s=0.0)
    published(kv, list(range(40)))
    left = parts(kv)
    del kv
    gc.collect()
    REAPER.join(30.0)
    assert not alive(left)


def test_a_tier_that_was_passed_as_an_object_outlives_a_dropped_cache() -> None:
    tier, closed = lasting(), list[str]()
    tier.close = lambda: closed.append("closed")
    kv = make_kv(simple(), tiers=[tier])
    published(kv, range(24))
    del kv
    gc.collect()
    REAPER.join(10.0)
    assert not closed and len(list(tier.scan())) > 0
    kv = make_kv(simple(), tiers=[tier])
    kv.close()
    assert closed


@pytest.mark.parametrize("way", ["close", "drop", "bind"])
@pytest.mark.parametrize("works", [True, False])
def test_a_tier_that_rests_is_tried_once_more_at_the_end(
    works: bool, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = failing("breaker")
    tier.close = lambda: None
    kv = make_kv(simple(), tiers=[tier])
    published(kv, range(40))
    tier.work("breaker")
    (lane,) = kv.planner.store.stack.mover.lanes
    assert not kv.flush() and lane.rests and kv.planner.store.writes.unsaved == 5
    lane.rest(60.0)
    if not works:
        tier.work = lambda reason="": Deferred.work(tier, "breaker")
    if way == "bind":
        bind(kv, simple(layers=2), Namespace(model="other"))
    elif way == "close":
        kv.close()
    del kv
    gc.collect()
    REAPER.join(30.0)
    said = capsys.readouterr().err
    assert len(tier.frames) == (5 if works else 0)
    assert said == "" if works else said.startswith("flowkv: 5 pages were not written by the end")
    assert said.count("\n") == (not works)


def test_what_a_close_loses_is_counted_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tier = failing("EIO")
    kv = make_kv(simple(), tiers=[tier])
    published(kv, range(40))
    tier.work("busy")
    assert not kv.flush() and kv.planner.store.stack.lost == 5
    published(kv, range(100, 124))
    tier.work("busy")
    kv.close()
    assert capsys.readouterr().err.startswith("flowkv: 3 pages were not written by the end")
