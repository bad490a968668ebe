"""Mooncake Store: frames in the memory of many machines, reached over TCP, RDMA or NVLink.

Bytes move between the store and an arena that is registered with it once. Three answers are not
trusted: `get` returns b"" for a miss and for a failure alike; a key that the master lists may be
unreadable; after a restart the store may be empty. A frame is served only after its own check.

A call on a peer that hangs returns after half a minute, and a transfer that failed may still write:
its slot is not reused before the client is torn down (DESIGN D10).
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack
from urllib.parse import parse_qsl, urlsplit

from flowkv.core import errors
from flowkv.core.config import parse_size, without_secrets
from flowkv.core.errors import ConfigError, MissingDependencyError, MissingLibraryError
from flowkv.core.reaper import begin
from flowkv.tiers.base import UNBOUNDED
from flowkv.tiers.io.engine import Arena, ArenaSlot
from flowkv.tiers.remote.backend import Listed, RemoteLimits, RemoteOptions, prefix_of
from flowkv.tiers.remote.tier import RemoteTier

# A client of Mooncake Store and the memory registered with it, opened and closed together.


class MooncakeSession:
    """Client of the store, with its registered memory.

    Args:
        client: The client, set up.
        n_bytes: Size of the memory.

    Attributes:
        users: Calls under way; the session is not closed before they have returned.
        retired_bytes: Bytes of slots in which transfers that failed may still write.

    Raises:
        ConnectionError: The memory could not be registered.
    """

    def __init__(self, client: Any, n_bytes: int) -> None:
        self.client, self.arena, self.users = client, Arena(n_bytes), 0
        self._settled, self.retired_bytes = threading.Condition(), 0
        if code := client.register_buffer(self.arena.address, self.arena.n_bytes):
            raise ConnectionError(f"the memory could not be registered (code {code})")

    def acquire(self, n_bytes: int, timeout_s: float) -> ArenaSlot:
        """Return a slot of the registered memory; wait until there is room for it.

        Raises:
            PermissionError: The memory is smaller than the request.
            TimeoutError: There was no room in time.
        """
        if n_bytes > self.arena.n_bytes:
            raise PermissionError(errno.EFBIG, "the frame is larger than the registered memory")
        with self._settled:
            slot = self._settled.wait_for(lambda: self.arena.acquire(n_bytes), timeout_s)
        if slot is None:
            raise TimeoutError("the registered memory is in use; raise buffer= in the URI")
        return slot

    def free(self, slot: ArenaSlot, ended: bool) -> None:
        """Free a slot; or retire it, if bytes may still be moving."""
        with self._settled:
            if ended:
                self.arena.give_back(slot)
            else:
                self.retired_bytes += slot.taken_bytes
            self._settled.notify_all()

    def close(self) -> None:
        """Tear the client down: after that all transfers have ended, and all memory is free."""
        self.client.close()
        self.client = None
        self.arena.close()


try:
    from mooncake.store import MooncakeDistributedStore
except ModuleNotFoundError:
    raise MissingDependencyError("a tier in Mooncake Store", "mooncake") from None
except ImportError as error:
    raise MissingLibraryError(
        f"a tier in Mooncake Store needs libraries of the system ({error})",
        f"As root: {errors.remedy(errors.missing() or errors.MOONCAKE)}",
    ) from error

DEFAULT_PORT = 50051
DEFAULT_BUFFER_BYTES = 128 << 20
CLIENT_BUFFER_BYTES = 1 << 20  # buffer of the client itself, for reads outside of registered memory
PROBE_BYTES = 4096
LIMITS = RemoteLimits(threads=4, spares=4)
"""Fewer calls than usual: one that hangs keeps a core busy, in the client's own loop."""

# Error codes of the store (`mooncake-store/include/types.h`).
NO_AVAILABLE_HANDLE, INVALID_PARAMS, REPLICA_IS_NOT_READY = -200, -600, -703
OBJECT_NOT_FOUND, OBJECT_ALREADY_EXISTS, LEASE_EXPIRED = -704, -705, -707
RPC_FAIL, RPC_TIMEOUT, TENANT_QUOTA_EXCEEDED = -900, -901, -1700

_LOCKED_NS = 60 * 10**9
"""Age of a lock that no living process holds, clocks of nodes being some seconds apart."""
_FULL = {NO_AVAILABLE_HANDLE, TENANT_QUOTA_EXCEEDED}
# Codes after which no transfer is under way: none began, or it has ended.
_ENDED = {
    *(*_FULL, INVALID_PARAMS, REPLICA_IS_NOT_READY),
    *(OBJECT_NOT_FOUND, OBJECT_ALREADY_EXISTS, LEASE_EXPIRED, RPC_FAIL, RPC_TIMEOUT),
}
_OPTIONS = {"prefix", "protocol", "device", "metadata", "local", "tenant", "buffer"}


