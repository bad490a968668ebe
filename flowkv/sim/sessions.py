"""Recorded sessions without a common clock: started at random, as often as one likes.

Each line is a session: its requests with times from its beginning, lengths, why each answer ended,
and its blocks as runs of session-local numbers. Another seed gives another trace of the same kind,
and a shorter span more load.

What sessions share is an assumption: with equally long tool prompts they have the same ones, and
with equally long system prompts behind them too. Only whole blocks are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import TURN_END
from flowkv.sim.chains import build_trace
from flowkv.sim.lines import REMEDY, read_lines
from flowkv.sim.mooncake import MOST_BLOCKS, STOPS
from flowkv.sim.trace import Trace

Tokens = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Run = tuple[Annotated[int, Meta(ge=0, lt=2**48)], Annotated[int, Meta(ge=0, lt=2**24)]]
Ints = NDArray[np.int64]


class Turn(msgspec.Struct):
    """A request; or, with `requests`, a helper's conversation that begins then."""

    t: Seconds = 0.0
    tokens_in: Tokens = msgspec.field(name="in", default=0)
    tokens_out: Tokens = msgspec.field(name="out", default=0)
    stop: str | None = None
    runs: list[Run] = []
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0
    requests: list[Turn] | None = None


class Session(msgspec.Struct):
    """A line."""

    requests: list[Turn]
    block_size: Annotated[int, Meta(ge=1, lt=2**20)]
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0


def read_sessions(
    path: Path, *, span_s: float = 28_800.0, seed: int = 1, block_tokens: int = 512
) -> Trace:
    """Starts every session of a file at a uniformly random time.

    Args:
        path: JSON lines, plain or zstd-compressed.
        span_s: Sessions start within so many seconds.
        seed: Of the times.
        block_tokens: Tokens of a block of the trace; a multiple of that of the file.

    Raises:
        ConfigError: If the file is damaged, or an argument does not fit it.
        OSError: The file cannot be read.
    """
    sessions = list(read_lines(path, Session))
    if not 0.0 < span_s < 1e9:
        raise ConfigError(f"sessions cannot start within {span_s} s", "Use 28800 for eight hours")
    starts = np.random.default_rng(seed).uniform(0.0, span_s, len(sessions))
    common: dict[tuple[int, ...], int] = {}
    rows: list[tuple[int, int, int, int, int, int]] = []
    pairs: list[NDArray[np.uint64]] = []
    total = 0
    for s, (session, start) in enumerate(zip(sessions, starts.tolist(), strict=True)):
        step, rest = divmod(block_tokens, session.block_size)
        if rest or step < 1:
            raise ConfigError(
                f"blocks of {session.block_size} tokens cannot be joined to {block_tokens}",
                f"Use a multiple of {session.block_size}",
            )
        for turn, at, tools, system in _turns(session):
            ids = _ids(turn.runs, step)
            total += len(ids)
            if total > MOST_BLOCKS or (ids < 0).any():
                raise ConfigError(f"{path}, line {s + 1} names too many blocks", REMEDY)
            spaces = [
                2 * common.setdefault(key, len(common)) + 1 for key in _prompts(tools, system)
            ]
            ends = [n // session.block_size // step for n in (tools, tools + system)]
            pairs.append(_named(ids, 2 * s, spaces, ends))
            stop = STOPS.get(turn.stop or "end_turn", TURN_END)  # unsaid: it did not call a tool
            time = round((start + at) * 1e9)
            rows.append((time, len(ids), turn.tokens_in, turn.tokens_out, s, stop))
    table = np.array(rows, np.int64).reshape(-1, 6)
    name = path.name.partition(".")[0]
    return build_trace(
        f"{name}:{seed}",
        table[:, 0],
        table[:, 1],
        np.concatenate([*pairs, np.empty((0, 2), np.uint64)]),
        block_tokens,
        input_tokens=table[:, 2],
        output_tokens=table[:, 3],
        sessions=table[:, 4],
        stops=table[:, 5],
    )


def _turns(session: Session) -> Iterator[tuple[Turn, float, int, int]]:
    """Requests, helpers' included: each with its time and the lengths of its prompts."""
    for turn in session.requests:
        if turn.requests is None:
            yield turn, turn.t, session.tool_tokens, session.system_tokens
        for inner in turn.requests or ():
            yield inner, turn.t + inner.t, turn.tool_tokens, turn.system_tokens


def _ids(runs: list[Run], step: int) -> Ints:
    """The last number of each whole block of `step`: numbers are chain-correct in a session."""
    if sum(count for _, count in runs) > 1 << 28:
        return np.array([-1])
    every = [np.arange(first, first + count) for first, count in runs]
    return np.concatenate([*every, np.empty(0, np.int64)])[step - 1 :: step]


def _prompts(tools: int, system: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What tells the two prompts from others."""
    return (tools,), (tools, system)


def _named(ids: Ints, own: int, spaces: list[int], ends: list[int]) -> NDArray[np.uint64]:
    """Ids in their session's space, but for the blocks that lie wholly within the prompts."""
    pairs = np.empty((len(ids), 2), np.uint64)
    pairs[:, 0], pairs[:, 1] = ids, own
    first = 0
    for space, end in zip(spaces, ends, strict=True):
        pairs[first:end, 0] = np.arange(first, min(end, len(ids)))
        pairs[first:end, 1] = space
        first = min(end, len(ids))
    return pairs
