"""The hazard model and its chains, compiled: features, learning, ends of chains.

Every feature is one of a few buckets, so that nothing has to be scaled, nothing can be NaN and
every weight has a plain meaning. Lengths go by octaves or half octaves, since the factor matters.

`pace` is the moving average of log2 of the gaps between the turns of a conversation, in seconds.
There is one for all gaps and one per stop reason of the previous turn: a tool answers in another
time than a person. `spread` is the moving average of the distance between gap and pace.
"""

from __future__ import annotations

import math

import numpy as np

from flowkv.policy.order import compiled
from flowkv.policy.order.compiled import Array, helper, inner, kernel

SIZES = {
    "stop, turn": 32,
    "blocks": 32,
    "output": 32,
    "stop, its pace": 104,
    "blocks of a first turn that were known": 32,
    "stop, output": 128,
    "pace, spread": 288,
    "blocks, output": 324,
    "new blocks, output": 324,
    "turn, blocks": 144,
    "blocks, new blocks": 324,
    "turn, output": 144,
    "stop, gap": 64,
    "turn, share that was known": 27,
}
"""Buckets of each feature, in the order of `describe`."""

FEATURES = len(SIZES)
BUCKETS = sum(SIZES.values())
STARTS = np.concatenate(([0], np.cumsum(list(SIZES.values()))[:-1])).astype(np.int64)

TIP = np.dtype(
    [
        ("time", np.int64),  # of the access
        ("eta", np.int64),  # median time of the return by a hint, -1 for none
        ("told", np.int64),  # time of that hint
        ("slot", np.int32),  # its deepest block so far
        ("low", np.int32),  # its deepest block that may be resident
        ("blocks", np.int32),  # blocks of the whole request
        ("known", np.int32),  # leading blocks that were known at its arrival
        ("seen", np.int32),  # blocks named so far, including those forgotten since
        ("turn", np.int32),
        ("output", np.int32),  # tokens; -1: not complete
        ("bin", np.int32),  # age bin of its index; -1: none
        ("stop", np.int8),
        ("done", np.int8),  # 1: the chain has returned
        ("torn", np.int8),  # 1: blocks of it came back not behind those before, or before others
    ]
)

# Columns of the traits; a pace for each reason to stop comes last.
GAP, PACE, SPREAD, INDEX, SIGMA, STOP_PACE = 0, 1, 2, 3, 4, 5
TRAITS = 9
NO_PACE = -1e9  # also: no gap, at a first turn


@inner
def octave(x: int) -> int:
    """Return 0 for x < 1, else 1 + floor(log2 x), at most 17."""
    n = 0
    while x >= 1 and n < 17:
        x >>= 1
        n += 1
    return n


@inner
def half_octave(x: int) -> int:
    """Return 0 for x < 1, else 1 + floor(2 log2 x), at most 31."""
    n = 0
    top = x
    while top > 1:
        top >>= 1
        n += 1
    if x < 1:
        return 0
    return min(31, 1 + 2 * n + (x >= 1.4142135623730951 * (1 << n)))


@inner
def clip(x: float, low: int, high: int) -> int:
    """Return x rounded down, within limits; NaN is the lower one."""
    if not x > low:
        return low
    return high if x >= high else int(np.floor(x))


@inner
def pace_of(x: float, fine: float, most: int) -> int:
    """Return 0 for no pace yet, else a bucket of log2 seconds, from 1/16 s on."""
    return 0 if x == NO_PACE else 1 + clip((x + 4.0) * fine, 0, most - 1)


@helper
def describe(tips: Array, traits: Array, rows: Array, t: int) -> None:
    """Write the row of the active weight of each feature of tip `t`."""
    tip = tips[t]
    n, g, stop = tip.blocks, tip.known, tip.stop & 3
    new, out = max(n - g, 0) + 1, tip.output + 1
    turn = min(tip.turn, 7)
    gap = 0
    if traits[t, GAP] != NO_PACE:
        gap = 2 + clip((traits[t, GAP] + 1.0) / 0.75, -1, 13)
    length, output = half_octave(n), half_octave(out)
    n1, o1, w1 = octave(n), octave(out), octave(new)
    row = rows[t]
    row[0] = stop * 8 + turn
    row[1] = length
    row[2] = output
    row[3] = stop * 26 + pace_of(traits[t, STOP_PACE + stop], 1.5, 25)
    row[4] = half_octave(g + 1) if turn == 0 else 0
    row[5] = stop * 32 + output
    row[6] = pace_of(traits[t, PACE], 1.0, 17) * 16 + clip(4.0 * traits[t, SPREAD], 0, 15)
    row[7] = n1 * 18 + o1
    row[8] = w1 * 18 + o1
    row[9] = turn * 18 + n1
    row[10] = n1 * 18 + w1
    row[11] = turn * 18 + o1
    row[12] = stop * 16 + gap
    row[13] = 9 * min(turn, 2) + 8 * min(g, n) // max(n, 1)
    for f in range(FEATURES):
        row[f] += STARTS[f]


