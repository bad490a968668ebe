"""Every way of generating gives the model's own tokens, reading pages and with prefixes reused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.fixture_model import load_tiny, stdlib_text
from tests.hooks import models
from tests.hooks.compare import PAST, assert_same, attached, forward, generate, reused

SUBJECTS = ["tiny", "gemma3", "deepseek_v3", "gpt_oss"]


def subject(name: str) -> torch.nn.Module:
    if name != "tiny":
        return models.causal(name)
    model = load_tiny()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def source_text(length: int, skip: int = 0) -> torch.Tensor:
    text = stdlib_text(skip + length)[skip:].replace(b"\0", b"\n")
    return torch.tensor([list(text)])


def padded() -> dict[str, torch.Tensor]:
    ids = torch.cat([source_text(90, skip) for skip in (0, 1000, 3000)])
    return models.pad_rows(ids, 41, 0, 7)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=4),
    "beams-returned": dict(num_beams=4, num_return_sequences=3),
    "prompt-lookup": dict(prompt_lookup_num_tokens=4),
    "chunked-prefill": dict(prefill_chunk_size=32),
    "no-logits-wanted": dict(output_logits=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_one_row(name: str, mode: str) -> None:
    model, inputs = subject(name), dict(input_ids=source_text(100), **MODES[mode])
    theirs = generate(model, **inputs)
    with attached(model):
        for _ in range(2):
            ours = generate(model, **inputs)
            assert torch.equal(ours.sequences, theirs.sequences)
    after = generate(model, **inputs)
    assert torch.equal(after.sequences, theirs.sequences), "detach leaves the model as it was"


@pytest.mark.parametrize("mode", ["greedy", "beams", "beams-returned"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_left_padded_rows(name: str, mode: str) -> None:
    model, inputs = subject(name), dict(**padded(), **MODES[mode])
    theirs = generate(model, **inputs)
    with attached(model) as kv:
        for _ in range(2):
            assert torch.equal(generate(model, **inputs).sequences, theirs.sequences)
        assert reused(kv) > 0


@pytest.mark.parametrize("name", SUBJECTS)
def test_sampling_several_continuations(name: str) -> None:
    model = subject(name)
    inputs = dict(input_ids=source_text(80), do_sample=True, num_return_sequences=3)
    torch.manual_seed(5)
    theirs = generate(model, **inputs)
    with attached(model):
        for _ in range(2):
            torch.manual_seed(5)
            assert torch.equal(generate(model, **inputs).sequences, theirs.sequences)


@pytest.mark.parametrize("name", ["tiny", "gemma3"])
def test_assisted_decoding(name: str) -> None:
    model, draft = subject(name), models.causal("llama")
    inputs = dict(input_ids=source_text(100), assistant_model=draft)
    theirs = generate(model, 30, **inputs)
    with attached(model):
        for _ in range(2):
            assert torch.equal(generate(model, 30, **inputs).sequences, theirs.sequences)


@pytest.mark.parametrize("name", ["tiny", "gemma3"])
def test_output_attentions_are_the_models_own(name: str) -> None:
    model = subject(name)
    model.set_attn_implementation("eager")
    inputs = dict(input_ids=source_text(60), output_attentions=True)
    theirs = generate(model, 6, **inputs)
    with attached(model):
        for _ in range(2):
            ours = generate(model, 6, **inputs)
            assert torch.equal(ours.sequences, theirs.sequences)
            for a, b in zip(ours.attentions, theirs.attentions, strict=True):
                for one, other in zip(a, b, strict=True):
                    assert one.shape == other.shape
                    assert torch.allclose(one, other, atol=1e-5)


def test_what_attention_weights_were_asked_of_is_not_shared() -> None:
    """Falcon takes a boolean mask for numbers then, so that its tokens see later ones."""
    model = models.causal("falcon")
    ids = models.prompt(48)
    theirs = generate(model, 6, input_ids=ids[:, :40])
    with attached(model):
        generate(model, 20, input_ids=ids, output_attentions=True)
        assert_same(generate(model, 6, input_ids=ids[:, :40]), theirs)


@pytest.mark.filterwarnings("ignore:FlowKV computes prompts whose hidden states")
@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("name", ["hidden_states", "router_logits"])
def test_outputs_of_all_tokens_are_complete(name: str, *, configured: bool) -> None:
    model, ids, asked = subject("gpt_oss"), source_text(60), {f"output_{name}": True}

    def run() -> list[torch.Size]:
        how = {PAST: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
        with torch.no_grad():
            found = model(ids, torch.ones_like(ids), **how, **({} if configured else asked))
        return [x.shape for x in found[name]]

    with attached(model):
        forward(model, ids)
        vars(model.config).update(asked if configured else {})
        first, again = run(), run()
    assert first == again == run()


@pytest.mark.parametrize("name", ["tiny", "gemma3"])
def test_tokens_that_see_later_ones(name: str) -> None:
    model, prompts = subject(name), [source_text(60)] * 2
    prompts[1] = prompts[1].where(torch.arange(60) < 40, 7)
    theirs = [forward(model, ids, is_causal=False) for ids in prompts]
    with attached(model), pytest.warns(UserWarning, match="attention may read `is_causal`"):
        for ids, wanted in zip(prompts, theirs, strict=True):
            assert torch.allclose(forward(model, ids, is_causal=False), wanted, atol=1e-3)


def test_a_token_that_looks_like_padding_inside_a_prompt() -> None:
    model, ids = subject("tiny"), source_text(80)
    ids[0, 40] = 0
    theirs = generate(model, input_ids=ids)
    with attached(model), pytest.warns(UserWarning, match="model's own cache") as warned:
        for _ in range(2):
            assert torch.equal(generate(model, input_ids=ids).sequences, theirs.sequences)
    assert len(warned) == 1, "one warning, however often it happens"


def test_embeddings_instead_of_tokens() -> None:
    model = subject("tiny")
    with torch.no_grad():
        given = dict(inputs_embeds=model.get_input_embeddings()(source_text(50)))
    theirs = generate(model, **given)
    with attached(model) as kv, pytest.warns(UserWarning, match="embeddings") as warned:
        for _ in range(2):
            assert torch.equal(generate(model, **given).sequences, theirs.sequences)
        assert reused(kv) == 0
    assert len(warned) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_stays_within_its_bound(dtype: torch.dtype) -> None:
    """Documented in docs/explain/exactness.md: relative to the largest logit."""
    model = load_tiny(dtype).eval()
    bound = 0.05 if dtype is torch.bfloat16 else 0.01
    ids = source_text(100)
    with torch.no_grad():
        theirs = model(ids, use_cache=True).logits
        with attached(model):
            for _ in range(2):
                ours = generate(model, 1, input_ids=ids).logits[0]
                worst = (ours - theirs[:, -1]).abs().max() / theirs[:, -1].abs().max()
                assert float(worst) < bound


def test_explicit_cache_for_one_call() -> None:
    model, ids = subject("tiny"), source_text(120)
    theirs = generate(model, input_ids=ids)
    with attached(model) as kv:
        for _ in range(2):
            cache = kv.cache(input_ids=ids, tenant="alice")
            ours = generate(model, input_ids=ids, past_key_values=cache)
            assert_same(ours, theirs)
        assert reused(kv) == 112
        cache = kv.cache(input_ids=ids, tenant="bob")
        assert_same(generate(model, input_ids=ids, past_key_values=cache), theirs)
        assert reused(kv) == 112, "another tenant's pages are never used"
