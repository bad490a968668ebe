"""The engines that move bytes to files, beside fio, in one run: `python -m bench.bench_ring`.

Random direct reads and writes of one file, 16 at a time. Each round runs fio (io_uring, buffers in
huge pages), then each engine over as many bytes as fio moved: with nothing beside it, with another
process computing, and with the interpreter busy in another thread. Both take a processor away, only
the latter the interpreter, too. Ratios are taken within a round; the median and the spread of the
rounds are shown. Processor time is that of the whole process, the figures of fio are its own.

    python -m bench.bench_ring --json           # one object, for machines
    python -m bench.bench_ring --directory /nvme --rounds 9 --seconds 2

Huge pages for fio are reserved for the time of the run where that is allowed, else it gets plain
ones, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowkv.tiers.io import open_engine
from flowkv.tiers.io.engine import OPERATION, READ, WRITE, Arena, ThreadsEngine
from flowkv.tiers.io.uring import UringEngine

Engine = UringEngine | ThreadsEngine
KIB = 1 << 10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB)
DEPTH = 16
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


class Sample(NamedTuple):
    """Bytes moved, seconds of the wall, seconds of processors."""

    n_bytes: float
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.n_bytes / self.wall_s

    @property
    def cost(self) -> float:
        """Processor seconds of a gigabyte."""
        return 1e9 * self.cpu_s / self.n_bytes


@contextmanager
def huge_pages(count: int) -> Iterator[str]:
    """Reserves huge pages; yields the kind of memory that fio can have."""
    try:
        before = HUGE_PAGES.read_text()
        HUGE_PAGES.write_text(str(int(before) + count))
    except OSError:
        yield "mmap"
        return
    try:
        enough = int(HUGE_PAGES.read_text()) >= int(before) + count
        yield "shmhuge" if enough else "mmap"
    finally:
        HUGE_PAGES.write_text(before)


def fio(path: str, op: int, size: int, seconds: float, memory: str) -> Sample:
    """What fio reaches."""
    command = [
        *("fio", "--name=ring", f"--filename={path}", "--ioengine=io_uring", "--direct=1"),
        *(f"--rw={'randread' if op == READ else 'randwrite'}", f"--bs={size}"),
        *(f"--iodepth={DEPTH}", f"--runtime={seconds}", "--time_based", f"--mem={memory}"),
        *("--norandommap", "--randrepeat=0", "--scramble_buffers=0", "--fallocate=none"),
        *(f"--size={os.path.getsize(path)}", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = job["read" if op == READ else "write"]
    wall_s = moved["runtime"] / 1e3
    return Sample(moved["io_bytes"], wall_s, (job["usr_cpu"] + job["sys_cpu"]) / 100 * wall_s)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def spinning() -> Iterator[None]:
    """Another process that computes."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.communicate()


def results_of(engine: Engine, count: int) -> list[int]:
    """Return the results of so many operations, once all have ended."""
    results: list[int] = []
    while len(results) < count:
        time.sleep(0.001)  # few calls of Python beside the engine
        answers = engine.wait(300.0)
        assert len(answers), "an engine does not answer"
        results += answers["result"].tolist()
    return results


