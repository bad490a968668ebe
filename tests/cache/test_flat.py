"""Memory stays flat over many tiny requests: what is remembered of them has a bound."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from itertools import count

import pytest

from flowkv import KV
from tests.cache.toy import advance, make_kv, simple
from tests.interrupts import PACKAGE

_FRESH = count()


def serve(kv: KV, requests: int) -> None:
    """Prompts that were never seen, each of a page and a tail, in a conversation of its own."""
    for n in (next(_FRESH) for _ in range(requests)):
        ids = [n % 50_021, n // 50_021, n % 997, *range(6)]
        with kv.open(ids, session=n) as seq:
            advance(kv, [seq], [ids])


def held(kv: KV) -> tuple[Counter[type], int]:
    """FlowKV's objects by type, and bytes that its own lines have allocated."""
    gc.collect()
    mine = (type(one) for one in gc.get_objects() if str(type(one).__module__).startswith("flowkv"))
    kinds = Counter(mine)
    ours = tracemalloc.Filter(True, f"{PACKAGE}/*")
    found = tracemalloc.take_snapshot().filter_traces([ours]).statistics("filename")
    return kinds, sum(line.size for line in found)


def check(kv: KV, requests: int, most_bytes: int) -> None:
    serve(kv, requests)
    tracemalloc.start()
    try:
        serve(kv, requests)  # what was there before is replaced by what is traced
        kinds, n_bytes = held(kv)
        serve(kv, requests)
        more, later = held(kv)
    finally:
        tracemalloc.stop()
    grown = {kind: n for kind, n in (more - kinds).items() if n > requests / 20}
    assert not grown, grown
    assert later - n_bytes < most_bytes
    kv.close()


def test_what_is_remembered_of_requests_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.cache.requests.MOST_SESSIONS", 32)
    monkeypatch.setattr("flowkv.cache.index._BATCH", 8)
    kv = make_kv(simple(), pages=16)
    kv.planner.store.index._least_ghosts = 32
    check(kv, 100, most_bytes=100 * 60)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_with_the_bounds_as_they_are(policy: str) -> None:
    check(make_kv(simple(), pages=64, policy=policy), 20_000, most_bytes=1 << 20)
