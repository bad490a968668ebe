"""Results that are remembered: `python -m bench memo`.

Four cells, each against the same calls without `memo`, call by call in turn, all with random models
and on the CPU: a text encoder none of whose inputs, and two fifths of whose inputs, were seen
before; prompts with images; batches of 64 texts. Processor time is of all threads of the process,
so what is stored behind a call's back is in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import flowkv
from bench.figures import between, save
from flowkv.cli.arguments import AddVerb
from flowkv.report.screen import Screen

_LENGTH, _WORDS = 64, 8192
_IMAGES, _PROMPTS = 12, 50


def text_encoder(layers: int = 6) -> Any:
    """A sentence encoder of 384 dimensions, with random weights."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=_WORDS,
        hidden_size=384,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    return transformers.BertModel(config).eval()


def image_model() -> Any:
    """A decoder that reads images of 196 patches, with random weights."""
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=224,
        patch_size=16,
    )
    text = transformers.LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
        pad_token_id=0,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=4, image_seq_length=196
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def sentences(seeds: Any) -> torch.Tensor:
    """Token ids of sentences, each by its number."""
    rows = [
        torch.randint(5, _WORDS, (_LENGTH,), generator=torch.Generator().manual_seed(int(seed)))
        for seed in seeds
    ]
    return torch.stack(rows)


def in_turn(
    plain: Callable[[Any], Any], remembered: Callable[[Any], Any], inputs: Iterator[Any]
) -> dict[str, list[float]]:
    """Seconds of each call of both, wall and processor; whoever is first changes."""
    found: dict[str, list[float]] = {
        name: [] for name in ("plain", "memo", "plain cpu", "memo cpu")
    }
    for number, given in enumerate(inputs):
        pair = [("plain", plain), ("memo", remembered)]
        for name, call in pair if number % 2 else pair[::-1]:
            began = time.perf_counter(), time.process_time()
            call(given)
            found[name].append(time.perf_counter() - began[0])
            found[f"{name} cpu"].append(time.process_time() - began[1])
    return found


def compared(found: dict[str, list[float]], percent: float) -> dict[str, float]:
    """A percentile of both, in milliseconds, and their ratios."""
    at = {name: float(np.percentile(each, percent)) for name, each in found.items()}
    return {
        "plain_ms": 1e3 * at["plain"],
        "memo_ms": 1e3 * at["memo"],
        "ratio": at["memo"] / at["plain"],
        "cpu_ratio": sum(found["memo cpu"]) / sum(found["plain cpu"]),
    }


def repeated(share: float, calls: int, start: int) -> dict[str, float]:
    """Batches of 20 sentences, a share of which was seen before; the median call."""
    encoder = text_encoder()
    known = round(20 * share)
    with flowkv.memo(encoder, places="host:256MiB") as remembered:
        seen = sentences(range(start, start + 40))
        remembered(seen)
        remembered.flush()
        first = start + 1000

        def inputs() -> Iterator[torch.Tensor]:
            for call in range(calls):
                fresh = range(first + call * 20, first + call * 20 + 20 - known)
                rows = [seen[(call * known + i) % 40] for i in range(known)]
                yield torch.stack([*rows, *sentences(fresh)])

        found = compared(in_turn(encoder, remembered, inputs()), 50)
        # What the encoder itself takes for the rows that are new: nobody needs less.
        least = in_turn(encoder, lambda given: encoder(given[known:]), inputs())
        return found | {"least_ratio": compared(least, 50)["ratio"]}


def embeddings(calls: int, start: int) -> dict[str, float]:
    """Batches of 64 sentences, drawn by Zipf's law of 2,000, 20 before; the 95th percentile."""
    encoder = text_encoder(layers=2)
    draws = np.random.default_rng(start)
    weights = 1.0 / np.arange(1, 2001)
    weights /= weights.sum()

    def draw() -> torch.Tensor:
        return sentences(start * 10_000 + draws.choice(2000, 64, p=weights))

    with flowkv.memo(encoder, places="host:256MiB") as remembered:
        for _ in range(20):
            remembered(draw())
        before = remembered.stats()
        found = compared(in_turn(encoder, remembered, (draw() for _ in range(calls))), 95)
        after = remembered.stats()
        rows = after["rows"] - before["rows"]
        return found | {"computed_share": (after["computed"] - before["computed"]) / rows}


def prompts(*, seen: bool, start: int) -> dict[str, float]:
    """Fifty prompts over twelve images, first tokens; the 95th percentile."""
    pixels = torch.randn(_IMAGES, 3, 224, 224, generator=torch.Generator().manual_seed(start))
    chosen = np.random.default_rng(start).integers(0, _IMAGES, _PROMPTS)

    def inputs(numbers: Any, first: int) -> Iterator[dict[str, torch.Tensor]]:
        for i, image in enumerate(numbers):
            question = sentences([first + i])[:, :32]
            ids = torch.cat([question, torch.full((1, 196), 4)], dim=1)
            yield {"input_ids": ids, "pixel_values": pixels[image : image + 1]}

    def answers(model: Any) -> Callable[[dict[str, torch.Tensor]], Any]:
        return lambda given: model.generate(**given, max_new_tokens=1, do_sample=False)

    plain, remembering = image_model(), image_model()
    options: dict[str, Any] = {"gpu": "256MiB", "host": "0"}
    with flowkv.attach(plain, **options), flowkv.attach(remembering, memo="host:1GiB", **options):
        both = answers(plain), answers(remembering)
        warm = range(_IMAGES) if seen else [0] * 2
        for given in inputs(warm, start * 1000 + 500):
            for call in both:
                call(given)
        return compared(in_turn(*both, inputs(chosen, start * 1000)), 95)


CELLS: dict[str, Callable[[int, int], dict[str, float]]] = {
    "no input seen before, 20 sentences, p50": lambda calls, start: repeated(0.0, calls, start),
    "40 % seen before, 20 sentences, p50": lambda calls, start: repeated(0.4, calls, start),
    "64 sentences by Zipf's law, p95": lambda calls, start: embeddings(2 * calls, start),
    "50 prompts over 12 images seen before, p95": lambda calls, start: prompts(
        seen=True, start=start
    ),
    "50 prompts over 12 images, p95": lambda calls, start: prompts(seen=False, start=start),
}


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("memo", _memo, "results that are remembered, against the same calls without")
    added.option("--rounds", "N", "of each cell; default %(default)s", type=int, default=3)
    added.option("--calls", "N", "of a round; default %(default)s", type=int, default=12)
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=1)
    added.option("--out", "FILE", "writes all figures as JSON", type=Path)


def _memo(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    torch.set_num_threads(given.threads)
    rows, raw = [], {}
    with torch.no_grad():
        for name, cell in CELLS.items():
            raw[name] = [cell(given.calls, 1 + round_) for round_ in range(given.rounds)]
            row = {"cell": name}
            for figure in raw[name][0]:
                row[figure] = between([one[figure] for one in raw[name]], ".3g")
            rows.append(row)
    figures = [*dict.fromkeys(figure for row in rows for figure in row)]
    screen.table(figures, [[row.get(figure, "-") for figure in figures] for row in rows])
    save(given.out, raw)
    return 0, {"cells": rows}
