"""When does it return? A logistic hazard per age bin, learned online, and the index made of it.

*Hazard.* Age, the time since a chain was used, is cut into bins that grow by a factor of 1.5. The
hazard of bin i is the probability that a chain that has not returned by its beginning does so
within it:

    logit hazard_i = base_i + sum over features f of weight[row_f](age of bin i).

A weight is a function of age: a line through its values at nine *knots*, over the logarithm of age.
So neighbouring bins learn from each other, and "long output" may mean late without meaning never.
Every return and every bin survived is one step of AdaGrad (Duchi et al., JMLR 2011).

*Index.* A chain is worth its room as long as the best chance of a return per second of room is high
(Gittins, JRSS B 1979): the largest, over all horizons h, of

    P(return within h) / E[time until the return or h, whichever is first],

from its present age on. The unit is 1/s. It rises as well as falls with age: a chain whose tool
takes ten seconds is worth more after eight seconds than after one.

All arithmetic is + - * / and comparisons, which IEEE 754 rounds alike on every machine.
"""

from __future__ import annotations

import math

import numpy as np

from flowkv.policy.hazard.features import BUCKETS, FEATURES
from flowkv.policy.order.compiled import Array, inner, kernel
from flowkv.policy.order.static_key import log2

BINS = 40
FIRST_S, RATIO = 0.5, 1.37
EDGES = np.array([0.0] + [FIRST_S * RATIO**i for i in range(BINS - 1)])
EDGES_NS = np.round(EDGES * 1e9).astype(np.int64)
WIDTHS = np.append(np.diff(EDGES), EDGES[-1] * (RATIO - 1.0))
KNOTS_S = (1.0, 3.0, 6.0, 12.0, 24.0, 48.0, 100.0, 400.0, 1600.0)
KNOTS = len(KNOTS_S)


def _between_knots() -> tuple[Array, Array]:
    """For each bin: the knot before its middle, and how far it lies towards the next."""
    middles = np.sqrt(np.maximum(EDGES, FIRST_S / 2) * (EDGES + WIDTHS))
    at = np.interp(np.log(middles), np.log(KNOTS_S), np.arange(KNOTS, dtype=float))
    before = np.minimum(at.astype(np.int64), KNOTS - 2)
    return before, np.round((at - before) * 4096) / 4096  # rounded: no libm in any weight


BEFORE, BEYOND = _between_knots()

# A model is one row: (value, sum of squared steps) of each weight and base, then the reach. There
# may be two, what is learned here and what was brought: both learn on, and the better one speaks.
RATE, BASE_RATE, EASE = 0.14, 0.3, 0.5
FIRST_BASE = -2.0
WEIGHT_LIMIT, BASE_LIMIT, LOGIT_LIMIT = 8.0, 16.0, 18.0
BASES = 2 * BUCKETS * KNOTS
REACH = BASES + 2 * BINS
REACHES = 8
LOSS = REACH + REACHES  # bits lost by its predictions, halving every 700 events or so
PROOF = 6.0  # bits by which a model that was brought must be the better one
MODEL_SIZE = LOSS + 1
FORGET = 0.999

LN2 = 0.6931471805599453
EXP = tuple(1.0 / math.factorial(k) for k in range(10, -1, -1))
MOST_INDEX = 1e6
CERTAIN = 1.0 - 1e-9  # more than rounding can add to a ratio


def fresh_model() -> Array:
    """A model that has seen nothing."""
    model = np.zeros((1, MODEL_SIZE))
    model[0, BASES:REACH:2] = FIRST_BASE
    model[0, BASES + 1 : REACH : 2] = 1.0
    model[0, REACH] = 1.0
    return model


@inner
def decay(x: float) -> float:
    """e^-x for x >= 0, to 1e-12, from correctly rounded operations only."""
    if not x < 40.0:
        return 0.0
    whole = int(x / LN2 + 0.5)
    y = whole * LN2 - x
    e = 0.0
    for c in EXP:
        e = e * y + c
    return e / (1 << whole)


@inner
def logistic(x: float) -> float:
    """1 / (1 + e^-x), never closer to 0 or 1 than 1.5e-8; of NaN, 1.5e-8."""
    if not x > -LOGIT_LIMIT:
        x = -LOGIT_LIMIT
    if x >= 0.0:
        return float(1.0 / (1.0 + decay(min(x, LOGIT_LIMIT))))
    e = decay(-x)
    return float(e / (1.0 + e))


@inner
def bound(x: float, limit: float) -> float:
    """X within +-limit."""
    return min(max(x, -limit), limit)


