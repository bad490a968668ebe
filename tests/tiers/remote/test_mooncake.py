"""The tier in Mooncake Store, on a real one."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowkv import Tier
from flowkv.testing import check_tier
from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.remote.tier import RemoteLimits, RemoteTier
from tests.clock import wait_for
from tests.inside import ConfigError, StoreError

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
from .faulty import check_late_start, check_swap, swaps
from .servers_mooncake import MooncakeCluster, binary, mooncake_cluster

binary()  # skips the module where the store does not run

from tests.inside import Mooncake, MooncakeTier  # noqa: E402

EVER_S = 20.0
BRIEF = RemoteLimits(threads=2, close_s=0.5, open_s=5.0)
numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with mooncake_cluster(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


def space(cluster: MooncakeCluster) -> str:
    """A URI under which nothing was stored yet."""
    return f"{cluster.uri}&prefix=test{next(numbers)}"


def opened(uri: str, limits: RemoteLimits = BRIEF) -> contextlib.closing[MooncakeTier]:
    return contextlib.closing(MooncakeTier(uri, limits=limits))


@pytest.mark.usefixtures("briefly")
def test_conformance(cluster: MooncakeCluster) -> None:
    """Many tiers on one client, since tearing one down takes a second."""
    store = Mooncake(cluster.uri)
    list(store.list(EVER_S))

    class Part(Mooncake):
        def __init__(self) -> None:
            self.__dict__.update(store.__dict__, _prefix=f"test{next(numbers)}")

        def close(self) -> None:
            """Leaves the client to the others."""

    def fresh(capacity_bytes: int) -> Tier:
        return RemoteTier(Part(), capacity_bytes, limits=BRIEF)

    check_tier(fresh, lossy=True, capacity_bytes=1 << 20)
    store.close()


def test_frames_and_their_stripes(cluster: MooncakeCluster) -> None:
    uri = space(cluster)
    with opened(uri) as tier:
        check_parts(tier, 64 << 10, 20, ((0, 0), (19, 1), (7, 10), (3, 0)))
        stored(tier, range(4))
        assert hits(tier, range(5)) == 4
    with opened(uri) as tier:  # another process asks
        assert tier.contains([key_of(n) for n in range(5)]) == [True] * 4 + [False]
        assert tier.erase([key_of(n) for n in range(3)]) == 3
        assert hits(tier, range(5)) == 1
        assert outcomes(get(tier, [9])) == [("miss", "")]


def test_what_the_backend_reads(cluster: MooncakeCluster) -> None:
    store = Mooncake(space(cluster))
    name, data = "0" * 64, os.urandom(100_000)
    assert list(store.list(EVER_S)) == []
    store.put(name, memoryview(data), EVER_S)
    store.put(name, memoryview(data[::-1]), EVER_S)  # replaces
    into = memoryview(bytearray(200_000))
    for offset, size in ((0, 200_000), (0, 100_000), (0, 4096), (0, 9000), (50, 10), (99_990, 50)):
        assert store.get(name, offset, into[:size], EVER_S) == data[::-1][offset : offset + size]
    assert store.get("1" * 64, 0, into, EVER_S) is None
    assert store.exists([name, "1" * 64], EVER_S) == [True, False]
    with pytest.raises(PermissionError, match="registered memory"):
        store.put(name, memoryview(bytes(17 << 20)), EVER_S)
    store.delete([name, "1" * 64], EVER_S)
    assert store.exists([name], EVER_S) == [False]
    store.close()


def test_what_another_wrote_since_is_not_replaced(cluster: MooncakeCluster) -> None:
    store = Mooncake(space(cluster))
    check_swap(store)
    client, held = store._session.client, store._key("erased.lock")  # type: ignore[union-attr]
    for age_s, free in ((5, False), (100, True)):  # another holds it; or did, and was killed
        client.put(held, b"%020d" % (time.time_ns() - age_s * 10**9) + bytes(16))
        assert not swaps(store, b"22", memoryview(b"three"))
        assert swaps(store, b"22", memoryview(b"three")) is free
        client.remove(held, True)
    store.close()


def test_a_full_store(cluster: MooncakeCluster) -> None:
    """It evicts, or says that it has no room: misses, and bytes that are right."""
    with opened(space(cluster)) as tier:
        size = 4 << 20
        body = body_of("body", size)
        wishes = [Store(key_of(("big", n)), info_of(size), memoryview(body)) for n in range(24)]
        done = answers(tier, tier.submit_store(wishes, deadline_s=20), len(wishes))
        assert {a.outcome for a in done} <= {Outcome.STORED, Outcome.FAILED}
        assert {a.reason for a in done if a.outcome is Outcome.FAILED} <= {"full"}
        target = bytearray(size)
        for answer in done:
            load = Load(answer.key, memoryview(target), LAYOUT)
            loaded = answers(tier, tier.submit_load([load]), 1)[0]
            assert loaded.outcome in (Outcome.HIT, Outcome.MISS), loaded
            assert loaded.outcome is Outcome.MISS or target == body, "WRONG BYTES"
        tier.erase([wish.key for wish in wishes])


@pytest.mark.parametrize(
    "uri",
    ["mooncake:///x", "redis://h", "mooncake://h:x", "mooncake://h?a=b", "mooncake://h?prefix=:"],
)
def test_bad_addresses(uri: str) -> None:
    with pytest.raises(ConfigError):
        Mooncake(uri)


def test_nobody_there_is_a_warning_and_then_misses(tmp_path: Path) -> None:
    cluster = MooncakeCluster(tmp_path)
    with pytest.warns(UserWarning, match="does not answer"):
        tier = MooncakeTier(cluster.uri, limits=BRIEF._replace(every_s=0.1))
    check_late_start(tier, cluster)


def test_everything_is_a_miss_after_a_restart(tmp_path: Path) -> None:
    with mooncake_cluster(tmp_path) as cluster, opened(cluster.uri) as tier:
        stored(tier, range(4))
        cluster.stop()
        target = bytearray(8192)
        load = Load(key_of(0), memoryview(target), LAYOUT)
        done = answers(tier, tier.submit_load([load], deadline_s=0.3), 1)[0]
        assert done.outcome is Outcome.FAILED and not any(target)
        cluster.start()
        wait_for(lambda: {a.outcome for a in get(tier, range(4))} == {Outcome.MISS})
        wait_for(lambda: {a.outcome for a in put(tier, range(4))} == {Outcome.STORED})
        assert hits(tier, range(4)) == 4
        cluster.withdraw()  # the master still says that they exist
        done = answers(tier, tier.submit_load([load], deadline_s=0.5), 1)
        assert done[0].outcome is not Outcome.HIT


@pytest.mark.parametrize("whom", ["lender", "master"])
def test_a_frozen_server_costs_deadlines_and_nothing_else(tmp_path: Path, whom: str) -> None:
    """Calls come back late, with bytes for memory that nobody else was given."""
    with mooncake_cluster(tmp_path) as cluster, opened(cluster.uri) as tier:
        stored(tier, range(6), 256 << 10)
        assert hits(tier, range(6), 256 << 10) == 6
        frozen = cluster if whom == "lender" else cluster.master
        frozen.freeze()
        targets = [bytearray(256 << 10) for _ in range(6)]
        loads = [Load(key_of(n), memoryview(t), LAYOUT) for n, t in enumerate(targets)]
        begun_s = time.monotonic()
        done = answers(tier, tier.submit_load(loads, deadline_s=0.3), 6)
        took_s = time.monotonic() - begun_s
        assert took_s < 5, "how exact it is, is measured by the benchmark"
        late = [a.item for a in done if a.outcome is Outcome.FAILED]
        before = {item: bytes(targets[item]) for item in late}
        frozen.thaw()
        wait_for(lambda: hits(tier, range(6), 256 << 10) == 6)
        assert all(targets[item] == was for item, was in before.items()), "a late answer landed"


class FakeClient:
    """A client that fails as it is told to."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def register_buffer(self, address: int, n_bytes: int) -> int:
        return 0

    def get_into(self, key: str, address: int, n_bytes: int) -> int:
        assert not self.closed, "used after it was torn down"
        self.gate.wait(EVER_S)
        assert not self.closed, "torn down while it was used"
        return self.codes.pop(0)

    def close(self) -> int:
        self.closed = True
        return 0


