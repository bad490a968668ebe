"""Gain and cost of automatic defragmentation: a pool of three sizes under churn.

    python -m bench.bench_defragmentation [--steps 20000] [--json FILE]

Sequences of raw pages come, are encoded page by page into two smaller sizes, and go; how long they
stay and which codec is in fashion drifts. The pool is filled up to a share of its bytes, so that a
refused page is refused for the way the free bytes lie. The same churn runs with and without moves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from flowkv.cache.pool import PagePool
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.policy.pages import Defragmentation

SIZES = {0: 32, 1: 9, 3: 5}  # granules by codec: raw, kv8 and kv4c of the fixture's shape
SLABS, FILL = 96, 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [churn(options.steps, most_bytes) for most_bytes in (0, 1 << 20, 16 << 20)]
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" for k, v in row.items()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows[-1]["refused"] < rows[0]["refused"] else 1


def churn(steps: int, most_bytes: int) -> dict[str, float]:
    """One run; equal seeds, so that all runs are asked for the same pages as long as they can."""
    dice, pool = np.random.default_rng(0), PagePool("cpu", SLABS * 16 * 32 * 4096, [32, 9, 5])
    policy = Defragmentation(most_bytes=most_bytes)
    live: list[int] = []
    total, spent, fragmentation = Counter[str](), [0.0], list[float]()
    for step in range(steps):
        fashion = 1 if np.sin(step / 700) > 0 else 3
        for _ in range(4):
            codec = int(dice.choice([0, fashion, fashion, fashion]))
            chosen, n_bytes = dice.random(), SIZES[codec] * GRANULE_BYTES
            total["asked"] += 1
            while live and pool.used_bytes() + n_bytes > FILL * pool.capacity_bytes():
                at = int((chosen if dice.random() < 0.9 else chosen**8) * len(live))
                pool.release(live.pop(at))
            pages = pool.allocate(SIZES[codec], 1, codec)
            if pages is None:
                total["refused"] += 1
                continue
            live += pages
            total["bytes"] += n_bytes
        started = time.perf_counter()
        if budget := policy.budget(pool.occupancy(), len(live)):
            moves = pool.plan_defragmentation(
                most_granules=budget // GRANULE_BYTES, least_gain=policy.config.least_gain
            )
            copied = sum(pool.size_bytes(page) for page in moves)
            pool.relocate(moves)
            live = [moves.get(page, page) for page in live]
            policy.record(len(moves), pool.occupancy())
            total["copied"] += copied
            total["most_copied"] = max(total["most_copied"], copied)
            total["moves"] += len(moves)
        spent.append(time.perf_counter() - started)
        fragmentation.append(pool.fragmentation())
    return {
        "budget_mib": most_bytes / (1 << 20),
        "refused": total["refused"] / total["asked"],
        "fragmentation": float(np.mean(fragmentation)),
        "copied_per_byte_written": total["copied"] / total["bytes"],
        "most_copied_mib": total["most_copied"] / (1 << 20),
        "pages_moved": total["moves"],
        "us_per_step_mean": 1e6 * float(np.mean(spent)),
        "us_per_step_p99": 1e6 * float(np.quantile(spent, 0.99)),
    }


if __name__ == "__main__":
    sys.exit(main())
