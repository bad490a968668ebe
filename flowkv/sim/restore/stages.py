"""A pipeline of stages, each with a share of the layers, an accelerator and a link of its own.

All stages restore at once: each loads the activations at its lower boundary for the tokens that it
computes, so that it need not wait for the stage below (the paper's third dimension,
arXiv 2604.25080). Those bytes come on top of the keys and values. Virtual: nothing here is several
accelerators.
"""

from __future__ import annotations

from typing import NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.bounds import lower_bound
from flowkv.policy.restore.flowkv import TwoPointer
from flowkv.policy.restore.words import Compute
from flowkv.sim.restore.clock import Clock
from flowkv.sim.restore.model import Modelled, asked

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


class _Stages(Clock):
    """Computes wait for the activations at their stage's boundary, which come over its link."""

    def __init__(self, stages: int, costs: Modelled, tokens: int) -> None:
        self.token_bytes = float(costs.model.width * BOUNDARY_NUMBER_BYTES)
        self._token_s = {
            i: self.token_bytes * 8.0 / (costs.rates[f"link{i}"] * 1e9) for i in range(1, stages)
        }
        self._policy = TwoPointer(block=64, inputs_s=self._token_s)
        part = costs.model._replace(layers=costs.model.layers // stages)
        asks = [asked(part, tokens, 0, number=i, tiers=(f"link{i}",)) for i in range(stages)]
        super().__init__(asks, self._policy, costs, costs, [(i,) for i in range(stages)], 1, None)
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
