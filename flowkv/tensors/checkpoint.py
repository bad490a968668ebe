"""Safetensors files read in place, and the manifest of digests that verifies every read.

A tensor is cut into parts of 1 MiB, and the manifest has the digest of each. The manifest is made
in passing: the first read of a part, in any process, defines its digest for all later reads, so no
file is read for its digests alone. A manifest belongs to one state of one file (path, size, inode,
time of the last write, header); a file that was written to has another manifest, and reads under
way fail. Behind those digests are the sums that name a model by its weights (`fingerprint`), of
blocks of 4 MiB, if they were requested: equal to those of the model in memory, and stored so that
the file is not read again for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from flowkv.core.errors import StoreError
from flowkv.core.files import MALFORMED, open_regular, replacing, sensible
from flowkv.core.memory import own_memory
from flowkv.naming.fingerprint import BLOCK_BYTES, bytes_of, sums_of
from flowkv.tiers.io.engine import (
    ALIGNMENT,
    OPERATION,
    READ,
    FileIO,
    IOEngine,
    ThreadsEngine,
    allows_direct,
    read_file,
)

VERSION = 2
"""Version of manifests, part of their names: 2 has sums of blocks behind digests of parts."""
PART_BYTES = 1 << 20
_DIGEST_BYTES = 16
_TENSOR_ALIGNMENT = 64  # as torch aligns memory on the CPU
_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_WAIT_S = 30.0
_REMEDY = "Fetch or write the checkpoint again"

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """Tensor in a file: its place, dtype and shape, and its first part and block there."""

    file: int
    offset: int
    n_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_part: int
    first_block: int


class Layout(NamedTuple):
    """Layout of tensors that are read together into one buffer.

    Attributes:
        tensors: The tensors.
        pieces: File, offset, length and place in the buffer of each read, all aligned.
        read_at: Offset of each tensor in the buffer after the read.
        places: Final offset of each tensor: aligned like torch's own memory, so that libraries of
            the CPU add up in the same order.
        read_bytes: Bytes that are read.
        n_bytes: Bytes that the buffer needs.
    """

    tensors: tuple[StoredTensor, ...]
    pieces: tuple[tuple[int, int, int, int], ...]
    read_at: tuple[int, ...]
    places: tuple[int, ...]
    read_bytes: int
    n_bytes: int


class Checkpoint:
    """Tensors of safetensors files, by name. One thread at a time may `fill`.

    Args:
        path: A file, or a directory with files or with an index of them.
        manifests: Directory of manifests; created if it is missing.

    Attributes:
        tensors: All tensors, by name.
        verified_bytes: Bytes of all tensors that were read and verified.

    Raises:
        StoreError: Files are missing, or are no safetensors files.
    """

    def __init__(self, path: str | os.PathLike[str], manifests: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.verified_bytes = self._tag = 0
        self._files: list[_File] = []
        self._engine: IOEngine | None = None
        try:
            manifests.mkdir(parents=True, exist_ok=True, mode=0o700)
            for number, name in enumerate(_paths(Path(path))):
                file = _File(os.path.realpath(name), manifests)
                self._files.append(file)
                found = file.tensors(number)
                if both := found.keys() & self.tensors.keys():
                    problem = f"two files of {path} have a tensor {min(both)!r}"
                    raise StoreError(problem, "Pass the file to read, or add an index of files")
                self.tensors |= found
            self._engine = _engine(os.path.dirname(self._files[0].path))
            for file in self._files:
                file.fd = self._engine.open(file.path, write=False)
                file.check_unchanged()
        except OSError as error:
            self.close()
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} cannot be read ({error})", "Pass a readable one") from error

    def layout(self, tensors: Iterable[StoredTensor]) -> Layout:
        """Return the layout of tensors in a buffer: each aligned range of a file is read once."""
        tensors = tuple(tensors)
        runs: list[list[int]] = []  # file, start, end
        run_of: dict[StoredTensor, int] = {}
        for t in sorted(tensors, key=lambda t: t[:3]):  # dtypes have no order
            start = t.offset // ALIGNMENT * ALIGNMENT
            end = -(-(t.offset + t.n_bytes) // ALIGNMENT) * ALIGNMENT
            if runs and runs[-1][0] == t.file and start <= runs[-1][2]:
                runs[-1][2] = max(end, runs[-1][2])
            else:
                runs.append([t.file, start, end])
            run_of[t] = len(runs) - 1
        pieces, at, bases = [], 0, []
        for file, start, end in runs:
            bases.append(at - start)
            for offset in range(start, end, PART_BYTES):
                length = min(PART_BYTES, end - offset)
                pieces.append((file, offset, length, at))
                at += length
        read_at = [bases[run_of[t]] + t.offset for t in tensors]
        places, end = dict[int, int](), 0
        for i in sorted(range(len(tensors)), key=read_at.__getitem__):
            places[i] = -(-max(read_at[i], end) // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
            end = places[i] + tensors[i].n_bytes
        n_bytes = -(-max(at, end) // ALIGNMENT) * ALIGNMENT
        moved = tuple(places[i] for i in range(len(tensors)))
        return Layout(tensors, tuple(pieces), tuple(read_at), moved, at, n_bytes)

    def fill(self, target: NDArray[np.uint8], layout: Layout) -> None:
        """Read the tensors of a layout into memory, and verify every byte of them.

        Args:
            target: At least `layout.n_bytes`, aligned to 4096; undefined after an error.
            layout: Result of `layout(tensors)`.

        Raises:
            StoreError: The file was changed or cannot be read, or a part has another digest.
        """
        engine = self._engine
        if engine is None:
            raise StoreError("the checkpoint is closed", "Load the model anew, and attach it")
        for number in {piece[0] for piece in layout.pieces}:
            self._files[number].check_unchanged()
        tensors = layout.tensors
        self._read(engine, target, layout)
        for t, place in zip(tensors, layout.read_at, strict=True):
            self._files[t.file].verify(t, target[place : place + t.n_bytes])
            self.verified_bytes += t.n_bytes
        # The last first: each tensor only moves up, into memory that no other one still needs.
        for i in sorted(range(len(tensors)), key=layout.places.__getitem__, reverse=True):
            if layout.places[i] != layout.read_at[i]:
                here = target.ctypes.data
                to, at = here + layout.places[i], here + layout.read_at[i]
                ctypes.memmove(to, at, tensors[i].n_bytes)
        # A write during the read shows in the time of the file.
        for number in {piece[0] for piece in layout.pieces}:
            self._files[number].check_unchanged()

    def _read(self, engine: IOEngine, target: NDArray[np.uint8], layout: Layout) -> None:
        address, expected, rows = target.ctypes.data, {}, []
        for number, offset, length, at in layout.pieces:
            file, self._tag = self._files[number], self._tag + 1
            expected[self._tag] = file, offset, min(length, file.size - offset)
            rows.append((READ, file.fd, offset, address + at, length, self._tag))
        if not rows:
            return
        engine.submit(np.array(rows, OPERATION))
        failed = ""
        while expected:  # the memory is the engine's until the last completion
            for tag, result in engine.wait(_WAIT_S).tolist():
                file, offset, least = expected.pop(tag)
                if result < least:
                    said = os.strerror(-result) if result < 0 else "end of file"
                    failed = f"{file.path} cannot be read at byte {offset} ({said})"
        if failed:
            raise StoreError(failed, _REMEDY)

    def sums(self, tensor: StoredTensor) -> bytes:
        """Return the sums of a tensor's blocks, which name its content; read it if necessary.

        Raises:
            StoreError: As from `fill`.
        """
        file = self._files[tensor.file]
        file.check_unchanged()
        known = file.sums(tensor)
        if known is None:
            known = b""
            for start in range(0, tensor.n_bytes, BLOCK_BYTES):
                n_bytes = min(BLOCK_BYTES, tensor.n_bytes - start)
                piece = tensor._replace(
                    offset=tensor.offset + start,
                    n_bytes=n_bytes,
                    first_part=tensor.first_part + start // PART_BYTES,
                )
                layout = self.layout([piece])
                memory = np.frombuffer(own_memory(layout.n_bytes), np.uint8)
                self.fill(memory, layout)
                place = layout.places[0]
                known += sums_of(torch.from_numpy(memory[place : place + n_bytes]))
            file.learn_sums(tensor, known)
        return known

    def save(self) -> None:
        """Write manifests that have new digests."""
        for file in self._files:
            file.save()

    def unlink(self) -> None:
        """Remove the files' names: the files vanish with the process, however it ends."""
        for file in self._files:
            os.unlink(file.path)
            file.named = False

    def close(self) -> None:
        """Save manifests, and close files. Safe to call again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            self.save()
        for file in self._files:
            if file.fd >= 0:
                os.close(file.fd)
                file.fd = -1


class _File:
    """One safetensors file, and the known digests of its parts."""

    def __init__(self, path: str, manifests: Path) -> None:
        self.path, self.fd, self.named = path, -1, True
        status = os.stat(path)
        self.size, self._state = status.st_size, _state(status)
        self._header, self._data_at, text = _header(path, self.size)
        header = hashlib.sha256(text).hexdigest()
        said = f"{VERSION}|{path}|{self._state}|{header}|{PART_BYTES}|{BLOCK_BYTES}"
        self._manifest = manifests / f"{hashlib.sha256(os.fsencode(said)).hexdigest()[:40]}.digests"
        self._digests, self._sums, self._fresh = bytearray(), bytearray(), False

    def tensors(self, number: int) -> dict[str, StoredTensor]:
        """Return the tensors that the header names.

        Raises:
            StoreError: The header contradicts itself or the file.
        """
        found, parts, blocks, ranges = {}, 0, 0, list[tuple[int, int]]()
        for name, said in self._header.items():
            if name == "__metadata__":
                continue
            try:
                dtype, shape = DTYPES[said["dtype"]], tuple(map(int, said["shape"]))
                first, end = map(int, said["data_offsets"])
                right = sensible(shape) and 0 <= first <= end <= self.size - self._data_at
                n_bytes = dtype.itemsize * math.prod(shape) if right else -1
            except (KeyError, TypeError, *MALFORMED):
                right = False
            if not right or end - first != n_bytes:
                raise StoreError(f"{self.path} describes {name!r} as it cannot be", _REMEDY)
            ranges.append((first, end))
            found[name] = StoredTensor(
                number, self._data_at + first, n_bytes, dtype, shape, parts, blocks
            )
            parts += -(-n_bytes // PART_BYTES)
            blocks += -(-n_bytes // BLOCK_BYTES)
        if any(one[1] > other[0] for one, other in pairwise(sorted(ranges))):
            raise StoreError(f"{self.path} has two tensors in one place", _REMEDY)
        known = self._known((parts + blocks) * _DIGEST_BYTES)
        self._digests = known[: parts * _DIGEST_BYTES]
        self._sums = known[parts * _DIGEST_BYTES :]
        return found

    def sums(self, tensor: StoredTensor) -> bytes | None:
        """Return the sums of a tensor's blocks, or None if they are unknown."""
        known = bytes(self._sums[_place_of_sums(tensor)])
        unknown = bytes(_DIGEST_BYTES)
        each = (known[i : i + _DIGEST_BYTES] for i in range(0, len(known), _DIGEST_BYTES))
        return None if unknown in each else known

    def learn_sums(self, tensor: StoredTensor, sums: bytes) -> None:
        """Record the sums of a tensor's blocks, which were read and verified."""
        self._sums[_place_of_sums(tensor)] = sums
        self._fresh = True

    def _known(self, n_bytes: int) -> bytearray:
        with contextlib.suppress(OSError):
            data = read_file(FileIO(), str(self._manifest), n_bytes + _DIGEST_BYTES, ours=True)
            body = data[_DIGEST_BYTES:]
            if len(body) == n_bytes and xxhash.xxh3_128_digest(body) == data[:_DIGEST_BYTES]:
                return bytearray(body)
        return bytearray(n_bytes)

    def check_unchanged(self) -> None:
        """Raise `StoreError` if the file was changed."""
        if _state(os.fstat(self.fd)) != self._state:
            raise StoreError(
                f"{self.path} was changed while its weights are in use",
                "Load the model anew, and attach its weights: those in memory are unchanged",
            )

    def verify(self, tensor: StoredTensor, data: NDArray[np.uint8]) -> None:
        """Compare a tensor's bytes with the digests of its parts; record unknown digests."""
        at = tensor.first_part * _DIGEST_BYTES
        for start in range(0, tensor.n_bytes, PART_BYTES):
            digest = xxhash.xxh3_128_digest(data[start : start + PART_BYTES].data)
            known = bytes(self._digests[at : at + _DIGEST_BYTES])
            if known == bytes(_DIGEST_BYTES):
                self._digests[at : at + _DIGEST_BYTES] = digest
                self._fresh = True
            elif known != digest:
                raise StoreError(
                    f"{self.path} is damaged at byte {tensor.offset + start}: it differs from what "
                    "was read there before",
                    f"{_REMEDY}, or check the disk",
                )
            at += _DIGEST_BYTES

    def save(self) -> None:
        if not (self._fresh and self.named):
            return
        body, self._fresh = bytes(self._digests + self._sums), False  # not tried again: one warning
        try:
            with replacing(self._manifest) as file:
                file.write(xxhash.xxh3_128_digest(body) + body)
        except OSError as error:
            warnings.warn(
                f"{self._manifest} cannot be written ({error}): later processes cannot verify "
                "these weights. Pass a directory that can be written to as disk=",
                RuntimeWarning,
                stacklevel=2,
            )


