"""Mutants for `check_restore_policy`: policies of one fault each."""

from __future__ import annotations

import itertools

import pytest

from bench.restore.baselines import (
    RESTORE_POLICIES,
    Cake,
    LayerWise,
    LoadLayers,
    LoadOnly,
    Recompute,
)
from flowkv.policy.restore import Compute, RestoreLoad, RestorePolicy, Span, Suffix
from flowkv.testing import check_restore_policy
from tests.inside import StateError

FAULTS = (AssertionError, StateError, IndexError, KeyError, TypeError)


class Nameless(Cake):
    name = ""


class NoSuffix(Cake):
    def next_compute(self, state, among=None):
        op = super().next_compute(state, among)
        return None if isinstance(op, Suffix) else op


class SuffixTooEarly(Cake):
    def next_compute(self, state, among=None):
        for p in state.among(among):
            if p.request.suffix > p.suffix == p.answered < p.request.layers:
                return Suffix(p.request.number, p.suffix)
        return super().next_compute(state, among)


class SuffixNobodyAskedFor(LoadLayers):
    def next_compute(self, state, among=None):
        for p in state.among(among):
            if not p.request.suffix and p.there(0) and not p.suffix:
                return Suffix(p.request.number, 0)
        return super().next_compute(state, among)


class SuffixSkipsLayers(Cake):
    def next_compute(self, state, among=None):
        op = super().next_compute(state, among)
        if isinstance(op, Suffix) and op.layer:
            return op._replace(layer=op.layer + 1)
        return op


class ServesAnyEngine(Cake):
    def next_compute(self, state, among=None):
        return super().next_compute(state)


class OneTierForAll(Cake):
    def next_load(self, state, tier):
        found = (super(OneTierForAll, self).next_load(state, t) for t in ("host", "disk"))
        return next((op for op in found if op), None)


class TriesAgain(LoadOnly):
    """After a failure, loads from the other source what the first one lost."""

    def _compute(self, state, progress):
        return None if len(progress.request.sources) > 1 else super()._compute(state, progress)

    def _load(self, state, progress, source):
        op = super()._load(state, progress, source)
        if op is None and progress.lost and max(progress.back) > min(progress.front):
            whole = Span(0, progress.request.layers)
            span = Span(min(progress.front), max(progress.back))
            return RestoreLoad(progress.request.number, whole, span, source)
        return op


class TopLayersFirst(LayerWise):
    def _compute(self, state, progress):
        if progress.request.whole or not progress.request.computable:
            return super()._compute(state, progress)
        for layer in reversed(range(progress.request.layers)):
            if progress.gap(layer) and progress.computed[layer] == progress.front[layer]:
                span = Span(progress.front[layer], progress.back[layer])
                return Compute(progress.request.number, Span(layer, layer + 1), span)
        return None


class ComputesWhatItCannot(Cake):
    def _compute(self, state, progress):
        p = progress
        if p.request.computable or p.flying or not p.gap(0):
            return super()._compute(state, p)
        span = Span(p.front[0], min(p.back))
        return Compute(p.request.number, Span(0, p.request.layers), span) if span.size > 0 else None


class LeavesLayersOut(LayerWise):
    """Of an unmodified model, which computes all of them at once."""

    def _compute(self, state, progress):
        op = super()._compute(state, progress)
        if op and progress.request.whole and op.layers.size > 1:
            return op._replace(layers=Span(0, 1))
        return op


class CutsPages(Cake):
    def _compute(self, state, progress):
        op = super()._compute(state, progress)
        if op and op.tokens.size > 3:
            return op._replace(tokens=Span(op.tokens.first, op.tokens.stop - 1))
        return op


class LoadsHalfPages(Cake):
    def _load(self, state, progress, source):
        op = super()._load(state, progress, source)
        if op and op.tokens.size > 3:
            return op._replace(tokens=Span(op.tokens.first + 1, op.tokens.stop))
        return op


class FirstOnly(Cake):
    def next_compute(self, state, among=None):
        return super().next_compute(state, [x for x in (among or [0]) if x == 0])


class NeverComputesLost(LoadOnly):
    def _compute(self, state, progress):
        return None if progress.lost else super()._compute(state, progress)


class GivesUpWithoutSource(LoadOnly):
    def _compute(self, state, progress):
        return super()._compute(state, progress) if progress.request.sources else None


class NeverLoads(Recompute):
    def next_load(self, state, tier):
        return None


class Fickle(Cake):
    """Answers by something that is not in the state."""

    asked = itertools.count()

    def next_load(self, state, tier):
        return super().next_load(state, tier) if next(self.asked) % 3 else None


class Siblings(Cake):
    """Objects of one class differ."""

    made = itertools.count()

    def __init__(self):
        super().__init__(chunk=16 << next(self.made) % 2)


class WritesState(Cake):
    def next_load(self, state, tier):
        op = super().next_load(state, tier)
        if op:
            state.requests[op.request].missing[0] += 1
        return op


class CountsLinkCells(Cake):
    def next_load(self, state, tier):
        state.link_cells[tier] = state.link_cells.get(tier, 0) + 1
        return super().next_load(state, tier)


class RemembersTheDead(Cake):
    """Goes on with a request that was called off."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def next_compute(self, state, among=None):
        self.known |= {p.request.number: p.request for p in state}
        gone = [n for n in self.known if n not in state.requests and (among is None or n in among)]
        if gone and gone[0] == 0:
            request = self.known[0]
            return Compute(0, Span(0, request.layers), Span(0, request.tokens))
        return super().next_compute(state, among)


class LoadsOnTheEngine(Cake):
    def next_compute(self, state, among=None):
        return super().next_compute(state, among) or self.next_load(state, "host")


class ThirdSource(Cake):
    def _load(self, state, progress, source):
        return super()._load(state, progress, source + 1)


class OverlapsTheFront(Cake):
    def _load(self, state, progress, source):
        op = super()._load(state, progress, source)
        if op and op.tokens.first == progress.front[0] > progress.request.resident:
            return op._replace(tokens=Span(progress.request.resident, op.tokens.stop))
        return op


class IgnoresResidentPages(Recompute):
    def _compute(self, state, progress):
        op = super()._compute(state, progress)
        if op and progress.request.resident and op.tokens.first == progress.request.resident:
            return op._replace(tokens=Span(0, op.tokens.stop))
        return op


class NothingAtAll(RestorePolicy):
    name = "nothing"

    def next_compute(self, state, among=None):
        return None

    def next_load(self, state, tier):
        return None


MUTANTS = [
    cls
    for cls in globals().values()
    if isinstance(cls, type) and issubclass(cls, RestorePolicy) and cls.__module__ == __name__
]


def test_enough_of_them() -> None:
    assert len(MUTANTS) >= 25


@pytest.mark.parametrize("mutant", MUTANTS)
def test_is_found(mutant: type[RestorePolicy]) -> None:
    with pytest.raises(FAULTS):
        check_restore_policy(mutant, max_examples=150, shrink=False)


def test_no_check_without_a_policy() -> None:
    with pytest.raises(AssertionError, match="RestorePolicy"):
        check_restore_policy(dict, max_examples=1, shrink=False)  # type: ignore[arg-type]


def test_the_catalogue_is_not_among_them() -> None:
    assert not set(RESTORE_POLICIES.values()) & set(MUTANTS)
