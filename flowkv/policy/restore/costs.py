"""Costs of restores, learned from those that ended.

A calibration goes stale: another job comes or goes, a clock drops, a drive warms its cache. So the
*form* of a cost (the fixed cost of a chunk, the growth of attention) is learned slowly, and its
*level* follows the last few samples: the median of three, so that one outlier changes nothing, and
two that agree are followed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.policy import Costs, RestoreRequest, Span

_MEMORY = 0.9
_SPREAD = 1e-4
_ENOUGH = 6
_LAST = 3
_FAR = 2.0

Form = tuple[float, float, float]
"""Seconds of one layer of a chunk: fixed, per token, and per pair of a token and an earlier one."""

_SHAPES = slice(0, 3), slice(0, 2), slice(1, 3), slice(1, 2)
"""Terms to fit, in order of trust, until the fit is valid."""


class Measured:
    """Costs from measurements (`Costs`).

    Args:
        prior: Costs before any measurement; the first samples correct its level. Without, unknown
            costs are 0.0.
    """

    def __init__(self, prior: Costs | None = None) -> None:
        self._prior = prior
        self._compute = _Chunks()
        self._links: dict[tuple[str, str], _Link] = {}
        self._suffix: deque[float] = deque(maxlen=_LAST)

    # ---- measurements

    @property
    def tried(self) -> bool:
        """Whether any compute was measured."""
        return self._compute.samples > 0

    def computed(self, request: RestoreRequest, layers: int, tokens: Span, seconds: float) -> None:
        """Record the seconds of computing layers of tokens; an empty compute is no sample."""
        if layers > 0 and tokens.size > 0 and seconds > 0:
            believed = self._prior.compute_s(request, 1, tokens) if self._prior else 0.0
            self._compute.add(tokens, seconds / layers, believed)

    def suffixed(self, request: RestoreRequest, seconds: float) -> None:
        """Record the seconds of computing all layers of the suffix, without waiting for loads.

        Where nothing else was computed, this measures computing: else a prior by which nothing is
        worth computing would never be corrected. A short suffix does not count, since its time is
        mostly the fixed time of a forward.
        """
        if not self._compute.samples and request.suffix >= request.unit:
            behind = Span(request.tokens, request.tokens + request.suffix)
            self.computed(request, request.layers, behind, seconds)
        believed = self._as_chunk_s(request)
        if seconds > 0 and believed > 0:
            self._suffix.append(seconds / believed)

    def loaded(self, request: RestoreRequest, source: int, cells: int, seconds: float) -> None:
        """Record the seconds of loading cells, without waiting for other loads."""
        tier, codec, cell_bytes = request.sources[source]
        if cells > 0 and seconds > 0:
            link = self._links.setdefault((tier, codec), _Link())
            believed = self._prior.load_s(request, source, cells) if self._prior else 0.0
            link.add(cells * cell_bytes, seconds, believed)

    # ---- expectations

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """Return the seconds of computing layers of tokens; 0.0 while unknown."""
        if self._prior is not None and not self._compute.sure:
            believed = self._prior.compute_s(request, layers, tokens)
            return believed * self._compute.against_prior
        once, each, pair = self._compute.form
        first, stop = tokens
        size = stop - first
        return layers * (once + size * (each + pair * (first + (size + 1) / 2)))

    def suffix_s(self, request: RestoreRequest) -> float:
        """Return the seconds of all layers of the suffix; 0.0 while unknown."""
        return self._as_chunk_s(request) * (_median(self._suffix) if self._suffix else 1.0)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
        """Return the seconds of loading so many cells at once; 0.0 while unknown."""
        tier, codec, cell_bytes = request.sources[source]
        link = self._links.get((tier, codec))
        if self._prior is not None and (link is None or not link.sure):
            level = link.against_prior if link else 1.0
            return self._prior.load_s(request, source, cells) * level
        if link is None:  # fall back on another codec of the same tier
            known = (other for (name, _), other in self._links.items() if name == tier)
            link = next(known, None)
        return link.latency_s + cells * cell_bytes * link.byte_s if link else 0.0

    def _as_chunk_s(self, request: RestoreRequest) -> float:
        if not request.suffix:
            return 0.0
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)


class _Chunks:
    """Model of the seconds of one layer of a chunk.

    Attributes:
        form: Current terms.
        sure: Whether they are known without a prior.
        against_prior: Ratio of measured times to the prior's.
        samples: Chunks measured so far.
    """

    def __init__(self) -> None:
        self.form: Form = (0.0, 0.0, 0.0)
        self._found: Form = (0.0, 1.0, 0.0)
        self.sure, self.against_prior = False, 1.0
        self.samples = 0
        self._square, self._right = np.zeros((3, 3)), np.zeros(3)
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
        level = _median(took / _times(self._found, one) for one, took in tuple(self._last))
        once, each, pair = self._found
        self.form = (once * level, each * level, pair * level)

    def _fit(self, sample: Form, seconds: float) -> None:
        """Fit the form to a sample's time, scaled to the pace of the first samples."""
        believed = seconds
        if self.samples > _LAST:
            believed = _times(self._found, sample)
            level = _median(took / _times(self._found, one) for one, took in tuple(self._last))
            seconds = min(max(seconds / level, believed / _FAR), believed * _FAR)
        row = np.array(sample) / believed  # relative errors count
        self._square = self._square * _MEMORY + np.outer(row, row)
        self._right = self._right * _MEMORY + row * (seconds / believed)
        found = next(filter(None, map(self._solved, _SHAPES)), None)
        if found is not None:
            self._found = found
            self.sure = self.samples >= _ENOUGH and found[0] > 0 and found[2] > 0

    def _solved(self, terms: slice) -> Form | None:
        """Solve least squares over some terms; None if they are collinear or one is below 0."""
        scale = np.sqrt(self._square.diagonal()[terms])
        square, right = self._square[terms, terms] / np.outer(scale, scale), self._right[terms]
        try:
            pivots = np.linalg.cholesky(square).diagonal() ** 2
        except np.linalg.LinAlgError:
            return None
        form = np.zeros(3)
        if pivots.min() >= _SPREAD:
            form[terms] = np.linalg.solve(square, right / scale) / scale
        once, each, pair = found = form.tolist()
        return (once, each, pair) if min(found) >= 0 and max(found) > 0 else None


