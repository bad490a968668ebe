"""Hit rates inside vLLM's own manager of host memory, and of a directory: lines of JSON.

python -m bench.engines.hits managers|directory TRACES
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from flowkv.policy import make_policy
from flowkv.residency.places import KeyedPolicy
from flowkv.sim.trace import Trace, read_npz

POLICIES = ("lru", "arc", "flowkv_lfu_ttl", "flowkv_auto")
SHARES = (0.05, 0.3)
HEAD = 6000
"""Requests of kct_dev, whose prompts are long."""


def keys_of(trace: Trace, suffix: bytes = b"") -> list[bytes]:
    return [
        hashlib.sha256(f"{trace.name} {n}".encode()).digest() + suffix for n in range(trace.unique)
    ]


Asked = list[tuple[int, list[bytes]]]
"""When each prompt comes, in nanoseconds, and its chunks."""


def prompts(trace: Trace, keys: list[bytes]) -> Asked:
    spans = zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)
    chains = [[keys[block] for block in trace.blocks[first:end].tolist()] for first, end in spans]
    return list(zip(trace.times_ns.tolist(), chains, strict=True))


def mixed(*streams: Asked) -> Asked:
    """Requests by their times, over the span of the longest."""
    span_ns = max(asked[-1][0] for asked in streams)
    return sorted(
        (
            (int(now_ns * (span_ns / asked[-1][0])), keys)
            for asked in streams
            for now_ns, keys in asked
        ),
        key=lambda one: one[0],
    )


def managed(policy: str, asked: Asked, n_chunks: int) -> float:
    """Share of chunks that vLLM's manager has when a prompt comes, on the trace's clock."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    import flowkv.connect.vllm as door

    now_ns = 0
    door.FlowKVCachePolicy.clock_ns = staticmethod(lambda: now_ns)
    module = door.__name__ if policy.startswith("flowkv") else None
    manager, hits, total = CPUOffloadingManager(n_chunks, policy, module), 0, 0
    for number, (now_ns, keys) in enumerate(asked):  # noqa: B007 - the clock reads it
        context = ReqContext(req_id=str(number))
        manager.on_new_request(context)
        for spot, key in enumerate(keys):
            context.set_offload_key_position(key, (spot + 1) * 16)
        n = 0
        while n < len(keys) and manager.lookup(keys[n], context) is LookupResult.HIT:
            n += 1
        if n:
            manager.prepare_load(keys[:n], context)
            manager.complete_load(keys[:n], context)
        made = manager.prepare_store(keys, context)
        if made is not None and made.keys_to_store:
            manager.complete_store(made.keys_to_store, context)
        manager.on_request_finished(context)
        hits, total = hits + n, total + len(keys)
    return hits / max(1, total)


def kept(policy: str, asked: Asked, n_blocks: int) -> float:
    """Share of blocks that a place has when a prompt comes, by the book that a keeper has of it."""
    book, there = KeyedPolicy(make_policy(policy)), set[bytes]()
    hits, total = 0, 0
    for now_ns, keys in asked:
        n = 0
        while n < len(keys) and keys[n] in there:
            n += 1
        book.access(now_ns, keys)
        new = [key for key in dict.fromkeys(keys) if key not in there][:n_blocks]
        excess = len(there) + len(new) - n_blocks
        if excess > 0:
            gone = book.evict(now_ns, excess, keys)
            if gone is None:
                new = new[: n_blocks - len(there)]
            else:
                there.difference_update(gone)
        above = {key: parent for parent, key in zip([b"", *keys], keys, strict=False)}
        book.insert(now_ns, new, [above[key] for key in new])
        there.update(new)
        hits, total = hits + n, total + len(keys)
    return hits / max(1, total)


def main() -> None:
    part, folder = sys.argv[1], Path(sys.argv[2])
    suffix = bytes(4 * (part == "managers"))  # the group, which ends vLLM's keys
    streams = {}
    for name in ("kct_dev", "moon_conv"):
        trace = read_npz(folder / f"{name}.npz")
        streams[name] = prompts(trace, keys_of(trace, suffix))
    streams["kct_dev"] = streams["kct_dev"][:HEAD]
    if part == "directory":
        asked = streams["kct_dev"]
        different = len({key for _, keys in asked for key in keys})
        for share, policies in ((0.5, ("lru", "auto")), (0.05, ("lru", "auto")), (1.0, ("lru",))):
            for policy in policies:
                hits = kept(policy, asked, int(share * different))
                tell({"share": share, "policy": policy, "hits": hits})
        return
    streams["both, mixed"] = mixed(*streams.values())
    for name, asked in streams.items():
        different = len({key for _, keys in asked for key in keys})
        for share in SHARES:
            for policy in POLICIES:
                begun_s = time.perf_counter()
                hits = managed(policy, asked, max(1, int(share * different)))
                seconds = time.perf_counter() - begun_s
                tell({"trace": name, "share": share, "policy": policy, "hits": hits, "s": seconds})


def tell(what: Any) -> None:
    print("SAYS " + json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
