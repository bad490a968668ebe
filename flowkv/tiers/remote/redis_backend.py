"""Frames in Valkey or Redis: one string per frame, in the memory of servers that others run.

    key   = prefix | ":" | 64 hex digits
    value = nanoseconds since 1970 when it was stored (8 bytes, big endian) | frame

A payload is received straight into the memory where the tier wants it (`resp`). The server decides
what stays: a key that expired, or that its `maxmemory-policy` evicted, is a miss.
"""

from __future__ import annotations

import errno
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar, cast

from flowkv.core.errors import ConfigError
from flowkv.tiers.remote.backend import ABSENT, Listed
from flowkv.tiers.remote.resp import (
    Bytes,
    Replies,
    Reply,
    ServerError,
    Wire,
    WireError,
    pack,
    pack_set,
)
from flowkv.tiers.remote.rewriting import rewrite
from flowkv.tiers.remote.wires import Nodes, Wires, is_true, shown, split

Result = TypeVar("Result")
Indices: TypeAlias = list[int]
Requests: TypeAlias = Sequence[Iterable[Bytes]]
Fits: TypeAlias = Callable[[Reply], bool]

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
            self._nodes = Nodes(plain, cluster=is_true(ours.get("cluster", "")))
        except ValueError:  # whose text may quote a part of the password
            raise ConfigError(
                f"{self.name} is no address of a server",
                "Write redis://host:6379/0, and % and two hex digits for signs in passwords",
            ) from None

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> int:
        """Receives part of a frame where it is wanted.

        Raises:
            OSError: As every backend.
        """
        key, end_s = self._key(name), time.monotonic() + timeout_s
        start = offset + _STAMP.size
        try:
            count = self._at(key, end_s, lambda wire: wire.fetch(key, start, into, end_s))
        except ServerError as error:
            if error.code == "WRONGTYPE":  # somebody else's list or set
                return ABSENT
            raise _translated(error) from error
        return count or ABSENT  # evicted between two requests, or never there

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
                return self._call(wires, [[pack(*words)]], end_s, _is_any)[0]

            rewrite(ask, end_s)

    def close(self) -> None:
        """Closes the connections."""
        self._nodes.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _at(self, key: bytes, end_s: float, work: Callable[[Wire], Result]) -> Result:
        """Does something with a wire to the server that has a key."""
        return self._with(self._nodes.of(key), end_s, work)

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

    def _call(self, wires: Wires, requests: Requests, end_s: float, fits: Fits) -> Replies:
        """Replies, none of them an error."""
        replies = self._with(wires, end_s, lambda wire: wire.call(requests, end_s, fits))
        for reply in replies:
            if isinstance(reply, ServerError) and reply.code in _MOVED:
                self._nodes.moved()
            _checked(reply)
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


def _is_any(reply: Reply) -> bool:
    return True


def _is_count(reply: Reply) -> bool:
    return reply in (0, 1)


def _is_scan(reply: Reply) -> bool:
    match reply:
        case [bytes(), [*keys]]:
            return all(isinstance(key, bytes) for key in keys)
    return False


def _checked(reply: Reply) -> Reply:
    if isinstance(reply, ServerError):
        raise _translated(reply) from reply
    return reply


def _translated(error: ServerError) -> OSError:
    """What a tier understands."""
    if error.code == "OOM":
        return OSError(errno.ENOSPC, "the server is full and evicts nothing")
    if error.code in _FINAL:
        return PermissionError(errno.EACCES, error.text)
    return ConnectionError(str(error))
