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
        most: Tenants that are told apart. Beyond them, the last of them in a ranking joins the
            others; no token is lost. Whoever has more than one in `most` of all tokens is told
            apart, with what it had since it was ranked last: these are no counters.
    """

    def __init__(self, bus: Bus, *, most: int = 64) -> None:
        self._lock, self._most = threading.Lock(), most
        self._found: dict[str, dict[str, int]] = {}  # tenant -> tier -> tokens; "" is nowhere
        self._others: dict[str, int] = {}
        # Where tenants rank, as in Space-Saving (Metwally et al., ICDT 2005): a newcomer goes on
        # from the rank that it takes over, or a crowd of small ones would never let it grow.
        self._ranks: dict[str, int] = {}
        self._subscription = bus.subscribe(self.note, Hit, Miss)

    def note(self, event: Hit | Miss) -> None:
        """Takes an event."""
        tier = event.tier if isinstance(event, Hit) else ""
        with self._lock:
            rank = self._ranks.get(event.tenant, 0)
            if event.tenant not in self._ranks and len(self._ranks) >= self._most:
                rank = self._join(min(self._ranks, key=self._ranks.__getitem__))
            self._ranks[event.tenant] = rank + event.tokens
            found = self._found.setdefault(event.tenant, {})
            found[tier] = found.get(tier, 0) + event.tokens

    def _join(self, tenant: str) -> int:
        """Counts a tenant as one of the others; returns its rank."""
        _add(self._others, self._found.pop(tenant))
        return self._ranks.pop(tenant)

    def tokens(self) -> dict[str, dict[str, int]]:
        """Prompt tokens by tenant and by the tier that had them; "" is nowhere."""
        with self._lock:
            told = {tenant: dict(found) for tenant, found in self._found.items()}
            if self._others:  # a tenant may be called that, too
                _add(told.setdefault(OTHERS, {}), self._others)
            return told

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


def _add(found: dict[str, int], more: dict[str, int]) -> None:
    for tier, tokens in more.items():
        found[tier] = found.get(tier, 0) + tokens
