"""Learning of bases: the largest step whose measured divergence stays within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from flowkv.core.geometry import PageLayout
from flowkv.kvt.basis import (
    Basis,
    BasisChunk,
    ChunkStatistics,
    KeyTurn,
    KeyTurns,
    chunk_places,
    learn_tables,
    shape_of,
)
from flowkv.kvt.codec import SINKS, PageCoder

MOST_BITS = 8.0
"""Most bits a value of a setting that is of use: kv8 takes as many, and needs no calibration."""
_TRIALS = 6
_SLACK = 0.9  # share of the bound at which the search ends

Sides = tuple[torch.Tensor, torch.Tensor]
"""Keys before their rotation and values, float `[layers, heads, tokens, dim]`."""


class Scores(NamedTuple):
    """What coded pages change in the tokens behind them.

    Attributes:
        kl: Mean divergence of the exact prediction from the other, in nats.
        same_token: Share of tokens with an unchanged most likely one.
        nll: Mean change of the negative log-likelihood of the text.
        bits: Bits a value of the coded pages.
    """

    kl: float
    same_token: float
    nll: float
    bits: float


class GroupLearner:
    """Statistics of one layer group.

    Args:
        layout: Layout of its raw pages.
        turns: Rotation of each layer's keys, None for none.

    Attributes:
        turns: All of them.
    """

    def __init__(self, layout: PageLayout, turns: Sequence[KeyTurn | None]) -> None:
        self.layout, self.turns = layout, KeyTurns.of_layers(turns)
        self._places = list(chunk_places(layout))
        self._chunks = [ChunkStatistics(shape_of(place, layout)) for place in self._places]
        self._samples = list[Sides]()

    def add(self, sides: Sides, gradients: Sides | None, *, sample: bool) -> None:
        """Add keys and values as they are in the cache, and gradients by them."""
        x = self.turns.apply(sides[0].float(), 0, back=True), sides[1].float()
        if sample:
            self._samples.append((x[0].half(), x[1].half()))
        g = None
        if gradients is not None:
            g = self.turns.apply(gradients[0].float(), 0, back=True), gradients[1].float()
        for place, chunk in zip(self._places, self._chunks, strict=True):
            chunk.add(place.elements(x, SINKS))
            if g is not None:
                chunk.add_gradients(place.elements(g, SINKS))

    def coder(self, step: float, measured: dict[str, float]) -> PageCoder:
        """Return the coder with a step."""
        chunks = [chunk.chunk(step) for chunk in self._chunks]
        tables = learn_tables(self._pairs(chunks))
        said = self.layout.fingerprint(), step, self.turns, chunks, tables, measured
        return PageCoder(self.layout, Basis(*said).pack())

    def _pairs(self, chunks: list[BasisChunk]) -> Iterator[tuple[BasisChunk, torch.Tensor]]:
        for sides in self._samples:
            for place, chunk in zip(self._places, chunks, strict=True):
                yield chunk, place.elements(sides, SINKS).float()

    @property
    def values(self) -> int:
        """Return the elements of keys and values of one token."""
        return sum(math.prod(chunk.shape) for chunk in self._chunks)


def coded_pages(coder: PageCoder, sides: Sides, first: int = 0) -> tuple[Sides, int, int]:
    """Return keys and values as coded pages give them back, and the bytes coded and raw.

    Args:
        coder: Coder of the pages.
        sides: Keys and values in the dtype of the pages, `[layers, heads, tokens, dim]`; the tokens
            fill whole pages.
        first: Number of the first page.
    """
    size, out = coder.layout.page_size, (sides[0].clone(), sides[1].clone())
    coded_bytes = raw_bytes = 0
    for number in range(sides[0].shape[2] // size):
        page = bytearray(coder.layout.page_bytes)
        here = slice(number * size, (number + 1) * size)
        for view, side in zip(coder.views(memoryview(page)), sides, strict=True):
            view.copy_(side[:, :, here])
        data, back = coder.round_trip(memoryview(page), first + number) or (page, page)
        raw_bytes += len(page)
        coded_bytes += len(data)
        for side, view in zip(out, coder.views(memoryview(back)), strict=True):
            side[:, :, here] = view
    return out, coded_bytes, raw_bytes


def search(score: Callable[[float], Scores], bound: float, first: float) -> dict[float, Scores]:
    """Return the scores of all steps that were tried for a divergence within a bound.

    Args:
        score: Measures a step.
        bound: Largest divergence.
        first: Step to begin with.
    """
    tried, step = dict[float, Scores](), first
    low, high = 0.0, math.inf  # the largest step within the bound, the smallest beyond it
    for _ in range(_TRIALS):
        found = tried[step] = score(step)
        if found.kl <= bound:
            low = max(low, step)
            if found.kl >= _SLACK * bound:
                break
        else:
            high = min(high, step)
        step *= min(4.0, max(0.25, math.sqrt(0.95 * bound / max(found.kl, 1e-9))))
        if not low < step < high:
            step = math.sqrt(low * high) if low and high < math.inf else step
    return tried