class _Link:
    """Model of the seconds of loads of one codec from one tier.

    Attributes:
        latency_s: Seconds before the first byte.
        byte_s: Seconds per byte.
        sure: Whether both are known without a prior.
        against_prior: Ratio of measured times to the prior's.
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
        level = _median(took / (latency_s + size * byte_s) for size, took in tuple(self._last))
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


# The admission gate: loads and stores only where the measured rates favour them (DESIGN D7).

_WEIGHT = 0.3
_DOUBT = 0.95
_MARGIN = 8.0
"""Largest ratio of load to compute time at which storing pays. Slower loads save at most a ninth of
computing, and only while both run at once: then T_c shrinks to T_c * T_l / (T_c + T_l)."""
_GATE_ENOUGH = 8
_STORE_DOUBT = 0.999
_SLOWEST_S, _FASTEST, _MOST_EARLIER = 60.0, 1e14, 64
"""Bounds of rates saved with a store: slowest, fastest, and most entries."""
_LONG_PAGES = 256
"""Pages of the longest prompt for which a store is judged."""


class EarlierRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that earlier processes measured, as saved with a store.

    Attributes:
        links: Tier -> seconds before the first byte, and bytes per second.
        computes: Model on a machine -> seconds per token.
    """

    links: dict[str, tuple[float, float]] = {}
    computes: dict[str, float] = {}

    def sane(self) -> EarlierRates:
        """Return the plausible rates, the newest few of them."""
        links = {
            name: (latency_s, bytes_per_s)
            for name, (latency_s, bytes_per_s) in self.links.items()
            if 0.0 <= latency_s <= _SLOWEST_S and 1.0 <= bytes_per_s <= _FASTEST
        }
        computes = {
            name: token_s
            for name, token_s in self.computes.items()
            if 1.0 / _FASTEST <= token_s <= _SLOWEST_S
        }
        return EarlierRates(
            dict(list(links.items())[-_MOST_EARLIER:]),
            dict(list(computes.items())[-_MOST_EARLIER:]),
        )


