"""Places that say that they are far away, and damage to those that are files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flowkv.testing import FlakyTier
from tests.inside import Faults, HostTier


class FarTier(HostTier):
    """Memory that says it is far away."""

    kind = "remote"


class _Stuck(FarTier):
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        time.sleep(1.0)
        return [True] * len(keys)


def stuck_tier() -> FlakyTier:
    """A far place that answers nothing, and is asked in vain."""
    return FlakyTier(_Stuck(1 << 20), 1, Faults(latency_s=1e6))


def flip(directory: Path, part: torch.Tensor) -> None:
    """Flip a bit of stored values, wherever they lie."""
    needle = part.view(torch.uint8).numpy().tobytes()[:64]
    for file in directory.iterdir():
        data = bytearray(file.read_bytes())
        at = data.find(needle)
        if at >= 0:
            data[at + 40] ^= 4
            file.write_bytes(data)
            return
    raise AssertionError("the values lie in no file")
