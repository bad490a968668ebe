"""A trace: who asked for which blocks, and when."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError

LARGEST_BYTES = 1 << 34
"""No array of a trace may be larger, whatever a file says."""

_ARRAYS = {
    "ts": "f", "off": "iu", "blk": "iu", "parent": "iu", "depth": "iu", "inl": "iu", "outl": "iu",
    "sess": "iu", "kind": "iu", "btok": "iu",
}  # fmt: skip
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, NotImplementedError,
    RuntimeError, OverflowError,
)  # fmt: skip
_REMEDY = "Pass another file, or make it anew"


class Trace(msgspec.Struct, frozen=True, eq=False):
    """R requests over U blocks, numbered densely in the order of their first use.

    Equal numbers mean equal whole prefixes, so a block has one parent. That lengths and numbers fit
    is looked at whenever a trace is made, since compiled code walks along them; `check` looks at
    the rest.

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

    def __post_init__(self) -> None:
        self._refuse(self._misfit())

    def __len__(self) -> int:
        return len(self.times_ns)

    @property
    def unique(self) -> int:
        """Different blocks."""
        return len(self.parents)

    def head(self, requests: int) -> Trace:
        """The first requests alone."""
        n = min(max(requests, 0), len(self))
        end = int(self.offsets[n])
        unique = int(self.blocks[:end].max(initial=-1)) + 1
        return msgspec.structs.replace(
            self,
            times_ns=self.times_ns[:n],
            offsets=self.offsets[: n + 1],
            blocks=self.blocks[:end],
            parents=self.parents[:unique],
            depths=self.depths[:unique],
            input_tokens=self.input_tokens[:n],
            output_tokens=self.output_tokens[:n],
            sessions=self.sessions[:n],
            stops=self.stops[:n],
            tenants=self.tenants[:n],
        )

    def check(self) -> None:
        """Looks whether all that is said above holds.

        Raises:
            ConfigError: If it does not; nothing may be replayed then.
        """
        self._refuse(self._misfit() or self._fault())

    def _refuse(self, fault: str) -> None:
        if fault:
            raise ConfigError(f"trace {self.name!r}: {fault}", _REMEDY)

    def _misfit(self) -> str:
        n, u, blocks = len(self), self.unique, self.blocks
        columns = (self.input_tokens, self.output_tokens, self.sessions, self.stops, self.tenants)
        numbers = self.times_ns, self.offsets, blocks, self.parents, self.depths, *columns
        if any(x.dtype.kind != "i" or x.ndim != 1 for x in numbers):
            return "not all arrays are vectors of signed integers"
        if len(self.offsets) != n + 1 or {len(column) for column in columns} != {n}:
            return "not one value per request everywhere"
        if len(self.depths) != u or self.block_tokens < 1:
            return "parents and depths differ in number, or blocks have no tokens"
        if self.offsets[0] != 0 or self.offsets[-1] != len(blocks):
            return "the offsets do not span the blocks"
        if (np.diff(self.offsets) < 0).any():
            return "an offset is smaller than the one before it"
        if blocks.min(initial=0) < 0 or blocks.max(initial=-1) >= u:
            return "blocks are not numbered from 0 to the last"
        if self.parents.min(initial=0) < -1 or self.parents.max(initial=-1) >= u:
            return "a parent is no block"
        return ""

    def _fault(self) -> str:
        u, blocks = self.unique, self.blocks
        if (np.diff(self.times_ns) < 0).any():
            return "time runs backwards"
        first = np.maximum.accumulate(blocks) if len(blocks) else blocks
        if len(blocks) and (blocks.min() < 0 or first[-1] != u - 1 or blocks[0] != 0):
            return "blocks are not numbered from 0 to the last"
        if len(blocks) and (np.diff(first) > 1).any():
            return "blocks are not numbered in the order of their first use"
        roots = np.zeros(len(blocks), np.bool_)
        roots[self.offsets[:-1][np.diff(self.offsets) > 0]] = True
        above = np.where(roots, -1, np.roll(blocks, 1))
        if not np.array_equal(self.parents[blocks], above):
            return "a block follows another one than its parent"
        depths = np.arange(len(blocks)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return "" if np.array_equal(self.depths[blocks], depths) else "a depth is wrong"


def read_npz(path: Path) -> Trace:
    """Reads a trace of `ts, off, blk, parent, depth, inl, outl, sess, kind, btok` arrays.

    Raises:
        ConfigError: If the file is damaged, or no trace.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as file:
            a = {name: _array(file, name, kinds) for name, kinds in _ARRAYS.items()}
    except _DAMAGE as error:
        raise ConfigError(f"{path} is no trace: {error}", _REMEDY) from None
    n, seconds = len(a["ts"]), a["ts"].astype(np.float64)
    if not (np.isfinite(seconds) & (np.abs(seconds) < 2**33)).all() or a["btok"].size != 1:
        raise ConfigError(f"{path} is no trace: a time or the size of a block is none", _REMEDY)
    trace = Trace(
        name=Path(path).stem,
        times_ns=np.round(seconds * 1e9).astype(np.int64),
        offsets=a["off"].astype(np.int64),
        blocks=a["blk"].astype(np.int64),
        parents=a["parent"].astype(np.int64),
        depths=a["depth"].astype(np.int32),
        input_tokens=a["inl"].astype(np.int32),
        output_tokens=a["outl"].astype(np.int32),
        sessions=a["sess"].astype(np.int64),
        stops=a["kind"].astype(np.int8),
        tenants=np.zeros(n, np.int32),
        block_tokens=int(a["btok"].ravel()[0]),
    )
    trace.check()
    return trace


def write_npz(path: Path, trace: Trace) -> None:
    """Writes a trace for `read_npz`; tenants are left out.

    Raises:
        OSError: The file cannot be written.
    """
    np.savez_compressed(
        path,
        allow_pickle=False,
        ts=trace.times_ns / 1e9,
        off=trace.offsets,
        blk=trace.blocks.astype(np.int32),
        parent=trace.parents.astype(np.int32),
        depth=trace.depths,
        inl=trace.input_tokens,
        outl=trace.output_tokens,
        sess=trace.sessions,
        kind=trace.stops,
        btok=np.int64(trace.block_tokens),
    )


def _array(file: zipfile.ZipFile, name: str, kinds: str) -> NDArray[np.generic]:
    """One array, whose size is looked at before there is room for it."""
    with file.open(f"{name}.npy") as stream:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, kind = read(stream)
        size = int(np.prod(shape, dtype=object)) * kind.itemsize
        if kind.kind not in kinds or len(shape) > 1 or size > LARGEST_BYTES:
            raise ValueError(f"{name} is an array of {kind} {shape}")
        left = file.getinfo(f"{name}.npy").file_size - stream.tell()
        if left != size:
            raise ValueError(f"{name} should have {size} bytes and has {left}")
        body = stream.read(size)
        if len(body) != size:
            raise ValueError(f"{name} ends early")
    return np.frombuffer(body, kind).reshape(shape)
