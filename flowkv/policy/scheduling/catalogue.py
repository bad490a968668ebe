"""Schedulers by name.

| name | class | what it does |
|---|---|---|
| `fcfs` | `FirstCome` | in order of submission |
| `shortest` | `Shortest` | the shortest remaining work first, with aging |
| `priority` | `Priority` | the highest priority first, with aging; the lowest makes room |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flowkv.core.errors import ConfigError, did_you_mean
from flowkv.policy.scheduling.base import Scheduler
from flowkv.policy.scheduling.fcfs import FirstCome
from flowkv.policy.scheduling.priority import Priority
from flowkv.policy.scheduling.shortest import Shortest

SCHEDULERS: Mapping[str, Callable[..., Scheduler]] = MappingProxyType(
    {"fcfs": FirstCome, "shortest": Shortest, "priority": Priority}
)


def make_scheduler(scheduler: str | Scheduler, **options: Any) -> Scheduler:
    """Makes a scheduler from its name, or passes an object through.

    Args:
        scheduler: A name in `SCHEDULERS`, or a `Scheduler`.
        **options: Arguments of the scheduler's class; none with an object.

    Raises:
        ConfigError: The name or an option is unknown, or the object is no scheduler.
    """
    if isinstance(scheduler, Scheduler):
        if options:
            raise ConfigError(
                f"scheduler {scheduler.name!r} is an object already, and options came with it",
                "Configure the object where it is made",
            )
        return scheduler
    if not isinstance(scheduler, str):
        raise ConfigError(
            f"{scheduler!r} is no scheduler",
            f"Pass a name ({', '.join(SCHEDULERS)}) or an object of a Scheduler",
        )
    make = SCHEDULERS.get(scheduler)
    if make is None:
        hint = did_you_mean(scheduler, SCHEDULERS)
        raise ConfigError(
            f"there is no scheduler {scheduler!r}", f"{hint}Use one of {', '.join(SCHEDULERS)}"
        )
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(
            f"scheduler {scheduler!r} does not take these options ({error})",
            "See its class for what it takes",
        ) from None
