"""`Ledger`: the same hits as the bare loop of a replay, and what goes where."""

from __future__ import annotations

import numpy as np
import pytest

from flowkv.policy import LRU, make_policy
from flowkv.residency import Ledger, Meta, Place
from flowkv.sim import Trace
from tests.inside import StateError
from tests.sim.stories import run_through


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


# --- what a policy of one's own answers ----------------------------------------------------------


class Answers(LRU):
    """LRU, until it is told to answer something else."""

    def __init__(self):
        super().__init__()
        self.wrong = {}

    def evict(self, now_ns, n, protected=()):
        got = super().evict(now_ns, n, protected)
        return self.wrong["evict"](got) if "evict" in self.wrong and got is not None else got

    def expired(self, now_ns):
        return self.wrong.get("expired", super().expired(now_ns))

    def admit(self, now_ns, slots):
        return self.wrong.get("admit", super().admit(now_ns, slots))


def filled(*capacities):
    policies = [Answers() for _ in capacities]
    ledger = Ledger([Place(p, c) for p, c in zip(policies, capacities, strict=True)], block_bytes=1)
    ns, ids = ledger.namespace(b""), np.arange(40, dtype=np.uint64).reshape(-1, 2)
    ledger.serve(0, ns, ids[:8])
    return ledger, ns, ids, policies


BEYOND = (-1, -(2**40), 20, 2000, 2**28, 2**40, 2**62)


@pytest.mark.parametrize("slot", BEYOND)
@pytest.mark.parametrize("places", [(8,), (8, 8)])
def test_victims_that_are_none_are_refused(slot, places):
    ledger, ns, ids, policies = filled(*places)
    policies[0].wrong["evict"] = lambda got: np.full_like(got, slot)
    before = ledger._blocks.copy()
    with pytest.raises(StateError, match=r"gave up blocks that do not lie in place 0"):
        ledger.serve(1, ns, ids[8:9])
    touched = np.flatnonzero(ledger._blocks != before)
    assert set(touched.tolist()) <= {8}  # the block that came; no other
    policies[0].wrong.clear()
    ledger.serve(2, ns, ids[9:10])
    assert ledger.used_bytes(0) <= 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda got: np.repeat(got[:1], len(got)),
        lambda got: np.array([[7], [6]]),  # two vectors of one
        lambda got: np.array([3.0, 3.5]),  # the same one, as whole numbers
    ],
)
def test_victims_that_are_named_twice_or_are_no_vector(wrong):
    ledger, ns, ids, policies = filled(8)
    policies[0].wrong["evict"] = wrong
    if np.asarray(wrong(np.array([7, 6]))).ndim == 2:
        ledger.serve(1, ns, ids[8:10])  # read as the slots that it holds
        assert ledger.used_bytes(0) == 8
        return
    with pytest.raises(StateError, match="or one of them twice"):
        ledger.serve(1, ns, ids[8:10])


def test_other_answers_beyond_the_blocks():
    ledger, _, _, policies = filled(4, 8)
    before = ledger._blocks.copy()
    for place in policies:
        place.wrong["expired"] = np.array(BEYOND)
    assert ledger.tick(1) == []  # they lie nowhere, so they cannot leave
    for place in policies:
        place.wrong["expired"] = list(BEYOND)
    assert ledger.tick(1) == []
    assert (ledger._blocks == before).all()


@pytest.mark.parametrize("admitted", [np.ones(1, np.int64), [1], np.ones(99, bool), True, None])
def test_what_admit_answers_is_one_bool_for_each_block(admitted):
    ledger, ns, ids, policies = filled(4, 8)
    policies[1].wrong["admit"] = admitted
    with pytest.raises(StateError, match=r"Answer admit\(\) with one bool for each block"):
        ledger.serve(4, ns, ids[10:15])


@pytest.mark.parametrize("slots", [[slot] for slot in BEYOND] + [[0]])
def test_only_what_is_pinned_is_unpinned(slots):
    ledger, ns, ids, _ = filled(8)
    with pytest.raises(StateError, match="not all pinned"):
        ledger.unpin(1, np.array(slots))
    pinned = ledger.pin(ns, ids[:2])
    ledger.unpin(1, pinned)
    with pytest.raises(StateError, match="not all pinned"):
        ledger.unpin(1, pinned)
