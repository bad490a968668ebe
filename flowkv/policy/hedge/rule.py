"""Which candidate decides: what each has hit more than LRU, and when that is reason to change.

Row 0 is LRU, and has the benefit of the doubt. Another row takes over once it is *surely* better:
by more than `SURE` standard deviations of what it gains per block, over the last half hour or so.
It hands back at once if, since it took over, it has really cost more than a small stake, however
sure one was; and then LRU stays until half as many blocks again have been asked for, and until what
was lost is small against that, or the next try is sure to bring it back. So a try is paid from a
loss that nobody notices, 0.002 of all blocks, or from what was gained before.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.hazard.model import decay
from flowkv.policy.order.compiled import Array, inner

# Entries of the sums: seconds of the last request; blocks so far; hits more than LRU's so far; the
# same lately with the sum of its squares, since the last change; blocks when LRU last had to help
# out; surplus at the last change. Then three per row: blocks lately, hits more than LRU's, squares.
TIME, BLOCKS, SURPLUS, LATELY, SQUARES, FAILED, ENTRY, ROWS = range(8)
WEIGHT, GAIN, SPREAD = range(3)

HALF_LIFE_S = 1800.0
SURE, SURE_SAMPLED, SURE_IN_DEBT, SURE_IN_PLACE = 1.0, 2.0, 3.0, 2.0
DOUBT = 24.0  # blocks: as if one request had already gone the other way
STAKE, SHARE = 40.0, 0.0004  # of a try: blocks, and of all blocks so far
DEBT, DEBT_SHARE = 24.0, 0.0005  # with which a try may begin
MOST, MOST_SHARE = 64.0, 0.0006  # of all tries
WAIT = 1.5
HYSTERESIS = 0.02
LN2 = 0.6931471805599453


def fresh_sums(rows: int) -> Array:
    """Nothing has been seen."""
    return np.zeros(ROWS + 3 * rows)


@inner
def witness(sums: Array, now: int, blocks: int, more: int) -> None:
    """A request of so many blocks has come; `more` of them were resident than LRU would have."""
    gone = now * 1e-9 - sums[TIME]
    if gone > 0.0:
        fade = decay(LN2 * gone / HALF_LIFE_S)
        sums[LATELY] *= fade
        sums[SQUARES] *= fade
        for i in range(ROWS, len(sums)):
            sums[i] *= fade
        sums[TIME] = now * 1e-9
    sums[BLOCKS] += blocks
    sums[SURPLUS] += more
    sums[LATELY] += more
    sums[SQUARES] += float(more) * more


@inner
def credit(sums: Array, row: int, blocks: int, more: int) -> None:
    """A candidate would have hit `more` blocks than LRU, of a request of so many."""
    i = ROWS + 3 * row
    sums[i + WEIGHT] += blocks
    sums[i + GAIN] += more
    sums[i + SPREAD] += float(more) * more


@inner
def rate_of(sums: Array, row: int) -> tuple[float, float]:
    """Hits more than LRU's per block, and the variance of that."""
    i = ROWS + 3 * row
    weight = max(sums[i + WEIGHT], 1.0)
    return sums[i + GAIN] / weight, (sums[i + SPREAD] + DOUBT * DOUBT) / (weight * weight)


@inner
def surely_best(sums: Array, rows: int) -> int:
    """The row that gains most for sure, 0 if none does."""
    best, most = 0, 0.0
    for a in range(1, rows):
        rate, variance = rate_of(sums, a)
        least = rate - (SURE if a == rows - 1 else SURE_SAMPLED) * np.sqrt(variance)
        if least > most:
            best, most = a, least
    return best


@inner
def in_debt(sums: Array, row: int, debt: float, share: float) -> bool:
    """Whether more was lost than that, and the row is not sure to bring it back."""
    if sums[SURPLUS] >= -(debt + share * sums[BLOCKS]):
        return False
    rate, variance = rate_of(sums, row)
    return bool(rate <= SURE_IN_DEBT * np.sqrt(variance))


@inner
def decide(sums: Array, rows: int, active: int) -> int:
    """The row that is to decide from now on."""
    best = surely_best(sums, rows)
    if active == 0:
        early = sums[BLOCKS] < WAIT * sums[FAILED]
        return 0 if early or in_debt(sums, best, DEBT, DEBT_SHARE) else int(best)
    since = sums[SURPLUS] - sums[ENTRY]
    lost = since < -(STAKE + SHARE * sums[BLOCKS])
    broke = since < 0.0 and in_debt(sums, active, MOST, MOST_SHARE)
    if lost or broke or sums[LATELY] < -SURE_IN_PLACE * np.sqrt(sums[SQUARES] + DOUBT * DOUBT):
        return 0
    if best not in (0, active):
        rate, variance = rate_of(sums, best)
        mine, also = rate_of(sums, active)
        if rate - (1.0 + HYSTERESIS) * mine > SURE * np.sqrt(variance + also):
            return best
    return int(active)


@inner
def turn(sums: Array, chosen: int) -> None:
    """Another row decides from now on."""
    if chosen == 0:
        sums[FAILED] = sums[BLOCKS]
    sums[ENTRY] = sums[SURPLUS]
    sums[LATELY] = sums[SQUARES] = 0.0
