"""`check_restore_policy`: what every `RestorePolicy` must do, told as stories by Hypothesis."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flowkv.core.errors import MissingDependencyError
from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.words import Compute, Load, Op, Request, Source, Span
from flowkv.testing.restore_story import RestoreStory, World
from flowkv.testing.told import tell, told

try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:  # pragma: no cover
    raise MissingDependencyError("flowkv.testing", "testing", "pytest and hypothesis") from None

_TIERS = ("host", "disk")
_UNKNOWN = 0.0
_INSTANT_S = 1e-9  # an op that ended when it began would leave open what came first


class Prices(msgspec.Struct, frozen=True):
    """What things take, or are thought to take. Implements `Costs`.

    Attributes:
        token_s: Computing a token of a layer.
        pair_s: Attention of a token of a layer to another.
        start_s: Starting a layer's compute.
        cell_s: Loading a cell; the second source takes half.
    """

    token_s: float
    pair_s: float
    start_s: float
    cell_s: float

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """See `Costs`."""
        pairs = tokens.size * (tokens.first + tokens.stop + 1) / 2
        fixed = self.start_s if self.token_s else 0.0
        return layers * (fixed + self.token_s * tokens.size + self.pair_s * pairs)

    def suffix_s(self, request: Request) -> float:
        """See `Costs`."""
        behind = Span(request.tokens, request.tokens + request.suffix)
        return self.compute_s(request, request.layers, behind)

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """See `Costs`."""
        return self.cell_s * cells / (1 + source)

    def op_s(self, request: Request, op: Op) -> float:
        """What an op takes."""
        if isinstance(op, Compute):
            return self.compute_s(request, op.layers.size, op.tokens)
        if isinstance(op, Load):
            return self.load_s(request, op.source, op.layers.size * op.tokens.size)
        return self.suffix_s(request) / request.layers


@st.composite
def _requests(draw: st.DrawFn, number: int) -> Request:
    """A prompt of some pages, here and there."""
    unit, layers = draw(st.sampled_from([1, 16, 64, 256])), draw(st.integers(1, 6))
    pages, resident = draw(st.integers(1, 40)), draw(st.integers(0, 3))
    tokens = max(1, pages * unit - draw(st.sampled_from([0, 0, unit // 2])))
    found = draw(st.lists(st.sampled_from(_TIERS), max_size=2))
    kinds = (("raw", 8.0), ("kv8", 4.0))
    return Request(
        number=number,
        tokens=tokens,
        suffix=draw(st.sampled_from([0, 1, 64, 512])),
        layers=layers,
        resident=min(resident * unit, tokens),
        unit=unit,
        sources=tuple(Source(tier, *kind) for tier, kind in zip(found, kinds, strict=False)),
        computable=not found or draw(st.sampled_from([True, True, True, False])),
        whole=draw(st.booleans()),
        arrived_s=draw(st.sampled_from([0.0, 0.0, 0.01, 0.5])),
    )


_rates = st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4])
_beliefs = st.sampled_from([_UNKNOWN, 0.01, 1.0, 1.0, 1.0, 100.0])
_noises = st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0, 4.0]), min_size=1, max_size=7)


@st.composite
def worlds(draw: st.DrawFn, most: int = 4) -> World:
    """Requests, what they really take, what the policy is told, and what goes wrong.

    Args:
        draw: Given by Hypothesis.
        most: Requests at most.
    """
    requests = [draw(_requests(number)) for number in range(draw(st.integers(1, most)))]
    token_s, cell_s = draw(_rates), draw(_rates)
    pair_s, start_s = draw(st.sampled_from([0.0, token_s / 1000])), draw(st.sampled_from([0, 1e-5]))
    true = Prices(token_s, pair_s, start_s, cell_s)
    doubt = draw(_beliefs)
    known = Prices(token_s * doubt, pair_s * doubt, start_s, cell_s * draw(_beliefs))
    noise = draw(_noises)

    def takes_s(op: Op, nth: int) -> float:
        return max(_INSTANT_S, true.op_s(requests[op.request], op) * noise[nth % len(noise)])

    numbers = range(len(requests))
    engines = draw(st.sampled_from([(None,), (numbers[::2], numbers[1::2]), (None, None)]))
    return World(
        requests=requests,
        costs=draw(st.sampled_from([known, None])),
        takes_s=takes_s,
        failing=draw(st.sets(st.integers(0, 30), max_size=3)),
        engines=engines,
        windows={tier: draw(st.integers(1, 3)) for tier in _TIERS},
        called_off={0: 0.02} if draw(st.integers(0, 7)) == 0 else {},
    )


def check_restore_policy(
    make: Callable[[], RestorePolicy], *, max_examples: int = 150, shrink: bool = True
) -> None:
    """Runs the conformance suite on a restore policy; returns if it found no fault. Deterministic.

    Stories have up to four requests, some of an unmodified model, some that cannot be computed or
    loaded, with pages that are resident; costs that are right, wrong, unknown or measured; one or
    two engines; ops that take longer than expected, or no time; loads that fail; requests that come
    late or are called off. Checked: questions do not change the state, and a second object that is
    asked the same answers alike; answers are for the engine that asks; no request is forgotten; and
    what `verify` checks.

    Args:
        make: Makes a fresh policy: its class, or any callable without arguments.
        max_examples: Stories to tell.
        shrink: Look for the shortest story that shows a fault, rather than tell the first.

    Raises:
        VerificationError: (an `AssertionError`) Says what is wrong; Hypothesis adds the story.
        StateError: An op does not go on where the pointers are.
    """

    @told(max_examples, shrink=shrink)
    @given(world=worlds())
    def story(world: World) -> None:
        RestoreStory(make, world).run()

    tell(story)
