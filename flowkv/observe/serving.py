"""How an engine serves: latencies, throughput, use of memory; in bounded memory, for any time.

    with Serving(kv.bus) as serving:
        engine.run(requests)
    print(serving.summary()["ttft_s"]["p95"])

Nothing is collected, and no event of a step is even made, while nobody listens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from flowkv.observe.events import (
    Admitted,
    Audited,
    Bus,
    Demoted,
    EngineStep,
    Event,
    Evicted,
    Failed,
    Finished,
    Hit,
    Miss,
    Preempted,
    Promoted,
    Quarantined,
    Queued,
    Restored,
    RestoreEnded,
    Stored,
)
from flowkv.observe.lanes import Lanes
from flowkv.observe.metrics import Metrics
from flowkv.observe.rules import Level
from flowkv.observe.series import Series
from flowkv.observe.spread import Spread
from flowkv.observe.tenancy import Tenancy

LATENCIES = {
    "ttft_s": "time to the first token",
    "tpot_s": "mean time of a further token, by request",
    "inter_token_s": "time between two tokens",
    "queue_s": "wait for the first admission",
    "aside_s": "wait of preempted requests",
    "request_s": "from submission to the end",
    "held_s": "requests held up by loads of their own prefix",
    "restore_s": "restores",
    "restore_exposed_s": "restores: somebody waited for loads",
    "restore_hidden_s": "restores: behind other work",
    "step_s": "steps",
    "model_s": "steps: the forward",
    "sampling_s": "steps: choice of tokens",
    "bookkeeping_s": "steps: everything else",
}
"""Times whose spread is collected, and what they are."""

MEMORY = ("device_used_bytes", "tier_used_bytes")
"""Levels whose course is collected."""

_MOVES = (Hit, Miss, Restored, Stored, Evicted, Promoted, Demoted, Failed, Quarantined, Audited)


class Serving:
    """Collects how a cache and the engines on it serve, while it is open. Thread-safe.

    Args:
        bus: `KV.bus`.
        levels: Read now and then for the use of memory over time, on the threads that emit events;
            None leaves that out.
        every_s: How often, at most.
        clock: Seconds, of the clock that events carry.

    Attributes:
        spreads: By name, those of `LATENCIES`.
        series: Over time: "rows", "waiting", "aside" and "kv" (pages held, as a share of all),
            the used bytes of each place, and counted "made", "prefill" and "decode" tokens.
        lanes: Requests as they went.
        moves: What was found, moved and lost meanwhile.
        tenants: What each tenant found.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        levels: Callable[[], Iterable[Level]] | None = None,
        every_s: float = 0.05,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._lock, self._clock = threading.RLock(), clock
        self._levels, self._every_s, self._next_s = levels, every_s, -1.0
        self.spreads = {name: Spread() for name in LATENCIES}
        self.series, self.lanes = Series(), Lanes()
        self.moves, self.tenants = Metrics(), Tenancy(bus)
        self._reasons: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._most: dict[str, float] = {}
        self._started_s, self._stopped_s = clock(), 0.0
        self._busy_s = self._used_s = self._row_s = 0.0
        self._begun_s, self._until_s = float("inf"), 0.0  # of all steps
        takes: dict[type[Event], Callable[[Any], None]] = {
            EngineStep: self._step,
            Queued: self._queued,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Finished: self._finished,
            RestoreEnded: self._restored,
        }
        self._takes = takes
        self._subscriptions = [
            self.moves.follow(bus, *_MOVES),
            bus.subscribe(self.note, *takes),
            bus.subscribe(self._moved, Stored, Evicted, Restored, Hit, Miss),
        ]

    def note(self, event: Event) -> None:
        """Takes an event of an engine, or the end of a restore."""
        with self._lock:
            take = next(take for kind, take in self._takes.items() if isinstance(event, kind))
            take(event)

    # ---- events, under the lock

    def _step(self, step: EngineStep) -> None:
        spreads, seconds = self.spreads, step.seconds
        spreads["step_s"].add(seconds)
        spreads["model_s"].add(step.model_s)
        spreads["sampling_s"].add(step.sampling_s)
        spreads["bookkeeping_s"].add(max(0.0, seconds - step.model_s - step.sampling_s))
        spreads["inter_token_s"].extend(step.gaps_s)
        used = step.pages / step.total_pages if step.total_pages else 0.0
        self._begun_s = min(self._begun_s, step.started_s)
        self._until_s = max(self._until_s, step.started_s + seconds)
        self._busy_s += seconds
        self._used_s += used * seconds
        self._row_s += step.rows * seconds
        self._totals.update(
            steps=1,
            made_tokens=step.made_tokens,
            prefill_tokens=step.prefill_tokens,
            decode_tokens=step.decode_tokens,
        )
        levels = {"rows": step.rows, "waiting": step.waiting, "aside": step.aside, "kv": used}
        for name, level in levels.items():
            self._most[name] = max(self._most.get(name, 0), level)
        self.series.set(step.started_s, levels, weight=seconds)
        counted = {"made": step.made_tokens, "prefill": step.prefill_tokens}
        self.series.count(step.started_s, counted | {"decode": step.decode_tokens})
        self._sample(step.started_s + seconds)

    def _queued(self, event: Queued) -> None:
        self._totals["requests"] += 1
        self.lanes.queued(event, self._clock())

    def _admitted(self, event: Admitted) -> None:
        self.spreads["aside_s" if event.resumed else "queue_s"].add(event.queued_s)
        self._totals["reused_tokens"] += 0 if event.resumed else event.reused_tokens
        self.lanes.admitted(event, self._clock())

    def _preempted(self, event: Preempted) -> None:
        self._totals["kept" if event.kept else "dropped"] += 1
        self.lanes.preempted(event, self._clock())

    def _finished(self, event: Finished) -> None:
        self._reasons[event.reason] += 1
        self.spreads["request_s"].add(event.seconds)
        if event.ttft_s:
            self.spreads["ttft_s"].add(event.ttft_s)
        if event.tpot_s:
            self.spreads["tpot_s"].add(event.tpot_s)
        if event.restore_s:
            self.spreads["held_s"].add(event.exposed_s)
        self.lanes.finished(event)

    def _restored(self, event: RestoreEnded) -> None:
        exposed_s = min(event.exposed_s, event.seconds)
        self.spreads["restore_s"].add(event.seconds)
        self.spreads["restore_exposed_s"].add(exposed_s)
        self.spreads["restore_hidden_s"].add(event.seconds - exposed_s)

    def _moved(self, event: Event) -> None:
        with self._lock:
            self._sample(self._clock())

    def _sample(self, now_s: float) -> None:
        if self._levels is None or now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        used = {
            next(iter(level.labels.values())): level.value
            for level in self._levels()
            if level.name in MEMORY
        }
        self.series.set(now_s, used)

    # ---- reading

    @property
    def now_s(self) -> float:
        """The time, or that of the end of collecting."""
        return self._stopped_s or self._clock()

    def places(self) -> list[str]:
        """Devices and tiers whose use was collected."""
        own = {"rows", "waiting", "aside", "kv", "made", "prefill", "decode"}
        with self._lock:
            return [name for name in self.series.names if name not in own]

    def summary(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON.

        Each of `LATENCIES` is {"count", "mean", "p50", "p90", "p95", "p99", "max"} in seconds,
        quantiles being within 1 % of the true ones. `tokens_per_s` counts new tokens from the
        beginning of the first step to the end of the last one. The means of `rows` and
        `kv_utilisation` are over the time of steps: a step weighs as much as it took.
        """
        with self._lock:
            span_s = max(0.0, self._until_s - self._begun_s)
            totals, most, busy_s = self._totals, self._most, self._busy_s
            made, over = totals["made_tokens"], sum(self._reasons.values())
            found = self.moves.by("hit_tokens_total", "tier")
            known = sum(found.values()) + self.moves.total("miss_tokens_total")
            return {
                "seconds": self.now_s - self._started_s,
                "requests": totals["requests"],
                "finished": dict(self._reasons),
                "steps": totals["steps"],
                "busy_s": busy_s,
                "made_tokens": made,
                "prefill_tokens": totals["prefill_tokens"],
                "reused_tokens": totals["reused_tokens"],
                "tokens_per_s": made / span_s if span_s else 0.0,
                "requests_per_s": over / span_s if span_s else 0.0,
                "rows": {"mean": _share(self._row_s, busy_s), "max": most.get("rows", 0)},
                "waiting": {"max": most.get("waiting", 0)},
                "kv_utilisation": {"mean": _share(self._used_s, busy_s), "max": most.get("kv", 0)},
                "preempted": {"kept": totals["kept"], "dropped": totals["dropped"]},
                "hit_rate": {tier: tokens / known for tier, tokens in found.items() if known},
                "tenants": self.tenants.report(),
                **{name: spread.summary() for name, spread in self.spreads.items()},
            }

    def close(self) -> None:
        """Ends the collecting; what was collected stays."""
        for subscription in self._subscriptions:
            subscription.close()
        self.tenants.close()
        with self._lock:
            self._stopped_s = self._stopped_s or self._clock()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
