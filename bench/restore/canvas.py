"""The memory of a restore: a request's keys and values, and how far its hidden states are."""

from __future__ import annotations

import torch

from bench.restore.model import Model
from flowkv.policy.restore import Compute, Span, Suffix

_CHUNK = 512


class Canvas:
    """One request's tensors, empty: whatever is not restored is NaN.

    Args:
        model: Computes.
        tokens: int64 `[N + S]`: the prefix, and the suffix behind it.
        prefix: N.
        answer: Tokens of an answer that have room behind them.

    Attributes:
        kv: `[L, N + S + answer, 2, Hk, D]`.
        scores: Of the token that follows, once the last layer of the suffix is done.
    """

    def __init__(self, model: Model, tokens: torch.Tensor, prefix: int, answer: int = 0) -> None:
        self.model, self.tokens, self.prefix = model, tokens, prefix
        self.kv = model.empty_kv(len(tokens) + answer)
        self.scores: torch.Tensor | None = None
        # Per token: what its next layer is given. Layers of a token are computed from below, so
        # that one row for each is enough, however the cells are cut into ops.
        self._hidden = torch.full_like(model.embed(tokens), torch.nan)

    @torch.no_grad()
    def compute(self, op: Compute | Suffix) -> None:
        """Computes an op's cells; on a GPU, when the stream comes to it."""
        if isinstance(op, Compute):
            for layer in range(*op.layers):
                self._layer(layer, op.tokens)
            return
        self._layer(op.layer, Span(self.prefix, len(self.tokens)))
        if op.layer == self.model.shape.layers - 1:
            self.scores = self.model.scores(self._hidden[-1:])

    def _layer(self, number: int, tokens: Span) -> None:
        where = slice(*tokens)
        x = self.model.embed(self.tokens[where]) if number == 0 else self._hidden[where]
        self._hidden[where] = self.model.layer(number, x, self.kv[number], tokens.first)

    def prefill(self) -> None:
        """Computes everything, as nobody had anything."""
        layers = Span(0, self.model.shape.layers)
        for first in range(0, self.prefix, _CHUNK):
            self.compute(Compute(0, layers, Span(first, min(self.prefix, first + _CHUNK))))
        for layer in range(*layers):
            self.compute(Suffix(0, layer))

    @torch.no_grad()
    def answer(self, tokens: int) -> list[int]:
        """The likeliest tokens that follow, one after the other; needs a suffix, and room."""
        scores, first = self.scores, len(self.tokens)
        found: list[int] = []
        while scores is not None and len(found) < tokens:
            found.append(int(scores.argmax()))
            if len(found) < tokens:
                new = torch.tensor(found[-1:], device=self.tokens.device)
                scores = self.model.forward(new, self.kv, first + len(found) - 1)
        return found
