"""After an edit, what attach tried is tried again; and which caches leave their pages."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, filled, forward, generate, reused
from tests.hooks.tabled import as_library
from tests.inside import Identity, Weights
from tests.inside import door as doors

Edit = AbstractContextManager[Any]
"""While it is open, a model computes something else."""


def hook(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: change(out))


def last_token(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, -1] += 3.0
    return x


def prefill_only(x: torch.Tensor) -> torch.Tensor:
    return x + 2.0 if x.shape[1] > 1 else x


def twentieth_token(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    if x.shape[1] > 1:
        x[:, 20] += 3.0  # raises where fewer are computed
    return x


@contextmanager
def looks_ahead(model: Any) -> Iterator[None]:
    layers = [layer.self_attn for layer in model.model.layers]
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "is_causal", False))
        unmasked = patch.object(modeling_llama, "create_causal_mask", lambda *_, **__: None)
        stack.enter_context(unmasked)
        yield


def attention_of_torch(model: Any) -> Edit:
    name, plain = "scaled_dot_product_attention", F.scaled_dot_product_attention
    return patch.object(F, name, lambda q, *a, **k: plain(q * 1.02, *a, **k))


def keys_repeated(model: Any) -> Edit:
    plain = sdpa_attention.repeat_kv
    return patch.multiple(
        sdpa_attention, use_gqa_in_sdpa=lambda *_: False, repeat_kv=lambda x, n: plain(x * 1.02, n)
    )


def cache_layers(model: Any) -> Edit:
    plain = DynamicLayer.update

    def halved(self: Any, k: Any, v: Any, *given: Any, **more: Any) -> Any:
        return plain(self, k, v * 0.5, *given, **more)

    return patch.object(DynamicLayer, "update", halved)


EDITS: dict[str, Callable[[Any], Edit]] = {
    "the last token": lambda m: hook(m, last_token),
    "the prompt alone": lambda m: hook(m, prefill_only),
    "decoding alone": lambda m: hook(m, lambda x: x + 2.0 if x.shape[1] == 1 else x),
    "the mean of the tokens": lambda m: hook(m, lambda x: x + x.mean(1, keepdim=True)),
    "their number": lambda m: hook(m, lambda x: x * (1 + x.shape[1] / 20)),
    "an index that some forwards lack": lambda m: hook(m, twentieth_token),
    "many tokens only": lambda m: hook(
        m, lambda x: x - x.mean(1, keepdim=True) * (x.shape[1] > 40)
    ),
    "attention that looks ahead": looks_ahead,
    "torch's attention": attention_of_torch,
    "a function of attention": keys_repeated,
    "the model's own cache": cache_layers,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.filterwarnings("ignore")
def test_an_edit_that_pages_cannot_serve(edit: Callable[[Any], Edit]) -> None:
    model, prompt = models.causal("llama"), models.prompt(60)
    plain = generate(model, 6, input_ids=prompt)
    with attached(model) as kv:
        for _ in range(2):
            generate(model, 6, input_ids=prompt)
        with edit(model):
            ours = [generate(model, 6, input_ids=prompt) for _ in range(3)]
            kv.detach()
            theirs = generate(model, 6, input_ids=prompt)
    assert not torch.equal(torch.stack(plain.logits), torch.stack(theirs.logits))
    for found in ours:
        assert_same(found, theirs)


def test_an_edit_is_tried_once_and_an_amount_never(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    settle = doors.settle
    monkeypatch.setattr(doors, "settle", lambda *a: tried.append(1) or settle(*a))
    model, prompt = models.causal("llama"), models.prompt(60)
    layer = model.model.layers[1]
    plain, times = layer.mlp, as_library().Times(layer.mlp, model.config).eval()
    with attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        for times.scale in (1.5, 1.25, 1.5):
            layer.mlp = times
            for _ in range(2):
                generate(model, 4, input_ids=prompt)
            layer.mlp = plain
            generate(model, 4, input_ids=prompt)
        assert len(tried) == 1
        assert reused(kv) == 7 * 48


@pytest.mark.filterwarnings("ignore:FlowKV computes prompts whose hidden states")
def test_a_trial_leaves_the_hooks_of_hidden_states_installed() -> None:
    model, ids = models.short(), models.prompt(40)
    with attached(model):
        model.config.output_hidden_states = True
        model.set_attn_implementation("eager")
        forward(model, ids)
        assert len(model(ids, use_cache=False).hidden_states) == 3


def _ahead(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.is_causal = False


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
@pytest.mark.parametrize("part", ["settle", "probe", "name_pages"])
def test_a_trial_that_is_interrupted(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = models.short(), models.prompt(60)
    prompts = [ids, ids.where(torch.arange(60) < 48, 7)]
    with attached(model):
        forward(model, ids)
        _ahead(model)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(doors, part, Mock(side_effect=KeyboardInterrupt))
            forward(model, ids)
        ours = [forward(model, ids) for ids in prompts]
    theirs = [forward(model, ids) for ids in prompts]
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
@pytest.mark.parametrize("edit", [_ahead, torch.nn.Module.double])
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_an_edit_between_a_forward_and_the_release_of_its_cache(
    name: str, edit: Callable[[Any], Any]
) -> None:
    """The release names the model anew, for it saves states."""
    model = models.causal(name)
    ids = torch.cat([models.prompt(48), models.prompt(16, 2)], 1)
    prompts = [ids, ids.where(torch.arange(64) < 48, 7)]
    with attached(model):
        held = filled(model, models.prompt(27, 3))
        edit(model)
        del held
        ours = [forward(model, ids) for ids in prompts]
    theirs = [forward(model, ids) for ids in prompts]
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(ours, theirs, strict=True))


def test_a_trial_uses_up_nothing_of_others() -> None:
    model, prompt = models.causal("llama"), models.prompt(60)
    mlp = model.model.layers[1].mlp
    mlp.pending = None

    def once(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        pending, module.pending = module.pending, None
        return out if pending is None else out + pending

    def twice() -> list[Any]:
        mlp.pending = 2
        return [generate(model, 4, input_ids=prompt) for _ in range(2)]

    with attached(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generate(model, 4, input_ids=prompt)
        handle = mlp.register_forward_hook(once)
        ours = twice()
    theirs = twice()
    handle.remove()
    for found, wanted in zip(ours, theirs, strict=True):
        assert_same(found, wanted)


# ---- gradients


def steered(model: Any, vector: torch.Tensor | None) -> Edit:
    return nullcontext() if vector is None else hook(model, lambda x: x + vector)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_gradients_flow_behind_a_prompt_that_was_computed_without(frozen: bool) -> None:
    """A frozen model may have a hook with a parameter of its own."""
    model, prompt, more = models.causal("llama"), models.prompt(50), models.prompt(4, seed=3)
    model.requires_grad_(not frozen)
    vector = torch.zeros(64, requires_grad=True) if frozen else None

    def gradients() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        model.zero_grad()
        if vector is not None:
            vector.grad = None
        model(more, past_key_values=cache, use_cache=True, labels=more).loss.backward()
        every = [vector] if vector is not None else list(model.parameters())
        return [p.grad.clone() for p in every if p is not None and p.grad is not None]

    with steered(model, vector):
        theirs = gradients()
        with attached(model):
            ours = gradients()
    assert theirs and len(ours) == len(theirs)
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_a_hook_that_came_behind_the_prompt() -> None:
    """Nothing in the model wants gradients until the forward is under way."""
    model, prompt, more = models.causal("llama"), models.prompt(50), models.prompt(4, seed=3)
    model.requires_grad_(False)

    def gradients() -> list[torch.Tensor]:
        cache, found = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for ids, given in ((more, cache), (prompt, DynamicCache(config=model.config))):
            vector = torch.zeros(64, requires_grad=True)
            with steered(model, vector):
                logits = model(ids, past_key_values=given, use_cache=True, logits_to_keep=1).logits
                logits.square().mean().backward()
            assert vector.grad is not None
            found.append(vector.grad)
        return found

    theirs = gradients()
    with attached(model):
        for _ in range(2):
            torch.testing.assert_close(gradients(), theirs, rtol=1e-4, atol=1e-5)


def derivative(model: Any, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    given = model.get_input_embeddings()(ids).detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given, torch.ones_like(given))
        out = model(inputs_embeds=dual, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [x.detach() for x in forward_ad.unpack_dual(out.logits)]


def jvp(model: Any, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    def logits(x: torch.Tensor) -> Any:
        own = copy.deepcopy(cache)
        given = dict(past_key_values=own, use_cache=True, logits_to_keep=1)
        return model(inputs_embeds=x, **given).logits

    given = model.get_input_embeddings()(ids).detach()
    return list(torch.func.jvp(logits, (given,), (torch.ones_like(given),)))


def of_a_row(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits of a model behind a row, which gets a cache of its own."""

    def logits(row: torch.Tensor) -> torch.Tensor:
        given = dict(past_key_values=DynamicCache(config=model.config), use_cache=True)
        return model(row, **given, logits_to_keep=1).logits

    return logits


