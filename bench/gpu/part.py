"""Parts of a whole run, in a process that the run started: rows of JSON on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from bench.gpu import model, rivals
from bench.gpu.kernels import compare, jobs
from bench.gpu.machine import Machine
from bench.gpu.whole import SECONDS

Row = dict[str, Any]
A, B = "decode 32 x 4k", "decode 1 x 128k"
CODECS = ("kv8", "k8v4", "kv4c", "kv4h")
FIRST = (A, *(f"{A} {c}" for c in CODECS), "prefill 1 x 2k", "prefill 1 x 16k", "transcode")
FIRST = (*FIRST, "transfers", B, *(f"{B} {c}" for c in CODECS), "moves", "cold")
"""Cases that the table shows: they come before all others."""
UNMEASURED = {"transfers", "stream"}
"""Those that compile nothing that others do not."""
COMPILING = ("attached", "engine", "codecs", "pressure", "batch")
"""Parts with a model that compile something; what they take then is told, too."""


def serve(names: Sequence[str], *, dry: bool) -> int:
    """Run parts by name, one after the other; stop early where the device answers no more."""
    rivals.RIVALS.pop("FlexAttention", None)  # half a minute of its compiler for each case
    if not dry and not torch.cuda.is_available():
        print("torch sees no CUDA device; --dry-run needs none", file=sys.stderr)
        return 2
    machine = Machine(dry)
    bed = model.Bed(machine)
    say(facts=machine.facts())
    for name in names:
        begun_s = time.perf_counter()
        say(begin=name)
        try:
            for row in rows_of(name, machine, bed):
                say(part=name, row=row)
        except Exception as error:  # of one part: the others have nothing to do with it
            say(part=name, failed=f"{type(error).__name__}: {error}"[:500])
            if not alive(machine):
                return 3
        say(end=name, s=time.perf_counter() - begun_s)
    return 0


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def alive(machine: Machine) -> bool:
    """Whether the device goes on after an error."""
    try:
        if not machine.dry:
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def rows_of(name: str, machine: Machine, bed: model.Bed) -> Iterator[Row]:
    """The rows of a part; "warm 2/10" compiles the third of ten shares of what all others need."""
    if name.startswith("warm"):
        number, count = map(int, name.split()[1].split("/"))
        return warm(Machine(machine.dry, warm=True), number, count)
    if name == "kernels":
        return kernels(machine)
    return model.PARTS[name](bed)


def kernels(machine: Machine) -> Iterator[Row]:
    """All cases, those of the table first."""
    torch.manual_seed(1)
    yield {"case": "ceilings", **machine.measure_limits()}
    results: list[Row] = []
    end_s = time.perf_counter() + 0.8 * SECONDS["kernels"]
    for name, job in ordered(machine):
        if time.perf_counter() > end_s:
            yield {"case": name, "failed": "There was no time left."}
            continue
        found = attempt(name, lambda job=job: job(machine))
        results += found
        compare(results)
        yield from found
        if not machine.dry:
            torch.cuda.empty_cache()


def ordered(machine: Machine, without: Collection[str] = ()) -> list[tuple[str, Any]]:
    place = {name: number for number, name in enumerate(FIRST)}
    found = [job for job in jobs(machine) if job[0] not in without]
    found.sort(key=lambda job: place.get(job[0], len(place)))
    return found[:2] if machine.dry else found


def warm(machine: Machine, number: int, count: int) -> Iterator[Row]:
    """A share of all calls, made once: what answers wrongly is told, and no kernel is timed."""
    machine.limits = defaultdict(lambda: 1.0)
    tasks: list[tuple[str, Callable[[], Iterable[Row]]]] = [
        (name, lambda name=name: model.PARTS[name](model.Bed(machine))) for name in COMPILING
    ]
    tasks += [(name, lambda job=job: job(machine)) for name, job in ordered(machine, UNMEASURED)]
    end_s = time.perf_counter() + 0.8 * SECONDS["warm"]
    for name, run in tasks[number::count]:
        if time.perf_counter() > end_s:
            return
        if not machine.dry:
            torch.cuda.empty_cache()  # others compile on the same device
        for row in attempt(name, run):
            if name in COMPILING or row.keys() & {"wrong", "failed"}:
                yield row | {"case": f"compiling: {row['case']}"}


def attempt(name: str, run: Callable[[], Any]) -> list[Row]:
    """The rows of a job, or one that says how it failed."""
    try:
        return list(run())
    except Exception as error:
        return [{"case": name, "failed": f"{type(error).__name__}: {error}"[:500]}]
