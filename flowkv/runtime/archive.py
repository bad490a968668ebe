"""One file with many frames: what `KV.export` writes and `KV.load` reads.

    file  = first page | frame | frame | ... | index | end
    frame = as in every tier (`tiers.frame`), from a multiple of 4 KiB on
    index = msgpack: [version, [[key 32, offset, bytes], ...]]
    end   = magic 8 | offset of the index u64 | its bytes u64 | its xxh3_128     little-endian

The file appears whole or not at all. Whatever happens to it afterwards, a frame is given out only
if it is, byte for byte, what was written: every header and stripe is checked, lengths before memory
is found for them. Where the index is damaged the frames are found one after the other, up to the
first that is damaged too.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from flowkv.core.errors import StoreError
from flowkv.core.keys import KEY_BYTES
from flowkv.core.layout import GRANULE_BYTES
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import BadFrame, Header, aligned, peek_header_bytes

MAGIC = b"FKVEXPRT"
VERSION = 1
_END = struct.Struct("<8sQQ16s")
_KEY_AT = slice(40, 40 + KEY_BYTES)  # of a frame's header
_TARGET = "Write to another path"


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: bytes
    offset: int
    n_bytes: int


class _Index(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    entries: tuple[_Entry, ...]


class Found(NamedTuple):
    """One frame of a file.

    Attributes:
        header: What its checked header says; None if it is damaged.
        place: Where the frame begins.
        n_bytes: Bytes of the file that are its.
    """

    header: Header | None
    place: int
    n_bytes: int


class ArchiveWriter:
    """Writes a file of frames; it takes its name when the `with` block ends well.

    Args:
        path: The file; replaced if it is there.
        envelope: How frames are wrapped.

    Attributes:
        frames: Frames written so far.
        n_bytes: Bytes written so far.

    Raises:
        StoreError: It cannot be written. Nothing is left of it then.
    """

    def __init__(self, path: str | os.PathLike[str], envelope: Envelope) -> None:
        self.path, self._envelope = Path(path), envelope
        self._partly = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self.frames, self.n_bytes, self._entries = 0, 0, list[_Entry]()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._named():
            with contextlib.suppress(FileNotFoundError):
                self._partly.unlink()  # of a process that was killed and had this number
            self._file: BinaryIO = os.fdopen(os.open(self._partly, flags, 0o600), "wb")
            self._write(MAGIC + VERSION.to_bytes(4, "little"))

    def add(self, key: bytes, info: FrameInfo, body: memoryview | bytes) -> None:
        """Appends a frame.

        Raises:
            BadFrame: Description and body do not fit together.
            StoreError: The file cannot be written.
        """
        sealed = self._envelope.seal(key, info, body)
        self._entries.append(_Entry(key, self.n_bytes, sealed.n_bytes))
        with self._named():
            self._write(sealed.header, *sealed.parts)
        self.frames += 1

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._file.close()
            self._partly.unlink(missing_ok=True)
            return
        with self._named():
            index, at = msgspec.msgpack.encode(_Index(VERSION, tuple(self._entries))), self.n_bytes
            self._write(index)
            self._file.write(_END.pack(MAGIC, at, len(index), xxhash.xxh3_128_digest(index)))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partly, self.path)
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            self.n_bytes = self.path.stat().st_size

    def _write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Writes parts, and zeros up to the next page."""
        n_bytes = sum(self._file.write(part) for part in parts)
        n_bytes += self._file.write(bytes(aligned(n_bytes) - n_bytes))
        self.n_bytes += n_bytes

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError, AttributeError):
                self._file.close()
            self._partly.unlink(missing_ok=True)
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror})", _TARGET
            ) from error


class ArchiveReader:
    """Reads a file of frames, of which nothing is believed before it is checked.

    Args:
        path: The file.
        envelope: How frames must be wrapped.

    Raises:
        StoreError: It cannot be opened, or was never such a file.
    """

    def __init__(self, path: str | os.PathLike[str], envelope: Envelope) -> None:
        self.path, self._envelope = Path(path), envelope
        try:
            self._file: BinaryIO = self.path.open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
            first = self._file.read(GRANULE_BYTES)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be read ({error.strerror})", "Correct the path"
            ) from error
        version = int.from_bytes(first[len(MAGIC) : len(MAGIC) + 4], "little")
        if not first.startswith(MAGIC) or version != VERSION:
            self._file.close()
            kind = "no exported cache" if not first.startswith(MAGIC) else f"of version {version}"
            raise StoreError(f"{self.path} is {kind}", "Give a file that `kv.export` wrote")

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def frames(self) -> Iterator[Found]:
        """All frames, in the order in which they were written; a damaged one has no header."""
        index = self._index()
        if index is not None:
            for entry in index.entries:
                yield self._at(entry.offset, entry.n_bytes, entry.key)
            return
        place = GRANULE_BYTES
        while place < self._size:
            found = self._at(place, self._size - place, None)
            yield found
            if found.header is None:
                return
            place += aligned(found.n_bytes)

    def read(self, found: Found, target: memoryview) -> bool:
        """Reads a frame's body into memory of its length; False if it is damaged."""
        header = found.header
        if header is None or target.nbytes < header.body_bytes:
            return False
        offset, n_bytes = self._envelope.place(header, 0, header.stripes)
        stored = self._read(found.place + offset, n_bytes)
        try:
            self._envelope.open(header, stored, target, 0, header.stripes)
        except BadFrame:
            return False
        return True

    def _at(self, place: int, most: int, key: bytes | None) -> Found:
        """The frame that begins here."""
        try:
            first = self._read(place, GRANULE_BYTES)
            n_bytes = peek_header_bytes(first)
            head = first if n_bytes <= GRANULE_BYTES else self._read(place, n_bytes)
            header = self._envelope.head(head, bytes(first[_KEY_AT]) if key is None else key)
        except BadFrame:
            return Found(None, place, 0)
        offset, stored = self._envelope.place(header, 0, header.stripes)
        if offset + stored > min(most, self._size - place):
            return Found(None, place, 0)
        return Found(header, place, offset + stored)

    def _read(self, place: int, n_bytes: int) -> bytearray:
        """Bytes of the file, fewer where it ends; no more is taken than there can be."""
        data = bytearray(max(0, min(n_bytes, self._size - place)))
        try:
            self._file.seek(place)
            count = self._file.readinto(data)  # type: ignore[attr-defined]
        except OSError:
            count = 0
        del data[count:]
        return data

    def _index(self) -> _Index | None:
        """The index, if it is whole."""
        end = self._read(max(0, self._size - _END.size), _END.size)
        if len(end) != _END.size:
            return None
        magic, at, n_bytes, digest = _END.unpack(end)
        if magic != MAGIC or at + n_bytes > self._size:
            return None
        data = self._read(at, n_bytes)
        if len(data) != n_bytes or xxhash.xxh3_128_digest(data) != digest:
            return None
        try:
            index = msgspec.msgpack.decode(data, type=_Index)
        except (msgspec.MsgspecError, RecursionError):
            return None
        sound = all(
            GRANULE_BYTES <= entry.offset < self._size
            and entry.n_bytes > 0
            and len(entry.key) == KEY_BYTES
            for entry in index.entries
        )
        return index if sound and index.version == VERSION else None