# Time of return: a logistic hazard per age bin, learned online, and the index made of it.
#
# *Hazard.* Age, the time since a chain was used, is cut into bins that grow by a factor of 1.37.
# The hazard of bin i is the probability that a chain that has not returned before the bin does so
# within it:
#
#     logit hazard_i = base_i + sum over features f of weight[row_f](age of bin i).
#
# A weight is a function of age: a line through its values at nine *knots*, over the logarithm of
# age. So neighbouring bins learn from each other, and "long output" may mean late without meaning
# never. Every return and every bin survived is one step of AdaGrad (Duchi et al., JMLR 2011).
#
# *Index.* A chain is worth its room as long as the best chance of a return per second of room is
# high (Gittins, JRSS B 1979): the largest, over all horizons h, of
#
#     P(return within h) / E[time until the return or h, whichever is first],
#
# from its present age on. The unit is 1/s. It rises as well as falls with age: a chain that waits
# for a ten-second tool is worth more after eight seconds than after one.
#
# All arithmetic is + - * / and comparisons, which IEEE 754 rounds alike on every machine.

BINS = 40
FIRST_S, RATIO = 0.5, 1.37
EDGES = np.array([0.0] + [FIRST_S * RATIO**i for i in range(BINS - 1)])
EDGES_NS = np.round(EDGES * 1e9).astype(np.int64)
WIDTHS = np.append(np.diff(EDGES), EDGES[-1] * (RATIO - 1.0))
KNOTS_S = (1.0, 3.0, 6.0, 12.0, 24.0, 48.0, 100.0, 400.0, 1600.0)
KNOTS = len(KNOTS_S)


def _between_knots() -> tuple[Array, Array]:
    """Return for each bin the knot before its middle, and the share of the way to the next."""
    middles = np.sqrt(np.maximum(EDGES, FIRST_S / 2) * (EDGES + WIDTHS))
    at = np.interp(np.log(middles), np.log(KNOTS_S), np.arange(KNOTS, dtype=float))
    before = np.minimum(at.astype(np.int64), KNOTS - 2)
    return before, np.round((at - before) * 4096) / 4096  # rounded: no libm in any weight


BEFORE, BEYOND = _between_knots()

# A model is one row: (value, sum of squared steps) of each weight and base, then the reach. There
# may be two, one learned here and one loaded: both learn on, and the better one decides.
RATE, BASE_RATE, EASE = 0.14, 0.3, 0.5
FIRST_BASE = -2.0
WEIGHT_LIMIT, BASE_LIMIT, LOGIT_LIMIT = 8.0, 16.0, 18.0
BASES = 2 * BUCKETS * KNOTS
REACH = BASES + 2 * BINS
REACHES = 8
LOSS = REACH + REACHES  # bits lost by its predictions, halving every 700 events or so
PROOF = 6.0  # bits by which a loaded model must be better
MODEL_SIZE = LOSS + 1
FORGET = 0.999

LN2 = 0.6931471805599453
EXP = tuple(1.0 / math.factorial(k) for k in range(10, -1, -1))
MOST_INDEX = 1e6
CERTAIN = 1.0 - 1e-9  # allows for rounding of a ratio


@inner
def decay(x: float) -> float:
    """Return e^-x for x >= 0, to 1e-12, from correctly rounded operations only."""
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
    """Return 1 / (1 + e^-x), never closer to 0 or 1 than 1.5e-8; of NaN, 1.5e-8."""
    if not x > -LOGIT_LIMIT:
        x = -LOGIT_LIMIT
    if x >= 0.0:
        return float(1.0 / (1.0 + decay(min(x, LOGIT_LIMIT))))
    e = decay(-x)
    return float(e / (1.0 + e))


@inner
def bound(x: float, limit: float) -> float:
    """Return x clipped to +-limit."""
    return min(max(x, -limit), limit)


@helper
def bin_of(age_ns: int) -> int:
    """Return the bin of an age."""
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
    """Return the hazard of bin `i` for a chain with the features `row`."""
    k, u = BEFORE[i], BEYOND[i]
    if u == 1.0:  # beyond the last knot: a third of all calls
        return float(logistic(model[BASES + 2 * i] + said_at(model, row, k + 1)))
    low = high = 0.0
    for f in range(FEATURES):
        at = 2 * (np.int64(row[f]) * KNOTS + k)
        low += model[at]
        high += model[at + 2]
    return float(logistic(model[BASES + 2 * i] + (1.0 - u) * low + u * high))


