"""Levels are what `stats` says, cost little, and keep no cache alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from flowkv import KV
from flowkv.testing import MemoryTier
from tests.cache.fakes import lasting
from tests.cache.toy import make_kv, published, simple
from tests.inside import NAMES, HostTier, Level, breaker, discard, levels, source

TEXT = list(range(50))


def filled(**options: Any) -> Any:
    kv = make_kv(simple(), pages=5, tiers=[HostTier(1 << 20), lasting()], **options)
    published(kv, TEXT[:24], tenant="alice")
    published(kv, [9] * 16)
    published(kv, TEXT[:24], tenant="alice")
    assert kv.flush(60)
    return kv


def value(found: list[Level], name: str, **labels: str) -> float:
    (level,) = [one for one in found if one.name == name and dict(one.labels) == labels]
    return level.value


def test_levels_are_what_stats_say() -> None:
    kv = filled()
    found, stats = list(levels(kv)), kv.stats()
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
    assert stats["tenants"]["alice"]["miss_tokens"] > 0
    assert sum(stats["hits"].values()) == pytest.approx(
        sum(sum(t["hit_tokens"].values()) for t in stats["tenants"].values())
        / sum(t["miss_tokens"] + sum(t["hit_tokens"].values()) for t in stats["tenants"].values())
    )
    kv.close()
    assert list(levels(kv)) == []


def test_every_level_is_documented() -> None:
    kv = filled()
    for name, _, labels in levels(kv):
        assert set(labels) == set(NAMES[name].labels), name
    told = {level.name for level in levels(kv)}
    silent = {name for name in NAMES if name.startswith(("tier_", "device_"))} - told
    assert not silent


def test_what_was_opened_in_vain_does_not_count_and_counters_do_not_fall() -> None:
    """Prometheus takes a counter that falls for a restart, and counts all of it again."""
    kv = filled()
    told, names = list[tuple[float, float]](), ("tokens_seen_total", "tokens_reused_total")

    def read() -> None:
        found = list(levels(kv))
        told.append((value(found, names[0]), value(found, names[1])))

    read()
    before = kv.stats()
    for _ in range(2):
        seqs = [kv.open(TEXT[:24], tenant="alice")]
        assert seqs[0].reused > 0
        read()
        discard(kv, seqs)
        read()
    after = kv.stats()
    assert [after[name] for name in ("tokens_seen", "tokens_reused")] == [
        before[name] for name in ("tokens_seen", "tokens_reused")
    ]
    for _ in range(2):
        kv.open(TEXT[:24], tenant="alice").close()
        read()
    assert told == sorted(told) and [one[1] for one in told] == sorted(one[1] for one in told)
    assert told[-1] == (kv.tokens_seen, kv.tokens_reused), "they catch up"


def test_tenants_are_not_told() -> None:
    kv = filled()
    assert "alice" in kv.stats()["tenants"] and "alice" not in kv.metrics.prometheus()


def test_they_are_read_when_metrics_are() -> None:
    kv = filled()
    text = kv.metrics.prometheus()
    used = kv.stats()["devices"]["cpu"]["used_bytes"]
    assert f'flowkv_device_used_bytes{{device="cpu"}} {used}\n' in text
    assert 'flowkv_tier_breaker{state="closed",tier="host"} 1\n' in text


def test_a_cache_that_knows_no_model_has_few() -> None:
    with KV(gpu="1MiB") as kv:
        assert {level.name for level in levels(kv)} == {
            "tokens_seen_total", "tokens_reused_total", "open_sequences",
        }  # fmt: skip


def test_who_reads_levels_keeps_no_cache_alive(ended: list[KV]) -> None:
    kv = make_kv(simple())
    read, ref = source(kv), weakref.ref(kv)
    assert read()
    kv.close()
    ended.clear()
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
    assert breaker(kv.planner.store.stack, 0) == state
    assert kv.stats()["tiers"]["far"]["breaker"] == state
    assert value(list(levels(kv)), "tier_breaker_trips_total", tier="far") == 3


def test_a_tier_that_rests_counts_as_open() -> None:
    kv = make_kv(simple(), tiers=[MemoryTier(name="far")])
    store = kv.planner.store
    assert breaker(store.stack, 0) == "closed"
    store.stack.mover.lanes[0].rest(5.0)
    assert breaker(store.stack, 0) == "open" and kv.stats()["tiers"]["far"]["breaker"] == "open"
