"""Eviction policies, one class each, by name.

| name | class | evicted first, among the leaves |
|---|---|---|
| `lru` | `LRU` | the longest unused |
| `lfu-ttl` | `LfuTtl` | the expired, then the least frequently used, frequency halving every tau |
| `arc` | `ARC` | the longest unused, of the recency list or of the frequency list |
| `cost-aware` | `CostAware` | the block that saves least time per byte: count times cost per byte |
| `hazard` | `HazardIndex` | the least likely to return soon, as learned from past returns |
| `auto` | `Hedge` | by the learned order while it hits no less than LRU, else by LRU |
| `opt` | `Optimum` | the block needed latest; requires the future, so offline only |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from flowkv.policy.base import (
    ArcConfig,
    CostAwareConfig,
    HazardConfig,
    Lease,
    LfuTtlConfig,
    LruConfig,
    Policy,
    PolicyConfig,
    Slots,
    Visit,
    made,
)
from flowkv.policy.hedge import HazardIndex, Hedge
from flowkv.policy.optimum import Optimum, OptimumConfig
from flowkv.policy.order.leaf import ARC, LRU, CostAware, LfuTtl

__all__ = [
    "ARC",
    "CATALOGUE",
    "LRU",
    "ArcConfig",
    "CatalogueEntry",
    "CostAware",
    "CostAwareConfig",
    "HazardConfig",
    "HazardIndex",
    "Hedge",
    "Lease",
    "LfuTtl",
    "LfuTtlConfig",
    "LruConfig",
    "Optimum",
    "OptimumConfig",
    "Policy",
    "PolicyConfig",
    "Slots",
    "Visit",
    "make_policy",
]


class CatalogueEntry(NamedTuple):
    """One row of the catalogue.

    Attributes:
        make: Class of the policy.
        config: Struct that checks its options.
        defaults: Options used unless they are given.
    """

    make: Callable[..., Policy]
    config: type[PolicyConfig]
    defaults: Mapping[str, object]


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "arc": CatalogueEntry(ARC, ArcConfig, {}),
        "auto": CatalogueEntry(Hedge, HazardConfig, {}),
        "cost-aware": CatalogueEntry(CostAware, CostAwareConfig, {}),
        "hazard": CatalogueEntry(HazardIndex, HazardConfig, {}),
        "lfu-ttl": CatalogueEntry(LfuTtl, LfuTtlConfig, {}),
        "lru": CatalogueEntry(LRU, LruConfig, {}),
        "opt": CatalogueEntry(Optimum, OptimumConfig, {}),
    }
)


def make_policy(policy: str | Policy, **options: object) -> Policy:
    """Make a policy by its name in the catalogue, or pass a policy object through.

    Args:
        policy: A name such as "auto", "lfu-ttl" or "lru", or a `Policy` object.
        **options: Fields of the policy's configuration; none with an object.

    Returns:
        A fresh policy, or the object itself.

    Raises:
        ConfigError: If the name or an option is unknown, or the object is no policy.
    """
    makers = {name: partial(entry.make, **entry.defaults) for name, entry in CATALOGUE.items()}
    return made(policy, makers, Policy, "policy", options)  # type: ignore[type-abstract]
