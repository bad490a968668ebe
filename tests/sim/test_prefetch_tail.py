"""Effect of prefetching on waiting requests, on generated traffic.

Simulated. One channel brings blocks to the place, demands first; prefetches use it while nobody
waits, a chunk at a time. What a request waits for is the time until the last of its blocks came.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from flowkv.policy import make_policy
from flowkv.policy.prefetch import Prefetcher
from flowkv.sim import Trace, generate
from tests.inside import OnePlace

CHUNK = 8


class Watched(OnePlace):
    """Notes when how many blocks were prefetched."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.fetches = list[tuple[int, int]]()

    def _bring(self, now: int) -> None:
        before = self.course.prefetched
        super()._bring(now)
        if self.course.prefetched > before:
            self.fetches.append((now, self.course.prefetched - before))


class Seen(NamedTuple):
    """What requests waited for, in nanoseconds; blocks demanded; blocks prefetched."""

    waited: NDArray[np.int64]
    demanded: int
    prefetched: int


def waits(
    arrivals: list[tuple[int, int]], fetches: list[tuple[int, int]], block_ns: int
) -> NDArray[np.int64]:
    """Time from each arrival (time, blocks) until its last block came, behind those before it."""
    queue, free_ns, out = deque(fetches), 0, list[int]()
    waiting = 0
    for now, blocks in arrivals:
        while True:  # what the channel does before this arrival, a chunk at a time
            while queue and queue[0][0] <= max(free_ns, 0):
                waiting += queue.popleft()[1]
            if not waiting and queue and queue[0][0] < now:
                free_ns = max(free_ns, queue[0][0])
                continue
            if not waiting or free_ns >= now:
                break
            chunk = min(waiting, CHUNK)
            waiting -= chunk
            free_ns += chunk * block_ns
        if blocks:
            free_ns = max(free_ns, now) + blocks * block_ns
            out.append(free_ns - now)
        else:
            out.append(0)
    return np.array(out, np.int64)


@cache
def trace_of(kind: str) -> Trace:
    return generate(kind, requests=2000, seed=1)


@cache
def replayed(kind: str, bytes_per_s: float = 0.0) -> Watched:
    """A replay in a fiftieth of the room, with prefetches unless they may bring nothing."""
    trace = trace_of(kind)
    capacity = trace.unique // 50
    prefetcher = Prefetcher(capacity, bytes_per_s=bytes_per_s) if bytes_per_s else None
    place = Watched(trace, make_policy("hazard"), capacity, prefetcher=prefetcher)
    place.replay()
    return place


def seen(place: Watched, block_ns: int) -> Seen:
    """The same on a channel that takes so long for a block."""
    loaded = place.course.loaded
    arrivals = list(zip(place.trace.times_ns.tolist(), loaded.tolist(), strict=True))
    return Seen(
        waits(arrivals, place.fetches, block_ns), int(loaded.sum()), place.course.prefetched
    )


def compared(kind: str, load: float) -> tuple[Seen, Seen, int]:
    """Without prefetches and with them, on a channel that demands alone keep so busy."""
    alone, times = replayed(kind), trace_of(kind).times_ns
    demanded = max(int(alone.course.loaded.sum()), 1)
    block_ns = round(load * int(times[-1] - times[0]) / demanded)
    return seen(alone, block_ns), seen(replayed(kind, 0.5e9 / block_ns), block_ns), block_ns


@pytest.mark.parametrize("kind", ["bursts", "drift", "chat", "mix"])
@pytest.mark.parametrize("load", [0.2, 0.7])
def test_the_tail_of_bursty_and_drifting_traffic_is_not_raised(kind: str, load: float) -> None:
    alone, beside, block_ns = compared(kind, load)
    for share in (0.5, 0.99):
        before, after = (np.quantile(one.waited, share) for one in (alone, beside))
        assert after <= before * 1.001 + CHUNK * block_ns
    if kind != "mix":  # half of that are agents, who can be predicted
        assert beside.demanded + beside.prefetched <= 1.02 * alone.demanded


def test_agents_wait_less_in_the_mean_and_in_the_tail() -> None:
    alone, beside, block_ns = compared("agents", 0.3)
    assert beside.prefetched > 0 and beside.demanded < alone.demanded
    assert beside.waited.mean() < alone.waited.mean()
    assert np.quantile(beside.waited, 0.99) <= np.quantile(alone.waited, 0.99) + CHUNK * block_ns


def test_the_channel_serves_demands_first_and_prefetches_in_chunks() -> None:
    assert waits([(0, 3), (1, 2)], [], 10).tolist() == [30, 49]
    beside = waits([(100, 1)], [(0, 1000)], 10)
    assert beside.tolist() == [70], "a chunk of eight ends at 160"