class LoadGate:
    """Running estimates of load and compute rates, and the decisions that follow from them.

    No load is refused before both rates were measured once: the first load measures. Every refusal
    makes the tiers concerned look a little faster, so that they are measured again now and then: a
    slow first load, on a cold disk say, does not count for ever.

    Attributes:
        rates: Tier -> measured rates of loads.
        earlier: Rates of earlier processes. Plans begin with them; refusals ignore them.
        model: Key of the running model in `earlier`.
    """

    def __init__(self) -> None:
        self.rates: dict[str, Rates] = {}
        self.earlier, self.model = EarlierRates(), ""
        self._compute_s_per_token, self._chunks = 0.0, _Chunks()
        # Per tier: the number of measured loads, and the pages refused since the last one.
        self._refused: dict[str, tuple[int, int]] = {}

    def loaded(self, tier: str, n_bytes: int, seconds: float) -> None:
        """Record a load of `n_bytes` from `tier`."""
        if n_bytes > 0:
            self.rates.setdefault(tier, Rates()).add(n_bytes, seconds)

    def computed(self, tokens: int, seconds: float, middle: float | None = None) -> None:
        """Record a forward pass over `tokens` new tokens.

        Args:
            tokens: Number of tokens.
            seconds: Seconds for all of them.
            middle: Mean position of these tokens in their prompts; by default of one whole prompt.
        """
        if tokens > 0:
            fresh = seconds / tokens
            known = self._compute_s_per_token or fresh
            self._compute_s_per_token = known + _WEIGHT * (fresh - known)
            first = 0 if middle is None else round(middle - tokens / 2)
            if seconds > 0:
                self._chunks.add(Span(first, first + tokens), seconds, 0.0)

    def token_s(self, position: float) -> float:
        """Return the seconds of one more token at a position; 0 if unknown."""
        _, each, pair = self._chunks.form
        return each + pair * position or self._compute_s_per_token

    def learned(self) -> EarlierRates:
        """Return the rates for later processes: measured here, else those of earlier processes."""
        links = self.earlier.links | {
            tier: (rates.latency_s, rates.bytes_per_s)
            for tier, rates in self.rates.items()
            if rates.samples
        }
        computes = {k: v for k, v in self.earlier.computes.items() if k != self.model}
        if token_s := self._compute_s_per_token or self.earlier.computes.get(self.model, 0.0):
            computes[self.model] = token_s
        return EarlierRates(links, computes).sane()

    @property
    def seconds_per_token(self) -> float:
        """Seconds of a forward pass per token; 0 while unknown."""
        return self._compute_s_per_token

    def load_s(self, n_bytes: dict[str, int]) -> float:
        """Return the expected seconds to load so many bytes from each tier; 0 where unknown."""
        known = ((self.rates[tier], n) for tier, n in n_bytes.items() if tier in self.rates)
        return sum(rates.expected_s(n) for rates, n in known)

    def worth(self, n_bytes: dict[str, int], tokens: int) -> bool:
        """Return whether loading these bytes beats computing `tokens` tokens."""
        compute_s = self._compute_s_per_token * tokens
        if not compute_s or self.load_s(n_bytes) <= compute_s:
            return True
        for tier in n_bytes.keys() & self.rates.keys():
            self.rates[tier].doubt(_DOUBT)
        return False

    def pays_to_store(
        self, tier: str, n_bytes: int, tokens: int, reach: Callable[[int], int]
    ) -> bool:
        """Return whether a page can ever be worth loading from a tier.

        It cannot where loading takes many times as long as computing, as measured: every page of a
        tier with low bandwidth, and pages of short prompts on one with high latency. A page is
        loaded together with others of its prompt, so the whole prompt counts. With few
        measurements, everything pays. A tier without stores is never measured, so refusals are
        doubted here too: about two thousand of them make up for a factor of eight.

        Args:
            tier: Name of the tier.
            n_bytes: The page's bytes there.
            tokens: The page's tokens.
            reach: `reach(most)`: pages of the longest prompt with this page, up to `most`.
        """
        rates, compute_s = self.rates.get(tier), self._compute_s_per_token * tokens
        if rates is None or rates.samples < _GATE_ENOUGH or not compute_s:
            return True
        samples, refused = self._refused.get(tier, (rates.samples, 0))
        refused = refused if samples == rates.samples else 0
        belief = _STORE_DOUBT**refused / (_MARGIN * compute_s)

        def pays(pages: int) -> bool:
            return rates.expected_s(n_bytes * pages) * belief <= pages

        if pays(1) or (pays(_LONG_PAGES) and pays(reach(_LONG_PAGES))):
            return True
        self._refused[tier] = rates.samples, refused + 1
        return False


