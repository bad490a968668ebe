"""Costs learnt from what things took."""

from __future__ import annotations

import random
import sys
from functools import partial

import pytest

from flowkv.policy.restore import Measured, RestoreRequest, Source, Span
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked
from tests.clock import together

LLAMA = SHAPES["Llama-3.1-8B"]
TRUTH = Modelled(LLAMA, GPUS["A100"], 40, latency_s=50e-6)
REQUEST = asked(LLAMA, 65536)


def spans(n: int, seed: int = 1) -> list[Span]:
    draw = random.Random(seed)
    firsts = [draw.randrange(0, 60000) for _ in range(n)]
    return [Span(first, first + draw.choice((256, 512, 2048, 4096))) for first in firsts]


def learn(measured: Measured, truth: Modelled, samples: list[Span], pace: float = 1.0) -> None:
    for span in samples:
        seconds = truth.compute_s(REQUEST, 4, span) * pace
        measured.computed(REQUEST, 4, span, seconds)


def test_nothing_is_known_at_first() -> None:
    fresh = Measured()
    assert fresh.compute_s(REQUEST, 4, Span(0, 512)) == 0.0
    assert fresh.suffix_s(REQUEST) == 0.0
    assert fresh.load_s(REQUEST, 0, 1000) == 0.0


def test_one_sample_is_believed() -> None:
    fresh = Measured()
    fresh.computed(REQUEST, 32, Span(0, 512), 0.5)
    assert fresh.compute_s(REQUEST, 32, Span(0, 512)) == pytest.approx(0.5)
    assert fresh.compute_s(REQUEST, 16, Span(0, 1024)) == pytest.approx(0.5)
    fresh.loaded(REQUEST, 0, 1000, 0.25)
    assert fresh.load_s(REQUEST, 0, 4000) == pytest.approx(1.0)


def test_the_form_is_found() -> None:
    learnt = Measured()
    learn(learnt, TRUTH, spans(40))
    for span in (Span(0, 512), Span(30000, 38192), Span(0, 8192), Span(64000, 64512)):
        truth = TRUTH.compute_s(REQUEST, 1, span)
        assert learnt.compute_s(REQUEST, 1, span) == pytest.approx(truth, rel=0.02)
    draw = random.Random(2)
    for cells in (draw.randrange(1000, 50000) for _ in range(20)):
        learnt.loaded(REQUEST, 0, cells, TRUTH.load_s(REQUEST, 0, cells))
    assert learnt.load_s(REQUEST, 0, 777) == pytest.approx(TRUTH.load_s(REQUEST, 0, 777), rel=0.02)
    one_s = TRUTH.load_s(REQUEST, 0, 1)
    assert learnt.load_s(REQUEST, 0, 1) == pytest.approx(one_s, rel=0.05)


@pytest.mark.parametrize("pace", [0.2, 0.5, 3.0, 8.0])
def test_two_samples_tell_that_the_box_changed(pace: float) -> None:
    learnt = Measured()
    learn(learnt, TRUTH, spans(40))
    learn(learnt, TRUTH, spans(2, seed=9), pace)
    span = Span(10000, 12048)
    truth = TRUTH.compute_s(REQUEST, 1, span) * pace
    assert learnt.compute_s(REQUEST, 1, span) == pytest.approx(truth, rel=0.35)
    learn(learnt, TRUTH, spans(2, seed=10), pace)
    assert learnt.compute_s(REQUEST, 1, span) == pytest.approx(truth, rel=0.35)


def test_one_sample_that_is_far_off_changes_little() -> None:
    learnt = Measured()
    learn(learnt, TRUTH, spans(40))
    learn(learnt, TRUTH, spans(1, seed=9), pace=20.0)
    span = Span(10000, 12048)
    truth = TRUTH.compute_s(REQUEST, 1, span)
    assert learnt.compute_s(REQUEST, 1, span) == pytest.approx(truth, rel=0.25)


@pytest.mark.parametrize("off", [0.1, 5.0])
def test_a_stale_prior_is_put_right_by_the_first_sample(off: float) -> None:
    stale = Modelled(LLAMA, GPUS["A100"], 40 * off, share=off)
    learnt = Measured(stale)
    span = Span(0, 4096)
    assert learnt.compute_s(REQUEST, 1, span) == stale.compute_s(REQUEST, 1, span)
    assert learnt.suffix_s(REQUEST) == pytest.approx(stale.suffix_s(REQUEST))
    learn(learnt, TRUTH, [Span(0, 2048)])
    truth = TRUTH.compute_s(REQUEST, 1, span)
    assert learnt.compute_s(REQUEST, 1, span) == pytest.approx(truth, rel=0.1)
    learnt.loaded(REQUEST, 0, 5000, TRUTH.load_s(REQUEST, 0, 5000))
    assert learnt.load_s(REQUEST, 0, 9000) == pytest.approx(TRUTH.load_s(REQUEST, 0, 9000), rel=0.1)


