"""Progress of restores: begin, end and fail."""

from __future__ import annotations

import pytest

from flowkv.policy.restore import Compute, RestoreLoad, RestoreRequest, Source, Span, State, Suffix
from tests.inside import MadeUpCosts, StateError

ALL = Span(0, 3)
ASKED = RestoreRequest(
    number=1,
    tokens=100,
    suffix=8,
    layers=3,
    resident=10,
    unit=10,
    sources=(Source("host", "raw", 2.0), Source("disk", "kv8", 1.0)),
)


def fresh() -> State:
    state = State(MadeUpCosts(0.0, 0.0, 0.0, 0.0))
    state.add(ASKED)
    return state


def compute(first: int, stop: int, layers: Span = ALL) -> Compute:
    return Compute(1, layers, Span(first, stop))


def load(first: int, stop: int, layers: Span = ALL, source: int = 0) -> RestoreLoad:
    return RestoreLoad(1, layers, Span(first, stop), source)


def test_two_pointers_meet() -> None:
    state = fresh()
    mine = state.requests[1]
    assert mine.cells() == 270 and not mine.met and not mine.restored
    ops = [load(60, 100), load(50, 60, source=1), compute(10, 50)]
    for op in ops:
        state.begin(op)
    assert mine.met and not mine.restored and mine.cells() == 0
    assert state.link_cells == {"host": 120, "disk": 30}
    for op in ops[:2]:
        state.end(op)
    assert not mine.there(0) and state.link_cells == {"host": 0, "disk": 0}
    state.end(ops[2])
    assert mine.restored and not mine.done
    for layer in range(3):
        state.begin(Suffix(1, layer))
        assert not mine.done
        state.end(Suffix(1, layer))
    assert mine.done and not mine.flying


def test_a_layer_is_there_before_others() -> None:
    state = fresh()
    mine = state.requests[1]
    first = load(10, 100, Span(0, 1))
    state.begin(first)
    with pytest.raises(StateError, match="not due"):
        state.begin(Suffix(1, 0))
    state.end(first)
    assert mine.there(0) and not mine.there(1) and mine.gap(1) == 90
    state.begin(Suffix(1, 0))
    with pytest.raises(StateError, match="not due"):
        state.begin(Suffix(1, 1))


def test_a_failed_load_gives_everything_below_it_back() -> None:
    state = fresh()
    mine = state.requests[1]
    state.begin(done := load(40, 100, Span(0, 1)))
    state.begin(failing := load(60, 100, Span(1, 2)))
    state.begin(flying := load(50, 60, Span(1, 2), source=1))
    state.end(done)
    state.fail(failing)
    assert mine.lost == 100 and mine.back == [100] * 3 and mine.missing == [0, 10, 0]
    assert state.link_cells == {"host": 0, "disk": 10}
    state.begin(again := compute(10, 100))
    state.end(again)
    assert mine.restored is False, "the buffer of a load is still written to"
    state.end(flying)
    assert mine.restored


def test_a_failed_load_leaves_what_lies_above_it() -> None:
    state = fresh()
    mine = state.requests[1]
    state.begin(above := load(60, 100))
    state.begin(failing := load(40, 60, Span(2, 3)))
    state.fail(failing)
    assert mine.back == [60, 60, 60] and mine.lost == 60
    state.end(above)
    with pytest.raises(StateError):
        state.begin(load(40, 60))
    state.begin(rest := compute(10, 60))
    state.end(rest)
    assert mine.restored


@pytest.mark.parametrize(
    "op",
    [
        *(compute(0, 20), compute(20, 30), compute(10, 10), compute(10, 90)),
        *(compute(10, 20, Span(1, 1)), load(70, 90), load(80, 80), load(0, 80), load(10, 80)),
    ],
)
def test_what_does_not_go_on(op: Compute | RestoreLoad) -> None:
    state = fresh()
    mine = state.requests[1]
    state.begin(load(80, 100))
    state.begin(compute(10, 20, Span(2, 3)))
    before = list(mine.front), list(mine.back), list(mine.missing), dict(state.link_cells)
    with pytest.raises(StateError):
        state.begin(op)
    assert before == (mine.front, mine.back, mine.missing, state.link_cells), "half begun"


def test_only_loads_fail() -> None:
    state = fresh()
    state.begin(compute(10, 20))
    with pytest.raises(StateError, match="Only loads"):
        state.fail(compute(10, 20))
    assert state.requests[1].flying


def test_who_leaves_takes_loads_off_the_link() -> None:
    state = fresh()
    state.begin(load(60, 100))
    state.begin(load(50, 60, source=1))
    with pytest.raises(StateError, match="already"):
        state.add(ASKED)
    state.remove(1)
    assert state.link_cells == {"host": 0, "disk": 0} and not list(state)


def test_numbers() -> None:
    state = fresh()
    assert [p.request.number for p in state.among(None)] == [1]
    assert [p.request.number for p in state.among([2, 1])] == [1]
    assert not list(state.among([2]))