# Lower bound of a restore, for any policy.
#
# Seconds of one engine's work add up, in any order; two engines work at once. The link cost of a
# cell is the same everywhere; its compute cost grows with its token, and is the same in every
# layer. So the best set of cells to compute is all layers of the first tokens, and no restore ends
# before both engines are done at the best split. Overheads, page sizes and dependencies only add to
# that: pass costs without them (`Modelled.ideal`).


def lower_bound(
    requests: RestoreRequest | Sequence[RestoreRequest],
    costs: Costs,
    *,
    of: Literal["makespan", "mean"] = "makespan",
    stages: int = 1,
    boundary_s: float = 0.0,
) -> float:
    """Return the seconds that no policy can beat: until the last token, or on the mean of all.

    Args:
        requests: One, or several that share the link and the compute engine. Suffixes count.
        costs: Best possible costs.
        of: For a batch: until all are done, or the mean time to first token.
        stages: Pipeline stages that each have a share of the layers, an engine and a link.
        boundary_s: With stages: seconds of a stage's link for the boundary activation of a
            computed token.

    Raises:
        ConfigError: `of` is unknown, or `stages` is below 1.
    """
    if stages < 1 or of not in ("makespan", "mean"):
        raise ConfigError(f"there is no bound of {of!r} over {stages} stages", "See lower_bound")
    batch = [requests] if isinstance(requests, RestoreRequest) else list(requests)
    if not batch:
        return 0.0
    if of == "makespan":
        return _makespan(batch, costs, _suffixes(batch, costs), stages, boundary_s)
    alone = sum(_makespan([one], costs, None, stages, boundary_s) for one in batch) / len(batch)
    if len({one.arrived_s for one in batch}) > 1:
        return alone
    # When k have ended their joint work is done, which is at least that of the k shortest.
    suffixes = sorted(_suffixes(batch, costs))
    moved = sorted(map(_from_zero, batch), key=lambda one: one.tokens)
    ends = (
        _makespan(moved[:k], costs, suffixes[:k], stages, boundary_s)
        for k in range(1, len(moved) + 1)
    )
    return max(alone, sum(ends) / len(moved))


def _suffixes(batch: Sequence[RestoreRequest], costs: Costs) -> list[float]:
    return [costs.suffix_s(one) if one.suffix else 0.0 for one in batch]


def _from_zero(request: RestoreRequest) -> RestoreRequest:
    """Return a request with as many cells that are no dearer to compute."""
    if not request.resident:
        return request
    return msgspec.structs.replace(request, tokens=request.tokens - request.resident, resident=0)


def _makespan(
    batch: Sequence[RestoreRequest],
    costs: Costs,
    suffixes: Sequence[float] | None,
    stages: int,
    boundary_s: float,
) -> float:
    """Return the makespan by water-filling: all compute their first tokens, up to one goal."""
    suffixes = _suffixes(batch, costs) if suffixes is None else suffixes
    # Requests that share no tier share no link: the slowest such group counts.
    groups: dict[frozenset[str], list[int]] = {}
    for index, one in enumerate(batch):
        groups.setdefault(frozenset(source.tier for source in one.sources), []).append(index)

    def compute_s(tokens: int) -> float:
        return (sum(_computed_s(one, costs, tokens) for one in batch) + sum(suffixes)) / stages

    def load_s(tokens: int) -> float:
        return max(
            sum(_loaded_s(batch[i], costs, tokens, stages, boundary_s) for i in group)
            for group in groups.values()
        )

    least = max([one.tokens for one in batch if not one.sources], default=0)
    return crossing(compute_s, load_s, least, max(one.tokens for one in batch))


def _computed_s(request: RestoreRequest, costs: Costs, tokens: int) -> float:
    """Return the seconds to compute a request's cells up to a token, as far as possible."""
    stop = request.tokens if not request.sources else min(tokens, request.tokens)
    if not request.computable or stop <= request.resident:
        return 0.0
    return costs.compute_s(request, request.layers, Span(request.resident, stop))


