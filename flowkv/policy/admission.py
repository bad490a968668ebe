"""Write admission: which pages that leave memory are worth a write to a lasting tier.

| rule | a page is written |
|---|---|
| `second-touch` | once two requests have used it |
| `auto` | unless pages of its turn are the least likely to return, and seldom enough do |

The turn of a page is the number of requests that extended its prompt before it was made. `auto`
counts, for each turn, the pages that left memory and those that a later request used again. It
declines the turns with the smallest share of returns, as long as these returns are together at most
`loss` of all uses of pages: so they bound the hits that it can lose.

Whatever was admitted once stays so, and all pages above it are admitted with it: a page without its
beginning is of no use. Pure, as policies are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import refuse_unknown
from flowkv.policy.base import Slots

RULES = ("second-touch", "auto")

TURNS = 16
"""Turns that `auto` tells apart; later ones count as the last."""

USUAL = 64
"""Pages with the share of returns of all turns that each turn is taken to have besides its own."""

MEMORY = 1 << 16
"""Pages that left memory, after which all counts are halved."""

USES = 1 << 23
"""Uses of pages after which they are: what memory alone served permits no endless losses later."""

_SLOT = np.dtype(
    [("uses", "u1"), ("turn", "u1"), ("left", "u1"), ("chosen", "?"), ("parent", "i4")]
)


class WriteAdmission:
    """Uses of pages by slot, and the rule that chooses those to write.

    Args:
        rule: A name of `RULES`.
        loss: With "auto", the largest share of all uses that may be returns of declined pages. The
            default loses about half a point of hits: a page that is missing ends a run of hits.

    Raises:
        ConfigError: There is no such rule.
    """

    def __init__(self, rule: str, loss: float = 0.0035) -> None:
        refuse_unknown("no rule of write admission", rule, RULES)
        self.rule, self.loss = rule, loss
        self._slots = np.zeros(0, _SLOT)
        self._left, self._back = np.zeros((2, TURNS), np.int64)
        self._uses = self._new = 0  # pages that came since the last request count with the next

    # ---- what happens

    def access(self, slots: Slots) -> None:
        """Count a request's use of pages, resident or not; unknown slots are skipped."""
        known = self._known(slots)
        uses, left = self._slots["uses"], self._slots["left"]
        uses[known] = np.minimum(uses[known], 254) + 1
        self._uses, self._new = self._uses + len(known) + self._new, 0
        back = known[left[known] > 0]
        self._back += np.bincount(left[back] - 1, minlength=TURNS)
        left[back] = 0
        self._age()

    def insert(self, slots: Slots, parents: Slots) -> None:
        """Add pages that became known, root to leaf, with their first use; others are skipped.

        Args:
            slots: The pages.
            parents: The page above each, -1 for none.
        """
        most = int(slots.max(initial=-1)) + 1
        if most > (known := len(self._slots)):
            self._slots = np.append(self._slots, np.zeros(max(most - known, known), _SLOT))
        new = self._slots["uses"][slots] == 0
        self._slots["parent"][slots] = parents  # those above may have come back as other slots
        self.choose(parents[(parents >= 0) & self._slots["chosen"][slots]])
        for slot, parent in zip(slots[new].tolist(), parents[new].tolist(), strict=True):
            above = self._slots[parent] if 0 <= parent < len(self._slots) else None
            turn = 0 if above is None else min(above["turn"] + (above["uses"] > 1), TURNS - 1)
            self._slots[slot] = (1, turn, 0, False, parent)
        self._new += int(np.count_nonzero(new))

    def forget(self, slots: Slots) -> None:
        """Forget pages; the numbers may be reused for others."""
        self._slots[slots[slots < len(self._slots)]] = 0

    def choose(self, slots: Slots) -> None:
        """Admit pages for a reason of the caller's, with those above them."""
        rows = self._slots
        for slot in self._known(slots).tolist():
            while slot >= 0 and rows[slot]["uses"] and not rows[slot]["chosen"]:
                rows["chosen"][slot] = True
                slot = int(rows[slot]["parent"])

    # ---- what is decided

    def admits(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which of these pages the rule would write now; unknown ones are admitted."""
        admitted = np.ones(len(slots), np.bool_)
        inside = slots < len(self._slots)
        rows = self._slots[slots[inside]]
        good = rows["uses"] > 1 if self.rule == "second-touch" else ~self._poor()[rows["turn"]]
        admitted[inside] = good | rows["chosen"] | (rows["uses"] == 0)
        return admitted

    def depart(self, slots: Slots) -> NDArray[np.bool_]:
        """Record that pages leave memory, and return which of them are to be written."""
        admitted = np.ones(len(slots), np.bool_)
        for n in range(len(slots)):  # one by one: batches of any size give the same answers
            admitted[n] = self.admits(slots[n : n + 1])[0]
            first = self._known(slots[n : n + 1])
            row = self._slots[first]
            first = first[(row["left"] == 0) & ~row["chosen"]]
            self._slots["left"][first] = self._slots["turn"][first] + 1
            self._left[self._slots["turn"][first]] += 1
            self.choose(slots[n : n + admitted[n]])
            self._age()
        return admitted

    def declined(self, slot: int) -> bool:
        """Return whether a page left memory unwritten, and was not used since."""
        known = 0 <= slot < len(self._slots)
        return known and bool(self._slots["left"][slot]) and not self._slots["chosen"][slot]

    def _age(self) -> None:
        if self._uses > USES or self._left.sum() > MEMORY:
            self._left //= 2
            self._back //= 2
            self._uses //= 2

    def _known(self, slots: Slots) -> Slots:
        inside = slots[slots < len(self._slots)]
        return inside[self._slots["uses"][inside] > 0]

    def _poor(self) -> NDArray[np.bool_]:
        """Return the turns with pages that are not worth a write."""
        poor, back = np.zeros(TURNS, np.bool_), self._back
        expected = back + USUAL * (back.sum() / max(self._left.sum(), 1))
        order = np.argsort(expected / (self._left + USUAL), kind="stable")
        poor[order] = np.cumsum(back[order]) <= self.loss * self._uses
        return poor
