"""Devices: an engine's operations begin in order, and each tells when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from flowkv.policy.restore import Op

Clock = Callable[[], float]
"""Seconds since a restore began."""


class Ended(NamedTuple):
    """What became of an op.

    Attributes:
        start_s: When the device began it.
        end_s: When it was done with it.
        ok: Whether it came; only loads may fail.
    """

    start_s: float
    end_s: float
    ok: bool = True


class Mark(Protocol):
    """One op under way."""

    def wait(self) -> Ended:
        """Returns when it has ended. Called once, by one thread."""
        ...


class Device(Protocol):
    """Does ops one after the other, in the order in which they were begun.

    Attributes:
        ahead: Ops that it takes before the first of them has ended. More than one, so that it does
            not stand still between two; one, where `begin` does the work itself.
    """

    ahead: int

    def begin(self, op: Op, clock: Clock) -> Mark:
        """Begins an op behind those begun before. Called by one thread."""
        ...


class Done(NamedTuple):
    """A mark of what had ended when it was made: the device does an op while it is begun."""

    ended: Ended

    def wait(self) -> Ended:
        return self.ended


def stopwatch() -> Clock:
    """A clock that stands at zero now."""
    begun_s = time.perf_counter()
    return lambda: time.perf_counter() - begun_s


def rest(until_s: float, clock: Clock) -> None:
    """Sleeps until then."""
    while (left_s := until_s - clock()) > 0:
        time.sleep(left_s)
