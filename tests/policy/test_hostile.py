"""Numbers that are no slots end in an error or in nothing, never in the end of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flowkv.policy import CATALOGUE


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_number_leads_out_of_the_arrays(seed: int) -> None:
    line = [sys.executable, "-X", "faulthandler", "-m", "tests.policy.hostile", str(seed)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*sorted(CATALOGUE), "by-score"]
