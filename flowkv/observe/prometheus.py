"""Export of metrics through `prometheus_client`, beside those of the rest of a program.

    from flowkv.observe.prometheus import Exporter

    with Exporter(kv):                       # registers with prometheus_client.REGISTRY
        prometheus_client.start_http_server(9400)
        ...

The values equal those of `KV.metrics.prometheus()`: both come from `Metrics.families`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.observe.events import Closing
from flowkv.observe.metrics import NAMES, PREFIX, Family, Histogram, Observable

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
except ImportError as error:
    raise MissingDependencyError("Prometheus metrics", "metrics") from error


class Exporter(Closing):
    """Collector of `prometheus_client` for the metrics of a cache and its engines.

    An open exporter also has the steps of engines counted.

    Args:
        kv: The cache. Where a process has several, give each a registry of its own.
        registry: Registry to join, by default that of the process; None joins none.

    Raises:
        ConfigError: Another cache is registered there.
    """

    def __init__(self, kv: Observable, *, registry: Any = REGISTRY) -> None:
        self._metrics, self._registry = kv.metrics, registry
        self._steps = kv.metrics.follow_steps(kv.bus)
        if registry is not None:
            try:
                registry.register(self)
            except ValueError as error:
                self._steps.close()
                raise ConfigError(
                    "the registry has metrics of another cache already",
                    "Give each cache a registry of its own: Exporter(kv, registry=...)",
                ) from error

    def collect(self) -> Iterator[Any]:
        """Yield all metric families, with their values, for `prometheus_client`."""
        return map(_family, self._metrics.families())

    def describe(self) -> Iterable[Any]:
        """Yield all metric families without values: the registry refuses names it has already."""
        return (_family(Family(name, one.kind, one.meaning, [])) for name, one in NAMES.items())

    def close(self) -> None:
        """Unregister the exporter. Safe to call again."""
        self._steps.close()
        if self._registry is not None:
            self._registry.unregister(self)
            self._registry = None


def _family(family: Family) -> Any:
    name, kind, said, series = family
    labels = sorted({label for key, _ in series for label, _ in key})
    make = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}.get(kind)
    told = (make or HistogramMetricFamily)(PREFIX + name, said, labels=labels)
    for key, value in series:
        values = [dict(key).get(label, "") for label in labels]
        if isinstance(value, Histogram):
            told.add_metric(values, value.below(), value.total)
        else:
            told.add_metric(values, value)
    return told
