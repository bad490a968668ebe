"""Disk tier: frames in a directory on a local disk, their files, and their inspection."""

from __future__ import annotations

from flowkv.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
