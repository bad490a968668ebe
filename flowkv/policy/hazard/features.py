"""What the hazard model looks at: a chain's history in fourteen small buckets.

Every feature is one of a few buckets, so that nothing has to be scaled, nothing can be NaN and a
weight says what it means. Lengths go by octaves or half octaves, since what matters is the factor.

`pace` is the moving average of log2 of the gaps between the turns of a conversation, in seconds;
there is one for all gaps and one per reason for which the turn before had ended: a tool answers in
another time than a person. `spread` is the moving average of how far a gap lay from the pace.
"""

from __future__ import annotations

import numpy as np

from flowkv.policy.order.compiled import Array, inner, kernel

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
        ("told", np.int64),  # when that hint came
        ("slot", np.int32),  # its deepest block so far
        ("low", np.int32),  # its deepest block that may be resident
        ("blocks", np.int32),  # of the whole request
        ("known", np.int32),  # leading blocks that were known when it came
        ("seen", np.int32),  # blocks named so far
        ("turn", np.int32),
        ("output", np.int32),  # tokens; -1: not complete
        ("bin", np.int32),  # age bin that its index was computed in; -1: none
        ("stop", np.int8),
        ("done", np.int8),  # 1: it returned
    ]
)

# Columns of the traits; a pace for each reason to stop comes last.
GAP, PACE, SPREAD, INDEX, SIGMA, STOP_PACE = 0, 1, 2, 3, 4, 5
TRAITS = 9
NO_PACE = -1e9  # also: no gap, at a first turn


@inner
def octave(x: int) -> int:
    """0 for x < 1, else 1 + floor(log2 x), at most 17."""
    n = 0
    while x >= 1 and n < 17:
        x >>= 1
        n += 1
    return n


@inner
def half_octave(x: int) -> int:
    """0 for x < 1, else 1 + floor(2 log2 x), at most 31."""
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
    """The whole number below, within limits; NaN is the lower one."""
    if not x > low:
        return low
    return high if x >= high else int(np.floor(x))


@inner
def pace_of(x: float, fine: float, most: int) -> int:
    """0 for no pace yet, else a bucket of log2 seconds, from 1/16 s on."""
    return 0 if x == NO_PACE else 1 + clip((x + 4.0) * fine, 0, most - 1)


@inner
def describe(tips: Array, traits: Array, rows: Array, t: int) -> None:
    """Writes which weights speak for tip `t`: one row number per feature."""
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


@kernel
def describe_all(tips: Array, traits: Array, rows: Array) -> None:
    """`describe`, for all tips."""
    for t in range(len(tips)):
        describe(tips, traits, rows, t)