@inner
def said_at(model: Array, row: Array, k: int) -> float:
    """Return the sum of the features' weights at a knot."""
    total = 0.0
    for f in range(FEATURES):
        total += model[2 * (np.int64(row[f]) * KNOTS + k)]
    return total


@inner
def nudge(model: Array, at: int, step: float, rate: float, ease: float, limit: float) -> None:
    """Apply one AdaGrad step to the weight at `at`."""
    model[at + 1] += step * step
    model[at] = bound(model[at] + rate * step / np.sqrt(model[at + 1] + ease), limit)


@inner
def learn(model: Array, row: Array, i: int, returned: int) -> None:
    """Train one model: a chain returned in bin `i` (1), or did not (0)."""
    h = hazard(model, row, i)
    model[LOSS] = FORGET * model[LOSS] - compiled.log2(h if returned == 1 else 1.0 - h)
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


@helper
def teach(models: Array, row: Array, i: int, returned: int) -> None:
    """Train all models: a chain returned in bin `i` (1), or did not (0)."""
    for m in range(len(models)):
        learn(models[m], row, i, returned)


@inner
def speaker(models: Array) -> int:
    """Return the deciding model: 1, the loaded one, while its recent loss is clearly lower."""
    return 1 if len(models) > 1 and models[1, LOSS] + PROOF <= models[0, LOSS] else 0


@helper
def teach_reach(models: Array, short: int) -> None:
    """Record that a chain returned but for its last `short` blocks, with a memory of about 1000."""
    for m in range(len(models)):
        for i in range(REACHES):
            models[m, REACH + i] *= FORGET
        models[m, REACH + min(short, REACHES - 1)] += 1.0


@helper
def reach(models: Array, short: int) -> float:
    """Return the share of returning chains that use the block `short` before their end."""
    m, total, used = speaker(models), 0.0, 0.0
    for i in range(REACHES):
        total += models[m, REACH + i]
        if i <= short:
            used += models[m, REACH + i]
    return used / total


@helper
def index(models: Array, row: Array, i: int) -> float:
    """Return the Gittins index at the beginning of bin `i`, in 1/s.

    The loop ends as soon as no later horizon can be better: the remaining gain costs no less time
    than if all of it came evenly within the next bin, since none of those after it is shorter.
    """
    model = models[speaker(models)]
    alive, gained, spent, best = 1.0, 0.0, 0.0, 0.0
    at, low, high = -1, 0.0, 0.0  # the last two knots, and the features' sums there
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


# Index of a chain with a return announced by the application: lognormal, about an eta.

STEPS = 24
LEAST_SIGMA, MOST_SIGMA = 0.05, 5.0
HOPELESS = 1e-4
ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


@inner
def beyond(z: float) -> float:
    """Return P(N > z) of a standard normal N, to 1e-7 (Abramowitz and Stegun, 7.1.26)."""
    x = abs(z) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * x)
    e = 0.0
    for c in ERFC:
        e = e * t + c
    tail = 0.5 * e * t * decay(x * x)
    return float(tail if z >= 0.0 else 1.0 - tail)


@inner
def later(t_s: float, eta_s: float, sigma: float) -> float:
    """Return P(the return comes after t_s)."""
    return beyond(LN2 * compiled.log2(t_s / eta_s) / sigma) if t_s > 0.0 else 1.0


@helper
def hinted_index(eta_s: float, sigma: float, age_s: float) -> float:
    """Return the Gittins index `age_s` after a hint; -1 once the hint has proved wrong.

    Horizons grow by 1.2 from a tenth of the typical time.
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


# Chains and their ends: the owner of a block, the returns of a chain, and the worth of a block.
#
# Every request leaves a *tip*, the record of its chain's end. A block belongs to the tip of the
# last request that used it, so the blocks of one tip are a stretch of one chain, and at most one
# of them is a leaf where parents are known. Tips are stored in the order of their times: they reach
# a bin edge in that order too, and one counter per edge finds them without a search.
#
# A tip *returns* when a request comes with known blocks that end at the tip or just before it (the
# last block of a chain is often a partial one, which is not used again). It trains the model until
# then, also when all its blocks have been evicted.

OWN = np.dtype(
    [
        ("tip", np.int32),  # tip that owns the block, -1: not known
        ("at", np.int32),  # index of the block in that chain
        ("up", np.int32),  # the block before it there, -1 for the first
        ("next", np.int32),  # the block after it when last used, -1: none yet
        ("forks", np.int32),  # changes of the next block so far
        ("pause", np.float32),  # moving average of the seconds between forks
        ("forked", np.int64),  # time of the last fork, or of the first use
    ]
)

# Entries of the vector of counters: number of tips; time when the next of them reaches an edge;
# then, for each edge, how many have passed it and when the next one reaches it.
TIPS, NEXT, PASSED = 0, 1, 2
EDGE_COUNT = BINS - 1
REACHED = PASSED + EDGE_COUNT
COUNTERS = REACHED + EDGE_COUNT

SHORT = 1  # blocks before a tip at which a return may end
BRANCHES = 4  # forks from which on a block counts as shared
KEY_SCALE = 2.0**-100


@inner
def key_of(value: float) -> int:
    """Return an index as a key in [2^61, 2^62), in the same order; later than any clock."""
    scaled = np.float64(min(max(value * KEY_SCALE, 2.0**-511), 1.0))
    return int(scaled.view(np.int64))


@inner
def value_of(key: int) -> float:
    """Return the index that a key stands for; the smallest stands for 0."""
    value = np.int64(key).view(np.float64)
    return value / KEY_SCALE if value > 2.0**-511 else 0.0


@helper
def index_of(tips: Array, traits: Array, rows: Array, model: Array, t: int, now: int) -> float:
    """Return the index of a tip, computed once per age bin, as of the bin's beginning."""
    tip = tips[t]
    b = bin_of(now - tip.time)
    if b == tip.bin:
        return float(traits[t, INDEX])
    value = -1.0
    if tip.eta >= 0:
        age = max(tip.time + EDGES_NS[b] - tip.told, 0)
        value = hinted_index(tip.eta * 1e-9, traits[t, SIGMA], age * 1e-9)
    if value < 0.0:
        value = index(model, rows[t], b)
    tip.bin = b
    traits[t, INDEX] = value
    return value


