"""Gain of schedulers on a mixed load (simulated), and cost of deciding a turn (measured).

    python -m bench.bench_schedulers              # tables
    python -m bench.bench_schedulers --json       # one JSON object

The load is that of docs/guides/schedulers.md: short questions among long tasks, more than is served
while they come. Ratios are to `fcfs` on the same requests, one a seed. A turn is decided for 64
rows that decode with 300 requests behind them: with nothing new, and with somebody who just came.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from flowkv.policy.scheduling import (
    COMING,
    RUNNING,
    SCHEDULERS,
    Job,
    Limits,
    Room,
    Turns,
    make_scheduler,
)
from flowkv.sim.serving import mixed, serve

SEEDS = 5
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("shortest", {"aging_s": 20.0}),
    ("shortest", {"aging_s": 5.0}),
    ("shortest", {"aging_s": 20.0, "times": 4.0}),
)
ROWS, WAITING, ROUNDS = 64, 300, 2000


def gains() -> list[dict[str, Any]]:
    """Mean completion and total time over those of `fcfs`, and the longest wait."""
    loads = [mixed(400, rate=12.0, seed=seed) for seed in range(SEEDS)]
    base = [serve(load) for load in loads]
    found = []
    for name, options in CASES:
        own = [serve(load, name, **options) for load in loads]
        pairs = list(zip(own, base, strict=True))
        found.append(
            {
                "scheduler": name,
                "options": options,
                "completion": [one.mean() / other.mean() for one, other in pairs],
                "whole": [one.seconds / other.seconds for one, other in pairs],
                "waited_most_s": max(one.percentile(100, "queued_s") for one in own),
                "label": "simulated",
            }
        )
    return found


def turn_us(name: str, *, newcomer: bool) -> float:
    """Median microseconds of deciding who enters and what each row computes."""
    turns = Turns(make_scheduler(name), Limits(ROWS, 2 * ROWS, 16))
    jobs = [Job(n, 0.001 * n, 100, 400) for n in range(ROWS + WAITING)]
    for job in jobs[:ROWS]:
        job.move(COMING, 1.0)
        job.move(RUNNING, 1.0)
        job.ready, job.made, job.pages = 100 + job.number % 16, 1 + job.number % 16, 8
    active, waiting, room = jobs[:ROWS], jobs[ROWS:], Room(50, 4000)
    numbers, taken = itertools.count(len(jobs)), []
    for turn in range(ROUNDS):
        now_s = 2.0 + 0.01 * turn
        if newcomer:
            waiting = [*waiting[1:], Job(next(numbers), now_s, 100, 400)]
        began_s = time.perf_counter()
        turns.admit(waiting, active, room, now_s)
        turns.share(active, now_s)
        taken.append(time.perf_counter() - began_s)
    return 1e6 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    found = {
        "gains": gains(),
        "turn_us": {
            name: {"calm": turn_us(name, newcomer=False), "newcomer": turn_us(name, newcomer=True)}
            for name in sorted(SCHEDULERS)
        },
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for one in found["gains"]:
        low, high = min(one["completion"]), max(one["completion"])
        whole = f"{min(one['whole']):.2f} to {max(one['whole']):.2f}"
        print(
            f"{one['scheduler']} {one['options']}: mean completion {low:.2f} to {high:.2f} of fcfs,"
            f" all together {whole}, waits at most {one['waited_most_s']:.1f} s (simulated)"
        )
    for name, us in found["turn_us"].items():
        print(
            f"{name}: a turn is decided in {us['calm']:.0f} us, with a newcomer"
            f" {us['newcomer']:.0f} (measured)"
        )


if __name__ == "__main__":
    main()
