"""Stores through a keeper until it is killed: `python -m tests.connect.victim`.

A server that has everything loaded: for each line "DIRECTORY SEED" it forks a victim, and says
"dead" once that was killed. The victim says "pid n", "+ n" once frame n is stored, and "- n" before
it is given up.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable

from flowkv.connect import Keeper
from flowkv.policy import make_policy
from flowkv.tiers import Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.tiers.frames import answers, body_of, info_of, key_of
from tests.tiers.victim import CAPACITY_BYTES, say, serve, size_of

NAMES = 120


NUMBERS = {key_of(name): name for name in range(NAMES)}


class TellingDisk(DiskTier):
    def delete(self, keys: Iterable[bytes]) -> int:
        for key in keys:
            say("-", NUMBERS[key])
        return super().delete(list(keys))


def suffer(directory: str, seed: int, turns: int = 1 << 30) -> None:
    rng = random.Random(seed)
    with Keeper([TellingDisk(directory, CAPACITY_BYTES)], lambda *_: make_policy("lru")) as keeper:
        say("=", 0)
        caller = keeper.caller()
        for _ in range(turns):
            names = [rng.randrange(NAMES) for _ in range(rng.randrange(1, 6))]
            items = [
                Store(
                    key_of(name),
                    info_of(size_of(name), parent=key_of(name - 7)),
                    memoryview(body_of(name, size_of(name))),
                )
                for name in names
            ]
            for answer in answers(caller, caller.submit_store(items), len(items)):
                assert answer.outcome is Outcome.STORED, answer
                say("+", NUMBERS[answer.key])


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:  # loads what victims would load
        out, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        suffer(os.path.join(directory, "kv"), 0, 60)
        os.dup2(out, 1)
    serve(suffer)


if __name__ == "__main__":
    main()
