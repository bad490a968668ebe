"""Files in memory that lose power at every change: any part of what was not synced survives."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from .simulation import BLOCK_BYTES, SimulatedFiles

__all__ = ["BLOCK_BYTES", "MemoryFiles"]


class MemoryFiles(SimulatedFiles):
    """Simulated files whose names all survive; `on_change` is called before every change."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        super().__init__(random.Random(0))
        self.on_change = on_change or (lambda: None)

    @property
    def files(self) -> dict:
        """The files by their names."""
        return self._names

    def copy(self) -> MemoryFiles:
        """The same files, synced and not, as another process finds them."""
        twin = MemoryFiles()
        twin._names = copy.deepcopy(self._names)
        return twin

    def crash(self, rng: random.Random) -> MemoryFiles:
        """What a machine that lost power right now comes back with."""
        after = self.copy()
        after.chance, after._durable_names = rng, dict(after._names)
        after.lose_power()
        return after

    def _happens(self, name: str) -> bool:
        if name in ("write", "names", "sync"):
            self.on_change()
        return super()._happens(name)
