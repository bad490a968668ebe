"""Several places: the same decisions as the plain loop where there is one, and sums that fit."""

from __future__ import annotations

from itertools import zip_longest
from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import NEVER
from flowkv.policy import Policy, make_policy
from flowkv.policy.prefetch import Prefetcher
from flowkv.sim import Trace, build_trace, generate, replay
from flowkv.testing import MemoryTier
from tests.cache.fakes import lasting
from tests.cache.toy import PAGE, advance, make_kv, simple
from tests.inside import (
    HARDWARE,
    MODELS,
    WRITE_RULES,
    ConfigError,
    Hit,
    ManualClock,
    OnePlace,
    PlaceStack,
    Quota,
    ReplayTier,
    Shape,
    Tenants,
    TraceHints,
    WriteAdmission,
    block_costs,
    first_tokens_s,
    hints_of,
    tier_from,
    wide,
)
from tests.inside import hardware_CODECS as CODECS
from tests.policy.call_log import CallLog
from tests.sim.stories import chains, run_through, told, traces

S, PAGE_BYTES = 10**9, 4096
Found = list[list[int]]
Content = list[set[int]]
Calls = list[list[Any]]
Quotas = dict[str, dict[str, tuple[int, float]]]

QUOTAS: Quotas = {
    "0": {"gpu": (4, 6), "host": (2, 8), "disk": (0, 12)},
    "1": {"gpu": (3, inf), "host": (0, inf), "disk": (0, inf)},
}
"""Blocks that each tenant has in reserve in a place of a kind, and the most."""


@settings(max_examples=15)
@given(trace=traces, capacity=st.integers(0, 12))
def test_held_blocks_stay_in_a_stack_as_in_one_place(trace, capacity):
    """Room is made before a request, and behind it its first blocks are there."""
    alone = OnePlace(trace, make_policy("lfu-ttl"), capacity, held=True)
    for r, now in enumerate(trace.times_ns.tolist()):
        alone.serve(r, now)
        assert alone.here[alone.chain(r)[:capacity]].all() and alone.used <= capacity
    stack = PlaceStack(trace, [make_policy("lfu-ttl")], [capacity], held=True)
    assert stack.replay().hits.tolist() == alone.course.hits.tolist()


@settings(max_examples=15)
@given(trace=traces, held=st.booleans())
def test_a_limit_of_a_tenant_holds_in_one_place_as_in_a_stack(trace, held):
    policies = [Tenants(lambda: make_policy("lfu-ttl"), {0: Quota(0, 5)}) for _ in range(2)]
    alone = OnePlace(trace, policies[0], 9, held=held)
    stack = PlaceStack(trace, policies[1:], [9], held=held)
    assert stack.replay().hits.tolist() == alone.replay().hits.tolist() and alone.used <= 5


