"""Choices of your own models, and how rows are drawn together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from flowkv import FlowKVError, Request
from tests.inside import (
    Choice,
    ConfigError,
    Drawn,
    Largest,
    NonFiniteError,
    OwnSampler,
    draw,
    seed_of,
)

PROMPT = np.arange(3, dtype=np.uint32)


def start(seed: int = 0, **options: Any) -> Choice:
    return OwnSampler().start(Request(prompt=PROMPT, options=options), PROMPT, seed)


def scores(rows: int = 4, seed: int = 0, vocabulary: int = 97) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def tokens(given: Iterable[Drawn]) -> list[int]:
    drawn = list(given)
    assert all(each.error is None for each in drawn)
    return [each.token for each in drawn]


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 1.0, 3.0, 0.0]])
    assert tokens(draw([start(), start()], logits)) == [1, 0]
    assert tokens(draw([start(), start()], logits.bfloat16())) == [1, 0]


def test_end_tokens_end() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 3)
    drawn = draw([start(), start(eos_token_id=1), start(eos_token_id=[2, 0])], logits)
    assert [each.over for each in drawn] == [False, True, False]
    several = torch.tensor([1, 0]), np.array([1]), np.array(1), np.int64(1), (1,), {1}
    for ids in several:
        assert all(each.over for each in draw([start(eos_token_id=ids)], logits[:1]))


@pytest.mark.parametrize(
    "options",
    [
        *(dict(), dict(temperature=2.5), dict(temperature=0.3, top_k=5), dict(top_p=0.7)),
        *(dict(temperature=1.9, top_k=20, top_p=0.6), dict(top_k=500), dict(top_p=1e-9)),
    ],
    ids=str,
)
def test_draws_as_transformers_would(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    warpers = transformers.LogitsProcessorList()
    if "temperature" in options:
        warpers.append(transformers.TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        warpers.append(transformers.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(transformers.TopPLogitsWarper(options["top_p"]))
    logits, choice = scores(40), start(7, do_sample=True, **options)
    ours = [tokens(draw([choice], row[None]))[0] for row in logits]
    torch.manual_seed(7)
    weights = (warpers(None, row[None].clone()).softmax(-1) for row in logits)
    assert ours == [int(torch.multinomial(each, 1)) for each in weights]
    assert len(set(ours)) > 5


def test_a_row_draws_what_it_draws_alone() -> None:
    logits = scores(6)
    options = dict(do_sample=True, temperature=2.0, top_p=0.9)
    alone = [tokens(draw([start(row, **options)], logits[row : row + 1]))[0] for row in range(6)]
    assert tokens(draw([start(row, **options) for row in range(6)], logits)) == alone
    assert logits.equal(scores(6))  # nothing was written into them


def test_a_choice_goes_on_where_it_was() -> None:
    options = dict(do_sample=True, temperature=4.0)
    choice, twin = start(1, **options), start(1, **options)
    logits = scores(1)
    torch.manual_seed(0)
    first = [tokens(draw([choice], logits))[0] for _ in range(8)]
    torch.randn(100)
    assert [tokens(draw([twin], logits))[0] for _ in range(8)] == first
    assert len(set(first)) > 1


def test_your_own_rule_sees_logits_and_tokens() -> None:
    seen = list[list[int]]()

    def second(logits: torch.Tensor, made: list[int]) -> int:
        seen.append(list(made))
        assert logits.dtype == torch.float32
        return int(logits.topk(2).indices[1])

    choice = start(choose=second, eos_token_id=2)
    logits = torch.tensor([[3.0, 2.0, 1.0]]).bfloat16()
    assert tokens([*draw([choice], logits), *draw([choice], logits)]) == [1, 1]
    assert seen == [[], [1]]


def test_a_broken_rule_fails_its_request_alone() -> None:
    def broken(logits: torch.Tensor, made: list[int]) -> int:
        raise KeyError("mine")

    logits = scores(3)
    logits[2, 50] = torch.nan
    choices = [start(choose=broken), start(), start()]
    bad, good, ill = draw(choices, logits)
    assert isinstance(bad.error, KeyError) and bad.over
    assert good == Drawn(int(logits[1].argmax()), over=False)
    assert isinstance(ill.error, NonFiniteError)
    [far] = draw([start(choose=lambda *_: 97)], scores(1))
    assert isinstance(far.error, FlowKVError)


@pytest.mark.parametrize(
    "options",
    [
        *(dict(temperature=0.5), dict(do_sample=True, temperature=0.0)),
        *(dict(do_sample=True, temperature=float("nan")), dict(do_sample=True, top_p=0.0)),
        *(dict(do_sample=True, top_p=1.1), dict(do_sample=True, top_k=-1)),
        *(dict(do_sample=True, top_k=2.5), dict(do_sample=True, top_k=True)),
        *(dict(do_sample=True, temperature="0.7"), dict(do_sample=True, temperature=[1.0])),
        *(dict(do_sample=True, top_p="x"), dict(do_sample=True, top_p=True)),
        *(dict(eos_token_id="end"), dict(eos_token_id="7"), dict(eos_token_id=2.7)),
        *(dict(eos_token_id=[1, 2.0]), dict(choose=3), dict(choose=lambda *_: 1, do_sample=True)),
        dict(num_beams=2),
    ],
    ids="-".join,
)
def test_refused_at_submit(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        start(**options)
    with pytest.raises(ConfigError):
        OwnSampler(**options)


def test_defaults_of_an_engine() -> None:
    sampler = OwnSampler(do_sample=True, temperature=2.0, eos_token_id=4)
    plain = Request(prompt=PROMPT)
    greedy = Request(prompt=PROMPT, options=dict(do_sample=False, temperature=None))
    assert not sampler.start(plain, PROMPT, 0).greedy
    assert type(sampler.start(greedy, PROMPT, 0)) is Largest
    assert sampler.start(greedy, PROMPT, 0).take(4)


def test_seeds_differ_by_request_and_engine() -> None:
    seeds = {seed_of(engine, number) for engine in range(30) for number in range(100)}
    assert len(seeds) > 2900
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert seed_of(0, 0) == 0xE220A8397B1DCDAF  # the first word of splitmix64 from 0
