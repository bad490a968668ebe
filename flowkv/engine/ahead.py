"""Requests that wait: what is known of them comes nearer, and what they will share is looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import Any

from flowkv.engine.live import Live
from flowkv.policy.scheduling import WAITING
from flowkv.runtime.cache import KV
from flowkv.runtime.footprint import Footprint
from flowkv.runtime.sequence import Sequence

_MOST, _EACH_TURN = 16, 2
"""Requests whose pages come nearer while they wait, and those that one turn begins with."""


class Ahead:
    """Looks at requests that wait. Belongs to the thread that runs the engine.

    Args:
        kv: The cache.
    """

    def __init__(self, kv: KV) -> None:
        self._kv = kv
        self._queued: set[Live] = set()
        self._probes: dict[Live, Sequence] = {}

    def look(self, waiting: Iterable[Live], rank: Callable[[Live], Any]) -> None:
        """Tells the cache of a few requests that are to be served next: it may fetch their pages.

        Args:
            waiting: Who waits.
            rank: Their order.
        """
        room = min(_EACH_TURN, _MOST - len(self._queued))
        if room <= 0:
            return
        fresh = [live for live in waiting if live.queued is None and live.state == WAITING]
        for live in nsmallest(room, fresh, key=rank):
            request = live.request
            live.queued = self._kv.enqueue(live.known, tenant=request.tenant, salts=request.salts)
            self._queued.add(live)

    def opened(self, live: Live) -> None:
        """A request has a row now: opening its prompt has served one that waited for it."""
        self._probes.pop(live, None)
        if live.queued is None:
            return
        self._queued.discard(live)
        if live.queued.waiting:  # it served another request for the same prompt: they change places
            for other in self._queued:
                served = other.queued
                if served is not None and not served.waiting and served._key == live.queued._key:
                    other.queued, live.queued = live.queued, None
                    break
            else:
                live.queued.cancel()
        live.queued = None

    def over(self, live: Live) -> None:
        """A request will not be served."""
        self._probes.pop(live, None)
        if live.queued is not None:
            live.queued.cancel()
            self._queued.discard(live)
            live.queued = None

    def shared(self, live: Live, footprint: Footprint) -> int:
        """Pages of what is known of a request that others hold now, so that it needs no room.

        Args:
            live: It waits.
            footprint: Counts pages of the cache's pools.
        """
        kv, known = self._kv, live.known.size
        with kv.lock:
            if live.row is not None:
                seq = live.row.seq
            else:
                seq = self._probe(live)
            if seq.planner is not kv.planner:  # in pools of before the model changed
                return 0
            return footprint.held(seq, min(known, live.ready or known - 1) // kv.page_size)

    def _probe(self, live: Live) -> Sequence:
        kv, probe = self._kv, self._probes.get(live)
        if (
            probe is None
            or probe.known != live.known.size
            or (probe.planner, probe.namespace) != (kv.planner, kv.namespace)  # another model
        ):
            request = live.request
            probe = kv._lineless(kv._bound(), request.tenant, request.salts)
            probe.extend(live.known)
            self._probes[live] = probe
        return probe
