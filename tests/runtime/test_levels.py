"""Levels are what `stats` says, cost little, and keep no cache alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from flowkv import KV
from flowkv.observe.names import NAMES
from flowkv.observe.rules import Level
from flowkv.runtime.levels import breaker, levels, source
from flowkv.testing import MemoryTier
from flowkv.tiers.host import HostTier
from tests.runtime.fakes import lasting
from tests.runtime.toy import make_kv, published, simple

TEXT = list(range(50))


def filled(**options: Any) -> Any:
    kv = make_kv(simple(), pages=5, tiers=[HostTier(1 << 20), lasting()], **options)
    published(kv, TEXT[:24], tenant="alice")
    published(kv, [9] * 16)
    published(kv, TEXT[:24], tenant="alice")
    assert kv.flush(5.0)
    return kv


def value(found: list[Level], name: str, **labels: str) -> float:
    (level,) = [one for one in found if one.name == name and dict(one.labels) == labels]
    return level.value


def test_levels_are_what_stats_say() -> None:
    kv = filled()
    found, stats = list(levels(kv, tenants=True)), kv.stats()
    assert value(found, "tokens_seen_total") == stats["tokens_seen"] > 0
    assert value(found, "tokens_reused_total") == stats["tokens_reused"] > 0
    assert value(found, "known_pages") == stats["blocks"] > 0
    device = stats["devices"]["cpu"]
    for name in ("used_bytes", "capacity_bytes", "fragmentation"):
        assert value(found, f"device_{name}", device="cpu") == device[name]
    for tier, said in stats["tiers"].items():
        for name in ("used_bytes", "capacity_bytes", "answers"):
            assert value(found, f"tier_{name}", tier=tier) == said[name]
        for name in ("loaded_bytes", "refused", "dropped", "unpaid"):
            assert value(found, f"tier_{name}_total", tier=tier) == said[name]
        assert value(found, "tier_breaker", tier=tier, state=said["breaker"]) == 1.0
    alice = stats["tenants"]["alice"]
    for tier, tokens in alice["hit_tokens"].items():
        assert value(found, "tenant_hit_tokens_total", tenant="alice", tier=tier) == tokens
    assert value(found, "tenant_miss_tokens_total", tenant="alice") == alice["miss_tokens"] > 0
    assert sum(stats["hits"].values()) == pytest.approx(
        sum(sum(t["hit_tokens"].values()) for t in stats["tenants"].values())
        / sum(t["miss_tokens"] + sum(t["hit_tokens"].values()) for t in stats["tenants"].values())
    )
    kv.close()
    assert list(levels(kv)) == []


def test_every_level_is_documented() -> None:
    kv = filled()
    for name, _, labels, kind in levels(kv, tenants=True):
        assert NAMES[name][:2] == (kind, tuple(NAMES[name].labels)), name
        assert set(labels) == set(NAMES[name].labels), name
    told = {level.name for level in levels(kv, tenants=True)}
    silent = {name for name in NAMES if name.startswith(("tier_", "device_", "tenant_"))} - told
    assert not silent
    kv.close()


def test_tenants_are_told_only_if_asked_for() -> None:
    kv = filled()
    assert not any("tenant" in level.labels for level in levels(kv))
    assert "alice" not in kv.metrics.prometheus()
    kv.close()


def test_they_are_read_when_metrics_are() -> None:
    kv = filled()
    text = kv.metrics.prometheus()
    used = kv.stats()["devices"]["cpu"]["used_bytes"]
    assert f'flowkv_device_used_bytes{{device="cpu"}} {used}\n' in text
    assert 'flowkv_tier_breaker{state="closed",tier="host"} 1\n' in text
    kv.close()


def test_a_cache_that_knows_no_model_has_few() -> None:
    with KV(gpu="1MiB") as kv:
        assert {level.name for level in levels(kv)} == {
            "tokens_seen_total", "tokens_reused_total", "open_sequences",
        }  # fmt: skip


def test_who_reads_levels_keeps_no_cache_alive() -> None:
    kv = make_kv(simple())
    read, ref = source(kv), weakref.ref(kv)
    assert read()
    kv.close()
    del kv
    gc.collect()
    assert ref() is None and read() == []


@pytest.mark.parametrize("state", ["closed", "half-open", "open"])
def test_a_tier_may_have_a_breaker_of_its_own(state: str) -> None:
    class Guarded(MemoryTier):
        @property
        def state(self) -> Any:
            return type("State", (), {"value": state})

        trips = 3

    kv = make_kv(simple(), tiers=[Guarded(name="far")])
    assert breaker(kv.planner.store, 0) == state
    assert kv.stats()["tiers"]["far"]["breaker"] == state
    assert value(list(levels(kv)), "tier_breaker_trips_total", tier="far") == 3
    kv.close()


def test_a_tier_that_rests_counts_as_open() -> None:
    kv = make_kv(simple(), tiers=[MemoryTier(name="far")])
    store = kv.planner.store
    assert breaker(store, 0) == "closed"
    store.rest(0, 5.0)
    assert breaker(store, 0) == "open" and kv.stats()["tiers"]["far"]["breaker"] == "open"
    kv.close()
