"""From chains of ids, as a file or a generator has them, to a trace of dense block numbers.

An id need not tell prefixes apart: blocks are keyed by (block before, id), so that equal numbers
mean equal whole prefixes whatever the source hashed (some published traces hash each block alone).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.ledger.table import KEY, factors, find, put
from flowkv.policy.order.compiled import Array, kernel
from flowkv.sim.trace import Trace

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
    """Gives each (block before, id) a number, in order of first use; returns how many there are.

    The block before serves as the table's space, and 0 as that of roots.
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


def wide(ids: ArrayLike) -> Ids:
    """u64 [n, 2] of plain integer ids, negative ones included."""
    low = np.asarray(ids, np.int64).ravel()
    pairs = np.zeros((len(low), 2), np.uint64)
    pairs[:, 0] = low.view(np.uint64)
    return pairs


def build_trace(
    name: str,
    times_ns: ArrayLike,
    lengths: ArrayLike,
    ids: Ids,
    block_tokens: int,
    **more: ArrayLike | None,
) -> Trace:
    """Makes a trace of requests in any order of time.

    Args:
        name: For tables.
        times_ns: [R], of any order; requests of one time keep theirs.
        lengths: [R], blocks of each request.
        ids: u64 [sum of lengths, 2], root to leaf, request after request.
        block_tokens: Tokens of a block.
        **more: `input_tokens`, `output_tokens`, `sessions`, `stops`, `tenants`, [R] each; without,
            whole blocks, none, unknown, unknown and one tenant.

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
            "Give one of each per request, and as many ids as the lengths say",
        )
    order = np.argsort(times, kind="stable")
    starts = np.cumsum(sizes) - sizes
    offsets = np.concatenate(([0], np.cumsum(sizes[order])))
    if len(order) and (np.diff(order) < 0).any():
        at = np.arange(len(ids)) + np.repeat(starts[order] - offsets[:-1], sizes[order])
        ids = ids[at]
    blocks, parents, depths = _number(offsets, np.ascontiguousarray(ids, np.uint64))

    def column(key: str, kind: type, default: ArrayLike) -> NDArray[np.generic]:
        if key not in columns:
            return np.broadcast_to(np.asarray(default, kind), len(order)).copy()
        return columns[key][order].astype(kind)

    return Trace(
        name=name,
        times_ns=times[order],
        offsets=offsets,
        blocks=blocks,
        parents=parents,
        depths=depths,
        input_tokens=column("input_tokens", np.int32, sizes[order] * block_tokens),  # type: ignore[arg-type]
        output_tokens=column("output_tokens", np.int32, 0),  # type: ignore[arg-type]
        sessions=column("sessions", np.int64, -1),  # type: ignore[arg-type]
        stops=column("stops", np.int8, 0),  # type: ignore[arg-type]
        tenants=column("tenants", np.int32, 0),  # type: ignore[arg-type]
        block_tokens=block_tokens,
    )


def _number(
    offsets: NDArray[np.int64], ids: Ids
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    n = len(ids)
    keys = np.zeros(n, KEY)
    keys["space"] = -1
    buckets = np.zeros(1 << max(4, (2 * n).bit_length()), np.uint64)
    blocks, parents = np.empty(n, np.int64), np.empty(n, np.int64)
    depths = np.empty(n, np.int32)
    unique = number(offsets, ids, keys, buckets, factors(_SEED), blocks, parents, depths)
    return blocks, parents[:unique].copy(), depths[:unique].copy()


def join(name: str, traces: Sequence[Trace]) -> Trace:
    """Requests of several traces in one, in order of time; blocks and sessions of each its own.

    Raises:
        ConfigError: If there is none, or blocks differ in tokens.
    """
    if len({trace.block_tokens for trace in traces}) != 1:
        raise ConfigError("traces to join must have blocks of one size", "Pass one or more such")
    ids, sessions, tenants = [], [], []
    session = tenant = 0
    for i, trace in enumerate(traces):
        pairs = np.empty((len(trace.blocks), 2), np.uint64)
        pairs[:, 0], pairs[:, 1] = trace.blocks, i
        ids.append(pairs)
        sessions.append(np.where(trace.sessions < 0, -1, trace.sessions + session))
        session += int(trace.sessions.max(initial=-1)) + 1
        tenants.append(trace.tenants + tenant)
        tenant += int(trace.tenants.max(initial=-1)) + 1
    return build_trace(
        name,
        np.concatenate([trace.times_ns for trace in traces]),
        np.concatenate([np.diff(trace.offsets) for trace in traces]),
        np.concatenate(ids),
        traces[0].block_tokens,
        input_tokens=np.concatenate([trace.input_tokens for trace in traces]),
        output_tokens=np.concatenate([trace.output_tokens for trace in traces]),
        sessions=np.concatenate(sessions),
        stops=np.concatenate([trace.stops for trace in traces]),
        tenants=np.concatenate(tenants),
    )
