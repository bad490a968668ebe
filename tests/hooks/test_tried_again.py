"""After an edit, what attach tried is tried again; and which caches leave their pages."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from transformers import DynamicCache
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.hooks.tabled import as_library
from tests.inside import Identity, Weights
from tests.inside import door as doors

Undo = Callable[[], None]


def hook(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Undo:
    handle = model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: change(out))
    return handle.remove


def patched(owner: Any, name: str, value: Any) -> Undo:
    had, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if had else delattr(owner, name)


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


def looks_ahead(model: Any) -> Undo:
    layers = [layer.self_attn for layer in model.model.layers]
    undone = [patched(layer, "is_causal", False) for layer in layers]
    mask = patched(modeling_llama, "create_causal_mask", lambda *_, **__: None)
    return lambda: [undo() for undo in (*undone, mask)] and None


def attention_of_torch(model: Any) -> Undo:
    plain = F.scaled_dot_product_attention
    return patched(F, "scaled_dot_product_attention", lambda q, *a, **k: plain(q * 1.02, *a, **k))


def keys_repeated(model: Any) -> Undo:
    plain = sdpa_attention.repeat_kv
    whole = patched(sdpa_attention, "use_gqa_in_sdpa", lambda *_: False)
    scaled = patched(sdpa_attention, "repeat_kv", lambda x, n: plain(x * 1.02, n))
    return lambda: [undo() for undo in (whole, scaled)] and None


def cache_layers(model: Any) -> Undo:
    from transformers.cache_utils import DynamicLayer

    plain = DynamicLayer.update
    return patched(
        DynamicLayer, "update", lambda self, k, v, *a, **o: plain(self, k, v * 0.5, *a, **o)
    )


EDITS: dict[str, Callable[[Any], Undo]] = {
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
def test_an_edit_that_pages_cannot_serve(edit: Callable[[Any], Undo]) -> None:
    model, prompt = models.causal("llama"), models.prompt(60)
    plain = generate(model, 6, input_ids=prompt)
    with attached(model) as kv:
        for _ in range(2):
            generate(model, 6, input_ids=prompt)
        undo = edit(model)
        try:
            ours = [generate(model, 6, input_ids=prompt) for _ in range(3)]
            kv.detach()
            theirs = generate(model, 6, input_ids=prompt)
        finally:
            undo()
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


def steered(model: Any, vector: torch.Tensor | None) -> Undo:
    return (lambda: None) if vector is None else hook(model, lambda x: x + vector)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_gradients_flow_behind_a_prompt_that_was_computed_without(frozen: bool) -> None:
    """A frozen model may have a hook with a parameter of its own."""
    model, prompt, more = models.causal("llama"), models.prompt(50), models.prompt(4, seed=3)
    model.requires_grad_(not frozen)
    vector = torch.zeros(64, requires_grad=True) if frozen else None
    undo = steered(model, vector)

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

    theirs = gradients()
    with attached(model):
        ours = gradients()
    undo()
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
            undo = steered(model, vector)
            logits = model(ids, past_key_values=given, use_cache=True, logits_to_keep=1).logits
            logits.square().mean().backward()
            undo()
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


def vmapped(model: Any, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    def logits(row: torch.Tensor) -> Any:
        given = dict(past_key_values=DynamicCache(config=model.config), use_cache=True)
        return model(row, **given, logits_to_keep=1).logits

    return [torch.func.vmap(logits)(torch.stack([ids, ids + 1]))]


def traced(model: Any, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    def logits(row: torch.Tensor) -> Any:
        given = dict(past_key_values=DynamicCache(config=model.config), use_cache=True)
        return model(row, **given, logits_to_keep=1).logits

    return [torch.jit.trace(logits, (ids,), check_trace=False)(ids + 1)]


@pytest.mark.parametrize("way", [derivative, jvp, vmapped, traced])
@pytest.mark.filterwarnings("ignore")
def test_transforms_of_torch_see_no_pages(way: Callable[..., list[torch.Tensor]]) -> None:
    model, prompt, more = models.causal("llama"), models.prompt(50), models.prompt(20, seed=3)
    model.requires_grad_(False)
    model.set_attn_implementation("eager")  # others have no forward derivative

    @torch.no_grad()
    def found() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return way(model, cache, more)

    theirs = found()
    with attached(model):
        for _ in range(2):
            torch.testing.assert_close(found(), theirs, rtol=1e-3, atol=1e-4)


# ---- caches that leave their pages


def turn(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


@pytest.mark.filterwarnings("ignore")
def test_a_cache_goes_from_one_model_to_another() -> None:
    prompt, more = models.prompt(50), models.prompt(4, seed=3)
    first = models.causal("llama")
    second = copy.deepcopy(first)
    own = DynamicCache(config=first.config)
    turn(first, own, prompt)
    wanted = turn(second, own, more)
    with attached(first), attached(second):
        cache = DynamicCache(config=first.config)
        turn(first, cache, prompt)
        assert torch.allclose(turn(second, cache, more), wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
@pytest.mark.filterwarnings("ignore")
def test_closing_leaves_a_cache_to_whoever_holds_it(name: str) -> None:
    model, prompt, more = models.causal(name), models.prompt(50), models.prompt(4, seed=3)
    own = DynamicCache(config=model.config)
    turn(model, own, prompt)
    wanted = turn(model, own, more)
    kv = flowkv.attach(model, gpu="64MiB", page_size=16)
    cache = DynamicCache(config=model.config)
    turn(model, cache, prompt)
    kv.close()
    assert torch.allclose(turn(model, cache, more), wanted, atol=1e-4)


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
