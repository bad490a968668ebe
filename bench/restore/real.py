"""The protocol on torch: real tensors over a real link, on this processor."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Sequence

import msgspec
import torch

from bench.restore.baselines import RESTORE_POLICIES, make_restore_policy
from bench.restore.model import SMALL
from bench.restore.modelled import Timed, bounds_of, outcome
from bench.restore.row import Bounds, Cell, Label, Outcome
from bench.restore.torch_engine import Prompt, TorchEngine
from flowkv.policy.restore import Span
from flowkv.policy.restore.costs import Measured

_GIGABIT = 1e9 / 8  # bytes
_SMALL_TOKENS, _SMALL_SUFFIX = 2048, 128
_SHARES = (0.25, 1.0)
"""What loading takes, of computing: links of a processor's rows are as fast as that makes them."""


class Processor:
    """Small models on this processor (`Engine`).

    One model is kept at a time, so cells that share one should follow each other.
    """

    name = "cpu"
    label: Label = "measured"

    def __init__(self) -> None:
        self.repetitions = 3
        self._made: tuple[tuple[object, ...], TorchEngine] | None = None
        self._costs: dict[Cell, Measured] = {}
        self._known: list[Cell] = []

    def cells(self) -> Sequence[Cell]:
        """Links are as fast as makes the better of two pointers interesting."""
        if not self._known:
            for model in ("small", "wide"):
                self._known += self._cells_of(model)
        return self._known

    def policies(self, cell: Cell) -> Sequence[str]:
        return list(RESTORE_POLICIES)

    def close(self) -> None:
        self._made = None

    def bounds(self, cell: Cell) -> Bounds:
        """By what things took at their fastest, just before."""
        return bounds_of(self._engine(cell).requests(), self._calibrated(cell))

    def run(self, cell: Cell, policy: str) -> Outcome:
        engine, costs = self._engine(cell), Measured(self._calibrated(cell))
        timed = Timed(make_restore_policy(policy))
        requests = engine.requests()
        with self._alone():
            found = engine.restore(timed, costs, bytes_per_s=_rate(cell))
        return outcome(
            found,
            requests,
            timed,
            error=max(engine.error(request.number) for request in requests),
            same_token=all(engine.same_tokens(request.number) for request in requests),
        )

    def _calibrated(self, cell: Cell) -> Measured:
        if cell not in self._costs:
            engine = self._engine(cell)
            with self._alone():
                self._costs[cell] = engine.calibrated(bytes_per_s=_rate(cell))
        return self._costs[cell]

    def _engine(self, cell: Cell) -> TorchEngine:
        key = (cell.model, cell.tokens, cell.suffix)
        if self._made is None or self._made[0] != key:
            self._made = None  # before the next one takes its room
            with self._alone():
                prompts = [Prompt(cell.tokens, cell.suffix)]
                self._made = key, TorchEngine(SMALL[cell.model], prompts)
        return self._made[1]

    def _cells_of(self, model: str) -> list[Cell]:
        cell = Cell(
            part="small",
            model=model,
            gpu=platform.machine(),
            tokens=_SMALL_TOKENS,
            suffix=_SMALL_SUFFIX,
            gbps=0.0,
            link="memory",
        )
        engine, costs = self._engine(cell), self._calibrated(cell)
        (request,) = engine.requests()
        all_s = costs.compute_s(request, request.layers, Span(0, request.tokens))
        n_bytes = request.layers * request.tokens * request.sources[0].cell_bytes

        rates = (n_bytes / (share * all_s) / _GIGABIT for share in _SHARES)
        return [
            msgspec.structs.replace(cell, gbps=float(f"{rate:.2g}"), link="limited")
            for rate in rates
        ]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread computes, so that the link's has a core of its own where there are two."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _rate(cell: Cell) -> float | None:
    """Bytes per second that the link is limited to."""
    return cell.gbps * _GIGABIT if cell.gbps else None
