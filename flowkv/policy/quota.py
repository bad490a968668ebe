"""What a tenant may have of a place, and what it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

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

    def learned(self) -> bytes:
        """What its policy has learned; nothing if that does not learn."""
        save: Callable[[], bytes] | None = getattr(self.policy, "save_model", None)
        return b"" if save is None else save()

    def learn(self, saved: bytes) -> None:
        """Its policy begins with what it learned elsewhere, if it is one that learns."""
        load: Callable[[bytes], None] | None = getattr(self.policy, "load_model", None)
        if load is not None:
            load(saved)

    @property
    def spare(self) -> int:
        """Bytes above its reserve."""
        return self.used - self.quota.reserve_bytes

    @property
    def excess(self) -> float:
        """Bytes above its limit."""
        return self.used - self.quota.limit_bytes


def chains_above(slots: Iterable[int], here: Mapping[int, tuple[int, int]]) -> set[int]:
    """These slots and all above them, of those that are here: slot -> (parent, bytes)."""
    found: set[int] = set()
    for first in slots:
        s = first
        while s in here and s not in found:
            found.add(s)
            s = here[s][0]
    return found


def evictable(accounts: Mapping[int, Account], stuck: Mapping[int, int]) -> dict[int, int]:
    """Blocks that each tenant can give up and may, down to its reserve.

    Args:
        accounts: By tenant.
        stuck: How many blocks of a tenant may not go.
    """
    can = {}
    for tenant, account in accounts.items():
        free = account.count - stuck.get(tenant, 0)
        if account.quota.reserve_bytes:
            free = min(free, max(0, account.spare // account.largest))
        if free > 0:
            can[tenant] = free
    return can
