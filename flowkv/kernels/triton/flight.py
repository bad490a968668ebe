"""Tiles, warps, stages and programs of attention kernels, chosen by a model of bytes in flight.

Decoding waits for memory. The bytes in flight of a processor are `programs x buffers x tile bytes`:
by Little's law that many bytes arrive in one latency, as long as its programs (limited by shared
memory and registers) find time to compute, and memory has bandwidth left. Prefill is bound by
arithmetic: there the model predicts how well tensor cores, softmax and loads hide each other.

Constants are clocks, fitted to a sweep on an H200; the model reproduces its order
(`tests/kernels/sweep_h200.json`). The best measured tilings are in a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from flowkv.core.geometry import ITEMSIZE, SPECS, PageLayout
from flowkv.kernels.triton.launch import Traits, padded

REGISTERS = 65536
"""Registers of a processor; a thread has 255 at most."""

SHARED_LOST = 1024
"""Bytes of shared memory that each program costs beside its own."""

LATENCY = 1050.0
START = 65.0  # per part of a tile, regardless of its size
ELEMENT = 6.0  # per element of K and V that a thread holds
SPILLING = 7.0  # per raw element, for each 512 of a thread that are too many
CHANNELS = 2000.0  # per tile of kv4c: its query is multiplied by the channels' scales
BARRIER = 1200.0  # per part that several warps share
BUSY = 11.0  # warps that proceed at full speed
PROGRAM = 1000.0  # per program beside its loop: its begin, and a partial
SHARPNESS = 3.4  # exponent of the soft minimum of several limits
BANDWIDTH = {0: 8.0, 8: 10.0, 9: 19.0, 10: 29.0}  # bytes a clock and processor, by generation
WORK = 1 << 20  # bytes per processor


class Tiling(NamedTuple):
    """Tiling of a kernel's work.

    Attributes:
        block: Slots of a page in a part of a tile: tokens, or pairs with values that share bytes;
            of prefill, query rows.
        parts: Parts of a tile; of prefill, tokens of a tile.
        warps: Warps of a program.
        stages: Stages of the loop; it reads the page table first, so (stages - 1) // 2 tiles are
            ahead.
        programs: Programs that a processor gets at once.
    """

    block: int
    parts: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def buffers(self) -> int:
        """Tiles with K and V in shared memory or in flight."""
        return (self.stages - 1) // 2


class Stream(NamedTuple):
    """Pages that a decode kernel reads.

    Attributes:
        codec: Codec of the pages.
        slots: Slots of a page.
        slot_bytes: Bytes of K and V of a slot.
        width: Elements of a slot, padded as its tile is.
        tile_bytes: Bytes of each tile regardless of its slots.
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
"""Best tilings of the sweep without spills, by generation, codec and elements of a slot; 8 columns.

64 slots of 4 bits, one warp, are 1 % (kv4c, 3 stages) and 2 % (kv4h) faster, and spill."""


