"""Traces as Mooncake publishes them: JSON lines of block ids, here with session and stop as well.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

Times are milliseconds. `session` (a number or a name), `stop` ("tool_use", "end_turn", "length")
and `tenant` may be added. R. Qin et al., "Mooncake", FAST 2025.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import zstandard
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import CUT_OFF, TOOL_USE, TURN_END, UNKNOWN_STOP
from flowkv.sim.chains import build_trace, wide
from flowkv.sim.lines import REMEDY, read_lines
from flowkv.sim.trace import Trace

STOPS = {
    "": UNKNOWN_STOP, "tool_use": TOOL_USE, "tool_calls": TOOL_USE, "end_turn": TURN_END,
    "stop": TURN_END, "max_tokens": CUT_OFF, "length": CUT_OFF,
}  # fmt: skip
WORDS = {UNKNOWN_STOP: "", TOOL_USE: "tool_use", TURN_END: "end_turn", CUT_OFF: "length"}
MOST_BLOCKS = 1 << 31

Tokens = Annotated[int, Meta(ge=0, lt=2**31)]


class Line(msgspec.Struct):
    """One request."""

    timestamp: Annotated[float, Meta(ge=0, le=1e13)]
    hash_ids: list[int]
    input_length: Tokens = 0
    output_length: Tokens = 0
    session: int | str | None = None
    stop: str = ""
    tenant: int | str | None = None


def read_mooncake(path: Path, *, block_tokens: int | None = None) -> Trace:
    """Reads JSON lines, plain or zstd-compressed.

    Args:
        path: The file.
        block_tokens: Tokens of a block; by default the power of two that the input lengths suggest.

    Raises:
        ConfigError: If the file is damaged or no such trace.
        OSError: The file cannot be read.
    """
    lines: list[tuple[float, int, int, int, int, int]] = []
    ids: list[NDArray[np.int64]] = []
    sessions: dict[int | str, int] = {}
    tenants: dict[int | str | None, int] = {}
    total = 0
    for line in read_lines(path, Line):
        total += len(line.hash_ids)
        if total > MOST_BLOCKS:
            raise ConfigError(f"{path} names more than {MOST_BLOCKS} blocks", "Cut it in pieces")
        session = -1 if line.session is None else sessions.setdefault(line.session, len(sessions))
        tenant = tenants.setdefault(line.tenant, len(tenants))
        stop = STOPS.get(line.stop, UNKNOWN_STOP)
        lines.append((line.timestamp, line.input_length, line.output_length, session, tenant, stop))
        ids.append(_ids(path, line.hash_ids))
    table = np.array(lines, np.float64).reshape(-1, 6)
    lengths = np.array(list(map(len, ids)), np.int64)
    whole = table[:, 1:].astype(np.int64)
    return build_trace(
        _stem(path),
        np.round(table[:, 0] * 1e6).astype(np.int64),
        lengths,
        wide(np.concatenate([*ids, np.empty(0, np.int64)])),
        block_tokens or _tokens_of_blocks(whole[:, 0], lengths),
        input_tokens=whole[:, 0],
        output_tokens=whole[:, 1],
        sessions=whole[:, 2],
        tenants=whole[:, 3],
        stops=whole[:, 4],
    )


def write_mooncake(path: Path, trace: Trace) -> None:
    """Writes JSON lines; compressed if the name ends in `.zst`.

    Raises:
        OSError: The file cannot be written.
    """
    body = b"".join(_line(trace, r) for r in range(len(trace)))
    if path.suffix == ".zst":
        body = zstandard.ZstdCompressor(level=10).compress(body)
    path.write_bytes(body)


def _ids(path: Path, numbers: list[int]) -> NDArray[np.int64]:
    """Ids of 64 bits, signed or not."""
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        pass
    try:
        return np.array(numbers, np.uint64).view(np.int64)
    except OverflowError:
        raise ConfigError(f"{path} has ids of more than 64 bits", REMEDY) from None


def _line(trace: Trace, r: int) -> bytes:
    line: dict[str, object] = {
        "timestamp": _milliseconds(int(trace.times_ns[r])),
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


def _milliseconds(time_ns: int) -> int | float:
    whole, rest = divmod(time_ns, 10**6)
    return time_ns / 1e6 if rest else whole


def _stem(path: Path) -> str:
    name = path.name
    for ending in (".zst", ".jsonl", ".json"):
        name = name.removesuffix(ending)
    return name


def _tokens_of_blocks(tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """The power of two nearest to the tokens per block of the longer half of the requests."""
    known = (tokens > 0) & (lengths > 0)
    if not known.any():
        return 512
    tokens, lengths = tokens[known], lengths[known]
    long = lengths >= np.median(lengths)
    return 1 << max(0, round(float(np.log2(np.median(tokens[long] / lengths[long])))))
