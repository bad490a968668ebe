"""Long answers: how much the time between tokens varies, beside a cache that is copied to grow."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import torch

from bench.policy.finding import Finding
from bench.serve.ground import Ground, Setting
from bench.serve.models import longer, twin
from bench.serve.turnstile import Turnstile
from bench.serve.workload import Load, draw
from flowkv.observe.events import EngineStep

_STRIDE, _PROMPT, _POINTS = 50, 16, 40
_ENGINE, _CONTIGUOUS = 0, 1
TARGET = 0.7


class Soak(msgspec.Struct, frozen=True):
    """Two ways to make the same long answers, in turns.

    Attributes:
        rows: At once.
        tokens: New ones of each row.
        variance_ratio: Of the time between tokens: that of the engine over that of the cache that
            grows by copying.
        cpu_variance_ratio: The same of processor time of the thread, which others on the machine
            hardly change.
        deviation_s: Standard deviations of the two.
        mean_s: Mean times between tokens.
        worst_s: The longest.
        at: Tokens of a row at which medians were taken.
        curves: Medians of the time around them, of the two.
        same_tokens: Whether both made the same.
    """

    rows: int
    tokens: int
    variance_ratio: float
    cpu_variance_ratio: float
    deviation_s: tuple[float, float]
    mean_s: tuple[float, float]
    worst_s: tuple[float, float]
    at: list[int]
    curves: dict[str, list[float]]
    same_tokens: bool

    def finding(self) -> Finding:
        """The promise about it."""
        note = (
            f"processor time {self.cpu_variance_ratio:.3g}; deviations"
            f" {1e3 * self.deviation_s[0]:.3g} and {1e3 * self.deviation_s[1]:.3g} ms"
        )
        on = f"{self.rows} rows of {self.tokens:,} tokens"
        what = "variance of the time between tokens, of a contiguous cache's"
        return Finding("soak", what, on, TARGET, "at most", self.variance_ratio, "measured", note)


def measure_soak(ground: Ground, setting: Setting, *, rows: int, tokens: int) -> Soak:
    """Both at once, in turns of a few tokens.

    Args:
        ground: The model.
        setting: Of the engine.
        rows: At once.
        tokens: New ones of each row, at least 2.
    """
    load = Load(requests=rows, concurrency=rows, lengths=f"{_PROMPT}+{_PROMPT}")
    asks = draw(load, context=ground.context, vocabulary=ground.vocabulary, seed=5)
    prompts = [ask.prompt for ask in asks]
    stile = Turnstile(_STRIDE)
    other = _Contiguous(ground, prompts, tokens, stile)
    with ground.engine(setting, positions=_PROMPT + tokens) as (engine, kv):
        following = kv.bus.subscribe(lambda _: stile.passes(_ENGINE), EngineStep)
        other.start()
        try:
            answers = [engine.submit(prompt, max_new_tokens=tokens) for prompt in prompts]
            made = [answer.result().tokens for answer in answers]
        finally:
            following.close()
            stile.leave(_ENGINE)
            other.join()
    return _soak(stile, rows, tokens, same=made == other.made)


class _Contiguous(threading.Thread):
    """`generate` with the model's own cache, which is copied whenever a token is added."""

    def __init__(
        self, ground: Ground, prompts: list[list[int]], tokens: int, stile: Turnstile
    ) -> None:
        super().__init__(name="contiguous", daemon=True)
        self._model, self._prompts = longer(twin(ground.model), _PROMPT + tokens), prompts
        self._tokens, self._stile = tokens, stile
        self.made: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with each token of the rows."""
        self._stile.passes(_CONTIGUOUS)

    def end(self) -> None:
        """Called by `generate` when it is done."""

    def run(self) -> None:
        ids = torch.tensor(self._prompts, device=self._model.device)
        try:
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._tokens,
                do_sample=False,
                streamer=self,
            )
            self.made = made[:, ids.shape[1] :].tolist()
        finally:
            self._stile.leave(_CONTIGUOUS)


def _soak(stile: Turnstile, rows: int, tokens: int, *, same: bool) -> Soak:
    # The first gaps hold the prompt; the two sides are compared over as many.
    count = min(map(len, stile.wall_s))
    wall, cpu = (
        [np.array(side[1:count]) for side in times] for times in (stile.wall_s, stile.cpu_s)
    )
    parts = [np.array_split(side, min(_POINTS, len(side))) for side in wall]
    ends = np.cumsum([len(part) for part in parts[0]])
    names = ("engine", "contiguous cache")
    return Soak(
        rows=rows,
        tokens=tokens,
        variance_ratio=float(wall[0].var() / wall[1].var()),
        cpu_variance_ratio=float(cpu[0].var() / cpu[1].var()),
        deviation_s=(float(wall[0].std()), float(wall[1].std())),
        mean_s=(float(wall[0].mean()), float(wall[1].mean())),
        worst_s=(float(wall[0].max()), float(wall[1].max())),
        at=ends.tolist(),
        curves={
            name: [float(np.median(part)) for part in side]
            for name, side in zip(names, parts, strict=True)
        },
        same_tokens=same,
    )
