"""Whatever changes what a layer computes changes the name, and nothing else does."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from transformers import activations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama import modeling_llama

import flowkv
from tests.clock import wait_for
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, foreign, generate, reused
from tests.hooks.tabled import ByRow
from tests.inside import (
    CALLS,
    Identity,
    Weights,
    door_of,
    fingerprint_of_weights,
    identity,
    version_of,
)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:FlowKV")
Edit = AbstractContextManager[Any]
"""While it is open, a model computes something else."""


def on_disk(kv: flowkv.KV) -> int:
    (tier,) = [tier for name, tier in kv.stats()["tiers"].items() if "disk" in name]
    return int(tier["blocks"])


def attention(model: torch.nn.Module, layer: int = 1) -> torch.nn.Module:
    return model.model.layers[layer].self_attn


# ---- edits, each of which changes what is computed, made after a prompt was served; more of them
# are in `test_foreign`


def mlp_of(model: Any) -> Any:
    return model.model.layers[0].mlp


def louder(plain: Any, factor: float = 1.3) -> Any:
    """An attention function whose output is larger."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        out, weights = plain(*args, **kwargs)
        return out * factor, weights

    return attend


def frequencies_of_rope(model: Any) -> Edit:
    rotary = model.model.rotary_emb
    buffers = {**rotary._buffers, "inv_freq": rotary.inv_freq * 1.5}
    return patch.object(rotary, "_buffers", buffers)


@contextmanager
def rotary_made_again(model: Any) -> Iterator[None]:
    rotary, config = model.model.rotary_emb, model.config
    with patch.dict(config.rope_parameters, rope_theta=50.0):
        rotary.__init__(config)
        yield
    rotary.__init__(config)
    rotary.eval()


def a_function_of_a_module(model: Any) -> Edit:
    plain = modeling_llama.apply_rotary_pos_emb

    def turned(q, k, cos, sin, unsqueeze_dim=1):
        return plain(q, k, sin, cos, unsqueeze_dim)

    return patch.object(modeling_llama, "apply_rotary_pos_emb", turned)


def a_registered_attention(model: Any) -> Edit:
    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    return patch.dict(registry._global_mapping, sdpa=louder(registry["sdpa"]))


def a_global_hook(model: Any) -> Edit:
    def scaled(module, args, out):
        return out * 1.5 if isinstance(module, modeling_llama.LlamaMLP) else None

    return torch.nn.modules.module.register_module_forward_hook(scaled)


@contextmanager
def a_row_of_weights(model: Any) -> Iterator[None]:
    weight = attention(model).v_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[3] += 2.0
        yield
        weight.copy_(before)


@contextmanager
def a_weight_uncounted(model: Any) -> Iterator[None]:
    row = attention(model).v_proj.weight.detach().numpy()[5]
    before = row.copy()
    row += 2.0
    yield
    row[:] = before


@contextmanager
def a_step_of_an_optimizer(model: Any) -> Iterator[None]:
    weight = attention(model).v_proj.weight
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()
    weight.grad = None
    yield
    weight.data.copy_(before)


