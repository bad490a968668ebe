"""Ctrl-C anywhere in who drives an engine, with the signal itself: the engine serves on."""

from __future__ import annotations

from typing import Any

import pytest

from flowkv import Engine
from tests import interrupts
from tests.engine.nano import Nano, make_kv


def check(most: int, **options: Any) -> None:
    nano, kv = Nano(), make_kv()
    wanted = nano.alone([3, 4, 5], 3)
    with interrupts.collectable(), Engine(nano, kv, max_rows=2) as engine:

        def story() -> None:
            engine.run([[3, 4, 5], [9] * 12], max_new_tokens=3)

        story()
        count = interrupts.places(story, **options)
        for at in interrupts.chosen(count, most):
            interrupts.run(story, interrupts.Tracer(at, **options))
            assert interrupts.free(engine._loop.drive) and interrupts.free(engine._starting)
            assert interrupts.free(engine._inbox._changed)
            (answer,) = engine.run([[3, 4, 5]], max_new_tokens=3)
            assert answer.tokens == wanted and engine._loop.idle
            interrupts.whole(kv)
    kv.close()


def test_at_lines_of_the_engine() -> None:
    check(40, only=("engine/",))


@pytest.mark.slow
def test_at_any_line() -> None:
    check(10_000)
