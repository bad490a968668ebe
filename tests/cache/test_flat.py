"""Memory stays flat over many tiny requests: what is remembered of them has a bound."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from itertools import count

import pytest

from flowkv import KV
from flowkv.policy import CATALOGUE
from tests.cache.toy import advance, make_kv, simple
from tests.inside import most_ghosts
from tests.interrupts import PACKAGE

_FRESH = count()


def serve(kv: KV, requests: int) -> None:
    """Prompts that were never seen, each of a page and a tail, of a conversation and a tenant."""
    for n in (next(_FRESH) for _ in range(requests)):
        ids = [n, n % 997, *range(7)]
        with kv.open(ids, session=n, tenant=str(n)) as seq:
            advance(kv, [seq], [ids])


def objects() -> Counter[type]:
    """FlowKV's objects by type."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return Counter(kind for kind in kinds if str(kind.__module__).startswith("flowkv"))


def allocated() -> int:
    """Bytes that FlowKV's own lines have allocated, arrays among them."""
    gc.collect()
    ours = tracemalloc.Filter(True, f"{PACKAGE}/*")
    found = tracemalloc.take_snapshot().filter_traces([ours]).statistics("filename")
    return sum(line.size for line in found)


def check(kv: KV, requests: int, *, spare: int, spare_bytes: int) -> None:
    """Nothing grows once `requests` came, but for what is given up in batches.

    What leaks grows in each round; a table that doubles grows in one.
    """
    tracemalloc.start()
    try:
        serve(kv, requests)
        kinds, n_bytes = objects(), allocated()
        serve(kv, requests)
        more, later = objects() - kinds, allocated()
        serve(kv, requests)
        last = allocated()
    finally:
        tracemalloc.stop()
    grown = {kind.__name__: n for kind, n in more.items() if n > spare}
    assert not grown, grown
    assert min(later - n_bytes, last - later) <= spare_bytes, (n_bytes, later, last)
    assert last - n_bytes <= 3 * spare_bytes, (n_bytes, later, last)
    kv.close()


def test_ghosts_are_bounded_by_what_is_known() -> None:
    for blocks in range(0, 50_000, 7):
        assert most_ghosts(blocks) <= max(1024, 16 * blocks)
        assert most_ghosts(blocks) >= max(1024, 2 * blocks)
        assert most_ghosts(blocks) <= most_ghosts(blocks + 7)
    assert most_ghosts(512) == 8192 and most_ghosts(20_000) == 40_000


SLOW = [pytest.param(name, marks=pytest.mark.thorough) for name in CATALOGUE if name != "opt"]


@pytest.mark.at_once
@pytest.mark.parametrize("policy", ["lru", "auto", *SLOW])
def test_what_is_remembered_of_requests_has_a_bound(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowkv.cache.requests.FEW_SESSIONS", 32)
    monkeypatch.setattr("flowkv.cache.index.MOST_TENANTS", 32)
    monkeypatch.setattr("flowkv.cache.index._BATCH", 8)
    monkeypatch.setattr("flowkv.cache.index.LEAST_GHOSTS", 32)
    for name in ("FIRST_TIPS", "GHOSTS"):
        monkeypatch.setattr(f"flowkv.policy.hedge.{name}", 32)
    kv = make_kv(simple(), pages=3, policy=policy)
    serve(kv, 50)  # what is compiled is loaded
    check(kv, 150, spare=12, spare_bytes=16 << 10)


def test_conversations_whose_pages_are_known_are_remembered() -> None:
    kv = make_kv(simple(), pages=400)
    kept = {n: [n, 1, *range(7)] for n in range(1 << 30, (1 << 30) + 40)}
    for session, ids in kept.items():
        with kv.open(ids, session=session) as seq:
            advance(kv, [seq], [ids])
    serve(kv, 340)
    assert len(kv.visits._sessions) > 256
    assert [kv.hint(session, 5.0) for session in kept] == [8] * 40


@pytest.mark.slow
def test_a_hundred_thousand_requests() -> None:
    kv = make_kv(simple(), pages=64, policy="auto")
    check(kv, 50_000, spare=80, spare_bytes=64 << 10)
