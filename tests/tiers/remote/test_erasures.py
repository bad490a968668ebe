"""What was erased on a remote tier, as caches of other nodes hear of it: within a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowkv import KV
from flowkv.tiers.remote.tier import RemoteLimits, RemoteTier
from tests.cache.fakes import Wrapped
from tests.cache.toy import make_kv, published, simple
from tests.inside import AGAIN_S, MOST_ENTRIES, Erased, ManualClock, RemoteErasures, StoreError
from tests.tiers.frames import key_of, outcomes, put
from tests.tiers.remote.faulty import FaultyBackend
from tests.waiting import until

P = [1] * 24
KEYS = [bytes([n]) * 32 for n in range(1, 80)]


def log(engine: FaultyBackend, clock: ManualClock | None = None) -> RemoteErasures:
    return RemoteErasures(engine, lambda work, _: work(), 1.0, clock or ManualClock())


def told(one: RemoteErasures, *keys: bytes, **names: Any) -> None:
    with one.erasing():
        one.publish(keys, **names)


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
    until(lambda: b.warm(P) == 24)
    if how == "prompt":
        assert a.forget(P) == 3
    else:
        assert (a.forget(tenant="") if how == "tenant" else a.invalidate()) == 3
    until(b.planner.store.stack.erasure_logs.outdated)
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
    until(lambda: engine.count("get") > looks + 3)
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
    tier.close()
    other.close()


def test_an_engine_that_does_not_confirm_it_is_named() -> None:
    engine = FaultyBackend()
    a = cache(engine)
    engine.always["put"] = "error"
    with pytest.raises(StoreError, match="did not confirm the erasure for other nodes"):
        a.forget(P)
    engine.release()
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


@pytest.mark.parametrize("harm", ["damaged", "gone", "overtaken", "empty"])
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
        engine.objects["erased"] = b""
        if harm == "gone":
            engine.objects.pop("erased")
    b.look()
    assert b.news().everything
    for one in (b, b):  # and it goes on
        one.look()
    assert not b.changed()
