"""Memory words of objects that change with the objects, read all at once.

A look at a model compares thousands of values, and most of its time is the processor's waiting for
memory. CPython counts the changes of each dict in one word (PEP 509), and a function, a cell and an
instance hold their code, content and class in one word each. The words of all objects are read by
one call, in which the waits overlap: a fiftieth of the time.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CLASS, _DICT, _VERSION, _CONTENT, _CODE = 8, -24, 24, 16, (48, 56, 64)
"""Offsets: class and `__dict__` of an instance, count of a dict's changes, content of a cell; code,
defaults and keyword defaults of a function."""
_MANAGED = 1 << 4
"""Flag of classes whose instances have their `__dict__` at that offset."""


def words_of(thing: Any) -> list[int]:
    """Return addresses of words that change with a dict, a class, a cell or a function.

    The words of a class, given by its `__dict__`, change with its attributes, and those of a
    function with its code and defaults. Other objects, and some interpreters, have no such words.
    """
    if type(thing) is types.MappingProxyType:
        (thing,) = gc.get_referents(thing)
    kind, offsets = type(thing), tuple[int, ...]()
    if kind is dict or (kind is OrderedDict and not thing):  # a change of order counts for none
        offsets = (_VERSION,)
    elif kind is types.FunctionType:
        offsets = _CODE
    elif kind is types.CellType:
        offsets = (_CONTENT,)
    return [id(thing) + offset for offset in offsets] if SUPPORTED else []


def words_of_instance(thing: Any) -> list[int]:
    """Return the addresses of an instance's class and `__dict__`, where it has such words."""
    if not SUPPORTED or not type(thing).__flags__ & _MANAGED:
        return []
    return [id(thing) + _CLASS, id(thing) + _DICT]


def places_of(addresses: Iterable[int]) -> NDArray[np.int64]:
    """Return the places in `MEMORY` of words at some addresses, which are multiples of 8."""
    return (np.fromiter(addresses, np.int64) - 8) >> 3


class _Memory:
    """All memory from address 8 on."""

    def __init__(self) -> None:
        shape, data = (1 << 44,), (8, True)
        self.__array_interface__ = {"shape": shape, "data": data, "typestr": "<i8", "version": 3}


class _Thing:
    """Instance with an attribute that is set until the interpreter specialises the instruction."""

    def __init__(self) -> None:
        self.value: Any = 0

    def store(self, value: Any) -> None:
        self.value = value


def _changes() -> Iterator[tuple[list[int], Callable[[], Any]]]:
    """Yield words, and a change that they have to show."""
    held: dict[Any, Any] = {"a": 1, "b": 2}
    ordered = OrderedDict[Any, Any]()
    for one, words in ((held, words_of(held)), (ordered, words_of(ordered))):
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
    words = words_of(vars(thing))
    for i in range(64):
        yield words, functools.partial(thing.store, float(i))
    yield words, functools.partial(object.__setattr__, thing, "value", None)
    yield words, functools.partial(delattr, thing, "value")
    for i in range(64):
        yield words_of(vars(_Thing)), functools.partial(setattr, _Thing, "count", i)
    yield words_of(vars(_Thing)), functools.partial(delattr, _Thing, "count")
    words = words_of_instance(thing)
    yield words[:1], functools.partial(setattr, thing, "__class__", type("T", (_Thing,), {}))
    yield words[1:], functools.partial(setattr, thing, "__dict__", {})
    number = 0

    def function(one: int = 0, *, other: int = 0) -> int:
        return number + one + other

    def set_number(value: int) -> None:
        nonlocal number
        number = value

    words = words_of(function)
    yield words, functools.partial(setattr, function, "__code__", (lambda: number).__code__)
    yield words, functools.partial(setattr, function, "__defaults__", (1,))
    yield words, functools.partial(setattr, function, "__kwdefaults__", {})
    cells: Any = set_number.__closure__
    for i in range(64):
        yield words_of(cells[0]), functools.partial(set_number, 1000 + i)
    yield words_of(cells[0]), functools.partial(setattr, cells[0], "cell_contents", None)


def _proven() -> bool:
    """Return whether each kind of change is seen in this interpreter, and reading changes none."""
    for addresses, change in _changes():
        places = places_of(addresses)
        before, again = MEMORY.take(places), MEMORY.take(places)
        change()
        if not np.array_equal(before, again) or np.array_equal(before, MEMORY.take(places)):
            return False
    return True


MEMORY = np.asarray(_Memory())
"""All words of the process. Only `take` is of use, at places of objects that the caller keeps."""
VERSION, VERSIONS = sys.version_info[:2], ((3, 11), (3, 12))
"""Version of Python, and the first and the last that counts all changes of dicts."""
# Builds for debugging have other offsets.
SUPPORTED = (
    sys.implementation.name == "cpython"
    and VERSIONS[0] <= VERSION <= VERSIONS[1]
    and struct.calcsize("P") == 8
    and sys.byteorder == "little"
    and not any(map(sysconfig.get_config_var, ("Py_DEBUG", "Py_TRACE_REFS")))
)
SUPPORTED = SUPPORTED and _proven()
