"""What was erased on a remote tier, as caches of other nodes hear of it: within a bound."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from flowkv import KV
from flowkv.tiers.remote.tier import RemoteLimits, RemoteTier
from tests.cache.fakes import Wrapped
from tests.cache.toy import make_kv, published, simple
from tests.clock import wait_for
from tests.inside import (
    AGAIN_S,
    MOST_ENTRIES,
    Erased,
    ManualClock,
    RemoteErasures,
    StoreError,
    new_entry,
    realm_name,
)
from tests.tiers.frames import key_of, outcomes, put
from tests.tiers.remote.faulty import FaultyBackend

P = [1] * 24
KEYS = [bytes([n]) * 32 for n in range(1, 80)]


def log(engine: FaultyBackend, clock: ManualClock | None = None) -> RemoteErasures:
    return RemoteErasures(engine, lambda work, _: work(), 1.0, clock or ManualClock())


def told(one: RemoteErasures, *keys: bytes, **names: Any) -> None:
    with one.erasing():
        one.publish(new_entry(keys, **names))


def heard(one: RemoteErasures) -> Erased:
    one.look()
    assert one.changed()
    news = one.news()
    one.look()
    assert not one.changed()
    return news


def cache(engine: FaultyBackend, **limits: float) -> KV:
    tier = RemoteTier(engine, name="pool", limits=RemoteLimits(every_s=0.05, **limits))
    return make_kv(simple(), pages=16, tiers=[Wrapped(tier)])


# ---- caches


@pytest.mark.parametrize("how", ["prompt", "tenant", "model"])
def test_other_nodes_hear_of_it_within_the_bound(how: str) -> None:
    engine = FaultyBackend()
    a, b = cache(engine), cache(engine)
    published(a, P)
    assert a.flush()
    wait_for(lambda: b.warm(P) == 24)
    if how == "prompt":
        assert a.forget(P) == 3
    else:
        assert (a.forget(tenant="") if how == "tenant" else a.invalidate()) == 3
    wait_for(b.planner.store.stack.erasure_logs.outdated)
    with b.open([*P, 0]) as seq:
        assert seq.reused == 0
    a.close()
    b.close()


def test_what_was_erased_before_a_cache_began_is_no_news(tmp_path: Path) -> None:
    """Else each start would throw away what was stored since, also in a directory of its own."""

    def beside(engine: FaultyBackend) -> KV:
        tier = RemoteTier(engine, name="pool", limits=RemoteLimits(every_s=0.02))
        return make_kv(simple(), pages=16, tiers=[f"disk:{tmp_path}:8MiB", Wrapped(tier)])

    engine = FaultyBackend()
    a = beside(engine)
    published(a, P)
    assert a.flush() and a.invalidate() == 3
    published(a, P)
    assert a.flush()
    a.close()
    b, looks = beside(engine), engine.count("get")
    wait_for(lambda: engine.count("get") > looks + 3)
    with b.open([*P, 0]) as seq:
        assert seq.reused == 24
    b.close()


def test_what_is_stored_late_is_erased_once_more() -> None:
    """By a node that had begun before: who erased looks again when that must be over."""
    engine, clock = FaultyBackend(), ManualClock()
    tier = RemoteTier(engine, clock=clock, limits=RemoteLimits(every_s=0.05))
    other = RemoteTier(engine, limits=RemoteLimits(every_s=0.05))
    told(tier.erasure_log, key_of(0))
    assert outcomes(put(other, [0, 1])) == [("stored", "")] * 2
    clock.advance(s=AGAIN_S / 2)
    tier._agree()
    assert key_of(0).hex() in engine.objects
    clock.advance(s=AGAIN_S)
    tier._agree()
    assert key_of(0).hex() not in engine.objects and key_of(1).hex() in engine.objects


@pytest.mark.parametrize("fault", ["listing", "header"])
def test_it_is_erased_once_more_as_soon_as_it_is_found(fault: str) -> None:
    """An engine that failed just then once kept the frame for good."""
    engine, clock = FaultyBackend(), ManualClock()
    quiet = RemoteLimits(every_s=1e6)
    tier, other = RemoteTier(engine, clock=clock, limits=quiet), RemoteTier(engine, limits=quiet)
    told(tier.erasure_log, key_of(0), realms=[realm_name(key_of("tenant"), None)])
    assert outcomes(put(other, [0, 1])) == [("stored", "")] * 2
    clock.advance(s=AGAIN_S)
    engine.plan = {"list": ["error"]} if fault == "listing" else {"get": ["", *["error"] * 4]}
    with pytest.raises(StoreError):
        tier._agree()
    tier._agree()
    assert key_of(0).hex() not in engine.objects and key_of(1).hex() not in engine.objects
    gets = engine.count("list")
    tier._agree()
    assert engine.count("list") == gets, "once is enough"


@pytest.mark.parametrize("fault", ["deletions", "lists", "hidden"])
def test_an_engine_that_fails_at_all_else_still_has_news(fault: str) -> None:
    engine = FaultyBackend()
    engine.objects = {f"{n:064x}": b"foreign" for n in range(20_000)}
    if fault == "lists":
        engine.pauses_s = 0.0003
    tier = RemoteTier(engine, limits=RemoteLimits(every_s=0.05, open_s=0.05))
    news = tier.erasure_log
    if fault == "deletions":
        engine.always["delete"] = "refuse"
        tier.delete([bytes(32)])
    elif fault == "hidden":
        engine.always["list"] = "error"
    told(log(engine), KEYS[0])
    wait_for(news.changed, 2.0)
    assert news.news().has(KEYS[0])
    engine.release()


def test_an_engine_that_does_not_confirm_it_is_named() -> None:
    engine = FaultyBackend()
    a = cache(engine)
    engine.always["put"] = "error"
    with pytest.raises(StoreError, match="did not confirm the erasure for other nodes"):
        a.forget(P)
    engine.release()
    a.close()


@pytest.mark.parametrize("how", ["prompt", "tenant", "model"])
def test_forgetting_again_is_no_proof(how: str) -> None:
    engine = FaultyBackend()
    a = cache(engine)
    published(a, P)
    assert a.flush()
    forget = {"prompt": lambda: a.forget(P), "tenant": lambda: a.forget(tenant="")}
    engine.always["delete"] = "ignore"
    for _ in range(3):
        with pytest.raises(StoreError, match="are still there"):
            forget.get(how, a.invalidate)()
    engine.release()
    forget.get(how, a.invalidate)()
    assert [*engine.objects] == ["erased"]
    a.close()


# ---- the object


def test_others_hear_it_once_and_nobody_hears_himself() -> None:
    engine = FaultyBackend()
    a, b = log(engine), log(engine)
    b.look()
    told(a, *KEYS[:3], below=[KEYS[4]], realms=[bytes(16)])
    assert not a.changed()
    news = heard(b)
    assert news.keys == {key[:8] for key in KEYS[:3]} and news.below == {KEYS[4][:8]}
    assert news.realms == {bytes(16)} and not news.everything
    told(b, KEYS[5])
    assert heard(a).keys == {KEYS[5][:8]}


def test_what_another_write_took_away_is_put_back() -> None:
    engine = FaultyBackend()
    a, b, c = log(engine), log(engine), log(engine)
    for one in (a, b, c):
        one.look()
    before = engine.objects.get("erased")
    told(a, KEYS[0])
    engine.objects.pop("erased")
    assert before is None
    told(b, KEYS[1])
    assert heard(c).keys == {KEYS[1][:8]}
    a.look()
    assert a.news().keys == {KEYS[1][:8]}
    assert heard(c).keys == {KEYS[0][:8]}


@pytest.mark.parametrize("there", [False, True])
def test_of_two_that_erase_at_once_both_are_noted(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that read first took the other's entry away; its process may have ended by then."""
    engine = FaultyBackend()
    a, b, c = log(engine), log(engine), log(engine)
    if there:
        told(c, KEYS[9])
    read, late = engine.get, [KEYS[1], KEYS[2]]

    def get(*request: Any) -> memoryview | None:
        found = read(*request)
        if late:
            monkeypatch.setattr(engine, "get", read)
            told(b, late.pop())
            monkeypatch.setattr(engine, "get", get)
        return found

    monkeypatch.setattr(engine, "get", get)
    told(a, KEYS[0])
    assert heard(c).keys == {key[:8] for key in KEYS[:3]}


