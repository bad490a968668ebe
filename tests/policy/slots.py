"""Slots and ids as policies take them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ids(*values: int) -> NDArray[np.int64]:
    """Return the values as one vector."""
    return np.array(values, np.int64)
