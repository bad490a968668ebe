"""Real restores: whatever the policy, what is restored is what a full prefill computes."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest
import torch

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from bench.restore.canvas import Canvas
from bench.restore.device import stopwatch
from bench.restore.model import SMALL, Model
from bench.restore.processor import BURST_S, Copier, Link
from bench.restore.torch_engine import Prompt, TorchEngine
from flowkv.policy.restore import Compute, Measured, RestoreLoad, RestoreRequest, Span, Suffix
from tests.inside import ConfigError, Decoder
from tests.policy.restore.verifier import Caps, verify

pytestmark = pytest.mark.usefixtures("one_thread")
DEEP = Decoder("deep", 6, 48, 4, 2, 12, 64)
EXPERTS = Decoder("experts", 3, 32, 4, 1, 16, 16, experts=2)
EVEN_S = 0.03
"""What the loads of a whole prefix take in most of these tests: about as long as computing it."""


def engine_of(shape: Decoder, *prompts: Prompt, **options: Any) -> TorchEngine:
    return TorchEngine(shape, prompts or (Prompt(704, 33),), **options)


def rate(requests: list[RestoreRequest], seconds: float = EVEN_S) -> float:
    """Bytes a second at which all prefixes take so long."""
    return sum(r.layers * r.tokens * r.sources[0].cell_bytes for r in requests) / seconds


def check(engine: TorchEngine, policy: str, caps: Caps | None = None, **options: Any) -> Any:
    requests = options.pop("requests", None) or engine.requests()
    run = engine.restore(make_restore_policy(policy), requests=requests, **options)
    verify(requests, run.timeline, caps or Caps(loads={"link": 1}))
    for request in requests:
        assert engine.error(request.number) < 1e-3
        assert engine.same_tokens(request.number)
    return run


@pytest.fixture(scope="module")
def deep() -> TorchEngine:
    return engine_of(DEEP)


@pytest.fixture(scope="module")
def experts() -> TorchEngine:
    return engine_of(EXPERTS)


@pytest.fixture(scope="module")
def fixture() -> TorchEngine:
    return engine_of(SMALL["fixture"], Prompt(1024, 70))


@pytest.fixture(scope="module")
def wide() -> TorchEngine:
    return engine_of(SMALL["wide"], Prompt(320, 40))


@pytest.mark.parametrize("policy", RESTORE_POLICIES)
@pytest.mark.parametrize("shape", ["deep", "experts", "fixture", "wide"])
def test_what_is_restored_is_what_a_full_prefill_computes(
    shape: str, policy: str, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(shape)
    check(engine, policy, bytes_per_s=rate(engine.requests()))


def test_with_calibrated_costs(deep: TorchEngine) -> None:
    bytes_per_s, (request,) = rate(deep.requests()), deep.requests()
    costs = deep.calibrated(bytes_per_s=bytes_per_s)
    cells = request.layers * request.tokens
    assert costs.load_s(request, 0, cells) >= 0.9 * EVEN_S  # a link is no faster than its limit
    assert costs.suffix_s(request) > 0
    first, last = (costs.compute_s(request, 1, Span(n, n + 64)) for n in (0, 640))
    assert first > 0
    assert last > 0
    for policy in ("cake", "staircase", "flowkv"):
        check(deep, policy, costs=Measured(costs), bytes_per_s=bytes_per_s)


@pytest.mark.parametrize("policy", [n for n in RESTORE_POLICIES if n != "recompute"])
def test_what_failed_is_computed(deep: TorchEngine, policy: str) -> None:
    count = 0

    def fails(op: RestoreLoad) -> bool:
        nonlocal count
        count += 1
        return count % 4 == 1

    bytes_per_s = rate(deep.requests(), 0.01)
    costs = Measured(deep.calibrated(bytes_per_s=bytes_per_s))
    run = check(deep, policy, costs=costs, bytes_per_s=bytes_per_s, fails=fails)
    assert any(not done.ok for done in run.timeline) == (count > 0)


@pytest.mark.parametrize("policy", RESTORE_POLICIES)
def test_several_at_once(policy: str) -> None:
    engine = engine_of(DEEP, Prompt(512, 16), Prompt(190, 5), Prompt(320, 64))
    requests = [
        msgspec.structs.replace(request, arrived_s=0.004 * request.number)
        for request in engine.requests()
    ]
    run = check(engine, policy, requests=requests, bytes_per_s=rate(requests))
    assert set(run.ttft_s) == {0, 1, 2}


def test_what_is_not_restored_shows(deep: TorchEngine) -> None:
    check(deep, "load", bytes_per_s=rate(deep.requests()))
    deep.canvases[0].kv[3, 100, 1, 0, 5] = torch.nan
    assert math.isnan(deep.error(0))
    deep.canvases[0].kv[3, 100, 1] = 7.0
    assert deep.error(0) > 1e-3


def test_wrong_keys_give_other_tokens(fixture: TorchEngine) -> None:
    check(fixture, "load")
    values = fixture.canvases[0].kv[:, :1024, 1]
    values.copy_(values.flip(1))
    for layer in range(4):
        fixture.canvases[0].compute(Suffix(0, layer))
    assert not fixture.same_tokens(0)


@pytest.mark.parametrize("shape", [DEEP, EXPERTS, SMALL["fixture"]], ids=lambda s: s.name)
def test_pieces_of_a_prefill_are_the_prefill(shape: Decoder) -> None:
    model = Model(shape, positions=300)
    tokens = torch.randint(256, (290,))
    whole, pieces = model.empty_kv(290), Canvas(model, tokens, 256)
    scores = model.forward(tokens, whole, 0)
    layers, half = Span(0, shape.layers), shape.layers // 2
    pieces.compute(Compute(0, layers, Span(0, 64)))
    pieces.compute(Compute(0, Span(0, half), Span(64, 256)))
    pieces.compute(Compute(0, Span(half, half + 1), Span(64, 192)))
    pieces.compute(Compute(0, Span(half, half + 1), Span(192, 256)))
    if half + 1 < shape.layers:
        pieces.compute(Compute(0, Span(half + 1, shape.layers), Span(64, 256)))
    for layer in range(shape.layers):
        pieces.compute(Suffix(0, layer))
    assert (pieces.kv - whole).abs().max() < 1e-4
    assert pieces.scores is not None
    assert (pieces.scores - scores).abs().max() < 1e-4


def test_causal() -> None:
    model = Model(DEEP, positions=300)
    tokens = torch.randint(256, (200,))
    kv, other = model.empty_kv(200), model.empty_kv(200)
    model.forward(tokens, kv, 0)
    tokens[150] = (tokens[150] + 1) % 256
    model.forward(tokens, other, 0)
    assert torch.equal(kv[:, :150], other[:, :150])
    assert (kv[:, 150:] - other[:, 150:]).abs().amax((0, 2, 3, 4)).min() > 0


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 query heads"):
        Model(Decoder("odd", 1, 16, 3, 2, 8, 16), positions=8)
    with pytest.raises(ConfigError, match="no prefix"):
        TorchEngine(DEEP, [Prompt(0, 8)])


def test_a_link_keeps_to_its_limit_and_to_no_less() -> None:
    kv = torch.randn(2, 256, 2, 2, 16)
    model = Model(Decoder("d", 2, 32, 2, 2, 16, 32), positions=260)
    canvas = Canvas(model, torch.zeros(260, dtype=torch.int64), 256)
    link = Link({0: canvas}, {0: kv}, bytes_per_s=kv.nbytes / 0.08)
    copier, clock = Copier(link), stopwatch()
    for stop in range(256, 0, -32):
        copier.begin(RestoreLoad(0, Span(0, 2), Span(stop - 32, stop)), clock).wait()
    assert clock() >= 0.08 - BURST_S
    assert torch.equal(canvas.kv[:, :256], kv)
    time.sleep(0.02)  # idle time is not saved up
    at = clock()
    assert link.slot(RestoreLoad(0, Span(0, 2), Span(0, 256)), at)[1] >= at - BURST_S + 0.0799


def test_what_a_failed_load_was_to_bring_is_not_written() -> None:
    kv = torch.randn(2, 64, 2, 2, 16)
    model = Model(Decoder("d", 2, 32, 2, 2, 16, 32), positions=64)
    canvas = Canvas(model, torch.zeros(64, dtype=torch.int64), 64)
    link = Link({0: canvas}, {0: kv}, fails=lambda op: True)
    assert not Copier(link).begin(RestoreLoad(0, Span(0, 2), Span(0, 64)), stopwatch()).wait().ok
    assert canvas.kv.isnan().all()
