"""Requests that are preempted and go on later make the tokens that they make with room."""

from __future__ import annotations

import msgspec
import numpy as np

from bench.policy.finding import Finding
from bench.serve.engine import Engined
from bench.serve.ground import Ground, Setting
from bench.serve.workload import Ask, Load, draw

_REQUESTS = 6
_PAGE = 16


class Swaps(msgspec.Struct, frozen=True):
    """Random schedules in a pool that is too small, beside the same requests with room.

    Attributes:
        schedules: How many.
        pressed: In how many of them somebody made room.
        preempted: How often, all together.
        same: Share of the requests with the same tokens.
    """

    schedules: int
    pressed: int
    preempted: int
    same: float

    def finding(self) -> Finding:
        """The promise about it."""
        on = f"{self.schedules} schedules"
        note = f"{self.preempted} preemptions, in {self.pressed} schedules"
        what = "requests with the same tokens under pressure"
        return Finding("swap", what, on, 1.0, "at least", self.same, "measured", note)


def measure_swaps(ground: Ground, setting: Setting, *, schedules: int) -> Swaps:
    """Random lengths and orders, a pool of about half of what they need.

    Args:
        ground: The model.
        setting: Of the engine; its pages are made smaller, so that there are more of them.
        schedules: How many.
    """
    roomy = msgspec.structs.replace(setting, page_size=_PAGE)
    pool = 224 * ground.token_bytes(_PAGE)
    tight = msgspec.structs.replace(roomy, pool_bytes=pool, max_rows=_REQUESTS)
    same = preempted = pressed = 0
    with ground.engine(roomy) as (other, free), ground.engine(tight) as (engine, kv):
        reference, shared = Engined(other, free), Engined(engine, kv)
        for seed in range(schedules):
            asks = _asks(ground, seed)
            right = reference.serve(asks, _REQUESTS).served
            found = shared.serve(asks, _REQUESTS).served
            same += sum(a.tokens == b.tokens for a, b in zip(right, found, strict=True))
            times = sum(one.preempted for one in found)
            preempted, pressed = preempted + times, pressed + (times > 0)
    return Swaps(schedules, pressed, preempted, same / (schedules * _REQUESTS))


def _asks(ground: Ground, seed: int) -> list[Ask]:
    rng = np.random.default_rng(seed)
    load = Load(requests=_REQUESTS, concurrency=_REQUESTS, lengths="120+2", ranks=3)
    drawn = draw(load, context=ground.context, vocabulary=ground.vocabulary, seed=seed)
    return [
        Ask(ask.prompt[: int(rng.integers(2, 120))], int(rng.integers(8, 48)), 0.0, ask.priority)
        for ask in drawn
    ]
