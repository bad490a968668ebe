"""The figures of batches of eight; simulated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product

import pytest

from bench.restore.baselines import make_restore_policy
from bench.restore.grid import GRID_GBPS, GRID_GPUS, GRID_MODELS, lengths
from flowkv.policy.restore import RestoreRequest
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, lower_bound, run
from tests.inside import TwoPointer
from tests.policy.restore.verifier import Caps, verify


def together(costs: Modelled, tokens: Sequence[int], every_s: float = 0.0) -> list[RestoreRequest]:
    """Requests of these lengths; one every so many seconds, all at once without."""
    return [asked(costs.model, n, number=i, arrived_s=i * every_s) for i, n in enumerate(tokens)]


def compare(costs: Modelled, draws: int) -> None:
    means, spans, over, seen = [], [], [], []
    for seed in range(draws):
        requests = together(costs, lengths(8, seed))
        v1 = run(requests, make_restore_policy("two-pointer-v1"), costs)
        mine = run(requests, make_restore_policy("flowkv"), costs)
        means.append(mine.mean_s / v1.mean_s)
        spans.append(mine.makespan_s / v1.makespan_s)
        over.append(mine.mean_s / lower_bound(requests, costs.ideal, of="mean"))
        seen.append(mine.makespan_s / lower_bound(requests, costs.ideal))
    assert statistics.mean(means) <= 0.60
    assert statistics.mean(spans) <= 1.08
    assert max(over) <= 1.15
    assert min(over) >= 1.0
    assert min(seen) >= 1.0


@pytest.mark.parametrize(
    ("model", "gpu", "gbps"),
    [("Llama-3.1-8B", "A100", 40.0), ("Qwen3-30B-A3B", "H100", 80.0), ("Qwen3-8B", "L40S", 10.0)],
)
def test_mean_and_makespan(model: str, gpu: str, gbps: float) -> None:
    compare(Modelled(SHAPES[model], GPUS[gpu], gbps), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu", "gbps"), list(product(GRID_MODELS, GRID_GPUS, GRID_GBPS)))
def test_mean_and_makespan_everywhere(model: str, gpu: str, gbps: float) -> None:
    compare(Modelled(SHAPES[model], GPUS[gpu], gbps), 8)


def test_batches_keep_the_rules() -> None:
    costs = Modelled(SHAPES["Llama-3.1-8B"], GPUS["H100"], 40)
    requests = together(costs, lengths(8, 3), every_s=0.1)
    done = run(requests, make_restore_policy("flowkv"), costs)
    verify(requests, done.timeline, Caps(loads={"link": 1}))


EVERY_S = 0.2


def crowd(aging: float) -> float:
    """Seconds that a long request waits while short ones come faster than they can be served."""
    costs = Modelled(SHAPES["Llama-3.1-8B"], GPUS["A100"], 10)
    long = asked(costs.model, 32768, number=1000)
    short = [asked(costs.model, 4096, number=i, arrived_s=i * EVERY_S) for i in range(1, 100)]
    return run([long, *short], TwoPointer(aging=aging), costs).ttft_s[1000]


def test_nobody_starves() -> None:
    costs = Modelled(SHAPES["Llama-3.1-8B"], GPUS["A100"], 10)
    size = {n: run([asked(costs.model, n)], TwoPointer(), costs).ttft_s[0] for n in (4096, 32768)}
    assert crowd(1e-9) > 100 * EVERY_S  # after all others
    for aging in (0.25, 1.0):
        overtake = size[32768] / aging / EVERY_S  # that came soon enough
        assert crowd(aging) < size[32768] + (overtake + 2) * size[4096]
    assert crowd(1.0) < crowd(0.25) < crowd(1e-9)
