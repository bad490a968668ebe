"""Hybrid models restore: a saved state at once, the pages below it behind the forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.inside import door_of

from . import models
from .compare import assert_same, generate, reused
from .test_restore import restoring, some, stored


class Flag:
    """A file that is there or not: unlike an event, it is in no name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stop(self) -> None:
        if self.path.exists():
            self.path.unlink()
            raise ZeroDivisionError("asked for")


@contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Lets calls of the model pass by its cache."""
    door = door_of(model)
    assert door is not None
    with door.aside():
        yield


def longer_prompt(model: Any, *seeds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prompts of 70 tokens, and what goes on behind their answers."""
    inputs = {"input_ids": torch.cat([models.prompt(70, seed=seed) for seed in seeds])}
    more = models.prompt(40, seed=9).repeat(len(seeds), 1)
    answers = generate(model, 4, **inputs).sequences
    return inputs, {"input_ids": torch.cat([answers, more], 1)}


@pytest.mark.parametrize("lose", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seeds", [(1,), (1, 2), (1, 1)])
@pytest.mark.parametrize("name", some(models.HYBRID[:1], models.HYBRID))
def test_pages_come_behind_the_forward(name: str, seeds: tuple[int, ...], lose: float) -> None:
    model = models.causal(name)
    inputs, longer = longer_prompt(model, *seeds)
    theirs = generate(model, 4, **longer)
    with restoring(model, stored(model, inputs), lose=lose) as (kv, tier, seen):
        assert_same(generate(model, 4, **longer), theirs)
        # Of a prompt there are two states: behind its last whole page, and behind its answer.
        assert 1 <= len(seen.ended) <= len(set(seeds)) * (2 if lose == 1.0 else 1)
        assert seen.sum("computed_tokens") == 0
        assert bool(tier.lost) is bool(lose)
        if not lose:
            assert [ended.loaded_tokens for ended in seen.ended] == [64] * len(set(seeds))
            assert reused(kv) == 70 * len(seeds)
        # What a failed load left behind is right as well.
        again = {"input_ids": torch.cat([theirs.sequences, longer["input_ids"][:, :30]], 1)}
        with without_cache(model):
            theirs = generate(model, 4, **again)
        assert_same(generate(model, 4, **again), theirs)


@torch.no_grad()
def test_a_forward_that_fails(tmp_path: Path) -> None:
    model = models.causal(models.HYBRID[0])
    inputs, longer = longer_prompt(model, 1)
    theirs, run = model(**longer).logits[:, -1], generate(model, 4, **longer)
    armed = Flag(tmp_path / "armed")
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: armed.stop())
    with restoring(model, stored(model, inputs), every=5) as (_, _, seen):
        cache = DynamicCache(config=model.config)
        armed.path.touch()
        with pytest.raises(ZeroDivisionError):
            model(**longer, past_key_values=cache, logits_to_keep=1)
        (ended,) = seen.ended
        assert ended.tokens == 0 == cache.get_seq_length()
        again = model(**longer, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        torch.testing.assert_close(again, theirs, rtol=1e-4, atol=1e-4)
        assert_same(generate(model, 4, **longer), run)
    hook.remove()
