"""After `fork`: the child generates, the parent's cache and files are untouched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        *(pytest.param(c, marks=pytest.mark.thorough) for c in ("attaches", "hybrid", "locked")),
    ],
)
def test_a_child_generates(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hooks.forked", case, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, check=False, cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "well\n"
