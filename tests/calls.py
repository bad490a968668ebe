"""Cost counted in calls instead of seconds: the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection


def calls_of(work: Callable[[], object], kinds: Collection[str] = ("call", "c_call")) -> int:
    """Python and C functions that `work` calls, or only those of one of these profile events."""
    count = 0

    def tally(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in kinds

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection calls its callbacks (Hypothesis has one): not what `work` calls
    sys.setprofile(tally)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
