"""Prompts that lose tokens by policy: what stays is exact, at its positions, and nobody else's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.inside import CapacityError, ConfigError, StateError
from tests.policy.test_sparsify import RandomTokens

NEW = 6


def distinct(length: int, seed: int = 1) -> torch.Tensor:
    """Token ids `[1, length]`, none twice: the same token has keys of the same norm in layer 0."""
    dice = torch.Generator().manual_seed(seed)
    return 5 + torch.randperm(245, generator=dice)[None, :length]


def protected(score: torch.Tensor, share: float) -> torch.Tensor:
    """The kept tokens `[Hk, n]` of scores `[Hk, S]`, as blend.md's part B words it."""
    length = score.shape[1]
    count = math.ceil(share * length)
    score = score.double().clone()
    score[:, length - min(32, count - min(4, count)) :] = torch.inf
    score[:, : min(4, count)] = torch.inf
    # Pooled weights are often equal: the latest stay.
    order = score.flip(1).argsort(dim=1, descending=True, stable=True)[:, :count]
    return (length - 1 - order).sort(dim=1).values


def by_rule(rule: str, share: float, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a rule keeps, in torch, from keys `[Hk, S, D]` and eager's weights `[Hq, S, S]`."""
    heads, length, _ = k.shape
    if rule == "latest":
        return protected(torch.arange(length).expand(heads, length), share)
    if rule == "key-norm":
        return protected(-k.norm(dim=2), share)
    seen = weights[:, -32:].unflatten(0, (heads, -1)).mean((1, 2))
    return protected(torch.nn.functional.max_pool1d(seen, 7, 1, 3), share)


@torch.no_grad()
def oracle(model: Any, ids: torch.Tensor, rule: str, share: float) -> torch.Tensor:
    """Logits `[NEW, vocab]` of greedy decoding over what a rule keeps, in a native cache."""
    model.set_attn_implementation("eager")
    try:
        cache = DynamicCache()
        out = model(ids, past_key_values=cache, output_attentions=True)
        logits = [out.logits[0, -1]]
        for layer, weights in zip(cache.layers, out.attentions, strict=True):
            keep = by_rule(rule, share, layer.keys[0], weights[0])[None, :, :, None]
            layer.keys = layer.keys.take_along_dim(keep, 2)
            layer.values = layer.values.take_along_dim(keep, 2)
        for i in range(NEW - 1):
            position = torch.tensor([[ids.shape[1] + i]])
            token = logits[-1].argmax().reshape(1, 1)
            out = model(token, past_key_values=cache, position_ids=position)
            logits.append(out.logits[0, -1])
    finally:
        model.set_attn_implementation("sdpa")
    return torch.stack(logits)


def decoded(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return torch.stack(generate(model, NEW, input_ids=ids, **more).logits, 1)


@pytest.fixture
def model() -> Any:
    return models.causal("llama")


@pytest.mark.parametrize("share", [0.25, 0.6])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("llama", "latest"),
        ("llama", "key-norm"),
        ("llama", "snapkv"),
        ("qwen3", "snapkv"),  # its keys, untrained, are all of one norm
    ],
)
def test_attention_is_over_the_kept_tokens_at_their_positions(
    name: str, rule: str, share: float
) -> None:
    model, ids = models.causal(name), distinct(150)
    wanted = oracle(model, ids, rule, share)
    with attached(model, sparsify=f"{rule}:{share}"):
        found = decoded(model, ids)[0]
    assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()
    whole = decoded(model, ids)[0]
    assert (whole - wanted)[1:].abs().max() > 1e-2 * wanted.abs().max(), "nothing was lost"
    assert torch.allclose(whole[0], wanted[0], atol=1e-4), "the prompt itself is computed whole"


def test_padded_rows_lose_tokens_as_each_does_alone(model: Any) -> None:
    long, short = distinct(120, 2), distinct(70, 3)
    wanted = torch.stack([oracle(model, ids, "snapkv", 0.4) for ids in (long, short)])
    ids = torch.cat([long, torch.nn.functional.pad(short, (50, 0))])
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    with attached(model, sparsify="snapkv:0.4"):
        found = decoded(model, ids, attention_mask=mask)
    assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()


