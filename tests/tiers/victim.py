"""Stores and deletes frames until it is killed: `python -m tests.tiers.victim`.

A server that has everything loaded: for each line "DIRECTORY SEED" it forks a victim, and says
"dead" once that was killed. The victim says "pid n", "+ n" once frame n is stored, and "- n" before
it is deleted. Each kind of engine has its turn.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile

from flowkv.tiers import Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import ThreadsEngine, open_engine

from .frames import answers, body_of, hits, info_of, key_of, stored

CAPACITY_BYTES = 1 << 20
NAMES = 90


def size_of(name: int) -> int:
    return (9000, 20_000, 4096, 30_000)[name % 4]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # small: all or nothing


def suffer(directory: str, seed: int) -> None:
    say("pid", os.getpid())
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


def main() -> None:
    warm_up()
    for line in sys.stdin:
        directory, seed = line.split()
        child = os.fork()
        if child == 0:
            try:
                suffer(directory, int(seed))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("dead", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
