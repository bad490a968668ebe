"""Decoding of coded pages on a GPU, in batches, on a stream of its own.

A GPU reads the coded pages, and the raw ones come back to where the tier was asked to load them:
their way from there on is that of all other pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.compiled import compiling
from flowkv.kvt.basis import KeyTurn
from flowkv.kvt.codec import PageCoder
from flowkv.kvt.entropy import SHIFTS

if TYPE_CHECKING:
    from flowkv.kernels.triton.kvt import BasisTables

DEVICES = {"cuda"}
"""Types of devices that decode pages."""
BATCH_BYTES = 64 << 20
"""Most memory of a batch on the device, unless a single page takes more."""
_AGAIN_S = 60.0  # after an error, until the device is asked again
_NEAR = 1e-4  # of a token's largest element: sums of float32 in another order
_log = logging.getLogger("flowkv")


class CodedPage(NamedTuple):
    """A coded page, and memory for some of its layers.

    Attributes:
        coder: Coder of the page.
        data: The coded page.
        target: Memory of these layers.
        first: First layer.
        layers: Number of layers.
        done: Called from any thread, with this page: with whether it was sound, or with None if it
            has to be decoded elsewhere. It raises nothing.
    """

    coder: PageCoder
    data: bytes
    target: memoryview
    first: int
    layers: int
    done: Callable[..., object]


def basis_tables(coder: PageCoder, device: torch.device) -> BasisTables:
    """Return the basis of a coder on a device."""
    from flowkv.kernels.triton.kvt import COARSE, FINE, BasisTables
    from flowkv.kernels.triton.launch import padded

    layout, chunks, turns = coder.layout, coder.basis.chunks, coder.basis.turns.turns
    dims = layout.head_dim, layout.value_dim
    room = padded(-(-max(dims) // 2))
    pairs = [_pairs(turn, dims[0], room) for turn in turns]
    pairs += [_pairs(None, dim, room) for dim in dims]
    firsts = np.cumsum([0, *(len(chunk.mean) for chunk in chunks)]).tolist()
    lines, tiles, axis = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
    for n, (place, chunk) in enumerate(zip(coder.places, chunks, strict=True)):
        span, at = (place.layers.start, place.layers.stop), 0
        lines.append((axis, len(chunk.classes), len(chunk.coarse), *span, len(chunk.mean)))
        axis += len(chunk.classes)
        for layer in range(*span):
            turn = -1 if place.side else coder.basis.turns.of_layer[layer]
            turned = 0 if turn < 0 else len(turns[turn].inv_freq)
            kind = len(turns) + place.side if turn < 0 else turn
            for head in range(place.heads.start, place.heads.stop):
                tiles.append((n, place.side, layer, head, firsts[n] + at, at, kind, turned))
                at += dims[place.side]
    kinds = np.concatenate([chunk.classes for chunk in chunks]).astype(np.int32)
    codes = kinds | SHIFTS[kinds].astype(np.int32) << 8
    integers = coder.basis.tables.slots.view(np.int32).ravel(), codes, lines, tiles, pairs
    there = [torch.from_numpy(np.array(one, np.int32)).to(device) for one in integers]
    for name, unit in (("coarse", COARSE), ("fine", FINE)):
        blocks = [getattr(chunk, name) for chunk in chunks]
        width = -(-max(1, *map(len, blocks)) // unit) * unit
        there.append(torch.zeros(firsts[-1], width, dtype=blocks[0].dtype, device=device))
        for block, first in zip(blocks, firsts, strict=False):
            there[-1][first : first + block.shape[1], : len(block)] = block.T.to(device)
    there.append(torch.cat([chunk.mean for chunk in chunks]).to(device))
    there.append(torch.from_numpy(np.concatenate([chunk.scale for chunk in chunks])).to(device))
    speeds = np.zeros((len(turns), room))
    for n, one in enumerate(turns):
        speeds[n, : len(one.inv_freq)] = one.inv_freq
    return BasisTables._make((*there, torch.from_numpy(speeds).to(device)))


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


class DeviceDecoder:
    """A basis in the memory of a device, which decodes pages there.

    Args:
        coder: Coder of the pages.
        device: The device.
    """

    def __init__(self, coder: PageCoder, device: torch.device) -> None:
        from flowkv.kernels.triton import kvt  # imports Triton

        self._kernels, self._layout = kvt, coder.layout
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with self._on_stream():
            self._basis = basis_tables(coder, device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Queue work on a stream of its own; wait for it at the end, whatever happens."""
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:  # copies that were begun write to targets
                if self._stream is not None:
                    self._stream.synchronize()

    def decode_batch(self, pages: Sequence[CodedPage]) -> list[bool]:
        """Write layers of the first pages to host memory, at least one; return which were sound."""
        kernels, layout, parts, left = self._kernels, self._layout, list[Any](), BATCH_BYTES
        for page in pages:
            left -= len(page.data) + self._basis.page_bytes(layout, page.layers)
            if parts and left < 0:
                break
            n, chunks = page.coder.parts(memoryview(page.data)) or page.coder.nothing
            parts.append(kernels.CodedPart(page.data, *page[3:5], n * layout.page_size, chunks))
        with self._on_stream():
            raw, bad = kernels.decode_pages(self._basis, parts, layout)
            sound = [not one for one in bad.tolist()]
            for page, own, good in zip(pages, raw, sound, strict=False):
                if good:
                    torch.frombuffer(page.target, dtype=torch.uint8).copy_(own, non_blocking=True)
        return sound


