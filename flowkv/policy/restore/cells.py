"""One request's cells as the verifier sees them: who produced each, and when."""

from __future__ import annotations

import math

import numpy as np

from flowkv.policy.restore.words import Compute, Load, Op, Request, Span, Suffix

_NEVER = math.inf


class VerificationError(AssertionError):
    """A timeline breaks a rule. The message begins with the rule's name."""


def require(holds: bool, sentence: str, op: Op | None = None) -> None:
    """Fails with a sentence, and the op that it is about.

    Raises:
        VerificationError: It does not hold.
    """
    if not holds:
        raise VerificationError(sentence if op is None else f"{sentence}: {op}")


class Cells:
    """Cells of one request, in columns between the tokens at which spans begin or end.

    Args:
        request: Whose.
        edges: Tokens at which any span of tokens begins or ends.
    """

    def __init__(self, request: Request, edges: set[int]) -> None:
        self.request = request
        self._edges = sorted(e for e in edges if request.resident <= e <= request.tokens)
        self._column = {edge: i for i, edge in enumerate(self._edges)}
        shape = request.layers, max(0, len(self._edges) - 1)
        self._taken = np.zeros(shape, bool)
        self._ready = np.full(shape, _NEVER)  # when a cell's value is there
        self._computed = np.full(shape, _NEVER)  # when the next layer's input is there
        self._front, self._back = [request.resident] * shape[0], [request.tokens] * shape[0]
        self._lost = 0
        self._answered: list[float] = []  # when layers of the suffix were done

    def begin(self, op: Op, start_s: float, end_s: float, ok: bool) -> None:
        """An op began; when it will end, and whether well, is known."""
        if isinstance(op, Suffix):
            self._begin_suffix(op, start_s, end_s)
            return
        where = self._area(op)
        require(not self._taken[where].any(), "once: a cell is produced again", op)
        if isinstance(op, Compute):
            self._begin_compute(op, where, start_s, end_s)
        else:
            self._begin_load(op, where, end_s if ok else _NEVER)
        self._taken[where] = True

    def fail(self, op: Op) -> None:
        """A load failed: what was loaded up to its last token is dropped."""
        assert isinstance(op, Load)
        self._lost = max(self._lost, op.tokens.stop)
        lost = self._column[self._lost]
        for layer in range(self.request.layers):
            front = self._column[self._front[layer]]
            self._taken[layer, front:lost] = False
            self._ready[layer, front:lost] = _NEVER
            self._back[layer] = max(self._back[layer], self._lost)

    def check_finished(self) -> None:
        """Everything was produced."""
        mine, number = self.request, self.request.number
        met = bool(self._taken.all())
        require(met, f"met: the pointers of request {number} did not meet")
        if mine.suffix:
            done = len(self._answered) == mine.layers
            require(done, f"suffix: request {number} lacks layers of its suffix")

    # ---- one op each

    def _area(self, op: Compute | Load) -> tuple[slice, slice]:
        request, tokens, layers = self.request, op.tokens, op.layers
        fits = 0 <= layers.first < layers.stop <= request.layers
        require(fits, "span: layers are empty or not the model's", op)
        fits = request.resident <= tokens.first < tokens.stop <= request.tokens
        require(fits, "span: tokens are empty or not the prefix's", op)
        for edge in tokens:
            aligned = edge % request.unit == 0 or edge in (request.resident, request.tokens)
            require(aligned, "span: tokens do not begin and end with pages", op)
        columns = slice(self._column[tokens.first], self._column[tokens.stop])
        return slice(*layers), columns

    def _begin_compute(
        self, op: Compute, where: tuple[slice, slice], start_s: float, end_s: float
    ) -> None:
        request = self.request
        require(request.computable, "compute: the request cannot be computed", op)
        all_layers = op.layers == Span(0, request.layers)
        require(all_layers or not request.whole, "whole: a compute leaves layers out", op)
        layers, columns = where
        for layer in range(layers.start, layers.stop):
            begins = self._front[layer] == op.tokens.first
            require(begins, "front: a compute does not begin where the front is", op)
            self._front[layer] = op.tokens.stop
        before = self._computed[layers, : columns.start]
        require(bool((before <= start_s).all()), "causal: tokens before are not computed", op)
        if layers.start:
            below = self._computed[layers.start - 1, columns]
            require(bool((below <= start_s).all()), "layers: the layer below is not computed", op)
        self._ready[where] = self._computed[where] = end_s

    def _begin_load(self, op: Load, where: tuple[slice, slice], end_s: float) -> None:
        require(0 <= op.source < len(self.request.sources), "source: there is no such one", op)
        require(op.tokens.first >= self._lost, "lost: a load below one that failed", op)
        for layer in range(*op.layers):
            ends = self._back[layer] == op.tokens.stop
            require(ends, "back: a load does not end where the back is", op)
            self._back[layer] = op.tokens.first
        self._ready[where] = end_s

    def _begin_suffix(self, op: Suffix, start_s: float, end_s: float) -> None:
        layer = len(self._answered)
        require(self.request.suffix > 0, "suffix: the request has none", op)
        require(op.layer == layer < self.request.layers, "suffix: layers are out of order", op)
        there = bool((self._ready[layer] <= start_s).all())
        require(there, "suffix: cells of its layer are not there", op)
        below = self._answered[-1] if layer else start_s
        require(below <= start_s, "suffix: the layer below is not done", op)
        self._answered.append(end_s)
