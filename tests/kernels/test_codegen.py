"""The Triton kernels compile well: no spills, little shared memory, few instructions an element.

`bench/codegen.py` cross-compiles them in a process of its own; no GPU is needed. A budget that
fails after a change of a kernel, or of Triton, is a slower kernel until a GPU says otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
EXACT = {"prefill-fp32"}  # float32 is multiplied exactly, out of registers that do not suffice
MMA = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}

pytest.importorskip("triton", reason="Triton is not installed here")


def compiled(arch: int, names: str) -> list[dict[str, Any]]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.codegen", "--arch", str(arch), "--json", "-k", names]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def keep_their_budget(arch: int, names: str) -> None:
    rows = compiled(arch, names)
    assert rows
    for row in rows:
        where = f"sm_{arch} {row['case']} {row['kernel']}: {row}"
        assert row["spills"] == 0 or row["case"] in EXACT, where
        assert row["shared_bytes"] <= SHARED_BYTES[arch], where
        if row["budget"] is not None:
            assert row["inst_per_el"] <= row["budget"], where
        if row["kernel"].startswith("attend") and "fp32" not in row["case"]:
            kind = MMA[arch] if row["kernel"] == "attend_many" else "HMMA"
            assert any(mma.startswith(kind) for mma in row["mma"]), where
            # K and V travel past the registers: a register copy of a tile is the classic mistake.
            assert any(op.startswith("LDGSTS") for op in row["loop_ops"]), where
        if row["kernel"] in ("append_kernel", "dense_kernel", "copy_kernel"):
            assert "LDG.E.128" in row["memory"] and "STG.E.128" in row["memory"], where


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        (80, "^(decode|prefill)$"),
        (90, "^(decode|decode-(d64|d256|p16|fp32|all)|verify)$"),
        (90, "^(prefill|prefill-(d64|d256|all)|suffix|merge|append|dense|copy)$"),
        (100, "^(decode|prefill)$"),
    ],
)
def test_kernels_keep_their_budget(arch: int, names: str) -> None:
    keep_their_budget(arch, names)


@pytest.mark.slow
def test_all_kernels_keep_their_budget() -> None:
    keep_their_budget(90, "")
