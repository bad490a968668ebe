"""Load: nothing is computed that can be loaded."""

from __future__ import annotations

from flowkv.policy.restore.in_order import InOrder
from flowkv.policy.restore.pointers import compute_all, load_all, must_compute
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Compute, Load


class LoadOnly(InOrder):
    """Loads the prefix from the back, then computes the suffix, as HiCache and LMCache do.

    What cannot be loaded, because a load failed or there is no source, is computed.

    Args:
        chunk: Tokens that are computed at once, where that must be.
        io_chunk: Tokens that are loaded at once; nothing waits for a part of them.
    """

    name = "load"

    def __init__(self, chunk: int = 512, io_chunk: int = 2048) -> None:
        super().__init__(chunk, io_chunk)

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return compute_all(progress, self.chunk, must_compute(progress))

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
        return load_all(progress, self.io_chunk, source)