@settings(max_examples=12)
@given(trace=traces, rooms=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_sums(trace, rooms):
    stack = PlaceStack(trace, [make_policy("lru") for _ in rooms], rooms)
    course = stack.replay()
    assert stack.found.sum(axis=1).tolist() == course.hits.tolist()
    alone = run_through(trace, make_policy("lru"), rooms[0])
    assert (course.hits >= alone).all()
    assert (stack.found[:, 0] <= alone).all() or len(rooms) == 1
    if max(rooms) >= trace.unique:
        assert course.loaded.sum() == 0


def test_what_leaves_one_place_is_found_in_the_next():
    trace = generate("agents", requests=1200, seed=1)
    alone = replay(trace, "lru", size="2%")
    both = replay(trace, "lru", size="2%", tiers=["dram:10%"])
    assert both.extra["hit_ratio_hbm"] == pytest.approx(alone.prefix_hit_ratio, abs=0.02)
    assert both.prefix_hit_ratio > alone.prefix_hit_ratio + 0.2
    assert both.prefix_hit_ratio == pytest.approx(
        both.extra["hit_ratio_hbm"] + both.extra["hit_ratio_dram"]
    )
    assert both.row()["source"] == "simulated"
    assert both.closure is None


def test_compression_is_room():
    trace = generate("agents", requests=1200, seed=1)
    ratios = [
        replay(trace, "lru", size="2%", codec=codec).prefix_hit_ratio for codec in ("raw", "kv8")
    ]
    tiers = ["dram:3%", "dram:3%:kv8", "dram:3%:kv4"]
    results = [replay(trace, "lru", size="1%", tiers=[tier]) for tier in tiers]
    hits = [result.prefix_hit_ratio for result in results]
    assert hits == sorted(hits)
    assert len(set(hits)) == 3
    rooms = [result.extra["room_gib_dram"] for result in results]
    assert rooms == pytest.approx([rooms[0]] * 3, rel=0.02)
    assert ratios[0] < ratios[1]


def test_times_by_hand():
    """Four blocks of 4 tokens: two in the first place, one in the second, one nowhere."""
    trace = told([(0, [0, 1, 0, 1], 0)])
    machine, shape = HARDWARE["h100"], Shape(parameters=1e9)
    tiers = [ReplayTier(place="hbm", size=0.5), ReplayTier(place="disk", size=0.5)]
    costs = block_costs(trace, shape) / (machine.flops * machine.efficiency)
    last = float(shape.prefill_flops(np.array([16.0]), 1.0)[0]) / machine.flops / 0.5
    disk = machine.place("disk")
    load = disk.latency_s + 4 * shape.token_bytes() / disk.bytes_per_s
    got = first_tokens_s(trace, np.array([[2, 1]]), tiers, machine, shape)
    assert got.tolist() == pytest.approx([min(load, costs[2]) + costs[3] + last])
    everything = first_tokens_s(trace, np.array([[4, 0]]), tiers, machine, shape)
    assert everything.tolist() == pytest.approx([last])
    nothing = first_tokens_s(trace, np.array([[0, 0]]), tiers, machine, shape)
    assert nothing.tolist() == pytest.approx([costs.sum() + last])


@settings(max_examples=15)
@given(trace=traces, name=st.sampled_from(list(HARDWARE)), data=st.data())
def test_a_load_is_never_slower_than_to_compute(trace, name, data):
    sizes = np.diff(trace.offsets)
    found = np.array([[data.draw(st.integers(0, int(n))), 0] for n in sizes])
    found[:, 1] = sizes - found[:, 0]
    tiers = [ReplayTier(place="hbm", size=1.0), ReplayTier(place="remote", size=1.0)]
    some, none = (
        first_tokens_s(trace, f, tiers, HARDWARE[name], MODELS["8b"]) for f in (found, found * 0)
    )
    assert (some <= none * (1 + 1e-12)).all()
    assert (some > 0).all()


def test_profiles_are_plausible():
    for machine in HARDWARE.values():
        rates = [place.bytes_per_s for place in machine.places]
        prices = [place.dollars_per_gib_hour for place in machine.places]
        latencies = [place.latency_s for place in machine.places]
        assert rates[0] == max(rates)
        assert prices[0] == max(prices)
        assert latencies == sorted(latencies)
    assert MODELS["8b"].token_bytes() == 131_072
    assert CODECS["raw"] == 1.0 > CODECS["kv8"] > CODECS["kv4"]


def test_deep_blocks_cost_more():
    costs = block_costs(told([(0, [0, 1, 2, 0], 0)]))
    assert (np.diff(costs) > 0).all()


def test_named_hardware_adds_times():
    trace = generate("chat", requests=300, seed=1)
    results = [replay(trace, name, size="5%", hardware="laptop") for name in ("lru", "opt")]
    lru, opt = (result.row() for result in results)
    assert opt["ttft_ms_mean"] < lru["ttft_ms_mean"] < lru["ttft_ms_mean_without"]
    assert lru["hardware"] == "laptop"


def test_unknown_lengths_have_the_price_of_whole_blocks():
    trace = told([(0, [0, 1], 0), (9, [0, 1, 2], 0)])
    free = msgspec.structs.replace(trace, input_tokens=0 * trace.input_tokens)
    one, other = (replay(t, "lru", pages=2, hardware="h100") for t in (trace, free))
    assert one.extra == other.extra


def test_wrong_tiers_are_named():
    trace = generate("chat", requests=50, seed=1)
    assert tier_from("dram:5%:kv8") == ReplayTier(place="dram", size=0.05, codec="kv8")
    for bad in ("dram", "dram:", "dram:x", "a:1%:raw:b"):
        with pytest.raises(ConfigError, match=r"is no (tier|share)"):
            tier_from(bad)
    for more, message in [
        ({"tiers": ["tape:5%"]}, "no place 'tape'"),
        ({"tiers": ["dram:5%:zip"]}, "no codec 'zip'"),
        ({"tiers": ["dram:5%"], "hardware": "abacus"}, "'abacus' is not known"),
        ({"tiers": ["dram:5%"], "model": "9t"}, "'9t' is not known"),
        ({"tiers": ["dram:5%"], "hints": 0.5}, "with tiers there are no hints"),
    ]:
        with pytest.raises(ConfigError, match=message):
            replay(trace, "lru", size="1%", **more)


@pytest.mark.parametrize("rule", WRITE_RULES)
def test_write_admission_writes_less_than_all(rule):
    trace = generate("chat", requests=4000, seed=2)
    told = {"size": "5%", "tiers": ["dram:5%", "disk:100%"]}
    whole, some = replay(trace, "lru", **told), replay(trace, "lru", admit=rule, **told)
    assert some.extra["admit"] == rule and whole.extra["declined"] == 0 < some.extra["declined"]
    assert some.extra["written_disk"] < whole.extra["written_disk"]
    assert some.extra["written_dram"] == whole.extra["written_dram"] > 0
    assert some.prefix_hit_ratio <= whole.prefix_hit_ratio
    if rule == "auto":
        assert whole.prefix_hit_ratio - some.prefix_hit_ratio < 0.01


def test_write_admission_needs_a_place_that_lasts():
    with pytest.raises(ConfigError, match="without a place that lasts"):
        replay(generate("chat", requests=20, seed=2), "lru", size="5%", admit="auto")


def test_an_unknown_rule_of_write_admission_is_refused_with_all_that_there_are():
    with pytest.raises(ConfigError, match="all, second-touch, auto"):
        told = {"tiers": ["disk:100%"], "admit": "thrice"}
        replay(generate("chat", requests=20, seed=2), "lru", size="5%", **told)


# --- the live cache -------------------------------------------------------------------------------


def talks(seed: int, requests: int) -> Trace:
    """Nine conversations of two tenants that grow, branch and begin again."""
    rng = np.random.default_rng(seed)
    words: list[list[int]] = [[int(rng.integers(3))] for _ in range(9)]
    times, asked, now = [], list[tuple[int, list[int]]](), 0
    for _ in range(requests):
        now += int(rng.exponential(5 * S)) + 1
        n = int(rng.integers(9))
        if rng.random() < 0.15:
            words[n] = words[n][: int(rng.integers(1, len(words[n]) + 1))]
        words[n] = words[n] + rng.integers(0, 3, int(rng.integers(0, 3))).tolist()
        if len(words[n]) > 8:
            words[n] = [int(rng.integers(3))]
        times.append(now)
        asked.append((n, words[n]))
    letters = [x for n, word in asked for x in (word[0] + 1000 * (n % 2 + 1), *word[1:])]
    lengths = [len(word) for _, word in asked]
    return build_trace(
        "talks", np.array(times), lengths, wide(letters), PAGE, sessions=[n for n, _ in asked],
        tenants=[n % 2 for n, _ in asked], input_tokens=[n * PAGE + 1 for n in lengths],
    )  # fmt: skip


def shares(kinds: dict[str, tuple[int, float]], size: int) -> dict[str, str]:
    """A tenant's quotas as the text of a configuration, with blocks of a size."""
    return {
        kind: f"{reserve * size}B:{'' if limit == inf else f'{limit * size}B'}"
        for kind, (reserve, limit) in kinds.items()
    }


def story_of(log: CallLog, blocks: dict[int, int], *, joined: bool = False) -> Calls:
    """Calls that change a policy, about blocks, and tenants and sessions in order of first use.

    Evictions that follow each other are one: tiers make room page by page. So are with `joined`
    inserts of a chain: prefetched pages arrive one by one.
    """
    numbers, calls, start_ns = dict[Any, int](), Calls(), log.calls[0].arguments[0]
    for name, arguments, options, answer in log.calls:
        if name == "evict":
            if calls[-1][0] != name:
                calls.append([name, []])
            calls[-1][1] += [blocks[slot] for slot in answer or ()]
        elif name == "complete":
            calls.append([name, *arguments[1:], *map(int, options.values())])
        elif name == "remove" and arguments[0]:
            calls.append([name, [blocks[slot] for slot in arguments[0]]])
        elif name in ("wanted", "displace", "hint", "enqueue"):
            now_ns, *said = arguments
            named = [[blocks[slot] for slot in some] for some in said if type(some) is tuple]
            said = [one for one in said if type(one) is not tuple]
            chosen = answer[0] if name == "wanted" else answer or ()
            calls.append([name, now_ns - start_ns, named, said, [blocks[slot] for slot in chosen]])
        elif name == "access" or (name == "insert" and arguments[1]):
            now_ns, slots, more = arguments
            if name == "access":
                request, session, *sizes, tenant = more
                said = [request, numbers.setdefault(("session", session), len(numbers)), *sizes]
            else:
                tenant, said = options["tenant"], [[blocks.get(slot, -1) for slot in more]]
                said += [options["cost_ns"], options["lease"]]
            said.append(numbers.setdefault(("tenant", tenant), len(numbers)))
            new = [name, now_ns - start_ns, [blocks[slot] for slot in slots], *said]
            last = calls[-1] if joined and calls and name == "insert" else new[:1] * 3
            if last[:2] == new[:2] and last[2][-1:] == new[3][:1] and last[4:] == new[4:]:
                last[2] += new[2]
                last[3] += new[3]
            else:
                calls.append(new)
    return calls


def live(
    trace: Trace, policy: str, rooms: list[int], lasts: list[bool], admit: str,
    quotas: Quotas | None = None, *, hints: TraceHints | None = None, queue_ns: int = 0,
    prefetch: Any = "off", **options: Any,
) -> tuple[Found, Content, list[Calls]]:  # fmt: skip
    """Blocks that each request reads from each place, the content at the end, and all calls."""
    clock, found, names, logs = ManualClock(), Found(), dict[bytes, int](), list[CallLog]()
    tiers = [
        lasting(capacity_bytes=room * PAGE_BYTES, name=str(k))
        if lasts[k]
        else MemoryTier(room * PAGE_BYTES, name=str(k))
        for k, room in enumerate(rooms)
        if k
    ]

    def make() -> Policy:
        logs.append(CallLog(make_policy(policy, **options)))
        return logs[-1]

    given = {name: shares(kinds, PAGE_BYTES) for name, kinds in (quotas or {}).items()}
    kv = make_kv(
        simple(), pages=rooms[0], policy=make, clock=clock, tiers=tiers, prefetch=prefetch,
        admit=admit, quotas=given,
    )  # fmt: skip
    store = kv.planner.store
    assert store.pools["cpu"].capacity_granules == rooms[0]

    def note(event: Hit) -> None:
        found[-1][0 if event.tier == "device" else int(event.tier)] += event.tokens // PAGE

    def settle() -> None:
        with kv.lock:
            while store.writes.drain():
                pass

    def wait(until_ns: int) -> None:
        """Let time pass, with an edge whenever a prefetch is due, as between steps of others."""
        for one in kv.prefetches.devices.values() if kv.prefetches else ():
            while one.due_ns <= until_ns:
                clock.advance(ns=max(one.due_ns - clock.now_ns(), 0))
                with kv.lock:
                    one.edge()
                settle()
        clock.advance(ns=max(until_ns - clock.now_ns(), 0))

    kv.bus.subscribe(note, Hit)
    times, queued = trace.times_ns - trace.times_ns[0] + clock.now_ns(), 0
    asked = [[*np.repeat(chain, PAGE).tolist(), 10**6] for chain in chains(trace)]
    for r, (now_ns, tokens) in enumerate(zip(times.tolist(), asked, strict=True)):
        while queue_ns and queued < len(times) and times[queued] - queue_ns <= now_ns:
            wait(max(int(times[queued]) - queue_ns, int(times[0])))
            kv.enqueue(asked[queued], tenant=str(trace.tenants[queued]))
            queued += 1
            settle()
        wait(now_ns)
        found.append([0] * len(rooms))
        tenant, pages = str(trace.tenants[r]), len(tokens) // PAGE
        with kv.open(tokens, session=int(trace.sessions[r]), tenant=tenant) as seq:
            names.update((seq.key(0, page), tokens[page * PAGE]) for page in range(pages))
            if part := tokens[seq.position : -1]:  # without the open page of the last token
                advance(kv, [seq], [part])
            settle()
        settle()
        if hints is not None:
            n, eta_s = int(hints.counts[r]), int(hints.etas_ns[r]) / S
            for count, when_s in [(pages, NEVER)] * (n < pages) + [(n, eta_s)] * (n > 0):
                kv.hint(tokens[: count * PAGE], when_s, sigma=0.5, tenant=tenant)
    here = [{names[b.key] for b in store.index if b.page >= 0}]
    here += [{names[b.key] for b in store.index if b.tiers >> k & 1} for k in range(len(tiers))]
    blocks = dict(zip(store.index.slots(names), names.values(), strict=True))
    calls = [story_of(log, blocks, joined=prefetch != "off") for log in logs]
    kv.close()
    return found, here, calls


def simulated(
    trace: Trace, policy: str, rooms: list[int], lasts: list[bool], admit: str,
    quotas: Quotas | None = None, **options: Any,
) -> tuple[Found, Content, list[Calls]]:  # fmt: skip
    """The same of the simulator."""
    rule = None if admit == "all" else WriteAdmission(admit)
    logs = list[CallLog]()

    def make() -> Policy:
        logs.append(CallLog(make_policy(policy, **options)))
        return logs[-1]

    kinds = ["gpu", *("disk" if last else "host" for last in lasts[1:])]
    policies = [
        Tenants(make, {int(name): Quota(*some[kind]) for name, some in quotas.items()})
        if quotas
        else make()
        for kind in kinds
    ]
    stack = PlaceStack(trace, policies, rooms, lasts, rule, held=True)
    stack.replay()
    known = stack.ledger._blocks[: trace.unique]
    block_of = {lo: block for block, lo in enumerate(wide(np.arange(trace.unique))[:, 0].tolist())}
    blocks = {slot: block_of[lo] for slot, lo in enumerate(known["lo"].tolist())}
    places = [np.flatnonzero(known["here"] >> k & 1).tolist() for k in range(len(rooms))]
    here = [{blocks[slot] for slot in some} for some in places]
    return stack.found.tolist(), here, [story_of(log, blocks) for log in logs]


SHARED, TIMED = {"quotas": QUOTAS}, {"lease_s": 25.0, "max_age_s": 80.0}


@pytest.mark.parametrize(
    ("policy", "lasts", "admit", "more"),
    [
        ("arc", [], "all", {}),
        ("lru", [False, True], "all", {}),
        ("lfu-ttl", [False, True], "auto", {}),
        ("hazard", [False], "all", {}),
        ("lru", [False, True, True], "all", {}),
        ("lru", [], "all", SHARED),
        ("lfu-ttl", [False, True], "all", SHARED),
        ("lru", [True], "all", TIMED),
        ("lfu-ttl", [False, True], "all", TIMED),
        *(
            pytest.param(policy, lasts, admit, more, marks=pytest.mark.thorough)
            for policy in ("lru", "lfu-ttl", "cost-aware", "hazard")
            for lasts in ([False], [True], [False, True], [False, True, True])
            for admit, more in (("all", SHARED), ("all", TIMED), ("auto", SHARED), ("auto", TIMED))
            if admit == "all" or any(lasts)
        ),
        *(
            pytest.param(policy, lasts, admit, {}, marks=pytest.mark.thorough)
            for policy in ("lru", "lfu-ttl", "cost-aware", "hazard", "auto")
            for lasts in ([False], [True], [False, True], [False, True, True])
            for admit in ("all", "auto", "second-touch")
            if (admit == "all" or any(lasts))
            and (len(lasts) < 2 or policy[:2] in ("lr", "lf", "co"))
        ),
    ],
)
def test_a_live_cache_reads_and_holds_what_the_simulator_says(policy, lasts, admit, more):
    rooms = [16 if more else 12, *[(), (20,), (16, 40), (16, 20, 30)][len(lasts)]]
    trace = talks(seed=len(policy) - len(lasts), requests=120)
    want, content, calls = live(trace, policy, rooms, [False, *lasts], admit, **more)
    got, here, others = simulated(trace, policy, rooms, [False, *lasts], admit, **more)
    for some, same in [(want, got), *zip(calls, others, strict=True)]:
        assert next((pair for pair in zip_longest(some, same) if pair[0] != pair[1]), None) is None
    assert here == content
    counts = [sum(column) for column in zip(*want, strict=True)]
    if more is TIMED:  # few pages live until they are asked for in a slower place
        del counts[2:]
    assert all(count > 5 for count in counts), counts


@pytest.mark.parametrize(
    ("policy", "learned", "queue_s"),
    [
        ("lru", "policy", 3),
        ("hazard", "policy", 0),
        *(
            pytest.param(policy, learned, queue_s, marks=pytest.mark.thorough)
            for policy in ("arc", "lfu-ttl", "cost-aware", "hazard", "auto")
            for learned in ("policy", "markov")
            for queue_s in (0, 3)
            if queue_s or policy == "auto" or (policy, learned) == ("hazard", "markov")
        ),
    ],
)
def test_a_live_cache_prefetches_what_the_simulator_says(policy, learned, queue_s, monkeypatch):
    """All that waiting requests, hints and predictions bring, when, and what makes room."""
    monkeypatch.setattr("flowkv.policy.restore.costs.Rates.expected_s", lambda *_: 0.0)
    trace, options = talks(seed=3, requests=60), {"learned": learned, "probe_share": 1.0}
    hints, room = hints_of(trace, 0.5) if learned == "policy" else None, 12
    want, _, (calls, _) = live(
        trace, policy, [room, 1000], [False, False], "all", hints=hints, queue_ns=queue_s * S,
        prefetch=options,
    )  # fmt: skip
    log, prefetcher = CallLog(make_policy(policy)), Prefetcher(room, **options)
    place = OnePlace(trace, log, room, hints, 0.5, queue_s * S, prefetcher, held=True)
    hits = place.replay().hits.tolist()
    same = story_of(log, dict(enumerate(range(trace.unique))), joined=True)
    for some, other in ((calls, same), ([n for n, _ in want], hits)):
        assert next((pair for pair in zip_longest(some, other) if pair[0] != pair[1]), None) is None
    assert place.course.prefetched > 20
