"""FlowKV under other versions: `python -m tests.versions [--in DIR] [NAME...]`.

Makes an environment for each set of versions, runs the smoke set there, and prints the table that
docs/install.md shows; `--pins NAME` only prints the constraints of one, for pip. Interpreters are
those on the PATH, and what cannot be had is a row that says so. An environment takes 2 to 6 GB.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "transformers", "numba", "numpy")
EXTRAS = "hf,cli,report,testing"

SMOKE = (
    """
    tests/core tests/compiled tests/cache/test_steps.py tests/hooks/test_attach.py
    tests/tiers/test_frame.py tests/tiers/test_disk.py tests/policy/restore/test_conformance.py
""".split()
    + [
        f"tests/test_docs.py::test_page_runs[docs/{page}.md]"  # the checks are in them, one of each
        for page in """
        quickstart guides/policies guides/schedulers guides/tiers explain/codecs
    """.split()
    ]
)
"""What runs in each environment: the core, a cache, hooks, tiers, and all of `flowkv.testing`."""


QUIET = ("-W", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # says torch


class Versions(NamedTuple):
    """One environment.

    Attributes:
        python: "3.11", ...
        pins: Constraints of pip; the newest of what has none.
    """

    python: str
    pins: tuple[str, ...] = ()


def least() -> Iterator[str]:
    """The lower bounds of what FlowKV and its extras depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in project["dependencies"] + [
        one for name in EXTRAS.split(",") for one in extras[name]
    ]:
        if bound := re.match(r"([\w-]+)>=([\w.]+)", line):
            yield f"{bound[1]}=={bound[2]}"


SETS = {
    "oldest": Versions("3.11", tuple(least())),
    "newest-3.12": Versions("3.12"),
    "newest-3.13": Versions("3.13"),
    "newest-3.14": Versions("3.14"),
}


def run(log: Path, *command: str | Path) -> str | None:
    """What a command prints, which is added to a log; None if it failed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    with log.open("a") as told:
        print(*command, done.stdout, f"exit {done.returncode}", sep="\n", file=told)
    return None if done.returncode else done.stdout


def row(name: str, where: Path) -> tuple[str, ...]:
    """The cells of one set of versions."""
    wanted, log = SETS[name], where / f"{name}.log"
    python, begun = shutil.which(f"python{wanted.python}"), time.monotonic()
    none = ("-",) * len(SHOWN)
    if python is None or run(log, python, "--version") is None:
        return (name, wanted.python, *none, f"not tested: no Python {wanted.python} here")
    pins, bin = where / f"{name}.txt", where / name / "bin"
    pins.write_text("".join(f"{pin}\n" for pin in wanted.pins))
    pip = (bin / "pip", "install", "-q", "-c", pins)
    if run(log, python, "-m", "venv", where / name) is None or (
        run(log, *pip, "-e", f"{ROOT}[{EXTRAS}]", "pytest-timeout", "pytest-xdist", "accelerate")
        is None
    ):
        return (name, wanted.python, *none, f"not tested: cannot be installed, see {log.name}")
    made_s, begun = time.monotonic() - begun, time.monotonic()
    ask = (
        "import sys; from importlib.metadata import version as v; "
        f"print(sys.version.split()[0], *(v(name) for name in {SHOWN}))"
    )
    found = (run(log, bin / "python", "-c", ask) or "").split()
    passed = run(log, bin / "python", "-m", "pytest", "-q", "-n", "2", *QUIET, *SMOKE)
    said = re.findall(r"\d+ (?:passed|failed|errors?)", log.read_text().rpartition("short test")[2])
    verdict = ", ".join(said) or ("passed" if passed is not None else f"failed, see {log.name}")
    print(f"{name}: made in {made_s:.0f} s, run in {time.monotonic() - begun:.0f} s", flush=True)
    return (name, *found, verdict)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETS))
    parser.add_argument("--in", dest="where", type=Path, help="keep environments and logs there")
    parser.add_argument("--pins", choices=SETS, help="print constraints, and nothing else")
    given = parser.parse_args()
    if given.pins:
        print(*SETS[given.pins].pins, sep="\n")
        return
    with tempfile.TemporaryDirectory() as temporary:
        where = given.where or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        rows = [row(name, where.resolve()) for name in given.names or SETS]
        print("| set | Python |", " | ".join(SHOWN), "| smoke set |")
        print("|---|---|" + "---|" * len(SHOWN) + "---|")
        for cells in rows:
            print("|", " | ".join(cells), "|")
        if any("failed" in cells[-1] for cells in rows):
            sys.exit(1)


if __name__ == "__main__":
    main()
