"""Time of a step beside the model: deciding, planning pages, counting, handing out."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from bench.policy.finding import Finding
from bench.serve.ground import Ground, Setting
from bench.serve.served import percentile
from bench.serve.workload import Load, draw
from flowkv.engine.runner import PackedRunner
from flowkv.hooks.huggingface.packed import PackedForward
from flowkv.observe.events import EngineStep

ROWS = 64
TARGET_S, FLAT = 300e-6, 1.2
_NEW = 48
_SHORT = 64


class Steps(msgspec.Struct, frozen=True):
    """Steps in which all rows decode.

    Attributes:
        rows: Of a step.
        context: Tokens of each row at the beginning.
        steps: How many.
        beside_s: Median of what a step takes beside the model itself and sampling.
        beside_p90_s: The same, exceeded by one step in ten.
        planning_s: Median of the part of that in which pages are planned and committed.
        sampling_s: Median.
        model_s: Median.
    """

    rows: int
    context: int
    steps: int
    beside_s: float
    beside_p90_s: float
    planning_s: float
    sampling_s: float
    model_s: float


class _Watch:
    """Times the model alone, and keeps what each step tells beside it.

    Args:
        model: The model; hooks on it would be a part of who it is.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._model_s = model, 0.0
        self.seen: list[tuple[EngineStep, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def clear(self) -> None:
        """Forgets what was seen so far."""
        self.seen, self._model_s = [], 0.0

    def tell(self, step: EngineStep) -> None:
        """A step is over."""
        self.seen.append((step, self._model_s))
        self._model_s = 0.0

    def __call__(self, **given: Any) -> Any:
        began_s = time.perf_counter()
        found = self._model(**given)
        self._model_s += time.perf_counter() - began_s
        return found


def measure_steps(ground: Ground, setting: Setting) -> list[Steps]:
    """Short and long contexts, all rows with a beginning in common so that they fit."""
    long = ground.context - 2 * _NEW
    setting = msgspec.structs.replace(setting, max_rows=ROWS, token_budget=2 * ROWS + 512)
    with ground.engine(setting) as (engine, kv):
        runner, found = engine._loop.runner, []
        assert isinstance(runner, PackedRunner) and isinstance(runner._forward, PackedForward)
        call = runner._forward._call
        watch = _Watch(call._model())
        call._model = lambda: watch  # type: ignore[assignment]
        for context in (_SHORT, long):
            load = Load(
                requests=ROWS + 1,
                concurrency=ROWS,
                lengths=f"{_SHORT // 2}+{_NEW}",
                prefix_tokens=context - _SHORT // 2,
                groups=1,
            )
            asks = draw(load, context=ground.context, vocabulary=ground.vocabulary, seed=context)
            engine.submit(asks[0].prompt, max_new_tokens=2).result()  # the others find it
            watch.clear()
            with kv.bus.subscribe(watch.tell, EngineStep):
                answers = [engine.submit(a.prompt, max_new_tokens=_NEW) for a in asks[1:]]
                for answer in answers:
                    answer.result()
            found.append(_steps(watch.seen, context))
    return found


def findings(found: list[Steps]) -> list[Finding]:
    """The promises about them."""
    short, long = found[0], found[-1]
    note = (
        f"{1e6 * short.planning_s:.0f} of them for pages; {1e6 * short.sampling_s:.0f} us more"
        f" for sampling, {1e6 * short.model_s:.0f} the model"
    )
    what = "us a step beside model and sampling, median"
    value, flat = 1e6 * short.beside_s, long.beside_s / short.beside_s
    on, then = f"{short.rows} rows", f"{1e6 * long.beside_s:.0f} us"
    longer = f"{long.context:,} tokens"
    return [
        Finding("steps", what, on, 1e6 * TARGET_S, "at most", value, "measured", note),
        Finding("steps", "of that, with", longer, FLAT, "at most", flat, "measured", then),
    ]


def _steps(seen: list[tuple[EngineStep, float]], context: int) -> Steps:
    decodes = [one for one in seen if one[0].rows == ROWS and not one[0].prefill_tokens]
    beside = [step.seconds - step.sampling_s - model_s for step, model_s in decodes]
    return Steps(
        rows=ROWS,
        context=context,
        steps=len(decodes),
        beside_s=float(np.median(beside)),
        beside_p90_s=percentile(beside, 90),
        planning_s=float(np.median([step.model_s - model_s for step, model_s in decodes])),
        sampling_s=float(np.median([step.sampling_s for step, _ in decodes])),
        model_s=float(np.median([model_s for _, model_s in decodes])),
    )
