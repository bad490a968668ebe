"""Stores and deletes frames until it is killed: `python -m tests.tiers.victim DIRECTORY SEED`.

Prints "+ n" once frame n is stored, and "- n" before it is deleted.
"""

from __future__ import annotations

import os
import random
import sys

from flowkv.tiers.base import Outcome, Store
from flowkv.tiers.disk import DiskTier

from .frames import answers, body_of, info_of, key_of

CAPACITY_BYTES = 1 << 20
NAMES = 90


def size_of(name: int) -> int:
    return (9000, 20_000, 4096, 30_000)[name % 4]


def say(sign: str, name: int) -> None:
    os.write(1, f"{sign} {name}\n".encode())  # one small write to a pipe is all or nothing


def main(directory: str, seed: int) -> None:
    rng, tier = random.Random(seed), DiskTier(directory, CAPACITY_BYTES)
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
