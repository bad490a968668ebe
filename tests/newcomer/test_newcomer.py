"""What a newcomer is told to do can be done, from the wheel and with an empty home."""

from __future__ import annotations

import pytest

from tests.newcomer import __main__ as newcomer
from tests.test_artifacts import Stranger

TASKS = dict(newcomer.tasks())


def test_there_are_enough_of_them() -> None:
    assert len(TASKS) > 10 and all(TASKS.values())


@pytest.fixture(scope="module")
def somebody(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    return newcomer.settle(tmp_path_factory.mktemp("newcomer"))


@pytest.mark.thorough
@pytest.mark.timeout(600)  # the first one compiles
@pytest.mark.parametrize("name", TASKS)
def test_a_task(name: str, somebody: Stranger) -> None:
    print(f"{newcomer.seconds(somebody, name, TASKS[name]):.1f} s")
