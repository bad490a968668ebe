"""One place that blocks lie in: its policy, and what that may not give up there now."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import NO_SLOTS, Policy, Slots
from flowkv.policy.tenants import Tenants


class Place:
    """A policy and the slots that are protected from it. Callers hold the KV lock.

    Blocks are held and let go far more often than room is made, and mostly both between two
    evictions: so the policy is told of pins where it is about to choose, and of the changes only.
    A policy that does not count pins gets all of them with every choice.

    Args:
        name: Of the device or tier.
        kind: "gpu", "host", "disk" or "remote".
        policy: Chooses what the place keeps.

    Attributes:
        held: Slots that must not be given up.
    """

    __slots__ = ("_changed", "_counts", "_told", "held", "kind", "name", "policy")

    def __init__(self, name: str, kind: str, policy: Policy) -> None:
        self.name, self.kind, self.policy = name, kind, policy
        self.held: dict[int, None] = {}
        self._counts = type(policy).pin is not Policy.pin
        self._told: dict[int, None] = {}
        self._changed: dict[int, None] = {}

    def hold(self, slot: int) -> None:
        """Protects a slot, resident or not, until `let_go`."""
        if slot not in self.held:
            self.held[slot] = self._changed[slot] = None

    def let_go(self, slot: int) -> None:
        """Protects a slot no longer."""
        if slot in self.held:
            del self.held[slot]
            self._changed[slot] = None

    def evict(self, now_ns: int, n: int) -> Slots | None:
        """`n` victims of the policy, or None."""
        if not self._counts:
            return self.policy.evict(now_ns, n, self.held)
        self._tell()
        return self.policy.evict(now_ns, n)

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """See `Policy.wanted`."""
        return self.policy.wanted(now_ns, n)

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """See `Policy.displace`."""
        if not self._counts:
            return self.policy.displace(now_ns, n, rate, {*self.held, *protected})
        self._tell()
        return self.policy.displace(now_ns, n, rate, protected)

    def expired(self, now_ns: int) -> list[int]:
        """Slots whose lease has run out here and that nothing protects, removed."""
        slots = [slot for slot in self.policy.expired(now_ns).tolist() if slot not in self.held]
        if slots:
            self.policy.remove(as_slots(slots))
        return slots

    def surplus(self, now_ns: int) -> list[int]:
        """Slots that go as a tenant has more than its quota allows, removed."""
        if not isinstance(self.policy, Tenants):
            return []
        self._tell()
        slots: list[int] = self.policy.shed(now_ns, () if self._counts else self.held).tolist()
        return slots

    def forget(self, slots: Sequence[int]) -> None:
        """Nobody knows the blocks of these slots any more."""
        for slot in slots:
            self.let_go(slot)
        self._tell()
        self.policy.forget(as_slots(slots))

    def _tell(self) -> None:
        if not self._changed or not self._counts:
            return
        pins = [slot for slot in self._changed if slot in self.held and slot not in self._told]
        ends = [slot for slot in self._changed if slot in self._told and slot not in self.held]
        self._changed.clear()
        if pins:
            self.policy.pin(as_slots(pins))
            self._told.update(dict.fromkeys(pins))
        if ends:
            self.policy.unpin(as_slots(ends))
            for slot in ends:
                del self._told[slot]


def as_slots(slots: Sequence[int]) -> Slots:
    """Slot numbers as policies take them."""
    return np.array(slots, np.int64) if len(slots) else NO_SLOTS
