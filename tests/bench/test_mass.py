"""`python -m bench mass`: shares of weight add up, and a scan is what policies are told it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import mass
from flowkv.sim import replay
from tests.fixture_model import load_tiny
from tests.hooks.compare import attached

pytestmark = pytest.mark.usefixtures("one_thread")


def test_weights_of_an_answer_are_shares() -> None:
    model = load_tiny()
    prompt = list(b"def area(width, height):\n    return width * height\n" * 8)
    with attached(model, page_size=16) as kv, torch.no_grad():
        found = mass.recorded(model, kv, prompt, 4)
    assert found.shape == (4, 4, -(-(len(prompt) + 1) // 16))
    np.testing.assert_allclose(found.sum(2), 1)
    ages = np.array(list(mass.by_age(found).values()))
    np.testing.assert_allclose(ages.sum(0), 1)
    held = mass.held(found, 0.5)
    assert held["the best of each step"] >= max(held.values()) - 1e-9


def test_of_a_scan_the_optimum_saves_what_a_fixed_set_does_and_lru_nothing() -> None:
    steps, share = 40, 0.25
    trace = mass.scan(steps, 100)
    best, lru = (replay(trace, name, size=share).block_hit_ratio for name in ("opt", "lru"))
    assert best == pytest.approx(share * (steps - 1) / steps)  # nothing in the first step
    assert lru == 0.0