@helper
def worth_of(learner: tuple[Array, ...], s: int, now: int) -> float:
    """Return a block's worth: its tip's index, as far as returns reach it, plus its forks'."""
    own, tips, traits, rows, model, _counters = learner
    mine = own[s]
    t = mine.tip
    value = 0.0
    if t >= 0:
        short = tips[t].blocks - 1 - mine.at
        value = index_of(tips, traits, rows, model, t, now)
        if short < REACHES:
            value *= reach(model, max(short, 0))
    if mine.forks >= BRANCHES:
        value += 1.0 / (max(mine.pause, 1e-3) + (now - mine.forked) * 1e-9)
    return value


@inner
def peek(learner: tuple[Array, ...], s: int, now: int) -> float:
    """Return the worth of a block and change no state."""
    tips, traits, t = learner[1], learner[2], learner[0][s].tip
    seen, known = tips[t].bin, traits[t, INDEX]
    value = worth_of(learner, s, now)
    tips[t].bin, traits[t, INDEX] = seen, known
    return value


@helper
def rekey(order: tuple[Array, ...], learner: tuple[Array, ...], s: int, now: int) -> None:
    """Update the place of a resident leaf among the leaves, while this order decides."""
    nodes, heaps, state = order
    if state[compiled.MODE] != 0:  # another key is in use; see `flowkv.policy.hedge`
        return
    nodes[s].key = key_of(worth_of(learner, s, now))
    i, row = nodes[s].place, nodes[s].row
    if i >= 0:
        compiled.put(heaps[row], nodes["place"], state[row], i, compiled.words(nodes, s, row))


@inner
def give_up(order: tuple[Array, ...], learner: tuple[Array, ...], s: int, now: int) -> None:
    """End the residence of a slot, and update the parent that becomes a leaf by that.

    The parent's key is set before, so that it moves once.
    """
    nodes, heaps, state = order
    p = compiled.parent_of(nodes, s)
    if p >= 0 and nodes[p].kids == 1:
        rekey(order, learner, p, now)
    compiled.drop(nodes, heaps, state, s)


@inner
def take_next(order: tuple[Array, ...], learner: tuple[Array, ...], now: int) -> int:
    """Evict the next leaf, and expire what only this child kept alive."""
    nodes, heaps, state = order
    s = heaps[compiled.choose(heaps, state, now), 0, 1] & compiled.SLOT_MASK
    compiled.fold(state, compiled.DIGEST, s)
    give_up(order, learner, s, now)
    if state[compiled.DUES] > 0 and heaps[compiled.DUES, 0, 0] <= now:
        compiled.expire(nodes, heaps, state, now)
    return int(s)


@inner
def rekey_tip(order: tuple[Array, ...], learner: tuple[Array, ...], t: int, now: int) -> None:
    """Update the keys of a tip's leaves: one where parents are known, else any number."""
    nodes = order[0]
    own, tips = learner[0], learner[1]
    s, found = tips[t].low, False
    while s >= 0 and own[s].tip == t:
        if nodes[s].birth != 0:
            if not found:
                tips[t].low, found = s, True
            if nodes[s].kids == 0:
                rekey(order, learner, s, now)
            p = nodes[s].parent
            if p >= 0 and nodes[p].birth == nodes[s].bond and tips[t].torn == 0:
                break
        up = own[s].up
        if up >= 0 and own[up].at >= own[s].at:
            break
        s = up
    if not found:
        tips[t].low = -1  # all have gone: `follow` or `join` sets it again


