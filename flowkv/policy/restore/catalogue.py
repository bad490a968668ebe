"""Restore policies by name. `bench.restore.baselines` has those that this one is compared with.

| name | class | what it does |
|---|---|---|
| `flowkv` | `TwoPointer` | over tokens, the suffix behind the last loads, shortest first |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flowkv.policy.config import made
from flowkv.policy.restore.flowkv import TwoPointer
from flowkv.policy.restore.state import RestorePolicy

RESTORE_POLICIES: Mapping[str, Callable[..., RestorePolicy]] = MappingProxyType(
    {"flowkv": TwoPointer}
)


def make_restore_policy(policy: str | RestorePolicy, **options: Any) -> RestorePolicy:
    """Makes a restore policy from its name, or passes an object through.

    Args:
        policy: A name in `RESTORE_POLICIES`, or a `RestorePolicy`.
        **options: Arguments of the policy's class; none with an object.

    Raises:
        ConfigError: The name or an option is unknown, or the object is no restore policy.
    """
    return made(policy, RESTORE_POLICIES, RestorePolicy, "restore policy", options)  # type: ignore[type-abstract]
