"""Schedulers of requests: one order each, driven by one mechanism in the engine and in `sim`."""

from flowkv.policy.scheduling.schedulers import (
    ASIDE,
    COMING,
    OVER,
    RUNNING,
    SCHEDULERS,
    WAITING,
    FirstCome,
    Job,
    Priority,
    Scheduler,
    Shortest,
    make_scheduler,
)
from flowkv.policy.scheduling.turns import Limits, Room, Turn, Turns

__all__ = [
    "ASIDE",
    "COMING",
    "OVER",
    "RUNNING",
    "SCHEDULERS",
    "WAITING",
    "FirstCome",
    "Job",
    "Limits",
    "Priority",
    "Room",
    "Scheduler",
    "Shortest",
    "Turn",
    "Turns",
    "make_scheduler",
]