class Mooncake:
    """`Backend` on a Mooncake Store.

    Args:
        uri: `mooncake://master:port`, with `?` and: `prefix=` of the keys, `protocol=` (tcp, rdma),
            `device=` of the network, `metadata=` (P2PHANDSHAKE), `local=` address of this host,
            `tenant=`, `buffer=` size of the registered memory.

    Raises:
        ConfigError: The URI cannot be used.
    """

    asks = 4096

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        options = dict(parse_qsl(parts.query))
        said = without_secrets(uri)
        try:
            self._master = parts.hostname or "", parts.port or DEFAULT_PORT
        except ValueError:  # the port is no number: it may be a password without a host
            self._master, said = ("", 0), f"{parts.scheme}://..."
        if parts.scheme != "mooncake" or not self._master[0]:
            raise ConfigError(f"{said!r} names no master", "Write mooncake://host:50051")
        if unknown := sorted(options.keys() - _OPTIONS):
            raise ConfigError(f"option {unknown[0]!r}", f"Use {', '.join(sorted(_OPTIONS))}")
        self.name = "mooncake://{}:{}".format(*self._master)
        self._prefix, self._options = prefix_of(options), options
        buffer = options.get("buffer", "")
        self._buffer_bytes = parse_size(buffer) if buffer else DEFAULT_BUFFER_BYTES
        self._changed = threading.Condition()
        self._session: MooncakeSession | None = None
        self._opening = self._closed = False
        self._problem = ""

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        """Read part of an object into registered memory, and copy it from there.

        Raises:
            OSError: As every backend.
        """
        with self._use(timeout_s) as session:
            slot, ended = session.acquire(into.nbytes, timeout_s), False
            begun_s = time.monotonic()
            try:
                count = _read(session.client, self._key(name), slot, offset)
                in_time = time.monotonic() - begun_s <= timeout_s
                ended = count >= 0 or (count in _ENDED and in_time)
                if count > 0:
                    into[:count] = slot.view[:count]
            finally:
                session.free(slot, ended)
        if count >= 0:
            return into[:count]
        if count == OBJECT_NOT_FOUND and in_time:
            return None
        raise _failed(count)

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        """Copy a frame into registered memory, and store it from there.

        Raises:
            OSError: As every backend; ENOSPC where no segment has room.
        """
        with self._use(timeout_s) as session:
            slot, ended = session.acquire(data.nbytes, timeout_s), False
            begun_s = time.monotonic()
            try:
                slot.view[:] = data
                code = session.client.upsert_from(self._key(name), slot.address, data.nbytes)
                in_time = time.monotonic() - begun_s <= timeout_s
                ended = code == 0 or (code in _ENDED and in_time)
            finally:
                session.free(slot, ended)
        if code:
            raise _failed(code)

    def swap(self, name: str, was: bytes | None, data: memoryview, timeout_s: float) -> None:
        """Write an object if its bytes are still `was`.

        Clients exclude each other by a second object, which only the first `put` can make.

        Raises:
            OSError: As every backend.
        """
        lock, mine = self._key(f"{name}.lock"), b"%020d" % time.time_ns() + os.urandom(16)
        with self._use(timeout_s) as session:
            client = session.client
            client.put(lock, mine)
            if (holder := client.get(lock)) != mine:
                if holder and int(holder[:20]) < time.time_ns() - _LOCKED_NS:
                    client.remove(lock, True)  # of a process that was killed
                raise _failed(REPLICA_IS_NOT_READY)
            try:
                room = memoryview(bytearray(len(was or b"") + 1))
                if self.get(name, 0, room, timeout_s) != was:
                    raise _failed(REPLICA_IS_NOT_READY)
                self.put(name, data, timeout_s)
            finally:
                client.remove(lock, True)

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Remove objects, leased ones too.

        Raises:
            OSError: As every backend.
        """
        keys = [self._key(name) for name in names]
        with self._use(timeout_s) as session:
            _check(session.client.batch_remove(keys, True), keys, {0, OBJECT_NOT_FOUND})

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Return which objects the master lists; a read may still miss.

        Raises:
            OSError: As every backend.
        """
        keys = [self._key(name) for name in names]
        with self._use(timeout_s) as session:
            codes = _check(session.client.batch_is_exist(keys), keys, {0, 1})
        return [code == 1 for code in codes]

    def list(self, timeout_s: float) -> Iterator[Listed]:
        """Yield nothing: the store has no listing. Frames of others are found by `exists`.

        Raises:
            OSError: The store does not answer.
        """
        with self._use(timeout_s):
            yield from ()

    def close(self) -> None:
        """Tear the client down and free its memory."""
        with self._changed:
            session, self._session, self._closed = self._session, None, True
        if session is not None:
            session.close()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    # ---- the client: a thread of its own sets it up, which may take minutes, and may hang

    @contextmanager
    def _use(self, timeout_s: float) -> Iterator[MooncakeSession]:
        """Yield a session that is not torn down meanwhile."""
        with self._changed:
            if self._session is None:
                self._begin()
                self._changed.wait_for(lambda: not self._opening, timeout_s)
            session = self._session
            if session is None:
                if self._opening:
                    raise TimeoutError("the store did not open in time")
                raise ConnectionError(f"the store could not be opened ({self._problem})")
            session.users += 1
        try:
            yield session
        finally:
            with self._changed:
                session.users -= 1
                clogged = session.retired_bytes > session.arena.n_bytes // 4
                if clogged and self._session is session:
                    self._session = None  # the next call opens another one
                last = session is not self._session and not session.users
            if last:
                session.close()

    def _begin(self) -> None:
        if not self._opening:
            self._problem = ""
            self._opening = begin(self._connect, name=f"flowkv {self.name}") is not None

    def _connect(self) -> None:
        session, problem = None, ""
        try:
            session = self._set_up()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            late = session if self._closed else None
            self._session, self._problem = None if self._closed else session, problem
            self._opening = False
            self._changed.notify_all()
        if late is not None:
            late.close()

    def _set_up(self) -> MooncakeSession:
        probe = socket.create_connection(self._master, 5.0)  # refused at once, unlike by the client
        local = self._options.get("local") or str(probe.getsockname()[0])
        probe.close()
        client, options = MooncakeDistributedStore(), self._options
        code = client.setup(
            local,
            options.get("metadata", "P2PHANDSHAKE"),
            0,  # this process lends the store no memory
            CLIENT_BUFFER_BYTES,
            options.get("protocol", "tcp"),
            options.get("device", ""),
            "{}:{}".format(*self._master),
            **({"tenant_id": options["tenant"]} if "tenant" in options else {}),
        )
        if code:
            raise ConnectionError(f"the store cannot be set up (code {code})")
        return MooncakeSession(client, self._buffer_bytes)


