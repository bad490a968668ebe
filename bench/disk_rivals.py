"""Other stores of blocks on a disk: a file per block, and RocksDB. For `bench.bench_disk`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Protocol

from flowkv.core.memory import own_memory

THREADS = 16


class Blocks(Protocol):
    """Keeps blocks of bytes by key; both calls end when all is done."""

    name: str

    def put(self, keys: Sequence[bytes], bodies: Sequence[memoryview]) -> None: ...

    def get(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None: ...

    def close(self) -> None: ...


class FilePerBlock:
    """One file a block past the page cache, renamed into place; nothing is checked."""

    name = "file per block"

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory, self._memory = str(directory), local()
        self._pool = ThreadPoolExecutor(THREADS)

    def put(self, keys: Sequence[bytes], bodies: Sequence[memoryview]) -> None:
        list(self._pool.map(self._put, keys, bodies))

    def get(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        list(self._pool.map(self._get, keys, targets))

    def close(self) -> None:
        self._pool.shutdown()

    def _aligned(self, n_bytes: int) -> memoryview:
        held = getattr(self._memory, "held", None)
        if held is None or len(held) < n_bytes:
            held = self._memory.held = own_memory(n_bytes)
        return held[:n_bytes]

    def _put(self, key: bytes, body: memoryview) -> None:
        path = os.path.join(self._directory, key.hex())
        memory = self._aligned(len(body))
        memory[:] = body
        fd = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        assert os.pwritev(fd, [memory], 0) == len(body)
        os.close(fd)
        os.rename(path + ".tmp", path)

    def _get(self, key: bytes, target: memoryview) -> None:
        memory = self._aligned(len(target))
        fd = os.open(os.path.join(self._directory, key.hex()), os.O_RDONLY | os.O_DIRECT)
        assert os.preadv(fd, [memory], 0) == len(target)
        os.close(fd)
        target[:] = memory


class RocksDB:
    """RocksDB with blob files, without a write-ahead log, past the page cache."""

    name = "RocksDB"

    def __init__(self, directory: Path) -> None:
        from rocksdict import DBCompressionType, Options, Rdict, WriteOptions

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        options.set_blob_file_size(256 << 20)
        options.set_write_buffer_size(64 << 20)
        options.set_compression_type(DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        self._db = Rdict(str(directory), options=options)
        writing = WriteOptions()
        writing.disable_wal = True
        self._db.set_write_options(writing)
        self._pool = ThreadPoolExecutor(8)

    def put(self, keys: Sequence[bytes], bodies: Sequence[memoryview]) -> None:
        list(self._pool.map(lambda key, body: self._db.put(key, bytes(body)), keys, bodies))
        self._db.flush()

    def get(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        list(self._pool.map(self._get, keys, targets))

    def close(self) -> None:
        self._pool.shutdown()
        self._db.close()

    def _get(self, key: bytes, target: memoryview) -> None:
        target[:] = self._db.get(key)
