"""Words of memory that differ once a dict, a function, a cell or an object's class was changed.

To read all that a model's dicts and functions hold takes a millisecond once a forward has used the
caches of the processor. Every dict has a number that each change replaces (PEP 509), and functions
and cells hold addresses: compiled code compares these in one pass. Interpreters without such a
number (as from Python 3.13 on, for all that is known) have no words, and all is read.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.addresses import pointer
from flowkv.core.machine_code import kept


@kept()
def _read(addresses):  # type: ignore[no-untyped-def]
    return np.array([pointer(address, address)[0] for address in addresses])


@kept()
def unchanged(addresses, known):  # type: ignore[no-untyped-def]
    """Return whether the words at some addresses, which hold memory in use, are as known."""
    for i in range(len(addresses)):  # noqa: SIM110 - numba knows no `all`
        if pointer(addresses[i], known[i])[0] != known[i]:
            return False
    return True


class Words:
    """The words of things that the caller keeps alive, as they are when this is made.

    Args:
        addresses: Of the words, see `of`; int64.
    """

    def __init__(self, addresses: NDArray[np.int64]) -> None:
        self.addresses, self.known = addresses, _read(addresses)

    def same(self) -> bool:
        """Return whether no word has changed."""
        return bool(unchanged(self.addresses, self.known))

    @staticmethod
    def of(thing: Any, *names: str) -> list[int]:
        """Return the addresses of words that say whether a thing was changed; [] for no such thing.

        Args:
            thing: A dict, a view of one, or an object.
            names: Attributes of the object that count.
        """
        if names:
            kinds = [_Model if name == "__class__" else type(thing) for name in names]
            places = [_place(k.__name__, name) for k, name in zip(kinds, names, strict=True)]
            return [] if None in places else [id(thing) + place for place in places if place]
        while type(thing) in (types.MappingProxyType, type({}.keys())):
            (thing,) = gc.get_referents(thing)
        version = _version() if isinstance(thing, dict) else None
        return [] if version is None else [id(thing) + version]


class _Model:
    a: Any = None


_CHANGES: tuple[Callable[[Any], Any], ...] = (
    *[lambda model: setattr(model, "a", object())] * 64,  # specialised, in the end
    lambda model: vars(model).update(a=object()),
    lambda model: vars(model).setdefault("z", object()),
    lambda model: delattr(model, "z"),
    lambda model: vars(model).popitem(),
)


def _example(a: Any = _CHANGES, *, b: Any = None) -> None: ...


_EXAMPLES: dict[str, Any] = {
    type(x).__name__: x for x in (_example, types.CellType(_CHANGES), _Model())
}


def _words(thing: Any) -> list[int]:
    return [*(ctypes.c_int64 * (type(thing).__basicsize__ // 8)).from_address(id(thing))]


@functools.cache
def _version() -> int | None:
    """Return where a dict's number lies: in the one word that all changes of it change."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return None
    model = _Model()
    model.a, found = 0, set(range(dict.__basicsize__ // 8))
    for change in _CHANGES:
        before = _words(vars(model))
        change(model)
        after = zip(before, _words(vars(model)), strict=True)
        found &= {i for i, (old, new) in enumerate(after) if old != new}
    return 8 * found.pop() if len(found) == 1 else None


@functools.cache
def _place(kind: str, name: str) -> int | None:
    """Return where an object of a kind refers to one of its attributes."""
    if kind not in _EXAMPLES or _version() is None:
        return None
    words, part = _words(_EXAMPLES[kind]), id(getattr(_EXAMPLES[kind], name))
    return 8 * words.index(part) if words.count(part) == 1 else None
