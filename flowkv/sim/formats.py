"""`read_trace`: read a trace of any known format, recognised by the content of the file."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import xxhash
import zstandard
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED, open_regular
from flowkv.observe.recording import (
    FRAME_HEAD,
    ID_BYTES,
    MAGIC,
    MOST_BLOCK_TOKENS,
    About,
    RecordedRequest,
    Tokens,
    Writer,  # noqa: F401 - its public name
)
from flowkv.policy.base import CUT_OFF, TOOL_USE, TURN_END, UNKNOWN_STOP
from flowkv.sim.trace import COLUMNS, LEAST_BYTES, MOST_A_BYTE, Trace, build_trace, read_npz, wide

# JSON lines, plain or compressed, read one at a time within limits.

ZSTD, GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
#
# A file of a few bytes can name billions of blocks: the unpacked bytes, and the blocks of all
# requests together, are bounded by its length. Real traces have up to 60 bytes and 18 blocks a
# byte.

MOST_LINE_BYTES = 1 << 26
LEAST_BLOCKS = 1 << 16
REMEDY = "Pass another file, or fetch it again"


def most_blocks(path: Path) -> int:
    """Return the most blocks that the requests of a file may have together.

    Raises:
        OSError: The file cannot be read.
    """
    return LEAST_BLOCKS + MOST_A_BYTE * path.stat().st_size


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the lines of a file as structs of one kind; empty ones are skipped.

    Args:
        path: The file; its first bytes show whether it is compressed.
        kind: Struct of a line.

    Raises:
        ConfigError: If the file is damaged, or a line is none of that kind.
        OSError: The file cannot be read.
    """
    decoder = msgspec.json.Decoder(kind)
    with open_regular(path) as file:
        left = LEAST_BYTES + MOST_A_BYTE * os.fstat(file.fileno()).st_size
        lines = _opened(file)
        for number in itertools.count(1):
            most = min(MOST_LINE_BYTES, left)
            try:
                line = lines.readline(most + 1)
            except (zstandard.ZstdError, gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise ConfigError(f"{path} is damaged: {error}", REMEDY) from None
            left -= len(line)
            if len(line) > most:
                raise ConfigError(f"{path}, line {number} is too long to be a trace", REMEDY)
            if not line:
                return
            if line.strip():
                try:
                    found = decoder.decode(line)
                except MALFORMED as error:
                    raise ConfigError(f"{path}, line {number}: {error}", REMEDY) from None
                yield found


def _opened(file: BinaryIO) -> BinaryIO:
    head = file.read(len(ZSTD))
    file.seek(0)
    if head != ZSTD:
        return cast("BinaryIO", gzip.GzipFile(fileobj=file)) if head[:2] == GZIP else file
    window = min(1 << 27, max(1 << 23, MOST_A_BYTE * os.fstat(file.fileno()).st_size))
    return cast("BinaryIO", io.BufferedReader(_Frames(file, window), 1 << 20))


class _Frames(io.RawIOBase):
    """Reads the unpacked bytes of all frames of a file; a frame that is cut is an `EOFError`."""

    def __init__(self, file: BinaryIO, window: int) -> None:
        self._file, self._unpacked = file, memoryview(b"")
        self._begin = zstandard.ZstdDecompressor(max_window_size=window).decompressobj
        self._frame = self._begin()

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        # 256 bytes unpack to 8 MiB at most.
        while not self._unpacked and (part := self._frame.unused_data or self._file.read(1 << 8)):
            if self._frame.eof:
                self._frame = self._begin()
            self._unpacked = memoryview(self._frame.decompress(part))
        if not (self._unpacked or self._frame.eof):
            raise EOFError("its last frame is cut")
        count = min(len(room), len(self._unpacked))
        room[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


# Traces as Mooncake publishes them: JSON lines of block ids, here with session and stop as well.
#
#     {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
#
# `session` (a number or a name), `stop` ("tool_use", "end_turn", "length") and `tenant` may be
# added. R. Qin et al., "Mooncake", FAST 2025.
#
# Times are whole milliseconds there, and seconds in the traces of Bailian, which have `chat_id` and
# `parent_chat_id` as well; seconds and milliseconds since 1970 are distinguished by their size.
# Other traces name their unit: `timestamp_ms`, `timestamp_s`.

STOPS = {
    "": UNKNOWN_STOP, "tool_use": TOOL_USE, "tool_calls": TOOL_USE, "end_turn": TURN_END,
    "stop": TURN_END, "max_tokens": CUT_OFF, "length": CUT_OFF,
}  # fmt: skip
Time: TypeAlias = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0, le=1e13)]


