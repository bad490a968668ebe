"""Real servers on the loopback, started by tests and benchmarks, and always stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

READY_S = 60.0
BUCKET = "frames"


def free_port() -> int:
    """A port that nobody listened to a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_program(name: str) -> str | None:
    """A program beside the interpreter, or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


class Server:
    """A process that listens on a port. Stop it, freeze it, kill it, start it again.

    Args:
        command: Makes the command line, given the port.
        log: Where what it says goes.
    """

    def __init__(self, command: Callable[[int], list[str]], log: Path) -> None:
        self._command, self._log = command, log
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it accepts connections."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.port), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self._log.read_text()}")
            time.sleep(0.01)

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections and bytes, and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        end_s = time.monotonic() + READY_S
        while any(_state(task) != "T" for task in tasks.iterdir()):  # some run on for a while
            assert time.monotonic() < end_s
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGKILL, and waits for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(READY_S)
            self.process = None


class ObjectServer(Server):
    """`rclone serve s3` over a directory.

    Attributes:
        uri: Of a bucket.
        options: What `ObjectTier` and obstore need to reach it.
    """

    def __init__(self, directory: Path, log: Path) -> None:
        (directory / BUCKET).mkdir(parents=True, exist_ok=True)
        key, secret = secrets.token_hex(10), secrets.token_hex(20)
        program = find_program("rclone")
        assert program is not None
        super().__init__(
            lambda port: [
                *(program, "serve", "s3", "--addr", f"127.0.0.1:{port}"),
                *("--auth-key", f"{key},{secret}", "--config", os.devnull, str(directory)),
            ],
            log,
        )
        self.uri = f"s3://{BUCKET}/kv"
        self.options: dict[str, Any] = {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": key,
            "secret_access_key": secret,
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }


@contextlib.contextmanager
def object_server(directory: Path) -> Iterator[ObjectServer]:
    """A running object server on `directory`, stopped at the end."""
    server = ObjectServer(directory / "data", directory / "rclone.log")
    try:
        server.start()
        yield server
    finally:
        server.stop()
