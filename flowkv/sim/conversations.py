"""Which request continues which: what a hint of the application would say in a replay."""

from __future__ import annotations

from typing import NamedTuple

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


@kernel
def repeat(
    offsets: Array, blocks: Array, sessions: Array, order: Array, users: Array, again: Array
) -> None:
    """Fills `again`: how many leading blocks of each request are sent again, and by which one.

    `order` has the requests session by session; `users` is scratch, -1 for each block.
    """
    for i in range(len(order) - 1, -1, -1):
        r = order[i]
        for j in range(offsets[r], offsets[r + 1]):
            later = users[blocks[j]]
            if later >= 0 and sessions[later] == sessions[r]:
                again[r, 0], again[r, 1] = j - offsets[r] + 1, later
            users[blocks[j]] = r


class Hints(NamedTuple):
    """What an application hints after each request.

    Attributes:
        etas_ns: i8 [R], nanoseconds until the next use of the part that is sent again; `NEVER_NS`
            if nothing is.
        counts: i8 [R], leading blocks of the request that are sent again: what the time is about.
            The others are never used again.
    """

    etas_ns: NDArray[np.int64]
    counts: NDArray[np.int64]


def hints_of(trace: Trace, sigma: float, seed: int = 0) -> Hints:
    """Hints of an application that knows which part of a prompt it sends again, and about when.

    That part ends at the deepest block that a later request of the same session has too; where
    sessions are not known, that any later request has. So what is sent again is the truth, and that
    nothing is; the time until the first such request is the true one with a lognormal error.

    Args:
        trace: The trace.
        sigma: Standard deviation of the natural logarithm of the error; 0 is the truth.
        seed: Of the errors.

    Raises:
        ConfigError: If sigma is negative or not finite.
    """
    if not 0.0 <= sigma < float("inf"):
        raise ConfigError(f"hints with an error of {sigma}", "Use 0 (exact), or 0.5 for instance")
    again = np.zeros((len(trace), 2), np.int64)
    order = np.argsort(trace.sessions, kind="stable")
    users = np.full(trace.unique, -1, np.int64)
    repeat(trace.offsets, trace.blocks, trace.sessions, order, users, again)
    counts, turns = again.T
    gaps = (trace.times_ns[turns] - trace.times_ns).astype(np.float64)
    errors = np.exp(sigma * np.random.default_rng(seed).standard_normal(len(trace)))
    etas = np.minimum(gaps * errors, 2.0**62).astype(np.int64)
    return Hints(np.where(counts == 0, NEVER_NS, etas), counts)
