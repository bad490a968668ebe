"""Lines of sequences."""

from __future__ import annotations

import pytest
import torch

from tests.inside import CLOSED, READY, CapacityError, Tables


def test_lines_are_given_emptied_and_grown() -> None:
    tables = Tables([torch.device("cpu"), torch.device("cpu")], 2, max_pages=2)
    first, second = tables.open_row(), tables.open_row()
    with pytest.raises(CapacityError, match="raise max_rows"):
        tables.open_row()
    assert tables.state.tolist() == [READY, READY, CLOSED]
    tables.pages[1][second, 1] = 7
    old = tables.table(1)
    tables.reserve(3)
    assert tables.pages[1].shape == (2, 4) and tables.pages[1][second].tolist() == [-1, 7, -1, -1]
    assert old.shape == (2, 2) and old[second].tolist() == [-1, 7], "a running step keeps its table"
    assert tables.table(1)[second].tolist() == [-1, 7, -1, -1]
    tables.lengths[second], tables.shared[second] = 9, True
    tables.close_row(second)
    assert tables.pages[1][second].tolist() == [-1] * 4 and tables.lengths[second] == 0
    assert not tables.shared[second] and tables.open_row() == second != first
    assert tables.lengths[tables.nowhere] == 0 and tables.state[tables.nowhere] == CLOSED
