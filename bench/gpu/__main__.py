"""The page kernels on one GPU: checked first, then timed, in one call.

    python -m bench.gpu                  # writes bench/results/gpu-<device>.json
    python -m bench.gpu -k "32 x 4k"     # only cases whose names match; prints, writes nothing
    python -m bench.gpu --dry-run        # every case, tiny, on the CPU: nothing is timed
    python -m bench.render               # the figures into docs/benchmarks/

Each case runs over fresh random data in several sets that together exceed the L2 cache, and answers
over poisoned memory; a case that answers wrongly is reported and not timed. Calls are captured in
CUDA graphs, as engines do, and replayed in turn over the sets; times are medians, from events.
Ceilings are measured in the same run: reading and copying device memory, to and from pinned memory,
and a bfloat16 matrix product. FlashInfer and vLLM's kernel run where they can be imported
(`bench/gpu/vllm_shim.py`); what is absent is skipped with a sentence. Restores run last, beside
their lower bound; `python -m bench restore --engine cuda --full` is all of their protocol.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.attention import CASCADES, CASES, CHUNKED, attention, cascade, chunked
from bench.gpu.machine import Machine
from bench.gpu.moves import moves, seals, streamed
from bench.gpu.remade import remade
from bench.gpu.restores import restores
from bench.gpu.transfers import transfers

RESULTS = Path(__file__).resolve().parents[1] / "results"
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
    yield "stream", lambda machine: [streamed(machine)]
    yield "restore", restores


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", help="only cases in whose name this pattern is found")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases, on the CPU, no times")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA device; --dry-run needs none", file=sys.stderr)
        return 2
    torch.manual_seed(0 if args.dry_run else int.from_bytes(os.urandom(4), "little"))
    machine = Machine(args.dry_run)
    machine.measure_limits()
    report = machine.facts() | {"bench": "gpu", "ceilings": machine.limits}
    print(json.dumps(report), flush=True)
    slug = re.sub(r"\W+", "-", report["device"].lower())

    def keep(results: list[dict[str, Any]]) -> None:
        if not args.dry_run and not args.k:
            args.out.mkdir(parents=True, exist_ok=True)
            whole = json.dumps(report | {"results": results}, indent=1)
            (args.out / f"gpu-{slug}.json").write_text(whole + "\n")

    bad = run(machine, args.k, keep)
    print(f"{bad} cases without a time", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
