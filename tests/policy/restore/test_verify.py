"""The verifier: timelines of one fault each, and random ones."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.restore.baselines import RESTORE_POLICIES
from flowkv.policy.restore import Compute, RestoreLoad, RestoreRequest, Source, Span, Suffix
from tests.inside import RestoreStory, VerificationError
from tests.inside import restores_worlds as worlds
from tests.policy.restore.verifier import Caps, verify

ALL = Span(0, 2)
REQUEST = RestoreRequest(
    number=7,
    tokens=40,
    suffix=5,
    layers=2,
    resident=4,
    unit=4,
    sources=(Source("host", "raw", 10.0), Source("disk", "raw", 10.0)),
    arrived_s=1.0,
)


def compute(first: int, stop: int, layers: Span = ALL) -> Compute:
    return Compute(7, layers, Span(first, stop))


def load(first: int, stop: int, layers: Span = ALL, source: int = 0) -> RestoreLoad:
    return RestoreLoad(7, layers, Span(first, stop), source)


RIGHT = [
    *((compute(4, 12), 1.0, 3.0, True), (load(24, 40), 1.0, 2.0, True)),
    *((load(16, 24, source=1), 1.0, 5.0, True), (load(12, 16), 2.0, 4.0, True)),
    *((Suffix(7, 0), 5.0, 6.0, True), (Suffix(7, 1), 6.0, 7.0, True)),
]
CAPS = Caps(1, {"host": 1, "disk": 1}, {"host": 320.0})


def changed(at: int, *entries):
    return [*RIGHT[:at], *entries, *RIGHT[at + 1 :]]


def entry(at: int, **values):
    op, start_s, end_s, ok = RIGHT[at]
    names = {"start_s": start_s, "end_s": end_s, "ok": ok} | {
        k: v for k, v in values.items() if k in ("start_s", "end_s", "ok")
    }
    rest = {k: v for k, v in values.items() if k not in names}
    return op._replace(**rest), names["start_s"], names["end_s"], names["ok"]


FAULTS = {
    "numbers": [changed(0, entry(0, request=8))],
    "time": [
        changed(0, entry(0, start_s=0.5)),
        changed(0, entry(0, end_s=0.9)),
        changed(0, entry(0, end_s=float("nan"))),
        changed(0, entry(0, end_s=float("inf"))),
    ],
    "failure": [changed(0, entry(0, ok=False)), changed(4, entry(4, ok=False))],
    "span": [
        *(changed(0, entry(0, layers=Span(0, 3))), changed(0, entry(0, layers=Span(1, 1)))),
        *(changed(0, entry(0, layers=Span(-1, 2))), changed(0, entry(0, tokens=Span(0, 12)))),
        *(changed(0, entry(0, tokens=Span(4, 4))), changed(0, entry(0, tokens=Span(4, 11)))),
        *(changed(1, entry(1, tokens=Span(25, 40))), changed(1, entry(1, tokens=Span(24, 44)))),
    ],
    "once": [
        [*RIGHT[:4], (load(12, 16), 4.0, 5.0, True), *RIGHT[4:]],
        changed(3, entry(3, tokens=Span(8, 16))),
        changed(0, entry(0, tokens=Span(4, 16))),
        [*RIGHT[:4], (compute(4, 12), 3.0, 4.0, True), *RIGHT[4:]],
    ],
    "front": [changed(0, entry(0, tokens=Span(8, 12)))],
    "back": [changed(1), changed(1, entry(1, start_s=1.5, end_s=2.0))],
    "causal": [changed(0, (compute(4, 8), 1.0, 3.0, True), (compute(8, 12), 2.0, 3.0, True))],
    "layers": [
        changed(
            0,
            (compute(4, 12, Span(0, 1)), 1.0, 3.0, True),
            (compute(4, 12, Span(1, 2)), 2, 3, True),
        ),
        changed(
            0, (compute(4, 12, Span(1, 2)), 1, 2, True), (compute(4, 12, Span(0, 1)), 2, 3, True)
        ),
    ],
    "source": [changed(2, entry(2, source=2))],
    "met": [RIGHT[:3], RIGHT[1:3]],
    "suffix": [
        *(RIGHT[:5], RIGHT[:4]),
        [*RIGHT[:4], (Suffix(7, 1), 5, 6, True), (Suffix(7, 0), 6, 7, True)],
        *([*RIGHT, (Suffix(7, 2), 7.0, 8.0, True)], changed(4, entry(4, start_s=4.5))),
        changed(5, entry(5, start_s=5.5)),
    ],
    "caps": [
        changed(3, entry(3, start_s=1.5)),
        changed(3, entry(3, start_s=2.0, end_s=2.1)),
        changed(1, entry(1, end_s=1.5)),
    ],
}


def test_right() -> None:
    verify([REQUEST], RIGHT, CAPS)


@pytest.mark.parametrize(
    ("rule", "timeline"), [(rule, timeline) for rule, some in FAULTS.items() for timeline in some]
)
def test_wrong(rule: str, timeline: list) -> None:
    caps = CAPS if rule == "caps" else Caps(9, {"host": 9})
    with pytest.raises(VerificationError, match=f"^{rule}: "):
        verify([REQUEST], timeline, caps)


def test_failures_move_the_split() -> None:
    start = [(compute(4, 12), 1.0, 3.0, True), (load(24, 40), 1.0, 2.0, False)]
    rest = [
        (compute(12, 40), 3.0, 5.0, True),
        (Suffix(7, 0), 5.0, 6.0, True),
        (Suffix(7, 1), 6.0, 7.0, True),
    ]
    verify([REQUEST], start + rest)
    once = [*start, (load(20, 24), 1.5, 4.0, True), *rest]  # on its way when the other failed
    verify([REQUEST], once)
    again = [*start, (load(24, 40, source=1), 2.0, 2.5, True), *rest]
    with pytest.raises(VerificationError, match=r"^lost: "):
        verify([REQUEST], again)
    with pytest.raises(VerificationError, match=r"^met: "):
        verify([REQUEST], start)
    verify([REQUEST], start, unfinished=[7])
    with pytest.raises(VerificationError, match=r"^suffix: cells"):
        verify(
            [REQUEST], [*start, *[(op, s - 1, e - 1, ok) for op, s, e, ok in rest]][:2] + rest[1:]
        )


def test_a_stripe_that_fails_takes_those_below_with_it() -> None:
    high, low = Span(1, 2), Span(0, 1)
    start = [
        (load(20, 40), 1.0, 2.0, True),
        (load(4, 20, low), 2.0, 3.0, True),
        (load(12, 20, high), 3.0, 4.0, False),
    ]
    rest = [(Suffix(7, 0), 6.0, 7.0, True), (Suffix(7, 1), 7.0, 8.0, True)]
    verify([REQUEST], [*start, (compute(4, 20), 4.0, 5.0, True), *rest])
    # The suffix of the layer below had begun before the stripe above it failed.
    early = [(Suffix(7, 0), 3.0, 3.5, True), (compute(4, 20), 4.0, 5.0, True), rest[1]]
    verify([REQUEST], start + early)
    with pytest.raises(VerificationError, match=r"^layers: "):
        verify([REQUEST], [*start, (compute(4, 20, high), 4.0, 5.0, True), *rest])
    with pytest.raises(VerificationError, match=r"^once: "):
        verify([REQUEST], [*start, (compute(4, 20), 3.5, 5.0, True), *rest])


def test_what_a_request_forbids() -> None:
    whole = msgspec.structs.replace(REQUEST, whole=True)
    with pytest.raises(VerificationError, match=r"^whole: "):
        verify([whole], [(compute(4, 12, Span(0, 1)), 1.0, 2.0, True)])
    loaded = msgspec.structs.replace(REQUEST, computable=False)
    with pytest.raises(VerificationError, match=r"^compute: "):
        verify([loaded], RIGHT)
    bare = msgspec.structs.replace(REQUEST, suffix=0)
    with pytest.raises(VerificationError, match=r"^suffix: "):
        verify([bare], RIGHT)
    verify([bare], RIGHT[:4])
    with pytest.raises(VerificationError, match=r"^numbers: "):
        verify([REQUEST, REQUEST], RIGHT)


def test_nothing_to_do() -> None:
    here = msgspec.structs.replace(REQUEST, resident=40)
    with pytest.raises(VerificationError, match=r"^suffix: "):
        verify([here], [])
    verify([here], [(Suffix(7, 0), 1.0, 1.0, True), (Suffix(7, 1), 1.0, 1.0, True)])
    verify([], [])


@given(world=worlds(), name=st.sampled_from(sorted(RESTORE_POLICIES)))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_what_a_story_lets_through_is_right(world, name: str) -> None:
    story = RestoreStory(RESTORE_POLICIES[name], world)
    story.run()
    caps = Caps(len(world.engines), world.windows)
    verify(world.requests, story.timeline, caps, unfinished=story.unfinished)


@given(world=worlds(2), name=st.sampled_from(sorted(RESTORE_POLICIES)), at=st.integers(0, 1 << 20))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_every_op_counts(world, name: str, at: int) -> None:
    world = msgspec.structs.replace(world, failing=(), called_off={})
    story = RestoreStory(RESTORE_POLICIES[name], world)
    story.run()
    ops = story.timeline
    if ops:
        at %= len(ops)
        with pytest.raises(VerificationError):
            verify(world.requests, ops[:at] + ops[at + 1 :])
        with pytest.raises(VerificationError):
            verify(world.requests, [*ops, ops[at]], Caps(99))
