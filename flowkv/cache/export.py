"""Export of pages and states to a file, and storage of named tensors on a tier."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import torch
import xxhash

from flowkv.cache.index import BUNDLE_LAYOUT, LAYOUT, Block, frame_infos
from flowkv.cache.sequence import Guard
from flowkv.cache.store import PageStore
from flowkv.cache.tier_stack import serves
from flowkv.compiled import compiling
from flowkv.core.errors import StoreError
from flowkv.core.files import MALFORMED, open_regular, replacing, sensible
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.core.keys import KEY_BYTES, ROOT
from flowkv.observe.events import Closing
from flowkv.observe.timeline import joined
from flowkv.tiers.base import BadFrame, FrameInfo, Load, Outcome, aligned
from flowkv.tiers.frame import Envelope, Header, peek_header_bytes
from flowkv.tiers.io.engine import FileIO

# Format of the file that `KV.export` writes and `KV.load` reads: one file with many frames.
#
#     file  = first page | frame | frame | ... | index | end
#     frame = as in every tier (`tiers.frame`), from a multiple of 4 KiB on
#     index = msgpack: [version, [[key 32, offset, bytes], ...]]
#     end   = magic 8 | offset of the index u64 | its bytes u64 | its xxh3_128     little-endian
#
# The file appears whole or not at all. A frame is returned only if it is, byte for byte, the
# written one: every header and stripe is checked, and lengths before memory is allocated. If the
# index is damaged, the frames are found one after the other, up to the first damaged one.

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
    """Location of one frame in a file.

    Attributes:
        header: The checked header; None if the frame is damaged.
        place: Offset of the frame in the file.
        n_bytes: Length of the frame.
    """

    header: Header | None
    place: int
    n_bytes: int


class ArchiveWriter:
    """Writer of a file of frames, which gets its name when the `with` block ends without error.

    Args:
        path: The file; replaced if it exists.
        envelope: Envelope of the frames: their checksums, encryption and compression.

    Attributes:
        frames: Frames written so far.
        n_bytes: Bytes written so far.

    Raises:
        StoreError: The file cannot be written. Nothing of it is left then.
    """

    def __init__(self, path: str | os.PathLike[str], envelope: Envelope) -> None:
        self.path, self._envelope = Path(path), envelope
        self.frames, self.n_bytes, self._entries = 0, 0, list[_Entry]()
        self._replacing = replacing(self.path, 0o600)
        with self._named():
            self._file = self._replacing.__enter__()
            self._write(MAGIC + VERSION.to_bytes(4, "little"))

    def append(self, key: bytes, info: FrameInfo, body: memoryview | bytes) -> None:
        """Append a frame.

        Raises:
            BadFrame: `info` and `body` do not fit together.
            StoreError: The file cannot be written.
        """
        sealed = self._envelope.seal(key, info, body)
        self._entries.append(_Entry(key, self.n_bytes, sealed.n_bytes))
        with self._named():
            self._write(sealed.header, *sealed.parts)
        self.frames += 1

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self._replacing.__exit__(*error)
            return
        with self._named():
            index, at = msgspec.msgpack.encode(_Index(VERSION, tuple(self._entries))), self.n_bytes
            self._write(index)
            self._file.write(_END.pack(MAGIC, at, len(index), xxhash.xxh3_128_digest(index)))
            self._replacing.__exit__(None, None, None)
            FileIO().sync_directory(str(self.path.parent))
            self.n_bytes = self.path.stat().st_size

    def _write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Write the parts, and zeros up to the next multiple of 4 KiB."""
        n_bytes = sum(self._file.write(part) for part in parts)
        n_bytes += self._file.write(bytes(aligned(n_bytes) - n_bytes))
        self.n_bytes += n_bytes

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._replacing.__exit__(OSError, error, error.__traceback__)
            problem = f"{self.path} cannot be written ({error.strerror})"
            raise StoreError(problem, _TARGET) from error


