"""Random damage to shared memory in use: `python -m tests.tiers.hunter DIRECTORY POINTS SEED`.

Peers store, load, delete and erase in processes of their own, while words, bits and pages of the
file change under them. Prints one line of JSON: how many peers crashed, hung or erred. Every loaded
byte is compared with what was stored.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from tests.inside import INDEX_AT, FileLayout, StoreError, file_name

from .frames import hits, key_of, put
from .sharer import NAMES, die_with_parent, size_of, start

PEERS = 2
ROUNDS = 8  # of every peer between two damages
HUNG_S = 60.0
DONE, HITS, INODES = 0, 1, 2  # words of a peer's diary
_PAGE = 4096


def peer(directory: str, seed: int, diary: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    """Works for ever; says in its diary how far it came."""
    rng, tier, known = random.Random(seed), start(directory), {key_of(n) for n in range(NAMES)}
    while True:
        name, action = rng.randrange(NAMES), rng.random()
        if action < 0.45:
            put(tier, [name], size_of(name))
        elif action < 0.55:
            (tier.delete if action < 0.5 else _erase(tier))([key_of(name)])
        elif action < 0.6:
            assert {entry.key for entry in tier.scan()} <= known
            tier.contains([key_of(name)])
            assert 0 <= tier.used_bytes() <= tier.capacity_bytes
        elif action < 0.62:
            tier.close()
            tier = start(directory)
        diary[HITS] += hits(tier, [name], size_of(name))
        diary[DONE] += 1


def _erase(tier):  # type: ignore[no-untyped-def]
    def erase(keys):  # type: ignore[no-untyped-def]
        try:
            tier.erase(keys)
        except StoreError as error:
            assert "cannot be changed" in error.problem

    return erase


def places(plan: FileLayout) -> dict[str, tuple[int, int]]:
    """Parts of the file: where they begin and end."""
    return {
        "superblock": (0, 64),
        "counters": (512, 1024),
        "index": (INDEX_AT, plan.links_at),
        "links": (plan.links_at, plan.arena_at),
        "arena": (plan.arena_at, plan.file_bytes),
        "anywhere": (0, plan.file_bytes),
    }


def damage(fd: int, plan: FileLayout, rng: random.Random) -> str:
    """Changes bytes of the file; returns what was done."""
    part, (begin, end) = rng.choice(list(places(plan).items()))
    kind = rng.choice(("words", "small words", "bit", "swap", "zeros", "ones", "page"))

    def word() -> int:
        return rng.randrange(begin, end - 7) & ~7

    if kind in ("words", "small words"):
        for _ in range(rng.choice((1, 1, 4, 60))):
            value = rng.getrandbits(64 if kind == "words" else 9)
            os.pwrite(fd, value.to_bytes(8, "little"), word())
    elif kind == "bit":
        at = rng.randrange(begin, end)
        old = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([old ^ 1 << rng.randrange(8)]), at)
    elif kind == "swap":
        one, other = word(), word()
        left, right = os.pread(fd, 8, one), os.pread(fd, 8, other)
        os.pwrite(fd, right, one)
        os.pwrite(fd, left, other)
    else:
        at = max(begin, rng.randrange(begin, end) & ~(_PAGE - 1))
        size = min(_PAGE, end - at)
        source = max(begin, rng.randrange(begin, end - size + 1) & ~7)
        old = os.pread(fd, size, source)
        data = {"zeros": bytes(size), "ones": b"\xff" * size, "page": old}[kind]
        os.pwrite(fd, data, at)
    return f"{kind} in {part}"


class Watched:
    """One peer, started again when it ended."""

    def __init__(self, directory: str, number: int, diary: np.ndarray) -> None:  # type: ignore[type-arg]
        self.directory, self.number, self.diary, self.starts = directory, number, diary, 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                die_with_parent()
                peer(self.directory, 1000 * self.number + self.starts, self.diary)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def wait(self, until: int, end_s: float) -> str:
        """Until it did so much; "", or how it ended instead."""
        while self.diary[DONE] < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.start()
                return "crashed" if os.WIFSIGNALED(status) else "erred"
            if time.monotonic() > end_s:
                self.kill()
                self.start()
                return "hung"
            time.sleep(0.0005)
        return ""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def hunt(directory: str, points: int, seed: int) -> dict[str, object]:
    rng, found, blame = random.Random(seed), {"crashed": 0, "hung": 0, "erred": 0}, list[str]()
    path, tier = Path(directory) / file_name("test"), start(directory)
    plan = tier._memory.plan
    put(tier, [0], size_of(0))  # compiles, if need be, before anybody waits
    hits(tier, [0], size_of(0))
    list(tier.scan())
    tier.erase([key_of(0)])
    tier.close()
    diaries = np.frombuffer(mmap.mmap(-1, _PAGE), np.int64).reshape(-1, 8)
    peers = [Watched(directory, number, diaries[number]) for number in range(PEERS)]
    inodes = set[int]()
    for _ in range(points):
        goals = [int(watched.diary[DONE]) + ROUNDS for watched in peers]
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:  # somebody is making it anew just now
            what = "nothing"
        else:
            inodes.add(os.fstat(fd).st_ino)
            what = damage(fd, plan, rng) if os.fstat(fd).st_size >= plan.file_bytes else "nothing"
            os.close(fd)
        end_s = time.monotonic() + HUNG_S
        for watched, goal in zip(peers, goals, strict=True):
            if how := watched.wait(goal, end_s):
                found[how] += 1
                blame.append(f"{how}: {what}")
    for watched in peers:
        watched.kill()
    loaded = int(diaries[:, HITS].sum())
    return found | {"points": points, "hits": loaded, "files": len(inodes), "blame": blame[:20]}


if __name__ == "__main__":
    print(json.dumps(hunt(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
