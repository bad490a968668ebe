"""What a launch costs in Python: FlowKV's way against Triton's, for the Triton that is installed.

    python -m bench.bench_launch            # a table
    python -m bench.bench_launch --json     # one JSON object

Needs no GPU: the launcher of a device that is not there does nothing, so what is left is what every
launch costs before a driver sees it. Times are the thread's own, the best of many rounds in which
both ways take turns, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import timeit
from collections.abc import Callable
from datetime import date
from typing import Any
from unittest import mock

import torch
import triton

from bench.codegen import CALLS, CASES, scene
from bench.nodevice import ARCHES, NoDevice, active, no_device
from flowkv.kernels.triton import launch as triton_launch

ARCH = "sm_90"
NAMES = ("decode", "append", "copy", "merge")


def best(*calls: Callable[[], object], rounds: int = 60, number: int = 200) -> list[float]:
    """Microseconds of each call, on the thread's clock."""
    for call in calls:
        call()
    times = [
        [timeit.timeit(call, number=number, timer=time.thread_time) for call in calls]
        for _ in range(rounds)
    ]
    return [1e6 * min(column) / number for column in zip(*times, strict=True)]


def launches(rounds: int = 60) -> list[dict[str, Any]]:
    """Both ways for each kernel of some operations."""
    rows = []
    for case in CASES:
        if case.name not in NAMES:
            continue
        with no_device(ARCH) as found:
            CALLS[case.op](scene(case))
        with active(NoDevice(ARCH)):
            for one in found:
                kernel, grid, args, constants = one.function, one.grid, one.args, one.constants
                direct, plain = best(
                    lambda: triton_launch.launch(kernel, grid, *args, **constants),  # noqa: B023
                    lambda: kernel[grid](*args, **constants),  # noqa: B023
                    rounds=rounds,
                )
                row = {"kernel": one.kernel, "arguments": len(args), "constants": len(constants)}
                rows.append(row | {"flowkv_us": round(direct, 2), "triton_us": round(plain, 2)})
    return rows


def calls() -> list[dict[str, Any]]:
    """All the Python of a call: checks, the choice of kernels and tiles, scratch, launches."""
    rows = []
    with mock.patch.object(triton_launch, "INTERPRETED", ARCHES[ARCH]), active(NoDevice(ARCH)):
        triton_launch.traits.cache_clear()
        for case in CASES:
            if case.name in NAMES:
                given = scene(case)
                (us,) = best(lambda: CALLS[case.op](given), number=50)  # noqa: B023
                rows.append({"call": case.op, "us": round(us, 1)})
        triton_launch.traits.cache_clear()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "bench": "launch",
        "label": "measured",
        "date": date.today().isoformat(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "launches": launches(),
        "calls": calls(),
    }
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(f"Triton {report['triton']}, microseconds of Python")
    for row in report["launches"]:
        ratio = row["triton_us"] / row["flowkv_us"]
        print(
            f"{row['kernel']:14} {row['arguments']:2} arguments, {row['constants']:2} constants:"
            f" {row['flowkv_us']:5.2f} against {row['triton_us']:5.2f} ({ratio:.1f}x)"
        )
    for row in report["calls"]:
        print(f"{row['call']:14} the whole call: {row['us']:.1f}")


if __name__ == "__main__":
    sys.exit(main())
