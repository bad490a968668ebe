"""Whatever happens to a model after `attach`, its tokens are the ones it would give alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import transformers

import flowkv
from flowkv import FlowKVError
from tests.clock import together
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused


def _scale(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)


def _scale_behind_autograd(model: torch.nn.Module) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


def _scale_beside_a_counted_write(model: torch.nn.Module) -> None:
    _scale_behind_autograd(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.0)


def _one_element(model: torch.nn.Module) -> None:
    model.model.embed_tokens.weight.data[:, 3] += 2.0


def _load(model: torch.nn.Module) -> None:
    other = {name: tensor * 1.3 for name, tensor in model.state_dict().items()}
    model.load_state_dict(other)


def _new_parameter(model: torch.nn.Module) -> None:
    old = model.model.layers[2].self_attn.o_proj.weight
    model.model.layers[2].self_attn.o_proj.weight = torch.nn.Parameter(old.detach() * 1.5)


def _to_double_and_back(model: torch.nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


CHANGES = [_scale, _scale_behind_autograd, _scale_beside_a_counted_write, _one_element, _load]
CHANGES += [_new_parameter, _to_double_and_back]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_weights_changed_in_place(change: Callable[[torch.nn.Module], None]) -> None:
    model, prompt = models.causal("llama"), models.prompt(80)
    with attached(model):
        generate(model, input_ids=prompt)
        change(model)
        ours = generate(model, input_ids=prompt)
        again = generate(model, input_ids=prompt)
    theirs = generate(model, input_ids=prompt)
    assert_same(ours, theirs)
    assert_same(again, theirs)


def test_changed_weights_are_not_served_from_disk(tmp_path) -> None:
    model, prompt = models.causal("llama"), models.prompt(80)
    with attached(model, disk=f"{tmp_path}/kv:64MiB"):
        generate(model, input_ids=prompt)
    _scale(model)
    theirs = generate(model, input_ids=prompt)
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        assert_same(generate(model, input_ids=prompt), theirs)
        assert reused(kv) == 0


def test_another_dtype() -> None:
    model, prompt = models.causal("llama"), models.prompt(80)
    with attached(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generate(model, input_ids=prompt)
        model.to(torch.float64)
        ours = [generate(model, input_ids=prompt) for _ in range(2)]
    theirs = generate(model, input_ids=prompt)
    for found in ours:
        assert_same(found, theirs)


def test_training_mode_is_left_alone() -> None:
    model, prompt = models.causal("llama"), models.prompt(60)
    with attached(model) as kv, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generate(model, input_ids=prompt)
        model.train()
        loss = model(input_ids=prompt, labels=prompt).loss
        loss.backward()
        assert model.model.layers[0].self_attn.k_proj.weight.grad is not None
        generate(model, input_ids=prompt)
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


def test_two_threads_generate_at_once() -> None:
    model = models.causal("llama")
    prompts = [models.prompt(60 + 7 * i, seed=i) for i in range(4)]
    theirs = [generate(model, input_ids=prompt) for prompt in prompts]
    found: dict[int, list[object]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(3):
                found[i].append(generate(model, input_ids=prompts[i]))

    with attached(model):
        together(*(partial(work, i) for i in range(4)))
        for i, wanted in enumerate(theirs):
            assert len(found[i]) == 3
            for ours in found[i]:
                assert_same(ours, wanted)


def test_a_prompt_longer_than_the_pool_is_answered() -> None:
    model, prompt = models.causal("llama"), models.prompt(700)
    theirs = generate(model, input_ids=prompt)
    with attached(model, gpu="1MiB"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = generate(model, input_ids=prompt)
        except FlowKVError as refused:
            assert "pool" in str(refused)
        else:
            assert_same(ours, theirs)


def test_detach_leaves_the_model_as_it_was() -> None:
    model, prompt = models.causal("gpt_oss"), models.prompt(60)
    before = (model.config._attn_implementation, len(model._forward_pre_hooks), dict(vars(model)))
    theirs = generate(model, input_ids=prompt)
    kv = flowkv.attach(model, gpu="64MiB", page_size=16)
    generate(model, input_ids=prompt)
    kv.detach()
    assert model.config._attn_implementation == before[0]
    assert len(model._forward_pre_hooks) == before[1]
    assert set(vars(model)) == set(before[2])
    assert_same(generate(model, input_ids=prompt), theirs)
    kv.close()


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
