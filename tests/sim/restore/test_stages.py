"""Pipeline stages that restore at once; virtual."""

from __future__ import annotations

import statistics
from itertools import product

import pytest

from bench.restore.grid import GRID_GPUS, GRID_MODELS, staged
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, lower_bound
from tests.inside import ConfigError


def efficiency(costs: Modelled, tokens: int, stages: int) -> float:
    """Speed-up over linear, where linear is given the time of the boundary activations."""
    one, many = staged(costs, tokens, 1), staged(costs, tokens, stages)
    free_s = lower_bound(asked(costs.model, tokens, 0), costs.ideal) / stages  # linear
    assert many.restored_s >= many.bound_s >= free_s
    return one.restored_s / many.restored_s / stages * many.bound_s / free_s


@pytest.mark.parametrize("stages", [2, 4])
def test_nearly_linear_beside_the_boundaries(stages: int) -> None:
    found = [
        efficiency(Modelled(SHAPES[model], GPUS[gpu], gbps), tokens, stages)
        for model, gpu, gbps, tokens in product(GRID_MODELS, GRID_GPUS, (40, 80), (6144, 30720))
    ]
    assert min(found) >= 0.90
    assert statistics.median(found) >= 0.97


def test_boundaries_are_a_small_part_of_the_bytes() -> None:
    costs = Modelled(SHAPES["Llama-3.1-8B"], GPUS["H100"], 40)
    two, four = staged(costs, 16384, 2), staged(costs, 16384, 4)
    all_bytes = 16384 * 32 * costs.model.cell_bytes
    assert staged(costs, 16384, 1).boundary_bytes == 0.0
    # One boundary: 4096 numbers of 2 bytes, of tokens that are computed.
    assert 0 < two.boundary_bytes < 16384 * 4096 * 2
    assert two.boundary_bytes < 0.07 * all_bytes
    assert two.boundary_bytes < four.boundary_bytes < 0.2 * all_bytes


def test_layers_are_shared_evenly() -> None:
    costs = Modelled(SHAPES["Llama-3.1-8B"], GPUS["H100"], 40)
    for stages in (0, 3):
        with pytest.raises(ConfigError, match="evenly"):
            staged(costs, 4096, stages)