@inner
def await_edge(tips: Array, counters: Array, i: int) -> None:
    """Set the time when the next tip reaches edge `i`."""
    c = counters[PASSED + i]
    counters[REACHED + i] = tips[c].time + EDGES_NS[i + 1] if c < counters[TIPS] else compiled.NEVER


@inner
def await_next(counters: Array) -> int:
    """Set the time when the next tip reaches any edge; return that edge."""
    first = 0
    for i in range(1, EDGE_COUNT):
        if counters[REACHED + i] < counters[REACHED + first]:
            first = i
    counters[NEXT] = counters[REACHED + first]
    return first


@helper
def await_all(tips: Array, counters: Array) -> None:
    """Set the times when the next tips reach all edges."""
    for i in range(EDGE_COUNT):
        await_edge(tips, counters, i)
    await_next(counters)


@helper
def advance(order: tuple[Array, ...], learner: tuple[Array, ...], now: int) -> None:
    """Train on the tips that reach an edge by `now`, and update their keys, in order of time.

    So the model at a time does not depend on the calls in between.
    """
    _own, tips, _traits, rows, model, counters = learner
    while counters[NEXT] <= now:
        i = await_next(counters)
        if counters[NEXT] > now:
            break
        c = counters[PASSED + i]
        if tips[c].done == 0:
            teach(model, rows[c], i, 0)
        rekey_tip(order, learner, c, counters[NEXT])
        counters[PASSED + i] = c + 1
        await_edge(tips, counters, i)


@inner
def averaged(old: float, new: float, share: float) -> float:
    """Return a moving average that starts with its first value."""
    return new if old == NO_PACE else old + share * (new - old)


@inner
def succeed(tips: Array, traits: Array, t: int, q: int) -> None:
    """Set the history of tip `t`, the turn after `q`, or a first turn if that is -1."""
    tips[t].turn = 0
    traits[t, GAP] = traits[t, PACE] = NO_PACE
    traits[t, SPREAD] = 1.0
    for k in range(4):
        traits[t, STOP_PACE + k] = NO_PACE
    if q < 0:
        return
    gap = compiled.log2(max((tips[t].time - tips[q].time) * 1e-9, 0.1))
    tips[t].turn = tips[q].turn + 1
    traits[t, GAP] = gap
    traits[t, PACE] = averaged(traits[q, PACE], gap, 0.3)
    if traits[q, PACE] != NO_PACE:
        off = abs(gap - traits[q, PACE])
        traits[t, SPREAD] = traits[q, SPREAD] + 0.3 * (off - traits[q, SPREAD])
    for k in range(4):
        traits[t, STOP_PACE + k] = traits[q, STOP_PACE + k]
    k = STOP_PACE + (tips[q].stop & 3)
    traits[t, k] = averaged(traits[q, k], gap, 0.4)


@inner
def judge(learner: tuple[Array, ...], t: int) -> None:
    """Describe a tip again, and drop its cached index."""
    _own, tips, traits, rows, _model, _counters = learner
    describe(tips, traits, rows, t)
    tips[t].bin = -1


@helper
def begin(learner: tuple[Array, ...], now: int, q: int, known: int, blocks: int) -> int:
    """Add a tip, the turn after `q` (-1: a first one), and return it. There must be room."""
    _own, tips, traits, _rows, _model, counters = learner
    t = counters[TIPS]
    counters[TIPS] += 1
    tip = tips[t]
    tip.time = now
    tip.eta = tip.slot = tip.low = tip.output = -1
    tip.blocks, tip.known, tip.seen = blocks, known, 0
    tip.stop = tip.done = tip.torn = 0
    succeed(tips, traits, t, q)
    judge(learner, t)
    for i in range(EDGE_COUNT):
        if counters[PASSED + i] == t:
            await_edge(tips, counters, i)
    counters[NEXT] = min(counters[NEXT], now + EDGES_NS[1])
    return int(t)


@inner
def follow(own: Array, tips: Array, t: int, s: int, now: int) -> None:
    """Append block `s` to the chain of tip `t`."""
    before = tips[t].slot
    mine = own[s]
    if mine.tip < 0:
        mine.next, mine.forks, mine.pause, mine.forked = -1, 0, -1.0, now
    if before >= 0:
        above = own[before]
        if above.next >= 0 and above.next != s:
            pause = (now - above.forked) * 1e-9
            above.pause = pause if above.forks == 0 else 0.7 * above.pause + 0.3 * pause
            above.forks += 1
            above.forked = now
        above.next = s
    mine.tip, mine.at, mine.up = t, own[before].at + 1 if before >= 0 else 0, before
    tips[t].seen += 1
    tips[t].slot = tips[t].low = s


