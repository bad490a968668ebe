"""Processes on one shared tier: `python -m tests.tiers.sharer COMMAND DIRECTORY ...`.

Prints what the tests look at as one line of JSON. Peers are forked, which costs milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from numba import njit

from flowkv.tiers import Outcome
from flowkv.tiers.shared import SharedTier
from tests.inside import StoreError, table

from .frames import get, hits, key_of, outcomes, put

CAPACITY_BYTES = 1 << 20
NAMES = 40
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def size_of(name: int) -> int:
    return (9000, 20_000, 4096, 30_000)[name % 4]


def start(directory: str, name: str = "test", capacity_bytes: int = CAPACITY_BYTES) -> SharedTier:
    return SharedTier(name, capacity_bytes, directory=directory)


def audit(tier: SharedTier) -> None:
    """Index, chains, free list and counters agree."""
    memory = tier._current()
    counters, index, links = memory.arrays
    assert not counters[table.VERSION] & 1
    assert table.audit(memory.fd, memory.arrays) == 0
    grown = table.grown_of(memory.arrays)
    owners: dict[int, int] = {}

    def walk(first: int, count: int, owner: int) -> None:
        granule = first
        for _ in range(count):
            assert 0 <= granule < grown, owner
            assert granule not in owners, f"{owner} and {owners.get(granule)}"
            owners[granule] = owner
            granule = int(table.follow(links, granule, owner))
        assert granule >= 0

    rows = index[index[:, 4] != 0]
    for row in rows:
        walk(int(row[5]), -(-int(row[6]) // table.GRANULE), int(row[4]))
        assert tier.contains([row[:4].tobytes()]) == [True]
        assert row[7] == table.check_of(row)
    assert len(owners) == counters[table.USED]
    walk(int(counters[table.FREE]), int(grown - counters[table.USED]), 0)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


@contextmanager
def peer(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that works; killed in the end."""
    pid = os.fork()
    if not pid:
        try:
            die_with_parent()
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---- killed while it stores, deletes, erases


def victim(directory: str, seed: int, pipe: int) -> None:
    """Says "+ n" once frame n is stored, and "- n" before it is deleted."""
    rng, tier = random.Random(seed), start(directory)
    while True:
        name = rng.randrange(NAMES)
        if rng.random() < 0.6:
            done = put(tier, [name], size_of(name))
            if done[0].outcome is Outcome.STORED:
                os.write(pipe, b"+ %d\n" % name)
        else:
            os.write(pipe, b"- %d\n" % name)
            (tier.delete if rng.random() < 0.5 else tier.erase)([key_of(name)])


@njit(cache=True, nogil=True)
def hammer(fd, arrays, seat, seed, rounds):  # type: ignore[no-untyped-def]
    """Changes as fast as it can, so that a kill nearly always lands within one."""
    np.random.seed(seed)
    key, out = np.zeros(4, np.int64), np.zeros(8, np.int64)
    for _ in range(rounds):
        key[0] = np.random.randint(0, 30)
        key[1:] = key[0]
        action = np.random.randint(0, 4)
        if action == 0:
            table.withdraw(fd, arrays, key, 0, 0, out)
        elif action == 1:
            if table.withdraw(fd, arrays, key, 0, seat, out) == 0:
                table.withdraw(fd, arrays, out.copy(), out[4], 0, out)
        else:
            answer = table.claim(fd, arrays, key, seat, np.random.randint(4097, 80_000), out)
            if answer == table.GROW:
                table.grow(fd, arrays, len(arrays[2]))
            elif answer == 0:
                table.commit(fd, arrays, out, key)


