"""`python -m bench embedding`: rows of a table larger than memory, beside a mapping of the file.

A table of random rows lies on disk; ids follow Zipf's law, over rows in a random order. Each way
has a process of its own, which enters a memory cgroup when all is imported: what it reads from then
on, page cache included, must fit. The file's pages are dropped first. Ways alternate, in rounds; a
look-up of each way gives the same rows.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import xxhash

from bench.figures import answer, between, ratios
from flowkv.cli.arguments import AddVerb, count
from flowkv.core.config import format_size, parse_size
from flowkv.core.errors import ConfigError
from flowkv.policy import make_policy
from flowkv.report.screen import Screen
from flowkv.residency import Ledger, Meta, Place
from flowkv.tensors.embedding import EmbeddingTable, write_table

ZIPF, WIDTH = 1.05, 64
SIZES = {64: 200, 1024: 60}  # ids of a look-up: look-ups that are timed
WARM = 120  # look-ups of the larger size before that
WAYS = ("flowkv", "mapping, random")
_GROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(n_bytes: int) -> Iterator[Path]:
    """A memory cgroup of so many bytes.

    Raises:
        ConfigError: None can be made here.
    """
    for root in map(Path, _GROUPS):
        group, old = root / f"flowkv-{os.getpid()}", root.name == "memory"
        limit = group / ("memory.limit_in_bytes" if old else "memory.max")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            limit.write_text(str(n_bytes))
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            yield group
            return
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    raise ConfigError(
        "no memory cgroup can be made here, and without one the page cache hides the disk",
        "Run it as root, where /sys/fs/cgroup can be written",
    )


def zipf(rows: int, sizes: list[int], seed: int) -> list[np.ndarray]:
    """Ids of look-ups, each of so many."""
    draw = np.random.default_rng(seed)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF
    cumulated = np.cumsum(weights)
    order = draw.permutation(rows)
    ranks = np.searchsorted(cumulated, draw.random(sum(sizes)) * cumulated[-1])
    return np.split(order[np.minimum(ranks, rows - 1)], np.cumsum(sizes)[:-1])


def optimum(batches: list[np.ndarray], room: int) -> float:
    """Share of the rows that are in memory where what is used last goes first (Belady's MIN)."""
    uses: dict[int, list[int]] = {}
    for n, ids in enumerate(batches):
        for row in np.unique(ids).tolist():
            uses.setdefault(row, []).append(n)
    for later in uses.values():
        later.reverse()
    here, heap, hits, asked = dict[int, int](), list[tuple[int, int]](), 0, 0
    for ids in batches:
        for row in np.unique(ids).tolist():
            uses[row].pop()
            following = uses[row][-1] if uses[row] else 1 << 60
            asked, hits = asked + 1, hits + (row in here)
            here[row] = following
            heapq.heappush(heap, (-following, row))
            while len(here) > room:
                when, victim = heapq.heappop(heap)
                if here.get(victim) == -when:
                    del here[victim]
    return hits / asked


def kept(policy: str, batches: list[np.ndarray], room: int) -> tuple[float, float]:
    """Share of the rows that a policy has in memory, and microseconds a row that deciding takes."""
    ledger = Ledger([Place(make_policy(policy), room)], ghosts=0)
    space, hits, asked, spent_s = ledger.namespace(b"rows"), 0, 0, 0.0
    for n, ids in enumerate(batches):
        different = np.unique(ids)
        pairs = np.zeros((len(different), 2), np.uint64)
        pairs[:, 0] = different
        began_s = time.thread_time()
        plan = ledger.serve(n + 1, space, pairs, Meta(chained=False))
        spent_s += time.thread_time() - began_s if n else 0.0
        hits, asked = hits + int((plan.sources >= 0).sum()), asked + len(different)
    return hits / asked, 1e6 * spent_s / asked


def child(given: argparse.Namespace) -> dict[str, Any]:
    """One way, in its cgroup: seconds of each look-up by size."""
    way, group, folder = given.child.split("|")
    batches = np.load(Path(folder) / "ids.npy", allow_pickle=True)
    (path,) = (Path(folder) / "table").glob("table-*")
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with tempfile.TemporaryDirectory() as small:  # what is compiled and loaded counts for nobody
        write_table(small, [torch.zeros(99, WIDTH)])
        with EmbeddingTable(small, host="1MiB") as warm:
            for n in range(0, 99, 3):
                warm.look_up(np.arange(n, n + 3))
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    look_up: Callable[[Any], Any]
    table = None
    if way == "flowkv":
        # a quarter is left for what everybody needs: staging, results, the interpreter
        table = EmbeddingTable(Path(folder) / "table", host=parse_size(given.memory) * 3 // 4)
        look_up = lambda ids: table.look_up(ids).view(np.float32)  # noqa: E731
    else:
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        rows = np.frombuffer(mapped, np.float32).reshape(-1, WIDTH)
        look_up = rows.__getitem__
    found: dict[str, list[float]] = {str(size): [] for size in SIZES}
    seen = xxhash.xxh3_128()
    for n, ids in enumerate(batches):
        began_s = time.perf_counter()
        got = look_up(ids)
        seconds = time.perf_counter() - began_s
        if n >= WARM:
            found[str(len(ids))].append(seconds)
            seen.update(np.ascontiguousarray(got).data)
    result: dict[str, Any] = {"seconds": found, "digest": seen.hexdigest()}
    if table is not None:
        result["stats"] = table.stats()
        table.close()
    return result


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    parser = verb("embedding", _embedding, "look rows up in a table larger than memory")
    parser.add_argument("--rows", type=count, default=20_000_000)
    parser.add_argument("--memory", default="64MiB", help="of each process, page cache included")
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--dir", type=Path, help="where the table lies; default a temporary one")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)


def _embedding(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.child:
        return 0, child(given)
    with contextlib.ExitStack() as stack:
        folder = given.dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "table" / "manifest").exists():
            torch.manual_seed(1)
            step = 1 << 18
            sizes = [min(step, given.rows - at) for at in range(0, given.rows, step)]
            write_table(folder / "table", (torch.randn(n, WIDTH) for n in sizes))
        sizes = [1024] * WARM + [size for size, times in SIZES.items() for _ in range(times)]
        batches = zipf(given.rows, sizes, 7)
        np.save(folder / "ids.npy", np.array(batches, object), allow_pickle=True)
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way, done_so_far in runs.items():
                with memory_group(parse_size(given.memory)) as group:
                    command = [sys.executable, "-m", "bench", "embedding", "--json"]
                    command += ["--memory", given.memory, "--child", f"{way}|{group}|{folder}"]
                    done_so_far.append(answer(command))
    return 0, _told(runs, batches, given, screen)


def _told(
    runs: dict[str, list[dict[str, Any]]], batches: Any, given: argparse.Namespace, screen: Screen
) -> dict[str, Any]:
    same = len({one["digest"] for way in runs.values() for one in way}) == 1
    stats = runs["flowkv"][-1]["stats"]
    result: dict[str, Any] = {"identical": same, "stats": stats, "ways": {}, "policies": {}}
    rows = []
    for size in map(str, SIZES):
        ours = [_p95(one, size) for one in runs["flowkv"]]
        for way, measured in runs.items():
            theirs = [_p95(one, size) for one in measured]
            over = sorted(ratios(ours, theirs))
            half = median(median(one["seconds"][size]) for one in measured)
            result["ways"][f"{way}, {size}"] = {"p50_s": half, "p95_s": theirs, "ratio": over}
            times = f"{1e3 * half:.2f} ms", f"{1e3 * median(theirs):.2f} ms"
            rows.append([way, size, *times, between(over, ".3f")])
    title = f"{given.rows:,} x {WIDTH} float32, Zipf {ZIPF}, in {given.memory}"
    screen.table(["way", "ids", "p50", "p95", "flowkv's p95 over it"], rows, title=title)
    for policy in ("lfu-ttl", "lru"):
        hits, us = kept(policy, batches, stats["pool_rows"])
        result["policies"][policy] = {"hits": hits, "us_per_row": us}
        screen.say(f"{policy}: {hits:.3f} of the different rows in memory, {us:.2f} us a row")
    result["policies"]["optimum"] = {"hits": optimum(batches, stats["pool_rows"])}
    screen.say(f"optimum: {result['policies']['optimum']['hits']:.3f}")
    pool = format_size(stats["pool_rows"] * WIDTH * 4)
    screen.say(f"{stats['pool_rows']:,} rows in memory ({pool}); all ways alike: {same}")
    return result


def _p95(run: dict[str, Any], size: str) -> float:
    return float(np.percentile(run["seconds"][size], 95))
