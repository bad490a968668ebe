"""Tenants are told apart up to a number, and no token is lost beyond it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import OTHERS, Bus, Hit, Miss, Tenancy

told = st.lists(
    st.tuples(st.sampled_from("abcdefg"), st.sampled_from(["", "host", "disk"]), st.integers(0, 9)),
    max_size=60,
)


def tell(bus: Bus, tenant: str, tier: str, tokens: int) -> None:
    if tier:
        bus.emit(Hit(tier=tier, tokens=tokens, n_bytes=1, tenant=tenant))
    else:
        bus.emit(Miss(tokens=tokens, tenant=tenant))


@given(told, st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_no_token_is_lost(story: list[tuple[str, str, int]], most: int) -> None:
    bus = Bus()
    tenancy = Tenancy(bus, most=most)
    for event in story:
        tell(bus, *event)
    report = tenancy.report()
    assert len(set(report) - {OTHERS}) <= most
    for tier in ("host", "disk"):
        seen = sum(one["hit_tokens"].get(tier, 0) for one in report.values())
        assert seen == sum(tokens for _, name, tokens in story if name == tier)
    missed = sum(one["miss_tokens"] for one in report.values())
    assert missed == sum(tokens for _, name, tokens in story if not name)


def test_the_smallest_joins_the_others() -> None:
    bus = Bus()
    tenancy = Tenancy(bus, most=2)
    tell(bus, "alice", "host", 30)
    tell(bus, "alice", "", 10)
    tell(bus, "bob", "", 5)
    tell(bus, "carol", "disk", 20)
    assert tenancy.report() == {
        "alice": {"hit_tokens": {"host": 30}, "miss_tokens": 10, "hit_rate": 0.75},
        OTHERS: {"hit_tokens": {}, "miss_tokens": 5, "hit_rate": 0.0},
        "carol": {"hit_tokens": {"disk": 20}, "miss_tokens": 0, "hit_rate": 1.0},
    }
    tenancy.close()
    tell(bus, "dave", "", 99)
    assert "dave" not in tenancy.report() and not bus.wants(Hit)


@pytest.mark.parametrize("asks", [4, 40])
def test_whoever_has_a_large_share_is_told_apart(asks: int) -> None:
    """However many small ones come in between: a newcomer takes over the rank of the last."""
    bus = Bus()
    tenancy = Tenancy(bus, most=4)
    for number in range(8):
        tell(bus, f"early {number}", "", 6)
    for number in range(asks * 10):
        tell(bus, f"small {number}", "", 6)
        tell(bus, "large", "", 3)  # a third of all, where a quarter is enough; never many at once
    report = tenancy.report()
    assert "large" in report and report["large"]["miss_tokens"] == 30 * asks
    assert sum(one["miss_tokens"] for one in report.values()) == 90 * asks + 48


def test_one_that_came_back_has_what_it_had_since() -> None:
    bus = Bus()
    tenancy = Tenancy(bus, most=1)
    for tenant in ("alice", "bob", "alice"):
        tell(bus, tenant, "", 5)
    told = {tenant: one["miss_tokens"] for tenant, one in tenancy.report().items()}
    assert told == {"alice": 5, OTHERS: 10}


def test_a_tenant_may_be_called_like_the_others() -> None:
    bus = Bus()
    tenancy = Tenancy(bus, most=1)
    for tenant in (OTHERS, "alice", OTHERS):
        tell(bus, tenant, "host", 5)
    (one,) = tenancy.report().values()
    assert one["hit_tokens"] == {"host": 15}
