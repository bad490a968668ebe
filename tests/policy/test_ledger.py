"""`Ledger`: the same hits as the bare loop of a replay, and what goes where."""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.policy import make_policy
from flowkv.policy.ledger import Ledger, Meta, Place
from flowkv.sim.loop import run_through
from flowkv.sim.trace import Trace


def random_trace(seed, requests=400, roots=3, step_ns=10**8):
    """Chains that grow, branch and come back; blocks are numbered by first use."""
    rng = np.random.default_rng(seed)
    chains = [[] for _ in range(roots)]
    parents, rows, times, now = [], [], [], 0
    for _ in range(requests):
        now += int(rng.integers(0, 20)) * step_ns
        chain = list(chains[rng.integers(len(chains))])
        if rng.random() < 0.3:
            chain = chain[: rng.integers(len(chain) + 1)]
        for _ in range(int(rng.integers(1, 5))):
            parents.append(chain[-1] if chain else -1)
            chain.append(len(parents) - 1)
        chains.append(chain)
        chains = chains[-60:]
        rows.append(chain)
        times.append(now)
    n = len(rows)
    offsets = np.cumsum([0, *map(len, rows)])
    depths = np.zeros(len(parents), np.int32)
    tokens = rng.integers(1, 9999, n).astype(np.int32)
    sessions = rng.integers(-1, 9, n)
    return Trace(
        "random", np.array(times), offsets, np.concatenate(rows), np.array(parents), depths,
        tokens, tokens, sessions, rng.integers(0, 4, n).astype(np.int8), np.zeros(n, np.int32), 512,
    )  # fmt: skip


def ids_for(trace, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 64, (trace.unique, 2), np.uint64)


def serve_all(trace, ledger, ids):
    ns = ledger.namespace(b"")
    hits = []
    for r, now in enumerate(trace.times_ns.tolist()):
        chain = trace.blocks[trace.offsets[r] : trace.offsets[r + 1]]
        meta = Meta(int(trace.sessions[r]), int(trace.input_tokens[r]))
        stop, output = int(trace.stops[r]), int(trace.output_tokens[r])
        plan = ledger.serve(now, ns, ids[chain], meta, stop=stop, output_tokens=output)
        hits.append(plan.hits)
    return hits


@pytest.mark.parametrize("capacity", [1, 7, 40, 10**6])
@pytest.mark.parametrize("name", ["lru", "lfu-ttl"])
def test_same_hits_as_the_bare_loop(name, capacity):
    trace = random_trace(capacity)
    want = run_through(trace, make_policy(name), capacity)
    for seed in (0, 1):
        ledger = Ledger([Place(make_policy(name), capacity)], seed=seed)
        assert serve_all(trace, ledger, ids_for(trace)) == want.tolist()
