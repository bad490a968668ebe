"""Measurement of generation: time to the first token (TTFT) and per further token (TPOT).

A streamer reads the clock whenever `generate` passes it tokens. The first call brings the prompt
itself; TTFT ends with the second, TPOT is the mean gap between the rest. `generate` moves tokens to
the CPU before it passes them, so that a GPU has finished them by then.

Warm up with another prompt first, or compilers and allocators are measured; interleave the compared
runs, and compare medians.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flowkv.core.errors import ConfigError


class Stamps:
    """Streamer of Hugging Face's `generate` that records the time of each token.

    Attributes:
        wall_s: `time.perf_counter` at each call of `put`, the prompt's first.
    """

    def __init__(self) -> None:
        self.wall_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the time of the prompt or of a new token of each row; called by `generate`."""
        self.wall_s.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing; called by `generate` when it is done."""


class Timing(NamedTuple):
    """Times and answers of one call of `generate`.

    Attributes:
        answers: New tokens of each row.
        ttft_s: Time from the call to the first new token.
        tpot_s: Mean time per further token; 0 if there was none.
    """

    answers: list[list[int]]
    ttft_s: float
    tpot_s: float


def timed_generate(
    model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, **options: Any
) -> Timing:
    """Generate greedily, and measure the times.

    Args:
        model: A Hugging Face causal language model, with or without FlowKV attached.
        prompts: One row or more, all of the same length.
        max_new_tokens: Most new tokens of a row, at least 1.
        **options: Further arguments of `generate`.

    Raises:
        ConfigError: A prompt is empty, or their lengths differ.
    """
    if len({len(prompt) for prompt in prompts}) != 1 or not prompts[0]:
        raise ConfigError(
            "prompts of one timed call are empty or differ in length",
            "Pass non-empty rows of equal length, or one call per prompt",
        )
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    stamps = Stamps()
    began_s = time.perf_counter()
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=stamps,
        **options,
    )
    first, last, gaps = stamps.wall_s[1], stamps.wall_s[-1], len(stamps.wall_s) - 2
    tpot_s = (last - first) / gaps if gaps else 0.0
    return Timing(done[:, ids.shape[1] :].tolist(), first - began_s, tpot_s)


class Reuse(NamedTuple):
    """A cache's counters of reuse; their difference is the reuse between two points in time.

    Attributes:
        seen: Tokens of prompts.
        reused: Tokens of prompts that were not computed.
        loaded_bytes: Bytes read from tiers below the device, by kind of tier.
    """

    seen: int
    reused: int
    loaded_bytes: dict[str, int]

    @classmethod
    def of(cls, kv: Any) -> Reuse:
        """Return the counters of a `KV` now."""
        stats = kv.stats()
        loaded: dict[str, int] = {}
        for tier in stats["tiers"].values():
            loaded[tier["kind"]] = loaded.get(tier["kind"], 0) + tier["loaded_bytes"]
        return cls(stats["tokens_seen"], stats["tokens_reused"], loaded)

    def since(self, before: Reuse) -> Reuse:
        """Return the reuse since `before`."""
        loaded = {k: n - before.loaded_bytes.get(k, 0) for k, n in self.loaded_bytes.items()}
        return Reuse(self.seen - before.seen, self.reused - before.reused, loaded)


NOTHING = Reuse(0, 0, {})
"""Counters before the first request, or without a cache."""
