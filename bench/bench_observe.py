"""Cost of watching an engine: per step, and as a share of a step of 64 rows.

    python -m bench.bench_observe              # a table
    python -m bench.bench_observe --json       # one JSON object

Two ways in one run. *Alone*: each watcher is given the event of a step of 64 rows that all decode,
a step every ten milliseconds of the events' own time, and the time per event is set against that
of a step of the tiny model with 64 rows and nobody watching; it is the median of rounds that are
long enough to have all that happens now and then (values counted at once, levels read). *Beside*:
the same 64 requests are served with nobody watching and with an account (`kv.report`), a trace, and
the Prometheus exporter at once, in turn; of the ratios of neighbours the median is taken. The first
figure is the sharper one on a busy machine, the second shows that nothing was left out. The target
is 1 %, and nothing that can be measured while nobody watches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

import flowkv
from flowkv.data import tiny_path
from flowkv.observe.events import Bus, EngineStep
from flowkv.observe.metrics import Level, Metrics
from flowkv.observe.prometheus import Exporter
from flowkv.observe.timeline import Serving, TraceFile
from flowkv.report.account import Account

ROWS = 64
STEP_S = 0.01
WATCHERS = ("nobody", "serving", "report", "exporter", "trace", "all", "otel", "otel gaps")
"""`serving` is a bare `Serving(bus)`, `report` what `kv.report` collects, `all` a report, an
exporter and a trace, `otel gaps` a `Bridge(kv, gaps=True)`."""


class Watched:
    """As much of a cache as watchers need: a bus of its own, and the levels of a real one."""

    def __init__(self, kv: flowkv.KV) -> None:
        self.bus, self.metrics = Bus(), Metrics()
        self.levels: Callable[[], Iterable[Level]] = kv._levels


def event(started_s: float) -> EngineStep:
    """The event of a step of 64 rows that decode."""
    gaps = tuple(0.01 + 1e-5 * row for row in range(ROWS))
    return EngineStep(
        rows=ROWS, prefill_tokens=0, decode_tokens=ROWS, made_tokens=ROWS, waiting=3, aside=0,
        pages=600, total_pages=1000, started_s=started_s, seconds=STEP_S, model_s=0.009,
        sampling_s=0.0005, gaps_s=gaps,
    )  # fmt: skip


@contextlib.contextmanager
def watching(what: str, watched: Watched, folder: Path) -> Iterator[None]:
    """Somebody watches."""
    with contextlib.ExitStack() as stack:
        if what == "serving":
            stack.enter_context(Serving(watched.bus))
        if what in ("report", "all"):
            stack.enter_context(Account(folder / f"{what}.html", watched.bus, watched.levels))
        if what in ("exporter", "all"):
            stack.enter_context(Exporter(watched, registry=CollectorRegistry()))
        if what in ("trace", "all"):
            stack.enter_context(TraceFile(folder / f"{what}.json", watched.bus))
        if what.startswith("otel"):
            stack.enter_context(telemetry(watched, gaps=what == "otel gaps"))
        yield


@contextlib.contextmanager
def telemetry(watched: Watched, *, gaps: bool) -> Iterator[None]:
    """An SDK of OpenTelemetry that keeps what it is told."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from flowkv.observe.otel import Bridge

    meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    with Bridge(watched, meter=meters.get_meter("bench"), gaps=gaps):
        yield
    meters.shutdown()


def cost_s(what: str, kv: flowkv.KV, folder: Path, *, rounds: int = 9, events: int = 1024) -> float:
    """Seconds per event, the median of some rounds; making it included where it is made."""
    watched, means_s, at_s = Watched(kv), list[float](), 0.0
    with watching(what, watched, folder):
        for _ in range(rounds):
            started_s = time.perf_counter()
            for _ in range(events):
                at_s += STEP_S
                if watched.bus.wants(EngineStep):
                    watched.bus.emit(event(at_s))
            means_s.append((time.perf_counter() - started_s) / events)
    return statistics.median(means_s)


def serve(kv: flowkv.KV, model: Any, tokens: int) -> float:
    """Seconds per step of 64 rows that decode, prompts left out."""
    seconds: list[float] = []
    with flowkv.Engine(model, kv, max_rows=ROWS, token_budget=4096) as engine:
        turn = engine._loop.turn

        def timed() -> None:
            started_s, active = time.perf_counter(), len(engine._loop.active)
            turn()
            if active == ROWS:
                seconds.append(time.perf_counter() - started_s)

        engine._loop.turn = timed  # type: ignore[method-assign]
        engine.run([[3 + row, *range(5, 20)] for row in range(ROWS)], max_new_tokens=tokens)
    return statistics.median(seconds)


def measure(windows: int, tokens: int) -> dict[str, Any]:
    """All figures."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32).eval()
    kv = flowkv.attach(model, gpu="64MiB", max_rows=ROWS)
    ratios, off_s = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serve(kv, model, 4)
        for number in range(windows):
            if number % 2:
                on, off = beside(kv, model, folder, tokens), serve(kv, model, tokens)
            else:
                off, on = serve(kv, model, tokens), beside(kv, model, folder, tokens)
            ratios.append(on / off)
            off_s.append(off)
        alone = {watcher: cost_s(watcher, kv, folder) for watcher in WATCHERS}
    kv.close()
    step_s = statistics.median(off_s)
    return {
        "rows": ROWS,
        "step_s": step_s,
        "alone_s": alone,
        "alone_share": {name: seconds / step_s for name, seconds in alone.items()},
        "beside": statistics.median(ratios),
        "beside_least": min(ratios),
        "beside_most": max(ratios),
        "source": "measured",
    }


def beside(kv: flowkv.KV, model: Any, folder: Path, tokens: int) -> float:
    """As `serve`, while everybody watches."""
    with (
        kv.report(folder / "r.html"),
        kv.trace(folder / "t.json"),
        Exporter(kv, registry=CollectorRegistry()),
    ):
        return serve(kv, model, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    given = parser.parse_args()
    told = measure(given.windows, given.tokens)
    if given.json:
        print(json.dumps(told))
        return
    print(f"A step of {ROWS} rows takes {told['step_s'] * 1e3:.2f} ms; its event costs, alone:")
    for name, seconds in told["alone_s"].items():
        print(f"  {name:10} {seconds * 1e6:8.2f} us  {told['alone_share'][name]:8.3%}")
    spread = f"{told['beside_least']:.3f} to {told['beside_most']:.3f}"
    print(f"All but OpenTelemetry beside: {told['beside']:.3f} times the step ({spread})")


if __name__ == "__main__":
    main()
