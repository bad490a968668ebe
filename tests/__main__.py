"""The test command: `python -m tests [--all | --thorough] [words for pytest]`.

Style and import contracts, then the rules of the house and the plain tests, and types beside them,
so that what fails in the first five minutes is most of what fails; then the other tests
(documentation snippets are among them): the fast ones, or with `--all` the thorough ones too. With
`--thorough`, or words for pytest, the tests are one stage; with `--thorough` only those run,
without the stages before. Each stage is timed; a failure is shown when it comes, and ends the run
with its stage.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
TYPES = [sys.executable, "-m", "mypy"]
STAGES = {
    "style": [sys.executable, "-m", "ruff", "check"],
    "format": [sys.executable, "-m", "ruff", "format", "--check"],
    "contracts": [str(SCRIPTS / "lint-imports"), "--no-logo"],
}
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
PYTEST += ["--durations", "40", "--durations-min", "5"]  # where the time goes
# One test compiles all kernels, first and beside tests that need none: nothing is compiled twice.
HOUSE = ["tests/test_cli.py::test_doctor_compiles_what_first_calls_would"]
HOUSE += ["tests/test_house.py", "tests/test_surface.py", "tests/test_testing.py"]
HOUSE += ["tests/core", "tests/compiled"]
USUAL = "not slow and not matrix and not deep and not nightly"
SETS = {  # the tests of each, as pytest's -m says it
    "": f"{USUAL} and not thorough",
    "--all": USUAL,
    "--thorough": f"{USUAL} and thorough",
}


RUNNING: list[subprocess.Popen[str]] = []


def run(name: str, command: list[str], quiet: bool) -> None:
    """Run one stage; a quiet one shows what it printed only if it fails."""
    start = time.monotonic()
    said = subprocess.PIPE if quiet else None
    with subprocess.Popen(
        command, cwd=ROOT, stdout=said, stderr=said and subprocess.STDOUT, text=True
    ) as process:
        RUNNING.append(process)
        text, _ = process.communicate()
        RUNNING.remove(process)
    verdict = {0: "ok", -signal.SIGTERM: "ended"}.get(process.returncode, "FAILED")
    if quiet and verdict == "FAILED":
        print(text, file=sys.stderr, flush=True)
    print(f"{name:<10} {verdict:<6} {time.monotonic() - start:7.1f} s", flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)


@contextmanager
def beside(name: str, command: list[str]) -> Iterator[Callable[[], None]]:
    """Run a quiet stage beside others. It ends with the first of them that fails.

    Yields:
        A function that waits for the stage, and fails with it.
    """
    with ThreadPoolExecutor(1) as pool:
        stage = pool.submit(run, name, command, quiet=True)
        try:
            yield stage.result
        finally:
            for process in [*RUNNING]:
                process.terminate()


def main(arguments: list[str]) -> None:
    """Run all stages in order, the cheap ones first."""
    start = time.monotonic()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every process would compile all it imports
    chosen = next((word for word in arguments if word in SETS), "")
    rest = [word for word in arguments if word not in SETS]
    pytest = [*PYTEST, "-m", SETS[chosen]]
    if chosen != "--thorough":
        with beside("types", TYPES) as types:  # they need a minute of one core
            for name, line in STAGES.items():
                run(name, line, quiet=True)
            if not rest:
                run("house", [*pytest, *HOUSE], quiet=False)
                rest = [f"--deselect={path}" for path in HOUSE]
            types()
    run("tests", [*pytest, *rest], quiet=False)
    print(f"{'all':<10} {'ok':<6} {time.monotonic() - start:7.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
