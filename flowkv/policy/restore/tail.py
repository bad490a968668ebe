"""Loads from the back: all layers at once while the split can still move, then layer by layer."""

from __future__ import annotations

import math
from typing import NamedTuple

from flowkv.policy.restore.aim import Aim, suffix_left_s, together_s
from flowkv.policy.restore.split import first_behind
from flowkv.policy.restore.state import State
from flowkv.policy.restore.words import Load, Span

_TAIL = 1.25
_PAYS = 4.0
_BLOCKS = 5
_LEAST = 3
_SLOWLY = 0.7


class Sizes(NamedTuple):
    """Tokens that are taken at once.

    Attributes:
        chunk: Most that are computed.
        block: Most that are loaded of all layers.
        probe: What is computed while costs are not known.
    """

    chunk: int
    block: int
    probe: int


def load_from_back(state: State, aim: Aim, tier: str, sizes: Sizes) -> Load | None:
    """The next load of a request from a tier; None if the rest is to be computed."""
    progress = aim.progress
    request, back, front = progress.request, progress.back, progress.front
    index, layers = aim.sources[tier], request.layers
    end = back[0]
    if not progress.fronted and end == back[-1] and back.count(end) == layers:
        floor = max(front[0], aim.goal, progress.lost)
        size = _block(state, aim, end - floor, sizes) if end > floor else 0
        if size:
            start = max(floor, (end - size) // request.unit * request.unit)
            return Load(request.number, Span(0, layers), Span(start, end), index)
    lost, goal, layer = progress.lost, aim.goal, aim.stripe
    turn = first_behind(progress) if goal > front[-1] else 0
    while layer < layers:
        floor = max(front[layer], lost, goal if layer >= turn else 0)
        if back[layer] > floor:
            break
        layer += 1
    aim.stripe = layer
    if layer == layers:
        return None
    end, last, first = back[layer], layer + 1, front[layer]
    most = min(layers, layer + _stripes(state, aim, index, end - floor))
    while last < most and back[last] == end and front[last] == first and last != turn:
        last += 1
    start = max(floor, (end - sizes.block * layers) // request.unit * request.unit)
    return Load(request.number, Span(layer, last), Span(start, end), index)


def _stripes(state: State, aim: Aim, index: int, tokens: int) -> int:
    """Layers that must be loaded at once for that not to be mostly latency."""
    if aim.group < 0:
        request, load_s = aim.progress.request, state.costs.load_s
        one_s, latency_s = load_s(request, index, tokens), load_s(request, index, 1)
        aim.group = math.ceil(latency_s * _PAYS / one_s) if one_s else 1
    return aim.group


def in_time(state: State, aim: Aim, op: Load) -> Load | None:
    """Cut to what this tier can load while the others load the rest; None if that is nothing.

    A slow tier helps as long as nobody has to wait for it.
    """
    progress = aim.progress
    request, load_s = progress.request, state.costs.load_s
    cells = op.layers.size * op.tokens.size
    took_s = load_s(request, op.source, cells)
    if not took_s or not aim.cell_s:
        return op
    fastest = min(load_s(request, index, cells) for index in aim.sources.values())
    left_s = aim.cell_s * sum(
        max(0, back - max(front, aim.goal, progress.lost))
        for front, back in zip(progress.front, progress.back, strict=True)
    )
    if took_s <= fastest:
        return op
    left_s = (left_s - suffix_left_s(state, progress)) * _SLOWLY
    if took_s <= left_s and op.layers.size == request.layers:
        return op
    first = op.tokens.stop - int(op.tokens.size * left_s / took_s)
    first = -(-first // request.unit) * request.unit
    if op.layers.size < request.layers or first >= op.tokens.stop:
        return None
    return op._replace(tokens=Span(first, op.tokens.stop))


def _block(state: State, aim: Aim, gap: int, sizes: Sizes) -> int:
    """Tokens to load of all layers at once; 0 where the rest should come layer by layer.

    The first block is small: it tells what the others will take.
    """
    request = aim.progress.request
    aim.cell_s = together_s(state, request, aim.sources)
    if not aim.cell_s:
        return min(gap, max(sizes.probe // 4, request.unit))
    if aim.suffix_s < 0:
        aim.suffix_s = suffix_left_s(state, aim.progress)
    tail = _TAIL * aim.suffix_s / (aim.cell_s * request.layers)
    part = 0.0 if aim.progress.back[0] == request.tokens else (gap - tail) / _BLOCKS
    size = min(max(_LEAST * request.unit, part), gap - tail, sizes.block)
    return max(0, int(size // request.unit) * request.unit)
