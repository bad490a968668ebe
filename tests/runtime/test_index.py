"""Keys and the tree over them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flowkv.core.errors import StateError
from flowkv.core.keys import ROOT
from flowkv.runtime.index import Block, PrefixIndex
from tests.runtime.audit import audit_index


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") if number else ROOT


def ancestors(number: int) -> set[int]:
    return {number >> shift for shift in range(1, 5)}


def test_slots_are_dense_and_reused() -> None:
    index = PrefixIndex()
    blocks = [index.publish(key(i), ROOT, 0) for i in (1, 2, 3)]
    assert [block.slot for block in blocks] == [0, 1, 2]
    assert index.publish(key(2), ROOT, 0) is blocks[1]
    index.forget(blocks[1])
    assert blocks[1].gone and index.find(key(2)) is None and index.slot(key(2)) == -1
    with pytest.raises(StateError, match="slot 1 is not in use"):
        index.at(1)
    assert index.publish(key(9), ROOT, 0).slot == 1 and len(index) == 3


def test_descendants_are_found_across_holes() -> None:
    index = PrefixIndex()
    chain = [index.publish(key(i), key(i - 1), 0) for i in range(1, 6)]
    side = index.publish(key(9), key(2), 0)
    index.forget(chain[2])
    index.forget(chain[1])
    assert [set(branch) for branch in index.branches(key(1))] == [{chain[3], chain[4], side}]
    assert index.children(key(1)) == [] and index.children(key(2)) == [side]
    assert index.children(ROOT) == [chain[0]]
    again = index.publish(key(2), key(1), 0)
    assert index.children(key(1)) == [again]
    assert index.branches(key(2)) == [[*chain[3:]], [side]]
    for block in (side, again, *chain[3:], chain[0]):
        index.forget(block)
    assert not index._children and not index._holes and len(index) == 0


def test_blocks_known_before_their_parents_are_below_them() -> None:
    index = PrefixIndex()
    grandchild = index.publish(key(3), key(2), 0)
    assert index.branches(key(1)) == []
    child = index.publish(key(2), key(1), 0)
    assert index.branches(key(1)) == [[child, grandchild]]


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=60))
def test_the_tree_is_that_of_a_dictionary(calls: list[tuple[int, bool]]) -> None:
    index, known = PrefixIndex(), dict[int, Block]()
    for number, publish in calls:  # number n lies below n // 2
        if publish:
            known[number] = index.publish(key(number), key(number // 2), 0)
        elif number in known:
            index.forget(known.pop(number))
        assert set(index) == set(known.values())
        audit_index(index)
        for above in range(13):
            children = {block for n, block in known.items() if n // 2 == above}
            assert set(index.children(key(above))) == children
            below = {block for n, block in known.items() if above in ancestors(n)}
            assert {block for branch in index.branches(key(above)) for block in branch} <= below
            assert children <= {branch[0] for branch in index.branches(key(above))}
    for block in known.values():
        index.forget(block)
    assert not index._children and not index._holes


def test_frames_that_lie_about_their_parents_end_no_walk() -> None:
    index = PrefixIndex()
    a, b = (bytes([letter]) * 32 for letter in b"ab")
    index.publish(a, b, 0)
    index.publish(b, a, 0)
    index.publish(b"c" * 32, b"c" * 32, 0)
    assert [len(branch) for branch in index.branches(a)] == [2]
    assert [len(branch) for branch in index.branches(b"c" * 32)] == [1]
    for block in list(index):
        index.forget(block)
    assert len(index) == 0
