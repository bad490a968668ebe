"""Tokens that stay: as many as asked for, the first, the latest, and the most looked at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.inside import ConfigError, GeometryError, Importance

SIZE = 8


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Page mass [L, Hk, pages], a length that ends in its last page, and a budget."""
    layers, heads, pages = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    # Few different numbers, so that ties are common.
    mass = draw(hnp.arrays(np.float32, (layers, heads, pages), elements=st.sampled_from((0, 1, 2))))
    length = (pages - 1) * SIZE + draw(st.integers(1, SIZE))
    return mass, length, draw(st.integers(4, length + 5)) if length > 4 else length


def policy_of(mass: np.ndarray, queries: int = 1, **options: object) -> Importance:
    policy = Importance(*mass.shape[:2], SIZE, **options)
    policy.observe(mass, queries)
    return policy


@given(cases(), st.booleans())
def test_the_budget_is_met_and_the_ends_stay(
    case: tuple[np.ndarray, int, int], scored: bool
) -> None:
    mass, length, budget = case
    scores = np.random.default_rng(0).random((*mass.shape[:2], length)) if scored else None
    keep = policy_of(mass).keep(length, budget, scores)
    count = min(budget, length)
    assert keep.shape == (*mass.shape[:2], count) and keep.dtype == np.int32
    assert (np.diff(keep, axis=2) > 0).all() and keep.min() >= 0 and keep.max() < length
    recent = min(count - min(4, length), count // 4)
    fixed = {*range(min(4, length)), *range(length - recent, length)}
    assert all(fixed <= set(line) for line in keep.reshape(-1, count).tolist())


@given(cases())
def test_whole_pages_go_in_the_order_of_their_mass(case: tuple[np.ndarray, int, int]) -> None:
    mass, length, budget = case
    keep = policy_of(mass, recent_share=0.0, sink_tokens=0).keep(length, budget)
    pages = mass.shape[2]
    for heads, lines in zip(mass, keep, strict=True):
        for weights, line in zip(heads, lines, strict=True):
            have = np.bincount(line // SIZE, minlength=pages)
            full = np.minimum(SIZE, length - SIZE * np.arange(pages))
            partial = [p for p in range(pages) if 0 < have[p] < full[p]]
            assert len(partial) <= 1, "only the page at the border is cut"
            lost = [weights[p] for p in range(pages) if have[p] == 0]
            kept = [weights[p] for p in range(pages) if have[p]]
            assert not lost or max(lost) <= min(kept)
            for page in partial:
                last = page * SIZE + full[page]
                assert set(range(last - have[page], last)) <= set(line.tolist())


@given(cases(), st.randoms(use_true_random=False))
def test_heads_and_layers_do_not_meet(case: tuple[np.ndarray, int, int], random: object) -> None:
    mass, length, budget = case
    layers, heads = list(range(mass.shape[0])), list(range(mass.shape[1]))
    random.shuffle(layers)
    random.shuffle(heads)
    turned = mass[np.ix_(layers, heads)]
    straight = policy_of(mass).keep(length, budget)
    assert np.array_equal(policy_of(turned).keep(length, budget), straight[np.ix_(layers, heads)])


@given(cases(), st.lists(st.integers(0, 1), min_size=1, max_size=6))
def test_without_fading_it_does_not_matter_in_which_parts_queries_come(
    case: tuple[np.ndarray, int, int], late: list[int]
) -> None:
    mass, length, budget = case
    split = Importance(*mass.shape[:2], SIZE, half_life_tokens=0)
    pages = mass.shape[2]
    for grown in sorted(late):  # the last page appears at some time
        split.observe(mass[:, :, : max(1, pages - 1 + grown)], 3)
    total = mass * np.where(np.arange(pages) < max(1, pages - 1), len(late), sum(late))
    whole = policy_of(total[:, :, : split.mass.shape[2]], half_life_tokens=0)
    assert np.array_equal(split.mass, whole.mass)
    assert np.array_equal(split.keep(length, budget), whole.keep(length, budget))


def test_weights_fade() -> None:
    policy = policy_of(np.array([[[8.0, 0.0]]]), 5, half_life_tokens=10)
    policy.observe(np.array([[[0.0, 3.0]]]), 20)
    assert policy.mass.tolist() == [[[2.0, 3.0]]]
    keep = policy.keep(2 * SIZE, SIZE, None)
    assert keep[0, 0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_pages_of_a_cut_sequence_are_forgotten() -> None:
    policy = policy_of(np.ones((2, 1, 3)), half_life_tokens=0)
    policy.observe(np.ones((2, 1, 2)), 1)
    assert (policy.mass == np.full((2, 1, 2), 2.0)).all()


def test_scores_share_a_page_among_its_tokens() -> None:
    mass = np.array([[[1.0, 4.0, 2.0]]])
    scores = np.zeros((1, 1, 3 * SIZE))
    scores[0, 0, [3, 5]] = 1.0, 3.0  # 0.25 and 0.75 of 1
    scores[0, 0, [8, 9]] = 100.0, 300.0  # 1 and 3 of 4
    scores[0, 0, 20] = 0.001  # all of 2
    policy = policy_of(mass, sink_tokens=0, recent_share=0.0)
    order = [set(policy.keep(24, n, scores)[0, 0].tolist()) for n in range(1, 6)]
    assert order == [{9}, {9, 20}, {9, 20, 8}, {9, 20, 8, 5}, {9, 20, 8, 5, 3}]


@given(cases())
def test_equal_scores_are_no_scores(case: tuple[np.ndarray, int, int]) -> None:
    mass, length, budget = case
    length = mass.shape[2] * SIZE  # in a page that is not full, each token gets more
    even = np.full((*mass.shape[:2], length), 0.5)
    policy = policy_of(mass, sink_tokens=0)
    assert np.array_equal(policy.keep(length, budget, even), policy.keep(length, budget))


@given(cases())
def test_mass_follows_the_tokens_that_were_kept(case: tuple[np.ndarray, int, int]) -> None:
    mass, length, budget = case
    policy = policy_of(mass)
    keep = policy.keep(length, budget)
    policy.kept(keep)
    pages = -(-keep.shape[2] // SIZE)
    assert policy.mass.shape == (*mass.shape[:2], pages)
    for index in np.ndindex(*mass.shape[:2]):
        for page in range(pages):
            moved = keep[index][page * SIZE : (page + 1) * SIZE]
            assert policy.mass[(*index, page)] == pytest.approx(
                mass[index][moved // SIZE].sum() / 8
            )


def test_pages_nobody_looked_at_go_first() -> None:
    policy = policy_of(np.array([[[1.0]]]), recent_share=0.0, sink_tokens=0)
    assert policy.keep(3 * SIZE, SIZE)[0, 0].tolist() == list(range(SIZE))
    policy.kept(policy.keep(3 * SIZE, 2 * SIZE))
    assert policy.mass[0, 0].tolist() == [1.0, 0.0]
    untold = Importance(2, 1, SIZE, recent_share=0.0, sink_tokens=0)
    assert untold.keep(20, 3)[1, 0].tolist() == [17, 18, 19], "the latest, if nothing is known"


def test_what_cannot_be_is_refused() -> None:
    policy = policy_of(np.ones((2, 3, 4)))
    with pytest.raises(ConfigError, match="budget of 3 of 32 tokens, 4 of which always stay"):
        policy.keep(32, 3)
    with pytest.raises(ConfigError, match="budget of 0"):
        policy_of(np.ones((1, 1, 1)), sink_tokens=0).keep(8, 0)
    for shape in ((3, 2, 4), (2, 3)):
        with pytest.raises(GeometryError, match=r"Pass \[2, 3, pages\]"):
            policy.observe(np.ones(shape), 1)
    with pytest.raises(GeometryError, match="one number per slot"):
        policy.keep(32, 8, np.ones((2, 3, 31)))
    with pytest.raises(ConfigError, match="recent_share"):
        Importance(1, 1, SIZE, recent_share=1.5)
