"""The tier in Redis, on a real server."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowkv import Tier
from flowkv.testing import check_tier
from flowkv.tiers import Load, Outcome, Store, open_tier
from flowkv.tiers.remote.tier import RemoteLimits
from tests.clock import wait_for
from tests.inside import (
    ConfigError,
    Redis,
    RedisTier,
    StoreError,
    new_entry,
    parse_place,
    parse_size,
)

from ..frames import (
    LAYOUT,
    answers,
    body_of,
    check_parts,
    get,
    hits,
    info_of,
    key_of,
    outcomes,
    put,
    stored,
)
from .faulty import check_late_start, check_swap
from .servers_redis import RedisServer, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


numbers = itertools.count()


def space(server: RedisServer, more: str = "") -> str:
    """A URI under which nothing was stored yet."""
    return f"{server.uri}/0?prefix=test{next(numbers)}{more}"


def opened(uri: str, **options: Any) -> contextlib.closing[RedisTier]:
    return contextlib.closing(RedisTier(uri, **options))


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("capacity_bytes", [256 << 10, 1 << 20])
def test_conformance(server: RedisServer, capacity_bytes: int) -> None:
    uris: dict[int, str] = {}

    def fresh(capacity_bytes: int) -> Tier:
        uri = space(server)
        tier = RedisTier(uri, capacity_bytes)
        uris[id(tier)] = uri
        return tier

    def reopen(tier: Tier) -> Tier:
        tier.close()
        again = RedisTier(uris[id(tier)], capacity_bytes)
        uris[id(again)] = uris[id(tier)]
        return again

    # Lossy: a store whose deadline passed while the server was at it may be found all the same.
    check_tier(fresh, reopen=reopen, lossy=True, capacity_bytes=capacity_bytes)


@pytest.mark.parametrize("scheme", ["redis", "valkey", "unix"])
def test_every_way_to_a_server(server: RedisServer, scheme: str) -> None:
    places = {"redis": server.uri + "/3", "unix": server.unix_uri + "?db=3"}
    places["valkey"] = places["redis"].replace("redis", "valkey")
    place = parse_place(places[scheme] + ":1GiB")
    opening = open_tier(place.kind, path=place.path, capacity_bytes=parse_size(place.size))
    assert isinstance(opening, RedisTier) and opening.capacity_bytes == 1 << 30
    with contextlib.closing(opening) as tier:
        stored(tier, range(3))
        assert hits(tier, range(4)) == 3
        assert scheme in tier.name
        assert tier.erase([key_of(name) for name in range(3)]) == 3
        assert hits(tier, range(4)) == 0


def test_another_process_finds_the_frames_in_the_order_they_were_stored(
    server: RedisServer,
) -> None:
    uri = space(server)
    with opened(uri) as tier:
        for name in (5, 3, 9, 1):
            stored(tier, [name])
    with opened(uri) as tier:
        assert [entry.key for entry in tier.scan()] == [key_of(name) for name in (5, 3, 9, 1)]
        assert {entry.info for entry in tier.scan()} == {info_of(8192)}
        assert tier.used_bytes() == sum(entry.n_bytes for entry in tier.scan()) > 4 * 8192
        assert hits(tier, [5, 3, 9, 1]) == 4


def test_what_others_store_later_is_found_by_asking(server: RedisServer) -> None:
    uri = space(server)
    with opened(uri) as mine, opened(uri) as theirs:
        stored(theirs, range(2))
        keys = [key_of(name) for name in range(3)]
        assert mine.contains(keys) == [True, True, False]
        assert hits(mine, range(3)) == 2


def test_some_stripes_of_a_large_frame(server: RedisServer) -> None:
    with opened(space(server)) as tier:
        check_parts(tier, 64 << 10, 40, ((0, 0), (0, 1), (39, 1), (7, 30), (3, 0)))


def test_foreign_values_are_misses(server: RedisServer) -> None:
    uri, prefix = space(server), f"test{next(numbers) - 1}"
    uri = f"{server.uri}/0?prefix={prefix}"
    for name, command in enumerate(
        ("LPUSH {} 1 2", "SET {} rubbish", "SET {} 12345678", "SADD {} x")
    ):
        server.ask(command.format(f"{prefix}:{key_of(name).hex()}").encode())
    server.ask(f"SET {prefix}:not-a-frame 1".encode())
    server.ask(f"SET {prefix}:{'F' * 64} 1".encode())
    with opened(uri) as tier:
        assert {answer.outcome for answer in get(tier, range(4))} == {Outcome.MISS}
        assert list(tier.scan()) == []


def test_what_another_wrote_since_is_not_replaced(server: RedisServer) -> None:
    check_swap(Redis(space(server)))


def test_expiry_and_eviction_are_misses(tmp_path: Path) -> None:
    policy = ("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path, *policy) as server, opened(server.uri + "?ttl_s=600") as tier:
        stored(tier, range(100), 64 << 10)  # more than fits: the server evicts
        done = get(tier, range(100), 64 << 10)
        kept = sum(answer.outcome is Outcome.HIT for answer in done)
        assert 0 < kept < 100 and {a.outcome for a in done} == {Outcome.HIT, Outcome.MISS}
        key = b"flowkv:" + key_of("mortal").hex().encode()
        stored(tier, ["mortal"])
        assert 0 < int(server.ask(b"TTL " + key)[1:-2]) <= 600
        tier.erasure_log.publish(new_entry([key_of("mortal")]))
        assert server.ask(b"TTL flowkv:erased") == b":-1\r\n"  # or all caches drop all they have
        server.ask(b"EXPIRE " + key + b" 0")
        assert hits(tier, ["mortal"]) == 0 and not tier.contains([key_of("mortal")])[0]


def test_a_full_server_that_evicts_nothing_says_so(tmp_path: Path) -> None:
    policy = ("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path, *policy) as server, opened(server.uri) as tier:
        done = outcomes(put(tier, range(100), 64 << 10))
        assert set(done) == {("stored", ""), ("failed", "full")}
        assert hits(tier, range(100), 64 << 10) == done.count(("stored", ""))


def test_what_the_server_let_go_is_forgotten_in_time(server: RedisServer) -> None:
    uri, prefix = space(server), f"test{next(numbers) - 1}"
    uri = f"{server.uri}/0?prefix={prefix}"
    with opened(uri, limits=RemoteLimits(every_s=0.05)) as tier:
        stored(tier, range(4))
        server.ask(f"DEL {prefix}:{key_of(2).hex()}".encode())
        wait_for(lambda: tier.contains([key_of(n) for n in range(4)]) == [True, True, False, True])
        assert tier.used_bytes() == 3 * tier.frame_bytes(8192)


@pytest.mark.parametrize(
    "uri",
    [
        *("http://127.0.0.1", "redis://127.0.0.1:port", "redis://127.0.0.1?protocol=3"),
        *("redis://127.0.0.1?prefix=a:b", "redis://127.0.0.1?ttl_s=0", "redis://h?retry=5"),
        "redis://127.0.0.1:6390/0?bogus=1",
    ],
)
def test_bad_addresses(uri: str) -> None:
    with pytest.raises(ConfigError):
        Redis(uri)


def test_nobody_there_is_a_warning_and_then_misses(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    with pytest.warns(UserWarning, match="does not answer"):
        tier = RedisTier(server.uri, limits=RemoteLimits(every_s=0.05))
    check_late_start(tier, server)


def test_a_cluster_that_does_not_answer_costs_misses() -> None:
    """redis-py's errors of clusters are no `RedisError`: one reached whoever asked."""
    with pytest.warns(UserWarning, match="no node of the cluster answers"):
        tier = RedisTier("redis://127.0.0.1:9?cluster=true", limits=RemoteLimits(open_s=5.0))
    assert tier.contains([key_of(1)]) == [False]
    done = [outcomes(get(tier, [n]))[0] for n in range(4)]
    assert {reason for _, reason in done} == {"ConnectionError", "breaker"}
    with pytest.raises(StoreError, match="no node"):
        tier.erase([key_of(1)])