class MooncakeLine(msgspec.Struct):
    """Request in Mooncake's format."""

    hash_ids: list[int]
    timestamp: Time | None = None
    timestamp_ms: Time | None = None
    timestamp_s: Time | None = None
    input_length: Tokens = 0
    output_length: Tokens = 0
    session: int | str | None = None
    stop: str = ""
    tenant: int | str | None = None
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None

    def __post_init__(self) -> None:
        if self.timestamp is None and self.timestamp_ms is None and self.timestamp_s is None:
            raise ValueError("Object missing required field `timestamp`")
        _ids(self.hash_ids)

    @property
    def time(self) -> tuple[int | float, int]:
        """Time of arrival, and the nanoseconds of its unit; 0 if that is unknown."""
        if self.timestamp_s is not None:
            return self.timestamp_s, 10**9
        if self.timestamp_ms is not None:
            return self.timestamp_ms, 10**6
        return self.timestamp or 0, 0 if self.chat_id is None else 10**9


def read_mooncake(path: Path, *, block_tokens: int | None = None) -> Trace:
    """Read JSON lines, plain or compressed.

    Args:
        path: The file.
        block_tokens: Tokens of a block; by default the power of two that the input lengths suggest.

    Raises:
        ConfigError: If the file is damaged or no such trace, if its times may be milliseconds or
            seconds, or if blocks of one size do not fit its lengths.
        OSError: The file cannot be read.
    """
    times: list[tuple[int | float, int]] = []
    lines: list[tuple[int, ...]] = []
    ids: list[NDArray[np.int64]] = []
    sessions: dict[int | str | None, int] = {}
    tenants: dict[int | str | None, int] = {}
    for line in read_lines(path, MooncakeLine):
        name = line.chat_id if line.session is None else line.session
        session = -1
        if name is not None:  # a chat that continues another one has the same session
            session = sessions.setdefault(name, sessions.get(line.parent_chat_id, len(lines)))
        tenant = tenants.setdefault(line.tenant, len(tenants))
        stop = STOPS.get(line.stop, UNKNOWN_STOP)
        times.append(line.time)
        lines.append((line.input_length, line.output_length, session, stop, tenant))
        ids.append(_ids(line.hash_ids))
    columns, lengths = _columns(lines), np.array(list(map(len, ids)), np.int64)
    tokens = block_tokens or _tokens_of_blocks(path, columns["input_tokens"], lengths)
    pairs = wide(np.concatenate([*ids, np.empty(0, np.int64)]))
    stem = re.sub(r"(\.jsonl?)?(\.zst|\.gz)?$", "", path.name)
    return build_trace(stem, _nanoseconds(path, times), lengths, pairs, tokens, **columns)


def _columns(rows: Sequence[tuple[int, ...]]) -> dict[str, NDArray[np.int64]]:
    """Return the `COLUMNS` of rows, with sessions numbered from 0 on in their order; -1 stays."""
    table = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
    columns = dict(zip(COLUMNS, table.T, strict=True))
    different, found = np.unique(columns["sessions"], return_inverse=True)
    return columns | {"sessions": found.ravel() - int((different < 0).any())}


def _nanoseconds(path: Path, times: list[tuple[int | float, int]]) -> list[int]:
    """Return times in nanoseconds, by the unit of each, or the one that all others suggest."""
    unsaid = [time for time, unit in times if not unit]
    least, most = min(unsaid, default=0), max(unsaid, default=0)
    usual = 10**6
    if least >= 1e9 and most < 1e11:  # since 1970
        usual = 10**9
    elif least < 1e12 and any(isinstance(time, float) for time in unsaid):
        raise ConfigError(
            f"the times of {path} may be milliseconds or seconds",
            "Write whole milliseconds, or name them timestamp_ms or timestamp_s",
        )
    found = [round(time * (unit or usual)) for time, unit in times]
    if (most := max(found, default=0)) >= 1 << 61:
        where = f"{path}, request {found.index(most) + 1}"
        raise ConfigError(f"{where} has a time of more than 73 years", REMEDY)
    return found


def _ids(numbers: list[int]) -> NDArray[np.int64]:
    """Return ids of 64 bits, signed or not, as i8; raise `ValueError` for others."""
    for kind in (np.int64, np.uint64):
        try:
            return np.array(numbers, kind).view(np.int64)
        except OverflowError:
            continue
    raise ValueError("hash_ids have more than 64 bits")


