"""The disk tier beside other ways to keep blocks, in one run: `python -m bench.bench_disk`.

Each round stores the same blocks in every way, reads them cold in random batches of 64, and runs
fio on the same disk; ratios are taken within a round; the median and spread of rounds are shown.
"direct" reads straight into the targets. "deep" has all batches in flight at once, as "busy" has,
which computes in Python beside it. "busy put" stores as many blocks more beside that.
The disk tier digests what it writes and checks what it reads; the others check nothing. A put ends
when the bytes left the process (the tier's, fio's and the files' are direct; RocksDB is flushed).
Recovery is the time to open a store of 100,000 frames.

    python -m bench.bench_disk --json           # one object, for machines
    python -m bench.bench_disk --directory /nvme --rounds 5
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.bench_ring import (
    DEPTH,
    READ,
    WRITE,
    Sample,
    cpu_s,
    fio,
    huge_pages,
    parsed,
    ratios,
    spread,
    table,
)
from bench.disk_rivals import Blocks, FilePerBlock, RocksDB
from bench.figures import LAYOUT, finish, page_info
from flowkv.tiers.base import FrameInfo, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.disk.home import STORED, Held, Record
from flowkv.tiers.disk.store import DiskStore
from flowkv.tiers.io.engine import Arena

KIB = 1 << 10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB)
BATCH = 64
STRIPES = 16
FRAMES = 100_000


def info_of(size: int) -> FrameInfo:
    return page_info(max(4096, size // STRIPES))


class FlowKV:
    """The disk tier."""

    name = "FlowKV"

    def __init__(self, directory: Path, n_bytes: int) -> None:
        self._tier = DiskTier(directory, 3 * n_bytes + (64 << 20), queue_bytes=1 << 40)
        self.engine = self._tier.engine

    def put(self, keys: Sequence[bytes], bodies: Sequence[memoryview]) -> None:
        info = info_of(len(bodies[0]))
        items = [Store(key, info, body) for key, body in zip(keys, bodies, strict=True)]
        self._tier.submit_store(items)
        finish(self._tier, len(keys), Outcome.STORED)

    def get(
        self, keys: Sequence[bytes], targets: Sequence[memoryview], *, direct: bool = False
    ) -> None:
        both = zip(keys, targets, strict=True)
        self._tier.submit_load([Load(k, t, LAYOUT, direct=direct) for k, t in both])
        finish(self._tier, len(keys), Outcome.HIT)

    def get_deep(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """All batches in flight at once."""
        for at in range(0, len(keys), BATCH):
            parts = zip(keys[at : at + BATCH], targets[at : at + BATCH], strict=True)
            self._tier.submit_load([Load(key, target, LAYOUT) for key, target in parts])
        finish(self._tier, len(keys), Outcome.HIT)

    def close(self) -> None:
        self._tier.close()


class Spinning:
    """A thread that computes in Python."""

    def __enter__(self) -> None:
        self._end = False
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._thread.join()

    def _spin(self) -> None:
        number = 0
        while not self._end:
            for _ in range(2000):
                number += 1


class Bench:
    """Blocks of one size, and the ways to keep them."""

    def __init__(self, directory: Path, size: int, n_bytes: int) -> None:
        self.directory, self.size, self.count = directory, size, n_bytes // size
        self.noise = memoryview(np.random.default_rng(0).bytes(min(n_bytes, 256 << 20)))
        places = [n * size % len(self.noise) for n in range(self.count)]
        self.bodies = [self.noise[at : at + size] for at in places]
        keys = [hashlib.sha256(b"%d" % n).digest() for n in range(2 * self.count)]
        self.keys, self.others = keys[: self.count], keys[self.count :]
        self.arena = Arena(self.count * size + (64 << 20))
        slot = self.arena.acquire(self.count * size)
        assert slot is not None
        slot.view[:] = bytes(slot.n_bytes)  # no memory is made while somebody measures
        self.targets = [slot.view[n * size : (n + 1) * size] for n in range(self.count)]

    def ways(self) -> dict[str, Callable[[Path], Blocks]]:
        total = self.count * self.size
        made: dict[str, Callable[[Path], Blocks]] = {
            "FlowKV": lambda path: FlowKV(path, total),
            "file per block": FilePerBlock,
        }
        try:
            import rocksdict  # noqa: F401
        except ImportError:
            print("rocksdict is not installed: no RocksDB", file=sys.stderr)
        else:
            made["RocksDB"] = RocksDB
        return made

    def run(self, way: Callable[[Path], Blocks], seed: int) -> dict[str, Sample]:
        """Puts everything and gets it back in random order; a part of the bytes is compared."""
        path = self.directory / "blocks"
        shutil.rmtree(path, ignore_errors=True)
        blocks, found = way(path), {}
        order = random.Random(seed).sample(range(self.count), self.count)
        keys = [self.keys[n] for n in order]
        try:
            blocks.put(self.keys[:1], self.bodies[:1])  # what is done once is done
            blocks.get(self.keys[:1], self.targets[:1])
            found["put"] = self._timed(lambda: blocks.put(self.keys[1:], self.bodies[1:]))

            def get(**how: bool) -> None:
                for at in range(0, self.count, BATCH):
                    blocks.get(keys[at : at + BATCH], self.targets[at : at + BATCH], **how)

            found["get"] = self._timed(get)
            if isinstance(blocks, FlowKV):
                found["direct"] = self._timed(partial(get, direct=True))
                deep = partial(blocks.get_deep, keys, self.targets)
                found["deep"] = self._timed(deep)
                with Spinning():
                    found["busy"] = self._timed(deep)
                    put = partial(blocks.put, self.others, self.bodies)
                    found["busy put"] = self._timed(put)
            for n in range(0, self.count, 7):
                assert self.targets[n] == self.bodies[order[n]], "WRONG BYTES"
        finally:
            blocks.close()
        shutil.rmtree(path)
        return found

    def _timed(self, call: Callable[[], None]) -> Sample:
        used, start = cpu_s(), time.perf_counter()
        call()
        wall_s = time.perf_counter() - start
        return Sample(self.count * self.size, wall_s, cpu_s() - used)


def measure(
    directory: Path, sizes: Sequence[int], n_bytes: int, rounds: int, memory: str
) -> list[dict[str, Any]]:
    """A row for each size, direction and way."""
    rows = []
    for size in sizes:
        bench = Bench(directory, size, n_bytes)
        samples: dict[tuple[str, str], list[Sample]] = {}
        theirs: dict[str, list[Sample]] = {"put": [], "get": []}
        for number in range(rounds):
            with tempfile.NamedTemporaryFile(dir=directory) as file:
                for at in range(0, n_bytes, len(bench.noise)):  # holes are read without a device
                    file.write(bench.noise[: n_bytes - at])
                file.flush()
                os.fsync(file.fileno())
                theirs["put"].append(fio(file.name, WRITE, size, 0.4, memory))
                theirs["get"].append(fio(file.name, READ, size, 0.4, memory))
            for name, way in bench.ways().items():
                for what, sample in bench.run(way, number).items():
                    samples.setdefault((name, what), []).append(sample)
        rows += [row_of(size, name, what, samples, theirs) for name, what in samples]
    return rows


def row_of(
    size: int,
    name: str,
    what: str,
    samples: dict[tuple[str, str], list[Sample]],
    theirs: dict[str, list[Sample]],
) -> dict[str, Any]:
    mine, fios = samples[name, what], theirs["put" if "put" in what else "get"]
    row = {
        "way": name,
        "what": what,
        "kib": size // KIB,
        "gb_s": spread([sample.rate / 1e9 for sample in mine]),
        "cpu_s_per_gb": spread([sample.cost for sample in mine]),
        "of_fio": spread(ratios(mine, fios, "rate")),
        "cpu_of_fio": spread(ratios(mine, fios, "cost")),
    }
    for rival in ("file per block", "RocksDB"):
        if (rival, what) in samples and name.startswith("FlowKV"):
            row[f"x {rival}"] = spread(ratios(mine, samples[rival, what], "rate"))
    if idle := {"busy": "deep", "busy put": "put"}.get(what):
        row["busy_of_idle"] = spread(ratios(mine, samples[name, idle], "rate"))
    return row


def recovery(directory: Path, rounds: int) -> list[tuple[float, float]]:
    """Seconds of the wall and of processors to open a store of many frames."""
    path, info, body_bytes = directory / "recovery", info_of(256 * KIB), 256 * KIB
    store = DiskStore(str(path), 64 << 30)
    store.open()
    for first in range(0, FRAMES, 1000):
        batch = []
        for number in range(first, first + 1000):
            key = hashlib.sha256(b"frame %d" % number).digest()
            seq = store.reserve(key)
            assert seq is not None
            slot, _ = store.new_slot(4096, 4096 + body_bytes)
            held = Held(seq, slot, STRIPES, info._replace(parent=key), 4096 + body_bytes)
            batch.append(Record(STORED, key, held))
        store.commit(batch, batch.copy)
    store.close()
    seconds = []
    for _ in range(rounds):
        start, used = time.perf_counter(), time.process_time()
        store = DiskStore(str(path), 64 << 30)
        store.open()
        seconds.append((time.perf_counter() - start, time.process_time() - used))
        store.close()
    shutil.rmtree(path)
    return seconds


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--mib", type=int, default=512, help="bytes of each store")
    options.add_argument("--kib", type=int, nargs="*", default=[size // KIB for size in SIZES])
    args = parsed(options, rounds=5)
    with (
        tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-disk-") as scratch,
        huge_pages(DEPTH) as memory,
    ):
        seconds = recovery(Path(scratch), args.rounds)
        sizes = [kib * KIB for kib in args.kib]
        rows = measure(Path(scratch), sizes, args.mib << 20, args.rounds, memory)
    report = {
        "bench": "disk",
        "fio_memory": memory,
        "rounds": args.rounds,
        "recovery_s": spread([wall_s for wall_s, _ in seconds]),
        "recovery_cpu_s": spread([used_s for _, used_s in seconds]),
        "frames": FRAMES,
        "rows": rows,
    }
    if args.json:
        print(json.dumps(report))
    else:
        names = ("gb_s", "cpu_s_per_gb", "of_fio", "x file per block", "x RocksDB", "busy_of_idle")
        table(rows, ("way", "what", "kib"), names)
        wall, used = report["recovery_s"], report["recovery_cpu_s"]
        print(f"opening a store of {FRAMES:,} frames: {wall} s, {used} s of processors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
