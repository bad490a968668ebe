"""Runs `generate` with and without a cache of ours and compares what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import flowkv
from tests.hooks import models

PAST = "cache" if hasattr(CausalLMOutputWithPast(), "cache") else "past_key_values"
"""What transformers calls the cache: from 5.24 on, `cache`."""


def generate(model: torch.nn.Module, new_tokens: int = 20, **inputs: Any) -> Any:
    """Greedy unless told otherwise; returns sequences and logits."""
    options = dict(
        do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True
    )
    return model.generate(**{**options, **inputs})


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any = None, **given: Any) -> torch.Tensor:
    """Logits `[B, vocabulary]` behind tokens that a cache gets, a fresh one if none is given."""
    cache = DynamicCache(config=model.config.get_text_config()) if cache is None else cache
    how = {PAST: cache, "use_cache": True, "logits_to_keep": 1} | given
    logits: torch.Tensor = model(input_ids=ids, **how).logits[:, -1]
    return logits


def filled(model: Any, ids: torch.Tensor, **given: Any) -> Any:
    """A cache with the keys and values of some tokens."""
    cache = DynamicCache(config=model.config.get_text_config())
    forward(model, ids, cache, **given)
    return cache


def turns(model: Any, new_tokens: int = 20, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Prompt and answer of two turns of a chat."""
    prompt = models.prompt(70)
    first = generate(model, new_tokens, input_ids=prompt, **options)
    longer = torch.cat([first.sequences, models.prompt(15, seed=2)], 1)
    return prompt, first, longer, generate(model, new_tokens, input_ids=longer, **options)


def assert_same(ours: Any, theirs: Any, tolerance: float = 2e-4) -> None:
    """Equal tokens, and logits equal up to the order of additions."""
    assert torch.equal(ours.sequences, theirs.sequences)
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        spread = b.abs().max().clamp_min(1.0)
        worst = float(((a - b).abs() / spread).max())
        assert worst < tolerance, f"logits differ by {worst} at step {step}"


@contextmanager
def attached(model: torch.nn.Module, **options: Any) -> Iterator[flowkv.KV]:
    """`flowkv.attach` for the length of a block, with small pages unless told otherwise."""
    kv = flowkv.attach(model, **{"gpu": "64MiB", "page_size": 16, **options})
    try:
        yield kv
    finally:
        kv.close()


def reused(kv: flowkv.KV) -> int:
    """Tokens that did not have to be computed so far."""
    return int(kv.stats()["tokens_reused"])


def foreign(kv: flowkv.KV) -> str:
    """Why nothing of the attached model is shared; "" if its pages are."""
    return str(kv.stats()["foreign"])


def asked(model: Any) -> list[tuple[dict[str, Any], Any]]:
    """Calls of `generate` with a prompt, a longer one and a padded batch, and plain's answers."""
    first, more = (models.prompt(n, seed).to(model.device) for n, seed in ((120, 1), (40, 7)))
    batch = torch.cat([models.prompt(70, seed) for seed in (1, 2, 3)])
    padded = models.pad_rows(batch, 0, 20, 33)
    calls = [
        dict(input_ids=first),
        dict(input_ids=torch.cat([first, more], 1)),
        {name: value.to(model.device) for name, value in padded.items()},
    ]
    return [(call, generate(model, **call)) for call in calls]
