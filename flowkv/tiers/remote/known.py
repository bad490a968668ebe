"""What a tier knows of a store that others write to as well."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import NamedTuple

from flowkv.tiers.base import FrameInfo

MOST_KNOWN = 1 << 20


class Fact(NamedTuple):
    """What is known of one frame.

    Attributes:
        n_bytes: Bytes it occupies; 0 while unknown.
        info: Its description; None until its header was seen.
        stored_ns: When it was stored, in nanoseconds since 1970; 0 while unknown.
    """

    n_bytes: int = 0
    info: FrameInfo | None = None
    stored_ns: int = 0

    def completed(self, other: Fact) -> Fact:
        """This, and what only the other knows."""
        return Fact(
            self.n_bytes or other.n_bytes,
            self.info or other.info,
            self.stored_ns or other.stored_ns,
        )


class Known:
    """Keys that are believed to be in the store, and those that must not be believed. Thread-safe.

    A key is *shunned* after its frame was found damaged, and *condemned* as well from a deletion on
    until the engine confirmed it: no listing brings it back, only a store of this process does. A
    frame on its way is *flying*; if its key is condemned meanwhile, it is deleted when it landed.

    Args:
        most: Frames known at a time; beyond it those known longest are forgotten, and found again
            when they are asked for.

    Attributes:
        fresh: Facts of frames that landed, or whose header was read, for whoever takes them out
            again; None to keep none.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most, self._changed = most, threading.Condition()
        self._facts: dict[bytes, Fact] = {}
        self._shunned: set[bytes] = set()
        self._condemned: set[bytes] = set()
        self._deleting: set[bytes] = set()
        self._flying: dict[bytes, bool] = {}
        self._used_bytes = self._reserved_bytes = 0
        self.fresh: list[tuple[bytes, Fact]] | None = None

    def __len__(self) -> int:
        return len(self._facts)

    def used_bytes(self) -> int:
        """Bytes of all known frames."""
        return self._used_bytes

    def get(self, key: bytes) -> Fact | None:
        """What is known of a key."""
        return self._facts.get(key)

    def is_shunned(self, key: bytes) -> bool:
        """Whether a frame of that key must not be used, even if the store has one."""
        return key in self._shunned

    def facts(self) -> list[tuple[bytes, Fact]]:
        """Everything, oldest store first."""
        with self._changed:
            found = list(self._facts.items())
        return sorted(found, key=lambda pair: pair[1].stored_ns)

    def learn(self, facts: Iterable[tuple[bytes, Fact]]) -> None:
        """Frames that others know of; what is known already is completed, never contradicted."""
        with self._changed:
            for key, fact in facts:
                if key not in self._shunned:
                    mine = self._facts.get(key, Fact())
                    self._put(key, mine.completed(fact))

    def see(self, key: bytes, fact: Fact) -> None:
        """A frame whose header was read just now."""
        with self._changed:
            mine = self._facts.get(key, Fact())
            self.learn([(key, fact)])
            if mine.info is None and key in self._facts:
                self._note(key)

    def drop(self, key: bytes, was: Fact | None, *, shun: bool = False) -> None:
        """Forgets a key of which the engine said something bad.

        Args:
            key: The key.
            was: What was known when the engine was asked; if it is something else by now, a store
                came in between, and nothing is forgotten.
            shun: Not to be believed any more either.
        """
        with self._changed:
            now = self._facts.get(key)
            if (now.stored_ns if now else 0) == (was.stored_ns if was else 0):
                self._drop(key)
                if shun:
                    self._shunned.add(key)

    # ---- stores

    def reserve(self, n_bytes: int, capacity_bytes: int) -> bool:
        """Takes room for a frame on its way, if there is some."""
        with self._changed:
            if self._used_bytes + self._reserved_bytes + n_bytes > capacity_bytes:
                return False
            self._reserved_bytes += n_bytes
            return True

    def release(self, n_bytes: int) -> None:
        """Gives back what `reserve` took."""
        with self._changed:
            self._reserved_bytes -= n_bytes

    def begin(self, key: bytes, timeout_s: float) -> bool:
        """A frame is about to fly; False if one of that key is being deleted for so long."""
        with self._changed:
            if not self._changed.wait_for(lambda: key not in self._deleting, max(0.0, timeout_s)):
                return False
            self._flying[key] = False
            return True

    def land(self, key: bytes, fact: Fact | None) -> None:
        """The frame arrived, or None: nobody knows."""
        with self._changed:
            unwanted = self._flying.pop(key, False)
            if fact is not None and not unwanted:
                self._condemned.discard(key)
                self._shunned.discard(key)
                self._put(key, fact)
                self._note(key)
            self._changed.notify_all()

    # ---- deletions

    def condemn(self, keys: Iterable[bytes]) -> int:
        """These frames are to be deleted; returns how many were known."""
        with self._changed:
            keys = list(keys)
            self._condemned.update(keys)
            for key in keys:
                if key in self._flying:
                    self._flying[key] = True
            self._shunned.update(keys)
            return sum(self._drop(key) for key in keys)

    def take_condemned(self, most: int) -> list[bytes]:
        """Keys to delete now, none of them flying; `acquit` or `keep_condemned` must follow."""
        with self._changed:
            keys = [key for key in self._condemned if key not in self._flying][:most]
            self._deletes(keys)
            return keys

    def seize(self, keys: Collection[bytes], timeout_s: float) -> bool:
        """Takes keys to delete now, as soon as nothing flies or is being deleted under them.

        What landed since they were condemned is condemned with them: it is going to be deleted, and
        would be known all the same. `acquit` or `keep_condemned` must follow.

        Returns:
            False if it takes longer than that.
        """
        names = set(keys)
        with self._changed:
            if not self._changed.wait_for(
                lambda: not names & self._deleting and names.isdisjoint(self._flying),
                max(0.0, timeout_s),
            ):
                return False
            self.condemn(names)  # what landed since they were condemned first
            self._deletes(names)
            return True

    def _deletes(self, keys: Collection[bytes]) -> None:
        self._condemned.difference_update(keys)
        self._deleting.update(keys)

    def acquit(self, keys: Iterable[bytes]) -> None:
        """The engine confirmed that they are gone."""
        with self._changed:
            self._deleting.difference_update(keys)
            self._shunned.difference_update(key for key in keys if key not in self._condemned)
            self._changed.notify_all()

    def keep_condemned(self, keys: Iterable[bytes]) -> None:
        """They could not be deleted: another time."""
        with self._changed:
            self._deleting.difference_update(keys)
            self._condemned.update(keys)
            self._changed.notify_all()

    def condemned(self) -> int:
        """Number of deletions that are not confirmed."""
        return len(self._condemned) + len(self._deleting)

    def _drop(self, key: bytes) -> bool:
        fact = self._facts.pop(key, None)
        if fact is not None:
            self._used_bytes -= fact.n_bytes
        return fact is not None

    def _note(self, key: bytes) -> None:
        if self.fresh is not None:
            self.fresh.append((key, self._facts[key]))

    def _put(self, key: bytes, fact: Fact) -> None:
        before = self._facts.get(key)
        if before is None and len(self._facts) >= self._most:
            self._drop(next(iter(self._facts)))
        self._used_bytes += fact.n_bytes - (before.n_bytes if before else 0)
        self._facts[key] = fact
