"""Traces: requests with their times and their chains of blocks."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike, NDArray

from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED, open_regular
from flowkv.policy.base import NEVER_NS
from flowkv.policy.order.compiled import CLOCK_LIMIT, Array, kernel
from flowkv.residency.blocks import KEY, factors, find, put

LEAST_BYTES, MOST_A_BYTE = 1 << 18, 256
"""Limit of unpacked bytes: a constant plus a factor of the file's length, for real ones 60."""

COLUMNS = {
    "input_tokens": np.int32,
    "output_tokens": np.int32,
    "sessions": np.int64,
    "stops": np.int8,
    "tenants": np.int32,
}
"""Columns of a trace besides times and blocks."""

_ARRAYS = {
    "off": ("offsets", np.int64), "blk": ("blocks", np.int64), "parent": ("parents", np.int64),
    "depth": ("depths", np.int32), "inl": ("input_tokens", np.int32),
    "outl": ("output_tokens", np.int32), "sess": ("sessions", np.int64), "kind": ("stops", np.int8),
}  # fmt: skip
_DAMAGE = (
    *MALFORMED, OSError, zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError,
    RuntimeError, TypeError, SyntaxError, MemoryError, struct.error,
)  # fmt: skip
_REMEDY = "Pass another file, or write it again"


