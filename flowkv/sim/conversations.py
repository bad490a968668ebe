"""Which request continues which: what a hint of the application would say in a replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NEVER_NS
from flowkv.policy.order.compiled import Array, kernel
from flowkv.sim.trace import Trace


@kernel
def follow(offsets: Array, blocks: Array, sessions: Array, users: Array, turns: Array) -> None:
    """Fills `turns` with the next turn of each request, -1 for none; `users` is scratch.

    Of a known session: its next request. Otherwise: the first later one that shares all blocks of
    this one, or all but the last, which may have been cut short, and more than one.
    """
    for r in range(len(offsets) - 1):
        first, end = offsets[r], offsets[r + 1]
        known = first
        while known < end and users[blocks[known]] >= 0:
            known += 1
        if sessions[r] < 0 and known - first > 1:
            q = users[blocks[known - 1]]
            if known - first >= offsets[q + 1] - offsets[q] - 1 and turns[q] < 0:
                turns[q] = r
        for j in range(first, end):
            users[blocks[j]] = r


def next_turns(trace: Trace, *, use_sessions: bool = True) -> NDArray[np.int64]:
    """For each request the one that continues its conversation; -1 where it ends.

    Args:
        trace: The trace.
        use_sessions: Go by sessions where they are known, not by blocks alone.
    """
    turns = np.full(len(trace), -1, np.int64)
    users = np.full(trace.unique, -1, np.int64)
    sessions = trace.sessions if use_sessions else np.full(len(trace), -1, np.int64)
    follow(trace.offsets, trace.blocks, sessions, users, turns)
    known = np.flatnonzero(sessions >= 0)
    order = known[np.argsort(sessions[known], kind="stable")]
    same = sessions[order[1:]] == sessions[order[:-1]]
    turns[order[:-1][same]] = order[1:][same]
    return turns


def hint_etas(trace: Trace, sigma: float, seed: int = 0) -> NDArray[np.int64]:
    """What an application hints after each request: the true gap with a lognormal error.

    Args:
        trace: The trace.
        sigma: Standard deviation of the natural logarithm of the error; 0 is the truth.
        seed: Of the errors.

    Returns:
        i8 [R]: nanoseconds from the request to the one that continues its chain; `NEVER_NS` if none
        does, as where a session goes on with another prompt.

    Raises:
        ConfigError: If sigma is negative or not finite.
    """
    if not 0.0 <= sigma < float("inf"):
        raise ConfigError(f"hints with an error of {sigma}", "Use 0 (exact), or 0.5 for instance")
    turns = next_turns(trace, use_sessions=False)  # of the chain, which a session may abandon
    gaps = (trace.times_ns[turns] - trace.times_ns).astype(np.float64)
    errors = np.exp(sigma * np.random.default_rng(seed).standard_normal(len(trace)))
    etas = np.minimum(gaps * errors, 2.0**62).astype(np.int64)
    return np.where(turns < 0, NEVER_NS, etas)
