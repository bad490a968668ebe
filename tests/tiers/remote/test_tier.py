"""`RemoteTier` over an engine that fails in every way (fault F7, and S8 for the memory)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import repeat

import pytest

from flowkv import Tier
from flowkv.testing import check_tier
from flowkv.tiers import Completion, Header, Load, Outcome, Store
from flowkv.tiers.remote.tier import RemoteLimits, RemoteTier
from tests.clock import wait_for, without_threads
from tests.inside import (
    AGAIN_S,
    HUGE_BYTES,
    UNBOUNDED,
    BreakerState,
    ConfigError,
    Fact,
    Known,
    Listed,
    ManualClock,
    StateError,
    StoreError,
    pack_header,
)

from ..frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, outcomes, put, stored
from .faulty import FaultyBackend, steady

SIZE = 8192
QUICK = RemoteLimits(threads=4, call_s=0.2, open_s=0.3, close_s=0.3, erase_s=0.3)
PATIENT = QUICK._replace(pause_s=2.0)
LATE_S = 5.0
"""What a busy machine may add to a deadline; bench/bench_remote.py measures the overrun."""


@pytest.fixture
def engine() -> Iterator[FaultyBackend]:
    backend = FaultyBackend()
    yield backend
    backend.release()


def open_tier(engine: FaultyBackend, **changes: object) -> RemoteTier:
    return RemoteTier(engine, **({"limits": QUICK} | changes))  # type: ignore[arg-type]


@pytest.fixture
def tier(engine: FaultyBackend) -> Iterator[RemoteTier]:
    made = open_tier(engine)
    yield made
    engine.release()
    made.close()


def load_one(tier: Tier, name: object, deadline_s: float, size: int = SIZE) -> Completion:
    wish = Load(key_of(name), memoryview(bytearray(size)), LAYOUT)
    start = time.monotonic()
    answer = answers(tier, tier.submit_load([wish], deadline_s=deadline_s), 1)[0]
    assert time.monotonic() - start < deadline_s + LATE_S, "answered too late"
    return answer


def store_one(tier: Tier, name: object, deadline_s: float) -> Completion:
    wish = Store(key_of(name), info_of(SIZE), memoryview(body_of(name)))
    start = time.monotonic()
    answer = answers(tier, tier.submit_store([wish], deadline_s=deadline_s), 1)[0]
    assert time.monotonic() - start < deadline_s + LATE_S, "answered too late"
    return answer


def reopened(tier: Tier) -> Tier:
    assert isinstance(tier, RemoteTier)
    tier.close()
    return steady(RemoteTier(tier.backend, tier.capacity_bytes))


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("capacity_bytes", [3 << 14, 1 << 20])
def test_conformance(capacity_bytes: int) -> None:
    check_tier(
        lambda n: steady(RemoteTier(FaultyBackend(), n)),
        reopen=reopened,
        capacity_bytes=capacity_bytes,
    )


@pytest.mark.usefixtures("briefly")
def test_a_failing_engine_loses_frames_and_never_lies() -> None:
    def flaky(capacity_bytes: int) -> Tier:
        engine = FaultyBackend()
        for kind, faults in (
            ("get", ["", "error", "corrupt", "truncate", "garbage", "", "", ""]),
            ("put", ["", "error", "lost reply", "", ""]),
            ("delete", ["error", "", "lost reply"]),
            ("exists", ["error", "", ""]),
        ):
            engine.plan[kind] = faults * 50
        return RemoteTier(engine, capacity_bytes)

    check_tier(flaky, lossy=True, capacity_bytes=1 << 20)


# ---- hung, slow, dead, flapping


def test_a_hung_engine_costs_three_deadlines(engine: FaultyBackend) -> None:
    tier = open_tier(engine, limits=PATIENT)
    stored(tier, range(4))
    engine.always["get"] = "hang"
    for _ in range(3):
        assert load_one(tier, 0, 0.2).reason == "deadline"
    assert (tier.state, tier.trips) == (BreakerState.OPEN, 1)
    calls = engine.count("get")
    assert load_one(tier, 0, 5.0).reason == "breaker"
    assert store_one(tier, 9, 5.0).reason == "breaker"
    assert (engine.count("get"), engine.count("put")) == (calls, 4), "an open breaker asks nobody"
    assert tier.contains([key_of(0)]) == [False], "what cannot be loaded is not promised"
    engine.release()
    wait_for(lambda: tier.state is BreakerState.HALF_OPEN)
    assert tier.contains([key_of(0)]) == [True]
    assert hits(tier, [0]) == 1 and tier.state is BreakerState.CLOSED
    assert hits(tier, range(4)) == 4


def test_a_dead_engine_opens_the_breaker(engine: FaultyBackend) -> None:
    tier = open_tier(engine, limits=PATIENT)
    stored(tier, [0])
    engine.always["get"] = engine.always["put"] = "error"
    reasons = [store_one(tier, 1, 1.0).reason, *(load_one(tier, 0, 1.0).reason for _ in range(3))]
    assert (reasons[0], reasons[-1]) == ("ECONNREFUSED", "breaker"), reasons
    assert reasons.count("breaker") <= 2 and set(reasons) <= {"ECONNREFUSED", "deadline", "breaker"}


def test_an_engine_is_not_blamed_for_want_of_time(engine: FaultyBackend) -> None:
    """Who gives it less time than it was seen to need learns nothing about it."""
    clock = engine.clock = ManualClock()
    tier = open_tier(engine, clock=clock)
    stored(tier, [0])
    for _ in range(20):
        tier.reading.add_sample(1 << 20, 60.0)  # a slow engine: half a second for these 8 KiB
        tier.reading.add_sample(0, 0.5)
    engine.always["get"] = "late"
    for _ in range(4):
        assert load_one(tier, 0, 0.1).reason == "deadline"
    assert tier.state is BreakerState.CLOSED
    for _ in range(3):
        assert load_one(tier, 0, 1.1).reason == "deadline"
    assert tier.state is BreakerState.OPEN


def test_what_hung_teaches_no_rates(engine: FaultyBackend, tier: RemoteTier) -> None:
    stored(tier, range(20))
    assert hits(tier, range(20)) == 20
    before_s = tier.reading.expected_s(SIZE)
    engine.plan["get"] = ["hang"]
    assert load_one(tier, 0, 0.2).reason == "deadline"
    time.sleep(0.3)
    engine.release()
    wait_for(lambda: tier.retired_bytes == 0)
    assert tier.reading.expected_s(SIZE) == before_s


@pytest.mark.parametrize("spares", [0, 8])
def test_what_waits_behind_a_hung_engine_fails_when_the_breaker_opens(
    engine: FaultyBackend, spares: int
) -> None:
    tier = open_tier(engine, limits=PATIENT._replace(spares=spares))
    stored(tier, range(20))
    engine.always["get"] = "hang"
    start = time.monotonic()
    quick = [Load(key_of(n), memoryview(bytearray(SIZE)), LAYOUT) for n in range(4)]
    job = tier.submit_load(quick, deadline_s=0.2)
    patient = [Load(key_of(n), memoryview(bytearray(SIZE)), LAYOUT) for n in range(4, 20)]
    other = tier.submit_load(patient, deadline_s=20.0)
    found: list[Completion] = []
    while len(found) < 20:
        found += tier.poll(0.05)
    assert time.monotonic() - start < 0.2 + 2 * LATE_S, "half of what the patient ones had"
    assert {a.reason for a in found if a.job == job} == {"deadline"}
    assert {a.reason for a in found if a.job == other} == {"breaker"}
    engine.release()


def test_a_flapping_engine(engine: FaultyBackend) -> None:
    """Single failures are retried inside the deadline and seen by nobody."""
    tier = open_tier(engine, limits=QUICK._replace(threads=1))
    engine.plan["put"] = ["error", ""] * 10
    stored(tier, range(10))
    engine.plan["get"] = ["error", "error", ""] * 10
    assert hits(tier, range(10)) == 10
    assert tier.trips == 0


def test_a_lost_reply_is_asked_for_again(engine: FaultyBackend, tier: RemoteTier) -> None:
    """A request that arrives twice changes nothing."""
    engine.plan["put"] = ["lost reply"]
    stored(tier, [0])
    assert engine.count("put") == 2 and hits(tier, [0]) == 1


def test_a_refusal_is_not_retried(engine: FaultyBackend, tier: RemoteTier) -> None:
    engine.plan["put"] = ["refuse"]
    assert store_one(tier, 0, 1.0).reason == "EACCES"
    assert engine.count("put") == 1


def test_little_time_is_not_the_engines_fault(engine: FaultyBackend, tier: RemoteTier) -> None:
    stored(tier, [0])
    for _ in range(6):
        assert load_one(tier, 0, 0.0).outcome is Outcome.FAILED
    assert tier.state is BreakerState.CLOSED


def test_a_late_reply_never_lands_in_a_reused_buffer(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    """Canary: the owner uses the target again right after the answer; so does another load."""
    stored(tier, range(8))
    engine.plan["get"] = ["hang", "hang"]
    canary = bytearray(b"\xaa" * SIZE)
    memory = memoryview(bytearray(SIZE))
    for name in (0, 1):
        job = tier.submit_load([Load(key_of(name), memory, LAYOUT)], deadline_s=0.2)
        assert answers(tier, job, 1)[0].reason == "deadline"
    memory[:] = canary
    assert tier.retired_bytes == 2 * HUGE_BYTES, "what hangs keeps its own memory"
    assert hits(tier, range(8)) == 8
    engine.release()
    wait_for(lambda: tier.retired_bytes == 0)
    assert memory == canary
    assert tier.poll(0.0) == [], "an item was answered twice"


def test_a_late_store_reads_nothing_and_is_undone(engine: FaultyBackend, tier: RemoteTier) -> None:
    engine.plan["put"] = ["hang"]
    body = bytearray(body_of(0))
    job = tier.submit_store([Store(key_of(0), info_of(SIZE), memoryview(body))], deadline_s=0.2)
    assert answers(tier, job, 1)[0].reason == "deadline"
    body[:] = b"\xaa" * SIZE
    engine.release()
    wait_for(lambda: engine.count("delete") and not engine.objects)
    assert get(tier, [0])[0].outcome is Outcome.MISS
    stored(tier, [0])
    assert hits(tier, [0]) == 1


def test_retired_memory_is_bounded(engine: FaultyBackend) -> None:
    """Calls that never return may not eat the machine: beyond the cap nothing is begun."""
    limits = PATIENT._replace(threads=2, spares=100, retired_bytes=11 << 20)
    tier = open_tier(engine, limits=limits)
    stored(tier, [0])
    engine.always["get"] = "hang"
    reasons = []
    for _ in range(40):
        tier._breaker._opened_ns = None  # as if every probe had worked
        reasons.append(load_one(tier, 0, 0.2).reason)
    assert reasons[:6] == ["deadline"] * 6 and reasons[6:] == ["breaker"] * 34
    assert engine.hanging == 6 and tier.retired_bytes == 6 * HUGE_BYTES
    engine.release()
    wait_for(lambda: tier.retired_bytes == 0)


# ---- damage


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "garbage"])
def test_damage_is_a_miss_and_not_asked_for_again(
    engine: FaultyBackend, tier: RemoteTier, fault: str
) -> None:
    stored(tier, range(2))
    engine.plan["get"] = [fault]
    answer = get(tier, [0])[0]
    assert answer.outcome is Outcome.MISS
    assert answer.reason in ("digest", "truncated", "key", "foreign"), answer
    assert tier.corrupt == 1
    calls = engine.count("get")
    assert tier.contains([key_of(0), key_of(1)]) == [False, True]
    assert outcomes(get(tier, [0])) == [("miss", "")] and engine.count("get") == calls
    stored(tier, [0])  # written anew, over what is there
    assert hits(tier, range(2)) == 2


def test_every_bit_of_a_small_frame(engine: FaultyBackend, tier: RemoteTier) -> None:
    stored(tier, [0], size=16)
    name = key_of(0).hex()
    good = engine.objects[name]
    for byte in (*range(300), *range(len(good) - 20, len(good))):
        bad = bytearray(good)
        bad[byte] ^= 1 << byte % 8
        engine.objects[name] = bytes(bad)
        tier.known._shunned.clear()
        answer = get(tier, [0], size=16)[0]
        assert answer.outcome is Outcome.MISS and answer.reason, byte
    engine.objects[name] = good
    tier.known._shunned.clear()
    assert hits(tier, [0], size=16) == 1


def test_a_frame_that_others_replaced_or_removed(engine: FaultyBackend, tier: RemoteTier) -> None:
    info = info_of(4096)
    body = body_of(0, 3 * 4096)
    job = tier.submit_store([Store(key_of(0), info, memoryview(body))])
    assert answers(tier, job, 1)[0].outcome is Outcome.STORED
    wish = Load(key_of(0), memoryview(bytearray(4096)), LAYOUT, 0, 1, 1)
    assert answers(tier, tier.submit_load([wish]), 1)[0].outcome is Outcome.HIT
    assert wish.target == body[4096:8192]
    engine.objects.clear()
    assert outcomes(answers(tier, tier.submit_load([wish]), 1)) == [("miss", "")]
    assert tier.contains([key_of(0)]) == [False] and tier.used_bytes() == 0


def test_a_header_that_others_made_stale_is_read_again(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    other = open_tier(engine, name="other")
    bodies = [body_of(name, 3 * 4096) for name in "ab"]
    for each, body in zip((tier, other), bodies, strict=True):
        job = each.submit_store([Store(key_of(0), info_of(4096), memoryview(body))])
        assert answers(each, job, 1)[0].outcome is Outcome.STORED
    wish = Load(key_of(0), memoryview(bytearray(4096)), LAYOUT, 0, 1, 1)
    assert outcomes(answers(tier, tier.submit_load([wish]), 1)) == [("hit", "")]
    assert wish.target == bodies[1][4096:8192] and tier.corrupt == 0
    engine.objects[key_of(0).hex()] = engine.objects[key_of(0).hex()][:-1]
    wish = wish._replace(first=2)
    assert answers(tier, tier.submit_load([wish]), 1)[0].outcome is Outcome.MISS
    assert tier.corrupt == 1 and tier.contains([key_of(0)]) == [False]


def test_a_frame_that_others_replaced_by_a_longer_one(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    """As one with a lossy codec is by an exact one: it was taken for damaged, and shunned."""
    stored(tier, [0], size=4096)
    other = open_tier(engine, name="other")
    other.erase([key_of(0)])
    stored(other, [0], size=16384)
    wish = Load(key_of(0), memoryview(bytearray(16384)), LAYOUT)
    assert outcomes(answers(tier, tier.submit_load([wish]), 1)) == [("hit", "")]
    assert wish.target == body_of(0, 16384) and tier.corrupt == 0


def test_lengths_in_a_header_are_checked_before_memory_is_found(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    lie = Header(key_of(0), info_of(1 << 40), bytes(32))
    engine.objects[key_of(0).hex()] = pack_header(lie)
    for first, stripes in ((0, 1), (1, 0), (0, 0)):
        wish = Load(key_of(0), memoryview(bytearray(4096)), LAYOUT, 0, first, stripes)
        assert outcomes(answers(tier, tier.submit_load([wish]), 1)) == [("failed", "target")]
    assert all(hand.staging.n_bytes <= HUGE_BYTES for hand in tier._workers._hands)


# ---- what is known


def test_layers_are_read_alone(engine: FaultyBackend) -> None:
    tier = open_tier(engine)
    body = body_of("layers", 40 * 4096)
    job = tier.submit_store([Store(key_of(0), info_of(4096), memoryview(body))])
    assert answers(tier, job, 1)[0].outcome is Outcome.STORED
    tier.close()
    tier = open_tier(engine)
    engine.calls.clear()
    for first, stripes in ((0, 1), (5, 3), (39, 1), (30, 0)):
        count = stripes or 40 - first
        wish = Load(key_of(0), memoryview(bytearray(count * 4096)), LAYOUT, 0, first, stripes)
        answer = answers(tier, tier.submit_load([wish]), 1)[0]
        assert (answer.outcome, answer.n_bytes) == (Outcome.HIT, count * 4096)
        assert wish.target == body[first * 4096 : (first + count) * 4096]
    assert engine.count("get") == 5, "the header is read once"


def test_frames_of_others_are_asked_for(engine: FaultyBackend, tier: RemoteTier) -> None:
    other = open_tier(engine, name="other")
    stored(other, range(5))
    keys = [key_of(n) for n in range(7)]
    assert tier.contains(keys) == [True] * 5 + [False] * 2
    asked = engine.count("exists")
    assert tier.contains(keys) == [True] * 5 + [False] * 2
    assert engine.count("exists") == asked, "what is not there is not asked for again at once"
    assert hits(tier, range(5)) == 5


def test_contains_waits_no_longer_than_it_may(engine: FaultyBackend, tier: RemoteTier) -> None:
    engine.always["exists"] = "hang"
    for _ in range(20):
        start = time.monotonic()
        assert tier.contains([key_of("x")]) == [False]
        assert time.monotonic() - start < 0.05 + LATE_S
    assert engine.count("exists") == 1, "a silent engine is not asked again at once"


def test_deletions_are_repeated_until_confirmed(engine: FaultyBackend, tier: RemoteTier) -> None:
    stored(tier, range(3))
    engine.plan["delete"] = ["error"]
    assert tier.delete([key_of(0), key_of(7)]) == 1
    assert outcomes(get(tier, [0])) == [("miss", "")], "gone at once, for us"
    wait_for(lambda: len(engine.objects) == 2)
    tier.delete([key_of(1)])
    stored(tier, [1])  # waits for the deletion
    assert hits(tier, [1]) == 1
    tier.delete([key_of(2)])
    tier.close()
    assert len(engine.objects) == 1, "closing deletes what was to be deleted"


def test_erase_is_proven(engine: FaultyBackend, tier: RemoteTier) -> None:
    other = open_tier(engine, name="other")
    stored(other, range(3))
    assert tier.erase([key_of(0), key_of(1), key_of("never")]) == 2
    assert list(engine.objects) == [key_of(2).hex()]
    engine.always["delete"] = "ignore"
    with pytest.raises(StoreError, match="1 are still there"):
        tier.erase([key_of(2)])
    engine.always["delete"] = "error"
    with pytest.raises(StoreError, match="did not confirm"):
        tier.erase([key_of(2)])
    engine.release()
    engine.always["exists"] = "hang"
    start = time.monotonic()
    with pytest.raises(StoreError, match="Erase again"):
        tier.erase([key_of(2)])
    assert time.monotonic() - start < QUICK.erase_s + LATE_S
    engine.release()


@pytest.mark.parametrize("fault", ["error", "lost reply", "late"])
def test_erase_waits_for_stores_that_may_still_arrive(engine: FaultyBackend, fault: str) -> None:
    """One that was answered with an error, or not at all, was carried out after the proof."""
    clock = engine.clock = ManualClock()
    tier = steady(open_tier(engine, clock=clock))
    engine.plan["put"] = [fault] * 4
    assert outcomes(put(tier, [0])) != [("stored", "")]
    engine.plan.clear()
    engine.plan["put"] = ["lost reply"]
    stored(tier, [1])
    assert tier.erase([key_of(2)]) == 0
    for keys in ([key_of(0), key_of(1), key_of(2)], []):  # also where nothing is known any more
        with pytest.raises(StoreError, match="2 failed stores may arrive"):
            tier.erase(keys)
    clock.advance(s=AGAIN_S)
    put(other := open_tier(engine), [0])
    other.close()
    assert tier.erase([]) == 1 and not engine.objects


@pytest.mark.parametrize("fault", ["ignore", "error", "refuse"])
def test_an_erasure_that_failed_is_not_proven_by_asking_again(
    engine: FaultyBackend, tier: RemoteTier, fault: str
) -> None:
    """Nothing was known of the frames any more, so the second call did nothing, and returned."""
    stored(tier, range(2))
    engine.always["delete"] = fault
    for keys in ([key_of(0)], [], [key_of(1)], []):
        with pytest.raises(StoreError, match="did not confirm"):
            tier.erase(keys)
    engine.release()
    tier.erase([])
    assert not engine.objects and tier.erase([]) == 0


def test_a_library_that_raises_anything_costs_a_miss(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    stored(tier, [0])
    engine.always = dict.fromkeys(("get", "put", "delete", "exists", "list"), "panic")
    assert tier.contains([key_of(1)]) == [False]
    assert outcomes(get(tier, [0]))[0][0] == outcomes(put(tier, [1]))[0][0] == "failed"
    for work in (tier.survey, lambda: tier.erase([key_of(0)])):
        with pytest.raises(StoreError, match="of the client library"):
            work()
    engine.release()
    assert hits(tier, [0]) == 0, "condemned"
    stored(tier, [0])
    assert hits(tier, [0]) == 1


def test_a_listing_without_end_is_ended(
    engine: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkv.tiers.remote.tier.MOST_KNOWN", 5000)
    monkeypatch.setattr(engine, "list", lambda timeout_s: map(Listed, repeat("ab" * 32), repeat(1)))
    tier = open_tier(engine)
    wait_for(tier._listed.done, 10.0)
    assert len(tier.known) == 1


def test_capacity_counts_what_is_there(
    engine: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(engine, capacity_bytes=5 * 12288)
    done = put(tier, range(7))
    assert sorted(outcomes(done)) == [("failed", "full")] * 2 + [("stored", "")] * 5
    assert tier.used_bytes() == tier.capacity_bytes
    tier.close()
    tier = open_tier(engine, capacity_bytes=6 * 12288)
    assert outcomes(put(tier, ["a", "b"])).count(("stored", "")) == 1
    engine.plan["put"] = ["refuse"]
    tier.delete([key_of("a"), key_of("b")])
    release = tier.known.unreserve
    monkeypatch.setattr(tier.known, "unreserve", lambda size: (time.sleep(0.3), release(size)))
    assert put(tier, ["c"])[0].reason == "EACCES"
    stored(tier, ["d"])  # a failed store gave its room back before it was answered


def test_what_failed_is_not_said_to_be_late(
    engine: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is late is deleted in the store, what failed otherwise is not: one or the other."""
    tier, engine.always["put"] = open_tier(engine), "lost reply"
    land = tier.known.land
    monkeypatch.setattr(tier.known, "land", lambda *given: (time.sleep(0.8), land(*given)))
    job = tier.submit_store(
        [Store(key_of(0), info_of(SIZE), memoryview(body_of(0, SIZE)))], deadline_s=0.5
    )
    assert outcomes(answers(tier, job, 1)) == [("failed", "ECONNRESET")]


