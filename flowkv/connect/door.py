"""Parts that the doors of all engines share: their versions, frames and transfers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, TypeVar

from flowkv.core.errors import ConfigError
from flowkv.residency.keeper import HOLD_S, Caller, Keeper
from flowkv.tiers.base import FrameInfo, Outcome, TierAnswer

T = TypeVar("T")
_log = logging.getLogger("flowkv")

raw_page = partial(FrameInfo, "page", 0, 0)
"""Describe a page in the engine's own form; the arguments are the fields of `FrameInfo` from
`layout` on."""


def untested(engine: str, tested: str, error: ImportError) -> ConfigError:
    """Return the error for an engine that is missing, or has another interface."""
    return ConfigError(
        f"{engine} is missing, or its interface is not the tested one ({error})",
        f"Install {engine} {tested}, or a FlowKV version for yours",
    )


def check_version(engine: str, part: str, version: str, tested: str) -> None:
    """Log a warning if an engine's version is not the tested one."""
    if not version.startswith(f"{tested}."):
        _log.warning("%s %s: FlowKV's %s was tested with %s", engine, version, part, tested)


class Settings:
    """Entries of an engine's configuration that all doors have; the others are for `open_keeper`.

    Args:
        part: Name of the door.
        said: The entries.
        remedy: Remedy for a configuration without places.

    Attributes:
        places: The places, fastest first.
        weights: Name of the weights, or names by model; "" for a digest of their files.
        revision: Revision of the model.
        load_deadline_s: Longest time of a load.
        lookup_deadline_s: Longest time of a look-up in remote places.
        secret: Secret of the salts of tenants.
        options: The options of `open_keeper`.

    Raises:
        ConfigError: There is no place.
    """

    def __init__(self, part: str, said: Mapping[str, Any], remedy: str) -> None:
        self.options = dict(said)
        take, places = self.options.pop, self.options.pop("places", ())
        self.places = [places] if isinstance(places, str) else list(places)
        if not self.places:
            raise ConfigError(f"FlowKV's {part} has no places", remedy)
        self.weights, self.revision = take("weights", ""), str(take("revision", ""))
        self.load_deadline_s = float(take("load_deadline_s", 5.0))
        self.lookup_deadline_s = float(take("lookup_deadline_s", 1.0))
        self.secret = bytes.fromhex(self.options.get("secret", ""))


class Transfer:
    """One job of an engine, a load or a store, with the answers so far.

    Args:
        number: Number of the job.
        keys: The engine's keys of the items.
        loads: Whether the job is a load.

    Attributes:
        left: Number of items without an answer.
        sizes: Bytes of each item that was served, by its position.
        begun_s: Time of the start.
    """

    def __init__(self, number: int, keys: Sequence[Any], *, loads: bool) -> None:
        self.number, self.keys, self.loads = number, list(keys), loads
        self.left, self.sizes = len(self.keys), dict[int, int]()
        self.begun_s = time.monotonic()

    def answered(self, answer: TierAnswer) -> None:
        """Count the answer to an item, and record the bytes of a served one."""
        self.left -= 1
        if answer.outcome in (Outcome.HIT, Outcome.STORED):
            self.sizes[answer.item] = answer.n_bytes


class Holds(dict[bytes, tuple[int, float]]):
    """Frames that were looked up, each held until it was let go as often. Methods are thread-safe.

    The value of each is the number of its look-ups, and the time of the last one; oldest first.

    Args:
        caller: The caller that looked them up.
        most_s: Longest hold of a frame that is not looked up again.
    """

    def __init__(self, caller: Caller, most_s: float = HOLD_S) -> None:
        super().__init__()
        self._caller, self._lock, self._most_s = caller, threading.Lock(), most_s

    def hold_frames(self, names: Iterable[bytes]) -> None:
        """Count look-ups; release the frames that nothing has looked up for too long."""
        now_s = time.monotonic()
        with self._lock:
            for name in names:
                self[name] = self.pop(name, (0, 0.0))[0] + 1, now_s
            for name in [*takewhile(lambda name: self[name][1] <= now_s - self._most_s, self)]:
                del self[name]
                self._caller.release(name)

    def release_frames(self, names: Iterable[bytes]) -> None:
        """End one look-up of each frame."""
        with self._lock:
            for name in names:
                count, at_s = self.get(name, (0, 0.0))
                if count > 1:
                    self[name] = count - 1, at_s
                elif count:
                    del self[name]
                    self._caller.release(name)


class Announced(dict[bytes, T]):
    """Frames that an engine knows to be stored, by name, with what it knows them by."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self._keeper, self._left = keeper, SimpleQueue[bytes]()

    def departed(self, names: Iterable[bytes]) -> None:
        """Record that frames left the keeper; needs no lock."""
        for name in names:
            self._left.put(name)

    def take_gone(self) -> list[T]:
        """Remove and return the frames that left, and were not stored again since."""
        # The number is fixed at the start: an endless stream of deletions must not hold the loop.
        names = dict.fromkeys(self._left.get_nowait() for _ in range(self._left.qsize()))
        known = [name for name in names if name in self]
        return [self.pop(name) for name in known if not self._keeper.knows(name)]
