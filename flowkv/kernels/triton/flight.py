"""Tiles, warps, stages and programs of attention kernels, chosen by a model of bytes in flight.

Decoding waits for memory. What a processor has in flight is `programs x buffers x tile bytes`: by
Little's law that many bytes arrive in one latency, as long as the programs it holds (limited by
shared memory and registers) find time to compute, and memory has more to give. Prefill is bound by
arithmetic: there the model says how well tensor cores, softmax and loads hide each other.

Constants are clocks, fitted to a sweep on an H200 whose order the model reproduces
(`tests/kernels/sweep_h200.json`); the best of what was measured is taken from a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from flowkv.core.geometry import ITEMSIZE, PageLayout
from flowkv.kernels.triton.launch import Traits, padded

BITS = {"kv8": (8, 8), "k8v4": (8, 4), "kv4c": (4, 4), "kv4h": (4, 4)}
"""Of an element of K and of V, by codec."""

REGISTERS = 65536
"""Of a processor; a thread has 255 at most."""

SHARED_LOST = 1024
"""Bytes of shared memory that each program costs beside its own."""

LATENCY = 1050.0
START = 65.0  # of a part of a tile, whatever its size
ELEMENT = 6.0  # of each element of K and V that a thread holds
SPILLING = 7.0  # of a raw element, for each 512 of a thread that are too many
CHANNELS = 2000.0  # of a tile of kv4c: its query is multiplied by the channels' scales
BARRIER = 1200.0  # of a part that several warps share
BUSY = 11.0  # warps that proceed as if they were alone
PROGRAM = 1000.0  # of a program beside its loop: its begin, and a partial
SHARPNESS = 3.4  # of the least of several limits
BANDWIDTH = {0: 8.0, 8: 10.0, 9: 19.0, 10: 29.0}  # bytes a clock and processor, by generation
WORK = 1 << 20  # bytes of a processor


class Tiling(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        block: Slots of a page in a part of a tile: tokens, or pairs whose values share bytes; of
            prefill, query rows.
        parts: Parts of a tile; of prefill, tokens of a tile.
        warps: Of a program.
        stages: Of the loop; it reads the page table first, so (stages - 1) // 2 tiles are ahead.
        programs: That a processor is given at once.
    """

    block: int
    parts: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def buffers(self) -> int:
        """Tiles whose K and V are in shared memory or on their way."""
        return (self.stages - 1) // 2


class Stream(NamedTuple):
    """What a decode kernel reads.

    Attributes:
        codec: Of its pages.
        slots: Of a page.
        slot_bytes: K and V of a slot.
        width: Elements of a slot, padded as its tile is.
        tile_bytes: Of each tile whatever its slots.
        columns: Query rows.
        item: Bytes of a raw element.
    """

    codec: str
    slots: int
    slot_bytes: int
    width: int
    tile_bytes: int
    columns: int
    item: int


MEASURED = {
    (9, "raw", 256): Tiling(64, 1, 2, 5, 2),
    (9, "kv8", 256): Tiling(64, 1, 1, 5, 6),
    (9, "k8v4", 512): Tiling(32, 1, 2, 5, 4),
    (9, "kv4c", 512): Tiling(32, 1, 1, 5, 8),
    (9, "kv4h", 512): Tiling(32, 1, 2, 5, 4),
    (9, "prefill", 256): Tiling(64, 64, 4, 5),
}
"""The best of the sweep without spills, by generation, codec and elements of a slot; 8 columns.

64 slots of 4 bits, one warp, are 1 % (kv4c, 3 stages) and 2 % (kv4h) faster, and spill."""


