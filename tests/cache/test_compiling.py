"""Compiling takes no page from a restore, and no time into a rate."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cache.toy import check_content, make_kv, prefill, write
from tests.inside import DiskScheduler, compiling

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(16 * 8 + 3))
DEADLINE_S, COMPILES_S = 0.5, 1.0


@pytest.fixture(params=["a compiler", "a slow disk"])
def busy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the first batch of loads meets, for longer than the deadline."""
    finish, met = DiskScheduler._finish_loads, list[bool]()

    def slow(self: DiskScheduler, flights: list[Any]) -> Any:
        if flights and not met:
            met.append(True)
            compiles = request.param == "a compiler"
            with compiling.around() if compiles else contextlib.nullcontext():
                time.sleep(COMPILES_S)
        return finish(self, flights)

    monkeypatch.setattr(DiskScheduler, "_finish_loads", slow)
    return str(request.param)


@pytest.mark.parametrize("wait", [True, False])
def test_a_load_that_compiles_is_not_late(tmp_path: Path, busy: str, wait: bool) -> None:
    tiers = [f"disk:{tmp_path}:16MiB"]
    with make_kv(tiers=tiers) as kv:
        prefill(kv, kv.open(PROMPT)).close()
        assert kv.flush(60)
    with make_kv(tiers=tiers, load_deadline_s=DEADLINE_S) as kv:
        seq = kv.open(PROMPT, wait=wait)
        if (restoration := seq.restoration) is not None:
            restoration.complete()
            restoration.finish()
        measured = [rates.expected_s(1) for rates in kv.gate.rates.values() if rates.samples]
        if busy == "a compiler":
            assert seq.length == len(PROMPT) - 1
            assert not any(lane.overdue for lane in kv.planner.store.stack.mover.lanes)
            assert all(seconds < COMPILES_S for seconds in measured)
        else:  # so the deadline is one
            assert seq.length < len(PROMPT) // 8 * 8
        prefill(kv, seq)
        check_content(kv, seq, PROMPT)


def test_a_step_that_compiles_is_no_sample(tmp_path: Path) -> None:
    told: list[float] = []
    with make_kv() as kv:
        kv.planner.measured = lambda tokens, seconds, _: told.append(seconds)
        for compiled in (False, True, False):
            with kv.open(PROMPT, reuse=False) as seq:
                for step in kv.prefill([seq], chunk=len(PROMPT)):
                    write(step)
                    if compiled:
                        with compiling.around():
                            time.sleep(0.5)
    assert len(told) <= 2 and all(seconds < 0.5 for seconds in told)


PROGRAM = """
import json, sys
from flowkv import KV, Geometry
from flowkv.cache.restore import RestoreScheduler
from tests.cache.toy import check_content, prefill

arrived, lost = [0], [0]
inner = RestoreScheduler._arrived

def counted(self, flight):
    arrived[0] += 1
    lost[0] += flight.lost
    inner(self, flight)

RestoreScheduler._arrived = counted
directory = sys.argv[1]
shape = Geometry.uniform(layers=2, kv_heads=2, head_dim=64, page_size=64)
tiers = ["gpu:64MiB", f"disk:{directory}:256MiB"]
kv = KV(shape, namespace="toy", tiers=tiers, load_deadline_s=0.3)
reused = []
for n in range(3):
    seq = kv.open([(1000 * n + i) % 5000 for i in range(16 * 64 + 5)])
    reused.append(seq.reused)
    prefill(kv, seq, chunk=256)
    seq.close()
assert kv.flush(600)
samples = {name: rates.samples for name, rates in kv.gate.rates.items()}
overdue = [lane.overdue for lane in kv.planner.store.stack.mover.lanes]
print(json.dumps({"reused": reused, "lost": lost, "overdue": overdue, "samples": samples}))
kv.close()
"""


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_the_first_restart_after_an_installation(tmp_path: Path) -> None:
    """Two processes, each of which compiles all that it runs, with a deadline of 0.3 seconds."""
    said = []
    for process in range(2):
        env = os.environ | {
            "NUMBA_CACHE_DIR": str(tmp_path / f"cache{process}"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "kv")]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=700
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = said
    assert first["reused"] == [0, 0, 0]
    assert second["reused"] == [1024, 1024, 1024]
    assert second["lost"] == [0] and not any(second["overdue"])
