"""The page kernels: each case checked over poisoned memory first, then timed, beside its rivals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bench.gpu.attention import CASCADES, CASES, CHUNKED, attention, cascade, chunked
from bench.gpu.cold import cold
from bench.gpu.machine import Machine
from bench.gpu.moves import moves, seals, streamed
from bench.gpu.remade import remade
from bench.gpu.transfers import transfers

Job = tuple[str, Callable[[Machine], Iterable[dict[str, Any]]]]


def jobs(machine: Machine) -> Iterator[Job]:
    """Everything there is to do, by name."""
    for cases, run in ((CASES, attention), (CHUNKED, chunked), (CASCADES, cascade)):
        for case in cases:
            small = case.shrunk() if machine.dry else case
            yield case.name, lambda machine, run=run, case=small: [run(case, machine)]
    yield "moves", moves
    yield "transfers", transfers
    yield "remade", remade
    yield "transcode", seals
    yield "cold", cold
    yield "stream", lambda machine: [streamed(machine)]


def compare(results: list[dict[str, Any]]) -> None:
    """Say of each case how many times faster it is than the one it is a multiple of."""
    times = {result["case"]: result["us"] for result in results if "us" in result}
    for result in results:
        if "us" in result and result.get("of") in times:
            result["times"] = times[result["of"]] / result["us"]


def run(machine: Machine, names: str, keep: Callable[[list[dict[str, Any]]], None]) -> int:
    """Do all jobs whose name matches; how many results have no time."""
    results: list[dict[str, Any]] = []
    for name, job in jobs(machine):
        if not re.search(names, name):
            continue
        try:
            found = list(job(machine))
        except Exception as error:  # one case that fails must not take the others' results along
            if machine.dry:
                raise
            found = [{"case": name, "failed": f"{type(error).__name__}: {error}"[:500]}]
        results += found
        compare(results)
        for result in found:
            sound = machine.dry and "us" in result
            print(
                json.dumps({"case": result["case"], "ran": True} if sound else result), flush=True
            )
        keep(results)
        if not machine.dry:
            torch.cuda.empty_cache()
    return sum("us" not in result for result in results)
