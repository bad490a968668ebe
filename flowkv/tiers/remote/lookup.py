"""Asks an engine about keys that are not known, for as long as a look-up may take."""

from __future__ import annotations

from collections.abc import Sequence

from flowkv.core.clock import Clock
from flowkv.tiers.remote.aside import Aside
from flowkv.tiers.remote.backend import Backend
from flowkv.tiers.remote.known import Fact, Known

ASK_S = 0.045
"""Longest wait for the engine; a `Tier.contains` has 50 ms."""

ABSENT_S = 1.0
"""How long a key that the engine did not have, or an engine that was silent, is not asked again."""

MOST_ABSENT = 1 << 14


class Lookup:
    """Learns which of some keys are there, in one bounded call.

    Args:
        backend: The engine; it says how many names it looks up quickly.
        known: What is known already, and learns.
        clock: Source of time.
        aside: Where calls may hang.
    """

    def __init__(self, backend: Backend, known: Known, clock: Clock, aside: Aside) -> None:
        self._backend, self._known, self._clock, self._aside = backend, known, clock, aside
        self._absent: dict[bytes, int] = {}
        self._quiet_until_ns = 0

    def ask(self, keys: Sequence[bytes]) -> None:
        """Asks for the first of these keys that were not asked for lately."""
        now_ns = self._clock.now_ns()
        if now_ns < self._quiet_until_ns:
            return
        long_ago = now_ns - round(ABSENT_S * 1e9)
        fresh = (key for key in keys if self._absent.get(key, long_ago) <= long_ago)
        asked = [key for key in fresh if not self._known.is_shunned(key)][: self._backend.asks]
        if not asked:
            return
        names = [key.hex() for key in asked]
        try:
            there = self._aside.call(lambda: self._backend.exists(names, ASK_S), ASK_S)
        except OSError:
            self._quiet_until_ns = now_ns + round(ABSENT_S * 1e9)
            return
        answered = list(zip(asked, there, strict=True))
        self._known.learn((key, Fact()) for key, found in answered if found)
        if len(self._absent) > MOST_ABSENT:
            self._absent.clear()
        self._absent.update((key, now_ns) for key, found in answered if not found)
