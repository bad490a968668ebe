"""The arithmetic under the numba kernels, on every 16-bit value there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from tests.inside import FAST, exp2, narrow, order, tanh, unorder, widen


@njit(fastmath=FAST)  # as fast as the kernels: flags must not leak into these functions
def exp2_of(x, shift):
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = exp2(x[i] - shift)
    return y


@njit(fastmath=FAST)
def tanh_of(x):
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = tanh(x[i])
    return y


@njit
def widened(x):
    y = np.empty(x.size, np.float32)
    for i in range(x.size):
        y[i] = widen(x[i])
    return y


@njit
def narrowed(x, like):
    y = np.empty_like(like)
    for i in range(x.size):
        y[i] = narrow(x[i], like[0])
    return y


@njit
def there_and_back(x):
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = unorder(order(x[i]))
    return y


@njit
def ordered(x):
    y = np.empty(x.size, np.int64)
    for i in range(x.size):
        y[i] = order(x[i])
    return y


def test_exp2() -> None:
    x = np.linspace(-126, 20, 200_001).astype(np.float32)
    expected = np.exp2(x.astype(np.float64))
    assert np.abs(exp2_of(x, np.float32(0)) / expected - 1).max() < 2.5e-7
    low = exp2_of(np.array([-np.inf, -127, -1e30, np.nan], np.float32), np.float32(0))
    assert (low[:3] == 0).all() and np.isnan(low[3])
    assert exp2_of(np.zeros(1, np.float32), np.float32(0)) == 1


def test_tanh() -> None:
    x = np.linspace(-12, 12, 200_002).astype(np.float32)
    expected = np.tanh(x.astype(np.float64))
    assert np.abs(tanh_of(x) / expected - 1).max() < 4e-7
    assert np.isnan(tanh_of(np.array([np.nan], np.float32)))[0]
    assert tanh_of(np.array([-np.inf, 0, np.inf], np.float32)).tolist() == [-1, 0, 1]


KINDS = [(torch.bfloat16, np.uint16), (torch.float16, np.int16)]


@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_every_16_bit_float_widens_as_in_torch(dtype: torch.dtype, kind: type) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    expected = torch.from_numpy(bits.view(np.int16).copy()).view(dtype).float().numpy()
    np.testing.assert_array_equal(widened(bits.view(kind)), expected)


@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_narrowing_rounds_as_in_torch(dtype: torch.dtype, kind: type) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    ties = (np.arange(1 << 16, dtype=np.uint64) << 16) + 0x8000
    x = np.concatenate([bits, ties]).astype(np.uint32).view(np.float32)
    got = torch.from_numpy(narrowed(x, np.empty(x.size, kind)).view(np.int16)).view(dtype)
    expected = torch.from_numpy(x).to(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])


def test_order_of_bits_is_order_of_floats() -> None:
    x = np.sort(np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 1e3)
    x = np.concatenate([[-np.inf], x, [np.inf, np.nan]]).astype(np.float32)
    assert (np.diff(ordered(x)) >= 0).all()
    np.testing.assert_array_equal(there_and_back(x), x)