def _loaded_s(
    request: RestoreRequest, costs: Costs, tokens: int, stages: int, boundary_s: float
) -> float:
    """Return the seconds to load a request's cells from a token on, by all its tiers at once."""
    first = max(tokens, request.resident) if request.computable else request.resident
    size = max(0, request.tokens - first)
    if not request.sources:
        return 0.0
    best: dict[str, float] = {}
    for index, source in enumerate(request.sources):
        seconds = costs.load_s(request, index, size * request.layers) if size else 0.0
        best[source.tier] = min(best.get(source.tier, seconds), seconds)
    together = 0.0
    if size and min(best.values()) > 0.0:
        together = 1.0 / sum(1.0 / seconds for seconds in best.values())
    computed = min(first, request.tokens) - request.resident
    return together / stages + (boundary_s * computed if stages > 1 else 0.0)


def crossing(
    rising: Callable[[int], float], falling: Callable[[int], float], first: int, last: int
) -> float:
    """Return the least maximum of two functions of a whole number, one rising and one falling.

    Between neighbours both are taken as straight lines.
    """
    last = bisect_left(range(last), True, first, key=lambda n: rising(n) >= falling(n))
    if last == first or rising(last) <= falling(last):
        return max(rising(last), falling(last))
    first = last - 1
    before, after = falling(first) - rising(first), rising(last) - falling(last)
    share = before / (before + after)
    return rising(first) + share * (rising(last) - rising(first))


# Transfer rates of a place: latency and bandwidth, estimated from measured transfers.

_RATES_MEMORY = 0.8
_RATES_SPREAD = 1e-6
_RATES_ENOUGH = 8
_LEAST_S, _TIMES = 1.0, 20.0


class Rates:
    """Estimate of transfer seconds, `latency_s + n_bytes / bytes_per_s`, by recent samples most.

    It is a least-squares line through the samples, each weighing 0.8 of the next one. While all
    samples have one size, latency and bandwidth are not separable, and all goes to the bandwidth.

    Attributes:
        samples: Transfers measured so far.
    """

    __slots__ = ("_sn", "_sx", "_sxx", "_sxy", "_sy", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._sn = self._sx = self._sy = self._sxx = self._sxy = 0.0

    def add(self, n_bytes: int, seconds: float) -> None:
        """Record a transfer of `n_bytes` in `seconds`; one of no bytes or no time is no sample."""
        if n_bytes > 0 and seconds > 0:
            self.samples += 1
            self._sn = self._sn * _RATES_MEMORY + 1
            self._sx = self._sx * _RATES_MEMORY + n_bytes
            self._sy = self._sy * _RATES_MEMORY + seconds
            self._sxx = self._sxx * _RATES_MEMORY + n_bytes * n_bytes
            self._sxy = self._sxy * _RATES_MEMORY + n_bytes * seconds

    def doubt(self, factor: float) -> None:
        """Scale all measured times by a factor."""
        self._sy *= factor
        self._sxy *= factor

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte; 0 while unknown."""
        return self._line()[0]

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in bytes per second; 0 while unknown."""
        slope = self._line()[1]
        return 1 / slope if slope else self._sx / self._sy if self._sy else 0.0

    def expected_s(self, n_bytes: int) -> float:
        """Return the expected seconds of a transfer of so many bytes; 0 while unknown."""
        latency, slope = self._line()
        return latency + n_bytes * slope

    def patience_s(self, n_bytes: int, most_s: float) -> float:
        """Return a timeout for such a transfer: many times its expected time, at most `most_s`.

        With few samples it is `most_s`.
        """
        if self.samples < _RATES_ENOUGH:
            return most_s
        return min(most_s, _LEAST_S + _TIMES * self.expected_s(n_bytes))

    def _line(self) -> tuple[float, float]:
        """Return the seconds before the first byte, and the seconds per byte."""
        if not self._sx:
            return 0.0, 0.0
        spread = self._sn * self._sxx - self._sx * self._sx
        if spread <= _RATES_SPREAD * self._sn * self._sxx:
            return 0.0, self._sy / self._sx
        slope = max(0.0, (self._sn * self._sxy - self._sx * self._sy) / spread)
        latency = (self._sy - slope * self._sx) / self._sn
        return (latency, slope) if latency >= 0 else (0.0, self._sy / self._sx)
