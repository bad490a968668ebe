"""JSON lines, plain or zstd-compressed, read one at a time, with a bound on what is believed."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec
import zstandard

from flowkv.core.errors import ConfigError

ZSTD = b"\x28\xb5\x2f\xfd"
MOST_LINE_BYTES = 1 << 26
MOST_BYTES = 1 << 35
REMEDY = "Pass another file, or get it anew"
T = TypeVar("T")


def read_lines(path: Path, kind: type[T], most_line: int = MOST_LINE_BYTES) -> Iterator[T]:
    """The lines of a file as structs of one kind; empty ones are skipped.

    Args:
        path: The file; whether it is compressed is seen from its first bytes.
        kind: What a line is.
        most_line: Bytes of the longest line.

    Raises:
        ConfigError: If the file is damaged, or a line is none of that kind.
        OSError: The file cannot be read.
    """
    decoder = msgspec.json.Decoder(kind)
    total = 0
    with path.open("rb") as file:
        lines = _opened(file)
        number = 0
        while True:
            number += 1
            try:
                line = lines.readline(most_line + 1)
                total += len(line)
                if len(line) > most_line or total > MOST_BYTES:
                    raise ConfigError(f"{path}, line {number} is too long to be a trace", REMEDY)
                if not line:
                    return
                if line.strip():
                    yield decoder.decode(line)
            except zstandard.ZstdError as error:
                raise ConfigError(f"{path} is damaged: {error}", REMEDY) from None
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}", REMEDY) from None


def _opened(file: BinaryIO) -> BinaryIO:
    packed = file.read(len(ZSTD)) == ZSTD
    file.seek(0)
    if not packed:
        return file
    stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file)
    return cast("BinaryIO", io.BufferedReader(stream, 1 << 20))
