"""The index of a chain whose return the application has announced: lognormal, about an eta."""

from __future__ import annotations

from flowkv.policy.hazard.model import MOST_INDEX, decay
from flowkv.policy.order.compiled import inner, kernel
from flowkv.policy.order.static_key import log2

STEPS = 24
LEAST_SIGMA, MOST_SIGMA = 0.05, 5.0
HOPELESS = 1e-4
LN2 = 0.6931471805599453
ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


@inner
def beyond(z: float) -> float:
    """P(N > z) of a standard normal N, to 1e-7 (Abramowitz and Stegun, 7.1.26)."""
    x = abs(z) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * x)
    e = 0.0
    for c in ERFC:
        e = e * t + c
    tail = 0.5 * e * t * decay(x * x)
    return float(tail if z >= 0.0 else 1.0 - tail)


@inner
def later(t_s: float, eta_s: float, sigma: float) -> float:
    """P(the return comes after t_s)."""
    return beyond(LN2 * log2(t_s / eta_s) / sigma) if t_s > 0.0 else 1.0


@kernel
def hinted_index(eta_s: float, sigma: float, age_s: float) -> float:
    """The Gittins index `age_s` after a hint; -1 once the hint has proved wrong.

    Horizons grow by 1.2 from a tenth of the time that is typical.
    """
    eta_s = max(eta_s, 1e-3)
    sigma = min(max(sigma, LEAST_SIGMA), MOST_SIGMA)
    alive = later(age_s, eta_s, sigma)
    if not alive > HOPELESS:
        return -1.0
    step = 0.1 * max(eta_s - age_s, 0.3 * sigma * max(eta_s, age_s))
    now, spent, best, left = age_s, 0.0, 0.0, alive
    for _ in range(STEPS):
        now += step
        after = later(now, eta_s, sigma)
        spent += 0.5 * step * (left + after)
        left = after
        best = max(best, (alive - after) / spent)
        step *= 1.2
    return min(best, MOST_INDEX)