class ArchiveReader(Closing):
    """Reader of a file of frames, which checks everything before use.

    Args:
        path: The file.
        envelope: Envelope that the frames must have.

    Raises:
        StoreError: The file cannot be opened, or was not written by `ArchiveWriter`.
    """

    def __init__(self, path: str | os.PathLike[str], envelope: Envelope) -> None:
        self.path, self._envelope = Path(path), envelope
        try:
            self._file: BinaryIO = open_regular(self.path)
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

    def close(self) -> None:
        """Close the file. Safe to call again."""
        self._file.close()

    def frames(self) -> Iterator[Found]:
        """Yield all frames in the order of the file; a damaged one has no header."""
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
        """Read a frame's body into `target`; return False if the body is damaged."""
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
        """Read the header at offset `place` and return its frame, of at most `most` bytes.

        If `key` is None, the key in the frame's own header is accepted.
        """
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
        """Read bytes of the file, fewer at its end; allocate no more than the file can hold."""
        data = bytearray(max(0, min(n_bytes, self._size - place)))
        try:
            self._file.seek(place)
            count = self._file.readinto(data)  # type: ignore[attr-defined]
        except OSError:
            count = 0
        del data[count:]
        return data

    def _index(self) -> _Index | None:
        """Read and check the index; return None if it is damaged."""
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
        except MALFORMED:
            return None
        place = GRANULE_BYTES  # frames must be in order and not overlap: the file is read once
        for entry in index.entries:
            inside = place <= entry.offset < self._size and entry.n_bytes > 0
            if not inside or len(entry.key) != KEY_BYTES:
                return None
            place = entry.offset + entry.n_bytes
        return index if index.version == VERSION else None


_BUSY_S = 0.1
_PATIENCE_S = 10.0


class Exported(NamedTuple):
    """Counts of frames written to a file.

    Attributes:
        frames: Pages, tails and states written.
        n_bytes: Length of the file.
        missing: Known blocks that could not be read any more.
    """

    frames: int
    n_bytes: int
    missing: int


class Loaded(NamedTuple):
    """Counts of frames read from a file.

    Attributes:
        frames: Pages, tails and states loaded.
        known: Frames that were known before.
        foreign: Refused frames of another model, geometry, page size or codec.
        damaged: Refused frames that differ from the written ones.
        no_room: Frames without room on device and tiers, and tails without a lasting tier.
    """

    frames: int
    known: int
    foreign: int
    damaged: int
    no_room: int


def write(
    store: PageStore,
    guard: Guard,
    path: str | os.PathLike[str],
    envelope: Envelope,
    blocks: Iterable[Block],
) -> Exported:
    """Write blocks from any place to a file. Takes the KV lock for one block at a time.

    Raises:
        StoreError: The file cannot be written.
    """
    missing = 0
    with ArchiveWriter(path, envelope) as archive:
        for block in blocks:
            with guard:
                found = _content(store, block)
            if found is None:
                missing += 1
            else:
                archive.append(block.key, *found)
    return Exported(archive.frames, archive.n_bytes, missing)


def _content(store: PageStore, block: Block) -> tuple[FrameInfo, bytes | memoryview] | None:
    """Read description and content of a block from the nearest place; None if none has it."""
    if block.page >= 0 and not block.gone:
        content = store.pool(block.group).page_bytes(block.page, store.size(block))
        return store.forms[block.group].describe([block])[0], content.cpu().numpy().tobytes()
    found = store.stack.load(block)
    return found and found[1:]


def read(
    store: PageStore,
    guard: Guard,
    path: str | os.PathLike[str],
    envelope: Envelope,
    namespace: bytes,
) -> Loaded:
    """Load the frames of a file: on the device while pages are free, else on the tiers.

    Takes the KV lock for one frame at a time.

    Args:
        store: Store that takes the frames.
        guard: The KV lock.
        path: The file.
        envelope: Envelope that the frames must have.
        namespace: Namespace digest; frames of another one are refused.

    Raises:
        StoreError: The file cannot be read, or is no exported cache.
    """
    counts = dict.fromkeys(Loaded._fields, 0)
    with ArchiveReader(path, envelope) as archive:
        for found in archive.frames():
            counts[_take(store, guard, archive, found, namespace)] += 1
    return Loaded(**counts)


