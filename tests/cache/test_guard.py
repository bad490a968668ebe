"""The lock, and what finalizers leave to it."""

from __future__ import annotations

import threading

import pytest

from tests.inside import Guard


def test_work_waits_for_the_outermost_exit() -> None:
    guard, done = Guard(), list[str]()
    with guard, guard:
        guard.defer(lambda: done.append("x"))
        assert not done
    assert done == ["x"]
    guard.defer(lambda: done.append("now"))
    assert done == ["x", "now"]


def test_work_left_behind_is_done_at_the_next_entry() -> None:
    guard, done = Guard(), list[int]()
    guard._deferred.append(lambda: done.append(1))  # its thread found the lock just being left
    with guard:
        assert done == [1]


def test_work_deferred_by_deferred_work_is_done_too() -> None:
    guard, done = Guard(), list[int]()

    def again() -> None:
        done.append(1)
        if len(done) < 3:
            guard.defer(again)

    with guard:
        guard.defer(again)
    assert done == [1, 1, 1]


def test_deferring_never_waits_for_another_thread() -> None:
    guard, done, held, go = Guard(), list[int](), threading.Event(), threading.Event()

    def hold() -> None:
        with guard:
            held.set()
            go.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    guard.defer(lambda: done.append(1))
    assert not done
    go.set()
    thread.join()
    with guard:
        assert done == [1]


@pytest.mark.parametrize("within", [True, False])
def test_failing_work_does_not_keep_the_lock(within: bool) -> None:
    guard = Guard()

    def fail() -> None:
        raise ZeroDivisionError

    if within:
        with pytest.raises(ZeroDivisionError), guard:
            guard.defer(fail)
    else:
        guard._deferred.append(fail)
        with pytest.raises(ZeroDivisionError), guard:
            pass
    entered = list[bool]()
    thread = threading.Thread(target=lambda: entered.append(guard._lock.acquire(timeout=5)))
    thread.start()
    thread.join()
    assert entered == [True]
