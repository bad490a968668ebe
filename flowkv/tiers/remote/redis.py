"""`RedisTier`: frames in Valkey or Redis."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, Unpack, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from flowkv.core.config import without_secrets
from flowkv.core.errors import ConfigError, MissingDependencyError, StoreError
from flowkv.tiers.base import UNBOUNDED
from flowkv.tiers.remote.backend import Listed, RemoteOptions
from flowkv.tiers.remote.tier import RemoteTier

# The wire of Redis and Valkey (RESP2): requests out of frames, payloads into their slots.
#
# A client library opens the connection (addresses, names, TLS, passwords, clusters); from then on
# its socket belongs to a `Wire`. A payload is received by one system call into the memory where
# it is wanted: no buffer in between, and one turn of the interpreter's lock for a whole frame.
#
# Every exchange ends with an echoed number. A reply that was lost, sent twice or meant for another
# request is noticed before anything is believed, and a wire that was ever in doubt is `broken`: it
# can only be closed. Lengths are compared with what was asked for before memory is touched.

Bytes: TypeAlias = bytes | bytearray | memoryview
Reply: TypeAlias = "int | bytes | ServerError | list[Reply] | None"
Replies: TypeAlias = list[Reply]
Fits: TypeAlias = Callable[[Reply], bool]

MAX_LINE_BYTES = 4096
MAX_REPLY_BYTES = 8 << 20
MAX_ITEMS = 1 << 16
MAX_DEPTH = 4

_BUFFER_BYTES = 1 << 16
_SIP_BYTES = 64  # enough for the line before a payload, and little to copy of what follows it
_MOST_PARTS = 512  # below IOV_MAX
_CRLF = b"\r\n"
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]{0,18})")
_TIMEVAL = struct.Struct("@ll")


class WireError(StoreError):
    """A connection that can only be closed.

    Args:
        reason: "deadline", "closed" or "protocol".
        problem: What is wrong, one sentence without a full stop.
    """

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem, "Close the connection and open another one")
        self.reason = reason


class ServerError(StoreError):
    """An error that the server answered; the connection is in order.

    Attributes:
        code: Its first word: "OOM", "MOVED", "LOADING", "NOPERM", "WRONGTYPE", "ERR", ...
    """

    def __init__(self, line: bytes) -> None:
        text = line[:200].decode("ascii", "replace")
        super().__init__(f"the server answered {text!r}", "Look at its configuration and its log")
        self.code, self.text = text.split(" ", 1)[0], text


def pack(*arguments: Bytes) -> bytes:
    """One request of short arguments."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts += (b"$%d\r\n" % len(argument), argument, _CRLF)  # type: ignore[arg-type]
    return b"".join(parts)


