"""Architectures on a GPU: cold, again and in a batch, plain's tokens."""

from __future__ import annotations

import pytest
import torch

from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused

NAMES = [*models.CAUSAL, *models.HYBRID]
ON_A_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in NAMES]


@pytest.mark.parametrize(("name", "device"), [("llama", "cpu"), *ON_A_GPU])
def test_architectures_answer_as_without_a_cache(name: str, device: str) -> None:
    model = models.causal(name).to(device)
    first, more = (models.prompt(n, seed).to(device) for n, seed in ((120, 1), (40, 7)))
    batch = torch.cat([models.prompt(70, seed) for seed in (1, 2, 3)]).to(device)
    mask = torch.ones_like(batch)
    mask[1, :20] = mask[2, :33] = 0
    asked = [
        dict(input_ids=first),
        dict(input_ids=torch.cat([first, more], 1)),
        dict(input_ids=batch, attention_mask=mask),
    ]
    right = [generate(model, **inputs) for inputs in asked]
    with attached(model) as kv:
        for _ in range(2):
            for inputs, theirs in zip(asked, right, strict=True):
                assert_same(generate(model, **inputs), theirs)
        assert reused(kv) > 0
