"""Simple restore policies: what each computes, what it loads, and in which order."""

from __future__ import annotations

import itertools

import pytest

from bench.restore.baselines import (
    RESTORE_POLICIES,
    LoadOnly,
    Recompute,
    Staircase,
    TwoPointerSeed,
    TwoPointerV1,
    make_restore_policy,
    over_layers_s,
    over_tokens_s,
)
from flowkv.policy.restore import (
    Compute,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    State,
    Suffix,
)
from flowkv.testing import check_restore_policy
from tests.inside import ConfigError, MadeUpCosts, RestoreStory, RestoreWorld

PRICES = MadeUpCosts(token_s=1e-5, pair_s=1e-9, start_s=2e-5, cell_s=1e-5)
UNKNOWN = MadeUpCosts(token_s=0.0, pair_s=0.0, start_s=0.0, cell_s=0.0)


def request(number: int = 0, tokens: int = 4096, **more: object) -> RestoreRequest:
    said = {"suffix": 256, "layers": 4, "unit": 16, "sources": (Source("disk", "raw", 1.0),)}
    return RestoreRequest(number=number, tokens=tokens, **(said | more))


def told(
    make,
    *requests: RestoreRequest,
    prices: MadeUpCosts = PRICES,
    costs: MadeUpCosts | None = None,
    **more: object,
) -> RestoreStory:
    """A policy's whole story, on an engine and a link whose ops take what `prices` say."""
    asked = {r.number: r for r in requests}
    world = RestoreWorld(
        requests=requests,
        costs=costs or prices,
        takes_s=lambda op, nth: prices.op_s(asked[op.request], op),
        windows={"disk": 1},
        **more,
    )
    story = RestoreStory(make, world)
    story.run()
    return story


def ops(story: RestoreStory, kind: type) -> list:
    return [op for op, *_ in story.timeline if isinstance(op, kind)]


def cells(some: list) -> int:
    return sum(op.layers.size * op.tokens.size for op in some)


def end_s(story: RestoreStory, kind: type | tuple[type, ...] = (Compute, RestoreLoad)) -> float:
    return max(end for op, _, end, _ in story.timeline if isinstance(op, kind))


def test_recompute_loads_nothing() -> None:
    story = told(Recompute, request())
    assert not ops(story, RestoreLoad) and len(ops(story, Compute)) == 2, "chunks of 2048 tokens"
    story = told(Recompute, request(computable=False))
    assert not ops(story, Compute) and cells(ops(story, RestoreLoad)) == 4 * 4096


def test_load_computes_nothing_that_it_can_load() -> None:
    story = told(RESTORE_POLICIES["load"], request())
    assert not ops(story, Compute) and cells(ops(story, RestoreLoad)) == 4 * 4096
    suffix = [start for op, start, *_ in story.timeline if isinstance(op, Suffix)]
    assert min(suffix) == end_s(story, RestoreLoad)
    story = told(lambda: LoadOnly(io_chunk=128), request(), failing={4})
    lost = 4096 - 4 * 128  # up to the failed load's last token
    assert [op.tokens for op in ops(story, Compute)][-1].stop == lost
    assert cells(ops(story, Compute)) == 4 * lost


def test_load_layers_hides_the_suffix_behind_the_loads() -> None:
    story = told(RESTORE_POLICIES["load-layers"], request())
    assert [op.layers.first for op in ops(story, RestoreLoad)] == [0, 1, 2, 3]
    ended = {
        op.layers.first: end for op, _, end, _ in story.timeline if isinstance(op, RestoreLoad)
    }
    began = {op.layer: start for op, start, *_ in story.timeline if isinstance(op, Suffix)}
    assert began == ended, "each layer of the suffix begins when its layer is there"


def test_cake_meets_in_the_middle() -> None:
    story = told(RESTORE_POLICIES["cake"], request())
    computed = max(op.tokens.stop for op in ops(story, Compute))
    assert computed == min(op.tokens.first for op in ops(story, RestoreLoad))
    assert 1024 < computed < 3072
    one_s = PRICES.compute_s(request(), 4, Span(0, 4096))
    assert end_s(story) < 0.75 * min(one_s, PRICES.load_s(request(), 0, 4 * 4096))


def test_layers_meet_in_the_middle() -> None:
    story = told(RESTORE_POLICIES["layers"], request())
    assert [op.layers.first for op in ops(story, Compute)] == [0, 1]
    assert [op.layers.first for op in ops(story, RestoreLoad)] == [3, 2]
    assert {op.tokens for op in (*ops(story, Compute), *ops(story, RestoreLoad))} == {Span(0, 4096)}
    whole = told(RESTORE_POLICIES["layers"], request(whole=True))
    assert {op.layers for op in (*ops(whole, Compute), *ops(whole, RestoreLoad))} == {Span(0, 4)}


