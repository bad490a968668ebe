"""Real restores on torch: a model with random weights, and a link that copies its keys and values.

What comes out is compared with a full prefill, number by number. Times are of this machine, and
labelled *measured*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from bench.restore.canvas import Canvas
from bench.restore.device import Clock, Device, stopwatch
from bench.restore.executor import Executor, Unit
from bench.restore.model import VOCABULARY, Model
from bench.restore.processor import Copier, Link, Processor
from flowkv.core.errors import ConfigError
from flowkv.policy.restore import (
    Compute,
    Op,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    Suffix,
)
from flowkv.policy.restore.costs import Measured
from flowkv.sim.restore import LINK, Decoder, Run

UNIT = 64
"""Tokens of a page."""

ANSWER = 4
"""Tokens of an answer that are compared."""

_ROUNDS = 3


class Prompt(NamedTuple):
    """How long a prompt is.

    Attributes:
        tokens: Of its prefix, which lies somewhere.
        suffix: Of what follows, which does not.
    """

    tokens: int
    suffix: int


class TorchEngine:
    """A model, and prompts whose prefixes were computed before.

    Args:
        shape: Of the model.
        prompts: Of random tokens; request `i` is the i-th of them.
        seed: Of weights and tokens.

    Raises:
        ConfigError: No prompt, or one without a prefix.
    """

    def __init__(self, shape: Decoder, prompts: Sequence[Prompt], *, seed: int = 0) -> None:
        if not prompts or min(prompt.tokens for prompt in prompts) < 1:
            raise ConfigError("There is no prefix to restore", "Name prompts of at least one token")
        self.prompts = tuple(prompts)
        self.canvases: dict[int, Canvas] = {}
        longest = max(map(sum, prompts)) + ANSWER
        self.model = Model(shape, positions=longest, seed=seed)
        self._tokens = _random_tokens(self.prompts, seed)
        self._kept: dict[int, torch.Tensor] = {}
        self._right: dict[int, list[int]] = {}
        for number, prompt in enumerate(self.prompts):
            canvas = self._canvas(number)
            canvas.prefill()
            self._right[number] = canvas.answer(ANSWER)
            self._kept[number] = canvas.kv[:, : prompt.tokens].clone()

    def requests(self) -> list[RestoreRequest]:
        """What there is to restore."""
        return [
            RestoreRequest(
                number=number,
                tokens=prompt.tokens,
                suffix=prompt.suffix,
                layers=self.model.shape.layers,
                unit=UNIT,
                sources=(Source(LINK, "raw", float(self._kept[number][0, 0].nbytes)),),
            )
            for number, prompt in enumerate(self.prompts)
        ]

    def restore(
        self,
        policy: RestorePolicy,
        costs: Measured | None = None,
        *,
        requests: Sequence[RestoreRequest] | None = None,
        bytes_per_s: float | None = None,
        fails: Callable[[RestoreLoad], bool] | None = None,
    ) -> Run:
        """Restores into empty tensors, which `canvases` holds afterwards.

        Args:
            policy: Decides.
            costs: What the policy expects; it learns from what happens. None: it knows nothing yet.
            requests: Some of `requests`, or the same with other fields; None for all.
            bytes_per_s: Limit of the link; None for none.
            fails: Loads that fail.

        Raises:
            StateError: The policy stopped too early, or begins what is not due.
        """
        requests = self.requests() if requests is None else requests
        self.canvases = {request.number: self._canvas(request.number) for request in requests}
        compute, link = self._devices(bytes_per_s, fails)
        costs = Measured() if costs is None else costs
        return Executor(policy, costs, [Unit(compute)], {LINK: link}).run(requests)

    def error(self, number: int) -> float:
        """Largest difference of restored keys and values from those of the full prefill.

        NaN if something was not restored.
        """
        restored, kept = self.canvases[number].kv, self._kept[number]
        worst: list[float] = [
            (mine[: len(right)] - right).abs().max().item()
            for mine, right in zip(restored, kept, strict=True)
        ]
        return max(worst, key=lambda x: (math.isnan(x), x))

    def same_tokens(self, number: int) -> bool:
        """Whether the next tokens are those that follow the full prefill."""
        found = self.canvases[number].answer(ANSWER)
        return found == self._right[number]

    def calibrated(self, *, bytes_per_s: float | None = None) -> Measured:
        """What things take on this machine now: the fastest of some runs of each.

        For bounds, and as what a policy begins with. See `restore` for the argument.
        """
        request, costs, clock = self.requests()[0], Measured(), stopwatch()
        canvas = self._canvas(request.number)
        canvas.kv[:, : request.tokens] = self._kept[request.number]
        self.canvases = {request.number: canvas}
        compute, link = self._devices(bytes_per_s, None)
        spans = list(_spans(request.tokens))
        samples = _computed(compute, request, spans, clock)
        for tokens, seconds in zip(spans, samples, strict=False):
            costs.computed(request, request.layers, tokens, seconds)
        if request.suffix:
            costs.suffixed(request, samples[-1])
        for tokens in (Span(0, min(UNIT, request.tokens)), *spans):
            op = RestoreLoad(request.number, Span(0, request.layers), tokens)
            cells = request.layers * tokens.size
            costs.loaded(request, 0, cells, _fastest_s(link, op, clock))
        return costs

    def _canvas(self, number: int) -> Canvas:
        return Canvas(self.model, self._tokens[number], self.prompts[number].tokens, ANSWER)

    def _devices(
        self, bytes_per_s: float | None, fails: Callable[[RestoreLoad], bool] | None
    ) -> tuple[Device, Device]:
        """What computes, and what loads."""
        link = Link(self.canvases, self._kept, bytes_per_s, fails)
        return Processor(self.canvases), Copier(link)


def _computed(
    compute: Device, request: RestoreRequest, spans: Sequence[Span], clock: Clock
) -> list[float]:
    """Seconds of all layers of each span, and of the suffix."""
    layers = Span(0, request.layers)
    ops = [Compute(request.number, layers, tokens) for tokens in spans]
    suffix = [Suffix(request.number, layer) for layer in range(*layers)] if request.suffix else []
    seconds = [_fastest_s(compute, op, clock) for op in ops]
    return [*seconds, sum(_fastest_s(compute, op, clock) for op in suffix)]


def _fastest_s(device: Device, op: Op, clock: Clock) -> float:
    runs = (device.begin(op, clock).wait() for _ in range(_ROUNDS))
    return min(end_s - start_s for start_s, end_s, _ in runs)


def _spans(tokens: int) -> Iterator[Span]:
    """Pieces of a prefix: of two lengths, at several places."""
    for size in (tokens // 8, tokens // 3):
        size = max(UNIT, size // UNIT * UNIT)
        for first in range(0, tokens - size + 1, max(size, tokens // 3 // UNIT * UNIT)):
            yield Span(first, first + size)


def _random_tokens(prompts: Sequence[Prompt], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (sum(one),), generator=generator) for one in prompts]
