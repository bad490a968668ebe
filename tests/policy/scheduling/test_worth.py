"""Pages are kept where two moves of them take less than computing them again."""

from __future__ import annotations

import pytest

from flowkv.policy.scheduling import Job
from tests.inside import Worth


def job(tokens: int, pages: int) -> Job:
    one = Job(0, 0.0, tokens, 10)
    one.ready, one.pages = tokens, pages
    return one


def told(token_s: float, page_s: float, *, step_s: float = 0.01) -> Worth:
    worth = Worth(page_bytes=1000)
    for tokens in (256, 8, 256, *[8] * 200):
        worth.step(tokens, step_s + token_s * tokens)
    for _ in range(3):
        worth.observe_move(4000, 4 * page_s, out=True)
        worth.observe_move(8000, 8 * page_s, out=False)
    return worth


def test_a_token_costs_what_it_adds_to_a_step_also_after_a_while_of_decoding() -> None:
    assert told(2e-4, 1e-3).token_s == pytest.approx(2e-4)


@pytest.mark.parametrize(("page_s", "kept"), [(1e-4, True), (1.5e-3, True), (1.7e-3, False)])
def test_both_moves_count(page_s: float, kept: bool) -> None:
    # 16 tokens of a page take 3.2 ms, and a page crosses the link twice
    assert told(2e-4, page_s)(job(160, 10)) is kept


def test_pages_that_others_hold_too_need_not_be_moved() -> None:
    assert not told(2e-4, 1.7e-3)(job(160, 10))
    assert told(2e-4, 1.7e-3)(job(160, 5))


@pytest.mark.parametrize("known", ["nothing", "steps", "moves", "steps of one size"])
def test_what_is_unknown_is_kept(known: str) -> None:
    worth = Worth(page_bytes=1000)
    if known == "steps":
        worth.step(256, 1e-9)
        worth.step(8, 1e-10)
    if known in ("moves", "steps of one size"):
        worth.observe_move(1000, 1000.0, out=True)
    if known == "steps of one size":
        worth.step(8, 1e-3)
        worth.step(8, 1e-3)
    assert worth(job(160, 10))


def test_moves_back_are_expected_to_take_as_long_as_moves_out() -> None:
    worth = Worth(page_bytes=1000)
    worth.step(256, 0.01 + 256 * 2e-4)
    worth.step(8, 0.01 + 8 * 2e-4)
    worth.observe_move(1000, 1.7e-3, out=True)
    assert not worth(job(160, 10))
    worth.observe_move(1000, 1e-5, out=False)
    assert worth(job(160, 10))


def test_a_load_that_gets_larger_does_not_confuse_it() -> None:
    worth = Worth(page_bytes=1)
    for tokens in (1, 2, 3, 64, 3, 65, 512, 5, 130, 600, 4):
        worth.step(tokens, 0.01 + 2e-4 * tokens)
        assert worth.token_s == 0.0 or worth.token_s == pytest.approx(2e-4)
    assert worth.token_s == pytest.approx(2e-4)


def test_steps_that_took_no_time_say_nothing() -> None:
    worth = Worth(page_bytes=1)
    worth.step(0, 1.0)
    worth.step(5, 0.0)
    assert worth.token_s == 0.0


def test_steps_of_about_the_same_size_say_nothing() -> None:
    worth = Worth(page_bytes=1)
    for tokens in (65, 100, 130, 65, 65):
        worth.step(tokens, 0.01)
    assert worth.token_s == 0.0