def test_a_frozen_server_costs_deadlines_and_nothing_else(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.uri) as tier:
        stored(tier, range(8))
        server.freeze()
        overruns = []
        for _ in range(3):
            target = [memoryview(bytearray(8192)) for _ in range(4)]
            wishes = [Load(key_of(n), view, LAYOUT) for n, view in enumerate(target)]
            begun_s = time.monotonic()
            done = answers(tier, tier.submit_load(wishes, deadline_s=0.1), 4)
            overruns.append(time.monotonic() - begun_s - 0.1)
            assert {answer.outcome for answer in done} == {Outcome.FAILED}
            assert {answer.reason for answer in done} <= {"deadline", "breaker"}
            assert tier.contains([key_of("unknown")]) == [False]
        assert max(overruns) < 1.0  # how much less is measured by the benchmark
        assert tier.trips == 1, "three failures in a row open the breaker"
        server.thaw()
        wait_for(lambda: hits(tier, range(8)) == 8)
        assert not any(any(view) for view in target), "a late answer was written"


def test_killed_with_a_log_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    log = ("--appendonly", "yes", "--appendfsync", "always")
    with redis_server(tmp_path, *log) as server, opened(server.uri) as tier:
        wishes = [Store(key_of(n), info_of(8192), memoryview(body_of(n))) for n in range(200)]
        job = tier.submit_store(wishes, deadline_s=5)
        early = []
        while len(early) < 40:
            early += tier.poll(0.05)
        server.stop()
        late = []
        while len(early) + len(late) < len(wishes):
            late += tier.poll(0.05)
        kept = [a.item for a in (*early, *late) if a.outcome is Outcome.STORED]
        assert len(kept) >= 40 and {a.job for a in (*early, *late)} == {job}
        server.start()
        wait_for(lambda: hits(tier, kept[:1]) == 1)
        assert hits(tier, kept) == len(kept), "acknowledged, and gone"
        get(tier, range(200))  # of the others any, but never a wrong byte


