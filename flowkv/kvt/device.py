"""Decoding of coded pages on a GPU, in batches, on a stream of its own.

A GPU reads the coded pages, and the raw ones come back to where the tier was asked to load them:
their way from there on is that of all other pages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.kernels.operands import sent
from flowkv.kvt.basis import KeyTurn
from flowkv.kvt.codec import PageCoder
from flowkv.kvt.entropy import SHIFTS

DEVICES = {"cuda"}
"""Types of devices that decode pages."""
BATCH_BYTES = 64 << 20
"""Most memory of a batch on the device, unless a single page takes more."""
_AGAIN_S = 60.0  # after an error, until the device is asked again


class CodedPage(NamedTuple):
    """A coded page, and memory for some of its layers.

    Attributes:
        data: The coded page.
        target: Memory of these layers.
        first: First layer.
        layers: Number of layers.
    """

    data: bytes
    target: memoryview
    first: int
    layers: int


class DeviceDecoder:
    """A basis in the memory of a device, which decodes pages there.

    Args:
        coder: Coder of the pages.
        device: The device.
    """

    def __init__(self, coder: PageCoder, device: torch.device) -> None:
        from flowkv.kernels.triton import kvt  # imports Triton

        self.coder, self.device, self.kernels = coder, device, kvt
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with self._on_stream():
            self.basis = self._tables()
            turns = coder.basis.turns.turns
            self._speeds = [torch.from_numpy(one.inv_freq.copy()).to(device) for one in turns]
            self._finish()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def page_bytes(self, page: CodedPage) -> int:
        """Return the bytes that a page takes on the device while it is decoded."""
        coefficients = 4 * self.basis.coarse.shape[1] + self.basis.fine.shape[1]
        angles = 8 * len(self.coder.basis.turns.turns) * self.basis.pairs.shape[2]
        tokens = self.coder.layout.page_size * (len(self.coder.places) * coefficients + angles)
        n_bytes = page.layers * self.coder.layout.stripe_stride_bytes + tokens
        return int(len(page.data) + n_bytes)

    def decode(self, pages: Sequence[CodedPage]) -> list[bool]:
        """Write layers of coded pages to host memory; return which pages were sound."""
        parts = [self.coder.parts(memoryview(page.data)) for page in pages]
        found = {n: one for n, one in enumerate(parts) if one is not None}
        some, sound = [pages[n] for n in found], [False] * len(pages)
        if not some:
            return sound
        with self._on_stream():
            raw, coefficients = self.queue(some, [*found.values()])
            bad, raws = coefficients.bad.tolist(), torch.split(raw, [page.layers for page in some])
            try:
                for n, page, own, damaged in zip(found, some, raws, bad, strict=True):
                    sound[n] = not damaged
                    if sound[n]:
                        target = torch.frombuffer(page.target, dtype=torch.uint8, count=own.numel())
                        target.copy_(own.view(-1), non_blocking=True)
            finally:  # copies that were begun write to the targets
                self._finish()
        return sound

    def queue(
        self, pages: Sequence[CodedPage], parts: Sequence[tuple[int, NDArray[np.int64]]]
    ) -> tuple[torch.Tensor, Any]:
        """Queue the decoding of pages; return their layers behind each other, and coefficients.

        Args:
            pages: The pages.
            parts: What `PageCoder.parts` returned for each.
        """
        layout, device, kernels = self.coder.layout, self.device, self.kernels
        data = torch.frombuffer(bytearray().join(page.data for page in pages), dtype=torch.uint8)
        start, stripe, places, spans = 0, 0, list[Any](), list[tuple[int, ...]]()
        for page, (_, chunks) in zip(pages, parts, strict=True):
            places.append(chunks + np.array([start, 0, 0, 0]))
            spans.append((page.first, page.first + page.layers, stripe))
            start, stripe = start + len(page.data), stripe + page.layers
        tables = (np.array(one, np.int32) for one in (places, spans))
        there = [sent(torch.from_numpy(one), device) for one in tables]
        starts = torch.tensor([layout.page_size * number for number, _ in parts], dtype=torch.int64)
        batch = kernels.CodedBatch(sent(data, device), *there, *self._angles(sent(starts, device)))
        raw = torch.zeros(stripe, layout.stripe_stride_bytes, dtype=torch.uint8, device=device)
        found = kernels.decode_symbols(self.basis, batch, layout.page_size)
        kernels.write_elements(self.basis, batch, found, raw, layout)
        return raw, found

    def _angles(self, starts: torch.Tensor) -> torch.Tensor:
        """Return cos and sin `[2, turns, pages, tokens, P]`, as `KeyTurn.angles` does."""
        page, pairs = self.coder.layout.page_size, self.basis.pairs.shape[2]
        both = starts.new_zeros(2, len(self._speeds), len(starts), page, pairs, dtype=torch.float32)
        at = starts[:, None] + torch.arange(page, device=self.device)
        for n, speed in enumerate(self._speeds):
            angle = at.double()[..., None] * speed
            both[0, n, ..., : len(speed)], both[1, n, ..., : len(speed)] = angle.cos(), angle.sin()
        return both

    def _tables(self) -> Any:
        basis, layout, coder = self.coder.basis, self.coder.layout, self.coder
        turns, chunks, dims = basis.turns.turns, basis.chunks, (layout.head_dim, layout.value_dim)
        room = max(16, 1 << ((max(dims) - 1) // 2).bit_length())
        pairs = [_pairs(turn, dims[0], room) for turn in turns]
        pairs += [_pairs(None, dim, room) for dim in dims]
        firsts = np.cumsum([0, *coder.elements]).tolist()
        lines, tiles, axis = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
        for n, (place, chunk) in enumerate(zip(coder.places, chunks, strict=True)):
            span, at = (place.layers.start, place.layers.stop), 0
            lines.append((axis, chunk.axes, chunk.coarse_axes, *span, firsts[n + 1] - firsts[n]))
            axis += chunk.axes
            for layer in range(*span):
                turn = -1 if place.side else basis.turns.of_layer[layer]
                turned = 0 if turn < 0 else len(turns[turn].inv_freq)
                kind = len(turns) + place.side if turn < 0 else turn
                for head in range(place.heads.start, place.heads.stop):
                    tiles.append((n, place.side, layer, head, firsts[n] + at, at, kind, turned))
                    at += dims[place.side]
        kinds = np.concatenate([chunk.classes for chunk in chunks]).astype(np.int32)
        codes = kinds | SHIFTS[kinds].astype(np.int32) << 8
        tables = basis.tables.slots.view(np.int32).ravel(), codes, lines, tiles, pairs
        there = [torch.from_numpy(np.array(one, np.int32)).to(self.device) for one in tables]
        for name, unit in (("coarse", self.kernels.COARSE), ("fine", self.kernels.FINE)):
            blocks = [getattr(chunk, name) for chunk in chunks]
            width = -(-max(1, *map(len, blocks)) // unit) * unit
            shape, dtype = (firsts[-1], width), blocks[0].dtype
            there.append(torch.zeros(shape, dtype=dtype, device=self.device))
            for block, first in zip(blocks, firsts, strict=False):
                there[-1][first : first + block.shape[1], : len(block)] = block.T.to(self.device)
        floats = [chunk.mean for chunk in chunks], [torch.from_numpy(x.scale) for x in chunks]
        return self.kernels.BasisTables._make(
            (*there, *(torch.cat(x).to(self.device) for x in floats))
        )


def _pairs(turn: KeyTurn | None, dim: int, room: int) -> NDArray[np.int64]:
    """Return two dims of each pair `[2, room]`, those that a turn mixes first; -1 for none."""
    found, rest = np.full((2, room), -1), np.arange(dim)
    half = 0 if turn is None else len(turn.inv_freq)
    if turn is not None:
        one, two = (2, 1) if turn.interleaved else (1, half)
        found[0, :half] = turn.start + one * np.arange(half)
        found[1, :half] = found[0, :half] + two
        rest = np.setdiff1d(rest, found[:, :half])
    near = -(-len(rest) // 2)
    found[0, half : half + near] = rest[:near]
    found[1, half : half + len(rest) - near] = rest[near:]
    return found


class _Waiting(NamedTuple):
    decoder: Callable[[], DeviceDecoder]
    basis: bytes
    page: CodedPage
    done: Callable[[bool | None], None]


class DeviceQueue:
    """Pages that wait for a device: a thread that finds it idle decodes batches of them.

    Thread-safe. After an error, pages are decoded elsewhere for a while; so are those that come
    while the first ones of a basis may wait for a compiler.
    """

    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), list[_Waiting]()
        self._leads, self._again_s, self._proven = False, 0.0, set[bytes]()

    def decode(
        self,
        decoder: Callable[[], DeviceDecoder],
        basis: bytes,
        page: CodedPage,
        done: Callable[[bool | None], None],
    ) -> bool:
        """Decode a page on a device; return False if it takes none at present.

        Args:
            decoder: Returns the decoder of the page's basis.
            basis: Name of the basis.
            page: The page.
            done: Called from any thread: with whether the page was sound, or with None after an
                error of the device. It raises nothing.
        """
        with self._lock:
            unsure = self._leads and basis not in self._proven
            if unsure or time.monotonic() < self._again_s:
                return False
            self._waiting.append(_Waiting(decoder, basis, page, done))
            leads, self._leads = not self._leads, True
        while leads and (batch := self._next()):
            self._decode(batch)
        return True

    def _next(self) -> list[_Waiting]:
        with self._lock:
            batch = [one for one in self._waiting if one.basis == self._waiting[0].basis]
            self._waiting = [one for one in self._waiting if one.basis != batch[0].basis]
            self._leads = bool(batch)
            return batch

    def _decode(self, batch: list[_Waiting]) -> None:
        while batch:
            sound: Sequence[bool | None] = [None] * len(batch)
            try:
                if time.monotonic() >= self._again_s:
                    decoder = batch[0].decoder()
                    room = np.cumsum([decoder.page_bytes(one.page) for one in batch])
                    some = max(1, int((room <= BATCH_BYTES).sum()))
                    sound = decoder.decode([one.page for one in batch[:some]])
                    self._proven.add(batch[0].basis)
            except BaseException:  # out of memory, no compiler, or a panic of a library
                self._again_s = time.monotonic() + _AGAIN_S
            for one, found in zip(batch, sound, strict=False):
                one.done(found)
            batch = batch[len(sound) :]
