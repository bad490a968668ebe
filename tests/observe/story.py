"""Events of an engine that serves some requests, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.inside import Bus, Event, events

BEGIN_S = 100.0


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, now_s: float = BEGIN_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def step(started_s: float, seconds: float = 0.010, **fields: Any) -> events.EngineStep:
    said: dict[str, Any] = {"rows": 2, "prefill_tokens": 6, "decode_tokens": 1, "made_tokens": 2}
    said |= {"waiting": 1, "aside": 0, "pages": 10, "total_pages": 40, "gaps_s": (0.011,)}
    said |= {"model_s": 0.8 * seconds, "sampling_s": 0.1 * seconds}
    return events.EngineStep(started_s=started_s, seconds=seconds, **(said | fields))


def finished(request: int, started_s: float, seconds: float, **fields: Any) -> events.Finished:
    said: dict[str, Any] = {"reason": "length", "prompt_tokens": 9, "reused_tokens": 4}
    said |= {"new_tokens": 5, "queued_s": 0.01, "ttft_s": 0.5 * seconds, "tpot_s": 0.02}
    return events.Finished(request=request, started_s=started_s, seconds=seconds, **(said | fields))


def story() -> Iterator[tuple[float, Event]]:
    """Two requests; the second is preempted before its first token, and goes on."""
    e = events
    yield 0.000, e.Queued(request=0, prompt_tokens=9, waiting=1, tenant="alice")
    yield 0.001, e.Admitted(request=0, queued_s=0.001, reused_tokens=4, tenant="alice")
    yield 0.002, e.Queued(request=1, prompt_tokens=7, waiting=1, tenant="bob")
    yield 0.010, e.Admitted(request=1, queued_s=0.008, reused_tokens=0, tenant="bob")
    yield 0.022, step(BEGIN_S + 0.010, 0.010, rows=2)
    yield 0.030, e.Preempted(request=1, pages=3, n_bytes=300, kept=True)
    yield 0.042, step(BEGIN_S + 0.030, 0.010, rows=1, aside=1, pages=20)
    yield 0.050, finished(0, BEGIN_S, 0.050, ttft_s=0.020, tenant="alice")
    yield 0.060, e.Admitted(request=1, queued_s=0.030, reused_tokens=7, resumed=True)
    yield 0.100, finished(1, BEGIN_S + 0.002, 0.098, ttft_s=0.078, preempted=1)


def tell(bus: Bus, clock: Clock) -> None:
    """Emits the story."""
    for at_s, event in story():
        clock.now_s = BEGIN_S + at_s
        bus.emit(event)
