"""What the doors of all engines share: jobs, look-ups, holds, and notices of frames."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.connect import Keeper
from flowkv.policy import make_policy
from flowkv.tiers import Load, Store
from tests.clock import together
from tests.connect.far import stuck_tier
from tests.inside import Announced, Holds, HostTier, Jobs, Lookup
from tests.tiers.frames import LAYOUT, body_of, info_of, key_of, stored

SIZE = 8192
NAMES = [key_of(n) for n in range(4)]


def keeper_of(frames: int = 64) -> Keeper:
    tier = HostTier(frames * HostTier(1 << 20).frame_bytes(SIZE))
    return Keeper([tier], lambda kind, capacity_bytes: make_policy("lru"))


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    with keeper_of() as made:
        yield made


looks = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), looks), max_size=12))
def test_a_found_frame_is_held_until_it_was_released_as_often(
    steps: list[tuple[bool, list[int]]],
) -> None:
    """Frames 0 to 2 are there, and 3 is not: it is never held."""
    with keeper_of() as keeper:
        caller, expected = keeper.caller(), Counter[bytes]()
        stored(caller, range(3))
        holds = Holds(caller, math.inf)
        for looked, numbers in steps:
            names = [NAMES[n] for n in numbers]
            if looked:
                lookup = Lookup(holds, names, 1.0)
                assert lookup.is_over()
                assert lookup.found == [n < 3 for n in numbers]
                expected.update(name for name in names if name != NAMES[3])
            else:
                holds.release_frames(names)
                for name in names:
                    expected[name] = max(0, expected[name] - 1)
            held = {name: n for name, n in expected.items() if n}
            assert {name: count for name, (count, _) in holds.items()} == held
            assert {name for _, name in keeper._holds} == held.keys()
        holds.release_frames(NAMES * 60)
        assert not keeper._holds


def test_a_look_up_releases_its_own_holds_alone(keeper: Keeper) -> None:
    """Another look-up of a frame that is absent yet may be under way."""
    holds = Holds(keeper.caller())
    stored(holds.caller, range(2))
    holds.hold_frames(NAMES[1:4])
    lookup = Lookup(holds, NAMES, 1.0)
    assert lookup.is_over() and lookup.found == [True, True, False, False]
    lookup.release_found(1)
    assert {name: count for name, (count, _) in holds.items()} == dict.fromkeys(NAMES, 1)


def test_a_hold_that_is_not_looked_up_again_ends(keeper: Keeper) -> None:
    caller = keeper.caller()
    stored(caller, range(2))
    holds = Holds(caller, 0.05)
    for n in range(2):
        assert Lookup(holds, [NAMES[n]], 1.0).is_over()
        time.sleep(0.06 * (1 - n))
    assert [*holds] == [name for _, name in keeper._holds] == NAMES[1:2]


def test_a_name_that_is_none_is_absent(keeper: Keeper) -> None:
    lookup = Lookup(Holds(keeper.caller()), [b"", NAMES[0]], 1.0)
    assert lookup.is_over()
    assert lookup.found == [False, False]


def test_a_look_up_waits_for_its_deadline_alone() -> None:
    with Keeper([stuck_tier()], lambda kind, capacity_bytes: make_policy("lru")) as keeper:
        holds = Holds(keeper.caller())
        lookup = Lookup(holds, [NAMES[0]], 0.05)
        assert not lookup.is_over()
        time.sleep(0.06)
        assert lookup.is_over()
        assert lookup.found == [False]
        assert not holds


def test_each_job_of_each_thread_is_finished_once(keeper: Keeper) -> None:
    """Threads start jobs, and whichever polls gets those that are over."""
    jobs, over, lock = Jobs(keeper.caller()), list[tuple[int, int]](), threading.Lock()

    def work(first: int) -> None:
        for n in range(first, first + 20):
            body = body_of(n, SIZE)
            items = [Store(key_of((n, i)), info_of(SIZE), memoryview(body)) for i in range(3)]
            jobs.start_job(items, "abc", n, loads=False)
            done = jobs.finished()
            with lock:
                over.extend((job.number, len(job.sizes)) for job in done)

    together(*(partial(work, 100 * n) for n in range(4)))
    while jobs:
        over.extend((job.number, len(job.sizes)) for job in jobs.finished(0.1))
    assert sorted(over) == [(100 * n + i, 3) for n in range(4) for i in range(20)]


def test_a_job_knows_which_items_were_served(keeper: Keeper) -> None:
    caller = keeper.caller()
    stored(caller, [0, 2])
    jobs, targets = Jobs(caller), [bytearray(SIZE) for _ in range(3)]
    loads = [Load(NAMES[n], memoryview(targets[n]), LAYOUT) for n in range(3)]
    job = jobs.start_job(loads, "abc", 7, loads=True, deadline_s=5.0)
    while jobs:
        jobs.finished(0.1)
    assert (job.number, [job.keys[at] for at in sorted(job.sizes)]) == (7, ["a", "c"])
    assert [targets[n] == body_of(n, SIZE) for n in range(3)] == [True, False, True]


def test_a_wait_ends_when_it_is_woken(keeper: Keeper) -> None:
    jobs, begun_s = Jobs(keeper.caller()), time.monotonic()
    threading.Timer(0.05, jobs.wake).start()
    assert jobs.finished(60.0) == []
    assert time.monotonic() - begun_s < 30.0


def test_frames_are_news_once_until_they_are_gone(keeper: Keeper) -> None:
    caller, known = keeper.caller(), Announced[str](keeper)
    assert not known.arrived(NAMES[0], "zero")  # it was evicted before its answer came
    stored(caller, [0, 1])
    assert [known.arrived(NAMES[n], str(n)) for n in (0, 1, 0)] == [True, True, False]
    known.departed(NAMES[:1])  # late: it is there
    assert known.take_gone() == []
    caller.delete(NAMES[:1])
    known.departed([NAMES[0], NAMES[3]])
    assert known.take_gone() == ["0"]
    assert [*known.values()] == ["1"]
