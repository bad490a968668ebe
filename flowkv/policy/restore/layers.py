"""Layer-wise: compute layers from the bottom, load layers from the top, until they meet."""

from __future__ import annotations

from flowkv.policy.restore.in_order import InOrder
from flowkv.policy.restore.pointers import compute_all, compute_lowest, load_all, load_layer
from flowkv.policy.restore.remaining import engine_would, link_would
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Compute, Load


class LayerWise(InOrder):
    """Two pointers over layers, then the suffix, as HCache splits a model (arXiv 2410.05004).

    A model that computes all layers at once (`Request.whole`) gets two pointers over tokens.
    A layer that the other engine would be through with before is left to it.
    """

    name = "layers"

    def _compute(self, state: State, progress: Progress) -> Compute | None:
        if progress.request.whole:
            return compute_all(progress, self.chunk)
        op = compute_lowest(progress)
        return None if op is not None and link_would(state, progress, op) else op

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
        if progress.request.whole:
            return load_all(progress, self.io_chunk, source)
        op = load_layer(progress, source, upwards=False)
        if op is None or not engine_would(state, progress, op):
            return op
        rival = compute_lowest(progress)  # both must not leave it to each other
        return op if rival is not None and link_would(state, progress, rival) else None
