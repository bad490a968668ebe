"""Which chains to bring into a faster place before anybody asks for them.

Three reasons, in this order. The *queue*: a request that waits will use its chain, certainly and
soon. A *hint*: the application expects a chain at about some time; bringing it starts early enough
for the transfer, some slack and the error of the hint, and not before. And what the place's policy
has *learned* (`Policy.wanted`). All three pay for what they bring from a purse that fills when they
were right (`credit`); on traffic that cannot be predicted the learned reason so switches
itself off. Nothing goes for a prefetch that is worth more than it (`Policy.displace`), and while a
`RegretGuard` says that prefetching costs more than it saves, nothing is brought at all. To bring
nothing is the normal answer.

Pure and deterministic: who drives it tells what happened, gives the time, and moves the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NO_SLOTS, Slots
from flowkv.policy.config import PolicyConfig, configure
from flowkv.policy.prefetch.credit import HINT, KINDS, LEARNED, QUEUE, Credit, class_of
from flowkv.policy.prefetch.hints import Hint, Hints
from flowkv.policy.prefetch.outcome import FREE, Outcome, Outcomes
from flowkv.policy.prefetch.reach import Fetch, Giver, Reach
from flowkv.policy.prefetch.regret import RegretGuard
from flowkv.policy.rates import Rates

_VERSION = 1
_RESTLESS = 16
_TOGETHER = 16  # hints that are due within this part of a period are looked at together

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(gt=0.0)]


class PrefetchConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `Prefetcher` can be told.

    Attributes:
        bytes_per_s: Most bytes a second that it brings, on average.
        burst_s: Of so many seconds, bytes may be brought at once.
        flying_bytes: Most bytes that are on their way.
        unproven: Share of the place that may hold what was brought and not used yet, before what
            was learned brings more.
        margin: What is brought must be worth so much more than what goes for it.
        slack_s: A hinted chain should be there so long before its time.
        early: ... and so many standard deviations of the hint's error.
        period_s: The learned reason is asked so often.
        candidates: Chains that it is asked for.
        floor: Precision from which on a reason pays for itself.
        probe_share: What learned reasons may risk, of the bytes that are demanded anyway.
        horizon_s: What was not used by then was brought in vain.
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
    floor: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.4
    probe_share: Share = 0.01
    horizon_s: Seconds = 600.0


class Prefetcher:
    """Decides for one place and the one below it.

    Args:
        capacity_bytes: Of the place.
        rates: How fast the place below is; unknown by default.
        guard: Whether to go on; one of its own by default.
        **options: Fields of `PrefetchConfig`.

    Attributes:
        credit: What each reason may bring, and how often it was right.
        fetched_bytes: Brought so far, by kind.
        used_bytes: Of these, somebody asked for.
        wasted_bytes: Of these, nobody did.
        displaced_bytes: Asked for, and pushed out by a prefetch.

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
        self._hints = Hints()
        self._now_ns: int | None = None
        self._asked_ns: int | None = None
        self._planned_ns = -(1 << 62)
        self._idle = 0
        self._budget = self._mean = 0.0
        self._digest = 0

    # ---- what may be used

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """A queued request will use this chain; `accessed` or `abort` ends that."""
        self._tick(now_ns)
        if len(slots):
            self._queue[request] = int(slots[-1])

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """The application expects this chain in about `eta_ns`; see `Policy.hint`."""
        self._tick(now_ns)
        lead_s = self.config.slack_s + self.rates.expected_s(round(self._mean * len(slots)))
        if len(slots):
            hint = Hint(now_ns, max(eta_ns, 0), sigma)
            self._hints.tell(int(slots[-1]), hint, round(lead_s * 1e9), self.config.early)

    def abort(self, now_ns: int, request: int) -> None:
        """A queued request will not run."""
        self._tick(now_ns)
        self._queue.pop(request, None)

    # ---- what happens

    def accessed(
        self, now_ns: int, chain: Slots, hits: int, demanded_bytes: int, request: int = -1
    ) -> None:
        """Somebody uses a chain, root to leaf.

        Args:
            now_ns: Time.
            chain: Known blocks.
            hits: How many of the leading ones were in the place.
            demanded_bytes: What has to be loaded for it from the place below.
            request: Its number, if it was enqueued.
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

    def left(self, now_ns: int, slots: Slots) -> None:
        """Blocks left the place, whatever for; not to be told of the victims of a `Fetch`."""
        self._tick(now_ns)
        self._learn(now_ns, self._outcomes.leave(slots))

    def landed(self, now_ns: int, slots: Slots) -> None:
        """Blocks of a `Fetch` arrived, all or some."""
        self._tick(now_ns)
        self._outcomes.land(slots)

    def failed(self, now_ns: int, slots: Slots) -> None:
        """Blocks of a `Fetch` will not arrive."""
        self._tick(now_ns)
        self._outcomes.drop(slots)

    def forget(self, slots: Slots) -> None:
        """Nobody knows these blocks any more: their slots may name others next."""
        gone = set(slots.tolist())
        self._hints.end(list(gone))
        self._queue = {r: tip for r, tip in self._queue.items() if tip not in gone}
        self._outcomes.forget(slots)

    @property
    def idle(self) -> bool:
        """Whether nothing is enqueued and no hint holds."""
        return not self._queue and not len(self._hints)

    # ---- what is decided

    def plan(self, now_ns: int, policy: Giver, reach: Reach) -> Iterator[Fetch]:
        """What to bring now, the most certain first.

        Carry each out, or have it begin, before asking for the next: `reach` must know of it.

        Args:
            now_ns: Time.
            policy: Of the place; gives up what has to go.
            reach: What lies where.
        """
        now_ns = self._planned_ns = self._tick(now_ns)
        if not self.guard.allows(now_ns):
            return
        for tip in list(self._queue.values()):
            yield from self._bring(now_ns, QUEUE, tip, math.inf, policy, reach)
        full = False
        for tip, rate in self._hints.due(now_ns):
            if not full:
                yield from self._bring(now_ns, HINT, tip, rate, policy, reach)
                full = len(self._missing(tip, reach)[1]) > 0
            if full:  # what is less urgent has no better chance
                self._hints.again(tip, now_ns, round(self.config.period_s * 1e9))
        if self._asked_ns is None or now_ns >= self._asked_ns + self._period_ns():
            self._asked_ns, self._idle = now_ns, self._idle + 1
            tips, rates = policy.wanted(now_ns, self.config.candidates)
            for tip, rate in zip(tips.tolist(), rates.tolist(), strict=True):
                if tip not in self._hints:
                    yield from self._bring(now_ns, LEARNED, tip, rate, policy, reach)

    def due_ns(self, now_ns: int) -> int:
        """When to ask again, at the latest, unless something is enqueued or hinted before."""
        asked_ns = now_ns if self._asked_ns is None else self._asked_ns
        due = asked_ns + self._period_ns()
        together = self._planned_ns + round(self.config.period_s * 1e9 / _TOGETHER)
        return max(now_ns + 1, min(due, max(self._hints.next_ns(), together)))

    def _period_ns(self) -> int:
        """Longer while nothing happens, since then little changes."""
        return round(self.config.period_s * 1e9) << min(max(self._idle - _RESTLESS, 0), 6)

    def _missing(self, tip: int, reach: Reach) -> tuple[int, Slots]:
        anchor, slots = reach.missing(tip)
        return anchor, slots[self._outcomes.of(slots) == FREE]

    def _bring(
        self, now_ns: int, kind: int, tip: int, rate: float, policy: Giver, reach: Reach
    ) -> Iterator[Fetch]:
        anchor, slots = self._missing(tip, reach)
        purse = class_of(kind, rate)
        slots, sizes = self._affordable(purse, slots, reach)
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
        self._outcomes.bring(now_ns, purse, slots, sizes)
        n_bytes = int(sizes.sum())
        self.credit.pay(purse, n_bytes)
        self._budget -= n_bytes
        self.fetched_bytes[kind] += n_bytes
        for part in (slots, victims):
            self._digest = xxhash.xxh3_64_intdigest(part.tobytes(), seed=self._digest)
        yield Fetch(kind, rate, slots, victims)

    def _affordable(self, purse: int, slots: Slots, reach: Reach) -> tuple[Slots, Slots]:
        """The leading blocks for which there is money, time and room for what is unproven."""
        outcomes = self._outcomes
        most = min(
            self.credit.affords(purse),
            self._budget,
            self.config.flying_bytes - outcomes.flying_bytes,
        )
        if purse >= LEARNED:
            unproven = self.config.unproven * reach.capacity_bytes
            most = min(most, unproven - outcomes.unproven_bytes)
        if not len(slots) or most <= 0:
            return slots[:0], slots[:0]
        sizes = reach.sizes(slots)
        take = int(np.searchsorted(sizes.cumsum(), most, "right"))
        return slots[:take], sizes[:take]

    def _make_room(
        self, now_ns: int, sizes: Slots, bound: float, anchor: int, policy: Giver, reach: Reach
    ) -> Slots:
        """Has the policy give up what is worth less than `bound`, as far as that is needed."""
        protected = () if anchor < 0 else (anchor,)
        need, gone = int(sizes.sum()) - reach.room_bytes(), [NO_SLOTS]
        while need > 0:
            count = math.ceil(need / sizes.mean())
            gone.append(policy.displace(now_ns, count, bound, protected))
            need -= int(reach.sizes(gone[-1]).sum())
            if len(gone[-1]) < count:
                break
        return np.concatenate(gone)

    def _learn(self, now_ns: int, outcome: Outcome) -> None:
        for purse, n_bytes in outcome.used.items():
            self.used_bytes[min(purse, LEARNED)] += n_bytes
            self.credit.used(purse, n_bytes)
            self.guard.used(now_ns, n_bytes)
        for purse, n_bytes in outcome.wasted.items():
            self.wasted_bytes[min(purse, LEARNED)] += n_bytes
            self.credit.wasted(purse, n_bytes)
            self.guard.wasted(now_ns, n_bytes)
        if outcome.displaced:
            self.displaced_bytes += outcome.displaced
            self.guard.displaced(now_ns, outcome.displaced)

    def _tick(self, now_ns: int) -> int:
        last_ns = now_ns if self._now_ns is None else self._now_ns
        self._now_ns = now_ns = max(now_ns, last_ns)
        most = self.config.bytes_per_s * self.config.burst_s
        if most == math.inf:
            self._budget = most
        else:
            earned = self.config.bytes_per_s * (now_ns - last_ns) / 1e9
            self._budget = min(self._budget + earned, most)
        self._learn(now_ns, self._outcomes.tick(now_ns))
        return now_ns

    # ---- carrying it over

    @property
    def unproven_bytes(self) -> int:
        """On their way, or there and not used yet."""
        return self._outcomes.unproven_bytes

    def precision(self, kind: int) -> float:
        """Which part of what a kind brought was used, lately; 1 while nothing is known."""
        return self.credit.precision(kind)

    def digest(self) -> int:
        """64-bit rolling hash of every decision so far."""
        return self._digest

    def snapshot(self) -> bytes:
        """How right each reason was, for `warm`."""
        return msgspec.msgpack.encode([_VERSION, self.credit.state()])

    def warm(self, snapshot: bytes, trust: float = 0.1) -> None:
        """Begins with a small share of what another one had earned; a weak start by intent.

        Args:
            snapshot: What `snapshot` gave, perhaps for a place of another size.
            trust: The share.

        Raises:
            ConfigError: If it is damaged or of another version.
        """
        try:
            version, state = msgspec.msgpack.decode(snapshot, type=tuple[int, list[Any]])
            if version != _VERSION:
                raise ValueError(f"version {version}")
            self.credit.restore(state, trust)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise ConfigError(f"no state of a prefetcher: {error}", "Start without it") from None

    def __repr__(self) -> str:
        used, all_ = sum(self.used_bytes), sum(self.fetched_bytes)
        return f"Prefetcher({all_} bytes brought, {used} of them used, {self.guard!r})"
