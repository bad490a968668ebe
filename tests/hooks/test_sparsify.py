"""Prompts that lose tokens by policy: what stays is exact, at its positions, and nobody else's."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

import flowkv
from flowkv.policy.sparsify import SPARSIFIERS, KeepLatest, KeyNorm, SnapKV
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.inside import CapacityError, ConfigError, StateError
from tests.policy.test_sparsify import RandomTokens

NEW = 6
Share = float | Sequence[float]
UNEVEN = (0.9, 0.2, 1.0, 0.2)
"""Of four layers: three layer groups, one of which loses nothing."""


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
    if rule == "kvzip":
        return protected(weights.amax(1).unflatten(0, (heads, -1)).mean(1), share)
    seen = weights[:, -32:].unflatten(0, (heads, -1)).mean((1, 2))
    return protected(torch.nn.functional.max_pool1d(seen, 7, 1, 3), share)


def repeated(model: Any, ids: torch.Tensor, cache: Any) -> list[torch.Tensor]:
    """Weights `[1, Hq, T, S]` of each layer that a prompt gets when it is read behind itself.

    Parts of 128 tokens are each read by themselves.
    """
    found, length = list[Any](), ids.shape[1]
    for first in range(0, length, 128):
        part, twin = ids[:, first : first + 128], copy.deepcopy(cache)
        found.append(model(part, past_key_values=twin, output_attentions=True).attentions)
    return [torch.cat([w[..., :length] for w in of], 2) for of in zip(*found, strict=True)]


@torch.no_grad()
def kept_of(model: Any, ids: torch.Tensor, rule: str, share: Share) -> list[torch.Tensor]:
    """The kept tokens `[Hk, n]` of a prompt in each layer, by what the model computes by itself."""
    model.set_attn_implementation("eager")
    try:
        cache = DynamicCache()
        weights = model(ids, past_key_values=cache, output_attentions=True).attentions
        if rule == "kvzip":
            weights = repeated(model, ids, cache)
    finally:
        model.set_attn_implementation("sdpa")
    layers = range(len(cache.layers))
    shares = [share] * len(layers) if isinstance(share, float) else share
    return [by_rule(rule, shares[i], cache.layers[i].keys[0], weights[i][0]) for i in layers]


@contextmanager
def masked(model: Any, columns: int, kept: list[list[torch.Tensor]]) -> Iterator[None]:
    """A model without FlowKV, for which tokens from column `columns` on see kept ones only.

    Args:
        model: The model.
        columns: Of the prompts.
        kept: For each row and layer `[Hk, n]`, columns of the prompt.
    """
    layers = range(len(kept[0]))
    lost = torch.ones(len(layers), len(kept), len(kept[0][0]), columns, dtype=torch.bool)
    for row, of_layers in enumerate(kept):
        for layer, of_heads in enumerate(of_layers):
            lost[layer, row].scatter_(1, of_heads, False)

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **how: Any) -> Any:
        (batch, heads, new, _), total = q.shape, k.shape[2]
        mine = lost[module.layer_idx].repeat_interleave(batch // len(kept), 0)
        mine = mine.repeat_interleave(heads // mine.shape[1], 1)[..., :total]
        mine = torch.nn.functional.pad(mine, (0, total - mine.shape[2]))[:, :, None]
        behind = (torch.arange(total - new, total) >= columns)[:, None]
        mask = mask.masked_fill(mine & behind, torch.finfo(mask.dtype).min)
        return eager_attention_forward(module, q, k, v, mask, **how)

    both = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    for registry, function in zip(both, (attend, both[1]["eager"]), strict=True):
        registry.register("kept", function)
    model.set_attn_implementation("kept")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
        for registry in both:
            registry._global_mapping.pop("kept")


def oracle(
    model: Any, prompts: list[torch.Tensor], rule: str, share: Share, new: int = NEW, **more: Any
) -> Any:
    """What `generate` answers to left-padded prompts, by masks that hide what a rule drops."""
    given, how = models.padded(*prompts), (rule, share)
    columns = given["input_ids"].shape[1]
    kept = [
        [of_heads + columns - prompt.shape[1] for of_heads in kept_of(model, prompt, *how)]
        for prompt in prompts
    ]
    with masked(model, columns, kept):
        return generate(model, new, **given, **more)


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
        ("llama", "kvzip"),
        ("qwen3", "kvzip"),
        ("qwen3", "snapkv"),  # its keys, untrained, are all of one norm
    ],
)
def test_attention_is_over_the_kept_tokens_at_their_positions(
    name: str, rule: str, share: float
) -> None:
    model, ids = models.causal(name), distinct(150)
    wanted = oracle(model, [ids], rule, share)
    with attached(model, sparsify=f"{rule}:{share}"):
        assert_same(generate(model, NEW, input_ids=ids), wanted)
    whole = generate(model, NEW, input_ids=ids).logits
    assert (whole[1] - wanted.logits[1]).abs().max() > 1e-2, "nothing was lost"
    assert torch.allclose(whole[0], wanted.logits[0], atol=1e-4), "the prompt is computed whole"


@pytest.mark.parametrize(
    ("name", "rule"),
    [("llama", KeepLatest), ("llama", KeyNorm), ("llama", SnapKV), ("qwen3", SnapKV)],
)
def test_each_layer_keeps_its_own_share(name: str, rule: type[Any]) -> None:
    model, prompts = models.causal(name), [distinct(150), distinct(70, 3)]
    given = models.padded(*prompts)
    wanted = oracle(model, prompts, rule.name, UNEVEN, new=40)
    with attached(model, sparsify=rule(UNEVEN)) as kv:
        found = generate(model, 40, **given)
        groups = [group.layers for group in kv.geometry.groups]
    assert_same(found, wanted)
    assert groups == [(0,), (1, 3), (2,)]


@settings(max_examples=12)
@given(
    st.sampled_from(sorted(SPARSIFIERS.keys() - {"kvzip"})),
    st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.8, 1.0]), min_size=4, max_size=4),
    st.lists(st.integers(2, 120), min_size=1, max_size=3),
    st.integers(2, 40),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(0, 99),
)
def test_any_budgets_rows_and_beams(
    rule: str, shares: list[float], lengths: list[int], new: int, beams: int, seed: int
) -> None:
    model = models.causal("llama")
    prompts = [distinct(length, seed + n) for n, length in enumerate(lengths)]
    given = models.padded(*prompts)
    wanted = oracle(model, prompts, rule, shares, new, num_beams=beams)
    with attached(model, sparsify=SPARSIFIERS[rule](shares)):
        found = generate(model, new, **given, num_beams=beams)
    assert_same(found, wanted)


def test_padded_rows_lose_tokens_as_each_does_alone(model: Any) -> None:
    prompts = [distinct(120, 2), distinct(70, 3)]
    alone = [oracle(model, [ids], "snapkv", 0.4) for ids in prompts]
    given = models.padded(*prompts)
    with attached(model, sparsify="snapkv:0.4"):
        found = generate(model, NEW, **given)
    for row, wanted in enumerate(alone):
        for got, want in zip(found.logits, wanted.logits, strict=True):
            torch.testing.assert_close(got[row], want[0], rtol=0, atol=2e-4 * want.abs().max())


def test_a_prompt_in_chunks_loses_the_same_tokens(model: Any) -> None:
    ids = distinct(150)
    wanted = oracle(model, [ids], "snapkv", 0.3)
    for chunk in (20, 64):  # shorter than what is observed, and a last one of 22
        with attached(model, sparsify="snapkv:0.3"):
            for _ in range(2):
                assert_same(generate(model, NEW, input_ids=ids, prefill_chunk_size=chunk), wanted)


@pytest.mark.parametrize("rule", ["latest", "key-norm", "snapkv"])
def test_all_of_it_changes_nothing(model: Any, rule: str) -> None:
    ids = distinct(90)
    native = generate(model, NEW, input_ids=ids)
    with attached(model, sparsify=f"{rule}:1"):
        assert_same(generate(model, NEW, input_ids=ids), native)


def test_nothing_of_it_is_ever_found_and_what_was_known_is_used(model: Any) -> None:
    ids = distinct(150)
    wanted = oracle(model, [ids], "snapkv", 0.3)
    with attached(model, sparsify="snapkv:0.3") as kv:
        first = generate(model, 40, input_ids=ids)
        blocks = kv.stats()["blocks"]
        assert blocks <= 150 // 16, "what was computed over what is left has no name"
        assert reused(kv) == 0
        assert_same(generate(model, NEW, input_ids=ids), wanted)
        assert reused(kv) == 118, "all but the 32 tokens whose attention counts"
        # The answer comes back as a prompt: its tokens are computed, over the whole of the prompt.
        before = reused(kv)
        cache = kv.cache(input_ids=first.sequences)
        assert cache.reused == 144
        cache.close()
        assert reused(kv) - before == 144
        assert kv.stats()["blocks"] == blocks


@pytest.mark.usefixtures("all_is_loaded")
def test_another_cache_finds_the_prompt_whole(model: Any, tmp_path: Any) -> None:
    ids = distinct(150)
    native = generate(model, NEW, input_ids=ids)
    with attached(model, sparsify="key-norm:0.3", disk=f"{tmp_path}/kv:64MiB") as kv:
        generate(model, 40, input_ids=ids)
        kv.flush()
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        assert_same(generate(model, NEW, input_ids=ids), native)
        assert reused(kv) >= 96, "what it gains by the last page is not worth a read"


@pytest.mark.usefixtures("all_is_loaded")
def test_layers_paged_otherwise_are_other_pages(model: Any, tmp_path: Any) -> None:
    ids, place = distinct(150), f"{tmp_path}/kv:64MiB"
    native, wanted = generate(model, NEW, input_ids=ids), oracle(model, [ids], "latest", UNEVEN)
    with attached(model, disk=place) as kv:
        assert_same(generate(model, NEW, input_ids=ids), native)
        kv.flush()
    for found in (0, 96):
        with attached(model, sparsify=KeepLatest(UNEVEN), disk=place) as kv:
            assert_same(generate(model, NEW, input_ids=ids), wanted)
            assert found <= reused(kv) <= 150 * bool(found), "as the same budgets name pages alike"
            kv.flush()
    for more in ({}, {"sparsify": KeepLatest([1.0] * 4)}):
        with attached(model, disk=place, **more) as kv:
            assert_same(generate(model, NEW, input_ids=ids), native)
            assert reused(kv) >= 96


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


def test_pages_follow_the_budget_of_each_layer(model: Any) -> None:
    ids = distinct(160)
    with attached(model, sparsify=KeepLatest(UNEVEN)) as kv, torch.no_grad():
        cache = kv.cache(input_ids=ids)
        model(ids, past_key_values=cache, logits_to_keep=1)
        (seq,) = cache.rows.seqs
        assert [len(blocks) for blocks in seq.blocks] == [10, 10, 10]
        model(ids[:, :1], past_key_values=cache)
        assert seq.lengths.tolist() == [145, 33, 161]
        assert [len(blocks) for blocks in seq.blocks] == [10, 3, 11]
        assert (seq.length, seq.position, seq.dropped) == (161, 161, 128)
        with pytest.raises(StateError, match="lost tokens"):
            cache.crop(-1)
        cache.close()


@pytest.mark.parametrize("rule", [KeepLatest, KeyNorm])
@pytest.mark.parametrize("share", [0.44, (0.9, 0.44, 1.0, 0.16)])
def test_of_encoded_pages_the_same_tokens_stay_decoded(
    model: Any, rule: type[Any], share: Share
) -> None:
    ids = distinct(150)  # no layer fills a page within the answer, and encodes it again
    parts = [ids[:, n : n + 1] for n in range(3)]
    with attached(model, sparsify=rule(share), codec="kv8", recent_tokens=0) as kv, torch.no_grad():
        cache = kv.cache(input_ids=ids)
        model(ids, past_key_values=cache)
        read, native = cache.__deepcopy__({}), DynamicCache()
        for i, layer in enumerate(read.layers):
            native.update(layer.keys.clone(), layer.values.clone(), i)
        read.close()
        found = [model(part, past_key_values=cache).logits for part in parts]
        cache.close()
    shares = [share] * 4 if isinstance(share, float) else share
    keys = [layer.keys[0] for layer in native.layers]
    kept = [by_rule(rule.name, s, k, k) for s, k in zip(shares, keys, strict=True)]
    with masked(model, 150, [kept]), torch.no_grad():
        exact = DynamicCache()
        model(ids, past_key_values=exact)
        wanted = [model(part, past_key_values=native).logits for part in parts]
        raw = [model(part, past_key_values=exact).logits for part in parts]
    for got, want, unencoded in zip(found, wanted, raw, strict=True):
        near = 2e-5 * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=near)
        assert (got - unencoded).abs().max() > 20 * near, "nothing was encoded"


@pytest.mark.parametrize("share", [0.5, UNEVEN])
def test_beams_and_samples_go_on_from_what_is_left(model: Any, share: Share) -> None:
    prompts = [distinct(100), distinct(60, 5)]
    given = models.padded(*prompts)
    drawn = {"do_sample": True, "num_return_sequences": 3}
    for how in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, drawn):
        torch.manual_seed(0)
        wanted = oracle(model, prompts, "snapkv", share, 24, **how)
        with attached(model, sparsify=SnapKV(share)):
            torch.manual_seed(0)
            found = generate(model, 24, **given, **how)
        assert_same(found, wanted)


@pytest.mark.parametrize("share", [0.5, UNEVEN])
def test_a_copy_goes_on_by_itself(model: Any, share: Share) -> None:
    ids, kept = distinct(100), [kept_of(model, distinct(100), "key-norm", share)]
    with attached(model, sparsify=KeyNorm(share)) as kv, torch.no_grad():
        cache = kv.cache(input_ids=ids)
        found = [list(told(model, cache, [ids, ids[:, :1]]))]
        twin = cache.__deepcopy__({})
        parts = [[ids[:, 7:10], ids[:, :1]], [ids[:, 20:50], ids[:, 3:4]]]
        found += [
            list(told(model, one, part)) for one, part in zip((cache, twin), parts, strict=True)
        ]
    with masked(model, 100, kept), torch.no_grad():
        for part, got in zip(parts, found[1:], strict=True):
            wanted = list(told(model, DynamicCache(), [ids, ids[:, :1], *part]))
            for one, other in zip([*found[0], *got], wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=2e-4 * float(other.abs().max()))


def told(model: Any, cache: Any, parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Logits of some tokens after the other."""
    for part in parts:
        yield model(part, past_key_values=cache).logits


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


