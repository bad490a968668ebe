"""Time as an argument: code that decides by time takes a `Clock`, so that tests can advance it."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Source of nanoseconds that never goes backwards."""

    def now_ns(self) -> int:
        """Return nanoseconds since an arbitrary origin."""
        ...


class ManualClock:
    """Clock that moves only by `advance`."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return the time set by `advance`."""
        return self._now_ns

    def advance(self, *, ns: int = 0, s: float = 0.0) -> None:
        """Move the clock forward by `ns` nanoseconds plus `s` seconds."""
        step = ns + round(s * 1e9)
        if step < 0:
            raise ValueError("a clock does not go backwards. Advance by a positive step.")
        self._now_ns += step
