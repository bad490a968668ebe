"""What restores take, learnt from what they took.

A calibration goes stale: another job comes or goes, a clock drops, a drive warms its cache. So the
*form* of a cost (what a chunk takes on top of its tokens, how attention grows) is learnt slowly,
and its *level* is what the last few samples say: the median of three, so that one that is far off
changes nothing, and two of a kind are believed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from flowkv.policy.rates import Rates
from flowkv.policy.restore.state import Costs
from flowkv.policy.restore.words import Request, Span

_MEMORY = 0.9
_SPREAD = 1e-4
_ENOUGH = 6
_LAST = 3
_FAR = 2.0

Form = tuple[float, float, float]
"""Of one layer of a chunk: once, for each token, and for each pair of a token and one before it."""

_SHAPES = ((0, 1, 2), (0, 1), (1, 2), (1,))
"""Which of the three are asked about, in order of trust, until the answer makes sense."""


class Measured:
    """Costs as they were measured (`Costs`).

    Args:
        prior: What is believed before anything was measured; its level is corrected by the first
            samples. 0.0, "not known", without.
    """

    def __init__(self, prior: Costs | None = None) -> None:
        self._prior = prior
        self._compute = _Chunks()
        self._links: dict[tuple[str, str], _Link] = {}
        self._suffix: deque[float] = deque(maxlen=_LAST)

    # ---- what was measured

    def computed(self, request: Request, layers: int, tokens: Span, seconds: float) -> None:
        """Computing so many layers of these tokens took so long; nothing of it is no sample."""
        if layers > 0 and tokens.size > 0 and seconds > 0:
            believed = self._prior.compute_s(request, 1, tokens) if self._prior else 0.0
            self._compute.add(tokens, seconds / layers, believed)

    def suffixed(self, request: Request, seconds: float) -> None:
        """Computing all layers of the suffix took so long, without waiting for loads.

        Where nothing else was computed, that tells what computing takes: a prior by which nothing
        is worth computing would else never be put right. A few tokens do not: what they take is
        mostly what any forward takes.
        """
        if not self._compute.samples and request.suffix >= request.unit:
            behind = Span(request.tokens, request.tokens + request.suffix)
            self.computed(request, request.layers, behind, seconds)
        believed = self._as_chunk_s(request)
        if seconds > 0 and believed > 0:
            self._suffix.append(seconds / believed)

    def loaded(self, request: Request, source: int, cells: int, seconds: float) -> None:
        """Loading so many cells took so long, without waiting for other loads."""
        tier, codec, cell_bytes = request.sources[source]
        if cells > 0 and seconds > 0:
            link = self._links.setdefault((tier, codec), _Link())
            believed = self._prior.load_s(request, source, cells) if self._prior else 0.0
            link.add(cells * cell_bytes, seconds, believed)

    # ---- what is expected

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """So many layers of these tokens; 0.0 while nothing is known."""
        if self._prior is not None and not self._compute.sure:
            believed = self._prior.compute_s(request, layers, tokens)
            return believed * self._compute.against_prior
        once, each, pair = self._compute.form
        first, stop = tokens
        size = stop - first
        return layers * (once + size * (each + pair * (first + (size + 1) / 2)))

    def suffix_s(self, request: Request) -> float:
        """All layers of the suffix; 0.0 while nothing is known."""
        return self._as_chunk_s(request) * (_median(self._suffix) if self._suffix else 1.0)

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """So many cells at once; 0.0 while nothing is known."""
        tier, codec, cell_bytes = request.sources[source]
        link = self._links.get((tier, codec))
        if self._prior is not None and (link is None or not link.sure):
            level = link.against_prior if link else 1.0
            return self._prior.load_s(request, source, cells) * level
        if link is None:  # another codec of the same tier says something
            known = (other for (name, _), other in self._links.items() if name == tier)
            link = next(known, None)
        return link.latency_s + cells * cell_bytes * link.byte_s if link else 0.0

    def _as_chunk_s(self, request: Request) -> float:
        if not request.suffix:
            return 0.0
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)


class _Chunks:
    """Seconds of one layer of a chunk.

    Attributes:
        form: Now.
        sure: Whether it is known without a prior.
        against_prior: How much longer things take than the prior says.
        samples: Chunks seen so far.
    """

    def __init__(self) -> None:
        self.form: Form = (0.0, 0.0, 0.0)
        self._found: Form = (0.0, 1.0, 0.0)
        self.sure, self.against_prior = False, 1.0
        self.samples = 0
        self._square = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._last: deque[tuple[Form, float]] = deque(maxlen=_LAST)
        self._ratios: deque[float] = deque(maxlen=_LAST)

    def add(self, tokens: Span, seconds: float, believed: float) -> None:
        size = tokens.size
        sample = (1.0, float(size), size * (tokens.first + (size + 1) / 2))
        self.samples += 1
        if believed > 0:
            self._ratios.append(seconds / believed)
            self.against_prior = _median(self._ratios)
        self._last.append((sample, seconds))
        self._fit(sample, seconds)
        level = _median(took / _times(self._found, one) for one, took in self._last)
        once, each, pair = self._found
        self.form = (once * level, each * level, pair * level)

    def _fit(self, sample: Form, seconds: float) -> None:
        """Learns the form from what the sample would have taken at the pace of the first ones."""
        believed = seconds
        if self.samples > _LAST:
            believed = _times(self._found, sample)
            level = _median(took / _times(self._found, one) for one, took in self._last)
            seconds = min(max(seconds / level, believed / _FAR), believed * _FAR)
        # Relative errors count: each sample is divided by what it should take.
        for i, x in enumerate(sample):
            self._right[i] = self._right[i] * _MEMORY + x * seconds / believed**2
            for j, y in enumerate(sample):
                self._square[i][j] = self._square[i][j] * _MEMORY + x * y / believed**2
        found = next(filter(None, map(self._solved, _SHAPES)), None)
        if found is not None:
            self._found = found
            self.sure = self.samples >= _ENOUGH and found[0] > 0 and found[2] > 0

    def _solved(self, which: tuple[int, ...]) -> Form | None:
        """Least squares over some terms; None if they cannot be told apart or one is below 0."""
        scale = [self._square[i][i] ** 0.5 for i in which]
        rows = [
            [self._square[i][j] / (a * b) for j, b in zip(which, scale, strict=True)]
            + [self._right[i] / a]
            for i, a in zip(which, scale, strict=True)
        ]
        for k, row in enumerate(rows):
            if row[k] < _SPREAD:
                return None
            for other in rows[k + 1 :]:
                share = other[k] / row[k]
                for column in range(k, len(row)):
                    other[column] -= share * row[column]
        answer = [0.0] * len(rows)
        for k in range(len(rows) - 1, -1, -1):
            known = sum(rows[k][j] * answer[j] for j in range(k + 1, len(rows)))
            answer[k] = (rows[k][-1] - known) / rows[k][k]
        form = [0.0] * 3
        for i, value, by in zip(which, answer, scale, strict=True):
            form[i] = value / by
        return (form[0], form[1], form[2]) if min(form) >= 0 and max(form) > 0 else None


class _Link:
    """Seconds of loads of one codec from one tier.

    Attributes:
        latency_s: Before the first byte.
        byte_s: For each byte.
        sure: Whether they are known without a prior.
        against_prior: How much longer loads take than the prior says.
    """

    def __init__(self) -> None:
        self.latency_s = self.byte_s = 0.0
        self.sure, self.against_prior = False, 1.0
        self._rates = Rates()
        self._last: deque[tuple[float, float]] = deque(maxlen=_LAST)
        self._ratios: deque[float] = deque(maxlen=_LAST)

    def add(self, n_bytes: float, seconds: float, believed: float) -> None:
        size = max(1, round(n_bytes))
        self._rates.add(size, seconds)
        self._last.append((size, seconds))
        if believed > 0:
            self._ratios.append(seconds / believed)
            self.against_prior = _median(self._ratios)
        latency_s = self._rates.latency_s
        byte_s = 1.0 / self._rates.bytes_per_s
        level = _median(took / (latency_s + size * byte_s) for size, took in self._last)
        self.latency_s, self.byte_s = latency_s * level, byte_s * level
        self.sure = self._rates.samples >= _ENOUGH


def _times(form: Form, sample: Form) -> float:
    return form[0] * sample[0] + form[1] * sample[1] + form[2] * sample[2]


def _median(values: Iterable[float]) -> float:
    found = sorted(values)
    middle = len(found) // 2
    if len(found) % 2:
        return found[middle]
    # Of two, the geometric mean: one that is ten times off must not rule alone.
    return math.sqrt(found[middle - 1] * found[middle])
