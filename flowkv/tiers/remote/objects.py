"""Object stores (S3, GCS, Azure, or a directory) through obstore: `ObjectBackend`.

A frame is one object, `PREFIX/frames/<64 hex digits>`; catalogs (`encode_catalog`) are
`PREFIX/index/<time and a random number>`. There are no other names. Layers are read by ranges, and
large frames by several ranges at a time, as one connection to an object store is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias, Unpack
from urllib.parse import unquote, urlsplit

import msgspec
import xxhash

from flowkv.core.config import without_secrets
from flowkv.core.errors import ConfigError, MissingDependencyError, StoreError
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.keys import KEY_BYTES
from flowkv.tiers.base import UNBOUNDED, BadFrame, FrameInfo
from flowkv.tiers.frame import count_stripes
from flowkv.tiers.remote.backend import CHANGED, NAME, Listed, RemoteOptions, shown, swap, sweep
from flowkv.tiers.remote.tier import MOST_KNOWN, Fact, RemoteTier

# Catalogs: small objects that list frames, so that opening need not read every header.
#
# An object lists the frames that one process stored in a while, a few hundred bytes a frame:
#
#     magic 8s | version u16 | 6 zeros | xxh3_128 of the rest | msgpack: [key, bytes, time, info]*
#
# It is a hint and no more: a frame is used only after its own header was checked. So a catalog that
# is damaged, foreign or out of date is skipped, or costs a miss.

MAGIC, VERSION = b"FKVINDEX", 1
MOST_BYTES = 16 << 20
MOST_FRAMES = 1 << 12
LISTED_NS = 2 * 10**9
"""Closer times are equal: listings give them to the second, files to a tick of the kernel."""
_HEAD = struct.Struct("<8sH6x16s")
_span = partial(timedelta, 0)  # of seconds


class CatalogLine(msgspec.Struct, frozen=True, array_like=True):
    """Catalog entry of one frame.

    Attributes:
        key: 32 bytes.
        n_bytes: Bytes of the frame.
        stored_ns: Time of the store, in nanoseconds since 1970.
        info: Its description.
    """

    key: bytes
    n_bytes: int
    stored_ns: int
    info: FrameInfo


_DECODER = msgspec.msgpack.Decoder(list[CatalogLine])


def encode_catalog(facts: Iterable[tuple[bytes, Fact]]) -> bytes:
    """Return a catalog of these frames, without those that have no description."""
    lines = [
        CatalogLine(key, fact.n_bytes, fact.stored_ns, fact.info)
        for key, fact in facts
        if fact.info is not None
    ]
    body = msgspec.msgpack.encode(lines)
    return _HEAD.pack(MAGIC, VERSION, xxhash.xxh3_128_digest(body)) + body


def decode_catalog(data: bytes | bytearray | memoryview) -> list[tuple[bytes, Fact]]:
    """Return the frames of a catalog; an empty list if it is no catalog, or damaged."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        return []
    magic, version, digest = _HEAD.unpack_from(view)
    body = view[_HEAD.size :]
    if (magic, version, digest) != (MAGIC, VERSION, xxhash.xxh3_128_digest(body)):
        return []
    try:
        lines = _DECODER.decode(body)
    except msgspec.MsgspecError:
        return []
    names: dict[bytes, bytes] = {}  # most frames share namespace, tenant and layout
    return [
        (line.key, Fact(line.n_bytes, _interned(line.info, names), line.stored_ns))
        for line in lines
        if _sound(line)
    ]


def _interned(info: FrameInfo, names: dict[bytes, bytes]) -> FrameInfo:
    return info._replace(
        layout=names.setdefault(info.layout, info.layout),
        namespace=names.setdefault(info.namespace, info.namespace),
        tenant=names.setdefault(info.tenant, info.tenant),
    )


def _sound(line: CatalogLine) -> bool:
    if len(line.key) != KEY_BYTES or not 0 < line.n_bytes < 1 << 62 or line.stored_ns < 0:
        return False
    try:
        count_stripes(line.key, line.info, max(1, line.info.stripe_bytes))
    except BadFrame:
        return False
    return True


FRAMES, INDEX = "frames", "index"
CONNECT_S = 2.0
RUNGS_S = (2.0, 10.0, 60.0, 300.0)
"""Timeouts of the clients: each call takes the first one that is at least its own."""

