"""One place of a ledger: a policy, its room, and what it can do beyond the least."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, StateError
from flowkv.policy.base import Policy, Slots
from flowkv.policy.config import Lease
from flowkv.policy.ledger.blocks import USED
from flowkv.policy.tenants import Tenants

Integers = NDArray[np.int64]


class Place(NamedTuple):
    """Where blocks may lie.

    Attributes:
        policy: A fresh policy, used by nobody else.
        capacity_bytes: Room.
    """

    policy: Policy
    capacity_bytes: int


class Move(NamedTuple):
    """Blocks that go from one place to another, or away.

    Attributes:
        slots: In the order in which they go.
        source: Number of the place that gives them up; of a copy, -1.
        target: Number of the place that takes them; -1 where they are only given up.
    """

    slots: Slots
    source: int
    target: int


class Terms(NamedTuple):
    """What a policy is told about a block besides its place in the tree."""

    n_bytes: int = 1
    cost_ns: int = 0
    lease: str | Lease = ""
    tenant: int = 0


def overrides(policy: Policy, method: str) -> bool:
    """Whether a policy does more than `Policy` in a method."""
    return getattr(type(policy), method) is not getattr(Policy, method)


class Shelf:
    """A place as its ledger sees it. Attributes that are None are calls without effect.

    Args:
        place: The policy and its room.
        number: Which place of the ledger.
    """

    def __init__(self, place: Place, number: int) -> None:
        policy = place.policy
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise ConfigError(
                f"place {number} has no policy but {policy!r}",
                "Pass Place(make_policy(name), capacity_bytes)",
            )
        self.policy = policy
        self.number = number
        self.used_at = USED + number
        self.resize(place.capacity_bytes)
        self.access, self.insert, self.evict = policy.access, policy.insert, policy.evict
        self.expired = policy.expired if overrides(policy, "expired") else None
        self.complete = policy.complete if overrides(policy, "complete") else None
        self.admit = policy.admit if overrides(policy, "admit") else None
        self.shed = policy.shed if isinstance(policy, Tenants) else None
        self.pins = overrides(policy, "pin") and overrides(policy, "unpin")

    def resize(self, capacity_bytes: int) -> None:
        """Another room; the ledger sees to it that it is kept to."""
        if capacity_bytes < 0:
            raise ConfigError(
                f"place {self.number} cannot hold {capacity_bytes} bytes", "Pass none or more"
            )
        if isinstance(self.policy, Tenants) and self.policy.reserved_bytes > capacity_bytes:
            raise ConfigError(
                f"tenants have {self.policy.reserved_bytes} bytes in reserve in place "
                f"{self.number}, which holds {capacity_bytes}",
                "Lower the reserves, or give the place more room",
            )
        self.capacity = int(capacity_bytes)

    def victims(self, now_ns: int, n: int, protected: Collection[int]) -> Slots:
        """Up to `n` victims: fewer, or none, where the policy has no more to give."""
        while n > 0:
            got = self.evict(now_ns, n, protected)
            if got is not None:
                if len(got) != n:
                    raise StateError(
                        f"policy {self.policy.name!r} gave {len(got)} victims for {n}",
                        "Check it with flowkv.testing.check_policy",
                    )
                return got
            n //= 2
        return np.empty(0, np.int64)
