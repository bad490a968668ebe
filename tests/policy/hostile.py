"""Calls with numbers that are no slots, times or tenants: `python -m tests.policy.hostile SEED`.

Prints each policy's name once it has lived through all of them. Errors of Python are fine; a crash
of the process is not.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable

import numpy as np

from flowkv import Policy
from flowkv.policy import CATALOGUE, Visit, make_policy
from tests.inside import NEVER_NS, ByScore

FAR = [-(2**63), -(2**40), -(2**31), -5, -1, 3, 1023, 1024, 2048, 2**16, 2**28, 2**31, 2**62]
NUMBERS = [*FAR, 0, 1, 2, 5]
RATES = [0.0, 1.0, -1.0, float("inf"), float("nan")]


class Scored(ByScore):
    name = "by-score"

    def score(self, now_ns, use):
        return use.uses


def vector(rng: random.Random, size: int | None = None) -> object:
    n = rng.randrange(5) if size is None else size
    numbers = [rng.choice(FAR) if rng.random() < 0.4 else rng.randrange(12) for _ in range(n)]
    made = np.array(numbers, np.int64)
    odd = (made[::-1], made.astype(np.float64), made.view(np.uint64), numbers, np.array([made] * 2))
    return made if rng.random() < 0.7 else rng.choice(odd)


def calls(policy: Policy, rng: random.Random, step: int) -> list[Callable[[], object]]:
    now = step * 10**9 if rng.random() < 0.8 else rng.choice([-(2**63), -1, 0, 2**62])
    slots, other, number = vector(rng), vector(rng), rng.choice(NUMBERS)
    near = np.array([rng.randrange(12) for _ in range(rng.randrange(5))], np.int64)
    sizes = {"n_bytes": rng.choice([1, 0, -1, 2**62]), "cost_ns": rng.choice([0, -1, 2**62])}
    visit = Visit(rng.choice([-1, 0, 2**62]), number, rng.choice(NUMBERS), len(near))
    tenant = rng.choice([0, 0, 0, 1, -1, 500, 2**40])
    told: list[Callable[[], object]] = [
        lambda: policy.insert(now, slots, other),
        lambda: policy.insert(now, near, vector(rng, len(near)), tenant=tenant, **sizes),
        lambda: policy.insert(now, near, vector(rng, len(near)), **sizes),
        lambda: policy.access(now, slots, visit),
        lambda: policy.access(now, near, visit),
        lambda: policy.remove(slots),
        lambda: policy.forget(slots),
        lambda: policy.complete(now, visit.request, stop=number, output_tokens=number),
        lambda: policy.pin(slots),
        lambda: policy.unpin(slots),
        lambda: policy.hint(now, slots, rng.choice([NEVER_NS, number]), rng.choice(RATES)),
        lambda: policy.enqueue(now, rng.randrange(3), slots),
        lambda: policy.abort(now, rng.randrange(3)),
        lambda: policy.invalidate(now, number),
        lambda: policy.evict(now, rng.randrange(-1, 9), slots),
        lambda: policy.displace(now, rng.randrange(9), rng.choice(RATES), slots),
        lambda: policy.admit(now, slots),
        lambda: policy.expired(now),
        lambda: policy.wanted(now, rng.choice([-1, 0, 5, 1000])),
        lambda: policy.priority(number),
    ]
    if hasattr(policy, "foresee"):
        told.append(lambda: policy.foresee(slots, other))
    return told


def live(policy: Policy, rng: random.Random, steps: int) -> None:
    policy.insert(0, np.arange(6), np.arange(-1, 5))
    done = 0
    for step in range(steps):
        call = rng.choice(calls(policy, rng, step))
        try:
            call()
            done += 1
        except Exception:
            continue
    assert done > steps // 2
    policy.evict(2**62, 1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy's, of casts
    for name in sorted(CATALOGUE):
        live(make_policy(name), random.Random(f"{name} {sys.argv[1]}"), 600)
        print(name)
    live(Scored(), random.Random(sys.argv[1]), 600)
    print("by-score")
