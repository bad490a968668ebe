"""Tokens that are read a step late: the same ones, and nothing of the step too many is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowkv import KV, Answer, Completion, Engine
from tests.engine.nano import PAGE, Nano, make_kv, prompts
from tests.engine.pressed import made, pressed
from tests.inside import (
    EngineStep,
    NonFiniteError,
    Planner,
    UnreadTokens,
    Weighted,
    engine_engine,
    make_request,
)

from ..cache.toy import make_kv as toy_kv
from ..cache.toy import simple

pytestmark = pytest.mark.usefixtures("behind")
PROMPTS = prompts(9)
LIMITS = (1, 2, 3, 9, 20, 17, 30, 2, 12)


def submit(engine: Engine, prompt: list[int], limit: int, **fields: Any) -> Answer:
    """Hands a request in; nothing runs before the next turn."""
    request = make_request(prompt, {"max_new_tokens": limit} | fields)
    return engine._hand_in(request, limited=False).answer


def drain(engine: Engine) -> None:
    """Turns until all is answered."""
    while not engine._loop.idle or engine._inbox.pending:
        engine._loop.turn()


def run(nano: Nano, kv: KV, given: list[list[int]] = PROMPTS, **fields: Any) -> list[Completion]:
    """Served with those limits, all at once."""
    with Engine(nano, kv, max_rows=4, token_budget=24) as engine:
        each = zip(given, LIMITS, strict=True)
        answers = [submit(engine, ids, limit, **fields) for ids, limit in each]
        drain(engine)
        return [answer.result(0) for answer in answers]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Switches to tokens that are read at once, with `undo` back again."""
    with monkeypatch.context() as patch:
        patch.setattr(engine_engine, "runs_behind", lambda logits: False)
        yield patch


def test_greedy_tokens_are_the_same(nano: Nano, followed: list[int]) -> None:
    with make_kv() as kv:
        done = run(nano, kv)
        assert [len(one.tokens) for one in done] == [*LIMITS]
        for one, prompt in zip(done, PROMPTS, strict=True):
            assert one.tokens == nano.alone(prompt, len(one.tokens)) and one.reason == "length"
        assert len(followed) > 25 and not kv._open
        for one, prompt in zip(run(nano, kv), PROMPTS, strict=True):  # of pages made a step late
            assert one.tokens == nano.alone(prompt, len(one.tokens))


SAMPLED = {"do_sample": True, "temperature": 2.0, "top_p": 0.95, "eos_token_id": [5, 6, 7]}


def test_seeds_draw_the_same(nano: Nano, followed: list[int], plain: pytest.MonkeyPatch) -> None:
    with make_kv() as kv:
        wanted = run(nano, kv, seed=11, options=SAMPLED)
    assert not followed and {one.reason for one in wanted} == {"stop", "length"}
    plain.undo()
    with make_kv() as kv:
        found = run(nano, kv, seed=11, options=SAMPLED)
    assert len(followed) > 10
    assert [(one.tokens, one.reason) for one in found] == [(o.tokens, o.reason) for o in wanted]


