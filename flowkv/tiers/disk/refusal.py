"""Why a store cannot be done now."""

from __future__ import annotations

from flowkv.core.errors import FlowKVError


class Refused(FlowKVError):
    """A wish that cannot be fulfilled now; `reason` is "full", "busy" or "read-only"."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the frame was not stored ({reason})", "Make room, or store it later")
        self.reason = reason