@lru_cache(maxsize=256)
def stream(layout: PageLayout, columns: int) -> Stream:
    """Describe what `columns` query rows read of the pages of a layout."""
    dim, value_dim = layout.head_dim, layout.value_dim
    item = ITEMSIZE[layout.dtype]
    k_bits, v_bits = BITS.get(layout.codec, (8 * item, 8 * item))
    pair = 2 if v_bits == 4 else 1
    width = pair * (max(32 * 8 // k_bits, padded(dim)) + padded(value_dim))
    scales = 4 * dim + 2 * dim * columns if layout.codec == "kv4c" else 0
    slot_bytes = pair * (dim * k_bits + value_dim * v_bits) // 8
    return Stream(layout.codec, layout.page_size // pair, slot_bytes, width, scales, columns, item)


def held(tiling: Tiling, read: Stream) -> float:
    """Elements of K and V of a part that a thread holds, once for each 8 query rows."""
    return tiling.block * read.width * max(1, read.columns // 8) / (32 * tiling.warps)


def room_of(tiling: Tiling, read: Stream) -> int:
    """Bytes of shared memory of a program."""
    tile_bytes = tiling.block * tiling.parts * read.slot_bytes + read.tile_bytes
    return tiling.buffers * tile_bytes + 2048


def resident(tiling: Tiling, read: Stream, device: Traits) -> int:
    """Programs that a processor holds at once: as many as shared memory and registers admit."""
    if read.codec == "raw":
        registers = 80 + 0.56 * held(tiling, read)
    else:
        registers = 31 * math.log2(held(tiling, read)) - 41
    threads = 32 * tiling.warps * min(255.0, registers)
    shared = (device.shared_bytes + SHARED_LOST) // (room_of(tiling, read) + SHARED_LOST)
    return max(1, min(shared, int(REGISTERS // threads)))


def in_flight(tiling: Tiling, read: Stream, programs: int) -> int:
    """Bytes in flight or in work of so many programs that a processor holds."""
    return programs * tiling.buffers * tiling.block * tiling.parts * read.slot_bytes


def clocks(tiling: Tiling, read: Stream, device: Traits) -> float:
    """Model the clocks in which a processor attends over `WORK` bytes."""
    elements = held(tiling, read)
    spilled = max(0.0, elements / 512 - 1) * SPILLING if read.codec == "raw" else 0.0
    loop = tiling.parts * (START + ELEMENT * elements * (1 + spilled))
    loop += CHANNELS if read.codec == "kv4c" else 0
    alone = loop + tiling.parts * BARRIER * (tiling.warps > 1)
    turn = max(alone * tiling.buffers, LATENCY + alone) if tiling.buffers > 1 else LATENCY + alone
    tile_bytes = tiling.block * tiling.parts * read.slot_bytes
    most = BUSY * tile_bytes / (loop * tiling.warps), BANDWIDTH[min(10, device.major)]

    def wave(programs: int) -> float:
        limits = (in_flight(tiling, read, programs) / turn, *most)
        rate = sum(limit**-SHARPNESS for limit in limits) ** (-1 / SHARPNESS)
        return programs / tiling.programs * WORK / rate

    at_once = resident(tiling, read, device)
    waves, rest = divmod(tiling.programs, at_once)
    total = waves * wave(at_once) + (wave(rest) if rest else 0.0)
    return total + PROGRAM * tiling.programs


def fits(tiling: Tiling, read: Stream, device: Traits) -> bool:
    """Whether a program's shared memory suffices, and no register spills."""
    # The assembler for sm_100 spills with twice as many of 4-bit keys.
    spills = read.codec in {"kv4c", "kv4h"} and device.major >= 10
    most = 256 if read.codec == "raw" or spills else 512
    bytes_ = tiling.block * read.slot_bytes
    wide = read.codec == "raw" and bytes_ > 32768  # more tempts the compiler to use WGMMA
    enough = room_of(tiling, read) <= device.shared_bytes
    return held(tiling, read) <= most and not wide and enough


def candidates(read: Stream, device: Traits, warps: int) -> Iterator[Tiling]:
    """All tilings that a kernel may have; of one number of warps, if it is not 0."""
    raw = read.codec == "raw"
    exact = raw and read.item == 4  # float32 is multiplied exactly, without tensor cores
    blocks: tuple[int, ...] = (16, 32, 64, 128) if raw else (32, 64, 128)
    stages: tuple[int, ...] = (3, 5, 7) if raw else (3, 5)
    widths: tuple[int, ...] = (2,) if exact else (1, 2) if raw else (1, 2, 4)
    if raw and not device.major:  # AMD's devices: one tile in shared memory, and 2 warps or spills
        stages, widths = (3,), (2,)
        most = (device.shared_bytes - 2048) // read.slot_bytes
        wide = [block for block in blocks if 64 <= block <= most and not read.slots % block]
        blocks = blocks if exact or not wide else tuple(wide)  # of fewer slots, no matrix unit
    for block in blocks[:1] if exact else blocks:
        for parts in (1, 2) if read.codec == "kv4c" else (1,):
            if block * parts > blocks[0] and read.slots % (block * parts):
                continue
            for width in (warps,) if warps else widths:
                for ahead in stages:
                    yield Tiling(block, parts, width, ahead)


@lru_cache(maxsize=256)
def decoding(read: Stream, device: Traits, warps: int = 0, room: int = 0) -> Tiling:
    """Choose the tiling of a decode kernel.

    Args:
        read: What the kernel reads.
        device: Where.
        warps: Of a program, if it has to share a launch with others; 0 for any.
        room: Bytes of shared memory that a program may have then; 0 for all.
    """
    best = MEASURED.get((device.major, read.codec, read.width))
    alone = read.columns == 8 and not room and warps in (0, best.warps if best else 0)
    if best is not None and alone and read.item == 2 and read.slots % best.block == 0:
        return best._replace(programs=min(best.programs, resident(best, read, device)))
    every = list(candidates(read, device, warps))
    good = [
        tiling
        for tiling in every
        if fits(tiling, read, device) and (not room or room_of(tiling, read) <= room)
    ]
    if not good:  # the least that there is
        least = min(every, key=lambda tiling: (held(tiling, read), room_of(tiling, read)))
        return least._replace(programs=resident(least, read, device))
    # Each warp of a sealed kernel repeats what belongs to columns.
    fewest = 4 if read.codec == "raw" else min(tiling.warps for tiling in good)
    filled = [
        tiling._replace(programs=n)
        for tiling in good
        if tiling.warps <= fewest
        for n in range(1, resident(tiling, read, device) + 1)
    ]
    model = {tiling: clocks(tiling, read, device) for tiling in filled}
    near = 1.1 * min(model.values())  # of what is as good, the least instructions an element
    most = max(tiling.block * tiling.parts for tiling in filled if model[tiling] <= near)
    large = [tiling for tiling in filled if tiling.block * tiling.parts == most]
    return min(large, key=lambda tiling: model[tiling])


# Prefill. A program multiplies one tile after the other; others of its processor fill its pauses.

MATRIX = 4096.0  # products and sums of 16-bit elements a clock, by tensor cores
THIN = 4.9  # times as long, where two groups of 4 warps share the 64 rows that one takes
WEIGH, WEIGH_START = 19.7, 760.0  # of each score that a thread holds, and of a tile
SPILLED = 12.0  # of what a thread does, for each time its registers are exceeded
WAITED = 3600.0  # of a tile, where none is loaded ahead while another is multiplied


def prefill_clocks(tiling: Tiling, dims: int, device: Traits) -> float:
    """Model the clocks per query row and token of prefill, with keys and values of `dims`."""
    block, tile, warps = tiling.block, tiling.parts, tiling.warps
    product = 2.0 * block * tile * dims / MATRIX * (THIN if warps * 16 > block else 1.0)
    registers = block * (dims / 2 + 0.57 * tile) / (32 * warps)
    weigh = WEIGH * block * tile / (32 * warps) + WEIGH_START
    weigh *= 1 + SPILLED * max(0.0, registers / 128 - 1)
    alone = product + weigh + (WAITED if tiling.buffers < 2 else 0.0)
    room = block * dims + max(1, tiling.buffers) * tile * 2 * dims + 2048 + SHARED_LOST
    shared = (device.shared_bytes + SHARED_LOST) // room
    threads = 32 * warps * min(255.0, 5 + registers)
    at_once = max(1, min(shared, int(REGISTERS // threads)))
    return max(product, alone / at_once) / (block * tile)


def prefilling(dims: int, tile: int, device: Traits) -> tuple[int, int]:
    """Choose query rows and warps of a prefill kernel whose tiles have so many tokens."""
    best = MEASURED.get((device.major, "prefill", dims))
    if best is None or best.parts != tile:
        sizes = [Tiling(16 * warps, tile, warps, 5) for warps in (4, 8)]
        best = min(sizes, key=lambda size: prefill_clocks(size, dims, device))
    return best.block, best.warps