def test_an_object_that_others_always_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FaultyBackend()
    engine.objects["erased"] = b"as it was"
    monkeypatch.setattr(engine, "get", lambda *request: memoryview(b"as it never was"))
    monkeypatch.setattr("flowkv.tiers.remote.erasures._PAUSE_S", 0.0)
    with pytest.raises(StoreError, match="another process wrote it"):
        told(log(engine), KEYS[0])


def test_a_node_that_cannot_write_still_has_news() -> None:
    engine = FaultyBackend()
    a, b = log(engine), log(engine)
    engine.always["put"] = "refuse"
    with pytest.raises(StoreError):
        told(a, KEYS[0])
    engine.always.clear()
    told(b, KEYS[1])
    engine.always["put"] = "refuse"
    with pytest.raises(PermissionError):
        a.look()
    assert a.news().keys == {KEYS[1][:8]}


def test_damage_that_another_node_repairs_first_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FaultyBackend()
    a, b, c = log(engine), log(engine), log(engine)
    told(b, KEYS[0])
    engine.objects["erased"] = engine.objects["erased"][:-1] + b"\0"
    get = engine.get

    def overtaken(*request: Any) -> Any:
        found = get(*request)
        monkeypatch.setattr(engine, "get", get)
        c.look()
        return found

    monkeypatch.setattr(engine, "get", overtaken)
    a.look()
    assert a.news().everything
    a.look()
    assert not a.changed()


