"""MLPerf Storage's benchmark over other backends, with a stand-in for its checkout."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import mlperf
from bench.__main__ import main
from tests.inside import ConfigError

MODEL = SimpleNamespace(num_layers=2, kv_cache_size_per_token=4096)
"""Pages of 256 KiB in two stripes, chunks of 1 MiB."""

FILES = {
    "__init__": "",
    "models": """
from types import SimpleNamespace
MODEL_CONFIGS = {"tiny": SimpleNamespace(num_layers=2, kv_cache_size_per_token=4096)}
""",
    "backends": """
import time
from dataclasses import dataclass
import numpy as np
class StorageBackend:
    @dataclass
    class IOTiming:
        total: float
        device: float
        host: float
class Files(StorageBackend):
    def __init__(self, place):
        self.place = place
        place.mkdir()
    def write(self, key, data):
        np.save(self.place / f"{key}.npy", data)
        return self.IOTiming(0.5, 0.5, 0.0)
    def read(self, key):
        return np.load(self.place / f"{key}.npy"), self.IOTiming(0.25, 0.25, 0.0)
    def delete(self, key):
        (self.place / f"{key}.npy").unlink()
""",
    "benchmark": """
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from kv_cache.backends import Files
class IntegratedBenchmark:
    def __init__(self, model, num_users, gpu_memory_gb, cpu_memory_gb, duration_seconds,
                 cache_dir, seed, storage_capacity_gb):
        assert gpu_memory_gb == cpu_memory_gb == 0 and storage_capacity_gb == 1
        self.cache = SimpleNamespace(backends={"nvme": Files(Path(cache_dir))})
        self.users = num_users
    def run(self):
        if self.users == 99:
            return {}  # as for want of time
        backend, times, read_bytes = self.cache.backends["nvme"], [], 0
        print("pages of text")
        for n, tokens in enumerate((1, 63, 64, 65, 700)):
            data = np.random.randint(0, 999, (2, 2, tokens, 2, 256), np.int16)
            times.append(backend.write(f"k{n}", data).total)
            found, took = backend.read(f"k{n}")
            assert np.array_equal(found, data) and took.total > 0, "wrong bytes"
            read_bytes += found.nbytes
        backend.delete("k0")
        stats = {"read_iops": 5, "write_iops": 5, "total_read_bytes": read_bytes,
                 "total_write_bytes": 2 * read_bytes, "storage_read_p50_ms": 4.0}
        return {"summary": {"cache_stats": stats, "elapsed_time": 2.0}}
""",
}  # fmt: skip


def checkout_in(folder: Path) -> Path:
    package = folder / "kv_cache_benchmark" / "kv_cache"
    package.mkdir(parents=True)
    for name, body in FILES.items():
        (package / f"{name}.py").write_text(body)
    return folder


def test_each_backend_runs_the_checkout_s_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entries of odd sizes come back, and the figures are those of its summary."""
    out = tmp_path / "out.json"
    said = ["mlperf", "--checkout", str(checkout_in(tmp_path / "theirs")), "--model", "tiny"]
    said += ["--gib", "1", "--rounds", "1", "--directory", str(tmp_path), "--out", str(out)]
    assert main([*said, "--backends", "reference,flowkv-sync"]) == 0
    shown = capsys.readouterr().out
    assert "no submission" in shown and "pages of text" not in shown
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["reference", "flowkv-sync"]
    for (row,) in rows.values():
        assert row["failed"] == 0.0 and row["reads/s"] == row["writes/s"] == 2.5
        assert row["write GB/s"] == 2 * row["read GB/s"] == 893 * 4096 / 1e9
        assert row["read p50, ms"] == 4.0
    assert [path.name for path in tmp_path.iterdir() if "bench-mlperf" in path.name] == []


def test_what_is_no_checkout_and_no_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mlperf", "--checkout", str(tmp_path)]) != 0
    assert "Name a checkout of github.com/mlcommons/storage" in capsys.readouterr().err
    theirs = str(checkout_in(tmp_path / "theirs"))
    assert main(["mlperf", "--checkout", theirs, "--backends", "floppy"]) != 0
    assert "Use reference, flowkv-sync" in capsys.readouterr().err
    said = ["--model", "tiny", "--gib", "1", "--backends", "reference", "--users", "99"]
    assert main(["mlperf", "--checkout", theirs, "--directory", str(tmp_path), *said]) != 0
    assert "Use more --seconds, or a smaller --model" in capsys.readouterr().err


def backends(folder: Path) -> list[mlperf.Pieces]:
    mlperf.Pieces.timing = SimpleNamespace
    made: list[mlperf.Pieces] = [mlperf.FlowKV(folder / "tier", MODEL, 1 << 28, "none")]
    if all(map(importlib.util.find_spec, ("lmcache", "aiofiles"))):
        made.append(mlperf.LMCache(folder / "cached", MODEL, direct=False))
        made.append(mlperf.LMCache(folder / "direct", MODEL, direct=True))
    return made


def test_threads_get_their_own_entries(tmp_path: Path) -> None:
    """Each writes, reads and deletes beside the others, with which it shares the interface."""
    for backend in backends(tmp_path):
        wrong: list[str] = []

        def work(name: int, backend: Any = backend, wrong: list[str] = wrong) -> None:
            rng = np.random.default_rng(name)
            for n in range(8):
                data = rng.integers(0, 99, (2, 2, int(rng.integers(1, 600)), 2, 256), np.int16)
                backend.write(f"{name} {n}", data)
                found, took = backend.read(f"{name} {n}")
                if not np.array_equal(found, data) or took.total <= 0:
                    wrong.append(f"{name} {n}")
                if n % 2:
                    backend.delete(f"{name} {n}")

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not wrong and backend.failed == 0
        with pytest.raises(KeyError):
            backend.read("0 1")
        backend.clear()
        with pytest.raises(KeyError):
            backend.read("0 0")


def test_what_was_lost_is_a_failure(tmp_path: Path) -> None:
    """The reference would count it as a read, and swallow the error."""
    for backend in backends(tmp_path):
        data = np.ones((2, 2, 100, 2, 256), np.int16)
        backend.write("here", data)
        keys, _ = backend._entries["here"]
        backend.forget(keys[-1:])
        with pytest.raises(OSError, match="not loaded"):
            backend.read("here")
        assert backend.failed == 1


def test_wrong_bytes_end_the_run() -> None:
    class Forgetful:
        def write(self, key: str, data: Any) -> None:
            self.data = np.zeros_like(data)

        def read(self, key: str) -> tuple[Any, None]:
            return self.data, None

    with pytest.raises(ConfigError, match="wrong bytes"):
        mlperf.check(Forgetful(), 4096)
