"""F2: the machine stops at any moment, and comes back with any part of what was not synced.

Others fill and empty the same disk meanwhile, and frames are confirmed by the dozen: so a write of
the journal ends in the middle of its pages, and later ones succeed.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from flowkv.tiers import Completion, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import COMPLETION, SYNC, Arena, Buffer, Operations
from tests.inside import engine_Completions as Completions

from .crashing import BLOCK_BYTES, MemoryFiles
from .files_engine import FilesEngine, tier_over
from .frames import LAYOUT, body_of, info_of, key_of

SMALL = 512 << 10
NAMES = 60
PLACE = "/crash/kv"
BODIES = [body_of(name, 3000 if name % 12 else 20_480) for name in range(NAMES)]
KEYS = [key_of(name) for name in range(NAMES)]
INFOS = [info_of(len(body)) for body in BODIES]
STEPS = 60
POINTS_PER_RUN = 100


class Together(FilesEngine):
    """Says nothing until somebody waits: then all that was asked for is done at once."""

    def wait(self, timeout_s: float = 0.0) -> Completions:
        waits = timeout_s > 0
        return super().wait(timeout_s) if waits else np.empty(0, COMPLETION)


class Machine:
    """A machine with a tier that is kept busy, and loses power again and again."""

    def __init__(self, seed: int, *, durable: bool) -> None:
        self.rng, self.durable = random.Random(seed), durable
        self.durability = "sync" if durable else "none"
        self.arena = Arena(1 << 20)
        self.targets = [memoryview(bytearray(len(body))) for body in BODIES]
        self.points = self.found = self.before = self.failed = 0

    def open(self, files: MemoryFiles) -> DiskTier:
        return DiskTier(
            PLACE,
            SMALL,
            files=files,
            engine=Together(files),
            threads=0,
            arena=self.arena,
            durability=self.durability,  # type: ignore[arg-type]
        )

    def run(self, points: int) -> None:
        """Random stores and deletions, so many that slots are reused, and power losses."""
        end = self.points + points
        while self.points < end:
            files = MemoryFiles()
            self.acknowledged: set[int] = set()
            tier = self.open(files)
            budget = min(POINTS_PER_RUN, end - self.points)
            chance = 0.25

            def lose_power(files: MemoryFiles = files, chance: float = chance) -> None:
                nonlocal budget
                if budget > 0 and self.rng.random() < chance:
                    budget -= 1
                    self.come_back(files.crash(self.rng))

            files.on_change = lose_power
            for _ in range(STEPS):
                if self.rng.random() < 0.3:
                    self.crowd(files, (1 << 28, 0))
                    self.delete(tier, self.some())
                    self.crowd(files, (1, 1, 2))
                self.store(tier, self.some())
                self.crowd(files, (0, 1, 2, 8, 1 << 28))
            files.on_change = lambda: None
            tier.close()
            files.space_bytes = 1 << 40
            self.come_back(files, safe=True)

    def crowd(self, files: MemoryFiles, left: Sequence[int]) -> None:
        """Somebody else takes what is left of the disk but for some blocks, or gives it back."""
        if self.rng.random() < 0.6:
            files.space_bytes = files.used_bytes() + BLOCK_BYTES * self.rng.choice(left)

    def store(self, tier: DiskTier, names: list[int]) -> None:
        items = [Store(KEYS[n], INFOS[n], memoryview(BODIES[n])) for n in names]
        tier.submit_store(items)
        reasons = Counter[str]()
        for answer in self.answers(tier, len(items)):
            reasons[answer.reason] += 1
            if answer.outcome is Outcome.STORED:
                self.acknowledged.add(KEYS.index(answer.key))
        assert set(reasons) <= {"", "full", "ENOSPC"}
        self.failed += reasons["ENOSPC"]
        oldest = [KEYS.index(entry.key) for entry in tier.scan()]
        self.delete(tier, oldest[: reasons["full"]])

    def some(self) -> list[int]:
        """One frame or two, or as many as go into several pages of the journal."""
        return self.rng.sample(range(NAMES), self.rng.choice((1, 1, 1, 2, 4, 30, NAMES)))

    def delete(self, tier: DiskTier, names: list[int]) -> None:
        self.acknowledged.difference_update(names)
        tier.delete([KEYS[name] for name in names])

    def answers(self, tier: DiskTier, count: int) -> list[Completion]:
        done: list[Completion] = []
        while len(done) < count:
            done += tier.poll(1.0)
        return done

    def come_back(self, files: MemoryFiles, *, safe: bool = False) -> None:
        """Opens what is left: every frame found is right, and nothing that was safe is lost."""
        self.points += 1
        tier = self.open(files)
        hits = self.hits(tier)
        assert tier.used_bytes() <= SMALL
        if self.durable or safe:
            assert self.acknowledged <= hits, "lost what the device had confirmed"
        if self.points % 16 == 0:
            self.go_on(tier, hits)
        tier.close()
        self.found, self.before = self.found + len(hits), self.before + len(self.acknowledged)

    def hits(self, tier: DiskTier) -> set[int]:
        """Which frames are verified hits; their bytes must be right."""
        there = tier.contains(KEYS)
        names = [name for name in range(NAMES) if there[name]]
        tier.submit_load([Load(KEYS[name], self.targets[name], LAYOUT) for name in names])
        hits = set()
        for answer in self.answers(tier, len(names)):
            if answer.outcome is not Outcome.HIT:
                assert answer.reason, answer
                continue
            name = names[answer.item]
            assert self.targets[name] == BODIES[name], "WRONG BYTES"
            hits.add(name)
        return hits

    def go_on(self, tier: DiskTier, hits: set[int]) -> None:
        """Life after the crash: what is stored now is found, and so is what was there."""
        name = self.rng.randrange(NAMES)
        tier.submit_store([Store(KEYS[name], INFOS[name], memoryview(BODIES[name]))])
        (answer,) = self.answers(tier, 1)
        if answer.outcome is Outcome.STORED:
            hits = hits | {name}
        assert hits <= self.hits(tier)


def power_losses(points: int, seed: int, *, durable: bool) -> Machine:
    """A machine after at least so many power losses."""
    machine = Machine(seed, durable=durable)
    machine.run(points)
    assert machine.points >= points
    assert machine.found > machine.before / 4
    assert machine.failed > machine.points / 4, "the disk was hardly ever full"
    return machine


class Unsynced(FilesEngine):
    """Keeps syncs to itself until `fail`, or until writes come, if they are `failing`."""

    syncs: tuple[int, ...] = ()
    failing = False

    def submit(self, operations: Operations) -> None:
        self.syncs += tuple(operations[operations["op"] == SYNC]["tag"].tolist())
        super().submit(operations[operations["op"] != SYNC])
        if self.failing and (operations["op"] != SYNC).any():
            self.fail()

    def fail(self) -> None:
        failed, self.syncs = self.syncs, ()
        self._reports.post([(tag, -errno.EIO) for tag in failed])


@pytest.mark.parametrize("at_once", [False, True])
def test_F2_a_failed_sync_is_that_of_every_write_before_it(at_once: bool) -> None:
    """The kernel drops what it could not write, and the next sync of the file succeeds."""
    files = MemoryFiles()
    engine = Unsynced(files)
    tier = DiskTier(PLACE, SMALL, files=files, engine=engine, threads=0, durability="sync")
    for name in (0, 1):
        tier.submit_store([Store(KEYS[name], INFOS[name], memoryview(BODIES[name]))])
        if not engine.failing:
            assert tier.poll() == []
        engine.failing = at_once
    if not at_once:
        engine.fail()
    found = {(answer.key, answer.reason) for answer in tier.poll()}
    assert found == {(KEYS[0], "EIO"), (KEYS[1], "EIO")}
    assert tier.contains(KEYS[:2]) == [False, False]


class Ordered(MemoryFiles):
    """Notes what happens to the journal."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._watch(fd, "write")
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._watch(fd, "sync")
        super().sync(fd)

    def _watch(self, fd: int, what: str) -> None:
        if self._open[fd] is self.files.get(f"{PLACE}/journal"):
            self.order.append(what)


