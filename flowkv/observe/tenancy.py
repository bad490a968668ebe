"""Who finds how much of its prompts: by tenant, for a bounded number of tenants."""

from __future__ import annotations

import threading
from typing import Any

from flowkv.observe.events import Bus, Hit, Miss

OTHERS = "(others)"
"""What tenants beyond the number that are told apart are called, all together."""


class Tenancy:
    """Tokens found and not found by tenant. Thread-safe.

    Names of tenants may be private: they leave the process only where somebody asks for them.

    Args:
        bus: Where to listen.
        most: Tenants that are told apart. Beyond them, the one with the fewest tokens joins the
            others; no token is lost.
    """

    def __init__(self, bus: Bus, *, most: int = 64) -> None:
        self._lock, self._most = threading.Lock(), most
        self._found: dict[str, dict[str, int]] = {}  # tenant -> tier -> tokens; "" is nowhere
        self._sizes: dict[str, int] = {}
        self._subscription = bus.subscribe(self.note, Hit, Miss)

    def note(self, event: Hit | Miss) -> None:
        """Takes an event."""
        tier = event.tier if isinstance(event, Hit) else ""
        with self._lock:
            if event.tenant not in self._sizes and len(self._sizes) >= self._most:
                self._join(min(self._sizes, key=self._sizes.__getitem__))
            self._sizes[event.tenant] = self._sizes.get(event.tenant, 0) + event.tokens
            found = self._found.setdefault(event.tenant, {})
            found[tier] = found.get(tier, 0) + event.tokens

    def _join(self, tenant: str) -> None:
        del self._sizes[tenant]
        others = self._found.setdefault(OTHERS, {})
        for tier, tokens in self._found.pop(tenant).items():
            others[tier] = others.get(tier, 0) + tokens

    def tokens(self) -> dict[str, dict[str, int]]:
        """Prompt tokens by tenant and by the tier that had them; "" is nowhere."""
        with self._lock:
            return {tenant: dict(found) for tenant, found in self._found.items()}

    def report(self) -> dict[str, Any]:
        """Plain numbers: for each tenant its tokens by tier, those not found, and its hit rate."""
        report = {}
        for tenant, found in self.tokens().items():
            missed = found.pop("", 0)
            hits = sum(found.values())
            rate = hits / (hits + missed) if hits + missed else 0.0
            report[tenant] = {"hit_tokens": found, "miss_tokens": missed, "hit_rate": rate}
        return report

    def close(self) -> None:
        """Ends the collecting; what was collected stays."""
        self._subscription.close()
