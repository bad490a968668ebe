"""Settings of the published comparisons on the virtual clock, and pipelines of stages."""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.costs import lower_bound
from flowkv.policy.restore.policy import Compute, RestorePolicy, RestoreRequest, TwoPointer
from flowkv.sim.restore import GPUS, SHAPES, Modelled, Run, VirtualClock, asked, run

# The grid of the protocol, cell by cell, on the virtual clock.
#
# Three models, three accelerators, 10, 40 and 80 Gbps (1 Gbps = 1e9 bit/s) and prefixes of 6K to
# 96K tokens: the settings of the published comparisons (arXiv 2604.25080, 2410.03065).

GRID_MODELS = tuple(SHAPES)[:3]  # those of the published comparisons
GRID_GPUS = ("L40S", "A100", "H100")
GRID_GBPS = (10.0, 40.0, 80.0)
GRID_TOKENS = (6144, 16384, 30720, 98304)


class Cell(NamedTuple):
    """One setting.

    Attributes:
        model: Name in `SHAPES`.
        gpu: Name in `GPUS`.
        gbps: Rate of the link.
        tokens: Of the prefix.
        suffix: Tokens behind it.
        share: Of the accelerator, what the restore gets.
    """

    model: str
    gpu: str
    gbps: float
    tokens: int
    suffix: int = 512
    share: float = 1.0

    @property
    def costs(self) -> Modelled:
        """What things take there."""
        return Modelled(SHAPES[self.model], GPUS[self.gpu], self.gbps, share=self.share)

    def request(self, *, whole: bool = False, codecs: tuple[str, ...] = ("raw",)) -> RestoreRequest:
        """Its only request."""
        shape = SHAPES[self.model]
        return asked(shape, self.tokens, self.suffix, whole=whole, codecs=codecs)

    def run(self, policy: RestorePolicy, *, whole: bool = False) -> Run:
        """Restores the request as a policy says."""
        return run([self.request(whole=whole)], policy, self.costs)

    def bound_s(self) -> float:
        """Seconds that no policy can beat."""
        return lower_bound(self.request(), self.costs.ideal)


def grid(suffix: int = 512, share: float = 1.0) -> tuple[Cell, ...]:
    """All 108 settings with such a suffix and such a share of the accelerator."""
    settings = product(GRID_MODELS, GRID_GPUS, GRID_GBPS, GRID_TOKENS)
    return tuple(Cell(*setting, suffix=suffix, share=share) for setting in settings)


# A pipeline of stages, each with a share of the layers, an accelerator and a link of its own.
#
# All stages restore at once: each loads the activations at its lower boundary for the tokens that
# it computes, so that it need not wait for the stage below (the paper's third dimension, arXiv
# 2604.25080). Those bytes come on top of the keys and values. Virtual: nothing here is several
# accelerators.

BOUNDARY_NUMBER_BYTES = 2


class Staged(NamedTuple):
    """What stages did with one prefix.

    Attributes:
        restored_s: Until the last stage had all its cells.
        bound_s: What no policy can beat, boundary activations loaded for what is computed.
        boundary_bytes: Loaded on top of keys and values, by all stages.
        link_bytes: Keys and values loaded, by all stages.
    """

    restored_s: float
    bound_s: float
    boundary_bytes: float
    link_bytes: float


class _Stages(VirtualClock):
    """Computes wait for the activations at their stage's boundary, which come over its link."""

    def __init__(self, stages: int, costs: Modelled, tokens: int) -> None:
        self.token_bytes = float(costs.model.width * BOUNDARY_NUMBER_BYTES)
        self._token_s = {
            i: self.token_bytes * 8.0 / (costs.rates[f"link{i}"] * 1e9) for i in range(1, stages)
        }
        self._policy = TwoPointer(block=64, inputs_s=self._token_s)
        part = costs.model._replace(layers=costs.model.layers // stages)
        asks = [asked(part, tokens, 0, number=i, tiers=(f"link{i}",)) for i in range(stages)]
        super().__init__(asks, self._policy, costs, engines=[(i,) for i in range(stages)])
        self._fetched: dict[int, list[tuple[int, float]]] = {i: [] for i in range(1, stages)}

    @property
    def boundary_bytes(self) -> float:
        """Loaded so far."""
        return sum(known[-1][0] for known in self._fetched.values() if known) * self.token_bytes

    def inputs_s(self, op: Compute) -> float:
        """When the activations of all its tokens are there; those of the next pass are fetched."""
        number, stop = op.request, op.tokens.stop
        if number not in self._fetched or op.layers.first:
            return self.state.now_s
        self._fetch(number, stop)
        there_s = next(time_s for token, time_s in self._fetched[number] if token >= stop)
        self._fetch(number, min(self._policy.goal(number), stop + 3 * stop))
        return max(there_s, self.state.now_s)

    def _fetch(self, number: int, stop: int) -> None:
        fetched = self._fetched[number]
        first = fetched[-1][0] if fetched else 0
        if stop > first:
            tier = f"link{number}"
            took_s = (stop - first) * self._token_s[number]
            self.free_s[tier] = max(self.state.now_s, self.free_s[tier]) + took_s
            fetched.append((stop, self.free_s[tier]))


def staged(costs: Modelled, tokens: int, stages: int) -> Staged:
    """Restores a prefix on so many stages, without a suffix.

    Args:
        costs: Of one accelerator; all stages have one like it, and a link like its first.
        tokens: Of the prefix.
        stages: How many; they share the layers evenly.

    Raises:
        ConfigError: The layers cannot be shared evenly.
    """
    if stages < 1 or costs.model.layers % stages:
        raise ConfigError(f"{costs.model.layers} layers over {stages} stages", "Share them evenly")
    gbps = next(iter(costs.rates.values()))
    mine = Modelled(
        costs.model, costs.gpu, {f"link{i}": gbps for i in range(stages)}, share=costs.share
    )
    clock = _Stages(stages, mine, tokens)
    done = clock.run()
    whole = asked(costs.model, tokens, 0, tiers=("link0",))
    boundary_s = clock.token_bytes * 8.0 / (gbps * 1e9)
    return Staged(
        max(done.ttft_s.values()),
        lower_bound(whole, mine.ideal, stages=stages, boundary_s=boundary_s),
        clock.boundary_bytes,
        done.link_bytes,
    )


# Several requests at once: lengths to draw from.

MEDIAN_TOKENS = 12_000
LEAST_TOKENS, MOST_TOKENS, SPREAD = 1024, 98304, 0.8


def lengths(size: int, seed: int) -> tuple[int, ...]:
    """Prefix lengths of a batch, in tokens: lognormal around 12K, between 1K and 96K."""
    draw = random.Random(seed)
    some = (MEDIAN_TOKENS * draw.lognormvariate(0.0, SPREAD) for _ in range(size))
    return tuple(max(LEAST_TOKENS, min(MOST_TOKENS, int(n) // 64 * 64)) for n in some)
