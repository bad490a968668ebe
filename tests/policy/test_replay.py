"""Replay sanity: on a small generated trace no policy beats the optimum, nor an infinite cache."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flowkv.policy import LRU, LfuTtl

S = 10**9
Trace = list[tuple[int, list[int]]]


def sessions(seed: int, requests: int = 600) -> Trace:
    """(time, chain of blocks): conversations that grow by a few blocks a turn, over three prompts.

    A block has one number, which serves as its slot. One request in three is a chain that never
    comes back.
    """
    rng = random.Random(seed)
    chains = [list(range(3 * i, 3 * i + 3)) for i in range(3)]
    live: list[list[int]] = []
    fresh, now, trace = 9, 0, []
    for _ in range(requests):
        now += rng.randrange(1, 10 * S)
        if rng.random() < 0.33:
            chain = [*range(fresh, fresh + rng.randrange(4, 10))]
        elif live and rng.random() < 0.8:
            chain = live.pop(rng.randrange(len(live)))
        else:
            chain = list(rng.choice(chains[: 1 + (rng.random() < 0.4)]))
        fresh = max(fresh, *[b + 1 for b in chain])
        if chain[0] < 9:
            new = rng.randrange(1, 4)
            chain = chain + list(range(fresh, fresh + new))
            fresh += new
            if rng.random() < 0.85:
                live.append(chain)
        trace.append((now, chain))
    return trace


def replay(policy, trace: Trace, capacity: int) -> list[int]:
    """Leading resident blocks of each request."""
    here: set[int] = set()
    hits = []
    for now, chain in trace:
        here -= set(policy.expired(now).tolist())
        policy.remove(policy.expired(now))
        held = [b in here for b in chain]
        run = held.index(False) if False in held else len(chain)
        assert sum(held) == run  # leaves go first, so that what is left is a prefix
        hits.append(run)
        kept = chain[:capacity]
        new = kept[run:]
        policy.access(now, np.array(kept[:run], np.int64))
        victims = policy.evict(now, max(0, len(here) + len(new) - capacity), kept)
        here -= set(victims.tolist())
        policy.insert(now, np.array(new, np.int64), np.array([-1, *kept][run:-1], np.int64))
        here |= set(new)
        assert len(here) <= capacity
    return hits


def belady(trace: Trace, capacity: int) -> list[int]:
    """Keeps, after each request, what is needed soonest; of equals the nearest to the root."""
    uses: dict[int, list[int]] = {}
    depth: dict[int, int] = {}
    for r, (_, chain) in enumerate(trace):
        for i, b in enumerate(chain):
            uses.setdefault(b, []).append(r)
            depth[b] = i
    here: set[int] = set()
    hits = []
    for _, chain in trace:
        held = [b in here for b in chain]
        assert held == sorted(held, reverse=True)  # ancestor-closed without being told to
        hits.append(sum(held))
        for b in chain:
            uses[b].pop(0)
        wanted = [b for b in here | set(chain) if uses[b]]
        here = set(sorted(wanted, key=lambda b: (uses[b][0], depth[b], b))[:capacity])
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_optimum(seed):
    trace = sessions(seed)
    total = sum(len(chain) for _, chain in trace)
    unique = len({b for _, chain in trace for b in chain})
    best = total - unique
    last = {"opt": 0, "lru": 0}
    for capacity in (16, 32, 64, 128, 256):
        opt = sum(belady(trace, capacity))
        lru = sum(replay(LRU(), trace, capacity))
        assert last["lru"] <= lru <= opt <= best
        assert last["opt"] <= opt
        for tau_s in (30, 300):
            assert 0 < sum(replay(LfuTtl(tau_s=tau_s), trace, capacity)) <= opt
        last = {"opt": opt, "lru": lru}
    for policy in (LRU(), LfuTtl()):
        assert sum(replay(policy, trace, unique)) == best
    assert sum(belady(trace, unique)) == best


def test_frequency_helps_against_scans():
    """With one request in three a scan, counting beats recency at sizes that hold the prompts."""
    trace = sessions(7)
    gain = [
        sum(replay(LfuTtl(tau_s=300), trace, capacity)) - sum(replay(LRU(), trace, capacity))
        for capacity in (24, 32, 48, 64)
    ]
    assert min(gain) > 0


def test_a_lease_gives_memory_back_and_costs_hits():
    trace = sessions(8)
    hits = {lease: sum(replay(LfuTtl(lease_s=lease), trace, 10**4)) for lease in (20, 200, 2000)}
    best = sum(replay(LfuTtl(), trace, 10**4))
    assert 0 < hits[20] < hits[200] < hits[2000] <= best
