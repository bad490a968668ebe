"""What prefetching costs those who wait, weighed against what it saves them.

Two promises. The first holds for every single demand and needs no measuring: prefetches are sent in
*chunks*, no chunk while a demand waits or is under way, so a demand finds at most one in its way.
(Chunks start only when no demand is unfinished; so the work before a demand is never more than
without prefetches, plus that chunk.) The second is about the sum: bytes that were in the way of
demands, bytes loaded again since a prefetch had displaced them, and bytes that nobody used
are held against the bytes that were there when somebody asked. When the balance exceeds its
budget, prefetching rests, twice as long each time, and then gets another small trial.

Pure: bytes and times are told, no clock is read.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from flowkv.policy.config import PolicyConfig, configure
from flowkv.policy.rates import Rates

_LEAST_BYTES, _FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 22, 1 << 26
_ENOUGH = 8

Share = Annotated[float, Meta(ge=0.0, le=16.0)]
Seconds = Annotated[float, Meta(gt=0.0, le=30 * 86_400.0)]


class RegretConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `RegretGuard` can be told.

    Attributes:
        chunk_s: A demand may wait so long for prefetches that were sent before it, and as long as
            the latency of one load.
        interference: Bytes in the way of demands, and displaced ones, may exceed the bytes that
            prefetching saved by this share of what was demanded.
        waste: Bytes that nobody used, as a share of those demanded and of those saved.
        trial_bytes: What may be lost before anything is known.
        memory_s: Half-life of all that is counted.
        rest_s: Length of the first rest.
        longest_rest_s: Length of the longest.
    """

    chunk_s: Seconds = 0.005
    interference: Share = 0.02
    waste: Share = 0.5
    trial_bytes: Annotated[int, Meta(ge=0)] = 1 << 26
    memory_s: Seconds = 600.0
    rest_s: Seconds = 30.0
    longest_rest_s: Seconds = 3600.0


class RegretGuard:
    """Says whether prefetching from one place may go on.

    Args:
        **options: Fields of `RegretConfig`.

    Attributes:
        in_the_way_bytes: All bytes that were in flight when a demand arrived, ever.
        saved_bytes: All prefetched bytes that were there when somebody asked for them, ever.
        wasted_bytes: All of them that nobody used, ever.
        rests: How often prefetching was stopped.

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
        """Somebody waits for bytes, and found prefetches in flight before them."""
        self._fade(now_ns)
        self._demanded += n_bytes
        self._cost += in_the_way_bytes
        self.in_the_way_bytes += in_the_way_bytes
        self._judge(now_ns)

    def used(self, now_ns: int, n_bytes: int) -> None:
        """Prefetched bytes were there when somebody asked for them."""
        self._fade(now_ns)
        self._saved += n_bytes
        self.saved_bytes += n_bytes

    def wasted(self, now_ns: int, n_bytes: int) -> None:
        """Prefetched bytes left unused, or were not used in time."""
        self._fade(now_ns)
        self._wasted += n_bytes
        self.wasted_bytes += n_bytes
        self._judge(now_ns)

    def displaced(self, now_ns: int, n_bytes: int) -> None:
        """Bytes were demanded that a prefetch had pushed out."""
        self._fade(now_ns)
        self._cost += n_bytes
        self._judge(now_ns)

    # ---- what is decided

    def allows(self, now_ns: int) -> bool:
        """Whether to prefetch now."""
        self._fade(now_ns)
        if self._until_ns is None or now_ns < self._until_ns:
            return self._until_ns is None
        self._until_ns = None  # a new trial; what was lost before has been paid for by the rest
        self._cost = self._wasted = 0.0
        return True

    def chunk_bytes(self, rates: Rates) -> int:
        """Most bytes of prefetches in flight: what takes `chunk_s` by the rates measured so far.

        And the bytes that pass during the latency of one load, or a far tier would idle meanwhile.
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
                self._rest_s = config.rest_s  # it has proved itself
            return
        self.rests += 1
        self._until_ns = now_ns + round(self._rest_s * 1e9)
        self._rest_s = min(2 * self._rest_s, config.longest_rest_s)

    def __repr__(self) -> str:
        state = "allows" if self._until_ns is None else "rests"
        return f"RegretGuard({state}, saved {self._saved:.0f}, cost {self._cost:.0f} bytes lately)"
