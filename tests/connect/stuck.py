"""A far place that answers late, for tests of the engines' doors."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.inside import HostTier


class Stuck(HostTier):
    """Says that it is far away and has everything, and takes a second to answer."""

    kind = "remote"

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        time.sleep(1.0)
        return [True] * len(keys)