def _alike(page: CodedPage, sound: bool) -> bool:
    """Decode a page on the processor, too; return whether that gives the same, but for rounding."""
    coder, here = page.coder, memoryview(bytearray(page.target.nbytes))
    if coder.decode(memoryview(page.data), here, page.first, page.layers) is not sound:
        return False
    sides = (coder.views(body, page.layers) for body in (page.target, here))
    for one, wanted in zip(*sides, strict=True):
        most = wanted.float().abs().amax((0, 1, 3))[:, None]
        near = max(2 * torch.finfo(wanted.dtype).eps, _NEAR)
        if sound and not bool(((one.float() - wanted.float()).abs() <= near * most).all()):
            return False
    return True


Decoders = Callable[[PageCoder], DeviceDecoder]


class DeviceQueue:
    """Pages that wait for a device: a thread that finds it idle decodes batches of them.

    Thread-safe. The first page of a basis is decoded there for a trial, so that no load waits for a
    compiler; if that gives something else than the processor, the device gets no page of the basis.
    After an error the device gets no page for a while, and then another trial.
    """

    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), list[CodedPage]()
        self._leads, self._again_s = False, 0.0
        self._proven = dict[bytes, bool]()  # by basis; False until its trial is passed

    def decode_soon(
        self, pages: Sequence[CodedPage], decoder: Decoders, rest: Callable[[Any], object]
    ) -> None:
        """Decode pages, and what else waits unless another thread does.

        Args:
            pages: The pages.
            decoder: Returns the decoder of a coder's pages.
            rest: Called with those that the device does not get.
        """
        left = list[CodedPage]()
        with self._lock:
            for page in pages:
                proven = time.monotonic() >= self._again_s and self._proven.get(page.coder.name)
                (self._waiting if proven else left).append(page)
                if proven is None:
                    layout = page.coder.layout
                    trial = memoryview(bytearray(layout.page_bytes)), 0, layout.layers
                    self._waiting.append(CodedPage(page.coder, page.data, *trial, self._judge))
                    self._proven[page.coder.name] = False
        rest(left)
        with self._lock:
            leads, self._leads = not self._leads, True
        while leads and (batch := self._next()):
            while batch:
                batch = self._decode_some(batch, decoder)

    def _judge(self, page: CodedPage, sound: bool | None) -> None:
        if sound is None:  # after an error
            return
        name, alike = page.coder.name, _alike(page, sound)
        if alike and not sound:  # a damaged page proves nothing
            self._proven.pop(name)
        else:
            self._proven[name] = alike
        if not alike:
            said = "a device decodes cold pages to something else than the processor, and gets no"
            _log.error(said + " more: report it with the versions of torch, Triton and the driver")

    def _next(self) -> list[CodedPage]:
        with self._lock:
            batch = [one for one in self._waiting if one.coder is self._waiting[0].coder]
            self._waiting = [one for one in self._waiting if one.coder is not batch[0].coder]
            self._leads = bool(batch)
            return batch

    def _decode_some(self, batch: list[CodedPage], decoder: Decoders) -> list[CodedPage]:
        """Decode the first pages; return the others."""
        name, sound = batch[0].coder.name, list[bool | None]([None] * len(batch))
        try:
            if time.monotonic() >= self._again_s:
                with nullcontext() if self._proven.get(name) else compiling.aside():
                    sound = [*decoder(batch[0].coder).decode_batch(batch)]
        except BaseException:  # out of memory, no compiler, or a panic of a library
            self._again_s = time.monotonic() + _AGAIN_S
        if sound[0] is None:
            self._proven.pop(name, None)
        for one, found in zip(batch, sound, strict=False):
            with suppress(BaseException):  # others wait for their answers
                one.done(one, found)
        return batch[len(sound) :]
