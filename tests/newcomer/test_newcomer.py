"""What a newcomer is told to do can be done, from the wheel and with an empty home."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.newcomer import __main__ as newcomer

TASKS = dict(newcomer.tasks())


def test_there_are_enough_of_them() -> None:
    assert len(TASKS) > 10 and all(TASKS.values())


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # the first one compiles
def test_every_task(tmp_path: Path) -> None:
    """In one home, where all but the first find what was compiled."""
    faults = {}
    for name, took_s, fault in newcomer.done(newcomer.settle(tmp_path), TASKS):
        print(f"{took_s:.1f} s {name}")
        if fault:
            faults[name] = fault
    assert not faults
