"""Rotary frequencies that switch with the length of a text, around the length where they do.

With `longrope` a text beyond the original length is rotated by other frequencies from its first
token on, and so is a whole batch in which one row is longer; with dynamic NTK they go on changing.
Keys of a short text are wrong under a long one, whatever their tokens. YaRN does not switch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from . import models
from .compare import assert_same, attached, generate, reused

thorough = pytest.mark.thorough
PAST = "cache" if hasattr(CausalLMOutputWithPast(), "cache") else "past_key_values"
ORIGINAL, LONGEST = 64, 256
FACTORS = dict(short_factor=[1.0] * 8, long_factor=[8.0] * 8)
BASE = models.GROUPED | dict(num_hidden_layers=2)


def rope(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = dict(rope_type=kind, rope_theta=10000.0, factor=4.0)
    if kind != "dynamic":
        found |= dict(original_max_position_embeddings=ORIGINAL)
    return found | (FACTORS if kind == "longrope" else {})


def llama(kind: str) -> Any:
    longest = ORIGINAL if kind == "dynamic" else LONGEST
    settings = BASE | dict(max_position_embeddings=longest, rope_parameters=rope(kind))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def phi(kind: str) -> Any:
    """Its `generate` drops the cache where the text outgrows the original length."""
    more: dict[str, Any] = dict(max_position_embeddings=LONGEST, num_hidden_layers=2)
    more |= dict(original_max_position_embeddings=ORIGINAL, rope_parameters=rope("longrope"))
    if kind == "Phimoe":
        more |= dict(num_local_experts=2, num_experts_per_tok=1)
        more["rope_parameters"] |= dict(short_mscale=1.1, long_mscale=1.3)
    config = getattr(transformers, f"{kind}Config")(**models.SMALL | more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def gemma3(kind: str) -> Any:
    """Windows with frequencies that stay beside full layers with some that switch."""
    longest = ORIGINAL if kind == "dynamic" else LONGEST
    plain = dict(rope_type="default", rope_theta=10000.0)
    config = transformers.Gemma3TextConfig(
        **BASE | dict(max_position_embeddings=longest),
        sliding_window=24,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(sliding_attention=plain, full_attention=rope(kind)),
    )
    return transformers.Gemma3ForCausalLM(config)


KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "longrope": (llama, "longrope"),
    "dynamic": (llama, "dynamic"),
    "yarn": (llama, "yarn"),
    "phi3": (phi, "Phi3"),
    "phimoe": (phi, "Phimoe"),
    "gemma3-longrope": (gemma3, "longrope"),
    "gemma3-dynamic": (gemma3, "dynamic"),
}
FAST = ("longrope",)


def build(name: str) -> Any:
    torch.manual_seed(0)
    make, kind = KINDS[name]
    return models.sharpen(make(kind))


def rows(*lengths: int) -> dict[str, torch.Tensor]:
    """Return a left-padded batch whose rows all begin alike."""
    width, text = max(lengths), models.prompt(max(lengths))[0]
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = text[:length]
    return dict(input_ids=ids, attention_mask=(ids != 0).long())


CASES: list[dict[str, Any]] = [
    *(rows(length) for length in (40, 62, 63, 64, 65, 66, 100)),
    rows(50) | dict(new_tokens=20),
    rows(57) | dict(new_tokens=20),
    *(rows(40, length) for length in (62, 64, 65, 100)),
    rows(30, 58) | dict(new_tokens=12),
    rows(100) | dict(prefill_chunk_size=32),
    rows(66) | dict(prefill_chunk_size=16),
    rows(60) | dict(num_beams=3),
    rows(66) | dict(num_beams=2),
    rows(56) | dict(prompt_lookup_num_tokens=4, new_tokens=14),
]
"""Calls below, at and above the original length, and across it; 8 new tokens if not said."""


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else thorough) for name in KINDS]
)
def test_prompts_around_the_original_length(name: str, tmp_path: Path) -> None:
    if name == "gemma3-longrope" and models.OLD:
        pytest.skip("this release cannot encode long texts in layers of several kinds")
    order = [*CASES, *random.Random(3).sample(CASES, len(CASES))]
    plain = build(name)
    wanted = [generate(plain, **dict(new_tokens=8) | case) for case in order]
    for life in range(2):
        model, known = build(name), list[int]()
        with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
            for case, want in zip(order, wanted, strict=True):
                before = reused(kv)
                assert_same(generate(model, **dict(new_tokens=8) | case), want)
                known.append(reused(kv) - before)
        assert any(known[len(CASES) :]) and (life == 0 or known[0] > 0)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
@pytest.mark.parametrize("name", ["longrope", "dynamic", "gemma3-longrope"])
def test_large_positions_at_padding_switch_every_row(name: str) -> None:
    """Nothing attends to padding, but the largest position of a batch chooses the frequencies."""
    if name == "gemma3-longrope" and models.OLD:
        pytest.skip("this release cannot encode long texts in layers of several kinds")
    model, plain = build(name), build(name)
    batch = rows(40, 50)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    far = torch.where(batch["attention_mask"] == 0, 200, positions)
    ids = rows(50)["input_ids"]

    def answer(served: Any, **given: Any) -> torch.Tensor:
        cache = DynamicCache(config=served.config)
        found: torch.Tensor = served(**given, **{PAST: cache}, logits_to_keep=1).logits
        return found

    given = [batch | dict(position_ids=far), dict(input_ids=ids), batch | dict(position_ids=far)]
    wanted = [answer(plain, **each) for each in given]
    with attached(model) as kv:
        for each, want in zip(given, wanted, strict=True):
            torch.testing.assert_close(answer(model, **each), want, rtol=0, atol=2e-3)
        assert reused(kv) == 0
        answer(model, input_ids=ids)
        assert reused(kv) == 49


def hybrid() -> Any:
    """Recurrent layers, whose states are kept where a forward ends."""
    torch.manual_seed(0)
    config = models.causal("falcon_h1").config
    config.max_position_embeddings, config.rope_parameters = LONGEST, rope("longrope")
    return models.sharpen(transformers.FalconH1ForCausalLM(config))


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
@pytest.mark.parametrize("way", ["states", "overflow", "overflow-dynamic", "audit"])
def test_a_long_prompt_is_not_computed_in_short_parts(way: str) -> None:
    """A part of it, run by itself, would be encoded as the short text that it is."""
    make = hybrid if way == "states" else partial(build, way.partition("-")[2] or "longrope")
    options: dict[str, Any] = dict(audit=1.0) if way == "audit" else {}
    if way.startswith("overflow"):
        options = dict(overflow=True, gpu="48KiB", host="64MiB")
    for length in (72, 100):
        model, plain, ids = make(), make(), models.prompt(length)
        with attached(model, **options):
            for _ in range(2):  # with dynamic NTK the second is encoded as the first has ended
                want = generate(plain, 6, input_ids=ids)
                assert_same(generate(model, 6, input_ids=ids), want, 1e-3)


@pytest.mark.usefixtures("all_is_loaded")
def test_long_prompts_reuse_each_other(tmp_path: Path) -> None:
    """Keys of long texts are alike, whatever their length; none of them is that of a short one."""
    text, plain = models.prompt(130), build("longrope")
    lengths, known = (100, 50, 130, 66, 65, 64, 50, 100), list[list[int]]()
    wanted = [generate(plain, 8, input_ids=text[:, :length]) for length in lengths]
    for _ in range(2):
        model = build("longrope")
        with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
            known.append([])
            for length, want in zip(lengths, wanted, strict=True):
                before = reused(kv)
                assert_same(generate(model, 8, input_ids=text[:, :length]), want)
                known[-1].append(reused(kv) - before)
    assert known[0] == [0, 0, 100, 65, 64, 0, 49, 99]
    assert all(n >= 48 for n in known[1][:5]) and known[1][5] == 0


def test_lists_of_tokens_name_texts_as_long_as_they_are(tmp_path: Path) -> None:
    """Long texts are found and erased; with a short one, those that it begins."""
    text, disk = models.prompt(130), f"{tmp_path}/kv:64MiB"
    long, short = text[0, :100].tolist(), text[0, :40].tolist()
    for erased, left in ((long, short), (short, None)):
        model = build("longrope")
        with attached(model, disk=disk) as kv:
            for ids in (long, short):
                generate(model, 8, input_ids=torch.tensor([ids]))
            assert kv.explain(long).known >= 96 and kv.explain(short).known >= 32
            assert kv.warm(long) >= 96 and kv.pin(long) >= 96 and kv.pin(long, pinned=False)
            assert kv.forget(erased) > 0
            for ids in (long, short):
                found = kv.explain(ids).known
                assert (found >= 32) == (ids is left), (len(ids), found)


@torch.no_grad()
@pytest.mark.parametrize("way", ["cut", "rows"])
def test_a_long_text_that_becomes_short_names_no_page(way: str) -> None:
    """What is computed behind a cut, or without the longest row, is encoded as in a short text."""
    model, plain, pair = build("longrope"), build("longrope"), rows(40, 100)
    more = models.prompt(40, seed=6)
    ids = torch.cat([pair["input_ids"][:1, 60:], more, more], 1)
    want = generate(plain, 4, input_ids=ids)
    with attached(model) as kv:
        cache = DynamicCache(config=model.config)
        given = dict(input_ids=pair["input_ids"][1:]) if way == "cut" else dict(pair)
        if way == "rows":
            given["position_ids"] = (pair["attention_mask"].cumsum(1) - 1).clamp_min(0)
        model(**given, **{PAST: cache}, logits_to_keep=1, use_cache=True)
        if way == "cut":
            cache.crop(-60)
        else:
            cache.batch_select_indices(torch.tensor([0]))
        mask = torch.ones(1, cache.get_seq_length() + 20, dtype=torch.long)
        mask[0, : cache.get_seq_length() - 40] = 0
        where = torch.arange(40, 60)[None]
        model(
            more[:, :20], logits_to_keep=1, attention_mask=mask, position_ids=where, **{PAST: cache}
        )
        del cache
        assert_same(generate(model, 4, input_ids=ids), want)
        assert reused(kv) >= 32, "what was computed as a long text is reused"


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
def test_an_original_length_that_is_set_later() -> None:
    model, plain, text = build("longrope"), build("longrope"), models.prompt(80)
    with attached(model) as kv:
        for original in (ORIGINAL, 32):
            for one in (model, plain):
                one.config.rope_parameters["original_max_position_embeddings"] = original
            for length in (24, 50, 80, 50, 24):
                want = generate(plain, 4, input_ids=text[:, :length])
                assert_same(generate(model, 4, input_ids=text[:, :length]), want)
        assert reused(kv) > 0
