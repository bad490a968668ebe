"""The virtual clock: what it does with ops, failures, arrivals and beliefs."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from bench.restore.baselines import make_restore_policy
from flowkv.policy.restore import Compute, Measured, RestoreLoad, RestorePolicy, Span, State, Suffix
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, run
from tests.inside import ConfigError, StateError
from tests.policy.restore.verifier import Caps, verify

COSTS = Modelled(SHAPES["Llama-3.1-8B"], GPUS["A100"], 40)
SHAPE = COSTS.model


def test_loads_take_what_the_link_takes() -> None:
    request = asked(SHAPE, 4096, 0)
    done = run([request], make_restore_policy("load"), COSTS)
    n_bytes = 4096 * 32 * SHAPE.cell_bytes
    assert done.link_bytes == n_bytes
    assert done.ttft_s[0] == pytest.approx(n_bytes * 8 / 40e9)
    assert done.link_busy_s == pytest.approx(done.ttft_s[0])
    assert done.compute_busy_s == 0.0
    assert done.met[0] == 0.0


def test_recompute_takes_what_computing_takes() -> None:
    request = asked(SHAPE, 2048, 0)
    done = run([request], make_restore_policy("recompute", chunk=2048), COSTS)
    assert done.ttft_s[0] == pytest.approx(COSTS.compute_s(request, 32, Span(0, 2048)))
    assert done.met[0] == 1.0
    assert done.link_bytes == 0.0


def test_two_runs_are_the_same() -> None:
    requests = [asked(SHAPE, 8192, number=i, arrived_s=0.01 * i) for i in range(3)]
    first, second = (run(requests, make_restore_policy("flowkv"), COSTS) for _ in range(2))
    assert first == second


def test_time_to_first_token_counts_from_arrival() -> None:
    early = asked(SHAPE, 4096, number=0)
    late = asked(SHAPE, 4096, number=1, arrived_s=5.0)
    done = run([early, late], make_restore_policy("flowkv"), COSTS)
    assert done.ttft_s[0] == pytest.approx(done.ttft_s[1])
    assert done.makespan_s == pytest.approx(5.0 + done.ttft_s[1])


def test_a_failed_load_is_computed() -> None:
    request = asked(SHAPE, 8192)
    dice = random.Random(5)
    failed = []

    def fails(op: RestoreLoad) -> bool:
        failed.append(dice.random() < 0.3)
        return failed[-1]

    done = run([request], make_restore_policy("flowkv"), COSTS, fails=fails)
    verify([request], done.timeline, Caps(loads={"link": 1}))
    assert any(failed)
    assert [not entry.ok for entry in done.timeline if isinstance(entry.op, RestoreLoad)] == failed
    assert done.ttft_s[0] > run([request], make_restore_policy("flowkv"), COSTS).ttft_s[0]


def test_all_loads_fail() -> None:
    request = asked(SHAPE, 8192)
    done = run([request], make_restore_policy("flowkv"), COSTS, fails=lambda op: True)
    verify([request], done.timeline, Caps(loads={"link": 1}))
    assert done.met[0] == 1.0


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_loads_are_begun_at_once(depth: int) -> None:
    request = asked(SHAPE, 8192)
    done = run([request], make_restore_policy("cake"), COSTS, depth=depth)
    verify([request], done.timeline, Caps(loads={"link": depth}))
    begun = [entry.start_s for entry in done.timeline if isinstance(entry.op, RestoreLoad)]
    assert begun[:depth] == [0.0] * depth
    assert begun[depth] > 0.0
    assert done.link_busy_s <= done.ttft_s[0]


def test_engines_compute_what_is_theirs() -> None:
    requests = [asked(SHAPE, 8192, number=i, tiers=(f"link{i}",)) for i in range(2)]
    costs = Modelled(SHAPE, GPUS["A100"], {"link0": 40, "link1": 40})
    both = run(requests, make_restore_policy("flowkv"), costs, engines=[(0,), (1,)])
    alone = run(requests[:1], make_restore_policy("flowkv"), costs)
    assert both.ttft_s[0] == pytest.approx(alone.ttft_s[0], rel=0.02)
    assert both.ttft_s[1] == pytest.approx(alone.ttft_s[0], rel=0.02)


def test_beliefs_are_told_what_things_took() -> None:
    request = asked(SHAPE, 16384)
    learnt = Measured()
    run([request], make_restore_policy("flowkv"), COSTS, believed=learnt)
    truth = COSTS.compute_s(request, 32, Span(4096, 6144))
    assert learnt.compute_s(request, 32, Span(4096, 6144)) == pytest.approx(truth, rel=0.1)
    assert learnt.load_s(request, 0, 9999) == pytest.approx(
        COSTS.load_s(request, 0, 9999), rel=0.02
    )
    assert learnt.suffix_s(request) == pytest.approx(COSTS.suffix_s(request), rel=0.1)


def test_nothing_to_do() -> None:
    request = asked(SHAPE, 0, 0)
    done = run([request], make_restore_policy("flowkv"), COSTS)
    assert done.timeline == ()
    assert done.ttft_s == {0: 0.0}
    assert done.makespan_s == 0.0


class Idle(RestorePolicy):
    name = "idle"

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        return None

    def next_load(self, state: State, tier: str) -> RestoreLoad | None:
        return None


def test_a_policy_that_stops_is_told() -> None:
    with pytest.raises(StateError, match="unfinished"):
        run([asked(SHAPE, 4096)], Idle(), COSTS)


@pytest.mark.parametrize(("share", "gbps"), [(0.0, 10), (1.0, 0.0), (1.0, {"a": 1.0, "b": -1.0})])
def test_costs_need_rates(share: float, gbps: float | dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Modelled(SHAPE, GPUS["A100"], gbps, share=share)


def test_a_share_of_the_accelerator_takes_longer() -> None:
    request = asked(SHAPE, 4096)
    eighth = Modelled(SHAPE, GPUS["A100"], 40, share=0.125).ideal
    whole = COSTS.ideal
    span = Span(0, 4096)
    assert eighth.compute_s(request, 1, span) == pytest.approx(
        8 * whole.compute_s(request, 1, span)
    )
    assert eighth.load_s(request, 0, 7) == whole.load_s(request, 0, 7)
