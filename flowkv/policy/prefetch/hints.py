"""When to start for a chain that the application expects at about some time."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from flowkv.policy.base import NEVER_NS

_MOST = 1 << 16
_GIVEN_UP = 4  # times the expected time
_LEAST_S = 0.01


class Hint(NamedTuple):
    """A chain's next use, `eta_ns` after `told_ns`, the logarithm's deviation being `sigma`."""

    told_ns: int
    eta_ns: int
    sigma: float

    def rate(self, now_ns: int) -> float:
        """Uses a second, at a time when it was not used yet: 1 / E[T - t | T > t], T lognormal."""
        passed, eta = max(now_ns - self.told_ns, 1), max(self.eta_ns, 1)
        sigma = max(self.sigma, 1e-3)
        late = math.log(passed / eta) / sigma
        beyond = math.erfc(late / math.sqrt(2.0))
        if beyond < 1e-12:  # long overdue: as if it were as far ahead as it is behind
            return 1e9 / passed
        mean = eta * math.exp(sigma * sigma / 2) * math.erfc((late - sigma) / math.sqrt(2.0))
        return 1e9 / max(mean / beyond - passed, _LEAST_S * 1e9)


class Hints:
    """The hints that hold, and when each is to be looked at."""

    def __init__(self) -> None:
        self._hints: dict[int, Hint] = {}
        self._starts: list[tuple[int, int]] = []

    def __contains__(self, tip: int) -> bool:
        return tip in self._hints

    def __getitem__(self, tip: int) -> Hint:
        return self._hints[tip]

    def __len__(self) -> int:
        return len(self._hints)

    def tell(self, tip: int, hint: Hint, lead_ns: int, early: float) -> None:
        """A new hint about a chain's last block, which takes the place of an older one.

        Args:
            tip: The block.
            hint: What is expected; `NEVER_NS` only ends the older one.
            lead_ns: To be looked at so long before its time,
            early: and so many deviations.
        """
        self._hints.pop(tip, None)
        if hint.eta_ns == NEVER_NS:
            return
        if len(self._hints) >= _MOST:  # the oldest has been wrong, or is far
            del self._hints[next(iter(self._hints))]
        self._hints[tip] = hint
        first_ns = hint.eta_ns * math.exp(-early * hint.sigma)
        self._at(tip, hint.told_ns + round(first_ns) - lead_ns)

    def end(self, chain: list[int]) -> None:
        """These blocks are used: hints about them are fulfilled."""
        for tip in self._hints.keys() & set(chain) if self._hints else ():
            del self._hints[tip]

    def due(self, now_ns: int) -> list[tuple[int, float]]:
        """Blocks whose time has come, each once, and their rates, the most urgent first."""
        tips = dict[int, float]()
        while self._starts and self._starts[0][0] <= now_ns:
            tip = heapq.heappop(self._starts)[1]
            if tip in self._hints and tip not in tips:
                tips[tip] = self._hints[tip].rate(now_ns)
        return sorted(tips.items(), key=lambda one: -one[1])

    def again(self, tip: int, now_ns: int, least_ns: int) -> None:
        """There was no room for a chain: look at it once more, later."""
        hint = self._hints[tip]
        left_ns = abs(hint.told_ns + hint.eta_ns - now_ns)
        again_ns = now_ns + max(left_ns // 4, hint.eta_ns // 16, least_ns)
        if again_ns < hint.told_ns + _GIVEN_UP * hint.eta_ns:
            self._at(tip, again_ns)

    def next_ns(self) -> int:
        """When the next one is due; `NEVER_NS` if there is none."""
        return self._starts[0][0] if self._starts else NEVER_NS

    def _at(self, tip: int, when_ns: int) -> None:
        heapq.heappush(self._starts, (when_ns, tip))
        if len(self._starts) > 4 * _MOST:  # mostly of hints that are gone
            self._starts = sorted((w, t) for w, t in self._starts if t in self._hints)
            del self._starts[2 * _MOST :]
