"""The innermost loop of a replay: one place, equal blocks, requests that take no time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowkv.policy.base import Policy, Visit
from flowkv.sim.trace import Trace


def run_through(trace: Trace, policy: Policy, capacity: int) -> NDArray[np.int64]:
    """Leading resident blocks of each request, from cold, where `capacity` blocks fit.

    All blocks of a request become resident, and afterwards what is too much leaves; the request's
    own blocks may be among it, so that a policy can decline to keep them.
    """
    here = np.zeros(trace.unique, np.bool_)
    hits = np.zeros(len(trace), np.int64)
    used = 0
    times, offsets = trace.times_ns.tolist(), trace.offsets.tolist()
    for r, now in enumerate(times):
        chain = trace.blocks[offsets[r] : offsets[r + 1]]
        run_out = policy.expired(now)
        if len(run_out):
            policy.remove(run_out)
            here[run_out] = False
            used -= len(run_out)
        held = here[chain]
        run = len(chain) if held.all() else int(held.argmin())
        hits[r] = run
        n_tokens = int(trace.input_tokens[r])
        policy.access(now, chain, Visit(r, int(trace.sessions[r]), n_tokens, len(chain)))
        new = chain[~held]
        if len(new):
            policy.insert(now, new, trace.parents[new])
            here[new] = True
            used += len(new)
        stop, output = int(trace.stops[r]), int(trace.output_tokens[r])
        policy.complete(now, r, stop=stop, output_tokens=output)
        if used > capacity:
            victims = policy.evict(now, used - capacity)
            assert victims is not None
            here[victims] = False
            used = capacity
    return hits