@contextmanager
def a_setting_of_the_configuration(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    plain = modeling_llama.eager_attention_forward
    with patch.object(modeling_llama, "eager_attention_forward", louder(plain)):
        yield
    model.set_attn_implementation(before.removeprefix("flowkv_"))


@contextmanager
def precision(model: Any) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with a_row_of_weights(model):
        yield
    torch.set_default_dtype(torch.float32)


EDITS: dict[str, Callable[[Any], Edit]] = {
    "an_activation": lambda model: patch.object(mlp_of(model), "act_fn", torch.nn.Tanh()),
    "eps_of_a_norm": lambda model: patch.object(
        model.model.layers[1].input_layernorm, "variance_epsilon", 3.0
    ),
    "scaling_of_attention": lambda model: patch.object(attention(model), "scaling", 0.9),
    "scaling_of_rope": lambda model: patch.object(model.model.rotary_emb, "attention_scaling", 1.7),
    "frequencies_of_rope": frequencies_of_rope,
    "rotary_made_again": rotary_made_again,
    "a_method_of_a_class": lambda model, plain=modeling_llama.LlamaMLP.forward: patch.object(
        modeling_llama.LlamaMLP, "forward", lambda self, x: 1.5 * plain(self, x)
    ),
    "a_function_of_a_module": a_function_of_a_module,
    "a_registered_attention": a_registered_attention,
    "a_method_of_an_instance": lambda model: patch.object(
        mlp := mlp_of(model),
        "forward",
        types.MethodType(lambda self, x, plain=mlp.forward: plain(x) * 1.5, mlp),
    ),
    "a_hook": lambda model: mlp_of(model).register_forward_hook(lambda m, a, out: out * 1.5),
    "a_hook_before": lambda model: mlp_of(model).register_forward_pre_hook(
        lambda m, a: (a[0] * 1.5,)
    ),
    "a_global_hook": a_global_hook,
    "a_row_of_weights": a_row_of_weights,
    "a_weight_uncounted": a_weight_uncounted,
    "a_step_of_an_optimizer": a_step_of_an_optimizer,
    "a_setting_of_the_configuration": a_setting_of_the_configuration,
    "precision": precision,
}
each_edit = pytest.mark.parametrize("edit", EDITS)


@each_edit
def test_an_edit_after_attach_is_never_answered_with_what_was(edit: str) -> None:
    """Wrong before the edit is noticed, and right again, and reused, when it is taken back."""
    model, prompt = models.short(), models.prompt(60)
    plain = generate(model, 2, input_ids=prompt)
    with attached(model) as kv:
        for _ in range(2):
            generate(model, 2, input_ids=prompt)
        with EDITS[edit](model):
            ours = [generate(model, 2, input_ids=prompt) for _ in range(2)]
            kv.detach()
            theirs = generate(model, 2, input_ids=prompt)
    assert not all(torch.equal(a, b) for a, b in zip(plain.logits, theirs.logits, strict=True))
    for found in ours:
        assert_same(found, theirs)


@pytest.mark.thorough
@each_edit
@pytest.mark.usefixtures("all_is_loaded")
def test_an_edit_before_attach_is_another_name(edit: str, tmp_path) -> None:
    """Over a store, after a restart: the edited model finds nothing, the old one finds its own."""
    model, prompt = models.short(), models.prompt(60)
    place = f"{tmp_path}/kv:64MiB"
    with attached(model, disk=place):
        generate(model, 4, input_ids=prompt)
    with EDITS[edit](model):
        theirs = generate(model, 4, input_ids=prompt)
        with attached(model, disk=place) as kv:
            assert_same(generate(model, 4, input_ids=prompt), theirs)
            assert reused(kv) == 0
    with attached(model, disk=place) as kv:
        generate(model, 4, input_ids=prompt)
        assert foreign(kv) or reused(kv) == 48


# ---- names stay


def test_an_edit_that_is_taken_back_finds_what_was() -> None:
    model, prompt = models.short(), models.prompt(60)
    with attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        generate(model, 4, input_ids=prompt)
        for edit in ("scaling_of_attention", "a_hook", "an_activation"):
            before = reused(kv)
            with EDITS[edit](model):
                generate(model, 4, input_ids=prompt)
            assert reused(kv) == before
            generate(model, 4, input_ids=prompt)
            assert reused(kv) == before + 48


@pytest.mark.parametrize("name", [*activations.ACT2CLS])
def test_activations_have_no_mode(name: str) -> None:
    """Models share some, so that `eval` of one model changes the mode in others."""
    activation = activations.ACT2FN[name]
    if type(activation).__module__ == activations.__name__:
        x, found = torch.linspace(-12, 12, 97), Identity(activation.train())
        theirs = activation(x)
        assert not found.training and found.same(activation.eval())
        assert found.namespace == Identity(activation).namespace
        assert torch.equal(activation(x), theirs)


def loaded(model: Any, path: str) -> Any:
    model.save_pretrained(path)
    return type(model).from_pretrained(path)


def of_a_state(model: Any, path: str) -> Any:
    config = type(model.config)(**model.config.to_dict())
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def served_otherwise(model: Any, path: str) -> Any:
    given = dict(max_new_tokens=2, cache_implementation="static", disable_compile=True)
    model.generate(models.prompt(9), **given)
    torch.compile(model, backend="eager")
    model.lm_head.forward = model.lm_head.forward  # a patch that was taken back
    return model


SAME: tuple[Callable[[Any, str], Any], ...] = (
    *(loaded, of_a_state, served_otherwise),
    lambda model, path: model.double().float(),
    lambda model, path: pickle.loads(pickle.dumps(model)),
)


@pytest.mark.parametrize("way", SAME)
def test_ways_to_one_model_give_one_name(way: Callable[[Any, str], Any], tmp_path: Path) -> None:
    model = models.short()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    before = Identity(model).namespace.digest()
    assert Identity(way(model, str(tmp_path))).namespace.digest() == before


def test_the_compiler_changes_no_name(monkeypatch) -> None:
    """It marks the class of all modules when it first compiles anything."""
    mark = "___needs_generation_tag_patch"
    monkeypatch.delattr(torch.nn.Module, mark, raising=False)
    model = models.short()
    before = Identity(model)
    monkeypatch.setattr(torch.nn.Module, mark, False, raising=False)
    assert before.same(model) and Identity(model).namespace == before.namespace


def test_a_forward_of_another_module_is_another_name() -> None:
    model = models.short()
    before, (one, other) = Identity(model), (layer.mlp for layer in model.model.layers[:2])
    one.forward = other.forward
    assert not before.same(model) and Identity(model).namespace != before.namespace


def test_a_shared_activation_changes_no_name() -> None:
    """Another model, as XLM, has the object that RoBERTa's code calls among its modules."""
    model = models.roberta()
    found = Identity(model)
    mode = activations.gelu.training
    try:
        torch.nn.Sequential(activations.gelu).train(not mode)
        assert found.same(model) and Identity(model).namespace == found.namespace
    finally:
        activations.gelu.train(mode)


def test_looks_at_annotations_change_nothing() -> None:
    model = models.short()
    identity = Identity(model)
    for module in model.modules():
        assert type(module).__annotations__ is not None  # Python keeps it in the class
    assert identity.same(model)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
def test_experts_are_those_that_are_registered(name: str, monkeypatch) -> None:
    """Both that `generate` runs: it decodes on a GPU by `batched_mm` where `grouped_mm` is set."""
    model = models.causal("gpt_oss")
    registry = ALL_EXPERTS_FUNCTIONS._global_mapping
    plain, found = registry[name], Identity(model)
    model.set_experts_implementation("batched_mm")
    assert found.same(model) and Identity(model).namespace == found.namespace
    monkeypatch.setitem(registry, name, lambda *given: 2 * plain(*given))
    assert not found.same(model) and Identity(model).namespace != found.namespace
    monkeypatch.undo()
    model.set_experts_implementation("eager")
    assert not found.same(model) and Identity(model).namespace != found.namespace


PROGRAM = """
import json, sys
import torch
from flowkv.naming.identity import Identity
from tests.hooks import models
from tests.hooks.compare import attached, generate
found = {}
for name in ("llama", "gpt_oss", "deepseek_v3", "falcon_h1", "bloom"):
    model = models.causal(name)
    found[name] = [Identity(model).namespace.digest().hex()]
    if sys.argv[1] == "served":
        generate(model, 5, input_ids=models.prompt(200))
        with attached(model):
            generate(model, 5, input_ids=models.prompt(100))
        found[name].append(Identity(model).namespace.digest().hex())
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_a_model_has_one_name_in_every_process() -> None:
    """With another order of hashes, and after it was served."""
    found = []
    for seed, state in (("1", "fresh"), ("2", "served")):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, state],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    fresh, served = found
    assert served == {name: 2 * names for name, names in fresh.items()}
    assert len({names[0] for names in fresh.values()}) == 5


def test_an_lstm_is_named_by_its_weights() -> None:
    """It holds weak references to them, too."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 4, num_layers=2).eval()
    held = Identity(lstm)
    assert held.foreign == "" and held.same(lstm)
    before = held.namespace
    with torch.no_grad():
        lstm.weight_hh_l1[0] += 1
    assert not held.same(lstm) and held.read(lstm) and held.namespace != before
    assert held.foreign == ""
    lstm._flat_weight_refs = []
    lstm.proj_size = 2
    assert held.read(lstm)


def test_submodules_in_training_mode_are_not_shared() -> None:
    model, prompt = models.short(), models.prompt(60)
    mlp = model.model.layers[1].mlp
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.5))
    model.eval()
    plain = generate(model, 4, input_ids=prompt)
    with attached(model) as kv:
        assert_same(generate(model, 4, input_ids=prompt), plain)
        mlp.act_fn[1].train()
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            ours = generate(model, 4, input_ids=prompt)
            with door_of(model).aside():
                torch.manual_seed(seed)
                assert_same(ours, generate(model, 4, input_ids=prompt))
        assert reused(kv) == 0
        mlp.act_fn[1].eval()
        assert_same(generate(model, 4, input_ids=prompt), plain)
        assert reused(kv) == 48