@pytest.mark.parametrize(("cell_s", "computed"), [(1e-5, 2), (1e-4, 4), (1.2e-6, 0), (5e-6, 1)])
def test_layers_split_as_well_as_can_be(cell_s: float, computed: int) -> None:
    """The last layer goes to the engine that is through with it first."""
    prices = MadeUpCosts(token_s=1e-5, pair_s=0.0, start_s=0.0, cell_s=cell_s)
    story = told(RESTORE_POLICIES["layers"], request(), prices=prices)
    assert len(ops(story, Compute)) == computed
    assert end_s(story) == pytest.approx(over_layers_s(prices, request()))


# ---- the published ones


def test_v1_gives_the_link_to_the_longest_and_advances_all_alike() -> None:
    story = told(lambda: TwoPointerV1(threshold_tokens=0), request(0, 2048), request(1, 8192))
    first = [op.request for op in ops(story, RestoreLoad)[:20]]
    assert first == [1] * 20
    assert [op.request for op in ops(story, Compute)[:6]] == [0, 1, 0, 1, 0, 1]


def test_v1_restores_short_prompts_over_layers() -> None:
    short, long = request(0, 1024), request(1, 4096)
    story = told(lambda: TwoPointerV1(threshold_tokens=1025), short, long)
    assert {op.request: op.layers.size for op in ops(story, Compute)} == {0: 1, 1: 4}
    story = told(lambda: TwoPointerV1(threshold_tokens=1024), short, long)
    assert {op.layers.size for op in ops(story, Compute)} == {4}


@pytest.mark.parametrize("start_s", [0.0, 2e-3, 2e-2])
@pytest.mark.parametrize("cell_s", [2e-6, 1e-5, 6e-5])
def test_v1_picks_the_better_of_both(start_s: float, cell_s: float) -> None:
    prices = MadeUpCosts(token_s=1e-5, pair_s=1e-9, start_s=start_s, cell_s=cell_s)
    one = request(layers=8, suffix=0)
    layers, tokens = (
        end_s(told(RESTORE_POLICIES[name], one, prices=prices)) for name in ("layers", "cake")
    )
    assert over_tokens_s(prices, one, 512) == pytest.approx(tokens, rel=0.03)
    assert over_layers_s(prices, one) == pytest.approx(layers, rel=0.03)
    best = end_s(told(TwoPointerV1, one, prices=prices))
    assert best == pytest.approx(min(layers, tokens), rel=0.02)


def test_v1_goes_over_tokens_while_nothing_is_known() -> None:
    story = told(TwoPointerV1, request(), costs=UNKNOWN)
    assert {op.layers.size for op in ops(story, RestoreLoad)} == {4}


def test_seed_loads_what_is_dearest_and_computes_what_is_cheapest() -> None:
    story = told(TwoPointerSeed, request(0, 2048), request(1, 8192))
    loads, computes = ops(story, RestoreLoad), ops(story, Compute)
    assert {op.request for op in loads[:20]} == {1}
    fronts = {0: 0, 1: 0}
    for op in computes[:6]:
        assert fronts[op.request] == min(fronts.values())
        fronts[op.request] = op.tokens.stop
    assert {op.request for op in computes} == {0, 1}


def test_seed_leaves_the_last_step_to_the_link() -> None:
    prices = MadeUpCosts(token_s=1e-5, pair_s=0.0, start_s=0.0, cell_s=1e-7)
    assert not ops(told(TwoPointerSeed, request(tokens=512), prices=prices), Compute)
    assert ops(told(TwoPointerSeed, request(tokens=512), prices=prices, costs=UNKNOWN), Compute)
    bare = request(tokens=512, sources=())
    assert ops(told(TwoPointerSeed, bare, prices=prices), Compute)


