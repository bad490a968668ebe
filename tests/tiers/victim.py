"""Stores and deletes frames until it is killed: `python -m tests.tiers.victim`.

A server that has everything loaded: for each line "DIRECTORY SEED" it forks a victim, and says
"dead" once that was killed. The victim says "pid n", "+ n" once frame n is stored, and "- n" before
it is deleted. Each kind of engine has its turn.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowkv.tiers import Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import ThreadsEngine, open_engine

from .frames import LAYOUT, answers, body_of, hits, info_of, key_of, stored

CAPACITY_BYTES = 1 << 20
NAMES = 90


def size_of(name: int) -> int:
    return (9000, 20_000, 4096, 30_000)[name % 4]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # small: all or nothing


def suffer(directory: str, seed: int) -> None:
    rng = random.Random(seed)
    best = open_engine(directory=os.path.dirname(directory))
    engine = (best, ThreadsEngine(), ThreadsEngine(direct=False))[seed % 3]
    tier = DiskTier(directory, CAPACITY_BYTES, engine=engine)
    assert tier.writable
    numbers = {key_of(name): name for name in range(NAMES)}
    say("=", 0)
    while True:
        names = [rng.randrange(NAMES) for _ in range(rng.randrange(1, 6))]
        items = [
            Store(key_of(name), info_of(size_of(name)), memoryview(body_of(name, size_of(name))))
            for name in names
        ]
        done = answers(tier, tier.submit_store(items), len(items))
        for answer in done:
            if answer.outcome is Outcome.STORED:
                say("+", numbers[answer.key])
        if any(answer.outcome is not Outcome.STORED for answer in done):
            assert {answer.reason for answer in done} <= {"", "full"}, done
            for entry in list(tier.scan())[:6]:
                say("-", numbers[entry.key])
                tier.delete([entry.key])


def warm_up() -> None:
    """Loads what victims would load, so that they can be born quickly."""
    with tempfile.TemporaryDirectory() as directory:
        tier = DiskTier(os.path.join(directory, "kv"), CAPACITY_BYTES)
        stored(tier, [0])
        assert hits(tier, [0]) == 1
        tier.close()


def serve(suffer: Callable[[str, int], None]) -> None:
    """Forks a victim for each line, and says how it died."""
    for line in sys.stdin:
        directory, seed = line.split()
        child = os.fork()
        if child == 0:
            try:
                say("pid", os.getpid())
                suffer(directory, int(seed))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("dead", os.waitstatus_to_exitcode(status))


def kill_once(
    server: subprocess.Popen[bytes], directory: Path, seed: int, after_s: float, there: set[int]
) -> int:
    """Lets a victim run for a while; how many lines it said.

    Args:
        server: One that serves.
        directory: Where the victim stores.
        seed: Of what it does.
        after_s: When it dies, after it has begun.
        there: The frames that must be there then, brought up to date.
    """
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{directory} {seed}\n".encode())
    server.stdin.flush()
    word, pid = server.stdout.readline().split()
    assert word == b"pid"
    assert server.stdout.readline() == b"= 0\n"
    killer = threading.Timer(after_s, os.kill, (int(pid), signal.SIGKILL))
    killer.start()
    said = 0
    while True:
        sign, name = server.stdout.readline().split()
        if sign == b"dead":
            assert int(name) == -signal.SIGKILL, "the victim died of something else"
            killer.join()
            return said
        said += 1
        (there.add if sign == b"+" else there.discard)(int(name))


@contextmanager
def forking(module: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server of victims once: loading a program takes longer than a victim lives."""
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()  # a victim that is left over dies of the broken pipe


def found(tier: Any, count: int) -> set[int]:
    """Names that are verified hits; their bytes must be right, and all must be answered."""
    targets = [bytearray(size_of(name)) for name in range(count)]
    items = [Load(key_of(name), memoryview(target), LAYOUT) for name, target in enumerate(targets)]
    there = set()
    for answer in answers(tier, tier.submit_load(items), count):
        assert (answer.outcome, answer.reason) in ((Outcome.HIT, ""), (Outcome.MISS, ""))
        if answer.outcome is Outcome.HIT:
            assert targets[answer.item] == body_of(answer.item, size_of(answer.item)), "WRONG BYTES"
            there.add(answer.item)
    return there


if __name__ == "__main__":
    warm_up()
    serve(suffer)
