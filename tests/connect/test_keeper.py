"""The keeper: who asked is answered, what is believed in stays, and the rest makes room."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flowkv import Lease, Tier
from flowkv.connect import Caller, Keeper, open_keeper
from flowkv.policy import Policy, make_policy
from flowkv.testing import FlakyTier, check_tier
from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.clock import together, wait_for, without_threads
from tests.connect.far import FarTier
from tests.inside import (
    HOLD_S,
    Bus,
    ConfigError,
    Erased,
    ErasureLog,
    Faults,
    HostTier,
    Quarantined,
    Quota,
    StateError,
    StoreError,
    Tenants,
    new_entry,
    realm_name,
    tenant_salt,
)
from tests.tiers.frames import (
    LAYOUT,
    answers,
    body_of,
    get,
    hits,
    info_of,
    key_of,
    outcomes,
    put,
    stored,
)
from tests.tiers.wraps import bfloat16

SIZE = 8192
FRAME = HostTier(1 << 20).frame_bytes(SIZE)


def lru(kind: str, capacity_bytes: int) -> Policy:
    return make_policy("lru")


def host(frames: int, name: str = "host", kind: type[HostTier] = HostTier) -> HostTier:
    return kind(frames * FRAME, name=name)


@pytest.fixture
def caller() -> Iterator[Caller]:
    keeper = Keeper([host(8)], lru)
    yield keeper.caller()
    keeper.close()


# ---- the protocol


def kept(*tiers: Callable[[int], Tier]) -> Callable[[int], Tier]:
    return lambda n: Keeper([make(n // len(tiers)) for make in tiers], lru).caller()


def test_a_keeper_is_a_tier() -> None:
    check_tier(kept(HostTier), lossy=True)


def test_a_stack_is_a_tier(tmp_path: Path) -> None:
    numbers = itertools.count()
    check_tier(
        kept(HostTier, lambda n: DiskTier(tmp_path / str(next(numbers)), n)),
        reopen=None,
        lossy=True,
        capacity_bytes=8 << 20,
    )


def test_what_is_listed_is_what_a_load_finds() -> None:
    """Of a key that lies on two tiers, which others may have described otherwise."""
    near, far = host(8), host(8, "far", FarTier)
    stored(far, ["a", "b"], tokens=32)
    stored(near, ["a"], tokens=64)
    keeper = Keeper([near, far], lru)
    caller = keeper.caller()
    listed = {entry.key: entry.info for entry in caller.scan()}
    assert listed == {answer.key: answer.info for answer in get(caller, ["a", "b"])}
    assert list(listed) == [key_of("a"), key_of("b")]
    keeper.close()


@pytest.mark.parametrize("kind", [HostTier, FarTier])
def test_a_moment_without_threads_is_one_of_misses(kind: type[HostTier]) -> None:
    """The error reached the caller, and the keeper never answered again."""
    keeper = Keeper([host(8, kind=kind)], lru)
    caller = keeper.caller()
    stored(keeper.levels[0].tier, ["b"])
    with without_threads():
        assert outcomes(put(caller, ["a"])) == [("failed", "error")]
        assert outcomes(get(caller, ["b"])) == [("miss", "")]
        assert caller.lookup([key_of("c")], "request") == [False]
    assert outcomes(put(caller, ["a"])) == [("stored", "")]
    assert hits(caller, ["a", "b"]) == 2
    keeper.close()


@pytest.mark.parametrize("names", [[], ["a", "b"]], ids=["unused", "used"])
def test_a_directory_of_a_keeper_that_is_garbage_is_taken_over(
    tmp_path: Path, names: list[str]
) -> None:
    keeper = Keeper([host(8), DiskTier(tmp_path / "kv", 1 << 20)], lru)
    if names:
        stored(keeper.caller(), names)
    threads = [level.pump for level in keeper.levels if level.pump is not None]
    assert bool(threads) == bool(names)
    del keeper  # and no collection
    heir = DiskTier(tmp_path / "kv", 1 << 20, exclusive=True)
    assert heir.contains(list(map(key_of, names))) == [True] * len(names)
    heir.close()
    wait_for(lambda: not any(thread.is_alive() for thread in threads))


def asked() -> threading.Thread:
    """The thread that asks for a keeper, which is gone."""
    keeper = Keeper([host(8, "far", FarTier)], lru)
    caller = keeper.caller()
    wait_for(lambda: lookup(caller, [1]) == [False])
    assert keeper._asker is not None
    return keeper._asker


def test_a_thread_that_asks_ends_with_its_keeper() -> None:
    asker = asked()
    wait_for(lambda: gc.collect() >= 0 and not asker.is_alive())


def test_a_keeper_of_flaky_tiers_never_lies() -> None:
    faults = Faults(fail=0.2, lose=0.1, flip=0.2, latency_s=0.001)
    check_tier(
        kept(
            lambda n: FlakyTier(HostTier(n), 7, faults),
            lambda n: FlakyTier(FarTier(n, name="far"), 8, faults),
        ),
        lossy=True,
    )


# ---- room


def test_a_full_tier_gives_up_what_is_oldest(caller: Caller) -> None:
    for name in range(20):
        stored(caller, [name])
    assert caller.used_bytes() <= caller.capacity_bytes
    assert hits(caller, range(12)) == 0
    assert hits(caller, range(12, 20)) == 8


def test_an_option_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="polcy"):
        open_keeper(f"disk:{tmp_path}:64MiB", polcy="lru")


def test_frames_shrink_on_demand(tmp_path: Path) -> None:
    """On a disk that nobody has loaded from, so that its rate is unknown."""
    size, body, used = 1 << 16, bfloat16("x", 1 << 16), dict[str, int]()
    for lossless in ("on", "off"):
        with open_keeper(f"disk:{tmp_path / lossless}:64MiB", lossless=lossless) as keeper:
            caller = keeper.caller()
            items = [Store(key_of(n), info_of(size), memoryview(body)) for n in range(100)]
            done = answers(caller, caller.submit_store(items), len(items))
            assert all(one.outcome is Outcome.STORED for one in done)
            used[lossless] = caller.used_bytes()
            target = bytearray(size)
            load = caller.submit_load([Load(key_of(1), memoryview(target), LAYOUT)])
            assert answers(caller, load, 1)[0].outcome is Outcome.HIT
            assert target == body
    assert used["on"] < 0.8 * used["off"]


def test_a_far_tier_whose_client_fails_has_nothing() -> None:
    class BrokenTier(FarTier):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            raise ValueError("a client's own")

    keeper = Keeper([host(8, "far", BrokenTier)], lru)
    caller = keeper.caller()
    for request in ("r", "s"):
        wait_for(lambda request=request: lookup(caller, [1], request) == [False])  # type: ignore[misc]
    keeper.close()


def test_long_loads_are_declined_until_computing_was_measured(caller: Caller) -> None:
    keeper, keys = caller.keeper, [key_of(1)]
    stored(caller, [1])
    (level,) = keeper.levels
    assert keeper.worth(keys, SIZE, 100)  # nothing is known
    level.loads.add(SIZE, 5.0)
    assert not keeper.worth(keys, SIZE, 100)
    keeper.gate.computed(100, 9.0)
    assert keeper.worth(keys, SIZE, 100)
    assert not keeper.worth(keys, SIZE, 10)


def test_what_is_lost_is_told_as_well(tmp_path: Path) -> None:
    disk, gone = DiskTier(tmp_path / "kv", 4 << 20), list[bytes]()
    keeper = Keeper([disk], lru)
    keeper.on_evicted = gone.extend
    caller = keeper.caller()
    stored(caller, range(3))
    for slab in (tmp_path / "kv").glob("slab-*"):
        data = bytearray(slab.read_bytes())
        data[data.find(body_of(1))] ^= 1
        slab.write_bytes(data)
    assert hits(caller, range(3)) == 2
    assert gone == [key_of(1)]
    assert keeper.knows(key_of(0)) and not keeper.knows(key_of(1))
    keeper.close()


def test_late_answers_are_slow_ones() -> None:
    """What a gate learns of a tier that is emulated is what its users wait for."""
    flaky = FlakyTier(host(8), 1, Faults(latency_s=0.2))
    keeper = Keeper([flaky], lru)
    caller = keeper.caller()
    stored(caller, range(4))
    begun = time.monotonic()
    assert hits(caller, range(4)) == 4
    (level,) = keeper.levels
    assert level.loads.bytes_per_s < 1.5 * 4 * SIZE / (time.monotonic() - begun)
    keeper.close()


def test_closing_waits_for_no_question() -> None:
    class SlowTier(FarTier):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            time.sleep(0.3)
            return super().contains(keys)

    keeper = Keeper([host(8, "far", SlowTier)], lru)
    caller = keeper.caller()
    lookup(caller, [1])
    time.sleep(0.1)  # the first is being asked about
    lookup(caller, [2, 3])
    closing = threading.Thread(target=keeper.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_what_was_given_up_is_told_once_it_lies_nowhere() -> None:
    keeper, gone = Keeper([host(2), host(4, "below")], lru), list[bytes]()
    keeper.on_evicted = gone.extend
    caller = keeper.caller()
    for name in range(6):
        stored(caller, [name])
    assert gone == [key_of(0), key_of(1)]
    keeper.close()


def test_what_is_used_stays(caller: Caller) -> None:
    stored(caller, range(8))
    assert hits(caller, [0]) == 1
    caller.touch([key_of(1)])
    stored(caller, range(8, 14))
    assert hits(caller, [0, 1]) == 2


def test_leaves_go_before_what_they_hang_on(caller: Caller) -> None:
    for name in range(8):  # a chain; its root is the oldest
        stored(caller, [name], parent=key_of(name - 1))
    stored(caller, ["other"])
    assert hits(caller, range(7)) == 7
    assert hits(caller, [7]) == 0


def test_more_than_fits_keeps_what_came_first_of_it(caller: Caller) -> None:
    items = [
        Store(key_of(n), info_of(SIZE, parent=key_of(n - 1)), memoryview(body_of(n)))
        for n in range(12)
    ]
    done = answers(caller, caller.submit_store(items), 12)
    assert [one.outcome for one in done] == [Outcome.STORED] * 8 + [Outcome.FAILED] * 4
    assert {one.reason for one in done[8:]} == {"full"}
    assert hits(caller, range(8)) == 8


def test_a_frame_larger_than_the_tier_is_refused(caller: Caller) -> None:
    stored(caller, range(3))
    size = 9 * SIZE
    assert outcomes(put(caller, ["large"], size)) == [("failed", "full")]
    assert hits(caller, range(3)) == 3


def test_a_frame_that_cannot_be_deleted_is_evicted_later() -> None:
    tier = host(4)
    keeper, delete = Keeper([tier], lru), tier.delete
    caller = keeper.caller()
    stored(caller, range(4))
    tier.delete = fails
    assert outcomes(put(caller, ["new"])) == [("failed", "full")]
    assert hits(caller, range(4)) == 4
    tier.delete = delete
    stored(caller, ["new"])
    assert set(keeper.levels[0].book) == {entry.key for entry in tier.scan()}
    keeper.close()


def fails(*_: object, **__: object) -> int:
    raise ValueError("a client's own")


# ---- look-ups


def lookup(caller: Caller, names: Sequence[object], request: object = "r") -> list[bool | None]:
    return caller.lookup([key_of(name) for name in names], request)


def test_what_is_believed_in_stays_until_it_is_released(caller: Caller) -> None:
    stored(caller, range(8))
    assert lookup(caller, range(3)) == [True] * 3
    assert lookup(caller, range(3)) == [True] * 3  # asked again: still one pin
    stored(caller, range(10, 15))
    assert hits(caller, range(3)) == 3
    caller.release("r")
    stored(caller, range(20, 28))
    assert hits(caller, range(3)) == 0


def test_nothing_comes_where_all_is_believed_in_until_nobody_comes_back() -> None:
    clock = HeldClock()
    keeper = Keeper([host(8)], lru, clock=clock)
    caller = keeper.caller()
    stored(caller, range(8))
    lookup(caller, range(8))
    assert outcomes(put(caller, ["new"])) == [("failed", "full")]
    clock.now += round(HOLD_S * 1e9) + 1
    stored(caller, ["new"])
    keeper.close()


class HeldClock:
    now = 1

    def now_ns(self) -> int:
        return self.now


def test_a_failed_load_is_a_miss_for_its_request_alone() -> None:
    keeper = Keeper([FlakyTier(host(8), 1, Faults())], lru)
    caller = keeper.caller()
    stored(caller, [0, 1])
    keeper.levels[0].tier.faults = Faults(fail=1.0)  # type: ignore[attr-defined]
    assert lookup(caller, [0, 1]) == [True, True]
    target = bytearray(SIZE)
    job = caller.submit_load([Load(key_of(0), memoryview(target), LAYOUT)], request="r")
    (answer,) = answers(caller, job, 1)
    assert answer.outcome is Outcome.FAILED
    assert lookup(caller, [0, 1]) == [False, True]
    assert lookup(caller, [0], "other") == [True]
    caller.release("r")
    assert lookup(caller, [0]) == [True]
    keeper.close()


def test_a_far_tier_is_asked_without_waiting() -> None:
    far = host(8, "far", FarTier)
    stored(far, ["theirs"])
    keeper = Keeper([host(4), far], lru)
    keeper.levels[1].book.remove([key_of("theirs")])  # as if others had stored it since
    caller = keeper.caller()
    assert lookup(caller, ["theirs", "nobody's"]) == [None, None]
    wait_for(lambda: lookup(caller, ["theirs", "nobody's"]) == [True, False])
    assert hits(caller, ["theirs"]) == 1
    keeper.close()


# ---- stacks


def test_what_one_tier_lost_comes_from_the_next_and_comes_back() -> None:
    near, far = host(4, "near"), host(16, "far")
    keeper = Keeper([near, far], lru)
    caller = keeper.caller()
    stored(caller, range(10))
    assert (sum(near.contains([key_of(n) for n in range(10)])), len(list(far.scan()))) == (4, 10)
    assert hits(caller, [0]) == 1
    wait_for(lambda: near.contains([key_of(0)])[0])
    far.delete([key_of(0)])
    assert hits(caller, [0]) == 1
    keeper.close()


def test_damage_is_healed_from_the_next_tier(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "kv", 4 << 20)
    seen: list[object] = []
    bus = Bus()
    bus.subscribe(seen.append, Quarantined)
    keeper = Keeper([disk, host(16, "far")], lru, bus=bus)
    caller = keeper.caller()
    stored(caller, range(4))
    for slab in (tmp_path / "kv").glob("slab-*"):
        data = bytearray(slab.read_bytes())
        for name in range(4):
            at = data.find(body_of(name))
            data[at] ^= 1
        slab.write_bytes(data)
    assert hits(caller, range(4)) == 4
    assert len(seen) == 4
    keeper.close()


def test_a_reader_of_a_directory_finds_what_its_owner_stores(tmp_path: Path) -> None:
    owner = Keeper([DiskTier(tmp_path / "kv", 4 << 20)], lru)
    with pytest.warns(UserWarning, match="another cache of this process"):
        reader = Keeper([DiskTier(tmp_path / "kv", 4 << 20)], lru)
    stored(owner.caller(), ["a"])
    theirs = reader.caller()
    assert hits(theirs, ["a"]) == 1
    assert not theirs.writable
    assert outcomes(put(theirs, ["b"])) == [("failed", "read-only")]
    reader.close()
    owner.close()


# ---- what was erased


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Caller, Caller]]:
    """The owner of a directory, and who reads it with memory of its own."""
    owner = Keeper([host(32, "theirs"), DiskTier(tmp_path / "kv", 4 << 20)], lru)
    with pytest.warns(UserWarning, match="another cache of this process"):
        reader = Keeper([host(32), DiskTier(tmp_path / "kv", 4 << 20)], lru)
    yield owner.caller(), reader.caller()
    reader.close()
    owner.close()


def in_memory(caller: Caller, names: Sequence[object]) -> list[bool]:
    return caller.keeper.levels[0].tier.contains([key_of(name) for name in names])


def chained(caller: Caller, names: Sequence[int]) -> None:
    for name in names:
        stored(caller, [name], parent=key_of(name - 1) if name else bytes(32))


def test_a_tier_that_raises_on_a_copy_back_stops_no_other() -> None:
    near, far = host(4, "near"), host(4, "far")
    keeper = Keeper([near, far], lru)
    caller = keeper.caller()
    stored(far, range(3))
    near.submit_store = fails
    for _ in range(2):
        assert hits(caller, range(3)) == 3
    assert all(level.pump is None or level.pump.is_alive() for level in keeper.levels)
    assert not keeper.levels[0].book and not keeper.levels[0].incoming_bytes
    assert outcomes(put(caller, ["new"]))[0][0] == "stored"
    keeper.close()


def test_an_engine_that_raises_on_evicted_frames_stops_no_load() -> None:
    keeper = Keeper([host(4, "near")], lru)
    keeper.on_evicted = fails
    caller = keeper.caller()
    for first in (0, 4, 8):
        stored(caller, range(first, first + 4))
    assert hits(caller, range(8, 12)) == 4
    (level,) = keeper.levels
    assert level.pump is not None and level.pump.is_alive()
    keeper.close()


def test_what_one_keeper_erased_no_other_has(two: tuple[Caller, Caller]) -> None:
    owner, reader = two
    chained(owner, range(6))
    assert hits(reader, range(6)) == 6
    wait_for(lambda: all(in_memory(reader, range(6))))
    assert owner.erase([key_of(3)]) == 1
    keys = [key_of(name) for name in range(6)]
    assert reader.lookup(keys, "r") == [True] * 3 + [False] + [True] * 2
    assert in_memory(reader, range(6)) == [True] * 3 + [False] * 3  # with what continues it
    assert hits(reader, range(6)) == 5
    chained(owner, [3])  # computed anew
    assert hits(reader, range(6)) == 6


def test_a_tier_that_cannot_erase_keeps_no_other_from_it(tmp_path: Path) -> None:
    """The tiers behind it once kept the frames, and other keepers did not hear of it."""

    class Stubborn(HostTier):
        def erase(self, keys: Sequence[bytes]) -> int:
            raise StoreError(f"{self.name} is stubborn", "Mend it")

    path = tmp_path / "kv"
    owner = Keeper([host(8, kind=Stubborn), DiskTier(path, 4 << 20)], lru)
    with pytest.warns(UserWarning, match="owns"):
        reader = Keeper([host(8), DiskTier(path, 4 << 20)], lru)
    chained(owner.caller(), range(3))
    assert hits(reader.caller(), range(3)) == 3
    wait_for(lambda: all(in_memory(reader.caller(), range(3))))
    for _ in range(2):
        with pytest.raises(StoreError, match="host is stubborn"):
            owner.caller().erase([key_of(n) for n in range(3)])
        assert owner.levels[1].tier.contains([key_of(n) for n in range(3)]) == [False] * 3
        assert hits(reader.caller(), range(3)) == 0
    reader.close()
    owner.close()


def test_a_tenant_that_was_erased_leaves_every_tier(two: tuple[Caller, Caller]) -> None:
    owner, reader = two
    stored(owner, ["a"], tenant=key_of("alice"))
    stored(owner, ["b"], tenant=key_of("bob"))
    assert hits(reader, ["a", "b"]) == 2
    wait_for(lambda: all(in_memory(reader, ["a", "b"])))
    log = ErasureLog(owner.keeper.levels[1].tier.erasure_log)
    with log.erasing():
        log.publish(new_entry(realms=[realm_name(key_of("alice"), None)]))
    assert in_memory(reader, ["a", "b"]) == [True, True]
    assert reader.contains([key_of("a"), key_of("b")])[0] is True  # the directory was not erased
    assert in_memory(reader, ["a", "b"]) == [False, True]
    log.close()


@pytest.mark.parametrize("proven", [True, False])
def test_an_owner_erases_what_a_reader_could_not(two: tuple[Caller, Caller], proven: bool) -> None:
    owner, _ = two
    stored(owner, ["a"])
    log = ErasureLog(owner.keeper.levels[1].tier.erasure_log)
    with log.erasing():
        log.publish(new_entry([key_of("a")], proven=proven))
    assert owner.lookup([key_of("a")], "r") == [False]
    assert hits(owner, ["a"]) == 0
    log.close()


def test_what_was_under_way_when_it_was_erased_does_not_come_back(tmp_path: Path) -> None:
    """Of a load the copy for faster tiers, and of a store all."""
    with Keeper([DiskTier(tmp_path / "kv", 4 << 20)], lru) as other:
        stored(other.caller(), ["a"])
    disk, held, go = DiskTier(tmp_path / "kv", 4 << 20), threading.Event(), threading.Event()
    take = disk.poll

    def poll(timeout_s: float = 0.0) -> list[object]:
        if found := take(timeout_s):
            held.set()
            go.wait(60)
        return found

    disk.poll = poll
    keeper = Keeper([host(32), disk], lru)
    caller, target = keeper.caller(), bytearray(SIZE)
    job = caller.submit_load([Load(key_of("a"), memoryview(target), LAYOUT)])
    assert held.wait(60)
    log = ErasureLog(disk.erasure_log)
    with log.erasing():
        log.publish(new_entry([key_of("a")], proven=False))
    assert caller.lookup([key_of("a")], "r") == [False]
    go.set()
    (answer,) = answers(caller, job, 1)
    assert answer.outcome is Outcome.HIT  # it was asked for before
    go.clear()
    held.clear()
    stores = caller.submit_store([Store(key_of("b"), info_of(SIZE), memoryview(body_of("b")))])
    assert held.wait(60)
    erase, disk.erase = disk.erase, lambda keys: 0  # it comes after that
    assert caller.erase([key_of("b")]) == 1
    disk.erase = erase
    go.set()
    answers(caller, stores, 1)
    wait_for(lambda: not any(level.flights for level in keeper.levels))
    assert hits(caller, ["a", "b"]) == 0
    assert list(caller.scan()) == []
    log.close()
    keeper.close()


def test_nothing_is_stored_by_who_does_not_know_what_was_erased(
    two: tuple[Caller, Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = two
    log = ErasureLog(owner.keeper.levels[1].tier.erasure_log)
    monkeypatch.setattr(owner.keeper, "_hear", lambda: None)  # it comes just afterwards
    with log.erasing():
        put(owner, ["a"])
        log.publish(new_entry([key_of("a")]))
    put(owner, ["a"])
    log.close()
    assert owner.keeper.levels[1].tier.contains([key_of("a")]) == [False]
    assert owner.keeper.counts == {"stored": 2}  # in memory
    monkeypatch.undo()
    assert owner.contains([key_of("a")]) == [False]
    stored(owner, ["a"])
    assert owner.keeper.levels[1].tier.contains([key_of("a")]) == [True]


def test_who_cannot_look_at_once_finds_nothing_until_it_has() -> None:
    go, far = threading.Event(), FarTier(1 << 20, name="far")
    look = far.scan

    def scan() -> Iterator[object]:
        go.wait(60)
        return look()

    keeper = Keeper([far], lru)
    caller = keeper.caller()
    stored(caller, ["a", "b"])
    far.scan = scan
    keeper.logs[0] = Told(Erased(keys=frozenset({key_of("a")[:8]}), proven=False))
    assert hits(caller, ["a", "b"]) == 0
    assert caller.lookup([key_of("a"), key_of("b")], None) == [False, False]
    assert caller.contains([key_of("a"), key_of("b")]) == [False, False]
    go.set()
    wait_for(lambda: not keeper.levels[0].sweeps)
    assert (hits(caller, ["a"]), hits(caller, ["b"])) == (0, 1)
    keeper.close()


class Told:
    """A log with one piece of news."""

    path = Path("far")

    def __init__(self, news: Erased) -> None:
        self._news = [news]

    def changed(self) -> bool:
        return bool(self._news)

    def news(self) -> Erased:
        return self._news.pop()

    def storing(self) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def close(self) -> None:
        pass


# ---- restarts


def test_a_restart_knows_what_there_is_and_makes_room(tmp_path: Path) -> None:
    place = f"disk:{tmp_path}/kv:2MiB"
    with open_keeper(place, policy="lru") as keeper:
        for name in range(40):
            stored(keeper.caller(), [name], parent=key_of(name - 1) if name % 4 else bytes(32))
    with open_keeper(place, policy="lru") as keeper:
        caller = keeper.caller()
        (level,) = keeper.levels
        assert set(level.book) == {entry.key for entry in level.tier.scan()}
        assert hits(caller, range(40)) == 40
        for name in range(40, 400):
            stored(caller, [name])
        assert caller.used_bytes() <= caller.capacity_bytes
        assert set(level.book) == {entry.key for entry in level.tier.scan()}
        assert hits(caller, range(390, 400)) == 10


def test_places_are_opened_as_they_are_written(tmp_path: Path) -> None:
    with open_keeper("host:1MiB", f"disk:{tmp_path}/kv:4MiB", quotas={"a": "256KiB"}) as keeper:
        assert [level.tier.kind for level in keeper.levels] == ["host", "disk"]
        caller = keeper.caller()
        for name in range(100):
            stored(caller, [name], tenant=tenant_salt("a"))
        for level in keeper.levels:
            assert 0 < sum(one.n_bytes for one in level.tier.scan()) <= 256 << 10
        stored(caller, range(100, 150), tenant=tenant_salt("b"))
        assert hits(caller, range(100, 150)) == 50
        assert keeper.report()["tiers"]["host"]["frames"] > 0
    with pytest.raises(StateError, match="closed"):
        caller.submit_load([])
    with pytest.raises(ConfigError):
        open_keeper("nowhere")
    with pytest.raises(ConfigError):
        Keeper([], lru)
    with pytest.raises(ConfigError):
        Keeper([host(1), host(2)], lru)


# ---- callers


def test_answers_go_to_who_asked() -> None:
    keeper = Keeper([host(64)], lru)
    wrong: list[object] = []

    def work(number: int) -> None:
        caller = keeper.caller()
        for turn in range(20):
            names = [(number, turn, i) for i in range(3)]
            job = caller.submit_store(
                [Store(key_of(n), info_of(SIZE), memoryview(body_of(n))) for n in names]
            )
            for answer in answers(caller, job, 3):
                if answer.key not in {key_of(n) for n in names}:
                    wrong.append(answer)
            get(caller, names)

    together(*(partial(work, n) for n in range(4)))
    assert not wrong
    assert keeper.counts["stored"] == 4 * 20 * 3
    keeper.close()


def test_closing_answers_what_is_under_way() -> None:
    keeper = Keeper([FlakyTier(host(8), 1, Faults(latency_s=0.2))], lru)
    caller = keeper.caller()
    body = memoryview(body_of(0))
    job = caller.submit_store([Store(key_of(0), info_of(SIZE), body)])
    keeper.close()
    assert len(answers(caller, job, 1)) == 1


# ---- everything at once

NAMES = st.integers(0, 15)
FRAMES = 6
LIMIT = 3
TENANTS = ("limited", "free")


class KeeperMachine(RuleBasedStateMachine):
    """Two callers, two requests each, a tenant with a limit, two tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers = [host(FRAMES, "near"), host(2 * FRAMES, "wide")]
        quota = {0: Quota(0, LIMIT * FRAME)}
        self.keeper = Keeper(
            self.tiers,
            lambda kind, n: Tenants(lambda: make_policy("lru"), quota),
            tenants=[tenant_salt("limited")],
        )
        self.callers = [self.keeper.caller() for _ in range(2)]
        self.believed: dict[tuple[int, int], set[int]] = {}
        self.owed: list[dict[tuple[int, int], bytes]] = [{}, {}]

    def owner(self, name: int) -> str:
        return TENANTS[name % 2]

    @rule(who=st.integers(0, 1), names=st.lists(NAMES, min_size=1, max_size=9))
    def store(self, who: int, names: list[int]) -> None:
        items = [
            Store(
                key_of(name),
                info_of(SIZE, tenant=tenant_salt(self.owner(name)), parent=key_of(name - 2)),
                memoryview(body_of(name)),
            )
            for name in names
        ]
        self.submitted(who, self.callers[who].submit_store(items), names)

    @rule(who=st.integers(0, 1), names=st.lists(NAMES, min_size=1, max_size=4))
    def load(self, who: int, names: list[int]) -> None:
        self.settle()
        surely = set().union(set(), *self.believed.values())
        for name, answer in zip(names, get(self.callers[who], names), strict=True):
            assert answer.outcome is Outcome.HIT or name not in surely

    @rule(who=st.integers(0, 1), request=st.integers(0, 1), names=st.lists(NAMES, max_size=3))
    def lookup(self, who: int, request: int, names: list[int]) -> None:
        self.settle()
        said = self.callers[who].lookup([key_of(name) for name in names], request)
        found = {name for name, there in zip(names, said, strict=True) if there}
        self.believed.setdefault((who, request), set()).update(found)

    @rule(who=st.integers(0, 1), request=st.integers(0, 1))
    def release(self, who: int, request: int) -> None:
        self.callers[who].release(request)
        self.believed.pop((who, request), None)

    @rule(name=NAMES)
    def delete(self, name: int) -> None:
        self.settle()
        self.callers[0].delete([key_of(name)])
        for names in self.believed.values():
            names.discard(name)
        assert not self.callers[1].contains([key_of(name)])[0]

    @rule()
    def settle(self) -> None:
        end = time.monotonic() + 60
        while any(self.owed):
            assert time.monotonic() < end, self.owed
            for caller, owed in zip(self.callers, self.owed, strict=True):
                for answer in caller.poll(0.001):
                    assert owed.pop((answer.job, answer.item)) == answer.key
                    assert answer.outcome is Outcome.STORED or answer.reason == "full"

    def submitted(self, who: int, job: int, names: list[int]) -> None:
        self.owed[who].update({(job, i): key_of(name) for i, name in enumerate(names)})

    @invariant()
    def nothing_is_too_full(self) -> None:
        assert all(tier.used_bytes() <= tier.capacity_bytes for tier in self.tiers)
        salt = tenant_salt("limited")
        for tier in self.tiers:
            limited = [entry for entry in tier.scan() if entry.info.tenant == salt]
            assert sum(entry.n_bytes for entry in limited) <= LIMIT * FRAME

    @precondition(lambda self: not any(self.owed))
    @invariant()
    def the_book_says_what_is_there(self) -> None:
        wait_for(lambda: not self.under_way())
        for level in self.keeper.levels:
            assert set(level.book) == {entry.key for entry in level.tier.scan()}
            assert not level.incoming_bytes
            assert not +level.storing

    def under_way(self) -> bool:
        """Something comes back into the faster tier, which nobody waits for."""
        with self.keeper._lock:
            return any(level.flights for level in self.keeper.levels)

    def teardown(self) -> None:
        self.settle()
        assert all(not caller.poll() for caller in self.callers), "an answer came twice"
        self.keeper.close()


