"""How far restores are: what was begun, what is done, and what was lost on the way.

Whoever executes a restore (virtual clock, emulated devices, torch, the cache) tells it `begin`,
`end` and `fail`; policies only read it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from flowkv.core.errors import StateError

# The words of a restore: what is asked for, and the three things that can be done about it.
#
# A prefix of N tokens over L layers is a rectangle of *cells* (layer, token). Each cell is
# computed or loaded, once. Causality gives both their direction: a layer's tokens are computed
# from the front, and only where the layer below computed them too; so loads come from the back.
# Per layer there are two pointers, and the layer is there when they have met. The suffix, which
# nobody has, is computed layer by layer once the prefix of its layer is there.


class Span(NamedTuple):
    """A half-open range: of layers, or of tokens."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        """How many."""
        return self.stop - self.first


class Source(NamedTuple):
    """Somewhere all cells of a prefix can be loaded from.

    Attributes:
        tier: Its name; loads of one tier share a link.
        codec: How the pages lie there (`core.layout.CODECS`).
        cell_bytes: Bytes of one token of one layer.
    """

    tier: str
    codec: str
    cell_bytes: float


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt whose prefix lies somewhere.

    Attributes:
        number: Names it; unique among those that are restored together.
        tokens: N, tokens of the prefix; the cells are those of `[resident, tokens)`.
        suffix: S, tokens behind it, which must be computed. 0 leaves the suffix out.
        layers: L.
        resident: Leading tokens that are there already.
        unit: Tokens of a page. Spans of tokens begin and end at multiples of it, or at `tokens`.
        sources: Where it can be loaded from, most precise first; empty if it can only be computed.
        computable: Whether cells can be computed at all; False where nobody drives the model.
        whole: Computes are over all layers (an unmodified model cannot be stopped halfway).
        arrived_s: When it came.
    """

    number: int
    tokens: int
    suffix: int
    layers: int
    resident: int = 0
    unit: int = 64
    sources: tuple[Source, ...] = ()
    computable: bool = True
    whole: bool = False
    arrived_s: float = 0.0


class Compute(NamedTuple):
    """Compute these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Which.
        tokens: Which; they begin where the layers' computed tokens end.
    """

    request: int
    layers: Span
    tokens: Span


class Load(NamedTuple):
    """Load these layers of these tokens.

    Attributes:
        request: Number of the request.
        layers: Which.
        tokens: Which; they end where the layers' loaded tokens begin.
        source: Index into `Request.sources`.
    """

    request: int
    layers: Span
    tokens: Span
    source: int = 0


class Suffix(NamedTuple):
    """Compute a layer of the suffix: all cells of the layer are there, and the layer below is done.

    Attributes:
        request: Number of the request.
        layer: Which.
    """

    request: int
    layer: int


Op = Compute | Load | Suffix


class Costs(Protocol):
    """What things are expected to take, in seconds; 0.0 while that is not known."""

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """Computing so many layers of these tokens."""
        ...

    def suffix_s(self, request: Request) -> float:
        """Computing all layers of the suffix."""
        ...

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """Loading so many cells (tokens times layers) at once."""
        ...


