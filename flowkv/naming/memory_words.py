"""Memory words that change with objects, read all at once.

A look at a model compares thousands of values, and most of its time is the processor's waiting for
memory. CPython counts the changes of each dict in one word (its version: PEP 509), and a function,
a cell and an instance point to their code, content and class. The words of all objects are read by
one call, in which the waits overlap. A version never comes back. A pointer does, and is worth
something only while its object is kept alive: its address may be another object's afterwards.
"""

from __future__ import annotations

import functools
import gc
import operator
import struct
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CLASS, _DICT, _CHANGES, _CONTENT, _CODE = 8, -24, 24, 16, (48, 56, 64)
"""Offsets: class and `__dict__` of an instance, count of a dict's changes, content of a cell; code,
defaults and keyword defaults of a function."""
_MANAGED = 1 << 4
"""Flag of classes whose instances have their `__dict__` at that offset."""


def versions_of(thing: Any) -> list[int]:
    """Return the address of the version of a dict, or of a class given by its `__dict__`.

    Other objects, and some interpreters, have none.
    """
    if type(thing) is types.MappingProxyType:
        (thing,) = gc.get_referents(thing)
    # An OrderedDict's version does not count changes of its order.
    counts = type(thing) is dict or (type(thing) is OrderedDict and not thing)
    return [id(thing) + _CHANGES] if counts and SUPPORTED else []


def pointers_of(thing: Any, values: Sequence[Any]) -> list[tuple[int, int]]:
    """Return addresses of pointers, and what they hold while an object has some values.

    Args:
        thing: A function, a cell that is not empty, or an instance; others have none.
        values: Code, defaults and keyword defaults; content; or class and `__dict__`.
    """
    kind = type(thing)
    if not SUPPORTED:
        return []
    if kind is types.FunctionType:
        held = [0 if value is None else id(value) for value in values]
        return [*zip([id(thing) + offset for offset in _CODE], held, strict=True)]
    offsets = (_CONTENT,) if kind is types.CellType else (_CLASS, _DICT)
    if kind is not types.CellType and not kind.__flags__ & _MANAGED:
        return []
    return [(id(thing) + at, id(value)) for at, value in zip(offsets, values, strict=True)]


def places_of(addresses: Iterable[int]) -> NDArray[np.int64]:
    """Return the places for `TAKE` of words at some addresses, which are multiples of 8."""
    return (np.fromiter(addresses, np.int64) - 8) >> 3


class _Memory:
    """All memory from address 8 on."""

    def __init__(self) -> None:
        shape, data = (1 << 59,), (8, True)
        self.__array_interface__ = {"shape": shape, "data": data, "typestr": "<i8", "version": 3}


class _Thing:
    """Instance with an attribute that is set until the interpreter specialises the instruction."""

    def __init__(self) -> None:
        self.value: Any = 0

    def store(self, value: Any) -> None:
        self.value = value


class _Other(_Thing):
    """Another class of that instance."""


def _changes() -> Iterator[tuple[list[int], Callable[[], Any]]]:
    """Yield addresses, and a change that the words there have to show."""
    held: dict[Any, Any] = {"a": 1, "b": 2}
    ordered = OrderedDict[Any, Any]()
    for one, words in ((held, versions_of(held)), (ordered, versions_of(ordered))):
        yield words, functools.partial(one.__setitem__, "a", [])
        yield words, functools.partial(one.update, {"a": 3})
        yield words, functools.partial(one.setdefault, "c", 4)
        yield words, functools.partial(one.pop, "c")
        yield words, functools.partial(operator.setitem, one, "d", 5)
        yield words, functools.partial(operator.delitem, one, "d")
        yield words, functools.partial(operator.ior, one, {"e": 6})
        yield words, one.popitem
        yield words, one.clear
    thing = _Thing()
    words, others = versions_of(vars(thing)), versions_of(vars(_Thing))
    for i in range(64):
        yield words, functools.partial(thing.store, float(i))
        yield others, functools.partial(setattr, _Thing, "count", i)
    yield words, functools.partial(object.__setattr__, thing, "value", None)
    yield words, functools.partial(delattr, thing, "value")
    yield others, functools.partial(delattr, _Thing, "count")
    number = 0

    def function(one: int = 0, *, other: int = 0) -> int:
        return number + one + other

    def set_number(value: int) -> None:
        nonlocal number
        number = value

    cell: Any = set_number.__closure__ and set_number.__closure__[0]
    code = (lambda: number).__code__
    parts = (function.__code__, function.__defaults__, function.__kwdefaults__)
    changes: list[tuple[Any, Any, list[Callable[[], Any]]]] = [
        (function, parts, [functools.partial(setattr, function, "__code__", code)]),
        (thing, (_Thing, vars(thing)), [functools.partial(setattr, thing, "__class__", _Other)]),
        (cell, (number,), [functools.partial(set_number, 1000 + i) for i in range(64)]),
    ]
    changes[0][2].append(functools.partial(setattr, function, "__defaults__", (1,)))
    changes[0][2].append(functools.partial(setattr, function, "__kwdefaults__", {}))
    changes[1][2].append(functools.partial(setattr, thing, "__dict__", {}))
    changes[2][2].append(functools.partial(setattr, cell, "cell_contents", None))
    for one, values, made in changes:
        pointers = pointers_of(one, values)
        if [*TAKE(places_of(at for at, _ in pointers))] != [value for _, value in pointers]:
            raise ValueError("a pointer elsewhere")
        for change in made:
            yield [at for at, _ in pointers], change


def _proven() -> bool:
    """Return whether each kind of change is seen in this interpreter, and reading changes none."""
    for addresses, change in _changes():
        places = places_of(addresses)
        before, again = TAKE(places), TAKE(places)
        change()
        still = len(places) and np.array_equal(before, again)
        if not still or np.array_equal(before, TAKE(places)):
            return False
    return True


TAKE = np.asarray(_Memory()).take
"""Read words at places of objects that the caller keeps alive. Other uses of the array crash."""
PYTHON, PYTHONS = sys.version_info[:2], ((3, 11), (3, 12))
"""Version of Python, and the first and the last that counts all changes of dicts."""
SUPPORTED = (
    sys.implementation.name == "cpython"
    and PYTHONS[0] <= PYTHON <= PYTHONS[1]
    and struct.calcsize("P") == 8
    and sys.byteorder == "little"
    and not sysconfig.get_config_var("Py_TRACE_REFS")  # which has other offsets
)
try:
    SUPPORTED = SUPPORTED and _proven()
except Exception:  # an interpreter with other objects
    SUPPORTED = False
