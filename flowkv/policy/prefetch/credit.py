"""Who may prefetch, and how much: a purse for each reason to prefetch, filled by being right.

A reason pays a byte for every byte it brings, and gets back `1 / floor` for each that was used.
So one whose precision stays above the floor can go on for ever, and one below runs dry,
losing no more than what it had earned before. The learned reasons, one for each half octave of the
predicted rate, begin with nothing: they live on *probes*, a small share of the bytes that were
demanded, which all of them share. That makes the cost of being wrong, and of asking again now and
then whether one still is, a share of the traffic by construction.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

QUEUE, HINT, LEARNED = 0, 1, 2
KINDS = ("queue", "hint", "learned")
CLASSES = 40
"""Purses: queue, hints, and half octaves of the rate from 2^-14 to 2^5 per second."""

_FADE = 1.0 / 4096.0
_USED, _WASTED = 0, 1


def class_of(kind: int, rate: float) -> int:
    """The purse of a prefetch: its kind, and for learned ones how soon a use is expected."""
    if kind != LEARNED:
        return kind
    octaves = math.floor(2 * math.log2(rate)) + 28 if 0.0 < rate < math.inf else 0
    return LEARNED + min(max(octaves, 0), CLASSES - LEARNED - 1)


class Credit:
    """The purses.

    Args:
        most_bytes: What a purse can hold.
        floor: The precision from which on a reason pays for itself.
        probe_share: Of the bytes demanded, what learned reasons may risk without having earned it.
        trusted: Whether queue and hints begin with a full purse.

    Attributes:
        purses: Bytes that each reason may bring.
        probes: Bytes that any may bring.
    """

    def __init__(
        self, most_bytes: int, floor: float, probe_share: float, trusted: bool = True
    ) -> None:
        self.most_bytes, self.floor, self.probe_share = most_bytes, floor, probe_share
        self.purses = np.zeros(CLASSES)
        if trusted:
            self.purses[:LEARNED] = most_bytes
        self.probes = 0.0
        self._outcomes = np.zeros((CLASSES, 2))

    def demanded(self, n_bytes: float) -> None:
        """Bytes were loaded because somebody waited for them."""
        self.probes = min(self.probes + self.probe_share * n_bytes, self.most_bytes / 4)

    def affords(self, purse: int) -> float:
        """Bytes that a reason may bring now."""
        return float(self.purses[purse] + self.probes)

    def pay(self, purse: int, n_bytes: float) -> None:
        """A reason brings bytes."""
        own = min(n_bytes, float(self.purses[purse]))
        self.purses[purse] -= own
        self.probes = max(0.0, self.probes - (n_bytes - own))

    def refund(self, purse: int, n_bytes: float) -> None:
        """Bytes did not come after all."""
        self.purses[purse] = min(self.purses[purse] + n_bytes, self.most_bytes)

    def used(self, purse: int, n_bytes: float) -> None:
        """Somebody asked for bytes that a reason had brought."""
        self.refund(purse, n_bytes / self.floor)
        self._count(purse, _USED, n_bytes)

    def wasted(self, purse: int, n_bytes: float) -> None:
        """Bytes that a reason had brought left without having been used."""
        self._count(purse, _WASTED, n_bytes)

    def precision(self, kind: int) -> float:
        """Which part of the bytes of a kind was used, lately; 1 while nothing is known."""
        last = CLASSES if kind == LEARNED else kind + 1
        used, wasted = self._outcomes[kind:last].sum(0)
        return float(used / (used + wasted)) if used + wasted else 1.0

    def state(self) -> list[Any]:
        """What `restore` takes: plain values."""
        return [self.most_bytes, self.purses.tolist(), self._outcomes.tolist()]

    def restore(self, state: list[Any], trust: float) -> None:
        """Begins with a share `trust` of what another one had earned, as far as it was right."""
        most, purses, outcomes = state
        scale = self.most_bytes / max(most, 1)
        self.purses = np.minimum(np.array(purses) * scale, self.most_bytes)
        self.purses[LEARNED:] *= trust
        self._outcomes = np.array(outcomes).reshape(CLASSES, 2) * trust

    def _count(self, purse: int, which: int, n_bytes: float) -> None:
        kept = (1.0 - _FADE) ** min(n_bytes / max(self.most_bytes * _FADE, 1.0), 1e6)
        self._outcomes[purse] *= kept
        self._outcomes[purse, which] += n_bytes
