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
    chunk_places,
    digest,
    learn_tables,
    shape_of,
)
from flowkv.kvt.codec import SINKS, PageCoder

MOST_BITS = 8.0
"""A setting that takes more bits a value is none: kv8 is simpler."""
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
    """

    def __init__(self, layout: PageLayout, turns: Sequence[KeyTurn | None]) -> None:
        self.layout, self._turns = layout, list[KeyTurn]()
        self._turn_of = list[int]()
        for turn in turns:
            if turn is None:
                self._turn_of.append(-1)
                continue
            known = (n for n, one in enumerate(self._turns) if _alike(one, turn))
            number = next(known, len(self._turns))
            if number == len(self._turns):
                self._turns.append(turn)
            self._turn_of.append(number)
        self._places = list(chunk_places(layout))
        self._chunks = [ChunkStatistics(shape_of(place, layout)) for place in self._places]
        self._samples = list[Sides]()

    def turned(self, keys: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Return keys `[layers, heads, tokens, dim]` rotated to positions from 0 on, or back."""
        out = keys.clone()
        for layer, turn in enumerate(self._turn_of):
            if turn >= 0:
                positions = torch.arange(keys.shape[2]).numpy()
                cos, sin = (x[:, 0] for x in self._turns[turn].angles(positions))
                sin = -sin if back else sin
                out[layer] = self._turns[turn].moved(keys[layer], cos, sin)
        return out

    def add(self, sides: Sides, gradients: Sides | None, *, sample: bool) -> None:
        """Add keys and values as they are in the cache, and gradients by them."""
        x = self.turned(sides[0].float(), back=True), sides[1].float()
        if sample:
            self._samples.append((x[0].half(), x[1].half()))
        g = None
        if gradients is not None:
            g = self.turned(gradients[0].float(), back=True), gradients[1].float()
        for place, chunk in zip(self._places, self._chunks, strict=True):
            chunk.add(_elements(x, place))
            if g is not None:
                chunk.add_gradients(_elements(g, place))

    def coder(self, step: float, measured: dict[str, float]) -> tuple[PageCoder, bytes]:
        """Return the coder with a step, and the basis as it is stored."""
        chunks = [chunk.chunk(step) for chunk in self._chunks]
        tables = learn_tables(self._pairs(chunks))
        said = self.layout.fingerprint(), step, self._turns, self._turn_of, chunks, tables, measured
        data = Basis(*said).pack()
        return PageCoder(self.layout, digest(data), Basis.unpack(data, self.layout)), data

    def _pairs(self, chunks: list[BasisChunk]) -> Iterator[tuple[BasisChunk, torch.Tensor]]:
        for sides in self._samples:
            for place, chunk in zip(self._places, chunks, strict=True):
                yield chunk, _elements((sides[0].float(), sides[1].float()), place)

    @property
    def values(self) -> int:
        """Return the elements of keys and values of one token."""
        return sum(math.prod(chunk.shape) for chunk in self._chunks)


def _alike(one: KeyTurn, other: KeyTurn) -> bool:
    same = one.interleaved == other.interleaved and one.start == other.start
    return same and one.inv_freq.tobytes() == other.inv_freq.tobytes()


def _elements(sides: Sides, place: object) -> torch.Tensor:
    part = sides[place.side][place.layers, place.heads, SINKS:].permute(2, 0, 1, 3)  # type: ignore[attr-defined]
    return part.reshape(part.shape[0], -1)


def coded_pages(coder: PageCoder, sides: Sides) -> tuple[Sides, int, int]:
    """Return keys and values as coded pages give them back, and the bytes coded and raw.

    Args:
        coder: Coder of the pages.
        sides: Keys and values in the dtype of the pages, `[layers, heads, tokens, dim]`; the tokens
            fill whole pages.
    """
    size, out = coder.layout.page_size, (sides[0].clone(), sides[1].clone())
    coded_bytes = raw_bytes = 0
    for number in range(sides[0].shape[2] // size):
        page, back = bytearray(coder.layout.page_bytes), bytearray(coder.layout.page_bytes)
        here = slice(number * size, (number + 1) * size)
        for view, side in zip(coder.views(memoryview(page)), sides, strict=True):
            view.copy_(side[:, :, here])
        data = coder.encode(memoryview(page), number)
        raw_bytes += len(page)
        coded_bytes += len(data or page)
        if data is None or not coder.decode(
            memoryview(data), memoryview(back), 0, coder.layout.layers
        ):
            back = page
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
