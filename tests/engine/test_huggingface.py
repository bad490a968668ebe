"""Engines over unmodified Hugging Face models say what `generate` says of each prompt alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import flowkv
from flowkv import Engine
from tests.fixture_model import load_tiny, stdlib_text
from tests.hooks import models
from tests.inside import (
    CODEC_SHIFT,
    CapacityError,
    ConfigError,
    PackedRunner,
    StateError,
    TokenError,
    UnsupportedModelError,
    door_of,
    engine_engine,
)

NEW = 8


@cache
def tiny() -> Any:
    return load_tiny()


def text(first: int, count: int) -> list[int]:
    return list(stdlib_text(4000)[first : first + count])


PROMPTS = [text(50 * i, 1 + 17 * i) for i in range(7)]


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.fixture
def kv() -> Iterator[flowkv.KV]:
    with flowkv.attach(tiny(), gpu="64MiB") as made:
        yield made


def test_greedy_tokens_are_those_of_generate(kv: flowkv.KV) -> None:
    wanted = [alone(tiny(), prompt) for prompt in PROMPTS]
    kv.invalidate()
    with Engine(tiny(), kv, max_rows=4, token_budget=24) as engine:
        assert isinstance(engine._loop.runner, PackedRunner), "rows share a forward"
        for known in (False, True):
            done = engine.run(PROMPTS, max_new_tokens=NEW)
            assert [one.tokens for one in done] == wanted
            assert (sum(one.reused_tokens for one in done) > 64) == known
    assert not kv._open


@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.7),
        dict(no_repeat_ngram_size=2, min_new_tokens=5, eos_token_id=32),
        dict(eos_token_id=[32, 10]),
        dict(bad_words_ids=[[32], [101]]),
    ],
    ids=str,
)
def test_options_mean_what_they_mean_to_generate(kv: flowkv.KV, options: dict[str, Any]) -> None:
    wanted = [alone(tiny(), prompt, **options) for prompt in PROMPTS]
    with Engine(tiny(), kv, max_rows=4, token_budget=32) as engine:
        done = engine.run(PROMPTS, max_new_tokens=NEW, options=options)
    assert [one.tokens for one in done] == wanted
    for one in done:
        assert one.reason == ("stop" if len(one.tokens) < NEW else one.reason)


def test_a_seed_draws_what_generate_draws_with_it(kv: flowkv.KV) -> None:
    options = dict(do_sample=True, temperature=1.3, top_k=12)
    wanted = []
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        wanted.append(alone(tiny(), prompt, **options))
    with Engine(tiny(), kv, max_rows=5, token_budget=16) as engine:
        answers = [
            engine.submit(prompt, seed=seed, options=options, max_new_tokens=NEW)
            for seed, prompt in enumerate(PROMPTS)
        ]
        assert [answer.result(60).tokens for answer in answers] == wanted


def test_the_model_can_be_called_beside_its_engine(kv: flowkv.KV) -> None:
    wanted = [alone(tiny(), prompt) for prompt in PROMPTS]
    with Engine(tiny(), kv, max_rows=4) as engine:
        for _ in range(3):
            answers = [engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
            assert alone(tiny(), PROMPTS[3]) == wanted[3]
            assert [answer.result(60).tokens for answer in answers] == wanted


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "words"),
    [
        ([1, 256], {}, TokenError, "256"),
        ([], {}, TokenError, "empty"),
        ([1], {"max_new_tokens": 1 << 20}, CapacityError, "allow"),
        ([1], {"options": {"num_beams": 2}}, ConfigError, "beam"),
        ([1], {"options": {"temprature": 2}}, ConfigError, "temprature"),
        ([1], {"options": {"inputs_embeds": 2}}, flowkv.FlowKVError, "inputs_embeds"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(
    kv: flowkv.KV, prompt: list[int], fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with Engine(tiny(), kv) as engine, pytest.raises(error, match=words):
        engine.submit(prompt, **fields)


def test_a_model_that_is_not_attached_is_told(kv: flowkv.KV) -> None:
    kv.detach()
    with pytest.raises(ConfigError, match="attach"):
        Engine(tiny(), kv)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_rows_together_or_apart(name: str) -> None:
    """Windows, and recurrent states, whose rows run by themselves."""
    model = models.causal(name)
    prompts = [models.prompt(5 + 11 * i, seed=i)[0].tolist() for i in range(4)]
    wanted = [alone(model, prompt) for prompt in prompts]
    with flowkv.attach(model, gpu="64MiB", page_size=16) as kv, Engine(model, kv) as engine:
        for _ in range(2):
            done = engine.run(prompts, max_new_tokens=NEW)
            assert [one.tokens for one in done] == wanted
        assert not kv._open


@pytest.mark.parametrize("name", [pytest.param("qwen3_next", marks=pytest.mark.thorough), "lfm2"])
@pytest.mark.parametrize("budget", [70, 2048])
def test_chunks_of_prompts_end_where_states_are_worth_saving(name: str, budget: int) -> None:
    """Where two prompts part, and behind the last page of the first, whatever the budget."""
    model = models.causal(name)
    shared = models.prompt(300)[0].tolist()
    prompts = [shared + models.prompt(100, seed=n)[0].tolist() for n in (2, 3, 4)]
    wanted = [alone(model, prompt) for prompt in prompts]
    with (
        flowkv.attach(model, gpu="64MiB", page_size=16) as kv,
        Engine(model, kv, token_budget=budget) as engine,
    ):
        known = []
        for prompt, want in zip([*prompts, prompts[0]], [*wanted, wanted[0]], strict=True):
            (done,) = engine.run([prompt], max_new_tokens=NEW)
            assert done.tokens == want
            known.append(done.reused_tokens)
        assert known[0] == 0 and known[1:] == ([0, 288, 384] if budget > 400 else known[1:])
        assert known[2] >= 256 and known[3] >= 256


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(do_sample=True, temperature=1.3, top_k=12),
        dict(do_sample=True, repetition_penalty=1.7, eos_token_id=[32, 10]),
        dict(no_repeat_ngram_size=2, min_new_tokens=5, eos_token_id=32),
    ],
    ids=str,
)
def test_tokens_that_are_read_a_step_late_are_those_of_generate(
    kv: flowkv.KV, options: dict[str, Any], followed: list[int]
) -> None:
    wanted = []
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        wanted.append(alone(tiny(), prompt, **options))
    with Engine(tiny(), kv, max_rows=8, token_budget=512) as engine:
        requests = [
            flowkv.Request(prompt=prompt, seed=seed, options=options, max_new_tokens=NEW)
            for seed, prompt in enumerate(PROMPTS)
        ]
        assert [one.tokens for one in engine.run(requests)] == wanted
    assert len(followed) >= NEW - 3


def test_pages_that_are_full_a_step_late_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many, and as the same tokens, as where each step's tokens are read before the next."""
    found = []
    for late in (False, True):
        monkeypatch.setattr(engine_engine, "runs_behind", lambda logits, late=late: late)
        kept: dict[str, Any] = dict(codec="kv8", recent_tokens=0, page_size=16, gpu="64MiB")
        with flowkv.attach(tiny(), **kept) as kv, Engine(tiny(), kv, max_rows=8) as engine:
            done = engine.run(PROMPTS, max_new_tokens=40)
            assert kv.planner is not None
            index = kv.planner.store.index
            pages = sorted((block.key, block.page >> CODEC_SHIFT) for block in index)
            assert any(codec for _, codec in pages)
            found.append(([one.tokens for one in done], pages))
    assert found[0] == found[1]


