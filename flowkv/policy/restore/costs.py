"""Costs of restores, learned from those that ended.

A calibration goes stale: another job comes or goes, a clock drops, a drive warms its cache. So the
*form* of a cost (what a chunk takes on top of its tokens, how attention grows) is learnt slowly,
and its *level* is what the last few samples say: the median of three, so that one that is far off
changes nothing, and two of a kind are believed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.policy import Costs, RestoreRequest, Span

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

    @property
    def tried(self) -> bool:
        """Whether anything was computed."""
        return self._compute.samples > 0

    def computed(self, request: RestoreRequest, layers: int, tokens: Span, seconds: float) -> None:
        """Computing so many layers of these tokens took so long; nothing of it is no sample."""
        if layers > 0 and tokens.size > 0 and seconds > 0:
            believed = self._prior.compute_s(request, 1, tokens) if self._prior else 0.0
            self._compute.add(tokens, seconds / layers, believed)

    def suffixed(self, request: RestoreRequest, seconds: float) -> None:
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

    def loaded(self, request: RestoreRequest, source: int, cells: int, seconds: float) -> None:
        """Loading so many cells took so long, without waiting for other loads."""
        tier, codec, cell_bytes = request.sources[source]
        if cells > 0 and seconds > 0:
            link = self._links.setdefault((tier, codec), _Link())
            believed = self._prior.load_s(request, source, cells) if self._prior else 0.0
            link.add(cells * cell_bytes, seconds, believed)

    # ---- what is expected

    def compute_s(self, request: RestoreRequest, layers: int, tokens: Span) -> float:
        """So many layers of these tokens; 0.0 while nothing is known."""
        if self._prior is not None and not self._compute.sure:
            believed = self._prior.compute_s(request, layers, tokens)
            return believed * self._compute.against_prior
        once, each, pair = self._compute.form
        first, stop = tokens
        size = stop - first
        return layers * (once + size * (each + pair * (first + (size + 1) / 2)))

    def suffix_s(self, request: RestoreRequest) -> float:
        """All layers of the suffix; 0.0 while nothing is known."""
        return self._as_chunk_s(request) * (_median(self._suffix) if self._suffix else 1.0)

    def load_s(self, request: RestoreRequest, source: int, cells: int) -> float:
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

    def _as_chunk_s(self, request: RestoreRequest) -> float:
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
        level = _median(took / _times(self._found, one) for one, took in tuple(self._last))
        once, each, pair = self._found
        self.form = (once * level, each * level, pair * level)

    def _fit(self, sample: Form, seconds: float) -> None:
        """Learns the form from what the sample would have taken at the pace of the first ones."""
        believed = seconds
        if self.samples > _LAST:
            believed = _times(self._found, sample)
            level = _median(took / _times(self._found, one) for one, took in tuple(self._last))
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


# The admission gate: what is loaded and stored where the measured rates say so (DESIGN D7).

_WEIGHT = 0.3
_DOUBT = 0.95
_MARGIN = 8.0
"""Loads that take so many times what computing takes save a ninth of it at most, and only while
both go on at once: of T_c alone, T_c * T_l / (T_c + T_l) is left."""
_GATE_ENOUGH = 8
_STORE_DOUBT = 0.999
_SLOWEST_S, _FASTEST, _MOST_EARLIER = 60.0, 1e14, 64
"""What rates kept with a store may say: nothing slower, nothing faster, no more of them."""
_LONG_PAGES = 256
"""What does not pay for a prompt of so many pages never does."""


class EarlierRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that earlier processes measured, as they are kept with a store.

    Attributes:
        links: Seconds before the first byte, and bytes a second, of each tier by its name.
        computes: Seconds a token, by what computes them: a model on a machine.
    """

    links: dict[str, tuple[float, float]] = {}
    computes: dict[str, float] = {}

    def sane(self) -> EarlierRates:
        """Return those that can be true, the newest few of them."""
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

    Nothing is refused before both rates were measured once: the first load measures. Every refusal
    makes the tiers that it would have used look a little faster, so that they are measured again
    now and then: a first load that was slow, on a cold disk say, is not held against them for ever.

    Attributes:
        rates: What loads from each tier take, by its name.
        earlier: What earlier processes measured. Plans begin with it; nothing is refused by it.
        model: What computes here, as `earlier` names it.
    """

    def __init__(self) -> None:
        self.rates: dict[str, Rates] = {}
        self.earlier, self.model = EarlierRates(), ""
        self._compute_s_per_token, self._chunks = 0.0, _Chunks()
        # Per tier: the loads that were measured, and the pages refused, since they were.
        self._refused: dict[str, tuple[int, int]] = {}

    def loaded(self, tier: str, n_bytes: int, seconds: float) -> None:
        """A load of `n_bytes` from `tier` took `seconds`."""
        if n_bytes > 0:
            self.rates.setdefault(tier, Rates()).add(n_bytes, seconds)

    def computed(self, tokens: int, seconds: float, middle: float | None = None) -> None:
        """A forward pass over `tokens` new tokens took `seconds`.

        Args:
            tokens: How many.
            seconds: For all of them.
            middle: Mean position of these tokens in their prompts; default those of one whole one.
        """
        if tokens > 0:
            fresh = seconds / tokens
            known = self._compute_s_per_token or fresh
            self._compute_s_per_token = known + _WEIGHT * (fresh - known)
            first = 0 if middle is None else round(middle - tokens / 2)
            if seconds > 0:
                self._chunks.add(Span(first, first + tokens), seconds, 0.0)

    def token_s(self, position: float) -> float:
        """What one more token takes there: the later, the more it attends to; 0 if unknown."""
        _, each, pair = self._chunks.form
        return each + pair * position or self._compute_s_per_token

    def learned(self) -> EarlierRates:
        """Return the rates for later processes: measured here, or before where they were not."""
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
        """What a forward pass takes for each token; 0 while nothing is known."""
        return self._compute_s_per_token

    def load_s(self, n_bytes: dict[str, int]) -> float:
        """Expected seconds to load so many bytes from each tier; 0 where nothing is known."""
        known = ((self.rates[tier], n) for tier, n in n_bytes.items() if tier in self.rates)
        return sum(rates.expected_s(n) for rates, n in known)

    def worth(self, n_bytes: dict[str, int], tokens: int) -> bool:
        """Whether loading these bytes beats computing `tokens` tokens."""
        compute_s = self._compute_s_per_token * tokens
        if not compute_s or self.load_s(n_bytes) <= compute_s:
            return True
        for tier in n_bytes.keys() & self.rates.keys():
            self.rates[tier].doubt(_DOUBT)
        return False

    def pays_to_store(
        self, tier: str, n_bytes: int, tokens: int, reach: Callable[[int], int]
    ) -> bool:
        """Whether a page can ever be worth loading from a tier.

        It cannot where loading takes many times what computing takes, as measured: every page of a
        tier that is slow all the way, and pages of short prompts on one that is slow to begin. A
        page is loaded together with others of its prompt, so it is the prompt that counts. Where
        little was measured, everything pays. Nobody measures a tier that nothing is stored on, so
        here too refusals are doubted: about two thousand of them make up for a factor of eight.

        Args:
            tier: Its name.
            n_bytes: The page's bytes there.
            tokens: Its tokens.
            reach: `reach(most)`: pages of the longest prompt that it belongs to, as far as `most`.
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


