"""The engine's choices are `generate`'s, option by option, seed by seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from flowkv import Request
from tests.hooks import models
from tests.inside import ConfigError, GenerateSampler, UnsupportedModelError, draw

NEW = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return models.causal("llama")


def continued(
    model: Any, prompt: torch.Tensor, seed: int = 0, limit: int = NEW, **options: Any
) -> Iterator[int]:
    """What an engine does with one request, without an engine."""
    request = Request(prompt=prompt[0], max_new_tokens=limit, options=options)
    choice = GenerateSampler(model).start(request, prompt[0].numpy().astype(np.uint32), seed)
    cache, ids = transformers.DynamicCache(config=model.config), prompt
    for _ in range(limit):
        with torch.no_grad():
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        [drawn] = draw([choice], logits)
        if drawn.error is not None:
            raise drawn.error
        yield drawn.token
        if drawn.over:
            return
        ids = torch.tensor([[drawn.token]])


def generated(model: Any, prompt: torch.Tensor, seed: int = 0, **options: Any) -> list[int]:
    torch.manual_seed(seed)
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, **{"max_new_tokens": NEW, **options})
    return out[0, prompt.shape[1] :].tolist()


def test_a_token_is_added_once_whoever_chose_it(model: Any) -> None:
    """Criteria see the text: a greedy token that `choose` returns is not added again by `take`."""
    texts = list[list[int]]()

    def seen(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        texts.append(input_ids[0].tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    prompt, logits = np.array([5, 6], np.uint32), torch.eye(16)
    choice = GenerateSampler(model).read(prompt, 4, {"stopping_criteria": [seen]}, 0)
    assert choice.greedy
    assert [choice.take(choice.choose(logits[3])), choice.take(9)] == [False, False]
    assert not choice.take(choice.choose(logits[4]))
    assert texts == [[5, 6, 3], [5, 6, 3, 9], [5, 6, 3, 9, 4]]


class Upwards(transformers.LogitsProcessor):
    """Prefers the next id; keeps state, as a user's own may."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[0, (int(input_ids[0, -1]) + self.calls) % scores.shape[-1]] += 1000.0
        return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": dict(do_sample=True),
    "warped": dict(do_sample=True, temperature=1.7, top_k=9, top_p=0.8),
    "min_p": dict(do_sample=True, min_p=0.05, temperature=3.0),
    "typical": dict(do_sample=True, typical_p=0.9, epsilon_cutoff=1e-3, eta_cutoff=1e-3),
    "penalised": dict(repetition_penalty=3.0, no_repeat_ngram_size=2),
    "by_prompt": dict(encoder_repetition_penalty=2.0, encoder_no_repeat_ngram_size=2),
    "decayed": dict(exponential_decay_length_penalty=(3, 1.5), eos_token_id=7),
    "suppressed": dict(suppress_tokens=[5, 6, 7], begin_suppress_tokens=[9]),
    "at_least": dict(eos_token_id=list(range(0, 256, 3)), min_new_tokens=5),
    "at_least_all": dict(eos_token_id=list(range(0, 256, 3)), min_length=12),
    "stopped": dict(eos_token_id=list(range(0, 256, 3))),
    "forced": dict(forced_eos_token_id=11),
    "biased": dict(sequence_bias=[[[42], 3.0]], bad_words_ids=[[17], [3, 4]]),
    "renormalised": dict(do_sample=True, renormalize_logits=True, remove_invalid_values=True),
    "marked": dict(do_sample=True, watermarking_config=dict(bias=2.5)),
    "constrained": dict(prefix_allowed_tokens_fn=lambda row, ids: [len(ids) % 250, 33]),
    "stopped_by": dict(stopping_criteria=[lambda ids, scores: torch.tensor([ids.shape[1] == 40])]),
    "stopped_at": dict(
        stopping_criteria=[transformers.MaxLengthCriteria(16)], repetition_penalty=2.0
    ),
    "config": dict(
        generation_config=transformers.GenerationConfig(do_sample=True, top_k=4, eos_token_id=None)
    ),
}


@pytest.mark.filterwarnings("ignore:You set different `max_length`")
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_generate(model: Any, name: str) -> None:
    for seed, length in enumerate((37, 5)):
        prompt = models.prompt(length, seed)
        theirs = generated(model, prompt, seed, **OPTIONS[name])
        assert list(continued(model, prompt, seed, **OPTIONS[name])) == theirs


def test_own_processors(model: Any) -> None:
    prompt = models.prompt(9)
    theirs = generated(model, prompt, logits_processor=[Upwards()])
    assert list(continued(model, prompt, logits_processor=[Upwards()])) == theirs
    assert theirs[:3] == [int(prompt[0, -1]) + 1, int(prompt[0, -1]) + 3, int(prompt[0, -1]) + 6]


def test_the_models_own_config_counts(model: Any) -> None:
    before, prompt = model.generation_config, models.prompt(9)
    try:
        model.generation_config = transformers.GenerationConfig(
            do_sample=True, temperature=2.0, top_k=7, pad_token_id=0, eos_token_id=None
        )
        assert list(continued(model, prompt, 5)) == generated(model, prompt, 5)
    finally:
        model.generation_config = before


def test_seeds_alone_decide(model: Any) -> None:
    prompt = models.prompt(9)
    options = dict(do_sample=True, temperature=3.0)
    first = list(continued(model, prompt, 1, **options))
    torch.manual_seed(99)
    streams = [continued(model, prompt, seed, **options) for seed in (1, 2)]
    turns = list(zip(*streams, strict=True))  # interleaved draws
    assert [turn[0] for turn in turns] == first
    assert [turn[1] for turn in turns] != first


def test_empty_processors_are_greedy(model: Any) -> None:
    read = GenerateSampler(model).read
    one = np.ones(3, np.uint32)
    assert read(one, 5, {}, 0).greedy
    assert read(one, 5, dict(eos_token_id=3), 0).greedy
    assert not read(one, 5, dict(repetition_penalty=2.0), 0).greedy
    assert not read(one, 5, dict(do_sample=True), 0).greedy


@pytest.mark.parametrize(
    "options",
    [
        *(dict(num_beams=3), dict(num_return_sequences=2, do_sample=True)),
        *(dict(prompt_lookup_num_tokens=3), dict(guidance_scale=2.0), dict(token_healing=True)),
        *(dict(max_new_tokens=4), dict(max_length=40), dict(assistant_model="someone")),
        *(dict(pixel_values=torch.zeros(1)), dict(stop_strings=["x"])),
        *(dict(do_sample=True, temperature=-1.0), dict(typo=1)),
    ],
    ids="-".join,
)
def test_refused_at_submit(model: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GenerateSampler(model).read(np.ones(3, np.uint32), 5, options, 0)


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        GenerateSampler(models.t5())
