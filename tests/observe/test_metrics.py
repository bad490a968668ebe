"""Metrics count what the bus says, and read back as a dict and as Prometheus text."""

from __future__ import annotations

import math
import threading

import pytest

from flowkv.core.errors import ConfigError
from flowkv.observe import events
from flowkv.observe.events import Bus, Event, Hit, Miss, Restored, Stored
from flowkv.observe.metrics import COUNT_BUCKETS, SECONDS_BUCKETS, Metrics


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
    with metrics.follow(bus):
        bus.emit(Miss(tokens=1))
    bus.emit(Miss(tokens=1))
    assert metrics.total("misses_total") == 1
    assert not bus.wants(Miss)


def test_direct_use() -> None:
    metrics = Metrics()
    metrics.count("opens_total")
    metrics.count("opens_total", 2, name="a", value="b")  # labels of any name
    metrics.set("used_bytes", 10, tier="host")
    metrics.set("used_bytes", 4, tier="host")
    assert metrics.snapshot() == {
        "opens_total": 1,
        'opens_total{name="a",value="b"}': 2,
        'used_bytes{tier="host"}': 4,
    }


def test_misuse_is_refused() -> None:
    metrics = Metrics()
    metrics.count("a_total")
    with pytest.raises(ConfigError, match="cannot go down"):
        metrics.count("a_total", -1)
    with pytest.raises(ConfigError, match="is a counter, not a gauge"):
        metrics.set("a_total", 1)
    with pytest.raises(ConfigError, match="is a counter, not a histogram"):
        metrics.observe("a_total", 1)
    with pytest.raises(ConfigError, match="joined by _"):
        metrics.count("a total")
    assert metrics.snapshot() == {"a_total": 1}


def test_histogram_quantiles() -> None:
    metrics = Metrics()
    for value in range(1, 101):
        metrics.observe("wait_seconds", value, buckets=(25, 50, 99))
    summary = metrics.snapshot()["wait_seconds"]
    assert summary == {"count": 100, "sum": 5050, "p50": 50, "p99": 99}
    metrics.observe("wait_seconds", 1e9, buckets=(1,), tier="disk")  # beyond the last bound
    assert metrics.snapshot()['wait_seconds{tier="disk"}']["p50"] == 99  # type: ignore[index]


@pytest.mark.parametrize("buckets", [SECONDS_BUCKETS, COUNT_BUCKETS])
def test_buckets_ascend(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))


def test_prometheus_text() -> None:
    metrics = Metrics()
    metrics.count("hits_total", 3, tier='a "quoted"\\path\n')
    metrics.count("hits_total", 1, tier="host")
    metrics.set("ratio", 0.25)
    metrics.set("unknown", math.nan)
    metrics.set("highest", math.inf)
    metrics.observe("wait_seconds", 0.2, buckets=(0.1, 0.5), tier="disk")
    metrics.observe("wait_seconds", 9.0, tier="disk")
    assert metrics.prometheus() == (
        "# TYPE flowkv_highest gauge\n"
        "flowkv_highest +Inf\n"
        "# HELP flowkv_hits_total Prompts of which a part was found\n"
        "# TYPE flowkv_hits_total counter\n"
        'flowkv_hits_total{tier="a \\"quoted\\"\\\\path\\n"} 3\n'
        'flowkv_hits_total{tier="host"} 1\n'
        "# TYPE flowkv_ratio gauge\n"
        "flowkv_ratio 0.25\n"
        "# TYPE flowkv_unknown gauge\n"
        "flowkv_unknown NaN\n"
        "# TYPE flowkv_wait_seconds histogram\n"
        'flowkv_wait_seconds_bucket{tier="disk",le="0.1"} 0\n'
        'flowkv_wait_seconds_bucket{tier="disk",le="0.5"} 1\n'
        'flowkv_wait_seconds_bucket{tier="disk",le="+Inf"} 2\n'
        'flowkv_wait_seconds_sum{tier="disk"} 9.2\n'
        'flowkv_wait_seconds_count{tier="disk"} 2\n'
    )
    assert Metrics().prometheus() == ""


def test_threads_lose_nothing() -> None:
    bus = Bus()
    metrics = Metrics(bus)
    event = Restored(tier="disk", tokens=2, n_bytes=3, seconds=0.001)

    def work() -> None:
        for _ in range(500):
            bus.emit(event)
            metrics.snapshot()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.total("restores_total") == 1500
    assert metrics.total("restored_tokens_total") == 3000
