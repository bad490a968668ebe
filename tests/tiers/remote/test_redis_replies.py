"""What comes of replies that are none: an error, or bytes that the frame's own digest judges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.inside import Redis, redis_tier

from .faulty_redis import FAULTS, HUGE, Fault, FaultyRedis, bulk, duplicate, hang

SOON_S = 5.0
KEY, BODY = "a" * 64, bytes(range(256)) * 16


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyRedis]:
    with FaultyRedis(3) as running:
        yield running


@pytest.fixture
def redis(server: FaultyRedis) -> Iterator[Redis]:
    backend = Redis(server.uri)
    backend.put(KEY, memoryview(BODY), SOON_S)
    yield backend
    assert fetched(backend) == BODY, "the exchange after it is not in order"
    backend.close()


def fetched(redis: Redis, timeout_s: float = SOON_S, size: int = len(BODY)) -> bytes | None:
    data = redis.get(KEY, 0, memoryview(bytearray(size)), timeout_s)
    return None if data is None else bytes(data)


def saying(data: bytes) -> Fault:
    return lambda server, reply: data


BAD = {
    "no number": b"$abc\r\n",
    "number too long": b"$99999999999999999999\r\n",
    "too much": bulk(BODY + b"x"),
    "huge": b"$%d\r\n" % HUGE,
    "nothing": b"$-1\r\n",
    "a number": b":12\r\n",
    "unknown kind": b"%1\r\n+a\r\n+b\r\n",
    "no end": b"$3\r\nabcde\r\n",
    "empty": b"\r\n",
    "silence": b"",
    "too deep": b"*1\r\n" * 5000 + b":1\r\n",
    "too many": b"*99999999\r\n",
    "one more": b"+OK\r\n+OK\r\n",
    "resp3": b"_\r\n",
    "an error": b"-ERR not today\r\n",
}


@pytest.mark.parametrize("name", BAD)
def test_a_payload_that_is_none(server: FaultyRedis, redis: Redis, name: str) -> None:
    server.plan.append(saying(BAD[name]))
    with pytest.raises(OSError):
        fetched(redis, 0.3)


@pytest.mark.parametrize("name", BAD)
def test_an_acknowledgement_that_is_none(server: FaultyRedis, redis: Redis, name: str) -> None:
    server.plan.append(saying(BAD[name]))
    with pytest.raises(OSError):
        redis.put(KEY, memoryview(BODY), 0.3)


@pytest.mark.parametrize("name", BAD)
def test_a_confirmation_that_is_none(server: FaultyRedis, redis: Redis, name: str) -> None:
    """A number that is none either: twelve of one key are there."""
    server.plan.append(saying(BAD[name]))
    with pytest.raises(OSError):
        redis.exists([KEY], 0.3)


def test_a_reply_to_another_request_is_noticed() -> None:
    """The form of the replies is in order, the number at the end is another's."""
    with FaultyRedis(commands=[b"ECHO"]) as server:
        redis = Redis(server.uri)
        for _ in range(2):
            server.plan.append(saying(bulk(b"0" * 16)))
        with pytest.raises(ConnectionError, match="not those to the requests"):
            redis.put(KEY, memoryview(BODY), SOON_S)
        with pytest.raises(ConnectionError, match="not those to the requests"):
            fetched(redis)
        redis.close()


def test_an_acknowledgement_is_never_that_of_an_earlier_store() -> None:
    """The server answers twice; without the echo, the second answer were that of the next SET."""
    with FaultyRedis(commands=[b"SET"]) as server:
        redis = Redis(server.uri)
        server.plan.append(duplicate)
        with pytest.raises(ConnectionError):
            redis.put(KEY, memoryview(BODY), SOON_S)
        server.plan.append(saying(b"-ERR not today\r\n"))
        with pytest.raises(PermissionError, match="not today"):
            redis.put(KEY, memoryview(BODY), SOON_S)
        redis.close()


def test_an_exchange_ends_at_its_deadline() -> None:
    with FaultyRedis(commands=[b"GETRANGE"]) as server:
        redis, begun_s = Redis(server.uri), time.monotonic()
        redis.put(KEY, memoryview(BODY), SOON_S)
        server.plan.append(hang)
        with pytest.raises(TimeoutError):
            fetched(redis, 0.1)
        assert time.monotonic() - begun_s < SOON_S
        server.stopping.set()
        redis.close()


