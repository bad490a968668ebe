"""Load layer by layer: the suffix runs behind the loads."""

from __future__ import annotations

from flowkv.policy.restore.load import LoadOnly
from flowkv.policy.restore.pointers import load_layer
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Load


class LoadLayers(LoadOnly):
    """Loads whole layers, the lowest first; a layer of the suffix waits for its own layer only."""

    name = "load-layers"
    early = True

    def _load(self, state: State, progress: Progress, source: int) -> Load | None:
        return load_layer(progress, source, upwards=True)