def _take(
    store: PageStore, guard: Guard, archive: ArchiveReader, found: Found, namespace: bytes
) -> str:
    """Load one frame; return the field of `Loaded` that counts it."""
    header = found.header
    if header is None:
        return "damaged"
    if header.info.namespace != namespace or not _readable(store, header, found.n_bytes):
        return "foreign"
    with guard:
        if _known(store, header):
            return "known"
    body = memoryview(bytearray(header.body_bytes))
    if not archive.read(found, body):
        return "damaged"
    for _ in range(round(_PATIENCE_S / _BUSY_S)):
        with guard:
            if _known(store, header):  # made by another thread meanwhile
                return "known"
            if _place(store, header, body):
                return "frames"
            if not store.stack.mover.storing:
                return "no_room"
            store.writes.drain(_BUSY_S)
    return "no_room"


def _known(store: PageStore, header: Header) -> bool:
    """Return whether a frame's block is on the device, or stored as exactly as the frame."""
    block = store.index.find(header.key)
    if block is None or block.page >= 0:
        return block is not None
    return block.somewhere and block.fidelity <= header.info.fidelity


def _place(store: PageStore, header: Header, body: memoryview) -> bool:
    """Publish a frame's block and place its body; return False if there is no room now."""
    info, lasting = header.info, store.stack.admission.writes_to()
    tail = info.kind == "state" and info.layout != LAYOUT
    if tail and lasting < 0:
        return False
    store.stack.supersede(store.index.find(header.key))
    block = store.index.get_or_create(header.key, info.parent, info.group, info.kind)
    block.tenant, block.namespace, block.fidelity = info.tenant, info.namespace, info.fidelity
    block.placed &= info.tokens > 0
    if info.kind != "page":
        block.tail, block.n_bytes = info.tokens, len(body)
        if tail:
            return store.writes.store_tail(block, lasting, info, body)
        return store.writes.store_state(block, info, bytes(body))
    pool, layout = store.pool(info.group), store.forms[info.group].layouts[info.codec]
    for page in store.allocator.free(info.group, 1, info.codec):
        pool.page_bytes(page, layout.page_bytes).copy_(torch.frombuffer(body, dtype=torch.uint8))
        store.change(block, page)
        store.insert([block])
        store.writes.write_down(block)
        return True
    stack, numbers = store.stack, range(len(store.stack.tiers))
    frames = [(block, info, body)]
    admitted = stack.admission.admitted
    placed = any(admitted([block], n) and not stack.store(frames, n) for n in numbers)
    stack.settle(block)
    return placed


def _readable(store: PageStore, header: Header, n_bytes: int) -> bool:
    """Return whether this cache could have written a frame: layout, codec and length fit."""
    info = header.info
    if info.fidelity > store.stack.fidelity:
        return False
    if info.kind == "state" and info.layout == LAYOUT:
        return header.body_bytes <= n_bytes
    if info.kind not in ("page", "state") or info.group >= len(store.forms):
        return False
    layout = store.forms[info.group].layouts.get(info.codec)
    fits = layout is not None and layout.fingerprint() == info.layout
    return fits and layout is not None and header.body_bytes == layout.page_bytes


# Named tensors beside the pages, such as weights: stored in parts, fetched stripe by stripe.
#
#     table = length u32 | msgpack: digest of all bytes, tensors (name, dtype, shape, offset)
#     part  = up to 8 MiB of the tensors' bytes, one after the other, each from a multiple of 4 KiB
#
# The table is a frame with a key made of the name; the keys of the parts are made of the digest in
# it, so that parts of two versions never mix. Parts have stripes of 256 KiB, and only the stripes
# that hold a wanted tensor are read. A missing or damaged part makes the whole a miss.

