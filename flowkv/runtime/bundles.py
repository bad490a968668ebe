"""Named tensors beside the pages, such as weights: kept in parts, fetched stripe by stripe.

    table = length u32 | msgpack: digest of all bytes, tensors (name, dtype, shape, offset)
    part  = up to 8 MiB of the tensors' bytes, one after the other, each from a multiple of 4 KiB on

The table is a frame whose key is made of the name; the keys of the parts are made of the digest in
it, so that parts of two versions never meet. Parts have stripes of 256 KiB, and of a tensor only
those are read that it lies in. What is missing or damaged makes the whole a miss.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec
import torch
import xxhash

from flowkv.core import compiling
from flowkv.core.errors import StoreError
from flowkv.core.keys import ROOT
from flowkv.core.layout import GRANULE_BYTES
from flowkv.runtime.guard import Guard
from flowkv.runtime.index import Block
from flowkv.runtime.states import BUNDLE_LAYOUT, DTYPES, MOST_ELEMENTS
from flowkv.runtime.store import Store
from flowkv.tiers.base import FrameInfo, Load, Outcome

GROUP = (1 << 32) - 1
"""What their frames say in place of a layer group."""

STRIPE_BYTES = 1 << 18
PART_BYTES = 1 << 23
_AT_ONCE = 8  # parts that are asked for together
_MOST_BYTES = 1 << 44
_BUSY_S, _PATIENCE_S = 0.1, 60.0


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def sound(self, n_bytes: int) -> bool:
        if self.dtype not in DTYPES or min(self.shape, default=0) < 0 or self.offset < 0:
            return False
        most = math.prod(max(n, 1) for n in self.shape)
        return most <= MOST_ELEMENTS and self.offset + self.n_bytes <= n_bytes


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: bytes
    n_bytes: int
    tensors: tuple[_Tensor, ...]


class _Piece(NamedTuple):
    """Stripes of one part, and where they go."""

    block: Block
    first: int
    stripes: int
    target: memoryview


class Bundles:
    """Named tensors of one cache.

    Args:
        store: What moves them.
        guard: The KV lock; taken for a few parts at a time.
        namespace: Namespace digest.
        tenant: Tenant salt.
    """

    def __init__(self, store: Store, guard: Guard, namespace: bytes, tenant: bytes) -> None:
        self.store, self.guard = store, guard
        self.namespace, self.tenant = namespace, tenant

    # ---- keeping

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Writes tensors to the tier that lasts longest; whether all found room there."""
        flat = {key: _bytes_of(key, tensor) for key, tensor in tensors.items()}
        table, root = _describe(tensors, flat), self._key(_encoded(name))
        with self.guard:
            old = self.store.index.find(root)
            for block in [*self.store.index.children(root), *([old] if old else [])]:
                self.store.forget(block)
            writable = (n for n, tier in enumerate(self.store.tiers) if tier.writable)
            number = self.store.lasting() if self.store.lasting() >= 0 else next(writable, -1)
        saved = number >= 0 and all(
            self._save(number, self._part_key(table, i), root, body, STRIPE_BYTES)
            for i, body in enumerate(_parts(flat.values()))
        )
        text = msgspec.msgpack.encode(table)
        body = bytearray(len(text).to_bytes(4, "little") + text)
        body += bytes(-len(body) % GRANULE_BYTES)
        return saved and self._save(number, root, ROOT, body, GRANULE_BYTES)

    def _save(self, number: int, key: bytes, parent: bytes, body: bytearray, step: int) -> bool:
        """Hands one frame to a tier; waits while that is busy."""
        info = FrameInfo(
            kind="weights",
            codec=0,
            fidelity=0,
            layout=BUNDLE_LAYOUT,
            parent=parent,
            namespace=self.namespace,
            group=GROUP,
            tokens=0,
            stripe_bytes=min(step, len(body)),
            tenant=self.tenant,
        )
        end_s = compiling.now_s() + _PATIENCE_S
        while compiling.now_s() < end_s:
            with self.guard:
                block = self.store.index.publish(key, parent, GROUP, "weights")
                block.tenant, block.namespace = self.tenant, self.namespace
                block.n_bytes = len(body)
                busy = not self.store.takes(number, len(body))
                saved = self.store.save(block, number, info, memoryview(body))
                self.store.settle(block)
                if saved or not busy:
                    self.store.drain()
                    return saved
                self.store.drain(_BUSY_S)
        return False

    # ---- fetching

    def fetch(self, name: str, only: Iterable[str] | None) -> dict[str, torch.Tensor] | None:
        """What was kept, or the tensors of these names; None if any of it cannot be had."""
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
        """The table: its first stripe says how long it is."""
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
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        sound = 0 <= table.n_bytes <= _MOST_BYTES and len(table.digest) == 16
        return table if sound and all(one.sound(table.n_bytes) for one in table.tensors) else None

    def _pieces(
        self, table: _Table, root: bytes, start: int, target: memoryview
    ) -> Iterator[_Piece]:
        """The stripes that fill `target` with the bytes from `start`, a stripe's edge, on."""
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
            self.store.discover(
                [key],
                group=GROUP,
                parent=parent,
                tenant=self.tenant,
                namespace=self.namespace,
                kind="weights",
            )
            found = self.store.index.find(key)
            return found if found is not None else Block(-1, key, parent, GROUP, "weights")

    def _load(self, pieces: list[_Piece]) -> bool:
        """Reads pieces, each from the nearest tier that gives it; False if one cannot be had."""
        with self.guard:
            for number in range(len(self.store.tiers) if pieces else 0):
                here = [p for p in pieces if self._holds(p.block, number)]
                wanted = [
                    Load(p.block.key, p.target, BUNDLE_LAYOUT, 0, p.first, p.stripes) for p in here
                ]
                answers, lent = self.store.mover.load([(number, one) for one in wanted], _ignore)
                for piece, answer in zip(here, answers, strict=True):
                    if answer.outcome is Outcome.HIT:
                        self.store.count_loaded(number, answer.n_bytes)
                        pieces = [left for left in pieces if left is not piece]
                    elif not piece.block.gone and piece.block.tiers >> number & 1:
                        self.store.not_served(piece.block, number, answer)
                self.store.touch([p.block for p in here if not p.block.gone])
                if lent:
                    return False  # it may still write there: no other tier's bytes would be safe
            return not pieces

    def _holds(self, block: Block, number: int) -> bool:
        if block.tiers >> number & 1:
            return self.store.answers(number)
        return self.store.source(block) == number

    # ---- names

    def _key(self, *words: bytes) -> bytes:
        state = hashlib.sha256(b"flowkv.bundle/1\0" + self.namespace + self.tenant)
        for word in words:
            state.update(len(word).to_bytes(4, "little") + word)
        return state.digest()

    def _part_key(self, table: _Table, number: int) -> bytes:
        return self._key(b"part", table.digest, number.to_bytes(8, "little"))


