"""A small server that speaks the protocol of Redis and breaks it on purpose, in this process."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

HUGE = 1 << 50

# What to do to the reply of one command: returns the bytes to send; None closes the connection.
Fault = Callable[["FaultyRedis", bytes], bytes | None]


def delay(seconds: float) -> Fault:
    def late(server: FaultyRedis, reply: bytes) -> bytes:
        server.stopping.wait(seconds)
        return reply

    return late


def drop(server: FaultyRedis, reply: bytes) -> bytes:
    return b""


def hang(server: FaultyRedis, reply: bytes) -> bytes | None:
    server.stopping.wait(30)
    return None


def shut(server: FaultyRedis, reply: bytes) -> bytes | None:
    return None


def truncate(server: FaultyRedis, reply: bytes) -> bytes | None:
    server.sending(reply[: len(reply) // 2])
    return None


def shorten(server: FaultyRedis, reply: bytes) -> bytes:
    return reply[: len(reply) // 2]


def duplicate(server: FaultyRedis, reply: bytes) -> bytes:
    return reply * 2


def corrupt(server: FaultyRedis, reply: bytes) -> bytes:
    """Flips one bit anywhere in it."""
    data = bytearray(reply)
    bit = server.random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def rot(server: FaultyRedis, reply: bytes) -> bytes:
    """Flips one bit of the value, so that the reply keeps its form."""
    start = reply.find(b"\r\n") + 2
    if not reply.startswith(b"$") or len(reply) - start < 3:
        return corrupt(server, reply)
    data = bytearray(reply)
    bit = server.random.randrange(8 * start, 8 * (len(data) - 2))
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def length(change: int) -> Fault:
    """Announces another length than it sends."""

    def wrong(server: FaultyRedis, reply: bytes) -> bytes:
        end = reply.find(b"\r\n")
        if not reply.startswith(b"$"):
            return b"$%d\r\n" % change + reply
        return b"$%d" % (int(reply[1:end]) + change) + reply[end:]

    return wrong


def another(server: FaultyRedis, reply: bytes) -> bytes:
    """The reply of another request."""
    return server.previous or b"+OK\r\n"


FAULTS: dict[str, Fault] = {
    "delay": delay(0.02),
    "drop": drop,
    "shut": shut,
    "truncate": truncate,
    "shorten": shorten,
    "duplicate": duplicate,
    "corrupt": corrupt,
    "rot": rot,
    "longer": length(1),
    "shorter": length(-1),
    "huge": length(HUGE),
    "negative": length(-HUGE),
    "another": another,
}


class FaultyRedis:
    """Serves a dict. `plan` holds faults for the next replies; then `chance` of a random one.

    Args:
        seed: Equal seeds and equal requests give equal faults.
        context: Serves TLS.
        commands: Whose replies are spoilt; the others are always in order.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        context: ssl.SSLContext | None = None,
        commands: Iterable[bytes] = (b"GETRANGE", b"SET", b"EXISTS", b"UNLINK", b"ECHO"),
    ) -> None:
        self.random, self.context, self.commands = random.Random(seed), context, set(commands)
        self.data: dict[bytes, bytes] = {}
        self.plan: deque[Fault] = deque()
        self.chance, self.spoilt, self.connections = 0.0, 0, 0
        self.previous = b""
        self.seen: list[bytes] = []
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.05)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._local = threading.local()
        self._threads[0].start()

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    @property
    def uri(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def sending(self, data: bytes) -> None:
        """Sends bytes to the client whose request is being served."""
        self._local.connection.sendall(data)

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(5)
        self._server.close()

    def __enter__(self) -> FaultyRedis:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                connection = self._server.accept()[0]
            except TimeoutError:
                continue
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as servers do
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self.context is not None:
                connection = self.context.wrap_socket(connection, server_side=True)
            self._local.connection = connection
            connection.settimeout(0.05)
            stream = Requests(connection, self.stopping)
            while (request := stream.next()) is not None:
                reply = self._spoil(request[0].upper(), self.answer(request))
                if reply is None:
                    return
                connection.sendall(reply)
        except OSError:
            return  # the client left
        finally:
            connection.close()

    def _spoil(self, command: bytes, reply: bytes) -> bytes | None:
        with self._lock:
            fault = None
            if command in self.commands:
                if self.plan:
                    fault = self.plan.popleft()
                elif self.random.random() < self.chance:
                    fault = self.random.choice(list(FAULTS.values()))
            spoilt = reply
        if fault is not None:
            self.spoilt += 1
            answer = fault(self, reply)
        else:
            answer = spoilt
        if command == b"GETRANGE":
            self.previous = reply
        return answer

    def answer(self, request: list[bytes]) -> bytes:
        """The right reply."""
        command, *rest = request
        name, data = command.upper(), self.data
        self.seen.append(name)
        with self._lock:
            if name == b"GETRANGE":
                first, last = int(rest[1]), int(rest[2])
                return bulk(data.get(rest[0], b"")[first : last + 1 if last >= 0 else None])
            if name == b"SET":
                if b"NX" in rest[2:] and rest[0] in data:
                    return b"$-1\r\n"
                data[rest[0]] = rest[1]
                return b"+OK\r\n"
            if name == b"EXISTS":
                return b":%d\r\n" % sum(key in data for key in rest)
            if name == b"STRLEN":
                return b":%d\r\n" % len(data.get(rest[0], b""))
            if name == b"UNLINK":
                return b":%d\r\n" % sum(data.pop(key, None) is not None for key in rest)
            if name == b"ECHO":
                return bulk(rest[0])
            if name == b"SCAN":
                keys = b"".join(bulk(key) for key in data)
                return b"*2\r\n" + bulk(b"0") + b"*%d\r\n" % len(data) + keys
            if name == b"INFO":
                return bulk(b"aof_enabled:0\r\nused_memory:0\r\nmaxmemory:0\r\n")
            return b"+OK\r\n"


class Requests:
    """Reads requests from a socket."""

    def __init__(self, connection: socket.socket, stopping: threading.Event) -> None:
        self._connection, self._stopping, self._held = connection, stopping, b""

    def next(self) -> list[bytes] | None:
        """The next request; None at the end."""
        line = self._until(b"\r\n")
        if line is None:
            return None
        request = []
        for _ in range(int(line[1:])):
            size = self._until(b"\r\n")
            argument = None if size is None else self._take(int(size[1:]) + 2)
            if argument is None:
                return None
            request.append(argument[:-2])
        return request

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._held:
            if not self._more():
                return None
        line, self._held = self._held.split(mark, 1)
        return line

    def _take(self, size: int) -> bytes | None:
        parts, held = [self._held], len(self._held)
        while held < size:
            if not (data := self._receive()):
                return None
            parts.append(data)
            held += len(data)
        whole = b"".join(parts)
        self._held = whole[size:]
        return whole[:size]

    def _more(self) -> bool:
        data = self._receive()
        self._held += data
        return bool(data)

    def _receive(self) -> bytes:
        end = time.monotonic() + 30
        while not self._stopping.is_set() and time.monotonic() < end:
            try:
                return self._connection.recv(1 << 18)
            except TimeoutError:
                continue
        return b""


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)
