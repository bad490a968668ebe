"""A trace: who asked for which blocks, and when."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Trace(NamedTuple):
    """R requests over U blocks, numbered densely in the order of their first use.

    Equal numbers mean equal whole prefixes, so a block has one parent.

    Attributes:
        name: For tables.
        times_ns: i8 [R], not decreasing.
        offsets: i8 [R + 1]; the blocks of request r are `blocks[offsets[r]:offsets[r + 1]]`.
        blocks: i8, root to leaf.
        parents: i8 [U], -1 for roots.
        depths: i4 [U].
        input_tokens: i4 [R].
        output_tokens: i4 [R].
        sessions: i8 [R], -1 if unknown.
        stops: i1 [R]; see `flowkv.policy.base`.
        tenants: i4 [R].
        block_tokens: Tokens of a block.
    """

    name: str
    times_ns: NDArray[np.int64]
    offsets: NDArray[np.int64]
    blocks: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int32]
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    sessions: NDArray[np.int64]
    stops: NDArray[np.int8]
    tenants: NDArray[np.int32]
    block_tokens: int

    def __len__(self) -> int:
        return len(self.times_ns)

    @property
    def unique(self) -> int:
        """Different blocks."""
        return len(self.parents)


def read_npz(path: Path) -> Trace:
    """Reads a trace of `ts, off, blk, parent, depth, inl, outl, sess, kind, btok` arrays."""
    with np.load(path, allow_pickle=False) as file:
        a = {name: file[name] for name in file.files}
    n = len(a["ts"])
    return Trace(
        name=path.stem,
        times_ns=np.round(a["ts"] * 1e9).astype(np.int64),
        offsets=a["off"].astype(np.int64),
        blocks=a["blk"].astype(np.int64),
        parents=a["parent"].astype(np.int64),
        depths=a["depth"].astype(np.int32),
        input_tokens=a["inl"].astype(np.int32),
        output_tokens=a["outl"].astype(np.int32),
        sessions=a["sess"].astype(np.int64),
        stops=a["kind"].astype(np.int8),
        tenants=np.zeros(n, np.int32),
        block_tokens=int(a["btok"]),
    )