def test_killed_without_a_log_everything_is_a_miss(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, opened(server.uri) as tier:
        stored(tier, range(5))
        server.stop()
        server.start()
        wait_for(lambda: {a.outcome for a in get(tier, range(5))} == {Outcome.MISS})
        stored(tier, range(5))
        assert hits(tier, range(5)) == 5


def test_erased_frames_are_in_no_file(tmp_path: Path) -> None:
    files = ("--appendonly", "yes", "--save", "3600", "1000000", "--rdbcompression", "no")
    with redis_server(tmp_path, *files) as server, opened(server.uri) as tier:
        stored(tier, ["gone", "kept"])
        server.ask(b"SAVE")

        def found(name: str) -> int:
            paths = [path for path in tmp_path.rglob("*") if path.is_file()]
            return sum(body_of(name)[100:200] in path.read_bytes() for path in paths)

        assert found("gone") == found("kept") >= 2
        assert tier.erase([key_of("gone"), key_of("never")]) == 1
        assert found("gone") == 0 and found("kept") >= 2
        assert hits(tier, ["gone", "kept"]) == 1


def test_erasure_that_cannot_be_proved_is_an_error(tmp_path: Path) -> None:
    options = ("--appendonly", "yes", "--rename-command", "BGREWRITEAOF", "")
    with redis_server(tmp_path, *options) as server, opened(server.uri) as tier:
        stored(tier, ["gone"])
        with pytest.raises(StoreError, match="in its files"):
            tier.erase([key_of("gone")])
        assert hits(tier, ["gone"]) == 0
        server.freeze()
        patient = RemoteLimits(erase_s=0.2, open_s=0.1, close_s=0.1)
        with (
            pytest.raises(StoreError, match="did not confirm"),
            opened(server.uri, limits=patient) as t,
        ):
            t.erase([key_of("gone")])


def test_one_connection_per_worker_kept(server: RedisServer) -> None:
    def connections() -> int:
        return server.ask(b"CLIENT LIST").count(b"addr=") - 1

    before = connections()
    with opened(space(server), limits=RemoteLimits(threads=2)) as tier:
        for _ in range(5):
            stored(tier, range(20))
            assert hits(tier, range(20)) == 20
            tier.delete([key_of(name) for name in range(20)])
        assert connections() - before <= 4  # two threads, the keeper, a look-up
    wait_for(lambda: connections() <= before)


def test_a_forked_child_speaks_through_connections_of_its_own(server: RedisServer) -> None:
    redis = Redis(space(server))
    name, data = "0" * 64, memoryview(b"parent")
    assert redis.get(name, 0, memoryview(bytearray(6)), 5.0) is None
    redis.put(name, data, 5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests
        child = os.fork()
    if child == 0:
        into = memoryview(bytearray(6))
        ok = all(redis.get(name, 0, into, 5.0) == b"parent" for _ in range(50))
        os._exit(0 if ok else 1)
    for _ in range(50):
        into = memoryview(bytearray(6))
        assert redis.get(name, 0, into, 5.0) == b"parent"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    redis.close()


def test_cancelled_loads_touch_nothing(server: RedisServer) -> None:
    with opened(space(server), limits=RemoteLimits(threads=1)) as tier:
        stored(tier, range(30), 256 << 10)
        targets = [bytearray(256 << 10) for _ in range(30)]
        wishes = [Load(key_of(n), memoryview(t), LAYOUT) for n, t in enumerate(targets)]
        job = tier.submit_load(wishes)
        tier.cancel(job)
        done = answers(tier, job, 30)
        for answer, target in zip(done, targets, strict=True):
            if answer.outcome is Outcome.FAILED:
                assert answer.reason == "cancelled" and not any(target)
            else:
                assert target == body_of(answer.item, 256 << 10)
        assert Outcome.FAILED in {answer.outcome for answer in done}
        assert threading.active_count() < 100
