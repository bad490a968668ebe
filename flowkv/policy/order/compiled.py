"""How the policies' inner loops are compiled, and the two things all of them do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.options import DefaultOptions
from numpy.typing import NDArray

Array = NDArray[Any]

# Counting references to the arrays would cost five times the work itself. Nothing compiled here
# makes or returns an array, so numba is asked to leave it out, where it knows how.
LEAN = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}

ROOM = Path(__file__).parent.parent
SOURCES = sorted((path.stat().st_mtime_ns, path.stat().st_size) for path in ROOM.rglob("*.py"))


def cached(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` whose cache on disk is good for as long as no file of this room changes.

    By itself numba looks at the file of a function only, not at those that it calls into, and
    would go on with code that no longer fits the arrays it is given.
    """
    compiler = njit(cache=True, error_model="numpy", **LEAN, **options)

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = compiler(function)
        file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
        if file is not None:
            file._source_stamp = (file._source_stamp, SOURCES)
        return dispatcher

    return compiled


kernel = cached()
inner = cached(forceinline=True)

SLOT_BITS = 28
SLOT_LIMIT = 1 << SLOT_BITS
SLOT_MASK = SLOT_LIMIT - 1


@inner
def fold(state: Array, where: int, value: int) -> None:
    """Rolls one number into the digest `state[where]` (a round of SplitMix64's finaliser)."""
    x = np.uint64(state[where]) ^ np.uint64(value)
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    state[where] = np.int64(x ^ (x >> np.uint64(31)))


@inner
def room_for(capacity: int, slots: Array) -> int:
    """0 if all slots fit, the capacity that would do, or -1 for a number that is no slot."""
    top = -1
    for s in slots:
        if s < 0 or s >= SLOT_LIMIT:
            return -1
        top = max(top, s)
    return top + 1 if top >= capacity else 0
