"""All parts of a plan in one run, and the result as one value."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import msgspec
import torch

import flowkv
from bench.policy.finding import Finding
from bench.serve.beside import Beside, measure_beside
from bench.serve.ground import Ground
from bench.serve.promise import PARTS_OF, promises
from bench.serve.protocol import LOADS, Plan, Tell, measure_loads
from bench.serve.recommend import Advice, recommend
from bench.serve.row import Row
from bench.serve.soak import Soak, measure_soak
from bench.serve.steps import Steps, findings, measure_steps
from bench.serve.swap import Swaps, measure_swaps


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one run found.

    Attributes:
        model: Its name.
        machine: Processor or GPU, versions, and the load before the run.
        rows: System by system under each load.
        findings: Targets beside figures.
        advice: The best configuration that was found.
        soak: Long answers; None where they were not asked for, like the next three.
        steps: What a step takes beside the model.
        beside: Decodes beside restores.
        swaps: Preempted and resumed.
    """

    model: str
    machine: str
    rows: list[Row]
    findings: list[Finding]
    advice: Advice
    soak: Soak | None = None
    steps: list[Steps] = []
    beside: Beside | None = None
    swaps: Swaps | None = None


def measure_serving(ground: Ground, plan: Plan, tell: Tell | None = None) -> Report:
    """Measures what a plan asks for.

    Args:
        ground: The model.
        plan: What is measured.
        tell: Called with (done, all, what is going on).

    Raises:
        ConfigError: If a load does not fit the model.
    """
    machine = _machine(ground)
    rows = measure_loads(ground, plan, tell)
    special = _Special(plan, tell)
    setting = plan.setting
    steps = special("steps", lambda: measure_steps(ground, setting)) or []
    soak = special(
        "soak", lambda: measure_soak(ground, setting, rows=plan.soak_rows, tokens=plan.soak_tokens)
    )
    beside = special("beside", lambda: measure_beside(ground, setting))
    swaps = special("swap", lambda: measure_swaps(ground, setting, schedules=plan.swaps))
    found = [f for f in promises(rows) if PARTS_OF[f.group] in plan.parts]
    found += findings(steps) if steps else []
    found += [one.finding() for one in (soak, beside, swaps) if one is not None]
    return Report(
        model=ground.name,
        machine=machine,
        rows=rows,
        findings=found,
        advice=recommend(rows),
        soak=soak,
        steps=steps,
        beside=beside,
        swaps=swaps,
    )


class _Special:
    """Parts with measures of their own: done where the plan asks for them, and told of."""

    def __init__(self, plan: Plan, tell: Tell | None) -> None:
        self._parts, self._tell = plan.parts, tell
        self._all = [part for part in plan.parts if part not in LOADS]

    def __call__(self, part: str, measure: Callable[[], Any]) -> Any:
        if part not in self._parts:
            return None
        if self._tell is not None:
            self._tell(self._all.index(part), len(self._all), part)
        return measure()


def _machine(ground: Ground) -> str:
    device = ground.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
        f" {torch.__version__}, Python {platform.python_version()}, FlowKV {flowkv.__version__},"
        f" load {os.getloadavg()[0]:.1f}"
    )
