"""Conformance checks for your own policies, schedulers, tiers and codecs, and tiers that misbehave.

They need `pytest` and `hypothesis` and nothing else beside the library
(`pip install 'flowkv[testing]'`), which are imported only when a check is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowkv.testing.codecs import check_codec as check_codec
    from flowkv.testing.policies import check_policy as check_policy
    from flowkv.testing.restores import check_restore_policy as check_restore_policy
    from flowkv.testing.schedulers import check_scheduler as check_scheduler
    from flowkv.testing.tier_machine import check_tier as check_tier
    from flowkv.testing.tiers import FlakyTier as FlakyTier
    from flowkv.testing.tiers import MemoryTier as MemoryTier

_PLACES = {
    "FlakyTier": "flowkv.testing.tiers",
    "MemoryTier": "flowkv.testing.tiers",
    "check_codec": "flowkv.testing.codecs",
    "check_policy": "flowkv.testing.policies",
    "check_restore_policy": "flowkv.testing.restores",
    "check_scheduler": "flowkv.testing.schedulers",
    "check_tier": "flowkv.testing.tier_machine",
}

__all__ = [
    "FlakyTier",
    "MemoryTier",
    "check_codec",
    "check_policy",
    "check_restore_policy",
    "check_scheduler",
    "check_tier",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
