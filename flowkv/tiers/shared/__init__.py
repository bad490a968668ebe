"""Host memory that the processes of one user share."""

from flowkv.tiers.shared.tier import SharedTier

__all__ = ["SharedTier"]
