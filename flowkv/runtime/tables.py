"""Block tables and lengths of all open sequences, one line a sequence, ready for the kernels.

Kept as arrays over all lines so that planning a step costs a few vector operations, whatever the
batch and however long its contexts are.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import CapacityError

CLOSED, READY, STEPPING, SUSPENDED = range(4)
"""What a line's sequence is doing."""


class Tables:
    """Lines of sequences. Callers hold the KV lock.

    Attributes:
        pages: Per group int32 `[rows, pages]`: granule of each page, -1 where there is none.
        lengths: int64 `[rows + 1]`: tokens whose K and V are written.
        state: uint8 `[rows + 1]`: `CLOSED`, `READY`, `STEPPING` or `SUSPENDED`.
        fidelity: uint8 `[rows + 1]`: index of the lossiest codec that a line was built on.
        shared: bool `[rows]`: the page that the next token goes to may belong to others too.
        nowhere: The line of sequences that have none any more: empty and closed.

    Args:
        devices: Device of each group.
        max_rows: Most sequences open at once.
        max_pages: Pages per line to begin with; lines grow.
    """

    def __init__(self, devices: list[torch.device], max_rows: int, max_pages: int = 64) -> None:
        self.devices, self.max_rows, self.nowhere = devices, max_rows, max_rows
        self.pages: list[NDArray[np.int32]] = []
        self._device_tables: list[torch.Tensor] = []
        self._dirty = True
        self._former: list[list[weakref.ref[NDArray[np.int32]]]] = []
        self.lengths = np.zeros(max_rows + 1, np.int64)
        self.state = np.full(max_rows + 1, CLOSED, np.uint8)
        self.fidelity = np.zeros(max_rows + 1, np.uint8)
        self.shared = np.zeros(max_rows, np.bool_)
        self._free = list(range(max_rows - 1, -1, -1))
        self._resize(max_pages)

    def open_row(self) -> int:
        """A line of its own.

        Raises:
            CapacityError: All lines are taken.
        """
        if not self._free:
            raise CapacityError(
                f"{self.max_rows} sequences are open", "Close some, or raise max_rows"
            )
        row = self._free.pop()
        self.state[row] = READY
        return row

    def close_row(self, row: int) -> None:
        """Gives a line back, emptied."""
        for table in self.pages:
            table[row] = -1
        self.lengths[row], self.state[row] = 0, CLOSED
        self.shared[row], self.fidelity[row] = False, 0
        self._dirty = True
        self._free.append(row)

    def reserve(self, pages: int) -> None:
        """Makes every line long enough for `pages` pages."""
        have = self.pages[0].shape[1]
        if pages > have:
            self._resize(max(pages, 2 * have))

    def replace(self, group: int, row: int, page_no: int, page: int) -> None:
        """Puts another page in a line, for steps under way on a CPU as well."""
        self.pages[group][row, page_no] = page
        for former in self._former:  # what steps read that began before the lines grew
            table = former[group]()
            if table is not None and page_no < table.shape[1]:
                table[row, page_no] = page
        self.touch()

    def touch(self) -> None:
        """Says that `pages` changed; device copies follow at the next `table`."""
        self._dirty = True

    def table(self, group: int) -> torch.Tensor:
        """The group's table on its device."""
        if self._dirty:
            for g, device in enumerate(self.devices):
                host = torch.from_numpy(self.pages[g])
                self._device_tables[g] = host if device.type == "cpu" else host.to(device)
            self._dirty = False
        return self._device_tables[group]

    def _resize(self, pages: int) -> None:
        # Fresh arrays: a step of another thread goes on reading the old ones, which stay right.
        old, self.pages = self.pages, []
        if old:
            alive = (tables for tables in self._former if any(ref() is not None for ref in tables))
            self._former = [*alive, [weakref.ref(table) for table in old]]
        for g in range(len(self.devices)):
            table = np.full((self.max_rows, pages), -1, np.int32)
            if old:
                table[:, : old[g].shape[1]] = old[g]
            self.pages.append(table)
        self._device_tables = [torch.from_numpy(np.empty(0, np.int32)) for _ in self.devices]
        self._dirty = True
