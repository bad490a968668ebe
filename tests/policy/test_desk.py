"""One argument in the place of ten arrays: it follows them when they grow, and is never copied."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from flowkv.policy import Policy, make_policy
from tests.inside import WORDS, ArrayCall


def serve(policy: Policy, first: int, last: int) -> list[list[int]]:
    """Requests that need ever higher slot numbers, with room for 300 blocks."""
    gone = []
    for r in range(first, last):
        slots = np.arange(16 * r, 16 * r + 16)
        policy.access(r * 10**9, slots)
        policy.insert(r * 10**9, slots, slots - 1)
        victims = policy.evict(r * 10**9, max(len(policy.resident()) - 300, 0))
        assert victims is not None
        gone.append(victims.tolist())
    return gone


def arrays(policy: Policy) -> list[bytes]:
    """All that the order and its model remember."""
    return [array.tobytes() for array in (*policy._arrays, policy._state, *policy._learner)]


@pytest.mark.parametrize("name", ["hazard", "auto"])
def test_a_copy_goes_on_by_itself(name: str) -> None:
    policy = make_policy(name)
    serve(policy, 0, 40)
    twin = copy.deepcopy(policy)
    before, image = policy.digest(), arrays(policy)
    theirs = serve(twin, 40, 80)
    assert policy.digest() == before
    assert arrays(policy) == image
    assert serve(policy, 40, 80) == theirs
    assert policy.digest() == twin.digest() != before


def test_it_knows_where_the_arrays_lie_now() -> None:
    policy = make_policy("hazard")
    for r in (5, 500, 5000):  # beyond what there is room for, twice
        serve(policy, r, r + 3)
        arrays = (*policy._arrays, policy._state, *policy._learner)
        words = policy._desk.reshape(-1, WORDS)
        assert words[:, 0].tolist() == [array.ctypes.data for array in arrays]
        for row, array in zip(words, arrays, strict=True):
            assert tuple(row[1 : 1 + array.ndim]) == array.shape


def test_it_refuses_what_the_compiled_calls_do_not_expect() -> None:
    kinds = ((np.int64, 1),)
    assert ArrayCall().lay(kinds, (np.arange(3),))[1] == 3
    for wrong in (np.zeros(3), np.zeros((3, 3), np.int64), np.arange(6)[::2]):
        with pytest.raises(AssertionError):
            ArrayCall().lay(kinds, (wrong,))
