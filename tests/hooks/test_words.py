"""Words of memory that say whether a dict, a function, a cell or an object's class was changed."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CellType, MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import flowkv
from tests.fixture_model import load_tiny
from tests.inside import Words, computation

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="dicts have no numbers from Python 3.13 on"
)


def sees(thing: Any, change: Callable[[], object], *names: str) -> bool:
    """Whether a change is seen, and nothing is before it."""
    words = Words(np.array(Words.of(thing, *names), np.int64))
    assert words.same() and words.same()
    change()
    return not words.same()


class Held:
    """An object with attributes."""

    a: Any = None


DICTS: dict[str, Callable[[dict[Any, Any]], object]] = {
    "another value": lambda d: d.__setitem__("a", object()),
    "the like": lambda d: d.__setitem__("f", float("1.5")),
    "one more": lambda d: d.__setitem__("z", 1),
    "one less": lambda d: d.__delitem__("a"),
    "update": lambda d: d.update(a=7),
    "merged": lambda d: d.__ior__({"y": 1}),
    "default": lambda d: d.setdefault("x", 1),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "there and back": lambda d: (d.__setitem__("a", 7), d.__setitem__("a", 1)),
    "by the base": lambda d: dict.__setitem__(d, "a", 7),
}


@pytest.mark.parametrize("change", DICTS.values(), ids=DICTS)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_every_change_of_a_dict_is_seen(
    kind: type[dict[Any, Any]], change: Callable[[dict[Any, Any]], object]
) -> None:
    held = kind(a=1, b=2, f=float("1.5"))
    assert sees(held, lambda: change(held))
    held = kind(a=1, b=2, f=float("1.5"))
    assert sees(held.keys() if kind is dict else MappingProxyType(held), lambda: change(held))


def test_attributes_of_objects_and_classes_are_seen() -> None:
    thing = Held()
    thing.a = 1
    for i in range(100):  # until the interpreter has specialised the store
        assert sees(vars(thing), lambda i=i: setattr(thing, "a", [i]))  # type: ignore[misc]
        assert sees(vars(Held), lambda i=i: setattr(Held, "a", [i]))  # type: ignore[misc]
    assert sees(vars(thing), lambda: delattr(thing, "a"))
    assert sees(globals(), lambda: globals().__setitem__("made", 1))


def test_functions_cells_and_classes_are_seen() -> None:
    value = 1

    def function(x: Any = None, *, y: Any = None) -> Any:
        return x, y, value

    names = "__code__", "__defaults__", "__kwdefaults__"
    parts: list[Any] = [(lambda x=None, *, y=None: (x, y, value)).__code__, (2,), {"y": 2}]
    for name, part in zip(names, parts, strict=True):
        assert sees(function, lambda n=name, p=part: setattr(function, n, p), *names)  # type: ignore[misc]
    cell = CellType(1)
    assert sees(cell, lambda: setattr(cell, "cell_contents", 2), "cell_contents")
    assert sees(cell, lambda: delattr(cell, "cell_contents"), "cell_contents")
    thing = Held()
    assert sees(thing, lambda: setattr(thing, "__class__", type("Other", (Held,), {})), "__class__")


def test_what_has_no_word_is_left_to_be_read() -> None:
    assert not Words.of([]) and not Words.of(object()) and not Words.of(None)
    assert not Words.of([], "__code__") and not Words.of(Held(), "a")


def test_a_model_is_read_whole_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = load_tiny().eval()
    with flowkv.attach(model, gpu="32MiB"):
        made: list[Any] = []

        class Counted(Words):
            def __init__(self, addresses: Any) -> None:
                made.append(addresses)
                super().__init__(addresses)

        monkeypatch.setattr(computation, "Words", Counted)
        for start in range(1, 5):
            model.generate(prompt_of(start), max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert len(made) <= 1 and all(len(addresses) > 500 for addresses in made)
        made.clear()
        model.model.layers[0].mlp.note = "one more attribute"
        model.generate(prompt_of(9), max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert made, "what a word tells of is looked at"


def prompt_of(start: int) -> Any:
    """Ids of 100 tokens that begin with a number."""
    return torch.tensor([[start, *range(10, 109)]])
