"""The grid of the protocol, cell by cell, on the virtual clock.

Three models, three accelerators, 10, 40 and 80 Gbps (1 Gbps = 1e9 bit/s) and prefixes of 6K to 96K
tokens: the settings of the published comparisons (arXiv 2604.25080, 2410.03065).
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.bounds import lower_bound
from flowkv.policy.restore.words import Request
from flowkv.sim.restore.clock import run
from flowkv.sim.restore.model import GPUS, SHAPES, Modelled, asked
from flowkv.sim.restore.run import Run

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

    def request(self, *, whole: bool = False, codecs: tuple[str, ...] = ("raw",)) -> Request:
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
