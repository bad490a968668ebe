"""`python -m bench mlperf`: MLPerf Storage's KV cache workload over the disk tier, unofficially.

The workload and all figures are the reference's own, of a checkout of github.com/mlcommons/storage;
only its `StorageBackend` is replaced. Without memory tiers every entry, which is the K and V of a
whole request, is on the disk: one file of the reference, pages of 64 tokens of FlowKV, chunks of
256 of LMCache. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import random
import select
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.figures import save
from flowkv.cli.arguments import AddVerb, count, names
from flowkv.core.errors import ConfigError
from flowkv.core.memory import own_memory
from flowkv.report.screen import Screen
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier

PAGE_TOKENS, CHUNK_TOKENS = 64, 256
BACKENDS = {
    "reference": "reference: np.save, fsync",
    "flowkv-sync": "FlowKV, synced",
    "flowkv": "FlowKV",
    "lmcache-direct": "LMCache fs, O_DIRECT",
    "lmcache": "LMCache fs, page cache",
}
_DEADLINE_S = 600.0


class Pieces:
    """A `StorageBackend` over an interface that reports the ends of all threads' tasks.

    A thread reads into memory that it keeps, as engines do: an array is good until its next read.

    Args:
        piece_bytes: Bytes of the pieces of an entry; the last one may have fewer.

    Attributes:
        failed: Number of entries that were not stored, or not loaded.
    """

    timing: Any

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes, self.failed, self._memory = piece_bytes, 0, threading.local()
        self._entries: dict[str, tuple[list[bytes], NDArray[Any]]] = {}
        self._results: dict[int, list[bool]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, daemon=True).start()

    def write(self, key: str, data: NDArray[Any]) -> Any:
        start, pieces = time.perf_counter(), -(-data.nbytes // self.piece_bytes)
        keys = [hashlib.sha256(f"{key} {n}".encode()).digest() for n in range(pieces)]
        self._entries[key] = keys, np.broadcast_to(data.dtype.type(0), data.shape)
        self._finish(*self.store(keys, self.cut(data.reshape(-1).view(np.uint8).data)))
        return self._took(start)

    def read(self, key: str) -> tuple[NDArray[Any], Any]:
        start, (keys, like) = time.perf_counter(), self._entries[key]
        target = self.own(like.nbytes)
        self._finish(*self.load(keys, self.cut(target)))
        return np.frombuffer(target, like.dtype).reshape(like.shape), self._took(start)

    def delete(self, key: str) -> None:
        if key in self._entries:
            self.forget(self._entries.pop(key)[0])

    def clear(self) -> None:
        for key in [*self._entries]:
            self.delete(key)

    def cut(self, body: memoryview) -> list[memoryview]:
        return [body[at : at + self.piece_bytes] for at in range(0, len(body), self.piece_bytes)]

    def own(self, n_bytes: int) -> memoryview:
        """Return memory of this thread, aligned as direct I/O needs it."""
        held: memoryview | None = getattr(self._memory, "held", None)
        if held is None or len(held) < n_bytes:
            held = self._memory.held = own_memory(n_bytes)
        return held[:n_bytes]

    def store(self, keys: list[bytes], bodies: list[memoryview]) -> tuple[int, int]:
        """Start a task; return its number, and the number of its results."""
        raise NotImplementedError

    def load(self, keys: list[bytes], targets: list[memoryview]) -> tuple[int, int]:
        """Start a task; return its number, and the number of its results."""
        raise NotImplementedError

    def forget(self, keys: list[bytes]) -> None:
        raise NotImplementedError

    def poll(self) -> Iterator[tuple[int, bool]]:
        """Wait a little for results; yield each with the number of its task."""
        raise NotImplementedError

    def _finish(self, number: int, results: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._results.get(number, ())) == results)
            good = all(self._results.pop(number))
            self.failed += not good
        if not good:
            raise OSError("an entry was not stored, or not loaded")

    def _took(self, start: float) -> Any:
        took = time.perf_counter() - start
        return self.timing(total=took, device=took, host=0.0)

    def _watch(self) -> None:
        while True:
            for number, good in self.poll():
                with self._changed:
                    self._results.setdefault(number, []).append(good)
                    self._changed.notify_all()


class FlowKV(Pieces):
    """The disk tier: direct I/O, and digests of all that is read are checked."""

    def __init__(self, directory: Path, model: Any, room: int, durability: Any) -> None:
        self._tier = DiskTier(directory, room, durability=durability, queue_bytes=1 << 40)
        super().__init__(PAGE_TOKENS * model.kv_cache_size_per_token)
        self._stripe_bytes = self.piece_bytes // model.num_layers

    def store(self, keys: list[bytes], bodies: list[memoryview]) -> tuple[int, int]:
        items = []
        for key, body in zip(keys, bodies, strict=True):
            stripe = self._stripe_bytes if len(body) == self.piece_bytes else len(body)
            ids = bytes(16), bytes(32), bytes(32)
            info = FrameInfo("page", 0, 0, *ids, 0, PAGE_TOKENS, stripe)
            items.append(Store(key, info, body))
        return self._tier.submit_store(items, deadline_s=_DEADLINE_S), len(items)

    def load(self, keys: list[bytes], targets: list[memoryview]) -> tuple[int, int]:
        both = zip(keys, targets, strict=True)
        items = [Load(key, target, bytes(16), direct=True) for key, target in both]
        return self._tier.submit_load(items, deadline_s=_DEADLINE_S), len(items)

    def forget(self, keys: list[bytes]) -> None:
        self._tier.delete(keys)

    def poll(self) -> Iterator[tuple[int, bool]]:
        for answer in self._tier.poll(0.2):
            yield answer.job, answer.outcome in (Outcome.HIT, Outcome.STORED)


class LMCache(Pieces):
    """LMCache's `fs` adapter: a file a chunk; nothing is checked or synced."""

    def __init__(self, directory: Path, model: Any, *, direct: bool) -> None:
        self._api = importlib.import_module("lmcache.v1.distributed.api")
        module = importlib.import_module("lmcache.v1.distributed.l2_adapters.fs_l2_adapter")
        config = module.FSL2AdapterConfig(str(directory), use_odirect=direct)
        self._adapter, self._direct = module.FSL2Adapter(config), direct
        self._loading, self._lock = set[int](), threading.Lock()
        super().__init__(CHUNK_TOKENS * model.kv_cache_size_per_token)

    def store(self, keys: list[bytes], bodies: list[memoryview]) -> tuple[int, int]:
        if self._direct:  # needs aligned memory, as LMCache's own is
            copied = self.cut(self.own(sum(map(len, bodies))))
            for target, body in zip(copied, bodies, strict=True):
                target[:] = body
            bodies = copied
        return self._adapter.submit_store_task(*self._objects(keys, bodies)), 1

    def load(self, keys: list[bytes], targets: list[memoryview]) -> tuple[int, int]:
        with self._lock:
            number = self._adapter.submit_load_task(*self._objects(keys, targets))
            self._loading.add(number)
        return number, 1

    def forget(self, keys: list[bytes]) -> None:
        self._adapter.delete(self._objects(keys, [])[0])

    def poll(self) -> Iterator[tuple[int, bool]]:
        one = self._adapter
        ends = one.get_store_event_fd(), one.get_load_event_fd()
        for fd in select.select(ends, (), (), 0.2)[0]:
            os.read(fd, 8)
        for number, result in one.pop_completed_store_tasks().items():
            yield number, result.is_successful()
        with self._lock:
            loading = [*self._loading]
        for number in loading:
            if (loaded := one.query_load_result(number)) is not None:
                self._loading.discard(number)
                yield number, loaded.popcount() == loaded.size()

    def _objects(self, keys: list[bytes], bodies: list[memoryview]) -> tuple[Any, Any]:
        named = [self._api.ObjectKey(key, "mlperf", 0) for key in keys]
        return named, [SimpleNamespace(byte_array=body) for body in bodies]


