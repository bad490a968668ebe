"""The shared host tier: handles in one process, real processes, kills, stops, damage."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from flowkv import Tier
from flowkv.testing import check_tier
from flowkv.tiers import Load, Store
from flowkv.tiers.shared import SharedTier
from tests.clock import together
from tests.inside import LEAST_BYTES, ConfigError, StateError, StoreError, file_name, table
from tests.inside import tier_plan as plan

from .frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, outcomes, put, stored
from .sharer import CAPACITY_BYTES, audit, start


def run(command: str, directory: Path, *arguments: int) -> dict[str, Any]:
    """What `tests.tiers.sharer` says."""
    line = [sys.executable, "-m", "tests.tiers.sharer", command, str(directory)]
    done = subprocess.run(
        [*line, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=1100
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_is_owed_is_given_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of two threads, or another frame's memory would be free while it is there."""
    tier = start(str(tmp_path))
    used, change = tier.used_bytes(), tier._change
    memory, row, words = tier._memory, np.zeros(8, np.int64), np.frombuffer(key_of("a"), np.int64)
    assert tier._claim(memory, words, 2 * table.GRANULE, row, 1 << 62) == 0
    memory.owed.append(row)

    def meddled(memory: Any, operation: Any, *arguments: Any, **options: Any) -> int:
        if operation is table.withdraw:
            monkeypatch.undo()
            stored(tier, ["b"])  # what another thread does just now
        return change(memory, operation, *arguments, **options)

    monkeypatch.setattr(tier, "_change", meddled)
    stored(tier, ["c"])
    assert tier.delete([key_of("b"), key_of("c")]) == 2 and tier.used_bytes() == used


def dead_row(tier: SharedTier) -> tuple[Any, Any]:
    """A frame that somebody was writing who died: another handle's, and its row."""
    dead, row = start(str(tier._memory.path.parent)), np.zeros(8, np.int64)
    words = np.frombuffer(key_of("dead"), np.int64)
    assert dead._claim(dead._memory, words, 3 * table.GRANULE, row, 1 << 62) == 0
    dead._memory._let_go()
    return dead, row


def test_a_seat_does_not_live_on_in_a_child(tmp_path: Path) -> None:
    tier, other = start(str(tmp_path)), start(str(tmp_path))
    seat = tier._memory.seat
    (read, write), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, b"!")
        os.read(read, 1)
        os._exit(0)
    assert os.read(told, 1)
    try:
        tier.close()
        assert not other._memory._try_seat(seat)  # a thread of the parent may still write
        tier._memory._let_go()  # as with the last who uses it
        assert other._memory._try_seat(seat)
    finally:
        os.write(write, b"!")
        os.waitpid(pid, 0)
        for fd in (read, write, told, tell):
            os.close(fd)
        other.close()


