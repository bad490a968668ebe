"""Another simulator's opinion, where it is installed (extra group `bench-sim`)."""

from __future__ import annotations

import pytest

from bench import bench_simulator
from flowkv.policy import LRU
from flowkv.sim import generate
from tests.sim.stories import chains, run_through


def test_single_blocks_are_read_leaf_to_root():
    trace = generate("rag", requests=60, seed=1)
    single = bench_simulator.flattened(trace)
    single.check()
    names: dict[int, int] = {}
    backwards = [block for chain in chains(trace) for block in reversed(chain)]
    for block, (dense,) in zip(backwards, chains(single), strict=True):
        assert names.setdefault(block, dense) == dense
    assert len(set(names.values())) == trace.unique == single.unique
    assert run_through(single, LRU(), trace.unique).sum() == len(single.blocks) - trace.unique


def test_libcachesim_agrees():
    library = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    for kind in ("chat", "rag"):
        for _, lru, own, best, own_best, *_ in bench_simulator.compare(
            library, generate(kind, requests=400, seed=2)
        ):
            assert lru == own
            assert own_best - 5e-3 <= best <= own_best  # it must keep what it has just read


def test_without_it_a_sentence_is_printed(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "libcachesim", None)
    assert bench_simulator.main([]) == 0
    assert "not installed" in capsys.readouterr().err