@inner
def find_return(learner: tuple[Array, ...], slots: Array, now: int) -> tuple[int, int]:
    """Return how many leading blocks are known, and the returning tip or -1; train on that."""
    own, tips, _traits, rows, model, _counters = learner
    known = 0
    while known < len(slots) and own[slots[known]].tip >= 0:
        known += 1
    if known == 0:
        return 0, -1
    q = own[slots[known - 1]].tip
    short = max(tips[q].blocks - known, 0)
    if short > SHORT or (short > 0 and known == 1):
        return known, -1
    if tips[q].done == 0:
        tips[q].done = 1
        teach(model, rows[q], bin_of(now - tips[q].time), 1)
        teach_reach(model, short)
    return known, int(q)


# Calls of the `Policy` protocol that a learned order answers otherwise than a static one.
#
# `order` holds the arrays of the order: nodes, heaps, state. `learner` holds the learned arrays:
# own (per slot), tips, traits and rows (per tip), models, counters.


@kernel
def visit(
    order: tuple[Array, ...], learner: tuple[Array, ...], slots: Array, now: int, blocks: int
) -> int:
    """Record a request for these blocks, of `blocks` in all; return its tip, -1 without room."""
    nodes, heaps, state = order
    own, tips, _traits, _rows, _model, counters = learner
    if compiled.room_for(len(nodes), slots) != 0 or counters[TIPS] >= len(tips):
        return -1
    compiled.access(nodes, heaps, state, slots, now)
    now = state[compiled.CLOCK]
    advance(order, learner, now)
    known, q = find_return(learner, slots, now)
    t = begin(learner, now, q, known, max(blocks, len(slots)))
    for s in slots:
        follow(own, tips, t, s, now)
    rekey_path(order, learner, slots)
    return int(t)


@helper
def rekey_path(order: tuple[Array, ...], learner: tuple[Array, ...], slots: Array) -> None:
    """Update the keys of the resident leaves among these slots, as of now."""
    nodes, now = order[0], order[2][compiled.CLOCK]
    for s in slots:
        if nodes[s].birth != 0 and nodes[s].kids == 0:
            rekey(order, learner, s, now)


@kernel
def join(
    order: tuple[Array, ...], learner: tuple[Array, ...], slots: Array, parents: Array
) -> None:
    """Add blocks that became resident; unknown ones continue a chain. There must be room for each.

    A block continues the tip that ends at its parent, at the block before it, or, for the first one
    without a parent, the latest tip while blocks of its request are missing; else it begins a tip.
    The clock has advanced before: no edge judged a block that was absent.
    """
    own, tips, _traits, _rows, _model, counters = learner
    now = order[2][compiled.CLOCK]
    for i in range(len(slots)):  # blocks that come back
        s = slots[i]
        if own[s].tip >= 0:
            mine = tips[own[s].tip]
            low = mine.low  # of another chain, if a request has taken it since
            if low < 0 or own[low].tip != own[s].tip or own[low].at < own[s].at:
                mine.low = low = s
            if parents[i] != own[s].up or (s != low and order[0][s].kids == 0):
                mine.torn = 1
    latest = counters[TIPS] - 1
    for i in range(len(slots)):
        s = slots[i]
        if own[s].tip >= 0:
            continue
        known = 0 <= parents[i] < len(own)  # an unknown parent is not resident
        above = parents[i] if known else (slots[i - 1] if i > 0 else -1)
        t = -1
        if above >= 0:
            t = own[above].tip
            if t >= 0 and tips[t].slot != above:
                t = begin(learner, now, -1, own[above].at + 1, own[above].at + 1)
                tips[t].seen, tips[t].slot = own[above].at + 1, above
        elif latest >= 0 and tips[latest].seen < tips[latest].blocks:
            t = latest
        if t < 0:
            t = begin(learner, now, -1, 0, 0)
        follow(own, tips, t, s, now)
        if own[s].at >= tips[t].blocks:
            tips[t].blocks = own[s].at + 1
            judge(learner, t)
    rekey_path(order, learner, slots)


@kernel
def tick(order: tuple[Array, ...], learner: tuple[Array, ...], now: int) -> int:
    """Run the order's `tick`, and advance the tips as well."""
    nodes, heaps, state = order
    advance(order, learner, compiled.expire(nodes, heaps, state, now))
    return int(state[compiled.EXPIRED])


@kernel
def insert(
    order: tuple[Array, ...],
    learner: tuple[Array, ...],
    slots: Array,
    parents: Array,
    lease: Array,
    said: tuple[int, int, int],
) -> bool:
    """Run the order's `insert`, then `join` if there is room for tips; return whether there was.

    Expiry and edges up to the present come first.
    """
    tick(order, learner, said[0])
    nodes, heaps, state = order
    compiled.insert(nodes, heaps, state, slots, parents, lease, said)
    fits = learner[5][TIPS] + len(slots) <= len(learner[1])
    if fits:
        join(order, learner, slots, parents)
    return bool(fits)


