"""What an engine makes of requests: the tokens that the model makes of each alone."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv import Completion, Engine, Request
from flowkv.policy.scheduling import FirstCome
from tests.engine.nano import PAGE, VOCABULARY, Nano, make_kv, prompts
from tests.inside import (
    Admitted,
    BusyError,
    CapacityError,
    ConfigError,
    EngineStep,
    Event,
    Finished,
    Queued,
    StateError,
    TokenError,
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_kv() as kv, Engine(Nano(), kv, max_rows=4, token_budget=16) as made:
        yield made


def model(engine: Engine) -> Nano:
    return engine._loop.runner._forward.__closure__[0].cell_contents


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def test_requests_get_the_tokens_that_the_model_makes_alone(engine: Engine) -> None:
    given = prompts(9)
    wanted = [model(engine).alone(prompt, 7) for prompt in given]
    done = engine.run(given, max_new_tokens=7)
    assert tokens(done) == wanted and not engine.kv._open and engine._loop.idle
    assert all(one.reason == "length" for one in done)
    assert [one.prompt_tokens for one in done] == [len(prompt) for prompt in given]
    answers = [engine.submit(prompt, max_new_tokens=7) for prompt in given]
    assert tokens([answer.result(90) for answer in answers]) == wanted
    assert sum(answer.result().reused_tokens for answer in answers) > 0, "prompts are known by now"


def test_rows_share_forwards(engine: Engine) -> None:
    engine.run([[1, 2, 3]] * 4, max_new_tokens=10)
    assert model(engine).calls == 10, "four rows, one forward a token"


@given(data=st.data())
@settings(max_examples=12)
def test_whatever_arrives_whenever(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 5))
    budget = rows + data.draw(st.integers(0, 20))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=8))
    seed = data.draw(st.integers(0, 99))
    draws = np.random.default_rng(seed)
    given = [draws.integers(0, VOCABULARY, n).tolist() for n, _ in lengths]
    with make_kv() as kv, Engine(nano := Nano(), kv, max_rows=rows, token_budget=budget) as engine:
        asked = [
            Request(prompt=prompt, max_new_tokens=limit)
            for prompt, (_, limit) in zip(given, lengths, strict=True)
        ]
        done = engine.run(asked)
        for prompt, one, (_, limit) in zip(given, done, lengths, strict=True):
            assert one.tokens == nano.alone(prompt, limit)
        assert not kv._open


def test_a_request_may_begin_with_one_token_and_end_with_one(engine: Engine) -> None:
    (one,) = engine.run([[5]], max_new_tokens=1)
    assert one.tokens == model(engine).alone([5], 1)
    assert one.tpot_s == 0.0 and one.ttft_s > 0.0
    assert model(engine).tokens == 1


def test_it_stops_at_an_end_token(engine: Engine) -> None:
    whole = model(engine).alone([1, 2, 3], 12)
    end = whole[4]
    (one,) = engine.run([[1, 2, 3]], max_new_tokens=12, options={"eos_token_id": end})
    assert one.tokens == whole[: whole.index(end) + 1] and one.reason == "stop"


def test_a_step_computes_no_more_than_its_budget(engine: Engine) -> None:
    counts: list[int] = []
    model(engine).before = lambda ids: counts.append(ids.shape[1])
    engine.run([[7] * 100, [8] * 50, [9]], max_new_tokens=5)
    assert max(counts) <= 16
    assert counts[0] == 16, "and as much as there is to do"


def test_long_prompts_do_not_hold_up_those_who_decode(engine: Engine) -> None:
    events: list[EngineStep] = []
    with engine.kv.bus.subscribe(events.append, EngineStep):
        engine.run([[3] * 4, [4] * 120], max_new_tokens=12)
    both = [one for one in events if one.prefill_tokens and one.decode_tokens]
    assert len(both) >= 7, "prompts are cut, and computed beside decodes"


def test_completions_tell_where_time_went(engine: Engine) -> None:
    (one,) = engine.run([[1, 2, 3]], max_new_tokens=6)
    assert 0.0 <= one.queued_s <= one.ttft_s <= one.seconds
    assert one.ttft_s + 5 * one.tpot_s == pytest.approx(one.seconds, abs=0.02)
    assert one.preempted == 0 and one.reused_tokens == 0


def test_run_takes_more_requests_than_may_wait() -> None:
    with make_kv() as kv, Engine(Nano(), kv, max_rows=2, max_waiting=3) as engine:
        assert len(engine.run([[1]] * 12, max_new_tokens=2)) == 12


def test_no_more_wait_than_may_while_they_are_taken_in() -> None:
    tried, refused = list[Queued](), list[BusyError]()

    def one_more(event: Queued) -> None:
        tried.append(event)
        try:
            engine.submit([5], max_new_tokens=1) if len(tried) < 9 else None
        except BusyError as error:
            refused.append(error)

    with make_kv() as kv, Engine(Nano(), kv, max_rows=2, max_waiting=3) as engine:
        for n in range(3):
            engine._hand_in(Request(prompt=[n], max_new_tokens=1), limited=True)
        with kv.bus.subscribe(one_more, Queued):
            engine._loop._take_in(0.0)
        assert len(refused) == 3


def test_one_wrong_request_and_none_is_served(engine: Engine) -> None:
    with pytest.raises(TokenError, match="empty") as refused:
        engine.run([[1], [2], []])
    assert "number 2 of" in refused.value.__notes__[0]
    assert engine._loop.idle and not engine._inbox.pending and not model(engine).calls


def test_run_of_nothing(engine: Engine) -> None:
    assert engine.run([]) == []


def test_requests_are_whole_or_fields(engine: Engine) -> None:
    request = Request(prompt=[1, 2], max_new_tokens=3)
    first = engine.submit(request).result(90)
    second = engine.submit(request, max_new_tokens=2).result(90)
    third = engine.submit(torch.tensor([1, 2]), max_new_tokens=2).result(90)
    assert second.tokens == third.tokens == first.tokens[:2]


def test_a_prompt_is_its_own_copy(engine: Engine) -> None:
    prompt = np.array([1, 2, 3])
    answer = engine.submit(prompt, max_new_tokens=4)
    prompt[:] = 9
    assert answer.result(90).tokens == model(engine).alone([1, 2, 3], 4)


# ---- what is refused at submit


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"prompt": []}, TokenError, "empty"),
        ({"prompt": [[1]]}, TokenError, "shape"),
        ({"prompt": [-1]}, TokenError, "reach"),
        ({"prompt": "text"}, TokenError, "the prompt is text"),
        ({"prompt": {"input_ids": [1]}}, TokenError, "the prompt is a mapping"),
        ({"prompt": [1], "max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ({"prompt": [1], "max_new_tokens": 2.0}, ConfigError, "max_new_tokens"),
        ({"prompt": [1], "max_new_tokens": True}, ConfigError, "max_new_tokens"),
        ({"prompt": [1], "priority": "high"}, ConfigError, "priority"),
        ({"prompt": [1], "seed": 0.5}, ConfigError, "seed"),
        ({"prompt": [1], "seed": -1}, ConfigError, "seed"),
        ({"prompt": [1], "seed": 1 << 64}, ConfigError, "seed"),
        ({"prompt": [1], "deadline_s": "soon"}, ConfigError, "deadline"),
        ({"prompt": [1], "tenant": 7}, ConfigError, "tenant"),
        ({"prompt": [1], "tenant": "\ud800"}, ConfigError, "Unicode"),
        ({"prompt": [1], "salts": (b"",)}, ConfigError, "salts"),
        ({"prompt": [1], "options": None}, ConfigError, "options"),
        ({"prompt": [1], "deadline_s": -1.0}, ConfigError, "deadline"),
        ({"prompt": [1], "deadline_s": math.nan}, ConfigError, "deadline"),
        ({"prompt": [1], "pirority": 3}, ConfigError, "pirority.*mean 'priority'"),
        ({"prompt": [1], "temperature": 0.5}, ConfigError, "temperature.*options="),
        ({"prompt": [1], "options": {"beams": 3}}, ConfigError, "beams"),
        ({"prompt": [1], "max_new_tokens": 256 * PAGE}, CapacityError, "device has pages for"),
        ({"prompt": [1], "retain": (3,)}, ConfigError, "retain"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_served_is_refused(
    engine: Engine, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    prompt = fields.pop("prompt")
    with pytest.raises(error, match=words):
        engine.submit(prompt, **fields)
    with pytest.raises(error, match=words):
        engine.run([prompt], **fields)
    assert engine.run([[1]], max_new_tokens=1)[0].reason == "length", "and nothing is broken"


def test_an_engine_whose_cache_is_closed_refuses_requests() -> None:
    with make_kv() as kv:
        engine = Engine(Nano(), kv)
    with pytest.raises(StateError, match="cache is closed"):
        engine.submit([1])
    for _ in range(2):
        with pytest.raises(StateError):
            engine.run([[1]])
    engine.close()


def test_context_tokens_bound_a_request() -> None:
    with make_kv() as kv, Engine(Nano(), kv, context_tokens=20) as engine:
        assert len(engine.run([[1] * 10], max_new_tokens=10)[0].tokens) == 10
        with pytest.raises(CapacityError, match="settings allow 20"):
            engine.submit([1] * 11, max_new_tokens=10)


def test_the_longest_request_that_is_taken_fits() -> None:
    with make_kv(pages=6, max_rows=2) as kv, Engine(nano := Nano(), kv, max_rows=2) as engine:
        most = engine._longest()
        done = engine.run([[1] * 3, [2] * (most - 8)], max_new_tokens=8)
        assert done[1].tokens == nano.alone([2] * (most - 8), 8)
        with pytest.raises(CapacityError):
            engine.submit([2] * (most - 7), max_new_tokens=8)


@pytest.mark.parametrize(
    "setting",
    [
        *({"max_rows": 0}, {"token_budget": 3, "max_rows": 4}, {"watermark": 1.0}),
        *({"max_waiting": 0}, {"context_tokens": 1}, {"swap": "much"}, {"seed": "one"}),
        *({"seed": True}, {"max_rows": 2.0}, {"watermark": "some"}, {"patience_s": -1}),
        *({"patience_s": "long"}, {"scheduler": "first"}, {"scheduler_options": {"speed": 3}}),
        *({"max_row": 3}, {"max_rows": 65}, {"invariant": True, "runner": 3}),
    ],
    ids=str,
)
def test_wrong_settings_are_told(setting: dict[str, Any]) -> None:
    with make_kv() as kv, pytest.raises(ConfigError, match=r"\. \S"):
        Engine(Nano(), kv, **setting)


def test_numbers_of_numpy_are_numbers() -> None:
    big, few, share = np.uint64((1 << 64) - 1), np.int32(4), np.float32(0.25)
    options = {"do_sample": True, "temperature": share, "top_k": few, "eos_token_id": few}
    with make_kv() as kv, Engine(Nano(), kv, max_rows=few, seed=big, watermark=share) as engine:
        request = Request(prompt=[1], max_new_tokens=few, options=options)
        assert engine.submit(request).result(90).prompt_tokens == 1
        assert engine.submit(request, seed=np.int64(7), deadline_s=few).result(90).tokens


def test_what_is_no_model_is_told() -> None:
    with make_kv() as kv, pytest.raises(ConfigError, match="no model"):
        Engine(3, kv)


def test_a_scheduler_of_your_own() -> None:
    class LastCome(FirstCome):
        name = "lcfs"

        def rank(self, job: Any, now_s: float) -> tuple[float, ...]:
            return (-job.number,)

    order: list[int] = []
    with make_kv() as kv, Engine(Nano(), kv, max_rows=1, scheduler=LastCome()) as engine:
        kv.bus.subscribe(lambda event: order.append(event.request), Finished)
        engine.run([[1], [2], [3]], max_new_tokens=2)
    assert len(order) == 3 and order == sorted(order, reverse=True)


# ---- events


def test_every_request_is_told_of_in_order(engine: Engine) -> None:
    events: list[Event] = []
    with engine.kv.bus.subscribe(events.append, Queued, Admitted, Finished):
        engine.run([[1] * 20, [2]], max_new_tokens=3, tenant="me")
    numbers = sorted({getattr(event, "request", -1) for event in events})
    for number, size in zip(numbers, (20, 1), strict=True):
        queued, admitted, over = (e for e in events if getattr(e, "request", -1) == number)
        assert (queued.prompt_tokens, queued.tenant) == (size, "me")
        assert isinstance(admitted, Admitted) and not admitted.resumed
        assert (over.reason, over.new_tokens, over.tenant) == ("length", 3, "me")
        assert over.ttft_s <= over.seconds


def test_steps_are_told_of(engine: Engine) -> None:
    events: list[EngineStep] = []
    with engine.kv.bus.subscribe(events.append, EngineStep):
        done = engine.run([[1] * 20, [2] * 3], max_new_tokens=4)
    assert sum(one.made_tokens for one in events) == 8
    assert sum(one.prefill_tokens + one.decode_tokens for one in events) == model(engine).tokens
    assert sum(len(one.gaps_s) for one in events) == 6, "first tokens have no gap"
    assert all(one.decode_tokens == len(one.gaps_s) for one in events)
    assert all(0 <= one.model_s + one.sampling_s <= one.seconds for one in events)
    assert all(0 <= one.pages <= one.total_pages for one in events)
    assert len(done) == 2


# ---- sharing, and what is left behind


def test_common_beginnings_are_computed_once(engine: Engine) -> None:
    stem = list(range(40))
    engine.run([[*stem, 1]], max_new_tokens=1)
    before = model(engine).tokens
    done = engine.run([[*stem, 2], [*stem, 3]], max_new_tokens=1)
    assert [one.reused_tokens for one in done] == [40, 40]
    assert model(engine).tokens - before == 2


def test_what_is_over_can_be_forgotten(engine: Engine) -> None:
    answer = engine.submit([1, 2], max_new_tokens=2, deadline_s=1000.0)
    answer.result(90)
    gone = weakref.ref(answer)
    del answer
    engine.run([[1]], max_new_tokens=1)  # the thread has let go of the turn before
    gc.collect()
    assert gone() is None
    for _ in range(80):
        engine.run([[1], [2], [3]], max_new_tokens=1, deadline_s=1000.0)
    assert len(engine._loop._deadlines) < 100


def test_same_requests_same_tokens_whatever_the_seed_of_time() -> None:
    given, found = prompts(8), []
    for rows in (1, 3, 8):
        with make_kv() as kv, Engine(Nano(), kv, max_rows=rows, token_budget=40, seed=5) as engine:
            asked = {"do_sample": True, "temperature": 1.5}
            found.append(tokens(engine.run(given, max_new_tokens=6, options=asked)))
    assert found[0] == found[1] == found[2]