class Progress:
    """One request's cells.

    Attributes:
        request: Whose.
        front: Per layer: tokens that computes were begun for, from the first one on.
        back: Per layer: first token that loads were begun for.
        computed: Per layer: tokens that are computed (or were resident).
        missing: Per layer: tokens of loads that were begun and have not ended.
        suffix: Layers of the suffix that were begun.
        answered: Layers of the suffix that are done.
        flying: Ops that were begun and have not ended.
        lost: Tokens up to which nothing can be loaded, because a load of theirs failed.
        fronted: Its front has ended: of the prefix nothing is computed any more, and the suffix
            waits for the rest, layer by layer.
    """

    def __init__(self, request: Request) -> None:
        layers = request.layers
        self.request = request
        self.front, self.computed = [request.resident] * layers, [request.resident] * layers
        self.back, self.missing = [request.tokens] * layers, [0] * layers
        self.suffix = self.answered = self.lost = 0
        self.fronted = False
        self.flying: list[Op] = []

    def gap(self, layer: int) -> int:
        """Tokens of a layer that nothing was begun for."""
        return max(0, self.back[layer] - self.front[layer])

    def cells(self) -> int:
        """Cells that nothing was begun for."""
        return sum(map(self.gap, range(self.request.layers)))

    def there(self, layer: int) -> bool:
        """Whether all cells of a layer's prefix are there."""
        whole = self.front[layer] >= self.back[layer] and not self.missing[layer]
        return whole and self.computed[layer] >= self.back[layer]

    @property
    def met(self) -> bool:
        """Whether something was begun for every cell."""
        return all(f >= b for f, b in zip(self.front, self.back, strict=True))

    @property
    def restored(self) -> bool:
        """Whether the whole prefix is there."""
        return all(map(self.there, range(self.request.layers)))

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        suffix = self.request.layers if self.request.suffix else 0
        return self.answered >= suffix and self.restored


class State:
    """Restores that are under way, together.

    Args:
        costs: What things are expected to take.

    Attributes:
        now_s: The time, as whoever executes tells it.
        requests: By number, in order of arrival.
        link_cells: Cells of loads under way, by tier.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now_s = costs, 0.0
        self.requests: dict[int, Progress] = {}
        self.link_cells: dict[str, int] = {}

    def add(self, request: Request) -> Progress:
        """A request arrived."""
        if request.number in self.requests:
            raise StateError(f"request {request.number} is there already", "Number it otherwise")
        progress = self.requests[request.number] = Progress(request)
        return progress

    def remove(self, number: int) -> None:
        """A request is done, or was called off."""
        progress = self.requests.pop(number)
        for op in progress.flying:
            if isinstance(op, Load):
                self._count(progress.request, op, -1)

    def fronted(self, number: int) -> None:
        """Nobody computes any more of a request's prefix."""
        self.requests[number].fronted = True

    def __iter__(self) -> Iterator[Progress]:
        return iter(self.requests.values())

    def among(self, numbers: Iterable[int] | None) -> Iterator[Progress]:
        """Those with these numbers; all of them if that is None."""
        if numbers is None:
            return iter(self)
        return (self.requests[number] for number in numbers if number in self.requests)

    # ---- what happens

    def begin(self, op: Op) -> None:
        """An op is begun; its cells are taken.

        Raises:
            StateError: It does not go on where the pointers are. The verifier says more.
        """
        progress = self.requests[op.request]
        if isinstance(op, Suffix):
            if op.layer != progress.suffix or not progress.there(op.layer):
                raise StateError(f"{op} is not due", "Ask the policy again")
            progress.suffix += 1
        elif isinstance(op, Compute):
            layers = range(*op.layers)
            begins = all(progress.front[layer] == op.tokens.first for layer in layers)
            fits = all(op.tokens.stop <= progress.back[layer] for layer in layers)
            self._meets(op, begins and fits)
            for layer in layers:
                progress.front[layer] = op.tokens.stop
        else:
            layers = range(*op.layers)
            ends = all(progress.back[layer] == op.tokens.stop for layer in layers)
            fits = all(op.tokens.first >= progress.front[layer] for layer in layers)
            self._meets(op, ends and fits and op.tokens.first >= progress.lost)
            for layer in layers:
                progress.back[layer] = op.tokens.first
                progress.missing[layer] += op.tokens.size
            self._count(progress.request, op, 1)
        progress.flying.append(op)

    def end(self, op: Op) -> None:
        """An op is done: its cells are there."""
        progress = self.requests[op.request]
        progress.flying.remove(op)
        if isinstance(op, Suffix):
            progress.answered += 1
        elif isinstance(op, Compute):
            for layer in range(*op.layers):
                progress.computed[layer] = op.tokens.stop
        else:
            self._landed(progress, op)

    def fail(self, op: Op) -> None:
        """A load failed: all up to its last token must be computed, what came of it is dropped."""
        if not isinstance(op, Load):
            raise StateError(f"{op} cannot fail", "Only loads do")
        progress = self.requests[op.request]
        progress.flying.remove(op)
        self._landed(progress, op)
        progress.lost = max(progress.lost, op.tokens.stop)
        for layer in range(progress.request.layers):
            progress.back[layer] = max(progress.back[layer], progress.lost)

    def _landed(self, progress: Progress, op: Load) -> None:
        for layer in range(*op.layers):
            progress.missing[layer] -= op.tokens.size
        self._count(progress.request, op, -1)

    def _count(self, request: Request, op: Load, sign: int) -> None:
        tier = request.sources[op.source].tier
        cells = sign * op.layers.size * op.tokens.size
        self.link_cells[tier] = self.link_cells.get(tier, 0) + cells

    @staticmethod
    def _meets(op: Compute | Load, right: bool) -> None:
        if not right or op.tokens.size <= 0 or op.layers.size <= 0:
            raise StateError(f"{op} does not go on where the pointers are", "Ask the policy again")


