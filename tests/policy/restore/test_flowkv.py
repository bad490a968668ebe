"""FlowKV's own restore policy: what it decides, beside the rules that all policies keep."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy.restore import (
    Compute,
    Progress,
    RestoreLoad,
    RestoreRequest,
    Source,
    Span,
    State,
    Suffix,
)
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, run
from flowkv.testing import check_restore_policy
from tests.inside import ConfigError, Prices, TwoPointer, best_split
from tests.policy.restore.verifier import Caps, verify

LLAMA = SHAPES["Llama-3.1-8B"]


def costs(gbps: float = 40.0, gpu: str = "A100", **more: float) -> Modelled:
    return Modelled(LLAMA, GPUS[gpu], gbps, **more)


class Unknown:
    """Costs before anything was measured."""

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        return 0.0

    def suffix_s(self, request: RestoreRequest) -> float:
        return 0.0

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        return 0.0


def test_keeps_the_rules_with_other_sizes() -> None:
    check_restore_policy(
        lambda: TwoPointer(chunk=96, block=48, probe=17, aging=3.0), max_examples=25
    )


@pytest.mark.deep
def test_keeps_the_rules_for_long() -> None:
    check_restore_policy(TwoPointer, max_examples=5000)


@settings(max_examples=12)
@given(
    tokens=st.integers(1, 20000),
    suffix=st.sampled_from((0, 1, 64, 2048)),
    gbps=st.floats(0.5, 400),
    share=st.floats(0.02, 1),
    whole=st.booleans(),
)
def test_never_slower_than_both_static_choices(
    tokens: int, suffix: int, gbps: float, share: float, whole: bool
) -> None:
    truth, request = costs(gbps, share=share), asked(LLAMA, tokens, suffix, whole=whole)
    done = run([request], TwoPointer(), truth)
    verify([request], done.timeline, Caps(loads={"link": 1}))
    suffix_s = truth.suffix_s(request) if suffix else 0.0
    load_s = truth.load_s(request, 0, tokens * 32) + suffix_s
    compute_s = truth.compute_s(request, 32, Span(0, tokens)) + suffix_s
    assert done.ttft_s[0] <= 1.02 * min(load_s, compute_s)


def test_the_front_is_computed_layer_by_layer_in_growing_steps() -> None:
    done = run([asked(LLAMA, 16384)], TwoPointer(), costs())
    steps = [entry.op for entry in done.timeline if isinstance(entry.op, Compute)]
    assert [op.layers.size for op in steps[:5]] == [1, 1, 2, 4, 8]
    assert all(op.tokens.first == 0 for op in steps)  # one pass: launches are paid once


def test_an_unmodified_model_computes_all_layers_at_once() -> None:
    done = run([asked(LLAMA, 16384, whole=True)], TwoPointer(), costs())
    steps = [entry.op for entry in done.timeline if isinstance(entry.op, Compute)]
    assert {op.layers for op in steps} == {Span(0, 32)}
    assert 1 < len(steps) <= 4


@pytest.mark.parametrize("part", [0.05, 0.5])
def test_little_is_not_computed_where_it_slows_the_loads(part: float) -> None:
    """That is where a page takes a small part of the time to load that it takes to compute."""
    truth, request = costs(), asked(LLAMA, 4096, 64, whole=True)
    page_s = truth.compute_s(request, request.layers, Span(0, request.unit))
    cells = request.layers * request.unit
    truth = costs(40.0 * truth.load_s(request, 0, cells) / (part * page_s))
    computed = []
    for shared in (False, True):
        done = run([msgspec.structs.replace(request, shared=shared)], TwoPointer(), truth)
        computed.append(any(isinstance(span.op, Compute) for span in done.timeline))
    assert computed == [True, part > 0.1]


def test_the_last_loads_come_layer_by_layer_and_the_suffix_runs_behind_them() -> None:
    done = run([asked(LLAMA, 16384)], TwoPointer(), costs())
    loads = [entry.op for entry in done.timeline if isinstance(entry.op, RestoreLoad)]
    layers = [op.layers for op in loads]
    assert layers[0] == Span(0, 32)
    assert layers[-32:] == [Span(layer, layer + 1) for layer in range(32)]
    ends = {entry.op.layers.first: entry.end_s for entry in done.timeline[-80:]
            if isinstance(entry.op, RestoreLoad) and entry.op.layers.size == 1}  # fmt: skip
    suffixes = [entry for entry in done.timeline if isinstance(entry.op, Suffix)]
    assert suffixes[0].start_s < ends[31]
    assert all(entry.start_s >= ends[entry.op.layer] for entry in suffixes)


def test_high_latency_makes_stripes_of_several_layers() -> None:
    done = run([asked(LLAMA, 16384)], TwoPointer(), costs(latency_s=0.005))
    sizes = {entry.op.layers.size for entry in done.timeline if isinstance(entry.op, RestoreLoad)}
    assert 1 not in sizes


@given(least=st.integers(2, 12), latency_s=st.floats(0, 0.02), tokens=st.integers(1, 16384))
def test_stripes_begin_at_multiples_of_the_least(least: int, latency_s: float, tokens: int) -> None:
    request = msgspec.structs.replace(asked(LLAMA, tokens, whole=True), least=least)
    done = run([request], TwoPointer(), costs(latency_s=latency_s))
    spans = [entry.op.layers for entry in done.timeline if isinstance(entry.op, RestoreLoad)]
    assert all(first % least == 0 and (stop % least == 0 or stop == 32) for first, stop in spans)


def test_without_costs_short_chunks_and_short_loads_find_out() -> None:
    state, policy = State(Unknown()), TwoPointer(probe=512)
    state.add(asked(LLAMA, 16384))
    first, load = policy.next_compute(state), policy.next_load(state, "link")
    assert isinstance(first, Compute)
    assert isinstance(load, RestoreLoad)
    assert first.tokens == Span(0, 512)
    assert load == RestoreLoad(0, Span(0, 32), Span(16384 - 128, 16384))
    done = run([asked(LLAMA, 16384)], policy, costs(), believed=Unknown())
    verify([asked(LLAMA, 16384)], done.timeline, Caps(loads={"link": 1}))


def test_only_loads_where_nobody_drives_the_model() -> None:
    request = RestoreRequest(
        number=3, tokens=4096, suffix=0, layers=4, computable=False,
        sources=(Source("link", "raw", 4096.0),),
    )  # fmt: skip
    done = run([request], TwoPointer(), costs())
    assert done.met[3] == 0.0
    assert done.link_bytes == 4096 * 4 * 4096.0


def test_only_computes_where_there_is_nothing_to_load() -> None:
    request = asked(LLAMA, 8192, tiers=())
    done = run([request], TwoPointer(), costs())
    assert done.met[0] == 1.0


def test_precision_is_given_up_only_where_that_is_faster() -> None:
    codecs = ("raw", "kv8", "kv4")
    slow_link = asked(LLAMA, 30720, codecs=codecs)
    done = run([slow_link], TwoPointer(), costs(10))
    assert {entry.op.source for entry in done.timeline if isinstance(entry.op, RestoreLoad)} == {2}
    # The suffix takes longer than any of the loads: they are free, so the most precise comes.
    busy = asked(LLAMA, 1024, 8192, codecs=codecs)
    done = run([busy], TwoPointer(), costs(80))
    assert {entry.op.source for entry in done.timeline if isinstance(entry.op, RestoreLoad)} == {0}


@pytest.mark.parametrize("gbps", [(40, 40), (40, 10), (40, 1), (40, 0.1), (10, 80)])
def test_two_tiers_are_no_slower_than_the_better_one(gbps: tuple[float, float]) -> None:
    truth = Modelled(LLAMA, GPUS["A100"], {"near": gbps[0], "far": gbps[1]})
    for tokens in (6144, 30720):
        both = asked(LLAMA, tokens, tiers=("near", "far"))
        done = run([both], TwoPointer(), truth)
        verify([both], done.timeline, Caps(loads={"near": 1, "far": 1}))
        alone = min(
            run([asked(LLAMA, tokens, tiers=(tier,))], TwoPointer(), truth).ttft_s[0]
            for tier in ("near", "far")
        )
        assert done.ttft_s[0] <= alone * (0.65 if gbps == (40, 40) else 1.03)


def test_shortest_first_and_age_counts() -> None:
    truth, policy = costs(10), TwoPointer(aging=1.0)
    long, short = asked(LLAMA, 32768, number=1), asked(LLAMA, 4096, number=2)
    done = run([long, short], policy, truth)
    assert done.ttft_s[2] < done.ttft_s[1]
    assert done.ttft_s[2] < 1.15 * run([short], TwoPointer(), truth).ttft_s[2]
    # What has waited longer than it is long is not overtaken any more.
    late = asked(LLAMA, 4096, number=3, arrived_s=9.0)
    state = State(truth)
    state.add(long)
    state.add(late)
    state.now_s = 9.0
    op = policy.next_load(state, "link")
    assert op is not None
    assert op.request == 1


def test_another_request_of_the_same_number_starts_afresh() -> None:
    policy, truth = TwoPointer(), costs()
    first = run([asked(LLAMA, 16384)], policy, truth)
    state = State(truth)
    state.add(asked(LLAMA, 16384))
    policy.next_compute(state)  # called off without a word
    assert run([asked(LLAMA, 16384)], policy, truth) == first


def test_the_goal_is_told() -> None:
    policy, state = TwoPointer(), State(costs())
    assert policy.goal(0) == 0
    state.add(asked(LLAMA, 16384))
    op = policy.next_compute(state)
    assert isinstance(op, Compute)
    assert policy.goal(0) == op.tokens.stop


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"block": 0}, {"probe": 0}, {"aging": 0.0}])
def test_sizes_must_be_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        TwoPointer(**wrong)  # type: ignore[arg-type]


@given(
    tokens=st.integers(1, 4000),
    most=st.integers(1, 4000),
    gbps=st.floats(1, 200),
    suffix=st.sampled_from((0, 64, 512)),
    unit=st.sampled_from((16, 64)),
)
def test_the_split_is_the_best_of_all(
    tokens: int, most: int, gbps: float, suffix: int, unit: int
) -> None:
    truth, cap = costs(gbps), min(tokens, most)
    request = RestoreRequest(
        number=0, tokens=tokens, suffix=suffix, layers=32, unit=unit,
        sources=(Source("link", "raw", 4096.0),),
    )  # fmt: skip
    cell_s = truth.load_s(request, 0, 1)
    suffix_s = truth.suffix_s(request) if suffix else 0.0
    split = best_split(Progress(request), 0, cap, truth, Prices(cell_s, suffix_s))

    def finish_s(goal: int) -> float:
        computed_s = truth.compute_s(request, 32, Span(0, goal)) + suffix_s
        return max(computed_s, 32 * (tokens - goal) * cell_s + suffix_s / 32)

    goals = [*range(0, cap, unit), cap]
    assert split.finish_s == pytest.approx(min(map(finish_s, goals)))
    assert split.finish_s == pytest.approx(finish_s(split.goal))
    assert split.goal in goals


def test_few_questions() -> None:
    """Each costs microseconds, whatever a restore takes: two for a layer and some for the rest."""
    for tokens in (6144, 98304):
        done = run([asked(LLAMA, tokens)], TwoPointer(), costs())
        assert len(done.timeline) <= 2 * 32 + 80