def vmapped(model: Any, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [torch.func.vmap(of_a_row(model))(torch.stack([ids, ids + 1]))]


def traced(model: Any, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    return [torch.jit.trace(of_a_row(model), (ids,), check_trace=False)(ids + 1)]


@pytest.mark.parametrize("way", [derivative, jvp, vmapped, traced])
@pytest.mark.filterwarnings("ignore")
def test_transforms_of_torch_see_no_pages(way: Callable[..., list[torch.Tensor]]) -> None:
    model, prompt, more = models.causal("llama"), models.prompt(50), models.prompt(20, seed=3)
    model.requires_grad_(False)
    model.set_attn_implementation("eager")  # others have no forward derivative

    @torch.no_grad()
    def found() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        forward(model, prompt, cache)
        return way(model, cache, more)

    theirs = found()
    with attached(model):
        for _ in range(2):
            torch.testing.assert_close(found(), theirs, rtol=1e-3, atol=1e-4)


# ---- caches that leave their pages


@pytest.mark.filterwarnings("ignore")
def test_a_cache_goes_from_one_model_to_another() -> None:
    prompt, more = models.prompt(50), models.prompt(4, seed=3)
    first = models.causal("llama")
    second = copy.deepcopy(first)
    own = DynamicCache(config=first.config)
    forward(first, prompt, own)
    wanted = forward(second, more, own)
    with attached(first), attached(second):
        cache = DynamicCache(config=first.config)
        forward(first, prompt, cache)
        assert torch.allclose(forward(second, more, cache), wanted, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_closing_while_another_thread_generates() -> None:
    model, prompt = models.causal("llama"), models.prompt(60)
    wanted = generate(model, 30, input_ids=prompt).sequences
    kv = flowkv.attach(model, gpu="64MiB", page_size=16)
    begun, made = threading.Event(), []
    handle = model.lm_head.register_forward_hook(lambda *_: begun.set())

    def work() -> None:
        for _ in range(4):
            made.append(generate(model, 30, input_ids=prompt).sequences)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(60)
    kv.close()
    thread.join()
    handle.remove()
    assert len(made) == 4 and all(torch.equal(found, wanted) for found in made)


# ---- weights


def test_how_a_tensor_lies_is_part_of_what_it_holds() -> None:
    square = torch.randn(8, 8)
    names = {
        Weights().read({"w": w})
        for w in (square, square.t(), square[0].expand(8, 8), square[0].expand(8, 8).t())
    }
    assert len(names) == 4
    assert Weights().read({"w": square[:1]}) == Weights().read({"w": square[:1].clone()})
    read = Weights()
    read.read({"w": square})
    assert read.counted(square)
    square.as_strided_((8, 8), (1, 8))
    assert not read.counted(square)


def test_a_transposed_projection_is_another_model() -> None:
    model = models.causal("llama")
    weight = model.model.layers[1].self_attn.o_proj.weight
    if weight.shape[0] != weight.shape[1]:
        model.model.layers[1].self_attn.o_proj.weight = weight = torch.nn.Parameter(weight[:, :64])
    identity = Identity(model)
    name = identity.namespace.weights
    weight.data = weight.data.t()
    assert not identity.same(model)
    assert identity.read(model) and identity.namespace.weights != name


def test_steps_of_fused_optimizers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.naming.identity.SMALL_BYTES", 0)
    model = models.causal("llama").requires_grad_(True)
    identity = Identity(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with torch.enable_grad():
        model(models.prompt(8)).logits.sum().backward()
    assert identity.same(model)
    optimizer.step()
    assert not identity.same(model)
    assert identity.read(model)
