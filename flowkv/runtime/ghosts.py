"""Blocks that lie nowhere any more: their slots stay theirs for a while, so that policies learn.

A policy that gave up a block it should have kept can only notice if the block comes back under the
number that it had. So the slot of a forgotten block stays with its key, until others were forgotten
after it. Nothing of the block itself stays; about 210 bytes are kept for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import NamedTuple

_BATCH = 64
"""Ghosts that drop out together: policies are told of so many at a time."""


class Ghost(NamedTuple):
    """What is left of a block.

    Attributes:
        slot: What policies know it as.
        parent: Chain key above it.
        realm: Namespace digest, tenant salt and layer group.
    """

    slot: int
    parent: bytes
    realm: tuple[bytes, bytes, int]


class Ghosts:
    """A bounded first-in, first-out list of forgotten blocks. Callers hold the KV lock.

    Args:
        drop: Told the slots that nobody knows any more.
    """

    def __init__(self, drop: Callable[[list[int]], None]) -> None:
        self._drop = drop
        self._known: dict[bytes, Ghost] = {}
        self._realms: dict[tuple[bytes, bytes, int], tuple[bytes, bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def get(self, key: bytes) -> Ghost | None:
        """The ghost of a key."""
        return self._known.get(key)

    def add(
        self, key: bytes, slot: int, parent: bytes, realm: tuple[bytes, bytes, int], most: int
    ) -> None:
        """Remembers a block; the oldest ones drop out where there are more than `most`."""
        realm = self._realms.setdefault(realm, realm)  # one object for all of them
        self._known[key] = Ghost(slot, parent, realm)
        surplus = len(self._known) - most
        if surplus >= min(_BATCH, most + 1):
            self._leave(list(islice(self._known, surplus)))

    def revive(self, key: bytes) -> int:
        """The slot of a key that comes back, -1 if it is no ghost."""
        ghost = self._known.pop(key, None)
        return ghost.slot if ghost else -1

    def bury(self, keys: Collection[bytes], below: Collection[bytes] = ()) -> int:
        """Drops the ghosts of keys, and of all that lies below them or below the keys `below`.

        Returns:
            How many they were.
        """
        children: dict[bytes, list[bytes]] = {}
        for key, ghost in self._known.items():
            children.setdefault(ghost.parent, []).append(key)
        doomed = dict.fromkeys(key for key in keys if key in self._known)
        waiting = [*keys, *below]
        while waiting:
            for key in children.pop(waiting.pop(), ()):
                doomed[key] = None
                waiting.append(key)
        self._leave(doomed)
        return len(doomed)

    def bury_realm(self, meant: Callable[[tuple[bytes, bytes, int]], bool]) -> int:
        """Drops the ghosts of some namespaces, tenants and groups; returns how many they were."""
        doomed = [key for key, ghost in self._known.items() if meant(ghost.realm)]
        self._leave(doomed)
        self._realms = {realm: realm for realm in self._realms if not meant(realm)}
        return len(doomed)

    def _leave(self, keys: Iterable[bytes]) -> None:
        slots = [self._known.pop(key).slot for key in keys]
        if slots:
            self._drop(slots)
