"""Frames in a directory on a local disk: the tier, its files, and the look inside."""

from __future__ import annotations

from flowkv.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
