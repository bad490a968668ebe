"""Which blocks to keep: eviction policies, one file and one class each, by name.

| name | class | what goes first, among the leaves |
|---|---|---|
| `lru` | `LRU` | the longest unused |
| `lfu-ttl` | `LfuTtl` | the expired, then the least frequently used, frequency halving every tau |
| `auto` | `LfuTtl` | as `lfu-ttl` with its defaults; nothing is chosen or learned at run time yet |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.policy.base import Policy, Slots, Visit
from flowkv.policy.config import Lease, LfuTtlConfig, LruConfig, PolicyConfig
from flowkv.policy.lfu_ttl import LfuTtl
from flowkv.policy.lru import LRU

__all__ = [
    "CATALOGUE",
    "LRU",
    "CatalogueEntry",
    "Lease",
    "LfuTtl",
    "LfuTtlConfig",
    "LruConfig",
    "Policy",
    "PolicyConfig",
    "Slots",
    "Visit",
    "make_policy",
]


class CatalogueEntry(NamedTuple):
    """One row of the catalogue.

    Attributes:
        make: The policy's class.
        config: The struct that checks its options.
        defaults: Options used unless they are given.
    """

    make: Callable[..., Policy]
    config: type[PolicyConfig]
    defaults: Mapping[str, object]


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "auto": CatalogueEntry(LfuTtl, LfuTtlConfig, {}),
        "lfu-ttl": CatalogueEntry(LfuTtl, LfuTtlConfig, {}),
        "lru": CatalogueEntry(LRU, LruConfig, {}),
    }
)


def make_policy(policy: str | Policy, **options: object) -> Policy:
    """Makes a policy from its name in the catalogue, or passes a policy object through.

    Args:
        policy: "auto", "lfu-ttl", "lru", or an object that implements `Policy`.
        **options: Fields of the policy's configuration; none with an object.

    Returns:
        A fresh policy, or the object itself.

    Raises:
        ConfigError: If the name or an option is unknown, or the object is no policy.
    """
    if isinstance(policy, str):
        entry = CATALOGUE.get(policy)
        if entry is None:
            near = get_close_matches(policy, CATALOGUE, 1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"there is no policy {policy!r}", f"{hint}Use one of {', '.join(CATALOGUE)}"
            )
        return entry.make(**{**entry.defaults, **options})
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise ConfigError(
            f"{policy!r} is no policy",
            f"Pass a name ({', '.join(CATALOGUE)}) or an object that implements Policy",
        )
    if options:
        raise ConfigError(
            f"policy {policy.name!r} is an object already, and {', '.join(options)} came with it",
            "Configure the object where it is made",
        )
    return policy
