"""Remote tiers beside their engine's own client, and their deadlines when the engine hangs.

    python -m bench.bench_remote                      # every engine that is installed
    python -m bench.bench_remote object --json        # one of them, for machines
    python -m bench.bench_remote --rounds 9 --megabytes 128

Servers are started on the loopback and stopped at the end; client and server share the machine, so
only ratios mean something. A round moves the same bytes in the same pieces by the same number of
threads first through the engine's client alone, then through the tier, which checks every byte and
copies it to its target; ratios are taken within a round, and shown as median and spread.

Then the server is stopped with SIGSTOP while loads are under way, again and again: shown is by how
much answers came later than their deadline, and beside it how late this machine, busy as it is,
wakes a thread that does nothing but sleep as long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.figures import LAYOUT, finish, frames, ratios, spread, took
from flowkv.tiers.base import Completion, Load, Outcome
from flowkv.tiers.remote.backend import RemoteLimits
from flowkv.tiers.remote.tier import BreakerState, RemoteTier

SIZES = (256 << 10, 1 << 20, 4 << 20)
THREADS = 8
DEADLINE_S = 0.1
PATIENCE_S = 60.0


class Running(NamedTuple):
    """An engine with its server.

    Attributes:
        tier: FlowKV's tier on it.
        put: Writes an object by the engine's client alone.
        get: Reads one; what it returns has a length.
        server: What can be frozen and thawed; None where there is no process.
    """

    tier: RemoteTier
    put: Callable[[str, memoryview], object]
    get: Callable[[str], Any]
    server: Any


@contextlib.contextmanager
def object_store(directory: Path) -> Iterator[Running]:
    """obstore and `rclone serve s3`."""
    import obstore
    from obstore.store import from_url

    from flowkv.tiers.remote.objects import ObjectTier
    from tests.tiers.remote.servers import object_server

    with object_server(directory) as server:
        alone = from_url("s3://frames/alone", **server.options)
        tier = ObjectTier(server.uri, options=server.options, limits=RemoteLimits(threads=THREADS))
        yield Running(
            tier,
            lambda name, data: obstore.put(alone, name, data, use_multipart=False),
            lambda name: memoryview(obstore.get(alone, name).bytes()),
            server,
        )
        tier.close()


@contextlib.contextmanager
def redis(directory: Path) -> Iterator[Running]:
    """redis-py and redis-server."""
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from flowkv.tiers.remote.redis import RedisTier
    from tests.tiers.remote.servers_redis import redis_server

    with redis_server(directory, "--maxmemory", "4gb") as server:
        alone = Redis.from_url(server.uri, retry=Retry(NoBackoff(), 0))
        tier = RedisTier(server.uri, limits=RemoteLimits(threads=THREADS))
        yield Running(tier, alone.set, alone.get, server)
        tier.close()
        alone.close()


@contextlib.contextmanager
def mooncake(directory: Path) -> Iterator[Running]:
    """Mooncake's own client, into registered memory, and a lender of memory over TCP."""
    from flowkv.tiers.remote.mooncake import MooncakeTier
    from tests.tiers.remote.servers_mooncake import MooncakeCluster

    cluster = MooncakeCluster(directory, 1 << 30)
    try:
        cluster.start()
        tier = MooncakeTier(cluster.uri + "&buffer=256MiB", limits=RemoteLimits(threads=THREADS))
        backend: Any = tier.backend
        session = backend._session
        slots = threading.local()

        def slot(n_bytes: int) -> Any:
            if getattr(slots, "n_bytes", 0) < n_bytes:
                slots.n_bytes, slots.slot = n_bytes, session.acquire(n_bytes, PATIENCE_S)
            return slots.slot

        def put(name: str, data: memoryview) -> None:
            mine = slot(data.nbytes)
            mine.view[: data.nbytes] = data
            assert session.client.upsert_from(f"alone{name}", mine.address, data.nbytes) == 0

        def get(name: str) -> memoryview:
            mine = slot(1)
            count = session.client.get_into(f"alone{name}", mine.address, mine.n_bytes)
            assert count > 0, count
            return memoryview(bytes(mine.view[:count]))

        yield Running(tier, put, get, cluster)
        tier.close()
    finally:
        cluster.stop()


ENGINES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Running]]] = {
    "object": object_store,
    "redis": redis,
    "mooncake": mooncake,
}


