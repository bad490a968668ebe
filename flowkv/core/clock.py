"""Time as an argument: code that decides by time takes a `Clock`, so that tests can advance it."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Source of nanoseconds that never goes backwards."""

    def now_ns(self) -> int:
        """Return nanoseconds since an arbitrary origin."""
