"""Plain `generate` after `attach` gives the model's own tokens, whatever its architecture."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationMixin
from transformers.models.llama import modeling_llama

from tests.hooks import matrix, models
from tests.hooks.compare import PAST, assert_same, attached, generate, reused, turns
from tests.inside import INDEXERS, PagedCache, door_of, place_layers, read_layer


@pytest.mark.parametrize("name", models.CAUSAL)
def test_two_turns_of_a_chat(name: str) -> None:
    model = models.causal(name)
    prompt, first, longer, second = turns(model)
    assert len(set(first.sequences[0, 70:].tolist())) > 2, "the model says one thing: no test"
    with attached(model) as kv:
        assert_same(generate(model, input_ids=prompt), first)
        assert reused(kv) == 0
        assert_same(generate(model, input_ids=longer), second)
        assert reused(kv) == 89, "all but the last token of the first turn, which was never fed"
        assert_same(generate(model, input_ids=longer), second)
        assert reused(kv) == 89 + 104
    assert_same(generate(model, input_ids=longer), second)


@pytest.mark.parametrize("name", models.CAUSAL)
def test_ragged_batch(name: str) -> None:
    model = models.causal(name)
    ids = torch.cat([models.prompt(60, seed=seed) for seed in (1, 2, 3)])
    inputs = models.pad_rows(ids, 0, 13, 37)
    theirs = generate(model, **inputs)
    with attached(model) as kv:
        assert_same(generate(model, **inputs), theirs)
        assert_same(generate(model, **inputs), theirs)
        assert reused(kv) > 0


def _git(patch: pytest.MonkeyPatch) -> torch.nn.Module:
    return matrix.build("causal", "git")  # widens its mask by an image once there is a cache


def _unmasked(patch: pytest.MonkeyPatch) -> torch.nn.Module:
    own = modeling_llama.create_causal_mask
    patch.setattr(
        modeling_llama,
        "create_causal_mask",
        lambda *args, **given: own(*args, **given | dict(attention_mask=None)),
    )
    return models.causal("llama")


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*padding changes")
@pytest.mark.parametrize("build", [_git, _unmasked])
@pytest.mark.parametrize("late", [False, True])
def test_padding_that_changes_a_row(
    build: Callable[[pytest.MonkeyPatch], torch.nn.Module], late: bool, monkeypatch: Any
) -> None:
    text = matrix.tokens(49)
    asked = []
    for pad in (0, 9, 20):
        ids = torch.cat([text[:, :pad] * 0, text], 1)
        asked.append(dict(input_ids=ids, attention_mask=(ids > 0).long()))
    with monkeypatch.context() as patch:
        model = build(patch)
        theirs = [generate(model, **given) for given in asked]
    with monkeypatch.context() as patch:
        if not late:
            build(patch)
        with attached(model, revision="1") as kv:
            if late:
                build(patch)
            for _ in range(2):
                for given, wanted in zip(asked, theirs, strict=True):
                    assert_same(generate(model, **given), wanted)
            assert reused(kv) == 48, "the text without padding, once"


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*no argument of the model")
@pytest.mark.parametrize("name", ["trocr", "bart", "bloom"])
def test_positions_that_a_model_does_not_take(name: str) -> None:
    model, text = matrix.build("causal", name), matrix.tokens(49)

    def ask(pad: int) -> torch.Tensor:
        ids = torch.cat([text[:, :pad] * 0, text], 1)
        mask = (ids > 0).long()
        given = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            out = model(ids, **given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    plain = [ask(pad) for pad in (0, 9, 20)]
    with attached(model):
        for _ in range(2):
            for pad, wanted in zip((0, 9, 20), plain, strict=True):
                assert torch.allclose(ask(pad), wanted, atol=1e-4)


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*count from 0")
def test_positions_of_the_model_s_own_count() -> None:
    model, ids = matrix.build("image", "kosmos-2.5"), matrix.tokens(50)

    def ask(**given: Any) -> torch.Tensor:
        cache = DynamicCache(config=model.config.text_config)
        with torch.no_grad():
            return model(ids, **given, past_key_values=cache, logits_to_keep=1).logits

    calls = [{}, {"position_ids": torch.arange(50)[None]}]
    plain = [ask(**given) for given in calls]
    with attached(model) as kv:
        for given, wanted in zip(calls * 2, plain * 2, strict=True):
            assert torch.allclose(ask(**given), wanted, atol=1e-4)
        assert reused(kv) == 49, "with positions, once"


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*pad token")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("m2m_100", torch.float32), ("m2m_100", torch.bfloat16), ("bart", torch.float32)],
)
def test_pad_tokens_that_count_no_position(name: str, dtype: torch.dtype) -> None:
    """M2M100 makes positions from the tokens of one forward, whatever lies in its cache."""
    model, plain = (matrix.build("seq2seq", name).to(dtype) for _ in range(2))
    source, text = matrix.tokens(20, 1), matrix.tokens(49)
    text[:, 5] = model.config.pad_token_id
    with attached(model) as kv:
        for ids in (text, text, torch.cat([text, matrix.tokens(9, 2)], 1)):
            given = dict(input_ids=source, decoder_input_ids=ids)
            assert_same(generate(model, **given), generate(plain, **given))
        assert bool(reused(kv)) == (name == "bart")


@pytest.mark.parametrize("name", models.HYBRID)
def test_hybrid_models_go_on_from_a_saved_state(name: str) -> None:
    model = models.causal(name)
    prompt, first, longer, second = turns(model)
    with attached(model) as kv:
        assert_same(generate(model, input_ids=prompt), first)
        assert_same(generate(model, input_ids=longer), second)
        assert reused(kv) == 89, "all but the last token of the first turn, which was never fed"
        assert_same(generate(model, input_ids=prompt), first)


@pytest.mark.usefixtures("all_is_loaded")
def test_a_hybrid_state_survives_a_restart(tmp_path) -> None:
    model = models.causal("falcon_h1")
    prompt, first, longer, second = turns(model)
    with attached(model, disk=f"{tmp_path}/kv:64MiB"):
        assert_same(generate(model, input_ids=prompt), first)
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        assert_same(generate(model, input_ids=longer), second)
        assert reused(kv) == 89


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("seq2seq", "t5gemma", id="its width is the encoder's"),
        pytest.param("audio", "cohere_asr", id="the encoder's mask", marks=pytest.mark.thorough),
        pytest.param("image", "minicpmv4_6", id="logits of all", marks=pytest.mark.thorough),
    ],
)
def test_known_prompts_are_reused(kind: str, name: str) -> None:
    if name not in matrix.KINDS[kind]:
        pytest.skip("not in this release of transformers")
    outcome = matrix.judge(kind, name)
    assert outcome.same and outcome.reused > 200


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize(
    "name", ["dory", pytest.param("inkling2_loop_text", marks=pytest.mark.thorough)]
)
def test_layers_that_run_in_loops(name: str, tmp_path: Path) -> None:
    """The model adds layers to its cache: one for each run of a layer."""
    if name not in matrix.KINDS["causal"]:
        pytest.skip("not in this release of transformers")
    model = matrix.build("causal", name)
    prompt, first, longer, second = turns(model)
    beams = generate(model, input_ids=prompt, num_beams=3)
    rows = models.pad_rows(torch.cat([prompt, prompt.roll(9, 1)]), 0, 9)
    batch = generate(model, **rows)
    for known in (False, True):
        with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
            if not known:
                assert_same(generate(model, input_ids=prompt), first)
            assert_same(generate(model, input_ids=longer), second)
            assert reused(kv) >= 64
            assert torch.equal(
                generate(model, input_ids=prompt, num_beams=3).sequences, beams.sequences
            )
            assert_same(generate(model, **rows), batch)
            assert door_of(model).plan.count == 4 < len(door_of(model).plan.specs)
    with torch.no_grad(), attached(model):
        cache = DynamicCache(config=model.config)
        model(prompt, **{PAST: cache}, logits_to_keep=1)
        assert isinstance(cache, PagedCache)
        native = pickle.loads(pickle.dumps(cache))
        logits = [model(longer[:, 70:75], **{PAST: one}).logits for one in (native, cache)]
        torch.testing.assert_close(logits[0], logits[1], atol=2e-4, rtol=2e-4)


def test_indexers_may_have_the_shape_of_latents_without_values() -> None:
    keys = torch.zeros(1, 1, 1, 16)
    layer = SimpleNamespace(keys=keys, values=keys[..., :0], indexer_keys=keys[:, 0])
    specs = [read_layer("full_attention", {})] * 2
    plan = place_layers(specs, [layer] * 2, 16, in_pages=True)
    assert plan.geometry.groups[0].layers == (0, 1, INDEXERS, INDEXERS + 1)


def test_speech_model() -> None:
    model = models.whisper()
    audio = torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(1))
    text = models.prompt(40).repeat(2, 1)

    def run(features: torch.Tensor, **options: object) -> object:
        # The model's own generate cuts audio into windows; the loop below it is what we serve.
        inputs = dict(input_features=features, decoder_input_ids=text)
        return generate(_Plain(model), **inputs, **options)

    theirs, beams, other = run(audio), run(audio, num_beams=3), run(audio.flip(0))
    assert len(set(theirs.sequences[0, 40:].tolist())) > 2
    assert not torch.equal(theirs.sequences, other.sequences), "audio does not matter: no test"
    with attached(model):
        assert_same(run(audio), theirs)
        assert torch.equal(run(audio, num_beams=3).sequences, beams.sequences)
        assert_same(run(audio.flip(0)), other)
        assert_same(run(audio), theirs)


class _Plain:
    """The model with the generation loop that all models share."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def generate(self, **inputs: object) -> object:
        return GenerationMixin.generate(self.model, **inputs)