def best_staircase_s(prices: MadeUpCosts, one: RestoreRequest, chunk: int) -> float:
    """By trying all: never more chunks than the layer below."""
    levels = range(-(-one.tokens // chunk) + 1)
    best = float("inf")
    for stairs in itertools.combinations_with_replacement(reversed(levels), one.layers):
        stops = [min(one.tokens, level * chunk) for level in stairs]
        busy = sum(prices.compute_s(one, 1, Span(0, stop)) for stop in stops if stop)
        link = prices.load_s(one, 0, sum(one.tokens - stop for stop in stops))
        best = min(best, max(busy, link))
    return best


@pytest.mark.parametrize("cell_s", [1e-6, 4e-6, 1.1e-5, 3e-5, 1e-3])
def test_staircase_is_the_best_of_all(cell_s: float) -> None:
    prices = MadeUpCosts(token_s=1e-5, pair_s=1e-9, start_s=0.0, cell_s=cell_s)
    one = request(tokens=3000, unit=8, suffix=0)
    story = told(lambda: Staircase(chunk=512, io_chunk=8), one, prices=prices)
    assert end_s(story) <= 1.03 * best_staircase_s(prices, one, 512)
    levels = [
        max((op.tokens.stop for op in ops(story, Compute) if op.layers.first == i), default=0)
        for i in range(4)
    ]
    assert levels == sorted(levels, reverse=True)


def test_staircase_computes_the_same_of_all_as_far_as_they_reach() -> None:
    three = [request(0, 512), request(1, 4096), request(2, 8192)]
    state = State(PRICES)
    for one in three:
        state.add(one)
    policy = Staircase()
    policy.next_load(state, "disk")
    stairs = [policy._stairs[one.number] for one in three]
    assert stairs[0].low == stairs[0].high == 512
    assert stairs[1] == stairs[2], "water-filling"
    assert 512 < stairs[1].low < stairs[1].high < 4096
    busy = link = 0.0
    for one in three:
        for layer in range(4):
            stop = policy._stairs[one.number].target(layer)
            busy += PRICES.compute_s(one, 1, Span(0, stop))
            link += PRICES.load_s(one, 0, one.tokens - stop)
    assert busy == pytest.approx(link, rel=0.1)
    policy.forget(1)
    assert set(policy._stairs) == {0, 2}


def test_staircase_makes_good_what_was_planned_wrong() -> None:
    one, right_s = request(suffix=0), end_s(told(Staircase, request(suffix=0)))
    cheap = MadeUpCosts(PRICES.token_s / 100, PRICES.pair_s / 100, 0.0, PRICES.cell_s)
    story = told(Staircase, one, costs=cheap)
    assert ops(story, RestoreLoad), "beyond the plan, which computes nearly everything"
    assert end_s(story) < 1.1 * right_s
    dear = MadeUpCosts(PRICES.token_s * 100, PRICES.pair_s * 100, 0.0, PRICES.cell_s)
    assert end_s(told(Staircase, one, costs=dear)) <= PRICES.load_s(one, 0, 4 * 4096) * 1.001
    unknown = told(Staircase, one, costs=UNKNOWN)
    assert end_s(unknown) < 1.2 * right_s


@pytest.mark.parametrize("name", ["layers", "two-pointer-seed", "staircase"])
@pytest.mark.parametrize("known", ["compute", "load"])
def test_nothing_is_left_to_an_engine_that_nobody_knows(name: str, known: str) -> None:
    """A load that is not known to be fast is not waited for, nor is a compute."""
    half = (
        MadeUpCosts(1e-5, 0.0, 0.0, 0.0) if known == "compute" else MadeUpCosts(0.0, 0.0, 0.0, 1e-5)
    )
    story = told(RESTORE_POLICIES[name], request(suffix=0), costs=half)
    assert {type(op) for op, start, *_ in story.timeline if not start} == {Compute, RestoreLoad}


@pytest.mark.parametrize("name", ["recompute", "cake"])
def test_chunks_smaller_than_a_page_are_pages(name: str) -> None:
    for resident in (0, 8):  # in the middle of a page, too
        one = request(tokens=100, resident=resident)
        story = told(lambda: make_restore_policy(name, chunk=5, io_chunk=5), one)
        spans = [op.tokens for op, *_ in story.timeline if not isinstance(op, Suffix)]
        assert all(0 < span.size <= 16 for span in spans)


@pytest.mark.parametrize("name", ["load", "two-pointer-v1", "two-pointer-seed", "staircase"])
def test_odd_chunks(name: str) -> None:
    for chunk in (5, 100):
        check_restore_policy(
            lambda c=chunk: make_restore_policy(name, chunk=c, io_chunk=c), max_examples=15
        )


# ---- batches and names


@pytest.mark.parametrize("name", ["recompute", "load", "cake", "staircase"])
def test_first_come_first_served(name: str) -> None:
    story = told(RESTORE_POLICIES[name], *(request(i, 1024) for i in range(3)))
    began = [op.request for op, *_ in story.timeline if isinstance(op, Suffix)]
    assert began == sorted(began)


def test_names() -> None:
    for name, make in RESTORE_POLICIES.items():
        assert make_restore_policy(name).name == name == make().name
    assert make_restore_policy("cake", chunk=64).chunk == 64
    policy = Recompute()
    assert make_restore_policy(policy) is policy


@pytest.mark.parametrize(
    ("policy", "options", "sentence"),
    [
        *(("caek", {}, "Did you mean 'cake'"), ("nothing like it", {}, "Use one of recompute")),
        *(("cake", {"chunks": 3}, "does not take"), ("cake", {"chunk": 0}, "one token or more")),
        ("cake", {"io_chunk": 0}, "one token or more"),
        ("staircase", {"block": 0}, "one layer or more"),
        (Recompute, {}, "is no restore policy"),
        (Recompute(), {"chunk": 3}, "an object already"),
    ],
)
def test_names_that_are_wrong(
    policy: str | RestorePolicy, options: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_restore_policy(policy, **options)
