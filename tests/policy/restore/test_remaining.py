"""The last steps of restores, and the request that they belong to."""

from __future__ import annotations

from bench.restore.baselines import engine_would, link_would
from flowkv.policy.restore import Compute, RestoreLoad, RestoreRequest, Source, Span, State
from tests.inside import MadeUpCosts

PRICES = MadeUpCosts(token_s=1.0, pair_s=0.0, start_s=100.0, cell_s=10.0)
ASKED = RestoreRequest(
    number=0, tokens=20, suffix=0, layers=4, unit=10, sources=(Source("host", "raw", 1.0),)
)


def layer(kind: type, n: int) -> Compute | RestoreLoad:
    return kind(0, Span(n, n + 1), Span(0, 20))


def test_only_what_is_left_counts() -> None:
    state = State(PRICES)
    mine = state.add(ASKED)
    for op in (layer(Compute, 0), layer(RestoreLoad, 3)):
        state.begin(op)
        state.end(op)
    # Left: a layer computes in 120 s and loads in 200 s, two in twice that.
    assert not engine_would(state, mine, layer(RestoreLoad, 2)) and not link_would(
        state, mine, layer(Compute, 1)
    )
    state.begin(flying := layer(RestoreLoad, 2))
    assert engine_would(state, mine, layer(RestoreLoad, 1)), "one layer, 120 s, before 200 s"
    assert not link_would(state, mine, layer(Compute, 1)), "what is on its way counts: 400 s"
    state.end(flying)
    assert not link_would(state, mine, layer(Compute, 1)), "one layer, 200 s, after 120 s"
    state.begin(layer(Compute, 1))
    assert engine_would(state, mine, layer(RestoreLoad, 1)), "what is being computed counts: 120 s"