def measure(running: Running, size: int, total: int, rounds: int) -> dict[str, Any]:
    """Megabytes per second of both, and their ratio, for writing and reading."""
    tier, items = running.tier, frames(size, total)
    memory = memoryview(bytearray(total))
    loads = [
        Load(item.key, memory[n * size : (n + 1) * size], LAYOUT) for n, item in enumerate(items)
    ]
    names = [item.key.hex() for item in items]
    moved = size * len(items)
    seconds: dict[str, list[float]] = {"alone_put": [], "put": [], "alone_get": [], "get": []}
    bodies = [item.body for item in items]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(rounds + 1):  # the first one warms up
            seconds["alone_put"].append(took(lambda: list(pool.map(running.put, names, bodies))))
            tier.submit_store(items, deadline_s=PATIENCE_S)
            seconds["put"].append(took(lambda: finish(tier, len(items), Outcome.STORED)))
            seconds["alone_get"].append(took(lambda: list(pool.map(running.get, names))))
            tier.submit_load(loads, deadline_s=PATIENCE_S)
            seconds["get"].append(took(lambda: finish(tier, len(loads), Outcome.HIT)))
            assert all(load.target == item.body for load, item in zip(loads, items, strict=True))
            memory[:] = bytes(len(memory))
            tier.erase([item.key for item in items])
    report: dict[str, Any] = {"bytes": size}
    for way in ("put", "get"):
        alone, ours = seconds[f"alone_{way}"][1:], seconds[way][1:]
        least, middle, most = spread(ratios(alone, ours))
        report[way] = {
            "alone_mb_s": round(moved / 1e6 / statistics.median(alone), 1),
            "tier_mb_s": round(moved / 1e6 / statistics.median(ours), 1),
            "ratio": round(middle, 3),
            "spread": [round(least, 3), round(most, 3)],
        }
    return report


def overruns(running: Running, cycles: int) -> dict[str, Any]:
    """Milliseconds by which answers were late while the server was stopped."""
    tier, late_ms, slept_ms, trips = running.tier, [], [], 0
    items = frames(64 << 10, THREADS * (64 << 10))
    tier.submit_store(items, deadline_s=PATIENCE_S)
    finish(tier, len(items), Outcome.STORED)
    for _ in range(cycles):
        loads = [Load(item.key, memoryview(bytearray(64 << 10)), LAYOUT) for item in items]
        running.server.freeze()
        start, answers = time.perf_counter(), list[Completion]()
        tier.submit_load(loads, deadline_s=DEADLINE_S)
        while len(answers) < len(loads):
            found = tier.poll(1.0)
            late_ms += [1e3 * (time.perf_counter() - start - DEADLINE_S)] * len(found)
            answers += found
        slept_ms.append(1e3 * (took(lambda: time.sleep(DEADLINE_S)) - DEADLINE_S))
        running.server.thaw()
        assert {answer.reason for answer in answers} == {"deadline"}, answers
        trips += tier.state is not BreakerState.CLOSED
        end_s = time.monotonic() + PATIENCE_S
        while tier.state is not BreakerState.CLOSED:
            tier.submit_load(loads[:1], deadline_s=1.0)
            while not tier.poll(1.0):
                pass
            time.sleep(0.02)
            assert time.monotonic() < end_s
    return {
        "answers": len(late_ms),
        "late_ms": quantiles(late_ms),
        "sleep_ms": quantiles(slept_ms),
        "breaker_opened": f"{trips} of {cycles}",
    }


def quantiles(sample: list[float]) -> dict[str, float]:
    ordered = sorted(sample)
    at = {"p50": len(ordered) // 2, "p99": int(len(ordered) * 0.99), "max": len(ordered) - 1}
    return {name: round(ordered[index], 2) for name, index in at.items()}


def show(name: str, report: dict[str, Any]) -> None:
    print(f"{name}: MB/s by its client alone and through the tier, {THREADS} threads")
    for line in report["sizes"]:
        for way in ("put", "get"):
            found = line[way]
            low, high = found["spread"]
            print(
                f"  {line['bytes'] >> 10:5d} KiB {way}  {found['alone_mb_s']:8.1f}"
                f"  {found['tier_mb_s']:8.1f}  ratio {found['ratio']:.2f} ({low:.2f}..{high:.2f})"
            )
    if late := report.get("stopped"):
        print(
            f"  server stopped: {late['answers']} answers, breaker opened {late['breaker_opened']}"
        )
        for what, found in (("late by", late["late_ms"]), ("a plain sleep", late["sleep_ms"])):
            print(f"  {what:>16} {found['p50']} ms (median), {found['p99']} ms (p99)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", choices=[*ENGINES, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=64, help="moved each way, per round")
    parser.add_argument("--cycles", type=int, default=20, help="times that the server is stopped")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reports: dict[str, Any] = {}
    for name in options.engines or ENGINES:
        with tempfile.TemporaryDirectory() as directory, ENGINES[name](Path(directory)) as running:
            sizes = [
                measure(running, size, options.megabytes << 20, options.rounds) for size in SIZES
            ]
            reports[name] = {"sizes": sizes}
            if running.server is not None and options.cycles:
                reports[name]["stopped"] = overruns(running, options.cycles)
        if not options.json:
            show(name, reports[name])
    if options.json:
        print(json.dumps(reports, indent=2))


if __name__ == "__main__":
    main()