PART_BYTES, SPLIT_BYTES = 8 << 20, 16 << 20
"""Reads from `SPLIT_BYTES` on are split into ranges of `PART_BYTES`."""

MOST_HEADS = 64
STREAM_BYTES = 256 << 10
LIST_PAGE, MOST_NAMES = 1000, 1 << 24
"""Names per request of a listing, and in all: beyond that its continuation has no end."""
MOST_READ = 1 << 12
"""Most catalogs that one look reads; the next look reads earlier ones."""
_CLIENT = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")
_UNFINISHED = re.compile(NAME.pattern + r"#\d+")
_NO_RANGES = re.compile("NotPartial")  # the server answers a range with 200 instead of 206
_BEYOND = re.compile("StartTooLarge|status code: 416")
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = ("401", "403")
_NO_CHOICE = "status code: 501"  # of a store without conditional requests


Parts: TypeAlias = list[memoryview]
_begun = 0  # process in which obstore's threads run


class ObjectBackend:
    """`Backend` on an object store; credentials come from the environment, as obstore finds them.

    Args:
        uri: "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix",
            "file:///directory" or "memory:///".
        options: Settings of obstore's store, such as `endpoint`; they override the environment.

    Raises:
        ConfigError: obstore does not understand the address or its settings.
        MissingDependencyError: obstore is not installed.
        StoreError: The process was forked from one that used an object store.
    """

    asks = 0

    def __init__(self, uri: str, options: dict[str, Any] | None = None) -> None:
        try:
            import obstore
            import obstore.store
        except ImportError:
            raise MissingDependencyError("a tier in an object store", "object") from None
        self._obs, self._uri, self._options = obstore, uri, dict(options or {})
        self.name = shown(uri).rstrip("/")
        self._errors: tuple[type[Exception], ...] = (obstore.exceptions.BaseError,)
        self._rungs: dict[float, Any] = {}
        self._lock, self._ranges = threading.Lock(), True
        self._local = uri.startswith(("file:", "memory:"))
        self._root, self._inode = unquote(urlsplit(uri).path), -1
        if _begun not in (0, os.getpid()):  # every call would hang
            raise StoreError(
                f"{self.name} cannot be opened in a forked process whose parent used obstore",
                "Start the process by spawn, or open such tiers in children only",
            )
        self._store(RUNGS_S[0])

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        """Read a range: in several requests if it is long, else without a copy."""
        parts = self.read(f"{FRAMES}/{name}", offset, len(into), timeout_s)
        if parts is None:
            return None
        if len(parts) == 1:
            return parts[0][: len(into)]
        at = 0
        for part in parts:
            data = part[: len(into) - at]
            into[at : at + len(data)] = data
            at += len(data)
        return into[:at]

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        """Write an object in one request."""
        self.write(f"{FRAMES}/{name}", data, timeout_s)

    def swap(self, name: str, was: bytes | None, data: memoryview, timeout_s: float) -> None:
        """Write an object if its bytes are still `was`, by a conditional request."""
        if self._inode >= 0:  # a directory: obstore has no such request for it
            return swap(self, f"{self._root}/{name}", was, data, timeout_s)
        store, path, kinds = self._store(timeout_s), f"{FRAMES}/{name}", self._obs.exceptions
        gone = () if was is None else (FileNotFoundError,)  # else there is no bucket
        with self._translating(final=True):
            try:
                mode: Any = "create"
                if was is not None:
                    meta = (found := self._obs.get(store, path)).meta
                    if meta["size"] != len(was) or bytes(found.bytes()) != was:
                        raise OSError(errno.EBUSY, CHANGED)
                    mode = {tag: meta[tag] for tag in ("e_tag", "version") if meta[tag]}
                self._obs.put(store, path, bytes(data), mode=mode, use_multipart=False)
            except (*gone, kinds.AlreadyExistsError, kinds.PreconditionError):
                raise OSError(errno.EBUSY, CHANGED) from None
            except self._errors as error:
                if not (isinstance(error, kinds.NotSupportedError) or _NO_CHOICE in str(error)):
                    raise
                self.put(name, data, timeout_s)

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Remove objects, in one request for many where the store can."""
        self.remove([f"{FRAMES}/{name}" for name in names], timeout_s)

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Return which objects are there: one request per name, or a listing for many names."""
        many, store, there = len(names) > MOST_HEADS, self._store(timeout_s), set[str]()
        if many:
            wanted = set(names)
            there.update(found.name for found in self.list(timeout_s) if found.name in wanted)
        for name in () if many else names:
            with contextlib.suppress(FileNotFoundError), self._translating():
                self._obs.head(store, f"{FRAMES}/{name}")
                there.add(name)
        return [name in there for name in names]

    def list(self, timeout_s: float) -> Iterator[Listed]:
        """Yield all frames in the store."""
        return (found for found in self.names(FRAMES, timeout_s) if NAME.fullmatch(found.name))

    def sweep(self) -> None:
        """Remove what obstore left of unfinished objects of a directory.

        Raises:
            OSError: Some may still be there.
        """
        if self._inode >= 0:
            sweep(self._root, FRAMES, _UNFINISHED, self._inode)

    def close(self) -> None:
        """Drop the clients; their connections end with them."""
        self._rungs.clear()

    # ---- requests

    def read(self, path: str, offset: int, size: int, timeout_s: float) -> Parts | None:
        """Return parts of an object of any folder; None if it is missing."""
        store = self._store(timeout_s)
        try:
            if offset == 0 and GRANULE_BYTES < size < SPLIT_BYTES:  # probably all of the object
                return self._read_through(store, path, 0, size)
            if self._ranges:
                try:
                    return self._read_ranges(store, path, offset, size)
                except self._errors as error:
                    if _NO_RANGES.search(str(error)):
                        self._ranges = False
                    elif size < SPLIT_BYTES or not _BEYOND.search(str(error)):
                        raise  # otherwise the object is shorter than expected
            return self._read_through(store, path, offset, size)
        except FileNotFoundError:
            return None
        except self._errors as error:
            if _BEYOND.search(str(error)):
                return []
            raise self._translated(error) from error

    def _read_through(self, store: Any, path: str, offset: int, size: int) -> Parts:
        """Read from the object's beginning on, until there is enough."""
        found = self._obs.get(store, path)
        if offset == 0 and found.meta["size"] <= size:  # known before any byte is read
            return [memoryview(found.bytes())]
        parts, at = [], 0
        for chunk in found.stream(STREAM_BYTES):
            parts.append(memoryview(chunk)[max(0, offset - at) : max(0, offset + size - at)])
            at += len(chunk)
            if at >= offset + size:
                break
        return parts

    def _read_ranges(self, store: Any, path: str, offset: int, size: int) -> Parts:
        end = offset + size  # streams, as `get_range` takes in all of a body, which may be endless
        if size < SPLIT_BYTES:
            found = self._obs.get(store, path, options={"range": (offset, end)})
            return [memoryview(next(iter(found.stream(size)), b""))[:size]]

        async def part(start: int, stop: int) -> memoryview:
            found = await self._obs.get_async(store, path, options={"range": (start, stop)})
            return memoryview(await anext(found.stream(stop - start), b""))[: stop - start]

        async def fetch() -> Parts:  # in parallel
            starts = range(offset, end, PART_BYTES)
            return await asyncio.gather(*(part(at, min(at + PART_BYTES, end)) for at in starts))

        return asyncio.run(fetch())

    def write(self, path: str, data: memoryview, timeout_s: float) -> None:
        """Write an object of any folder."""
        # A store in memory keeps the object itself, and `data` will be reused.
        whole = bytes(data) if self._uri.startswith("memory:") else data
        with self._translating(final=True):
            self._obs.put(self._store(timeout_s), path, whole, use_multipart=False)

    def remove(self, paths: Sequence[str], timeout_s: float) -> None:
        """Remove objects of any folder."""
        store = self._store(timeout_s)
        with self._translating():
            try:
                self._obs.delete(store, [*paths])
            except FileNotFoundError:  # some stores stop at the first missing name
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        self._obs.delete(store, path)

    def names(self, folder: str, timeout_s: float) -> Iterator[Listed]:
        """Yield names and lengths of a folder's objects, a thousand per request."""
        with self._translating(final=True):
            pages = self._obs.list(self._store(timeout_s), folder, chunk_size=LIST_PAGE)
            limit_s = None if self._local else timeout_s  # pages without names may go on for ever

            async def following() -> Any:
                try:
                    return await asyncio.wait_for(anext(pages, None), limit_s)
                except TimeoutError:
                    raise TimeoutError(f"no names of {folder} came within {limit_s:g} s") from None

            for _ in range(-(-MOST_NAMES // LIST_PAGE)):
                if not (page := asyncio.run(following())):
                    return
                for meta in page:
                    name = meta["path"].rpartition("/")[2]
                    stored_ns = round(meta["last_modified"].timestamp() * 1e9)
                    yield Listed(name, meta["size"], stored_ns)
        raise ConnectionError(errno.EIO, f"the listing of {folder} does not end")

    def _store(self, timeout_s: float) -> Any:
        global _begun  # noqa: PLW0603 - obstore's threads are the process's, too
        _begun = os.getpid()
        rung_s = next((rung for rung in RUNGS_S if rung >= timeout_s), RUNGS_S[-1])
        with self._lock:
            if self._local:
                rung_s = RUNGS_S[0]  # there are no clients, and a store in memory must be one
            if rung_s not in self._rungs:
                self._rungs[rung_s] = self._open(rung_s)
            return self._rungs[rung_s]

    def _open(self, timeout_s: float) -> Any:
        options: dict[str, Any] = dict(self._options)
        if self._uri.startswith("file:"):
            options.setdefault("mkdir", True)
        elif not self._local:
            client = {"timeout": _span(timeout_s), "connect_timeout": _span(CONNECT_S)}
            client |= _client_environment(self._uri)
            options["client_options"] = client | options.get("client_options", {})
            options["retry_config"] = {"max_retries": 0, "retry_timeout": _span(timeout_s)}
        try:
            opened = self._obs.store.from_url(self._uri, **options)
            if self._inode < 0 and self._uri.startswith("file:"):
                self._inode = os.stat(self._root).st_ino
            return opened
        except (OSError, ValueError, TypeError, self._obs.exceptions.BaseError) as error:
            raise ConfigError(
                f"{self.name} cannot be opened ({_first_line(error)})",
                "Write s3://bucket/prefix, gs://bucket/prefix or az://container/prefix; "
                "credentials are read from the environment (AWS_..., GOOGLE_..., AZURE_...)",
            ) from None  # the original error quotes the address

    @contextlib.contextmanager
    def _translating(self, *, final: bool = False) -> Iterator[None]:
        """Translate obstore's errors to those of a `Backend`; if `final`, missing objects too."""
        caught: tuple[type[Exception], ...] = (FileNotFoundError, *self._errors)
        try:
            yield
        except caught as error:
            if isinstance(error, FileNotFoundError) and not final:
                raise
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> OSError:
        kinds, text = self._obs.exceptions, _first_line(error)
        status = _STATUS.search(text)
        if isinstance(error, FileNotFoundError) or (status is not None and status[1] == "404"):
            return PermissionError(errno.ENOENT, "no such bucket or container")
        denied = kinds.PermissionDeniedError | kinds.UnauthenticatedError
        if isinstance(error, denied) or (status is not None and status[1] in _REFUSED):
            return PermissionError(errno.EACCES, text)
        if re.search(r"timed ?out", str(error), re.I):
            return TimeoutError(text)
        return ConnectionError(errno.EIO, text)


def _client_environment(uri: str) -> dict[str, Any]:
    """Return HTTP client settings of the environment, ignored by obstore when given others."""
    vendor = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}.get(uri.partition(":")[0], "")
    found = {name: os.environ.get(f"{vendor}_{name.upper()}") for name in _CLIENT}
    return {
        name: value.lower() == "true" if name.startswith("allow_") else value
        for name, value in found.items()
        if value is not None
    }


def _first_line(error: Exception) -> str:
    return without_secrets(str(error).partition("\n")[0])[:200]


# `ObjectTier`: frames in an object store, and the catalogs that make opening it cheap.

FLUSH_FRAMES, FLUSH_S = 512, 5.0
MOST_CATALOGS, MANY_CATALOGS, TURN = 16, 1 << 10, 1 / 64
"""Catalogs that are not merged at the opening, nor later; share of later looks at which they are,
so that nodes take turns."""


class ObjectTier(RemoteTier):
    """Frames in S3, GCS, Azure or a directory.

    Opening costs one request per thousand frames for their names and one per few thousand for their
    descriptions. Frames of other writers are noticed every `RemoteLimits.every_s` seconds, by their
    catalogs.

    Args:
        uri: "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix",
            "file:///directory" or "memory:///".
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the address.
        envelope: Seals and checks frames; default xxh3 and nothing else.
        clock: Source of time.
        limits: Limits of concurrency, memory and time.
        options: Settings of obstore's store, such as `endpoint`; they override the environment.

    Raises:
        ConfigError: The address or the capacity is wrong.
        MissingDependencyError: obstore is not installed.
        StoreError: The store refuses access; or the process was forked from one that used an
            object store, where obstore's threads do not run.
    """

    backend: ObjectBackend

    def __init__(
        self,
        uri: str,
        capacity_bytes: int = UNBOUNDED,
        *,
        options: dict[str, Any] | None = None,
        **more: Unpack[RemoteOptions],
    ) -> None:
        self._seen: set[str] = set()  # catalogs
        self._old: list[str] = []  # catalogs to be merged
        self._written_s = time.monotonic()
        super().__init__(ObjectBackend(uri, options), capacity_bytes, **more)

    def recall(self) -> dict[bytes, Fact]:
        """Return the frames in the catalogs."""
        self.known.fresh, self._seen = self.known.fresh or [], set()  # anew after a failure
        facts: dict[bytes, Fact] = {}
        for key, fact in chain.from_iterable(self._news()):
            # the last catalog wins, unless it is clearly older
            if key not in facts or facts[key].stored_ns <= fact.stored_ns + LISTED_NS:
                facts[key] = fact
        if len(self._seen) > MOST_CATALOGS:
            self._old = sorted(self._seen)
        return facts

    def refresh(self) -> None:
        """Read catalogs that were not there before; choose too many to be merged, now and then."""
        look = self.known.look()
        for facts in self._news():
            self.known.merge(facts, look)
        most = MANY_CATALOGS + 4 * len(self.known) // MOST_FRAMES
        if len(self._seen) > most and random.random() < TURN:
            self._old = sorted(self._seen)

    def flush(self) -> None:
        """Write a catalog of new frames, if many or after a while; or merge old catalogs."""
        fresh = self.known.fresh or []
        due = time.monotonic() - self._written_s >= FLUSH_S or self._closed
        if self._old:
            self._merge()
        elif len(fresh) >= FLUSH_FRAMES or (fresh and due):
            facts = fresh[:MOST_FRAMES]
            self._write(facts)
            del fresh[: len(facts)]

    def _news(self) -> Iterator[list[tuple[bytes, Fact]]]:
        """Yield the frames of each catalog that was not read yet."""
        listed = islice(self.backend.names(INDEX, self.limits.call_s), MOST_KNOWN)
        unread = {one.name: one.n_bytes for one in listed if 0 < one.n_bytes <= MOST_BYTES}
        self._seen.intersection_update(unread)  # others were merged
        for name in sorted(unread.keys() - self._seen)[-MOST_READ:]:  # names begin with a time
            read = partial(self._catalog, name, unread[name])
            yield read() or read()  # perhaps it was damaged on its way
            self._seen.add(name)

    def _catalog(self, name: str, n_bytes: int) -> list[tuple[bytes, Fact]]:
        parts = self.backend.read(f"{INDEX}/{name}", 0, n_bytes, self.limits.call_s)
        return decode_catalog(b"".join(parts or []))  # it may be gone

    def _write(self, facts: Sequence[tuple[bytes, Fact]]) -> None:
        there = [(key, fact) for key, fact in facts if self.known.get(key) is not None]
        name = f"{time.time_ns():020d}-{os.urandom(8).hex()}"
        self._written_s = time.monotonic()
        if there:
            catalog = memoryview(encode_catalog(there))
            self.backend.write(f"{INDEX}/{name}", catalog, self.limits.call_s)
            self._seen.add(name)

    def _merge(self) -> None:
        """Replace many catalogs, some of them with deleted frames, by few; try it once."""
        old, self._old = self._old, []
        facts = [(key, fact) for key, fact in self.known.facts() if fact.info is not None]
        for at in range(0, len(facts), MOST_FRAMES):
            self._write(facts[at : at + MOST_FRAMES])
        self.backend.remove([f"{INDEX}/{name}" for name in old], self.limits.call_s)
