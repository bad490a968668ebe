"""Prompts that are asked again need no more than one step, whatever part of a page they fill."""

from __future__ import annotations

import gc
import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from flowkv import Engine
from tests.cache.fakes import MemoryTier, Wrapped
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, filled, forward, generate, reused
from tests.inside import Identity


@pytest.mark.parametrize("length", [5, 16, 17, 70])
def test_a_prompt_that_is_asked_again(length: int) -> None:
    model, prompt = models.causal("llama"), models.prompt(length)
    wanted = generate(model, input_ids=prompt)
    with attached(model) as kv:
        for turn in range(3):
            ours = generate(model, input_ids=prompt)
            assert_same(ours, wanted)
            assert reused(kv) == turn * (length - 1)
            del ours  # and with it, its row
        held = generate(model, input_ids=prompt)
        assert held.past_key_values.reused == length - 1
        assert_same(generate(model, input_ids=prompt), wanted)
        assert reused(kv) == 4 * (length - 1), "while the row of the same prompt is held"


@pytest.mark.parametrize("cut", [33, 64 + 7, 64 + 9])
def test_forks_of_a_conversation_in_the_middle_of_a_page(cut: int) -> None:
    model = models.causal("llama")
    with attached(model) as kv:
        first = generate(model, input_ids=models.prompt(70)).sequences
        fork = torch.cat([first[:, :cut], models.prompt(9, seed=cut)], 1)
        before = reused(kv)
        ours = generate(model, input_ids=fork)
        assert reused(kv) - before == cut, "of the prompt, or of the answer to it"
    assert_same(ours, generate(model, input_ids=fork))


def test_rows_of_a_batch_begin_at_one_column() -> None:
    model = models.causal("llama")
    ids = torch.cat([models.prompt(60, seed=seed) for seed in (1, 2, 3)])
    inputs = models.pad_rows(ids, 0, 13, 37)
    wanted = generate(model, **inputs)
    with attached(model) as kv:
        for turn in range(3):
            assert_same(generate(model, **inputs), wanted)
            assert reused(kv) == turn * (3 * 59 - 13 - 37)


@pytest.mark.parametrize("back", [True, False])
def test_weights_that_change_within_a_page(back: bool) -> None:
    model, prompt = models.causal("llama"), models.prompt(20)
    weight = model.get_input_embeddings().weight
    was = weight.detach().clone()
    wanted = generate(model, input_ids=torch.cat([prompt, models.prompt(4, seed=5)], 1))
    try:
        with attached(model) as kv, torch.no_grad():
            cache = kv.cache(input_ids=prompt)
            model(prompt, past_key_values=cache)
            weight.mul_(1.5)
            model(models.prompt(4, seed=5), past_key_values=cache)  # of the other model
            if back:
                weight.copy_(was)
            del cache
            longer = torch.cat([prompt, models.prompt(4, seed=5)], 1)
            ours = generate(model, input_ids=longer)
            assert reused(kv) in (0, 16)
            if back:
                assert_same(ours, wanted)
    finally:
        with torch.no_grad():
            weight.copy_(was)


@pytest.mark.parametrize("kind", ["weights", "setting"])
def test_a_page_that_fills_behind_a_change_is_kept_nowhere(kind: str, tmp_path) -> None:
    """Not in the process once the change is undone, and not in a store."""
    model, plain, prompt, disk = models.short(), models.short(), models.prompt(52), tmp_path / "kv"
    longer = torch.cat([prompt, models.prompt(9, seed=2), models.prompt(3, seed=3)], 1)
    wanted = generate(plain, input_ids=longer)
    layer: Any = model.model.layers[0]
    weight, was = layer.mlp.down_proj.weight, layer.post_attention_layernorm.variance_epsilon

    @torch.no_grad()
    def change(factor: float) -> None:
        if kind == "weights":
            weight.mul_(factor)
        else:
            layer.post_attention_layernorm.variance_epsilon = was if factor == -1.0 else 3.0

    with attached(model, disk=f"{disk}:64MiB"):
        cache = filled(model, prompt)
        change(-1.0 if kind == "weights" else 1.0)
        forward(model, longer[:, 52:61], cache)
        del cache  # while the model is still another one
        change(-1.0)
        assert_same(generate(model, input_ids=longer), wanted)
    again = models.short()
    with attached(again, disk=f"{disk}:64MiB"):
        assert_same(generate(again, input_ids=longer), wanted)


@torch.no_grad()
def negate(model: Any) -> None:
    """Change the first values, or change them back."""
    model.model.layers[0].self_attn.v_proj.weight.mul_(-1)