# How fast a restore could be at best, by whatever policy.
#
# Seconds of one engine's work add up, whatever the order; two engines work at once. A cell costs
# the link the same wherever it lies; to compute it costs more the later its token, and the same
# in every layer. So the best set of cells to compute is all layers of the first tokens, and
# nothing ends before the better of all splits has both engines done. Overheads, page sizes and
# dependencies only add to that: give costs without them (`Modelled.ideal`).


def lower_bound(
    requests: RestoreRequest | Sequence[RestoreRequest],
    costs: Costs,
    *,
    of: Literal["makespan", "mean"] = "makespan",
    stages: int = 1,
    boundary_s: float = 0.0,
) -> float:
    """Seconds that no policy can beat: until the last token is there, or on the mean of all.

    Args:
        requests: One, or those that share the link and the compute engine. The suffix counts where
            a request has one.
        costs: What things take at best.
        of: For a batch: until all are done, or the mean time to first token.
        stages: Pipeline stages that each have a share of the layers, an engine and a link.
        boundary_s: With stages: seconds of a stage's link for the boundary activation of a token
            that is computed.

    Raises:
        ConfigError: No such bound, or no stages.
    """
    if stages < 1 or of not in ("makespan", "mean"):
        raise ConfigError(f"There is no bound of {of!r} over {stages} stages", "See lower_bound")
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
    """One with as many cells, which are no dearer to compute."""
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
    """Water-filling: the first tokens of all are computed, up to the same one."""
    suffixes = _suffixes(batch, costs) if suffixes is None else suffixes
    # Requests that share no tier share no link: whatever each such group needs, all need.
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
    """Seconds to compute its cells up to a token, as far as it can be computed."""
    stop = request.tokens if not request.sources else min(tokens, request.tokens)
    if not request.computable or stop <= request.resident:
        return 0.0
    return costs.compute_s(request, request.layers, Span(request.resident, stop))


