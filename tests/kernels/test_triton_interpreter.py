"""The Triton kernels are right: each group of `interpreted*.py` in a process of its own.

Triton decides when it is imported whether it interprets, so neither the other tests' process nor
the process that compiles kernels can do it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUPS: dict[str, set[Path]] = {}
"""Where the tests of a group stand; it is the second word of their names."""
for path in sorted(Path(__file__).parent.glob("interpreted*.py")):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            GROUPS.setdefault(node.name.split("_")[1], set()).add(path)

pytest.importorskip("triton", reason="Triton is not installed here")


def test_groups_are_a_few_processes_for_many_tests() -> None:
    assert 5 <= len(GROUPS) <= 20 and len(set.union(*GROUPS.values())) >= 2


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: str, marks: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "--durations=5"]
    command += ["-m", f"{marks} and not matrix and not deep and not nightly"]
    command += ["-p", "no:cacheprovider", "-k", f"test_{group}_"]
    command += map(str, GROUPS[group])
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    chosen_none = marks == "slow" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert chosen_none or done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
