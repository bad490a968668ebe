"""What the simple restore policies share: one request after the other, as they arrived."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from flowkv.core.errors import ConfigError
from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.pointers import source_on, suffix_layer
from flowkv.policy.restore.state import Progress, State
from flowkv.policy.restore.words import Compute, Load, Suffix


class InOrder(RestorePolicy):
    """Each engine serves the first request that has something for it.

    Args:
        chunk: Tokens that are computed at once.
        io_chunk: Tokens that are loaded at once.

    Attributes:
        early: Whether a layer of the suffix waits for its own layer of the prefix only.

    Raises:
        ConfigError: A chunk is not positive.
    """

    early = False

    def __init__(self, chunk: int = 512, io_chunk: int = 128) -> None:
        if chunk < 1 or io_chunk < 1:
            raise ConfigError(
                f"chunks of {chunk} and {io_chunk} tokens", "Use one token or more for both"
            )
        self.chunk, self.io_chunk = chunk, io_chunk

    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        """See `RestorePolicy`."""
        mine = list(state.among(among))
        due = (suffix_layer(progress, self.early) for progress in mine)
        suffix = next((op for op in due if op is not None), None)
        if suffix is not None:  # short, and somebody's first token
            return suffix
        steps = (self._compute(state, progress) for progress in self._compute_order(state, mine))
        return next((op for op in steps if op is not None), None)

    def next_load(self, state: State, tier: str) -> Load | None:
        """See `RestorePolicy`."""
        for progress in self._load_order(state, list(state)):
            source = source_on(progress.request, tier)
            if source is not None:
                op = self._load(state, progress, source)
                if op is not None:
                    return op
        return None

    def _compute_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return requests

    def _load_order(self, state: State, requests: list[Progress]) -> list[Progress]:
        return requests

    @abstractmethod
    def _compute(self, state: State, progress: Progress) -> Compute | None: ...

    @abstractmethod
    def _load(self, state: State, progress: Progress, source: int) -> Load | None: ...
