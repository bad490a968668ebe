"""What a tenant may have of a place, and what it has."""

from __future__ import annotations

import math

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.base import Policy


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tenant may count on, and may take at most.

    Attributes:
        reserve_bytes: Nothing that others do takes its blocks below this.
        limit_bytes: `shed` takes what is more.
    """

    reserve_bytes: int = 0
    limit_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_bytes <= self.limit_bytes:
            raise ConfigError(
                f"a reserve of {self.reserve_bytes} bytes under a limit of {self.limit_bytes}",
                "Use 0 <= reserve_bytes <= limit_bytes",
            )


class Account:
    """What one tenant has.

    Args:
        policy: Decides among its blocks.
        quota: Its quota.

    Attributes:
        used: Bytes of its resident blocks.
        count: Number of them.
        largest: Bytes of the largest block it ever had.
        pins: Whether its policy knows pins.
    """

    def __init__(self, policy: Policy, quota: Quota) -> None:
        self.policy, self.quota = policy, quota
        self.used = self.count = 0
        self.largest = 1
        kind = type(policy)
        self.pins = kind.pin is not Policy.pin and kind.unpin is not Policy.unpin

    @property
    def spare(self) -> int:
        """Bytes above its reserve."""
        return self.used - self.quota.reserve_bytes

    @property
    def excess(self) -> float:
        """Bytes above its limit."""
        return self.used - self.quota.limit_bytes
