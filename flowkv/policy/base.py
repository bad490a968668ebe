"""The `Policy` protocol: an order over slot ids, decided without I/O, torch or a clock of its own.

The runtime owns identity and residency: it numbers blocks with small integers (*slots*) and tells
the policy what happens to them; the policy answers which to give up. So the same object runs in the
simulator, in the runtime and inside other engines' plug-in points (DESIGN D8). Parents are optional
knowledge: where they are known, a block is given up after its descendants, as a rule of choice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]


@runtime_checkable
class Policy(Protocol):
    """Decides what a tier keeps. Deterministic: equal calls give equal answers and equal digests.

    `now_ns` never decreases from call to call; a smaller one is treated as the last one seen.

    Attributes:
        name: Its name in the catalogue.
    """

    name: str

    def insert(
        self,
        now_ns: int,
        slots: Slots,
        parents: Slots,
        *,
        n_bytes: int = 1,
        lease: str = "",
    ) -> None:
        """Blocks became resident; `parents[i]` is a slot or -1. Counts as an access."""
        ...

    def access(self, now_ns: int, slots: Slots) -> None:
        """A request used these resident blocks, root to leaf. Slots not resident are ignored."""
        ...

    def remove(self, slots: Slots) -> None:
        """Blocks are gone for another reason than `evict`. Slots not resident are ignored."""
        ...

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Which of these (not resident) blocks are worth their bytes here."""
        ...

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims, none protected; None, nothing changed, if it cannot."""
        ...

    def expired(self, now_ns: int) -> Slots:
        """Resident blocks whose lease has run out: never a hit again, reclaimed first."""
        ...

    def priority(self, slot: int) -> float:
        """Smaller is given up earlier; -inf for a slot that is not resident."""
        ...

    def resident(self) -> Sequence[int]:
        """Slots it believes to be resident, in no particular order."""
        ...

    def digest(self) -> int:
        """64-bit rolling hash of every decision so far."""
        ...