def test_harmless_training_mode_is_shared() -> None:
    """As PEFT leaves its layers when it adds them: nothing in them draws a random number."""
    model, prompt = models.short(), models.prompt(60)
    mlp = model.model.layers[1].mlp
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.0)).train()
    with attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        generate(model, 4, input_ids=prompt)
        assert reused(kv) == 48


# ---- rows


def by_row(model: torch.nn.Module, kind: Any = ByRow) -> None:
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp, [1.0, 2.0])


@pytest.mark.parametrize("common", [60, 40])
def test_rows_that_are_treated_differently_share_nothing(common: int) -> None:
    model = models.short()
    rows = models.prompt(60).repeat(2, 1)
    rows[1, common:] = models.prompt(60, 9)[0, common:]
    by_row(model)
    theirs = generate(model, 4, input_ids=rows)
    with attached(model, revision="by row") as kv:
        assert_same(generate(model, 4, input_ids=rows), theirs)
        assert reused(kv) == 0
        assert_same(generate(model, 4, input_ids=rows), theirs)
        assert reused(kv) > 0


def test_verify_tries_equal_rows() -> None:
    model = models.short()
    assert "row of the batch" not in str(flowkv.verify(model))
    by_row(model)
    assert "depends on the row of the batch" in str(flowkv.verify(model))


