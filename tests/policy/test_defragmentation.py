"""Emptying of sparse slabs: where it pays, seldom enough, and never twice in vain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import ConfigError, Defragmentation, Occupancy

SPARSE = Occupancy(slabs=64, empty=0, reclaimable=9, sizes=2, fragmentation=0.4)


def test_a_sparse_pool_without_empty_slabs_is_worth_a_budget() -> None:
    assert Defragmentation(most_bytes=123).budget(SPARSE, 0) == 123


@pytest.mark.parametrize(
    "otherwise",
    [{"empty": 4}, {"reclaimable": 0}, {"sizes": 1}, {"fragmentation": 0.09}],
    ids=["slabs are ready", "nothing to gain", "holes are as good", "too little"],
)
def test_otherwise_nothing_moves(otherwise: dict[str, float]) -> None:
    policy = Defragmentation()
    assert policy.budget(SPARSE._replace(**otherwise), 0) == 0
    assert policy.budget(SPARSE, 0) > 0, "and what was refused is not held against it"


def test_a_small_pool_keeps_one_slab_ready() -> None:
    small = SPARSE._replace(slabs=3)
    assert Defragmentation().budget(small, 0) > 0
    assert Defragmentation().budget(small._replace(empty=1), 0) == 0


def test_what_was_in_vain_is_tried_again_once_the_pool_is_another() -> None:
    policy = Defragmentation()
    assert policy.budget(SPARSE, 0)
    policy.record(0, SPARSE)
    assert policy.budget(SPARSE, 0) == 0
    assert policy.budget(SPARSE._replace(reclaimable=8), 0) > 0
    policy.record(5, SPARSE)
    assert policy.budget(SPARSE, 0) > 0


@given(st.integers(0, 5000), st.integers(1, 900))
def test_renaming_many_blocks_is_spread_over_many_edges(blocks: int, share: int) -> None:
    policy = Defragmentation(blocks_per_edge=share)
    edges = [bool(policy.budget(SPARSE, blocks)) for _ in range(3 * (blocks // share + 1))]
    assert edges == ([True] + [False] * (blocks // share)) * 3


def test_it_can_be_switched_off() -> None:
    assert Defragmentation(most_bytes=0).budget(SPARSE, 0) == 0


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="least_gain"):
        Defragmentation(least_gain=0.5)
    with pytest.raises(ConfigError, match="defragmentation"):
        Defragmentation(most_byte=1)
