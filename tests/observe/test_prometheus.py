"""prometheus_client and the built-in exposition say the same, about anything."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.inside import Bus, ConfigError, EngineStep, Exporter, Level, Metrics, Stored
from tests.observe.story import Clock, step, tell

Sample = tuple[str, tuple[tuple[str, str], ...], float]


class Watched:
    """A bus, and what counts it: as much of a cache as exporters need."""

    def __init__(self) -> None:
        self.bus, self.metrics = Bus(), Metrics()
        self.metrics.subscribe(self.bus, without=[EngineStep])


def samples(text: str) -> dict[tuple[str, str, tuple[tuple[str, str], ...]], str]:
    """What a scraper reads: kind, name and labels of each sample, and its value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            key = (family.type, name, tuple(sorted(labels.items())))
            assert key not in found, "a series is told once"
            found[key] = repr(float(value))  # NaN is itself here
    return found


def helps(text: str) -> dict[str, str]:
    return {f.name: f.documentation for f in text_string_to_metric_families(text)}


def both(watched: Watched) -> tuple[str, str]:
    registry = CollectorRegistry()
    with Exporter(watched, registry=registry):
        return watched.metrics.prometheus(), generate_latest(registry).decode()


def test_they_agree_about_an_engine() -> None:
    watched, registry = Watched(), CollectorRegistry()
    watched.metrics.source(
        lambda: [
            Level("tier_used_bytes", 12.5, {"tier": 'a "b"\\\n'}),
            Level("tier_used_bytes", math.inf, {"tier": "host"}),
            Level("tokens_seen_total", 7),
        ]
    )
    with Exporter(watched, registry=registry):
        tell(watched.bus, Clock())
        own, theirs = watched.metrics.prometheus(), generate_latest(registry).decode()
    assert samples(own) == samples(theirs)
    assert helps(own) == helps(theirs) and len(helps(own)) > 20
    read = samples(own)
    assert read["histogram", "flowkv_inter_token_seconds_count", ()] == "2.0"
    assert read["counter", "flowkv_finished_total", (("reason", "length"),)] == "2.0"
    assert read["counter", "flowkv_preemptions_total", (("kept", "true"),)] == "1.0"
    assert read["gauge", "flowkv_tier_used_bytes", (("tier", 'a "b"\\\n'),)] == "12.5"
    assert "alice" not in own + theirs


values = st.floats(allow_nan=True) | st.integers(-(2**60), 2**60)
names = st.sampled_from(["tier_used_bytes", "audit_worst", "tier_refused_total"])
labels = st.dictionaries(st.sampled_from(["tier", "reason"]), st.text(max_size=4), max_size=2)


@given(st.lists(st.tuples(names, values, labels), max_size=12))
@settings(max_examples=25, deadline=None)
def test_they_agree_about_anything(told: list[tuple[str, float, dict[str, str]]]) -> None:
    watched, levels = Watched(), []
    watched.metrics.source(lambda: levels)
    for name, value, found in told:
        # The text format ends lines at every kind of line end when the client reads it back.
        found = {key: "".join(c for c in said if c.isprintable()) for key, said in found.items()}
        found = {"tier": "", "reason": "", **found}
        counted = 1 if math.isnan(value) else abs(value)
        levels.append(Level(name, counted if name.endswith("_total") else value, found))
        took_s = float(value) if math.isfinite(value) else 1.0
        stored = Stored(tier=found["tier"], pages=1, n_bytes=int(abs(took_s)), seconds=took_s)
        watched.bus.emit(stored)
    own, theirs = both(watched)
    assert samples(own) == samples(theirs)


def test_steps_are_counted_while_somebody_exports() -> None:
    watched = Watched()
    assert not watched.bus.wants(EngineStep), "steps come often: nobody pays for nothing"
    one = Exporter(watched, registry=CollectorRegistry())
    two = Exporter(watched, registry=None)
    watched.bus.emit(step(1.0))
    assert watched.metrics.total("engine_steps_total") == 1, "once, however many export"
    one.close()
    one.close()
    watched.bus.emit(step(2.0))
    two.close()
    assert not watched.bus.wants(EngineStep)
    watched.bus.emit(step(3.0))
    assert watched.metrics.total("engine_steps_total") == 2


def test_two_caches_of_a_registry_are_refused() -> None:
    registry, one, two = CollectorRegistry(), Watched(), Watched()
    with Exporter(one, registry=registry):
        with pytest.raises(ConfigError, match="registry of its own"):
            Exporter(two, registry=registry)
        assert not two.bus.wants(EngineStep)
    Exporter(two, registry=registry).close()
    assert generate_latest(registry) == b""
