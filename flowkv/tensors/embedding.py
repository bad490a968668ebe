"""`attach_embedding`: an embedding with its table on disk, and its hot rows in memory.

    rows = flowkv.attach_embedding(model.embed_tokens, disk="./table", host="64MiB")
    model(...)                                  # the same bits; rows come from memory or disk

The table is one file of blocks, each of whole rows, beside a manifest with a digest of every block:

    table-ID = block | block | ...              a block is a multiple of 4 KiB and holds whole rows
    manifest = magic 8 | length of the description u32 | description, JSON
             | xxh3_64 of each block, u64, little-endian | xxh3_128 of all before it

A look-up takes the batch's distinct rows at once: hot ones from a pool in memory, the others from
their blocks, which are read in one batch through the ring and verified before any row is used. A
policy (`residency.Ledger`) decides row by row which ones stay, since hot rows are scattered.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from flowkv.core.config import format_size, parse_size
from flowkv.core.errors import ConfigError, StateError, StoreError
from flowkv.core.files import MALFORMED, lock_byte, open_regular, remove_left, renew_lock, replacing
from flowkv.core.interrupts import cover, unbroken
from flowkv.observe.events import Bus, Closing, RowsRead
from flowkv.policy import make_policy
from flowkv.policy.order.compiled import NODE
from flowkv.residency import Ledger, Meta, Place
from flowkv.residency.blocks import BLOCK
from flowkv.tiers.io import open_engine
from flowkv.tiers.io.engine import ALIGNMENT, OPERATION, READ, Arena, FileIO

MAGIC = b"FKVTABLE"
VERSION = 1
KNOWN_BYTES = 3 * (BLOCK.itemsize + NODE.itemsize + 4 * 16 + 24) // 2
"""Bytes of ledger and policy for each row; half of it while they double."""
LEAST_KNOWN = 1 << 10
"""Least rows that ledger and policy have room for; from there on they double."""

_MANIFEST = "manifest"
_STAGING_BYTES = 4 << 20
_WRITE_BYTES = 16 << 20
_READ_S = 30.0
_AT_ONCE = 1 << 10  # rows in one decision of the policy
_UNCHAINED = Meta(chained=False)  # rows are independent of each other
_ANEW = "Delete the directory, and attach the embedding with its weights to write it again"


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a table in its manifest."""

    version: int
    table: str
    rows: int
    width: int
    dtype: str
    block_rows: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def sound(self) -> bool:
        """Return whether a table can have this description; its file must be in the directory."""
        counts = self.rows, self.width, self.block_rows, self.block_bytes
        dtype = getattr(torch, self.dtype, None)
        return (
            self.version == VERSION
            and min(counts) > 0
            and isinstance(dtype, torch.dtype)
            and self.width * dtype.itemsize * self.block_rows <= self.block_bytes
            and self.block_bytes % ALIGNMENT == 0
            and re.fullmatch(r"[\w-]+", self.table) is not None
        )


def write_table(disk: str | os.PathLike[str], parts: Iterable[torch.Tensor]) -> None:
    """Write a table that need not fit into memory, for `attach_embedding` to find.

    The table appears whole or not at all: a reader finds the old table, or none, until the last
    part is on the device.

    Args:
        disk: A directory, created if it is missing.
        parts: [rows, width] each, one after the other, of one width and dtype.

    Raises:
        ConfigError: There are no rows, or parts differ in width or dtype.
        StoreError: The directory cannot be written to; no part of the table is left then.
    """
    folder = Path(disk)
    name = f"table-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = [one.name for one in folder.glob("table-*")]
        try:
            with (folder / name).open("xb") as table:
                lock_byte(table.fileno(), 0, fcntl.F_WRLCK)  # until the manifest names it
                described, digests = _write(table, name, parts)
                body = json.dumps(msgspec.to_builtins(described)).encode()
                raw = MAGIC + len(body).to_bytes(4, "little") + body + digests.tobytes()
                with replacing(folder / _MANIFEST) as file:
                    file.write(raw + xxhash.xxh3_128_digest(raw))
        except BaseException:
            with contextlib.suppress(StoreError):  # there is no manifest yet
                if _read_manifest(folder)[0].table == name:
                    raise  # a signal came behind the last step
            (folder / name).unlink(missing_ok=True)
            raise
        for old in before:  # files of an earlier table, or of a process that was killed
            if old != _read_manifest(folder)[0].table:  # of another writer, which ended later
                remove_left(folder / old)
        FileIO().sync_directory(str(folder))
    except OSError as error:
        raise StoreError(
            f"a table cannot be written to {folder} ({error.strerror or error})",
            "Free some space, or name another directory",
        ) from error


