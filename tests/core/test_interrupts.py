"""Handlers that FlowKV stands before stay what their owners set, for all who ask Python."""

from __future__ import annotations

import _signal
import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.inside import interrupts


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where a shell started the tests with it ignored."""
    before = _signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    _signal.signal(signal.SIGINT, before)


def mine(number: int, frame: Any) -> None:
    """A user's own handler."""


@pytest.mark.parametrize("handler", [signal.default_int_handler, mine])
@pytest.mark.usefixtures("ctrl_c")
def test_the_handler_that_was_set_is_the_one_that_python_names(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    for _ in range(2):
        interrupts.cover()
        assert _signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
    covered = signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, covered)  # as whoever sets one for a while does
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGKILL) is signal.SIG_DFL


@pytest.mark.parametrize("within", [False, True], ids=["before", "before and within"])
@pytest.mark.usefixtures("ctrl_c")
def test_asyncio_cancels_its_task_on_ctrl_c(within: bool) -> None:
    told: list[str] = []

    async def serve() -> None:
        if within:  # the handler of asyncio is there by now
            interrupts.cover()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    interrupts.cover()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(serve())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert told == ["cancelled"] * 2