def pack_set(key: bytes, value: Sequence[memoryview], *options: bytes) -> list[Bytes]:
    """A SET whose value is sent from where it lies, in parts."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        *(3 + len(options), len(key), key),
        sum(part.nbytes for part in value),
    )
    tail = b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
    return [head, *value, _CRLF + tail]


class Wire:
    """One connection, used by one thread at a time.

    Args:
        sock: Connected and logged in; TLS or not. It is the wire's from now on.

    Attributes:
        broken: An exchange did not come to its proper end; only `close` is left.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.broken = False
        self._socket, self._tls = sock, isinstance(sock, ssl.SSLSocket)
        if not self._tls:
            sock.settimeout(None)  # deadlines are given to the kernel instead
        self._number = secrets.randbits(62)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._low = self._high = self._budget = self._items = 0
        self._end_s = 0.0

    def fetch(self, key: bytes, offset: int, target: memoryview, end_s: float) -> int:
        """Receives bytes of a value, from `offset` on, as many as `target` holds or the value has.

        Args:
            key: Of the value.
            offset: First byte wanted.
            target: Writable bytes; undefined beyond what is returned, and after an error.
            end_s: When to give up (`time.monotonic`).

        Returns:
            Bytes received; 0 if the key is not there.

        Raises:
            ServerError: The server refused.
            WireError: The connection is broken.
        """
        span = b"%d" % offset, b"%d" % (offset + target.nbytes - 1)
        echo = self._send([pack(b"GETRANGE", key, *span)], end_s)
        line = self._line(_SIP_BYTES)
        if line[:1] == b"-":
            self._finish(echo)
            raise ServerError(line[1:])
        size = self._size(line, b"$", target.nbytes)
        if size is None:
            raise _doubt("a range of a value is nothing at all")
        end = memoryview(bytearray(len(_CRLF + echo)))
        self._fill([target[:size], end])
        if end != _CRLF + echo:
            raise _doubt("a value is not followed by the end of its exchange")
        self.broken = False
        return size

    def call(
        self,
        requests: Sequence[Iterable[Bytes]],
        end_s: float,
        fits: Fits | None = None,
    ) -> list[Reply]:
        """Sends requests, each in parts, and returns their short replies.

        Errors that the server answers are among the replies.

        Args:
            requests: Their parts.
            end_s: When to give up (`time.monotonic`).
            fits: Whether a reply that is no error can be one to such a request.

        Raises:
            WireError: The connection is broken; which requests were carried out is not known.
        """
        echo = self._send([part for request in requests for part in request], end_s)
        self._budget, self._items = MAX_REPLY_BYTES, MAX_ITEMS
        replies = [self._reply(0) for _ in requests]
        if fits and not all(isinstance(reply, ServerError) or fits(reply) for reply in replies):
            raise _doubt("a reply is none to its request")
        self._finish(echo)
        return replies

    def close(self) -> None:
        """Closes the connection."""
        self.broken = True
        self._socket.close()

    # --- sending -----------------------------------------------------------------------------

    def _send(self, parts: list[Bytes], end_s: float) -> bytes:
        """Sends requests and the echo that ends them; returns the reply to that."""
        if self.broken:
            raise WireError("closed", "a broken connection was used again")
        self.broken = True  # until the echo has come
        self._end_s = end_s
        if self._low != self._high:
            raise _doubt("there is a reply to no request")
        self._number += 1
        number = b"%016x" % self._number
        views = [memoryview(part) for part in (*parts, pack(b"ECHO", number))]
        try:
            while views:
                left_s = self._arm(socket.SO_SNDTIMEO)
                if self._tls:
                    self._socket.settimeout(left_s)
                    self._socket.sendall(views.pop(0))
                else:
                    views = _beyond(views, self._socket.sendmsg(views[:_MOST_PARTS]))
        except OSError as error:
            raise _broken(error) from error
        return b"$%d\r\n%b\r\n" % (len(number), number)

    def _arm(self, option: int) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if not self._tls:
            whole = int(left_s)
            timeval = _TIMEVAL.pack(whole, max(1, int((left_s - whole) * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)
        return left_s

    # --- receiving ---------------------------------------------------------------------------

    def _receive(self, views: list[memoryview], flags: int = 0) -> int:
        """Receives what there is, waiting for the first byte; how many bytes came."""
        try:
            left_s = self._arm(socket.SO_RCVTIMEO)
            if self._tls:
                self._socket.settimeout(left_s)
                count = self._socket.recv_into(views[0])
            else:
                count = self._socket.recvmsg_into(views, 0, flags)[0]
        except OSError as error:
            raise _broken(error) from error
        if not count:
            raise WireError("closed", "the server closed the connection")
        return count

    def _fill(self, views: list[memoryview]) -> None:
        """Fills all views: what is left in the buffer first, then from the socket."""
        views = _beyond(views, 0)
        while views and self._low < self._high:
            count = min(views[0].nbytes, self._high - self._low)
            views[0][:count] = self._view[self._low : self._low + count]
            self._low += count
            views = _beyond(views, count)
        while views:
            views = _beyond(views, self._receive(views, socket.MSG_WAITALL))

    def _line(self, appetite: int = _BUFFER_BYTES) -> bytes:
        """The next line, without its end."""
        while (end := self._buffer.find(_CRLF, self._low, self._high)) < 0:
            held = self._high - self._low
            if held > MAX_LINE_BYTES:
                raise _doubt("a line does not end")
            self._view[:held] = bytes(self._view[self._low : self._high])
            self._low, self._high = 0, held
            self._high += self._receive([self._view[held : held + appetite]])
        line = bytes(self._view[self._low : end])
        self._low = end + len(_CRLF)
        if len(line) > MAX_LINE_BYTES:
            raise _doubt("a line is too long")
        return line

    def _finish(self, echo: bytes) -> None:
        end = memoryview(bytearray(len(echo)))
        self._fill([end])
        if end != echo:
            raise _doubt("an exchange did not end with its number")
        self.broken = False

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        self._items -= 1
        if self._items < 0 or depth > MAX_DEPTH:
            raise _doubt("a reply has too many parts")
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest)
        if kind == b":":
            return _number(rest)
        if kind == b"*":
            count = self._size(line, b"*", self._items)
            return None if count is None else [self._reply(depth + 1) for _ in range(count)]
        size = self._size(line, b"$", self._budget)
        if size is None:
            return None
        self._budget -= size
        data = bytearray(size + len(_CRLF))
        self._fill([memoryview(data)])
        if not data.endswith(_CRLF):
            raise _doubt("a value does not end where it said")
        return bytes(data[:size])

    def _size(self, line: bytes, kind: bytes, most: int) -> int | None:
        """The length that a line announces; None where it announces nothing."""
        if line[:1] != kind:
            raise _doubt(f"a reply begins with {line[:16]!r}")
        size = _number(line[1:])
        if size == -1:
            return None
        if not 0 <= size <= most:
            raise _doubt(f"a reply announces {size} bytes or parts, {most} are possible")
        return size


def _number(digits: bytes) -> int:
    if not _NUMBER.fullmatch(digits):
        raise _doubt(f"{digits[:24]!r} is no number")
    return int(digits)


def _beyond(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of views after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *(v for v in views[index + 1 :] if v.nbytes)]
        count -= view.nbytes
    return []


def _doubt(problem: str) -> WireError:
    return WireError("protocol", problem)


def _broken(error: OSError) -> WireError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return WireError("deadline", "the server did not answer in time")
    return WireError("closed", f"the connection failed ({error.strerror or error})")


# Erasure from the files of a Redis server: what was unlinked is there until they are rewritten.

_PAUSE_S = 0.02


Sending: TypeAlias = Callable[..., Reply]
"""Sends the words of a request to a server: its reply; an `OSError` if it fails or is an error."""


def rewrite(ask: Sending, end_s: float) -> None:
    """Has a server write its append-only file and its dump anew, those that it keeps.

    A rewriting that is under way may have begun before the deletion: it is waited for, not counted.

    Args:
        ask: Reaches the server.
        end_s: When to give up (`time.monotonic`).

    Raises:
        OSError: The server does not let us, failed, or took longer.
    """
    state = _idle(ask, end_s)
    if state.get("aof_enabled") == "1":
        ask(b"BGREWRITEAOF")
        if _idle(ask, end_s).get("aof_last_bgrewrite_status") != "ok":
            raise OSError("the server could not rewrite its append-only file")
    if _dumps(ask, state):
        ask(b"BGSAVE")
        if _idle(ask, end_s).get("rdb_last_bgsave_status") != "ok":
            raise OSError("the server could not write a new dump")


def _dumps(ask: Sending, state: dict[str, str]) -> bool:
    """Whether a server saves dumps by itself, did so since it was started, or came from one."""
    loaded = state.get("rdb_last_load_keys_loaded", "0")  # says Redis 7 and later
    if state.get("rdb_last_bgsave_time_sec", "-1") != "-1" or loaded != "0":
        return True
    match ask(b"CONFIG", b"GET", b"save"):
        case [_, bytes(points)]:
            return bool(points.strip())
    return False


def _idle(ask: Sending, end_s: float) -> dict[str, str]:
    """What the server says about its files, once it writes none in the background."""
    while True:
        reply = ask(b"INFO", b"persistence")
        lines = (reply if isinstance(reply, bytes) else b"").decode("ascii", "replace").split()
        state = dict(line.split(":", 1) for line in lines if ":" in line)
        busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")
        if "aof_enabled" not in state:
            raise OSError("the server does not say what it keeps in files")
        if all(state.get(name, "0") == "0" for name in busy):
            return state
        if time.monotonic() + _PAUSE_S > end_s:
            raise TimeoutError("the server is still rewriting its files")
        time.sleep(_PAUSE_S)


# Wires to the servers of one URI: opened by redis-py, kept while they work, never shared.
#
# redis-py knows addresses, names, TLS, passwords, databases and the slots of a cluster. Its retries
# are switched off, since they do not know the deadline of an operation: the tier has its own.

try:
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.connection import Connection, parse_url
    from redis.retry import Retry
except ImportError:
    raise MissingDependencyError("a tier in Valkey or Redis", "redis") from None

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
CLUSTER_S = 5.0
OURS = ("prefix", "cluster", "ttl_s")
_FIXED = {"protocol": 2, "health_check_interval": 0, "decode_responses": False}
_TRUE = ("1", "true", "yes")


class Wires:
    """Wires to one server, the one used last on top. Thread-safe; a forked child starts anew.

    Args:
        kind: Connection class of redis-py.
        options: Its arguments.

    Raises:
        ConfigError: redis-py does not know one of them.
    """

    def __init__(self, kind: type[Any], options: dict[str, Any]) -> None:
        self._kind, self._options, self._lock = kind, options, threading.Lock()
        self._idle: list[Wire] = []
        self._pid, self._open = os.getpid(), True
        try:
            kind(**options)
        except TypeError as error:
            raise ConfigError(
                f"the URI has an option that redis-py does not know ({error})",
                "Use prefix, ttl_s, cluster, or an option of redis-py's connections",
            ) from None

    def borrow(self, end_s: float) -> Wire:
        """A wire that nobody else uses; give it back.

        Args:
            end_s: When to give up connecting (`time.monotonic`).

        Raises:
            PermissionError: The server does not let us in.
            TimeoutError: It does not answer.
            ConnectionError: It is not there.
        """
        with self._lock:
            if self._pid != os.getpid():  # our parent speaks through the others
                self._idle, self._pid = [], os.getpid()
            if self._idle:
                return self._idle.pop()
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time was over before a connection was open")
        return self._connect(left_s)

    def _connect(self, timeout_s: float) -> Wire:
        """Connects and logs in; several calls may each take the time."""
        connection = self._kind(**self._options)
        connection.retry = Retry(NoBackoff(), 0)
        connection.socket_connect_timeout = connection.socket_timeout = timeout_s
        try:
            connection.connect()
        except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
            raise PermissionError(f"the server refuses the login ({error})") from error
        except exceptions.TimeoutError as error:
            raise TimeoutError("the server did not let us in in time") from error
        except exceptions.ConnectionError as error:
            raise ConnectionError(str(error)) from error
        except exceptions.RedisError as error:
            raise PermissionError(f"the server refuses the connection ({error})") from error
        # From here on the socket is the wire's: redis-py must neither read nor close it.
        sock, connection._sock = connection._sock, None
        return Wire(sock)

    def give_back(self, wire: Wire) -> None:
        """Takes a wire back. If it broke, those that idle are as old: they are closed too."""
        with self._lock:
            broken = [wire, *self._idle] if wire.broken else []
            if broken:
                self._idle = []
            elif self._open:
                self._idle.append(wire)
            else:
                broken = [wire]
        for each in broken:
            each.close()

    def close(self) -> None:
        """Closes the idle ones, and those given back later."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()


class Nodes:
    """The servers behind a URI: one, or the primaries of a cluster.

    Args:
        uri: As redis-py takes it.
        cluster: Whether the server is a node of a cluster.
    """

    def __init__(self, uri: str, *, cluster: bool) -> None:
        self._uri, self._lock = uri, threading.Lock()
        self._client: Any = None
        self._wires: dict[str, Wires] = {}
        self.cluster = cluster
        if not cluster:
            options = parse_url(uri) | _FIXED
            kind = options.pop("connection_class", Connection)
            self._wires[""] = Wires(kind, options)

    def of(self, key: bytes) -> Wires:
        """Wires to the server that has a key.

        Raises:
            ConnectionError: No node of the cluster answers.
        """
        if not self.cluster:
            return self._wires[""]
        with self._lock:
            return self._node(self._connected().get_node_from_key(key))

    def all(self) -> list[Wires]:
        """Wires to each server.

        Raises:
            ConnectionError: No node of the cluster answers.
        """
        if not self.cluster:
            return [self._wires[""]]
        with self._lock:
            return [self._node(node) for node in self._connected().get_primaries()]

    def moved(self) -> None:
        """Keys lie elsewhere now: asks the cluster again, at the next call."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        """Closes all wires."""
        self.moved()
        with self._lock:
            for wires in self._wires.values():
                wires.close()

    def _connected(self) -> Any:
        if self._client is None:
            try:
                self._client = RedisCluster.from_url(
                    self._uri,
                    retry=Retry(NoBackoff(), 0),
                    socket_timeout=CLUSTER_S,
                    socket_connect_timeout=CLUSTER_S,
                    **_FIXED,
                )
            except exceptions.RedisError as error:
                raise ConnectionError(f"no node of the cluster answers ({error})") from error
        return self._client

    def _node(self, node: Any) -> Wires:
        if node is None:
            raise ConnectionError("no node of the cluster has the key")
        if node.name not in self._wires:
            pool = self._client.get_redis_connection(node).connection_pool
            options = dict(pool.connection_kwargs)
            self._wires[node.name] = Wires(pool.connection_class, options)
        return self._wires[node.name]


def split(uri: str) -> tuple[str, dict[str, str]]:
    """A URI as redis-py takes it, and what is meant for us: prefix, cluster, ttl_s.

    Raises:
        ConfigError: The scheme is unknown, or an option is not the user's to set.
    """
    parts = urlsplit(uri)
    scheme = parts.scheme.lower().replace("valkey", "redis")
    if parts.scheme.lower() not in SCHEMES:
        raise ConfigError(f"{parts.scheme!r} is no scheme of Redis", f"Use {', '.join(SCHEMES)}")
    query = dict(parse_qsl(parts.query))
    if taken := sorted(query.keys() & {*_FIXED, "retry", "retry_on_error", "retry_on_timeout"}):
        raise ConfigError(f"option {taken[0]!r} cannot be set in the URI", "Leave it out")
    ours: dict[str, str] = {name: query.pop(name) for name in OURS if name in query}
    rest = f"?{urlencode(query)}" if query else ""
    return f"{scheme}://{parts.netloc}{parts.path}{rest}", ours


def shown(uri: str) -> str:
    """A URI without user, password and options."""
    return without_secrets(uri).partition("?")[0].replace("//...@", "//")


# Frames in Valkey or Redis: one string per frame, in the memory of servers that others run.
#
#     key   = prefix | ":" | 64 hex digits
#     value = nanoseconds since 1970 when it was stored (8 bytes, big endian) | frame
#
# A payload is received straight into the memory where the tier wants it (`resp`). The server
# decides what stays: a key that expired, or that its `maxmemory-policy` evicted, is a miss.

Result = TypeVar("Result")
Indices: TypeAlias = list[int]
Requests: TypeAlias = Sequence[Iterable[Bytes]]

MOST_FRAME_BYTES = 512 << 20
"""Longest string of a server with its default `proto-max-bulk-len`."""

_STAMP = struct.Struct(">Q")
_NAME = re.compile("[0-9a-f]{64}")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SCAN_KEYS = 512
_FINAL = {"NOAUTH", "NOPERM", "WRONGPASS", "READONLY", "ERR", "WRONGTYPE"}
_MOVED = {"MOVED", "ASK", "CLUSTERDOWN"}


class Redis:
    """A `Backend` on one server, or on the primaries of a cluster.

    Args:
        uri: `redis://`, `rediss://` (TLS), `valkey://`, `valkeys://` or `unix://`, with what
            redis-py takes behind the `?`, and `prefix=`, `cluster=true` and `ttl_s=` of ours.

    Raises:
        ConfigError: The URI cannot be used.
        MissingDependencyError: redis-py is not installed.
    """

    asks = 2048

    def __init__(self, uri: str) -> None:
        plain, ours = split(uri)
        prefix, ttl_s = ours.get("prefix", "flowkv"), ours.get("ttl_s", "")
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"prefix {prefix!r}", "Use up to 64 letters, digits, '_', '.' or '-'")
        if ttl_s and not re.fullmatch("[1-9][0-9]{0,8}", ttl_s):
            raise ConfigError(f"ttl_s={ttl_s!r}", "Use whole seconds, at least 1")
        self.name = shown(uri)
        self._prefix = prefix.encode() + b":"
        self._options = (b"EX", ttl_s.encode()) if ttl_s else ()
        try:
            self._nodes = Nodes(plain, cluster=ours.get("cluster", "").lower() in _TRUE)
        except ValueError:  # whose text may quote a part of the password
            raise ConfigError(
                f"{self.name} is no address of a server",
                "Write redis://host:6379/0, and % and two hex digits for signs in passwords",
            ) from None

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        """Receives part of a frame where it is wanted.

        Raises:
            OSError: As every backend.
        """
        key, end_s = self._key(name), time.monotonic() + timeout_s
        start = offset + _STAMP.size
        try:
            wires = self._nodes.of(key)
            count = self._with(wires, end_s, lambda wire: wire.fetch(key, start, into, end_s))
        except ServerError as error:
            if error.code == "WRONGTYPE":  # somebody else's list or set
                return None
            raise _translated(error) from error
        return into[:count] if count else None  # evicted between two requests, or never there

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        """Sets a string, from where the frame lies.

        Raises:
            OSError: As every backend; ENOSPC where the server is full and evicts nothing.
        """
        if data.nbytes + _STAMP.size > MOST_FRAME_BYTES:
            raise PermissionError(errno.EFBIG, "the frame is longer than a string may be")
        key, end_s = self._key(name), time.monotonic() + timeout_s
        stamp = memoryview(_STAMP.pack(time.time_ns()))
        request = pack_set(key, [stamp, data], *self._options)
        self._call(self._nodes.of(key), [request], end_s, lambda reply: reply == b"OK")

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Unlinks strings.

        Raises:
            OSError: As every backend.
        """
        self._each(b"UNLINK", names, timeout_s)

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Asks for all in one go.

        Raises:
            OSError: As every backend.
        """
        return [reply == 1 for reply in self._each(b"EXISTS", names, timeout_s)]

    def list(self, timeout_s: float) -> Iterator[Listed]:
        """Scans the keys with our prefix, a few hundred at a time.

        Raises:
            OSError: As every backend.
        """
        for wires in self._nodes.all():
            cursor = b"0"
            while True:
                end_s = time.monotonic() + timeout_s
                cursor, found = self._scan(wires, cursor, end_s)
                yield from found
                if cursor == b"0":
                    break

    def rewrite(self, timeout_s: float) -> None:
        """Has every server write anew the files that it would restart from, and waits for that.

        Raises:
            OSError: As every backend; a server refused or failed to, or it took longer.
        """
        end_s = time.monotonic() + timeout_s
        for wires in self._nodes.all():

            def ask(*words: bytes, wires: Wires = wires) -> Reply:
                return self._call(wires, [[pack(*words)]], end_s)[0]

            rewrite(ask, end_s)

    def close(self) -> None:
        """Closes the connections."""
        self._nodes.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _with(self, wires: Wires, end_s: float, work: Callable[[Wire], Result]) -> Result:
        wire = wires.borrow(end_s)
        try:
            return work(wire)
        except ServerError as error:
            if error.code in _MOVED:
                self._nodes.moved()
            raise
        except WireError as error:
            if error.reason == "deadline":
                raise TimeoutError(str(error)) from error
            raise ConnectionError(str(error)) from error
        finally:
            wires.give_back(wire)

    def _each(self, command: bytes, names: Sequence[str], timeout_s: float) -> Replies:
        """The replies to one request per name, sent to each server together."""
        end_s = time.monotonic() + timeout_s
        keys = [self._key(name) for name in names]
        groups: dict[int, tuple[Wires, Indices]] = {}
        for index, key in enumerate(keys):
            wires = self._nodes.of(key)
            groups.setdefault(id(wires), (wires, []))[1].append(index)
        replies: Replies = [None] * len(keys)
        for wires, indices in groups.values():
            requests = [[pack(command, keys[index])] for index in indices]
            answers = self._call(wires, requests, end_s, _is_count)
            for index, answer in zip(indices, answers, strict=True):
                replies[index] = answer
        return replies

    def _call(
        self, wires: Wires, requests: Requests, end_s: float, fits: Fits | None = None
    ) -> Replies:
        """Replies, none of them an error."""
        replies = self._with(wires, end_s, lambda wire: wire.call(requests, end_s, fits))
        for reply in replies:
            if isinstance(reply, ServerError):
                if reply.code in _MOVED:
                    self._nodes.moved()
                raise _translated(reply) from reply
        return replies

    def _scan(self, wires: Wires, cursor: bytes, end_s: float) -> tuple[bytes, Sequence[Listed]]:
        """One step of a scan: the next cursor, and what was found."""
        scan = pack(b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", b"%d" % _SCAN_KEYS)
        reply = self._call(wires, [[scan]], end_s, _is_scan)[0]
        following, keys = cast(tuple[bytes, Sequence[bytes]], reply)
        names = {key[len(self._prefix) :].decode("ascii", "replace") for key in keys}
        names = {name for name in names if _NAME.fullmatch(name)}
        requests = []
        for name in names:
            key = self._key(name)
            requests += [[pack(b"STRLEN", key)], [pack(b"GETRANGE", key, b"0", b"7")]]
        replies = self._with(wires, end_s, lambda wire: wire.call(requests, end_s))
        found = []
        for name, length, stamp in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(length, int) and isinstance(stamp, bytes) and length > _STAMP.size:
                found.append(Listed(name, length - _STAMP.size, *_STAMP.unpack(stamp)))
        return following, found


def _is_count(reply: Reply) -> bool:
    return reply in (0, 1)


def _is_scan(reply: Reply) -> bool:
    match reply:
        case [bytes(), [*keys]]:
            return all(isinstance(key, bytes) for key in keys)
    return False


def _translated(error: ServerError) -> OSError:
    """What a tier understands."""
    if error.code == "OOM":
        return OSError(errno.ENOSPC, "the server is full and evicts nothing")
    if error.code in _FINAL:
        return PermissionError(errno.EACCES, error.text)
    return ConnectionError(str(error))


class RedisTier(RemoteTier):
    """Frames in Valkey or Redis.

    The server evicts and expires as it was told to (`maxmemory`, `maxmemory-policy`, `ttl_s=`);
    what it let go is a miss. `STORED` survives a crash of the server as far as the server keeps
    files: all of it with `appendonly yes` and `appendfsync always`.

    Args:
        uri: As `Redis`.
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the address.
        envelope: How frames are wrapped and checked.
        clock: Source of time.
        limits: How much it may do, and how long it may take.

    Raises:
        ConfigError: The URI or the capacity cannot be used.
        MissingDependencyError: redis-py is not installed.
        StoreError: The server refuses us.
    """

    def __init__(
        self, uri: str, capacity_bytes: int = UNBOUNDED, **options: Unpack[RemoteOptions]
    ) -> None:
        self._redis, self._asked = Redis(uri), 0
        super().__init__(self._redis, capacity_bytes, **options)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Removes frames from the server and from its files, and asks whether they are gone.

        Raises:
            StoreError: The server did not confirm it.
        """
        gone, limit_s = super().erase(keys), self.limits.erase_s
        if not keys:
            return gone
        try:
            self._aside.call(lambda: self._redis.rewrite(limit_s), limit_s)
        except OSError as error:
            raise StoreError(
                f"{self.name} may still have erased frames in its files ({error})",
                "Allow INFO, CONFIG GET, BGREWRITEAOF and BGSAVE, or rewrite the files there",
            ) from error
        return gone

    def refresh(self) -> None:
        """Asks for some of the known frames in turn, and forgets those that the server let go.

        Raises:
            OSError: The server failed.
        """
        facts = self.known.facts()
        start = self._asked if self._asked < len(facts) else 0
        asked = facts[start : start + self._redis.asks]
        self._asked = start + len(asked)
        there = self._redis.exists([key.hex() for key, _ in asked], self.limits.call_s)
        for (key, fact), found in zip(asked, there, strict=True):
            if not found:
                self.known.drop(key, fact)
