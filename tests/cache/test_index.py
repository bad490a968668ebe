"""Keys and the tree over them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.cache.audit import audit_index
from tests.inside import ROOT, Block, PrefixIndex, StateError


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") if number else ROOT


def ancestors(number: int) -> set[int]:
    return {number >> shift for shift in range(1, 5)}


def test_a_forgotten_block_keeps_its_slot_for_its_key() -> None:
    index = PrefixIndex()
    blocks = [index.get_or_create(key(i), ROOT, 0) for i in (1, 2, 3)]
    assert [block.slot for block in blocks] == [0, 1, 2]
    assert index.get_or_create(key(2), ROOT, 0) is blocks[1]
    index.forget(blocks[1])
    assert blocks[1].gone and index.find(key(2)) is None and index.slot(key(2)) == 1
    with pytest.raises(StateError, match="slot 1 is not in use"):
        index.at(1)
    assert index.get_or_create(key(9), ROOT, 0).slot == 3 and len(index) == 3
    again = index.get_or_create(key(2), ROOT, 0)
    assert again.slot == 1 and again is not blocks[1] and len(index.ghosts) == 0
    audit_index(index)


def test_the_oldest_ghosts_drop_out_and_their_slots_are_used_again() -> None:
    dropped = list[int]()
    index = PrefixIndex(dropped.extend, lambda blocks: 8)
    for number in range(1, 200):
        index.forget(index.get_or_create(key(number), ROOT, 0))
        assert len(index.ghosts) <= 8 + 9
        audit_index(index)
    assert dropped[:9] == list(range(9)) and len(index._slots) <= 20
    assert index.slot(key(1)) == -1 and index.slot(key(199)) >= 0


def test_what_is_known_makes_room_for_as_many_ghosts_again() -> None:
    index = PrefixIndex(most_ghosts=lambda blocks: 2 * blocks)
    kept = [index.get_or_create(key(number), ROOT, 0) for number in range(1, 101)]
    for number in range(101, 401):
        index.forget(index.get_or_create(key(number), ROOT, 0))
    assert 200 <= len(index.ghosts) < 264
    assert index.slot(key(101)) == -1 and index.slot(key(400)) >= 0
    for block in kept:
        index.forget(block)
    assert len(index.ghosts) < 64
    audit_index(index)


def test_ghosts_below_what_is_buried_are_buried_too() -> None:
    dropped = list[int]()
    index = PrefixIndex(dropped.extend)
    chain = [index.get_or_create(key(i), key(i - 1), 0) for i in range(1, 6)]
    side = index.get_or_create(key(9), key(2), 0)
    other = index.get_or_create(key(20), ROOT, 0)
    for block in (*reversed(chain), side, other):
        index.forget(block)
    assert index.chain(key(5)) == [0, 1, 2, 3, 4] and index.chain(key(9)) == [0, 1, 5]
    assert index.ghosts.bury([key(3)]) == 3 and sorted(dropped) == [2, 3, 4]
    assert index.chain(key(5)) == [] and index.slot(key(9)) == 5
    assert index.ghosts.bury([key(2)]) == 2 and index.slot(key(1)) == 0
    assert index.ghosts.bury([key(77)]) == 0
    assert index.ghosts.bury_realm(lambda realm: realm == (b"", b"", 0)) == 2
    assert len(index.ghosts) == 0 and len(dropped) == 7


def test_a_circle_of_stored_frames_is_no_endless_chain() -> None:
    index = PrefixIndex()
    blocks = [index.get_or_create(key(1), key(2), 0), index.get_or_create(key(2), key(1), 0)]
    assert sorted(index.chain(key(1))) == [0, 1]
    for block in blocks:
        index.forget(block)
    assert index.ghosts.bury([key(1)]) == 2


def test_descendants_are_found_across_holes() -> None:
    index = PrefixIndex()
    chain = [index.get_or_create(key(i), key(i - 1), 0) for i in range(1, 6)]
    side = index.get_or_create(key(9), key(2), 0)
    index.forget(chain[2])
    index.forget(chain[1])
    assert [set(branch) for branch in index.branches(key(1))] == [{chain[3], chain[4], side}]
    assert index.children(key(1)) == [] and index.children(key(2)) == [side]
    assert index.children(ROOT) == [chain[0]]
    again = index.get_or_create(key(2), key(1), 0)
    assert index.children(key(1)) == [again]
    assert index.branches(key(2)) == [[*chain[3:]], [side]]
    for block in (side, again, *chain[3:], chain[0]):
        index.forget(block)
    assert not index._children and not index._holes and len(index) == 0


def test_blocks_known_before_their_parents_are_below_them() -> None:
    index = PrefixIndex()
    grandchild = index.get_or_create(key(3), key(2), 0)
    assert index.branches(key(1)) == []
    child = index.get_or_create(key(2), key(1), 0)
    assert index.branches(key(1)) == [[child, grandchild]]


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=15, max_size=60))
def test_the_tree_is_that_of_a_dictionary(calls: list[tuple[int, bool]]) -> None:
    index, known = PrefixIndex(), dict[int, Block]()
    for number, publish in calls:  # number n lies below n // 2
        if publish:
            known[number] = index.get_or_create(key(number), key(number // 2), 0)
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
    index.get_or_create(a, b, 0)
    index.get_or_create(b, a, 0)
    index.get_or_create(b"c" * 32, b"c" * 32, 0)
    assert [len(branch) for branch in index.branches(a)] == [2]
    assert [len(branch) for branch in index.branches(b"c" * 32)] == [1]
    for block in list(index):
        index.forget(block)
    assert len(index) == 0
