"""A decayed access count as one integer that never has to be touched again.

With c the access count that halves every `tau`, the static key K = t_last + tau * log2(c) orders
blocks as their counts do at *every* later time, since all counts fall at the same rate: ageing
costs nothing. An access at time t makes c <- 1 + c * 2^(-(t - t_last) / tau), which on K alone is

    K <- max(K, t) + tau * log2(1 + 2^(-|K - t| / tau)),

in whole nanoseconds. tau = 0 leaves K = t: least recently used. A block that is worth w times
another per byte is one whose count is w times as high: its key has tau * log2(w) added.

The logarithms are built from + - * / only, which IEEE 754 rounds alike on every machine, so that
ties fall alike too.
"""

from __future__ import annotations

import math

import numpy as np

from flowkv.policy.order.compiled import inner, kernel

LN2 = 0.6931471805599453
TWO_OVER_LN2 = 2.8853900817779268
SQRT_HALF = 0.7071067811865476
EXP = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))  # e^x, highest power first
ATANH = tuple(1.0 / k for k in range(33, 0, -2))  # atanh(s) / s in s^2


@inner
def log2_from(s: float) -> float:
    """log2((1 + s) / (1 - s)) for |s| <= 1/3."""
    s2 = s * s
    total = 0.0
    for c in ATANH:
        total = total * s2 + c
    return TWO_OVER_LN2 * s * total


@inner
def softplus2(y: float) -> float:
    """log2(1 + 2^-y) for y >= 0, to about 2 ulp, from correctly rounded operations only."""
    if y >= 62.0:
        return 0.0
    whole = int(y + 0.5)
    x = (whole - y) * LN2  # 2^-y = e^x / 2^whole, |x| <= 0.35
    e = 0.0
    for c in EXP:
        e = e * x + c
    z = e / (1 << whole)
    return log2_from(z / (2.0 + z))


@inner
def log2(x: float) -> float:
    """The logarithm to base 2 of a finite x > 0, rounded alike on every machine; to about 2 ulp."""
    whole = 0
    while x >= 2.0 * SQRT_HALF:
        x *= 0.5
        whole += 1
    while x < SQRT_HALF:
        x *= 2.0
        whole -= 1
    return whole + log2_from((x - 1.0) / (x + 1.0))


@kernel
def log2_of(x: float) -> float:
    """`log2`, to be called from Python."""
    return float(log2(x))


@inner
def aged(key: int, now: int, tau: int) -> int:
    """The key after an access at `now`."""
    if tau == 0:
        return now
    gain = int(np.rint(tau * softplus2(abs(key - now) / tau)))
    return max(key, now) + gain
