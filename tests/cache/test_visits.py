"""Requests as policies hear of them, and what policies make of that."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import flowkv
from flowkv import KV, Lease, Retain
from flowkv.policy import LRU, make_policy
from tests.cache.audit import audit
from tests.cache.toy import (
    PAGE,
    advance,
    geometry,
    make_kv,
    opened,
    prefill,
    published,
    simple,
    write,
)
from tests.inside import (
    NEVER_NS,
    TOOL_USE,
    CapacityError,
    ConfigError,
    HostTier,
    ManualClock,
    session_number,
)
from tests.policy.call_log import CallLog, logged_by

P, Q, R = [1] * 24, [2] * 24, [3] * 24


def logged(*tiers: Any, policy: str = "lru", **options: Any) -> tuple[KV, list[CallLog]]:
    """A cache of one layer group whose policies write down what they are told, device first."""
    logs: list[CallLog] = []
    made = logged_by(logs, lambda: make_policy(policy))
    kv = make_kv(simple(), tiers=tiers, policy=made, **{"clock": ManualClock()} | options)
    return kv, logs


def told(log: CallLog, *names: str) -> list[tuple[Any, ...]]:
    return [(call.name, *call.arguments[1:]) for call in log.calls if call.name in names]


def about(log: CallLog, name: str, slot: int) -> list[tuple[Any, ...]]:
    return [c.arguments for c in log.calls if c.name == name and slot in c.arguments[0]]


# ---- a request


def test_every_place_is_told_of_a_request_once() -> None:
    kv, logs = logged(HostTier(1 << 20), pages=16)
    with opened(kv, [*P, 7]) as seq:
        advance(kv, [seq], [[8] * 3])
        seq.close("tool_use")
    kv.clock.advance(s=5.0)
    opened(kv, [*P, 7, 8, 8, 8, 9]).close()
    for log in logs:
        visits = [call for call in log.calls if call.name == "access"]
        assert [call.arguments[1] for call in visits] == [(), (0, 1, 2)]
        assert [tuple(call.arguments[2]) for call in visits] == [
            (0, -1, 25, 3, 0),
            (1, -1, 29, 3, 0),
        ]
        ends = [call for call in log.calls if call.name == "complete"]
        assert [call.arguments[1] for call in ends] == [0, 1]
        assert [call.options for call in ends] == [
            {"stop": TOOL_USE, "output_tokens": 3},
            {"stop": 0, "output_tokens": 0},
        ]
    inserts = [call for call in logs[0].calls if call.name == "insert"]
    assert [call.arguments[1:] for call in inserts] == [((0, 1), (-1, 0)), ((2,), (1,))]
    assert inserts[0].options["n_bytes"] == 4096 and inserts[0].options["lease"] == ""


def test_what_was_given_up_is_still_named_and_comes_back_under_its_number() -> None:
    kv, (log,) = logged(pages=7)
    for prompt in (P, Q, R):
        published(kv, [*prompt, 9])
    known = {kv.planner.store.index.slot(seq_key) for seq_key in keys(kv, P)}
    assert known == {0, 1, 2} and kv.explain([*P, 9]).known < 24
    published(kv, [*P, 9])
    last = [call for call in log.calls if call.name == "access"][-1]
    assert last.arguments[1] == (0, 1, 2)
    assert sorted(set(log.resident())) == sorted({b.slot for b in kv.planner.store.index})
    assert kv.explain([*P, 9]).known == 24


def keys(kv: KV, tokens: list[int]) -> list[bytes]:
    with kv._probe(tokens, None, ()) as seq:
        return [seq.key(0, page) for page in range(len(tokens) // PAGE)]


def test_the_time_stands_still_while_pages_come_back_for_a_request() -> None:
    class Ticking(ManualClock):
        def now_ns(self) -> int:
            self.advance(ns=1000)
            return super().now_ns()

    kv, (device, _) = logged(HostTier(1 << 20), pages=5, clock=Ticking())
    for prompt in (P, Q):
        published(kv, [*prompt, 9])
    with kv.open([*P, 9]) as seq:
        assert seq.reused == 24
    access = [call for call in device.calls if call.name == "access"][-1]
    back = [c for c in device.calls if c.name == "insert" and c.arguments[0] >= access.arguments[0]]
    assert back and {call.arguments[0] for call in back} == {access.arguments[0]}


def test_every_layer_group_has_a_request_of_its_own() -> None:
    logs: list[CallLog] = []
    kv = make_kv(geometry(), policy=logged_by(logs, LRU), clock=ManualClock())
    for _ in range(2):
        opened(kv, [*P, 9], session="s").close()
    (log,) = logs
    visits = [call.arguments[1:] for call in log.calls if call.name == "access"]
    assert [visit.request for _, visit in visits] == [0, 1, 2, 3]
    full, sliding = visits[2][0], visits[3][0]
    assert len(full) == 3 and len(sliding) >= 1 and not set(full) & set(sliding)
    sessions = [visit.session for _, visit in visits]
    assert sessions[0] == sessions[2] != sessions[1] == sessions[3]


def test_a_request_that_fails_is_called_off() -> None:
    kv, (log,) = logged(pages=8)
    kv.restorer.restore = lambda seq, limit: 1 / 0
    with pytest.raises(ZeroDivisionError):
        kv.open(P)
    assert told(log, "abort", "complete") == [("abort", 0)]


def test_a_sequence_that_nobody_closes_ends_too_and_forks_are_no_requests() -> None:
    kv, (log,) = logged(pages=8)
    seq = opened(kv, [*P, 9])
    twin = kv.fork(seq)
    twin.close()
    assert told(log, "complete") == []
    del seq
    gc.collect()
    kv.close()
    assert told(log, "complete") == [("complete", 0)]
    with pytest.raises(ConfigError, match="Use one of tool_use, turn_end, cut_off"):
        twin.close("done")


def test_warming_is_no_request() -> None:
    kv, (device, _) = logged(HostTier(1 << 20), pages=5)
    for prompt in (P, Q):
        published(kv, [*prompt, 9])
    before = len(told(device, "access"))
    assert kv.warm(P) == 24 and len(told(device, "access")) == before


# ---- leases and priorities


def test_a_lease_ends_where_it_was_given_for() -> None:
    kv, _ = logged(HostTier(1 << 20), pages=16, policy="lfu-ttl")
    published(kv, [*P, 9], lease="one_shot")
    published(kv, [*Q, 9], lease=Lease(lease_s=1000.0))
    published(kv, [*R, 9])
    kv.clock.advance(s=61.0)
    assert [kv.explain([*p, 9]).known for p in (P, Q, R)] == [24] * 3  # nobody came by yet
    kv.open([5]).close()
    with kv.open([4] * 9):
        assert [kv.explain([*p, 9]).known for p in (P, Q, R)] == [0, 24, 24]
    kv.clock.advance(s=1000.0)
    with kv.open([4] * 9):
        assert [kv.explain([*p, 9]).known for p in (P, Q, R)] == [0, 0, 24]


@pytest.mark.parametrize("more", [{"lease": "turn_end"}, {"retain": [Retain(0, 16, priority=80)]}])
def test_a_request_does_not_renew_what_has_run_out(more: dict[str, Any]) -> None:
    lru = {"tiers": [HostTier(1 << 20)], "policy_options": {"max_age_s": 10}}
    kv = make_kv(simple(), pages=16, clock=ManualClock(), **lru)
    published(kv, [*P, 9])
    kv.clock.advance(s=11.0)
    with kv.open([*P, 9], **more) as seq:
        assert seq.reused == 0


def test_a_prompt_is_not_taken_over_once_it_has_run_out() -> None:
    kv = make_kv(simple(), pages=16, clock=ManualClock(), policy_options={"max_age_s": 10})
    with kv.open([*P, 9]) as seq:
        published(kv, [*P, 9])
        kv.clock.advance(s=11.0)
        kv.take_over(seq, write)
        assert (seq.reused, seq.length) == (0, 25)


def test_an_unknown_lease_is_refused_before_anything_happens() -> None:
    kv, (log,) = logged(pages=8)
    with pytest.raises(ConfigError, match="knows no lease class 'turn_ends'"):
        kv.open(P, lease="turn_ends")
    assert not kv._open and told(log, "access", "complete") == []


@pytest.mark.parametrize("order", [(P, Q), (Q, P)])
def test_spans_are_kept_by_their_priority(order: tuple[list[int], list[int]]) -> None:
    kv, _ = logged(pages=8)
    for prompt in order:
        retain = [Retain(0, 16, priority=90)] if prompt is P else []
        published(kv, [*prompt, 9], retain=retain)
    published(kv, [*R, 4, 4, 4, 4, 4, 4, 4, 4, 9])
    assert kv.explain([*P, 9]).known == 16 and kv.explain([*Q, 9]).known <= 8


def test_what_is_known_already_is_kept_as_the_next_request_says() -> None:
    kv, (log, _) = logged(HostTier(1 << 20), pages=16)
    published(kv, [*P, 9])
    before = len(log.calls)
    kv.open([*P, 9], retain=[Retain(8, 17, priority=80, for_s=5.0)]).close()
    inserts = [call for call in log.calls[before:] if call.name == "insert"]
    assert [call.arguments[1] for call in inserts] == [(1, 2)]
    assert inserts[0].options["lease"] == Lease(rank=80, rank_s=5.0)


def test_spans_overlap_and_may_be_open_ended() -> None:
    kv, (log,) = logged(pages=16)
    spans = [Retain(0, 9, priority=50), Retain(4, 8, priority=70), Retain(17, priority=10)]
    opened(kv, [*P, *P], retain=spans, lease="one_shot").close()
    leases = {}
    for call in log.calls:
        if call.name == "insert":
            leases |= dict.fromkeys(call.arguments[1], call.options["lease"])
    low = Lease(rank=10)
    assert [leases[s] for s in range(6)] == [Lease(rank=70), Lease(rank=50), low, low, low, low]


@pytest.mark.parametrize(
    "wrong", [{"start": 3, "stop": 3}, {"start": -1}, {"start": 0, "priority": 101}]
)
def test_a_span_is_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Retain(**wrong)
    kv, _ = logged(pages=8)
    with pytest.raises(ConfigError, match="Retain"):
        kv.open(P, retain=[(0, 8)])


# ---- hints, and requests that wait


def test_a_conversation_that_is_over_goes_first() -> None:
    kv, (log, _) = logged(HostTier(1 << 20), pages=8)
    opened(kv, [*P, 9], session="over").close()
    opened(kv, [*Q, 9], session=4711).close()
    assert kv.hint(4711, flowkv.NEVER) == 24
    assert kv.hint("over", 60.0, sigma=0.2) == 24
    assert kv.hint("4711", flowkv.SOON) == 0 == kv.hint("over", 1.0, tenant="bob")
    assert told(log, "hint") == [
        ("hint", (3, 4, 5), NEVER_NS, 0.5),
        ("hint", (0, 1, 2), 60_000_000_000, 0.2),
    ]
    published(kv, [*R, 9])
    assert kv.explain([*P, 9]).residency == {"device": 24}


def test_a_hint_may_name_a_prompt_and_reaches_below_the_device() -> None:
    kv, (_, host) = logged(HostTier(1 << 20), pages=5)
    for prompt in (P, Q):
        published(kv, [*prompt, 9])
    assert kv.hint([*P, 9], flowkv.SOON) == 24 and kv.hint([6] * 24, 5.0) == 0
    assert told(host, "hint") == [("hint", (0, 1, 2), 0, 0.5)]
    for eta_s, sigma in ((-1.0, 0.5), (float("nan"), 0.5), (1.0, -1.0), (1.0, float("inf"))):
        with pytest.raises(ConfigError):
            kv.hint(P, eta_s, sigma=sigma)


def test_the_last_turn_of_a_conversation_is_what_a_hint_is_about() -> None:
    kv, (log,) = logged(pages=16)
    with opened(kv, [*P, 9], session="s") as seq:
        for token in range(8):
            advance(kv, [seq], [[token]])
    assert kv.hint("s", 1.0) == 32
    assert told(log, "hint")[-1][1] == (0, 1, 2, 3)


def test_sessions_are_numbers_that_tell_no_name() -> None:
    numbers = {session_number(s, t) for s in ("a", "b", 1, "1") for t in (b"x", b"y")}
    assert len(numbers) == 8 and all(0 <= number < 1 << 62 for number in numbers)
    assert session_number("a", b"x") == session_number("a", b"x")


def test_a_request_that_waits_is_served_once_or_cancelled() -> None:
    kv, (log, _) = logged(HostTier(1 << 20), pages=8)
    published(kv, [*P, 9])
    first, second = kv.enqueue([*P, 9]), kv.enqueue([*P, 9], prefetch=False)
    other = kv.enqueue([7] * 3)
    assert first.waiting and second.waiting and other.waiting
    with kv.open([*P, 9]):
        assert not first.waiting and second.waiting
    visits = [call.arguments[2] for call in log.calls if call.name == "access"]
    assert [visit.request for visit in visits] == [0, 1]
    for _ in range(2):
        second.cancel()
        first.cancel()
    kv.open([7] * 3).close()
    assert not (first.waiting or second.waiting or other.waiting)
    assert repr(first) == "<flowkv.WaitingRequest: served or cancelled>"
    assert told(log, "enqueue", "abort") == [
        ("enqueue", 1, (0, 1, 2)),
        ("enqueue", 2, (0, 1, 2)),
        ("enqueue", 3, ()),
        ("abort", 2),
    ]


def test_what_waits_comes_nearer_and_stays() -> None:
    kv, _ = logged(HostTier(1 << 20), pages=7)
    for prompt in (P, Q, R):
        published(kv, [*prompt, 9])
    assert kv.explain([*P, 9]).residency.get("device", 0) < 24
    queued = kv.enqueue([*P, 9])
    assert queued.prefetch is not None and queued.prefetch.wait()
    published(kv, [*Q, 9])
    assert kv.explain([*P, 9]).residency == {"device": 24}
    with kv.open([*P, 9]) as seq:
        assert seq.reused == 24


# ---- nothing of what was erased stays


def traces_of(kv: KV, *numbers: int) -> set[int]:
    index = kv.planner.store.index
    return {slot for slot in numbers if slot in {index.slot(key) for key in known_keys(kv)}}


def known_keys(kv: KV) -> list[bytes]:
    index = kv.planner.store.index
    return [*index._by_key, *index.ghosts._known]


def test_an_erased_prompt_leaves_no_ghost_and_no_session() -> None:
    kv, (log,) = logged(pages=8)
    opened(kv, [*P, *P, 9], session="p").close()
    opened(kv, [*Q, 9], session="q").close()
    opened(kv, [*R, 9]).close()
    mine = set(keys(kv, [*P, *P]))
    assert mine & set(kv.planner.store.index.ghosts._known)
    waiting, other = kv.enqueue([*P, *P, 9]), kv.enqueue([*R, 9])
    kv.forget([*P, 9])
    assert not waiting.waiting and other.waiting
    assert not mine & set(kv.queue._waiting)
    assert not mine & set(known_keys(kv)) and keys(kv, Q)[0] in known_keys(kv)
    assert kv.hint("p", 1.0) == 0 < kv.hint("q", 1.0)
    assert {s for call in log.calls if call.name == "forget" for s in call.arguments[0]} >= set(
        range(6)
    )


def test_ghosts_of_a_prompt_that_lies_nowhere_are_erased_as_well() -> None:
    kv, _ = logged(pages=5)
    published(kv, [*P, *P[:8], 9])
    published(kv, [*Q, *Q[:8], 9])
    assert kv.explain([*P, 9]).known == 0 and len(kv.planner.store.index.ghosts) >= 4
    assert kv.forget([*P, 9]) == 0
    assert not set(keys(kv, [*P, *P[:8]])) & set(known_keys(kv))
    assert kv.forget([1] * 3) == 0 and not len(kv.planner.store.index.ghosts)  # no page to tell by


def test_a_shared_beginning_stays_and_the_tenants_of_others_too() -> None:
    kv, _ = logged(pages=16)
    opened(kv, [*P, 9]).close()
    opened(kv, [*P[:8], *Q, 9]).close()
    opened(kv, [*P, 9], tenant="bob").close()
    kv.forget([*P, 9])
    assert keys(kv, P)[0] in known_keys(kv) and not set(keys(kv, P)[1:]) & set(known_keys(kv))
    kv.forget(tenant="bob")
    with kv._probe(P, "bob", ()) as seq:
        assert seq.key(0, 0) not in known_keys(kv)
    kv.invalidate()
    assert known_keys(kv) == []


# ---- policies of all sorts


class Stubborn(LRU):
    """Counts no pins, as a policy may that was written against the abstract methods only."""

    name = "stubborn"
    pin = flowkv.Policy.pin
    unpin = flowkv.Policy.unpin

    def __init__(self) -> None:
        super().__init__()
        self.protected: list[int] = []

    def evict(self, now_ns: int, n: int, protected: Any = ()) -> Any:
        self.protected.append(len(protected))
        return super().evict(now_ns, n, protected)


def test_a_policy_that_counts_no_pins_is_told_what_is_protected() -> None:
    kv = make_kv(simple(), pages=8, policy=Stubborn)
    with opened(kv, [*P, 9]):
        published(kv, [*Q, 9])
        published(kv, [*R, 9])
        assert kv.explain([*P, 9]).residency == {"device": 24}
        assert kv.planner.store.device_places["cpu"].policy.protected[-1] >= 3
        with pytest.raises(CapacityError):
            opened(kv, [5] * 60)
        audit(kv)


def test_pins_are_told_once_and_as_late_as_possible() -> None:
    kv, (log,) = logged(pages=8)
    seq = opened(kv, [*P, 9])
    kv.pin(P)
    published(kv, [*Q, 9])
    assert told(log, "pin", "unpin") == []
    published(kv, [*R, 9])
    assert about(log, "pin", 0) == [((0, 1, 2),)]
    seq.close()
    published(kv, [*Q, 9])
    assert about(log, "unpin", 0) == []
    kv.pin(P, pinned=False)
    published(kv, [*R, 9])
    published(kv, [*Q, 9])
    assert len(about(log, "unpin", 0)) == 1


@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "hazard", "auto"])
def test_any_policy_keeps_the_books_in_order(policy: str) -> None:
    random = np.random.default_rng(5)
    kv, logs = logged(HostTier(20 * 5300), pages=12, policy=policy)
    for turn in range(60):
        kv.clock.advance(s=float(random.integers(1, 50)))
        base = [int(random.integers(4))] * 16
        prompt = [*base, *random.integers(0, 3, int(random.integers(1, 20))).tolist()]
        seq = prefill(kv, kv.open(prompt, session=int(random.integers(6))))
        if turn % 3 == 0:
            kv.hint(int(random.integers(6)), float(random.choice([0.0, 9.0, np.inf])))
        seq.close("tool_use" if turn % 2 else "turn_end")
        audit(kv)
    assert all(log.digest() for log in logs)
