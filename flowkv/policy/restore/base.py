"""What a restore policy is: two questions, answered from the state alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from flowkv.policy.restore.state import State
from flowkv.policy.restore.words import Compute, Load, Suffix


class RestorePolicy(ABC):
    """Says what each engine does next. Pure: no I/O, no clock of its own, deterministic.

    The same object drives a virtual clock, emulated devices, torch and the runtime. Each asks when
    an engine of its is idle; what is answered is begun at once (`State.begin`), before anything
    else is asked. None says that the engine has nothing to do until something ends or arrives.
    """

    name = ""

    @abstractmethod
    def next_compute(
        self, state: State, among: Collection[int] | None = None
    ) -> Compute | Suffix | None:
        """What is computed next.

        Args:
            state: How far everything is.
            among: Numbers of the requests that this engine can compute; None for all.
        """

    @abstractmethod
    def next_load(self, state: State, tier: str) -> Load | None:
        """What is loaded from a tier next."""

    def forget(self, number: int) -> None:  # noqa: B027 - most remember nothing
        """A request is done or was called off: what is remembered of it can go."""