class Trace(msgspec.Struct, frozen=True, eq=False):
    """Trace of R requests over U blocks, numbered densely in the order of their first use.

    Equal numbers mean equal whole prefixes, so a block has one parent. Lengths and numbers are
    checked whenever a trace is made, since compiled code relies on them; `check` checks the rest.

    Attributes:
        name: Name for tables.
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

    def __repr__(self) -> str:
        blocks = f"{len(self.blocks):,} blocks asked for, {self.unique:,} different"
        return f"Trace({self.name!r}: {len(self):,} requests, {blocks})"

    @property
    def unique(self) -> int:
        """Number of different blocks in the trace."""
        return len(self.parents)

    def head(self, requests: int) -> Trace:
        """Return the first requests alone."""
        n = min(max(requests, 0), len(self))
        end = int(self.offsets[n])
        unique = int(self.blocks[:end].max(initial=-1)) + 1
        return msgspec.structs.replace(
            self,
            offsets=self.offsets[: n + 1],
            blocks=self.blocks[:end],
            parents=self.parents[:unique],
            depths=self.depths[:unique],
            **{name: getattr(self, name)[:n] for name in ("times_ns", *COLUMNS)},
        )

    def check(self) -> None:
        """Check all properties that the class documents.

        Raises:
            ConfigError: If one is violated; such a trace must not be replayed.
        """
        self._refuse(self._misfit() or self._fault())

    def _refuse(self, fault: str) -> None:
        if fault:
            raise ConfigError(f"trace {self.name!r}: {fault}", _REMEDY)

    def _misfit(self) -> str:
        n, u, blocks = len(self), self.unique, self.blocks
        columns = [getattr(self, name) for name in COLUMNS]
        numbers = self.times_ns, self.offsets, blocks, self.parents, self.depths, *columns
        if any(x.dtype.kind != "i" or x.ndim != 1 for x in numbers):
            return "not all arrays are vectors of signed integers"
        if len(self.offsets) != n + 1 or {len(column) for column in columns} != {n}:
            return "not one value per request everywhere"
        if len(self.depths) != u or not 1 <= self.block_tokens < 1 << 31:
            return "parents and depths differ in number, or blocks have no tokens, or too many"
        if np.abs(self.times_ns.astype(np.float64)).max(initial=0) >= CLOCK_LIMIT:
            return "a time lies more than 73 years from 0"
        if any(getattr(self, name).min(initial=0) < -(name == "sessions") for name in COLUMNS):
            return "a length, a session, a stop or a tenant is negative"
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
    """Read a trace of `ts, off, blk, parent, depth, inl, outl, sess, kind, btok` arrays.

    Raises:
        ConfigError: If the file cannot be read, is damaged, or is no trace.
    """
    try:
        with open_regular(path) as whole, zipfile.ZipFile(whole) as file:
            room = LEAST_BYTES + MOST_A_BYTE * os.fstat(whole.fileno()).st_size
            if sum(one.file_size for one in file.infolist()) > room:
                raise ValueError("it unpacks to more bytes than its length allows")
            if {one.compress_type for one in file.infolist()} - {0, zipfile.ZIP_DEFLATED}:
                raise ValueError("it is compressed in a way that numpy does not use")
            a = {name: _array(file, name, "iu") for name in (*_ARRAYS, "btok")}
            times = _array(file, "ts", "f").astype(np.float64)
    except _DAMAGE as error:
        raise ConfigError(f"{path} is no trace: {error}", _REMEDY) from None
    if not (np.isfinite(times) & (np.abs(times) < 2**33)).all() or a["btok"].size != 1:
        raise ConfigError(f"{path} is no trace: a time or the size of a block is none", _REMEDY)
    arrays: dict[str, Any] = {
        field: a[name].astype(kind) for name, (field, kind) in _ARRAYS.items()
    }
    if odd := [name for name, (field, _) in _ARRAYS.items() if (arrays[field] != a[name]).any()]:
        raise ConfigError(f"{path} is no trace: {odd[0]} has numbers that are too large", _REMEDY)
    trace = Trace(
        name=Path(path).stem,
        times_ns=np.round(times * 1e9).astype(np.int64),
        tenants=np.zeros(len(times), np.int32),
        block_tokens=int(a["btok"].ravel()[0]),
        **arrays,
    )
    trace.check()
    return trace


def _array(file: zipfile.ZipFile, name: str, kinds: str) -> NDArray[np.generic]:
    """Read one array, after its size is checked against its header."""
    with file.open(f"{name}.npy") as stream:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, kind = read(stream)
        size = int(np.prod(shape, dtype=object)) * kind.itemsize
        if kind.kind not in kinds or len(shape) > 1:
            raise ValueError(f"{name} is an array of {kind} {shape}")
        left = file.getinfo(f"{name}.npy").file_size - stream.tell()
        if left != size:
            raise ValueError(f"{name} should have {size} bytes and has {left}")
        body = stream.read(size)
        if len(body) != size:
            raise ValueError(f"{name} ends early")
    return np.frombuffer(body, kind).reshape(shape)


# From chains of ids, as a file or a generator has them, to a trace of dense block numbers.
#
# An id need not identify a prefix: blocks are keyed by (block before, id), so that equal numbers
# mean equal whole prefixes for any hashes of the source (some published traces hash each block
# alone).

Ids = NDArray[np.uint64]
_SEED = 20261


@kernel
def number(
    offsets: Array,
    ids: Array,
    keys: Array,
    buckets: Array,
    mix: Array,
    blocks: Array,
    parents: Array,
    depths: Array,
) -> int:
    """Number each (block before, id) in order of first use; return how many there are.

    The block before serves as the table's space, with 0 for roots.
    """
    n = 0
    for r in range(len(offsets) - 1):
        above = np.int64(-1)
        for j in range(offsets[r], offsets[r + 1]):
            b = find(keys, buckets, mix, ids[j, 0], ids[j, 1], above + 1)
            if b < 0:
                b = np.int64(n)
                put(keys, buckets, mix, b, ids[j, 0], ids[j, 1], above + 1)
                parents[b], depths[b] = above, j - offsets[r]
                n += 1
            blocks[j] = b
            above = b
    return n


def wide(ids: ArrayLike, space: int = 0) -> Ids:
    """Return integer ids of one space, negative ones included, as u64 [n, 2]."""
    low = np.asarray(ids, np.int64).ravel()
    return np.stack((low.view(np.uint64), np.full(len(low), space, np.uint64)), 1)


def build_trace(
    name: str,
    times_ns: ArrayLike,
    lengths: ArrayLike,
    ids: Ids,
    block_tokens: int,
    **more: ArrayLike | None,
) -> Trace:
    """Make a trace of requests in any order of time.

    Args:
        name: Name for tables.
        times_ns: [R], in any order; requests of one time keep their order.
        lengths: [R], blocks of each request.
        ids: u64 [sum of lengths, 2], root to leaf, request after request.
        block_tokens: Tokens of a block.
        **more: `input_tokens`, `output_tokens`, `sessions`, `stops`, `tenants`, [R] each; defaults
            are whole blocks, none, unknown, unknown and one tenant.

    Raises:
        ConfigError: If the lengths do not fit each other.
    """
    times = np.asarray(times_ns, np.int64)
    sizes = np.asarray(lengths, np.int64)
    columns = {key: np.asarray(value) for key, value in more.items() if value is not None}
    if (sizes < 0).any() or np.ndim(ids) != 2 or np.shape(ids)[1] != 2:
        raise ConfigError(
            f"trace {name!r} has negative lengths, or ids of shape {list(np.shape(ids))}",
            "Give lengths from 0 on, and ids [sum of lengths, 2], as `wide` makes them",
        )
    if {len(times), *map(len, columns.values())} != {len(sizes)} or sizes.sum() != len(ids):
        raise ConfigError(
            f"trace {name!r} has {len(times)} times, {len(sizes)} lengths and {len(ids)} blocks",
            "Give one of each per request, and as many ids as the lengths add up to",
        )
    order = np.argsort(times, kind="stable")
    starts = np.cumsum(sizes) - sizes
    offsets = np.concatenate(([0], np.cumsum(sizes[order])))
    if len(order) and (np.diff(order) < 0).any():
        at = np.arange(len(ids)) + np.repeat(starts[order] - offsets[:-1], sizes[order])
        ids = ids[at]
    ids, n = np.ascontiguousarray(ids, np.uint64), len(ids)
    keys = np.zeros(n, KEY)
    keys["space"] = -1
    buckets = np.zeros(1 << max(4, (2 * n).bit_length()), np.uint64)
    blocks, parents, depths = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int32)
    unique = number(offsets, ids, keys, buckets, factors(_SEED), blocks, parents, depths)
    unsaid: dict[str, Any] = dict.fromkeys(COLUMNS, 0)
    unsaid |= {"input_tokens": sizes * block_tokens, "sessions": -1}
    said: dict[str, Any] = {
        key: np.broadcast_to(columns.get(key, unsaid[key]), len(order))[order].astype(kind)
        for key, kind in COLUMNS.items()
    }
    return Trace(
        name=name,
        times_ns=times[order],
        offsets=offsets,
        blocks=blocks,
        parents=parents[:unique].copy(),
        depths=depths[:unique].copy(),
        block_tokens=block_tokens,
        **said,
    )


def join(name: str, traces: Sequence[Trace]) -> Trace:
    """Join requests of several traces in order of time; blocks and sessions stay separate.

    Raises:
        ConfigError: If there is none, or blocks differ in tokens.
    """
    if len({trace.block_tokens for trace in traces}) != 1:
        raise ConfigError("traces to join must have blocks of one size", "Pass one or more such")
    ids, sessions, tenants = [], [], []
    session = tenant = 0
    for i, trace in enumerate(traces):
        ids.append(wide(trace.blocks, i))
        sessions.append(np.where(trace.sessions < 0, -1, trace.sessions + session))
        session += int(trace.sessions.max(initial=-1)) + 1
        tenants.append(trace.tenants + tenant)
        tenant += int(trace.tenants.max(initial=-1)) + 1
    columns = {key: np.concatenate([getattr(trace, key) for trace in traces]) for key in COLUMNS}
    columns |= {"sessions": np.concatenate(sessions), "tenants": np.concatenate(tenants)}
    return build_trace(
        name,
        np.concatenate([trace.times_ns for trace in traces]),
        np.concatenate([np.diff(trace.offsets) for trace in traces]),
        np.concatenate(ids),
        traces[0].block_tokens,
        **columns,
    )


# Continuations of requests: the hints of an application in a replay.


@kernel
def follow(offsets: Array, blocks: Array, sessions: Array, users: Array, turns: Array) -> None:
    """Fill `turns` with the next turn of each request, -1 for none; `users` is scratch.

    In a known session it is the next request. Otherwise it is the first later one that shares all
    blocks of this one, or all but the last, which may have been cut short, and more than one.
    """
    for r in range(len(offsets) - 1):
        first, end = offsets[r], offsets[r + 1]
        known = first
        while known < end and users[blocks[known]] >= 0:
            known += 1
        if sessions[r] < 0 and known - first > 1:
            q = users[blocks[known - 1]]
            if known - first >= offsets[q + 1] - offsets[q] - 1 and turns[q] < 0:
                turns[q] = r
        for j in range(first, end):
            users[blocks[j]] = r


def next_turns(trace: Trace, *, use_sessions: bool = True) -> NDArray[np.int64]:
    """Return for each request the one that continues its conversation; -1 where it ends.

    Args:
        trace: The trace.
        use_sessions: Follow sessions where they are known, not blocks alone.
    """
    turns = np.full(len(trace), -1, np.int64)
    users = np.full(trace.unique, -1, np.int64)
    sessions = trace.sessions if use_sessions else np.full(len(trace), -1, np.int64)
    follow(trace.offsets, trace.blocks, sessions, users, turns)
    known = np.flatnonzero(sessions >= 0)
    order = known[np.argsort(sessions[known], kind="stable")]
    same = sessions[order[1:]] == sessions[order[:-1]]
    turns[order[:-1][same]] = order[1:][same]
    return turns


@kernel
def repeat(
    offsets: Array, blocks: Array, sessions: Array, order: Array, users: Array, again: Array
) -> None:
    """Fill `again`: how many leading blocks of each request are sent again, and by which one.

    `order` has the requests session by session; `users` is scratch, -1 for each block.
    """
    for i in range(len(order) - 1, -1, -1):
        r = order[i]
        for j in range(offsets[r], offsets[r + 1]):
            later = users[blocks[j]]
            if later >= 0 and sessions[later] == sessions[r]:
                again[r, 0], again[r, 1] = j - offsets[r] + 1, later
            users[blocks[j]] = r


class TraceHints(NamedTuple):
    """Hints of an application after each request.

    Attributes:
        etas_ns: i8 [R], nanoseconds until the next use of the part that is sent again; `NEVER_NS`
            without such a part.
        counts: i8 [R], leading blocks of the request that are sent again, to which the time
            applies. The others are never used again.
    """

    etas_ns: NDArray[np.int64]
    counts: NDArray[np.int64]


def hints_of(trace: Trace, sigma: float, seed: int = 0) -> TraceHints:
    """Return hints of an application that knows which part of a prompt it sends again, and when.

    That part ends at the deepest block that a later request of the same session has too; where
    sessions are unknown, at the deepest that any later request has. The part that is sent again is
    exact; the time until the first such request is the true one with a lognormal error.

    Args:
        trace: The trace.
        sigma: Standard deviation of the natural logarithm of the error; 0 is exact.
        seed: Seed of the errors.

    Raises:
        ConfigError: If sigma is negative or not finite.
    """
    if not 0.0 <= sigma < float("inf"):
        raise ConfigError(f"hints with an error of {sigma}", "Use 0 (exact), or 0.5 for instance")
    again = np.zeros((len(trace), 2), np.int64)
    order = np.argsort(trace.sessions, kind="stable")
    users = np.full(trace.unique, -1, np.int64)
    repeat(trace.offsets, trace.blocks, trace.sessions, order, users, again)
    counts, turns = again.T
    gaps = (trace.times_ns[turns] - trace.times_ns).astype(np.float64)
    errors = np.exp(sigma * np.random.default_rng(seed).standard_normal(len(trace)))
    etas = np.minimum(gaps * errors, 2.0**62).astype(np.int64)
    return TraceHints(np.where(counts == 0, NEVER_NS, etas), counts)
