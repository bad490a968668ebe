"""What a place of several tenants remembers as bytes: whose each block is, and their policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.base import Policy
from flowkv.policy.order.image import damaged
from flowkv.policy.quota import Account, Quota


class Tenancy(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The state of `Tenants`, in plain values.

    Attributes:
        accounts: Tenant, its policy's snapshot, bytes of its largest block ever.
        owner: Slot, tenant.
        here: Resident slot, its parent, its bytes.
        pins: Slot, how often it is pinned.
        requests: Request, tenant.
        untold: A request whose tenant is not known yet: time, slots, visit.
        digest: Rolling hash of the decisions.
        now: Latest time.
    """

    accounts: list[tuple[int, bytes, int]]
    owner: list[tuple[int, int]]
    here: list[tuple[int, int, int]]
    pins: list[tuple[int, int]]
    requests: list[tuple[int, int]]
    untold: tuple[int, list[int], tuple[int, int, int, int, int]] | None
    digest: int
    now: int


def tenancy_of(values: dict[str, Any]) -> Tenancy:
    """The state that a snapshot holds.

    Raises:
        ConfigError: It cannot be one.
    """
    try:
        found = msgspec.convert(values.get("tenancy"), Tenancy)
    except msgspec.ValidationError as error:
        raise damaged(str(error)) from None
    tenants = {tenant for tenant, _, _ in found.accounts}
    owner = dict(found.owner)
    whole = (
        len(tenants) == len(found.accounts)
        and all(largest > 0 for _, _, largest in found.accounts)
        and tenants.issuperset(owner.values())
        and tenants.issuperset(tenant for _, tenant in found.requests)
        and all(slot in owner and n_bytes >= 0 for slot, _, n_bytes in found.here)
        and all(count > 0 for _, count in found.pins)
        and not _circles({slot: parent for slot, parent, _ in found.here})
    )
    if not whole:
        raise damaged("its numbers do not fit each other")
    return found


def _circles(parents: dict[int, int]) -> bool:
    """Whether a block is above itself."""
    sound: set[int] = set()
    for first in list(parents):
        slot, mine = first, set[int]()
        while slot in parents and slot not in sound:
            if slot in mine:
                return True
            mine.add(slot)
            slot = parents[slot]
        sound |= mine
    return False


def accounts_of(
    found: Tenancy, make: Callable[[], Policy], quota_of: Callable[[int], Quota]
) -> dict[int, Account]:
    """The tenants' accounts, with policies that go on from where they were.

    Raises:
        ConfigError: A policy refuses its snapshot, or holds other blocks than its tenant.
    """
    theirs: dict[int, dict[int, int]] = {tenant: {} for tenant, _, _ in found.accounts}
    owner = dict(found.owner)
    for slot, _, n_bytes in found.here:
        theirs[owner[slot]][slot] = n_bytes
    accounts = {}
    for tenant, inner, largest in found.accounts:
        account = accounts[tenant] = Account(make(), quota_of(tenant))
        account.policy.restore(inner)
        if sorted(account.policy.resident()) != sorted(theirs[tenant]):
            raise damaged("tenants hold other blocks than their policies")
        account.largest, account.count = largest, len(theirs[tenant])
        account.used = sum(theirs[tenant].values())
    return accounts


def models_of(saved: bytes) -> dict[int, bytes]:
    """What the policies of tenants learned.

    Raises:
        ConfigError: It is damaged.
    """
    try:
        return msgspec.msgpack.decode(saved, type=dict[int, bytes])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"these are no models of tenants ({error})", "Start without them"
        ) from None