@pytest.mark.parametrize("fault", ["", "corrupt"])
def test_a_store_is_not_forgotten_for_an_older_answer(
    engine: FaultyBackend, tier: RemoteTier, fault: str
) -> None:
    """A load that found nothing, or damage, says nothing about what was stored meanwhile."""
    old = FaultyBackend()
    other = open_tier(old, name="other")
    stored(other, [0])
    other.close()
    if fault:
        spoiled = bytearray(old.objects[key_of(0).hex()])
        spoiled[-1] ^= 1
        engine.objects[key_of(0).hex()] = bytes(spoiled)
    engine.after["get"] = "hang"
    wish = Load(key_of(0), memoryview(bytearray(SIZE)), LAYOUT)
    job = tier.submit_load([wish], deadline_s=20.0)
    wait_for(lambda: engine.hanging)
    stored(tier, [0])
    engine.release()
    answer = answers(tier, job, 1)[0]
    assert (answer.outcome, answer.reason) == (Outcome.MISS, "digest" if fault else "")
    assert tier.contains([key_of(0)]) == [True]
    assert hits(tier, [0]) == 1


@pytest.mark.parametrize("call", ["get", "list"])
def test_what_was_seen_before_a_deletion_is_not_believed(
    engine: FaultyBackend, tier: RemoteTier, call: str
) -> None:
    """Neither a load under way nor a listing brings back what was deleted meanwhile."""
    stored(tier, [0, 1])
    engine.after[call] = "hang"
    asked = partial(get, tier, [0]) if call == "get" else tier.survey
    asking = threading.Thread(target=asked)
    asking.start()
    wait_for(lambda: engine.hanging)
    tier.delete([key_of(0)])
    wait_for(lambda: len(engine.objects) == 1 and not tier.known.is_shunned(key_of(0)))
    engine.release()
    asking.join()
    assert tier.contains([key_of(0), key_of(1)]) == [False, True]
    stored(tier, [0])
    assert tier.contains([key_of(0)]) == [True] and hits(tier, [0]) == 1