@pytest.mark.parametrize("harm", ["damaged", "gone", "overtaken", "empty", "long"])
def test_whatever_is_odd_is_taken_as_everything(harm: str) -> None:
    engine = FaultyBackend()
    a, b = log(engine), log(engine)
    b.look()
    told(a, KEYS[0])
    assert heard(b).has(KEYS[0])
    if harm == "damaged":
        engine.objects["erased"] = engine.objects["erased"][:-1] + b"\0"
    elif harm == "overtaken":
        c = log(engine)
        for key in KEYS[: MOST_ENTRIES + 1]:
            told(c, key)
    else:
        engine.objects["erased"] = b"" if harm == "empty" else bytes((1 << 20) + 1)
        if harm == "gone":
            engine.objects.pop("erased")
    b.look()
    assert b.news().everything
    for one in (b, b):  # and it goes on
        one.look()
    assert not b.changed()


@pytest.mark.parametrize("seed", range(50))
def test_all_hear_of_all_however_many_erase(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that made room for others, before a node had seen them, were missed."""
    monkeypatch.setattr("flowkv.tiers.remote.erasures.MOST_ENTRIES", 8)
    engine, draw = FaultyBackend(), random.Random(seed)
    nodes = [log(engine) for _ in range(3)]
    lacks: list[set[bytes]] = [set() for _ in nodes]

    def hears(number: int) -> None:
        news, lack = nodes[number].news(), lacks[number]
        lack -= {key for key in lack if news.everything or news.has(key)}

    for n in range(80):
        number, key = draw.randrange(3), bytes([n]) * 32
        if draw.random() < 0.5:
            told(nodes[number], key)
            for other in {0, 1, 2} - {number}:
                lacks[other].add(key)
        else:
            nodes[number].look()
        hears(number)
    for number in [*draw.sample(range(3), 3), *draw.sample(range(3), 3)]:
        nodes[number].look()
        hears(number)
    assert lacks == [set()] * 3
