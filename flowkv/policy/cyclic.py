"""For what is used in a circle, such as weights: keeps some of it and streams the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from flowkv.policy.base import NO_VISIT, Slots, Visit
from flowkv.policy.circle import (
    COUNTS,
    RECENT,
    RECENTS,
    SHADOW,
    fix,
    forsake,
    loosen,
    recall,
    watch,
)
from flowkv.policy.config import CyclicConfig, configure
from flowkv.policy.order.image import column, damaged, uncolumn
from flowkv.policy.order.leaf import LeafOrder, as_slots
from flowkv.policy.order.leaf_state import FIRST_CAPACITY
from flowkv.policy.order.rings import members
from flowkv.policy.order.slots import COUNT, HELD_FAST, LISTS


class Cyclic(LeafOrder):
    """Least recently used, until the traffic is a circle; then some blocks stay and others stream.

    When N blocks are used in a circle and C fit, LRU gives up each just before its next use, and
    hits nothing. Here C - `streaming` blocks stay for good and the others go through what is left,
    the longest unused first: a share (C - streaming) / N is found, of C / N at best, and which are
    missing is known a round ahead, so that they can be fetched in time.

    That the traffic is a circle is found by keeping count, beside the cache, of what LRU would have
    found and what a set would have that stays. A round of as many uses as there are known blocks
    decides: with a tenth more, the set wins; it is given up in the first round that LRU wins. How
    many blocks fit is the largest number that an eviction has left. What stays is chosen when an
    eviction leaves more than `streaming` blocks that do not: the longest unused of these.

    The optimum for a circle is to give up what was used last (Belady, IBM Systems Journal 1966);
    weight offloading runtimes keep the first k layers (Sheng et al., FlexGen, arXiv 2303.06865).

    Args:
        **options: Fields of `CyclicConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "cyclic"
    config: CyclicConfig

    def __init__(self, **options: object) -> None:
        self.config = configure(CyclicConfig, self.name, options)
        super().__init__(leases=self.config)
        self.cycle = self.config.cycle is True
        self._size = 0  # blocks that fit
        self._shadow = np.zeros(0, SHADOW)
        self._counts = np.zeros(COUNTS, np.int64)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """See `Policy.access`. Ghosts count: that they come back tells of a circle."""
        slots = as_slots(slots)
        super().access(now_ns, slots, visit)
        if self.config.cycle is not None or self._size == 0:
            return
        if len(self._shadow) < len(self._arrays[0]):
            grown = np.zeros(len(self._arrays[0]), SHADOW)
            grown[: len(self._shadow)] = self._shadow
            self._shadow = grown
        verdict = watch(self._shadow, self._counts, slots, self._size, self.config.streaming)
        if verdict != 0:
            self.cycle = verdict > 0
            if not self.cycle:
                loosen(*self._arrays, self._state)

    def forget(self, slots: Slots) -> None:
        """See `Policy.forget`."""
        slots = as_slots(slots)
        super().forget(slots)
        forsake(self._arrays[0], self._shadow, self._counts, slots)

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """See `Policy.evict`. Where the traffic is a circle, it also chooses what stays."""
        victims = super().evict(now_ns, n, protected)
        if victims is not None and n > 0:
            self._size = max(self._size, int(self._state[COUNT]))
            spare = int(self._state[COUNT] - self._state[HELD_FAST]) - self.config.streaming
            if self.cycle and spare > 0:
                fix(*self._arrays, self._state, spare)
        return victims

    def _more(self) -> dict[str, object]:
        recent = np.empty(self._counts[RECENTS], np.int64)
        members(self._shadow, self._counts, 0, recent)
        return {
            "shadow": column(self._shadow["marks"]),
            "shadows": len(self._shadow),
            "recent": recent.tolist(),
            "rounds": self._counts[:LISTS].tolist(),
            "size": self._size,
            "cycle": self.cycle,
        }

    def _take_more(self, values: Mapping[str, Any], n: int) -> None:
        try:
            more = msgspec.convert(values, _More, strict=True)
            recent, counts = np.array(more.recent, np.int64), np.array(more.rounds, np.int64)
        except (msgspec.ValidationError, OverflowError):
            raise damaged("its counts are none") from None
        if not 0 <= more.shadows <= max(n, FIRST_CAPACITY):
            raise damaged("its counts are out of range")
        shadow = np.zeros(more.shadows, SHADOW)
        shadow["marks"] = uncolumn(more.shadow, np.int32, more.shadows)
        marked = np.flatnonzero(shadow["marks"] & RECENT)
        if len(counts) != LISTS or not np.array_equal(np.sort(recent), marked):
            raise damaged("its counts do not fit")
        self._counts[:LISTS] = counts
        recall(shadow, self._counts, recent)
        self._shadow, self._size, self.cycle = shadow, more.size, more.cycle


class _More(msgspec.Struct):
    shadow: bytes
    shadows: int
    recent: list[int]
    rounds: list[int]
    size: Annotated[int, msgspec.Meta(ge=0)]
    cycle: bool
