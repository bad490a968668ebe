"""Time that stands still until a test moves it."""

from __future__ import annotations


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