@kernel
def finish(
    order: tuple[Array, ...], learner: tuple[Array, ...], now: int, t: int, stop: int, out: int
) -> None:
    """Record the end of the request of tip `t`."""
    tick(order, learner, now)
    tips = learner[1]
    tips[t].stop = stop
    tips[t].output = out
    judge(learner, t)
    rekey_tip(order, learner, t, order[2][compiled.CLOCK])


@kernel
def announce(
    order: tuple[Array, ...], learner: tuple[Array, ...], slots: Array, eta: int, sigma: float
) -> None:
    """Hint that the tip of the last of these blocks returns in about `eta`, if it is known."""
    own, tips, traits = learner[0], learner[1], learner[2]
    nodes, heaps, state = order
    now = state[compiled.CLOCK]
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].marks & compiled.DEAD:
            nodes[s].marks &= ~compiled.DEAD
            compiled.reorder(nodes, heaps, state, s)
    s = slots[len(slots) - 1]
    if s < 0 or s >= len(own) or own[s].tip < 0:
        return
    t = own[s].tip
    tips[t].eta, tips[t].told, tips[t].bin = eta, now, -1
    traits[t, SIGMA] = sigma
    rekey_tip(order, learner, t, now)


@kernel
def remove(order: tuple[Array, ...], learner: tuple[Array, ...], slots: Array) -> None:
    """Drop resident slots; update a parent that becomes a leaf."""
    nodes, state = order[0], order[2]
    for s in slots:
        if 0 <= s < len(nodes) and nodes[s].birth != 0:
            give_up(order, learner, s, state[compiled.CLOCK])


@kernel
def forget(order: tuple[Array, ...], learner: tuple[Array, ...], slots: Array) -> None:
    """Forget slots that are not resident, and close the gaps in their chains."""
    nodes, own, tips = order[0], learner[0], learner[1]
    for s in slots[::-1]:  # root to leaf, so that each is the end of its chain by then
        if 0 <= s < len(own) and nodes[s].birth == 0 and own[s].tip >= 0:
            tip, up = tips[own[s].tip], own[s].up
            x = tip.slot
            while x != s and x >= 0 and own[x].up != s:
                x = own[x].up if own[x].up < 0 or own[own[x].up].at < own[x].at else -1
            if x == s:
                tip.slot = up
            elif x >= 0:
                own[x].up = up
            if tip.low == s:
                tip.low = up
            own[s].tip = own[s].up = -1


@kernel
def evict(
    order: tuple[Array, ...], learner: tuple[Array, ...], protected: Array, victims: Array, now: int
) -> bool:
    """Run the order's `evict`; update parents that become leaves."""
    nodes, heaps, state = order
    now = compiled.expire(nodes, heaps, state, now)
    advance(order, learner, now)
    compiled.change_pins(nodes, heaps, state, protected, 1)
    enough = state[compiled.COUNT] - state[compiled.BLOCKED] >= len(victims)
    compiled.fold(state, compiled.DIGEST, len(victims) if enough else -1)
    if enough:
        for i in range(len(victims)):
            victims[i] = take_next(order, learner, now)
    compiled.change_pins(nodes, heaps, state, protected, -1)
    return bool(enough)


@kernel
def compact(learner: tuple[Array, ...], nodes: Array, keep: Array, ghosts: int) -> int:
    """Drop needless tips; `keep[t]` becomes a tip's new number, -1 if dropped.

    Tips with a resident block stay, and of the others that have not returned the latest ones, at
    most `ghosts` and four times as many as there are of the first kind.
    """
    own, tips, traits, rows, _model, counters = learner
    n = counters[TIPS]
    keep[:n] = 0
    live = 0
    for s in range(len(own)):
        t = own[s].tip
        if t >= 0 and nodes[s].birth != 0 and keep[t] == 0:
            keep[t] = 1
            live += 1
    left = ghosts + 4 * live
    for t in range(n - 1, -1, -1):
        if keep[t] == 0 and left > 0 and tips[t].done == 0:
            keep[t] = 1
            left -= 1
    kept = 0
    for t in range(n):
        if keep[t] == 0:
            keep[t] = -1
            continue
        if kept != t:
            tips[kept] = tips[t]
            for k in range(traits.shape[1]):
                traits[kept, k] = traits[t, k]
            for k in range(rows.shape[1]):
                rows[kept, k] = rows[t, k]
        keep[t] = kept
        kept += 1
    for i in range(EDGE_COUNT):
        t = counters[PASSED + i]
        while t < n and keep[t] < 0:
            t += 1
        counters[PASSED + i] = keep[t] if t < n else kept
    for s in range(len(own)):
        if own[s].tip >= 0:
            own[s].tip = keep[own[s].tip]
    counters[TIPS] = kept
    await_all(tips, counters)
    return int(kept)


