"""Processes with a cache each, over one place: `python -m tests.cache.peer SOCKET`.

It forks one for each connection, once it has loaded what takes seconds. A peer is told what to do
by lines of JSON and answers each with the operations that it witnessed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from flowkv import KV
from flowkv.tiers.shared import SharedTier
from tests.cache.fakes import Wrapped
from tests.cache.histories import NEVER, Operation, Witness, pages_of
from tests.cache.toy import make_kv, simple
from tests.inside import ErasureLog, StoreError

PATIENCE_S = 0.3
"""Of who erases, for those who are stopped."""


def cache_over(place: str, directory: str, *, private: bool) -> KV:
    """A cache over a place that others use, with or without memory of its own before it.

    Args:
        place: "disk", "host" (pages go there when the device gives them up), or "pool" (at once).
        directory: Where it lies.
        private: Whether there is a host tier before it.
    """
    tier: Any = f"disk:{directory}/kv:8MiB"
    if place != "disk":
        memory = SharedTier("peers", 2 << 20, directory=directory)
        tier = Wrapped(memory, kind="disk") if place == "pool" else memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a directory that others own
        return make_kv(simple(), pages=16, tiers=["host:256KiB", tier] if private else [tier])


def evict(kv: KV) -> None:
    """Has the device give up what nobody uses."""
    with kv.lock:
        store = kv.planner.store
        for block in list(store.index):
            if block.page >= 0 and not (block.holds or block.kept):
                store.device_places[store.devices[block.group]].remove(block)
                store.eviction.leave([block], "space")


def act(kv: KV, witness: Witness, action: str, name: str) -> None:
    """Does one thing; what an erasure that failed did is not known."""
    try:
        if action == "ask":
            witness.ask(kv, name)
        elif action == "forget":
            witness.forget(kv, name)
        elif action == "invalidate":
            witness.invalidate(kv)
        elif action == "evict":
            evict(kv)
        else:
            kv.flush(5.0)
    except StoreError:
        assert action in ("forget", "invalidate")


def serve(channel: socket.socket) -> None:
    lines, answers = channel.makefile("r"), channel.makefile("w")
    told = json.loads(lines.readline())
    kv, witness = cache_over(**told), Witness()
    for line in lines:
        action, name, value = json.loads(line)
        witness.history.clear()
        witness.numbers = count(value)
        act(kv, witness, action, name)
        done = [asdict(one) | {"pages": sorted(one.pages)} for one in witness.history]
        answers.write(json.dumps(done) + "\n")
        answers.flush()


def main(path: str) -> None:
    ErasureLog.__init__.__kwdefaults__["patience_s"] = PATIENCE_S
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    while True:
        channel, _ = listener.accept()
        if not os.fork():
            listener.close()
            channel.sendall(os.getpid().to_bytes(4, "little"))
            try:
                serve(channel)
            finally:
                os._exit(0)
        channel.close()


# ---- from the other side


class Nursery:
    """Where peers come from."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "nursery")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cache.peer", self.path], stdout=subprocess.PIPE
        )
        assert self._process.stdout and self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Peer:
    """One of them; it is told things and asked for its answers later."""

    def __init__(self, nursery: Nursery, who: str, **told: Any) -> None:
        self.who, self._channel = who, socket.socket(socket.AF_UNIX)
        self._channel.settimeout(60.0)
        self._channel.connect(nursery.path)
        self.pid = int.from_bytes(self._channel.recv(4, socket.MSG_WAITALL), "little")
        self._lines = self._channel.makefile("r")
        self._say(told)
        self._killed = False
        self._asked: list[list[Operation]] = []

    def _say(self, what: object) -> None:
        self._channel.sendall(f"{json.dumps(what)}\n".encode())

    def tell(self, action: str, name: str, value: int) -> None:
        pages = pages_of(name) if action == "ask" else ()
        said = value, time.monotonic(), NEVER, self.who
        self._asked.append([Operation("write", frozenset([page]), *said) for page in pages])
        self._say((action, name, value))

    def answers(self) -> list[Operation]:
        """What came of all that it was told; of what it did not end, what it may have written."""
        found: list[Operation] = []
        for fresh in self._asked:
            try:
                line = self._lines.readline()
            except OSError:
                line = ""
            if not line:
                assert self._killed, "it died, or hangs"
                found += fresh
                continue
            for one in json.loads(line):
                pages = frozenset(tuple(page) for page in one.pop("pages"))
                found.append(Operation(**one | {"pages": pages, "who": self.who}))
        self._asked = []
        return found

    def signal(self, number: signal.Signals) -> None:
        self._killed |= number == signal.SIGKILL
        with suppress(ProcessLookupError):  # the nursery waits for none of them
            os.kill(self.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._lines.close()
        self._channel.close()


if __name__ == "__main__":
    main(sys.argv[1])
