"""Load or recompute: a load happens only where the measured rates say that it helps (DESIGN D7)."""

from __future__ import annotations

from flowkv.policy.rates import Rates

_WEIGHT = 0.3
_DOUBT = 0.95


class LoadGate:
    """Running estimates of load and compute rates, and the decision that follows from them.

    Nothing is refused before both rates were measured once: the first load measures. Every refusal
    makes the tiers that it would have used look a little faster, so that they are measured again
    now and then: a first load that was slow, on a cold disk say, is not held against them for ever.

    Attributes:
        rates: What loads from each tier take, by its name.
    """

    def __init__(self) -> None:
        self.rates: dict[str, Rates] = {}
        self._compute_s_per_token = 0.0

    def loaded(self, tier: str, n_bytes: int, seconds: float) -> None:
        """A load of `n_bytes` from `tier` took `seconds`."""
        if n_bytes > 0:
            self.rates.setdefault(tier, Rates()).add(n_bytes, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward pass over `tokens` new tokens took `seconds`."""
        if tokens > 0:
            fresh = seconds / tokens
            known = self._compute_s_per_token or fresh
            self._compute_s_per_token = known + _WEIGHT * (fresh - known)

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
