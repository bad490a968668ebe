"""What a prompt that was never seen costs beyond the plain model, counted."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import flowkv
from tests.fixture_model import load_tiny
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused

ROOT = str(Path(flowkv.__file__).parent)


def calls(model: Any, tokens: int, seed: int) -> Counter[str]:
    """FlowKV's own calls of Python functions for one unseen prompt and one new token, by name."""
    prompt = torch.randint(1, 255, (1, tokens), generator=torch.Generator().manual_seed(seed))
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            found[code.co_qualname] += 1

    sys.setprofile(note)
    try:
        model.generate(prompt, max_new_tokens=1, min_new_tokens=1, do_sample=False, pad_token_id=0)
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def model() -> Any:
    return load_tiny().eval()


def test_weights_are_read_when_a_prompt_begins_and_before_its_pages_are_known(model: Any) -> None:
    with flowkv.attach(model, gpu="32MiB"):
        calls(model, 300, 0)
        for tokens in (300, 50):  # 50 fill no page, but the unfilled one is kept
            found = calls(model, tokens, tokens)
            assert found["Walk.same"] == found["Weights.same"] == 2
            assert found["checksum"] == 0, "the sums of the name are for a name that is new"


@pytest.mark.parametrize("known", ["whole", "beginning", "nothing"])
@pytest.mark.parametrize("tokens", [12, 150], ids=["tail", "pages"])
def test_a_write_without_a_count_between_two_prompts(known: str, tokens: int) -> None:
    """Pages made before are not used, those made since are not found when it is undone."""
    model, twin = models.causal("llama"), models.causal("llama")
    ids = models.prompt(tokens)
    begun = dict(whole=ids, beginning=torch.cat([ids[:, :-5], ids[:, :4]], 1))
    with attached(model) as kv:
        for prompt in (models.prompt(100, seed=9), begun.get(known)):
            if prompt is not None:
                generate(model, 2, input_ids=prompt)
        before = reused(kv)
        for factor in (2.0, 0.5, 2.0, 0.5):
            for each in (model, twin):
                each.lm_head.weight.detach().numpy()[:] *= factor  # what is seen at once
                each.model.layers[0].self_attn.v_proj.weight.detach().numpy()[:] *= factor
            assert_same(generate(model, 3, input_ids=ids), generate(twin, 3, input_ids=ids))
        # Tails go when a name does; pages that were known under each are known again.
        assert (reused(kv) > before) == (tokens > 16)


def test_an_unseen_prompt_takes_few_calls_of_python(model: Any) -> None:
    with flowkv.attach(model, gpu="32MiB"):
        calls(model, 300, 0)
        assert sum(calls(model, 300, 1).values()) < 900  # 785; 1,155 before they were batched


def test_an_unseen_prompt_that_is_stored_takes_few_calls_of_python(
    model: Any, tmp_path: Path
) -> None:
    with flowkv.attach(model, gpu="32MiB", disk=f"{tmp_path}:256MiB") as kv:
        calls(model, 300, 0)
        kv.flush()
        found = calls(model, 300, 1)
        assert sum(found.values()) < 2300  # 1,560 to 1,880; how many answers of a disk, time says
