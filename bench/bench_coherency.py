"""What an `open` pays for caches that agree, where nothing was erased.

    python -m pytest bench/bench_coherency.py -s

Times are those of the thread's CPU: what `open` does for it, and an `open` of a short prompt with
and without, in turn. The median over rounds, with the 10th and the 90th percentile; a difference
is taken between fastest rounds, as noise only adds.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.figures import repeated, show, turns
from flowkv.tiers.shared import SharedTier
from tests.cache.toy import make_kv, published, simple
from tests.inside import ErasureLogs

ROUNDS, CALLS = 31, 2000


def test_an_open_with_and_without_it(tmp_path: Path) -> None:
    kv = make_kv(simple(), tiers=[SharedTier("bench", 4 << 20, directory=tmp_path)])
    prompt = [1] * 24
    published(kv, prompt)
    store = kv.planner.store
    logs = store.stack.erasure_logs

    def ask(some: ErasureLogs) -> None:
        store.stack.erasure_logs = some
        kv.open(prompt).close()

    looks = {"look": logs.outdated, "call": lambda: None}
    opens = {"open": lambda: ask(logs), "open without": lambda: ask(ErasureLogs())}
    least = {}
    for ways, calls in ((looks, 20 * CALLS), (opens, CALLS // 20)):
        many = {name: repeated(way, calls) for name, way in ways.items()}
        for name, seconds in turns(many, ROUNDS, time.thread_time).items():
            each = [1e6 * s / calls for s in seconds]
            show(f"{name}, us", each)
            least[name] = min(each)
    print(f"look: {least['look'] - least['call']:.3f} us, one shared tier")
    print(f"open: {least['open'] - least['open without']:.3f} us more")
    assert least["look"] - least["call"] < 1.5  # a system call, which some machines are slow at
    kv.close()
