"""The own receive path of the Redis tier beside redis-py: `python -m bench.bench_wire`.

One connection, one value at a time, no frame and no check: what `tiers.remote.resp` is worth. Both
take turns in every round, and both leave the value in memory of the caller's; ratios are taken
within a round, and shown as median and spread. With `hiredis` installed redis-py is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from redis import Redis as Plain
from redis.backoff import NoBackoff
from redis.retry import Retry

from flowkv.tiers.remote.redis import Redis
from tests.tiers.remote.servers_redis import redis_server

SIZES = (64 << 10, 256 << 10, 1 << 20)
EVER_S = 60.0


def compare(title: str, n_bytes: int, rounds: int, ways: dict[str, Callable[[], object]]) -> None:
    """Prints throughput of two ways, and how much faster the first is."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    own, plain = seconds.values()
    ratios = sorted(b / a for a, b in zip(own, plain, strict=True))
    rates = [n_bytes / statistics.median(times) / 1e6 for times in (own, plain)]
    print(
        f"  {title:<20} own {rates[0]:6.0f} MB/s, redis-py {rates[1]:6.0f} MB/s, ratio "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})"
    )


def measure(uri: str, where: str, size: int, total: int, rounds: int) -> None:
    """Both directions at one size."""
    own, plain = Redis(uri), Plain.from_url(uri, retry=Retry(NoBackoff(), 0))
    names = [f"{n:064x}" for n in range(total // size)]
    bodies = [os.urandom(size) for _ in names]
    targets = [memoryview(bytearray(size)) for _ in names]

    def put() -> None:
        for name, body in zip(names, bodies, strict=True):
            own.put(name, memoryview(body), EVER_S)

    def plain_put() -> None:
        for name, body in zip(names, bodies, strict=True):
            plain.set(name, body)

    def get() -> None:
        for name, target in zip(names, targets, strict=True):
            assert len(own.get(name, 0, target, EVER_S) or b"") == size

    def plain_get() -> None:
        for name, target in zip(names, targets, strict=True):
            target[:] = plain.get(name)

    put()
    get()
    assert all(target == body for target, body in zip(targets, bodies, strict=True))
    compare(f"{where} {size >> 10} KiB put", total, rounds, {"own": put, "plain": plain_put})
    compare(f"{where} {size >> 10} KiB get", total, rounds, {"own": get, "plain": plain_get})
    plain.flushall()
    plain.close()
    own.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=32, help="moved each way, per round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, redis_server(Path(directory)) as server:
        for where, uri in (("tcp", server.uri), ("unix", server.unix_uri)):
            for size in SIZES:
                measure(uri, where, size, options.megabytes << 20, options.rounds)


if __name__ == "__main__":
    main()