def test_the_next_step_is_given_before_tokens_are_read(
    nano: Nano, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, own = list[str](), UnreadTokens.read

    def read(self: UnreadTokens) -> Any:
        story.append("read")
        return own(self)

    monkeypatch.setattr(UnreadTokens, "read", read)
    nano.after = lambda tokens: story.append(f"step of {tokens.shape[1]}")
    with make_kv() as kv, Engine(nano, kv, max_rows=4) as engine:
        engine.run([[1, 2], [3, 4, 5]], max_new_tokens=4)
    decode = "step of 2"
    assert story == ["step of 5", decode, decode, "read", decode, "read", "read"]


def test_a_row_that_stops_computes_one_token_too_many_which_is_dropped(nano: Nano) -> None:
    prompt, other = [1, 2, 3], [4, 5]
    answer = nano.alone(prompt, 40)
    stop = next(token for n, token in enumerate(answer) if n > 3 and token not in answer[:n])
    count = answer.index(stop) + 1
    steps = list[EngineStep]()
    with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
        kv.bus.subscribe(steps.append, EngineStep)
        short = submit(engine, prompt, 99, options={"eos_token_id": stop})
        (long,) = engine.run([other], max_new_tokens=count + 6)
        assert short.result(0).tokens == answer[:count] and short.result(0).reason == "stop"
        assert long.tokens == nano.alone(other, count + 6)
        computed = len(prompt) + count - 1 + len(other) + len(long.tokens) - 1
        assert nano.tokens == computed + 1, "one too many"
        assert sum(step.made_tokens for step in steps) == count + len(long.tokens)
        assert sum(step.prefill_tokens + step.decode_tokens for step in steps) == computed
        assert all(step.decode_tokens == len(step.gaps_s) for step in steps)
        with kv.open([*prompt, *answer]) as seq:  # what it left: all but its last token
            assert seq.length == len(prompt) + count - 1


@pytest.mark.parametrize("extra", range(PAGE))
def test_what_is_known_afterwards_is_the_same(
    nano: Nano, plain: pytest.MonkeyPatch, extra: int
) -> None:
    """Wherever borders of pages are: at the stop token, before it, behind it."""
    prompt = prompts(1, seed=5)[0][:3] + [7] * (extra + 1)
    answer = nano.alone(prompt, 21)
    stop = answer[19]
    left = []
    for undo in (False, True):
        if undo:
            plain.undo()
        with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
            engine.run([prompt], max_new_tokens=30, options={"eos_token_id": stop})
            blocks = kv.stats()["blocks"]
            with kv.open([*prompt, *answer]) as seq:
                left.append((blocks, seq.length))
    assert left[0] == left[1]


def test_pages_are_known_while_their_rows_go_on(nano: Nano) -> None:
    with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
        live = submit(engine, [1, 2, 3], 60)
        for _ in range(40):
            engine._loop.turn()
        text = [1, 2, 3, *live.tokens]
        assert kv.stats()["blocks"] == (len(text) - 1) // PAGE
        (more,) = engine.run([[*text, 9]], max_new_tokens=3)
        assert more.reused_tokens >= len(text) // PAGE * PAGE - PAGE
        assert more.tokens == nano.alone([*text, 9], 3)
        drain(engine)
        assert live.result(0).tokens == nano.alone([1, 2, 3], 60)


@pytest.mark.parametrize("keep", [True, False])
def test_rows_that_make_room_go_on_where_they_were(keep: bool) -> None:
    with pressed(toy_kv(simple(), pages=14)) as one:
        given = [[n + 1] * (9 + n) for n in range(4)]
        lives = [one.submit(prompt, 12) for prompt in given]
        for turn in itertools.count():
            if one.loop.idle and turn:
                break
            one.turn()
            one.audit()
            if turn in (3, 7) and one.loop.active:
                one.preempt(one.loop.active[0], keep)
        assert sum(live.preempted for live in lives) >= 2
        for live, prompt in zip(lives, given, strict=True):
            assert live.answer.result(0).tokens == made(prompt, 12)


def test_a_request_that_is_called_off_has_what_was_read(nano: Nano) -> None:
    with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
        one, two = (submit(engine, [n], 20) for n in (3, 4))
        for _ in range(6):
            engine._loop.turn()
        one.cancel()
        assert engine.run([[5]], max_new_tokens=2)[0].tokens == nano.alone([5], 2)
        assert one.result(0).reason == "cancelled" and len(one.result(0).tokens) in (5, 6)
        assert one.result(0).tokens == nano.alone([3], 20)[: len(one.result(0).tokens)]
        drain(engine)
        assert two.result(0).tokens == nano.alone([4], 20)


def test_all_called_off_leaves_nothing(nano: Nano) -> None:
    with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
        answer = submit(engine, [3], 50)
        for _ in range(4):
            engine._loop.turn()
        answer.cancel()
        engine._loop.turn()
        assert answer.done() and engine._loop.idle and not engine._loop._unread and not kv._open


def test_a_step_that_fails_over_unread_tokens_is_run_over_read_ones(nano: Nano) -> None:
    wanted = [nano.alone([n], 9) for n in (1, 2)]
    failed = list[int]()

    def fail(tokens: torch.Tensor) -> None:
        if nano.calls in (4, 7):
            nano.calls += 1
            failed.append(nano.calls)
            raise ArithmeticError("once")

    nano.before = fail
    nano.calls = 0
    with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
        assert [one.tokens for one in engine.run([[1], [2]], max_new_tokens=9)] == wanted
    assert len(failed) == 2


def test_nan_fails_its_request_alone(nano: Nano, monkeypatch: pytest.MonkeyPatch) -> None:
    own, count = Nano._logits, itertools.count()
    wanted = nano.alone([2], 9)

    def poisoned(self: Nano, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = own(self, tokens, positions)
        if next(count) == 4:
            logits[0, 0] = torch.nan
        return logits

    monkeypatch.setattr(Nano, "_logits", poisoned)
    options = {"do_sample": True, "temperature": 0.5}
    with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
        bad = submit(engine, [1], 50, options=options)
        assert engine.run([[2]], max_new_tokens=9)[0].tokens == wanted
        with pytest.raises(NonFiniteError):
            bad.result(0)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_step_that_raises_once_it_is_committed_fails_its_rows(
    rows: int, late: bool, nano: Nano, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken further, and cannot be run again: no answer may go on with a token twice."""
    if not late:
        monkeypatch.setattr(engine_engine, "runs_behind", lambda logits: False)
    own, count = Planner.commit, itertools.count()

    def committed(self: Any, seqs: Any, *args: Any, **given: Any) -> None:
        own(self, seqs, *args, **given)
        if next(count) == 7:
            raise NonFiniteError("a page cannot be encoded", "Use another codec")

    monkeypatch.setattr(Planner, "commit", committed)
    with make_kv() as kv, Engine(nano, kv, max_rows=4, token_budget=24) as engine:
        answers = [submit(engine, ids, 20) for ids in PROMPTS[:rows]]
        drain(engine)
        failed = 0
        for ids, answer in zip(PROMPTS, answers, strict=False):
            try:
                assert answer.result(0).tokens == nano.alone(ids, 20)
            except NonFiniteError:
                failed += 1
        assert failed
        assert engine.run([PROMPTS[0]], max_new_tokens=9)[0].tokens == nano.alone(PROMPTS[0], 9)


@pytest.mark.parametrize("what", ["nan_to_num", "draw", "send"])
def test_a_device_that_fails_while_it_chooses_costs_no_token_in_silence(
    what: str, nano: Nano, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"do_sample": True, "temperature": 0.7}
    with make_kv() as kv:
        wanted = [one.tokens for one in run(nano, kv, options=options, seed=5)]
    count = itertools.count()

    def failing(own: Any) -> Any:
        def fails(*args: Any, **given: Any) -> Any:
            if next(count) == 9:
                raise torch.OutOfMemoryError("out of memory")
            return own(*args, **given)

        return fails

    where = {"nan_to_num": (torch.Tensor, "nan_to_num"), "send": (UnreadTokens, "_send")}
    place, name = where.get(what, (Weighted, "draw"))
    monkeypatch.setattr(place, name, failing(getattr(place, name)))
    with make_kv() as kv, Engine(nano, kv, max_rows=4, token_budget=24) as engine:
        each = zip(PROMPTS, LIMITS, strict=True)
        answers = [submit(engine, ids, limit, options=options, seed=5) for ids, limit in each]
        drain(engine)
        failed = 0
        for answer, tokens in zip(answers, wanted, strict=True):
            try:
                assert answer.result(0).tokens == tokens
            except torch.OutOfMemoryError:
                failed += 1
        assert failed == (what != "send")  # that is tried again


def test_your_own_rule_sees_each_token_at_once(nano: Nano, followed: list[int]) -> None:
    def largest(logits: torch.Tensor, so_far: list[int]) -> int:
        return int(logits.argmax())

    with make_kv() as kv, Engine(nano, kv, max_rows=2) as engine:
        done = engine.run([[1], [2]], max_new_tokens=6, options={"choose": largest})
    assert [one.tokens for one in done] == [nano.alone([n], 6) for n in (1, 2)]
    assert not followed


@pytest.mark.parametrize("late", [True, False])
def test_first_tokens_come_when_their_own_prompts_are_computed(
    nano: Nano, plain: pytest.MonkeyPatch, *, late: bool
) -> None:
    """Not when those of others are, which share the budget of later steps."""
    if late:
        plain.undo()
    with make_kv() as kv, Engine(nano, kv, max_rows=8, token_budget=32) as engine:
        answers = [submit(engine, [n] * 16, 3) for n in range(6)]
        first = list[list[int]]()
        nano.before = lambda tokens: first.append([len(answer.tokens) for answer in answers])
        drain(engine)
        assert [one.result(0).tokens for one in answers] == [
            nano.alone([n] * 16, 3) for n in range(6)
        ]
    made = [sum(n > 0 for n in step) for step in first]
    assert made[:3] == [0, 2, 3] and first[-1] > [1] * 6, first
