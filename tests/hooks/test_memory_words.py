"""Looks at a model by memory words: never "the same" where a comparison of the objects differs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import Identity
from tests.inside import memory_words as words

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
    assert (words.VERSIONS[0] <= words.VERSION <= words.VERSIONS[1]) == words.SUPPORTED


def test_a_model_has_words_for_nearly_all_that_is_watched() -> None:
    model = models.causal("llama")
    identity = Identity(model)
    apart, covered = (len(known) for *_, known in identity._walk._columns)
    assert not words.SUPPORTED or covered > 20 * apart


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


MUTATIONS: list[Callable[[dict[Any, Any], int], object]] = [
    lambda held, n: held.update({n % 7: n}),
    lambda held, n: held.setdefault(n % 7, [n]),
    lambda held, n: held.pop(n % 7, None),
    lambda held, n: held.popitem() if held else None,
    lambda held, n: held.__setitem__(n % 5, str(n)),
    lambda held, n: held.__ior__({n % 3: n}),
    lambda held, n: held.clear() if n % 11 == 0 else None,
    lambda held, n: held.get(n),
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
    places = words.places_of(words.words_of(held))
    for number, n in story:
        before, count = [*held.items()], words.MEMORY.take(places)
        MUTATIONS[number](held, n)
        if words.SUPPORTED and (words.MEMORY.take(places) == count).all():
            now = [*held.items()]
            assert len(now) == len(before)
            assert all(a is c and b is d for (a, b), (c, d) in zip(before, now, strict=True))