@lru_cache(maxsize=256)
def stream(layout: PageLayout, columns: int) -> Stream:
    """Describe the pages of a layout as `columns` query rows read them."""
    dim, value_dim = layout.head_dim, layout.value_dim
    item = ITEMSIZE[layout.dtype]
    k_bits, v_bits = layout.spec.k_bits or 8 * item, layout.spec.v_bits or 8 * item
    pair = 2 if v_bits == 4 else 1
    width = pair * (max(32 * 8 // k_bits, padded(dim)) + padded(value_dim))
    scales = 4 * dim + 2 * dim * columns if layout.spec.by_channel else 0
    slot_bytes = pair * (dim * k_bits + value_dim * v_bits) // 8
    return Stream(layout.codec, layout.page_size // pair, slot_bytes, width, scales, columns, item)


def held(tiling: Tiling, read: Stream) -> float:
    """Return the elements of K and V of a part that a thread holds, once per 8 query rows."""
    return tiling.block * read.width * max(1, read.columns // 8) / (32 * tiling.warps)


def room_of(tiling: Tiling, read: Stream) -> int:
    """Return the bytes of shared memory of a program."""
    tile_bytes = tiling.block * tiling.parts * read.slot_bytes + read.tile_bytes
    return tiling.buffers * tile_bytes + 2048


def resident(tiling: Tiling, read: Stream, device: Traits) -> int:
    """Return the programs that a processor holds, limited by shared memory and registers."""
    if read.codec == "raw":
        registers = 80 + 0.56 * held(tiling, read)
    else:
        registers = 31 * math.log2(held(tiling, read)) - 41
    threads = 32 * tiling.warps * min(255.0, registers)
    shared = (device.shared_bytes + SHARED_LOST) // (room_of(tiling, read) + SHARED_LOST)
    return max(1, min(shared, int(REGISTERS // threads)))


def in_flight(tiling: Tiling, read: Stream, programs: int) -> int:
    """Return the bytes in flight or in use of so many programs of a processor."""
    return programs * tiling.buffers * tiling.block * tiling.parts * read.slot_bytes


def clocks(tiling: Tiling, read: Stream, device: Traits) -> float:
    """Return the modelled clocks in which a processor attends over `WORK` bytes."""
    elements = held(tiling, read)
    spilled = max(0.0, elements / 512 - 1) * SPILLING if read.codec == "raw" else 0.0
    loop = tiling.parts * (START + ELEMENT * elements * (1 + spilled))
    loop += CHANNELS if SPECS[read.codec].by_channel else 0
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
    """Return whether a program's shared memory suffices, and no register spills."""
    # The assembler for sm_100 spills with twice as many of 4-bit keys.
    spills = SPECS[read.codec].k_bits == 4 and device.major >= 10
    most = 256 if read.codec == "raw" or spills else 512
    bytes_ = tiling.block * read.slot_bytes
    wide = read.codec == "raw" and bytes_ > 32768  # more tempts the compiler to use WGMMA
    enough = room_of(tiling, read) <= device.shared_bytes
    return held(tiling, read) <= most and not wide and enough


def candidates(read: Stream, device: Traits, warps: int) -> Iterator[Tiling]:
    """Yield all tilings that a kernel may have, with `warps` warps if that is not 0."""
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
        for parts in (1, 2) if SPECS[read.codec].by_channel else (1,):
            if block * parts > blocks[0] and read.slots % (block * parts):
                continue
            for width in (warps,) if warps else widths:
                for ahead in stages:
                    yield Tiling(block, parts, width, ahead)


@lru_cache(maxsize=256)
def decoding(read: Stream, device: Traits, warps: int = 0, room: int = 0) -> Tiling:
    """Choose the tiling of a decode kernel.

    Args:
        read: Pages that the kernel reads.
        device: Traits of the device.
        warps: Warps of a program, if it has to share a launch with others; 0 for any.
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
    if not good:  # the least demanding tiling
        least = min(every, key=lambda tiling: (held(tiling, read), room_of(tiling, read)))
        return least._replace(programs=resident(least, read, device))
    # Each warp of a sealed kernel repeats the work per column.
    fewest = 4 if read.codec == "raw" else min(tiling.warps for tiling in good)
    filled = [
        tiling._replace(programs=n)
        for tiling in good
        if tiling.warps <= fewest
        for n in range(1, resident(tiling, read, device) + 1)
    ]
    model = {tiling: clocks(tiling, read, device) for tiling in filled}
    near = 1.1 * min(model.values())  # among equally good ones, the fewest instructions per element
    most = max(tiling.block * tiling.parts for tiling in filled if model[tiling] <= near)
    large = [tiling for tiling in filled if tiling.block * tiling.parts == most]
    return min(large, key=lambda tiling: model[tiling])


# Prefill: a program multiplies one tile after the other; others of its processor fill its pauses.

MATRIX = 4096.0  # products and sums of 16-bit elements a clock, by tensor cores
THIN = 4.9  # factor where two groups of 4 warps share the 64 rows that one takes
WEIGH, WEIGH_START = 19.7, 760.0  # per score that a thread holds, and per tile
SPILLED = 12.0  # added share of a thread's work, per multiple of its registers in excess
WAITED = 3600.0  # per tile, where none is loaded ahead while another is multiplied


def prefill_clocks(tiling: Tiling, dims: int, device: Traits) -> float:
    """Return the modelled clocks per query row and token of prefill, with K and V of `dims`."""
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
    """Choose the query rows and warps of a prefill kernel with tiles of so many tokens."""
    best = MEASURED.get((device.major, "prefill", dims))
    if best is None or best.parts != tile:
        sizes = [Tiling(16 * warps, tile, warps, 5) for warps in (4, 8)]
        best = min(sizes, key=lambda size: prefill_clocks(size, dims, device))
    return best.block, best.warps
