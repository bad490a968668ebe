"""Engines are used by several threads, and by callbacks on their own."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial

import pytest

from flowkv import Answer, Completion, Engine
from tests.clock import together
from tests.engine.nano import Gate, Nano, make_kv, settled
from tests.inside import BusyError, StateError

LONG = 1500


# ---- threads


def test_a_full_queue_refuses(engine: Engine, nano: Nano) -> None:
    gate = Gate(nano)
    engine.submit([1], max_new_tokens=2)
    gate.arrived()
    for n in range(3):
        engine.submit([n], max_new_tokens=2)
    with pytest.raises(BusyError, match="3 requests wait already"):
        engine.submit([4])
    gate.open()


def test_many_threads_submit_and_call_off(nano: Nano) -> None:
    wanted = {n: nano.alone([n, n + 1], 8) for n in range(8)}
    with make_kv() as kv, Engine(nano, kv, max_rows=4, max_waiting=1000) as engine:

        def ask(n: int) -> None:
            for turn in range(12):
                answer = engine.submit([n, n + 1], max_new_tokens=8)
                if turn % 3 == 1:
                    answer.cancel()
                done = answer.result(30)
                assert done.tokens == wanted[n][: len(done.tokens)]
                assert done.reason in ("length", "cancelled")

        together(*(partial(ask, n) for n in range(8)))
        assert settled(engine)


def test_threads_run_requests_at_the_same_time(nano: Nano) -> None:
    done: dict[int, list[Completion]] = {}
    with make_kv() as kv, Engine(nano, kv, max_rows=4) as engine:

        def ask(n: int) -> None:
            done[n] = engine.run([[n], [n, n]], max_new_tokens=20)

        together(*(partial(ask, n) for n in range(5)))
    for n in range(5):
        assert [one.tokens for one in done[n]] == [nano.alone([n], 20), nano.alone([n, n], 20)]


def test_submit_while_another_thread_runs(engine: Engine, nano: Nano) -> None:
    gate, done = Gate(nano), []
    thread = threading.Thread(target=lambda: done.extend(engine.run([[1]], max_new_tokens=3)))
    thread.start()
    gate.arrived()  # on the thread that runs
    answer = engine.submit([2], max_new_tokens=40)
    gate.open()
    assert answer.result(90).tokens == nano.alone([2], 40), "taken over when the run is over"
    thread.join(60)
    assert done[0].tokens == nano.alone([1], 3)


def test_others_may_wait_with_futures(engine: Engine) -> None:
    short, long = engine.submit([1], max_new_tokens=2), engine.submit([2], max_new_tokens=LONG)
    done, rest = wait([short, long], timeout=60, return_when=FIRST_COMPLETED)
    assert done == {short} and rest == {long}
    long.cancel()


# ---- callbacks


def test_callbacks_may_submit(engine: Engine, nano: Nano) -> None:
    chained: list[Answer] = []
    came = threading.Event()

    def go_on(answer: Answer) -> None:
        chained.append(engine.submit([*answer.result().tokens], max_new_tokens=3))
        came.set()

    engine.submit([1], max_new_tokens=2).add_done_callback(go_on)
    assert came.wait(60)
    assert chained[0].result(90).tokens == nano.alone(nano.alone([1], 2), 3)


def test_callbacks_that_raise_harm_nobody(engine: Engine) -> None:
    def fail(answer: Answer) -> None:
        raise ValueError("of the user's own")

    answers = [engine.submit([n], max_new_tokens=3) for n in range(3)]
    logging.getLogger("concurrent.futures").disabled = True
    try:
        for answer in answers:
            answer.add_done_callback(fail)
        assert [answer.result(90).reason for answer in answers] == ["length"] * 3
        assert engine.submit([1], max_new_tokens=1).result(90).reason == "length"
    finally:
        logging.getLogger("concurrent.futures").disabled = False


def test_the_engines_thread_does_not_wait_for_itself(engine: Engine) -> None:
    refused: list[str] = []
    came = threading.Event()
    other = engine.submit([9], max_new_tokens=LONG)

    def wrong(answer: Answer) -> None:
        for call in (other.result, other.exception, lambda: list(other), lambda: engine.run([[1]])):
            try:
                call()
            except StateError as error:
                refused.append(str(error))
        came.set()

    engine.submit([1], max_new_tokens=2).add_done_callback(wrong)
    assert came.wait(60)
    assert len(refused) == 4 and all("own thread" in one for one in refused)
    other.cancel()


def test_a_callback_may_close_the_engine(nano: Nano) -> None:
    with make_kv() as kv:
        engine = Engine(nano, kv)
        answers = [engine.submit([n], max_new_tokens=30) for n in range(3)]
        answers.append(engine.submit([4], max_new_tokens=2))
        answers[-1].add_done_callback(lambda _: engine.close())
        assert [answer.result(90).reason for answer in answers] == ["length"] * 4
        engine.close()
