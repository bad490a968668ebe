"""What used to reuse nothing without a word: it is reused, or one warning says why."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused


def tokenizer() -> Any:
    letters = sorted(ByteLevel.alphabet())
    inner = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = ByteLevel(), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("way", ["greedy", "beams", "sampled"])
def test_stop_strings_reuse_prompts(way: str) -> None:
    how = dict(beams=dict(num_beams=2), sampled=dict(do_sample=True, top_k=3)).get(way, {})
    given = dict(input_ids=models.prompt(70), stop_strings=["zzz"], tokenizer=tokenizer(), **how)
    given |= dict(attention_mask=torch.ones(1, 70, dtype=torch.long))
    model, twin = models.causal("llama"), models.causal("llama")
    torch.manual_seed(4)
    want = generate(twin, 6, **given)
    with attached(model) as kv:
        for again in range(2):
            torch.manual_seed(4)
            assert_same(generate(model, 6, **given), want)
            assert reused(kv) >= 69 * again
        plain = {k: v for k, v in given.items() if k not in ("stop_strings", "tokenizer")}
        generate(model, 6, **plain)
        assert reused(kv) >= 2 * 69, "a tokenizer names nothing"


@torch.no_grad()
def test_an_argument_that_only_looks_like_a_tokenizer_is_not_passed_over() -> None:
    model = models.causal("llama")
    with attached(model) as kv, pytest.warns(UserWarning, match="attention may read"):
        for _ in range(2):
            cache = transformers.DynamicCache(config=model.config)
            model(
                models.prompt(40),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                tokenizer=object(),
            )
        assert reused(kv) == 0


class TestCompiled:
    @pytest.fixture(autouse=True)
    def anew(self) -> Any:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @staticmethod
    def said(caught: list[Any]) -> list[str]:
        texts = [str(one.message) for one in caught]
        return [text for text in texts if "FlowKV leaves" in text and "compile" in text]

    @pytest.mark.parametrize(
        "first", ["attach", pytest.param("compile", marks=pytest.mark.thorough)]
    )
    def test_model_compile_warns_once(self, first: str) -> None:
        model, ids = models.causal("llama"), models.prompt(40)
        want = generate(models.causal("llama"), 2, input_ids=ids)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if first == "compile":
                model.compile(backend="eager")
            with attached(model) as kv:
                if first == "attach":
                    generate(model, 2, input_ids=ids)
                    model.compile(backend="eager")
                for _ in range(2):
                    assert_same(generate(model, 2, input_ids=ids), want)
                assert reused(kv) == 0
                model.compile(backend="eager")
        assert len(self.said(caught)) == 1

    def test_copies_and_detached_models_compile_as_their_class_does(self) -> None:
        model = models.causal("llama")
        with attached(model):
            twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for plain in (model, *twins):
            assert "compile" not in vars(plain)
            plain.compile(backend="eager")  # a warning would be an error
            assert plain._compiled_call_impl is not None

    @pytest.mark.filterwarnings("ignore:.*torch:UserWarning")
    def test_what_torch_compile_returned_is_unwrapped(self) -> None:
        model, ids = models.causal("llama"), models.prompt(40)
        want = generate(models.causal("llama"), 2, input_ids=ids)
        compiled = torch.compile(model, backend="eager")
        with pytest.warns(UserWarning, match="torch.compile") as caught:
            kv = flowkv.attach(compiled, gpu="64MiB", page_size=16)
        assert len(self.said(caught)) == 1
        for again in range(2):
            assert_same(generate(compiled, 2, input_ids=ids), want)
            assert reused(kv) == 39 * again, "generate calls the model itself"
        logits = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(logits[:, -1], want.logits[0], rtol=0, atol=1e-4)
        kv.close()
        assert flowkv.verify(compiled).ok
