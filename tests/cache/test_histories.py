"""The checker of histories: what it must find, and what it must not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.histories import NEVER, Operation, explain


def write(value: int, start: float, end: float = NEVER, page: str = "a") -> Operation:
    return Operation("write", frozenset([page]), value, start, end, "w")


def read(value: int | None, start: float, end: float, page: str = "a") -> Operation:
    return Operation("read", frozenset([page]), value, start, end, "r")


def erase(start: float, end: float = NEVER, *pages: str) -> Operation:
    return Operation("erase", frozenset(pages or ["a"]), None, start, end, "e")


def told(text: str) -> list[Operation]:
    """Return operations: `w1 0 2 b` writes 1 to page b from 0 to 2, `r- 3 4` misses, `e 5`."""
    found = list[Operation]()
    for what, *rest in map(str.split, text.split(", ") if text else []):
        given: list[Any] = [x if x.isalpha() else float(x) for x in rest]
        if what == "e":
            found.append(erase(*given))
        else:
            value = None if what[1:] == "-" else int(what[1:])
            found.append((write if what[0] == "w" else read)(value, *given))
    return found


IMPOSSIBLE = {
    "read after the erase ended": "w1 0 1, e 2 3, r1 4 5",
    "read by one, long after another missed": "w1 0 1, e 2 3, r- 4 5, r1 6 7",
    "a write that never ended was read before the erase, and after": "w1 0, r1 1 2, e 3 4, r1 5 6",
    "nobody wrote it": "r1 0 1",
    "it is read before it is written": "r1 0 1, w1 2 3",
    "the second erase is ignored": "w1 0 1, e 0 1, r1 2 3, e 4 5, r1 6 7",
    "two contents leave no moment between them": "w1 0 1, w2 2 3, e 4 6, r1 5.5 7, r2 6.5 8",
    "two contents cover an erase, each half of it": "w1 0 1, e 2 8, w2 3 4, r1 6 7, r2 9 10",
    "one of several pages": "w1 0 1 b, e 2 3 a b, r1 4 5 b",
    "two pages leave no common moment": "w1 0 1 a, w2 3 4 b, e 2 8 a b, r1 6 7 a, r2 9 10 b",
}
POSSIBLE = {
    "nothing": "",
    "misses, whatever there is": "w1 0 1, r- 2 3, r1 4 5",
    "read while it is erased": "w1 0 1, e 2 5, r1 3 4",
    "read that began before the erase ended": "w1 0 1, e 2 5, r1 4 9",
    "written while it is erased, and read": "w1 1 3, e 2 5, r1 6 7",
    "written again": "w1 0 1, e 2 3, w2 4 5, r2 6 7",
    "an erase that never ended": "w1 0 1, e 2, r1 4 5",
    "another page": "w1 0 1 b, e 2 3, r1 4 5 b",
    "a write that never ended may come late": "w1 0, e 2 3, r1 4 5",
    "two contents at a time": "w1 0 1, w2 2 3, r1 4 5, r2 4 5, r1 6 7",
    "between two contents there is one moment": "w1 0 1, e 2 8, r1 3 4, w2 5 6, r2 9 10",
}


@pytest.mark.parametrize("history", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_no_order_explains_is_found(history: str) -> None:
    for order in itertools.islice(itertools.permutations(told(history)), 24):
        assert explain(order)


@pytest.mark.parametrize("history", POSSIBLE.values(), ids=POSSIBLE)
def test_what_an_order_explains_is_not(history: str) -> None:
    for order in itertools.islice(itertools.permutations(told(history)), 24):
        assert not explain(order)


def _exists(history: list[Operation]) -> bool:
    """Whether some order explains a history: by trying all of them."""
    ended = [one for one in history if one.end != NEVER or one.kind != "erase"]
    for order in itertools.permutations(ended):
        if any(
            a.end < b.start for i, b in enumerate(order) for a in order[i + 1 :]
        ):  # a came before b
            continue
        there = set[object]()
        for one in order:
            if one.kind == "write":
                there.add(one.value)
            elif one.kind == "erase":
                there.clear()
            elif one.value is not None and one.value not in there:
                break
        else:
            return True
    return False


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    """A few operations on one page; each content is written once."""
    found = []
    kinds = draw(st.lists(st.sampled_from(["read", "read", "erase"]), min_size=1, max_size=4))
    for kind in ["write", *(["write"] if draw(st.booleans()) else []), *kinds]:
        start = draw(st.integers(0, 12))
        # Moments are all different, so that before and after are clear.
        start, end = (
            start + len(found) / 20,
            start + draw(st.integers(0, 8)) + len(found) / 20 + 0.01,
        )
        written = sum(one.kind == "write" for one in found)
        value = written if kind == "write" else draw(st.integers(0, written - 1))
        found.append(
            Operation(kind, frozenset("a"), None if kind == "erase" else value, start, end, kind)
        )
    return found


@given(histories())
def test_it_agrees_with_trying_all_orders(history: list[Operation]) -> None:
    assert bool(explain(history)) != _exists(history)