def _ignore(_: int) -> None:
    """A late answer: its target is the loader's, and nobody reads it any more."""


def _padded(n_bytes: int) -> int:
    """Length of the frame of a part: one stripe, or whole ones."""
    unit = GRANULE_BYTES if n_bytes <= STRIPE_BYTES else STRIPE_BYTES
    return -(-n_bytes // unit) * unit


def _encoded(name: str) -> bytes:
    """The bytes of a name.

    Raises:
        StoreError: It is none that has an encoding.
    """
    try:
        return name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise StoreError(f"{name!r} is no name", "Use a string of Unicode") from error


def _bytes_of(name: str, tensor: torch.Tensor) -> memoryview:
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
    """The tensors' bytes, each from a multiple of 4 KiB on, cut into parts."""
    part = bytearray()
    for view in flat:
        at = 0
        while at < len(view):
            taken = view[at : at + PART_BYTES - len(part)]
            part += taken
            at += len(taken)
            if len(part) == PART_BYTES:
                yield part
                part = bytearray()
        part += bytes(-len(part) % GRANULE_BYTES)
        if len(part) == PART_BYTES:
            yield part
            part = bytearray()
    if part:
        yield part + bytes(_padded(len(part)) - len(part))


def _spans(tensors: Iterable[_Tensor], n_bytes: int) -> list[tuple[int, int]]:
    """Stripes that tensors lie in, as runs of bytes from stripe to stripe, in order."""
    last, spans = (n_bytes - 1) // PART_BYTES * PART_BYTES, list[tuple[int, int]]()
    end = last + _padded(n_bytes - last) if n_bytes else 0
    for one in sorted((t for t in tensors if t.n_bytes), key=lambda t: t.offset):
        start = one.offset // STRIPE_BYTES * STRIPE_BYTES
        stop = min(-(-(one.offset + one.n_bytes) // STRIPE_BYTES) * STRIPE_BYTES, end)
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
        else:
            spans.append((start, stop))
    assert all(a[1] < b[0] for a, b in pairwise(spans))
    return spans


def _tensor(one: _Tensor, spans: list[tuple[int, int]], buffers: list[bytearray]) -> torch.Tensor:
    """A tensor over the bytes that were loaded for it."""
    if not one.n_bytes:
        return torch.zeros(one.shape, dtype=DTYPES[one.dtype], device="cpu")
    for (start, stop), buffer in zip(spans, buffers, strict=True):
        if start <= one.offset < stop:
            count, at = math.prod(one.shape), one.offset - start
            flat = torch.frombuffer(buffer, dtype=DTYPES[one.dtype], count=count, offset=at)
            return flat.reshape(one.shape)
    raise StoreError(f"tensor {one.name!r} lies nowhere", "Report this as a bug")
