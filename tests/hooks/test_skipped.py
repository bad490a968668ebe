"""Forwards that skip layers: those have fewer tokens from then on, as in the model's own cache."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.hooks.recorder import recorded
from tests.hooks.test_restore import restoring, stored
from tests.inside import PagedCache

PROMPT = models.prompt(40)


class Cut:
    """A processor of logits that cuts half of the layers off at one step, and puts them back."""

    def __init__(self, model: Any, at: int, back: int) -> None:
        self.base, self.at, self.back, self.steps = model.model, at, back, 0
        self.layers = self.base.layers

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.at:
            self.base.layers = torch.nn.ModuleList(self.layers[: len(self.layers) // 2])
        if self.steps == self.back:
            self.base.layers = self.layers
        return scores


def answer(model: Any, way: dict[str, Any], back: int) -> Any:
    """Return the answer of a model that is cut meanwhile; None if it does not work like that."""
    cut = Cut(model, 3, back)
    torch.manual_seed(0)
    try:
        return generate(model, 20, input_ids=PROMPT, logits_processor=[cut], **way)
    except RuntimeError:
        return None
    finally:
        model.model.layers = cut.layers


WAYS: list[dict[str, int]] = [{}, {"num_beams": 3}, {"num_return_sequences": 2}]
BACK = (4, 9, 99)
CASES = [  # every two of way, model, graphs and length meet
    (way, name, graphs, BACK[(w + n + graphs) % 3])
    for w, way in enumerate(WAYS)
    for n, name in enumerate(("llama", "falcon_h1", "qwen3_next"))
    for graphs in (False, True)
]


@pytest.mark.filterwarnings("ignore:FlowKV")
@pytest.mark.parametrize(("way", "name", "graphs", "back"), CASES)
def test_layers_that_are_skipped_and_come_back(
    name: str, way: dict[str, Any], graphs: bool, back: int
) -> None:
    model, twin = models.causal(name), models.causal(name)
    way = way | {"do_sample": "num_return_sequences" in way}
    with recorded() if graphs else nullcontext(), attached(model) as kv:
        for _ in range(2):
            answers = [answer(each, way, back) for each in (twin, model)]
            if None not in answers:  # masks of some releases do not fit a layer with fewer tokens
                assert_same(answers[1], answers[0])
            # Older releases may refuse these: they build the mask of the first layer for all.
            assert answers[0] is None or answers[1] is not None or models.OLD
        assert_same(*(generate(each, 4, input_ids=PROMPT) for each in (model, twin)))
        assert reused(kv) or kv.stats()["foreign"]


@pytest.mark.skipif(models.OLD, reason="a reset cache keeps its length in older releases")
@pytest.mark.parametrize("edit", ["crop", "reset", "reorder", "repeat", "copy"])
def test_edits_of_a_cache_with_skipped_layers(edit: str) -> None:
    model, twin = models.short(), models.short()
    ids, found = models.prompt(60), list[Any]()
    with attached(model), torch.no_grad():
        for each in (model, twin):
            cache, layers = DynamicCache(config=each.config), each.config.num_hidden_layers
            each(ids[:, :30], past_key_values=cache, logits_to_keep=1)
            each.config.num_hidden_layers = 1
            each(ids[:, 30:32], past_key_values=cache, logits_to_keep=1)
            assert type(cache) is (DynamicCache if each is twin else PagedCache)
            if edit == "crop":
                cache.crop(-3)
            elif edit == "reset":
                cache.reset()
            elif edit == "reorder":
                cache.reorder_cache(torch.tensor([0]))
            elif edit == "repeat":
                cache.batch_repeat_interleave(2)
            else:
                cache = deepcopy(cache)
            rows = 2 if edit == "repeat" else 1
            each(ids[:, 32:33].repeat(rows, 1), past_key_values=cache, logits_to_keep=1)
            each.config.num_hidden_layers = layers
            each(ids[:, 33:34].repeat(rows, 1), past_key_values=cache, logits_to_keep=1)
            found.append([one for layer in cache.layers for one in (layer.keys, layer.values)])
    for ours, own in zip(*found, strict=True):
        assert ours.shape == own.shape and torch.allclose(ours, own, atol=1e-5)


def test_a_model_without_some_of_its_layers_goes_on_past_the_pool() -> None:
    model, twin = models.short(), models.short()
    ids = models.prompt(3000)
    options = {"gpu": "1MiB", "host": "64MiB", "overflow": True}
    answers = []
    with attached(model, **options):
        for each in (model, twin):
            cut = Cut(each, 3, 99)
            answers.append(generate(each, 6, input_ids=ids, logits_processor=[cut]))
    assert_same(*answers)


@pytest.mark.parametrize("part", [0.5, 1, 0])
def test_a_restore_whose_forwards_skip_layers_ends(part: float) -> None:
    model, twin, ids = models.short(), models.short(), models.prompt(200)
    frames = stored(model, {"input_ids": ids})
    with restoring(model, frames, part) as (kv, _, _):
        cache = kv.cache(ids)
        model.config.num_hidden_layers = twin.config.num_hidden_layers = 1
        found = generate(model, 6, input_ids=ids, past_key_values=cache)
        assert_same(found, generate(twin, 6, input_ids=ids))


def test_rows_of_an_engine_are_never_answered_from_layers_that_were_skipped() -> None:
    model, twin = models.short(), models.short()
    want = generate(twin, 12, input_ids=PROMPT, logits_processor=[Cut(twin, 3, 6)])
    with attached(model) as kv, flowkv.Engine(model, kv) as engine:
        cut = Cut(model, 3, 6)
        job = engine.submit(
            PROMPT[0].tolist(), max_new_tokens=12, options={"logits_processor": [cut]}
        )
        try:
            assert list(job.result().tokens) == want.sequences[0, 40:].tolist()
        except flowkv.FlowKVError:
            model.model.layers = cut.layers
        again = engine.submit(PROMPT[0].tolist(), max_new_tokens=4).result().tokens
    assert list(again) == generate(models.short(), 4, input_ids=PROMPT).sequences[0, 40:].tolist()
