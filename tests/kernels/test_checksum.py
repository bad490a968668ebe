"""Sums over memory: equal on every backend, and other for every change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkv.kernels import checksum
from tests.inside import GeometryError

BITS = (1 << 64) - 1
WORDS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=40)


def plain(words: list[int], block: int) -> list[list[int]]:
    """The definition, in Python's integers."""
    found = []
    for first in range(0, len(words), block):
        one = two = 0
        for j, word in enumerate(words[first : first + block]):
            key = (j + 1) * 0x9E3779B97F4A7C15 & BITS
            x = (word & BITS) ^ key
            x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & BITS
            x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & BITS
            x ^= x >> 32
            one, two = one + x, two + x * (key | 1)
        found.append([(s + (1 << 63) & BITS) - (1 << 63) for s in (one, two)])
    return found


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@given(words=WORDS, block=st.integers(1, 50))
def test_sums_are_as_defined(backend: str, words: list[int], block: int) -> None:
    found = checksum(torch.tensor(words), block, backend=backend)
    assert found.tolist() == plain(words, block)


def test_both_backends_agree_on_large_tensors() -> None:
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (3_000_001,), generator=torch.manual_seed(1))
    for block in (1 << 19, 4_000_000):
        sums = [checksum(words, block, backend=name) for name in ("reference", "cpu")]
        assert torch.equal(*sums)


@given(data=st.data())
def test_any_change_changes_both_sums_of_its_block_alone(data: st.DataObject) -> None:
    words = data.draw(WORDS)
    block, at = data.draw(st.integers(1, 50)), data.draw(st.integers(0, len(words) - 1))
    other = list(words)
    other[at] ^= 1 << data.draw(st.integers(0, 62))
    before, after = (checksum(torch.tensor(w), block) for w in (words, other))
    changed = (before != after).tolist()
    assert changed == [[i == at // block] * 2 for i in range(len(changed))]


@given(words=WORDS)
def test_order_matters(words: list[int]) -> None:
    turned = words[::-1]
    same = checksum(torch.tensor(words), 64).equal(checksum(torch.tensor(turned), 64))
    assert same == (words == turned)


def test_nothing_has_no_sums() -> None:
    assert checksum(torch.zeros(0, dtype=torch.int64), 8).shape == (0, 2)


def test_what_is_no_flat_row_of_words_is_refused() -> None:
    for wrong in (torch.zeros(4), torch.zeros(2, 2).long(), torch.zeros(8).long()[::2]):
        with pytest.raises(GeometryError, match="contiguous int64"):
            checksum(wrong, 8)
    with pytest.raises(GeometryError, match="at least 1"):
        checksum(torch.zeros(4).long(), 0)
