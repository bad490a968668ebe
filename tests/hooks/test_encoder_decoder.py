"""Encoder-decoders: what is known of decoder prompts is not computed again, and never wrongly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import flowkv
from tests.inside import StateError

from . import models
from .compare import assert_same, attached, generate, reused
from .test_restore import restoring, stored

START = 1


def pair(cache: Any) -> Any:
    """As encoder-decoders want it."""
    return EncoderDecoderCache(cache, DynamicCache())


def prompts(length: int = 100, rows: int = 2) -> torch.Tensor:
    ids = models.prompt(length).repeat(rows, 1)
    ids[:, 0] = START
    return ids


def text(masked: int | None = None) -> dict[str, torch.Tensor]:
    """What T5 is given: two texts to read, one beginning of what it writes.

    Args:
        masked: Give a mask that hides so many leading tokens of the second row.
    """
    read = torch.cat([models.prompt(30, seed=seed) for seed in (5, 6)])
    seen = torch.ones_like(read)
    seen[1, :5] = 0
    inputs = dict(input_ids=read, attention_mask=seen, decoder_input_ids=prompts())
    if masked is not None:
        mask = torch.ones_like(inputs["decoder_input_ids"])
        mask[1, :masked] = 0
        inputs["decoder_attention_mask"] = mask
    return inputs


@pytest.fixture(scope="module")
def t5() -> Any:
    return models.t5()


class TestCachesMadeBeforehand:
    @pytest.mark.parametrize("masked", [None, 0, 7])
    @pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
    def test_generate_goes_on_from_them(self, t5: Any, masked: int | None, beams: int) -> None:
        inputs = text(masked)
        theirs = generate(t5, 6, **inputs, num_beams=beams).sequences
        with attached(t5) as kv:
            for _ in range(2):
                cache = pair(kv.cache(**inputs))
                run = generate(t5, 6, **inputs, num_beams=beams, past_key_values=cache)
                assert torch.equal(run.sequences, theirs)
            assert reused(kv) == beams * (2 * 87 - masked if masked else 192)

    def test_a_prompt_of_one_token_only(self, t5: Any) -> None:
        inputs = text()
        inputs["decoder_input_ids"] = torch.full((2, 100), START)
        theirs = generate(t5, 6, **inputs)
        with attached(t5) as kv:
            for _ in range(2):
                cache = kv.cache(**inputs)
                run = generate(t5, 6, **inputs, past_key_values=pair(cache))
                assert_same(run, theirs)
            assert cache.reused == 192

    def test_what_follows_can_be_given_in_parts(self, t5: Any) -> None:
        inputs = text()
        ids = inputs["decoder_input_ids"]
        with torch.no_grad():
            theirs = t5(**inputs).logits[:, -1]
        with attached(t5) as kv, torch.no_grad():
            for _ in range(2):
                cache = pair(kv.cache(**inputs))
                for low, stop in [(cache.get_seq_length(), 98), (98, 100)]:
                    given = inputs | {"decoder_input_ids": ids[:, low:stop]}
                    logits = t5(**given, past_key_values=cache).logits
                    assert logits.shape[1] == stop - low
                torch.testing.assert_close(logits[:, -1], theirs, rtol=1e-4, atol=1e-4)

    @pytest.mark.skipif(models.OLD, reason="its release cuts no empty cache")
    def test_a_cut_one(self, t5: Any) -> None:
        inputs = text()
        theirs = generate(t5, 6, **inputs)
        with attached(t5) as kv:
            for _ in range(2):
                cache = kv.cache(**inputs)
                cache.crop(-10)
                assert_same(generate(t5, 6, **inputs, past_key_values=pair(cache)), theirs)
            assert cache.reused > 0

    def test_another_prompt_is_served_as_what_it_is(self, t5: Any) -> None:
        inputs = text()
        other = inputs["decoder_input_ids"].clone()
        other[:, 3:] += 1
        calls = [
            *(inputs, inputs | {"decoder_input_ids": other}),
            inputs | {"decoder_input_ids": inputs["decoder_input_ids"][:, :98]},
            *(inputs | {"input_ids": inputs["input_ids"].flip(1)}, text(masked=7)),
        ]
        wanted = [generate(t5, 6, **call) for call in calls]
        with attached(t5) as kv:
            for made in (inputs, calls[-1]):
                for call, theirs in zip(calls, wanted, strict=True):
                    cache = pair(kv.cache(**made))
                    assert_same(generate(t5, 6, **call, past_key_values=cache), theirs)

    def test_a_single_cache_is_refused(self, t5: Any) -> None:
        inputs = text()
        with attached(t5) as kv, pytest.raises(StateError, match="EncoderDecoderCache"):
            generate(t5, 6, **inputs, past_key_values=kv.cache(**inputs))

    def test_speech(self) -> None:
        model = models.whisper()
        sound = torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(1))
        inputs = dict(input_features=sound, decoder_input_ids=prompts())
        theirs = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        with attached(model) as kv:
            for _ in range(2):
                cache = kv.cache(**inputs)
                run = model.generate(
                    **inputs, max_new_tokens=6, do_sample=False, past_key_values=pair(cache)
                )
                assert torch.equal(run, theirs)
            assert cache.reused == 192

    def test_a_cache_that_has_begun_needs_its_pair(self, t5: Any) -> None:
        inputs = text()
        with attached(t5):
            alone = generate(t5, 1, **inputs).past_key_values.self_attention_cache
            length = alone.get_seq_length()
            with torch.no_grad(), pytest.raises(StateError, match="cross attention"):
                t5(**inputs, past_key_values=alone)
            assert alone.get_seq_length() == length


class TestGenerate:
    def test_verify_reuses_as_it_does(self, t5: Any) -> None:
        assert flowkv.verify(t5).cases[1].reused >= 64
        with attached(t5) as kv:
            assert flowkv.verify(t5).cases[1].reused >= 64
            assert not kv.stats()["blocks"], "the cache of the attached model is left as it was"

    @pytest.mark.parametrize("masked", [None, 7])
    @pytest.mark.parametrize("beams", [1, pytest.param(3, marks=pytest.mark.slow)])
    def test_known_prompts_are_not_computed_again(
        self, t5: Any, masked: int | None, beams: int
    ) -> None:
        inputs = text(masked)
        theirs = generate(t5, 6, **inputs, num_beams=beams).sequences
        with attached(t5) as kv:
            for _ in range(2):
                run = generate(t5, 6, **inputs, num_beams=beams).sequences
                assert torch.equal(run, theirs)
            assert reused(kv) == beams * (192 if masked is None else 2 * 87 - 7)

    def test_another_text_to_read_is_another_prompt(self, t5: Any) -> None:
        inputs = text()
        other = inputs | {"input_ids": inputs["input_ids"].flip(0).flip(1)}
        theirs = generate(t5, 6, **other)
        with attached(t5) as kv:
            generate(t5, 6, **inputs)
            assert_same(generate(t5, 6, **other), theirs)
            assert reused(kv) == 0

    def test_whoever_else_calls_the_model_gets_all_logits(self, t5: Any) -> None:
        inputs = text()
        with torch.no_grad():
            theirs = t5(**inputs).logits
        with attached(t5) as kv, torch.no_grad():
            for _ in range(2):
                generate(t5, 6, **inputs)
                ours = t5(**inputs, past_key_values=pair(DynamicCache())).logits
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert reused(kv) == 192, "of generate"

    def test_generate_is_known_however_many_calls_lie_between(self, t5: Any) -> None:
        class Deep(type(t5)):
            def __call__(self, *args: Any, depth: int = 20, **given: Any) -> Any:
                if depth:
                    return self(*args, depth=depth - 1, **given)
                return super().__call__(*args, **given)

        model = Deep(t5.config).eval()
        with attached(model, revision="deep") as kv:
            runs = [generate(model, 3, **text()).sequences for _ in range(2)]
            assert torch.equal(*runs) and reused(kv) == 192

    def test_detached_and_copied_models_have_their_own_generate(self, t5: Any) -> None:
        inputs = text()
        with attached(t5):
            twin = copy.deepcopy(t5)
            assert "_prefill" in vars(t5) and "_prefill" not in vars(twin)
        assert "_prefill" not in vars(t5)
        calls = []
        twin._prefill = lambda *args, **given: (
            calls.append(1) or type(t5)._prefill(twin, *args, **given)
        )
        own = twin._prefill
        with attached(twin, revision="own"):
            assert_same(generate(twin, 3, **inputs), generate(t5, 3, **inputs))
            copied = copy.deepcopy(twin)
        assert calls and vars(twin)["_prefill"] is vars(copied)["_prefill"] is own

    @pytest.mark.filterwarnings("ignore:FlowKV computes prompts whose hidden states")
    def test_whoever_reads_more_gets_it(self, t5: Any) -> None:
        inputs = text()
        with attached(t5):
            for _ in range(2):
                run = generate(t5, 3, **inputs, output_hidden_states=True)
                assert run.decoder_hidden_states[0][-1].shape[1] == 100

    @pytest.mark.parametrize("lose", [0.0, 0.3])
    def test_prompts_are_restored(self, t5: Any, lose: float) -> None:
        inputs = text()
        theirs = generate(t5, 4, **inputs)
        frames = stored(t5, inputs)
        with restoring(t5, frames, lose=lose) as (kv, tier, seen):
            assert_same(generate(t5, 4, **inputs), theirs)
            assert seen.sum("computed_tokens") >= 96
            assert bool(tier.lost) is bool(lose) and (lose or reused(kv) == 96)
