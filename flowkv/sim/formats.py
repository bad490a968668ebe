"""`read_trace`: any trace that FlowKV knows, told by what is in the file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.sim.lines import read_lines
from flowkv.sim.mooncake import read_mooncake
from flowkv.sim.recording import MAGIC, Reader
from flowkv.sim.sessions import read_sessions
from flowkv.sim.trace import Trace, read_npz


class _Probe(msgspec.Struct):
    """What tells the kinds of JSON lines apart."""

    hash_ids: list[object] | None = None
    requests: list[object] | None = None


def read_trace(path: str | Path) -> Trace:
    """Reads a trace, whatever its format.

    Knows recordings of a live cache (`flowkv.sim.recording`), JSON lines in Mooncake's format, raw
    sessions, which are started at random with seed 1 (`flowkv.sim.sessions`), and arrays in an
    `.npz` file; JSON lines plain or zstd-compressed.

    Args:
        path: The file; its name does not matter.

    Raises:
        ConfigError: If it is missing, damaged or none of these.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", "Name a trace, or use flowkv.sim.generate")
    if zipfile.is_zipfile(path):
        return read_npz(path)
    with path.open("rb") as file:
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