def _read(client: Any, key: str, slot: ArenaSlot, offset: int) -> int:
    """Read into a slot, to its end or the object's; return the bytes, or a negative code."""
    most = slot.n_bytes
    if offset == 0 and most > PROBE_BYTES:
        count = int(client.get_into(key, slot.address, most))
        if count != INVALID_PARAMS:  # otherwise the object is longer than the slot
            return count
    count = _range(client, key, slot, offset, most)
    if count != INVALID_PARAMS:  # otherwise the object ends before the slot
        return count
    size = int(client.get_size(key))
    if size < 0:
        return size
    return _range(client, key, slot, offset, size - offset) if size > offset else 0


def _range(client: Any, key: str, slot: ArenaSlot, offset: int, n_bytes: int) -> int:
    counts = client.get_into_ranges([slot.address], [[key]], [[[0]]], [[[offset]]], [[[n_bytes]]])
    return int(counts[0][0][0])


def _check(codes: list[int], keys: list[str], good: set[int]) -> list[int]:
    """Return the codes of a call for many keys: a good one for each.

    Raises:
        OSError: Some are others, or missing.
    """
    if (failed := {*codes} - good) or len(codes) != len(keys):
        raise _failed(min(failed, default=0))
    return codes


def _failed(code: int) -> OSError:
    """Return the `OSError` for a code of the store."""
    if code in _FULL:
        return OSError(errno.ENOSPC, "no segment of the store has room")
    if code == RPC_TIMEOUT:
        return TimeoutError("the master of the store did not answer in time")
    if code == INVALID_PARAMS:
        return PermissionError(errno.EINVAL, "the store refuses the object")
    if code == REPLICA_IS_NOT_READY:
        return ConnectionError(errno.EBUSY, "the object is being written")
    return ConnectionError(f"the store failed with code {code}")


class MooncakeTier(RemoteTier):
    """Frames in Mooncake Store.

    The store evicts frames that were not read for long, loses those on a machine that left, and
    forgets everything when its master restarts: all of that is a miss. It has no listing: after
    opening, frames of others are known once `contains` has asked for them.

    Args:
        uri: As `Mooncake`.
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the address.
        envelope: Seals and checks frames.
        clock: Source of time.
        limits: Limits of concurrency, memory and time; default `usual`.

    Raises:
        ConfigError: The URI or the capacity cannot be used.
        MissingDependencyError: The client of Mooncake is not installed.
    """

    usual = LIMITS

    def __init__(
        self, uri: str, capacity_bytes: int = UNBOUNDED, **options: Unpack[RemoteOptions]
    ) -> None:
        super().__init__(Mooncake(uri), capacity_bytes, **options)
