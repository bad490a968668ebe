"""`python -m bench policy`: what it measures on, what it counts, what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.__main__ import main
from bench.policy import ground, run, streams
from bench.policy.cost import fixed, ids_of, per_request
from bench.policy.finding import GROUPS, Finding, summary
from bench.policy.ground import Ground, Replays, part
from bench.policy.replayed import _halves, closure, floor, prefetch
from flowkv.sim import Trace, generate, replay


def small_trace(seed: int = 1) -> Trace:
    """Conversations over a common beginning, in turns, with gaps."""
    return msgspec.structs.replace(generate("chat", requests=240, seed=seed), name=f"small-{seed}")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return small_trace()


# ---- findings


@pytest.mark.parametrize(
    ("sense", "measured", "met"),
    [
        *(("at least", 0.5, True), ("at least", 0.49, False), ("at most", 0.5, True)),
        *(("at most", 0.51, False), ("at most", None, None)),
    ],
)
def test_a_finding_knows_whether_its_target_is_met(
    sense: str, measured: float | None, met: bool | None
) -> None:
    assert Finding("closure", "w", "t", 0.5, sense, measured).met is met  # type: ignore[arg-type]


def test_a_summary_counts() -> None:
    found = [Finding("cost", "w", "t", 1.0, "at most", value) for value in (0.5, 1.5, 0.1, None)]
    assert summary(found) == {"met": 2, "missed": 1, "not_measured": 1}


# ---- parts of traces


def test_a_part_is_the_same_requests(trace: Trace) -> None:
    which = np.array([3, 4, 9, 50, 51, 120])
    cut = part(trace, which)
    assert cut.times_ns.tolist() == trace.times_ns[which].tolist()
    names: dict[int, int] = {}
    for mine, theirs in zip(range(len(cut)), which, strict=True):
        new = cut.blocks[cut.offsets[mine] : cut.offsets[mine + 1]].tolist()
        old = trace.blocks[trace.offsets[theirs] : trace.offsets[theirs + 1]].tolist()
        assert len(new) == len(old)
        for a, b in zip(new, old, strict=True):
            assert names.setdefault(a, b) == b, "one number, one block"
    assert sorted(names) == list(range(cut.unique)), "dense"
    assert cut.blocks[np.unique(cut.blocks, return_index=True)[1]].tolist() == sorted(names)
    above = cut.parents[cut.blocks[1:]] == cut.blocks[:-1]
    starts = np.isin(np.arange(1, len(cut.blocks)), cut.offsets)
    assert (above | starts).all() and (cut.parents[cut.blocks[cut.offsets[:-1]]] == -1).all()


def test_halves_keep_conversations_whole(trace: Trace) -> None:
    even, odd = _halves(Ground(trace, "agents", public=False))
    assert len(even) + len(odd) == len(trace)
    assert not set(even.sessions.tolist()) & set(odd.sessions.tolist())


# ---- replays


def test_replays_are_made_once(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ground, "replay", lambda *a, **k: calls.append((a, k)) or replay(*a, **k))
    replays = Replays()
    assert replays(trace, "lru", 0.1) is replays(trace, "lru", 0.1)
    replays(trace, "lru", 0.1, hints=0.5)
    replays(trace.head(50), "lru", 0.1)
    assert len(calls) == 3


def test_closure_and_floor_are_those_of_the_replays(trace: Trace) -> None:
    grounds, replays = [Ground(trace, "chat", public=True)], Replays()
    small, middle = closure(grounds, replays)
    each = [replay(trace, "auto", size=size).closure or 0.0 for size in (0.05, 0.1)]
    assert middle.measured == pytest.approx(sum(each) / 2) and middle.target == 0.20
    assert small.target == 0.33
    (worst,) = floor(grounds, replays)
    for size in (0.005, 0.01, 0.02, 0.05, 0.1, 0.3):
        above = replay(trace, "auto", size=size).prefix_hit_ratio
        above -= replay(trace, "lru", size=size).prefix_hit_ratio
        assert worst.measured is not None and worst.measured <= above + 1e-12


def test_prefetch_on_chat_is_held_against_its_own_traffic(trace: Trace) -> None:
    found = prefetch([Ground(trace, "chat", public=True)], Replays())
    assert [(f.target, f.sense) for f in found] == [(1.02, "at most")] * 3


# ---- streams


def test_the_best_recall_is_that_of_the_chain() -> None:
    stream, best = streams.chain(1, 8, 40_000, seed=3)
    counts = np.zeros((8, 8))
    np.add.at(counts, (stream[:-1], stream[1:]), 1)
    likeliest = counts.max(axis=1).sum() / counts.sum()
    assert best[1:, 0].mean() == pytest.approx(likeliest, abs=0.01)
    assert np.allclose(best.sum(axis=1), 1.0) and (np.diff(best, axis=1) <= 0).all()


def test_recall_of_a_cycle_is_perfect_and_of_noise_is_chance() -> None:
    cycle = np.tile(np.arange(7), 60)
    assert streams.recall(cycle, 100, (1,)) == [1.0]
    noise = np.random.default_rng(5).integers(0, 50, 3000)
    (share,) = streams.recall(noise, 2000, (1,))
    assert share < 0.1


# ---- costs


def test_every_request_is_timed(trace: Trace) -> None:
    spent = per_request(trace, "lru")
    assert (spent > 0).all() and len(spent) == len(trace)
    ids = ids_of(trace)
    assert ids.shape == (len(trace.blocks), 2) and len(np.unique(ids, axis=0)) == trace.unique


def test_a_fixed_cost_is_a_time_per_call() -> None:
    calls: list[int] = []
    assert 0 < fixed(calls.append, 3) < 1e4
    assert len(calls) == 6000 and calls == sorted(calls), "time goes on"


# ---- the whole


def test_one_run_measures_everything(
    trace: Trace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [Ground(trace, "agents", False), Ground(small_trace(2), "chat", False)]
    monkeypatch.setattr(run, "grounds", lambda quick: given)
    monkeypatch.setattr(run, "chains", lambda quick: [])
    out = tmp_path / "policy.json"
    assert main(["policy", "--quick", "--json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    groups = {found["group"] for found in report["findings"]}
    assert groups >= {"closure", "floor", "hints", "prefetch", "warm start", "cost"}
    assert groups <= set(GROUPS)
    assert sum(report["summary"].values()) == len(report["findings"])
    assert report["traces"] == ["small-1", "small-2"] and report["quick"]
    for found in report["findings"]:
        assert found["measured"] is None or math.isfinite(found["measured"])


def test_missed_targets_are_bad_news(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = msgspec.structs.asdict(Finding("floor", "here", "t", 0.5, "at least", 0.25, note="n"))
    report = run.Report(
        quick=False,
        traces=["t"],
        public=False,
        machine="m",
        summary={"met": 0, "missed": 1, "not_measured": 0},
        findings=[{**missed, "met": False}],
    )
    monkeypatch.setattr(run, "measure_policies", lambda **_: report)
    assert main(["policy"]) == 1
    out = capsys.readouterr().out
    assert "Prefix hit ratio" in out and "missed" in out and "0.25" in out
    assert "FLOWKV_TRACES is not set" in out


def test_bench_refuses_a_file_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "--out", "/none/x.json"]) == 2
    assert "no directory for /none/x.json. Make it first." in capsys.readouterr().err
