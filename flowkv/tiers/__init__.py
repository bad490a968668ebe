"""Places for frames below the device: what one is (`base`), the frame format, memory and disk."""

from __future__ import annotations

from typing import Literal

from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError
from flowkv.tiers.base import (
    Completion,
    Entry,
    FrameInfo,
    Load,
    Outcome,
    Store,
    Tier,
)
from flowkv.tiers.frame import BadFrame, Header, decode_header, encode_header, verify

__all__ = [
    "BadFrame",
    "Completion",
    "Entry",
    "FrameInfo",
    "Header",
    "Load",
    "Outcome",
    "Store",
    "Tier",
    "decode_header",
    "encode_header",
    "open_tier",
    "verify",
]

_LATER = {  # kinds with a place in the design and no code yet: the extra that they will need
    "s3": "object",
    "gs": "object",
    "az": "object",
    "redis": "redis",
    "valkey": "redis",
    "mooncake": "mooncake",
}


def open_tier(
    kind: str,
    *,
    capacity_bytes: int,
    path: str = "",
    name: str = "",
    exclusive: bool = False,
    durability: Literal["none", "sync"] = "none",
    clock: Clock | None = None,
) -> Tier:
    """Opens a tier.

    Args:
        kind: "host" or "disk".
        capacity_bytes: Most bytes the tier may occupy, everything included.
        path: Directory of a disk tier.
        name: Name in statistics; default made from the rest.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durability: "none" survives the death of the process, "sync" that of the machine.
        clock: Source of time.

    Raises:
        ConfigError: The kind is unknown or not part of this version, or the capacity is too small.
        StoreError: The directory cannot be used.
    """
    if kind == "host":
        from flowkv.tiers.host import HostTier

        return HostTier(capacity_bytes, name=name or "host", clock=clock)
    if kind == "disk":
        from flowkv.tiers.disk import DiskTier

        return DiskTier(
            path,
            capacity_bytes,
            name=name,
            exclusive=exclusive,
            durability=durability,
            clock=clock,
        )
    if kind in _LATER:
        raise ConfigError(
            f"tiers of kind {kind!r} are not available in this version",
            "Use 'host' and 'disk' tiers; remote ones will come with"
            f" pip install 'flowkv[{_LATER[kind]}]'",
        )
    raise ConfigError(f"tier kind {kind!r} is unknown", "Use 'host' or 'disk'")
