"""The table of 128-bit ids: a dict in everything but speed, also under attack and after years."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import ConfigError, buckets_for
from tests.policy.id_table import IdTable


def ids_of(numbers, shift=0):
    n = np.asarray(numbers, np.uint64)
    return np.stack([n << np.uint64(shift), ~n], axis=1)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 3),
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 1)), min_size=30, max_size=120
    ),
)
def test_is_a_dict(seed, steps):
    """Insertions and removals in any order; two spaces share the numbers."""
    table, model, free = IdTable(64, seed), {}, list(range(64))
    for add, number, space in steps:
        key = (number, space)
        if add and key not in model:
            model[key] = free.pop(number % len(free))
            table.insert(ids_of([number]), np.array([model[key]]), space)
        elif not add and key in model:
            table.remove(np.array([model[key], 64, -1]))
            free.append(model.pop(key))
        for s in (0, 1):
            want = [model.get((i, s), -1) for i in range(41)]
            assert table.find(ids_of(range(41)), s).tolist() == want
        assert len(table) == len(model)


def test_no_rot():
    """Many times its size goes through a table; look-ups stay as short as in a fresh one."""
    rng = np.random.default_rng(0)
    table = IdTable(4096, seed=1)
    slots = np.arange(4096)
    for _ in range(60):
        ids = rng.integers(0, 1 << 63, (4096, 2), np.uint64)
        table.insert(ids, slots)
        assert (table.find(ids) == slots).all()
        rng.shuffle(slots)
        table.remove(slots)
    assert len(table) == 0
    assert table.longest_probe == 0
    table.insert(rng.integers(0, 1 << 63, (4096, 2), np.uint64), slots)
    assert table.longest_probe < 64


@pytest.mark.parametrize("shift", [0, 13, 20, 32, 43])
def test_structured_ids_do_not_pile_up(shift):
    """Ids that are counters, wherever in the word they count."""
    table = IdTable(1 << 15, seed=5)
    table.insert(ids_of(range(1 << 15), shift), np.arange(1 << 15))
    assert table.longest_probe < 400


def test_ids_made_to_collide_under_one_seed_do_not_under_another():
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 1 << 63, (1 << 16, 2), np.uint64)
    victim, other = IdTable(1 << 10, seed=8), IdTable(1 << 10, seed=9)
    mask = np.uint64(len(buckets_for(1 << 10)) - 1)
    mix = victim._mix
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = ids[:, 0], ids[:, 1]
    hashed = mix[0] + mix[1] * (a & low) + mix[2] * (a >> half)
    hashed += mix[3] * (b & low) + mix[4] * (b >> half)
    chosen = ids[(hashed >> half) & mask == 0]
    assert len(chosen) > 15
    victim.insert(chosen, np.arange(len(chosen)))
    other.insert(chosen, np.arange(len(chosen)))
    assert victim.longest_probe == len(chosen) - 1
    assert other.longest_probe < 4


def test_grows_and_refuses():
    table = IdTable(2)
    table.insert(ids_of([7, 8]), np.array([1, 0]))
    for slots in (np.array([2]), np.array([1]), np.array([-1])):
        with pytest.raises(ConfigError, match="grow the table"):
            table.insert(ids_of([9]), slots)
    table.grow(1000)
    with pytest.raises(ConfigError, match="cannot be made"):
        table.insert(ids_of([9, 7]), np.array([2, 999]))
    assert table.find(ids_of([7, 8, 9, 10])).tolist() == [1, 0, 2, -1]
    assert len(table) == 3
    with pytest.raises(ConfigError, match="too large"):
        table.grow(1 << 29)
    with pytest.raises(ConfigError, match=r"u64 \[n, 2\]"):
        table.find(np.zeros(4, np.uint64))
