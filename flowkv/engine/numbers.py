"""Numbers that users pass: whole ones, and any."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flowkv.core.errors import ConfigError


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a number, of Python or numpy; True and False are none."""
    return is_whole(value) or isinstance(value, float | np.floating)


def whole(name: str, value: Any, least: float = -math.inf) -> None:
    """Checks a whole number.

    Raises:
        ConfigError: It is none, or smaller than `least`.
    """
    if not is_whole(value) or value < least:
        bound = f", at least {least}" if least > -math.inf else ""
        raise ConfigError(f"{name}={value!r}", f"Use a whole number{bound}")
