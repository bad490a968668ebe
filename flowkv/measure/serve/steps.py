"""What a step takes beside the model: deciding, counting, handing out."""

from __future__ import annotations

import msgspec
import numpy as np

from flowkv.measure.policy.finding import Finding
from flowkv.measure.serve.ground import Ground, Setting
from flowkv.measure.serve.workload import Load, draw
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
        beside_s: Median of what a step takes beside the model and sampling.
        beside_p90_s: The same, exceeded by one step in ten.
        sampling_s: Median.
        model_s: Median.
    """

    rows: int
    context: int
    steps: int
    beside_s: float
    beside_p90_s: float
    sampling_s: float
    model_s: float


def measure_steps(ground: Ground, setting: Setting) -> list[Steps]:
    """Short and long contexts, all rows with a beginning in common so that they fit."""
    long = ground.context - 2 * _NEW
    setting = msgspec.structs.replace(setting, max_rows=ROWS, token_budget=2 * ROWS + 512)
    with ground.engine(setting) as (engine, kv):
        found = []
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
            seen: list[EngineStep] = []
            with kv.bus.subscribe(seen.append, EngineStep):
                answers = [engine.submit(a.prompt, max_new_tokens=_NEW) for a in asks[1:]]
                for answer in answers:
                    answer.result()
            found.append(_steps(seen, context))
    return found


def findings(found: list[Steps]) -> list[Finding]:
    """The promises about them."""
    short, long = found[0], found[-1]
    note = f"{1e6 * short.sampling_s:.0f} us more for sampling, {1e6 * short.model_s:.0f} the model"
    what = "us a step beside model and sampling, median"
    value, flat = 1e6 * short.beside_s, long.beside_s / short.beside_s
    on, then = f"{short.rows} rows", f"{1e6 * long.beside_s:.0f} us"
    longer = f"{long.context:,} tokens"
    return [
        Finding("steps", what, on, 1e6 * TARGET_S, "at most", value, "measured", note),
        Finding("steps", "of that, with", longer, FLAT, "at most", flat, "measured", then),
    ]


def _steps(seen: list[EngineStep], context: int) -> Steps:
    decodes = [step for step in seen if step.rows == ROWS and not step.prefill_tokens]
    beside = [step.seconds - step.model_s - step.sampling_s for step in decodes]
    return Steps(
        rows=ROWS,
        context=context,
        steps=len(decodes),
        beside_s=float(np.median(beside)),
        beside_p90_s=float(np.percentile(beside, 90)),
        sampling_s=float(np.median([step.sampling_s for step in decodes])),
        model_s=float(np.median([step.model_s for step in decodes])),
    )
