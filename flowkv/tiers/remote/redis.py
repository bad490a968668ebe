"""`RedisTier`: frames in Valkey or Redis, through redis-py."""

from __future__ import annotations

import errno
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, Unpack, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from flowkv.core.errors import ConfigError, MissingDependencyError, StoreError
from flowkv.tiers.base import UNBOUNDED
from flowkv.tiers.remote.backend import CHANGED, NAME, Listed, RemoteOptions, prefix_of, shown
from flowkv.tiers.remote.tier import RemoteTier

try:
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.connection import Connection, ConnectionPool, parse_url
    from redis.retry import Retry
except ImportError:
    raise MissingDependencyError("a tier in Valkey or Redis", "redis") from None

Words: TypeAlias = Sequence["bytes | memoryview"]
Reply: TypeAlias = "int | bytes | exceptions.ResponseError | list[Reply] | None"
Replies: TypeAlias = list[Reply]

# Erasure from the files of a Redis server: unlinked frames stay there until they are rewritten.

_PAUSE_S = 0.02


Sending: TypeAlias = Callable[..., Reply]
"""Function that sends the words of a request and returns the reply, or raises an `OSError`."""


def rewrite(ask: Sending, end_s: float) -> None:
    """Make a server rewrite its append-only file and its dump, if it keeps them.

    A rewrite that is under way may have begun before the deletion: wait for it, and start another.

    Args:
        ask: Sends requests to the server.
        end_s: Time limit (`time.monotonic`).

    Raises:
        OSError: The server refused, failed, or took longer.
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
    """Return whether a server saves dumps by itself, did so since its start, or came from one."""
    loaded = state.get("rdb_last_load_keys_loaded", "0")  # reported by Redis 7 and later
    if state.get("rdb_last_bgsave_time_sec", "-1") != "-1" or loaded != "0":
        return True
    match ask(b"CONFIG", b"GET", b"save"):
        case [_, bytes(points)]:
            return bool(points.strip())
    return False


def _idle(ask: Sending, end_s: float) -> dict[str, str]:
    """Return the server's report about its files, once it writes none in the background."""
    while True:
        reply = ask(b"INFO", b"persistence")
        lines = (reply if isinstance(reply, bytes) else b"").decode("ascii", "replace").split()
        state = dict(line.split(":", 1) for line in lines if ":" in line)
        busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")
        if "aof_enabled" not in state:
            raise OSError("the server does not report its files")
        if all(state.get(name, "0") == "0" for name in busy):
            return state
        if time.monotonic() + _PAUSE_S > end_s:
            raise TimeoutError("the server is still rewriting its files")
        time.sleep(_PAUSE_S)


# Connections: redis-py opens them (addresses, names, TLS, passwords, databases, the slots of a
# cluster) and reads replies. Its retries are switched off, since they ignore the deadline of an
# operation: the tier has its own.

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
CONNECT_S, CLUSTER_S = 2.0, 5.0
READ_BYTES, MOST_BYTES = 1 << 18, 64 << 20
"""Bytes that are received at a time, and most of the replies to requests without frames."""
OURS = ("prefix", "cluster", "ttl_s")
_FIXED = {"protocol": 2, "health_check_interval": 0, "decode_responses": False}
_TRUE = ("1", "true", "yes")
_CODE = re.compile(r"([A-Z]+) ")
_ONCE = Retry(NoBackoff(), 0)
_UNREADABLE = (exceptions.RedisError, ValueError, OverflowError, RecursionError)
"""Errors of redis-py for a connection that failed, or for bytes that are no reply."""


