"""The lock, and what finalizers leave to it."""

from __future__ import annotations

import threading

import pytest

from tests.clock import held
from tests.inside import Guard


def test_work_waits_until_the_change_is_over() -> None:
    guard, done = Guard(), list[str]()
    with guard, guard:
        guard.defer(lambda: done.append("x"))
        guard.run_deferred()
        assert not done
    guard.run_deferred()
    assert done == ["x"]
    guard.defer(lambda: done.append("now"))
    assert done == ["x", "now"]


def test_the_lock_is_entered_and_left_in_c() -> None:
    """No bytecode of ours runs between taking it and the block that gives it back."""
    assert not any(hasattr(getattr(Guard, name), "__code__") for name in ("__enter__", "__exit__"))


def test_work_deferred_by_deferred_work_is_done_too() -> None:
    guard, done = Guard(), list[int]()

    def again() -> None:
        done.append(1)
        if len(done) < 3:
            guard.defer(again)

    with guard:
        guard.defer(again)
    guard.run_deferred()
    assert done == [1, 1, 1]


def test_deferring_never_waits_for_another_thread() -> None:
    guard, done = Guard(), list[int]()
    with held(guard):
        guard.defer(lambda: done.append(1))
        assert not done
    guard.run_deferred()
    assert done == [1]


def test_failing_work_does_not_keep_the_lock() -> None:
    guard = Guard()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.defer(fail)
    entered = list[bool]()
    thread = threading.Thread(target=lambda: entered.append(guard.acquire(timeout=60)))
    thread.start()
    thread.join()
    assert entered == [True]
