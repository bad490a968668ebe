"""Which restored pages are to be recomputed and compared, and what came of it (`runtime.audit`)."""

from __future__ import annotations

from typing import NamedTuple

MOST_WAITING = 1 << 12
"""Sampled pages that wait for their audit at most; the oldest are forgotten."""


class Verdict(NamedTuple):
    """How far a page lies from what the model computes in its place.

    Attributes:
        error: Greatest distance of a token's keys or values, relative to their size.
        bound: How large that may be there.
    """

    error: float
    bound: float

    @property
    def sound(self) -> bool:
        """Whether the page is what the model computes, as far as that can be told."""
        return self.error <= self.bound


class Samples:
    """The sample of restored pages. Callers hold the KV lock.

    A page is in the sample for good or not at all, as its key says: the same pages in every run
    and in every process. Keys are SHA-256, so that the share is met whatever the prompts are.

    Args:
        share: Of all restored pages, 0 to 1; 0 samples none.

    Attributes:
        audited: Pages that were recomputed and compared.
        mismatches: Those that were not what the model computes.
        skipped: Those that could not be recomputed.
        worst: The greatest error as a share of its bound, mismatches left out.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._border = round(share * 2.0**64)
        self._came: dict[bytes, str] = {}
        self.audited = self.mismatches = self.skipped = 0
        self.worst = 0.0

    def __len__(self) -> int:
        return len(self._came)

    def has(self, key: bytes) -> bool:
        """Whether a page belongs to the sample."""
        return int.from_bytes(key[:8], "little") < self._border

    def came(self, key: bytes, tier: str) -> None:
        """A page was restored from a tier."""
        if self._border and self.has(key):
            self._came.pop(key, None)
            self._came[key] = tier
            if len(self._came) > MOST_WAITING:
                del self._came[next(iter(self._came))]

    def waiting(self, key: bytes) -> bool:
        """Whether a page was restored and is still to be audited."""
        return key in self._came

    def take(self, key: bytes) -> str:
        """The tier that a page was restored from, which is audited now; "" if it need not be."""
        return self._came.pop(key, "")

    def skip(self, key: bytes) -> None:
        """A page cannot be audited."""
        self.skipped += bool(self.take(key))

    def judged(self, verdict: Verdict) -> None:
        """A page was compared."""
        self.audited += 1
        if not verdict.sound:
            self.mismatches += 1
        elif verdict.bound:
            self.worst = max(self.worst, verdict.error / verdict.bound)
