"""Nested forwards: parts of prompts computed on their own are what one forward computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.inside import Fill, ForwardCall, Nested, door_of
from tests.inside import restore_Part as Part

from . import models
from .compare import assert_same, attached, generate, reused

NOTHING_FILLED = Fill([], {}, {})


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """A left-padded batch of prompts of these lengths."""
    return models.padded(*(models.prompt(length, row + 1) for row, length in enumerate(lengths)))


def first_forward(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, ForwardCall]:
    """The door of a model, and the first forward that `generate` would do over these inputs."""
    door = door_of(model)
    assert door is not None
    given = {**inputs, "past_key_values": DynamicCache(), "logits_to_keep": 1}
    if "position_ids" in door.names.parameters:
        given["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    call = ForwardCall(door.names, given)
    assert not call.problem
    return door, call


def opened(door: Any, call: ForwardCall) -> list[flowkv.Sequence]:
    prompts = call.prompts(call.pads() or [])
    return [door.kv.open(p.tokens, salts=p.salts, reuse=False) for p in prompts]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("llama", "bloom") else pytest.mark.slow)
        for name in ("llama", "mistral", "deepseek_v3", "gpt_oss", "bloom")
    ],
)
def test_rows_advance_as_they_like(name: str) -> None:
    model, inputs = models.causal(name), padded(100, 70, 83)
    theirs = generate(model, **inputs)
    with attached(model) as kv:
        door, call = first_forward(model, inputs)
        run = Nested(door, call, call.types, NOTHING_FILLED)
        seqs, pads = opened(door, call), [0, 30, 17]
        # Others go on, one rests, and one begins late; then all have the pages that they can.
        for counts in [(16, 0, 32), (32, 16, 0), (7, 48, 48), (41, 0, 0)]:
            parts = zip(seqs, pads, counts, strict=True)
            run.compute([Part(r, s, p, n) for r, (s, p, n) in enumerate(parts) if n])
        assert [seq.length for seq in seqs] == [96, 64, 80]
        assert_same(generate(model, **inputs), theirs)
        assert reused(kv) == 94 + 64 + 77
        for seq in seqs:
            seq.close()


def test_a_failed_forward_leaves_the_rows_as_they_were() -> None:
    model, inputs = models.causal("llama"), padded(60, 60)
    with attached(model):
        door, call = first_forward(model, inputs)
        run, seqs = (Nested(door, call, call.types, NOTHING_FILLED), opened(door, call))
        parts = [Part(row, seq, 0, 16) for row, seq in enumerate(seqs)]
        run.compute(parts)

        def stop(layer: int) -> None:
            if layer == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run.compute(parts, stop)
        assert [seq.length for seq in seqs] == [16, 16]
        run.compute(parts)
        assert [seq.length for seq in seqs] == [32, 32]
