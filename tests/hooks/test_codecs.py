"""Encoded pages under a Hugging Face model: the trained fixture, whose answers mean something."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.fixture_model import corpus, load_tiny
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.inside import ConfigError, NonFiniteError
from tests.inside import layout_CODECS as CODECS

FIXED = CODECS[1:]
# Mean over steps of the relative distance between logits and those of raw pages.
TOLERANCE = {"kv8": 0.01, "k8v4": 0.1, "kv4c": 0.12, "kv4h": 0.15, "auto": 0.05}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_tiny()


def text(length: int, first: int = 20_000) -> torch.Tensor:
    return torch.tensor([list(corpus("validation")[first : first + length])])


def distance(ours: Any, theirs: Any) -> float:
    """Mean relative distance of the logits of the prompt's next token and a few forced ones."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).mean())


def forced(model: Any, ids: torch.Tensor, steps: int = 12) -> torch.Tensor:
    """Logits `[steps, vocabulary]` while the model is fed the text itself, token by token."""
    cache, found = transformers_cache(model), []
    for given in ids.split([ids.shape[1] - steps, *[1] * steps], dim=1)[:-1]:
        with torch.no_grad():
            out = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        found.append(out.logits[0, -1])
    return torch.stack(found)


def transformers_cache(model: Any) -> Any:
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("codec", [*FIXED, "auto"])
def test_a_prompt_is_read_from_encoded_pages(model: Any, codec: str) -> None:
    ids = text(700)
    theirs = forced(model, ids)
    size = 128 if codec == "auto" else 64
    with attached(model, codec=codec, page_size=size, recent_tokens=0, warm_tokens=256) as kv:
        first = forced(model, ids)  # the prompt itself is computed, then its pages are encoded
        assert reused(kv) == 0
        again = forced(model, ids)
        assert reused(kv) == 687 // size * size
        device = kv.stats()["devices"]["cpu"]
        assert device["compression"] > 2.5, "the fixture computes in float32"
        assert "raw" not in device["codecs"] or device["codecs"]["raw"] < device["used_bytes"] / 2
    for logits in (first, again):
        assert 1e-6 < distance(logits, theirs) < TOLERANCE[codec]
        agree = (logits.argmax(-1) == theirs.argmax(-1)).float().mean()
        assert agree >= (0.9 if codec in ("kv8", "auto") else 0.7)


def test_generate_goes_on_in_encoded_pages(model: Any) -> None:
    ids = text(300)
    with attached(model, codec="kv8", page_size=64, recent_tokens=0) as kv:
        ours = generate(model, 100, input_ids=ids)
        assert set(kv.stats()["devices"]["cpu"]["codecs"]) <= {"kv8", "raw"}
        assert kv.stats()["events"]['encoded_pages_total{source="raw",target="kv8"}'] >= 6
    theirs = generate(model, 100, input_ids=ids)
    same = (ours.sequences == theirs.sequences)[0, 300:].float().mean()
    assert same > 0.5, "eight bits seldom turn a token around"


def test_batches_beams_and_cuts_work_on_encoded_pages(model: Any) -> None:
    ids = torch.cat([text(200, 30_000), text(200, 60_000)])
    with attached(model, codec="kv8", page_size=64, recent_tokens=0):
        beams = generate(model, 20, input_ids=ids, num_beams=2)
        assert beams.sequences.shape == (2, 220)
        cache = transformers_cache(model)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.crop(-80)  # into an encoded page
            out = model(ids[:, 120:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    with torch.no_grad():
        whole = model(ids, logits_to_keep=1)
    assert distance(out.logits[:, -1], whole.logits[:, -1]) < TOLERANCE["kv8"]


def test_models_that_read_dense_get_decoded_pages(model: Any) -> None:
    ids = text(400)
    with attached(model, reads="dense", codec="kv8", page_size=64, recent_tokens=0):
        dense = forced(model, ids)
    with attached(model, codec="kv8", page_size=64, recent_tokens=0):
        paged = forced(model, ids)
    assert distance(dense, paged) < 2e-3


def test_raw_is_as_without(model: Any) -> None:
    ids = text(260)
    theirs = generate(model, 20, input_ids=ids)
    with attached(model, page_size=64) as kv:
        for _ in range(2):
            assert_same(generate(model, 20, input_ids=ids), theirs)
        assert set(kv.stats()["devices"]["cpu"]["codecs"]) == {"raw"}


def test_another_run_with_another_codec_reads_what_it_may(model: Any, tmp_path: Any) -> None:
    ids = text(300)

    def run(codec: str) -> int:
        with attached(model, codec=codec, page_size=64, disk=f"{tmp_path}/kv:1GiB") as kv:
            forced(model, ids)
            return reused(kv)

    # A busy disk may be beaten by computing, but not for all of the four pages.
    read = [run(codec) for codec in ("kv8", "kv8", "kv4c", "raw", "raw", "kv8")]
    assert [0 < tokens <= 256 for tokens in read] == [False, True, True, False, True, True], read


def test_a_model_whose_heads_are_too_small_is_told(model: Any) -> None:
    with pytest.raises(ConfigError, match="head dims of at least 64"):
        flowkv.attach(models.causal("llama"), codec="kv4c")
    small, ids = models.causal("llama"), models.prompt(100)
    theirs = generate(small, 8, input_ids=ids)
    with attached(small, codec="auto", page_size=16, recent_tokens=16) as kv:
        for _ in range(2):
            assert generate(small, 8, input_ids=ids).sequences.shape == theirs.sequences.shape
        assert reused(kv) > 0 and "kv8" in kv.stats()["devices"]["cpu"]["codecs"]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "falcon"])
def test_windows_and_sinks_go_with_codecs(name: str) -> None:
    small, ids = models.causal(name), models.prompt(100)
    theirs = generate(small, 8, input_ids=ids)
    with attached(small, codec="kv8", page_size=16, recent_tokens=0) as kv:
        for turn in range(2):
            ours = generate(small, 8, input_ids=ids)
            distances = [
                float((a - b).norm() / b.norm())
                for a, b in zip(ours.logits, theirs.logits, strict=True)
            ]
            assert distances[0] < (1e-4 if turn == 0 else 0.1), "the first prompt reads no pages"
        assert reused(kv) > 0


def test_states_lie_beside_encoded_pages() -> None:
    hybrid, ids = models.causal("falcon_h1"), models.prompt(100)
    with attached(hybrid, codec="kv8", page_size=16, recent_tokens=0) as kv:
        first = generate(hybrid, 8, input_ids=ids).sequences
        longer = torch.cat([first, models.prompt(9, seed=2)], dim=1)
        ours = generate(hybrid, 8, input_ids=longer)
        assert reused(kv) == 107
    theirs = generate(hybrid, 8, input_ids=longer)
    assert float((ours.logits[0] - theirs.logits[0]).norm() / theirs.logits[0].norm()) < 0.1


def test_what_cannot_be_encoded_is_named() -> None:
    for choice in ("raw", "error"):
        broken = load_tiny()
        options = dict(codec="kv8", page_size=64, recent_tokens=0, non_finite=choice)
        with (
            warnings.catch_warnings(record=True) as said,
            attached(broken, **options),
            contextlib.ExitStack() as stack,
        ):
            warnings.simplefilter("always")
            if choice == "error":
                stack.enter_context(pytest.raises(NonFiniteError, match="page 0 of layer 2"))
            with torch.no_grad():
                broken.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
            generate(broken, 4, input_ids=text(200))
            assert any("Page 0 of layer 2 holds NaN" in str(found.message) for found in said)
