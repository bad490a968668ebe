"""Words and numbers about what is known."""

from __future__ import annotations

import json

import pytest

from flowkv import KV, Namespace, Salt
from flowkv.testing import MemoryTier
from tests.cache.fakes import lasting
from tests.cache.toy import geometry, make_kv, opened, published, simple
from tests.inside import HostTier, bind

TEXT = list(range(50))


def reason(kv: KV, tokens: list[int], **options: object) -> str:
    return kv.explain(tokens, **options).reason


def test_the_reason_names_the_first_token_that_differs() -> None:
    kv = make_kv()
    published(kv, TEXT)
    explained = kv.explain([*TEXT[:21], 999, *TEXT[22:]])
    assert (explained.known, explained.tokens, explained.differs_at) == (21, 50, 21)
    assert str(explained) == (
        "21 of 50 tokens are known (21 on device): token 21 differs from the nearest known prompt"
    )
    published(kv, [*TEXT[:20], 7, 7, 7, 7, 7])
    assert kv.explain([*TEXT[:21], 999, *TEXT[22:]]).differs_at == 21, "the nearest counts"
    assert "token 0 differs" in reason(kv, [9] * 30)


def test_other_reasons() -> None:
    kv = make_kv(simple())
    assert reason(kv, TEXT) == "nothing is known behind token 0"
    published(kv, TEXT[:24])
    assert reason(kv, TEXT) == "nothing is known behind token 24"
    assert "must run" in reason(kv, TEXT[:24]) and "fill no page" in reason(kv, [])
    assert reason(kv, TEXT, tenant="bob") == "nothing is known behind token 0"
    image = Salt(10, b"i" * 32)
    explained = kv.explain(TEXT, salts=[image])
    assert explained.known == 8 and explained.differs_at == 8
    assert "beside another image" in explained.reason
    bind(kv, simple(), Namespace(model="toy", adapter="lora"))
    assert "3 blocks belong to other models, weights, adapters" in reason(kv, TEXT)


@pytest.mark.parametrize(("group", "page"), [(0, 3), (1, 2), (1, 3)])
def test_groups_that_disagree_are_named(group: int, page: int) -> None:
    kv = make_kv(geometry(window=20))
    published(kv, TEXT[:32])
    with kv._probe(TEXT, None, ()) as seq:
        kv.planner.store.forget(kv.restorer.find(seq, group, page))
    explained = kv.explain([*TEXT[:32], 1])
    assert f"page {page} in layer group {group}" in explained.reason
    assert explained.known < 32


def test_residency_is_by_place() -> None:
    kv = make_kv(simple(), pages=4, tiers=[HostTier(1 << 20), lasting()])
    published(kv, TEXT[:24])
    published(kv, [9] * 16)
    residency = kv.explain(TEXT).residency
    assert residency["device"] + residency["host"] == 24
    seq = opened(kv, [8] * 16)
    assert kv.explain(TEXT).residency["host"] > residency["host"]
    seq.close()


def test_explaining_and_probing_change_no_figure() -> None:
    kv = make_kv()
    published(kv, TEXT)
    before = kv.stats()
    kv.explain(TEXT), kv.warm(TEXT), kv.pin(TEXT), kv.pin(TEXT, pinned=False)
    after = kv.stats()
    told = ("events", "hits", "tenants")  # these count events, and to warm is to look up
    assert {k: v for k, v in before.items() if k not in told} == {
        k: v for k, v in after.items() if k not in told
    }


def test_statistics_are_plain_and_add_up() -> None:
    kv = make_kv(tiers=[MemoryTier()])
    published(kv, TEXT)
    seq = kv.open(TEXT)
    stats = json.loads(json.dumps(kv.stats()))
    assert (stats["tokens_seen"], stats["tokens_reused"], stats["hit_rate"]) == (100, 49, 0.49)
    assert (stats["sequences"], stats["blocks"]) == (1, 12)
    device = stats["devices"]["cpu"]
    # What fills no page was left by the first, and copied by the second.
    assert device["used_bytes"] == (12 + 2 + 2) * 4096 <= device["capacity_bytes"]
    assert 0 <= device["fragmentation"] < 1
    assert stats["tiers"]["memory"]["kind"] == "host"
    events = stats["events"]
    assert events['published_tokens_total{group="0"}'] == 48
    assert events['hit_tokens_total{tier="device"}'] == 49
    seq.close()
