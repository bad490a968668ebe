"""Storage tiers below the device: the `Tier` protocol (`base`), the frame format, and each kind."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

from flowkv.core.clock import Clock
from flowkv.core.errors import ConfigError
from flowkv.tiers.base import (
    UNBOUNDED,
    BadFrame,
    Completion,
    Entry,
    FrameInfo,
    Load,
    Outcome,
    Store,
    Tier,
    TierAnswer,
)
from flowkv.tiers.frame import Envelope, Header, decode_header, encode_header, verify

__all__ = [
    "REMOTE_KINDS",
    "BadFrame",
    "Completion",
    "Entry",
    "Envelope",
    "FrameInfo",
    "Header",
    "Load",
    "Outcome",
    "Store",
    "Tier",
    "TierAnswer",
    "decode_header",
    "encode_header",
    "open_tier",
    "verify",
]

_REMOTE = {
    **dict.fromkeys(("s3", "gs", "az"), ("objects", "ObjectTier")),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "unix"), ("redis", "RedisTier")),
    "mooncake": ("mooncake", "MooncakeTier"),
    "nixl": ("nixl", "NixlTier"),
}
REMOTE_KINDS = tuple(_REMOTE)
"""Schemes of the URIs of remote tiers."""


def open_tier(
    kind: str,
    *,
    capacity_bytes: int = UNBOUNDED,
    path: str = "",
    name: str = "",
    exclusive: bool = False,
    durability: Literal["none", "sync"] = "none",
    envelope: Envelope | None = None,
    clock: Clock | None = None,
) -> Tier:
    """Open a tier of the given kind.

    Args:
        kind: "host", "disk", or the scheme of a URI: one of `REMOTE_KINDS`.
        capacity_bytes: Most bytes the tier may occupy, everything included; the size of a remote
            tier may be left to its engine.
        path: Directory of a disk tier, the whole URI of a remote one, or the name under which
            processes of this machine share a host tier.
        name: Name in statistics; by default made from the kind and the path.
        exclusive: Refuse a directory that another process owns, instead of only reading it.
        durability: "none" survives the death of the process, "sync" that of the machine.
        envelope: Check, encryption and compression of frames on disks and remote tiers; default:
            xxh3 digests only.
        clock: Source of time.

    Raises:
        ConfigError: The kind is unknown, or the capacity is too small.
        MissingDependencyError: The tier needs an extra that is not installed.
        StoreError: The directory, or the engine, cannot be used.
    """
    common: dict[str, Any] = {"name": name, "envelope": envelope, "clock": clock}
    if kind in REMOTE_KINDS:
        module, tier = _REMOTE[kind]
        open_remote = getattr(import_module(f"flowkv.tiers.remote.{module}"), tier)
        remote: Tier = open_remote(path, capacity_bytes, **common)
        return remote
    if kind not in ("host", "disk"):
        known = ", ".join(REMOTE_KINDS)
        raise ConfigError(f"tier kind {kind!r} is unknown", f"Use host, disk, or one of {known}")
    if kind == "disk":
        from flowkv.tiers.disk.tier import DiskTier

        common |= {"exclusive": exclusive, "durability": durability}
        return DiskTier(path, capacity_bytes, **common)
    if path:
        from flowkv.tiers.shared import SharedTier

        return SharedTier(path, capacity_bytes, clock=clock)
    from flowkv.tiers.host import HostTier

    return HostTier(capacity_bytes, name=name or "host", clock=clock)
