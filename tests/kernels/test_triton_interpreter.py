"""The Triton kernels are right: each group of `interpreted.py` in a process of its own.

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
TESTS = Path(__file__).with_name("interpreted.py")
GROUPS = ("few", "prefill", "suffix", "move")

pytest.importorskip("triton", reason="Triton is not installed here")


def test_every_test_is_in_a_group() -> None:
    names = [
        node.name
        for node in ast.parse(TESTS.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert names
    for name in names:
        assert name.split("_")[1] in GROUPS, f"{name}: no group would run it"


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "--durations=5"]
    command += ["-p", "no:cacheprovider", "-k", f"test_{group}_", str(TESTS)]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