def test_a_prompt_in_chunks_loses_the_same_tokens(model: Any) -> None:
    ids = distinct(150)
    wanted = oracle(model, ids, "snapkv", 0.3)
    for chunk in (20, 64):  # shorter than what is observed, and a last one of 22
        with attached(model, sparsify="snapkv:0.3"):
            found = decoded(model, ids, prefill_chunk_size=chunk)[0]
            again = decoded(model, ids, prefill_chunk_size=chunk)[0]
        for got in (found, again):
            assert (got - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize("rule", ["latest", "key-norm", "snapkv"])
def test_all_of_it_changes_nothing(model: Any, rule: str) -> None:
    ids = distinct(90)
    native = generate(model, NEW, input_ids=ids)
    with attached(model, sparsify=f"{rule}:1"):
        assert_same(generate(model, NEW, input_ids=ids), native)


def test_nothing_of_it_is_ever_found_and_what_was_known_is_used(model: Any) -> None:
    ids = distinct(150)
    wanted = oracle(model, ids, "snapkv", 0.3)
    with attached(model, sparsify="snapkv:0.3") as kv:
        first = generate(model, 40, input_ids=ids)
        blocks = kv.stats()["blocks"]
        assert blocks <= 150 // 16, "what was computed over what is left has no name"
        assert reused(kv) == 0
        again = decoded(model, ids)[0]
        assert reused(kv) == 118, "all but the 32 tokens whose attention counts"
        assert (again - wanted).abs().max() < 2e-4 * wanted.abs().max()
        # The answer comes back as a prompt: its tokens are computed, over the whole of the prompt.
        before = reused(kv)
        cache = kv.cache(input_ids=first.sequences)
        assert cache.reused == 144
        cache.close()
        assert reused(kv) - before == 144
        assert kv.stats()["blocks"] == blocks


def test_another_cache_finds_the_prompt_whole(model: Any, tmp_path: Any) -> None:
    ids = distinct(150)
    native = generate(model, NEW, input_ids=ids)
    with attached(model, sparsify="key-norm:0.3", disk=f"{tmp_path}/kv:64MiB") as kv:
        generate(model, 40, input_ids=ids)
        kv.flush()
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        assert_same(generate(model, NEW, input_ids=ids), native)
        assert reused(kv) >= 96, "what it gains by the last page is not worth a read"


def test_pages_are_given_back(model: Any) -> None:
    ids = distinct(160)
    with attached(model, sparsify="latest:0.25") as kv:
        cache = kv.cache(input_ids=ids)
        with torch.no_grad():
            out = model(ids, past_key_values=cache, logits_to_keep=1)
            assert [seq.length for seq in cache.rows.seqs] == [160]
            model(out.logits[:, -1].argmax(-1, keepdim=True), past_key_values=cache)
        (seq,) = cache.rows.seqs
        assert (seq.length, seq.position) == (41, 161)
        assert cache.get_seq_length() == 161
        assert len(seq.blocks[0]) == 3
        cache.close()


def test_sealed_pages_lose_tokens_too(model: Any) -> None:
    ids = distinct(150)
    wanted = oracle(model, ids, "latest", 0.5)
    with attached(model, sparsify="latest:0.5", codec="kv8"):
        found = decoded(model, ids)[0]
    assert (found[0] - wanted[0]).abs().max() < 1e-4 * wanted.abs().max()
    assert (found - wanted).abs().max() < 0.5 * wanted.abs().max()


def test_beams_and_samples_go_on_from_what_is_left(model: Any) -> None:
    ids = distinct(100)
    with attached(model, sparsify="snapkv:0.5"):
        found = generate(model, 8, input_ids=ids, num_beams=3, output_logits=False)
        torch.manual_seed(0)
        drawn = generate(model, 8, input_ids=ids, do_sample=True, num_return_sequences=3)
    assert found.sequences.shape == (1, 108)
    assert drawn.sequences.shape == (3, 108)


def test_a_cache_that_lost_tokens_is_not_cut_or_read_as_a_whole(model: Any) -> None:
    ids = distinct(100)
    with attached(model, sparsify="key-norm:0.5") as kv, torch.no_grad():
        cache = kv.cache(input_ids=ids)
        model(ids, past_key_values=cache, logits_to_keep=1)
        assert cache.layers[0].keys.shape[2] == 100, "until the first token of an answer"
        model(ids[:, :1], past_key_values=cache)
        for refused in (
            lambda: cache.crop(-1),
            lambda: cache.layers[0].keys,
            cache.reset,
            lambda: model(ids[:, :1], past_key_values=cache, output_attentions=True),
        ):
            with pytest.raises(StateError, match="lost tokens"):
                refused()
        model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 102
        twin = cache.__deepcopy__({})
        a = model(ids[:, :3], past_key_values=cache).logits
        b = model(ids[:, :3], past_key_values=twin).logits
        assert torch.equal(a, b), "a copy goes on by itself"


def test_a_pool_without_room_keeps_all(model: Any) -> None:
    ids = distinct(200)
    native = generate(model, NEW, input_ids=ids)
    with (
        attached(model, sparsify="latest:0.9", gpu="400KiB"),
        pytest.warns(UserWarning, match="keeps all tokens of 1 of 1 prompts"),
    ):
        assert_same(generate(model, NEW, input_ids=ids), native)


def test_of_a_batch_those_that_have_no_room_are_kept_whole() -> None:
    model, ids = models.causal("llama"), torch.cat([distinct(200), distinct(200).flip(1)])
    mask = torch.ones_like(ids)
    mask[0, :150] = 0  # the short one finds room
    native = generate(model, NEW, input_ids=ids, attention_mask=mask)
    with (
        attached(model, sparsify="latest:0.9", gpu="440KiB"),
        pytest.warns(UserWarning, match="keeps all tokens of 1 of 2 prompts"),
    ):
        found = generate(model, NEW, input_ids=ids, attention_mask=mask)
    for one, other in zip(found.logits, native.logits, strict=True):
        torch.testing.assert_close(one[1], other[1], rtol=0, atol=2e-4)
    pairs = zip(found.logits, native.logits, strict=True)
    assert any((one[0] - other[0]).abs().max() > 1e-3 for one, other in pairs)


def test_an_answer_that_outgrows_the_pool_says_so(model: Any) -> None:
    kv = attached(model, sparsify="latest:0.5", gpu="400KiB")
    with kv, pytest.raises(CapacityError):
        generate(model, 600, input_ids=distinct(200), eos_token_id=None)


class NoNumbers(RandomTokens):
    """A rule of one's own that fails where keys are real."""

    def score(self, *given: Any) -> Any:
        return np.full_like(super().score(*given), np.nan)


def test_a_rule_that_fails_leaves_the_prompt_whole(model: Any) -> None:
    ids = distinct(200)
    native = generate(model, 40, input_ids=ids)
    with (
        attached(model, sparsify=NoNumbers(0.5)) as kv,
        pytest.warns(UserWarning, match="keeps all tokens of 1 of 1 prompts"),
    ):
        found = generate(model, 40, input_ids=ids)
        assert_same(found, native)
        kv.flush()
        assert kv.explain(found.sequences[0].tolist()).known > 216, "the answer is published"


def test_what_cannot_lose_tokens_is_refused(model: Any) -> None:
    for odd, words in (
        ("snapkv", "NAME:SHARE"),
        ("snapvk:0.5", "snapkv"),
        ("latest:0", "share"),
        ("latest:1.5", "share"),
        ("latest:half", "NAME:SHARE"),
        (3, "sparsifier"),
    ):
        with pytest.raises(ConfigError, match=words):
            flowkv.attach(model, sparsify=odd, gpu="1MiB")
    with pytest.raises(ConfigError, match="dense"):
        flowkv.attach(model, sparsify="latest:0.5", reads="dense", gpu="1MiB")
    with pytest.raises(ConfigError, match="overflow"):
        flowkv.attach(model, sparsify="latest:0.5", overflow=True, gpu="1MiB", host="1MiB")
    with pytest.raises(ConfigError, match="sliding"):
        flowkv.attach(models.causal("mistral"), sparsify="latest:0.5", gpu="1MiB")
    with pytest.raises(ConfigError, match="computes with keys and values itself"):
        flowkv.attach(models.causal("deepseek_v3"), sparsify="latest:0.5", gpu="1MiB")
    assert not model._forward_hooks
    kv = flowkv.attach(model, sparsify="latest:0.5", gpu="1MiB", page_size=16)
    with kv, pytest.raises(ConfigError, match="engine keeps all tokens"):
        flowkv.Engine(model, kv)


def test_a_rule_of_ones_own(model: Any) -> None:
    ids = distinct(100)
    with attached(model, sparsify=RandomTokens(0.5)) as kv, torch.no_grad():
        cache = kv.cache(input_ids=ids)
        model(ids, past_key_values=cache, logits_to_keep=1)
        model(ids[:, :1], past_key_values=cache)
        assert cache.rows.seqs[0].length == 51
