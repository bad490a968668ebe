"""Descriptors of tiers: one at most, and none after the end."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkv import Tier
from flowkv.tiers import Completion, Outcome
from flowkv.tiers.disk import DiskTier
from tests.inside import HostTier
from tests.inside import worker_Completions as Completions

from .frames import hits, stored


def descriptors() -> list[str]:
    """Eventfds of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "eventfd" in link:
            found.append(name)
    return found


def test_none_is_made_after_the_end() -> None:
    before, answers = descriptors(), Completions()
    fd = answers.fileno()
    assert fd == answers.fileno() >= 0
    answers.close()
    answers.post([Completion(1, 0, b"", Outcome.STORED, "", None, 0, 0.0)])
    assert answers.fileno() == -1
    assert len(answers.poll()) == 1
    answers.close()
    assert descriptors() == before


def test_the_end_wakes_a_thread_that_polls() -> None:
    answers = Completions()
    thread = threading.Thread(target=answers.poll, args=(300.0,))
    thread.start()
    while not answers._changed._waiters:
        pass
    answers.close()
    thread.join(60)
    assert not thread.is_alive()


def test_none_stays_whoever_is_faster() -> None:
    before = descriptors()
    for _ in range(200):
        answers, start = Completions(), threading.Barrier(3)

        def ask(answers: Completions = answers, start: threading.Barrier = start) -> None:
            start.wait()
            for _ in range(20):
                answers.fileno()

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        answers.close()
        for thread in threads:
            thread.join()
    assert descriptors() == before


@pytest.mark.parametrize(
    "make",
    [lambda path: DiskTier(path, 1 << 20), lambda _: HostTier(1 << 20)],
    ids=["disk", "host"],
)
def test_a_tier_leaves_none(tmp_path: Path, make: Callable[[Path], Tier]) -> None:
    make(tmp_path / "first").close()  # whatever is made once in a process
    before = descriptors()
    tier = make(tmp_path / "second")
    stored(tier, range(4))
    fd = tier.fileno()  # type: ignore[attr-defined]
    assert hits(tier, range(4)) == 4
    assert not select.select([fd], [], [], 0)[0]
    tier.close()
    assert tier.fileno() == -1  # type: ignore[attr-defined]
    assert descriptors() == before
