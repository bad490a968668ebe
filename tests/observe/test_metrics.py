"""Metrics count what the bus says, and read back as a dict and as Prometheus text."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.clock import together
from tests.inside import (
    COUNT_BUCKETS,
    SECONDS_BUCKETS,
    Bus,
    Event,
    Histogram,
    Hit,
    Level,
    Metrics,
    Miss,
    Quarantined,
    Restored,
    StepPlanned,
    Stored,
    Warned,
    events,
)
from tests.observe.story import step


def test_events_are_counted() -> None:
    bus = Bus()
    metrics = Metrics(bus)
    for tokens in (64, 128):
        bus.emit(Hit(tier="host", tokens=tokens, n_bytes=10 * tokens, tenant="alice"))
    bus.emit(Hit(tier="disk", tokens=1, n_bytes=2))
    bus.emit(Miss(tokens=7))
    bus.emit(Stored(tier="disk", pages=3, n_bytes=30, seconds=0.02))
    snapshot = metrics.snapshot()
    assert snapshot['hits_total{tier="host"}'] == 2
    assert snapshot['hit_tokens_total{tier="host"}'] == 192
    assert snapshot['hit_bytes_total{tier="host"}'] == 1920
    assert snapshot["miss_tokens_total"] == 7
    assert snapshot['stored_pages_total{tier="disk"}'] == 3
    assert snapshot['store_seconds{tier="disk"}'] == {
        "count": 1,
        "sum": 0.02,
        "p50": 0.025,
        "p99": 0.025,
    }
    assert metrics.total("hits_total") == 3
    assert metrics.total("hits_total", tier="disk") == 1
    assert metrics.total("hits_total", tier="tape") == metrics.total("never_total") == 0
    assert "alice" not in str(snapshot) + metrics.prometheus()


@pytest.mark.parametrize("kind", Event.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_event_is_counted(kind: type[Event]) -> None:
    if kind.__module__ != events.__name__:
        pytest.skip("an event of another test")
    plain = {"str": "x", "bytes": b"x", "int": 1, "float": 1.0, "bool": True}
    plain |= {"tuple[float, ...]": (1.0, 2.0)}
    filled = {name: plain[typed] for name, typed in kind.__annotations__.items()}
    bus = Bus()
    metrics = Metrics(bus)
    assert bus.wants(kind)
    bus.emit(kind(**filled))
    assert 1 in metrics.snapshot().values()


def test_a_subclass_is_counted_as_its_base() -> None:
    class FarHit(Hit, frozen=True, kw_only=True):
        pass

    bus = Bus()
    metrics = Metrics(bus)
    bus.emit(FarHit(tier="moon", tokens=1, n_bytes=1))
    assert metrics.total("hits_total", tier="moon") == 1


def test_following_can_end() -> None:
    bus, metrics = Bus(), Metrics()
    with metrics.subscribe(bus):
        bus.emit(Miss(tokens=1))
    bus.emit(Miss(tokens=1))
    assert metrics.total("misses_total") == 1
    assert not bus.wants(Miss)


def test_levels_are_what_they_were_told_last() -> None:
    metrics = Metrics()
    metrics.on_event(step(1.0))
    metrics.on_event(msgspec.structs.replace(step(2.0), rows=7))
    metrics.on_event(Warned(code="a", message=""))
    told = metrics.snapshot()
    assert told["engine_rows"] == 7 and told["engine_steps_total"] == 2
    assert told['warnings_total{code="a"}'] == 1


def test_histogram_quantiles() -> None:
    told = Histogram((25, 50, 99))
    told.observe(range(1, 101))
    assert (sum(told.counts), told.total) == (100, 5050)
    assert (told.quantile(0.5), told.quantile(0.99)) == (50, 99)
    assert told.below() == [("25", 25), ("50", 50), ("99", 99), ("+Inf", 100)]
    beyond = Histogram((25, 50, 99))
    beyond.observe([1e9])
    assert beyond.quantile(0.5) == 99


@pytest.mark.parametrize("buckets", [SECONDS_BUCKETS, COUNT_BUCKETS])
def test_buckets_ascend(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))


def test_prometheus_text() -> None:
    metrics = Metrics()
    for tier, number in (('a "quoted"\\path\n', 3), ("host", 1)):
        for _ in range(number):
            metrics.on_event(Quarantined(tier=tier, key=b"", reason=""))
    levels = [Level("audit_worst", 0.25), Level("prefetch_precision", math.nan)]
    metrics.source(lambda: [*levels, Level("tier_capacity_bytes", math.inf)])
    for rows in (1, 9, 1 << 30):
        metrics.on_event(StepPlanned(rows=rows, new_tokens=0, context_tokens=0))
    text = metrics.prometheus()
    assert text.startswith(
        "# HELP flowkv_audit_worst Greatest error of a sound page as a share of its bound\n"
        "# TYPE flowkv_audit_worst gauge\n"
        "flowkv_audit_worst 0.25\n"
        "# HELP flowkv_prefetch_precision Used share of prefetched bytes, 0 to 1\n"
        "# TYPE flowkv_prefetch_precision gauge\n"
        "flowkv_prefetch_precision NaN\n"
        "# HELP flowkv_quarantined_total Stored pages that failed their check\n"
        "# TYPE flowkv_quarantined_total counter\n"
        'flowkv_quarantined_total{tier="a \\"quoted\\"\\\\path\\n"} 3\n'
        'flowkv_quarantined_total{tier="host"} 1\n'
    )
    assert text.endswith("\nflowkv_tier_capacity_bytes +Inf\n")
    assert (
        "# TYPE flowkv_step_rows histogram\n"
        'flowkv_step_rows_bucket{le="1"} 1\n'
        'flowkv_step_rows_bucket{le="4"} 1\n'
        'flowkv_step_rows_bucket{le="16"} 2\n'
    ) in text
    assert (
        'flowkv_step_rows_bucket{le="16777216"} 2\n'
        'flowkv_step_rows_bucket{le="+Inf"} 3\n'
        "flowkv_step_rows_sum 1073741834\n"
        "flowkv_step_rows_count 3\n"
    ) in text
    assert Metrics().prometheus() == ""


def test_threads_lose_nothing() -> None:
    bus = Bus()
    metrics = Metrics(bus)
    event = Restored(tier="disk", tokens=2, n_bytes=3, seconds=0.001)

    def work() -> None:
        for _ in range(500):
            bus.emit(event)
            metrics.snapshot()

    together(*[work] * 3)
    assert metrics.total("restores_total") == 1500
    assert metrics.total("restored_tokens_total") == 3000


def test_a_source_may_have_names_of_its_own() -> None:
    metrics = Metrics()
    metrics.source(lambda: [Level("my_own", 3.0)])
    assert "flowkv_my_own 3" in metrics.prometheus()
