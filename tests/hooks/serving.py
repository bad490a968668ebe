"""Serves prompts through a runner in ragged steps: parts of prompts beside single tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from flowkv import Request
from tests.inside import PackedRunner, Parts, Runner


def runner_of(parts: Parts, kv: Any) -> Runner:
    """The runner that an engine would use; before each row, the model is looked at."""
    runner = parts.apart if parts.forward is None else PackedRunner(kv, parts.forward)
    own = runner.open

    def look_and_open(*given: Any, **how: Any) -> Any:
        parts.refresh()
        return own(*given, **how)

    vars(runner)["open"] = look_and_open
    return runner


def serve(
    runner: Runner,
    prompts: Items[Items[int]],
    new_tokens: int,
    *,
    seed: int = 0,
    chunk: int = 13,
    logits: dict[tuple[int, int], torch.Tensor] | None = None,
) -> list[list[int]]:
    """Greedy tokens of each prompt. Which rows are in a step, and how far they go, is drawn.

    Args:
        runner: Runs the model.
        prompts: Token ids of each.
        new_tokens: Of each.
        seed: Of what is drawn.
        chunk: Most tokens of a row in a step.
        logits: Filled by (prompt, number of the new token), if given.
    """
    rng = np.random.default_rng(seed)
    texts = [list(map(int, prompt)) for prompt in prompts]
    rows = [
        runner.open(Request(prompt=text), np.asarray(text, np.uint32), wait=True) for text in texts
    ]
    live = set(range(len(rows)))
    while live:
        some = [i for i in sorted(live) if rng.random() < 0.7] or [min(live)]
        parts = []
        for i in some:
            first, count = rows[i].seq.length, int(rng.integers(1, chunk + 1))
            parts.append(np.asarray(texts[i][first : first + count], np.uint32))
        groups = [some] if runner.together else [[i] for i in some]
        for group in groups:
            given = [parts[some.index(i)] for i in group]
            answers = runner.step([rows[i] for i in group], given)
            for i, answer in zip(group, answers, strict=True):
                if rows[i].seq.length < len(texts[i]):
                    continue
                texts[i].append(int(answer.argmax()))
                made = len(texts[i]) - len(prompts[i])
                if logits is not None:
                    logits[i, made - 1] = answer
                if made == new_tokens:
                    live.discard(i)
                    rows[i].close()
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