@pytest.mark.parametrize("copied", [False, True])
def test_a_cut_takes_back_what_was_looked_at(copied: bool, tmp_path) -> None:
    """A page was filled and cut again before the model changed and wrote to its end."""
    model, ids = models.short(), models.prompt(45)
    wanted = generate(models.short(), input_ids=ids[:, :43])
    options = dict(disk=f"{tmp_path}/kv:64MiB")
    with attached(model, **options):
        cache = filled(model, ids[:, :44])
        cache = deepcopy(cache) if copied else cache
        cache.crop(34)
        negate(model)
        for at in range(34, 42):
            forward(model, ids[:, at : at + 1], cache)
        del cache
        gc.collect()
        negate(model)
        assert_same(generate(model, input_ids=ids[:, :43]), wanted)
    again = models.short()
    with attached(again, **options):
        assert_same(generate(again, input_ids=ids[:, :43]), wanted)


def test_a_row_that_ends_behind_a_change_takes_others_with_it(tmp_path) -> None:
    """The change is undone before the others end, and was not counted."""
    model, ids, other = models.short(), models.prompt(45), models.prompt(32, seed=2)
    options = dict(disk=f"{tmp_path}/kv:64MiB")
    values = model.model.layers[0].self_attn.v_proj.weight.data
    wanted = generate(models.short(), input_ids=ids)
    with attached(model, **options):
        held, beside = filled(model, ids[:, :36]), filled(model, other[:, :20])
        values.neg_()
        forward(model, ids[:, 36:44], held)
        forward(model, other[:, 20:24], beside)
        del beside
        gc.collect()
        values.neg_()
        del held
        gc.collect()
        assert_same(generate(model, input_ids=ids), wanted)
    again = models.short()
    with attached(again, **options):
        assert_same(generate(again, input_ids=ids), wanted)


def test_rows_that_end_while_their_model_is_named_anew(tmp_path, monkeypatch) -> None:
    """Between the new name and the end of the old one, the model is not compared with itself."""
    model, ids, other = models.short(), models.prompt(45), models.prompt(32, seed=2)
    options = dict(disk=f"{tmp_path}/kv:64MiB")
    with attached(model, **options):
        held, beside = filled(model, ids[:, :36]), filled(model, other[:, :31])
        negate(model)
        for at in range(36, 44):
            forward(model, ids[:, at : at + 1], held)
        last = [held]
        del held
        read = Identity.read

        def reading(self: Any, *args: Any, **options: Any) -> bool:
            found = read(self, *args, **options)
            thread = threading.Thread(target=last.clear)
            thread.start()
            thread.join()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Identity, "read", reading)
            forward(model, other[:, 31:], beside)  # fills a page
        assert not last
        negate(model)
    again = models.short()
    with attached(again, **options):
        assert_same(generate(again, input_ids=ids), generate(models.short(), input_ids=ids))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_engines(name: str) -> None:
    model, prompt = models.causal(name), models.prompt(70)
    first = generate(model, 9, input_ids=prompt).sequences[0].tolist()
    options: dict[str, Any] = {"max_new_tokens": 9}
    with attached(model) as kv, Engine(model, kv) as engine:
        for known in (0, 69, 78):
            before = reused(kv)
            text = first if known > 70 else first[:70]
            (done,) = engine.run([text], **options)
            assert reused(kv) - before == min(known, len(text) - 1)
            assert known > 70 or list(done.tokens) == first[70:]


def test_a_cache_made_beforehand_ends_where_it_was_said_to() -> None:
    """What comes behind it may be another text, or come in parts."""
    model, prompt = models.causal("llama"), models.prompt(62)
    other = prompt.clone()
    other[:, 50:] = (other[:, 50:] + 7) % 50 + 1
    with torch.no_grad():
        wanted = model(input_ids=other).logits[:, -1]
    plain = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    tier = Wrapped(MemoryTier(name="kept"), kind="disk", close=lambda: None)
    options = {"tiers": ["gpu:8MiB", tier], "page_size": 16}
    with flowkv.attach(model, **options) as kv:
        model.generate(input_ids=prompt, max_new_tokens=2, do_sample=False)
        assert kv.flush()
    assert "state" in {header.info.kind for header, _ in tier.frames.values()}
    with flowkv.attach(model, **options) as kv, torch.no_grad():
        cache = kv.cache(input_ids=prompt)
        told = cache.get_seq_length()
        got = model(input_ids=other[:, told:], past_key_values=cache, use_cache=True).logits
        assert told == 48 and torch.allclose(got[:, -1], wanted, atol=1e-4)
    chunks = {"max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": 4}
    native = DynamicCache()
    with torch.no_grad():
        model(input_ids=prompt[:, :told], past_key_values=native, use_cache=True)
    if not torch.equal(model.generate(prompt, past_key_values=native, **chunks), plain):
        return  # transformers 5.17 forgets with its own cache, too, what that holds
    with flowkv.attach(model, **options) as kv:
        cache = kv.cache(input_ids=prompt)
        assert torch.equal(model.generate(prompt, past_key_values=cache, **chunks), plain)