def test_the_suffix_takes_what_it_took() -> None:
    learnt = Measured()
    learn(learnt, TRUTH, spans(10))
    learnt.suffixed(REQUEST, 1.5 * TRUTH.suffix_s(REQUEST))
    assert learnt.suffix_s(REQUEST) == pytest.approx(1.5 * TRUTH.suffix_s(REQUEST), rel=0.02)
    assert learnt.suffix_s(asked(LLAMA, 4096, 0)) == 0.0


def test_a_suffix_tells_what_computing_takes_where_nothing_else_does() -> None:
    stale = Modelled(LLAMA, GPUS["A100"], 40, share=0.1)
    learnt = Measured(stale)
    learnt.suffixed(REQUEST, TRUTH.suffix_s(REQUEST))
    truth = TRUTH.compute_s(REQUEST, 1, Span(0, 2048))
    assert learnt.compute_s(REQUEST, 1, Span(0, 2048)) == pytest.approx(truth, rel=0.3)
    assert learnt.suffix_s(REQUEST) == pytest.approx(TRUTH.suffix_s(REQUEST), rel=0.02)


def test_another_codec_of_the_same_tier_says_something() -> None:
    request = RestoreRequest(
        number=0,
        tokens=4096,
        suffix=0,
        layers=4,
        sources=(Source("a", "raw", 100.0), Source("a", "kv8", 50.0), Source("b", "raw", 100.0)),
    )
    learnt = Measured()
    learnt.loaded(request, 0, 1000, 1.0)
    assert learnt.load_s(request, 1, 1000) == pytest.approx(0.5)
    assert learnt.load_s(request, 2, 1000) == 0.0
    learnt.loaded(request, 1, 1000, 0.8)  # to decode takes its time
    assert learnt.load_s(request, 1, 1000) == pytest.approx(0.8)
    assert learnt.load_s(request, 0, 1000) == pytest.approx(1.0)


def test_a_suffix_of_a_few_tokens_does_not_say_what_computing_takes() -> None:
    span, few = Span(0, 2048), asked(LLAMA, 4096, 1)
    learnt = Measured(TRUTH)
    believed = learnt.compute_s(few, 32, span)
    for _ in range(5):
        learnt.suffixed(few, 50 * TRUTH.suffix_s(few))  # mostly what any forward takes
    assert learnt.compute_s(few, 32, span) == believed
    assert learnt.suffix_s(few) == pytest.approx(50 * TRUTH.suffix_s(few))
    page = asked(LLAMA, 4096, few.unit)
    learnt.suffixed(page, 3 * TRUTH.suffix_s(page))
    assert learnt.compute_s(few, 32, span) == pytest.approx(3 * believed)


def test_samples_of_nothing_say_nothing() -> None:
    learnt = Measured()
    learnt.computed(REQUEST, 0, Span(0, 512), 1.0)
    learnt.computed(REQUEST, 4, Span(8, 8), 1.0)
    learnt.computed(REQUEST, 4, Span(0, 8), 0.0)
    learnt.suffixed(REQUEST, 0.0)
    learnt.suffixed(asked(LLAMA, 4096, 0), 1.0)
    learnt.loaded(REQUEST, 0, 0, 1.0)
    learnt.loaded(REQUEST, 0, 5, 0.0)
    assert learnt.compute_s(REQUEST, 4, Span(0, 512)) == 0.0
    assert learnt.suffix_s(REQUEST) == 0.0
    assert learnt.load_s(REQUEST, 0, 5) == 0.0


def test_noise_does_not_make_it_wild() -> None:
    draw, learnt = random.Random(4), Measured()
    for span in spans(60):
        seconds = TRUTH.compute_s(REQUEST, 4, span) * draw.uniform(0.8, 1.25)
        learnt.computed(REQUEST, 4, span, seconds)
    for span in (Span(0, 512), Span(0, 8192), Span(50000, 54096)):
        truth = TRUTH.compute_s(REQUEST, 1, span)
        assert truth / 1.6 < learnt.compute_s(REQUEST, 1, span) < truth * 1.6


def test_threads_learn_at_once() -> None:
    """Models generate in several threads, and each tells what it took."""
    measured = Measured(TRUTH)

    def work(seed: int) -> None:
        for span in spans(2000, seed):
            learn(measured, TRUTH, [span])
            measured.loaded(REQUEST, 0, 1000, 0.25)

    pause_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(*(partial(work, seed) for seed in range(4)))
    finally:
        sys.setswitchinterval(pause_s)