def test_a_hook_that_treats_rows_differently() -> None:
    model, rows = models.short(), models.prompt(60).repeat(3, 1)

    def hook(module, args, kwargs, out, names):
        scale = torch.tensor([{"a": 1.0, "b": 1.5}[name] for name in names])
        return out * scale[:, None, None]

    for names in (["a", "b", "a"], ["b", "a", "a"]):
        handle = model.model.layers[1].mlp.register_forward_hook(
            functools.partial(hook, names=names), with_kwargs=True
        )
        theirs = generate(model, 4, input_ids=rows)
        handle.remove()
        other = models.short()
        with attached(other):
            for _ in range(2):
                handle = other.model.layers[1].mlp.register_forward_hook(
                    functools.partial(hook, names=names), with_kwargs=True
                )
                assert_same(generate(other, 4, input_ids=rows), theirs)
                handle.remove()


def test_equal_rows_of_an_ordinary_model_share() -> None:
    model, rows = models.short(), models.prompt(60).repeat(2, 1)
    with attached(model) as kv:
        generate(model, 4, input_ids=rows)
        generate(model, 4, input_ids=rows)
        assert reused(kv) >= 96


# ---- inputs that nobody knows


class Steered(transformers.LlamaForCausalLM):
    """Takes more than transformers' models do."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        logits_to_keep=0,
        steer=None,
        names=None,
        loud=True,
        **kwargs,
    ):
        self.model.layers[0].mlp.__dict__["now"] = (steer, names, loud)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def prepare_inputs_for_generation(self, *args, steer=None, names=None, loud=True, **kwargs):
        given = super().prepare_inputs_for_generation(*args, **kwargs)
        return given | {"steer": steer, "names": names, "loud": loud}


class SteeredMLP(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steer, names, loud = self.__dict__["now"]
        y = self.inner(x)
        if steer is not None:
            y = y * steer.view(-1, 1, 1)
        if names is not None:
            y = y * torch.tensor([1.0 + len(name) for name in names])[:, None, None]
        return y if loud else y * 0.5


def steered() -> torch.nn.Module:
    torch.manual_seed(0)
    model = models.sharpen(Steered(transformers.LlamaConfig(**models.GROUPED)))
    model.model.layers[0].mlp = SteeredMLP(model.model.layers[0].mlp)
    return model


def test_an_input_that_nobody_knows_is_part_of_the_key() -> None:
    model, rows = steered(), models.prompt(60).repeat(2, 1)
    cases = [
        *({}, {"steer": torch.tensor([1.0, 1.5])}, {"steer": torch.tensor([1.5, 1.0])}),
        *({"steer": torch.tensor(1.5)}, {"names": ["a", "bb"]}, {"names": ["bb", "a"]}),
        *({"loud": False}, {"loud": True}),
    ]
    wanted = [generate(model, 4, input_ids=rows, **case) for case in cases]
    with attached(model, revision="steered") as kv:
        for order in (range(len(cases)), reversed(range(len(cases)))):
            for case in order:
                assert_same(generate(model, 4, input_ids=rows, **cases[case]), wanted[case])
        assert reused(kv) > 0


def test_an_input_without_a_digest_is_not_shared() -> None:
    model, prompt = steered(), models.prompt(60)

    class Name:
        def __init__(self, length: int) -> None:
            self.length = length

        def __len__(self) -> int:
            return self.length

    for length in (1, 3, 1):
        wanted = generate(model, 4, input_ids=prompt, names=(Name(length),))
        with attached(model) as kv:
            for _ in range(2):
                found = generate(model, 4, input_ids=prompt, names=(Name(length),))
                assert_same(found, wanted)
            assert reused(kv) == 0


def test_a_mode_of_torch_between_model_and_torch_is_not_shared() -> None:
    class Louder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            return out * 1.2 if function is torch.nn.functional.silu else out

    model, prompt = models.short(), models.prompt(60)
    plain = generate(model, 4, input_ids=prompt)
    with Louder():
        louder = generate(model, 4, input_ids=prompt)
    with attached(model):
        for _ in range(2):
            assert_same(generate(model, 4, input_ids=prompt), plain)
            with Louder():
                assert_same(generate(model, 4, input_ids=prompt), louder)


# ---- weights larger than what is read for every call


def large() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**models.GROUPED | dict(vocab_size=40_000))
    return models.sharpen(transformers.LlamaForCausalLM(config))


def test_every_byte_of_large_weights_is_in_the_name() -> None:
    model = large()
    names, weight = [Identity(model).namespace.weights], model.lm_head.weight
    for at in (0, 17_321, weight.shape[0] - 1):
        for column in (0, 33, 63):
            with torch.no_grad():
                weight[at, column] += 1.0
            names.append(Identity(model).namespace.weights)
    assert len(set(names)) == len(names)


def test_pages_of_large_weights_wait_for_a_reading(tmp_path, monkeypatch) -> None:
    """Nothing lasts that was computed by weights that were written to without a count."""
    monkeypatch.setattr(identity, "_SHARE", 0.0)  # a call reads its 32nd part, whatever it took
    model, prompt, place = large(), models.prompt(60), f"{tmp_path}/kv:64MiB"
    with attached(model, disk=place) as kv:
        door_of(model).proof.enter()  # never idle
        generate(model, 4, input_ids=prompt)
        assert kv.planner.store.stack.provisional
        assert on_disk(kv) == 0
        kv.flush()
        assert not kv.planner.store.stack.provisional
        assert on_disk(kv) > 0
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        generate(model, 4, input_ids=models.prompt(60, 5))
    with attached(model, disk=place) as kv:
        theirs = generate(model, 4, input_ids=models.prompt(60, 5))
        assert reused(kv) == 0
    kv.close()
    assert_same(theirs, generate(model, 4, input_ids=models.prompt(60, 5)))


class Late(fingerprint_of_weights.Later):  # type: ignore[misc,name-defined]
    ready = False


@pytest.fixture(params=[False, True], ids=["at once", "by a device that runs behind"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads weights for their proof."""
    if request.param:
        monkeypatch.setattr(fingerprint_of_weights, "Later", Late)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("settings", [1, 2])
