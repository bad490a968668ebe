"""The memory of a compiled order: its arrays, how they grow, and how they are carried over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import Slots
from flowkv.policy.config import LeaseConfig
from flowkv.policy.order import calls
from flowkv.policy.order.image import (
    chains_of,
    column,
    columns_of,
    damaged,
    length_of,
    put_ghosts,
    rebuild,
    records_of,
    seal,
    uncolumn,
    unseal,
)
from flowkv.policy.order.slots import (
    BIRTHS,
    CLOCK,
    CLOCK_LIMIT,
    HEAPS,
    LISTS,
    MODE,
    NODE,
    SIZE,
    STALE,
    TARGET,
    TAU,
    TENANTS,
    TERMS,
)

FIRST_CAPACITY = 1024
TENANT_LIMIT = 1 << 24


class LeafState:
    """Records, heaps and lists of slots, for `LeafOrder` to work on.

    Args:
        tau_ns: Half-life that blocks are sorted by.
        config: Lease classes, and what else a policy on top can be told.

    Attributes:
        config: As given. A snapshot fits a policy of equal configuration only.
    """

    name = ""

    def __init__(self, tau_ns: int, config: LeaseConfig) -> None:
        self.config = config
        self._state = np.zeros(LISTS + TENANTS + 1, np.int64)
        self._state[CLOCK] = -CLOCK_LIMIT
        self._state[TAU] = tau_ns
        self._arrays: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] = (
            np.zeros(0, NODE),
            np.zeros(0, TERMS),
            np.zeros((HEAPS, 0, 2), np.int64),
        )
        self._queued: dict[int, Slots] = {}
        self._grow(FIRST_CAPACITY)

    def snapshot(self) -> bytes:
        """See `Policy.snapshot`. About 90 bytes per slot number, less where little is used."""
        nodes, terms, _ = self._arrays
        calls.tick(*self._arrays, self._state, self._state[CLOCK])
        state = self._state.copy()
        state[:BIRTHS] = state[LISTS:] = 0
        columns = columns_of(nodes, terms, self._state)
        values: dict[str, object] = {
            "state": column(state),
            "queued": {request: slots.tolist() for request, slots in self._queued.items()},
        }
        return seal(self.name, self.config, values | columns | self._more())

    def restore(self, snapshot: bytes) -> None:
        """See `Policy.restore`. Nothing has changed if it is refused."""
        values = unseal(snapshot, self.name, self.config)
        size = length_of(values.get("state"), 8)
        state = uncolumn(values.get("state"), np.int64, max(size, LISTS + TENANTS + 1))
        self._check(state)
        queued = chains_of(values.get("queued"))
        nodes, terms = records_of(values, len(state) - LISTS - TENANTS, queued)
        n = len(nodes)
        state[:BIRTHS] = state[LISTS:] = 0
        state[BIRTHS] = max(state[BIRTHS], int(nodes["birth"].max(initial=0)))
        heaps = np.zeros((HEAPS, n, 2), np.int64)
        if not rebuild(nodes, terms, heaps, state, np.zeros(n, np.int64)):
            raise damaged("its blocks are no forest")
        put_ghosts(nodes, terms, state, values.get("ghosts"))
        self._take_more(values, n)
        self._arrays, self._state, self._queued = (nodes, terms, heaps), state, queued
        if n < FIRST_CAPACITY:
            self._grow(FIRST_CAPACITY)

    def _more(self) -> dict[str, object]:
        """What a policy on top remembers besides."""
        return {}

    def _take_more(self, values: Mapping[str, Any], n: int) -> None:
        """Takes over what `_more` gave, when there were `n` slots; refuses before it changes."""

    def _check(self, state: Slots) -> None:
        """Whether a state vector is of a policy with the same keys.

        Raises:
            ConfigError: It is not.
        """
        own = self._state
        if state[MODE] != own[MODE] or state[TAU] != own[TAU] or state[STALE] != 0:
            raise damaged("its half-life is another")
        if abs(int(state[CLOCK])) > CLOCK_LIMIT or min(state[BIRTHS], state[TARGET]) < 0:
            raise damaged("its clock is none")
        if state[TARGET] > state[SIZE]:
            raise damaged("its target is larger than the cache")

    def _welcome(self, tenant: int) -> None:
        """Makes room for the list of a tenant's blocks."""
        if not 0 <= tenant < TENANT_LIMIT:
            raise ConfigError(f"tenant {tenant}", "Number tenants densely from 0")
        old = self._state
        self._state = np.zeros(LISTS + TENANTS + 2 * (tenant + 1), np.int64)
        self._state[: len(old)] = old

    def _grow(self, room: int) -> None:
        """Makes room for slots below `room`: doubles, so that growing costs O(1) per slot."""
        nodes, terms, heaps = self._arrays
        old, new = len(nodes), max(room, 2 * len(nodes))
        grown = np.zeros(new, NODE), np.zeros(new, TERMS), np.zeros((len(heaps), new, 2), np.int64)
        grown[0][:old], grown[1][:old], grown[2][:, :old] = nodes, terms, heaps
        grown[0]["place"][old:] = grown[1]["due"][old:] = -1
        self._arrays = grown
