"""Attached models audit what is restored for them: the same answers, and wrong pages found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flowkv
from flowkv.testing import MemoryTier
from tests.cache.fakes import Wrapped
from tests.inside import Audited, Quarantined

from . import models
from .compare import assert_same, generate
from .test_restore_nested import padded

PAGE = 16


def some(names: list[str], quick: set[str]) -> list[Any]:
    """All names, of which only the quick ones are tried in every run."""
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in names]


@contextmanager
def cached(
    model: Any, frames: dict[bytes, Any] | None = None, **options: Any
) -> Iterator[tuple[flowkv.KV, Any]]:
    """The model attached above a lasting tier with these frames; nothing is too slow to load."""
    tier = Wrapped(MemoryTier(name="lasting"), kind="disk")
    tier.frames.update(frames or {})
    kv = flowkv.attach(
        model, tiers=["gpu:64MiB", tier], **{"page_size": PAGE, "audit": 1.0, **options}
    )
    kv.planner.measured = lambda tokens, seconds, _: None
    kv.audited = []
    kv.bus.subscribe(kv.audited.append, Audited)
    try:
        yield kv, tier
    finally:
        kv.close()


def stored(model: Any, *many: dict[str, Any], **options: Any) -> dict[bytes, Any]:
    """Frames of the pages that these calls of `generate` make."""
    with cached(model, **options) as (kv, tier):
        for inputs in many:
            generate(model, 1, **inputs)
        assert kv.flush()
        return dict(tier.frames)


def counts(kv: flowkv.KV) -> tuple[int, int, int]:
    report = kv.stats()["audit"]
    return report["audited"], report["mismatches"], report["skipped"]


def loaded(kv: flowkv.KV) -> int:
    """Pages that came from the tier."""
    return int(kv.metrics.total("restore_loaded_tokens_total")) // PAGE


@pytest.mark.parametrize("name", some(models.CAUSAL, {"deepseek_v3", "gemma3"}))
def test_what_is_restored_is_what_the_model_computes(name: str) -> None:
    model, inputs = models.causal(name), padded(120, 70, 97)
    theirs = generate(model, 3, **inputs)
    frames = stored(model, inputs)
    with cached(model, frames) as (kv, _):
        assert_same(generate(model, 3, **inputs), theirs)
        audited, wrong, _skipped = counts(kv)
        assert wrong == 0 and audited > 0
        assert all(event.error <= 2e-4 for event in kv.audited)
        assert_same(generate(model, 3, **inputs), theirs)
        assert counts(kv)[0] == audited, "on the device by now"


@pytest.mark.parametrize("name", ["llama"])
def test_every_loaded_page_of_full_attention_is_audited(name: str) -> None:
    model, inputs = models.causal(name), padded(120, 70)
    frames = stored(model, inputs)
    with cached(model, frames) as (kv, _):
        generate(model, 1, **inputs)
        assert counts(kv) == (loaded(kv), 0, 0) and loaded(kv) > 3


@pytest.mark.parametrize("codec", some(["kv8", "k8v4", "kv4c", "kv4h"], {"kv4h"}))
def test_encoded_pages_are_audited_within_their_bounds(codec: str) -> None:
    from tests.fixture_model import load_tiny

    model = load_tiny()
    text = b"def greet(name):\n    return 'Hello, ' + name\n\n\nclass Greeter:\n    pass\n" * 6
    inputs = {"input_ids": torch.tensor([list(text[:400])])}
    options = {"codec": codec, "page_size": 64, "recent_tokens": 0}
    frames = stored(model, inputs, **options)
    with cached(model, frames, **options) as (kv, _):
        generate(model, 1, **inputs)
        audited, wrong, skipped = counts(kv)
        assert audited >= 3 and (wrong, skipped) == (0, 0)
        assert all(event.codec == codec and 0 < event.error < event.bound for event in kv.audited)
        assert 0 < kv.stats()["audit"]["worst"] < 0.7


def test_a_wrong_page_is_found_behind_the_answer_and_never_used_again() -> None:
    model, inputs = models.causal("llama"), {"input_ids": models.prompt(200)}
    theirs = generate(model, 4, **inputs)
    frames = stored(model, inputs)
    with cached(model, frames) as (kv, tier):
        quarantined: list[Quarantined] = []
        kv.bus.subscribe(quarantined.append, Quarantined)
        with kv._probe(inputs["input_ids"][0], None, ()) as seq:
            bad, good = seq.key(0, 10), seq.key(0, 4)
        tier.forge(bad, tier.frames[good][1])
        with pytest.warns(UserWarning, match="not what the model computes"):
            generate(model, 4, **inputs)
        assert [event.key for event in quarantined] == [bad] and counts(kv)[1] == 1
        assert kv.flush() and bad not in tier.frames
        assert_same(generate(model, 4, **inputs), theirs)
        assert counts(kv)[1] == 1


def test_other_weights_under_the_same_name_are_found() -> None:
    model, inputs = models.causal("llama"), {"input_ids": models.prompt(200)}
    frames = stored(model, inputs, namespace="mine")
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    with (
        cached(model, frames, namespace="mine") as (kv, _),
        pytest.warns(UserWarning, match="it must change with the weights"),
    ):
        generate(model, 1, **inputs)
    assert counts(kv)[1] >= 1


def test_images_are_audited_where_a_page_holds_them_whole() -> None:
    model = models.llava()
    torch.manual_seed(3)
    ids = models.prompt(120)
    for first in (20, 45):  # the second one lies across a border
        ids[0, first : first + models.IMAGE_PATCHES] = models.IMAGE_TOKEN
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 28, 28)}
    theirs = generate(model, 2, **inputs)
    frames = stored(model, inputs)
    with cached(model, frames) as (kv, _):
        assert_same(generate(model, 2, **inputs), theirs)
        audited, wrong, skipped = counts(kv)
        assert audited >= 2 and (wrong, skipped) == (0, 0)
        assert not {event.page for event in kv.audited} & {2, 3}


@pytest.mark.parametrize("name", some(models.HYBRID, set()))
def test_models_with_a_state_of_their_own_are_left_alone(name: str) -> None:
    model, inputs = models.causal(name), {"input_ids": models.prompt(100)}
    theirs = generate(model, 2, **inputs)
    with cached(model) as (kv, _):
        generate(model, 1, **inputs)
        assert kv.flush()
        for place in kv.planner.store.pools:
            for block in kv.planner.store.blocks_on(place):
                kv.planner.store.eviction.leave([block], "space")
        assert_same(generate(model, 2, **inputs), theirs)
        assert counts(kv)[:2] == (0, 0)


def test_caches_made_beforehand_are_audited_too() -> None:
    model, inputs = models.causal("qwen3"), {"input_ids": models.prompt(150)}
    theirs = generate(model, 3, **inputs)
    frames = stored(model, inputs)
    with cached(model, frames) as (kv, _):
        assert_same(generate(model, 3, **inputs, past_key_values=kv.cache(**inputs)), theirs)
        audited, wrong, skipped = counts(kv)
        assert audited >= 3 and (wrong, skipped) == (0, 0)


def test_beams_audit_a_prompt_once() -> None:
    model, inputs = models.causal("llama"), padded(100, 60)
    theirs = generate(model, 5, **inputs, num_beams=3)
    frames = stored(model, inputs)
    with cached(model, frames) as (kv, _):
        ours = generate(model, 5, **inputs, num_beams=3)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert counts(kv) == (loaded(kv), 0, 0) and loaded(kv) > 2
