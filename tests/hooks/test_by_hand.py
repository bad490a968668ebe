"""Loops of one's own that pass positions, masks, embeddings and caches by hand, right and wrong.

Each trial runs the same random forwards over a cache of the model alone and over one of ours, and
compares their logits. All trials share one store, so that a page which an odd call left under the
name of its tokens would be found by a later one.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from . import models
from .compare import attached, reused
from .test_long_rope import build

thorough = pytest.mark.thorough
TRIALS = 50
Make = Callable[[random.Random, int, int, int], Any]
"""Makes an argument for rows B, new columns T and columns before them; None leaves it out."""


def _flat(past: int, new: int) -> torch.Tensor:
    return torch.arange(past, past + new)[None]


def _seen(rng: random.Random, rows: int, new: int, past: int) -> torch.Tensor:
    """A mask `[B, 1, T, S]` that hides some columns, or shows later ones, or is causal."""
    total = past + new
    query, key = _flat(past, new)[0][:, None], torch.arange(total)[None]
    seen = key <= query
    kind = rng.choice(["causal", "holes", "ahead"])
    if kind == "holes":
        seen = seen & ((key % 7 != 3) | (key == query))
    elif kind == "ahead":
        seen = seen | (key < 10)
    return seen[None, None].expand(rows, 1, new, total)


def _hidden(rng: random.Random, rows: int, new: int, past: int) -> torch.Tensor:
    """A mask `[B, S]` that hides some columns, which need not be the first."""
    mask = torch.ones(rows, past + new, dtype=torch.long)
    first = rng.randrange(past + new)
    mask[0, first : first + rng.choice([1, 3])] = 0
    mask[0, -1] = 1
    return mask


def _moved(rng: random.Random, rows: int, new: int, past: int) -> torch.Tensor:
    found = _flat(past, new).clone()
    found[0, rng.randrange(new)] += 3
    return found


def _additive(rng: random.Random, rows: int, new: int, past: int) -> torch.Tensor:
    seen = _seen(rng, rows, new, past)
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


POSITIONS: list[Make] = [
    lambda rng, rows, new, past: None,
    lambda rng, rows, new, past: _flat(past, new).expand(rows, new),
    lambda rng, rows, new, past: _flat(past, new).int(),
    lambda rng, rows, new, past: _flat(past, new) + rng.choice([1, 5, 40]),
    lambda rng, rows, new, past: _flat(past, new).flip(1),
    lambda rng, rows, new, past: torch.zeros(1, new, dtype=torch.long),
    lambda rng, rows, new, past: _flat(0, new),
    _moved,
]
MASKS: list[Make] = [
    lambda rng, rows, new, past: None,
    lambda rng, rows, new, past: torch.ones(rows, past + new, dtype=torch.long),
    lambda rng, rows, new, past: torch.ones(rows, past + new, dtype=torch.bool),
    *(lambda rng, rows, new, past: torch.ones(rows, new, dtype=torch.long), _hidden, _seen),
    _additive,
]
USUAL = 0.75
"""Share of arguments that are as `generate` passes them: the first three of each list."""


def chosen(rng: random.Random, makes: list[Make]) -> Make:
    return rng.choice(makes[:3] if rng.random() < USUAL else makes)


def arguments(rng: random.Random, ids: torch.Tensor, past: int) -> dict[str, Any]:
    (rows, new), found = ids.shape, dict[str, Any]()
    found["position_ids"] = chosen(rng, POSITIONS)(rng, rows, new, past)
    found["attention_mask"] = chosen(rng, MASKS)(rng, rows, new, past)
    if rng.random() < 0.08:
        found["cache_position"] = torch.arange(past, past + new) + rng.choice([0, 0, 2])
    given = rng.choices(["ids", "embeddings", "both"], [20, 3, 1])[0]
    if given != "embeddings":
        found["input_ids"] = ids
    if given != "ids":
        found["inputs_embeds"] = ids
    found["logits_to_keep"] = rng.choices([1, min(5, new), 0], [6, 2, 1])[0]
    return {name: value for name, value in found.items() if value is not None}


def run(model: Any, cache: Any, given: dict[str, Any]) -> torch.Tensor | Exception:
    given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    if "inputs_embeds" in given:
        given["inputs_embeds"] = model.get_input_embeddings()(given["inputs_embeds"])
    try:
        return model(**given, past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return]
    except Exception as error:  # what the model refuses
        return error


def begun(rng: random.Random) -> torch.Tensor:
    """A prompt that shares its beginning with others, or two of them."""
    rows = []
    width = rng.choice([20, 33, 48, 60, 62, 63, 64, 65, 66, 70, 100])
    for _ in range(rng.choice([1, 1, 1, 2])):
        ids = models.prompt(100, seed=rng.randrange(2))[:, :width].clone()
        if rng.random() < 0.3:
            ids[:, rng.randrange(width) :] = 7
        rows.append(ids)
    return torch.cat(rows)


def trial(rng: random.Random, model: Any, plain: Any) -> None:
    ids, past = begun(rng), 0
    ours, theirs = DynamicCache(config=model.config), DynamicCache(config=plain.config)
    for step in range(rng.choice([1, 1, 2, 3, 5])):
        if step:
            new = rng.choice([1, 1, 1, 3, 17, 20])
            ids = models.prompt(new * len(ids), seed=rng.randrange(3)).view(len(ids), new)
        given = arguments(rng, ids, past)
        got, want = run(model, ours, given), run(plain, theirs, given)
        if isinstance(want, Exception):
            return  # a failed forward leaves a cache in any state
        note = step, past, {k: getattr(v, "shape", v) for k, v in given.items()}
        assert isinstance(got, torch.Tensor), (note, got)
        scale = want.abs().max().clamp_min(1.0)
        torch.testing.assert_close(got / scale, want / scale, rtol=0, atol=5e-4, msg=str(note))
        assert ours.get_seq_length() == theirs.get_seq_length(), note
        past += ids.shape[1]


SUBJECTS: dict[str, Callable[[], Any]] = dict(
    **{name: partial(build, name) for name in ("longrope", "dynamic", "phi3")},
    **{name: partial(models.causal, name) for name in ("llama", "gemma3", "deepseek_v3")},
    **{name: partial(models.causal, name) for name in ("lfm2", "bloom", "falcon", "falcon_h1")},
)
FAST = ("llama", "longrope")


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else thorough) for name in SUBJECTS]
)
def test_forwards_by_hand(name: str, tmp_path: Path) -> None:
    for life in range(2):
        model, plain = SUBJECTS[name](), SUBJECTS[name]()  # frequencies may depend on what was
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FlowKV")
            with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
                for number in range(TRIALS):
                    trial(random.Random(f"{name} {life} {number}"), model, plain)
                assert reused(kv) > 100