MOST_ELEMENTS = 1 << 40

_NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
"""Dtypes that a stored tensor may have."""

GROUP = (1 << 32) - 1
"""Layer group in the frames of bundles, which belong to none."""

STRIPE_BYTES = 1 << 18
PART_BYTES = 1 << 23
_AT_ONCE = 8  # parts that are loaded together
_MOST_BYTES = 1 << 44
_BUNDLES_BUSY_S, _BUNDLES_PATIENCE_S = 0.1, 60.0


class TensorForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a tensor beside its stored bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def lies_within(self, start: int, stop: int) -> bool:
        """Return whether this describes a tensor with bytes from `start` on, `stop` at most."""
        if self.dtype not in DTYPES or not sensible(self.shape) or start < 0:
            return False
        most = math.prod(max(n, 1) for n in self.shape)
        return most <= MOST_ELEMENTS and start + self.tensor_bytes <= stop


class _Tensor(TensorForm, frozen=True, forbid_unknown_fields=True):
    offset: int


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: bytes
    n_bytes: int
    tensors: tuple[_Tensor, ...]


class _Piece(NamedTuple):
    """Stripes of one part, and the memory that they are loaded to."""

    block: Block
    first: int
    stripes: int
    target: memoryview


class Bundles:
    """Named tensors of one cache.

    Args:
        store: Store that moves the tensors.
        guard: The KV lock; taken for a few parts at a time.
        namespace: Namespace digest.
        tenant: Tenant salt.
    """

    def __init__(self, store: PageStore, guard: Guard, namespace: bytes, tenant: bytes) -> None:
        self.store, self.guard = store, guard
        self.namespace, self.tenant = namespace, tenant

    # ---- keeping

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Write tensors to the most durable tier; return whether all found room there."""
        flat = {key: bytes_of(key, tensor) for key, tensor in tensors.items()}
        table, root = _describe(tensors, flat), self._key(_encoded(name))
        with self.guard:
            old = self.store.index.find(root)
            self.store.forget(*self.store.index.children(root), *([old] if old else ()))
            writable = (n for n, tier in enumerate(self.store.stack.tiers) if tier.writable)
            if (number := self.store.stack.admission.lasting()) < 0:
                number = next(writable, -1)
        saved = number >= 0 and all(
            self._save(number, self._part_key(table, i), root, body, STRIPE_BYTES)
            for i, body in enumerate(_parts(flat.values()))
        )
        text = msgspec.msgpack.encode(table)
        body = bytearray(len(text).to_bytes(4, "little") + text)
        body += bytes(-len(body) % GRANULE_BYTES)
        return saved and self._save(number, root, ROOT, body, GRANULE_BYTES)

    def _save(self, number: int, key: bytes, parent: bytes, body: bytearray, step: int) -> bool:
        """Store one frame on a tier, and wait while the tier is busy; return whether it took it."""
        end_s = compiling.now_s() + _BUNDLES_PATIENCE_S
        while compiling.now_s() < end_s:
            with self.guard:
                block = self.store.index.get_or_create(key, parent, GROUP, "weights")
                block.tenant, block.namespace = self.tenant, self.namespace
                block.n_bytes, stripe_bytes = len(body), min(step, len(body))
                info = frame_infos([block], BUNDLE_LAYOUT, 0, stripe_bytes)[0]
                busy = not self.store.stack.mover.lanes[number].takes(len(body))
                saved = not self.store.stack.store([(block, info, memoryview(body))], number)
                self.store.stack.settle(block)
                if saved or not busy:
                    self.store.writes.drain()
                    return saved
                self.store.writes.drain(_BUNDLES_BUSY_S)
        return False

    # ---- fetching

    def fetch(self, name: str, only: Iterable[str] | None) -> dict[str, torch.Tensor] | None:
        """Load a bundle, or only the tensors `only` of it; return None if a part is missing.

        Raises:
            StoreError: The bundle has no tensor of one of these names.
        """
        root = self._key(_encoded(name))
        table = self._table(root)
        if table is None:
            return None
        wanted = {tensor.name: tensor for tensor in table.tensors}
        if only is not None:
            names = list(only)
            if unknown := [key for key in names if key not in wanted]:
                raise StoreError(
                    f"{name!r} has no tensor {unknown[0]!r}", f"It has {', '.join(wanted)}"
                )
            wanted = {key: wanted[key] for key in names}
        spans = _spans(wanted.values(), table.n_bytes)
        buffers = [bytearray(stop - start) for start, stop in spans]
        pieces = [
            piece
            for (start, _), buffer in zip(spans, buffers, strict=True)
            for piece in self._pieces(table, root, start, memoryview(buffer))
        ]
        for at in range(0, len(pieces), _AT_ONCE):
            if not self._load(pieces[at : at + _AT_ONCE]):
                return None
        return {key: _tensor(one, spans, buffers) for key, one in wanted.items()}

    def _table(self, root: bytes) -> _Table | None:
        """Load and check the table of a bundle; its first stripe holds its length."""
        block, head = self._find(root, ROOT), bytearray(GRANULE_BYTES)
        if not self._load([_Piece(block, 0, 1, memoryview(head))]):
            return None
        length = int.from_bytes(head[:4], "little") + 4
        stripes = -(-length // GRANULE_BYTES) - 1
        if stripes > 1 << 16:
            return None
        rest = bytearray(stripes * GRANULE_BYTES)
        if stripes and not self._load([_Piece(block, 1, stripes, memoryview(rest))]):
            return None
        try:
            table = msgspec.msgpack.decode((head + rest)[4:length], type=_Table)
        except MALFORMED:
            return None
        sound = 0 <= table.n_bytes <= _MOST_BYTES and len(table.digest) == 16
        fit = all(one.lies_within(one.offset, table.n_bytes) for one in table.tensors)
        return table if sound and fit else None

    def _pieces(
        self, table: _Table, root: bytes, start: int, target: memoryview
    ) -> Iterator[_Piece]:
        """Yield the stripes that fill `target` with the bytes from `start` on, a stripe's edge."""
        at = 0
        while at < len(target):
            part, within = divmod(start + at, PART_BYTES)
            n_bytes = min(PART_BYTES - within, len(target) - at)
            part_bytes = _padded(min(PART_BYTES, table.n_bytes - part * PART_BYTES))
            step = min(STRIPE_BYTES, part_bytes)
            block = self._find(self._part_key(table, part), root)
            yield _Piece(block, within // step, n_bytes // step, target[at : at + n_bytes])
            at += n_bytes

    def _find(self, key: bytes, parent: bytes) -> Block:
        with self.guard:
            realm = self.tenant, self.namespace
            self.store.stack.listing.discover([key], parent, realm, (GROUP, "weights"))
            found = self.store.index.find(key)
            return found if found is not None else Block(-1, key, parent, GROUP, "weights")

    def _load(self, pieces: list[_Piece]) -> bool:
        """Load pieces, each from the nearest tier that has it; return False if one is missing."""
        with self.guard:
            for number in range(len(self.store.stack.tiers) if pieces else 0):
                here = [p for p in pieces if serves(self.store.stack.mover, p.block, number)]
                wanted = [
                    Load(p.block.key, p.target, BUNDLE_LAYOUT, 0, p.first, p.stripes) for p in here
                ]
                answers, lent = self.store.stack.mover.load([(number, one) for one in wanted])
                for piece, answer in zip(here, answers, strict=True):
                    if answer.outcome is Outcome.HIT:
                        self.store.stack.mover.lanes[number].loaded_bytes += answer.n_bytes
                        pieces = [left for left in pieces if left is not piece]
                    elif not piece.block.gone and piece.block.tiers >> number & 1:
                        self.store.stack.not_served(piece.block, number, answer)
                self.store.touch([p.block for p in here if not p.block.gone])
                if lent:  # a late tier may still write to the targets, which another tier's bytes
                    return False  # would share: give the whole load up
            return not pieces

    # ---- names

    def _key(self, *words: bytes) -> bytes:
        state = hashlib.sha256(b"flowkv.bundle/1\0" + self.namespace + self.tenant)
        for word in words:
            state.update(len(word).to_bytes(4, "little") + word)
        return state.digest()

    def _part_key(self, table: _Table, number: int) -> bytes:
        return self._key(b"part", table.digest, number.to_bytes(8, "little"))


def _padded(n_bytes: int) -> int:
    """Return the length of a part's frame: one stripe, or several whole ones."""
    unit = GRANULE_BYTES if n_bytes <= STRIPE_BYTES else STRIPE_BYTES
    return -(-n_bytes // unit) * unit


def _encoded(name: str) -> bytes:
    """Encode a name as UTF-8.

    Raises:
        StoreError: `name` is no string, or cannot be encoded.
    """
    try:
        return name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise StoreError(f"{name!r} is no name", "Use a string of Unicode") from error


def bytes_of(name: str, tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory."""
    if not isinstance(tensor, torch.Tensor):
        raise StoreError(f"{name!r} is of type {type(tensor).__name__}", "Keep tensors")
    _encoded(name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise StoreError(f"tensor {name!r} has dtype {dtype}", "Convert it to a plain dtype")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise StoreError(
            f"tensor {name!r} has no bytes of its own ({tensor.layout} on {tensor.device})",
            "Make it dense, and give it content",
        )
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _describe(tensors: Mapping[str, torch.Tensor], flat: Mapping[str, memoryview]) -> _Table:
    described, at, digest = [], 0, xxhash.xxh3_128()
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        described.append(_Tensor(name, dtype, tuple(tensor.shape), at))
        digest.update(f"{name}\0{dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(flat[name])
        at += -(-len(flat[name]) // GRANULE_BYTES) * GRANULE_BYTES
    return _Table(digest.digest(), at, tuple(described))


def _parts(flat: Iterable[memoryview]) -> Iterator[bytearray]:
    """Yield parts of the tensors' bytes, in which each tensor begins at a multiple of 4 KiB."""
    part = bytearray()
    for piece in (piece for view in flat for piece in (view, bytes(-len(view) % GRANULE_BYTES))):
        at = 0
        while at < len(piece):
            taken = piece[at : at + PART_BYTES - len(part)]
            part += taken
            at += len(taken)
            if len(part) == PART_BYTES:
                yield part
                part = bytearray()
    if part:
        yield part + bytes(_padded(len(part)) - len(part))


def _spans(tensors: Iterable[_Tensor], n_bytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges of the stripes that hold tensors, merged and in order."""
    last, step = (n_bytes - 1) // PART_BYTES * PART_BYTES, STRIPE_BYTES
    end = last + _padded(n_bytes - last) if n_bytes else 0
    some = [(one.offset, one.offset + one.tensor_bytes) for one in tensors if one.tensor_bytes]
    return joined((a // step * step, min(-(-b // step) * step, end)) for a, b in some)


def _tensor(one: _Tensor, spans: list[tuple[int, int]], buffers: list[bytearray]) -> torch.Tensor:
    """Return a tensor as a view of its loaded bytes."""
    if not one.tensor_bytes:
        return torch.zeros(one.shape, dtype=DTYPES[one.dtype], device="cpu")
    for (start, stop), buffer in zip(spans, buffers, strict=True):
        if start <= one.offset < stop:
            count, at = math.prod(one.shape), one.offset - start
            flat = torch.frombuffer(buffer, dtype=DTYPES[one.dtype], count=count, offset=at)
            return flat.reshape(one.shape)
    raise StoreError(f"tensor {one.name!r} lies nowhere", "Report this as a bug")
