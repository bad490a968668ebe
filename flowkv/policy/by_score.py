"""Custom policies from one function: a score of each block at its use; the least goes first."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NEVER_NS, NO_VISIT, LeaseConfig, Slots, Visit, configure
from flowkv.policy.order.compiled import CLOCK, LATEST, assign
from flowkv.policy.order.leaf import LeafOrder, as_slots

_FIELDS = "uses first_ns before_ns last_ns n_bytes cost_ns"
PAST = np.dtype([(field, np.int64) for field in _FIELDS.split()])


class Use(NamedTuple):
    """Blocks that are used now, root to leaf, and their history; equally long vectors.

    Attributes:
        slots: Slot numbers.
        uses: Uses so far, this one included; evictions do not reset the count.
        first_ns: Time of the first use.
        before_ns: Time of the previous use; equal to `first_ns` at the first.
        depth: Number of blocks above.
        n_bytes: Bytes of each block, from its last insert.
        cost_ns: Time to recompute each block, likewise; 0 if unknown.
        visit: The request, as far as it is known.
    """

    slots: Slots
    uses: Slots
    first_ns: Slots
    before_ns: Slots
    depth: Slots
    n_bytes: Slots
    cost_ns: Slots
    visit: Visit


class ByScore(LeafOrder):
    """Policy that evicts the leaf with the least score; override `score`, nothing else.

    Leaf order, pins, leases, ranks, tenants, queued requests and hints that a block is never used
    again are provided. (A hint of a time is ignored: times and scores have no common unit.) A
    score counts from the block's use until its next one, so a policy that ages needs a score to
    which time adds the same for all, as the logarithm of a decaying count; see
    `flowkv.policy.order.compiled`.

    `score` runs once per request on whole vectors: plain numpy is fast enough to replay millions of
    blocks in seconds.

    Args:
        **options: Fields of `LeaseConfig`.
    """

    name = "by-score"

    def __init__(self, **options: object) -> None:
        super().__init__(leases=configure(LeaseConfig, self.name, options))
        self._past = np.zeros(0, PAST)

    def score(self, now_ns: int, use: Use) -> NDArray[Any]:
        """Return one number for each block, not NaN; the smaller, the earlier it goes.

        The default is LRU. Any other result raises `ConfigError` in the call that asked, and scores
        no block.

        Args:
            now_ns: Time.
            use: The blocks.
        """
        return np.full(len(use.slots), now_ns)

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Add blocks that became resident, root to leaf; `parents[i]` is a slot or -1."""
        slots = as_slots(slots)
        super().insert(now_ns, slots, parents, **said)
        if (more := len(self._order[0]) - len(self._past)) > 0:
            self._past = np.append(self._past, np.zeros(more, PAST))
        self._past["n_bytes"][slots] = said.get("n_bytes", 1)
        self._past["cost_ns"][slots] = said.get("cost_ns", 0)
        now = int(self._state[CLOCK])
        past = self._past[slots]
        self._use(slots[(past["uses"] == 0) | (past["last_ns"] != now)], NO_VISIT)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf."""
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        slots = slots[(slots >= 0) & (slots < len(self._past))]
        nodes = self._order[0][slots]
        self._use(slots[(nodes["birth"] != 0) & (nodes["live"] >= 0)], visit)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects the next use of this chain in about `eta_ns`.

        Only `NEVER_NS` has an effect.
        """
        if eta_ns == NEVER_NS:
            super().hint(now_ns, slots, eta_ns, sigma)
        else:
            self.admit(now_ns, as_slots([]))  # time passes

    def forget(self, slots: Slots) -> None:
        """Forget slots that are not resident; the numbers may be reused for other blocks."""
        slots = as_slots(slots)
        super().forget(slots)
        slots = slots[(slots >= 0) & (slots < len(self._past))]
        self._past[slots[self._order[0]["birth"][slots] == 0]] = np.zeros(1, PAST)

    def _use(self, slots: Slots, visit: Visit) -> None:
        """Count a use of each block and score it again."""
        if len(slots) == 0:
            return
        slots = np.unique(slots) if len(np.unique(slots)) != len(slots) else slots
        now, past = int(self._state[CLOCK]), self._past[slots]
        fresh = past["uses"] == 0
        past["first_ns"] = np.where(fresh, now, past["first_ns"])
        past["before_ns"] = np.where(fresh, now, past["last_ns"])
        past["last_ns"] = now
        past["uses"] += 1
        self._past[slots] = past
        depth = self._order[0]["depth"][slots].astype(np.int64)
        uses, first, before = past["uses"], past["first_ns"], past["before_ns"]
        known = slots.copy(), uses, first, before, depth, past["n_bytes"], past["cost_ns"]
        keys = self._checked(self.score(now, Use(*known, visit)), len(slots))
        assign(*self._order, slots, keys)

    def _checked(self, scores: object, n: int) -> Slots:
        """Return the keys of scores, checked, since compiled code reads one for each block."""
        try:
            given = np.asarray(scores)
        except (ValueError, TypeError, RuntimeError) as error:  # ragged, or out of numpy's reach
            problem = f"gave no vector for {n} blocks ({str(error).rstrip('.')})"
        else:
            if given.dtype.kind not in "biuf" or given.shape != (n,):
                problem = f"gave {given.dtype} {list(given.shape)} for {n} blocks"
            elif given.dtype.kind == "f" and np.isnan(given).any():
                problem = f"gave NaN for {int(np.isnan(given).sum())} of {n} blocks"
            else:
                return _keys(given)
        raise ConfigError(
            f"score() of policy {self.name!r} {problem}",
            "Return one number for each of use.slots, none of them NaN",
        )


def _keys(scores: NDArray[Any]) -> Slots:
    """Return integers in the order of the scores: integers as such, floats by their bits."""
    scores = np.ascontiguousarray(scores)
    if scores.dtype.kind in "iu":
        least = -LATEST if scores.dtype.kind == "i" else 0
        return np.asarray(np.clip(scores, least, LATEST), np.int64)
    bits = np.where(scores == 0, 0.0, scores.astype(np.float64)).view(np.int64)
    ordered = np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits)
    return np.asarray(ordered >> 1, np.int64).clip(-LATEST, LATEST)
