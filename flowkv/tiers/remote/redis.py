"""`RedisTier`: frames in Valkey or Redis."""

from __future__ import annotations

from collections.abc import Sequence

from flowkv.core.clock import Clock
from flowkv.core.errors import StoreError
from flowkv.tiers.base import UNBOUNDED
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.remote.limits import Limits
from flowkv.tiers.remote.redis_backend import Redis
from flowkv.tiers.remote.tier import RemoteTier


class RedisTier(RemoteTier):
    """Frames in Valkey or Redis.

    The server evicts and expires as it was told to (`maxmemory`, `maxmemory-policy`, `ttl_s=`);
    what it let go is a miss. `STORED` survives a crash of the server as far as the server keeps
    files: all of it with `appendonly yes` and `appendfsync always`.

    Args:
        uri: As `Redis`.
        capacity_bytes: Most bytes of frames that this process knows of there.
        name: Shown in statistics; default the address.
        envelope: How frames are wrapped and checked.
        clock: Source of time.
        limits: How much it may do, and how long it may take.

    Raises:
        ConfigError: The URI or the capacity cannot be used.
        MissingDependencyError: redis-py is not installed.
        StoreError: The server refuses us.
    """

    def __init__(
        self,
        uri: str,
        capacity_bytes: int = UNBOUNDED,
        *,
        name: str = "",
        envelope: Envelope | None = None,
        clock: Clock | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._redis, self._asked = Redis(uri), 0
        super().__init__(
            self._redis, capacity_bytes, name=name, envelope=envelope, clock=clock, limits=limits
        )

    def erase(self, keys: Sequence[bytes]) -> int:
        """Removes frames from the server and from its files, and asks whether they are gone.

        Raises:
            StoreError: The server did not confirm it.
        """
        gone, limit_s = super().erase(keys), self.limits.erase_s
        if not keys:
            return gone
        try:
            self._aside.call(lambda: self._redis.rewrite(limit_s), limit_s)
        except OSError as error:
            raise StoreError(
                f"{self.name} may still have erased frames in its files ({error})",
                "Allow INFO, CONFIG GET, BGREWRITEAOF and BGSAVE, or rewrite the files there",
            ) from error
        return gone

    def refresh(self) -> None:
        """Asks for some of the known frames in turn, and forgets those that the server let go.

        Raises:
            OSError: The server failed.
        """
        facts = self.known.facts()
        start = self._asked if self._asked < len(facts) else 0
        asked = facts[start : start + self._redis.asks]
        self._asked = start + len(asked)
        there = self._redis.exists([key.hex() for key, _ in asked], self.limits.call_s)
        for (key, fact), found in zip(asked, there, strict=True):
            if not found:
                self.known.drop(key, fact)
