"""Torch makes tensors elsewhere unless asked: FlowKV's own stay where the model computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flowkv import kernels
from tests.hooks import elsewhere
from tests.inside import GeometryError, address


def test_a_default_device_of_torch_changes_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere.main("attach", "default", "llama")
    assert " reused " in capsys.readouterr().out


@pytest.mark.thorough
def test_nor_does_it_in_a_process_of_its_own() -> None:
    """A process, since what it tests once ended the process."""
    cases = """
        forwards:context:llama forwards:context:llama/kv8 forwards:patched:llama
        attach:context:llama/kv8 attach:patched:llama forwards:default:llama
        forwards:context:gemma3 forwards:context:falcon_h1
    """.split()
    done = subprocess.run(
        [sys.executable, "-m", elsewhere.__name__, *cases],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("reused ") == len(cases), done.stdout


def test_compiled_kernels_get_no_address_of_another_device() -> None:
    with pytest.raises(GeometryError, match="a tensor on meta"):
        address(torch.empty(4, device="meta"))


def test_kernels_make_their_tensors_beside_their_operands() -> None:
    parts = [(torch.ones(2, 2, 8), torch.zeros(2, 2)) for _ in range(2)]
    words = torch.from_numpy(np.arange(64))
    with torch.device("meta"):
        merged, _ = kernels.merge(parts)
        sums = kernels.checksum(words, 16)
    assert torch.equal(merged, parts[0][0]) and sums.device.type == "cpu"
