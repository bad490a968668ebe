"""Whatever happens to a model after `attach`, its tokens are the ones it would give alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused


def test_changed_weights_are_not_served_from_disk(tmp_path) -> None:
    model, prompt = models.causal("llama"), models.prompt(80)
    with attached(model, disk=f"{tmp_path}/kv:64MiB"):
        generate(model, input_ids=prompt)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
    theirs = generate(model, input_ids=prompt)
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        assert_same(generate(model, input_ids=prompt), theirs)
        assert reused(kv) == 0


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
def test_a_copied_cache_goes_its_own_way() -> None:
    model, prompt = models.causal("gemma3"), models.prompt(60)
    tails = [models.prompt(9, seed=seed) for seed in (5, 6)]
    theirs = []
    for tail in tails:
        theirs.append(generate(model, input_ids=torch.cat([prompt, tail], 1)))
    with attached(model), torch.no_grad():
        cache = model(input_ids=prompt, use_cache=True).past_key_values
        for tail, wanted in zip(tails, theirs, strict=True):
            mine = copy.deepcopy(cache)
            ids = torch.cat([prompt, tail], 1)
            assert_same(generate(model, input_ids=ids, past_key_values=mine), wanted)
        ids = torch.cat([prompt, tails[0]], 1)
        assert_same(generate(model, input_ids=ids, past_key_values=cache), theirs[0])


def test_a_model_that_is_not_its_own_continuation_keeps_its_own_cache() -> None:
    config = transformers.MoshiConfig(**models.GROUPED, sliding_window=24, ffn_dim=128)
    torch.manual_seed(0)
    model = models.sharpen(transformers.MoshiForCausalLM(config))
    prompt = models.prompt(70)
    theirs = generate(model, input_ids=prompt)
    with pytest.warns(UserWarning, match="own cache"), attached(model) as kv:
        for _ in range(2):
            assert_same(generate(model, input_ids=prompt), theirs)
        assert reused(kv) == 0
    assert not flowkv.verify(model).ok


@pytest.mark.parametrize("name", [*models.CAUSAL, *models.HYBRID])
def test_verify_passes(name: str) -> None:
    model = models.causal(name)
    report = flowkv.verify(model)
    assert report.ok, str(report)
    assert any(case.reused for case in report.cases)
    assert report.verdict in str(report)


@pytest.mark.parametrize("build", [models.whisper, models.llava])
def test_verify_passes_beside_encoders(build: Callable[[], torch.nn.Module]) -> None:
    report = flowkv.verify(build())
    assert report.ok, str(report)


@pytest.mark.parametrize("second", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_layers_on_two_devices(second: str) -> None:
    """`device_map`: each device's layers get a group, and a pool, of their own."""
    accelerate = pytest.importorskip("accelerate")
    model, prompt = models.causal("llama"), models.prompt(80)
    theirs = generate(model, input_ids=prompt)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 2 else second for i in range(4)}
    places |= {"model.norm": second, "lm_head": second}
    # With another main device, what is on the CPU would only be kept there, and computed elsewhere.
    accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    assert {str(weight.device) for weight in model.parameters()} == {"cpu", second}
    with attached(model) as kv:
        for _ in range(2):
            assert_same(generate(model, input_ids=prompt), theirs, tolerance=1e-3)
        assert kv.geometry is not None
        assert {group.device for group in kv.geometry.groups} == {"cpu", second}
        assert reused(kv) > 0
