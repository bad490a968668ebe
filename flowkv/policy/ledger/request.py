"""What a request says to a ledger, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import Slots
from flowkv.policy.config import Lease
from flowkv.policy.ledger.places import Move


class Meta(NamedTuple):
    """What a request says about itself and its blocks; every field may be left out.

    Attributes:
        session: See `Visit.session`.
        tokens: Input tokens.
        n_bytes: Bytes of each block that is new; 0 for the ledger's `block_bytes`.
        cost_ns: Time to compute each of them anew; 0 if unknown.
        lease: Lease class of what it brings, or a lease.
        chained: Whether each block is the parent of the next; not so for weights or memo rows,
            of which any one may be used without the others.
    """

    session: int = -1
    tokens: int = 0
    n_bytes: int = 0
    cost_ns: int = 0
    lease: str | Lease = ""
    chained: bool = True


PLAIN = Meta()


class Plan(NamedTuple):
    """What is to be done for a request. The arrays change at the ledger's next call.

    Attributes:
        hits: Leading blocks that can be read.
        slots: i8 [n], of all its blocks.
        sources: i1 [n], the fastest place in which each can be read; -1: nowhere, it is to be
            computed; -2: another request is bringing it.
        kept: Leading blocks that are, or will be, in the first place. Fewer than `n` where the
            request is longer than there is room.
        moves: What goes, in this order, before anything is written to the first place.
    """

    hits: int
    slots: Slots
    sources: NDArray[np.int8]
    kept: int
    moves: Sequence[Move]