class Ladder(KeepLatest):
    """Numbers of tokens, where shares only tell layers apart."""

    def count(self, tokens: int, layer: int) -> int:
        return min(tokens, 20 + 10 * layer)


def test_a_rule_may_count_by_layer_where_it_has_a_share_for_each(model: Any) -> None:
    ids = distinct(100)
    with attached(model, sparsify=Ladder([0.1, 0.2, 0.3, 0.4])) as kv, torch.no_grad():
        cache = kv.cache(input_ids=ids)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        assert cache.rows.seqs[0].lengths.tolist() == [21, 31, 41, 51]
    native = generate(model, NEW, input_ids=ids)
    with (
        attached(model, sparsify=Ladder(0.5)),
        pytest.warns(UserWarning, match=r"layers of one share keep \[20, 30, 40, 50\] tokens"),
    ):
        assert_same(generate(model, NEW, input_ids=ids), native)


def test_what_cannot_lose_tokens_is_refused(model: Any) -> None:
    for odd, words in (
        *(("snapkv", "NAME:SHARE"), ("snapvk:0.5", "snapkv"), ("latest:0", "share")),
        *(("latest:1.5", "share"), ("latest:half", "NAME:SHARE"), (3, "sparsifier")),
        (KeepLatest([0.5] * 3), "none for layer 3"),
        (KeepLatest([0.5] * 5), "shares of 5 layers for a LlamaForCausalLM of 4"),
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
