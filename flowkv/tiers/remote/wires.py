"""Wires to the servers of one URI: opened by redis-py, kept while they work, never shared.

redis-py knows addresses, names, TLS, passwords, databases and the slots of a cluster. Its retries
are switched off, since they do not know the deadline of an operation: the tier has its own.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.core.sizes import without_secrets
from flowkv.tiers.remote.resp import Wire

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


class Target(Protocol):
    """Where the wires of one server lead."""

    def connect(self, timeout_s: float) -> Wire:
        """Opens a wire; several calls may each take the time."""
        ...


class Server:
    """One server, as redis-py describes it.

    Args:
        kind: Connection class of redis-py.
        options: Its arguments.
    """

    def __init__(self, kind: type[Any], options: dict[str, Any]) -> None:
        self._kind, self._options = kind, options
        try:
            kind(**options)
        except TypeError as error:
            raise ConfigError(
                f"the URI has an option that redis-py does not know ({error})",
                "Use prefix, ttl_s, cluster, or an option of redis-py's connections",
            ) from None

    def connect(self, timeout_s: float) -> Wire:
        """Connects and logs in.

        Raises:
            PermissionError: The server does not let us in.
            TimeoutError: It does not answer.
            ConnectionError: It is not there.
        """
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


class Wires:
    """Idle wires to one server, the one used last on top. Thread-safe; a forked child starts anew.

    Args:
        target: Opens new ones.
    """

    def __init__(self, target: Target) -> None:
        self._target, self._lock = target, threading.Lock()
        self._idle: list[Wire] = []
        self._pid, self._open = os.getpid(), True

    def borrow(self, end_s: float) -> Wire:
        """A wire that nobody else uses; give it back.

        Args:
            end_s: When to give up connecting (`time.monotonic`).

        Raises:
            OSError: As `Server.connect`.
        """
        with self._lock:
            if self._pid != os.getpid():  # our parent speaks through the others
                self._idle, self._pid = [], os.getpid()
            if self._idle:
                return self._idle.pop()
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time was over before a connection was open")
        return self._target.connect(left_s)

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
            self._wires[""] = Wires(Server(kind, options))

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
            target = Server(pool.connection_class, dict(pool.connection_kwargs))
            self._wires[node.name] = Wires(target)
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


def is_true(text: str) -> bool:
    """Whether an option of a URI says yes."""
    return text.lower() in _TRUE
