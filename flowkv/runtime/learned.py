"""What policies learned, kept in a small file within a disk tier's directory.

Models only: how soon conversations go on, after what kind of turn. No block, no key, no tenant and
no time is in it; which pages lie where is the tiers' own business.

    16 bytes xxh3_128 of what follows | MessagePack: version, and a model for each kind of place
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import xxhash

from flowkv.core.errors import ConfigError
from flowkv.runtime.places import Place
from flowkv.tiers.disk.files import FileIO, read_file, replace_file
from flowkv.tiers.disk.home import LEARNED

VERSION = 1
_CHECK_BYTES, _MOST_BYTES = 16, 1 << 24


@runtime_checkable
class Learner(Protocol):
    """A policy that can begin with what another one of its kind learned."""

    def save_model(self) -> bytes:
        """What it learned."""
        ...

    def load_model(self, saved: bytes) -> None:
        """Begins with it, weakly: what is observed soon counts more."""
        ...


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    models: dict[str, bytes]


def save(directory: Path, places: Iterable[Place]) -> bool:
    """Writes what the policies of places learned; the file appears whole or not at all.

    Args:
        directory: Of a disk tier, which this process owns.
        places: Whose policies.

    Returns:
        Whether there was anything to write.

    Raises:
        OSError: It cannot be written.
    """
    models = {name: learner.save_model() for name, learner in _learners(places).items()}
    if not models:
        return False
    body = msgspec.msgpack.encode(_File(VERSION, models))
    replace_file(FileIO(), str(directory / LEARNED), xxhash.xxh3_128_digest(body) + body)
    return True


def load(directory: Path, places: Iterable[Place]) -> int:
    """Has policies begin with what was learned before; returns how many do.

    Raises:
        ConfigError: The file is damaged, of another version, or a model does not fit its policy.
        OSError: It cannot be read, or is no file of ours.
    """
    path = directory / LEARNED
    try:
        raw = read_file(FileIO(), str(path), _MOST_BYTES, ours=True)
    except FileNotFoundError:
        return 0
    body = raw[_CHECK_BYTES:]
    if len(raw) > _MOST_BYTES or xxhash.xxh3_128_digest(body) != raw[:_CHECK_BYTES]:
        raise ConfigError(f"{path} is damaged, or no such file", "Delete it")
    try:
        found = msgspec.msgpack.decode(body, type=_File)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is of another version ({error})", "Delete it") from None
    if found.version != VERSION:
        raise ConfigError(f"{path} is of version {found.version}", "Delete it")
    learners = _learners(places)
    started = 0
    for name in learners.keys() & found.models.keys():
        learners[name].load_model(found.models[name])
        started += 1
    return started


def _learners(places: Iterable[Place]) -> dict[str, Learner]:
    """The policies that learn, by the kind of their place, its number in it, and their name."""
    found: dict[str, Learner] = {}
    counts: dict[str, int] = {}
    for place in places:
        number = counts[place.kind] = counts.get(place.kind, 0) + 1
        if isinstance(place.policy, Learner):
            found[f"{place.kind}/{number}/{place.policy.name}"] = place.policy
    return found