def test_F2_deletions_reach_the_device_before_what_took_their_place() -> None:
    files = Ordered()
    tier = tier_over(files, PLACE, SMALL, threads=0, durability="sync")
    for name, order in ((0, ["write", "sync"]), (1, ["sync", "write", "sync"])):
        files.order.clear()
        tier.submit_store([Store(KEYS[name], INFOS[name], memoryview(BODIES[name]))])
        assert [answer.outcome for answer in tier.poll()] == [Outcome.STORED]
        assert files.order == order
        assert tier.delete([KEYS[name]]) == 1


@pytest.mark.parametrize("durable", [False, True])
def test_F2_power_loss(durable: bool) -> None:
    power_losses(5000, 11, durable=durable)


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("durable", [False, True])
def test_F2_power_loss_deep(durable: bool) -> None:
    power_losses(500_000, 12, durable=durable)


def test_F2_what_a_killed_process_left_is_safe_before_it_is_confirmed_again() -> None:
    """A durable tier confirms a frame that is there already; so what it finds must be synced."""
    files, careless = MemoryFiles(), Machine(0, durable=False)
    names = range(4)
    stores = [Store(KEYS[n], INFOS[n], memoryview(BODIES[n])) for n in names]
    before = careless.open(files)
    before.submit_store(stores)
    assert {answer.outcome for answer in careless.answers(before, len(stores))} == {Outcome.STORED}

    machine = Machine(1, durable=True)
    files = files.copy()  # after `kill -9`: everything, and nothing safer than before
    tier = machine.open(files)
    tier.submit_store(stores)
    assert {answer.outcome for answer in machine.answers(tier, len(stores))} == {Outcome.STORED}
    machine.acknowledged = set(names)
    for _ in range(40):
        machine.come_back(files.crash(machine.rng))


def test_F10_a_store_on_a_full_disk_opens_and_is_read() -> None:
    files, machine = MemoryFiles(), Machine(0, durable=False)
    tier = machine.open(files)
    tier.submit_store([Store(KEYS[0], INFOS[0], memoryview(BODIES[0]))])
    assert {answer.outcome for answer in machine.answers(tier, 1)} == {Outcome.STORED}
    full = files.copy()
    full.troubles["enospc"] = 1.0
    again = machine.open(full)
    assert machine.hits(again) == {0}
    again.close()
