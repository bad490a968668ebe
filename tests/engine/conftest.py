"""An engine over the small model, that may be busy when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowkv import Engine
from tests.engine.nano import Nano, make_kv
from tests.inside import engine_engine


@pytest.fixture
def nano() -> Nano:
    return Nano()


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a device that runs behind: tokens are read a step late."""
    monkeypatch.setattr(engine_engine, "runs_behind", lambda logits: True)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that ran over tokens that were not read yet."""
    seen, own = list[int](), engine_engine.follow

    def follow(runner: Any, parts: Any, ids: Any) -> Any:
        seen.append(len(parts))
        return own(runner, parts, ids)

    monkeypatch.setattr(engine_engine, "follow", follow)
    return seen


@pytest.fixture
def engine(nano: Nano) -> Iterator[Engine]:
    kv = make_kv(pages=1024)
    with Engine(nano, kv, max_rows=2, token_budget=16, max_waiting=3) as made:
        yield made
        made.close(drain=False)
    assert not kv._open
    kv.close()
