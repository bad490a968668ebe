"""One process of the demo: `python -m flowkv.demo --phase store|restore --work DIR`.

It finds its plan in the working directory and writes one JSON object per line on standard output:
progress, then a result or an error. `flowkv.demo.run` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec

from flowkv.core.errors import FlowKVError
from flowkv.demo.records import FINDINGS, PLAN, DemoPlan, Findings


def main() -> int:
    """Runs one phase; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flowkv.demo")
    parser.add_argument("--phase", choices=("store", "restore"), required=True)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    pipe = sys.stdout

    def tell(message: dict[str, Any]) -> None:
        pipe.write(msgspec.json.encode(message).decode() + "\n")
        pipe.flush()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:  # such as FlowKV's own; the rest is for developers
            tell({"note": str(message)})

    # Whatever a library prints goes to standard error: the pipe carries messages only.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.showwarning = show
        try:
            _run(arguments.phase, arguments.work, tell)
        except FlowKVError as error:
            tell({"problem": error.problem, "remedy": error.remedy})
            return 2
    return 0


def _run(phase: str, work: Path, tell: Any) -> None:
    tell({"done": 0, "total": 1, "doing": "importing torch"})
    from flowkv.demo.run import restore_phase, store_phase

    def progress(done: int, total: int, doing: str) -> None:
        tell({"done": done, "total": total, "doing": doing})

    plan = msgspec.json.decode((work / PLAN).read_bytes(), type=DemoPlan)
    if phase == "store":
        found = store_phase(plan, work, progress)
    else:
        stored = msgspec.json.decode((work / FINDINGS.format("store")).read_bytes(), type=Findings)
        found = restore_phase(plan, work, stored.cases, progress)
    (work / FINDINGS.format(phase)).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    sys.exit(main())
