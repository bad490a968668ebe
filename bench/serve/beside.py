"""Pace of live decodes while prefixes of others are restored."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from bench.policy.finding import Finding
from bench.serve.ground import Ground, Setting
from bench.serve.served import percentile
from bench.serve.workload import Ask, Load, draw
from flowkv.observe.events import EngineStep

LIVE, STEPS, TARGET = 8, 16, 0.98
_CALM_STEPS, _OWN = 4, 8
_ROOM = 1.25
"""Of the disk, over the bytes of the prefixes."""

_KEPT, _WARM = 3, 4
"""Prefixes that the pool holds beside the live rows, and the first turns, which nobody counts: they
compile what is missing, and touch all of the pool."""


class Beside(msgspec.Struct, frozen=True):
    """Steps of live decodes while somebody comes, in turns: with a prefix on disk, and in memory.

    Attributes:
        live: Rows that decode.
        prefix: Tokens of each prefix.
        restores: How many were restored from the disk.
        reused: Share of their tokens that were not computed.
        resident_s: Median time of `STEPS` steps from when somebody comes whose prefix is there.
        restored_s: The same where it lies on a disk.
        calm_s: The same when nobody comes.
        pace: `resident_s` over `restored_s`, median of the pairs; None if nothing was restored.
        quarters: What a quarter of the pairs are below, and above.
    """

    live: int
    prefix: int
    restores: int
    reused: float
    resident_s: float
    restored_s: float
    calm_s: float
    pace: float | None
    quarters: tuple[float, float]

    def finding(self) -> Finding:
        """The promise about it."""
        note = (
            "nothing was restored"
            if self.pace is None
            else (
                f"quarters {self.quarters[0]:.3g} and {self.quarters[1]:.3g}; each costs"
                f" {1e3 * (self.restored_s - self.resident_s):.0f} ms of decoding;"
                f" {self.restores} prefixes of {self.prefix:,} tokens, {self.reused:.0%} reused;"
                f" {STEPS} steps take {1e3 * self.restored_s:.0f} ms, with prefixes in memory"
                f" {1e3 * self.resident_s:.0f}, alone {1e3 * self.calm_s:.0f}"
            )
        )
        on = f"{self.live} live rows"
        what = f"pace of {STEPS} steps during which a prefix is restored from disk"
        return Finding("beside", what, on, TARGET, "at least", self.pace, "measured", note)


def measure_beside(ground: Ground, setting: Setting, *, turns: int = 24) -> Beside:
    """A few rows decode without end; now and then somebody comes whose prefix lies on a disk.

    Another cache wrote the prefixes, so this one finds each on the disk when it is first asked
    for, and in its own memory when it is asked for again with other tokens behind it (with the
    same, it would compute one only): 20 steps later, when the live rows are a little longer, which
    flatters the pace by a percent or so.

    Args:
        ground: The model.
        setting: Of the engine.
        turns: Most restores; fewer for a model whose context ends the live rows before.
    """
    prefix, most = min(ground.context // 2, 2048), ground.context // 2
    count = turns + _WARM
    load = Load(
        requests=count, concurrency=1, lengths=f"{_OWN}+2", prefix_tokens=prefix, groups=count
    )
    asks = draw(load, context=ground.context, vocabulary=ground.vocabulary, seed=3)
    short = Load(requests=LIVE, concurrency=LIVE, lengths="16+16")
    live = draw(short, context=ground.context, vocabulary=ground.vocabulary, seed=4)
    with tempfile.TemporaryDirectory() as folder:
        token_bytes = ground.token_bytes(setting.page_size)
        whole = prefix + setting.page_size
        room = _ROOM * count * whole * token_bytes
        extra = (("disk", f"{folder}:{64 + (int(room) >> 20)}MiB"), ("host", 0))
        pool = (LIVE * (most + setting.page_size) + _KEPT * whole) * token_bytes
        kept = msgspec.structs.replace(setting, pool_bytes=pool, extra=extra)
        with ground.engine(kept) as (engine, kv):
            for ask in asks:
                engine.submit(ask.prompt, max_new_tokens=2).result()
            kv.flush()
        with ground.engine(kept) as (engine, kv):
            return _watched(engine, kv, asks, live, most)


class _Watch:
    """When steps ended, as the engine tells them, while some rows live."""

    def __init__(self) -> None:
        self._ended_s: list[float] = []
        self.live: list[Any] = []

    def __call__(self, step: EngineStep) -> None:
        self._ended_s.append(time.perf_counter())

    def wait(self, steps: int) -> float:
        """Until so many more are over; when the last of them was.

        Raises:
            _Over: A live row has come to its end.
        """
        upto = len(self._ended_s) + steps
        while len(self._ended_s) < upto:
            if any(answer.done() for answer in self.live):
                raise _Over
            time.sleep(1e-3)
        return self._ended_s[upto - 1]


class _Over(Exception):
    """The live rows have no tokens left to make."""


class _Turn(msgspec.Struct, frozen=True):
    """A prefix that was asked for twice, and nobody before that."""

    calm_s: float
    restored_s: float
    resident_s: float
    restored: bool
    reused: int


def _watched(engine: Any, kv: Any, asks: Sequence[Ask], live: Sequence[Ask], most: int) -> Beside:
    watch, turns = _Watch(), []
    with kv.bus.subscribe(watch, EngineStep):
        watch.live = [engine.submit(ask.prompt, max_new_tokens=most) for ask in live]
        try:
            while not all(answer.tokens for answer in watch.live):
                watch.wait(1)
            for ask in asks:
                calm_s, _ = _window(engine, watch, None)
                restored_s, first = _window(engine, watch, ask)
                other = [*ask.prompt[:-_OWN], *ask.prompt[: -_OWN - 1 : -1]]
                resident_s, again = _window(
                    engine, watch, msgspec.structs.replace(ask, prompt=other)
                )
                came = first.restore_s > 0.0 == again.restore_s
                turns.append(_Turn(calm_s, restored_s, resident_s, came, first.reused_tokens))
        except _Over:
            pass
        turns = turns[_WARM:]
        for answer in watch.live:
            answer.cancel()
    restored = [turn for turn in turns if turn.restored]
    paces = [turn.resident_s / turn.restored_s for turn in restored]
    length = len(asks[0].prompt)
    return Beside(
        live=len(live),
        prefix=length - _OWN,
        restores=len(restored),
        reused=sum(turn.reused for turn in restored) / max(1, length * len(restored)),
        resident_s=percentile([turn.resident_s for turn in restored], 50),
        restored_s=percentile([turn.restored_s for turn in restored], 50),
        calm_s=percentile([turn.calm_s for turn in restored], 50),
        pace=float(np.median(paces)) if paces else None,
        quarters=(percentile(paces, 25), percentile(paces, 75)),
    )


def _window(engine: Any, watch: _Watch, ask: Ask | None) -> tuple[float, Any]:
    """Time of some steps from when somebody comes, and what he was answered."""
    watch.wait(_CALM_STEPS)
    began_s = time.perf_counter()
    coming = engine.submit(ask.prompt, max_new_tokens=2) if ask is not None else None
    ended_s = watch.wait(STEPS)
    return ended_s - began_s, coming.result() if coming is not None else None
