"""Times, shares and factors in readable form."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """Format a time: "2.5 ms", "1.24 s"."""
    if not math.isfinite(value):
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 0.9995:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def share(value: float) -> str:
    """Format a share as percent: "42%"."""
    return f"{100 * value:.3g}%"


def times(value: float) -> str:
    """Format a factor as a multiple: "3.4x"."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}x" if value >= 20 else f"{value:.1f}x"
