"""Lengths of prompts and answers: drawn from what was fitted, or from a public trace.

Source of the fits: the Azure LLM inference trace of 2023 (Patel et al., "Splitwise", arXiv
2311.18677), lengths of 19,366 conversations and 8,819 completions of code: mean and deviation of
the logarithms, ends cut where the trace ends.
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.policy.ground import PUBLIC
from flowkv.core.errors import ConfigError

FULL_CONTEXT = 8192
"""Tokens of the context that those lengths are for; they shrink with a smaller one."""

MIXED = "mixed"
"""Short and long answers side by side: what tells schedulers apart."""

_SHORT, _LONG, _LONG_SHARE = 12, 192, 0.2


class Fit(NamedTuple):
    """Lognormal lengths: of the logarithms' mean and deviation, and the longest.

    Attributes:
        prompt: Of prompts.
        answer: Of answers.
    """

    prompt: tuple[float, float, int]
    answer: tuple[float, float, int]


FITS = MappingProxyType(
    {
        "chat": Fit((6.64, 0.98, 4142), (5.03, 0.85, 601)),
        "code": Fit((7.00, 1.35, 7436), (2.86, 0.81, 252)),
    }
)
"""Generators, by name."""

_TRACES = MappingProxyType({"azure-chat": "conv", "azure-code": "code"})

KINDS = (*FITS, *_TRACES, MIXED)
"""All that `draw_lengths` knows, beside `PROMPT+ANSWER`."""


def draw_lengths(
    kind: str, count: int, context: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Tokens of prompts and answers, int64 `[count, 2]`, all at least 2 and within the context.

    Args:
        kind: A name in `KINDS`, or `"512+64"`: that many tokens of each.
        count: Requests.
        context: Most tokens of prompt and answer; lengths shrink by `context / FULL_CONTEXT`.
        rng: Source of randomness.

    Raises:
        ConfigError: If there is no such kind, or the public trace is not there.
    """
    if kind == MIXED:
        long = rng.random(count) < _LONG_SHARE
        prompts = rng.integers(16, 129, count)
        pairs = np.stack([prompts, np.where(long, _LONG, _SHORT)], 1)
    elif kind in FITS:
        fit = FITS[kind]
        drawn = [
            np.minimum(rng.lognormal(mean, deviation, count), most) for mean, deviation, most in fit
        ]
        pairs = _scaled(np.stack(drawn, 1), context)
    elif kind in _TRACES:
        known = read_azure(_TRACES[kind])
        first = int(rng.integers(len(known)))  # neighbours stay neighbours
        pairs = _scaled(known[np.arange(first, first + count) % len(known)] * 1.0, context)
    else:
        pairs = np.tile(np.array([_fixed(kind)]), (count, 1))
    return _fitting(pairs, context)


def read_azure(part: str) -> NDArray[np.int64]:
    """Lengths of the public Azure trace in the order of arrival, int64 `[requests, 2]`.

    Args:
        part: "conv" or "code".

    Raises:
        ConfigError: If `FLOWKV_TRACES` does not name a directory that holds it.
    """
    name = f"azure_llm/AzureLLMInferenceTrace_{part}.csv.zst"
    path = Path(os.environ.get(PUBLIC, ""), name)
    if not os.environ.get(PUBLIC) or not path.is_file():
        raise ConfigError(
            f"the public trace {name} is not there",
            f"Set {PUBLIC} to the directory that holds it, or use one of {', '.join(FITS)}",
        )
    with path.open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file).read().decode()
    rows = csv.DictReader(io.StringIO(text))
    return np.array([[int(r["ContextTokens"]), int(r["GeneratedTokens"])] for r in rows])


def _scaled(pairs: NDArray[np.floating[Any]], context: int) -> NDArray[np.int64]:
    scaled: NDArray[np.int64] = np.rint(pairs * min(1.0, context / FULL_CONTEXT)).astype(np.int64)
    return scaled


def _fitting(pairs: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    answers = np.clip(pairs[:, 1], 2, context // 2)
    return np.stack([np.clip(pairs[:, 0], 2, context - answers), answers], 1)


def _fixed(kind: str) -> tuple[int, int]:
    prompt, plus, answer = kind.partition("+")
    if not (plus and prompt.isdigit() and answer.isdigit()):
        raise ConfigError(
            f"there are no lengths {kind!r}", f"Use one of {', '.join(KINDS)}, or as in 512+64"
        )
    return int(prompt), int(answer)