def kills(directory: str, points: int, seed: int) -> dict[str, int]:
    """A survivor beside victims that are killed at random moments."""
    rng, tier, checked, said = random.Random(seed), start(directory), 0, 0
    hits(tier, [0])
    for point in range(points):
        read, write = os.pipe()
        before = {name for name in range(NAMES) if hits(tier, [name], size_of(name))}
        with peer(lambda point=point, write=write: victim(directory, point, write)):
            os.close(write)
            told = [os.read(read, 1 << 12) for _ in range(rng.randrange(1, 12))]
            time.sleep(rng.uniform(0, 0.002))
        with os.fdopen(read, "rb") as rest:  # all of it: the victim is dead
            told.append(rest.read())
        for line in b"".join(told).splitlines():
            sign, name = line.split()
            (before.add if sign == b"+" else before.discard)(int(name))
            said += 1
        tier.contains([])  # whatever was left in the middle is repaired now
        tier._bury(tier._memory)
        audit(tier)
        there = {name for name in range(NAMES) if hits(tier, [name], size_of(name))}
        assert before <= there, f"lost {sorted(before - there)} at point {point}"
        assert {entry.key for entry in tier.scan()} >= {key_of(name) for name in there}
        tier.delete([key_of(name) for name in rng.sample(sorted(there), len(there) // 2)])
        checked += len(there)
    assert tier.corrupt == 0
    return {"checked": checked, "said": said} | mends(tier)


def mends(tier: SharedTier) -> dict[str, int]:
    return {"repairs": int(tier._memory.arrays[0][table.REPAIRS]), "renewed": tier.renewed}


def repairs(directory: str, points: int, seed: int) -> dict[str, int]:
    """A survivor beside hammers that are killed, nearly always in the middle of a change."""
    rng, tier = random.Random(seed), start(directory)
    stored = put(tier, ["mine"])[0].outcome is Outcome.STORED
    assert stored

    def hit_it(name: str, seed: int, rounds: int) -> None:
        memory = start(directory, name)._memory
        os.write(write, b"!")
        hammer(memory.fd, memory.arrays, memory.seat, seed, rounds)

    read, write = os.pipe()
    hit_it("warm", 0, 10)  # compiles, if need be, before the clock runs
    os.read(read, 1)

    for point in range(points):
        with peer(lambda point=point: hit_it("test", point, 1 << 40)):
            os.read(read, 1)
            time.sleep(rng.uniform(0.001, 0.004))
        assert table.settle(tier._memory.fd, tier._memory.arrays, -1) == 0
        tier._bury(tier._memory)
        audit(tier)
        if not hits(tier, ["mine"]):
            return {"point": point, "lost": 1}
        put(tier, [point % 5])
    return {"lost": 0} | mends(tier)


# ---- stopped while it holds the lock


def stopped(directory: str) -> dict[str, object]:
    """What a survivor is answered beside a stopped peer, and after that peer is killed."""
    tier, found = start(directory), dict[str, object]()
    put(tier, ["a", "b"])

    def freeze() -> None:
        memory = start(directory)._memory
        fcntl.flock(memory.fd, fcntl.LOCK_EX)
        memory.arrays[0][table.VERSION] += 1  # in the middle of a change
        os.kill(os.getpid(), signal.SIGSTOP)

    with peer(freeze) as pid:
        os.waitpid(pid, os.WUNTRACED)
        begun = time.monotonic()
        found["load"] = outcomes(get(tier, ["a"]))
        found["store"] = outcomes(put(tier, ["c"]))
        first = time.monotonic()
        found["again"] = outcomes(put(tier, ["c", "d", "e"]))
        found["deleted"] = tier.delete([key_of("b")])
        try:
            tier.erase([key_of("b")])
        except StoreError as error:
            found["erase"] = error.problem
        found["opened"] = hits(start(directory), ["a", "b"])
        found["first_s"], found["rest_s"] = first - begun, time.monotonic() - first
    found["after"] = outcomes(put(tier, ["c"]))
    found["hits"] = hits(tier, ["a", "b", "c"])
    audit(tier)
    return found


# ---- a table that is thrown away


def leave(directory: str, rounds: int) -> dict[str, object]:
    """Peers that all find out, at the same time, that the table contradicts itself.

    Each stores a frame in whatever it goes to then. If two of them made a new table, some of these
    frames would be in the one that nobody else has.
    """
    peers, seen = 4, list[list[str]]()
    step = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)

    def work(number: int) -> None:
        tier = start(directory)
        step[number] = -1  # it has the table that is about to be damaged
        for turn in range(1, rounds + 1):
            while step[0] < turn:
                time.sleep(0)
            while hits(tier, [number]):  # of the last turn
                tier.delete([key_of("nobody")])  # looks at the table under its lock
            while not hits(tier, [number]):
                put(tier, [number])
            assert tier.renewed == turn
            step[number] = turn
        time.sleep(60)

    tier = start(directory)
    put(tier, ["warm", *range(1, peers + 1)])
    hits(tier, ["warm"])
    with ExitStack() as running:
        for number in range(1, peers + 1):
            running.enter_context(peer(lambda number=number: work(number)))
        while (step[1 : peers + 1] != -1).any():
            time.sleep(0.001)
        for turn in range(1, rounds + 1):
            damage(tier, turn)
            step[0] = turn
            end_s = time.monotonic() + 60
            while (step[1 : peers + 1] < turn).any():
                assert time.monotonic() < end_s, f"turn {turn}: {step[: peers + 1].tolist()}"
                time.sleep(0.001)
            known = {key_of(n): str(n) for n in ["warm", *range(1, peers + 1)]}
            seen.append(sorted(known[entry.key] for entry in tier.scan()))
            audit(tier)
    return {"seen": seen, "renewed": tier.renewed, "left": os.listdir(directory)}


def damage(tier: SharedTier, turn: int) -> None:
    """Makes the table contradict itself, in one of the places where the next store looks."""
    memory = tier._current()
    counters, index, links = memory.arrays
    place = turn % 6
    if place == 0:
        counters[table.USED] -= 1
    elif place == 1:
        counters[table.GROWN] += 1
    elif place == 2:
        index[index[:, 4] != 0, 5] += 1
    elif place == 3:
        links[:] ^= 1
    elif place == 4:
        counters[:] = 0
    else:
        counters[table.FREE] = -1


# ---- both ends at work


def exchange(directory: str, rounds: int) -> dict[str, int]:
    """Two processes store and load the same names all the time; what comes is right, or nothing."""

    def work(tier: SharedTier, seed: int) -> int:
        rng, good = random.Random(seed), 0
        for _ in range(rounds):
            name = rng.randrange(NAMES)
            if rng.random() < 0.4:
                put(tier, [name], size_of(name))
            elif rng.random() < 0.3:
                (tier.delete if rng.random() < 0.7 else tier.erase)([key_of(name)])
            good += hits(tier, [name], size_of(name))
        return good

    tier = start(directory)
    read, write = os.pipe()
    with peer(lambda: os.write(write, b"%d" % work(start(directory), 1)) and None):
        mine = work(tier, 2)
        theirs = int(os.read(read, 100))
    audit(tier)
    return {"mine": mine, "theirs": theirs, "corrupt": tier.corrupt}


if __name__ == "__main__":
    command, directory, *rest = sys.argv[1:]
    print(json.dumps(globals()[command](directory, *map(int, rest))))
