from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import (
    MAX_LINE_BYTES,
    MAX_REPLY_BYTES,
    ServerError,
    Wire,
    WireError,
    pack,
    pack_set,
)

from .faulty_redis import FAULTS, HUGE, FaultyRedis, bulk, duplicate, hang

SOON_S = 5.0


def end(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def connected(server: FaultyRedis) -> Wire:
    return Wire(socket.create_connection(("127.0.0.1", server.port), SOON_S))


@contextmanager
def served(reply: Callable[[bytes], bytes]) -> Iterator[Wire]:
    """A wire whose other end answers the first exchange with what is made of its number."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        data = b""
        while not data.endswith(b"\r\n") or b"ECHO\r\n$16\r\n" not in data:
            data += theirs.recv(1 << 16)
        with suppress(OSError):  # it was closed because of the first bytes
            theirs.sendall(reply(data[-18:-2]))
            theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    wire = Wire(ours)
    yield wire
    wire.close()
    thread.join(SOON_S)
    theirs.close()


def test_requests_are_packed_as_the_protocol_says() -> None:
    assert pack(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
    parts = pack_set(b"k", [memoryview(b"abc"), memoryview(b"de")], b"EX", b"9")
    whole = b"".join(bytes(part) for part in parts)
    assert whole == pack(b"SET", b"k", b"abcde", b"EX", b"9")


def test_every_kind_of_reply() -> None:
    said = b"+OK\r\n:-12\r\n$-1\r\n$0\r\n\r\n*-1\r\n"
    said += b"*3\r\n:1\r\n$2\r\n\r\n\r\n*1\r\n+x\r\n-ERR no way\r\n"
    with served(lambda number: said + bulk(number)) as wire:
        *fine, error = wire.call([[pack(b"PING")]] * 7, end())
        assert fine == [b"OK", -12, None, b"", None, [1, b"\r\n", [b"x"]]]
        assert isinstance(error, ServerError) and error.code == "ERR" and not wire.broken


def test_a_payload_lands_where_it_is_wanted() -> None:
    with FaultyRedis() as server:
        wire, body = connected(server), bytes(range(256)) * 4000
        assert wire.call([pack_set(b"k", [memoryview(body[:99]), memoryview(body[99:])])], end())
        target = memoryview(bytearray(len(body) + 10))
        assert wire.fetch(b"k", 0, target, end()) == len(body)
        assert target[:-10] == body and target[-10:] == bytes(10)
        assert wire.fetch(b"k", 1000, target[:7], end()) == 7
        assert target[:7] == body[1000:1007]
        assert wire.fetch(b"nothing", 0, target, end()) == 0
        assert wire.fetch(b"k", len(body), target, end()) == 0
        assert not wire.broken
        wire.close()


def test_an_error_instead_of_a_payload_leaves_the_wire_in_order() -> None:
    with served(lambda number: b"-WRONGTYPE of value\r\n" + bulk(number)) as wire:
        with pytest.raises(ServerError) as caught:
            wire.fetch(b"k", 0, memoryview(bytearray(10)), end())
        assert caught.value.code == "WRONGTYPE" and not wire.broken


BAD = {
    "no number": b"$abc\r\n",
    "number too long": b"$99999999999999999999\r\n",
    "too much": b"$11\r\n12345678901\r\n",
    "huge": b"$%d\r\n" % HUGE,
    "negative": b"$-2\r\n",
    "nothing": b"$-1\r\n",
    "another kind": b"+OK\r\n",
    "unknown kind": b"%1\r\n+a\r\n+b\r\n",
    "no end": b"$3\r\nabcde\r\n",
    "line for ever": b"+" + b"x" * (MAX_LINE_BYTES + 100),
    "long line": b"-" + b"x" * (MAX_LINE_BYTES + 1) + b"\r\n",
    "empty": b"\r\n",
    "silence": b"",
}


@pytest.mark.parametrize("name", BAD)
def test_a_payload_that_is_none(name: str) -> None:
    with served(lambda number: BAD[name] + bulk(number)) as wire:
        with pytest.raises(WireError):
            wire.fetch(b"k", 0, memoryview(bytearray(10)), end())
        assert wire.broken
        with pytest.raises(WireError, match="broken connection"):
            wire.call([[pack(b"PING")]], end())


WRONG = {
    "too deep": b"*1\r\n" * 9 + b":1\r\n",
    "too many": b"*99999999\r\n",
    "too long": b"$%d\r\n" % (MAX_REPLY_BYTES + 1),
    "too long together": (b"*2\r\n" + bulk(bytes(MAX_REPLY_BYTES)) + b"$1\r\nx\r\n"),
    "one more": b"+OK\r\n+OK\r\n",
    "resp3": b"_\r\n",
    "no end": b"$2\r\nabc\r\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_short_reply_that_is_none(name: str) -> None:
    with served(lambda number: WRONG[name] + bulk(number)) as wire:
        with pytest.raises(WireError) as caught:
            wire.call([[pack(b"PING")]], end())
        assert wire.broken and caught.value.reason == "protocol"


def test_a_reply_to_another_request_is_noticed() -> None:
    """The number at the end is the point: the form of the reply is in order."""
    with served(lambda number: b"$3\r\nabc\r\n" + bulk(b"0" * 16)) as wire:
        target = memoryview(bytearray(10))
        with pytest.raises(WireError, match="end of its exchange"):
            wire.fetch(b"k", 0, target, end())
    with served(lambda number: b"+OK\r\n" + bulk(b"0" * 16)) as wire:
        request = [[pack(b"SET", b"k", b"v")]]
        with pytest.raises(WireError, match="number"):
            wire.call(request, end())


def test_an_acknowledgement_is_never_that_of_an_earlier_store() -> None:
    """The server answers twice; without the echo, the second answer were that of the next SET."""
    with FaultyRedis(commands=[b"SET"]) as server:
        wire = connected(server)
        server.plan.append(duplicate)
        with pytest.raises(WireError):
            wire.call([[pack(b"SET", b"a", b"1")]], end())
        assert wire.broken
        wire.close()


def test_the_deadline_is_one_for_all_of_an_exchange() -> None:
    with FaultyRedis(commands=[b"GETRANGE"]) as server:
        server.plan.append(hang)
        server.data[b"k"] = bytes(100)
        wire, begun_s = connected(server), time.monotonic()
        with pytest.raises(WireError) as caught:
            wire.fetch(b"k", 0, memoryview(bytearray(100)), end(0.1))
        assert caught.value.reason == "deadline" and 0.1 <= time.monotonic() - begun_s < 5
        wire.close()
    with served(lambda number: b"$8000\r\n" + bytes(20)) as wire:
        with pytest.raises(WireError) as caught:
            wire.fetch(b"k", 0, memoryview(bytearray(8000)), end())
        assert caught.value.reason == "closed" and wire.broken


def test_a_trickle_does_not_prolong_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        theirs.sendall(b"$100000\r\n")
        while not stop.wait(0.01):
            try:
                theirs.sendall(b"x" * 10)
            except OSError:
                return

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    wire, begun_s = Wire(ours), time.monotonic()
    with pytest.raises(WireError) as caught:
        wire.fetch(b"k", 0, memoryview(bytearray(100000)), end(0.2))
    assert caught.value.reason == "deadline" and time.monotonic() - begun_s < 5
    stop.set()
    wire.close()
    thread.join()
    theirs.close()


def test_a_server_that_does_not_read_does_not_hold_us() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        wire, body = Wire(ours), memoryview(bytes(16 << 20))
        with pytest.raises(WireError) as caught:
            wire.call([pack_set(b"k", [body])], end(0.1))
        assert caught.value.reason == "deadline" and wire.broken
        wire.close()


@pytest.mark.parametrize("name", sorted({*FAULTS} - {"rot", "delay"}))
@pytest.mark.parametrize("command", [b"GETRANGE", b"SET", b"ECHO"])
def test_every_fault_breaks_the_wire_or_nothing(name: str, command: bytes) -> None:
    """What is not exactly the reply is an error; a flipped bit of a payload is for the frame."""
    body = bytes(range(256)) * 16
    with FaultyRedis(3, commands=[command]) as server:
        server.data[b"k"] = body
        wire, target = connected(server), memoryview(bytearray(len(body)))
        wire.fetch(b"k", 0, target, end()) if command != b"GETRANGE" else None
        server.plan.append(FAULTS[name])
        try:
            if command == b"SET":
                request = [pack(b"SET", b"k", b"v")]
                assert wire.call([request], end(0.3), lambda reply: reply == b"OK") == [b"OK"]
            else:
                assert wire.fetch(b"k", 0, target, end(0.3)) == len(body)
        except (WireError, ServerError) as error:
            assert wire.broken or isinstance(error, ServerError)
        else:
            if (name, command) == ("duplicate", b"ECHO"):  # seen by the next exchange at the latest
                with pytest.raises(WireError):
                    wire.call([[pack(b"PING")]], end(0.3))
            else:
                assert name == "corrupt" and command == b"GETRANGE", "a fault went unnoticed"
                assert sum(a != b for a, b in zip(target, body, strict=True)) == 1
        wire.close()


LINES = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda n: b"$%d\r\n" % n, st.integers(-3, 1 << 40)),
    st.builds(lambda n: b"*%d\r\n" % n, st.integers(-3, 1 << 20)),
    st.builds(lambda n: b":%d\r\n" % n, st.integers()),
    st.builds(bulk, st.binary(max_size=40)),
    st.sampled_from([b"+OK\r\n", b"-ERR x\r\n", b"-\r\n", b"\r\n", b"$-1\r\n", b"*0\r\n"]),
)


@given(lines=st.lists(LINES, max_size=6), echo=st.booleans(), fetch=st.booleans())
def test_garbage_raises_only_typed_errors(lines: list[bytes], echo: bool, fetch: bool) -> None:
    """Any bytes end in a reply that the wire can vouch for, or in an error of ours; bounded."""
    target = bytearray(64)
    with served(lambda number: b"".join(lines) + (bulk(number) if echo else b"")) as wire:
        try:
            if fetch:
                assert wire.fetch(b"k", 0, memoryview(target)[:32], end()) <= 32
            else:
                wire.call([[pack(b"PING")]], end())
            assert echo and not wire.broken
        except ServerError:
            assert not wire.broken
        except WireError:
            assert wire.broken
    assert target[32:] == bytes(32), "bytes written past the memory that was given"