def test_everything_at_once() -> None:
    run_state_machine_as_test(KeeperMachine, settings=settings(stateful_step_count=30))


def test_leases_hold_in_every_tier_that_gets_the_frame() -> None:
    """Also in a faster one that a load copies it back to; absent frames are no mistake."""
    near, far = host(6, "near"), host(40, "far")
    keeper = Keeper([near, far], lru)
    caller, asked = keeper.caller(), Lease(rank=80, rank_s=3600.0)
    stored(caller, ["kept", "plain"])
    near.delete([key_of("kept"), key_of("plain")])
    keeper.levels[0].book.remove([key_of("kept"), key_of("plain")])
    for name, leased in (("kept", ["kept", "absent"]), ("plain", [])):
        load = Load(key_of(name), memoryview(bytearray(SIZE)), LAYOUT)
        leases = {key_of(one): asked for one in leased}
        (answer,) = answers(caller, caller.submit_load([load], leases=leases), 1)
        assert answer.outcome is Outcome.HIT
    wait_for(lambda: all(near.contains([key_of("kept"), key_of("plain")])))
    for n in range(12):
        stored(caller, [n])
    assert near.contains([key_of("kept"), key_of("plain")]) == [True, False]
    held = {name: tier["retained_bytes"] for name, tier in keeper.report()["tiers"].items()}
    assert held == {"near": FRAME, "far": FRAME}
    caller.touch([], {key_of(n): asked for n in (10, 11)})
    assert keeper.report()["tiers"]["near"]["retained_bytes"] == 3 * FRAME
    again = Store(key_of(9), info_of(SIZE), memoryview(body_of(9, SIZE)))
    answers(caller, caller.submit_store([again], leases={key_of(9): asked}), 1)
    caller.delete([key_of("kept")])
    assert keeper.report()["tiers"]["near"]["retained_bytes"] == 3 * FRAME
    keeper.close()


@pytest.mark.parametrize("when", ["stored", "touched"])
def test_a_rank_does_not_lengthen_the_time_that_a_place_allows(when: str) -> None:
    """A place with a maximum age, for privacy: a client's hint is about the order alone."""
    near = host(8)
    keeper = Keeper([near], lambda kind, size: make_policy("lru", max_age_s=0.2))
    caller, asked = keeper.caller(), {key_of("kept"): Lease(rank=80)}
    store = Store(key_of("kept"), info_of(SIZE), memoryview(body_of("kept", SIZE)))
    leases = asked if when == "stored" else None
    answers(caller, caller.submit_store([store], leases=leases), 1)
    caller.touch([], asked)
    assert keeper.report()["tiers"]["host"]["retained_bytes"] == FRAME
    time.sleep(0.3)
    caller.touch([], asked)
    stored(caller, ["other"])
    assert near.contains([key_of("kept"), key_of("other")]) == [False, True]
    keeper.close()
