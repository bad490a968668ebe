"""`ObjectTier`: frames in an object store, and the catalogs that make opening it cheap."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from flowkv.core.clock import Clock
from flowkv.tiers.base import UNBOUNDED
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.remote.catalog import MOST_BYTES, MOST_FRAMES, decode_catalog, encode_catalog
from flowkv.tiers.remote.known import Fact
from flowkv.tiers.remote.limits import Limits
from flowkv.tiers.remote.objects import ObjectBackend
from flowkv.tiers.remote.tier import RemoteTier

FLUSH_FRAMES, FLUSH_S = 512, 5.0
MOST_CATALOGS = 16


class ObjectTier(RemoteTier):
    """Frames in S3, GCS, Azure or a directory.

    Opening costs one request per thousand frames for their names and one per few thousand for what
    they are. What others store is noticed every `Limits.every_s` seconds, by their catalogs.

    Args:
        uri: "s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix",
            "file:///directory" or "memory:///".
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the address.
        envelope: How frames are wrapped and checked; default xxh3 and nothing else.
        clock: Source of time.
        limits: How much it may do, and how long it may take.
        options: Settings of obstore's store, such as `endpoint`; they go before the environment.

    Raises:
        ConfigError: The address or the capacity is wrong.
        MissingDependencyError: obstore is not installed.
        StoreError: The store refuses us.
    """

    backend: ObjectBackend

    def __init__(
        self,
        uri: str,
        capacity_bytes: int = UNBOUNDED,
        *,
        name: str = "",
        envelope: Envelope | None = None,
        clock: Clock | None = None,
        limits: Limits | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._seen: set[str] = set()  # catalogs
        self._old: list[str] = []  # those to be merged
        self._written_s = time.monotonic()
        super().__init__(
            ObjectBackend(uri, options),
            capacity_bytes,
            name=name,
            envelope=envelope,
            clock=clock,
            limits=limits,
        )

    def recall(self) -> dict[bytes, Fact]:
        """What the catalogs say."""
        self.known.fresh = []
        facts = dict(self._news())
        if len(self._seen) > MOST_CATALOGS:
            self._old = sorted(self._seen)
        return facts

    def refresh(self) -> None:
        """Reads catalogs that were not there before."""
        self.known.learn(self._news())

    def flush(self) -> None:
        """Writes a catalog of what was stored since the last one, if it is much, or long ago."""
        fresh = self.known.fresh or []
        due = time.monotonic() - self._written_s >= FLUSH_S or not self._open
        if self._old:
            self._merge()
        elif len(fresh) >= FLUSH_FRAMES or (fresh and due):
            facts = fresh[:MOST_FRAMES]
            self._write(facts)
            del fresh[: len(facts)]

    def _news(self) -> Iterator[tuple[bytes, Fact]]:
        """What catalogs say that were not read yet."""
        for name, n_bytes, _ in self.backend.list_catalogs(self.limits.call_s):
            if name not in self._seen and n_bytes <= MOST_BYTES:
                data = self.backend.get_catalog(name, n_bytes, self.limits.call_s)
                self._seen.add(name)
                yield from decode_catalog(data)

    def _write(self, facts: Sequence[tuple[bytes, Fact]]) -> None:
        there = [(key, fact) for key, fact in facts if self.known.get(key) is not None]
        name = f"{time.time_ns():020d}-{os.urandom(8).hex()}"
        self._written_s = time.monotonic()
        if there:
            self.backend.put_catalog(name, encode_catalog(there), self.limits.call_s)
            self._seen.add(name)

    def _merge(self) -> None:
        """Replaces many catalogs, or such as speak of deleted frames, by few."""
        facts = [(key, fact) for key, fact in self.known.facts() if fact.info is not None]
        for at in range(0, len(facts), MOST_FRAMES):
            self._write(facts[at : at + MOST_FRAMES])
        self.backend.delete_catalogs(self._old, self.limits.call_s)
        self._old = []
