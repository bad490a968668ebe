"""Parts that the doors of all engines share: versions, settings, jobs, look-ups, and holds."""

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
from flowkv.core.keys import ROOT, tenant_salt
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
        self._secret = bytes.fromhex(self.options.get("secret", ""))

    def salt(self, tenant: str) -> bytes:
        """Return the salt of a tenant's frames; zeros for frames of no tenant."""
        return tenant_salt(tenant, self._secret) if tenant else ROOT


class Transfer:
    """One job of an engine, a load or a store, with the answers so far.

    Args:
        number: Number of the job.
        keys: The engine's keys of the items.
        loads: Whether the job is a load.

    Attributes:
        answers: Answers so far, one for each item.
        sizes: Bytes of each item that was served, by its position.
        begun_s: Time of the start.
    """

    def __init__(self, number: int, keys: Iterable[Any], *, loads: bool) -> None:
        self.number, self.keys, self.loads = number, list(keys), loads
        self.answers, self.sizes = list[TierAnswer](), dict[int, int]()
        self.begun_s = time.monotonic()


_WAKES = TierAnswer(0, 0, b"", Outcome.MISS)


class Jobs(dict[int, Transfer]):
    """Transfers of one caller under way, by the caller's numbers. Methods are thread-safe."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self._caller, self._lock = caller, threading.Lock()

    def start_job(
        self, items: Sequence[Any], keys: Iterable[Any], number: int, *, loads: bool, **how: Any
    ) -> Transfer:
        """Start a job of one item or more; `how` are options of `Caller.submit_load`, or store."""
        start = self._caller.submit_load if loads else self._caller.submit_store
        with self._lock:  # before its first answer is counted
            job = start(items, **how)
            self[job] = Transfer(number, keys, loads=loads)
            return self[job]

    def finished(self, timeout_s: float = 0.0) -> list[Transfer]:
        """Return the jobs whose last answers came, after a wait of `timeout_s` at most."""
        answers, over = self._caller.poll(timeout_s), list[Transfer]()
        with self._lock:
            for answer in answers:
                if (transfer := self.get(answer.job)) is None:
                    continue  # of `wake`
                transfer.answers.append(answer)
                if answer.outcome in (Outcome.HIT, Outcome.STORED):
                    transfer.sizes[answer.item] = answer.n_bytes
                if len(transfer.answers) == len(transfer.keys):
                    over.append(self.pop(answer.job))
        return over

    def wake(self) -> None:
        """End a wait in `finished`."""
        self._caller.answers.post([_WAKES])


class Holds(dict[bytes, tuple[int, float]]):
    """Frames that were looked up, each held until it was let go as often. Methods are thread-safe.

    The value of each is the number of its look-ups, and the time of the last one; oldest first.

    Args:
        caller: The caller that looked them up.
        most_s: Longest hold of a frame that is not looked up again.
    """

    def __init__(self, caller: Caller, most_s: float = HOLD_S) -> None:
        super().__init__()
        self.caller, self._lock, self._most_s = caller, threading.Lock(), most_s

    def hold_frames(self, names: Iterable[bytes]) -> None:
        """Count look-ups; release the frames that nothing has looked up for too long."""
        now_s = time.monotonic()
        with self._lock:
            for name in names:
                self[name] = self.pop(name, (0, 0.0))[0] + 1, now_s
            for name in [*takewhile(lambda name: self[name][1] <= now_s - self._most_s, self)]:
                del self[name]
                self.caller.release(name)

    def release_frames(self, names: Iterable[bytes]) -> None:
        """End one look-up of each frame."""
        with self._lock:
            for name in names:
                count, at_s = self.get(name, (0, 0.0))
                if count > 1:
                    self[name] = count - 1, at_s
                elif count:
                    del self[name]
                    self.caller.release(name)


class Lookup:
    """Look-up of frames without a wait; found ones are held until released as often.

    Args:
        holds: The frames that are held.
        names: Names of the frames; b"" for one that cannot be stored.
        limit_s: Time after which frames without an answer count as absent.
        number: Number of the look-up.

    Attributes:
        found: For each name whether the frame can be loaded, once the look-up is over.
    """

    def __init__(self, holds: Holds, names: list[bytes], limit_s: float, number: int = 0) -> None:
        self._holds, self._names, self.number = holds, names, number
        self._known: dict[bytes, bool | None] = {name: None if name else False for name in names}
        self._until_s = time.monotonic() + limit_s
        self.found: list[bool] = []
        holds.hold_frames(names)

    def is_over(self) -> bool:
        """Ask for the frames that are not known yet; return whether all are, or time is up."""
        unknown = [name for name, there in self._known.items() if there is None]
        for name in unknown:
            self._known[name] = self._holds.caller.lookup([name], name)[0]
        if None in self._known.values() and time.monotonic() < self._until_s:
            return False
        self.found = [bool(self._known[name]) for name in self._names]
        self._holds.release_frames(name for name in self._names if not self._known[name])
        return True

    def release_found(self, first: int = 0) -> None:
        """Release the found frames, from the name at `first` on."""
        there = zip(self._names[first:], self.found[first:], strict=True)
        self._holds.release_frames(name for name, found in there if found)


class Announced(dict[bytes, T]):
    """Frames that an engine knows to be stored, by name, with what it knows them by."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self._keeper, self._left = keeper, SimpleQueue[bytes]()

    def arrived(self, name: bytes, known_as: T) -> bool:
        """Record a frame that was stored; return whether that is news, and the frame still there.

        Methods but `departed` are for one thread.
        """
        if name in self or not self._keeper.knows(name):
            return False
        self[name] = known_as
        return True

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
