"""NIXL: frames as files of a directory, moved by a plug-in of NVIDIA's transfer library.

NIXL moves bytes between registered memory and open files, and knows neither names nor listings:
those are the file system's, local or shared (NFS, Lustre, 3FS). `plugin=POSIX` runs everywhere;
others, such as `GDS_MT`, need their hardware.

A transfer cannot be called back: a call returns only when its transfer has ended, however late, so
that the tier never reuses memory that bytes still move in (DESIGN D10).
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Unpack
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np

from flowkv.core.config import without_secrets
from flowkv.core.errors import ConfigError, MissingDependencyError, StoreError
from flowkv.tiers.base import UNBOUNDED
from flowkv.tiers.remote.backend import NAME, Listed, RemoteLimits, RemoteOptions, swap, sweep
from flowkv.tiers.remote.tier import RemoteTier

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:
    raise MissingDependencyError("a tier that NIXL moves", "nixl") from None

LIMITS = RemoteLimits(threads=4, spares=4)
_UNFINISHED = re.compile(rf"\.{NAME.pattern}\.[0-9a-f]+")
_FIRST_S, _LONGEST_S = 20e-6, 1e-3  # the library has no wait for completion: it is polled


class Nixl:
    """`Backend` on a directory, through NIXL.

    Args:
        uri: `nixl:///directory`, with `?plugin=` the name of a plug-in for files (POSIX).

    Raises:
        ConfigError: The URI cannot be used.
        StoreError: There is no such directory, or the plug-in does not load.
    """

    asks = 4096

    def __init__(self, uri: str) -> None:
        parts, said = urlsplit(uri), without_secrets(uri)
        options = dict(parse_qsl(parts.query))
        if parts.netloc or parts.path in ("", "/") or options.keys() - {"plugin"}:
            raise ConfigError(f"place {said!r} is no directory for NIXL", "Write nixl:///mnt/kv")
        self._directory, self._plugin = unquote(parts.path), options.get("plugin", "POSIX")
        self.name, self._lock = f"nixl://{self._directory}", threading.Lock()
        if not os.path.isdir(self._directory):
            raise StoreError(f"there is no directory {self._directory}", "Make or mount it first")
        self._inode = os.stat(self._directory).st_ino
        self._agent_name = f"flowkv-{secrets.token_hex(8)}"
        try:
            self._agent: Any = nixl_agent(self._agent_name, nixl_agent_config(backends=[]))
            self._agent.create_backend(self._plugin)
        except Exception as error:
            problem = f"NIXL cannot use its plug-in {self._plugin} ({error})"
            raise StoreError(problem, "Use plugin=POSIX, or install what that one needs") from None

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        """Read into memory of the caller; None if there is no such file.

        Raises:
            OSError: As every backend.
        """
        try:
            file = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            part = into.cast("B")[: max(0, os.fstat(file).st_size - offset)]
            self._move("READ", part, file, offset)
            return part
        finally:
            os.close(file)

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        """Write a file under another name first, so that readers see all of it or nothing.

        Raises:
            OSError: As every backend.
        """
        other = self._path(f".{name}.{secrets.token_hex(8)}")
        file = os.open(other, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if data.nbytes:
                os.posix_fallocate(file, 0, data.nbytes)  # a full file system says so here
            self._move("WRITE", data.cast("B"), file, 0)
            os.replace(other, self._path(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(other)
            raise
        finally:
            os.close(file)

    def swap(self, name: str, was: bytes | None, data: memoryview, timeout_s: float) -> None:
        """Write a file if its bytes are still `was`, under a lock.

        Raises:
            OSError: As every backend.
        """
        swap(self, self._path(name), was, data, timeout_s)

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Remove files; missing ones are no error.

        Raises:
            OSError: As every backend.
        """
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self._path(name))

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Return which files are there."""
        return [os.path.exists(self._path(name)) for name in names]

    def list(self, timeout_s: float) -> Iterator[Listed]:
        """Yield all frames of the directory.

        Raises:
            OSError: As every backend.
        """
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        told = entry.stat(follow_symlinks=False)
                        yield Listed(entry.name, told.st_size, told.st_mtime_ns)

    def sweep(self) -> None:
        """Remove what is left of files whose writing did not end.

        Raises:
            OSError: Some may still be there.
        """
        sweep(self._directory, ".", _UNFINISHED, self._inode)

    def close(self) -> None:
        """Release the agent and its plug-in."""
        self._agent = None

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _move(self, way: str, data: memoryview, file: int, offset: int) -> None:
        """Move bytes between memory and an open file, and wait for their end, however long."""
        if not data.nbytes:
            return
        address, agent = np.frombuffer(data, np.uint8).ctypes.data, self._agent
        plugins = [self._plugin]
        held = list[Any]()
        try:
            with self._lock:
                for region, kind in (
                    ((address, data.nbytes, 0, ""), "DRAM"),
                    ((offset, data.nbytes, file, ""), "FILE"),
                ):
                    held.append(agent.register_memory([region], kind, backends=plugins))
                ends = [one.trim() for one in held]
                transfer = agent.initialize_xfer(way, *ends, self._agent_name, backends=plugins)
                state, pause_s = agent.transfer(transfer), _FIRST_S
            while state == "PROC":
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
                with self._lock:
                    state = agent.check_xfer_state(transfer)
            with self._lock:
                agent.release_xfer_handle(transfer)
        except Exception as error:
            raise ConnectionError(f"NIXL failed ({type(error).__name__}: {error})") from error
        finally:
            with self._lock:
                for one in held:
                    with suppress(Exception):  # the transfer's own error says more
                        agent.deregister_memory(one, backends=plugins)
        if state != "DONE":
            raise ConnectionError(f"a transfer of NIXL ended as {state}")


class NixlTier(RemoteTier):
    """Frames in a directory that NIXL reads and writes.

    Args:
        uri: As `Nixl`.
        capacity_bytes: Most bytes of frames there.
        name: Shown in statistics; default the directory.
        envelope: Seals and checks frames.
        clock: Source of time.
        limits: Limits of concurrency, memory and time; default `usual`.

    Raises:
        ConfigError: The URI or the capacity cannot be used.
        MissingDependencyError: NIXL is not installed.
        StoreError: As `Nixl`.
    """

    usual = LIMITS

    def __init__(
        self, uri: str, capacity_bytes: int = UNBOUNDED, **options: Unpack[RemoteOptions]
    ) -> None:
        super().__init__(Nixl(uri), capacity_bytes, **options)
