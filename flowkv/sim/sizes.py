"""How many blocks fit, as a number or as a share of a trace's different blocks."""

from __future__ import annotations

import math
from typing import Any

from flowkv.core.errors import ConfigError
from flowkv.sim.trace import Trace


def pages_of(trace: Trace, pages: int | None = None, size: float | str | None = None) -> int:
    """How many blocks fit.

    Args:
        trace: What `size` is a share of.
        pages: That number itself.
        size: Share of the trace's different blocks: 0.01 or "1%".

    Raises:
        ConfigError: If not exactly one of the two is given, or it is out of range.
    """
    if (pages is None) == (size is None):
        raise ConfigError(f"pages={pages!r} and size={size!r}", "Give one of the two")
    if size is not None:
        return max(1, math.floor(share_of(size) * trace.unique + 1e-9))
    if isinstance(pages, bool) or not isinstance(pages, int) or pages < 0:
        raise ConfigError(f"pages={pages!r} is no number of blocks", "Use 0 or more")
    return pages


def share_of(size: Any) -> float:
    """A share, from 0.01 or "1%".

    Raises:
        ConfigError: If it is neither, not positive or not finite.
    """
    try:
        text = size.strip() if isinstance(size, str) else size
        share = (
            float(text[:-1]) / 100 if isinstance(text, str) and text[-1:] == "%" else float(text)
        )
    except (TypeError, ValueError):
        share = math.nan
    if not 0.0 < share < math.inf:
        raise ConfigError(f"{size!r} is no share of a trace's blocks", 'Use 0.01 or "1%"')
    return share
