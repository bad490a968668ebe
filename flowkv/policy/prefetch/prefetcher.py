"""The prefetcher: chooses chains to bring into a faster place before a request asks for them.

There are three reasons, in this order. *Queue*: a waiting request will use its chain, certainly
and soon. *Hint*: the application expects a chain at about some time; loading starts early enough
for the transfer, some slack and the error of the hint, and not before. *Learned*: the place's
policy expects a use (`Policy.wanted`), or a Markov chain over the chains' last known blocks does,
for documents and templates that recur. Each pays for its blocks from a budget that fills when its
predictions were right (`Credit`); on unpredictable traffic the learned reason so switches itself
off. No block is evicted for a prefetch that is worth less than the block (`Policy.displace`), and
while prefetching costs more than it saves, `RegretGuard` stops it. An empty answer is normal.

Pure and deterministic: the caller reports events, passes the time, and moves the bytes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.policy.base import NEVER_NS, NO_SLOTS, PolicyConfig, Slots, configure
from flowkv.policy.prefetch.markov import Markov
from flowkv.policy.restore.costs import Rates

# Start times for chains that the application expects at about some time.

_MOST = 1 << 16
_GIVEN_UP = 4  # multiples of the expected time after which a hint is dropped
_LEAST_S = 0.01


class Hint(NamedTuple):
    """Hint of a next use, `eta_ns` after `told_ns`, with `sigma` of the logarithm's deviation."""

    told_ns: int
    eta_ns: int
    sigma: float

    def rate(self, now_ns: int) -> float:
        """Return uses per second of a chain unused so far: 1 / E[T - t | T > t], T lognormal."""
        passed, eta = max(now_ns - self.told_ns, 1), max(self.eta_ns, 1)
        sigma = max(self.sigma, 1e-3)
        late = math.log(passed / eta) / sigma
        beyond = math.erfc(late / math.sqrt(2.0))
        if beyond < 1e-12:  # long overdue: as far ahead as it is behind
            return 1e9 / passed
        mean = eta * math.exp(sigma * sigma / 2) * math.erfc((late - sigma) / math.sqrt(2.0))
        return 1e9 / max(mean / beyond - passed, _LEAST_S * 1e9)


