"""Partial failures of stores, end to end: no wrong answer, and no wrong page that is kept."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inside import Nested, RestoreJob, StateError
from tests.inside import rows_Rows as Rows

from . import models
from .compare import assert_same, generate
from .stories import MODELS, NEW, SHELVES, World, alike
from .test_restore import Slow, on, stored

PROMPTS, SEEDS = 60, range(48)
"""Prompts of a world that is told at length, and seeds of its rounds."""
TURN = 2 * int(os.environ.get("FLOWKV_TURN", "0")) % len(SEEDS)
"""Two neighbouring seeds at a time: `.ci/run` goes on to the next two when it was here before."""
LENGTHS = {  # prompts, seeds, marks
    "few": (20, SEEDS[:1], ()),
    "some": (PROMPTS, SEEDS[TURN : TURN + 2], pytest.mark.thorough),
    "many": (PROMPTS, SEEDS, pytest.mark.deep),
}
TOLD = [  # worlds of one model are neighbours, and share it; each is told briefly over one shelf
    pytest.param(model, shelf, prompts, seeds, marks=marks, id=f"{model}-{shelf}-{length}")
    for m, model in enumerate(MODELS)
    for s, shelf in enumerate(SHELVES)
    for length, (prompts, seeds, marks) in LENGTHS.items()
    if length != "few" or (m + s) % len(SHELVES) == 0
]
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(("model", "shelf", "prompts", "seeds"), TOLD)
def test_pages_that_do_not_come(
    model: str, shelf: str, prompts: int, seeds: range, tmp_path: Path
) -> None:
    world = World(model, shelf, tmp_path, prompts)
    try:
        for seed in seeds:
            print(f"seed {seed}")
            world.round(seed)
    finally:
        world.shelf.close()


def lose_what_is_left(patch: Patch, tier: Slow) -> None:
    """Have one page come, and nothing that is left to come behind the forward."""
    settle, tier.most = RestoreJob.settle, 1

    def settled(job: RestoreJob, *limit: int) -> int:
        length = settle(job, *limit)
        tier.lose, tier.most = 1.0, math.inf
        return length

    patch.setattr(RestoreJob, "settle", settled)


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("change", ["ids", "positions", "unsaid"])
def test_a_page_is_named_by_what_its_forward_was_given(change: str, monkeypatch: Patch) -> None:
    """A forward over other ids or positions than the known ones publishes nothing."""
    model, ids = models.causal("llama"), models.prompt(117)
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    golden = stored(model, given)
    inputs = Nested._inputs

    def changed(nested: Any, parts: Any, pads: Any, columns: Any, cache: Any) -> Any:
        found = inputs(nested, parts, pads, columns, cache)
        name = nested._names.ids if change == "ids" else nested._names.positions
        found[name] = found[name] + 1
        return found

    tier = Slow(dict(golden), every=3)
    with on(model, tier, prefetch="off") as kv, monkeypatch.context() as patch:
        lose_what_is_left(patch, tier)
        patch.setattr(Nested, "_inputs", changed)
        if change == "unsaid":  # no forward says what it was given
            patch.setattr(Rows, "record_ids", lambda *_: None)
        with pytest.raises(StateError):
            generate(model, NEW, **given)
        assert tier.lost and kv.flush()
    for key, (_, body) in tier.inner.frames.items():
        assert key in golden and alike(body, golden[key][1])


@pytest.mark.usefixtures("all_is_loaded")
def test_a_part_ends_with_the_known_tokens() -> None:
    """A part that ends within the last page is extended to the end of the prompt, no further."""
    model, ids = models.causal("llama"), models.prompt(117)
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    theirs = generate(model, NEW, **given)
    tier = Slow(stored(model, given), every=3)
    counts: list[tuple[int, int]] = []
    compute = Nested.compute

    def counted(nested: Any, parts: Any, awaits: Any = None) -> None:
        counts.extend((part.seq.length + part.count, part.seq.known) for part in parts)
        compute(nested, parts, awaits)

    with on(model, tier, prefetch="off"), Patch.context() as patch:
        lose_what_is_left(patch, tier)
        patch.setattr(Nested, "compute", counted)
        assert_same(generate(model, NEW, **given), theirs)
    assert counts and all(stop <= known for stop, known in counts)
