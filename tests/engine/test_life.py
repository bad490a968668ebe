"""Engines end as they should: closed, forgotten, forked, or with the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest

from flowkv import Engine
from tests.clock import in_child
from tests.engine.nano import Gate, Nano, make_kv
from tests.inside import StateError, make_request

ROOT = Path(__file__).resolve().parents[2]


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "flowkv-engine"]


def gone() -> bool:
    for _ in range(2000):
        if not threads():
            return True
        time.sleep(0.002)
    return False


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    yield
    assert gone()


# ---- closed


def test_close_waits_for_what_was_submitted() -> None:
    nano = Nano()
    with make_kv() as kv:
        engine = Engine(nano, kv, max_rows=2)
        answers = [engine.submit([n], max_new_tokens=12) for n in range(5)]
        engine.close()
        assert all(answer.done() for answer in answers)
        assert [answer.result().tokens for answer in answers] == [
            nano.alone([n], 12) for n in range(5)
        ]
        assert not threads()
        engine.close()
        with pytest.raises(StateError, match="closed"):
            engine.submit([1])
        with pytest.raises(StateError, match="closed"):
            engine.run([[1]])
        assert "closed" in repr(engine)


def test_close_without_draining_calls_off() -> None:
    nano = Nano()
    with make_kv() as kv:
        engine = Engine(nano, kv, max_rows=2)
        answers = [engine.submit([n], max_new_tokens=1500) for n in range(5)]
        while not answers[0].tokens:
            time.sleep(0.001)
        engine.close(drain=False)
        assert [answer.result(0).reason for answer in answers] == ["cancelled"] * 5
        assert answers[0].result().tokens and not answers[4].result().tokens
        assert not kv._open and not threads()


def test_close_drains_for_so_long() -> None:
    with make_kv() as kv:
        engine = Engine(Nano(), kv, max_rows=2)
        short, long = engine.submit([1], max_new_tokens=2), engine.submit([2], max_new_tokens=1800)
        assert short.result(90).reason == "length"
        engine.close(timeout_s=0.02)
        assert long.result(0).reason == "cancelled"


def test_an_exception_in_the_block_calls_off() -> None:
    with make_kv() as kv:
        with pytest.raises(ZeroDivisionError), Engine(Nano(), kv) as engine:
            answer = engine.submit([1], max_new_tokens=1800)
            raise ZeroDivisionError
        assert answer.result(0).reason == "cancelled"


def test_an_engine_without_requests_starts_no_thread() -> None:
    with make_kv() as kv, Engine(Nano(), kv) as engine:
        engine.run([[1]], max_new_tokens=2)
        assert not threads()
        engine.close()
        assert not threads()


def test_close_waits_for_a_run_on_another_thread() -> None:
    nano, done = Nano(), []
    with make_kv() as kv:
        engine = Engine(nano, kv)
        gate = Gate(nano)
        thread = threading.Thread(target=lambda: done.extend(engine.run([[1]], max_new_tokens=9)))
        thread.start()
        gate.arrived()
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        gate.open()
        closing.join(60)
        thread.join(60)
        assert len(done[0].tokens) == 9


def test_a_second_engine_over_the_same_cache() -> None:
    nano = Nano()
    with make_kv() as kv, Engine(nano, kv) as one, Engine(nano, kv) as two:
        answers = [
            engine.submit([n, n], max_new_tokens=9) for n in range(6) for engine in (one, two)
        ]
        wanted = [nano.alone([n, n], 9) for n in range(6) for _ in range(2)]
        assert [answer.result(90).tokens for answer in answers] == wanted


@pytest.mark.parametrize("busy", [True, False])
def test_a_cache_that_is_closed_under_an_engine_is_told(busy: bool) -> None:
    nano, kv = Nano(), make_kv()
    engine = Engine(nano, kv, max_rows=2)
    answers = []
    if busy:
        gate = Gate(nano)
        answers = [engine.submit([n], max_new_tokens=1500) for n in range(5)]
        gate.arrived()
        closing = threading.Thread(target=kv.close)
        closing.start()
        gate.open()
        closing.join(60)
    kv.close()
    for answer in answers:
        assert isinstance(answer.exception(20), StateError)
    with pytest.raises(StateError):
        engine.submit([1])
    engine.close()


def test_what_a_closed_cache_leads_to_names_the_cause() -> None:
    for turns in (0, 2):
        kv = make_kv()
        engine = Engine(Nano(), kv)
        loop, answer = engine._loop, engine._hand_in(make_request([1], {}), limited=True).answer
        for _ in range(turns):
            loop.turn()
        kv.close()
        loop.turn()
        with pytest.raises(StateError, match="Close an engine before its cache"):
            answer.result(0)
    kv, told = make_kv(), ZeroDivisionError()
    engine = Engine(Nano(), kv)
    answer = engine._hand_in(make_request([1], {}), limited=True).answer
    kv.close()
    engine._loop.fail(told)
    with pytest.raises(StateError, match="Close an engine before its cache") as raised:
        answer.result(0)
    assert raised.value.__cause__ is not None and raised.value.__cause__.__cause__ is told


# ---- forgotten


def test_an_engine_that_nobody_holds_still_answers() -> None:
    nano = Nano()
    with make_kv() as kv:
        engine = Engine(nano, kv)
        answer, held = engine.submit([1, 2], max_new_tokens=200), weakref.ref(engine)
        del engine
        gc.collect()
        assert held() is None
        assert answer.result(90).tokens == nano.alone([1, 2], 200)
        assert gone(), "and then it ends"
        assert not kv._open


def test_an_answer_keeps_no_engine_and_no_cache() -> None:
    kv = make_kv()
    with Engine(Nano(), kv) as engine:
        answer, called_off = (engine.submit([n], max_new_tokens=2000 * n + 1) for n in (0, 1))
        called_off.cancel()
        assert called_off.result(90).reason == "cancelled"
        assert answer.result(90).reason == "length"
        held = weakref.ref(engine._loop)
    kv.close()
    del engine, kv
    gc.collect()
    assert held() is None
    assert not answer.cancel() and answer.exception() is None and len(list(answer)) == 1


def test_an_idle_engine_that_nobody_holds_ends() -> None:
    with make_kv() as kv:
        engine = Engine(Nano(), kv)
        engine.submit([1], max_new_tokens=1).result(90)
        assert threads()
        del engine
        gc.collect()
        assert gone()


# ---- other processes, and the end of this one


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_is_refused_and_leaves_the_parent_alone() -> None:
    nano = Nano()
    with make_kv() as kv, Engine(nano, kv) as engine:
        gate = Gate(nano)
        answer = engine.submit([1], max_new_tokens=6)
        gate.arrived()

        def refused() -> int:
            for call in (lambda: engine.submit([2]), lambda: engine.run([[2]]), answer.result):
                with pytest.raises(StateError, match="parent"):
                    call()
            engine.close()
            return 0

        assert in_child(refused) == 0
        gate.open()
        assert answer.result(90).tokens == nano.alone([1], 6)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_end_whatever_their_engines_do() -> None:
    """With an idle one, a busy one, and one that was the parent's."""
    code = """
        import os, sys
        from flowkv import Engine
        from tests.engine.nano import Nano, make_kv

        idle, busy = (Engine(Nano(), make_kv(pages=1024), max_rows=4) for _ in range(2))
        print(len(idle.submit([1], max_new_tokens=3).result(90).tokens))
        busy.run([[n] for n in range(9)], max_new_tokens=3)  # no kernel is half compiled later
        answers = [busy.submit([n], max_new_tokens=5000) for n in range(9)]
        next(iter(answers[0]))
        child = os.fork()
        if not child:
            sys.exit(0)
        print(os.waitpid(child, 0)[1])
        answers[0].add_done_callback(lambda answer: print(answer.result().reason))
        print("end", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This process", "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split() == ["3", "0", "end", "cancelled"]
