"""The tier in Redis, on a server that breaks the protocol: misses and failures, no wrong byte."""

from __future__ import annotations

import time

import pytest

from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.remote.tier import RemoteLimits
from tests.clock import wait_for
from tests.inside import RedisTier

from ..frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, outcomes, put, stored
from .faulty_redis import FAULTS, FaultyRedis, delay, duplicate, hang, rot

IMPATIENT = RemoteLimits(threads=2, open_s=2.0, close_s=2.0, call_s=0.5)
LONG_S = 60.0  # a deadline that no busy machine misses


def load_one(tier: RedisTier, name: object, size: int, deadline_s: float) -> tuple[str, str]:
    """One load; a hit has the right bytes, and nothing else touches the target after the answer."""
    target = bytearray(size)
    wish = Load(key_of(name), memoryview(target), LAYOUT)
    done = answers(tier, tier.submit_load([wish], deadline_s=deadline_s), 1)[0]
    if done.outcome is Outcome.HIT:
        assert target == body_of(name, size), "WRONG BYTES"
    return done.outcome.value, done.reason


@pytest.mark.parametrize("name", sorted(FAULTS))
@pytest.mark.parametrize("command", [b"GETRANGE", b"ECHO"])
def test_one_fault_under_a_load(name: str, command: bytes) -> None:
    """It is a hit after a second try, or no hit; the load after it is in order again."""
    with FaultyRedis(11, commands=[command]) as server:
        tier = RedisTier(server.uri, limits=IMPATIENT)
        stored(tier, ["a", "b"], 20480)
        assert hits(tier, ["b"], 20480) == 1  # its reply is the one that "another" repeats
        server.plan.append(FAULTS[name])
        # More bytes are awaited than come: the deadline ends it. The line end that a shorter value
        # leaves behind is found at once only if the next reply comes in a packet of its own.
        cut = name == "shorter" and command == b"GETRANGE"
        quiet = cut or name in ("drop", "shorten", "huge", "negative")
        quiet = quiet or (name == "longer" and command == b"ECHO")
        outcome, reason = load_one(tier, "a", 20480, 0.5 if quiet else LONG_S)
        while quiet and not server.spoilt:  # the machine was busy: the command was never sent
            outcome, reason = load_one(tier, "a", 20480, 0.5)
        told = {"rot": "digest", "another": "key"}  # what only the frame itself can tell
        if name in told and command == b"GETRANGE":
            assert (outcome, reason) == ("miss", told[name]) and tier.corrupt == 1
        elif name == "corrupt" and command == b"GETRANGE":
            assert outcome in ("hit", "miss")
        else:
            right = {("failed", "deadline")} if quiet else {("hit", "")}
            assert (outcome, reason) in right | ({("hit", "")} if cut else set())
        assert load_one(tier, "b", 20480, LONG_S) == ("hit", "")
        assert server.spoilt == 1
        tier.close()


@pytest.mark.parametrize("name", sorted(FAULTS))
@pytest.mark.parametrize("command", [b"SET", b"ECHO"])
def test_one_fault_under_a_store(name: str, command: bytes) -> None:
    """What is acknowledged is there: an answer that may be another's is none."""
    with FaultyRedis(12, commands=[command]) as server:
        tier = RedisTier(server.uri, limits=IMPATIENT)
        stored(tier, ["b"], 20480)
        server.plan.append(FAULTS[name])
        wish = Store(key_of("a"), info_of(20480), memoryview(body_of("a", 20480)))
        done = answers(tier, tier.submit_store([wish], deadline_s=0.5), 1)[0]
        assert done.outcome is Outcome.STORED or done.reason == "deadline", done
        if done.outcome is Outcome.STORED:
            assert load_one(tier, "a", 20480, LONG_S) == ("hit", "")
        assert load_one(tier, "b", 20480, LONG_S) == ("hit", "")
        tier.close()


def test_a_store_that_the_server_did_not_do_is_not_acknowledged() -> None:
    """Two answers to the first SET, and an error to the second: only a tier that counts sees it."""
    with FaultyRedis(commands=[b"SET"]) as server:
        tier = RedisTier(server.uri, limits=RemoteLimits(threads=1, open_s=2.0))
        server.plan.append(duplicate)
        server.plan.extend([lambda server, reply: b"-ERR not today\r\n"] * 8)
        done = put(tier, ["a", "b"])
        for answer in done:
            if answer.outcome is Outcome.STORED:
                assert load_one(tier, "ab"[answer.item], 8192, LONG_S) == ("hit", "")
        assert Outcome.FAILED in {answer.outcome for answer in done}
        tier.close()


