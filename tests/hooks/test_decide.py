"""What decides whether a first forward is served: a table of forwards, each with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from tests.hooks import models
from tests.hooks.compare import PAST, attached
from tests.inside import door_of


class Mine(DynamicCache):
    """A user's own class of caches."""


class Compared(Mine):
    """One whose objects cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


def _filled(cache: DynamicCache) -> DynamicCache:
    for index in range(len(cache.layers)):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), index)
    return cache


def _marked(cache: DynamicCache, **marks: Any) -> DynamicCache:
    vars(cache).update(marks)
    return cache


def _crossed(cache: DynamicCache, *, filled: bool) -> EncoderDecoderCache:
    other = DynamicCache()
    if filled:
        other.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    return EncoderDecoderCache(cache, other)


def _shorter(cache: DynamicCache) -> DynamicCache:
    cache.layers.pop()
    return cache


Change = Callable[[Any, dict[str, Any]], dict[str, Any]]

CASES: dict[str, tuple[str | None, Change]] = {
    "a fresh cache": ("", lambda _, given: given),
    "a cache without layers": ("", lambda _, given: given | {PAST: DynamicCache()}),
    "a pair of caches": ("", lambda _, given: given | {PAST: _crossed(given[PAST], filled=False)}),
    "labels": (None, lambda _, given: given | {"labels": given["input_ids"]}),
    "a filled cross attention": (
        None,
        lambda _, given: given | {PAST: _crossed(given[PAST], filled=True)},
    ),
    "no cache is used": (None, lambda _, given: given | {"use_cache": False}),
    "all logits": (None, lambda _, given: given | {"logits_to_keep": 0}),
    "chosen logits": (None, lambda _, given: given | {"logits_to_keep": torch.tensor([1])}),
    "logits unsaid": (None, lambda _, given: {k: v for k, v in given.items() if "logits" not in k}),
    "no cache": ("it has no cache", lambda _, given: given | {PAST: None}),
    "a static cache": (
        "is a StaticCache",
        lambda model, given: given | {PAST: StaticCache(model.config, max_cache_len=64)},
    ),
    "a class of the user's": (None, lambda _, given: given | {PAST: Mine()}),
    "a class without a hash": (None, lambda _, given: given | {PAST: Compared()}),
    "an offloaded cache": (
        "is offloaded",
        lambda _, given: given | {PAST: _marked(given[PAST], offloading=True)},
    ),
    "a cache given to generate": (
        "generate was given a DynamicCache",
        lambda _, given: given | {PAST: _marked(given[PAST], _is_user_defined=True)},
    ),
    "a filled cache": (
        "was filled without FlowKV",
        lambda _, given: given | {PAST: _filled(given[PAST])},
    ),
    "a cache of another model": (
        "has other layers than the model",
        lambda _, given: given | {PAST: _shorter(given[PAST])},
    ),
    "a cache that left its pages": (
        None,
        lambda _, given: given | {PAST: _marked(given[PAST], left_pages=True)},
    ),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return models.causal("llama")


def decide(model: Any, change: Change, modes: Any = None) -> str | None:
    """Decide, and see that nothing changes and nothing is said."""
    with attached(model) as kv:
        door, own = door_of(model), DynamicCache(config=model.config)
        given = {"input_ids": models.prompt(5), PAST: own, "logits_to_keep": 1}
        given, before = change(model, given), kv.stats()
        whole = given[PAST]
        cache = whole.self_attention_cache if type(whole) is EncoderDecoderCache else whole
        with torch.no_grad(), modes or nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("error")
            found: str | None = door.decide(model, cache, given)
            assert found == door.decide(model, cache, given)
        assert not len(door.passes)
        assert kv.stats() == before
        return found


@pytest.mark.parametrize("name", CASES)
def test_of_the_table(model: Any, name: str) -> None:
    wanted, change = CASES[name]
    found = decide(model, change)
    if not wanted:
        assert found == wanted
    else:
        assert found is not None
        assert wanted in found


def test_of_gradients(model: Any) -> None:
    found = decide(model, lambda _, given: given, torch.enable_grad())
    assert found is not None
    assert found.startswith("gradients are wanted")


def test_of_autocast(model: Any) -> None:
    modes = torch.autocast("cpu", dtype=torch.bfloat16)
    assert decide(model, lambda _, given: given, modes) == "it runs under autocast"


def test_of_training(model: Any) -> None:
    def train(model: Any, given: dict[str, Any]) -> dict[str, Any]:
        model.train()
        return given

    try:
        assert decide(model, train) is None
    finally:
        model.eval()


def test_of_a_cache_that_was_warned_of(model: Any) -> None:
    with attached(model), torch.no_grad():
        door, cache = door_of(model), DynamicCache(config=model.config)
        given = {"input_ids": models.prompt(5), PAST: cache, "logits_to_keep": 1}
        assert door.decide(model, cache, given) == ""
        door.passes.add(cache)
        assert door.decide(model, cache, given) is None
