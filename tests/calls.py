"""Cost counted in calls instead of seconds: the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage: among millions of nodes that stay, that takes most of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def calls_of(work: Callable[[], object], kinds: Collection[str] = ("call", "c_call")) -> int:
    """Python and C functions that `work` calls, or only those of one of these profile events."""
    count = 0

    def tally(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in kinds

    before = sys.getprofile()
    with uncollected():  # a collection calls its callbacks (Hypothesis has one): not `work`'s calls
        sys.setprofile(tally)
        try:
            work()
        finally:
            sys.setprofile(before)
    return count
