"""After `fork`: the child generates, the parent's cache and files are untouched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.parametrize(
    "cases", ["plain threaded", pytest.param("attaches hybrid locked", marks=pytest.mark.thorough)]
)
def test_a_child_generates(cases: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hooks.forked", str(tmp_path), *cases.split()]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, check=False, cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == cases.split()
