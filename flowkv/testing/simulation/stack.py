"""The small store that the simulation drives: requests fall through the tiers and fill them."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque

from flowkv.core.clock import ManualClock
from flowkv.core.layout import GRANULE_BYTES
from flowkv.testing.simulation.place import BEFORE, Place
from flowkv.testing.tier_model import Frame
from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Tier

NAMES = 48
DEADLINES_S = (0.0, 0.001, 0.05, 10.0, 10.0, 10.0)
_LAYOUT = bytes(range(16))


def make_frame(name: int) -> tuple[bytes, Frame]:
    """Key and content of the frame with a number; content follows from the key, as in life."""
    key = hashlib.sha256(b"simulated %d" % name).digest()
    stripes = (1, 1, 2, 4)[name % 4]
    step = GRANULE_BYTES if stripes > 1 else 1500 + 97 * name
    info = FrameInfo(
        kind="page",
        codec=0,
        fidelity=0,
        layout=_LAYOUT,
        parent=bytes(32),
        namespace=bytes(32),
        group=name % 3,
        tokens=64,
        stripe_bytes=step,
    )
    return key, Frame(info, hashlib.shake_128(key).digest(step * stripes))


FRAMES = [make_frame(name) for name in range(NAMES)]
KEYS = [key for key, _ in FRAMES]


class Stack:
    """Places, nearest first, and what a store does with them.

    Args:
        chance: Source of every decision.
        clock: Moved by the one who owns this.

    Attributes:
        places: The tiers with their models.
        counts: How often each thing happened.
        tail: The last lines of the log.
    """

    def __init__(self, chance: random.Random, clock: ManualClock) -> None:
        self.chance, self.clock = chance, clock
        self.places: list[Place] = []
        self.counts: Counter[str] = Counter()
        self.tail: deque[str] = deque(maxlen=40)
        self._digest = hashlib.blake2b(digest_size=16)

    def place(self, tier: Tier, *, lossy: bool = False) -> Place:
        """A tier with a model."""
        return Place(tier, lossy=lossy, clock=self.clock, note=self.note)

    def note(self, event: str) -> None:
        """A line of the log."""
        self._digest.update(event.encode() + b"\n")
        self.tail.append(event)

    def digest(self) -> str:
        """Of all events in order."""
        return self._digest.hexdigest()

    # ---- what a store does

    def request(self) -> None:
        """Wants a page: from the nearest tier that gives it, or made anew."""
        self._ask(self.chance.randrange(NAMES), 0)

    def load(self) -> None:
        """Wants a few pages, or stripes of them, from one tier."""
        place = self.chance.choice(self.places)
        place.load([self._wish(self._any()) for _ in range(self._few())], self._deadline_s())

    def store(self) -> None:
        """Writes a few pages to one tier."""
        level = self.chance.randrange(len(self.places))
        frames = [FRAMES[self._any()] for _ in range(self._few())]
        self._save(level, frames)

    def cancel(self) -> None:
        """Gives up a job."""
        place = self.chance.choice(self.places)
        if place.jobs:
            place.cancel(self.chance.choice(place.jobs))

    def forget(self) -> None:
        """Deletes a few pages on one tier."""
        place = self.chance.choice(self.places)
        place.delete(sorted({KEYS[self._any()] for _ in range(self._few())}))

    def wait(self) -> None:
        """Lets time pass."""
        self.clock.advance(s=self.chance.choice((1e-5, 1e-3, 1e-3, 0.03, 1.0, 11.0)))

    def _any(self) -> int:
        return self.chance.randrange(NAMES)

    def _few(self) -> int:
        return self.chance.choice((1, 1, 2, 3))

    def _deadline_s(self) -> float:
        return self.chance.choice(DEADLINES_S)

    def _wish(self, name: int, *, whole: bool = False) -> Load:
        key, (info, body) = FRAMES[name]
        first = 0 if whole else self.chance.choice((0, 0, 0, 1, 3))
        stripes = 0 if whole else self.chance.choice((0, 0, 1, 2))
        target = memoryview(bytearray([BEFORE]) * (len(body) + self.chance.choice((0, 0, 3))))
        return Load(key, target, info.layout, 0, first, stripes)

    def _ask(self, name: int, level: int) -> None:
        if level == len(self.places):  # nowhere: computed, and written down
            for each in range(2):
                self._save(each, [FRAMES[name]])
            return

        def answered(answer: Completion) -> None:
            if answer.outcome is not Outcome.HIT:
                self._ask(name, level + 1)
            for above in range(level if answer.outcome is Outcome.HIT else 0):
                self._save(above, [FRAMES[name]])

        self.places[level].load([self._wish(name, whole=True)], 10.0, answered)

    def _save(self, level: int, frames: list[tuple[bytes, Frame]]) -> None:
        place = self.places[level]

        def answered(answer: Completion) -> None:
            if answer.reason == "full":
                there = [
                    key for key, has in zip(KEYS, place.tier.contains(KEYS), strict=True) if has
                ]
                self.counts["evict"] += 1
                place.delete(self.chance.sample(there, min(2, len(there))))

        place.store(frames, self._deadline_s(), answered)