def _write(
    file: BinaryIO, name: str, parts: Iterable[torch.Tensor]
) -> tuple[_Description, NDArray[np.uint64]]:
    """Write a table's file to the device; return its description and its blocks' digests."""
    left, digests, rows = iter(parts), list[int](), 0
    first = next((part for part in left if len(part)), torch.empty(0, 0))
    if not first.numel():
        raise ConfigError("the table has no rows", "Pass at least one part with rows")
    width, dtype, size = first.shape[-1], str(first.dtype).removeprefix("torch."), first[0].nbytes
    count = max(1, ALIGNMENT // size)
    length = -(-count * size // ALIGNMENT) * ALIGNMENT
    described = _Description(VERSION, name, 0, width, dtype, count, length)

    def fitting() -> Iterator[torch.Tensor]:
        nonlocal rows
        for part in chain([first], left):
            if part.dim() != 2 or (part.shape[1], part.dtype) != (width, first.dtype):
                raise ConfigError(
                    f"a part of shape {tuple(part.shape)} and dtype {part.dtype} does not fit the "
                    "table",
                    "Pass [rows, width], of one width and dtype",
                )
            rows += len(part)
            yield part

    for block in _blocks(fitting(), described):
        digests.append(xxhash.xxh3_64_intdigest(block, len(digests)))
        file.write(block)
    file.flush()
    os.fsync(file.fileno())
    return msgspec.structs.replace(described, rows=rows), np.array(digests, np.uint64)


def _blocks(parts: Iterable[torch.Tensor], said: _Description) -> Iterator[bytes | memoryview]:
    """Yield a table's bytes, block by block; the last one is padded with zeros."""
    size, left = said.block_bytes, b""
    for part in parts:
        row_bytes = part.shape[1] * part.element_size()
        used = said.block_rows * row_bytes
        for some in torch.split(part, max(1, _WRITE_BYTES // max(1, row_bytes))):
            data = left + some.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
            whole = len(data) // used * used
            if used == size:
                view = memoryview(data)
                yield from (view[n : n + size] for n in range(0, whole, size))
            else:
                yield from (data[n : n + used].ljust(size, b"\0") for n in range(0, whole, used))
            left = data[whole:]
    if left:
        yield left.ljust(size, b"\0")


class EmbeddingTable(Closing):
    """Table on disk with its hot rows in memory. Thread-safe.

    Args:
        disk: The directory of the table.
        host: Bytes for hot rows, their records, digests of all blocks and staging, as 67108864 or
            "64MiB".
        policy: Eviction policy of rows; a name of `make_policy`.
        bus: Receives an event of each look-up.

    Attributes:
        rows: Number of rows.
        width: Elements of each row.
        dtype: Dtype of the elements.
        pool_rows: Rows that memory holds.
        bus: Bus of the events.

    Raises:
        ConfigError: `host` does not hold a row, or the policy is unknown.
        StoreError: There is no table, or it does not match its manifest.
    """

    def __init__(
        self,
        disk: str | os.PathLike[str],
        *,
        host: int | str = "64MiB",
        policy: str = "lfu-ttl",
        bus: Bus | None = None,
    ) -> None:
        self._folder, self.bus = Path(disk), bus or Bus()
        said, self._digests = _read_manifest(self._folder)
        self._said, self.rows, self.width = said, said.rows, said.width
        self.dtype: torch.dtype = getattr(torch, said.dtype)
        self.row_bytes = said.width * self.dtype.itemsize
        budget, size = parse_size(host), said.block_bytes
        staging = max(1, min(_STAGING_BYTES, budget // 8) // size) * size
        most = budget - staging - self._digests.nbytes
        room, self._chunk = _room(most, self.row_bytes)
        self.pool_rows = min(said.rows, room)
        if self.pool_rows < 1:
            least = LEAST_KNOWN * KNOWN_BYTES + self.row_bytes + size + self._digests.nbytes
            least = format_size(least * 8 // 7)
            raise ConfigError(f"host={host!r} holds no row", f"Give it {least} at least")
        self._pool = np.empty((self.pool_rows, self.row_bytes), np.uint8)
        self._free = np.arange(self.pool_rows)[::-1].copy()
        self._free_rows = self.pool_rows
        place = Place(make_policy(policy), self.pool_rows)
        # No ghosts: records of evicted rows take more than the rows that could stay instead.
        self._ledger = Ledger([place], ghosts=0)
        self._space = self._ledger.namespace(b"rows")
        self._at = np.full(1024, -1, np.int64)  # ledger's slot -> row of the pool
        self._lock = threading.Lock()
        renew_lock(self, self._lock)
        self._counts = Counter(lookups=0, rows=0, hits=0, blocks=0, read_bytes=0)
        self._blocked_s, self._open, self._pid = 0.0, True, os.getpid()
        path = self._folder / said.table
        self._arena = Arena(staging)
        try:
            if path.stat().st_size != said.blocks * said.block_bytes:
                raise StoreError(f"{path} is not as long as its manifest says", _ANEW)
            self._engine = open_engine(self._arena, str(self._folder))
            self._fd = self._engine.open(str(path), write=False)
        except OSError as error:
            self._arena.close()
            raise StoreError(f"{path} cannot be read ({error.strerror})", _ANEW) from error

    @unbroken
    def look_up(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
        """Return the bytes of rows, u8 [n, bytes of a row], for numbers of rows, [n].

        Raises:
            IndexError: A number is out of range.
            StateError: The table is closed.
            StoreError: A block cannot be read, or is damaged.
        """
        different, back = np.unique(np.asarray(ids, np.int64), return_inverse=True)
        found = np.empty((len(different), self.row_bytes), np.uint8)
        if len(different) and not 0 <= different[0] <= different[-1] < self.rows:
            raise IndexError("index out of range in self")
        with self._alone():
            began_s, hits, blocks = time.perf_counter(), 0, 0
            for first in range(0, len(different), self._chunk):
                part = slice(first, first + self._chunk)
                more = self._rows_of(different[part], found[part])
                hits, blocks = hits + more[0], blocks + more[1]
            seconds = time.perf_counter() - began_s
            n_bytes = blocks * self._said.block_bytes
            rows = len(different)
            self._counts.update(lookups=1, rows=rows, hits=hits, blocks=blocks, read_bytes=n_bytes)
        if self.bus.wants(RowsRead):
            self.bus.emit(RowsRead(rows=rows, found=hits, n_bytes=n_bytes, seconds=seconds))
        return found[back.reshape(-1)]

    def all_rows(self) -> torch.Tensor:
        """Return the whole table, [rows, width], verified.

        Raises:
            StateError: The table is closed.
            StoreError: A block cannot be read, or is damaged.
        """
        found = torch.empty(self.rows, self.width, dtype=self.dtype)
        target = found.view(torch.uint8).reshape(self.rows, -1).numpy()
        with self._alone():
            step = self._at_once
            for first in range(0, self._said.blocks, step):
                blocks = np.arange(first, min(first + step, self._said.blocks))
                some = self._rows_in(self._read(blocks))
                begin = first * self._said.block_rows
                end = min(begin + some.shape[0] * some.shape[1], self.rows)
                target[begin:end] = some.reshape(-1, self.row_bytes)[: end - begin]
        return found

    def differs(self, weight: torch.Tensor) -> bool:
        """Return whether a table in memory differs from this one."""
        if weight.dtype != self.dtype or weight.shape != (self.rows, self.width):
            return True
        for number, block in enumerate(_blocks([weight], self._said)):
            if xxhash.xxh3_64_intdigest(block, number) != self._digests[number]:
                return True
        return False

    def absent(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a placeholder for a weight with its rows in this table."""
        digest = hashlib.sha256(self._digests.data).hexdigest()
        return _Absent(weight, f"{self._said.block_rows} {digest}")

    def stats(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON; `hits` are distinct rows found in memory."""
        with self._lock:
            return {
                **self._counts,
                "resident_rows": self.pool_rows - self._free_rows,
                "pool_rows": self.pool_rows,
                "blocked_s": self._blocked_s,
                "policy": self._ledger.policy(0).name,
            }

    def close(self) -> None:
        """Close the file and free the memory. Safe to call again."""
        if os.getpid() != self._pid:  # the lock may be held for ever
            return
        with self._lock:
            fd, self._fd, self._open = self._fd, -1, False
            if fd < 0:
                return
            if self._engine.close():
                self._arena.close()
            os.close(fd)

    # ---- one look-up

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            problem = "the table was opened before a fork"
            raise StateError(problem, "Load the model and attach the module in this process")
        with self._lock:
            cover()
            if not self._open:
                remedy = "Load the model again, and attach the module"
                raise StateError("the table is closed", remedy)
            yield

    def _rows_of(self, ids: NDArray[np.int64], found: NDArray[np.uint8]) -> tuple[int, int]:
        """Fill in distinct rows; return the rows found in memory, and the blocks read."""
        pairs = np.zeros((len(ids), 2), np.uint64)
        pairs[:, 0] = ids
        plan = self._ledger.serve(time.monotonic_ns(), self._space, pairs, _UNCHAINED)
        slots = plan.slots.copy()
        if len(slots) and (top := int(slots.max())) >= len(self._at):
            more = np.full(max(top + 1, 2 * len(self._at)) - len(self._at), -1, np.int64)
            self._at = np.concatenate((self._at, more))
        at = self._at[slots]  # -1 for rows that are not in the pool, or were never read
        here = at >= 0
        found[here] = self._pool[at[here]]
        gone = [move.slots for move in plan.moves]
        for some in gone:
            self._drop(some)
        missing = np.flatnonzero(~here)
        blocks = self._bring(ids[missing], found, missing)
        stays = ~here
        if gone:
            stays &= ~np.isin(slots, np.concatenate(gone))
        new = np.flatnonzero(stays)
        taken = self._free[self._free_rows - len(new) : self._free_rows]
        self._free_rows -= len(new)
        self._pool[taken] = found[new]
        self._at[slots[new]] = taken
        return int(np.count_nonzero(here)), blocks

    def _drop(self, slots: NDArray[np.int64]) -> None:
        """Remove rows from the pool."""
        at = self._at[slots]
        free = at[at >= 0]  # others were never read, after a failure
        self._free[self._free_rows : self._free_rows + len(free)] = free
        self._free_rows += len(free)
        self._at[slots] = -1

    def _bring(
        self, ids: NDArray[np.int64], found: NDArray[np.uint8], where: NDArray[np.int64]
    ) -> int:
        """Read rows from their blocks into `found[where]`; return the number of blocks."""
        blocks, back = np.unique(ids // self._said.block_rows, return_inverse=True)
        within, step = ids % self._said.block_rows, self._at_once
        for first in range(0, len(blocks), step):
            rows = self._rows_in(self._read(blocks[first : first + step]))
            mine = (back >= first) & (back < first + step)
            found[where[mine]] = rows[back[mine] - first, within[mine]]
        return len(blocks)

    @property
    def _at_once(self) -> int:
        """Return the number of blocks that are read in one batch."""
        return self._arena.n_bytes // self._said.block_bytes

    def _rows_in(self, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return u8 [blocks, rows of a block, bytes of a row] of u8 [blocks, bytes of a block]."""
        held = blocks[:, : self._said.block_rows * self.row_bytes]
        return held.reshape(len(blocks), self._said.block_rows, self.row_bytes)

    @unbroken
    def _read(self, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Read and verify blocks; return them in staging memory, valid until the next call."""
        began_s, size = time.perf_counter(), self._said.block_bytes
        operations = np.zeros(len(blocks), OPERATION)
        operations["op"], operations["fd"], operations["length"] = READ, self._fd, size
        operations["offset"] = blocks * size
        operations["address"] = self._arena.address + np.arange(len(blocks)) * size
        operations["tag"] = np.arange(len(blocks))
        self._engine.submit(operations)
        left, failed = len(blocks), 0
        while left:
            done = self._engine.wait(_READ_S)
            if not len(done):
                self._open = False  # the staging memory may still be written to
                raise StoreError(f"{self._folder} does not answer", "Attach again once it does")
            failed += int(np.count_nonzero(done["result"] != size))
            left -= len(done)
        whole = self._arena.view[: len(blocks) * size]
        for n, number in enumerate(blocks.tolist()):
            body = whole[n * size : (n + 1) * size]
            if failed or xxhash.xxh3_64_intdigest(body, number) != self._digests[number]:
                raise StoreError(
                    f"block {number} of {self._folder / self._said.table} "
                    + ("cannot be read" if failed else "is not what was written"),
                    _ANEW,
                )
        self._blocked_s += time.perf_counter() - began_s
        return np.frombuffer(whole, np.uint8).reshape(len(blocks), size)


def _room(n_bytes: int, row_bytes: int) -> tuple[int, int]:
    """Return the rows that so much memory holds, and the rows of one decision of the policy.

    New rows come before others leave, so the ledger has room for both.
    """
    known, best = LEAST_KNOWN, (0, 1)
    while (left := n_bytes - known * KNOWN_BYTES) > 0:
        chunk = min(_AT_ONCE, known // 4)
        best = max(best, (min(known - chunk, left // max(1, row_bytes)), chunk))
        known *= 2
    return best


def _read_manifest(folder: Path) -> tuple[_Description, NDArray[np.uint64]]:
    """Return the description of a directory's table, and the digests of its blocks.

    Raises:
        StoreError: There is no manifest, or it is damaged.
    """
    try:
        with open_regular(folder / _MANIFEST) as file:
            raw = file.read()
    except OSError as error:
        raise StoreError(
            f"{folder} has no table ({error.strerror})",
            "Attach an embedding that has its weights, or write one with write_table",
        ) from error
    length = int.from_bytes(raw[8:12], "little")
    begin, end = 12 + length, len(raw) - 16
    sound = raw.startswith(MAGIC) and begin <= end  # no copies below: the manifest may be long
    if sound and xxhash.xxh3_128_digest(memoryview(raw)[:end]) == raw[end:]:
        with contextlib.suppress(*MALFORMED):
            said = msgspec.json.decode(raw[12:begin], type=_Description)
            if said.sound and end - begin == 8 * said.blocks:
                return said, np.frombuffer(raw, "<u8", said.blocks, begin)
    raise StoreError(f"{folder / _MANIFEST} is damaged, or of another version", _ANEW)


class _Absent(torch.Tensor):
    """Placeholder for a table on disk, with its shape, dtype and device, which models read.

    Any other use raises. `content`, a digest of the table, stands for its content when the model
    is named.
    """

    __module__ = "flowkv.hooks.embedding"  # its first place, which is part of models' names
    content: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, content: str) -> _Absent:
        device = torch.device("cpu") if like.is_meta else like.device
        made: _Absent = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=device
        )
        made.content = content
        return made

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return [], self.content

    @staticmethod
    def __tensor_unflatten__(inner: Any, content: str, size: Any, stride: Any) -> _Absent:
        return _Absent(torch.empty_strided(size, stride, device="meta"), content)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0], args[0].content)
        raise StateError(
            f"the rows of an attached embedding lie on disk: {func} has nothing to read",
            "Call the module, or detach the embedding first",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "an attached embedding cannot be saved or shared: its rows lie on disk",
            "Detach it first",
        )

    def share_memory_(self) -> Any:  # ends the process in torch, for there is no memory
        self.__reduce_ex__(0)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"a table on disk, {list(self.shape)} of {self.dtype}"


class AttachedEmbedding(Closing):
    """Embedding that looks its rows up in a table; `attach_embedding` makes it.

    Attributes:
        table: The table.
        around: The module's own forward, which is replaced.
        bus: Bus of the `RowsRead` events; caches that are attached later receive them, too.
    """

    def __init__(self, module: torch.nn.Embedding, table: EmbeddingTable) -> None:
        self.table, self._module, self.around = table, module, module.forward
        self.bus = table.bus
        weight = module.weight
        self._first = weakref.ref(weight)
        self._trains, self._device = weight.requires_grad, weight.device
        absent: Any = torch.nn.Parameter(table.absent(weight), requires_grad=False)
        module.weight, self._content = absent, absent.content
        module.forward = self.__call__  # type: ignore[method-assign]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., width], for numbers of rows of any shape, on their device.

        Raises:
            IndexError: A number is out of range.
            TypeError: Numbers are not int32 or int64.
            StateError: The embedding is trained or compiled, was detached, or has another weight.
            StoreError: A block cannot be read, or is damaged.
        """
        if torch.compiler.is_compiling():
            raise StateError("look-ups in a table on disk cannot be compiled", "Detach it first")
        if self._trains and self._module.training and torch.is_grad_enabled():
            raise StateError(
                "rows of a table on disk cannot be trained",
                "Call eval() or use torch.no_grad(), or detach the embedding first",
            )
        table = self.table
        if input.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"numbers of rows are int32 or int64, not {input.dtype}")
        if not self._stands():
            raise StateError(
                "the embedding was given another weight than the table on disk",
                "Detach it, set the weight, and attach it to another directory",
            )
        raw = table.look_up(input.detach().reshape(-1).cpu().numpy())
        rows = torch.from_numpy(raw.reshape(-1)).view(table.dtype)
        return rows.reshape(*input.shape, table.width).to(input.device)

    def _stands(self) -> bool:
        """Return whether the module's weight is still the placeholder."""
        weight = self._module.weight
        return getattr(weight, "content", None) == self._content and not weight.data_ptr()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers, see `EmbeddingTable.stats`."""
        return self.table.stats()

    def detach(self) -> None:
        """Put the whole table back into the module, and close. Safe to call again.

        A parameter that was set in the module meanwhile stays instead. The parameter of before
        returns if another module or an optimizer still holds it.

        Raises:
            StateError: The table is closed.
            StoreError: A block cannot be read, or is damaged.
        """
        if self._module.__dict__.get("forward") == self.__call__:
            if isinstance(self._module.weight, _Absent):
                weight = self._first()  # another module or an optimizer may hold it
                if weight is None or weight.is_meta or weight.shape != self._module.weight.shape:
                    device = "cpu" if self._device.type == "meta" else self._device
                    rows = self.table.all_rows().to(device)
                    weight = torch.nn.Parameter(rows, requires_grad=self._trains)
                self._module.weight = weight
            del self._module.forward
        self.close()

    def close(self) -> None:
        """Close the table; the module cannot be called any more. Safe to call again."""
        self.table.close()


def attach_embedding(
    module: torch.nn.Embedding,
    *,
    disk: str | os.PathLike[str],
    host: int | str = "64MiB",
    policy: str = "lfu-ttl",
    bus: Bus | None = None,
) -> AttachedEmbedding:
    """Move an embedding's table to disk; the module looks its rows up from then on, bit for bit.

    Args:
        module: An embedding with weights, which are written to `disk` unless they are there
            already; or on the meta device, over an existing table.
        disk: A directory of its own.
        host: Bytes for hot rows, their records, digests of all blocks and staging, as 67108864 or
            "64MiB".
        policy: Eviction policy of rows in memory; a name of `make_policy`.
        bus: Receives an event of each look-up.

    Returns:
        The attached embedding, which has statistics and can put the table back.

    Raises:
        ConfigError: The module renormalises or has sparse gradients, is attached already, or its
            shape, dtype or weights are not those of the table.
        StoreError: There are neither a table nor weights, or the table is damaged or cannot be
            written.
    """
    if not isinstance(module, torch.nn.Embedding):
        raise ConfigError(f"{type(module).__name__} is no torch.nn.Embedding", "Pass one")
    for name in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, name):
            raise ConfigError(f"an embedding with {name} writes to its rows", f"Unset {name}")
    if isinstance(getattr(module.__dict__.get("forward"), "__self__", None), AttachedEmbedding):
        raise ConfigError("the embedding is attached already", "Detach it first")
    if type(module).forward is not torch.nn.Embedding.forward or "forward" in module.__dict__:
        raise ConfigError(
            f"{type(module).__name__} has a forward of its own, which would not be called",
            "Attach the plain embedding inside it, if there is one",
        )
    weight, there = module.weight, (Path(disk) / _MANIFEST).exists()
    if not there and weight.device.type != "meta":
        write_table(disk, [weight])
    table = EmbeddingTable(disk, host=host, policy=policy, bus=bus)
    try:
        wanted = (table.rows, table.width, table.dtype)
        if (*weight.shape, weight.dtype) != wanted:
            raise ConfigError(
                f"the table in {disk} is {table.rows} x {table.width} of {table.dtype}, the "
                f"embedding {weight.shape[0]} x {weight.shape[1]} of {weight.dtype}",
                "Name another directory",
            )
        if there and weight.device.type != "meta" and table.differs(weight):
            raise ConfigError(
                f"the table in {disk} holds other weights than the embedding",
                "Name another directory, or delete that one",
            )
    except BaseException:
        table.close()
        raise
    return AttachedEmbedding(module, table)
