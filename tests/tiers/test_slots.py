"""Slots of host memory that a device reaches."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import together
from tests.inside import SlotPool, populate, slots

SIZE = 8192


class Device:
    """Registers memory, and says what of it is registered."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most, self.there = most, dict[int, int]()

    def pin(self, address: int, n_bytes: int) -> str:
        if sum(self.there.values()) + n_bytes > self.most:
            return "too much"
        self.there[address] = n_bytes
        return ""

    def unpin(self, address: int) -> None:
        del self.there[address]

    def reaches(self, array: np.ndarray) -> bool:
        at = array.ctypes.data
        return any(a <= at and at + array.nbytes <= a + n for a, n in self.there.items())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "CHUNK_BYTES", 4 * SIZE)
    monkeypatch.setattr(slots, "AHEAD_BYTES", SIZE)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3 * SIZE)), min_size=10, max_size=40))
def test_slots_are_apart_and_come_back(steps: list[tuple[int, int]]) -> None:
    """Whatever is taken and let go of: bytes stay as they were written, and none is lost."""
    device, pool = Device(), SlotPool(12 * SIZE)
    pool.register(device.pin, device.unpin)
    held = dict[int, tuple[np.ndarray, int]]()
    for value, (number, n_bytes) in enumerate(steps):
        if number in held:
            array, wanted = held.pop(number)
            (reached,) = pool.reaches([array.ctypes.data], [len(array)])
            assert (array == wanted).all() and reached is not None
            del array
        elif (array := pool.acquire(n_bytes, pinned=True)) is not None:
            assert (
                len(array) == n_bytes
                and device.reaches(array)
                and pool.reaches([array.ctypes.data], [n_bytes])[0]
            )
            array[:] = value % 251
            held[number] = array[:1].base, value % 251
            whole, at = pool.locate(array.ctypes.data)
            assert np.shares_memory(whole[at : at + 1], array)
            del array, whole
    assert all((array == wanted).all() for array, wanted in held.values())
    held.clear()
    assert pool.used_bytes == 0 and sum(device.there.values()) <= 12 * SIZE
    pool.close()
    gc.collect()
    assert not device.there and pool.acquire(1) is None


def test_chunks_are_made_ahead_and_in_need() -> None:
    device, pool = Device(), SlotPool(12 * SIZE)
    pool.register(device.pin, device.unpin, SIZE)
    assert sum(device.there.values()) == 4 * SIZE
    held = [pool.acquire(SIZE, pinned=True) for _ in range(13)]
    assert all(array is not None for array in held) and pool.acquire(SIZE) is None
    assert sorted(device.there.values()) == [SIZE, *[4 * SIZE] * 3]
    assert len({array.ctypes.data for array in held}) == 13
    pool.close()
    assert len(device.there) == 4, "what is in use stays registered"
    del held
    assert not device.there


def test_memory_is_committed_and_registered_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the beginning on, without a call for a slot; bytes are committed before each call."""
    monkeypatch.setattr(slots, "AHEAD_BYTES", 7 * SIZE)
    order, ready = list[str](), threading.Event()

    def committed(address: int, n_bytes: int) -> None:
        order.append("commit")
        populate(address, n_bytes)

    def pin(address: int, n_bytes: int) -> str:
        order.append("pin")
        if len(order) == 4:
            ready.set()
        return device.pin(address, n_bytes)

    monkeypatch.setattr(slots, "populate", committed)
    device, pool = Device(), SlotPool(12 * SIZE)
    pool.register(pin, device.unpin)
    assert ready.wait(10.0) and order == ["commit", "pin"] * 2
    held = pool.acquire_all(8, SIZE, pinned=True)
    assert len(held) == 8 and order[4:] in ([], ["commit"], ["commit", "pin"])
    pool.close()
    del held
    gc.collect()
    assert not device.there


def test_a_forked_child_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes memory ahead is not there."""
    monkeypatch.setattr(slots, "AHEAD_BYTES", 7 * SIZE)
    device, pool, parent = Device(), SlotPool(12 * SIZE), os.getpid()
    begun, over = threading.Event(), threading.Event()

    def pin(address: int, n_bytes: int) -> str:
        if device.there and os.getpid() == parent:
            begun.set()
            assert over.wait(30.0)
        return device.pin(address, n_bytes)

    pool.register(pin, device.unpin)
    assert begun.wait(10.0)
    if not (child := os.fork()):
        signal.alarm(20)
        os._exit(0 if len(pool.acquire_all(12, SIZE, pinned=True)) == 12 else 1)
    over.set()
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


def test_what_exceeds_a_chunk_has_one_of_its_own() -> None:
    device, pool = Device(), SlotPool(20 * SIZE)
    pool.register(device.pin, device.unpin)
    assert pool.acquire(9 * SIZE, pinned=True) is not None
    assert pool.acquire(21 * SIZE) is None
    pool.close()


def test_memory_that_cannot_be_registered_is_memory() -> None:
    device, pool = Device(5 * SIZE), SlotPool(12 * SIZE)
    pool.register(device.pin, device.unpin)
    held = [pool.acquire(SIZE, pinned=True) for _ in range(5)]
    assert [array is not None for array in held] == [True] * 4 + [False]
    assert pool.why == "too much" and pool.pinned
    more = [pool.acquire(SIZE) for _ in range(8)]
    assert all(array is not None for array in more) and pool.acquire(SIZE) is None
    assert (
        sum(
            bool(pool.reaches([array.ctypes.data], [len(array)])[0]) for array in [*held[:4], *more]
        )
        == 4
    )
    pool.register(device.pin, device.unpin)
    pool.close()


def test_wiped_bytes_go_with_the_last_array() -> None:
    pool = SlotPool(4 * SIZE)
    array = pool.acquire(SIZE)
    array[:] = 7
    whole, at = pool.locate(array.ctypes.data)
    part = array[10:20]
    pool.wipe(array)
    del array
    assert (part == 7).all()
    del part
    assert not whole[at : at + SIZE].any() and pool.used_bytes == 0
    again = pool.acquire(SIZE)
    again[:] = 3
    del again
    assert whole[at : at + SIZE].any(), "one slot was wiped, once"


def test_a_closed_pool_holds_no_memory() -> None:
    pool = SlotPool(4 * SIZE)
    held, other = pool.acquire(SIZE), pool.acquire(SIZE)
    arena = weakref.ref(pool._chunks[0])
    del other
    pool.close()
    assert arena() is not None
    del held
    assert arena() is None and pool.used_bytes == 0


def test_threads_take_and_let_go() -> None:
    device, pool = Device(), SlotPool(16 * SIZE)
    pool.register(device.pin, device.unpin)

    def work(value: int) -> None:
        for _ in range(200):
            array = pool.acquire(SIZE, pinned=True)
            if array is not None:
                array[:] = value
                assert (array == value).all()

    together(*(partial(work, n) for n in range(6)))
    assert pool.used_bytes == 0
    pool.close()
