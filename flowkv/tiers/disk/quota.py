"""What a directory may occupy: the capacity, and what of it managing the frames may take."""

from __future__ import annotations

from flowkv.core.errors import ConfigError
from flowkv.tiers.disk.journal import CHARGE_BYTES

LEAST_BYTES = 256 << 10
_FIXED_BYTES = 32 << 10  # superblock, lock, directory, unfinished journal pages, their copies


class Quota:
    """Bytes of one directory.

    Args:
        capacity_bytes: Most that it may occupy, everything included.

    Attributes:
        capacity_bytes: The same.
        garbage: Dead records that the journal may hold.

    Raises:
        ConfigError: The capacity is too small.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise ConfigError(
                f"a disk tier of {capacity_bytes} bytes", f"Give it at least {LEAST_BYTES} bytes"
            )
        self.capacity_bytes = capacity_bytes
        self.garbage = min(max(capacity_bytes >> 16, 64), 1 << 18)
        reserve = (capacity_bytes >> 9) + min(capacity_bytes >> 4, 1 << 19)
        self._fixed_bytes = _FIXED_BYTES + reserve + self.garbage * CHARGE_BYTES

    def overhead_bytes(self, frames: int) -> int:
        """What so many frames take beside their slots."""
        # every frame may stand in the journal twice: a compaction writes a second one
        return self._fixed_bytes + 2 * CHARGE_BYTES * frames

    def slots_bytes(self, frames: int) -> int:
        """What is left for the slots of so many frames."""
        return self.capacity_bytes - self.overhead_bytes(frames)
