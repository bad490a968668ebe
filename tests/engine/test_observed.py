"""An engine at work is told about as it was: numbers, pictures, traces, exporters agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from flowkv import Completion, Engine
from flowkv.observe.events import EngineStep, Event
from flowkv.observe.prometheus import Exporter
from flowkv.observe.serving import Serving
from tests.engine.nano import Nano, make_kv, prompts
from tests.observe.chrome import read_chrome
from tests.observe.test_prometheus import samples


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[max(1, -(-round(q * 100) * len(values) // 100)) - 1]


def test_all_that_watch_agree(tmp_path: Path) -> None:
    registry, seen = CollectorRegistry(), list[Event]()
    with make_kv(host="1MiB") as kv, Engine(Nano(), kv, max_rows=4, token_budget=16) as engine:
        engine.run([[1, 2, 3]], max_new_tokens=2)  # what is slow the first time
        assert not kv.bus.wants(EngineStep), "nobody watches, nobody pays"
        with (
            kv.report(tmp_path / "r.html") as account,
            kv.trace(tmp_path / "t.json"),
            Exporter(kv, registry=registry),
            kv.bus.subscribe(seen.append, EngineStep),
        ):
            done = engine.run(prompts(12), max_new_tokens=6)
            text = generate_latest(registry).decode()
            assert samples(text) == samples(kv.metrics.prometheus())
        assert not kv.bus.wants(EngineStep)
    check_numbers(account.serving, done)
    read = samples(text)
    steps = [event for event in seen if isinstance(event, EngineStep)]
    assert read["counter", "flowkv_engine_steps_total", ()] == repr(float(len(steps)))
    assert account.summary()["steps"] == len(steps)
    gaps = sum(len(step.gaps_s) for step in steps)
    assert read["histogram", "flowkv_inter_token_seconds_count", ()] == repr(float(gaps))
    shown = read_chrome((tmp_path / "t.json").read_text())
    assert len([s for s in shown.on("engine") if s.name.endswith("tokens")]) == len(steps)
    assert shown.tracks("requests") == {f"request {n}" for n in range(1, 13)}
    page = (tmp_path / "r.html").read_text()
    assert "12 finished" in page and "<svg" in page and "http:" not in page


def check_numbers(serving: Serving, done: list[Completion]) -> None:
    told = serving.summary()
    assert told["requests"] == 12 and told["finished"] == {"length": 12}
    assert told["made_tokens"] == sum(len(one.tokens) for one in done) == 72
    assert told["inter_token_s"]["count"] == 72 - 12, "every token but the first has a gap"
    for name in ("ttft_s", "tpot_s", "queued_s"):
        values = [getattr(one, name) for one in done]
        spread = told["queue_s" if name == "queued_s" else name]
        assert spread["max"] == pytest.approx(max(values)), name
        for q in (0.5, 0.9, 0.99):
            assert spread[f"p{q * 100:.0f}"] == pytest.approx(quantile(values, q), rel=0.0101)
    assert 0 < told["kv_utilisation"]["mean"] <= told["kv_utilisation"]["max"] <= 1
    assert told["rows"]["max"] == 4
    parts = told["model_s"]["mean"] + told["sampling_s"]["mean"] + told["bookkeeping_s"]["mean"]
    assert parts == pytest.approx(told["step_s"]["mean"], rel=1e-6)


def test_an_account_that_is_open_is_written_with_its_cache(tmp_path: Path) -> None:
    with make_kv() as kv:
        kv.report(tmp_path / "r.html")
        with Engine(Nano(), kv) as engine:
            engine.run([[1, 2, 3]], max_new_tokens=2)
    page = (tmp_path / "r.html").read_text()
    assert "1 finished" in page and "cpu" in page, "levels are read before the cache is gone"
