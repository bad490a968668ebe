"""FlowKV on one GPU: its kernels, or all of it in one call.

    python -m bench.gpu --whole          # six minutes: tests, kernels, an 8B model; prints a table
    python -m bench.gpu                  # the kernels; both write bench/results/gpu-<device>.json
    python -m bench.gpu -k "32 x 4k"     # only cases whose names match; prints, writes nothing
    python -m bench.gpu --table FILE     # the table of a whole run, also of one that was cut off
    python -m bench.gpu --dry-run        # tiny, on the CPU, no times; also with --whole
    python -m bench.render               # the figures into docs/benchmarks/

Each case runs over fresh random data in several sets that together exceed the L2 cache, and answers
over poisoned memory; a case that answers wrongly is reported and not timed. Calls are captured in
CUDA graphs, as engines do, and replayed in turn over the sets; times are medians, from events.
Ceilings are measured in the same run: reading and copying device memory, to and from pinned memory,
and a bfloat16 matrix product. FlashInfer and vLLM's kernel run where they can be imported
(`bench/gpu/vllm_shim.py`); what is absent is skipped with a sentence.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.gpu import whole

RESULTS = Path(__file__).resolve().parents[1] / "results"


def kernels(names: str, out: Path, *, dry: bool) -> int:
    """Check and time the kernels whose cases match; the exit status."""
    import torch

    from bench.gpu.kernels import run
    from bench.gpu.machine import Machine

    if not dry and not torch.cuda.is_available():
        print("torch sees no CUDA device; --dry-run needs none", file=sys.stderr)
        return 2
    torch.manual_seed(0 if dry else int.from_bytes(os.urandom(4), "little"))
    machine = Machine(dry)
    machine.measure_limits()
    report = machine.facts() | {"bench": "gpu", "ceilings": machine.limits}
    print(json.dumps(report), flush=True)
    slug = re.sub(r"\W+", "-", report["device"].lower())

    def keep(results: list[dict[str, Any]]) -> None:
        if not dry and not names:
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report | {"results": results}, indent=1)
            (out / f"gpu-{slug}.json").write_text(text + "\n")

    bad = run(machine, names, keep)
    print(f"{bad} cases without a time", file=sys.stderr)
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", help="only cases in whose name this pattern is found")
    parser.add_argument("--whole", action="store_true", help="tests, kernels and an 8B model")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases, on the CPU, no times")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=345.0, help="that a whole run may take")
    parser.add_argument("--only", default=",".join(whole.SECONDS), help="parts of a whole run")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show a whole run's results")
    parser.add_argument("--parts", help=argparse.SUPPRESS)  # how a whole run starts its processes
    args = parser.parse_args()
    if args.table:
        print(whole.table(json.loads(args.table.read_text())))
        return 0
    if args.parts:
        from bench.gpu.part import serve

        return serve(args.parts.split(","), dry=args.dry_run)
    if not args.whole:
        return kernels(args.k, args.out or RESULTS, dry=args.dry_run)
    with tempfile.TemporaryDirectory() as nowhere:
        out = args.out or (Path(nowhere) if args.dry_run else RESULTS)
        only = args.only.split(",")
        return whole.Whole(out, args.seconds, dry=args.dry_run, only=only).run()


if __name__ == "__main__":
    sys.exit(main())
