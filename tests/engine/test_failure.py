"""A step that raises fails those who caused it; the others do not notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import KV, Answer, Engine, Request, Sequence
from flowkv.policy.scheduling import FirstCome, Job
from tests.engine.nano import Nano, make_kv, prompts
from tests.inside import CapacityError, Finished, PackedRunner, StateError, own_model

POISON = 60


class Poisoned(Exception):
    """What a forward raises that sees poison."""


@pytest.fixture
def kv() -> Iterator[KV]:
    with make_kv() as made:
        yield made


def poisonous(nano: Nano, times: float = float("inf")) -> Callable[[torch.Tensor], None]:
    left = [times]

    def check(ids: torch.Tensor) -> None:
        if (ids == POISON).any() and left[0] > 0:
            left[0] -= 1
            raise Poisoned("of the model")

    nano.after = check  # when all of K and V are written
    return check


def outcome(answer: Answer) -> str:
    error = answer.exception(20)
    return type(error).__name__ if error is not None else answer.result().reason


@pytest.mark.parametrize("bad", [[0], [3], [5], [0, 5], [1, 2, 3], list(range(6))], ids=str)
def test_who_raises_alone_fails_alone(nano: Nano, kv: KV, bad: list[int]) -> None:
    poisonous(nano)
    given = [[POISON, n] if n in bad else [n, n + 1, n] for n in range(6)]
    with Engine(nano, kv, max_rows=6) as engine:
        answers = [engine.submit(prompt, max_new_tokens=5) for prompt in given]
        for n, answer in enumerate(answers):
            if n in bad:
                assert outcome(answer) == "Poisoned"
            else:
                assert answer.result(90).tokens == nano.alone(given[n], 5)
    assert not kv._open


def test_a_newcomer_does_not_cost_the_others_more_than_one_step(nano: Nano, kv: KV) -> None:
    poisonous(nano)
    with Engine(nano, kv, max_rows=8) as engine:
        loop = engine._loop
        old = [engine._hand_in(_request([n]), limited=True).answer for n in range(7)]
        loop.turn()
        bad = engine._hand_in(_request([POISON]), limited=True).answer
        nano.calls = 0
        loop.turn()
        assert nano.calls == 3, "all, those who were there, the newcomer"
        assert outcome(bad) == "Poisoned"
        assert [len(answer.tokens) for answer in old] == [2] * 7
        engine.close(drain=False)


def _request(prompt: list[int]) -> Request:
    return Request(prompt=prompt, max_new_tokens=30)


@pytest.mark.parametrize("times", [1, 2])
def test_what_happens_once_fails_nobody(nano: Nano, kv: KV, times: int) -> None:
    poisonous(nano, times)
    with Engine(nano, kv, max_rows=4) as engine:
        given = [[POISON], [1, 2], [3], [4]]
        done = engine.run(given, max_new_tokens=6)
    nano.after = lambda ids: None
    assert [one.tokens for one in done] == [nano.alone(prompt, 6) for prompt in given]


def test_one_that_is_alone_fails_at_once(nano: Nano, kv: KV) -> None:
    poisonous(nano)
    with Engine(nano, kv) as engine:
        nano.calls = 0
        with pytest.raises(Poisoned):
            engine.run([[POISON]])
        assert nano.calls == 1


def test_exceptions_that_are_the_cause_of_each_other_hold_up_nobody(nano: Nano, kv: KV) -> None:
    def fall_back(ids: torch.Tensor) -> None:
        try:
            raise Poisoned("first")
        except Poisoned as first:
            try:
                raise KeyError("its fallback")
            except KeyError as error:
                second = error
            raise first from second

    nano.after = fall_back
    with Engine(nano, kv) as engine:
        assert outcome(engine.submit([1])) == "Poisoned"
        nano.after = lambda ids: None
        assert engine.submit([1], max_new_tokens=3).result(90).tokens == nano.alone([1], 3)


@pytest.mark.parametrize(
    ("at", "call"), [("_take", 2), ("_admit", 1), ("_step", 2), ("_advance", 2), ("_answer", 2)]
)
def test_others_are_answered_though_the_one_who_drives_is_interrupted(
    nano: Nano, kv: KV, at: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(nano, kv, max_rows=4)
    others = [engine._hand_in(_request([n]), limited=True).answer for n in range(3)]
    do, left = getattr(engine._loop, at), [call]

    def interrupted(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return do(*args)

    monkeypatch.setattr(engine._loop, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run([[5]], max_new_tokens=4)
    engine.close(timeout_s=20)
    for n, answer in enumerate(others):
        assert answer.result(0).tokens == nano.alone([n], 30)
    assert not kv._open


def test_what_runs_out_fails_also_those_who_await(nano: Nano, kv: KV) -> None:
    left = iter([3, 4])

    async def main() -> None:
        async with Engine(nano, kv) as engine:
            options = {"choose": lambda logits, made: next(left)}
            answer = engine.submit([1], options=options)
            with pytest.raises(RuntimeError, match="StopIteration") as told:
                await asyncio.wait_for(answer, 20)
            assert isinstance(told.value.__cause__, StopIteration)
            assert answer.tokens == [3, 4]

    asyncio.run(main())


def test_run_serves_the_others_before_it_raises(nano: Nano, kv: KV) -> None:
    poisonous(nano)
    over: list[Finished] = []
    kv.bus.subscribe(over.append, Finished)
    with Engine(nano, kv, max_rows=2) as engine, pytest.raises(Poisoned):
        engine.run([[POISON], [1], [2], [3]], max_new_tokens=4)
    assert sorted(one.reason for one in over) == ["failed", "length", "length", "length"]


def test_prompts_in_chunks_are_rolled_back_whole(nano: Nano, kv: KV) -> None:
    poisonous(nano)
    long = prompts(1, longest=60, seed=5)[0] * 3
    with Engine(nano, kv, max_rows=3, token_budget=8) as engine:
        bad = engine.submit([*range(30), POISON, *range(9)], max_new_tokens=3)
        good = [engine.submit(long, max_new_tokens=6), engine.submit([1], max_new_tokens=20)]
        assert outcome(bad) == "Poisoned"
        assert good[0].result(90).tokens == nano.alone(long, 6)
        assert good[1].result(90).tokens == nano.alone([1], 20)


@given(
    bad=st.sets(st.integers(0, 7)),
    rows=st.integers(1, 8),
    times=st.integers(1, 12),
    spare=st.integers(0, 9),
)
@settings(max_examples=12)
def test_isolation_whatever_fails(bad: set[int], rows: int, times: int, spare: int) -> None:
    nano = Nano()
    poisonous(nano)
    given = [[n] * (1 + 5 * n % 7) + [POISON] * (n in bad) for n in range(8)]
    with make_kv() as kv, Engine(nano, kv, max_rows=rows, token_budget=rows + spare) as engine:
        answers = [engine.submit(prompt, max_new_tokens=1 + times % 4) for prompt in given]
        for n, answer in enumerate(answers):
            if n in bad:
                assert outcome(answer) == "Poisoned"
            else:
                assert answer.result(90).tokens == nano.alone(given[n], 1 + times % 4)
        engine.close()
        assert not kv._open


def test_what_a_failed_forward_held_is_let_go(nano: Nano, kv: KV) -> None:
    """Else the halves find no memory that the whole could not find."""
    alive: list[int] = []
    kept: list[Any] = []

    class Big:
        def __del__(self) -> None:
            kept.remove(id(self))

    def check(ids: torch.Tensor) -> None:
        alive.append(len(kept))
        big = Big()
        kept.append(id(big))
        if ids.shape[1] > 1:
            try:
                raise ValueError(repr(big))
            except ValueError as error:
                raise Poisoned("with a cause") from error

    nano.after = check
    with Engine(nano, kv, max_rows=4) as engine:
        engine.run([[1], [2], [3], [4]], max_new_tokens=1)
    assert alive == [0] * 7, "one over all, two halves, four alone"


# ---- what is not the model's


def test_own_choices_that_raise_fail_their_request(nano: Nano, kv: KV) -> None:
    def choose(logits: torch.Tensor, made: list[int]) -> int:
        if len(made) == 2:
            raise ZeroDivisionError("of the user's own")
        return int(logits.argmax())

    with Engine(nano, kv, max_rows=3) as engine:
        bad = engine.submit([1, 2], max_new_tokens=5, options={"choose": choose})
        good = engine.submit([3], max_new_tokens=5)
        assert outcome(bad) == "ZeroDivisionError" and len(bad.tokens) == 2
        assert good.result(90).tokens == nano.alone([3], 5)


def test_what_the_cache_refuses_fails_its_request(nano: Nano, kv: KV) -> None:
    with Engine(nano, kv) as engine:
        bad = engine.submit([1] * 20, lease="forever", max_new_tokens=2)
        good = engine.submit([3], max_new_tokens=5)
        assert outcome(bad) == "ConfigError"
        assert good.result(90).tokens == nano.alone([3], 5)


def test_logits_that_are_none_fail_requests(nano: Nano, kv: KV) -> None:
    runner = PackedRunner(kv, lambda step, last: torch.zeros(0))
    with Engine(nano, kv, runner=runner) as engine:
        answers = [engine.submit([n], max_new_tokens=2) for n in range(3)]
        assert all(answer.exception(20) is not None for answer in answers)


def test_a_model_that_forgets_a_layer_is_told(kv: KV) -> None:
    def wrong(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, tokens.shape[1], 9)

    with Engine(wrong, kv) as engine, pytest.raises(StateError, match="no keys and values"):
        engine.run([[1, 2]])
    assert not kv._open


def test_rows_that_run_apart_fail_apart(nano: Nano, kv: KV) -> None:
    class Apart(PackedRunner):
        together = False

        def step(self, rows: Any, tokens: Any) -> torch.Tensor:
            assert len(rows) == 1
            return super().step(rows, tokens)

    poisonous(nano)
    given = [[1, 2], [POISON], [3]]
    with Engine(nano, kv, runner=Apart(kv, own_model(nano)), max_rows=3) as engine:
        answers = [engine.submit(prompt, max_new_tokens=5) for prompt in given]
        assert outcome(answers[1]) == "Poisoned"
        assert answers[0].result(90).tokens == nano.alone(given[0], 5)
        assert answers[2].result(90).tokens == nano.alone(given[2], 5)


# ---- the engine itself


class Broken(FirstCome):
    """Raises as soon as it sees a third request."""

    name = "broken"
    steady = False

    def __init__(self) -> None:
        self._seen = set[int]()

    def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
        self._seen.add(job.number)
        if len(self._seen) == 3:
            raise KeyError("a scheduler of the user's own")
        return super().rank(job, now_s)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_scheduler_that_raises_fails_all_and_says_so(
    nano: Nano, kv: KV, threaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(nano, kv, max_rows=1, scheduler=Broken()) as engine:
        if threaded:
            answers = [engine.submit([n], max_new_tokens=500) for n in range(3)]
            for answer in answers:
                with pytest.raises(StateError, match="KeyError") as told:
                    answer.result(90)
                assert isinstance(told.value.__cause__, KeyError)
            assert "an engine failed" in caplog.text
        else:
            with pytest.raises(StateError, match="KeyError"):
                engine.run([[1], [2], [3]], max_new_tokens=5)
        with pytest.raises(StateError, match="engine failed"):
            engine.submit([1])
        with pytest.raises(StateError, match="engine failed"):
            engine.run([[1]])
    assert not kv._open


class Stop(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("where", ["model", "draw", "scheduler"])
def test_an_interrupted_run_leaves_the_engine_in_order(nano: Nano, kv: KV, where: str) -> None:
    armed = [True]

    def interrupt(*_: object) -> int:
        if armed[0] and nano.calls >= 3:
            armed[0] = False
            raise Stop
        return 5

    class Interrupting(FirstCome):
        name, steady = "interrupting", False

        def rank(self, job: Job, now_s: float) -> tuple[float, ...]:
            if where == "scheduler":
                interrupt()
            return super().rank(job, now_s)

    if where == "model":
        nano.after = interrupt
    options = {"choose": interrupt} if where == "draw" else {}
    with Engine(nano, kv, max_rows=2, scheduler=Interrupting()) as engine:
        other = engine._hand_in(_request([7, 8]), limited=True).answer
        with pytest.raises(Stop):
            engine.run([[1], [2], [3]], max_new_tokens=9, options=options)
        assert not armed[0] and not other.done()
        assert not kv._open, "rows are given up"
        assert engine.run([[1]], max_new_tokens=4)[0].tokens == nano.alone([1], 4)
        engine._start()
        assert other.result(90).tokens == nano.alone([7, 8], 30), "begun anew, with what it made"
    assert engine._loop.idle


# ---- pages that others hold


@contextmanager
def hogged(nano: Nano, patience_s: float) -> Iterator[tuple[Engine, Sequence]]:
    """An engine, and a sequence that holds nearly all pages."""
    kv = make_kv(pages=8, max_rows=4)
    with kv, Engine(nano, kv, max_rows=2, patience_s=patience_s) as engine:
        hog = kv.open([1] * 60)
        for step in kv.prefill([hog]):
            nano(step.tokens, step.positions)
        yield engine, hog


def test_pages_that_others_hold_are_waited_for(nano: Nano) -> None:
    with hogged(nano, 90.0) as (engine, hog):
        answer = engine.submit([5] * 20, max_new_tokens=4)
        with pytest.raises(TimeoutError):
            answer.result(0.1)
        hog.close()
        assert answer.result(90).tokens == nano.alone([5] * 20, 4)


def test_and_not_for_ever(nano: Nano) -> None:
    with hogged(nano, 0.05) as (engine, hog):
        with pytest.raises(CapacityError):
            engine.run([[5] * 20], max_new_tokens=4)
        hog.close()
        assert engine.run([[5] * 20], max_new_tokens=4)[0].reason == "length"


class Odd(BaseException):
    """What no handler of `Exception` sees."""


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Odd()])
@pytest.mark.parametrize("where", ["sampler", "model", "callback"])
def test_a_request_that_raises_anything_ends_alone(
    nano: Nano, kv: KV, raised: BaseException, where: str
) -> None:
    def choose(logits: torch.Tensor, made: list[int]) -> int:
        if where == "sampler" and made:
            raise raised
        return int(logits.argmax())

    def check(ids: torch.Tensor) -> None:
        if where == "model" and (ids == POISON).any():
            raise raised

    def call(answer: Answer) -> None:
        # Of an answer that is over by then, it runs on this thread, which is not the engine's.
        if where == "callback" and threading.current_thread() is not threading.main_thread():
            raise raised

    nano.after = check
    with Engine(nano, kv, max_rows=4) as engine:
        bad = engine.submit([POISON, 4], max_new_tokens=4, options={"choose": choose})
        bad.add_done_callback(call)
        others = [engine.submit([n, n + 1, n], max_new_tokens=5) for n in range(3)]
        for n, answer in enumerate(others):
            assert answer.result(90).tokens == nano.alone([n, n + 1, n], 5)
        if where == "callback":
            assert len(bad.result(90).tokens) == 4
        else:
            with pytest.raises(RuntimeError, match=type(raised).__name__) as told:
                bad.result(90)
            assert told.value.__cause__ is raised
        assert engine.submit([7], max_new_tokens=1).result(90)
    assert not kv._open


@pytest.mark.parametrize("raised", [SystemExit(3), GeneratorExit()])
def test_the_caller_who_drives_is_told_alike(nano: Nano, kv: KV, raised: BaseException) -> None:
    def choose(logits: torch.Tensor, made: list[int]) -> int:
        raise raised

    with Engine(nano, kv) as engine:
        with pytest.raises(RuntimeError, match=type(raised).__name__):
            engine.run([[4, 5]], max_new_tokens=4, options={"choose": choose})
        assert engine.run([[4, 5]], max_new_tokens=2)[0].tokens == nano.alone([4, 5], 2)