def test_an_uncounted_write_is_found_within_so_many_calls(settings: int) -> None:
    """Also by calls that each find another setting of the model than the one before."""
    model, prompt = large(), models.prompt(60)

    def name(call: int) -> bytes:
        model.model.norm.variance_epsilon = (1e-6, 1e-5)[call % settings]
        generate(model, 2, input_ids=prompt)
        return kv.namespace

    with attached(model) as kv:
        before = {name(call) for call in range(settings)}
        model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.5)
        assert any(name(call) not in before for call in range(CALLS))
        kv_answer = generate(model, 4, input_ids=prompt)
    assert_same(kv_answer, generate(model, 4, input_ids=prompt))


def test_weights_that_were_merged_by_modules_that_left(monkeypatch) -> None:
    """Adapters are merged by writes without a count, before they are taken out."""
    monkeypatch.setattr(identity, "_SHARE", 0.0)
    model, prompt = large(), models.prompt(60)
    mlp: Any = model.model.layers[0].mlp
    linear = mlp.up_proj
    with attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        kv.flush()  # proves its pages
        mlp.up_proj = torch.nn.Sequential(linear)
        generate(model, 4, input_ids=prompt)
        linear.weight.data.mul_(1.5)
        mlp.up_proj = linear
        ours = generate(model, 4, input_ids=prompt)
    assert_same(ours, generate(model, 4, input_ids=prompt))


