"""Merging partials."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv.kernels import merge
from tests.inside import GeometryError
from tests.inside import pages as cpu

each_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])


@each_backend
@given(
    count=st.integers(1, 5),
    tokens=st.integers(0, 4),
    dim=st.sampled_from([1, 16, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([0.0, 1.0, 60.0]),
)
def test_merge_is_the_softmax_of_its_parts(
    backend: str, count: int, tokens: int, dim: int, dtype: torch.dtype, spread: float
) -> None:
    outs = torch.randn(count, tokens, 3, dim).to(dtype)
    lses = torch.randn(count, tokens, 3) * spread
    o, lse = merge(list(zip(outs, lses, strict=True)), backend=backend)
    total = torch.logsumexp(lses.double(), 0)
    expected = (torch.exp(lses.double() - total)[..., None] * outs.double()).sum(0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(o.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=2e-6)
    assert o.dtype == dtype and lse.dtype == torch.float32


@each_backend
def test_parts_without_tokens(backend: str) -> None:
    """An lse of -inf marks them; what else they hold does not matter, NaN included."""
    full, lse = torch.randn(2, 3, 16), torch.randn(2, 3)
    nothing = torch.full_like(full, torch.nan), torch.full_like(lse, -torch.inf)
    if backend == "cpu":
        o, total = merge([nothing, (full, lse), nothing], backend=backend)
        torch.testing.assert_close(o, full)
        torch.testing.assert_close(total, lse)
    empty = torch.zeros_like(full), torch.full_like(lse, -torch.inf)
    o, total = merge([empty, (full, lse), empty], backend=backend)
    torch.testing.assert_close(o, full)
    o, total = merge([empty, empty], backend=backend)
    assert (o == 0).all() and (total == -torch.inf).all()


@each_backend
def test_order_and_grouping_do_not_matter(backend: str) -> None:
    parts = [(torch.randn(5, 4, 32), torch.randn(5, 4) * 5) for _ in range(4)]
    o, lse = merge(parts, backend=backend)
    pairs = merge([merge(parts[2:], backend=backend), merge(parts[:2], backend=backend)])
    torch.testing.assert_close(pairs[0], o, rtol=0, atol=2e-6)
    torch.testing.assert_close(pairs[1], lse, rtol=0, atol=2e-6)


def test_merge_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(torch.randn(7, 5, 20), torch.randn(7, 5)) for _ in range(3)]
    expected, _ = merge(parts, backend="reference")
    monkeypatch.setattr(cpu, "slices", lambda work, least: 4)
    torch.testing.assert_close(merge(parts)[0], expected, rtol=0, atol=1e-6)


def test_two_halves() -> None:
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1)
    o, lse = merge([(one, zero), (3 * one, zero)])
    assert o.item() == pytest.approx(2) and lse.item() == pytest.approx(math.log(2))


def test_refusals() -> None:
    with pytest.raises(GeometryError, match="at least one"):
        merge([])
    with pytest.raises(GeometryError, match="same query tokens"):
        merge([(torch.ones(1, 2, 3), torch.ones(1, 2)), (torch.ones(1, 2, 4), torch.ones(1, 2))])
