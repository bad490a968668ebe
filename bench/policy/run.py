"""All promises in one run, and the result as one value."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import msgspec

import flowkv
from bench.policy.cost import cost
from bench.policy.finding import Finding, summary
from bench.policy.ground import PUBLIC, Ground, Replays, grounds
from bench.policy.replayed import bursts, closure, floor, hints, prefetch, warm_start
from bench.policy.streams import chains

Tell = Callable[[int, int, str], None]


class Report(msgspec.Struct, frozen=True):
    """What one run found.

    Attributes:
        quick: Whether only the beginnings of traces were replayed; such figures judge nothing.
        traces: What was replayed.
        public: Whether public traces were there.
        machine: Processor, versions and load before the run; costs are this machine's.
        summary: How many targets are met, missed and not measured.
        findings: Target by target.
    """

    quick: bool
    traces: list[str]
    public: bool
    machine: str
    summary: dict[str, int]
    findings: list[dict[str, Any]]


def measure_policies(*, quick: bool = False, tell: Tell | None = None) -> Report:
    """Measures every promise about policies, prefetch and the simulator.

    Args:
        quick: Replay 1,500 requests of each trace, and time less.
        tell: Called with (done, all, what is going on).

    Returns:
        Targets beside figures.
    """
    steps: list[tuple[str, Callable[[list[Ground], Replays], list[Finding]]]] = [
        *(("closure", closure), ("floor", floor), ("hints", hints), ("prefetch", prefetch)),
        *(("bursts", bursts), ("warm start", lambda found, _: warm_start(found))),
        ("costs", lambda found, _: cost(found, quick)),
        ("chains", lambda _, __: chains(quick)),
    ]
    say = tell or (lambda _done, _all, _doing: None)
    load = os.getloadavg()[0]  # of others; costs on a busy machine are too high
    say(0, len(steps) + 1, "reading traces")
    given, replays = grounds(quick), Replays()
    findings: list[Finding] = []
    for number, (label, step) in enumerate(steps, 1):
        say(number, len(steps) + 1, label)
        findings += step(given, replays)
    return Report(
        quick=quick,
        traces=[ground.trace.name for ground in given],
        public=bool(os.environ.get(PUBLIC)),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}, FlowKV {flowkv.__version__}, load {load:.1f}",
        summary=summary(findings),
        findings=[{**msgspec.structs.asdict(f), "met": f.met} for f in findings],
    )