TRICKLE = [b"$4096\r\n", *[b"x"] * 200]
POURED = [b"$%d\r\n" % HUGE, *[bytes(1 << 20)] * 64]


@pytest.mark.parametrize(
    ("parts", "pause_s", "within_s", "error"),
    [
        (TRICKLE, 0.01, 0.2, pytest.raises(TimeoutError)),
        (POURED, 0.0, SOON_S, pytest.raises(ConnectionError, match="longer than any")),
    ],
    ids=["trickle", "poured"],
)
def test_a_reply_without_end_is_left(
    parts: list[bytes], pause_s: float, within_s: float, error: Any
) -> None:
    """Of a trickle, each byte comes in time, the reply does not."""
    with FaultyRedis(commands=[b"GETRANGE"]) as server:
        left = parts.copy()

        def send(server: FaultyRedis, reply: bytes) -> bytes | None:
            while left and not server.stopping.wait(pause_s):
                server.sending(left.pop(0))
            return None

        redis = Redis(server.uri)
        redis.put(KEY, memoryview(BODY), SOON_S)
        server.plan.append(send)
        with error:
            fetched(redis, within_s)
        assert left
        redis.close()


@pytest.mark.parametrize("step", [0, 1])
def test_a_scan_without_end(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "MOST_SCANS", 20)
    with FaultyRedis(commands=[b"SCAN"]) as server:
        redis = Redis(server.uri)
        cursors = [bulk(b"%d" % (7 + step * number)) for number in range(30)]
        server.plan += [saying(b"*2\r\n" + cursor + b"*0\r\n") for cursor in cursors]
        with pytest.raises(ConnectionError, match="does not end"):
            list(redis.list(SOON_S))
        assert server.plan
        redis.close()


@pytest.mark.parametrize("said", ["MOVED 12 127.0.0.1:1", "NOPERM no", "LOADING", "WRONGTYPE no"])
def test_a_list_omits_no_frame_that_the_server_does_not_describe(said: str) -> None:
    """An erasure of a tenant was proven by a list without the frame of an error."""
    with FaultyRedis(commands=[b"STRLEN"]) as server:
        redis = Redis(server.uri)
        redis.put(KEY, memoryview(BODY), SOON_S)
        server.plan.append(saying(f"-{said}\r\n".encode()))
        with pytest.raises(OSError):
            list(redis.list(SOON_S))
        assert [found.name for found in redis.list(SOON_S)] == [KEY]
        redis.close()


@pytest.mark.parametrize("name", sorted({*FAULTS} - {"rot", "delay"}))
@pytest.mark.parametrize("command", [b"GETRANGE", b"SET", b"ECHO"])
def test_every_fault_is_an_error_or_for_the_frame(name: str, command: bytes) -> None:
    """What is not the reply is an error; a payload of another form is judged by its frame."""
    with FaultyRedis(3, commands=[command]) as server:
        redis, found = Redis(server.uri), None
        server.data[b"flowkv:" + KEY.encode()] = bytes(8) + BODY
        fetched(redis) if command != b"GETRANGE" else None
        server.plan.append(FAULTS[name])
        try:
            if command == b"SET":
                redis.put(KEY, memoryview(BODY), 0.3)
            else:
                found = fetched(redis, 0.3)
        except OSError:
            pass
        else:
            assert found is not None if command == b"GETRANGE" else name == "duplicate"
        assert fetched(redis) == BODY
        redis.close()


LINES = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda n: b"$%d\r\n" % n, st.integers(-3, 1 << 40)),
    st.builds(lambda n: b"*%d\r\n" % n, st.integers(-3, 1 << 20)),
    st.builds(lambda n: b":%d\r\n" % n, st.integers()),
    st.builds(bulk, st.binary(max_size=40)),
    st.sampled_from([b"+OK\r\n", b"-ERR x\r\n", b"-\r\n", b"\r\n", b"$-1\r\n", b"*0\r\n"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=6), fetch=st.booleans())
def test_garbage_raises_only_typed_errors(
    server: FaultyRedis, redis: Redis, lines: list[bytes], fetch: bool
) -> None:
    server.plan.append(saying(b"".join(lines)))
    try:
        if fetch:
            assert len(fetched(redis, 0.05, 32) or b"") <= 32
        else:
            redis.put(KEY, memoryview(BODY), 0.05)
    except OSError:
        pass
    server.plan.clear()
