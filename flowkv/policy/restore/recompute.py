"""Recompute: nothing is loaded that can be computed."""

from __future__ import annotations

from flowkv.policy.restore.in_order import InOrder
from flowkv.policy.restore.pointers import compute_all, load_all
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Compute, Load


class Recompute(InOrder):
    """Computes the prefix in chunks, then the suffix, as an engine without a store does.

    Args:
        chunk: Tokens that are computed at once.
        io_chunk: Tokens that are loaded at once, of requests that cannot be computed.
    """

    name = "recompute"

    def __init__(self, chunk: int = 2048, io_chunk: int = 128) -> None:
        super().__init__(chunk, io_chunk)

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return compute_all(progress, self.chunk)

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
        if progress.request.computable:
            return None
        return load_all(progress, self.io_chunk, source)
