"""An engine at work is told about as it was: numbers, pictures, traces, exporters agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from flowkv import Completion, Engine
from tests.engine.nano import Nano, make_kv, prompts
from tests.inside import EngineStep, Event, Exporter, Finished, Queued, Serving
from tests.observe.chrome import read_chrome
from tests.observe.test_prometheus import samples


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[max(1, -(-round(q * 100) * len(values) // 100)) - 1]


def test_all_that_watch_agree(tmp_path: Path) -> None:
    registry, seen, queued = CollectorRegistry(), list[Event](), list[Queued]()
    with make_kv(host="1MiB") as kv, Engine(Nano(), kv, max_rows=4, token_budget=16) as engine:
        engine.run([[1, 2, 3]], max_new_tokens=2)  # what is slow the first time
        assert not kv.bus.wants(EngineStep), "nobody watches, nobody pays"
        with (
            kv.report(tmp_path / "r.html") as account,
            kv.trace(tmp_path / "t.json"),
            Exporter(kv, registry=registry),
            kv.bus.subscribe(seen.append, EngineStep),
        ):
            kv.bus.subscribe(queued.append, Queued)
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
    assert len(queued) == 12
    assert shown.tracks("requests") == {f"request {event.request}" for event in queued}
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


def test_engines_of_a_cache_are_told_apart(tmp_path: Path) -> None:
    over = list[Finished]()
    with (
        make_kv() as kv,
        Engine(Nano(), kv, max_rows=2) as one,
        Engine(Nano(), kv, max_rows=2) as two,
        Serving(kv.bus) as serving,
        kv.trace(tmp_path / "t.json"),
        kv.bus.subscribe(over.append, Finished),
    ):
        answers = [e.submit([1, 2, 3], max_new_tokens=3) for _ in range(3) for e in (one, two)]
        for answer in answers:
            answer.result(90)
    numbers = {event.request for event in over}
    assert numbers == {answer.number for answer in answers} and len(numbers) == 6
    assert {lane.request for lane in serving.lanes if lane.ended is not None} == numbers
    tracks = read_chrome((tmp_path / "t.json").read_text()).tracks("requests")
    assert tracks == {f"request {number}" for number in numbers}


def test_seeds_do_not_depend_on_other_engines() -> None:
    options = {"do_sample": True, "temperature": 2.0}

    def drawn() -> list[list[int]]:
        with make_kv() as kv, Engine(Nano(), kv, seed=5) as engine:
            done = engine.run([[1, 2, 3]] * 3, max_new_tokens=8, options=options)
        return [one.tokens for one in done]

    first = drawn()
    assert drawn() == first and first[0] != first[1]


def test_pages_of_rows_that_end_are_told() -> None:
    steps, model = list[EngineStep](), Nano()
    with make_kv() as kv, kv.bus.subscribe(steps.append, EngineStep), Engine(model, kv) as engine:
        engine.run([list(range(20))], max_new_tokens=1)
        assert [(step.rows, step.pages > 2) for step in steps] == [(1, True)]
        held, steps[:] = kv.open(list(range(30, 50))), []
        with kv.step([held], [list(range(30, 50))]) as step:
            model(step.tokens, step.positions)
        engine.run([[1]], max_new_tokens=1)
        assert steps[-1].pages > 2, "others have pages, too"
        held.close()


def test_steps_are_counted_without_any_package() -> None:
    with make_kv() as kv, Engine(Nano(), kv) as engine:
        with kv.metrics.follow_steps(kv.bus):
            engine.run([[1, 2, 3]], max_new_tokens=4)
            read = samples(kv.metrics.prometheus())
        assert not kv.bus.wants(EngineStep)
    assert read["counter", "flowkv_made_tokens_total", ()] == "4.0"
    assert read["gauge", "flowkv_engine_rows", ()] == "1.0"
    assert read["gauge", "flowkv_requests_waiting", ()] == "0.0"
    assert read["histogram", "flowkv_inter_token_seconds_count", ()] == "3.0"