def test_what_two_bury_is_blanked_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one may have freed it meanwhile, and paid what it owed: all frames would go."""
    tier, other = start(str(tmp_path)), start(str(tmp_path))
    stored(tier, ["a"])
    _, row = dead_row(tier)
    put_bytes = SharedTier._put

    def putting(self: SharedTier, memory: Any, *arguments: Any) -> bool:
        if self is tier:
            monkeypatch.undo()
            other._memory.owed.append(row)  # as of a burial whose lock was not to be had
            stored(other, ["b"])
        return put_bytes(self, memory, *arguments)

    monkeypatch.setattr(SharedTier, "_put", putting)
    tier._bury(tier._memory)
    assert tier._memory.sound() and (tier.renewed, other.renewed) == (0, 0)
    assert hits(tier, ["a"]) == 1 and not tier._memory.writing()
    audit(tier)


def test_who_moves_in_leaves_alone_what_is_being_written_there_by_now(tmp_path: Path) -> None:
    tier, row = start(str(tmp_path)), np.zeros(8, np.int64)
    used = tier.used_bytes()
    memory, words = tier._memory, np.frombuffer(key_of("a"), np.int64)
    assert tier._claim(memory, words, 2 * table.GRANULE, row, 1 << 62) == 0
    tier._move_in(memory)  # later than another thread of this handle began to store
    assert tier._change(memory, table.commit, row, words) == 0 and memory.sound()
    tier.delete([key_of("a")])
    dead, _ = dead_row(tier)
    assert dead._memory.seat == 2
    heir = start(str(tmp_path))  # on that seat
    assert heir._memory.seat == 2 and heir.used_bytes() == used


def test_long_looks_for_the_dead_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, looks = start(str(tmp_path)), []
    clock = [1000.0]
    monkeypatch.setattr("flowkv.tiers.shared.time.monotonic", lambda: clock[0])

    def slow(memory: Any) -> bool:
        looks.append(memory)
        clock[0] += 2
        return False

    monkeypatch.setattr(tier, "_bury", slow)
    for later_s in (0, 1.5, 50, 60):
        clock[0] += later_s
        assert ("failed", "full") in outcomes(put(tier, [("x", later_s)], 2 * CAPACITY_BYTES))
        assert len(looks) == (2 if later_s == 60 else 1)
    monkeypatch.undo()


def test_is_a_tier(tmp_path: Path) -> None:
    tier = start(str(tmp_path))
    assert isinstance(tier, Tier)
    assert tier.shared and tier.kind == "host"
    tier.close()


def factories(directory: Path) -> tuple[Callable[[int], Tier], Callable[[Tier], Tier]]:
    numbers = itertools.count()

    def fresh(capacity_bytes: int) -> Tier:
        return SharedTier(f"n{next(numbers)}", capacity_bytes, directory=directory)

    def reopen(tier: Tier) -> Tier:
        assert isinstance(tier, SharedTier)
        tier.close()
        name = tier.name.removeprefix("host:")
        return SharedTier(name, tier.capacity_bytes, directory=directory)

    return fresh, reopen


@pytest.mark.parametrize("capacity_bytes", [LEAST_BYTES, 1 << 20])
def test_conformance(tmp_path: Path, capacity_bytes: int) -> None:
    factory, reopen = factories(tmp_path)
    check_tier(factory, reopen=reopen, capacity_bytes=capacity_bytes)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("put", "delete", "erase", "get", "reopen")),
        st.integers(0, 2),
        st.integers(0, 9),
    ),
    min_size=15,
    max_size=60,
)


@settings(max_examples=20)
@given(steps=STEPS)
def test_several_handles_see_one_truth(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    home, there = str(tmp_path_factory.mktemp("shm")), set[int]()
    handles = [start(home) for _ in range(3)]
    for action, number, name in steps:
        tier, size = handles[number], 3000 + 9000 * (name % 4)
        if action == "put":
            stored(tier, [name], size)
            there.add(name)
        elif action in ("delete", "erase"):
            assert getattr(tier, action)([key_of(name)]) == (name in there)
            there.discard(name)
        elif action == "reopen":
            tier.close()
            handles[number] = start(home)
        for handle in handles:
            assert hits(handle, [name], size) == (name in there)
    audit(handles[0])
    for handle in handles:
        assert {entry.key for entry in handle.scan()} == {key_of(name) for name in there}
        handle.close()


@settings(max_examples=30)
@given(
    slots=st.integers(9, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 15)), min_size=15, max_size=60),
)
def test_the_index_is_a_dict(slots: int, steps: list[tuple[bool, int]]) -> None:
    index, model = np.zeros((slots, 8), np.int64), dict[int, int]()
    for number, (insert, name) in enumerate(steps, 1):
        row = np.array([name, 0, 0, 7, number, 3, 9000, 0], np.int64)  # home: name % slots
        slot = table.find(index, row, True)
        assert (slot >= 0) == (name in model)
        if insert and slot < 0 and len(model) < 8:
            assert table.insert(index, row)
            model[name] = number
        elif not insert and slot >= 0:
            table.remove(index, slot)
            del model[name]
        for other, stored_as in model.items():
            found = table.find(index, np.array([other, 0, 0, 7], np.int64), True)
            assert found >= 0 and index[found, 4] == stored_as
            assert index[found, 7] == table.check_of(index[found])
        assert np.count_nonzero(index[:, 4]) == len(model)


# ---- real processes


def test_two_processes_exchange_frames(tmp_path: Path) -> None:
    found = run("exchange", tmp_path, 600)
    assert found["mine"] > 50 and found["theirs"] > 50
    assert found["corrupt"] == 0


def test_a_killed_peer(tmp_path: Path) -> None:
    found = run("kills", tmp_path, 60, 1)
    assert found["checked"] > 100 and found["said"] > 200 and found["renewed"] == 0


def test_a_peer_killed_in_the_middle_of_a_change(tmp_path: Path) -> None:
    found = run("repairs", tmp_path, 24, 2)
    assert found["lost"] == 0
    assert found["repairs"] > 3 and found["renewed"] == 0


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_killed_peers_deep(tmp_path: Path) -> None:
    assert run("kills", tmp_path / "a", 3000, 3)["said"] > 10_000
    assert run("repairs", tmp_path / "b", 3000, 4)["lost"] == 0


def test_a_stopped_peer_hangs_nobody(tmp_path: Path) -> None:
    found = run("stopped", tmp_path)
    assert found["load"] == [["hit", ""]]
    assert found["store"] == [["failed", "busy"]]
    assert found["again"] == [["failed", "busy"]] * 3
    assert found["deleted"] == 0
    assert "locked" in found["erase"]
    assert found["opened"] == 2
    assert found["first_s"] < 5 and found["rest_s"] < 10  # not the deadline of a minute
    assert found["after"] == [["stored", ""]]
    assert found["hits"] == 3


# ---- damage


def hunt(directory: Path, points: int, seed: int) -> None:
    """Damages a memory that peers work on; none may crash, hang, err or load a wrong byte."""
    line = [sys.executable, "-m", "tests.tiers.hunter", str(directory), str(points), str(seed)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["crashed"], found["hung"], found["erred"]) == (0, 0, 0), (found, done.stderr)
    assert found["hits"] > 5 * points  # they did find frames, before and after


def test_random_damage_to_memory_in_use(tmp_path: Path) -> None:
    hunt(tmp_path, 40, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_random_damages_to_memory_in_use(tmp_path: Path) -> None:
    hunt(tmp_path, 1000, 2)


def test_a_table_that_contradicts_itself_is_thrown_away_by_all_once(tmp_path: Path) -> None:
    found = run("leave", tmp_path, 12)
    assert found["seen"] == [["1", "2", "3", "4"]] * 12  # and nothing that was there before
    assert found["renewed"] == 12
    assert found["left"] == [file_name("test")]


PARTS = ("index", "links", "counters")


def scribble(tier: SharedTier, seed: int, where: set[str]) -> None:
    rng = np.random.default_rng(seed)
    counters, index, links = tier._memory.arrays
    arrays = dict(zip(PARTS, (index, links[:60], counters[:10]), strict=True))
    for name in sorted(where):
        flat = arrays[name].reshape(-1)
        spots = rng.integers(0, len(flat), rng.integers(1, 6))
        flat[spots] = rng.integers(-(2**63), 2**63, len(spots)).astype(flat.dtype)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    where=st.sets(st.sampled_from(PARTS), min_size=1),
    torn=st.booleans(),
)
def test_any_damage_is_repaired_or_thrown_away(
    tmp_path_factory: pytest.TempPathFactory, seed: int, where: set[str], torn: bool
) -> None:
    home = str(tmp_path_factory.mktemp("shm"))
    tier, other = start(home), start(home)
    stored(tier, range(8))
    stored(tier, range(8, 14), 40_000)
    tier.delete([key_of(name) for name in (1, 3, 9)])
    scribble(tier, seed, where)
    if torn:  # as a peer leaves it that died in the middle
        tier._memory.arrays[0][table.VERSION] |= 1
    for _ in range(2):
        for handle in (tier, other):
            hits(handle, [*range(8), "new"])
            hits(handle, range(8, 14), 40_000)
            put(handle, ["new"])
            handle.erase([key_of(7)])
            handle.delete([key_of(8)])
    put(tier, range(20, 50), 40_000)  # free granules are looked at when they are taken: all are now
    tier.delete([key_of(name) for name in range(20, 50)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # found damaged only now, by looking at all of it
        third = start(home)
        for handle in (third, tier, other):
            handle._current()
    audit(third)
    for name, handle in enumerate((tier, other, third)):
        stored(handle, [("last", name)])
        assert [hits(each, [("last", name)]) for each in (tier, other, third)] == [1, 1, 1]
    audit(tier)
    for handle in (tier, other, third):
        handle.close()


def test_what_was_under_way_in_a_table_that_is_thrown_away_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, other = start(str(tmp_path)), start(str(tmp_path))
    stored(tier, ["a", "b"])
    copy, put_bytes = SharedTier._copy, SharedTier._put

    def meddle() -> None:
        monkeypatch.undo()
        other._memory.arrays[0][table.USED] += 1
        assert other.delete([key_of("a")]) == 0
        stored(other, ["c"])

    def copying(self: SharedTier, memory: Any, *arguments: Any) -> None:
        meddle()
        memory.arena[:] = 0  # a loser of the race for these bytes
        copy(self, memory, *arguments)

    monkeypatch.setattr(SharedTier, "_copy", copying)
    assert outcomes(get(tier, ["a"])) == [("miss", "")]
    assert hits(tier, ["c"]) == hits(other, ["c"]) == 1 and tier._memory.path.exists()

    def putting(self: SharedTier, *arguments: Any) -> bool:
        meddle()
        return put_bytes(self, *arguments)

    monkeypatch.setattr(SharedTier, "_put", putting)
    tier.delete([key_of("c")])
    assert outcomes(put(tier, ["d"])) == [("failed", "lost")]
    assert (hits(tier, ["c", "d"]), tier.renewed, other.renewed) == (1, 2, 2)
    audit(tier)


def test_without_another_memory_all_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = start(str(tmp_path))
    stored(tier, ["a"])
    tier._memory.condemn()
    path = tier._memory.path
    path.unlink()
    path.mkdir()
    for _ in range(3):
        assert outcomes(get(tier, ["a"])) == [("miss", "")]
        assert outcomes(put(tier, ["a"])) == [("failed", "lost")]
        assert tier.contains([key_of("a")]) == [False] and not list(tier.scan())
        assert tier.delete([key_of("a")]) == tier.erase([key_of("a")]) == 0
        assert 0 < tier.used_bytes() <= tier.capacity_bytes
    assert len(caplog.records) < 5  # it does not try each time
    path.rmdir()
    tier._again_s = 0.0
    stored(tier, ["a"])
    assert hits(tier, ["a"]) == 1


class Guarded:
    """Arrays of a memory, with bytes on either side of each that nobody may write to."""

    def __init__(self, tier: SharedTier) -> None:
        memory = tier._memory
        self.guards: list[Any] = []
        counters, index, links = map(self._guard, memory.arrays)
        memory.arrays, memory.arena = (counters, index, links), self._guard(memory.arena)

    def _guard(self, array: Any) -> Any:
        margin = 1 << 17
        whole = np.full(array.nbytes + 2 * margin, 0xA5, np.uint8)
        self.guards += [whole[:margin], whole[-margin:]]
        inner = whole[margin:-margin].view(array.dtype).reshape(array.shape)
        inner[...] = array
        return inner

    def intact(self) -> bool:
        return all((guard == 0xA5).all() for guard in self.guards)


WILD = st.sampled_from((-(2**62), -70, -1, 0, 1, 5, 60, 200, 260, 300, 2**31, 2**32 - 1, 2**62))


@settings(max_examples=50)
@given(
    lies=st.lists(
        st.tuples(st.sampled_from(("row", "claim", "link", "free", "grown")), WILD, WILD, WILD),
        min_size=1,
        max_size=6,
    ),
    torn=st.booleans(),
)
def test_lies_with_right_checks_lead_nowhere(
    tmp_path_factory: pytest.TempPathFactory, lies: list[tuple[str, int, int, int]], torn: bool
) -> None:
    """Even where every check was made right: no write beyond the arrays, and an end."""
    home = tmp_path_factory.mktemp("shm")
    tier = start(str(home))
    stored(tier, range(6), 20_000)
    tier.delete([key_of(2)])
    (home / file_name("test")).rename(home / "kept")  # where it would go to is another story
    guarded, memory = Guarded(tier), tier._memory
    counters, index, links = memory.arrays
    for what, a, b, c in lies:
        if what == "row":
            row = index[index[:, 4] != 0][abs(a) % 5]
            row[5], row[6] = b, c
            row[7] = table.check_of(row)
            index[(index[:, :4] == row[:4]).all(axis=1)] = row
        elif what == "claim":
            claim = np.array([3, 9, table.WRITING, table.WRITING, abs(a) % 4 + 1, b, c, 0])
            table.insert(index, claim)
        elif what == "link":
            owner = int(index[index[:, 4] != 0][abs(b) % 5, 4]) if b % 2 else 0
            links[abs(a) % 60] = table.seal(abs(a) % 60, c % 2**32, owner)
        elif what == "free":
            counters[table.FREE] = a
        else:
            counters[table.GROWN] = np.uint64(table.seal(0, a % 2**32, -1)).astype(np.int64)
    counters[table.CHECK] = table.check_of(counters)
    counters[table.VERSION] += torn
    for name in range(6):
        get(tier, [name], 20_000)
    put(tier, ["x", "y"], 60_000)
    tier._bury(memory)
    tier.erase([key_of(name) for name in (0, 1)])
    tier.delete([key_of(name) for name in (3, 4, "x")])
    list(tier.scan())
    assert guarded.intact()
    tier.close()


def test_a_flipped_bit_is_a_miss_and_the_frame_is_gone(tmp_path: Path) -> None:
    tier = start(str(tmp_path))
    stored(tier, ["a"])
    for at in (100, 4096 + 5000):  # header, body
        tier._memory.arena[at] ^= 8
        (outcome,) = outcomes(get(tier, ["a"]))
        assert outcome in (("miss", "digest"), ("miss", "foreign"))
        assert outcomes(get(tier, ["a"])) == [("miss", "")]
        audit(tier)
        tier.delete([key_of("a")])
        stored(tier, ["a"])
    assert tier.corrupt == 2


def test_a_frame_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, other = start(str(tmp_path)), start(str(tmp_path))
    stored(tier, ["a"])
    copies, copy = [], SharedTier._copy

    def slow(self: SharedTier, *arguments: Any) -> None:
        if not copies:  # before the first byte is copied, all of it moves
            copies.append(1)
            other.delete([key_of("a")])
            stored(other, ["b", "a"])
        copy(self, *arguments)

    monkeypatch.setattr(SharedTier, "_copy", slow)
    assert hits(tier, ["a"]) == 1
    assert tier.corrupt == 0


def test_stripes(tmp_path: Path) -> None:
    tier, body = start(str(tmp_path)), body_of("s", 5 * 4096)
    stored(tier, ["s"], 5 * 4096, stripe_bytes=4096)
    target = bytearray(2 * 4096)
    wish = Load(key_of("s"), memoryview(target), LAYOUT, 0, 2, 2)
    (answer,) = answers(tier, tier.submit_load([wish]), 1)
    assert answer.n_bytes == 2 * 4096
    assert target == body[2 * 4096 : 4 * 4096]
    tier._memory.arena[4096 + 3 * 4096 + 5] ^= 1  # of the second stripe wished for, and no other
    other = wish._replace(first=0)
    assert outcomes(answers(tier, tier.submit_load([other]), 1)) == [("hit", "")]
    assert outcomes(answers(tier, tier.submit_load([wish]), 1)) == [("miss", "digest")]
    stored(tier, ["s"], 5 * 4096, stripe_bytes=4096)
    beyond = wish._replace(first=4)
    assert outcomes(answers(tier, tier.submit_load([beyond]), 1)) == [("miss", "stripes")]


def test_erased_bytes_are_nowhere(tmp_path: Path) -> None:
    tier = start(str(tmp_path))
    stored(tier, ["secret", "other"])
    assert body_of("secret")[:64] in tier._memory.path.read_bytes()
    assert tier.erase([key_of("secret"), key_of("nobody")]) == 1
    data = tier._memory.path.read_bytes()
    body = body_of("secret")
    assert not any(body[at : at + 64] in data for at in range(0, len(body), 512))
    assert body_of("other") in data


# ---- the file


def test_capacity_is_physical(tmp_path: Path) -> None:
    tier = SharedTier("n", CAPACITY_BYTES, directory=tmp_path)
    done = put(tier, range(200), 4096)
    assert ("failed", "full") in outcomes(done)
    assert tier.used_bytes() <= tier.capacity_bytes <= CAPACITY_BYTES
    status = os.stat(tmp_path / file_name("n"))
    assert max(status.st_size, 512 * status.st_blocks) <= CAPACITY_BYTES + 4096
    assert status.st_mode & 0o777 == 0o600


@given(capacity_bytes=st.integers(LEAST_BYTES, 1 << 42))
def test_plans_use_nearly_all(capacity_bytes: int) -> None:
    made = plan(capacity_bytes)
    assert made.file_bytes <= capacity_bytes
    assert made.granules * 4096 >= 0.97 * capacity_bytes - 20_000
    assert made.slots > made.granules // 2


def test_no_memory_behind_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = start(str(tmp_path))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert outcomes(put(tier, ["a"])) == [("failed", "ENOSPC")]
    monkeypatch.undo()
    stored(tier, ["a"])


def test_it_survives_its_processes_and_keeps_its_size(tmp_path: Path) -> None:
    tier = start(str(tmp_path))
    stored(tier, ["a"])
    tier.close()
    with pytest.warns(UserWarning, match="the size stays"):
        tier = start(str(tmp_path), capacity_bytes=4 * CAPACITY_BYTES)
    assert tier.capacity_bytes <= CAPACITY_BYTES
    assert hits(tier, ["a"]) == 1
    tier.remove()
    assert not list(tmp_path.iterdir())
    tier = start(str(tmp_path))
    assert list(tier.scan()) == []


@pytest.mark.parametrize("at", [0, 8, 16, 24, 40, 60])
def test_another_format_is_an_empty_tier(tmp_path: Path, at: int) -> None:
    tier, path = start(str(tmp_path)), tmp_path / file_name("test")
    stored(tier, ["a"])
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    tier.close()
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh = start(str(tmp_path))
    assert list(fresh.scan()) == []
    stored(fresh, ["b"])


def test_memory_of_another_version_is_left_to_those_who_have_it(tmp_path: Path) -> None:
    old = start(str(tmp_path))
    stored(old, ["a"])
    with (tmp_path / file_name("test")).open("r+b") as file:
        fixed = bytearray(file.read(48))
        fixed[8] ^= 1  # the version
        file.seek(0)
        file.write(fixed + xxhash.xxh3_128_digest(fixed))
    with pytest.warns(UserWarning, match="another format"):
        new = start(str(tmp_path))
    assert list(new.scan()) == [] and hits(old, ["a"]) == 1


def test_the_file_must_be_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / file_name("test")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be used"):
        start(str(tmp_path))
    path.unlink()
    start(str(tmp_path)).close()
    path.chmod(0o644)
    with pytest.raises(StoreError, match="others may open"):
        start(str(tmp_path))
    with pytest.raises(StoreError, match="cannot be used"):
        start(str(tmp_path / "nowhere"))


@given(name=st.text(min_size=1))
def test_names_are_no_paths(name: str) -> None:
    made = file_name(name)
    assert made.startswith(f"flowkv-{os.getuid()}-")
    assert "/" not in made and len(made) < 100 and made.isascii() and made.isprintable()
    assert name == "x" or made != file_name("x")


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least"):
        SharedTier("n", LEAST_BYTES - 1, directory=tmp_path)
    with pytest.raises(ConfigError, match="no name"):
        SharedTier("", LEAST_BYTES, directory=tmp_path)
    tier = start(str(tmp_path))
    tier.close()
    assert tier.contains([key_of("a")]) == [False]
    with pytest.raises(StateError, match="closed"):
        put(tier, ["a"])


def test_odd_keys_are_nobodys(tmp_path: Path) -> None:
    tier = start(str(tmp_path))
    stored(tier, ["a"])
    short = key_of("a")[:31]
    wish = Load(short, memoryview(bytearray(8192)), LAYOUT, 0)
    assert outcomes(answers(tier, tier.submit_load([wish]), 1)) == [("miss", "")]
    assert tier.contains([short]) == [False] and tier.delete([short]) == 0
    assert outcomes(put(tier, ["b"], stripe_bytes=100)) == [("failed", "invalid")]


def test_threads_of_one_handle(tmp_path: Path) -> None:
    tier = start(str(tmp_path), capacity_bytes=CAPACITY_BYTES)

    def work(seed: int) -> None:
        for n in range(60):
            name = (seed * 7 + n) % 20
            info, body = info_of(8192), memoryview(body_of(name))
            tier.submit_store([Store(key_of(name), info, body)])
            target = bytearray(8192)
            tier.submit_load([Load(key_of(name), memoryview(target), LAYOUT, 0)])
            assert not any(target) or target == body
            tier.delete([key_of(name + 1)])

    together(*(partial(work, seed) for seed in range(4)))
    assert len(tier.poll()) == 480
    audit(tier)
