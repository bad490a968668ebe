"""Whoever drives an engine is interrupted, at any line of it: the others do not notice."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from flowkv import Answer, Engine
from tests.engine.nano import Nano, make_kv
from tests.inside import PagedRow, make_request, sampling, scheduler
from tests.inside import engine_engine as serving

BOOKS = (
    *(serving.Inbox, serving.Loop, scheduler.RunningRequest),
    *(scheduler.RestoreQueue, scheduler.QueuePrefetch, scheduler.KVManager),
)
METHODS = {f"{book.__qualname__}.{name}" for book in BOOKS for name in vars(book)}
METHODS -= {"Loop.drive_until", "Loop.serve"}
"""What an engine does with requests, but for who drives it, and so is interrupted."""
TAKING = ("_take_in", "_take_fresh", "taken", "_call_off")
GIVING = ("draw", "_draw", "_hand_out", "_give", "_end", "_close", "_answer")
DELICATE = (*TAKING, *GIVING)
"""Functions that change what cannot be done a second time."""
SAMPLED = {"do_sample": True, "temperature": 3.0, "eos_token_id": 45}


FILES = (serving.__file__, scheduler.__file__)


def _traced(code: CodeType) -> bool:
    if code.co_filename == sampling.__file__:
        # Only that: one choice that is interrupted by half cannot be made again.
        return code.co_name == "draw"
    return code.co_filename in FILES and code.co_qualname in METHODS


class Interrupt:
    """Raises at one line of an engine.

    Args:
        at: Which of those that are run, from 1 on; 0 only counts them.

    Attributes:
        lines: How many were run.
        delicate: The first run of each line of `DELICATE`, on each way that leads there.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.lines = at, 0
        self.delicate: dict[tuple[object, ...], int] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not _traced(frame.f_code):
            return None
        # Leaving a `with` is a line to tracers, but no place where Python looks for signals.
        text = linecache.getline(file, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith("with "):
            self.lines += 1
            if name in DELICATE and frame.f_back and frame.f_back.f_back:
                way = frame.f_lineno, frame.f_back.f_lineno, frame.f_back.f_back.f_lineno
                self.delicate.setdefault((file, *way), self.lines)
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def served(interrupt: Interrupt) -> list[tuple[str, list[int]]]:
    """What becomes of those who did not drive."""
    with make_kv(pages=7, max_rows=8) as kv:
        engine = Engine(Nano(), kv, max_rows=3, token_budget=12, max_waiting=9)
        others: list[Answer] = []
        given = [(3, SAMPLED), (14, {}), (9, SAMPLED), (6, {}), (5, {})]
        for n, (size, options) in enumerate(given):
            fields = {"max_new_tokens": 7, "seed": n, "options": options}
            fields |= {"deadline_s": 0.0} if n == 4 else {}
            request = make_request([n + 5] * size, fields)
            others.append(engine._hand_in(request, limited=True).answer)
        others[3].cancel()
        told: list[int] = []
        others[1].add_done_callback(lambda answer: told.append(answer.number))
        mine: list[list[int]] = [[9] * 12, [8] * 3]
        try:
            with interrupt:
                engine.run(mine, max_new_tokens=4)
        except KeyboardInterrupt:
            pass
        loop = engine._loop
        for _ in range(200):
            if loop.idle and not loop.inbox.pending:
                break
            loop.turn()
        loop.turn()
        assert loop.inbox.waiting == 0 and not kv._open and not loop._made
        assert told == [others[1].number]
        results = [answer.result(0) for answer in others]
        return [(one.reason, one.tokens) for one in results]


def check(choose: Callable[[Interrupt], Iterable[int]]) -> None:
    left_alone = Interrupt()
    wanted = served(left_alone)
    reasons = [reason for reason, _ in wanted]
    assert reasons == ["stop", "length", "length", "cancelled", "deadline"], wanted
    for at in choose(left_alone):
        assert served(Interrupt(at)) == wanted, f"interrupted at line {at}"


def test_an_interrupt_at_any_line_harms_nobody_else() -> None:
    check(lambda run: range(7, run.lines, 179))


@pytest.mark.usefixtures("behind")
def test_an_interrupt_while_tokens_are_to_be_read_harms_nobody_else() -> None:
    check(lambda run: range(11, run.lines, 251))


@pytest.mark.parametrize("part", range(2))
def test_an_interrupt_of_what_cannot_be_repeated_harms_nobody_else(part: int) -> None:
    check(lambda run: list(run.delicate.values())[part::2])


def test_after_an_interrupt_nobody_is_counted_who_does_not_wait() -> None:
    nano = Nano()
    with make_kv() as kv, Engine(nano, kv, max_rows=2, max_waiting=3) as engine:
        stop(nano, after=2)
        with pytest.raises(KeyboardInterrupt):
            engine.run([[n] for n in range(9)])
        assert engine.submit([1], max_new_tokens=3).result(90).tokens == nano.alone([1], 3)


def stop(nano: Nano, after: int) -> None:
    def interrupt(tokens: torch.Tensor) -> None:
        if nano.calls == after:
            nano.calls += 1
            raise KeyboardInterrupt

    nano.before = interrupt


def test_a_row_that_cannot_be_closed_then_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nano = Nano()
    with make_kv() as kv, Engine(nano, kv, max_rows=4) as engine:
        others = [engine._hand_in(make_request([n], {}), limited=True) for n in (3, 4)]
        stop(nano, after=2)
        close, once = PagedRow.close, [True]

        def closed(row: PagedRow, why: str = "") -> None:
            close(row, why)
            if once.pop() if once else False:
                raise OSError("no room for what it leaves")

        monkeypatch.setattr(PagedRow, "close", closed)
        with pytest.raises(KeyboardInterrupt):
            engine.run([[5]])
        assert "could not be closed" in caplog.text and not kv._open
        engine._start()
        for n, live in zip((3, 4), others, strict=True):
            assert live.answer.result(90).tokens == nano.alone([n], 128)


def test_a_request_that_ended_right_before_an_interrupt_is_not_begun_anew() -> None:
    with make_kv() as kv, Engine(Nano(), kv) as engine:
        live, loop = engine._hand_in(make_request([3], {}), limited=True), engine._loop
        loop.turn()
        loop.keeper.close(live, 1.0)
        loop._due.append((live.answer, live.completion("length", 1.0), ValueError("its own")))
        loop.reset([])  # as if it came before the request was taken from the lives
        with pytest.raises(ValueError, match="its own"):
            live.answer.result(0)
        assert not loop.waiting and not loop.busy


@pytest.mark.deep
@pytest.mark.parametrize("part", range(8))
def test_an_interrupt_at_every_line_harms_nobody_else(part: int) -> None:
    check(lambda run: range(1 + part, run.lines + 1, 8))
