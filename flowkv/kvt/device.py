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
from typing import Any, NamedTuple

import torch

from flowkv.compiled import compiling
from flowkv.kvt.codec import PageCoder
from flowkv.kvt.entropy import SHIFTS

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


class DeviceDecoder:
    """A basis in the memory of a device, which decodes pages there.

    Args:
        coder: Coder of the pages.
        device: The device.
    """

    def __init__(self, coder: PageCoder, device: torch.device) -> None:
        from flowkv.kernels.triton import kvt  # imports Triton

        self._kernels, self._layout, basis = kvt, coder.layout, coder.basis
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with self._on_stream():
            own = coder.layout, coder.places, basis.chunks, basis.turns.turns, basis.turns.of_layer
            self._basis = kvt.basis_tables(*own, basis.tables.slots, SHIFTS, device)

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
