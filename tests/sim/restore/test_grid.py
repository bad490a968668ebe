"""The figures of single restores, over the grid of the protocol; simulated."""

from __future__ import annotations

import statistics
from itertools import product

import pytest

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from bench.restore.grid import GRID_MODELS, Cell, grid
from flowkv.policy.restore import Span
from flowkv.sim.restore import run
from tests.policy.restore.verifier import Caps, verify

SUFFIXES, SHARES = (64, 512, 2048), (0.125, 0.5, 1.0)
BASELINES = [name for name in RESTORE_POLICIES if name != "flowkv"]


def ratio(cell: Cell, whole: bool = False) -> float:
    run = cell.run(make_restore_policy("flowkv"), whole=whole)
    verify([cell.request(whole=whole)], run.timeline, Caps(loads={"link": 1}))
    return run.ttft_s[0] / cell.bound_s()


def helps(cell: Cell) -> bool:
    """Whether a quarter of the prefix is computed, suffix too, before the rest is loaded."""
    request, ideal = cell.request(), cell.costs.ideal
    first = request.tokens // 4
    computed_s = ideal.compute_s(request, request.layers, Span(0, first))
    rest = (request.tokens - first) * request.layers
    return computed_s + ideal.suffix_s(request) <= ideal.load_s(request, 0, rest)


def test_there_are_108() -> None:
    assert len(set(grid())) == 108
    assert all(cell.suffix == 512 and cell.share == 1.0 for cell in grid())


@pytest.mark.parametrize("whole", [False, True])
def test_next_to_the_bound(whole: bool) -> None:
    ratios = [ratio(cell, whole) for cell in grid()]
    assert statistics.median(ratios) <= 1.02
    assert max(ratios) <= 1.10
    assert min(ratios) >= 1.0


@pytest.mark.parametrize(("suffix", "share"), list(product((64, 2048), (0.125, 0.5, 1.0))))
def test_next_to_the_bound_with_other_suffixes_and_shares(suffix: int, share: float) -> None:
    ratios = [ratio(cell) for cell in grid(suffix, share)[1::3]]
    assert statistics.median(ratios) <= 1.03
    assert min(ratios) >= 1.0


@pytest.mark.parametrize("share", [0.125, 0.5])
def test_next_to_the_bound_on_a_share_of_the_accelerator(share: float) -> None:
    ratios = [ratio(cell) for cell in grid(512, share)]
    assert statistics.median(ratios) <= 1.02
    assert max(ratios) <= 1.10


def against_baselines(cells: tuple[Cell, ...], slack: float) -> None:
    for cell in cells:
        others = {name: cell.run(make_restore_policy(name)).ttft_s[0] for name in BASELINES}
        best = min(others, key=others.__getitem__)
        mine = cell.run(make_restore_policy("flowkv")).ttft_s[0]
        assert mine <= others[best] * (1 + slack), (cell, best, mine / others[best])
        assert mine <= min(others["load"], others["recompute"]) * 1.02, cell


def test_never_above_the_best_baseline() -> None:
    against_baselines(grid()[::4], 1e-9)  # all of 6K
    against_baselines(grid(share=0.125)[::4], 1e-9)


@pytest.mark.parametrize("gbps", [0.03, 0.3, 3.0])
def test_a_slow_link_is_not_waited_for(gbps: float) -> None:
    """Prefixes of several passes: loads leave later passes their tokens."""
    for model, gpu, tokens in product(GRID_MODELS, ("L40S", "H100"), (16384, 30720)):
        cell = Cell(model, gpu, gbps, tokens)
        assert ratio(cell) <= 1.03, cell


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "share"), list(product(SUFFIXES, SHARES)))
def test_never_above_the_best_baseline_anywhere(suffix: int, share: float) -> None:
    # With 64 tokens behind 10 Gbps, where there is next to no suffix to hide loads behind, the
    # staircase is ahead by up to 0.3 % in a few cells.
    against_baselines(grid(suffix, share), 0.003 if suffix == 64 else 1e-9)


def test_moves_a_fifth_less_where_computing_helps() -> None:
    moved, helped = [], []
    for cell in grid():
        request = cell.request()
        all_bytes = request.tokens * request.layers * request.sources[0].cell_bytes
        share = cell.run(make_restore_policy("flowkv")).link_bytes / all_bytes
        moved.append(share)
        if helps(cell):
            helped.append(share)
    assert len(helped) >= 60
    assert max(helped) <= 0.80
    assert statistics.median(moved) <= 0.80


def test_lower_precision_is_taken_where_it_is_faster() -> None:
    for cell in (Cell("Llama-3.1-8B", "H100", 10, 30720), Cell("Qwen3-8B", "A100", 40, 16384)):
        raw = run([cell.request()], make_restore_policy("flowkv"), cell.costs)
        all_three = cell.request(codecs=("raw", "kv8", "kv4"))
        mixed = run([all_three], make_restore_policy("flowkv"), cell.costs)
        assert mixed.ttft_s[0] < 0.8 * raw.ttft_s[0]
