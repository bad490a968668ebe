"""Search for the conditions of a published ratio (arXiv 2604.25080, second version).

A staircase is said to be 2.24 to 3.00 times as fast, on the mean, as the best policy before it.
Requests come one alone, several at once, or one after the other at random times; all is simulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from bench.restore.baselines import make_restore_policy
from bench.restore.grid import LEAST_TOKENS, MOST_TOKENS
from flowkv.policy.restore import RestoreRequest
from flowkv.policy.restore.costs import Measured, lower_bound
from flowkv.report.screen import Screen
from flowkv.sim.restore import GPUS, SHAPES, Accelerator, Decoder, Modelled, asked, run

CLAIMED = 2.24
PRIORS = ("recompute", "load-layers", "cake", "two-pointer-v1")
"""What the paper compares with, by our reading; `layers` it does not."""
POLICIES = (*PRIORS, "layers", "staircase", "flowkv")
SHOWN = ("bound", "staircase", "flowkv", "layers", "cake-2048")
EIGHT = Accelerator("8 H100", 8 * GPUS["H100"].flops, 8 * GPUS["H100"].bytes_per_s)
MLA = Decoder("MLA of 37B", 61, 7168, 71, 1, 288, 2048, experts=7)
"""A shape with the bytes (576 numbers a token and layer) and operations of DeepSeek-V3."""
PLACES = (
    *((SHAPES["Llama-3.1-8B"], GPUS["H100"]), (SHAPES["Qwen3-30B-A3B"], GPUS["H100"])),
    *((MLA, EIGHT), (SHAPES["Llama-3.1-8B"], GPUS["L40S"]), (SHAPES["Llama-3.1-70B"], EIGHT)),
)
ARRIVALS = ((0.0, 64, 0.7), (0.0, 64, 0.85), (0.0, 1024, 0.85), (0.8, 64, 0.85))
"""Spreads of lengths, suffixes and loads of requests that come over time."""


class Floor(Modelled):
    """Costs for bounds: the best possible ones, but for suffixes, which every policy computes."""

    def __init__(self, costs: Modelled) -> None:
        super().__init__(costs.model, costs.gpu, costs.rates, share=costs.share, ideal=True)
        self.suffix_s = costs.suffix_s  # type: ignore[method-assign]


class Situation(NamedTuple):
    """One situation: a model, a GPU, a link's Gbps, and requests.

    `tokens` is the median length, `spread` the sigma of its logarithm; `load` is the rate of
    arrivals over the highest rate that the bound allows, 0 for all at once.
    """

    model: Decoder
    gpu: Accelerator
    gbps: float
    tokens: int
    suffix: int
    size: int = 1
    spread: float = 0.0
    load: float = 0.0

    @property
    def part(self) -> str:
        """Return the name of the part of the search that it belongs to."""
        when = "over time" if self.load else "at once"
        return f"lengths of spread {self.spread:g} {when}" if self.size > 1 else "one request"

    def requests(self, costs: Modelled) -> list[RestoreRequest]:
        """Return the same requests in each call."""
        draw = random.Random(1)
        some = [self.tokens * draw.lognormvariate(0.0, self.spread) for _ in range(self.size)]
        ends = [max(LEAST_TOKENS, min(MOST_TOKENS, int(n) // 64 * 64)) for n in some]
        found = [asked(self.model, n, self.suffix, number=i) for i, n in enumerate(ends)]
        each_s = lower_bound(found, costs.ideal) / self.size
        times = [draw.expovariate(self.load / each_s) if self.load else 0.0 for _ in found]
        return [replace(one, arrived_s=sum(times[: one.number])) for one in found]

    def ratios(self) -> dict[str, float]:
        """Return the best prior's mean time over that of each policy, and over the bound."""
        costs = Modelled(self.model, self.gpu, self.gbps)
        requests = self.requests(costs)
        means = {"bound": lower_bound(requests, Floor(costs), of="mean")}
        policies = {name: make_restore_policy(name) for name in POLICIES}
        policies["cake-2048"] = make_restore_policy("cake", chunk=2048)
        for name, policy in policies.items():
            means[name] = run(requests, policy, costs, believed=Measured(costs)).mean_s
        best_s = min(means[name] for name in PRIORS)
        return {name: best_s / mean_s for name, mean_s in means.items()}


def situations() -> Iterator[Situation]:
    """Yield all situations of the search."""
    links, tokens, suffixes = (1, 10, 40, 100, 400), (2048, 8192, 32768), (1, 64, 512, 2048, 8192)
    for (model, gpu), gbps, prefix, suffix in product(PLACES, links, tokens, suffixes):
        yield Situation(model, gpu, gbps, prefix, suffix)
    for (model, gpu), gbps, size in product(PLACES, links[:4], (4, 16)):
        yield Situation(model, gpu, gbps, 8192, 512, size)
    for spread, (model, gpu), gbps, size in product((0.8, 1.5), PLACES[:3], links[1:3], (8, 64)):
        yield Situation(model, gpu, gbps, 8192, 512, size, spread)
    for (spread, suffix, load), (model, gpu), gbps in product(ARRIVALS, PLACES[:3], (4, 25)):
        yield Situation(model, gpu, gbps, 8192, suffix, 128, spread, load)


def show_headline(screen: Screen) -> list[tuple[Situation, dict[str, float]]]:
    """Search all situations; show each part's highest ratios and where the claim holds."""
    found, lines = [(one, one.ratios()) for one in situations()], []
    for part in dict.fromkeys(one.part for one, _ in found):
        own = [ratios for one, ratios in found if one.part == part]
        most = [f"{max(ratios[name] for ratios in own):.2f}" for name in SHOWN]
        lines.append([part, str(len(own)), *most])
    screen.table(["the best prior, at most over", "cells", *SHOWN], lines)
    for one, ratios in found:
        if ratios["staircase"] >= CLAIMED:
            figures = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            what = f"{one.tokens} + {one.suffix} tokens, load {one.load:g}: {figures}"
            screen.say(f"{one.model.name} on {one.gpu.name}, {one.gbps:g} Gbps, {what}")
    return found
