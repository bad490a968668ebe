"""Coding of raw pages: keys before their rotation and values, chunk by chunk.

    page   = head | turns of each chunk | words | literals | whole tokens
    head   = magic 4s | basis 16s | bytes of the basis, page number u32 | 4 zeros
    chunk  = words u32 | literals u32 | whole tokens u32

Tokens with coefficients that do not fit are stored whole, in 16 bits an element, as are the first
four of a prompt: all later ones attend to them, and their keys and values are like no others.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.geometry import PageLayout
from flowkv.core.memory import Scratch
from flowkv.kvt.basis import LEAST_DEVIATION, Basis, chunk_places, digest, finish, shape_of
from flowkv.kvt.entropy import Array

MAGIC = b"KVT1"
SINKS = 4
"""First tokens of a prompt that are stored whole."""
MOST_TOKENS = 1 << 17
"""Pages of unknown place are looked for before this position."""
_OF_TOKEN = 4
"""A token may lose so many times what all may lose on average."""
_HEAD, _CHUNK = struct.Struct("<4s16sII4x"), struct.Struct("<III")
_MOST, _MOST_COARSE = 127, 32767
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


_SCRATCH = Scratch()


class PageHead(NamedTuple):
    """First bytes of a coded page.

    Attributes:
        basis: Name of its basis.
        basis_bytes: Bytes of that.
        page_no: Number of the page in its prompt.
    """

    basis: bytes
    basis_bytes: int
    page_no: int


def read_head(data: memoryview) -> PageHead | None:
    """Return the head of a coded page; None if the bytes are none."""
    if len(data) < _HEAD.size:
        return None
    magic, *fields = _HEAD.unpack_from(data)
    return PageHead(*fields) if magic == MAGIC else None


def codable(layout: PageLayout) -> bool:
    """Return whether pages of a layout can be coded: raw keys and values of up to 32 bits."""
    exact = layout.codec == "raw" and not layout.latent and layout.dtype in _DTYPES
    return exact and 0 < layout.page_size <= 256 and not layout.page_size % 4  # tokens are u8


def coded_fingerprint(raw: bytes) -> bytes:
    """Return the fingerprint of the coded pages that stand for raw ones, from that of these."""
    return hashlib.sha256(b"flowkv.kvt/1" + raw).digest()[:16]


class PageCoder:
    """Encoder and decoder of pages of one layer group. Thread-safe.

    Args:
        layout: Layout of the raw pages.
        data: The basis as it is stored.

    Attributes:
        name: Name of the basis.
        nothing: What `parts` would return of a page without words.

    Raises:
        ValueError: The bytes are no basis of such pages.
    """

    def __init__(self, layout: PageLayout, data: bytes) -> None:
        self.data, self.name = data, digest(data)
        self.basis = Basis.unpack(data, layout)
        self.places = list(chunk_places(layout))
        self.nothing = 0, np.zeros((len(self.places), 4), np.int64)
        self._fit(layout)

    def _fit(self, layout: PageLayout) -> None:
        self.layout, self._dtype = layout, _DTYPES[layout.dtype]
        self._short = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float16

    def fitted(self, layout: PageLayout) -> PageCoder:
        """Return a coder of pages of another size or dtype in the same basis.

        Raises:
            ValueError: They have other layers, heads or dims, or cannot be coded.
        """
        names = "layers", "kv_heads", "head_dim", "value_dim"
        own, other = ([getattr(one, name) for name in names] for one in (self.layout, layout))
        if own != other or not codable(layout):
            raise ValueError(f"{names} of the basis are {own}; of {layout.dtype} pages {other}")
        coder = copy.copy(self)
        coder._fit(layout)
        return coder

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an element of raw pages."""
        return self._dtype.itemsize

    def likeliest(self, body: memoryview) -> int:
        """Return the likeliest number of a page, from its keys.

        Any number gives the same keys back: a wrong one costs more bits, or more loss.
        """
        lay, size = self.layout, self.layout.page_size
        means = torch.empty(lay.layers, lay.kv_heads, lay.head_dim, dtype=torch.float32)
        for place, chunk in zip(self.places, self.basis.chunks, strict=True):
            if not place.side:
                means[place.layers, place.heads] = chunk.mean.view(shape_of(place, lay))
        keys = self.views(body)[0].float()
        return self.basis.turns.likeliest(keys, means, SINKS, size, max(1, MOST_TOKENS // size))

    def loss(self, body: memoryview, back: memoryview, page_no: int) -> float:
        """Return the loss of a page that was coded and decoded; bases are made for at most 1.

        The loss is the price of the errors over their price if all axes had the deviation at which
        they are left out: the average over tokens, or a quarter of the largest of one token.

        Args:
            body: The page.
            back: The page as it came back.
            page_no: Number with which it was coded.
        """
        lost = [a.float() - b.float() for a, b in zip(*map(self.views, (body, back)), strict=True)]
        lost[0] = self.basis.turns.apply(lost[0], page_no * self.layout.page_size, back=True)
        price, elements = torch.zeros(self.layout.page_size, dtype=torch.float32), 0
        for place, chunk in zip(self.places, self.basis.chunks, strict=True):
            x = lost[place.side][place.layers, place.heads]
            price += (x * (x @ torch.from_numpy(chunk.metric))).sum((0, 1, 3))
            elements += len(chunk.mean)
        price /= elements * (LEAST_DEVIATION * self.basis.step) ** 2
        return max(float(price.mean()), float(price.max()) / _OF_TOKEN)

    def encode(self, body: memoryview, page_no: int) -> bytes | None:
        """Return the coded page; None if it holds values that are not finite, or is no smaller."""
        views, start = self.views(body), page_no * self.layout.page_size
        sides = self.basis.turns.apply(views[0].float(), start, back=True), views[1].float()
        heads, parts = list[bytes](), list[bytes]()
        for place, chunk in zip(self.places, self.basis.chunks, strict=True):
            x = place.elements(sides)
            q = chunk.quantise(x)
            size = q.abs()
            fits = (size[:, chunk.coarse_axes :] <= _MOST).all(1)  # NaN does not
            whole = ~(fits & (size[:, : chunk.coarse_axes] <= _MOST_COARSE).all(1))
            if not page_no:
                whole[:SINKS] = True
            q[whole] = 0
            symbols = q.to(torch.int16).T.contiguous().numpy()
            coded = self.basis.tables.encode(symbols, chunk.classes)
            tokens = whole.nonzero()[:, 0]
            heads.append(_CHUNK.pack(len(coded.words), len(coded.literals), len(tokens)))
            parts += coded.words.tobytes(), coded.literals.tobytes()
            if len(tokens):
                kept = x[tokens].to(self._short)
                if not bool(torch.isfinite(kept).all()):
                    return None
                parts.append(tokens.to(torch.uint8).numpy().tobytes())
                parts.append(kept.view(torch.int16).numpy().tobytes())
        head = _HEAD.pack(MAGIC, self.name, len(self.data), page_no)
        data = b"".join((head, *heads, *parts))
        return data if len(data) < len(body) else None

    def encode_within(self, body: memoryview, page_no: int) -> tuple[bytes, bytearray] | None:
        """Return the result of `round_trip`; None if the basis is unfit for the page.

        That is where the page loses more than the basis is for, or is no smaller.
        """
        found = self.round_trip(body, page_no)
        fits = found is not None and self.loss(body, memoryview(found[1]), page_no) <= 1
        return found if fits else None

    def round_trip(self, body: memoryview, page_no: int) -> tuple[bytes, bytearray] | None:
        """Return the coded page, and the page that comes back of it; None if it cannot be coded."""
        data, back = self.encode(body, page_no), bytearray(len(body))
        whole = memoryview(back), 0, self.layout.layers
        return (data, back) if data is not None and self.decode(memoryview(data), *whole) else None

    def decode(self, data: memoryview, target: memoryview, first: int, layers: int) -> bool:
        """Write layers of a coded page; return False if the bytes are not such a page.

        Args:
            data: The coded page.
            target: Memory of these layers.
            first: First layer.
            layers: Number of layers.
        """
        return self.decode_batch([(data, target)], first, layers)[0]

    def decode_batch(
        self, pages: Sequence[tuple[memoryview, memoryview]], first: int, layers: int
    ) -> list[bool]:
        """Write layers of coded pages; return which were such pages.

        Args:
            pages: Each coded page, and the memory of these layers of it.
            first: First layer.
            layers: Number of layers.
        """
        nothing, data = self.nothing, b"".join(one for one, _ in pages)
        numbers, found = zip(*(self.parts(one) or nothing for one, _ in pages), strict=True)
        size, end, sound = self.layout.page_size, first + layers, np.ones(len(pages), np.bool_)
        starts, parts = tuple(size * one for one in numbers), np.stack(found)
        parts[..., 0] += np.cumsum([0, *(len(one) for one, _ in pages[:-1])])[:, None]
        views = [self.views(target, layers) for _, target in pages]
        for number, place in enumerate(self.places):
            here = range(max(first, place.layers.start), min(end, place.layers.stop))
            if not here:
                continue
            coded = self._elements(number, data, parts[:, number], sound)
            turns = self.basis.turns.of_chunk(here, None if place.side else starts, size)
            written = slice(here.start - first, here.stop - first)
            form = here.start - place.layers.start, *shape_of(place, self.layout)[1:], size
            for page in sound.nonzero()[0].tolist():
                side = view = views[page][place.side][written, place.heads]
                memory: Any = pages[page][1]
                if self._dtype is not torch.float32:
                    memory = _SCRATCH.array("side", np.float32, *view.shape)
                    side = torch.from_numpy(memory)
                out = np.frombuffer(memory, np.float32, memory.nbytes // 4)
                strides = side.storage_offset(), *side.stride()[:2]
                for turn in turns:
                    finish(coded, (page, *form), out, strides, *turn)
                if self._dtype is torch.float16:  # values near its end may come back beyond it
                    side.clamp_(-65504.0, 65504.0)
                if side is not view:
                    view.copy_(side)
        return [bool(one) for one in sound]

    def _elements(self, number: int, data: bytes, parts: Array, sound: Array) -> tuple[Array, ...]:
        """Decode a chunk of some pages: return two parts of its elements, as `finish` takes them.

        Args:
            number: Number of the chunk.
            data: Bytes of the pages.
            parts: Where their chunks lie, `[pages, 4]`: see `parts`.
            sound: Which pages are sound so far; cleared for those that are not.
        """
        chunk, size = self.basis.chunks[number], self.layout.page_size
        n, tokens = len(chunk.mean), size * len(parts)
        coarse = _SCRATCH.array("coarse", np.float32, chunk.coarse_axes, tokens)
        fine = _SCRATCH.array("fine", np.int8, chunk.axes - chunk.coarse_axes, tokens)
        sums = _SCRATCH.array("sums", np.int32, tokens, n)
        base = _SCRATCH.array("base", np.float32, tokens, n)
        sound &= self.basis.tables.decode(data, parts, chunk.classes, coarse, fine)
        chunk.synthesise(coarse, fine, base, sums, size)
        for page in parts[:, 3].nonzero()[0].tolist():
            start, words, literals, some = parts[page].tolist()
            at = start + 2 * (words + literals)
            index, at = np.frombuffer(data, np.uint8, some, at).astype(np.int64), at + some
            if sound[page] and (index < size).all():
                kept = torch.from_numpy(np.frombuffer(data, np.int16, n * some, at).copy())
                base[page * size + index] = kept.view(self._short).view(some, n).float().numpy()
                sums[page * size + index] = 0
            else:
                sound[page] = False
        return base, sums, chunk.scale

    def parts(self, data: memoryview) -> tuple[int, NDArray[np.int64]] | None:
        """Return the number of a coded page, and where its chunks lie; None if it is none of these.

        Of each chunk, `[chunks, 4]`: its first byte, words, literals and whole tokens.
        """
        head, end = read_head(data), _HEAD.size + len(self.places) * _CHUNK.size
        if head is None or head.basis != self.name or len(data) < end:
            return None
        sizes = np.frombuffer(data[_HEAD.size : end], "<u4").reshape(-1, 3).astype(np.int64)
        n = np.array([len(chunk.mean) for chunk in self.basis.chunks])
        ends = end + np.cumsum(2 * (sizes[:, 0] + sizes[:, 1] + n * sizes[:, 2]) + sizes[:, 2])
        if ends[-1] != len(data) or sizes[:, 2].max() > self.layout.page_size:
            return None
        return head.page_no, np.column_stack([np.append(end, ends[:-1]), sizes])

    def views(self, body: memoryview, layers: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[layers, heads, tokens, dim]` of a page, or of some layers."""
        lay, item = self.layout, self._dtype.itemsize
        flat = torch.frombuffer(body, dtype=torch.uint8).view(self._dtype)
        strides = lay.stripe_stride_bytes // item, lay.run_bytes // item
        shape = layers or lay.layers, lay.kv_heads, lay.page_size
        v_at = lay.v_offset_bytes // item
        return (
            flat.as_strided((*shape, lay.head_dim), (*strides, lay.head_dim, 1)),
            flat.as_strided((*shape, lay.value_dim), (*strides, lay.value_dim, 1), v_at),
        )