@kernel
def worth(order: tuple[Array, ...], learner: tuple[Array, ...], s: int) -> float:
    """Return the worth of a block as of the last call, in 1/s; classes lie further apart."""
    nodes, _heaps, state = order
    leaf = nodes[s].kids == 0
    value = value_of(nodes[s].key) if leaf else peek(learner, s, state[compiled.CLOCK])
    here = compiled.present_class(nodes, state, s)
    return float(
        (here - compiled.FIRST_CLASS - compiled.DEFAULT_RANK) * compiled.CLASS_WORTH + value
    )


# Answers of a learned order to a prefetcher: chains worth bringing back, and their victims.

ASKED = np.dtype(
    [
        ("tip", np.int64),  # the tip that was judged: a number made of its history
        ("bin", np.int64),
        ("worth", np.float64),
    ]
)
"""By slot: worth of the end of a chain, as last computed."""


LEAST_KEY = 1 << 61  # least key that stands for a worth; see `key_of`


@inner
def weakest_worth(order: tuple[Array, ...], learner: tuple[Array, ...], s: int, now: int) -> float:
    """Return the worth of the leaf `s`, also while the leaves are sorted by another key."""
    key = order[0][s].key
    if key >= LEAST_KEY:
        return float(value_of(key))
    t = learner[0][s].tip
    if t < 0:
        return 0.0
    return float(peek(learner, s, now))


@inner
def asked_worth(learner: tuple[Array, ...], asked: Array, t: int, s: int, now: int) -> float:
    """Return the worth of the end `s` of tip `t`, cached per age bin; restores the tip's state."""
    tip, mine = learner[1][t], asked[s]
    name = tip.time * 4 + tip.stop + (tip.output << 20) + tip.blocks
    if tip.eta >= 0:
        name += tip.told * 3 + tip.eta
    b = bin_of(now - tip.time)
    if mine.tip != name or mine.bin != b:
        mine.worth = peek(learner, s, now)
        mine.tip, mine.bin = name, b
    return float(mine.worth)


@kernel
def wanted(
    order: tuple[Array, ...],
    learner: tuple[Array, ...],
    asked: Array,
    slots: Array,
    rates: Array,
    now: int,
) -> int:
    """Fill the ends of absent chains worth more than the next victim, best first.

    `asked` has a record for each slot, `slots` room for one at least. Ties: the older tip first.
    """
    nodes, heaps, state = order
    own, tips, counters = learner[0], learner[1], learner[5]
    now = compiled.expire(nodes, heaps, state, now)
    advance(order, learner, now)
    least, n = 0.0, 0
    if state[compiled.COUNT] > state[compiled.BLOCKED]:
        first = heaps[compiled.choose(heaps, state, now), 0, 1] & compiled.SLOT_MASK
        least = weakest_worth(order, learner, first, now)
    for t in range(counters[TIPS]):
        s = tips[t].slot
        if tips[t].done != 0 or s < 0 or own[s].tip != t or nodes[s].birth != 0:
            continue
        if nodes[s].marks & compiled.DEAD:
            continue
        value = asked_worth(learner, asked, t, s, now)
        if value <= least or (n == len(slots) and value <= rates[n - 1]):
            continue
        n = min(n + 1, len(slots))
        i = n - 1
        while i > 0 and rates[i - 1] < value:
            rates[i], slots[i] = rates[i - 1], slots[i - 1]
            i -= 1
        rates[i], slots[i] = value, s
    return int(n)


@kernel
def displace(
    order: tuple[Array, ...],
    learner: tuple[Array, ...],
    protected: Array,
    victims: Array,
    now: int,
    rate: float,
) -> int:
    """Evict as `evict` does, while the next victim is worth less than `rate`; return how many."""
    nodes, heaps, state = order
    now = compiled.expire(nodes, heaps, state, now)
    advance(order, learner, now)
    compiled.change_pins(nodes, heaps, state, protected, 1)
    most, found = min(state[compiled.COUNT] - state[compiled.BLOCKED], len(victims)), 0
    while found < most:
        s = heaps[compiled.choose(heaps, state, now), 0, 1] & compiled.SLOT_MASK
        where = compiled.class_of(nodes, s)
        if where == compiled.QUEUED_CLASS:
            break
        if where > compiled.DEAD_CLASS and weakest_worth(order, learner, s, now) >= rate:
            break
        victims[found] = take_next(order, learner, now)
        found += 1
    compiled.change_pins(nodes, heaps, state, protected, -1)
    return int(found)
