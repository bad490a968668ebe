"""Coding of raw pages: keys before their rotation and values, chunk by chunk.

    page   = head | turns of each chunk | words | literals | whole tokens
    head   = magic 4s | basis 16s | bytes of the basis, page number u32 | 4 zeros
    chunk  = words u32 | literals u32 | whole tokens u32

Tokens whose coefficients do not fit are stored whole, in 16 bits an element, as are the first four
of a prompt: all later ones attend to them, and their keys and values are like no others.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.geometry import PageLayout
from flowkv.kvt.basis import Basis, chunk_places, digest, shape_of
from flowkv.kvt.entropy import CodedSymbols

MAGIC = b"KVT1"
SINKS = 4
"""First tokens of a prompt that are stored whole."""
_HEAD, _CHUNK = struct.Struct("<4s16sII4x"), struct.Struct("<III")
_MOST, _MOST_COARSE = 127, 32767
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
    return layout.codec == "raw" and not layout.latent and layout.dtype in _DTYPES


class PageCoder:
    """Encoder and decoder of pages of one layer group. Thread-safe.

    Args:
        layout: Layout of the raw pages.
        data: The basis as it is stored.

    Attributes:
        name: Name of the basis.

    Raises:
        ValueError: The bytes are no basis of such pages.
    """

    def __init__(self, layout: PageLayout, data: bytes) -> None:
        self.layout, self.data, self.name = layout, data, digest(data)
        self.basis = Basis.unpack(data, layout)
        self.places = list(chunk_places(layout))
        self._dtype = _DTYPES[layout.dtype]
        self._short = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float16

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an element of raw pages."""
        return self._dtype.itemsize

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

    def decode(self, data: memoryview, target: memoryview, first: int, layers: int) -> bool:
        """Write layers of a coded page; return False if the bytes are not such a page.

        Args:
            data: The coded page.
            target: Memory of these layers.
            first: First layer.
            layers: Number of layers.
        """
        if (found := self.parts(data)) is None:
            return False
        page, start_token = self.layout.page_size, found[0] * self.layout.page_size
        views, wanted = self.views(target, layers), range(first, first + layers)
        for place, chunk, (start, words, literals, tokens) in zip(
            self.places, self.basis.chunks, found[1].tolist(), strict=True
        ):
            here = range(max(first, place.layers.start), min(wanted.stop, place.layers.stop))
            if not here:
                continue
            at = start + 2 * (words + literals)
            coded = CodedSymbols(
                np.frombuffer(data[start : start + 2 * words], np.uint16),
                np.frombuffer(data[start + 2 * words : at], np.int16),
            )
            coarse = np.empty((page, chunk.coarse_axes), np.float32)
            fine = np.empty((page, chunk.axes - chunk.coarse_axes), np.int8)
            if not self.basis.tables.decode(coded, chunk.classes, coarse.T, fine.T):
                return False
            x = chunk.synthesise(torch.from_numpy(coarse), torch.from_numpy(fine))
            if tokens:
                index = np.frombuffer(data[at : at + tokens], np.uint8).astype(np.int64)
                if int(index.max()) >= page:
                    return False
                end, rows = at + tokens * (1 + 2 * len(chunk.mean)), torch.from_numpy(index)
                kept = torch.from_numpy(np.frombuffer(data[at + tokens : end], np.int16).copy())
                x[0][rows], x[1][rows] = kept.view(self._short).view(tokens, -1).float(), 0
            _, heads, dim = shape_of(place, self.layout)
            side = x[0].new_empty((len(here), heads, page, dim))
            where = None if place.side else (here.start, start_token)
            self.basis.turns.finish(x, chunk.scale, side, here.start - place.layers.start, where)
            if self._dtype is torch.float16:  # what is near its end may come back beyond it
                side = side.clamp_(-65504.0, 65504.0)
            views[place.side][here.start - first : here.stop - first, place.heads].copy_(side)
        return True

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