def test_the_frame_of_another_key_is_a_miss() -> None:
    """The protocol is in order and the bytes are a sound frame, but not the one wished for."""
    with FaultyRedis() as server:
        tier = RedisTier(server.uri, limits=IMPATIENT)
        stored(tier, ["a", "b"])
        names = {name: b"flowkv:" + key_of(name).hex().encode() for name in "ab"}
        server.data[names["a"]] = server.data[names["b"]]
        assert outcomes(get(tier, ["a", "b"])) == [("miss", "key"), ("hit", "")]
        assert tier.corrupt == 1
        server.data[names["b"]] = server.data[names["b"]][:-1]
        assert outcomes(get(tier, ["b"])) == [("miss", "truncated")]
        tier.close()


def test_a_reply_that_comes_too_late_lands_nowhere() -> None:
    with FaultyRedis(commands=[b"GETRANGE"]) as server:
        tier = RedisTier(server.uri, limits=IMPATIENT)
        stored(tier, ["a"])
        server.plan.append(delay(0.3))
        target = bytearray(8192)
        wish = Load(key_of("a"), memoryview(target), LAYOUT)
        done = answers(tier, tier.submit_load([wish], deadline_s=0.1), 1)
        assert outcomes(done) == [("failed", "deadline")]
        time.sleep(0.4)
        assert not any(target)
        assert load_one(tier, "a", 8192, LONG_S) == ("hit", "")
        tier.close()


def test_a_server_that_hangs_opens_the_breaker_and_closing_is_quick() -> None:
    with FaultyRedis(commands=[b"GETRANGE"]) as server:
        tier = RedisTier(server.uri, limits=IMPATIENT)
        stored(tier, range(3))
        server.plan.extend([hang] * 20)
        seen = [load_one(tier, n % 3, 8192, 0.15) for n in range(5)]
        assert set(seen) <= {("failed", "deadline"), ("failed", "breaker")} and tier.trips == 1
        assert seen[-1] == ("failed", "breaker")
        begun_s = time.monotonic()
        tier.close()
        assert time.monotonic() - begun_s < 5
        server.stopping.set()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 20))]
)
def test_many_faults(seed: int) -> None:
    """Fifteen in a hundred replies are spoilt in some way: every hit is right, some are hits."""
    size, names = 12288, range(24)
    with FaultyRedis(seed) as server:
        tier = RedisTier(server.uri, limits=RemoteLimits(threads=3, open_s=2.0, every_s=0.05))
        server.chance = 0.15
        found, kept = 0, set()
        for turn in range(6):
            wishes = [
                Store(key_of(n), info_of(size), memoryview(body_of(n, size)))
                for n in names
                if n % 6 == turn
            ]
            done = answers(tier, tier.submit_store(wishes, deadline_s=0.8), len(wishes))
            kept |= {a.key for a in done if a.outcome is Outcome.STORED}
            targets = [bytearray(size) for _ in names]
            loads = [
                Load(key_of(n), memoryview(t), LAYOUT) for n, t in zip(names, targets, strict=True)
            ]
            for answer in answers(tier, tier.submit_load(loads, deadline_s=0.8), len(loads)):
                if answer.outcome is Outcome.HIT:
                    assert targets[answer.item] == body_of(answer.item, size), "WRONG BYTES"
                    found += 1
            time.sleep(0.3)  # for the breaker
        held = {key for key in kept if b"flowkv:" + key.hex().encode() in server.data}
        assert held == kept, "acknowledged, and not there"
        assert server.spoilt > 5 and found > 0
        server.chance = 0.0
        wait_for(lambda: load_one(tier, "after", 8192, 2.0)[0] != "failed", every_s=0.05)
        tier.close()


def test_rot_on_every_stripe_is_found() -> None:
    with FaultyRedis(5, commands=[b"GETRANGE"]) as server:
        tier = RedisTier(server.uri, limits=IMPATIENT)
        stored(tier, range(12))
        for name in range(12):
            server.plan.append(rot)
            assert load_one(tier, name, 8192, LONG_S)[0] == "miss"
        assert tier.corrupt == 12
        tier.close()
