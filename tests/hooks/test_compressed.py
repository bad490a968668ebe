"""DeepSeek-V4: layers with a window, and with what they compress of all tokens as their state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from flowkv import Engine
from tests.inside import door_of

from . import models
from .compare import assert_same, attached, generate, reused, turns
from .test_engine_rows import opened
from .test_indexed import (
    KNOWN,
    NEW,
    Frames,
    answer,
    check_changed,
    flipped,
    missing,
    of_another_prompt,
    pickled,
    ragged,
)
from .test_restore import restoring, stored

NAME = "deepseek_v4"
pytestmark = [
    pytest.mark.skipif(
        NAME not in transformers.CONFIG_MAPPING, reason="no such model is installed"
    ),
    pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*padding changes"),
]


def pair() -> dict[str, torch.Tensor]:
    return dict(input_ids=torch.cat([models.prompt(70, seed=seed) for seed in (4, 5)]))


def test_two_turns_of_a_chat_and_batches() -> None:
    model = models.causal(NAME)
    prompt, first, longer, second = turns(model, NEW)
    batch, even = generate(model, NEW, **ragged()), generate(model, NEW, **pair())
    assert len(set(first.sequences[0, 70:].tolist())) > 2, "the model says one thing: no test"
    with attached(model) as kv:
        assert not any(x.in_pages for x in door_of(model).plan.placed.values())
        assert_same(generate(model, NEW, input_ids=prompt), first)
        assert reused(kv) == 0
        assert_same(generate(model, NEW, input_ids=longer), second)
        assert reused(kv) == KNOWN
        assert_same(generate(model, NEW, input_ids=longer), second)
        assert reused(kv) == 2 * KNOWN
        for _ in range(2):
            before = reused(kv)
            assert_same(generate(model, NEW, **pair()), even)
        assert reused(kv) - before == 2 * 64
        before = reused(kv)
        for _ in range(2):
            assert_same(generate(model, NEW, **ragged()), batch)
        assert reused(kv) == before, "padding changes what the layers compress"
    assert_same(generate(model, NEW, input_ids=longer), second)


@pytest.mark.parametrize("length", [3, 4, 7, 8, 23, 24, 25])
def test_blocks_under_way_go_on(length: int) -> None:
    """Few tokens, one of a block, all of it, a window, and one more."""
    model, ids = models.causal(NAME), models.prompt(length)
    longer = torch.cat([ids, models.prompt(30, seed=2)], 1)
    wanted = generate(model, NEW, input_ids=longer)
    with attached(model) as kv:
        generate(model, 2, input_ids=ids)
        assert_same(generate(model, NEW, input_ids=longer), wanted)
        kv.flush()
        assert_same(generate(model, NEW, input_ids=longer), wanted)
        assert reused(kv) > 0


@pytest.mark.usefixtures("all_is_loaded")
def test_a_restart(tmp_path: Path) -> None:
    model = models.causal(NAME)
    prompt, first, longer, second = turns(model, NEW)
    with attached(model, disk=f"{tmp_path}/kv:64MiB"):
        assert_same(generate(model, NEW, input_ids=prompt), first)
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        assert_same(generate(model, NEW, input_ids=longer), second)
        assert reused(kv) == KNOWN


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call.*other layers")
def test_another_window_is_left_to_the_model() -> None:
    """The windows of layers are those of the configuration when the model was attached."""
    model, prompt = models.causal(NAME), models.prompt(70)
    held, wanted = model.config.sliding_window, {}
    for window in (held, 12, 40):
        model.config.sliding_window = window
        wanted[window] = generate(model, NEW, input_ids=prompt)
    assert not torch.equal(wanted[40].sequences, wanted[held].sequences), "windows do not matter"
    model.config.sliding_window = held
    with attached(model) as kv:
        for window in (held, 12, 12, 40, 40, held):
            model.config.sliding_window = window
            assert_same(generate(model, NEW, input_ids=prompt), wanted[window])
        assert reused(kv) == 64


def test_beams() -> None:
    model, prompt = models.causal(NAME), models.prompt(50)
    options = dict(num_beams=3, num_return_sequences=2)
    theirs = generate(model, NEW, input_ids=prompt, **options)
    with attached(model) as kv:
        for _ in range(2):
            ours = generate(model, NEW, input_ids=prompt, **options)
            assert torch.equal(ours.sequences, theirs.sequences)
        assert reused(kv) > 0


def test_rows_of_an_engine() -> None:
    """They share a beginning, and are computed in pieces; one is set aside and comes back."""
    model, shared = models.causal(NAME), models.prompt(40)
    prompts = [torch.cat([shared, models.prompt(20, seed=n)], 1) for n in (2, 3, 4)]
    wanted = [generate(model, NEW, input_ids=ids).sequences[0, 60:].tolist() for ids in prompts]
    with attached(model) as kv:
        for _ in range(2):
            with Engine(model, kv, max_rows=3, token_budget=24) as engine:
                done = engine.run([ids[0].tolist() for ids in prompts], max_new_tokens=NEW)
            assert [one.tokens for one in done] == wanted
        assert reused(kv) > 0
        row = opened(model, kv)
        row.suspend()
        row.resume()
        row.close("turn_end")
        before, text = reused(kv), torch.cat([models.prompt(20), models.prompt(5, seed=3)], 1)
        again = generate(model, 2, input_ids=text)
        assert reused(kv) - before == 20
    assert_same(generate(model, 2, input_ids=text), again)


def _repeated(cache: Any) -> Any:
    cache.batch_repeat_interleave(1)
    return cache


def _edited(cache: Any) -> Any:
    cache.layers[0].keys[:, :, 3:9] = 7.0
    return cache


def _edited_state(cache: Any) -> Any:
    cache.layers[1].compressed_kv["compressor"][:, 3:9] = 7.0
    return cache


@pytest.mark.parametrize("change", [copy.deepcopy, pickled, _repeated, _edited, _edited_state])
def test_a_cache_that_is_copied_or_changed(change: Any) -> None:
    check_changed(NAME, change)


# Faults: states that are not those of the pages beside them.


def states(frames: Frames) -> list[bytes]:
    return [key for key, (header, _) in frames.items() if header.info.kind == "state"]


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("fault", [missing, of_another_prompt, flipped])
def test_a_wrong_state_is_never_served(fault: Any) -> None:
    model, one, two = models.causal(NAME), models.prompt(100), models.prompt(100, seed=9)
    longer = torch.cat([one, models.prompt(20, seed=2)], 1)
    theirs = generate(model, 4, input_ids=longer)
    frames, other = (stored(model, {"input_ids": ids}) for ids in (one, two))
    with restoring(model, frames, 0.0) as (kv, _, _):
        assert_same(generate(model, 4, input_ids=longer), theirs)
        assert reused(kv) >= 96, "no test"
    found = states(frames)
    assert found
    for key, there in zip(found, states(other), strict=True):
        fault(frames, key, other, there)
    with restoring(model, frames, 0.0) as (kv, _, _):
        assert_same(generate(model, 4, input_ids=longer), theirs)
        assert reused(kv) == 0
        assert_same(generate(model, 4, input_ids=longer), theirs)


def test_a_failed_forward_leaves_nothing(tmp_path: Path) -> None:
    model, prompt = models.causal(NAME), models.prompt(40)
    wanted = answer(model, DynamicCache(config=model.config), prompt)
    with attached(model, revision="tests"):
        cache = DynamicCache(config=model.config)
        with pytest.raises(IndexError):
            answer(model, cache, torch.full((1, 40), 9999))
        torch.testing.assert_close(answer(model, cache, prompt), wanted, atol=2e-4, rtol=2e-4)
