"""Whether live decodes keep their pace while prefixes of others are restored."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import msgspec
import numpy as np

from flowkv.measure.policy.finding import Finding
from flowkv.measure.serve.ground import Ground, Setting
from flowkv.measure.serve.served import percentile
from flowkv.measure.serve.workload import Ask, Load, draw
from flowkv.observe.events import EngineStep

LIVE, STEPS, TARGET = 8, 16, 0.98
_CALM_STEPS, _OWN = 4, 8
_PREFIXES, _SPARE = 6, 512


class Beside(msgspec.Struct, frozen=True):
    """Steps of live decodes while somebody comes, in turns: with a prefix on disk, and in memory.

    Attributes:
        live: Rows that decode.
        prefix: Tokens of each prefix.
        restores: How many were restored.
        reused: Share of their tokens that were not computed.
        resident_s: Median time of `STEPS` steps from when somebody comes whose prefix is there.
        restored_s: The same where it lies on a disk.
        calm_s: The same when nobody comes.
        pace: `resident_s` over `restored_s`, median of the pairs.
        quarters: What a quarter of the pairs are below, and above.
    """

    live: int
    prefix: int
    restores: int
    reused: float
    resident_s: float
    restored_s: float
    calm_s: float
    pace: float
    quarters: tuple[float, float]

    def finding(self) -> Finding:
        """The promise about it."""
        note = (
            f"quarters {self.quarters[0]:.3g} and {self.quarters[1]:.3g};"
            f" {self.restores} prefixes of {self.prefix:,} tokens, {self.reused:.0%} reused;"
            f" {STEPS} steps take {1e3 * self.restored_s:.0f} ms, with prefixes in memory"
            f" {1e3 * self.resident_s:.0f}, alone {1e3 * self.calm_s:.0f}"
        )
        on = f"{self.live} live rows"
        what = "pace of decodes beside restores from disk"
        return Finding("beside", what, on, TARGET, "at least", self.pace, "measured", note)


def measure_beside(ground: Ground, setting: Setting, *, turns: int = 24) -> Beside:
    """A few rows decode without end; now and then somebody comes whose prefix lies on a disk.

    Args:
        ground: The model.
        setting: Of the engine.
        turns: Pairs of windows.
    """
    prefix = min(ground.context // 2, 2048)
    load = Load(
        requests=_PREFIXES, concurrency=1, lengths=f"{_OWN}+2", prefix_tokens=prefix, groups=64
    )
    asks = draw(load, context=ground.context, vocabulary=ground.vocabulary, seed=3)
    short = Load(requests=LIVE, concurrency=LIVE, lengths="16+16")
    live = draw(short, context=ground.context, vocabulary=ground.vocabulary, seed=4)
    tokens = LIVE * ground.context // 2 + 3 * prefix + _SPARE
    with tempfile.TemporaryDirectory() as folder:
        extra = (("disk", f"{folder}:4GiB"), ("host", 0))
        pool = tokens * ground.token_bytes()
        small = msgspec.structs.replace(setting, pool_bytes=pool, extra=extra)
        with ground.engine(small) as (engine, kv):
            for ask in asks:  # more than the pool holds: the first ones leave it for the disk
                engine.submit(ask.prompt, max_new_tokens=2).result()
            kv.flush()
            return _watch(engine, kv, asks, live, turns=turns, most=ground.context // 2)


class _Watch:
    """When steps ended, as the engine tells them."""

    def __init__(self) -> None:
        self._ended_s: list[float] = []

    def __call__(self, step: EngineStep) -> None:
        self._ended_s.append(time.perf_counter())

    def wait(self, steps: int) -> float:
        """Until so many more are over; when the last of them was."""
        upto = len(self._ended_s) + steps
        while len(self._ended_s) < upto:
            time.sleep(1e-3)
        return self._ended_s[upto - 1]


def _watch(
    engine: Any, kv: Any, asks: list[Ask], live: list[Ask], *, turns: int, most: int
) -> Beside:
    watch = _Watch()
    times: dict[str, list[float]] = {"calm": [], "restored": [], "resident": []}
    reused = 0
    with kv.bus.subscribe(watch, EngineStep):
        endless = [engine.submit(ask.prompt, max_new_tokens=most) for ask in live]
        while not all(answer.tokens for answer in endless):
            time.sleep(1e-3)
        for turn in range(turns):
            prompt = asks[turn % len(asks)].prompt
            for name, taken in times.items():
                watch.wait(_CALM_STEPS)
                began_s = time.perf_counter()
                coming = None
                if name != "calm":
                    coming = engine.submit(prompt, max_new_tokens=2)
                ended_s = watch.wait(STEPS)
                taken.append(ended_s - began_s)
                done = coming.result() if coming is not None else None
                if name == "restored" and done is not None:
                    reused += done.reused_tokens
        for answer in endless:
            answer.cancel()
    pairs = zip(times["resident"], times["restored"], strict=True)
    paces = [resident / restored for resident, restored in pairs]
    return Beside(
        live=len(live),
        prefix=len(asks[0].prompt) - _OWN,
        restores=turns,
        reused=reused / (turns * len(asks[0].prompt)),
        **{f"{name}_s": float(np.median(found)) for name, found in times.items()},
        pace=float(np.median(paces)),
        quarters=(percentile(paces, 25), percentile(paces, 75)),
    )
