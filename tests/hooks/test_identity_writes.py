"""Names and writes: a forward's own are in no name, others' to the same place are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers

from tests.hooks import models
from tests.hooks.compare import assert_same, attached, foreign, generate, reused
from tests.hooks.tabled import WRITES, as_library
from tests.hooks.test_identity import on_disk
from tests.inside import identity

pytestmark = [
    pytest.mark.filterwarnings("ignore:FlowKV shares nothing"),
    pytest.mark.usefixtures("all_is_loaded"),
]
Model = torch.nn.Module
Make = Callable[[], tuple[Model, Any]]
Edit = Callable[[Model, Any], None]


def mlp(model: Model) -> Model:
    return model.model.layers[1].mlp


def wrapped(kind: str, *given: Any) -> Callable[[], tuple[Model, Any]]:
    """Makes a model with a module of a library around an MLP."""

    def make() -> tuple[Model, Any]:
        model = models.short()
        model.model.layers[1].mlp = getattr(as_library(), kind)(mlp(model), *given).eval()
        return model, None

    return make


def in_process(make: Make, edits: list[Edit]) -> None:
    """After each edit the served model answers as a plain twin with the same edits; and again."""
    prompt, (model, held) = models.prompt(60), make()
    with attached(model) as kv, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for done in range(len(edits) + 1):
            if done:
                edits[done - 1](model, held)
            twin, beside = make()
            for edit in edits[:done]:
                edit(twin, beside)
            for _ in range(2):
                with torch.no_grad():
                    theirs = generate(twin, 2, input_ids=prompt)
                assert_same(generate(model, 2, input_ids=prompt), theirs)
        assert kv is not None


def over_a_store(make: Make, edits: list[Edit], place: str, *, served: bool = True) -> None:
    """A model that was edited before a restart finds nothing of others, and what is its own."""
    prompt = models.prompt(60)
    for again in (False, True):
        for done in range(len(edits) + 1):
            model, held = make()
            twin, beside = make()
            for edit in edits[:done]:
                edit(model, held)
                edit(twin, beside)
            with attached(model, disk=place) as kv, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ours = generate(model, 2, input_ids=prompt)
                assert_same(ours, generate(twin, 2, input_ids=prompt))
                assert foreign(kv) or not served or reused(kv) == (48 if again else 0)


def stays(make: Callable[[], Model], place: str) -> None:
    """Reuse is complete in the process, and after a restart, if the model was used before, too."""
    prompt = models.prompt(60)
    for again in (False, True):
        model = make()
        if again:
            generate(model, 3, input_ids=models.prompt(50, 77))
        with attached(model, disk=place) as kv:
            for call in range(3):
                before = reused(kv)
                generate(model, 3, input_ids=prompt)
                assert reused(kv) - before == (48 if again or call else 0), (again, call)


# ---- counters


def writing(model: Any, kind: str) -> None:
    model.model.layers[1].mlp = as_library().Writing(mlp(model), model.config, kind).eval()


@pytest.mark.parametrize("late", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("kind", WRITES)
def test_a_forward_that_counts_makes_its_model_foreign(kind: str, late: bool) -> None:
    """Its answers stay those of a plain model, and nothing that it computed is shared.

    What is equal after each forward has one name, and is shared.
    """
    model, plain, prompt = models.short(), models.short(), models.prompt(60)
    writing(plain, kind)
    if not late:
        writing(model, kind)
    with attached(model) as kv:
        if late:
            generate(model, 3, input_ids=prompt)
            writing(model, kind)
        for _ in range(3):
            theirs = generate(plain, 3, input_ids=prompt)
            assert_same(generate(model, 3, input_ids=prompt), theirs)
        named = kind == "an_equal_list" and not late  # by its content
        assert bool(foreign(kv)) is not (named or kind == "an_uncounted_buffer")  # read each time
        before = reused(kv)
        generate(model, 3, input_ids=prompt)
        assert reused(kv) == before + 48 * named


def test_a_forward_that_writes_is_served_by_a_revision(tmp_path) -> None:
    """What it writes is in no name then."""
    model, prompt, place = models.short(), models.prompt(60), f"{tmp_path}/kv:64MiB"
    writing(model, "a_number")
    with attached(model, disk=place) as kv:
        for _ in range(2):
            generate(model, 6, input_ids=prompt)
        assert "changed during a forward" in foreign(kv)
        kv.flush()
        assert reused(kv) == on_disk(kv) == 0
    with attached(model, disk=place, revision="counts") as kv:
        for _ in range(3):
            generate(model, 6, input_ids=prompt)
        assert reused(kv) >= 48
        generate(model, 6, input_ids=models.prompt(200, 7))
        for _ in range(2):
            before = reused(kv)
            generate(model, 6, input_ids=prompt)
        assert reused(kv) == before + 48


# ---- what somebody else writes to the same places


def sets_attribute(value: Any) -> Edit:
    return lambda model, held: setattr(mlp(model), "scale", value)


LAZY: list[tuple[str, Make, list[Edit]]] = [
    ("number", wrapped("Lazy", 1.0), [sets_attribute(2.0), sets_attribute(0.5)]),
    (
        "tensor",
        wrapped("Lazy", torch.ones(1)),
        [sets_attribute(torch.full((1,), 2.0)), sets_attribute(torch.full((1,), 0.5))],
    ),
]
each_lazy = pytest.mark.parametrize(
    ("make", "edits"), [c[1:] for c in LAZY], ids=[c[0] for c in LAZY]
)


@each_lazy
def test_what_a_forward_made_first_is_set_by_hand(make: Make, edits: list[Edit]) -> None:
    in_process(make, edits)


@each_lazy
def test_what_a_forward_makes_first_was_set_before(make, edits, tmp_path) -> None:
    over_a_store(make, edits, f"{tmp_path}/kv:64MiB")


def steer(factor: float) -> Edit:
    def edit(model: Model, held: Any) -> None:
        vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
        mlp(model).pending = factor * vector if factor else None

    return edit


@pytest.mark.parametrize("length", [60, 64])
def test_what_is_set_for_one_call_and_used_up(length: int) -> None:
    """Also by a longer prompt, of which the tokens of such a call are a part."""
    make, edits = wrapped("Once"), [steer(factor) for factor in (1.0, 0.0, 2.0, 1.0)]
    prompt, (model, held), (twin, beside) = models.prompt(length), make(), make()
    with attached(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for edit in edits:
            edit(model, held)
            edit(twin, beside)
            ours, theirs = (generate(m, 24, input_ids=prompt) for m in (model, twin))
            assert_same(ours, theirs)
            edit(model, held)
            edit(twin, beside)
            longer = torch.cat([ours.sequences, models.prompt(8, 3)], 1)
            ours, theirs = (generate(m, 4, input_ids=longer) for m in (model, twin))
            assert_same(ours, theirs)


# ---- encodings that depend on length

LENGTHS = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}


def by_length(kind: str) -> Make:
    def make() -> tuple[Model, Any]:
        rope = {"rope_type": kind, "rope_theta": 10000.0, **LENGTHS[kind]}
        config = transformers.LlamaConfig(
            **models.GROUPED | {"rope_parameters": rope, "max_position_embeddings": 1024}
        )
        torch.manual_seed(0)
        return models.sharpen(transformers.LlamaForCausalLM(config)), None

    return make


def frequencies_in_place(model: Model, held: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(3)


def both_frequencies(model: Model, held: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.original_inv_freq = rotary.original_inv_freq * 3
    rotary.inv_freq = rotary.inv_freq * 3


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("edit", [frequencies_in_place, both_frequencies])
def test_frequencies_of_an_encoding_by_length(kind: str, edit: Edit, tmp_path) -> None:
    served, _ = by_length(kind)()
    generate(served, 2, input_ids=models.prompt(20))
    rotary = served.model.rotary_emb
    if edit is frequencies_in_place and rotary.inv_freq is rotary.original_inv_freq:
        pytest.skip("in this release they are one tensor, once a forward has run")
    in_process(by_length(kind), [edit])
    if kind == "dynamic" or edit is both_frequencies:  # longrope takes the first at once back
        left = kind == "dynamic" and edit is frequencies_in_place  # to the model's own cache
        over_a_store(by_length(kind), [edit], f"{tmp_path}/kv:64MiB", served=not left)
    stays(lambda: by_length(kind)()[0], f"{tmp_path}/other:64MiB")


class Renewed(Mapping):
    """Gives new lists each time."""

    def __init__(self) -> None:
        self.held = {"a": [1, 2]}

    def __getitem__(self, key: str) -> list[int]:
        return [*self.held[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_a_mapping_of_ones_own_is_foreign() -> None:
    model = models.short()
    model.kept = kept = Renewed()
    assert kept["a"] == [1, 2] and identity.Identity(model).foreign
