"""Cake: compute chunks from the front, load chunks from the back, until they meet."""

from __future__ import annotations

from flowkv.policy.restore.in_order import InOrder
from flowkv.policy.restore.pointers import compute_all, load_all
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Compute, Load


class Cake(InOrder):
    """Two pointers over tokens, then the suffix. "Compute or Load KV cache" (arXiv 2410.03065)."""

    name = "cake"

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        return compute_all(progress, self.chunk)

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
        return load_all(progress, self.io_chunk, source)
