"""Answers: waited for, iterated, awaited, called off; from any thread."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import wait
from functools import partial

import pytest
import torch

from flowkv import Answer, Completion, Engine
from tests.clock import together
from tests.engine.nano import Gate, Nano, make_kv, settled
from tests.inside import AnswerSource, Finished, _Ear, compiling, tell
from tests.inside import request as answer_module

LONG = 1500


# ---- tokens as they come


def test_tokens_come_one_by_one(engine: Engine, nano: Nano) -> None:
    answer = engine.submit([1, 2], max_new_tokens=5)
    assert list(answer) == answer.result().tokens == answer.tokens == nano.alone([1, 2], 5)
    assert list(answer) == answer.tokens, "again, from the first one on"


def test_the_first_token_comes_before_the_last_is_made(engine: Engine) -> None:
    answer = engine.submit([1, 2], max_new_tokens=LONG)
    next(iter(answer))
    assert not answer.done()
    answer.cancel()


def test_many_listen_to_one(engine: Engine, nano: Nano) -> None:
    answer = engine.submit([3], max_new_tokens=60)
    heard: list[list[int]] = []
    together(*[lambda: heard.append(list(answer))] * 6)
    assert heard == [nano.alone([3], 60)] * 6
    assert not answer.heard, "and go when they have heard all"


def test_who_stops_listening_stops_nothing(engine: Engine) -> None:
    answer = engine.submit([3], max_new_tokens=20)
    for _ in answer:
        break
    assert not answer.heard
    assert len(answer.result(90).tokens) == 20


def test_iteration_ends_with_the_failure(engine: Engine, nano: Nano) -> None:
    def fail(ids: object) -> None:
        if nano.calls == 3:
            raise ValueError("no more")

    nano.before = fail
    answer = engine.submit([3], max_new_tokens=20)
    heard = []
    with pytest.raises(ValueError, match="no more"):
        for token in answer:
            heard.append(token)
    assert len(heard) == 3
    with pytest.raises(ValueError, match="no more"):
        answer.result()
    assert isinstance(answer.exception(), ValueError)


# ---- event loops


def test_answers_are_awaited(engine: Engine, nano: Nano) -> None:
    async def ask() -> tuple[Completion, list[Completion], list[int]]:
        one = await engine.submit([1], max_new_tokens=4)
        many = await asyncio.gather(*(engine.submit([n], max_new_tokens=3) for n in range(3)))
        heard = [token async for token in engine.submit([2], max_new_tokens=6)]
        return one, many, heard

    one, many, heard = asyncio.run(ask())
    assert one.tokens == nano.alone([1], 4)
    assert [done.tokens for done in many] == [nano.alone([n], 3) for n in range(3)]
    assert heard == nano.alone([2], 6)


def test_run_is_awaited_without_holding_the_event_loop(engine: Engine, nano: Nano) -> None:
    gate = Gate(nano)

    async def ask() -> list[Completion]:
        running = asyncio.ensure_future(engine.arun([[1], [2], [3]], max_new_tokens=3))
        await asyncio.to_thread(gate.arrived)
        assert not running.done()
        gate.open()  # by this event loop, which is free
        return await running

    done = asyncio.run(ask())
    assert [one.tokens for one in done] == [nano.alone([n], 3) for n in (1, 2, 3)]


def test_arun_serves_the_others_before_it_raises(engine: Engine, nano: Nano) -> None:
    def fail(ids: torch.Tensor) -> None:
        if (ids == 60).any():
            raise ValueError("of the model")

    nano.before = fail
    over: list[Finished] = []
    engine.kv.bus.subscribe(over.append, Finished)
    with pytest.raises(ValueError, match="of the model"):
        asyncio.run(engine.arun([[60], [1], [2]], max_new_tokens=30))
    assert sorted(one.reason for one in over) == ["failed", "length", "length"]


def test_a_task_that_is_cancelled_calls_its_request_off(engine: Engine) -> None:
    async def ask() -> Answer:
        answer = engine.submit([1], max_new_tokens=LONG)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answer, 0.05)
        return answer

    answer = asyncio.run(ask())
    assert answer.result(90).reason == "cancelled"


def test_arun_that_is_cancelled_calls_off_all(engine: Engine) -> None:
    async def ask() -> None:
        running = asyncio.ensure_future(engine.arun([[1], [2], [3]], max_new_tokens=LONG))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(ask())
    assert settled(engine)


def test_an_event_loop_may_be_gone_before_the_answer(engine: Engine, nano: Nano) -> None:
    gate, loop = Gate(nano), asyncio.new_event_loop()
    answer = engine.submit([1], max_new_tokens=3)
    gate.arrived()
    answer._listen(_Ear(lambda: None, loop))
    loop.close()
    gate.open()
    assert len(answer.result(90).tokens) == 3
    assert engine.submit([1], max_new_tokens=1).result(90).reason == "length"


def test_an_event_loop_is_woken_once_for_all_it_has_not_seen(engine: Engine) -> None:
    answers = [engine.submit([n], max_new_tokens=1) for n in range(3)]
    wait(answers, 20)

    async def listen() -> list[int]:
        woken, loop = [], asyncio.get_running_loop()
        for number, answer in enumerate(answers):
            answer._listen(_Ear(partial(woken.append, number), loop))
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            call = loop.call_soon_threadsafe
            patch.setattr(loop, "call_soon_threadsafe", lambda *a: (calls.append(a), call(*a)))
            tell(answers)
            tell(answers)
        await asyncio.sleep(0.01)
        assert len(calls) == 1
        return woken

    assert asyncio.run(listen()) == [0, 1, 2]


def test_engines_are_closed_by_event_loops(nano: Nano) -> None:
    async def ask() -> Completion:
        with make_kv() as kv:
            async with Engine(nano, kv) as engine:
                return await engine.submit([1, 2], max_new_tokens=3)

    assert asyncio.run(ask()).tokens == nano.alone([1, 2], 3)


# ---- called off


def test_a_request_is_called_off_while_it_waits(engine: Engine, nano: Nano) -> None:
    gate = Gate(nano)
    busy = [engine.submit([n], max_new_tokens=2) for n in range(2)]
    gate.arrived()
    waiting = engine.submit([7], max_new_tokens=2)
    assert waiting.cancel()
    gate.open()
    done = waiting.result(90)
    assert (done.reason, done.tokens) == ("cancelled", [])
    assert done.ttft_s == 0.0 and done.queued_s == done.seconds > 0.0
    assert [one.result(90).reason for one in busy] == ["length", "length"]


def test_a_request_is_called_off_within_a_step(engine: Engine, nano: Nano) -> None:
    gate = Gate(nano)
    answers = [engine.submit([n], max_new_tokens=LONG) for n in range(2)]
    gate.arrived()
    assert answers[0].cancel() and answers[0].cancel(), "as often as one likes"
    gate.open()
    done = answers[0].result(90)
    assert done.reason == "cancelled" and len(done.tokens) <= 1
    assert not answers[0].cancel(), "it is over"
    assert not answers[0].cancelled(), "it has a result"
    assert not answers[1].done()
    answers[1].cancel()
    assert settled(engine)


def test_tokens_end_where_a_request_is_called_off(engine: Engine) -> None:
    answer = engine.submit([1], max_new_tokens=LONG)
    heard = []
    for token in answer:
        heard.append(token)
        if len(heard) == 3:
            answer.cancel()
    assert heard == answer.result().tokens and 3 <= len(heard) < LONG


# ---- deadlines


def test_a_request_that_comes_too_late_ends(engine: Engine, nano: Nano) -> None:
    late = engine.submit([1], max_new_tokens=LONG, deadline_s=0.3)
    done = late.result(90)
    assert done.reason == "deadline" and 0 < len(done.tokens) < LONG
    assert done.seconds >= 0.3
    assert settled(engine)


def test_a_deadline_passes_while_a_request_waits(engine: Engine, nano: Nano) -> None:
    gate = Gate(nano)
    busy = [engine.submit([n], max_new_tokens=2) for n in range(2)]
    gate.arrived()
    late = engine.submit([7], max_new_tokens=2, deadline_s=0.01)
    soon = engine.submit([8], max_new_tokens=2, deadline_s=1000.0)
    time.sleep(0.02)
    gate.open()
    assert (late.result(90).reason, late.result().tokens) == ("deadline", [])
    assert soon.result(90).reason == "length"
    assert all(one.result(90).reason == "length" for one in busy)


def test_compiling_takes_nothing_from_a_deadline(engine: Engine, nano: Nano) -> None:
    gate = Gate(nano)
    answer = engine.submit([7], max_new_tokens=2, deadline_s=2.0)
    gate.arrived()
    with compiling.around():  # on another thread, as the model's own code would on its own
        time.sleep(2.5)
        gate.open()
        assert answer.result(90).reason == "length"


def test_a_deadline_of_now(engine: Engine) -> None:
    (done,) = engine.run([[1]], deadline_s=0.0)
    assert done.reason == "deadline" and done.tokens == []


def test_an_answer_may_be_given_while_somebody_begins_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a child process, too, that has the desk of given answers from its parent."""
    given = Completion(tokens=[7], reason="length", prompt_tokens=1)

    class Early(Answer):
        asked = False

        def done(self) -> bool:
            was = super().done()
            if not self.asked:
                self.asked = True
                self.settle(given, None)
            return was

    monkeypatch.setattr(answer_module._OVER, "pid", -1)
    assert Early(AnswerSource(lambda number: None), 0).result(60) is given
