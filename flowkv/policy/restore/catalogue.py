"""Restore policies by name.

| name | class | what it does |
|---|---|---|
| `recompute` | `Recompute` | computes everything |
| `load` | `LoadOnly` | loads everything, then computes the suffix |
| `load-layers` | `LoadLayers` | loads layer by layer, the suffix behind it |
| `cake` | `Cake` | computes chunks from the front, loads chunks from the back |
| `layers` | `LayerWise` | computes layers from the bottom, loads layers from the top |
| `two-pointer-v1` | `TwoPointerV1` | either of both; the longest request first on the link |
| `two-pointer-seed` | `TwoPointerSeed` | over tokens, whichever step saves most |
| `staircase` | `Staircase` | per block of layers, as many chunks as balance both engines |
| `flowkv` | `TwoPointer` | over tokens, the suffix behind the last loads, shortest first |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flowkv.core.errors import ConfigError, did_you_mean
from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.cake import Cake
from flowkv.policy.restore.flowkv import TwoPointer
from flowkv.policy.restore.layers import LayerWise
from flowkv.policy.restore.load import LoadOnly
from flowkv.policy.restore.load_layers import LoadLayers
from flowkv.policy.restore.recompute import Recompute
from flowkv.policy.restore.seed import TwoPointerSeed
from flowkv.policy.restore.staircase import Staircase
from flowkv.policy.restore.v1 import TwoPointerV1

RESTORE_POLICIES: Mapping[str, Callable[..., RestorePolicy]] = MappingProxyType(
    {
        "recompute": Recompute,
        "load": LoadOnly,
        "load-layers": LoadLayers,
        "cake": Cake,
        "layers": LayerWise,
        "two-pointer-v1": TwoPointerV1,
        "two-pointer-seed": TwoPointerSeed,
        "staircase": Staircase,
        "flowkv": TwoPointer,
    }
)


def make_restore_policy(policy: str | RestorePolicy, **options: Any) -> RestorePolicy:
    """Makes a restore policy from its name, or passes an object through.

    Args:
        policy: A name in `RESTORE_POLICIES`, or a `RestorePolicy`.
        **options: Arguments of the policy's class; none with an object.

    Raises:
        ConfigError: The name or an option is unknown, or the object is no restore policy.
    """
    if isinstance(policy, str):
        make = RESTORE_POLICIES.get(policy)
        if make is None:
            hint = did_you_mean(policy, RESTORE_POLICIES)
            raise ConfigError(
                f"there is no restore policy {policy!r}",
                f"{hint}Use one of {', '.join(RESTORE_POLICIES)}",
            )
        try:
            return make(**options)
        except TypeError as error:
            raise ConfigError(
                f"restore policy {policy!r} does not take these options ({error})",
                "See its class for what it takes",
            ) from None
    if not isinstance(policy, RestorePolicy):
        raise ConfigError(
            f"{policy!r} is no restore policy",
            f"Pass a name ({', '.join(RESTORE_POLICIES)}) or an object of a RestorePolicy",
        )
    if options:
        raise ConfigError(
            f"restore policy {policy.name!r} is an object already, and options came with it",
            "Configure the object where it is made",
        )
    return policy
