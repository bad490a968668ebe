"""One process of the demo: `python -m flowkv.demo TASK.json`, started by `flowkv.demo.run`.

The process writes one JSON object per line on standard output: progress and notes, then its
findings, or the reason of its failure.
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
from flowkv.demo.findings import DemoMessage, DemoTask


def main() -> int:
    """Run the task, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flowkv.demo")
    parser.add_argument("task", type=Path)
    given, pipe = parser.parse_args(), sys.stdout

    def tell(message: DemoMessage) -> None:
        pipe.write(msgspec.json.encode(message).decode() + "\n")
        pipe.flush()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:  # such as FlowKV's own; other kinds are for developers
            tell(DemoMessage(note=str(message)))

    # Output of libraries goes to standard error: the pipe carries messages only.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.showwarning = show
        tell(DemoMessage(total=1, doing="importing torch"))
        from flowkv.demo.process import run_task

        task = msgspec.json.decode(given.task.read_bytes(), type=DemoTask)
        try:
            tell(DemoMessage(found=run_task(task, lambda *said: tell(DemoMessage(*said)))))
        except FlowKVError as error:
            tell(DemoMessage(problem=error.problem, remedy=error.remedy))
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