def _loaded_s(
    request: RestoreRequest, costs: Costs, tokens: int, stages: int, boundary_s: float
) -> float:
    """Seconds to load its cells from a token on, by all its tiers at once."""
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
    """The least of the higher of two functions of a whole number, one rising and one falling.

    Between neighbours both are taken as straight lines.
    """
    if rising(first) >= falling(first):
        return max(rising(first), falling(first))
    if rising(last) <= falling(last):
        return max(rising(last), falling(last))
    while last - first > 1:
        middle = (first + last) // 2
        if rising(middle) < falling(middle):
            first = middle
        else:
            last = middle
    before, after = falling(first) - rising(first), rising(last) - falling(last)
    share = before / (before + after)
    return rising(first) + share * (rising(last) - rising(first))


# How fast a place is: latency and bandwidth, estimated from what its transfers took.

_RATES_MEMORY = 0.8
_RATES_SPREAD = 1e-6
_RATES_ENOUGH = 8
_LEAST_S, _TIMES = 1.0, 20.0


class Rates:
    """Seconds of a transfer as `latency_s + n_bytes / bytes_per_s`, recent samples counting most.

    A least-squares line through the samples, each weighing 0.8 of the next one. While all samples
    are of one size, latency and bandwidth cannot be told apart, and all goes to the bandwidth.

    Attributes:
        samples: Transfers seen so far.
    """

    __slots__ = ("_sn", "_sx", "_sxx", "_sxy", "_sy", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._sn = self._sx = self._sy = self._sxx = self._sxy = 0.0

    def add(self, n_bytes: int, seconds: float) -> None:
        """A transfer of `n_bytes` took `seconds`; one of no bytes or no time says nothing."""
        if n_bytes > 0 and seconds > 0:
            self.samples += 1
            self._sn = self._sn * _RATES_MEMORY + 1
            self._sx = self._sx * _RATES_MEMORY + n_bytes
            self._sy = self._sy * _RATES_MEMORY + seconds
            self._sxx = self._sxx * _RATES_MEMORY + n_bytes * n_bytes
            self._sxy = self._sxy * _RATES_MEMORY + n_bytes * seconds

    def doubt(self, factor: float) -> None:
        """Scales what is believed about its times."""
        self._sy *= factor
        self._sxy *= factor

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte; 0 while nothing is known."""
        return self._line()[0]

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth; 0 while nothing is known."""
        slope = self._line()[1]
        return 1 / slope if slope else self._sx / self._sy if self._sy else 0.0

    def expected_s(self, n_bytes: int) -> float:
        """Seconds that a transfer of so many bytes should take; 0 while nothing is known."""
        latency, slope = self._line()
        return latency + n_bytes * slope

    def patience_s(self, n_bytes: int, most_s: float) -> float:
        """How long to wait for such a transfer: many times what it should take, not over `most_s`.

        Before some samples were seen, that is `most_s`.
        """
        if self.samples < _RATES_ENOUGH:
            return most_s
        return min(most_s, _LEAST_S + _TIMES * self.expected_s(n_bytes))

    def _line(self) -> tuple[float, float]:
        """Seconds before the first byte, and seconds for each."""
        if not self._sx:
            return 0.0, 0.0
        spread = self._sn * self._sxx - self._sx * self._sx
        if spread <= _RATES_SPREAD * self._sn * self._sxx:
            return 0.0, self._sy / self._sx
        slope = max(0.0, (self._sn * self._sxy - self._sx * self._sy) / spread)
        latency = (self._sy - slope * self._sx) / self._sn
        return (latency, slope) if latency >= 0 else (0.0, self._sy / self._sx)
