"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(true: Callable[[], object], within_s: float = 60.0) -> None:
    """Return as soon as a condition is true; fail if it is not in time."""
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, "it did not become true in time"
        time.sleep(0.002)