def _tokens_of_blocks(path: Path, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Return the tokens of a block: a power of two, if one fits.

    A request of so many tokens has so many whole blocks, and perhaps one more for the rest. One
    request in a hundred need not fit.
    """
    known = tokens > 0
    if not (known & (lengths > 0)).any():
        return 512
    tokens, lengths = tokens[known], lengths[known]
    least = 1 + int(np.quantile(tokens // (lengths + 1), 0.99, method="higher"))
    most = np.where(lengths > 1, (tokens - 1) // np.maximum(lengths - 1, 1), MOST_BLOCK_TOKENS)
    limit = int(np.quantile(most, 0.01, method="lower"))
    power = 1 << (limit.bit_length() - 1) if limit else 0
    if least > limit:
        raise ConfigError(
            f"blocks of no size fit the requests of {path}: some have blocks of at most {limit} "
            f"tokens, others of at least {least}",
            "Correct input_length or hash_ids, or leave input_length out",
        )
    if limit == MOST_BLOCK_TOKENS:  # every request has one block
        return 1 << (least - 1).bit_length()
    return power if power >= least else limit


# Recorded sessions without a common clock, started at random, any number of times.
#
# Each line is a session, as kv-cache-tester and AgentX publish them (Weka format): its requests
# with times from its beginning, lengths, the reason for each answer's end, and its blocks as
# session-local numbers, or runs of these. Another seed gives another trace of the same kind, and a
# shorter span more load.
#
# Shared prompts are an assumption: sessions with equally long tool prompts share these, and with
# equally long system prompts behind them too. Only whole blocks are kept. All models of a session
# are taken for one.

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Run = tuple[Annotated[int, Meta(ge=0, lt=2**48)], Annotated[int, Meta(ge=0, lt=2**24)]]
Ints = NDArray[np.int64]


class SessionTurn(msgspec.Struct):
    """Request; or, with `requests`, a helper's conversation that begins then."""

    t: Seconds = 0.0
    tokens_in: Tokens = msgspec.field(name="in", default=0)
    tokens_out: Tokens = msgspec.field(name="out", default=0)
    stop: str | None = None
    runs: list[Run] = []
    hash_ids: list[int] = []
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0
    requests: list[SessionTurn] | None = None

    def __post_init__(self) -> None:
        _ids(self.hash_ids)


class SessionLine(msgspec.Struct):
    """Session on a line of a file."""

    requests: list[SessionTurn]
    block_size: Annotated[int, Meta(ge=1, lt=MOST_BLOCK_TOKENS)]
    hash_id_scope: Literal["local", "global"] = "local"
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0


def read_sessions(
    path: Path, *, span_s: float = 28_800.0, seed: int = 1, block_tokens: int = 512
) -> Trace:
    """Read sessions, each started at a uniformly random time.

    Args:
        path: JSON lines, plain or compressed, or a folder of such files in order of names.
        span_s: Seconds within which sessions start.
        seed: Seed of the times.
        block_tokens: Tokens of a block of the trace; a multiple of that of the file.

    Raises:
        ConfigError: If a file is damaged, or an argument does not fit it.
        OSError: A file cannot be read.
    """
    if not 0.0 < span_s < 1e9:
        raise ConfigError(f"sessions cannot start within {span_s} s", "Use 28800 for eight hours")
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"there is no file of sessions in {path}", "Name a folder of JSON files")
    lines = ((file, enumerate(read_lines(file, SessionLine), 1)) for file in files)
    sessions = ((f"{file}, session {n}", line) for file, found in lines for n, line in found)
    starts = np.random.default_rng(seed)
    common: dict[tuple[int, ...], int] = {}
    rows: list[tuple[int, int, int, int, int, int]] = []
    pairs: list[NDArray[np.uint64]] = []
    left = sum(map(most_blocks, files))
    for s, (where, session) in enumerate(sessions):
        start = starts.uniform(0.0, span_s)
        step, rest = divmod(block_tokens, session.block_size)
        if rest or step < 1:
            raise ConfigError(
                f"{where} has blocks of {session.block_size} tokens, and these cannot be joined to "
                f"{block_tokens}",
                f"Use a multiple of {session.block_size}",
            )
        for turn, at, tools, system in _turns(session):
            left -= sum(count for _, count in turn.runs) // step
            if left < 0:
                raise ConfigError(f"{where} names too many blocks", REMEDY)
            ids = (
                _joined(_ids(turn.hash_ids), step)
                if turn.hash_ids
                else _sessions_ids(turn.runs, step)
            )
            prompts: tuple[tuple[int, ...], ...] = (tools,), (tools, system)
            spaces = [2 * common.setdefault(key, len(common)) + 1 for key in prompts]
            ends = [n // session.block_size // step for n in (tools, tools + system)]
            if session.hash_id_scope == "global":
                pairs.append(wide(ids))
            else:
                pairs.append(_named(ids, 2 * s + 2, spaces, ends))
            stop = STOPS.get(turn.stop or "end_turn", TURN_END)  # by default it did not call a tool
            time = round((start + at) * 1e9)
            rows.append((time, len(ids), turn.tokens_in, turn.tokens_out, s, stop))
    times, lengths, *table = np.array(rows, np.int64).reshape(-1, 6).T
    columns = dict(zip(COLUMNS, table, strict=False))  # without tenants
    name = f"{path.resolve().name.partition('.')[0]}:{seed}"
    blocks = np.concatenate([*pairs, np.empty((0, 2), np.uint64)])
    return build_trace(name, times, lengths, blocks, block_tokens, **columns)


def _turns(session: SessionLine) -> Iterator[tuple[SessionTurn, float, int, int]]:
    """Yield requests, helpers' included, with their times and the lengths of their prompts.

    Times of helpers count from the helper's beginning, or from the session's where all begin later
    than their helpers do.
    """
    helpers = [turn for turn in session.requests if turn.requests]
    whole = all(min(one.t for one in turn.requests or ()) >= turn.t for turn in helpers)
    for turn in session.requests:
        if turn.requests is None:
            yield turn, turn.t, session.tool_tokens, session.system_tokens
        for inner in turn.requests or ():
            at = inner.t if whole else turn.t + inner.t
            yield inner, at, turn.tool_tokens, turn.system_tokens


def _sessions_ids(runs: list[Run], step: int) -> Ints:
    """Return the last number of each block of `step`; equal numbers mean equal prefixes."""
    starts, counts = np.array(runs, np.int64).reshape(-1, 2).T
    ends = np.cumsum(counts)
    last = np.arange(step - 1, int(ends[-1]) if len(ends) else 0, step)
    run = np.searchsorted(ends, last, side="right")
    return np.asarray(starts[run] + last - (ends - counts)[run])


def _joined(ids: Ints, step: int) -> Ints:
    """Return a number for each block of `step`; equal blocks have equal ones."""
    factors = np.random.default_rng(step).integers(1 << 62, size=step) * 2 + 1
    blocks = ids[: len(ids) // step * step].reshape(-1, step)
    return np.asarray(blocks @ factors)


def _named(ids: Ints, own: int, spaces: list[int], ends: list[int]) -> NDArray[np.uint64]:
    """Return ids in their session's space, except for blocks wholly within the prompts."""
    pairs, first = wide(ids, own), 0
    for space, end in zip(spaces, ends, strict=True):
        pairs[first:end, 0] = np.arange(first, min(end, len(ids)))
        pairs[first:end, 1] = space
        first = min(end, len(ids))
    return pairs


# Recordings of a live cache (`flowkv.observe.recording` writes them), read as traces.

T = TypeVar("T")
_REMEDY = "Record it again, or pass another file"


class Reader:
    """Reader of a recording.

    Args:
        path: The file.

    Attributes:
        about: First frame of the recording.

    Raises:
        ConfigError: If the file is no recording, or damaged.
        OSError: The file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        frame = next(self._frames(), None)
        if frame is None:
            raise ConfigError(f"{path} is no recording", _REMEDY)
        self.about = self._decode(frame, About)
        if self.about.version != 1 or not 1 <= self.about.block_tokens < MOST_BLOCK_TOKENS:
            raise ConfigError(
                f"{path} is a recording of version {self.about.version}, "
                f"with {self.about.block_tokens} tokens a block",
                "Read it with the FlowKV that wrote it",
            )

    def __iter__(self) -> Iterator[RecordedRequest]:
        """Yield the requests, in the order of their recording."""
        frames = self._frames()
        next(frames)
        for frame in frames:
            yield from self._decode(frame, list[RecordedRequest])

    def trace(self) -> Trace:
        """Return the recording as a trace; times count from the first request.

        Raises:
            ConfigError: If the recording is damaged.
        """
        parents: list[int] = []
        ids: list[bytes] = []
        tips: list[int] = []
        depths: list[int] = []
        requests, left = list(self), most_blocks(self.path)
        for request in requests:
            above, count = request.above, len(ids)
            if not -1 <= above < count or len(request.ids) % ID_BYTES:
                raise ConfigError(f"{self.path} names a block before it exists", _REMEDY)
            for at in range(0, len(request.ids), ID_BYTES):
                ids.append(request.ids[at : at + ID_BYTES])
                parents.append(above)
                depths.append(depths[above] + 1 if above >= 0 else 1)
                above = len(ids) - 1
            left -= depths[above] if above >= 0 else 0
            if left < 0:
                raise ConfigError(f"{self.path} names too many blocks", _REMEDY)
            tips.append(above)
        chains = [_chain_to(tip, parents) for tip in tips]
        pairs = np.frombuffer(b"".join(ids), "<u8").reshape(-1, 2).astype(np.uint64)
        pairs = pairs[np.concatenate([*chains, np.empty(0, np.int64)])]
        times = np.array([request.time_ns for request in requests], np.int64)
        times -= times.min(initial=times[0] if len(times) else 0)
        lengths, tokens = [len(chain) for chain in chains], self.about.block_tokens
        rows = [(r.input_tokens, r.output_tokens, r.session, r.stop, r.tenant) for r in requests]
        return build_trace(self.path.stem, times, lengths, pairs, tokens, **_columns(rows))

    def _frames(self) -> Iterator[bytes]:
        with open_regular(self.path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"{self.path} is no recording of FlowKV", _REMEDY)
            size = os.fstat(file.fileno()).st_size
            left = LEAST_BYTES + MOST_A_BYTE * size
            while len(head := file.read(FRAME_HEAD.size)) == FRAME_HEAD.size:
                packed_bytes, n_bytes, digest = FRAME_HEAD.unpack(head)
                left -= n_bytes
                if left < 0:
                    raise ConfigError(f"{self.path} has a frame of {n_bytes} bytes", _REMEDY)
                packed = file.read(min(packed_bytes, size))
                if len(packed) < packed_bytes:
                    return  # a crash cut it off
                yield self._unpack(packed, n_bytes, digest)

    def _unpack(self, packed: bytes, n_bytes: int, digest: int) -> bytes:
        try:
            said = zstandard.get_frame_parameters(packed).content_size
            body = zstandard.ZstdDecompressor().decompress(packed) if said == n_bytes else b""
        except zstandard.ZstdError as error:
            raise ConfigError(f"{self.path} is damaged: {error}", _REMEDY) from None
        if len(body) != n_bytes or xxhash.xxh3_64_intdigest(body) != digest:
            raise ConfigError(f"{self.path} is damaged: a frame has another digest", _REMEDY)
        return body

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except MALFORMED as error:
            raise ConfigError(f"{self.path} is no recording: {error}", _REMEDY) from None


def _chain_to(tip: int, parents: list[int]) -> NDArray[np.int64]:
    """Return the blocks from a root to `tip`."""
    chain = []
    while tip >= 0:
        chain.append(tip)
        tip = parents[tip]
    return np.array(chain[::-1], np.int64)


class _Probe(msgspec.Struct):
    """Fields that distinguish the kinds of JSON lines."""

    hash_ids: list[object] | None = None
    requests: list[object] | None = None


def read_trace(path: str | Path) -> Trace:
    """Read a trace of any known format.

    Formats are recordings of a live cache (`flowkv.sim.formats`), JSON lines in Mooncake's format,
    sessions, which are started at random with seed 1 (`read_sessions`), and arrays in an `.npz`
    file; JSON lines plain or compressed.

    Args:
        path: The file; its name does not matter. Or a folder of sessions.

    Raises:
        ConfigError: If it is missing, damaged or none of these.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return read_sessions(path)
        file = open_regular(path)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        where, why = (getattr(error, name, None) for name in ("filename", "strerror"))
        raise ConfigError(
            f"the trace {where or path} cannot be read ({why or error})",
            "Correct the path, or name a generator: `flowkv sim replay --help` lists them",
        ) from error
    with file:
        if zipfile.is_zipfile(file):
            return read_npz(path)
        file.seek(0)
        if file.read(len(MAGIC)) == MAGIC:
            return Reader(path).trace()
    probe = next(read_lines(path, _Probe), None)
    if probe is not None and probe.requests is not None:
        return read_sessions(path)
    if probe is not None and probe.hash_ids is not None:
        return read_mooncake(path)
    raise ConfigError(
        f"{path} is no trace that FlowKV knows",
        "Pass JSON lines with timestamp and hash_ids, a recording, or .npz arrays",
    )
