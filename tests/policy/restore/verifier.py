"""The verifier: whether a timeline of ops restored what was asked, and broke no rule on the way.

It keeps its own account, cell by cell, and shares nothing with `State`, whose bookkeeping it
judges. Every engine's tests put its timelines through it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from flowkv.policy.restore import Compute, Op, RestoreLoad, RestoreRequest, Span, Suffix
from tests.inside import require

# One request's cells as the verifier sees them: who produced each, and when.

_NEVER = math.inf


class Cells:
    """Cells of one request, in columns between the tokens at which spans begin or end.

    Args:
        request: Whose.
        edges: Tokens at which any span of tokens begins or ends.
    """

    def __init__(self, request: RestoreRequest, edges: set[int]) -> None:
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
        assert isinstance(op, RestoreLoad)
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

    def _area(self, op: Compute | RestoreLoad) -> tuple[slice, slice]:
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

    def _begin_load(self, op: RestoreLoad, where: tuple[slice, slice], end_s: float) -> None:
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


_SLACK = 1e-9  # of a rate: what rounding may add


class Caps(NamedTuple):
    """What engines and links bear.

    Attributes:
        computes: Computes and suffix layers at a time, of all requests together.
        loads: Loads at a time, per tier; tiers that are not named have no limit.
        bytes_per_s: What a tier's link carries; tiers that are not named have no limit.
    """

    computes: int = 1
    loads: Mapping[str, int] = {}
    bytes_per_s: Mapping[str, float] = {}


class _Ran(NamedTuple):
    op: Op
    start_s: float
    end_s: float
    ok: bool


def verify(
    requests: Collection[RestoreRequest],
    timeline: Iterable[tuple[Op, float, float, bool]],
    caps: Caps = Caps(),  # noqa: B008 - immutable
    *,
    unfinished: Collection[int] = (),
) -> None:
    """Checks a timeline; returns if it is right.

    Checked: each cell is produced exactly once, not counting what a failed load took with it; a
    layer's computes need the tokens before and the layer below; fronts only rise, backs only fall
    (but for failures), and they meet; the suffix goes up layer by layer behind its cells; nothing
    lies below the failed part of a load that is loaded; nothing happens before a request came;
    caps hold at any time.

    Args:
        requests: What was asked for.
        timeline: Ops that were begun, with start, end and whether they went well. An op starts when
            its cells are taken (`State.begin`). Those that start at one time are in the order in
            which they were begun.
        caps: What engines and links bear.
        unfinished: Numbers of requests that were called off, or cannot be finished.

    Raises:
        VerificationError: A rule is broken; the message names it and the op.
    """
    ran = [_Ran(*entry) for entry in timeline]
    cells = {request.number: Cells(request, _edges(request, ran)) for request in requests}
    require(len(cells) == len(requests), "numbers: two requests have the same")
    for entry in ran:
        _sane(entry, cells)
    for _, entry, begins in sorted(_events(ran), key=lambda event: event[0]):
        mine = cells[entry.op.request]
        if begins:
            mine.begin(entry.op, entry.start_s, entry.end_s, entry.ok)
        elif not entry.ok:
            mine.fail(entry.op)
    _check_counts(ran, cells, caps)
    for tier, rate in caps.bytes_per_s.items():
        _check_rate(tier, rate, [e for e in ran if _tier(e.op, cells) == tier], cells)
    for number, mine in cells.items():
        if number not in unfinished:
            mine.check_finished()


def _edges(request: RestoreRequest, ran: list[_Ran]) -> set[int]:
    """Tokens at which spans of a request begin or end."""
    spans = (e.op.tokens for e in ran if not isinstance(e.op, Suffix) and _of(e.op, request))
    edges = {request.resident, request.tokens}
    for span in spans:
        edges.update(span)
    return edges


def _of(op: Op, request: RestoreRequest) -> bool:
    return op.request == request.number


def _sane(entry: _Ran, cells: Mapping[int, Cells]) -> None:
    op, start, end, ok = entry
    require(op.request in cells, f"numbers: nobody asked for {op}")
    require(math.isfinite(start) and math.isfinite(end), f"time: {op} has no start or end", op)
    require(start <= end, "time: an op ended before it began", op)
    require(ok or isinstance(op, RestoreLoad), "failure: only loads fail", op)
    arrived = cells[op.request].request.arrived_s
    require(start >= arrived, "time: an op began before its request came", op)


def _events(ran: list[_Ran]) -> list[tuple[tuple[float, int, int, int], _Ran, bool]]:
    """Starts and ends, with what to sort them by: at one time, ends come first."""
    events = []
    for i, e in enumerate(ran):
        events.append(((e.start_s, 1, i, 0), e, True))
        events.append(
            ((e.end_s, 1, i, 1) if e.start_s == e.end_s else (e.end_s, 0, i, 0), e, False)
        )
    return events


def _tier(op: Op, cells: Mapping[int, Cells]) -> str | None:
    if not isinstance(op, RestoreLoad):
        return None
    return cells[op.request].request.sources[op.source].tier


def _check_counts(ran: list[_Ran], cells: Mapping[int, Cells], caps: Caps) -> None:
    """How many of a kind were under way at once."""
    limits: dict[str | None, int] = {None: caps.computes}
    limits.update(caps.loads.items())
    busy = dict.fromkeys(limits, 0)
    for _, entry, begins in sorted(_events(ran), key=lambda event: event[0]):
        tier = _tier(entry.op, cells)
        if tier in limits:
            busy[tier] += 1 if begins else -1
            what = "computes" if tier is None else f"loads from {tier}"
            require(busy[tier] <= limits[tier], f"caps: too many {what} at a time", entry.op)


def _check_rate(tier: str, rate: float, loads: list[_Ran], cells: Mapping[int, Cells]) -> None:
    """Within any stretch of time, a link carries no more than its rate allows."""
    loads = sorted(loads, key=lambda e: e.end_s)
    starts, ends = np.array([e.start_s for e in loads]), np.array([e.end_s for e in loads])
    sizes = np.array([_bytes(e.op, cells) for e in loads])
    for since in set(starts.tolist()):
        carried = np.cumsum(np.where(starts >= since, sizes, 0.0))
        fits = carried <= rate * np.maximum(ends - since, 0.0) * (1 + _SLACK) + _SLACK
        require(bool((fits | (starts < since)).all()), f"caps: {tier} carried more than its rate")


def _bytes(op: Op, cells: Mapping[int, Cells]) -> float:
    if not isinstance(op, RestoreLoad):
        return 0.0
    source = cells[op.request].request.sources[op.source]
    return op.layers.size * op.tokens.size * source.cell_bytes
