"""Functions that only compiled ones call: parts of those, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from tests.inside import PART


@njit(**PART)
def _inner(x, n):
    if n < 0:
        raise ValueError("less than nothing")
    return x[0] + max(n, 3)


@njit(**PART)
def _outer(x, n):
    return _inner(x, n) + _inner(x, n + 1)


@njit
def _entry(x, n):
    return _outer(x, n) * 2


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_parts_do_what_python_does(dtype: type) -> None:
    x = np.array([4], dtype)
    for n in (0, 2, 3, 7):
        assert _entry(x, n) == 2 * (2 * x[0] + max(n, 3) + max(n + 1, 3))
    with pytest.raises(ValueError, match="less than nothing"):
        _entry(x, -1)


def test_no_machine_code_is_made_of_a_part() -> None:
    _entry(np.array([4]), 1)
    for part in (_inner, _outer):
        for made in part.overloads.values():
            assert type(made.library).__name__ == "PartLibrary"
            engine = made.library.codegen._engine
            assert not engine.is_symbol_defined(made.fndesc.llvm_func_name)
