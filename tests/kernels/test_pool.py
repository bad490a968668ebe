"""The threads of the CPU kernels."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.clock import in_child
from tests.inside import cpu_pool


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.usefixtures("threads")
def test_every_slice_runs_once() -> None:
    for count in (1, 2, 7, 100):
        done = []
        cpu_pool.spread(done.append, count)
        assert sorted(done) == list(range(count))


@pytest.mark.usefixtures("threads")
def test_helpers_help_and_the_caller_too() -> None:
    meeting = threading.Barrier(3, timeout=30)
    names = set()

    def run(_: int) -> None:
        meeting.wait()
        names.add(threading.current_thread().name)

    cpu_pool.spread(run, 3)
    assert len(names) == 3 and threading.current_thread().name in names


@pytest.mark.usefixtures("threads")
def test_many_callers_share_the_helpers() -> None:
    def call(_: int) -> int:
        done = []
        cpu_pool.spread(done.append, 20)
        return sum(done)

    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(call, range(40))) == [190] * 40


@pytest.mark.usefixtures("threads")
def test_errors_reach_the_caller_after_all_slices_ended() -> None:
    running = []

    def run(i: int) -> None:
        running.append(i)
        if i == 1:
            raise ValueError("slice 1")

    with pytest.raises(ValueError, match="slice 1"):
        cpu_pool.spread(run, 6)
    assert 1 in running


def test_small_work_stays_on_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert cpu_pool.slices(0, 10) == cpu_pool.slices(19, 10) == 1
    assert cpu_pool.slices(20, 10) == 2
    assert cpu_pool.slices(10_000, 10) == 4 * cpu_pool.SLICES_PER_THREAD
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu_pool.slices(10_000, 10) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.usefixtures("threads")
def test_a_forked_child_makes_its_own_threads() -> None:
    cpu_pool.spread(lambda i: None, 8)  # the parent has a pool, whose threads the child lacks
    done: list[int] = []
    assert in_child(lambda: cpu_pool.spread(done.append, 8) or sorted(done) != list(range(8))) == 0
