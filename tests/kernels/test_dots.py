"""Dot products of rows of floats with rows of codes, in vectors of either width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numba import njit

from tests.inside import NIBBLES, SIGNED, UNSIGNED, data, dots_of


def callable_dots(lanes: int, kind: int, adds: bool) -> Callable[..., int]:
    dots = dots_of(lanes, kind, adds)

    @njit(error_model="numpy")
    def call(count, a, b, n, vectors, bias, out):
        x, y, z = (data(a), a.shape[1]), (data(b), b.shape[1], n), (data(out), out.shape[1])
        dots(count, x, y, vectors, data(bias), z, data(b))
        return a.size + b.size + bias.size + out.size  # so that they outlive the pointers

    return call


@pytest.mark.parametrize(
    ("kind", "adds"), [(SIGNED, False), (UNSIGNED, True), (NIBBLES, False), (NIBBLES, True)]
)
@pytest.mark.parametrize("lanes", [8, 16])
def test_dots(lanes: int, adds: bool, kind: int) -> None:
    """Rows in fours, twos and ones; columns and codes that do not fill a vector."""
    call, rng = callable_dots(lanes, kind, adds), np.random.default_rng(0)
    for count, n, width in ((1, 1, 1), (4, 16, 32), (7, 13, 24), (2, 40, 33), (9, 3, 64)):
        vectors, planes = -(-width // lanes), 2 if kind == NIBBLES else 1
        plane, padded = vectors * lanes, -(-n // lanes) * lanes
        a = np.zeros((count, planes * plane), np.float32)
        for i in range(planes):
            a[:, i * plane : i * plane + width] = rng.standard_normal((count, width))
        codes = rng.integers(0, 256, (n + lanes, width), dtype=np.uint8)  # read beyond, times 0
        bias = rng.standard_normal(count).astype(np.float32)
        out = rng.standard_normal((count, padded)).astype(np.float32)
        x = codes[:n].astype(np.float64)
        if kind == SIGNED:
            x = codes[:n].view(np.int8).astype(np.float64)
        elif kind == NIBBLES:
            x = np.concatenate([codes[:n] & 15, codes[:n] >> 4], 1).astype(np.float64)
        rows = np.concatenate([a[:, i * plane : i * plane + width] for i in range(planes)], 1)
        expected = rows.astype(np.float64) @ x.T + bias[:, None]
        expected += out[:, :n] if adds else 0
        call(count, a, codes, n, vectors, bias, out)
        np.testing.assert_allclose(
            out[:, :n], expected, rtol=0, atol=1e-6 * np.abs(x).max() * width
        )
