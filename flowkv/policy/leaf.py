"""The `Policy` protocol over the compiled order: what the leaf-first policies have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy import calls
from flowkv.policy.base import NO_SLOTS, NO_VISIT, Policy, Slots, Visit
from flowkv.policy.config import Lease
from flowkv.policy.order import (
    BIRTHS,
    CLOCK,
    CLOCK_LIMIT,
    COUNT,
    DIGEST,
    NEVER,
    NODE,
    SLOT_LIMIT,
    STATE_SIZE,
    TAU,
)

FIRST_CAPACITY = 1024


def as_slots(slots: object) -> Slots:
    """A contiguous, writable int64 vector: the one type the compiled calls are made for."""
    if type(slots) is np.ndarray and slots.dtype == np.int64 and slots.ndim == 1:
        flags = slots.flags
        return slots if flags.c_contiguous and flags.writeable else slots.copy()
    if isinstance(slots, Collection) and not isinstance(slots, (Sequence, np.ndarray)):
        return np.fromiter(slots, np.int64, len(slots))
    return np.array(slots, dtype=np.int64).reshape(-1)


class LeafOrder(Policy):
    """Gives up leaves only: a block goes after all its resident children.

    Among the leaves, expired ones go first, then the smallest key (`flowkv.policy.order`), then the
    deepest, then the smallest slot. The depth of a block is fixed when it is inserted: one more
    than its parent's, or, without a resident parent, its place in the array, since arrays run from
    root to leaf. So the blocks of one request go deepest first even where no parent is known.

    A parent that is removed leaves its children resident, as roots. A block that is inserted again
    while resident is accessed; if it has no parent it takes the one it is given. Memory: 108 bytes
    per slot number up to the largest one used.

    Args:
        tau_ns: Half-life of a block's access count in nanoseconds; 0 for recency alone.
    """

    name = "leaf-order"

    def __init__(self, tau_ns: int = 0) -> None:
        self._state = np.zeros(STATE_SIZE, np.int64)
        self._state[TAU] = tau_ns
        self._state[CLOCK] = -CLOCK_LIMIT
        self._arrays = (
            np.zeros(0, NODE),
            np.zeros((2, 0, 2), np.int64),
            np.zeros((3, 0), np.int32),
        )
        self._grow(FIRST_CAPACITY)

    def insert(
        self,
        now_ns: int,
        slots: Slots,
        parents: Slots,
        *,
        n_bytes: int = 1,
        cost_ns: int = 0,
        lease: str | Lease = "",
        tenant: int = 0,
    ) -> None:
        """See `Policy.insert`. All blocks count alike, whatever their `n_bytes`.

        Raises:
            ConfigError: If the arrays differ in length or hold what is no slot number.
        """
        slots, parents = as_slots(slots), as_slots(parents)
        if len(slots) != len(parents):
            raise ConfigError(
                f"insert got {len(slots)} slots and {len(parents)} parents",
                "Pass one parent per slot, -1 where it is unknown",
            )
        times = (now_ns, *self._lease_ns(lease))
        room = calls.insert(*self._arrays, self._state, slots, parents, times)
        if room < 0:
            raise ConfigError(
                f"slot numbers must lie in 0..{SLOT_LIMIT - 1}",
                "Number the blocks of a tier densely from 0",
            )
        if room > 0:
            self._grow(room)
            calls.insert(*self._arrays, self._state, slots, parents, times)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """See `Policy.access`."""
        calls.access(*self._arrays, self._state, as_slots(slots), now_ns)

    def remove(self, slots: Slots) -> None:
        """See `Policy.remove`. Children of a removed block stay, as roots."""
        calls.remove(*self._arrays, self._state, as_slots(slots))

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Everything: these policies choose what leaves, not what enters."""
        self._state[CLOCK] = max(min(now_ns, CLOCK_LIMIT), self._state[CLOCK])
        return np.ones(len(slots), np.bool_)

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """See `Policy.evict`. Victims in the order in which they go, children before parents.

        None if fewer than `n` blocks are neither protected nor above a protected block.

        Raises:
            ConfigError: If `n` is negative.
        """
        if n < 0:
            raise ConfigError(f"cannot evict {n} blocks", "Ask for none or more")
        if n > self._state[COUNT]:
            n = int(self._state[COUNT]) + 1  # as hopeless, without the memory
        victims = np.empty(n, np.int64)
        guarded = as_slots(protected) if len(protected) else NO_SLOTS
        done = calls.evict(*self._arrays, self._state, guarded, victims, now_ns)
        return victims if done else None

    def expired(self, now_ns: int) -> Slots:
        """See `Policy.expired`. Ascending; they stay until removed, evicted or inserted again."""
        count = calls.tick(*self._arrays, self._state, now_ns)
        if count == 0:
            return np.empty(0, np.int64)
        out = np.empty(count, np.int64)
        calls.list_expired(*self._arrays, self._state, out)
        out.sort()
        calls.record(self._state, out)
        return out

    def priority(self, slot: int) -> float:
        """The static key in nanoseconds, as of the last call; far below all others once expired."""
        nodes = self._arrays[0]
        if not 0 <= slot < len(nodes) or nodes[slot]["birth"] == 0:
            return -np.inf
        return float(nodes[slot]["key"])

    def resident(self) -> Sequence[int]:
        """Slots it believes to be resident, ascending."""
        births: list[int] = np.flatnonzero(self._arrays[0]["birth"]).tolist()
        return births

    def digest(self) -> int:
        """64-bit rolling hash of the answers of `evict` and of `expired`, where it names any."""
        return int(self._state[DIGEST]) & 0xFFFF_FFFF_FFFF_FFFF

    def __len__(self) -> int:
        return int(self._state[COUNT])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} resident, {int(self._state[BIRTHS])} ever)"

    def _lease_ns(self, lease: str | Lease) -> tuple[int, int]:
        """Lease and maximum age of a class; leaf-first policies have none unless they say so."""
        return NEVER, NEVER

    def _grow(self, room: int) -> None:
        """Makes room for slots below `room`: doubles, so that growing costs O(1) per slot."""
        nodes, heaps, place = self._arrays
        old, new = len(nodes), max(room, 2 * len(nodes))
        grown: tuple[Any, ...] = (
            np.zeros(new, NODE),
            np.zeros((2, new, 2), np.int64),
            np.zeros((3, new), np.int32),
        )
        grown[0][:old] = nodes
        grown[1][:, :old] = heaps
        grown[2][:2] = -1
        grown[2][:, :old] = place
        self._arrays = grown