def test_a_store_that_failed_is_not_known_from_a_load_meanwhile(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    engine.after["put"] = "hang"  # it is there, and the store's time passes
    item = Store(key_of(0), info_of(SIZE), memoryview(body_of(0)))
    job = tier.submit_store([item], deadline_s=0.3)
    wait_for(lambda: engine.hanging)
    assert hits(tier, [0]) == 1
    assert answers(tier, job, 1)[0].reason == "deadline"
    assert tier.contains([key_of(0)]) == [False]
    assert get(tier, [0])[0].outcome is Outcome.MISS, "while the engine has it"
    engine.release()
    wait_for(lambda: not engine.objects)
    assert tier.contains([key_of(0)]) == [False] and get(tier, [0])[0].outcome is Outcome.MISS


def test_a_cancelled_store_is_not_found_while_it_ends(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    engine.after["put"] = "hang"
    job = tier.submit_store([Store(key_of(0), info_of(SIZE), memoryview(body_of(0)))])
    wait_for(lambda: engine.hanging)
    tier.cancel(job)
    assert answers(tier, job, 1)[0].reason == "cancelled"
    assert get(tier, [0])[0].outcome is Outcome.MISS
    engine.release()
    wait_for(lambda: not engine.objects)
    stored(tier, [0])
    assert hits(tier, [0]) == 1


def test_a_store_whose_engine_ran_out_of_time_is_not_found(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    def put(name: str, data: memoryview, timeout_s: float) -> None:
        engine.objects[name] = bytes(data)  # done, and told too late
        raise TimeoutError

    engine.put = put  # type: ignore[method-assign]
    job = tier.submit_store([Store(key_of(0), info_of(SIZE), memoryview(body_of(0)))])
    assert answers(tier, job, 1)[0].reason == "deadline"
    assert get(tier, [0])[0].outcome is Outcome.MISS
    wait_for(lambda: not engine.objects)


def test_a_frame_that_lands_while_its_former_header_is_found_damaged_is_listed_again() -> None:
    known, key = Known(), key_of(0)
    known.merge([(key, was := Fact(64))], known.look())
    assert known.launch(key, 0.0)
    known.land(key, stored := Fact(64, None, 5))
    known.refuse(key, was)
    assert known.usable(key)
    known.mark_missing(key, stored)  # as where the index is full
    known.merge([(key, stored)], known.look())
    assert known.usable(key), "an erasure must find it"


def test_deletions_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.tiers.remote.tier.MOST_GONE", 2)
    known = Known()
    old = known.look()
    for n in range(4):
        known.end_deletion([key_of(n)], gone=True)
    known.merge([(key_of(n), Fact(10)) for n in range(6)], old)
    assert not known.facts(), "it cannot be told any more"
    known.merge([(key_of(n), Fact(10)) for n in range(6)], known.look())
    assert len(known) == 6


def test_what_is_known_is_bounded() -> None:
    known = Known(most=3)
    known.merge(((key_of(n), Fact(10)) for n in range(5)), known.look())
    assert [key for key, _ in known.facts()] == [key_of(n) for n in (2, 3, 4)]
    known.launch(key_of(9), 1.0)
    known.land(key_of(9), Fact(7))
    assert (len(known), known.used_bytes) == (3, 27) and known.get(key_of(9)) is not None


def test_a_frame_that_flew_while_it_was_deleted_stays_away(
    engine: FaultyBackend, tier: RemoteTier
) -> None:
    engine.plan["put"] = ["hang"]
    item = Store(key_of(0), info_of(SIZE), memoryview(body_of(0)))
    job = tier.submit_store([item], deadline_s=20.0)
    wait_for(lambda: engine.hanging)
    assert tier.delete([key_of(0)]) == 0
    engine.release()
    assert answers(tier, job, 1)[0].outcome is Outcome.STORED
    assert tier.contains([key_of(0)]) == [False] and get(tier, [0])[0].outcome is Outcome.MISS
    wait_for(lambda: not engine.objects)


def test_a_frame_that_is_stored_while_its_key_is_erased_is_not_believed_in(
    engine: FaultyBackend,
) -> None:
    tier = open_tier(engine, limits=QUICK._replace(erase_s=20.0))
    engine.plan["put"] = ["hang"]
    item = Store(key_of(1), info_of(SIZE), memoryview(body_of(1)))
    job = tier.submit_store([item], deadline_s=20.0)
    wait_for(lambda: engine.hanging)
    erasing = threading.Thread(target=tier.erase, args=([key_of(0), key_of(1)],))
    erasing.start()  # it waits for the other one
    wait_for(lambda: len(tier.known._condemned) == 2)
    stored(tier, [0])
    engine.release()
    erasing.join()
    assert answers(tier, job, 1)[0].outcome is Outcome.STORED
    assert tier.contains([key_of(0), key_of(1)]) == [False, False]
    assert not engine.objects
    stored(tier, [0, 1])
    assert hits(tier, [0, 1]) == 2


def test_what_landed_while_an_erasure_waited_is_erased_too() -> None:
    known = Known()
    known.launch(key_of(0), 1.0)
    known.condemn([key_of(0)])
    known.land(key_of(0), Fact(7))
    known.launch(key_of(0), 1.0)
    assert not known.seize([key_of(0), key_of(1)], 0.0), "it flies"
    known.land(key_of(0), Fact(7))
    assert known.get(key_of(0)) is not None
    assert known.seize([key_of(0), key_of(1)], 0.0)
    assert known.get(key_of(0)) is None and known.is_shunned(key_of(0))
    assert not known.launch(key_of(1), 0.0) and known.take_condemned(9) == []
    known.end_deletion([key_of(0)], gone=False)
    known.end_deletion([key_of(1)], gone=True)
    assert known.take_condemned(9) == [key_of(0)] and not known.is_shunned(key_of(1))


# ---- opening and closing


def test_a_forked_child_leaves_it_alone(engine: FaultyBackend, tier: RemoteTier) -> None:
    stored(tier, [0])
    tier._pid += 1  # what a child sees
    assert tier.contains([key_of(0)]) == [False] and tier.poll() == [] and tier.used_bytes() == 0
    assert tier.delete([key_of(0)]) == 0 and list(tier.scan()) == []
    with pytest.raises(StateError, match="before a fork"):
        tier.submit_store([])
    tier.close()
    tier._pid -= 1
    assert hits(tier, [0]) == 1


def test_opening_lists_and_scan_reads_headers_once(engine: FaultyBackend) -> None:
    tier = open_tier(engine)
    stored(tier, range(10))
    tier.close()
    engine.calls.clear()
    tier = open_tier(engine)
    assert tier.capacity_bytes == UNBOUNDED and tier.used_bytes() == 10 * 12288
    assert (engine.count("list"), engine.count("get")) == (1, 0)
    for _ in range(2):
        entries = list(tier.scan())
        assert {entry.key for entry in entries} == {key_of(n) for n in range(10)}
        assert {entry.info for entry in entries} == {info_of(SIZE)}
        assert engine.count("get") == 10


IMPORTS = """
import importlib.abc, sys, threading, time
from tests.tiers.frames import hits, stored
from tests.tiers.remote.faulty import FaultyBackend
from flowkv.tiers.remote.tier import RemoteTier

class Watcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            print(threading.current_thread().name)
            time.sleep(0.1)

assert "numba" not in sys.modules
sys.meta_path.insert(0, Watcher())
tier = RemoteTier(FaultyBackend())
stored(tier, range(3))
assert hits(tier, range(3)) == 3
tier.close()
"""


def test_numba_is_imported_before_there_are_two_threads() -> None:
    """Two that begin to import it at once may each find half of it."""
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "MainThread\n"), done.stderr


def test_opening_an_engine_that_does_not_answer(engine: FaultyBackend) -> None:
    engine.plan["list"] = ["error"]
    with pytest.warns(UserWarning, match="tried again"):
        tier = open_tier(engine, limits=QUICK._replace(every_s=0.05))
    engine.objects["ab" * 32] = b"foreign"
    wait_for(lambda: len(tier.known) == 1)  # listed later
    assert list(tier.scan()) == []


def test_the_thread_that_looks_after_it_survives_whatever_a_library_raises(
    engine: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One exception that is no OSError once ended it, and nothing was noticed any more."""
    engine.plan["list"], raised, lists = ["error"], list[int](), engine.list

    def odd(timeout_s: float) -> object:
        if len(raised) < 3:
            raised.append(1)
            raise RuntimeError("not what one expects")
        return lists(timeout_s)

    with pytest.warns(UserWarning, match="tried again"):
        tier = open_tier(engine, limits=QUICK._replace(every_s=0.05))
    monkeypatch.setattr(engine, "list", odd)
    wait_for(lambda: len(raised) == 3)
    engine.objects["ab" * 32] = b"foreign"
    wait_for(lambda: len(tier.known) == 1)


def test_opening_without_a_thread_says_so(engine: FaultyBackend) -> None:
    with without_threads(), pytest.raises(StoreError, match=r"no thread can start\. End other"):
        RemoteTier(engine)


def test_opening_an_engine_that_refuses(engine: FaultyBackend) -> None:
    engine.plan["list"] = ["refuse"]
    with pytest.raises(StoreError, match="Check the address"):
        open_tier(engine)
    with pytest.raises(ConfigError, match="Give it"):
        open_tier(engine, capacity_bytes=0)


def test_opening_and_closing_never_hang(engine: FaultyBackend) -> None:
    engine.always["list"] = "hang"
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tier = open_tier(engine)
    assert time.monotonic() - start < QUICK.open_s + LATE_S
    engine.always["put"] = "hang"
    items = [Store(key_of(n), info_of(SIZE), memoryview(body_of(n))) for n in range(9)]
    job = tier.submit_store(items, deadline_s=60.0)
    start = time.monotonic()
    tier.close()
    assert time.monotonic() - start < 3 * QUICK.close_s + LATE_S
    assert {a.reason for a in answers(tier, job, 9)} == {"closed"}
    assert not engine.closed, "a hanging call still uses the connections"
    with pytest.raises(StateError, match="Open it again"):
        tier.submit_load([])
    assert tier.contains([key_of(0)]) == [False] and list(tier.scan()) == []
    tier.close()


def test_closing_works_off_what_is_queued(engine: FaultyBackend) -> None:
    before = threading.active_count()
    tier = open_tier(engine)
    job = tier.submit_store(
        [Store(key_of(n), info_of(SIZE), memoryview(body_of(n))) for n in range(50)]
    )
    tier.close()
    assert {a.outcome for a in answers(tier, job, 50)} == {Outcome.STORED}
    assert len(engine.objects) == 50 and engine.closed
    wait_for(lambda: threading.active_count() <= before)


def test_cancel(engine: FaultyBackend, tier: RemoteTier) -> None:
    stored(tier, [0])
    engine.plan["get"] = ["hang"]
    job = tier.submit_load([Load(key_of(0), memoryview(bytearray(SIZE)), LAYOUT)], deadline_s=60.0)
    wait_for(lambda: engine.hanging)
    tier.cancel(job)
    assert answers(tier, job, 1)[0].reason == "cancelled"
    assert tier.state is BreakerState.CLOSED
    engine.release()
    assert hits(tier, [0]) == 1
