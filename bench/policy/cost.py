"""Cost of decisions on this machine: through the ledger, look-ups of 128-bit ids included."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from bench.policy.finding import Finding
from bench.policy.ground import Ground
from flowkv.policy import make_policy
from flowkv.residency import Ledger, Meta, Place
from flowkv.sim.trace import Trace

SIZE = 0.01
_CALLS = 2000  # in a round of a fixed cost
_ROUNDS = 15
_PASSES = 3  # a request's fastest counts: the machine may be shared


def cost(grounds: list[Ground], quick: bool) -> list[Finding]:
    """Nanoseconds per block, microseconds per request and per call, of the shipped default."""
    findings = []
    for ground in grounds:
        if ground.kind == "other":
            continue
        passes = 1 if quick else _PASSES
        spent = np.min([per_request(ground.trace, "auto") for _ in range(passes)], axis=0)
        name, half = ground.trace.name, len(spent) // 2
        steady = spent[half:]  # tables have grown, compiled code is loaded
        width = np.diff(ground.trace.offsets)[half:]
        note = f"{width.mean():.0f} blocks each"
        if ground.kind == "agents":  # elsewhere chains are so short that calls decide
            value = float(steady.sum() / width.sum())
            findings.append(_measured("ns per block", name, 100.0, value, note))
        value = float(np.median(steady)) / 1e3
        findings.append(_measured("us per request, median", name, 10.0, value, note))
    rounds = 3 if quick else _ROUNDS
    return findings + [
        _measured(f"us per call, {what}", "", 1.5, fixed(call, rounds), "one block")
        for what, call in _calls().items()
    ]


def _measured(what: str, trace: str, target: float, value: float, note: str) -> Finding:
    return Finding("cost", what, trace, target, "at most", value, "measured", note)


def ids_of(trace: Trace, seed: int = 1) -> NDArray[np.uint64]:
    """Ids as long as those of the cache, for every use of a block: u64 [blocks, 2]."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, 2**63, (trace.unique, 2), np.uint64)[trace.blocks]


def per_request(trace: Trace, policy: str) -> NDArray[np.int64]:
    """Nanoseconds of each request's `serve`; decisions are the same in every pass."""
    capacity = max(1, int(SIZE * trace.unique))
    ledger = Ledger([Place(make_policy(policy), capacity)])
    space, ids = ledger.namespace(b"bench"), ids_of(trace)
    spent = np.zeros(len(trace), np.int64)
    offsets, times = trace.offsets.tolist(), trace.times_ns.tolist()
    sessions, tokens = trace.sessions.tolist(), trace.input_tokens.tolist()
    stops, outputs = trace.stops.tolist(), trace.output_tokens.tolist()
    gc.collect()
    for r, now in enumerate(times):
        mine = ids[offsets[r] : offsets[r + 1]]
        meta = Meta(sessions[r], tokens[r])
        start = perf_counter_ns()
        ledger.serve(now, space, mine, meta, stop=stops[r], output_tokens=outputs[r])
        spent[r] = perf_counter_ns() - start
    return spent


def _calls() -> dict[str, Callable[[int], object]]:
    """Calls that have next to nothing to do, each on a place with 4,096 blocks."""
    policy = make_policy("auto")
    ledger = Ledger([Place(policy, 4096)])
    space = ledger.namespace(b"bench")
    ids = np.random.default_rng(2).integers(1, 2**63, (4096, 2), np.uint64)
    for i in range(0, 4096, 64):
        ledger.serve(i, space, ids[i : i + 64])
    one, slot = ids[64:65], np.array([64])
    return {
        "Ledger.lookup": lambda now: ledger.lookup(space, one),
        "Policy.access": lambda now: policy.access(now, slot),
        "Policy.evict of none": lambda now: policy.evict(now, 0),
    }


def fixed(call: Callable[[int], object], rounds: int) -> float:
    """Microseconds of a call: the median round's mean."""
    means = []
    for number in range(1, rounds + 1):
        start = perf_counter_ns()
        for now in range(10_000 * number, 10_000 * number + _CALLS):
            call(now)
        means.append((perf_counter_ns() - start) / _CALLS / 1e3)
    return float(np.median(means))
