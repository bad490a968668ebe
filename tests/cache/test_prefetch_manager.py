"""Prefetch to the device: expected pages come back before a request asks, and no others do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowkv
from flowkv import KV
from flowkv.policy import LRU, Slots
from flowkv.tiers import Completion, Load, Outcome
from tests.cache.audit import audit
from tests.cache.fakes import Wrapped, lasting
from tests.cache.test_cost import decode
from tests.cache.toy import advance, check_content, geometry, make_kv, opened, published, simple
from tests.calls import calls_of
from tests.inside import NEVER_NS, ConfigError, HostTier, ManualClock

P, Q, R = [1] * 24, [2] * 24, [3] * 24
PAGE_BYTES = 4096


def small(pages: int = 8, **options: Any) -> KV:
    """Two prompts of three pages fit beside a page to work with; the host has room for all."""
    tiers = options.pop("tiers", None) or [HostTier(1 << 20)]
    return make_kv(simple(), pages=pages, tiers=tiers, **{"clock": ManualClock()} | options)


def here(kv: KV, prompt: list[int]) -> int:
    """Tokens of a prompt on the device; asks nothing that would look ahead."""
    store = kv.planner.store
    seq = kv._lineless(kv.planner, None, ())
    seq.note(np.array([*prompt, 0], np.uint32))
    found = (store.index.find(seq.key(0, page)) for page in range(len(prompt) // 8))
    return 8 * sum(block is not None and block.page >= 0 for block in found)


def away(kv: KV, *prompts: list[int]) -> None:
    """Makes prompts known, and has all of them leave the device."""
    for prompt in prompts:
        published(kv, [*prompt, 9])
    empty(kv)
    assert [here(kv, prompt) for prompt in prompts] == [0] * len(prompts)


def empty(kv: KV) -> None:
    with kv.lock:
        while kv.planner.store.eviction.make_room(0, 1):
            kv.planner.store.writes.flush(5.0)


def edges(kv: KV, count: int = 3) -> None:
    """Steps of a request that has nothing to do with anything."""
    with opened(kv, [7]) as seq:
        for _ in range(count):
            advance(kv, [seq], [[7]])


def numbers_of(kv: KV) -> dict[str, Any]:
    return kv.stats()["prefetch"]["cpu"]


# ---- hints


@pytest.mark.parametrize("kind", ["host", "disk", "lasting"])
def test_a_hinted_prompt_is_back_before_it_is_opened(kind: str, tmp_path: Path) -> None:
    tier = {
        "host": HostTier(1 << 20),
        "disk": f"disk:{tmp_path / 'kv'}:64MiB",
        "lasting": lasting(),
    }
    kv = small(tiers=[tier[kind]])
    away(kv, P, Q)
    assert kv.hint([*P, 9], 60.0, sigma=0.1) == 24
    kv.clock.advance(s=20.0)
    edges(kv)
    assert here(kv, P) == 0, "until it is due it would only take room"
    kv.clock.advance(s=36.0)
    edges(kv, 1)
    assert kv.flush(5.0)
    for _ in range(200):
        if here(kv, P) == 24:
            break
        kv.planner.store.writes.drain(0.01)
    assert (here(kv, P), here(kv, Q)) == (24, 0)
    loaded = kv.stats()["tiers"]
    with kv.open([*P, 9]) as seq:
        assert seq.reused == 24
        check_content(kv, seq, P)
    assert [t["loaded_bytes"] for t in kv.stats()["tiers"].values()] == [
        t["loaded_bytes"] for t in loaded.values()
    ], "nobody had to wait"
    hint = numbers_of(kv)["hint"]
    assert hint == {
        "fetched_bytes": 3 * PAGE_BYTES,
        "used_bytes": 3 * PAGE_BYTES,
        "wasted_bytes": 0,
        "precision": 1.0,
    }


def test_what_is_never_used_again_is_not_brought() -> None:
    kv = small()
    away(kv, P)
    kv.hint([*P, 9], 30.0)
    kv.hint([*P, 9], flowkv.NEVER)
    for _ in range(20):
        kv.clock.advance(s=10.0)
        edges(kv)
    assert here(kv, P) == 0 and numbers_of(kv)["hint"]["fetched_bytes"] == 0
    assert all(one.due_ns == NEVER_NS for one in kv.prefetches.groups)


def test_a_hint_takes_no_room_from_what_the_policy_cannot_compare() -> None:
    kv = small(pages=5)
    away(kv, P)
    published(kv, [*Q, *Q[:8], 9])
    kv.hint([*P, 9], 1.0)
    for _ in range(8):
        kv.clock.advance(s=0.5)
        edges(kv)
    assert here(kv, [*Q, *Q[:8]]) >= 24, "lru has no rates: only free pages are used"


def test_a_hint_of_a_windowed_model_brings_what_the_window_shows() -> None:
    kv = make_kv(geometry(), pages=24, tiers=[HostTier(1 << 20)], clock=ManualClock())
    text = [*P, *Q, 9]
    published(kv, text)
    with kv.lock:
        evicted = kv.planner.store.eviction.make_room
        while evicted(0, 1) or evicted(1, 1):
            kv.planner.store.writes.flush(5.0)
    kv.hint(text, 1.0)
    kv.clock.advance(s=1.0)
    edges(kv)
    pages = [b.page >= 0 for b in kv.planner.store.index if b.tenant and b.group == 1]
    assert 0 < sum(pages) <= 3
    loaded = kv.stats()["tiers"]["host"]["loaded_bytes"]
    with kv.open(text) as seq:
        assert seq.reused == 48
    assert kv.stats()["tiers"]["host"]["loaded_bytes"] == loaded


def test_a_hint_about_an_erased_prompt_holds_no_longer() -> None:
    kv = small()
    away(kv, P)
    kv.hint([*P, 9], 5.0)
    kv.forget([*P, 9])
    away(kv, Q)
    kv.clock.advance(s=5.0)
    edges(kv)
    assert here(kv, Q) == 0 and numbers_of(kv)["hint"]["fetched_bytes"] == 0


# ---- requests that wait


def test_the_queue_goes_first() -> None:
    kv = small(pages=5)
    away(kv, P, Q)
    kv.hint([*Q, 9], 1.0, sigma=0.0)
    kv.clock.advance(s=1.0)
    queued = kv.enqueue([*P, 9])
    edges(kv)
    assert here(kv, P) == 24 > here(kv, Q)
    assert queued.prefetch is not None and queued.prefetch.arrived == 3
    with kv.open([*P, 9]) as seq:
        assert seq.reused == 24
    assert numbers_of(kv)["queue"]["used_bytes"] == 3 * PAGE_BYTES


def test_who_waits_no_longer_gets_nothing_more() -> None:
    kv = small(pages=5)
    away(kv, P)
    with opened(kv, [*Q, *Q[:8]]):  # no page is free
        queued = kv.enqueue([*P, 9])
        assert here(kv, P) < 24
        queued.cancel()
    empty(kv)
    kv.clock.advance(s=100.0)
    edges(kv)
    assert here(kv, P) == 0


def test_requests_behind_the_first_256_are_looked_at_once_those_are_served() -> None:
    kv = small(pages=12)
    away(kv, P, Q, R)
    first, *_ = [kv.enqueue([*P, 9]) for _ in range(256)]
    kv.enqueue([*Q, 9])
    kv.enqueue([*R, 9])
    assert [here(kv, prompt) for prompt in (P, Q, R)] == [24, 0, 0]
    for cancelled in (True, False):
        first.cancel() if cancelled else kv.open([*P, 9]).close()
        kv.clock.advance(s=2.0)
        edges(kv)
        assert (here(kv, Q), here(kv, R)) == (24, 0 if cancelled else 24), "oldest first"
    assert numbers_of(kv)["queue"]["fetched_bytes"] == 9 * PAGE_BYTES


def test_what_did_not_fit_comes_when_there_is_room() -> None:
    kv = small(pages=5)
    away(kv, P)
    with opened(kv, [*Q, *Q[:8]]):
        kv.enqueue([*P, 9])
        assert here(kv, P) < 24
    kv.clock.advance(s=2.0)
    edges(kv)
    assert here(kv, P) == 24


# ---- what is learned


class Longing(LRU):
    """Wants what it is told to, and gives nothing for it."""

    name = "longing"
    wanted_slots: tuple[int, ...] = ()

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, Any]:
        return np.array(self.wanted_slots, np.int64), np.full(len(self.wanted_slots), 0.1)


def test_what_was_learned_comes_once_it_may_cost_something() -> None:
    kv = small(policy=Longing, prefetch={"probe_share": 1.0})
    away(kv, P, Q)
    policy = kv.planner.store.device_places["cpu"].policy
    policy.wanted_slots = (kv.planner.store.index.chain(key_of(kv, P))[-1],)
    kv.clock.advance(s=5.0)
    edges(kv)
    assert here(kv, P) == 0, "its budget is empty"
    for _ in range(4):  # a quarter of the bytes that were demanded may be risked, and so on
        opened(kv, [*Q, 9]).close()
        empty(kv)
    for _ in range(4):
        kv.clock.advance(s=5.0)
        edges(kv)
    assert here(kv, P) > 0
    learned = numbers_of(kv)["learned"]
    assert learned["fetched_bytes"] == here(kv, P) // 8 * PAGE_BYTES


def key_of(kv: KV, prompt: list[int]) -> bytes:
    seq = kv._lineless(kv.planner, None, ())
    seq.note(np.array(prompt, np.uint32))
    return seq.key(0, len(prompt) // 8 - 1)


def agents(kv: KV, rounds: int) -> None:
    """Agents whose turns come back every ten seconds, and one-shot prompts between them."""
    rng = np.random.default_rng(5)
    texts = [[100 + agent] * 16 for agent in range(4)]
    for turn in range(rounds):
        for agent, text in enumerate(texts):
            kv.clock.advance(s=2.4 + 0.2 * float(rng.random()))
            seq = opened(kv, [*text, 1 + turn], session=agent)
            seq.close("tool_use")
            edges(kv, 1)
        opened(kv, rng.integers(1000, 9000, 33).tolist()).close()


def test_a_learned_policy_brings_back_what_agents_come_back_for() -> None:
    waited_for = {}
    for prefetch in ("auto", "off"):
        kv = small(pages=9, policy="hazard", prefetch=prefetch)
        agents(kv, 60)
        waited_for[prefetch] = kv.stats()["tiers"]["host"]["loaded_bytes"]
        if prefetch == "auto":
            learned = numbers_of(kv)["learned"]
            waited_for[prefetch] -= learned["fetched_bytes"]
            assert learned["used_bytes"] > 0.8 * learned["fetched_bytes"] > 0
        audit(kv)
        kv.close()
    assert waited_for["auto"] < 0.6 * waited_for["off"]


def test_documents_that_recur_in_an_order_come_before_they_are_asked_for() -> None:
    """The times between them say nothing: an order is all that can be learned."""
    waited_for = {}
    for prefetch in ("markov", "auto", "off"):
        rng = np.random.default_rng(3)
        kv = small(pages=12, policy="hazard", prefetch=prefetch)
        for turn in range(60):
            for document in range(5):
                kv.clock.advance(s=float(rng.exponential(20.0)))
                opened(kv, [*[10 + document] * 24, 100 + turn]).close()
                edges(kv, 1)
        waited_for[prefetch] = kv.stats()["tiers"]["host"]["loaded_bytes"]
        if prefetch != "off":
            learned = numbers_of(kv)["learned"]
            waited_for[prefetch] -= learned["fetched_bytes"]
        if prefetch == "markov":
            assert learned["used_bytes"] > 0.8 * learned["fetched_bytes"] > 0
        audit(kv)
        kv.close()
    assert waited_for["markov"] < 0.7 * waited_for["auto"] < 0.7 * waited_for["off"]


# ---- what it costs


@pytest.mark.at_once
@pytest.mark.parametrize("fills", [False, True], ids=["in a page", "at a border"])
def test_where_nothing_is_expected_a_step_calls_nothing_more(fills: bool) -> None:
    counts = []
    for prefetch in ("auto", "off"):
        kv = small(pages=64, prefetch=prefetch, write_back=False)
        seqs = [opened(kv, [row] * (17 - fills * 2)) for row in range(4)]
        for seq in seqs:
            seq.note([7] * 20)
        decode(kv, seqs)()
        if not fills:
            decode(kv, seqs)()
        counts.append(calls_of(decode(kv, seqs)))
        for seq in seqs:
            seq.close()
        kv.close()
    assert counts[0] == counts[1]


@pytest.mark.at_once
def test_until_something_is_due_an_edge_only_looks_at_the_clock() -> None:
    counts = []
    for eta_s in (None, 1000.0):
        kv = small(pages=64)
        away(kv, P)
        seqs = [opened(kv, [row] * 17) for row in range(4)]
        if eta_s is not None:
            kv.hint([*P, 9], eta_s)
        decode(kv, seqs)()
        counts.append(calls_of(decode(kv, seqs)))
        for seq in seqs:
            seq.close()
        kv.close()
    assert 0 < counts[1] - counts[0] <= 6


def test_a_guard_that_says_no_is_heard_before_anything_leaves() -> None:
    kv = small(pages=5)
    away(kv, P)
    published(kv, [*Q, 9])
    lane = kv.planner.store.stack.mover.lanes[0]
    lane.guard.wasted(lane.clock_ns(), 1 << 30)
    kv.enqueue([*P, 9])
    edges(kv)
    assert (here(kv, P), here(kv, Q)) == (0, 24) and lane.guard.rests == 1


class Failing(Wrapped):
    """Fails to load until told otherwise."""

    fails = True

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        if not self.fails:
            return int(self.inner.submit_load(items))
        failed = [Completion(-1, i, one.key, Outcome.FAILED, "io") for i, one in enumerate(items)]
        self.ready = failed
        return -1

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        ready, self.ready = self.__dict__.get("ready", []), []
        return [*ready, *self.inner.poll(0.0)]


def test_what_did_not_come_may_be_asked_for_again() -> None:
    tier = Failing(HostTier(1 << 20))
    kv = small(tiers=[tier])
    away(kv, P)
    for fails in (True, False):
        tier.fails = fails
        kv.hint([*P, 9], 1.0)
        kv.clock.advance(s=1.0)
        edges(kv)
        assert here(kv, P) == (0 if fails else 24)


def test_what_nobody_used_counts_as_wasted() -> None:
    kv = small()
    away(kv, P)
    kv.hint([*P, 9], 1.0)
    kv.clock.advance(s=1.0)
    edges(kv)
    assert here(kv, P) == 24
    empty(kv)
    edges(kv)
    assert numbers_of(kv)["hint"]["wasted_bytes"] == 3 * PAGE_BYTES


# ---- the switch


def test_switched_off_nothing_comes_by_itself() -> None:
    kv = small(prefetch="off")
    away(kv, P, Q)
    assert kv.prefetches is None and kv.stats()["prefetch"] == {}
    kv.hint([*P, 9], 1.0)
    for _ in range(5):
        kv.clock.advance(s=1.0)
        edges(kv)
    assert here(kv, P) == 0
    assert kv.enqueue([*Q, 9]).prefetch.wait(5.0) and here(kv, Q) == 24  # that is asked for


def test_without_a_tier_there_is_nothing_to_bring() -> None:
    with make_kv(simple()) as kv:
        assert kv.prefetches is None and kv.stats()["prefetch"] == {}


@pytest.mark.parametrize("wrong", ["on", {"margins": 1.0}, {"margin": -1.0}, {"learned": "all"}])
def test_the_option_is_checked_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="prefetch"):
        KV(prefetch=wrong)


class Told(LRU):
    """Remembers what pages are said to cost."""

    def insert(self, now_ns: int, slots: Any, parents: Any = None, **said: Any) -> Any:
        self.costs = [*getattr(self, "costs", []), said["cost_ns"]]
        return super().insert(now_ns, slots, parents, **said)


def test_policies_are_told_what_a_page_costs_where_it_is() -> None:
    kv = make_kv(simple(), policy=Told)
    for number in range(9):
        kv.gate.computed(64, 64 * (1e-3 + 1e-6 * 200 * number), 200.0 * number)
    kv.planner.measured = lambda *_: None
    published(kv, list(range(32 * 8)))
    costs = kv.planner.store.device_places["cpu"].policy.costs
    wanted = [8 * (1e-3 + 1e-6 * (16 * n + 8)) * 1e9 for n in range(16)]  # two pages at a time
    assert costs == pytest.approx(wanted, rel=0.05) and costs == sorted(costs)
