"""A real Mooncake Store on the loopback, from its wheel: a master and one process with memory."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.inside import errors

from .servers import Server, free_port

READY_S = 60.0

# Lends memory to the store until its standard input ends.
LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(
    "127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", "127.0.0.1:" + sys.argv[1]
)
print("ready" if code == 0 else f"code {code}", flush=True)
sys.stdin.read()
"""


def binary() -> Path:
    """Where mooncake_master is; skips the test, or module, where it or its library do not work."""
    spec = importlib.util.find_spec("mooncake")
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / "mooncake_master"
        if path.exists():
            check = [sys.executable, "-c", "import mooncake.store"]
            done = subprocess.run(check, capture_output=True, timeout=READY_S, check=False)
            if done.returncode:
                wanted = errors.remedy(errors.missing() or errors.MOONCAKE)
                said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                pytest.skip(f"{said}; as root: {wanted}", allow_module_level=True)
            return path
    wanted = "pip install mooncake-transfer-engine-non-cuda"
    pytest.skip(f"needs mooncake_master: {wanted}", allow_module_level=True)


class MooncakeCluster:
    """A master and a lender of memory.

    Args:
        directory: Where they write what they have to say.
        n_bytes: Memory lent.
        options: More options of the master.
    """

    def __init__(self, directory: Path, n_bytes: int = 64 << 20, *options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log, self._n_bytes, program = directory / "lender.log", n_bytes, str(binary())
        self.master = Server(
            lambda port: [
                *(program, f"--rpc_port={port}", "--rpc_address=127.0.0.1"),
                *(f"--metrics_port={free_port()}", "--metrics_host=127.0.0.1", *options),
            ],
            directory / "master.log",
        )
        self.lender: subprocess.Popen[str] | None = None

    @property
    def uri(self) -> str:
        return f"mooncake://127.0.0.1:{self.master.port}?local=127.0.0.1&buffer=16MiB"

    def start(self) -> None:
        self.master.start()
        self.lend()

    def lend(self) -> None:
        """Starts the lender."""
        with self._log.open("a") as log:
            self.lender = subprocess.Popen(
                [sys.executable, "-c", LENDER, str(self.master.port), str(self._n_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.lender.stdout is not None
        said = self.lender.stdout.readline()
        assert said == "ready\n", said + self._log.read_text()

    def freeze(self) -> None:
        assert self.lender is not None
        self.lender.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.lender is not None
        self.lender.send_signal(signal.SIGCONT)

    def withdraw(self) -> None:
        """Kills the lender."""
        lender, self.lender = self.lender, None
        if lender is not None:
            lender.kill()
            lender.wait(READY_S)
            for pipe in (lender.stdin, lender.stdout):
                if pipe is not None:
                    pipe.close()

    def stop(self) -> None:
        self.withdraw()
        self.master.stop()


@contextmanager
def mooncake_cluster(directory: Path, *options: str) -> Iterator[MooncakeCluster]:
    """A running store, stopped at the end."""
    cluster = MooncakeCluster(directory, 64 << 20, *options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