class _Received:
    """Socket that receives until a time, and so many bytes: a server may trickle, or never end.

    Args:
        within: The socket.
        end_s: The time (`time.monotonic`).
        left_bytes: Bytes that may still come.
    """

    def __init__(self, within: Any, end_s: float, left_bytes: int) -> None:
        self._within, self.end_s, self.left_bytes = within, end_s, left_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._within, name)

    def recv(self, size: int) -> bytes:
        """Receive some bytes.

        Raises:
            OSError: None came in time, or too many.
        """
        if limit_s := self._within.gettimeout():  # 0: what is there
            if (left_s := self.end_s - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self._within.settimeout(min(limit_s, left_s))
        data: bytes = self._within.recv(size)
        self.left_bytes -= len(data)
        if self.left_bytes < 0:
            raise OSError(errno.EMSGSIZE, "replies longer than any to such requests")
        return data

    def recv_into(self, buffer: Any) -> int:
        """Receive some bytes into memory, as `recv`."""
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def exchange(
    pool: ConnectionPool, requests: Sequence[Words], end_s: float, most_bytes: int = MOST_BYTES
) -> Replies:
    """Send requests over one connection, and return their replies, errors among them.

    The requests end with an echoed number, so that a lost, duplicate or misplaced reply is noticed
    before any reply is returned.

    Args:
        pool: Connections to the server.
        requests: Words of each request.
        end_s: Time limit (`time.monotonic`).
        most_bytes: Most bytes of the replies.

    Raises:
        OSError: The connection failed, and is closed with the idle ones: any number of the requests
            may have been carried out.
    """
    number, connection = b"%016x" % secrets.randbits(63), None
    try:
        connection = pool.get_connection()
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise exceptions.TimeoutError("no time was left")
        connection._sock.settimeout(left_s)
        connection._sock.end_s, connection._sock.left_bytes = end_s, most_bytes
        connection.send_packed_command(connection.pack_commands([*requests, (b"ECHO", number)]))
        *replies, echo = [_read(connection) for _ in range(len(requests) + 1)]
        if echo != number:
            raise exceptions.ConnectionError("the replies are not those to the requests")
        pool.release(connection)
        return replies
    except BaseException as error:
        if connection is not None:
            connection.disconnect()
            pool.release(connection)
        pool.disconnect(inuse_connections=False)  # idle connections are as old
        if isinstance(error, _UNREADABLE):
            raise translated(error) from error
        raise


def _read(connection: Connection) -> Reply:
    try:
        return connection.read_response(disable_decoding=True)
    except exceptions.ResponseError as error:
        return error


def translated(error: Exception) -> OSError:
    """Return the `OSError` of a `Backend` for an error of redis-py or of its server."""
    text = str(error)[:200]
    code = _CODE.match(text)
    if isinstance(error, exceptions.TimeoutError):
        return TimeoutError("the server did not answer in time")
    if isinstance(error, exceptions.OutOfMemoryError):
        return OSError(errno.ENOSPC, "the server is full and evicts nothing")
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return PermissionError(errno.EACCES, f"the server refuses the login ({text})")
    temporary = exceptions.ClusterError | exceptions.AskError | exceptions.TryAgainError
    other = code is not None and code[1] not in ("WRONGTYPE", "WRONGPASS")
    if isinstance(error, exceptions.ResponseError) and not (other or isinstance(error, temporary)):
        return PermissionError(errno.EACCES, text)
    replied = isinstance(error, exceptions.ResponseError)  # the server did not do it
    return ConnectionError(errno.EAGAIN if replied else errno.EIO, text)


class Nodes:
    """The servers behind a URI: one, or the primaries of a cluster.

    Args:
        uri: URI for redis-py.
        cluster: Whether the server is a node of a cluster.

    Raises:
        ConfigError: redis-py does not know an option.
    """

    def __init__(self, uri: str, *, cluster: bool) -> None:
        self._uri, self._lock = uri, threading.Lock()
        self._client: Any = None
        self._pools: dict[str, ConnectionPool] = {}
        self.cluster = cluster
        if not cluster:
            options = parse_url(uri) | _FIXED
            kind = options.pop("connection_class", Connection)
            try:
                kind(**options)
            except TypeError as error:
                raise ConfigError(
                    f"the URI has an option that redis-py does not know ({error})",
                    "Use prefix, ttl_s, cluster, or an option of redis-py's connections",
                ) from None
            self._pools[""] = _pool(kind, options)

    def for_key(self, key: bytes) -> ConnectionPool:
        """Return connections to the server that has a key.

        Raises:
            ConnectionError: No node of the cluster answers.
        """
        if not self.cluster:
            return self._pools[""]
        with self._connected() as client:
            return self._node(client.get_node_from_key(key))

    def all(self) -> list[ConnectionPool]:
        """Return connections to each server.

        Raises:
            ConnectionError: No node of the cluster answers.
        """
        if not self.cluster:
            return [self._pools[""]]
        with self._connected() as client:
            client.nodes_manager.initialize()  # servers may have come since the last look
            return [self._node(node) for node in client.get_primaries()]

    def drop_slot_map(self) -> None:
        """Drop the slot map of the cluster, so that the next call asks for it."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        """Close all connections."""
        self.drop_slot_map()
        with self._lock:
            for pool in self._pools.values():
                pool.disconnect()

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Yield the client of the cluster."""
        try:
            with self._lock:
                if self._client is None:
                    limits = {"socket_timeout": CLUSTER_S, "socket_connect_timeout": CLUSTER_S}
                    self._client = RedisCluster.from_url(self._uri, retry=_ONCE, **limits, **_FIXED)
                yield self._client
        except (exceptions.RedisError, exceptions.RedisClusterException) as error:
            raise ConnectionError(f"no node of the cluster answers ({error})") from error

    def _node(self, node: Any) -> ConnectionPool:
        if node is None:
            raise ConnectionError("no node of the cluster has the key")
        if node.name not in self._pools:
            pool = self._client.get_redis_connection(node).connection_pool
            self._pools[node.name] = _pool(pool.connection_class, dict(pool.connection_kwargs))
        return self._pools[node.name]


def _pool(kind: type[Any], options: dict[str, Any]) -> ConnectionPool:
    ours = {"retry": _ONCE, "socket_connect_timeout": CONNECT_S, "socket_timeout": CLUSTER_S}
    options = options | ours | {"socket_read_size": READ_BYTES}

    class Limited(kind):
        def _connect(self) -> _Received:
            return _Received(super()._connect(), time.monotonic() + CLUSTER_S, MOST_BYTES)

    return ConnectionPool(connection_class=Limited, **options)


def split(uri: str) -> tuple[str, dict[str, str]]:
    """Return the URI for redis-py, and FlowKV's own options: prefix, cluster, ttl_s.

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


# Frames in Valkey or Redis: one string per frame, in the memory of servers run by others.
#
#     key   = prefix | ":" | 64 hex digits
#     value = nanoseconds since 1970 of the store (8 bytes, big endian) | frame
#
# The server decides which frames stay: a key that expired, or that its `maxmemory-policy` evicted,
# is a miss.

MOST_FRAME_BYTES = 512 << 20
"""Longest string of a server with its default `proto-max-bulk-len`."""

_STAMP = struct.Struct(">Q")
_SWAP = b"""
if redis.call("GETRANGE", KEYS[1], 8, -1) ~= ARGV[1] then return 0 end
redis.call("SET", KEYS[1], ARGV[2])
return 1"""
_SCAN_KEYS, MOST_SCANS = 512, 1 << 20
"""Keys that a server looks at in one step of a scan, and most steps."""


class Redis:
    """`Backend` on one server, or on the primaries of a cluster.

    Args:
        uri: `redis://`, `rediss://` (TLS), `valkey://`, `valkeys://` or `unix://`, with options of
            redis-py behind the `?`, and FlowKV's `prefix=`, `cluster=true` and `ttl_s=`.

    Raises:
        ConfigError: The URI cannot be used.
        MissingDependencyError: redis-py is not installed.
    """

    asks = 2048

    def __init__(self, uri: str) -> None:
        plain, ours = split(uri)
        prefix, ttl_s = prefix_of(ours), ours.get("ttl_s", "")
        if ttl_s and not re.fullmatch("[1-9][0-9]{0,8}", ttl_s):
            raise ConfigError(f"ttl_s={ttl_s!r}", "Use whole seconds, at least 1")
        self.name = shown(uri)
        self._prefix = prefix.encode() + b":"
        self._options = (b"EX", ttl_s.encode()) if ttl_s else ()
        try:
            self._nodes = Nodes(plain, cluster=ours.get("cluster", "").lower() in _TRUE)
        except ValueError:  # the text of the error may quote a part of the password
            raise ConfigError(
                f"{self.name} is no address of a server",
                "Write redis://host:6379/0, and % and two hex digits for signs in passwords",
            ) from None

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        """Read part of a frame.

        Raises:
            OSError: As every backend.
        """
        key, end_s = self._key(name), time.monotonic() + timeout_s
        start = offset + _STAMP.size
        span = b"%d" % start, b"%d" % (start + len(into) - 1)
        most, pool = len(into) + READ_BYTES, self._nodes.for_key(key)
        reply = exchange(pool, [(b"GETRANGE", key, *span)], end_s, most)[0]
        if isinstance(reply, exceptions.ResponseError) and str(reply).startswith("WRONGTYPE"):
            return None  # another program's list or set
        data = self._checked(reply)
        if not isinstance(data, bytes) or len(data) > len(into):
            raise ConnectionError(errno.EIO, "a reply does not fit its request")
        return memoryview(data) if data else None  # evicted between two requests, or never there

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        """Write a frame as one string.

        Raises:
            OSError: As every backend; ENOSPC where the server is full and evicts nothing.
        """
        if data.nbytes + _STAMP.size > MOST_FRAME_BYTES:
            raise PermissionError(errno.EFBIG, "the frame is longer than a string may be")
        key, end_s = self._key(name), time.monotonic() + timeout_s
        value = b"".join((_STAMP.pack(time.time_ns()), data))
        options = self._options if NAME.fullmatch(name) else ()  # erasures stay
        request = (b"SET", key, value, *options)
        self._call(self._nodes.for_key(key), [request], end_s, lambda reply: reply == b"OK")

    def swap(self, name: str, was: bytes | None, data: memoryview, timeout_s: float) -> None:
        """Write a string if its bytes are still `was`.

        Raises:
            OSError: As every backend.
        """
        key, value = self._key(name), b"".join((_STAMP.pack(time.time_ns()), data))
        request = (b"EVAL", _SWAP, b"1", key, was or b"", value)
        end_s = time.monotonic() + timeout_s
        if self._call(self._nodes.for_key(key), [request], end_s, _is_count) == [0]:
            raise OSError(errno.EBUSY, CHANGED)

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Unlink the strings of these names.

        Raises:
            OSError: As every backend.
        """
        self._each(b"UNLINK", names, timeout_s)

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Return which names exist, asked in one go.

        Raises:
            OSError: As every backend.
        """
        return [reply == 1 for reply in self._each(b"EXISTS", names, timeout_s)]

    def list(self, timeout_s: float) -> Iterator[Listed]:
        """Scan the keys with the prefix of this backend, a few hundred at a time.

        Raises:
            OSError: As every backend.
        """
        for pool in self._nodes.all():
            cursor, before = b"0", b""
            for _ in range(MOST_SCANS):
                before, end_s = cursor, time.monotonic() + timeout_s
                cursor, found = self._scan(pool, before, end_s)
                yield from found
                if cursor in (b"0", before):
                    break
            if cursor != b"0":
                raise ConnectionError(errno.EIO, "the server's list of keys does not end")

    def rewrite(self, timeout_s: float) -> None:
        """Make every server rewrite the files that it would restart from, and wait for that.

        Raises:
            OSError: As every backend; a server refused or failed to, or it took longer.
        """
        end_s = time.monotonic() + timeout_s
        for pool in self._nodes.all():

            def ask(*words: bytes, pool: ConnectionPool = pool) -> Reply:
                return self._call(pool, [words], end_s)[0]

            rewrite(ask, end_s)

    def close(self) -> None:
        """Close the connections to all servers."""
        self._nodes.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _each(self, command: bytes, names: Sequence[str], timeout_s: float) -> Replies:
        """Return the replies to one request per name, sent to each server together."""
        end_s = time.monotonic() + timeout_s
        keys = [self._key(name) for name in names]
        groups: dict[int, tuple[ConnectionPool, list[int]]] = {}
        for index, key in enumerate(keys):
            pool = self._nodes.for_key(key)
            groups.setdefault(id(pool), (pool, []))[1].append(index)
        replies: Replies = [None] * len(keys)
        for pool, indices in groups.values():
            requests = [(command, keys[index]) for index in indices]
            answers = self._call(pool, requests, end_s, _is_count)
            for index, answer in zip(indices, answers, strict=True):
                replies[index] = answer
        return replies

    def _call(
        self,
        pool: ConnectionPool,
        requests: Sequence[Words],
        end_s: float,
        fits: Callable[[Reply], bool] | None = None,
    ) -> Replies:
        """Return the replies; raise for an error, and for a reply that does not fit."""
        replies = [self._checked(reply) for reply in exchange(pool, requests, end_s)]
        if fits and not all(map(fits, replies)):
            raise ConnectionError(errno.EIO, "a reply does not fit its request")
        return replies

    def _checked(self, reply: Reply) -> Reply:
        if not isinstance(reply, exceptions.ResponseError):
            return reply
        if isinstance(reply, exceptions.AskError | exceptions.ClusterDownError):
            self._nodes.drop_slot_map()
        raise translated(reply) from reply

    def _scan(
        self, pool: ConnectionPool, cursor: bytes, end_s: float
    ) -> tuple[bytes, Sequence[Listed]]:
        """Take one step of a scan; return the next cursor, and the frames found."""
        scan = (b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", b"%d" % _SCAN_KEYS)
        reply = self._call(pool, [scan], end_s, _is_scan)[0]
        following, keys = cast(tuple[bytes, Sequence[bytes]], reply)
        names = {key[len(self._prefix) :].decode("ascii", "replace") for key in keys}
        names = {name for name in names if NAME.fullmatch(name)}
        requests: list[Words] = []
        for name in names:
            key = self._key(name)
            requests += [(b"STRLEN", key), (b"GETRANGE", key, b"0", b"7")]
        replies = exchange(pool, requests, end_s)
        found = []
        for name, length, stamp in zip(names, replies[::2], replies[1::2], strict=True):
            if str(stamp).startswith("WRONGTYPE"):
                continue  # another program's list or set
            stamp, length = self._checked(stamp), self._checked(length)
            if not isinstance(stamp, bytes) or len(stamp) != _STAMP.size:
                continue
            if isinstance(length, int) and length > _STAMP.size:
                found.append(Listed(name, length - _STAMP.size, *_STAMP.unpack(stamp)))
        return following, found


def _is_count(reply: Reply) -> bool:
    return reply in (0, 1)


def _is_scan(reply: Reply) -> bool:
    match reply:
        case [bytes(), [*keys]]:
            return all(isinstance(key, bytes) for key in keys)
    return False


class RedisTier(RemoteTier):
    """Frames in Valkey or Redis.

    The server evicts and expires as it is configured (`maxmemory`, `maxmemory-policy`, `ttl_s=`);
    an evicted frame is a miss. `STORED` survives a crash of the server as far as the server keeps
    files: all of it with `appendonly yes` and `appendfsync always`.

    Args:
        uri: As `Redis`.
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the address.
        envelope: Seals and checks frames.
        clock: Source of time.
        limits: Limits of concurrency, memory and time.

    Raises:
        ConfigError: The URI or the capacity cannot be used.
        MissingDependencyError: redis-py is not installed.
        StoreError: The server refuses access.
    """

    def __init__(
        self, uri: str, capacity_bytes: int = UNBOUNDED, **options: Unpack[RemoteOptions]
    ) -> None:
        self._redis, self._asked = Redis(uri), 0
        super().__init__(self._redis, capacity_bytes, **options)

    def erase(self, keys: Sequence[bytes]) -> int:
        """Remove frames from the server and from its files, and verify that they are gone.

        Raises:
            StoreError: The server did not confirm it.
        """
        keys, limit_s = [*keys, *self._unproven], self.limits.erase_s
        gone = super().erase(keys)
        if not keys:
            return gone
        try:
            self._aside.call(lambda: self._redis.rewrite(limit_s), limit_s)
        except OSError as error:
            self._unproven.update(keys)
            raise StoreError(
                f"{self.name} may still have erased frames in its files ({error})",
                "Allow INFO, CONFIG GET, BGREWRITEAOF and BGSAVE, or rewrite the files there",
            ) from error
        return gone

    def refresh(self) -> None:
        """Look up some of the known frames in turn, and forget those that the server evicted.

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
                self.known.mark_missing(key, fact)
