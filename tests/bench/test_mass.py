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


def test_of_a_scan_a_fixed_set_saves_its_share() -> None:
    trace = mass.scan(40, 100)
    hits = {name: replay(trace, name, size=0.25).block_hit_ratio for name in ("cyclic", "lru")}
    assert hits["lru"] == 0.0
    best = replay(trace, "opt", size=0.25).block_hit_ratio
    assert 0.85 * best < hits["cyclic"] <= best <= 0.25  # it has to see that it is a cycle