@pytest.mark.parametrize("code", [-800, -1, -200, -600 - 101, -900, -704])
def test_slots_of_doubtful_transfers_are_retired(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.inside import mooncake

    clients: list[FakeClient] = []

    def set_up(self: Mooncake) -> mooncake.MooncakeSession:
        clients.append(FakeClient())
        return mooncake.MooncakeSession(clients[-1], 1 << 20)

    monkeypatch.setattr(Mooncake, "_set_up", set_up)
    store = Mooncake("mooncake://127.0.0.1:1")
    into = memoryview(bytearray(100_000))
    list(store.list(EVER_S))
    ended = code in (-200, -900, -704)
    for turn in range(6):
        clients[-1].codes.append(code)
        if code == -704:
            assert store.get("0" * 64, 0, into, EVER_S) is None
            continue
        with pytest.raises(OSError):
            store.get("0" * 64, 0, into, EVER_S)
        session = store._session
        if ended:
            assert session is not None and session.retired_bytes == 0
        elif turn < 2:
            assert session is not None and session.retired_bytes == (turn + 1) * 102_400
        elif turn == 2:  # a quarter is retired: this client is torn down, and another one set up
            assert session is None and clients[0].closed
            list(store.list(EVER_S))
    assert len(clients) == (1 if ended else 2)
    store.close()
    assert all(client.closed for client in clients)


def test_what_comes_back_late_is_retired_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.inside import mooncake

    client = FakeClient()
    monkeypatch.setattr(Mooncake, "_set_up", lambda self: mooncake.MooncakeSession(client, 4 << 20))
    store = Mooncake("mooncake://127.0.0.1:1")
    list(store.list(EVER_S))
    client.gate.clear()
    client.codes += [-704]
    threading.Timer(0.1, client.gate.set).start()
    with pytest.raises(OSError):  # not a miss either: nobody knows what it waited for
        store.get("0" * 64, 0, memoryview(bytearray(100_000)), 0.01)
    assert store._session is not None and store._session.retired_bytes == 102_400
    store.close()


def test_a_client_is_not_torn_down_while_a_call_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.inside import mooncake

    client = FakeClient()
    monkeypatch.setattr(
        Mooncake, "_set_up", lambda self: mooncake.MooncakeSession(client, 400 << 10)
    )
    store = Mooncake("mooncake://127.0.0.1:1")
    into = memoryview(bytearray(200 << 10))
    client.gate.clear()
    client.codes += [-800, -704]

    def slow() -> None:
        with contextlib.suppress(OSError):
            store.get("0" * 64, 0, into, 0.01)  # late as well: retired, whatever it says

    threads = [threading.Thread(target=slow) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: store._session is not None and store._session.users == 2)
    client.gate.set()
    for thread in threads:
        thread.join(EVER_S)
    assert client.closed and store._session is None
    store.close()


@pytest.mark.parametrize("codes", [[], [0], [0, 2], [0, 0, 0]])
def test_codes_that_do_not_fit_the_keys_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, codes: list[int]
) -> None:
    from tests.inside import mooncake

    client: Any = FakeClient()
    monkeypatch.setattr(Mooncake, "_set_up", lambda self: mooncake.MooncakeSession(client, 4 << 20))
    with contextlib.closing(RemoteTier(Mooncake("mooncake://127.0.0.1:1"), limits=BRIEF)) as tier:
        client.batch_remove = lambda keys, force: [0 for _ in keys]
        client.batch_is_exist = lambda keys: codes
        assert tier.contains([key_of(1), key_of(2)]) == [False, False]
        with pytest.raises(StoreError, match="did not confirm that 2 frames are gone"):
            tier.erase([key_of(1), key_of(2)])
        client.batch_is_exist = lambda keys: [0 for _ in keys]
        client.batch_remove = lambda keys, force: codes
        with pytest.raises(StoreError, match="did not confirm"):
            tier.erase([key_of(1), key_of(2)])
