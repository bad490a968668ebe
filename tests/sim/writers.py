"""Writes traces in the formats that `read_trace` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import zstandard

from flowkv.sim import Trace
from tests.inside import CUT_OFF, TOOL_USE, TURN_END, UNKNOWN_STOP

WORDS = {UNKNOWN_STOP: "", TOOL_USE: "tool_use", TURN_END: "end_turn", CUT_OFF: "length"}


def write_mooncake(path: Path, trace: Trace) -> None:
    """Writes JSON lines; compressed if the name ends in `.zst`.

    Raises:
        OSError: The file cannot be written.
    """
    body = b"".join(_line(trace, r) for r in range(len(trace)))
    if path.suffix == ".zst":
        body = zstandard.ZstdCompressor(level=10).compress(body)
    path.write_bytes(body)


def _line(trace: Trace, r: int) -> bytes:
    line: dict[str, object] = {
        **_milliseconds(int(trace.times_ns[r])),
        "input_length": int(trace.input_tokens[r]),
        "output_length": int(trace.output_tokens[r]),
        "hash_ids": trace.blocks[trace.offsets[r] : trace.offsets[r + 1]].tolist(),
    }
    if trace.sessions[r] >= 0:
        line["session"] = int(trace.sessions[r])
    if trace.stops[r] != UNKNOWN_STOP:
        line["stop"] = WORDS[int(trace.stops[r])]
    if trace.tenants[r] > 0:
        line["tenant"] = int(trace.tenants[r])
    return msgspec.json.encode(line) + b"\n"


def _milliseconds(time_ns: int) -> dict[str, int | float]:
    whole, rest = divmod(time_ns, 10**6)
    return {"timestamp_ms": time_ns / 1e6} if rest else {"timestamp": whole}


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
