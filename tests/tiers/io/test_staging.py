"""The arena: slots never overlap."""

from __future__ import annotations

import itertools
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import together
from tests.inside import Arena, ArenaSlot, ConfigError, Extents, StateError, address_of
from tests.inside import staging_PAGE_BYTES as PAGE_BYTES

PAGES = 64

steps = st.lists(
    st.tuples(st.sampled_from(["take", "take", "give"]), st.integers(0, 20)),
    min_size=15,
    max_size=60,
)


def spans(slots: list[ArenaSlot]) -> list[tuple[int, int]]:
    return sorted((slot.address, slot.address + slot.n_bytes) for slot in slots)


@settings(max_examples=25)
@given(steps)
def test_slots_are_apart_and_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    arena = Arena(PAGES * PAGE_BYTES)
    taken: list[ArenaSlot] = []
    for step, number in steps:
        if step == "take":
            wanted = max(1, number * PAGE_BYTES - number * 7)
            slot = arena.acquire(wanted)
            if slot is None:
                assert gap(arena, taken) < -(-wanted // PAGE_BYTES)
            else:
                assert len(slot.view) == slot.n_bytes == wanted
                assert slot.address % PAGE_BYTES == 0
                taken.append(slot)
        elif step == "give" and taken:
            arena.give_back(taken.pop(number % len(taken)))
        every = spans(taken)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(every))
        used = [-(-slot.n_bytes // PAGE_BYTES) * PAGE_BYTES for slot in taken]
        assert arena.free_bytes == arena.n_bytes - sum(used)
    for slot in taken:
        arena.give_back(slot)
    assert arena.acquire(arena.n_bytes) is not None  # all of it is one piece again


def gap(arena: Arena, slots: list[ArenaSlot]) -> int:
    """Pages of the largest gap."""
    ends = [arena.address, *(address + (n - address) for address, n in spans(slots))]
    starts = [*(start for start, _ in spans(slots)), arena.address + arena.n_bytes]
    rounded = [-(-end // PAGE_BYTES) * PAGE_BYTES for end in ends]
    return max((s - e) // PAGE_BYTES for s, e in zip(starts, rounded, strict=True))


def test_many_sizes_against_a_model() -> None:
    random, extents, free = Random(1), Extents(4096), [True] * 4096
    held: list[tuple[int, int]] = []
    for _ in range(4000):
        if held and random.random() < 0.5:
            first, pages = held.pop(random.randrange(len(held)))
            extents.free(first, pages)
            free[first : first + pages] = [True] * pages
        else:
            pages = random.choice((1, 2, 7, 15, 16, 17, 31, 33, 100, random.randrange(1, 400)))
            wished = random.choice((1, 1, 1, 3))
            firsts = extents.allocate(pages, wished)
            assert len(firsts) <= wished
            for first in firsts:
                assert all(free[first : first + pages]) and first + pages <= 4096
                free[first : first + pages] = [False] * pages
                held.append((first, pages))
        assert extents.free_pages == sum(free)


def test_the_best_part_of_the_memory_is_used() -> None:
    """Sizes of one class at a time: no more is wasted than the last slot."""
    for pages in (1, 3, 17, 33, 65, 129):
        extents, count = Extents(1024), 0
        while extents.allocate(pages):
            count += 1
        assert not extents.allocate(pages, 2)
        assert count == 1024 // pages


def test_slots_are_given_back_once() -> None:
    arena = Arena(4 * PAGE_BYTES)
    slot = arena.acquire(1)
    arena.give_back(slot)
    with pytest.raises(StateError, match="not taken"):
        arena.give_back(slot)
    other = arena.acquire(1)
    assert other.address == slot.address
    with pytest.raises(StateError):  # the new owner's memory is not the old one's to give
        arena.give_back(slot)


def test_addresses_are_true() -> None:
    arena = Arena(5 << 20)
    slot = arena.acquire(100)
    assert arena.address % (2 << 20) == 0
    assert address_of(slot.view) == slot.address
    assert arena.address <= slot.address < arena.address + arena.n_bytes
    slot.view[:] = b"z" * 100
    at = slot.address - arena.address
    assert arena.view[at : at + 100] == b"z" * 100


def test_closing_leaves_views_alone() -> None:
    arena = Arena(PAGE_BYTES)
    slot = arena.acquire(8)
    arena.close()
    arena.close()
    slot.view[:] = b"still ok"
    with pytest.raises(StateError, match="closed"):
        arena.acquire(1)
    with pytest.raises(StateError, match="not taken"):
        arena.give_back(slot)


def test_wrong_sizes() -> None:
    with pytest.raises(ConfigError, match="at least 4096"):
        Arena(0)
    arena = Arena(100)
    assert arena.n_bytes == PAGE_BYTES
    assert arena.acquire(PAGE_BYTES + 1) is None
    assert arena.acquire(0).view == b""


def test_threads_take_and_give() -> None:
    arena = Arena(256 * PAGE_BYTES)

    def work(mark: int) -> None:
        for i in range(200):
            slot = arena.acquire((1 + i % 5) * PAGE_BYTES)
            if slot is None:
                continue
            slot.view[:] = bytes([mark]) * slot.n_bytes
            assert bytes(slot.view) == bytes([mark]) * slot.n_bytes
            arena.give_back(slot)

    together(*(partial(work, mark) for mark in range(4)))
    assert arena.free_bytes == arena.n_bytes
