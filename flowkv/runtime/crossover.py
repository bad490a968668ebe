"""From which size on a piece is copied by the copy engine rather than by a kernel, measured.

A copy engine is told of each piece, which takes about as long as 30 KB of copying; one kernel moves
thousands of small pieces, but occupies processors (vLLM's `swap_blocks_triton` draws its line at
28 KB and 16 pieces; figures in its "KV offloading connector" report of January 2026). The line is
another on every machine, so it is measured once and remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from flowkv.runtime.streams import Streams

SIZES = tuple(4096 << n for n in range(8))  # 4 to 512 KiB
PIECES = 64
ROUNDS = 5
MEMORY = Path("~/.cache/flowkv/copies.json")

_BYTES_NEEDED = PIECES * SIZES[-1]


class Crossover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where kernels end and the copy engine begins.

    Attributes:
        up_bytes: Smallest piece that the copy engine brings to the device.
        down_bytes: Smallest piece that it brings from there.
        least_pieces: Fewest pieces that are worth a kernel.
    """

    up_bytes: int = 28 << 10
    down_bytes: int = 28 << 10
    least_pieces: int = 16


def remembered(name: str, file: Path = MEMORY) -> Crossover | None:
    """What was measured on a device of this name."""
    return _known(file.expanduser()).get(name)


def remember(name: str, crossover: Crossover, file: Path = MEMORY) -> None:
    """Keeps what was measured for the next process; where that is not allowed it measures again."""
    file = file.expanduser()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = _known(file) | {name: crossover}
        beside = file.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(known))
        beside.replace(file)
    except OSError:
        return


def calibrate(streams: Streams, pages: torch.Tensor, staging: torch.Tensor) -> Crossover:
    """Measures both ways on one device. The content of pages and staging is lost.

    Args:
        streams: Of the device.
        pages: uint8 `[bytes]` on the device, nobody's yet.
        staging: uint8 `[bytes]` in pinned memory.

    Returns:
        What was found, or the default if there is too little memory to tell.
    """
    if min(len(pages), len(staging)) < _BYTES_NEEDED:
        return Crossover()
    up, down = (_line(streams, pages, staging, to_device) for to_device in (True, False))
    return Crossover(up, down)


def _line(streams: Streams, pages: torch.Tensor, staging: torch.Tensor, to_device: bool) -> int:
    """The first size from which on the copy engine is not slower."""
    for size in SIZES:
        rows = staging[: PIECES * size].view(PIECES, size)
        # backwards: no two neighbours are one piece
        places = [(PIECES - 1 - i) * (size // 4096) for i in range(PIECES)]

        def engine(rows: torch.Tensor = rows, places: list[int] = places, n: int = size) -> None:
            for row, place in zip(rows, places, strict=True):
                page = pages[4096 * place :][:n]
                streams.copy(*((page, row) if to_device else (row, page)))

        def kernel(rows: torch.Tensor = rows, places: list[int] = places) -> None:
            (streams.scatter if to_device else streams.gather)(pages, places, rows)

        if _fastest(streams, engine) <= _fastest(streams, kernel):
            return size
    return 2 * SIZES[-1]


def _fastest(streams: Streams, call: Callable[[], None]) -> float:
    call()  # compiled, and once through
    return min(streams.timed(call) for _ in range(ROUNDS))


def _known(file: Path) -> dict[str, Crossover]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Crossover])
    except (OSError, msgspec.DecodeError):
        return {}