@inner
def bin_of(age_ns: int) -> int:
    """The bin that an age lies in."""
    low, high = 0, BINS - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if age_ns >= EDGES_NS[middle]:
            low = middle
        else:
            high = middle - 1
    return low


@inner
def hazard(model: Array, row: Array, i: int) -> float:
    """The hazard of bin `i` for a chain whose features are `row`."""
    k, u = BEFORE[i], BEYOND[i]
    if u == 1.0:  # beyond the last knot: a third of all questions
        return float(logistic(model[BASES + 2 * i] + said_at(model, row, k + 1)))
    low = high = 0.0
    for f in range(FEATURES):
        at = 2 * (np.int64(row[f]) * KNOTS + k)
        low += model[at]
        high += model[at + 2]
    return float(logistic(model[BASES + 2 * i] + (1.0 - u) * low + u * high))


@inner
def said_at(model: Array, row: Array, k: int) -> float:
    """What the features say at a knot."""
    total = 0.0
    for f in range(FEATURES):
        total += model[2 * (np.int64(row[f]) * KNOTS + k)]
    return total


@inner
def nudge(model: Array, at: int, step: float, rate: float, ease: float, limit: float) -> None:
    """One AdaGrad step of the weight at `at`."""
    model[at + 1] += step * step
    model[at] = bound(model[at] + rate * step / np.sqrt(model[at + 1] + ease), limit)


@inner
def learn(model: Array, row: Array, i: int, returned: int) -> None:
    """One model learns that a chain returned in bin `i` (1), or did not (0)."""
    h = hazard(model, row, i)
    model[LOSS] = FORGET * model[LOSS] - log2(h if returned == 1 else 1.0 - h)
    step = returned - h
    k, u = BEFORE[i], BEYOND[i]
    nudge(model, BASES + 2 * i, step, BASE_RATE, 0.0, BASE_LIMIT)
    before, after = (1.0 - u) * step, u * step
    for f in range(FEATURES):
        at = 2 * (np.int64(row[f]) * KNOTS + k)
        if u < 1.0:
            nudge(model, at, before, RATE, EASE, WEIGHT_LIMIT)
        if u > 0.0:
            nudge(model, at + 2, after, RATE, EASE, WEIGHT_LIMIT)


@kernel
def teach(models: Array, row: Array, i: int, returned: int) -> None:
    """All models learn that a chain returned in bin `i` (1), or did not (0)."""
    for m in range(len(models)):
        learn(models[m], row, i, returned)


@inner
def speaker(models: Array) -> int:
    """The model that decides: what was brought, while it has clearly predicted better lately."""
    return 1 if len(models) > 1 and models[1, LOSS] + PROOF <= models[0, LOSS] else 0


@kernel
def teach_reach(models: Array, short: int) -> None:
    """A chain returned but for its last `short` blocks. Remembers about a thousand returns."""
    for m in range(len(models)):
        for i in range(REACHES):
            models[m, REACH + i] *= FORGET
        models[m, REACH + min(short, REACHES - 1)] += 1.0


@inner
def reach(models: Array, short: int) -> float:
    """The share of the returning chains that use the block `short` before their end."""
    m, total, used = speaker(models), 0.0, 0.0
    for i in range(REACHES):
        total += models[m, REACH + i]
        if i <= short:
            used += models[m, REACH + i]
    return used / total


@kernel
def index(models: Array, row: Array, i: int) -> float:
    """The Gittins index at the beginning of bin `i`, in 1/s.

    Ends as soon as no later horizon can be better. What is left to gain costs no less time than if
    all of it came evenly within the next bin, since none of those after it is shorter.
    """
    model = models[speaker(models)]
    alive, gained, spent, best = 1.0, 0.0, 0.0, 0.0
    at, low, high = -1, 0.0, 0.0  # the last two knots, and what the features say there
    for b in range(i, BINS):
        k, u = BEFORE[b], BEYOND[b]
        while at < k:
            low = high if at >= 0 and at == k - 1 else said_at(model, row, k)
            at = k
            high = said_at(model, row, k + 1)
        h = logistic(model[BASES + 2 * b] + (1.0 - u) * low + u * high)
        gained += alive * h
        spent += alive * WIDTHS[b] * (1.0 - 0.5 * h)
        alive *= 1.0 - h
        best = max(best, gained / spent)
        if alive < 1e-3 or b + 1 == BINS:
            break
        if gained + alive < best * CERTAIN * (spent + 0.5 * alive * WIDTHS[b + 1]):
            break
    return min(best, MOST_INDEX)
