"""Models whose layers keep the keys of a sparse indexer beside keys and values.

An indexer chooses the tokens that attention reads, so keys and values of a prompt are worth nothing
without the indexer's keys of the same tokens: both are paged, found and verified together.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flowkv
from flowkv.testing import MemoryTier
from tests.inside import INDEXERS, PagedCache, door_of

from . import models
from .compare import assert_same, attached, filled, generate, reused, turns
from .test_restore import Slow, on, restoring, some

BY_COLUMN = "minimax_m3_vl_text"
FEW = [name for name in ("deepseek_v32", BY_COLUMN) if name in models.INDEXED]
STATEFUL = ("glm5_next", "qwen4_exp")
NEW, KNOWN = 8, 77
"""Tokens of an answer; those of the first turn but the last one, which was never fed."""
pytestmark = [
    pytest.mark.skipif(not models.INDEXED, reason="no such model is installed"),
    pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*padding changes"),
]


def ragged() -> dict[str, torch.Tensor]:
    ids = torch.cat([models.prompt(50, seed=seed) for seed in (1, 2, 3)])
    return models.pad_rows(ids, 0, 9, 21)


@pytest.mark.parametrize("name", models.INDEXED)
def test_two_turns_of_a_chat_and_a_ragged_batch(name: str) -> None:
    model = models.causal(name)
    prompt, first, longer, second = turns(model, NEW)
    inputs = ragged()
    batch = generate(model, NEW, **inputs)
    assert len(set(first.sequences[0, 70:].tolist())) > 2, "the model says one thing: no test"
    with attached(model) as kv:
        indexers = [n for g in kv.geometry.groups for n in g.layers if n >= INDEXERS]
        assert indexers and not any(x.in_pages for x in door_of(model).plan.placed.values())
        assert_same(generate(model, NEW, input_ids=prompt), first)
        assert reused(kv) == 0
        assert_same(generate(model, NEW, input_ids=longer), second)
        assert reused(kv) == KNOWN
        assert_same(generate(model, NEW, input_ids=longer), second)
        assert reused(kv) == KNOWN + (KNOWN if name in STATEFUL else KNOWN + 15)
        before = reused(kv)
        assert_same(generate(model, NEW, **inputs), batch)
        assert_same(generate(model, NEW, **inputs), batch)
        alone = name in STATEFUL or name == BY_COLUMN
        assert (reused(kv) == before) is alone, "padding changes what such models compute"
    assert_same(generate(model, NEW, input_ids=longer), second)


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("name", models.INDEXED)
def test_a_restart(name: str, tmp_path: Path) -> None:
    model = models.causal(name)
    prompt, first, longer, second = turns(model, NEW)
    with attached(model, disk=f"{tmp_path}/kv:64MiB"):
        assert_same(generate(model, NEW, input_ids=prompt), first)
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        assert_same(generate(model, NEW, input_ids=longer), second)
        assert reused(kv) in (64, KNOWN)


@pytest.mark.parametrize("name", FEW)
def test_indexers_stay_exact_beside_encoded_values(name: str) -> None:
    model, prompt = models.causal(name), models.prompt(90)
    for codec in ("kv8", "auto"):
        with attached(model, codec=codec, recent_tokens=32) as kv:
            forms = zip(kv.geometry.groups, kv.planner.store.forms, strict=True)
            sealed = {group.kind: len(form.sealed) for group, form in forms}
            assert sealed["full"] and not sealed["keys"]
            for _ in range(2):
                assert torch.isfinite(torch.cat(generate(model, input_ids=prompt).logits)).all()
            assert reused(kv) == 89


# Faults: pages of the indexer that are not those of the keys and values beside them.

Frames = dict[bytes, Any]


def numbered(frames: Frames, group: int) -> list[bytes]:
    """Keys of the pages of a group, in the order of their tokens."""
    own = {key: header.info.parent for key, (header, _) in frames.items() if _is(header, group)}
    (key,) = [key for key, parent in own.items() if parent not in own]
    found = [key]
    while following := [key for key, parent in own.items() if parent == found[-1]]:
        found += following
    return found


def _is(header: Any, group: int) -> bool:
    return header.info.kind == "page" and header.info.group == group


def missing(frames: Frames, key: bytes, other: Frames, there: bytes) -> None:
    del frames[key]


def of_another_prompt(frames: Frames, key: bytes, other: Frames, there: bytes) -> None:
    frames[key] = other[there]


def of_another_layer(frames: Frames, key: bytes, other: Frames, there: bytes) -> None:
    header, body = frames[key]
    size = header.info.stripe_bytes
    assert len(body) >= 2 * size
    frames[key] = header, body[size : 2 * size] + body[:size] + body[2 * size :]


def of_attention(frames: Frames, key: bytes, other: Frames, there: bytes) -> None:
    """The page of keys and values of the same tokens."""
    header, body = frames[key]
    beside = numbered(frames, 0)[numbered(frames, header.info.group).index(key)]
    frames[key] = header, (frames[beside][1] * 2)[: len(body)]


def flipped(frames: Frames, key: bytes, other: Frames, there: bytes) -> None:
    header, body = frames[key]
    frames[key] = header, bytes([body[0] ^ 1]) + body[1:]


FAULTS = [missing, of_another_prompt, of_another_layer, of_attention, flipped]


def stored(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Frames, int]:
    """Frames of a prompt's pages, and the number of the indexers' group."""
    tier = Slow()
    with on(model, tier) as kv:
        generate(model, 1, **inputs)
        assert kv.flush()
        groups = [one.layers[0] >= INDEXERS for one in kv.geometry.groups]
        return dict(tier.inner.frames), groups.index(True)


@pytest.fixture(scope="module")
def kept() -> Callable[[str], tuple[Any, Any, Any, Frames, Frames, int]]:
    found: dict[str, Any] = {}

    def kept(name: str) -> Any:
        if name not in found:
            model, one, two = models.causal(name), models.prompt(200), models.prompt(200, seed=9)
            theirs = generate(model, 4, input_ids=one)
            frames, group = stored(model, {"input_ids": one})
            other, _ = stored(model, {"input_ids": two})
            found[name] = model, {"input_ids": one}, theirs, frames, other, group
        return found[name]

    return kept


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("page", [0, 5])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", some(FEW[:1], FEW))
def test_a_wrong_page_of_an_indexer_is_never_served(
    name: str, fault: Any, page: int, kept: Any
) -> None:
    model, inputs, theirs, frames, other, group = kept(name)
    frames = dict(frames)
    key, there = (numbered(each, group)[page] for each in (frames, other))
    fault(frames, key, other, there)
    with restoring(model, frames, 0.0) as (kv, _, _):
        assert_same(generate(model, 4, **inputs), theirs)
        assert reused(kv) < 192, "behind the page, the prompt is not known"
        assert_same(generate(model, 4, **inputs), theirs)


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("name", FEW)
def test_a_page_of_an_indexer_that_was_wrong_when_stored_is_found_by_an_audit(
    name: str, kept: Any
) -> None:
    """Its digest is right, so that it is served: answers depend on it, and the audit finds it."""
    model, inputs, theirs, frames, other, group = kept(name)
    memory = MemoryTier(name="forged")
    memory.frames = dict(frames)
    for key, there in zip(numbered(frames, group), numbered(other, group), strict=True):
        memory.forge(key, other[there][1])
    with restoring(model, memory.frames, 0.0, audit=1.0) as (kv, _, _):
        with pytest.warns(UserWarning, match="not what the model computes"):
            wrong = generate(model, 4, **inputs)
        assert not torch.allclose(wrong.logits[0], theirs.logits[0], atol=1e-3), "no test"
        assert kv.stats()["audit"]["mismatches"]
        assert_same(generate(model, 4, **inputs), theirs)


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("name", FEW)
def test_a_prompt_is_computed_and_loaded_at_once(name: str, kept: Any) -> None:
    model, inputs, theirs, frames, _, _ = kept(name)
    with restoring(model, frames, 0.5, lose=0.1, audit=1.0) as (kv, _, seen):
        assert_same(generate(model, 4, **inputs), theirs)
        assert seen.sum("computed_tokens") >= 96
        assert_same(generate(model, 4, **inputs), theirs)
        assert not kv.stats()["audit"]["mismatches"]


# Operations on caches.


@pytest.mark.parametrize("name", some([*FEW[:1], "qwen4_exp"], models.INDEXED))
def test_beams_and_a_taken_back_draft(name: str) -> None:
    model, prompt = models.causal(name), models.prompt(50)
    ways: list[dict[str, Any]] = [dict(num_beams=3, num_return_sequences=2)]
    if name not in STATEFUL:
        ways.append(dict(prompt_lookup_num_tokens=3))
    for options in ways:
        theirs = generate(model, NEW, input_ids=prompt, **options)
        with attached(model) as kv:
            for _ in range(2):
                ours = generate(model, NEW, input_ids=prompt, **options)
                assert torch.equal(ours.sequences, theirs.sequences)
            assert reused(kv) > 0


def answer(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def keys_of(cache: Any) -> torch.Tensor:
    layer = next(one for one in cache.layers if hasattr(one, "update_indexer"))
    return layer.indexer_keys


def _edited(cache: Any) -> Any:
    keys_of(cache)[:, 3:9] = 7.0
    return cache


def _edited_behind_autograd(cache: Any) -> Any:
    keys_of(cache).data[:, 3:9].fill_(7.0)
    return cache


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


def _one_layer_cut(cache: Any) -> Any:
    cache.layers[0].batch_repeat_interleave(1)
    return cache


def _cut(cache: Any) -> Any:
    cache.crop(-5)
    return cache


CHANGES = [copy.deepcopy, pickled, _edited, _edited_behind_autograd, _one_layer_cut, _cut]


def check_changed(name: str, change: Any) -> None:
    """A copied or changed cache answers as the model's own would, and no other cache changes."""
    model, prompt, more = models.causal(name), models.prompt(60), models.prompt(9, seed=5)
    theirs = answer(model, change(filled(model, prompt)), more)
    plain = answer(model, filled(model, prompt), more)
    with attached(model):
        filled(model, prompt)
        cache = filled(model, prompt)
        assert isinstance(cache, PagedCache) and cache.reused
        changed = change(cache)
        torch.testing.assert_close(answer(model, changed, more), theirs, atol=2e-4, rtol=2e-4)
        if changed is not cache:
            torch.testing.assert_close(answer(model, cache, more), plain, atol=2e-4, rtol=2e-4)
        again = answer(model, filled(model, prompt), more)
        torch.testing.assert_close(again, plain, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_cache_that_is_copied_or_changed(change: Any) -> None:
    check_changed(FEW[0], change)


@pytest.mark.parametrize("name", FEW)
def test_a_cache_made_beforehand(name: str) -> None:
    model = models.causal(name)
    prompt, _, longer, second = turns(model, NEW)
    with attached(model) as kv:
        generate(model, NEW, input_ids=prompt)
        cache = kv.cache(input_ids=longer)
        assert cache.get_seq_length() == KNOWN
        assert_same(generate(model, NEW, input_ids=longer, past_key_values=cache), second)
        if name == BY_COLUMN:
            with pytest.raises(flowkv.FlowKVError, match="padding changes"):
                kv.cache(**ragged())