class HintQueue:
    """Valid hints, and the times at which each is due."""

    def __init__(self) -> None:
        self._hints: dict[int, Hint] = {}
        self._starts: list[tuple[int, int]] = []

    def __contains__(self, tip: int) -> bool:
        return tip in self._hints

    def __len__(self) -> int:
        return len(self._hints)

    def tell(self, tip: int, hint: Hint, lead_ns: int, early: float) -> None:
        """Add a hint about a chain's last block, and drop an older one about the same block.

        Args:
            tip: The last block.
            hint: The hint; with `NEVER_NS` only the older one is dropped.
            lead_ns: Time before the expected use at which the hint is due.
            early: Deviations to add to that lead.
        """
        self._hints.pop(tip, None)
        if hint.eta_ns == NEVER_NS:
            return
        if len(self._hints) >= _MOST:  # the oldest was wrong, or is far in the future
            del self._hints[next(iter(self._hints))]
        self._hints[tip] = hint
        first_ns = hint.eta_ns * math.exp(-early * hint.sigma)
        self._at(tip, hint.told_ns + round(first_ns) - lead_ns)

    def end(self, chain: list[int]) -> None:
        """Drop hints about these blocks, since they are used."""
        for tip in self._hints.keys() & set(chain) if self._hints else ():
            del self._hints[tip]

    def due(self, now_ns: int) -> list[tuple[int, float]]:
        """Return the due blocks, each once, with their rates, the most urgent first."""
        tips = dict[int, float]()
        while self._starts and self._starts[0][0] <= now_ns:
            tip = heapq.heappop(self._starts)[1]
            if tip in self._hints and tip not in tips:
                tips[tip] = self._hints[tip].rate(now_ns)
        return sorted(tips.items(), key=lambda one: -one[1])

    def again(self, tip: int, now_ns: int, least_ns: int) -> None:
        """Schedule a chain once more, later, for which there was no room."""
        hint = self._hints[tip]
        left_ns = abs(hint.told_ns + hint.eta_ns - now_ns)
        again_ns = now_ns + max(left_ns // 4, hint.eta_ns // 16, least_ns)
        if again_ns < hint.told_ns + _GIVEN_UP * hint.eta_ns:
            self._at(tip, again_ns)

    def next_ns(self) -> int:
        """Return the time when the next hint is due; `NEVER_NS` if there is none."""
        return self._starts[0][0] if self._starts else NEVER_NS

    def _at(self, tip: int, when_ns: int) -> None:
        heapq.heappush(self._starts, (when_ns, tip))
        if len(self._starts) > 4 * _MOST:  # mostly entries of dropped hints
            self._starts = sorted((w, t) for w, t in self._starts if t in self._hints)
            del self._starts[2 * _MOST :]


# Budgets of prefetching: one for each reason, filled by correct predictions.
#
# A reason pays a byte for every byte it brings, and gets back `1 / floor` for each byte used. So a
# reason with a precision above the floor can go on for ever, and one below runs dry, losing no more
# than it had earned before. The learned reasons, one for each half octave of the predicted rate,
# begin with nothing: they live on *probes*, a small share of the demanded bytes that all of them
# share. That limits the cost of wrong predictions, and of later probes of a failed reason, to a
# share of the traffic by construction.

QUEUE, HINT, LEARNED = 0, 1, 2
KINDS = ("queue", "hint", "learned")
CLASSES = 40
"""Number of budgets: queue, hints, and half octaves of the rate from 2^-14 to 2^5 per second."""


def class_of(kind: int, rate: float) -> int:
    """Return the budget of a prefetch: its kind, and for learned ones the expected rate."""
    if kind != LEARNED:
        return kind
    octaves = math.floor(2 * math.log2(rate)) + 28 if 0.0 < rate < math.inf else 0
    return LEARNED + min(max(octaves, 0), CLASSES - LEARNED - 1)


class Credit:
    """Budgets of the reasons to prefetch.

    Args:
        most_bytes: Most bytes of a budget.
        floor: Least precision at which a reason pays for itself.
        probe_share: Share of the demanded bytes that learned reasons may risk unearned.

    Attributes:
        budgets: Bytes that each reason may bring.
        probes: Bytes that any reason may bring.
    """

    def __init__(self, most_bytes: int, floor: float, probe_share: float) -> None:
        self.most_bytes, self.floor, self.probe_share = most_bytes, floor, probe_share
        # Queue and hints are trusted until they prove wrong.
        self.budgets = [float(most_bytes)] * LEARNED + [0.0] * (CLASSES - LEARNED)
        self.probes = 0.0

    def demanded(self, n_bytes: float) -> None:
        """Add the probe share of bytes that were loaded on demand."""
        self.probes = min(self.probes + self.probe_share * n_bytes, self.most_bytes / 4)

    def affords(self, budget: int) -> float:
        """Return the bytes that a reason may bring now."""
        return self.budgets[budget] + self.probes

    def pay(self, budget: int, n_bytes: float) -> None:
        """Charge a reason for bytes that it brings: first its budget, then the probes."""
        own = min(n_bytes, self.budgets[budget])
        self.budgets[budget] -= own
        self.probes = max(0.0, self.probes - (n_bytes - own))

    def used(self, budget: int, n_bytes: float) -> None:
        """Reward a reason for bytes that a request used."""
        self.budgets[budget] = min(self.budgets[budget] + n_bytes / self.floor, self.most_bytes)


# Outcomes of prefetched blocks, and of the blocks evicted for them.


class _Moved:
    """Prefetched block, or a block evicted for a prefetch: its time, size and budget."""

    __slots__ = ("awaited", "budget", "n_bytes", "since_ns")

    def __init__(self, since_ns: int, n_bytes: int, budget: int) -> None:
        self.since_ns, self.n_bytes, self.budget = since_ns, n_bytes, budget
        self.awaited = False  # a request asked for the block while it was in flight


class PrefetchOutcome(NamedTuple):
    """The outcome of prefetches that were just settled.

    Attributes:
        used: Bytes that requests asked for, by budget.
        wasted: Bytes that no request asked for, by budget.
        displaced_bytes: Requested bytes that a prefetch had displaced.
    """

    used: Counter[int]
    wasted: Counter[int]
    displaced_bytes: int


class Outcomes:
    """Tracker of prefetched slots until they are used, leave, or reach the horizon.

    Args:
        horizon_ns: A prefetch that is not used by then counts as wasted; a block that is requested
            later than that after its eviction does not count as displaced.

    Attributes:
        flying_bytes: Bytes in flight.
        unproven_bytes: Bytes in flight, or landed and not used yet.
    """

    def __init__(self, horizon_ns: int) -> None:
        self.horizon_ns = horizon_ns
        self.flying_bytes = self.unproven_bytes = 0
        self._flying: dict[int, _Moved] = {}
        self._landed: dict[int, _Moved] = {}
        self._pushed: dict[int, _Moved] = {}
        self._batches: deque[tuple[int, Slots]] = deque()

    def bring(self, now_ns: int, budget: int, slots: Slots, sizes: Slots) -> None:
        """Record that blocks start to load, charged to a budget."""
        self._batches.append((now_ns, slots))
        for slot, n_bytes in zip(slots.tolist(), sizes.tolist(), strict=True):
            self._flying[slot] = _Moved(now_ns, n_bytes, budget)
            self._pushed.pop(slot, None)
            self.flying_bytes += n_bytes
            self.unproven_bytes += n_bytes

    def push(self, now_ns: int, slots: Slots, sizes: Slots) -> None:
        """Record blocks evicted for a prefetch; prefetched ones among them have already left."""
        self._batches.append((now_ns, slots))
        for slot, n_bytes in zip(slots.tolist(), sizes.tolist(), strict=True):
            self._pushed[slot] = _Moved(now_ns, n_bytes, -1)

    def absent(self, slots: Slots) -> Slots:
        """Return the slots that are not prefetched."""
        known = [s not in self._flying and s not in self._landed for s in slots.tolist()]
        return slots[known]

    def land(self, slots: Slots) -> None:
        """Record that blocks have landed."""
        for slot, one in self._arrive(slots):
            if not one.awaited:
                self._landed[slot] = one
                self.unproven_bytes += one.n_bytes

    def drop(self, slots: Slots) -> None:
        """Record that blocks will not arrive."""
        for _ in self._arrive(slots):
            pass

    def _arrive(self, slots: Slots) -> Iterator[tuple[int, _Moved]]:
        """Take blocks out of those in flight, and yield them."""
        for slot in slots.tolist():
            one = self._flying.pop(slot, None)
            if one is not None:
                self.flying_bytes -= one.n_bytes
                self.unproven_bytes -= one.n_bytes
                yield slot, one

    def ask(self, chain: Slots, hits: int) -> PrefetchOutcome:
        """Settle the blocks of a requested chain, of which so many leading ones were resident."""
        used = self._settle(chain[:hits])
        displaced_bytes = 0
        if self._flying or self._pushed:
            for i, slot in enumerate(chain.tolist()):
                one = self._flying.get(slot)
                if one is not None and not one.awaited:  # the request waits, but for a shorter time
                    one.awaited = True
                    used[one.budget] += one.n_bytes
                pushed = self._pushed.pop(slot, None)
                if pushed is not None and i >= hits:
                    displaced_bytes += pushed.n_bytes
        return PrefetchOutcome(used, self._settle(chain[hits:]), displaced_bytes)

    def leave(self, slots: Slots) -> PrefetchOutcome:
        """Settle blocks that left the place."""
        return PrefetchOutcome(Counter(), self._settle(slots), 0)

    def forget(self, slots: Slots) -> None:
        """Forget slots; the numbers may be reused for other blocks."""
        self.drop(slots)
        self._settle(slots)
        for slot in slots.tolist():
            self._pushed.pop(slot, None)

    def tick(self, now_ns: int) -> PrefetchOutcome:
        """Settle blocks without a use within the horizon as wasted."""
        wasted = Counter[int]()
        while self._batches and self._batches[0][0] + self.horizon_ns <= now_ns:
            since_ns, slots = self._batches.popleft()
            for kind in (self._landed, self._pushed):
                old = [s for s in slots.tolist() if s in kind and kind[s].since_ns == since_ns]
                if kind is self._landed:
                    wasted += self._settle(np.array(old, np.int64))
                else:
                    for slot in old:
                        del kind[slot]
        return PrefetchOutcome(Counter(), wasted, 0)

    def _settle(self, slots: Slots) -> Counter[int]:
        """Remove landed, unused blocks; return their bytes by budget."""
        found = Counter[int]()
        for slot in slots.tolist() if self._landed else ():
            one = self._landed.pop(slot, None)
            if one is not None:
                found[one.budget] += one.n_bytes
                self.unproven_bytes -= one.n_bytes
        return found


# View of the places that a prefetcher decides on, and its decisions.


class PrefetchView(Protocol):
    """View of a place and the one below it, at this moment."""

    capacity_bytes: int
    """Bytes of the place."""

    def room_bytes(self) -> int:
        """Return the free bytes of the place."""

    def sizes(self, slots: Slots) -> Slots:
        """Return the bytes of each block."""

    def missing(self, tip: int) -> tuple[int, Slots]:
        """Return the deepest ancestor of `tip` in the place, or -1, and the blocks between.

        The blocks run from root to leaf and end with `tip`; they stop at a gap in the source.
        """


class Giver(Protocol):
    """Judge of the blocks worth bringing and the blocks to evict: a `Policy` or a stand-in."""

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return up to `n` ends of non-resident chains that are worth prefetching, best first."""

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Evict up to `n` victims for a prefetch: only blocks worth less than those it brings."""


class Fetch(NamedTuple):
    """Decision, carried out at once: blocks that leave the place, and blocks that come.

    Attributes:
        kind: `QUEUE`, `HINT` or `LEARNED`.
        rate: Expected uses per second.
        slots: Blocks to bring, root to leaf.
        victims: Blocks that the policy has evicted for them; the caller removes them.
    """

    kind: int
    rate: float
    slots: Slots
    victims: Slots


# Cost of prefetching to requests that wait, weighed against its savings.
#
# There are two promises. The first holds for every single demand and needs no measuring: prefetches
# are sent in *chunks*, no chunk while a demand waits or is under way, so a demand finds at most one
# in its way. (Chunks start only when no demand is unfinished; so the work before a demand is never
# more than without prefetches, plus that chunk.) The second is about the sum: bytes in the way of
# demands, bytes loaded again since a prefetch had displaced them, and unused bytes are held against
# the prefetched bytes that requests used. When the balance exceeds its budget, prefetching rests,
# twice as long each time, and then gets another small trial.
#
# Pure: bytes and times are arguments, no clock is read.

_LEAST_BYTES, _FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 22, 1 << 26
_ENOUGH = 8

Weight = Annotated[float, Meta(ge=0.0, le=16.0)]
Span = Annotated[float, Meta(gt=0.0, le=30 * 86_400.0)]


class RegretConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `RegretGuard`.

    Attributes:
        chunk_s: Longest wait of a demand for prefetches sent before it, beside the latency of
            one load.
        interference: Share of the demanded bytes by which bytes in the way of demands, and
            displaced ones, may exceed the bytes saved.
        waste: Unused bytes allowed, as a share of the bytes demanded and saved.
        trial_bytes: Bytes that may be lost before the balance counts.
        memory_s: Half-life of all counts.
        rest_s: Length of the first rest.
        longest_rest_s: Length of the longest rest.
    """

    chunk_s: Span = 0.005
    interference: Weight = 0.02
    waste: Weight = 0.5
    trial_bytes: Annotated[int, Meta(ge=0)] = 1 << 26
    memory_s: Span = 600.0
    rest_s: Span = 30.0
    longest_rest_s: Span = 3600.0


class RegretGuard:
    """Guard that stops prefetching from one place while its costs exceed its savings.

    Args:
        **options: Fields of `RegretConfig`.

    Attributes:
        in_the_way_bytes: All bytes that were in flight when a demand arrived, ever.
        saved_bytes: All prefetched bytes that were resident when requested, ever.
        wasted_bytes: All prefetched bytes without a use, ever.
        rests: Number of rests.

    Raises:
        ConfigError: If an option is unknown or wrong.
    """

    def __init__(self, **options: object) -> None:
        self.config = configure(RegretConfig, "regret", options)
        self.in_the_way_bytes = self.saved_bytes = self.wasted_bytes = self.rests = 0
        self._demanded = self._saved = self._cost = self._wasted = 0.0
        self._last_ns: int | None = None
        self._until_ns: int | None = None
        self._rest_s = self.config.rest_s

    # ---- what happens

    def demanded(self, now_ns: int, n_bytes: int, in_the_way_bytes: int = 0) -> None:
        """Record demanded bytes, and the prefetches in flight before them."""
        self._fade(now_ns)
        self._demanded += n_bytes
        self._cost += in_the_way_bytes
        self.in_the_way_bytes += in_the_way_bytes
        self._judge(now_ns)

    def used(self, now_ns: int, n_bytes: int) -> None:
        """Record prefetched bytes that were resident when requested."""
        self._fade(now_ns)
        self._saved += n_bytes
        self.saved_bytes += n_bytes

    def wasted(self, now_ns: int, n_bytes: int) -> None:
        """Record prefetched bytes that left unused, or were not used in time."""
        self._fade(now_ns)
        self._wasted += n_bytes
        self.wasted_bytes += n_bytes
        self._judge(now_ns)

    def displaced(self, now_ns: int, n_bytes: int) -> None:
        """Record demanded bytes that a prefetch had displaced."""
        self._fade(now_ns)
        self._cost += n_bytes
        self._judge(now_ns)

    # ---- what is decided

    def allows(self, now_ns: int) -> bool:
        """Return whether to prefetch now."""
        self._fade(now_ns)
        if self._until_ns is None or now_ns < self._until_ns:
            return self._until_ns is None
        self._until_ns = None  # a new trial: the rest has paid for earlier losses
        self._cost = self._wasted = 0.0
        return True

    def chunk_bytes(self, rates: Rates) -> int:
        """Return the most bytes of prefetches in flight: `chunk_s` worth at measured rates.

        The bytes that pass during the latency of one load are added, else a far tier would idle.
        """
        if rates.samples < _ENOUGH:
            return _FIRST_BYTES
        most = (self.config.chunk_s + rates.latency_s) * rates.bytes_per_s
        return round(min(max(most, _LEAST_BYTES), _MOST_BYTES))

    # ----

    def _fade(self, now_ns: int) -> None:
        if self._last_ns is None:
            self._last_ns = now_ns
        if now_ns > self._last_ns:
            left = 0.5 ** ((now_ns - self._last_ns) / (self.config.memory_s * 1e9))
            self._demanded *= left
            self._saved *= left
            self._cost *= left
            self._wasted *= left
            self._last_ns = now_ns

    def _judge(self, now_ns: int) -> None:
        config = self.config
        if self._until_ns is not None:
            return
        cost = self._cost - self._saved - config.interference * self._demanded
        waste = self._wasted - config.waste * (self._demanded + self._saved)
        if max(cost, waste) <= config.trial_bytes:
            if self._saved > self._cost + self._wasted:
                self._rest_s = config.rest_s  # the trial has succeeded
            return
        self.rests += 1
        self._until_ns = now_ns + round(self._rest_s * 1e9)
        self._rest_s = min(2 * self._rest_s, config.longest_rest_s)

    def __repr__(self) -> str:
        state = "allows" if self._until_ns is None else "rests"
        return f"RegretGuard({state}, saved {self._saved:.0f}, cost {self._cost:.0f} bytes lately)"


_MOST_QUEUED = 256  # oldest waiting requests in a plan; later ones move up as these are served
_RESTLESS = 16
_STEPS, _GAPS = 4, 64  # requests that a Markov chain looks ahead; latest gaps between requests
_TOGETHER = 16  # hints due within this part of a period are handled together

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0)]


class PrefetchConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `Prefetcher`.

    Attributes:
        bytes_per_s: Most bytes prefetched per second, on average.
        burst_s: Seconds of that rate that may be spent at once.
        flying_bytes: Most bytes in flight.
        unproven: Share of the place that prefetched, unused blocks may take before learned reasons
            pause.
        margin: Part by which a prefetched block must be worth more than its victims.
        slack_s: Seconds before the expected use by which a hinted chain should be resident,
        early: and standard deviations of the hint's error to add.
        period_s: Seconds between two predictions of learned uses.
        candidates: Most chains of a prediction.
        learned: Source of predictions: "policy" for the place's policy, which predicts returns and
            their times; "markov" for a `Markov` chain, which predicts the next chains.
        floor: Least precision at which a reason pays for itself.
        probe_share: Share of the demanded bytes that learned reasons may risk.
        horizon_s: Seconds after which an unused prefetch counts as wasted.
    """

    bytes_per_s: Annotated[float, Meta(gt=0.0)] = math.inf
    burst_s: Seconds = 5.0
    flying_bytes: Annotated[float, Meta(gt=0.0)] = math.inf
    unproven: Share = 0.5
    margin: Annotated[float, Meta(ge=0.0)] = 0.2
    slack_s: Seconds = 0.05
    early: Annotated[float, Meta(ge=0.0, le=4.0)] = 1.0
    period_s: Seconds = 1.0
    candidates: Annotated[int, Meta(ge=0, le=4096)] = 16
    learned: Literal["policy", "markov"] = "policy"
    floor: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.4
    probe_share: Share = 0.01
    horizon_s: Seconds = 600.0


class Prefetcher:
    """Prefetcher from the place below into one place.

    Args:
        capacity_bytes: Bytes of the place.
        rates: Transfer rates of the place below; unknown by default.
        guard: Guard that stops prefetching; one of its own by default.
        **options: Fields of `PrefetchConfig`.

    Attributes:
        credit: Budgets of the reasons.
        fetched_bytes: Bytes prefetched so far, by kind.
        used_bytes: Bytes of these that were requested.
        wasted_bytes: Bytes of these that were not.
        displaced_bytes: Requested bytes that a prefetch had displaced.

    Raises:
        ConfigError: If an option is unknown or wrong.
    """

    name = "prefetch"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        rates: Rates | None = None,
        guard: RegretGuard | None = None,
        **options: object,
    ) -> None:
        self.config = config = configure(PrefetchConfig, self.name, options)
        self.rates = rates or Rates()
        self.guard = guard or RegretGuard(trial_bytes=capacity_bytes)
        self.credit = Credit(capacity_bytes, config.floor, config.probe_share)
        self._outcomes = Outcomes(round(config.horizon_s * 1e9))
        self.fetched_bytes = [0 for _ in KINDS]
        self.used_bytes, self.wasted_bytes = list(self.fetched_bytes), list(self.fetched_bytes)
        self.displaced_bytes = 0
        self._queue: dict[int, int] = {}
        self._hints = HintQueue()
        self._markov = Markov() if config.learned == "markov" else None
        self._numbers = dict[int, int]()  # symbols of the Markov chain, by slot
        self._slots = dict[int, int]()  # and back
        self._gaps_ns = deque[int](maxlen=_GAPS)
        self._used_ns: int | None = None
        self._now_ns: int | None = None
        self._asked_ns: int | None = None
        self._planned_ns = -(1 << 62)
        self._idle = 0
        self._allowance = self._mean = 0.0
        self._digest = 0

    # ---- what may be used

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """Record a queued request's chain, until `accessed` or `abort`."""
        self._tick(now_ns)
        if len(slots):
            self._queue[request] = int(slots[-1])

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects this chain in about `eta_ns`; see `Policy.hint`."""
        self._tick(now_ns)
        lead_s = self.config.slack_s + self.rates.expected_s(round(self._mean * len(slots)))
        if len(slots):
            hint = Hint(now_ns, max(eta_ns, 0), sigma)
            self._hints.tell(int(slots[-1]), hint, round(lead_s * 1e9), self.config.early)

    def abort(self, now_ns: int, request: int) -> None:
        """Drop a queued request and its chain."""
        self._tick(now_ns)
        self._queue.pop(request, None)

    # ---- what happens

    def accessed(
        self, now_ns: int, chain: Slots, hits: int, demanded_bytes: int, request: int = -1
    ) -> None:
        """Record that a request uses a chain, root to leaf.

        Args:
            now_ns: Time.
            chain: Known blocks.
            hits: Leading blocks that were in the place.
            demanded_bytes: Bytes to be loaded for the request from the place below.
            request: Number of the request, if it was enqueued.
        """
        self._tick(now_ns)
        self._queue.pop(request, None)
        if len(self._hints):
            self._hints.end(chain.tolist())
        self._idle = 0
        outcome = self._outcomes.ask(chain, hits)
        self.credit.demanded(demanded_bytes)
        self.guard.demanded(now_ns, demanded_bytes)
        self._learn(now_ns, outcome)
        if self._markov is not None and len(chain):
            tip = int(chain[-1])
            number = self._numbers.setdefault(tip, self._markov.seen)
            self._slots[number] = tip
            self._markov.observe([number])
            if self._used_ns is not None:
                self._gaps_ns.append(now_ns - self._used_ns)
            self._used_ns, self._asked_ns = now_ns, None

    def left(self, now_ns: int, slots: Slots) -> None:
        """Record blocks that left the place, except victims of a `Fetch`."""
        self._tick(now_ns)
        self._learn(now_ns, self._outcomes.leave(slots))

    def landed(self, now_ns: int, slots: Slots) -> None:
        """Record that some or all blocks of a `Fetch` have landed."""
        self._tick(now_ns)
        self._outcomes.land(slots)

    def failed(self, now_ns: int, slots: Slots) -> None:
        """Record that blocks of a `Fetch` will not arrive."""
        self._tick(now_ns)
        self._outcomes.drop(slots)

    def forget(self, slots: Slots) -> None:
        """Forget slots; the numbers may be reused for other blocks."""
        gone = set(slots.tolist())
        self._hints.end(list(gone))
        self._queue = {r: tip for r, tip in self._queue.items() if tip not in gone}
        for slot in self._numbers.keys() & gone:
            del self._slots[self._numbers.pop(slot)]
        self._outcomes.forget(slots)

    @property
    def idle(self) -> bool:
        """Whether no request is enqueued and no hint is valid."""
        return not self._queue and not len(self._hints)

    # ---- what is decided

    def plan(self, now_ns: int, policy: Giver, reach: PrefetchView) -> Iterator[Fetch]:
        """Yield the fetches to do now, the most certain first.

        Carry out or begin each before asking for the next, since `reach` must reflect it.

        Args:
            now_ns: Time.
            policy: Policy of the place; evicts the victims.
            reach: View of the place and the one below.
        """
        now_ns = self._planned_ns = self._tick(now_ns)
        if not self.guard.allows(now_ns):
            return
        for tip in list(islice(self._queue.values(), _MOST_QUEUED)):
            yield from self._bring(now_ns, QUEUE, tip, math.inf, policy, reach)
        full = False
        for tip, rate in self._hints.due(now_ns):
            if not full:
                yield from self._bring(now_ns, HINT, tip, rate, policy, reach)
                full = len(self._missing(tip, reach)[1]) > 0
            if full:  # less urgent hints have no better chance
                self._hints.again(tip, now_ns, round(self.config.period_s * 1e9))
        if self._asked_ns is None or now_ns >= self._asked_ns + self._period_ns():
            self._asked_ns, self._idle = now_ns, self._idle + 1
            tips, rates = self._wanted(now_ns, policy)
            for tip, rate in zip(tips.tolist(), rates.tolist(), strict=True):
                if tip not in self._hints:
                    yield from self._bring(now_ns, LEARNED, tip, rate, policy, reach)

    def due_ns(self, now_ns: int) -> int:
        """Return the latest time for the next `plan`, if no request or hint comes before."""
        asked_ns = now_ns if self._asked_ns is None else self._asked_ns
        fresh = self._markov is not None and self._asked_ns is None
        due = now_ns if fresh else asked_ns + self._period_ns()
        together = self._planned_ns + round(self.config.period_s * 1e9 / _TOGETHER)
        return max(now_ns + 1, min(due, max(self._hints.next_ns(), together)))

    def _wanted(self, now_ns: int, policy: Giver) -> tuple[Slots, NDArray[np.float64]]:
        """Return the last blocks of chains that are expected, and their uses a second."""
        if self._markov is None:
            return policy.wanted(now_ns, self.config.candidates)
        if not self._gaps_ns:
            return NO_SLOTS, np.empty(0)
        numbers, rates = self._markov.rates(self.config.candidates, _STEPS)
        tips = np.array([self._slots.get(number, -1) for number in numbers.tolist()], np.int64)
        gap_s = max(sum(self._gaps_ns) / len(self._gaps_ns) / 1e9, _LEAST_S)
        return tips[tips >= 0], rates[tips >= 0] / gap_s

    def _period_ns(self) -> int:
        """Return the period of learned prefetches, longer while no request comes."""
        return round(self.config.period_s * 1e9) << min(max(self._idle - _RESTLESS, 0), 6)

    def _missing(self, tip: int, reach: PrefetchView) -> tuple[int, Slots]:
        anchor, slots = reach.missing(tip)
        return anchor, self._outcomes.absent(slots)

    def _bring(
        self, now_ns: int, kind: int, tip: int, rate: float, policy: Giver, reach: PrefetchView
    ) -> Iterator[Fetch]:
        anchor, slots = self._missing(tip, reach)
        budget = class_of(kind, rate)
        slots, sizes = self._affordable(budget, slots, reach)
        if not len(slots):
            return
        bound = math.inf if kind == QUEUE else rate / (1.0 + self.config.margin)
        victims = self._make_room(now_ns, sizes, bound, anchor, policy, reach)
        room = reach.room_bytes() + int(reach.sizes(victims).sum())
        take = int(np.searchsorted(sizes.cumsum(), room, "right"))
        if not take and not len(victims):
            return
        slots, sizes = slots[:take], sizes[:take]
        if take:
            self._mean = float(sizes.mean())
        self._learn(now_ns, self._outcomes.leave(victims))
        self._outcomes.push(now_ns, victims, reach.sizes(victims))
        self._outcomes.bring(now_ns, budget, slots, sizes)
        n_bytes = int(sizes.sum())
        self.credit.pay(budget, n_bytes)
        self._allowance -= n_bytes
        self.fetched_bytes[kind] += n_bytes
        for part in (slots, victims):
            self._digest = xxhash.xxh3_64_intdigest(part.tobytes(), seed=self._digest)
        yield Fetch(kind, rate, slots, victims)

    def _affordable(self, budget: int, slots: Slots, reach: PrefetchView) -> tuple[Slots, Slots]:
        """Return the leading blocks within the budget, the rate and the share of unproven bytes."""
        flying = self.config.flying_bytes - self._outcomes.flying_bytes
        most = min(self.credit.affords(budget), self._allowance, flying)
        if budget >= LEARNED:
            unproven = self.config.unproven * reach.capacity_bytes
            most = min(most, unproven - self.unproven_bytes)
        if not len(slots) or most <= 0:
            return slots[:0], slots[:0]
        sizes = reach.sizes(slots)
        take = int(np.searchsorted(sizes.cumsum(), most, "right"))
        return slots[:take], sizes[:take]

    def _make_room(
        self,
        now_ns: int,
        sizes: Slots,
        bound: float,
        anchor: int,
        policy: Giver,
        reach: PrefetchView,
    ) -> Slots:
        """Evict blocks worth less than `bound` through the policy, as far as room is needed."""
        protected = () if anchor < 0 else (anchor,)
        need, gone = int(sizes.sum()) - reach.room_bytes(), [NO_SLOTS]
        while need > 0:
            count = math.ceil(need / sizes.mean())
            gone.append(policy.displace(now_ns, count, bound, protected))
            need -= int(reach.sizes(gone[-1]).sum())
            if len(gone[-1]) < count:
                break
        return np.concatenate(gone)

    def _learn(self, now_ns: int, outcome: PrefetchOutcome) -> None:
        for budget, n_bytes in outcome.used.items():
            self.used_bytes[min(budget, LEARNED)] += n_bytes
            self.credit.used(budget, n_bytes)
            self.guard.used(now_ns, n_bytes)
        for budget, n_bytes in outcome.wasted.items():
            self.wasted_bytes[min(budget, LEARNED)] += n_bytes
            self.guard.wasted(now_ns, n_bytes)
        if outcome.displaced_bytes:
            self.displaced_bytes += outcome.displaced_bytes
            self.guard.displaced(now_ns, outcome.displaced_bytes)

    def _tick(self, now_ns: int) -> int:
        last_ns = now_ns if self._now_ns is None else self._now_ns
        self._now_ns = now_ns = max(now_ns, last_ns)
        most = self.config.bytes_per_s * self.config.burst_s
        if most == math.inf:
            self._allowance = most
        else:
            earned = self.config.bytes_per_s * (now_ns - last_ns) / 1e9
            self._allowance = min(self._allowance + earned, most)
        self._learn(now_ns, self._outcomes.tick(now_ns))
        return now_ns

    # ---- outcome

    @property
    def unproven_bytes(self) -> int:
        """Bytes in flight, or landed and not used yet."""
        return self._outcomes.unproven_bytes

    def precision(self, kind: int) -> float:
        """Return the used part of the bytes of a kind; 1 while none is settled."""
        known = self.used_bytes[kind] + self.wasted_bytes[kind]
        return self.used_bytes[kind] / known if known else 1.0

    def digest(self) -> int:
        """Return a 64-bit rolling hash of every decision so far."""
        return self._digest

    def __repr__(self) -> str:
        used, all_ = sum(self.used_bytes), sum(self.fetched_bytes)
        return f"Prefetcher({all_} bytes brought, {used} of them used, {self.guard!r})"
