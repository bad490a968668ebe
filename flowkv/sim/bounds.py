"""The two ends of the scale: leaf-first LRU and Belady, once per trace and size."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from flowkv.policy.lru import LRU
from flowkv.policy.optimum import belady
from flowkv.sim.loop import run_through
from flowkv.sim.trace import Trace

_MOST = 256


class Bounds(NamedTuple):
    """Hits of both, request by request.

    Attributes:
        lru: i8 [R], of leaf-first LRU; closure 0.
        opt: i8 [R], of the optimum; closure 1.
    """

    lru: NDArray[np.int64]
    opt: NDArray[np.int64]

    def closure(self, hits: NDArray[np.int64], first: int | None = None) -> float | None:
        """How much of the way from LRU to the optimum; None where they do not differ.

        Args:
            hits: i8 [R] of a policy.
            first: Of so many requests; of all without.
        """
        lru, opt = int(self.lru[:first].sum()), int(self.opt[:first].sum())
        return None if opt == lru else (int(hits[:first].sum()) - lru) / (opt - lru)


_known: OrderedDict[tuple[int, int], Bounds] = OrderedDict()


def digest_of(trace: Trace) -> int:
    """64 bits over what decides about hits: times and chains."""
    digest = xxhash.xxh3_64(trace.times_ns.tobytes())
    digest.update(trace.offsets.tobytes())
    digest.update(trace.blocks.tobytes())
    return digest.intdigest()


def bounds_of(trace: Trace, capacity: int) -> Bounds:
    """Both bounds, computed when they are first asked for."""
    key = (digest_of(trace), capacity)
    if key not in _known:
        opt = belady(trace.offsets, trace.blocks, trace.parents, capacity)
        _known[key] = Bounds(run_through(trace, LRU(), capacity), opt)
        if len(_known) > _MOST:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]
