"""Which blocks each decode step reads: the published pattern, or a JSON-lines trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from flowkv.core.errors import ConfigError


class Geometry(NamedTuple):
    """Shape of the cache; a block holds keys and values of one head for `block_tokens` tokens."""

    layers: int = 32
    heads: int = 32
    head_dim: int = 128
    value_bytes: int = 2
    context: int = 8192
    block_tokens: int = 128

    @property
    def blocks_per_head(self) -> int:
        """Blocks of the whole context, per layer and head."""
        return self.context // self.block_tokens

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.layers * self.heads * self.blocks_per_head

    @property
    def block_bytes(self) -> int:
        """Bytes of a block at full precision."""
        return self.block_tokens * self.head_dim * self.value_bytes * 2

    def newest(self, room: int) -> list[list[int]]:
        """The `room` blocks that a prefill wrote last, as it wrote them, chunk by chunk.

        A chunk is the same block of tokens in every layer and head.
        """
        per_chunk = self.layers * self.heads
        skipped = max(0, self.blocks - room)
        chunks = [
            list(range(first, self.blocks, self.blocks_per_head))
            for first in range(skipped // per_chunk, self.blocks_per_head)
        ]
        if chunks:
            chunks[0] = chunks[0][skipped % per_chunk :]
        return chunks

    def slot(self, layer: int, head: int, block: int) -> int:
        """The number under which a policy knows a block."""
        return (layer * self.heads + head) * self.blocks_per_head + block


class Workload(NamedTuple):
    """What is read, step by step.

    Attributes:
        name: For tables.
        geometry: Shape of the cache.
        steps: Slots in the order in which a step reads them, with repetitions.
        positions: Per step, the index of the block that holds the newest token.
    """

    name: str
    geometry: Geometry
    steps: Sequence[Sequence[int]]
    positions: Sequence[int]

    @property
    def accesses(self) -> int:
        """Reads in all."""
        return sum(map(len, self.steps))

    def distinct(self, step: int) -> list[int]:
        """Slots of a step, each once, in order."""
        return list(dict.fromkeys(self.steps[step]))


def published_workload() -> Workload:
    """The pattern of KVFlow: 8,192 tokens of context, 128 decode steps, 20,288 reads.

    Per step and layer, a head that moves on with the step reads its last three blocks, a second one
    a block that is eight blocks old, a third one a block from anywhere.
    Source: manishklach/KVFabric (formerly KVFlow), state of commit 3942e4d.
    """
    shape = Geometry()
    last = shape.blocks_per_head - 1
    steps, positions = [], []
    for step in range(128):
        newest = min(last, step // 2)
        reads = []
        for layer in range(shape.layers):
            recent, older, random = ((stride * step + layer) % shape.heads for stride in (1, 3, 7))
            for block in range(max(0, newest - 2), newest + 1):
                reads.append(shape.slot(layer, recent, block))
            reads.append(shape.slot(layer, older, max(0, newest - 8)))
            reads.append(shape.slot(layer, random, 11 * step % shape.blocks_per_head))
        steps.append(reads)
        positions.append(newest)
    return Workload("kvflow", shape, steps, positions)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    reads: list[tuple[int, int, int]]
    newest: int = -1


def read_workload(path: Path, geometry: Geometry | None = None) -> Workload:
    """Reads a trace with one JSON object per decode step.

    A line is `{"reads": [[layer, head, block], ...], "newest": block}`; without `newest`, the
    largest block read so far is taken for the newest one.

    Args:
        path: The file.
        geometry: Shape of the cache; default that of the published experiment.

    Raises:
        ConfigError: If the file cannot be read, or a line is no step of this geometry.
    """
    shape = geometry or Geometry()
    steps: list[list[int]] = []
    positions: list[int] = []
    newest = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            given = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise _refused(path, number, str(error)) from None
        for layer, head, block in given.reads:
            if not (
                0 <= layer < shape.layers
                and 0 <= head < shape.heads
                and 0 <= block < shape.blocks_per_head
            ):
                raise _refused(path, number, f"there is no block {[layer, head, block]}")
            newest = max(newest, block)
        steps.append([shape.slot(*read) for read in given.reads])
        positions.append(given.newest if given.newest >= 0 else newest)
    if not any(steps):
        raise ConfigError(f"{path} holds no reads", 'Write lines such as {"reads": [[0, 0, 0]]}')
    return Workload(path.stem, shape, steps, positions)


def write_workload(path: Path, workload: Workload) -> None:
    """Writes what `read_workload` reads."""
    shape = workload.geometry
    with path.open("wb") as file:
        for reads, newest in zip(workload.steps, workload.positions, strict=True):
            split = [_split(shape, slot) for slot in reads]
            file.write(msgspec.json.encode(_Line(split, newest)) + b"\n")


def _split(shape: Geometry, slot: int) -> tuple[int, int, int]:
    pair, block = divmod(slot, shape.blocks_per_head)
    layer, head = divmod(pair, shape.heads)
    return layer, head, block


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "Give the path of a JSON-lines file"
        ) from None


def _refused(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}, step {number}: {problem}",
        'Write one object per step, {"reads": [[layer, head, block], ...]}',
    )
