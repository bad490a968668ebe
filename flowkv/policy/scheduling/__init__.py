"""Schedulers of requests: one order each, driven by one mechanism in the engine and in `sim`."""

from flowkv.policy.scheduling.base import Scheduler
from flowkv.policy.scheduling.catalogue import SCHEDULERS, make_scheduler
from flowkv.policy.scheduling.fcfs import FirstCome
from flowkv.policy.scheduling.job import ASIDE, COMING, OVER, RUNNING, WAITING, Job
from flowkv.policy.scheduling.priority import Priority
from flowkv.policy.scheduling.shortest import Shortest
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
