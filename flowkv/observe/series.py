"""Values over time in bounded memory, however long that is: the grid gets coarser, nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Series:
    """Named values on a grid of time. Not thread-safe.

    Args:
        most: Cells of the grid. When they are full, neighbours become one.
        cell_s: Width of a cell at first.

    Attributes:
        started_s: Time of the first value.
        cell_s: Width of a cell now.
    """

    def __init__(self, *, most: int = 512, cell_s: float = 0.02) -> None:
        self.started_s, self.cell_s, self._most = math.nan, cell_s, most
        self._sums: dict[str, dict[int, float]] = {}
        self._levels: dict[str, dict[int, tuple[float, float]]] = {}

    def count(self, at_s: float, amounts: Mapping[str, float]) -> None:
        """Adds amounts, which are read as rates."""
        cell = self._cell(at_s)
        for name, amount in amounts.items():
            cells = self._sums.setdefault(name, {})
            cells[cell] = cells.get(cell, 0.0) + amount

    def set(self, at_s: float, levels: Mapping[str, float], *, weight: float = 1.0) -> None:
        """Says how high some levels are; those of one cell are read as their weighted mean."""
        cell = self._cell(at_s)
        for name, level in levels.items():
            cells = self._levels.setdefault(name, {})
            total, weights = cells.get(cell, (0.0, 0.0))
            cells[cell] = total + level * weight, weights + weight

    @property
    def cells(self) -> int:
        """Cells from the first value to the last."""
        last = [max(cells) for cells in self._sums.values()]
        last += [max(cells) for cells in self._levels.values()]
        return max(last, default=-1) + 1

    @property
    def times_s(self) -> list[float]:
        """Middle of each cell, in seconds from the first value."""
        return [(number + 0.5) * self.cell_s for number in range(self.cells)]

    @property
    def names(self) -> list[str]:
        """What there is, in order of appearance: levels first."""
        return [*self._levels, *self._sums]

    def rate(self, name: str, *, most: int = 72) -> tuple[list[float], list[float]]:
        """What was counted, per second: middles of at most so many stretches, and their rates."""
        cells, every = self._sums.get(name, {}), max(1, -(-self.cells // most))
        sums = [0.0] * -(-self.cells // every)
        for cell, amount in cells.items():
            sums[cell // every] += amount
        width_s = every * self.cell_s
        times_s = [(number + 0.5) * width_s for number in range(len(sums))]
        return times_s, [total / width_s for total in sums]

    def level(self, name: str, *, hold: bool = True) -> list[float]:
        """How high a level was in each cell.

        Args:
            name: Which.
            hold: Cells in which nobody said anything have the level of the one before; else NaN.
        """
        cells, found, last = self._levels.get(name, {}), list[float](), math.nan
        for number in range(self.cells):
            total, weights = cells.get(number, (0.0, 0.0))
            if weights:
                last = total / weights
            found.append(last if weights or hold else math.nan)
        return found

    def _cell(self, at_s: float) -> int:
        if math.isnan(self.started_s):
            self.started_s = at_s
        cell = max(0, int((at_s - self.started_s) / self.cell_s))
        while cell >= self._most:
            self._coarsen()
            cell //= 2
        return cell

    def _coarsen(self) -> None:
        self.cell_s *= 2
        for name, cells in self._sums.items():
            halved: dict[int, float] = {}
            for cell, amount in cells.items():
                halved[cell // 2] = halved.get(cell // 2, 0.0) + amount
            self._sums[name] = halved
        for name, levels in self._levels.items():
            merged: dict[int, tuple[float, float]] = {}
            for cell, (total, weights) in levels.items():
                had, before = merged.get(cell // 2, (0.0, 0.0))
                merged[cell // 2] = had + total, before + weights
            self._levels[name] = merged
