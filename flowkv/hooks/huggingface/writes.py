"""What a model's own forward writes, and whether somebody else wrote to it since.

A counter that a forward moves is no part of a model's name: it says nothing that the inputs do not
say. But the same place may be set by hand afterwards. So the state in which each forward left such
a place is remembered; whoever finds it in another one before the next forward knows that somebody
else wrote, and names what is there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

MISSING: Any = object()
LONG = 64
"""Of longer containers only the length and both ends are remembered."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_MOST = 256
_DEEP = 6
_SMALL_BYTES = 1 << 16


class Written(dict[str, tuple[tuple[str, str], ...]]):
    """Paths that forwards write, and the leaves that stand for them in the name.

    Attributes:
        grown: Mappings to which forwards add keys, by path: the keys that were there before.
    """

    def __init__(self, other: Mapping[str, tuple[tuple[str, str], ...]] | None = None) -> None:
        super().__init__(other or {})
        self.grown: dict[str, frozenset[str]] = dict(getattr(other, "grown", {}))


class State:
    """What a value was: kept without keeping the value itself alive.

    Args:
        holds: Whether a value is still the one, and in the state, that was met.
    """

    __slots__ = ("holds",)

    def __init__(self, holds: Callable[[Any], bool]) -> None:
        self.holds = holds


NEVER = State(lambda found: False)
"""A state in which nothing is."""


def holds(state: Any, value: Any) -> bool:
    """Whether a value is in a state that `state_of` gave."""
    if type(state) is State:
        return bool(state.holds(value))
    return value is state or (
        type(value) is type(state) and type(value) in _PLAIN and bool(value == state)
    )


def state_of(value: Any) -> Any:
    """The state of a value; plain values are their own."""
    return value if type(value) in _PLAIN or value is MISSING else _state(value, [_MOST], 0)