class Bench:
    """One file, one arena, and the engines."""

    def __init__(self, path: str, file_bytes: int) -> None:
        self.path, self.file_bytes = path, file_bytes
        self.arena = Arena(DEPTH * max(SIZES))
        self.arena.view[:] = np.random.default_rng(1).bytes(self.arena.n_bytes)
        self.random = np.random.default_rng(0)
        self.engines: dict[str, Engine] = {}
        try:
            self.engines["io_uring"] = UringEngine(depth=DEPTH, arena=self.arena)
        except OSError as error:
            print(f"no io_uring here: {error}", file=sys.stderr)
        self.engines["threads"] = ThreadsEngine(threads=DEPTH)
        self.fds = {name: engine.open(path, write=True) for name, engine in self.engines.items()}
        self._fill()

    def run(self, name: str, op: int, size: int, n_bytes: float, beside: str) -> Sample:
        """One engine over about as many bytes; `beside` it nothing, a process, or this thread."""
        engine, count = self.engines[name], max(4 * DEPTH, round(n_bytes / size))
        operations = np.empty(count, OPERATION)
        operations["op"], operations["fd"], operations["length"] = op, self.fds[name], size
        operations["offset"] = self.random.integers(0, self.file_bytes // size, count) * size
        operations["address"] = self.arena.address + np.arange(count) % DEPTH * size
        operations["tag"] = np.arange(count)
        ended: list[float] = []
        wrong: list[int] = []

        def wait() -> None:
            results = results_of(engine, count)
            ended.append(time.perf_counter())
            wrong.append(count - results.count(size))

        other = spinning() if beside == "process" else nullcontext()
        with other:
            used, began = self._measure(engine, operations, wait, busy=beside == "thread")
        assert not wrong[0], f"{wrong[0]} of {count} operations failed"
        return Sample(count * size, ended[0] - began, used)

    def _measure(
        self, engine: Engine, operations: Any, wait: Callable[[], None], *, busy: bool
    ) -> tuple[float, float]:
        """Processor seconds, and when it began."""
        began, used = time.perf_counter(), cpu_s()
        engine.submit(operations)
        if busy:
            waiter = threading.Thread(target=wait)
            waiter.start()
            number = 0
            while waiter.is_alive():
                for _ in range(2000):
                    number += 1
            waiter.join()
        else:
            wait()
        return cpu_s() - used, began

    def close(self) -> None:
        for name, engine in self.engines.items():
            assert engine.close()
            os.close(self.fds[name])
        self.arena.close()

    def _fill(self) -> None:
        """Every block of the file is written once, so that reads come from the device."""
        size = max(SIZES)
        operations = np.zeros(self.file_bytes // size, OPERATION)
        operations["op"], operations["fd"] = WRITE, self.fds["threads"]
        operations["offset"] = np.arange(len(operations)) * size
        operations["address"], operations["length"] = self.arena.address, size
        self.engines["threads"].submit(operations)
        results = results_of(self.engines["threads"], len(operations))
        assert results == [size] * len(operations)


def measure(bench: Bench, rounds: int, seconds: float, memory: str) -> list[dict[str, Any]]:
    """A row for each operation, size and engine."""
    rows = []
    for op in (READ, WRITE):
        for size in SIZES:
            theirs: list[Sample] = []
            ours: dict[tuple[str, str], list[Sample]] = {}
            for _ in range(rounds):
                theirs.append(fio(bench.path, op, size, seconds, memory))
                n_bytes = seconds * theirs[-1].rate
                for name in bench.engines:
                    for beside in ("", "process", "thread"):
                        sample = bench.run(name, op, size, n_bytes, beside)
                        ours.setdefault((name, beside), []).append(sample)
            for name in bench.engines:
                idle, crowded, busy = (ours[name, x] for x in ("", "process", "thread"))
                rows.append(
                    {
                        "engine": name,
                        "op": "read" if op == READ else "write",
                        "kib": size // KIB,
                        "fio_gb_s": spread([x.rate / 1e9 for x in theirs]),
                        "of_fio": spread(ratios(idle, theirs, "rate")),
                        "cpu_of_fio": spread(ratios(idle, theirs, "cost")),
                        "busy_of_idle": spread(ratios(busy, idle, "rate")),
                        "busy_of_crowded": spread(ratios(busy, crowded, "rate")),
                        "cpu_s_per_gb": spread([x.cost for x in idle]),
                    }
                )
    return rows


def ratios(some: list[Sample], others: list[Sample], what: str) -> list[float]:
    """Round by round; without those in which the other took too little time to be counted."""
    pairs = [(getattr(a, what), getattr(b, what)) for a, b in zip(some, others, strict=True)]
    return [a / b for a, b in pairs if b] or [math.nan]


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most of the rounds."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def table(rows: list[dict[str, Any]], keys: Sequence[str], names: Sequence[str]) -> None:
    """Print medians and, in brackets, their spread."""
    lines = [[*keys, *names]]
    for row in rows:
        found = [row.get(name) for name in names]
        cells = [f"{x['median']:.2f} [{x['min']:.2f}-{x['max']:.2f}]" if x else "" for x in found]
        lines.append([*(str(row[key]) for key in keys), *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def parsed(options: argparse.ArgumentParser, rounds: int) -> argparse.Namespace:
    """Return the arguments of a bench beside fio; end the process where fio is missing."""
    options.add_argument("--directory", type=Path, default=Path("."), help="on the disk to measure")
    options.add_argument("--rounds", type=int, default=rounds)
    options.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    given = options.parse_args()
    if not shutil.which("fio"):
        print("This bench compares with fio: install it (`apt install fio`)", file=sys.stderr)
        raise SystemExit(2)
    return given


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--file-mib", type=int, default=1024)
    options.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    args = parsed(options, rounds=7)
    probe = open_engine(directory=str(args.directory))
    probe.close()
    if not probe.direct:
        print(f"{probe.why}: pass a --directory on a local disk", file=sys.stderr)
        return 2
    with (
        tempfile.NamedTemporaryFile(dir=args.directory, prefix="bench-ring-") as file,
        huge_pages(DEPTH) as memory,
    ):
        bench = Bench(file.name, args.file_mib << 20)
        try:
            rows = measure(bench, args.rounds, args.seconds, memory)
        finally:
            bench.close()
    report = {
        "bench": "ring",
        "depth": DEPTH,
        "fio_memory": memory,
        "rounds": args.rounds,
        "rows": rows,
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(f"fio with --mem={memory}; medians of {args.rounds} rounds, with their spread")
        names = ("fio_gb_s", "of_fio", "cpu_of_fio", "busy_of_idle", "busy_of_crowded")
        table(rows, ("engine", "op", "kib"), names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
