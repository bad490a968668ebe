"""Quotas of tenants, options of policies, and what is said of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowkv import KV, Config
from flowkv.policy import LRU
from tests.cache.audit import audit
from tests.cache.toy import make_kv, opened, published, simple
from tests.inside import (
    ConfigError,
    HostTier,
    ManualClock,
    Tenants,
    load_config,
    parse_policy,
    parse_quota,
)

P, Q, R = [1] * 24, [2] * 24, [3] * 24
KIB = 1024


def known(kv: KV, tokens: list[int], tenant: str) -> int:
    return kv.explain([*tokens, 9], tenant=tenant).known


def quota_kv(*tiers: Any, pages: int = 12, **options: Any) -> KV:
    return make_kv(simple(), pages=pages, tiers=tiers, **{"clock": ManualClock()} | options)


# ---- quotas


def test_a_reserve_is_not_taken_by_others() -> None:
    kv = quota_kv(quotas={"alice": f"{12 * KIB}B:"})
    published(kv, [*P, 9], tenant="alice")
    for number in range(4, 12):
        published(kv, [*[number] * 24, 9], tenant="bob")
    assert known(kv, P, "alice") == 24
    assert kv.stats()["policies"]["cpu"]["quotas"] == {"alice": {"used_bytes": 12 * KIB}}
    audit(kv)
    kv.close()
    free = quota_kv()
    published(free, [*P, 9], tenant="alice")
    for number in range(4, 12):
        published(free, [*[number] * 24, 9], tenant="bob")
    assert known(free, P, "alice") < 24


def test_a_limit_holds_once_pages_are_free_to_go() -> None:
    kv = quota_kv(HostTier(1 << 20), quotas={"alice": {"gpu": "16KiB"}})
    with opened(kv, [*P, 9], tenant="alice"), opened(kv, [*Q, 9], tenant="alice"):
        assert kv.stats()["policies"]["cpu"]["quotas"]["alice"]["used_bytes"] == 24 * KIB
    assert kv.stats()["policies"]["cpu"]["quotas"]["alice"]["used_bytes"] == 16 * KIB
    assert known(kv, P, "alice") == 24 == known(kv, Q, "alice")  # what went, went to the host
    counts, of = kv.stats()["events"], '{reason="quota",tier="device"}'
    assert counts[f"evicted_pages_total{of}"] == 2 and counts[f"evictions_total{of}"] == 1


def test_a_limit_of_a_tier_holds_too() -> None:
    kv = quota_kv(HostTier(1 << 20), pages=5, quotas={"alice": {"host": "8KiB"}})
    for prompt in (P, Q, R):
        published(kv, [*prompt, 9], tenant="alice")
    with kv.open([5] * 3, tenant="bob"):
        pass
    assert kv.stats()["policies"]["host"]["quotas"]["alice"]["used_bytes"] <= 8 * KIB


def test_quotas_survive_a_restart_with_their_tenants(tmp_path: Path) -> None:
    options = {"quotas": {"alice": "10%:50%", "bob": ":20%"}, "disk": f"{tmp_path}:64MiB"}
    with make_kv(simple(), pages=8, **options) as kv:
        published(kv, [*P, 9], tenant="bob")
        assert kv.flush()
    with make_kv(simple(), pages=8, **options) as kv:
        (disk,) = kv.planner.store.stack.places
        assert isinstance(disk.policy, Tenants)
        assert (disk.policy.used_bytes(0), disk.policy.used_bytes(1)) == (0, 12 * KIB)
        audit(kv)


@pytest.mark.parametrize(
    ("text", "kind", "meant"),
    [
        *(("2KiB:8KiB", "gpu", (2048, 8192)), ("8KiB", "disk", (0, 8192))),
        *(("2KiB:", "host", (2048, None)), (":10%", "s3", (0, 100)), ("", "gpu", (0, None))),
        ({"gpu": "1KiB:", "remote": "25%"}, "redis", (0, 250)),
        ({"gpu": "1KiB:"}, "host", (0, None)),
    ],
)
def test_quotas_are_read(text: Any, kind: str, meant: tuple[int, int | None]) -> None:
    assert parse_quota(text, kind, 1000) == meant


def test_more_than_there_is_cannot_be_reserved() -> None:
    with pytest.raises(ConfigError, match=r"quotas reserve 72KiB of a gpu place of 48KiB"):
        quota_kv(quotas={"alice": "40KiB:", "bob": "32KiB:"})


# ---- options


def test_options_reach_the_places_that_they_are_for() -> None:
    options = {"tau_s": 60, "gpu": {"lease_s": 600}, "host": {"lease_s": 1800, "tau_s": 5}}
    kv = quota_kv(
        HostTier(1 << 20), policy="lfu-ttl:tau_s=30,max_age_s=1e6", policy_options=options
    )
    device, host = (place.policy.config for place in kv.planner.store.places)
    assert (device.tau_s, device.lease_s, device.max_age_s) == (60.0, 600.0, 1e6)
    assert (host.tau_s, host.lease_s, host.max_age_s) == (5.0, 1800.0, 1e6)
    assert [p["name"] for p in kv.stats()["policies"].values()] == ["lfu-ttl"] * 2


def test_time_to_live_is_told_place_by_place() -> None:
    kv = quota_kv(HostTier(1 << 20), policy="lru", policy_options={"gpu": {"lease_s": 10}})
    published(kv, [*P, 9])
    kv.clock.advance(s=11.0)
    with kv.open([5]):
        kv.open([6] * 9).close()
        assert known(kv, P, "") == 0  # nobody had put it on the host


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policy": "lru:tau=1"}, "options of 'lru'"),
        ({"policy": "lfu-ttl", "policy_options": {"tau": 1}}, "unknown field 'tau'"),
        ({"policy": "lfu-ttl", "policy_options": {"gpu": {"tau_s": -1}}}, "tau_s"),
        ({"policy_options": {"device": {"tau_s": 1}}}, "Did you mean 'gpu'"),
        ({"policy": "lfu"}, "Did you mean 'lru'"),
        ({"policy": "lru:x"}, "tau_s=30"),
        ({"quotas": {"alice": "3GiB:1GiB"}}, r"`quotas\['alice'\]`"),
        ({"quotas": {"alice": {"gpus": "1GiB"}}}, "Did you mean 'gpu'"),
        ({"policy": LRU, "policy_options": {"lease_s": 5}}, "beside a callable"),
    ],
)
def test_what_is_wrong_is_told_at_once(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KV(**fields)


def test_configurations_with_options_compare_hash_and_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "flowkv.toml"
    file.write_text(
        'policy = "lfu-ttl"\n[policy_options]\ntau_s = 20\n[policy_options.gpu]\nlease_s = 60\n'
        '[quotas]\nalice = "1GiB:2GiB"\n'
    )
    config = load_config(file)
    same = Config(
        policy="lfu-ttl",
        policy_options={"tau_s": 20, "gpu": {"lease_s": 60}},
        quotas={"alice": "1GiB:2GiB"},
    )
    assert config == same and hash(config) == hash(same)
    assert config.selection("gpu").options == {"tau_s": 20, "lease_s": 60}
    assert config.selection("s3").options == {"tau_s": 20}
    assert "quotas={'alice': '1GiB:2GiB'}" in repr(config)


def test_a_policy_is_read_from_text() -> None:
    assert parse_policy("lru") == ("lru", {})
    assert parse_policy("x: a=1 , b=2.5,c=true,d=word") == (
        "x",
        {"a": 1, "b": 2.5, "c": True, "d": "word"},
    )