def run_one(name: str, seed: int, place: Path, told: dict[str, Any]) -> dict[str, float]:
    """Run the reference's benchmark over one backend; return figures of its summary."""
    sys.path.insert(0, told["checkout"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reference prints pages
    kinds = ("benchmark", "models", "backends")
    whole, models, theirs = (importlib.import_module(f"kv_cache.{kind}") for kind in kinds)
    Pieces.timing, model = theirs.StorageBackend.IOTiming, models.MODEL_CONFIGS[told["model"]]
    random.seed(seed)
    np.random.seed(seed)
    how = {"gpu_memory_gb": 0, "cpu_memory_gb": 0, "storage_capacity_gb": told["gib"], "seed": seed}
    how |= {"num_users": told["users"], "duration_seconds": told["seconds"]}
    made = whole.IntegratedBenchmark(model, cache_dir=str(place / "files"), **how)
    own = made.cache.backends["nvme"]
    if name.startswith("flowkv"):
        room = (2 * told["gib"] + 1) << 30  # the reference deletes late
        own = FlowKV(place / "tier", model, room, "sync" if name[6:] else "none")
    elif name.startswith("lmcache"):
        own = LMCache(place / "adapter", model, direct=bool(name[7:]))
    check(own, model.kv_cache_size_per_token)
    made.cache.backends["nvme"] = own
    summary = made.run().get("summary")
    if summary is None:
        raise ConfigError(
            f"{BACKENDS[name]}: no request was over after {told['seconds']} s",
            "Use more --seconds, or a smaller --model",
        )
    stats, found = summary["cache_stats"], dict[str, float](failed=getattr(own, "failed", 0))
    for what in ("read", "write"):
        found[f"{what}s/s"] = stats[f"{what}_iops"] / summary["elapsed_time"]
        found[f"{what} GB/s"] = stats[f"total_{what}_bytes"] / 1e9 / summary["elapsed_time"]
        for q in ("p50", "p95", "p99"):
            found[f"{what} {q}, ms"] = stats.get(f"storage_{what}_{q}_ms", 0.0)
    return {key: float(value) for key, value in found.items()}


def check(backend: Any, token_bytes: int) -> None:
    """Write, read and compare an entry: a benchmark of wrong bytes is none."""
    data = np.frombuffer(np.random.default_rng(0).bytes(1000 * token_bytes), np.float16)
    backend.write("check", data.reshape(1, 2, 1000, 1, -1))
    if backend.read("check")[0].tobytes() != data.tobytes():
        raise ConfigError("the backend returns wrong bytes", "Report this")
    backend.delete("check")


def _mlperf(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    whole = given.checkout / "kv_cache_benchmark"
    checkout = (whole if whole.is_dir() else given.checkout).resolve()
    if not (checkout / "kv_cache" / "backends.py").is_file():
        raise ConfigError(
            f"{given.checkout} has no kv_cache_benchmark/kv_cache/backends.py",
            "Name a checkout of github.com/mlcommons/storage, version 3 or newer",
        )
    if unknown := [name for name in given.backends if name not in BACKENDS]:
        raise ConfigError(f"backend {unknown[0]!r} is unknown", f"Use {', '.join(BACKENDS)}")
    there = all(map(importlib.util.find_spec, ("lmcache", "aiofiles")))
    backends = [name for name in given.backends if there or not name.startswith("lmcache")]
    if backends != given.backends:
        screen.say("LMCache is not installed, or aiofiles, which it needs: its rows are left out.")
    told = {name: getattr(given, name) for name in ("model", "users", "seconds", "gib", "rounds")}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in backends}
    for seed in range(given.rounds):
        for name in backends:
            scratch = tempfile.TemporaryDirectory(dir=given.directory, prefix="bench-mlperf-")
            with scratch as place, ProcessPoolExecutor(1, get_context("spawn")) as pool:
                os.sync()
                how = told | {"checkout": str(checkout)}
                rows[name].append(pool.submit(run_one, name, seed, Path(place), how).result())
    lines = [
        [figure, *(f"{np.median([row[figure] for row in rows[name]]):,.3g}" for name in backends)]
        for figure in rows[backends[0]][0]
    ]
    title = ", ".join(f"{name} {value}" for name, value in told.items())
    screen.table(["medians", *(BACKENDS[name] for name in backends)], lines, title=title)
    screen.say("Unofficial: this is no submission to MLPerf Storage.")
    found = {**told, "rows": rows}
    save(given.out, found)
    return 0, found


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("mlperf", _mlperf, "MLPerf Storage's KV cache workload on disks, unofficially")
    about = "a checkout of github.com/mlcommons/storage"
    added.add_argument("--checkout", metavar="DIR", help=about, type=Path, required=True)
    added.option("--model", "NAME", "of the reference; default %(default)s", default="tiny-1b")
    for name, default, about in (
        ("users", 4, "at once"),
        ("seconds", 30, "of each run"),
        ("gib", 8, "of entries on the disk"),
        ("rounds", 3, "of all backends in turns"),
    ):
        added.option(f"--{name}", "N", f"{about}; default %(default)s", type=count, default=default)
    several = f"default {','.join(BACKENDS)}"
    added.option("--backends", "A,B", several, type=names, default=[*BACKENDS])
    added.option("--directory", "DIR", "where to store", type=Path, default=Path())
    added.option("--out", "FILE", "writes all figures as JSON", type=Path)
