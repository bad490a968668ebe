"""The admission gate: what is loaded and stored where the measured rates say so (DESIGN D7)."""

from __future__ import annotations

from collections.abc import Callable

from flowkv.policy.rates import Rates

_WEIGHT = 0.3
_DOUBT = 0.95
_MARGIN = 8.0
"""Loads that take so many times what computing takes save a ninth of it at most, and only while
both go on at once: of T_c alone, T_c * T_l / (T_c + T_l) is left."""
_ENOUGH = 8
_STORE_DOUBT = 0.999
_LONG_PAGES = 256
"""What does not pay for a prompt of so many pages never does."""


class LoadGate:
    """Running estimates of load and compute rates, and the decisions that follow from them.

    Nothing is refused before both rates were measured once: the first load measures. Every refusal
    makes the tiers that it would have used look a little faster, so that they are measured again
    now and then: a first load that was slow, on a cold disk say, is not held against them for ever.

    Attributes:
        rates: What loads from each tier take, by its name.
    """

    def __init__(self) -> None:
        self.rates: dict[str, Rates] = {}
        self._compute_s_per_token = 0.0
        # Per tier: the loads that were measured, and the pages refused, since they were.
        self._refused: dict[str, tuple[int, int]] = {}

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
        if rates is None or rates.samples < _ENOUGH or not compute_s:
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