@pytest.mark.parametrize("where", ["checksum", "Later", "result"])
def test_what_fails_to_be_read_is_not_proven(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out while weights are read: the reading begins anew."""
    monkeypatch.setattr(fingerprint_of_weights, "Later", Late)
    weights, held = Weights(), {name: torch.zeros(1 << 21) for name in "abc"}
    weights.read(held)
    held["b"].data[5] = 1.0
    fails = iter([False, True])
    own = getattr(Late if where == "result" else fingerprint_of_weights, where)

    def failing(*args: Any) -> Any:
        if next(fails, False):
            raise torch.OutOfMemoryError("out of memory")
        return own(*args)

    monkeypatch.setattr(Late if where == "result" else fingerprint_of_weights, where, failing)
    for _ in range(12):
        try:
            if not weights.roll(1 << 23):
                break
        except torch.OutOfMemoryError:
            pass
    else:
        pytest.fail("the write was not found")
    assert not weights.passes


@pytest.mark.usefixtures("device")
def test_idle_time_proves_pages(tmp_path) -> None:
    model = large()
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        generate(model, 4, input_ids=models.prompt(60))
        wait_for(lambda: not kv.planner.store.stack.provisional)
        kv.planner.store.writes.flush(30.0)
        assert on_disk(kv) > 0


def test_no_version_is_asked_of_what_has_none() -> None:
    """The error takes as long as seventy calls, and each step would wait for one a state."""
    made: Any = Mock(spec=["is_inference"], is_inference=lambda: True)
    assert version_of(made) == -1


def test_no_thread_reads_weights_while_the_interpreter_ends() -> None:
    """It is within torch most of the time, and would be ended there: that aborts a process."""
    program = """
import atexit, threading, time

@atexit.register  # the first to be registered is the last to be called
def told():
    print(sorted(thread.name for thread in threading.enumerate()))

import torch, flowkv
from flowkv.data import tiny_path
from flowkv.naming import identity
from transformers import AutoModelForCausalLM

identity.SMALL_BYTES = 0
real = identity.Proof.step
identity.Proof.step = lambda self: bool(time.sleep(0.3)) or real(self) or True
model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
import tempfile
kv = flowkv.attach(model, gpu="8MiB", disk=tempfile.mkdtemp())
model.generate((torch.arange(300)[None] % 90 + 32), max_new_tokens=4, do_sample=False)
assert any(thread.name == "flowkv-weights" for thread in threading.enumerate())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "flowkv-weights" not in done.stdout and "MainThread" in done.stdout
