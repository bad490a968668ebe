"""A stack of tiers, simulated: one thread, one clock, one seed, all that can go wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from flowkv.core.clock import ManualClock
from flowkv.core.errors import StoreError
from flowkv.core.layout import GRANULE_BYTES
from flowkv.testing.simulation.disk import SimulatedFiles
from flowkv.testing.simulation.engine import SimulatedEngine
from flowkv.testing.simulation.place import Place
from flowkv.testing.simulation.stack import FRAMES, KEYS, Stack
from flowkv.testing.tier_model import Frame
from flowkv.testing.tiers import Faults, FlakyTier, MemoryTier
from flowkv.tiers.base import Tier
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.host import HostTier

HAZARDS = frozenset({"kill", "power", "flips", "file errors", "full", "hangs", "remote", "erase"})
"""What may go wrong beyond eviction, cancellation and missed deadlines."""
DIRECTORY = "/simulated/kv"
HOST_BYTES, DISK_BYTES, REMOTE_BYTES = 80 << 10, 448 << 10, 192 << 10
_TROUBLES = {"write": 0.1, "enospc": 0.1, "short": 0.2, "torn": 0.1, "read": 0.1}
_TROUBLES |= {"short read": 0.2, "sync": 0.2, "names": 0.1}
_MOODS = Faults(fail=0.05, lose=0.02, flip=0.02, latency_s=0.05)
_BY_KEY = dict(FRAMES)
_STEPS = {"request": 40.0, "load": 20.0, "store": 20.0, "wait": 60.0, "cancel": 2.0}
_STEPS |= {"forget": 4.0, "reopen": 2.0}
_RARE = {"kill": 0.5, "power": 0.5, "flips": 0.5, "file errors": 0.5, "hangs": 0.5, "erase": 1.0}
_RARE |= {"full": 4.0}
_LEFT = (0, 1, 1, 1, 2, 1 << 20)  # blocks


class SimulationFailure(AssertionError):
    """A promise was broken; the same seed breaks it again, at the same step.

    Attributes:
        seed: Of the run.
        step: That broke it.
        hazards: That were switched on.
    """

    def __init__(self, run: Simulation, step: int, problem: BaseException) -> None:
        self.seed, self.step, self.hazards = run.seed, step, run.hazards
        events = "\n  ".join(run.tail)
        super().__init__(
            f"{type(problem).__name__}: {problem}\nlast events:\n  {events}\nStep {step} of"
            f" simulate({self.seed}, {step + 1}, hazards={sorted(self.hazards)}): replay that."
        )


class Report(NamedTuple):
    """What a run was like.

    Attributes:
        seed: Of the run.
        steps: Taken.
        answers: Items answered.
        counts: How often each thing happened.
        digest: Of all events in order: equal runs have equal digests.
    """

    seed: int
    steps: int
    answers: int
    counts: Counter[str]
    digest: str


class Simulation(Stack):
    """One run over a host tier, a disk tier and a remote one.

    Args:
        seed: Decides everything.
        hazards: Some of `HAZARDS`.
        open_disk: Opens the disk tier, from files, engine, clock, capacity and durability; for
            tests of the simulation itself.
    """

    def __init__(
        self,
        seed: int,
        hazards: Collection[str] = HAZARDS,
        open_disk: Callable[[Simulation], Tier] | None = None,
    ) -> None:
        super().__init__(random.Random(seed), ManualClock())
        self.seed, self.hazards = seed, frozenset(hazards)
        self._open_disk = open_disk or open_disk_tier
        self.durable = self.chance.random() < 0.5
        self.crowded = self.chance.random() < 0.2  # the device is smaller than the tier may be
        self.disk_bytes = DISK_BYTES + GRANULE_BYTES * self.chance.randrange(64)
        space_bytes = 280 << 10 if self.crowded else 1 << 40
        self.files = SimulatedFiles(random.Random(f"files {seed}"), space_bytes)
        self.engine = self._fresh_engine()
        self.bucket = MemoryTier(REMOTE_BYTES)
        self.cut_off: set[bytes] = set()  # keys that were erased and not stored since
        self.scarred = False  # the journal may say what was once true
        moody = "remote" in self.hazards
        self.places = [
            self.place(HostTier(HOST_BYTES, clock=self.clock)),
            self.place(self._disk_tier()),
            self.place(self._remote(), lossy=moody),
        ]
        rates = _STEPS | {name: _RARE[name] for name in sorted(self.hazards) if name in _RARE}
        self._names, self._weights = list(rates), list(rates.values())
        self._acts: dict[str, Callable[[], None]] = {
            "kill": self.kill,
            "power": self.lose_power,
            "flips": self.flip,
            "file errors": self.trouble,
            "full": self.crowd,
            "hangs": self.hang,
            "erase": self.erase,
        }

    @property
    def disk(self) -> Place:
        """The place in the middle."""
        return self.places[1]

    def step(self) -> None:
        """Does one thing, and checks everything."""
        name = self.chance.choices(self._names, self._weights)[0]
        self.counts[name] += 1
        self.note(f"{self.clock.now_ns()} {name}")
        act: Callable[[], None] = self._acts.get(name) or getattr(self, name)
        act()
        for place in self.places:
            place.poll()
            place.look(KEYS)
        used_bytes = self.files.used_bytes()
        assert used_bytes <= self.disk_bytes, f"{used_bytes} of {self.disk_bytes} bytes on the disk"
        if not self.disk.flying:
            self._excuse()

    # ---- what may happen

    def reopen(self) -> None:
        """Closes the disk tier when it is idle, and opens it again."""
        self.engine.revive()
        self.engine.hang = 0.0
        while self.disk.flying or self.engine.in_flight():
            self.clock.advance(s=0.5)
            self.disk.poll()
        self.disk.tier.close()
        self._restart(exact=not self.files.harmed)

    def kill(self) -> None:
        """The process dies, in the middle of whatever it does."""
        exact = not self.files.harmed
        self.engine.kill()
        self.files.kill()
        self._restart(exact=exact)
        self._lose_memory()

    def lose_power(self) -> None:
        """The machine dies. What the device confirmed is there, if the tier waits for that."""
        self.engine.kill()
        self.files.lose_power()
        self.disk.model.doubt(but_promised=self.durable)
        self.scarred = self.disk.harmed = True  # what was half written is refused
        self._restart(exact=False)
        self._lose_memory()

    def flip(self) -> None:
        """A bit turns on the disk."""
        self.note(self.files.flip())
        self.scarred = self.disk.harmed = True
        self.disk.model.doubt()

    def trouble(self) -> None:
        """The disk begins to fail, or ends to."""
        chosen = self.chance.sample(sorted(_TROUBLES), self.chance.randint(1, 3))
        self.files.troubles = {} if self.files.troubles else {n: _TROUBLES[n] for n in chosen}
        self._excuse()

    def crowd(self) -> None:
        """Others take what is left of the device but for some blocks, or give all of it back.

        Places are free, and frames come by the dozen: so the journal grows by more than one page.
        """
        self.files.space_bytes = 1 << 40
        self._save(1, FRAMES)
        self._settle()
        self.disk.delete(sorted(self.chance.sample(KEYS, len(KEYS) * 3 // 4)))
        left = self.chance.choice(_LEFT)
        self.files.space_bytes = self.files.used_bytes() + left * GRANULE_BYTES
        self.crowded = left < max(_LEFT)
        if self.crowded:  # else what failed meanwhile may still be answered
            self._excuse()
        self._save(1, self.chance.sample(FRAMES, len(FRAMES)))
        self._settle()

    def _settle(self) -> None:
        """Lets what is under way on the disk end at one time: the journal hears of it together."""
        self.disk.poll()
        self.clock.advance(s=0.01)
        self.disk.poll()

    def hang(self) -> None:
        """The disk begins to hang, or ends to."""
        if self.engine.hang:
            self.engine.revive()
        self.engine.hang = 0.0 if self.engine.hang else 0.2
        self.engine.latency_s = self.chance.choice((0.0, 0.002, 0.5))
        self._excuse()

    def erase(self) -> None:
        """Erases a few pages; then no file has a byte of them."""
        keys = sorted({KEYS[self._any()] for _ in range(self._few())})
        try:
            self.disk.delete(keys, erase=True)
        except StoreError as error:
            self.note(f"erase refused: {type(error).__name__}")
            self.counts["erase refused"] += 1
            for key in keys:
                self.disk.model.delete(key)
                self._may_be_back(key)
            return
        if self.engine.in_flight() or self.scarred:
            return  # something may be written yet; or lies where a lost record would have said so
        gone = {key for key in keys if not self.disk.model.stores(key)}
        if not self.files.troubles and not self.crowded:  # else the journal may still name it
            self.cut_off |= gone
        bodies = [frame.body[:64] for key, frame in FRAMES if key in gone]
        for name, image in self.files.images():
            assert not any(body in image for body in bodies), f"erased bytes are still in {name}"

    # ---- what follows

    def _fresh_engine(self) -> SimulatedEngine:
        return SimulatedEngine(
            self.files, random.Random(f"engine {self.chance.random()}"), self.clock
        )

    def _disk_tier(self) -> Tier:
        self.engine = self._fresh_engine()
        try:
            tier = self._open_disk(self)
        except StoreError:  # the disk fails: it is repaired or emptied
            self.files.troubles, self.files.space_bytes = {}, 1 << 40  # and has room again
            self.files.kill()
            self.counts["open refused"] += 1
            tier = self._open_disk(self)
        assert tier.writable, "the lock of a dead process holds"
        return tier

    def _remote(self) -> Tier:
        self.bucket.poll()
        if "remote" not in self.hazards:
            return self.bucket
        return FlakyTier(self.bucket, self.chance.randrange(1 << 30), _MOODS, self.clock)

    def _restart(self, *, exact: bool) -> None:
        self.disk.abandon()
        # Where a record may be gone that says "deleted", anything may be back; else only what was
        # given up on its way, since a journal without records has the slots looked through.
        back = KEYS if self.scarred or not exact else sorted(self.disk.undone)
        for key in back:
            self._may_be_back(key)
        self.disk.undone.clear()
        self.disk.tier = self._disk_tier()
        self._excuse()

    def _lose_memory(self) -> None:
        self.places[0] = self.place(HostTier(HOST_BYTES, clock=self.clock))
        self.places[2].abandon()
        self.places[2].tier = self._remote()

    def _may_be_back(self, key: bytes) -> None:
        model = self.disk.model
        if None in model.may[key] and key not in self.cut_off:
            model.may[key].add(_BY_KEY[key])
            model.doubtful.add(key)
            self.disk.harmed = True

    def _save(self, level: int, frames: list[tuple[bytes, Frame]]) -> None:
        if level == 1:
            self.cut_off.difference_update(key for key, _ in frames)
        super()._save(level, frames)

    def _excuse(self) -> None:
        reasons = set()
        if self.files.troubles or self.crowded:
            reasons |= {"EIO", "ENOSPC", "full"}  # full: freed blocks could not be given back
        if self.engine.hang:
            reasons |= {"breaker"}
        self.disk.excused = frozenset(reasons)


def open_disk_tier(run: Simulation) -> Tier:
    """The disk tier without threads, over the simulated disk."""
    return DiskTier(
        DIRECTORY,
        run.disk_bytes,
        name="disk",
        durability="sync" if run.durable else "none",
        files=run.files,
        engine=run.engine,
        threads=0,
        clock=run.clock,
    )


def simulate(seed: int, steps: int = 1000, hazards: Collection[str] = HAZARDS) -> Report:
    """Runs a simulation; the same arguments give the same run.

    Args:
        seed: Decides everything.
        steps: How many.
        hazards: What may go wrong, some of `HAZARDS`.

    Raises:
        SimulationFailure: A promise was broken; it names the seed and the step.
    """
    return _drive(Simulation(seed, hazards), steps)


def _drive(run: Simulation, steps: int) -> Report:
    for number in range(steps):
        try:
            run.step()
        except Exception as error:
            raise SimulationFailure(run, number, error) from error
    answers = sum(place.answered for place in run.places)
    return Report(run.seed, steps, answers, run.counts, run.digest())


def shrink(failure: SimulationFailure, tries: int = 20) -> SimulationFailure:
    """The same kind of failure with fewer hazards and, among some seeds, in fewer steps.

    Args:
        failure: What to make smaller.
        tries: Seeds to try after the hazards.
    """
    best = failure
    for hazard in sorted(failure.hazards):
        best = _shorter(best, failure.seed, best.hazards - {hazard}, failure.step + 1)
    for seed in range(tries):
        best = _shorter(best, seed, best.hazards, best.step)
    return best


def _shorter(
    best: SimulationFailure, seed: int, hazards: Collection[str], steps: int
) -> SimulationFailure:
    try:
        simulate(seed, steps, hazards)
    except SimulationFailure as smaller:
        return smaller
    return best
