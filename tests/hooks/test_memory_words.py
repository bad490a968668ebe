"""Looks at a model by memory words: never "the same" where a comparison of the objects differs."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import Identity, Walk
from tests.inside import fingerprint_of_weights as words

from . import models
from .compare import assert_same, attached, generate, reused

Change = Callable[[Any], object]


def mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


def other_dict(model: Any) -> None:
    """Give a module another `__dict__`, in which one layer is another."""
    held = dict(vars(mlp(model)))
    held["_modules"] = held["_modules"] | {"act_fn": torch.nn.Tanh()}
    vars(mlp(model))  # the former one stays as it was
    mlp(model).__dict__ = held


def other_function(model: Any) -> None:
    """Hang a function on a module that replaces its forward."""
    layer = mlp(model)
    layer.forward = lambda given: layer.down_proj(layer.up_proj(given))


def hooked(model: Any) -> None:
    """Hang a hook on a module past its method."""
    mlp(model)._forward_hooks[1 << 40] = lambda module, given, found: found * 2


def renamed(model: Any) -> None:
    """Set an attribute by the base of all classes, past the module's method."""
    object.__setattr__(mlp(model), "act_fn", torch.tanh)


CHANGES: dict[str, Change] = {
    "a dict": other_dict,
    "a forward": other_function,
    "a hook": hooked,
    "an attribute": renamed,
    "a child": lambda model: mlp(model)._modules.update(act_fn=torch.nn.Tanh()),
    "a weight": lambda model: mlp(model)._parameters.update(unused=None),
    "the mode": lambda model: mlp(model).train(),
    "the order": lambda model: model.model.layers[0]._modules.update(
        mlp=model.model.layers[0]._modules.pop("mlp")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("supported", [True, False])
def test_a_change_is_seen(change: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With words and without: in an interpreter that has none, objects are compared."""
    monkeypatch.setattr(words, "SUPPORTED", words.SUPPORTED and supported)
    model = models.causal("llama")
    identity = Identity(model)
    assert all(identity.same(model) for _ in range(3))
    CHANGES[change](model)
    assert not identity.same(model) and not identity.same(model)
    identity.read(model)
    assert identity.same(model)


def test_another_dict_of_a_module_is_another_model() -> None:
    """`module.__dict__ = other` leaves the former dict as it was: the module has it no more."""
    model, ids = models.causal("llama"), models.prompt(64)
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    with attached(model) as kv:
        generate(model, 4, **given)
        other_dict(model)
        found = generate(model, 4, **given)
        assert reused(kv) == 0
    changed = models.causal("llama")
    other_dict(changed)
    assert_same(found, generate(changed, 4, **given))


def test_this_interpreter_is_one_that_counts_changes() -> None:
    """Without words, a look at a model takes several times as long: it should be no accident."""
    assert (words.PYTHONS[0] <= words.PYTHON <= words.PYTHONS[1]) == words.SUPPORTED


def test_a_model_has_words_for_nearly_all_that_is_watched() -> None:
    model = models.causal("llama")
    identity = Identity(model)
    apart, covered = (len(known) for *_, known in identity._walk._columns)
    assert not words.SUPPORTED or covered > 20 * apart


@pytest.mark.skipif(not words.SUPPORTED, reason="Python counts no changes of dicts from 3.13 on")
def test_what_changes_during_a_comparison_is_seen_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.causal("llama")
    walk = Identity(model)._walk
    compare = type(walk)._compare

    def compared(walk: Any, *, worded: bool) -> bool:
        found = compare(walk, worded=worded)
        if worded:
            renamed(model)  # by another thread, behind the comparison
        return found

    assert walk.same()
    mlp(model).another = None  # which no forward reads: words differ
    del mlp(model).another
    with monkeypatch.context() as patch:
        patch.setattr(type(walk), "_compare", compared)
        assert walk.same()
    assert not walk.same()


def test_a_comparison_that_fails_is_made_again() -> None:
    model = models.causal("llama")
    walk, usual = Identity(model)._walk, mlp(model).act_fn
    assert walk.same()
    renamed(model)
    assert not walk.same() and not walk.same()
    del mlp(model).act_fn
    assert not walk.same()
    mlp(model).act_fn = usual
    assert walk.same() and walk.same()


class Scaled(torch.nn.Module):
    """A layer whose factor lies where a case puts it."""

    kept: ClassVar[dict[str, float] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.held, self.nested = {"factor": 0.5}, ({"factor": 0.5},)
        self.partial = functools.partial(scaled, factor=0.5)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        held = self.held if self.kept is None else self.kept
        return given * held["factor"] * self.nested[0]["factor"] * self.partial(1.0) * self.add(1)

    def add(self, number: int, *, factor: float = 0.5) -> float:
        return number * factor


class Keeps(Scaled):
    kept: ClassVar = {"factor": 0.5}


def scaled(number: float, factor: float = 1.0) -> float:
    return number * factor


def enclosed(factor: float) -> tuple[Callable[..., Any], Callable[[Any], None]]:
    def forward(self: Any, given: torch.Tensor) -> torch.Tensor:
        return given * factor

    def put(value: Any) -> None:
        nonlocal factor
        factor = value

    return forward, put


def an_attribute(layer: Any, step: int) -> None:
    layer.held = {"factor": 0.5} if step == 0 else layer.held
    layer.held["factor"] = 0.5 if step == 0 else 0.25


def in_a_tuple(layer: Any, step: int) -> None:
    layer.nested = ({"factor": 0.5},) if step == 0 else layer.nested
    layer.nested[0]["factor"] = 0.5 if step == 0 else 0.25


def of_a_class(layer: Any, step: int) -> None:
    Keeps.kept = {"factor": 0.5} if step == 0 else Keeps.kept
    Keeps.kept["factor"] = 0.5 if step == 0 else 0.25


def keyword_defaults(layer: Any, step: int) -> None:
    add: Any = Scaled.add
    add.__kwdefaults__ = {"factor": 0.5} if step == 0 else add.__kwdefaults__
    add.__kwdefaults__["factor"] = 0.5 if step == 0 else 0.25


def its_dict(layer: Any, step: int) -> None:
    if step == 0:
        layer.__dict__ = dict(layer.__dict__)
    else:
        layer.held = {"factor": 0.25}


def a_cell(layer: Any, step: int) -> None:
    """Another number at the address of an equal one, which nothing keeps alive."""
    if step == 0:
        type(layer).put(float("0.5"))
    else:
        type(layer).put(None)
        type(layer).put(float("0.25"))


def its_defaults(layer: Any, step: int) -> None:
    forward: Any = type(layer).forward
    if step == 0:
        forward.__defaults__ = tuple([0.5, 1])
    else:
        forward.__defaults__ = None
        forward.__defaults__ = tuple([0.25, 1])


@pytest.mark.parametrize(
    "change",
    [an_attribute, in_a_tuple, of_a_class, keyword_defaults, its_dict, a_cell, its_defaults],
    ids=lambda change: change.__name__,
)
def test_what_is_equal_only_is_compared_again(change: Any) -> None:
    """An equal object in the place of another may change, or go, without a change of that place."""
    kind: Any = Keeps if change is of_a_class else Scaled
    if change is a_cell:
        forward, put = enclosed(float("0.5"))
        kind = type("Enclosed", (torch.nn.Module,), {"forward": forward, "put": staticmethod(put)})
    elif change is its_defaults:

        def by_default(self: Any, given: torch.Tensor, factor: float = 0.5, n: int = 1) -> Any:
            return given * factor * n

        kind = type("Defaulted", (torch.nn.Module,), {"forward": by_default})
    model = torch.nn.Sequential(kind())
    identity, given = Identity(model), torch.ones(1)
    before = model(given)
    assert identity.same(model) and identity.same(model)
    try:
        change(model[0], 0)
        assert torch.equal(model(given), before)
        identity.same(model)
        change(model[0], 1)
        assert not torch.equal(model(given), before) and not identity.same(model)
    finally:
        Keeps.kept, Scaled.add.__kwdefaults__ = {"factor": 0.5}, {"factor": 0.5}  # type: ignore


def test_a_pointer_that_comes_back_stands_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are read while a cell holds another number, and compared while it holds its own."""
    forward, put = enclosed(own := float("0.5"))
    kind: Any = type("Enclosed", (torch.nn.Module,), {"forward": forward})
    model = torch.nn.Sequential(kind())
    walk, compare, other = Identity(model)._walk, Walk._compare, float("0.25")

    def compared(walk: Any, *, worded: bool) -> Any:
        put(own)
        found = compare(walk, worded=worded)
        put(other if worded else own)
        return found

    put(other)
    with monkeypatch.context() as patch:
        patch.setattr(Walk, "_compare", compared)
        walk.same()
    put(other)
    assert not walk.same()


def test_a_mapping_that_fills_during_a_walk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.causal("llama")
    environment = Walk._environment

    def hung(walk: Any, model: Any) -> None:
        environment(walk, model)
        hooked(model)  # by another thread

    with monkeypatch.context() as patch:
        patch.setattr(Walk, "_environment", hung)
        identity = Identity(model)
    assert not identity.same(model)


class Quarter(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 0.25


class Half(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 0.5


def test_the_bases_of_a_class_are_watched() -> None:
    kind: Any = type("Based", (Half,), {})
    model = torch.nn.Sequential(kind())
    identity = Identity(model)
    assert identity.same(model) and identity.same(model)
    kind.__bases__ = (Quarter,)
    assert not identity.same(model)


def test_the_parts_of_a_partial_are_watched() -> None:
    model = torch.nn.Sequential(Scaled())
    identity = Identity(model)
    assert identity.same(model) and identity.same(model)
    model[0].partial.__setstate__((scaled, (), {"factor": 0.25}, {}))
    assert not identity.same(model)


MUTATIONS: list[Callable[[dict[Any, Any], int], object]] = [
    *(lambda held, n: held.update({n % 7: n}), lambda held, n: held.setdefault(n % 7, [n])),
    *(lambda held, n: held.pop(n % 7, None), lambda held, n: held.popitem() if held else None),
    *(lambda held, n: held.__setitem__(n % 5, str(n)), lambda held, n: held.__ior__({n % 3: n})),
    *(lambda held, n: held.clear() if n % 11 == 0 else None, lambda held, n: held.get(n)),
    lambda held, n: held.update(dict(held)),
    lambda held, n: [held.__setitem__(k, n + k) for k in range(n % 40)],
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([dict, OrderedDict]),
    st.lists(st.tuples(st.integers(0, len(MUTATIONS) - 1), st.integers(0, 1000)), max_size=20),
)
def test_words_that_stay_mean_values_that_stay(kind: Any, story: list[tuple[int, int]]) -> None:
    held = kind()
    places = words.places_of(words.versions_of(held))
    for number, n in story:
        before, count = [*held.items()], words.TAKE(places)
        MUTATIONS[number](held, n)
        if words.SUPPORTED and (words.TAKE(places) == count).all():
            now = [*held.items()]
            assert len(now) == len(before)
            assert all(a is c and b is d for (a, b), (c, d) in zip(before, now, strict=True))