# What a restore policy is: two questions, answered from the state alone.


class RestorePolicy(ABC):
    """Says what each engine does next. Pure: no I/O, no clock of its own, deterministic.

    The same object drives a virtual clock, emulated devices, torch and the cache. Each asks when
    an engine of its is idle; what is answered is begun at once (`State.begin`), before anything
    else is asked. None says that the engine has nothing to do until something ends or arrives.
    """

    name = ""

    @abstractmethod
    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        """What is computed next.

        Args:
            state: How far everything is.
            among: Numbers of the requests that this engine can compute; None for all.
        """

    @abstractmethod
    def next_load(self, state: State, tier: str) -> Load | None:
        """What is loaded from a tier next."""

    def forget(self, number: int) -> None:  # noqa: B027 - most remember nothing
        """A request is done or was called off: what is remembered of it can go."""


# One request's cells as the verifier sees them: who produced each, and when.

_NEVER = math.inf


class VerificationError(AssertionError):
    """A timeline breaks a rule. The message begins with the rule's name."""


def require(holds: bool, sentence: str, about: object = None) -> None:
    """Fails with a sentence, and what it is about.

    Raises:
        VerificationError: It does not hold.
    """
    if not holds:
        raise VerificationError(sentence if about is None else f"{sentence}: {about}")


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


# The verifier: whether a timeline of ops restored what was asked, and broke no rule on the way.
#
# It keeps its own account, cell by cell, and shares nothing with `State`, whose bookkeeping it
# judges. Every engine's tests put its timelines through it.

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
    requests: Collection[Request],
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


def _edges(request: Request, ran: list[_Ran]) -> set[int]:
    """Tokens at which spans of a request begin or end."""
    spans = (e.op.tokens for e in ran if not isinstance(e.op, Suffix) and _of(e.op, request))
    edges = {request.resident, request.tokens}
    for span in spans:
        edges.update(span)
    return edges


def _of(op: Op, request: Request) -> bool:
    return op.request == request.number


def _sane(entry: _Ran, cells: Mapping[int, Cells]) -> None:
    op, start, end, ok = entry
    require(op.request in cells, f"numbers: nobody asked for {op}")
    require(math.isfinite(start) and math.isfinite(end), f"time: {op} has no start or end", op)
    require(start <= end, "time: an op ended before it began", op)
    require(ok or isinstance(op, Load), "failure: only loads fail", op)
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
    if not isinstance(op, Load):
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
    if not isinstance(op, Load):
        return 0.0
    source = cells[op.request].request.sources[op.source]
    return op.layers.size * op.tokens.size * source.cell_bytes
