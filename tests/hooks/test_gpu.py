"""Architectures on a GPU: cold, again and in a batch, plain's tokens."""

from __future__ import annotations

import pytest

from tests.hooks import models
from tests.hooks.compare import asked, assert_same, attached, generate, reused

NAMES = [*models.CAUSAL, *models.HYBRID]
ON_A_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in NAMES]


@pytest.mark.parametrize(("name", "device"), [("llama", "cpu"), *ON_A_GPU])
def test_architectures_answer_as_without_a_cache(name: str, device: str) -> None:
    model = models.causal(name).to(device)
    questions = asked(model)
    with attached(model) as kv:
        for _ in range(2):
            for inputs, theirs in questions:
                assert_same(generate(model, **inputs), theirs)
        assert reused(kv) > 0