def test_the_model_is_looked_at_once_in_each_turn_that_lets_requests_in(
    kv: flowkv.KV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays as it is for rows that are opened together; later ones see what changed since."""
    looks = list[int]()
    door = door_of(tiny())
    assert door is not None
    own = type(door).refresh
    monkeypatch.setattr(
        type(door), "refresh", lambda self, **how: (looks.append(1), own(self, **how))[1]
    )
    with Engine(tiny(), kv, max_rows=8, token_budget=512) as engine:
        looks.clear()
        engine.run(PROMPTS, max_new_tokens=NEW)
        assert len(looks) == 1
        with torch.no_grad():
            tiny().lm_head.weight.mul_(0.5)
        before = kv.namespace
        try:
            engine.run([PROMPTS[2]], max_new_tokens=2)
            assert len(looks) == 2 and kv.namespace != before
        finally:
            with torch.no_grad():
                tiny().lm_head.weight.mul_(2.0)


def test_what_a_look_at_the_model_raises_fails_requests_and_not_the_engine(
    kv: flowkv.KV, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny(), kv, max_rows=8) as engine:

        def refused() -> None:
            raise UnsupportedModelError("the model cannot be served", "Use it without FlowKV")

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop.keeper, "_refresh", refused)
            answers = [engine.submit(prompt, max_new_tokens=2) for prompt in PROMPTS[:3]]
            for answer in answers:
                with pytest.raises(UnsupportedModelError, match="cannot be served"):
                    answer.result(90)
        assert engine.submit(PROMPTS[1], max_new_tokens=2).result(90).reason == "length"


@pytest.mark.parametrize("name", ["bloom", "falcon_h1"])
def test_a_model_that_moves_to_another_dtype_fails_its_rows_and_serves_the_next(name: str) -> None:
    """In rectangles, and one by one: the rows have pages of the former dtype, and no others."""
    model, twin = models.causal(name), models.causal(name).to(torch.float64)
    prompt, calls = models.prompt(20)[0].tolist(), list[int]()

    def move(module: Any, *_: Any) -> None:
        calls.append(0)
        if len(calls) == 4:
            module.to(torch.float64)

    with (
        flowkv.attach(model, gpu="64MiB", page_size=16, revision="moves") as kv,
        Engine(model, kv, max_rows=4) as engine,
    ):
        handle = model.register_forward_hook(move)
        with pytest.raises(StateError, match="do not fit the pages"):
            engine.run([prompt], max_new_tokens=NEW)
        handle.remove()
        assert not kv._open, "its row is closed"
        (done,) = engine.run([prompt], max_new_tokens=NEW)
        assert done.tokens == alone(twin, prompt)
