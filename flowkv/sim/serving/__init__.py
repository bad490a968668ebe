"""Schedulers without a model: a virtual engine over the same turns as `flowkv.Engine`.

    from flowkv.sim.serving import mixed, serve

    print(serve(mixed(seed=1), "shortest").mean())

Everything here is simulated and says so (DESIGN D17).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowkv.policy.scheduling import Limits, Scheduler, Turns, make_scheduler
from flowkv.policy.scheduling.worth import Worth
from flowkv.sim.serving.costs import Costs
from flowkv.sim.serving.engine import VirtualEngine
from flowkv.sim.serving.load import Ask, mixed
from flowkv.sim.serving.result import Result, Served

__all__ = ["Ask", "Costs", "Result", "Served", "VirtualEngine", "mixed", "serve"]


def serve(
    asks: Sequence[Ask],
    scheduler: str | Scheduler = "fcfs",
    *,
    limits: Limits | None = None,
    pages: int = 1024,
    costs: Costs | None = None,
    **options: Any,
) -> Result:
    """Serves a load in virtual time.

    Args:
        asks: The load.
        scheduler: A name in `flowkv.policy.scheduling.SCHEDULERS`, or a `Scheduler`.
        limits: What may be done at once; by default 16 rows, 256 tokens, pages of 16 tokens.
        pages: Pages of the device.
        costs: What everything takes.
        **options: Arguments of the scheduler's class.

    Raises:
        ConfigError: A request does not fit, or the scheduler or an option is unknown.
        StateError: The scheduler lets nothing go on.
    """
    worth = Worth(page_bytes=1)
    turns = Turns(make_scheduler(scheduler, **options), limits or Limits(16, 256, 16), keeps=worth)
    return VirtualEngine(turns, pages, costs, worth).run(asks)
