"""Between disk, pinned memory and device, as the cache does it: pieces of pages, not one block.

`of_*_ceiling` compares with one large copy of the same run; `of_slower` compares a load from disk
to the device with the slower of its two halves, each measured beside it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench.gpu.machine import Machine
from flowkv.cache.pinned import Copies, CudaStreams, open_copies
from flowkv.core.geometry import GRANULE_BYTES
from flowkv.kernels import gather_pages, scatter_pages
from flowkv.tiers.host import SlotPool
from flowkv.tiers.io import open_engine
from flowkv.tiers.io.engine import OPERATION, READ, WRITE

PIECES = ((2 << 20, 128), (256 << 10, 1024), (16 << 10, 16384))
WINDOW = 8  # pieces read and sent up together
WINDOWS = 6  # of them under way


class Immediate:
    """The copies of a dry run: made at once, by the processor."""

    def use(self, *, behind: bool = False) -> None:
        return

    follow = lead = use

    def used(self) -> list[Immediate]:
        return []

    def after(self, mark: Immediate) -> None:
        return

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, to_device: bool) -> None:
        target.copy_(source)

    def move(self, pages: torch.Tensor, granules: Sequence[int], memory: torch.Tensor,
             lines: Sequence[int], n_bytes: int, *, to_device: bool) -> None:  # fmt: skip
        places = torch.tensor([granules, lines], dtype=torch.int32)
        kernel = scatter_pages if to_device else gather_pages
        kernel(pages, places[0], n_bytes // GRANULE_BYTES, memory, lines=places[1])

    def mark(self, *, to_device: bool) -> Immediate:
        return self

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def pin(self, address: int, n_bytes: int) -> str:
        return ""

    def unpin(self, address: int) -> None:
        return


def copies_of(machine: Machine, pages: torch.Tensor, n_bytes: int) -> Copies:
    """As the cache opens them."""
    if machine.dry:
        slots, streams = SlotPool(n_bytes), Immediate()
        slots.register(streams.pin, streams.unpin)
        copies = Copies(streams, pages, slots)
        copies.kernel_bytes, copies.least_pieces = 8191, 3
        return copies
    return open_copies(CudaStreams(torch.device("cuda")), pages, n_bytes=n_bytes)


def transfers(machine: Machine) -> Iterator[dict[str, Any]]:
    """Pieces of three sizes up and down, and a file onto the device."""
    for size, count in PIECES:
        yield from pieces(machine, size, count)
    yield from_disk(machine)


def pieces(machine: Machine, size: int, count: int) -> Iterator[dict[str, Any]]:
    """Pieces that lie side by side in pinned memory and apart on the device."""
    title = f"{size >> 10} KiB pieces"
    if machine.dry:
        size, count = size >> 9 & -GRANULE_BYTES or GRANULE_BYTES, 5
    pages = torch.zeros(2 * count * size, dtype=torch.uint8, device=machine.device)
    copies = copies_of(machine, pages, 2 * count * size)
    places = [2 * i * size // GRANULE_BYTES for i in torch.randperm(count).tolist()]
    index = torch.tensor(places, device=machine.device) * GRANULE_BYTES // size
    rows = copies.stage(count, size)
    for row in rows:
        row.random_(0, 256)

    def up() -> None:
        for row, place in zip(rows, places, strict=True):
            copies.upload([(place, row)])
        copies.launch()

    def down() -> list[torch.Tensor]:
        come, mark = copies.download(places, size)
        mark.wait()
        return come

    up()
    arrived = pages.view(2 * count, size)[index].cpu()
    right = torch.equal(arrived, torch.stack(rows))
    right = right and torch.equal(torch.stack(down()), torch.stack(rows))
    about = {"pinned": copies.slots.why or "registered"}
    for case, call, limit in (("to", up, "to_device"), ("from", down, "to_host")):
        name = f"{title} {case} the device"
        if not right:
            yield {"case": name, "wrong": True}
            continue
        result = {"case": name, **about, **machine.eager([call])}
        result["bytes_s"] = 1e6 * count * size / result["us"]
        result[f"of_{limit}_ceiling"] = result["bytes_s"] / machine.limits[f"{limit}_bytes_s"]
        yield result
    copies.close()


def from_disk(machine: Machine) -> dict[str, Any]:
    """A file of pages through the engine and the staging arena onto the device."""
    size, count = (8192, 40) if machine.dry else (2 << 20, 512)
    name = "disk to pinned memory to the device"
    pages = torch.zeros(count * size, dtype=torch.uint8, device=machine.device)
    copies = copies_of(machine, pages, (WINDOWS + 2) * WINDOW * size)  # two go up
    with tempfile.NamedTemporaryFile(prefix="bench-gpu-") as file:
        engine = open_engine()
        fd = engine.open(file.name, write=True)
        try:
            content = fill(engine, fd, copies, size, count)
            seconds = {}
            for way, up in (("disk", False), ("whole", True)) * (1 if machine.dry else 5):
                started = time.perf_counter()
                load(engine, fd, copies, (size, count), up=up)
                if not machine.dry:
                    torch.cuda.synchronize()
                seconds.setdefault(way, []).append(time.perf_counter() - started)
            wrong = not torch.equal(pages.cpu(), content)
        finally:
            ended = engine.close()
            os.close(fd)
    copies.close()
    if wrong or not ended:
        return {"case": name, "wrong": True}
    if machine.dry:
        return {"case": name, "us": 1.0}
    disk, whole = (count * size / sorted(seconds[way])[2] for way in ("disk", "whole"))
    slower = min(disk, machine.limits["to_device_bytes_s"])
    return {
        "case": name,
        "us": 1e6 * count * size / whole,
        "engine": engine.name,
        "direct": engine.direct,
        "bytes_s": whole,
        "disk_bytes_s": disk,
        "of_slower": whole / slower,
    }


def fill(engine: Any, fd: int, copies: Copies, size: int, count: int) -> torch.Tensor:
    """Writes random pieces to the file; returns them."""
    content = torch.randint(0, 256, (count, size), dtype=torch.uint8)
    (row,) = copies.stage(1, size)
    for i in range(count):
        row.copy_(content[i])
        one = np.array([(WRITE, fd, i * size, row.data_ptr(), size, i)], OPERATION)
        engine.submit(one)
        assert engine.wait(60.0)["result"].tolist() == [size]
    return content.view(-1)


def load(engine: Any, fd: int, copies: Copies, shape: tuple[int, int], *, up: bool) -> None:
    """Reads windows of pieces, several under way, and sends up each that has arrived."""
    size, count = shape
    windows: dict[int, tuple[list[torch.Tensor], int]] = {}  # rows, and how many are missing
    begun = ended = 0
    while ended < count:
        while begun < count and len(windows) < WINDOWS:
            number = begun // WINDOW
            rows = copies.stage(min(WINDOW, count - begun), size)
            operations = np.zeros(len(rows), OPERATION)
            operations["op"], operations["fd"], operations["length"] = READ, fd, size
            operations["tag"] = np.arange(begun, begun + len(rows))
            operations["offset"] = operations["tag"] * size
            operations["address"] = [row.data_ptr() for row in rows]
            engine.submit(operations)
            windows[number] = rows, len(rows)
            begun += len(rows)
        for tag, result in engine.wait(60.0).tolist():
            assert result == size, result
            rows, missing = windows[tag // WINDOW]
            windows[tag // WINDOW] = rows, missing - 1
            if missing == 1:
                del windows[tag // WINDOW]
                first = tag // WINDOW * WINDOW
                for i, row in enumerate(rows if up else ()):
                    copies.upload([((first + i) * size // GRANULE_BYTES, row)])
                copies.launch()
                ended += len(rows)