def _state(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if type(value) in _PLAIN or value is MISSING:
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        return _of_array(value)
    kind = type(value)
    if depth >= _DEEP or left[0] <= 0:
        return _of_object(value, None)
    if isinstance(value, Mapping):
        if len(value) > LONG:
            return _of_long(kind, len(value), ())
        items = {key: _state(item, left, depth + 1) for key, item in list(value.items())}
        return State(lambda found: type(found) is kind and _same_items(items, found))
    if isinstance(value, (list, tuple, deque)):
        if len(value) > LONG:
            return _of_long(kind, len(value), (state_of_end(value[0]), state_of_end(value[-1])))
        each = [_state(item, left, depth + 1) for item in list(value)]
        return State(
            lambda found: (
                type(found) is kind and len(found) == len(each) and all(map(holds, each, found))
            )
        )
    if isinstance(value, (set, frozenset)):
        members = frozenset(map(id, value)) if len(value) <= LONG else None
        size = len(value)
        return State(
            lambda found: (
                type(found) is kind
                and len(found) == size
                and (members is None or members == frozenset(map(id, found)))
            )
        )
    held = getattr(value, "__dict__", None)
    inside = _state(held, left, depth + 1) if type(held) is dict and held else None
    return _of_object(value, inside)


def state_of_end(value: Any) -> Any:
    """The state of one item of a long container: plain, or who it is."""
    return value if type(value) in _PLAIN else _of_object(value, None)


def _same_items(items: Mapping[Any, Any], found: Mapping[Any, Any]) -> bool:
    if len(found) != len(items):
        return False
    return all(holds(state, found.get(key, MISSING)) for key, state in items.items())


def _of_long(kind: Any, size: int, ends: tuple[Any, ...]) -> State:
    def same(found: Any) -> bool:
        met: Any = type(found)
        if met is not kind or len(found) != size:
            return False
        return not ends or (holds(ends[0], found[0]) and holds(ends[1], found[-1]))

    return State(same)


def _of_tensor(tensor: torch.Tensor) -> State:
    met: Any = weakref.ref(tensor)
    version = _version(tensor)
    return State(lambda found: met() is found and _version(found) == version)


def _of_content(value: Any) -> Any:
    """The state of a small tensor to which somebody writes without a count."""
    if not isinstance(value, torch.Tensor) or value.numel() * value.element_size() > _SMALL_BYTES:
        return state_of(value)
    met: Any = weakref.ref(value)
    content = value.detach().clone()
    return State(lambda found: met() is found and torch.equal(found.detach(), content))


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode: no versions are counted
        return -1


def _of_array(array: Any) -> State:
    met: Any = weakref.ref(array)
    if array.nbytes > _SMALL_BYTES or array.dtype.hasobject:
        return State(lambda found: met() is found)
    content = array.tobytes()
    return State(lambda found: met() is found and found.tobytes() == content)


def _of_object(value: Any, inside: Any) -> State:
    try:
        met: Any = weakref.ref(value)
    except TypeError:
        met = lambda: value  # noqa: E731 (it cannot be referred to weakly)
    if inside is None:
        return State(lambda found: met() is found)
    return State(lambda found: met() is found and holds(inside, vars(found)))


class Places:
    """The places that a model's forwards write, and in which state each was left.

    Attributes:
        touched: Places to which somebody else ever wrote.
        uncounted: Places of tensors that are written to without a count.
        foreign: Places that were not as a forward left them, when they were named last.
        unsteady: Grows whenever somebody else wrote to such a place, or a forward did to one that
            somebody else had written to: what is computed from now on is another thing than the
            name says which a call began with.
    """

    def __init__(self) -> None:
        self.unsteady = 0
        self._spots: dict[str, Callable[[], Any]] = {}
        self._left: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._edited: dict[str, Any] = {}
        self.uncounted: set[str] = set()
        self.touched: set[str] = set()
        self.foreign: set[str] = set()

    def take(self, spots: Mapping[str, Callable[[], Any]], learnt: Iterable[str] = ()) -> None:
        """Takes the places of a walk.

        Args:
            spots: What is at each place, by path.
            learnt: Places at which a write was seen only once: they are named by what is there,
                until a forward writes to them again.
        """
        self._spots = dict(spots)
        for path, get in self._spots.items():
            if path not in self._left:
                self._left[path] = self._own[path] = self._state(path, get())
        for path in learnt:
            self.distrust(path)
        for gone in self._left.keys() - self._spots.keys():
            del self._left[gone], self._own[gone]
            self._edited.pop(gone, None)

    def distrust(self, path: str) -> None:
        """What is at a place now was not left by a forward."""
        self._own[path] = NEVER
        self._edited[path] = self._spots[path]()

    def follow(self, *, ended: bool) -> None:
        """A forward begins, or has ended; whatever odd values raise, nothing is shared then."""
        try:
            if ended:
                self.end()
            else:
                self.begin()
        except Exception:
            self.unsteady += 1

    def begin(self) -> None:
        """A forward begins."""
        for path, get in self._spots.items():
            now = get()
            if not holds(self._left.get(path, MISSING), now):
                self._left[path] = self._state(path, now)
                self.touched.add(path)
                self.unsteady += 1
                if holds(self._own.get(path, MISSING), now):
                    self._edited.pop(path, None)
                else:
                    self._edited[path] = now

    def end(self) -> None:
        """A forward has ended: what differs by now, it has written."""
        for path, get in self._spots.items():
            now = get()
            if not holds(self._left.get(path, MISSING), now):
                self._left[path] = self._own[path] = self._state(path, now)
                self._edited.pop(path, None)
                if path in self.foreign:
                    self.unsteady += 1

    def edited(self) -> dict[str, Any]:
        """What was at the places that were not as a forward left them when one began, by path."""
        return dict(self._edited)

    def __contains__(self, path: str) -> bool:
        return path in self._spots

    def _state(self, path: str, value: Any) -> Any:
        return _of_content(value) if path in self.uncounted else state_of(value)

    def value(self, path: str) -> Any:
        """What is at a place."""
        return self._spots[path]()

    def forget(self) -> None:
        """Lets go of everything."""
        for held in (self._spots, self._left, self._own, self._edited):
            held.clear()