def _place_of_sums(tensor: StoredTensor) -> slice:
    first = tensor.first_block * _DIGEST_BYTES
    return slice(first, first + -(-tensor.n_bytes // BLOCK_BYTES) * _DIGEST_BYTES)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _header(path: str, size: int) -> tuple[dict[str, Any], int, bytes]:
    """Return the header of a file, the offset of its data, and the header's bytes."""
    with open_regular(path) as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        fits = size >= 8 and n_bytes <= min(size - 8, _MOST_HEADER_BYTES)
        text, header = file.read(n_bytes) if fits else b"", None
    with contextlib.suppress(*MALFORMED):
        header = json.loads(text)
    if not isinstance(header, dict):
        raise StoreError(f"{path} is no safetensors file", "Convert the weights first")
    return header, 8 + n_bytes, text


def _paths(path: Path) -> list[Path]:
    """Return the files of a checkpoint."""
    if not path.is_dir():
        return [path]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    found = _indexed(indexes[0]) if indexes else sorted(path.glob("*.safetensors"))
    if not found:
        raise StoreError(f"{path} has no safetensors files", "Pass a directory that has")
    for file in found:
        _check_within(file, path)
    return found


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names."""
    try:
        with open_regular(index) as file:
            names = sorted(set(json.loads(file.read())["weight_map"].values()))
        return [index.parent / name for name in names]
    except (*MALFORMED, KeyError, AttributeError, TypeError) as error:
        raise StoreError(f"{index} is no index of files", _REMEDY) from error


def _check_within(file: Path, folder: Path) -> None:
    """Raise `StoreError` if a checkpoint's file is outside its directory.

    The Hugging Face hub's cache keeps files in `blobs`, beside the snapshots that link to them.
    """
    homes = [os.path.realpath(folder)]
    above, name = os.path.split(os.path.dirname(homes[0]))
    if name == "snapshots":
        homes.append(os.path.join(above, "blobs"))
    try:
        real = os.path.realpath(file)
    except ValueError:  # an impossible file name
        real = ""
    if not any(real.startswith(os.path.join(home, "")) for home in homes):
        raise StoreError(f"{file} is outside of {folder}", "Copy the file into that directory")


def check_folder(folder: Path) -> None:
    """Check the files and indexes of a folder that other libraries read.

    Raises:
        StoreError: An entry is no regular file, or an index names a file outside.
        OSError: The folder or an index cannot be read.
    """
    for found in folder.iterdir():
        if found.exists() and not (found.is_file() or found.is_dir()):
            raise StoreError(f"{found} is no regular file", "Remove it from the folder")
    for index in folder.glob("*.index.json"):
        for file in _indexed(index):
            _check_within(file, folder)


def _engine(directory: str) -> IOEngine:
    # Pieces of a MiB come as fast through threads as through a ring, which would have to be loaded
    # first: a second until a process has its first token.
    try:
        return ThreadsEngine(direct=allows_direct(directory))
    except OSError:  # without write access, support of O_DIRECT cannot be tested
        return ThreadsEngine()


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, which appears whole or not at all.

    Raises:
        StoreError: A tensor has no memory or a dtype unknown to the format, or the disk is full.
    """
    header: dict[str, Any] = {}
    end = 0
    # The widest dtype first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        tensor = tensors[name]
        if tensor.is_meta or tensor.dtype not in _CODES:
            raise StoreError(
                f"{name} of {tensor.dtype} on {tensor.device} cannot be written", "Pass checkpoint="
            )
        first, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    try:
        with replacing(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(bytes_of(tensors[name].detach().cpu()).numpy().data)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error})", "Make room, or pass disk="
        ) from error
