"""The calls of a learned order as Python makes them: one compiled call each, over a `Desk`."""

from __future__ import annotations

import numpy as np

from flowkv.policy.hazard import calls
from flowkv.policy.hazard.features import TIP
from flowkv.policy.hazard.tips import OWN, TIPS
from flowkv.policy.order import insertion
from flowkv.policy.order.compiled import Array, kernel
from flowkv.policy.order.desk import ORDER, opener, order_on

MIND = (
    (OWN, 1),
    (TIP, 1),
    (np.float64, 2),
    (np.int32, 2),
    (np.float64, 2),
    (np.int64, 1),
)
"""Own, tips, traits, rows, models, counters."""

KINDS = ORDER + MIND
mind_on = opener(len(ORDER), MIND)

NOT_DONE, NOT_JOINED = -1, -2


@kernel
def visit(desk: Array, slots: Array, now: int, blocks: int) -> int:
    """See `calls.visit`."""
    return int(calls.visit(order_on(desk), mind_on(desk), slots, now, blocks))


@kernel
def insert(
    desk: Array, slots: Array, parents: Array, lease: Array, said: tuple[int, int, int]
) -> int:
    """See `insertion.insert` and `calls.join`; `NOT_JOINED` if tips lack room."""
    order, mind = order_on(desk), mind_on(desk)
    nodes, terms, heaps, state = order
    room = insertion.insert(nodes, terms, heaps, state, slots, parents, lease, said)
    if room != 0:
        return int(room)
    if mind[5][TIPS] + len(slots) > len(mind[1]):
        return NOT_JOINED
    calls.join(order, mind, slots, parents)
    return 0


@kernel
def finish(desk: Array, now: int, t: int, stop: int, out: int) -> None:
    """See `calls.finish`."""
    order, mind = order_on(desk), mind_on(desk)
    calls.tick(order, mind, now)
    calls.finish(order, mind, t, stop, out)


@kernel
def evict(desk: Array, protected: Array, victims: Array, now: int) -> bool:
    """See `calls.evict`."""
    return bool(calls.evict(order_on(desk), mind_on(desk), protected, victims, now))


@kernel
def tick(desk: Array, now: int) -> int:
    """See `calls.tick`."""
    return int(calls.tick(order_on(desk), mind_on(desk), now))
