"""Opening of the tiers and policies of a configuration; needs no torch, for engine connectors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path

from flowkv.core.clock import Clock
from flowkv.core.config import Config, TierConfig, format_size, parse_quota
from flowkv.core.errors import ConfigError
from flowkv.policy import Policy
from flowkv.policy.restore.costs import Rates
from flowkv.policy.tenants import Quota, Tenants
from flowkv.policy.warming import warming
from flowkv.tiers import Envelope, open_tier
from flowkv.tiers.base import UNBOUNDED, Tier


def open_tiers(
    config: Config, given: Sequence[Tier], clock: Clock, rates: dict[str, Rates], *, on_cpu: bool
) -> list[Tier]:
    """Open the tiers of the configuration, and return them with those given as objects.

    Args:
        config: Names the tiers, and the checks and compression of their frames.
        given: Tiers that are open.
        clock: Source of time.
        rates: Gets an entry for each tier of the configuration; its measured rate decides whether
            frames are compressed.
        on_cpu: Whether the layers compute on the CPU.

    Raises:
        ConfigError: A kind of tier is unknown, or too small.
        MissingDependencyError: A tier, or encryption, needs an extra that is not installed.
        StoreError: A directory or an engine cannot be used.
    """
    tiers: list[Tier] = []
    try:
        for place in config.places(on_cpu=on_cpu)[1:]:
            loads, total_bytes = Rates(), _total_bytes(place)
            size_bytes = place.size_bytes(total_bytes) or UNBOUNDED
            if place.kind == "disk" and size_bytes > total_bytes:
                raise ConfigError(
                    f"place '{place}' is larger than its file system ({format_size(total_bytes)})",
                    "Give it less, or a share of the file system like 50%",
                )
            tier = open_tier(
                place.kind,
                path=place.path,
                capacity_bytes=size_bytes,
                exclusive=config.exclusive,
                durability=config.durability,
                envelope=make_envelope(config, loads) if place.kind != "host" else None,
                clock=clock,
            )
            tiers.append(tier)
            rates[tier.name] = loads
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return [*tiers, *given]


def make_envelope(config: Config, loads: Rates | None = None) -> Envelope:
    """Return the envelope for frames outside of this process.

    Args:
        config: Has its integrity and compression.
        loads: Measured rate of loads from the tier; without it, every frame that shrinks is
            compressed.

    Raises:
        MissingDependencyError: Encryption needs an extra that is not installed.
    """
    rates = loads or Rates()
    keyring = lossless = None
    if config.integrity == "aead":
        from flowkv.tiers.envelope import Keyring

        keyring = Keyring(config.secret_bytes)
    if config.lossless != "off":
        from flowkv.tiers.lossless import Lossless

        if config.lossless == "on":  # compressed at any speed of the decoder
            lossless = Lossless(lambda: 1.0, decode_bytes_per_s=lambda: inf)
        else:
            lossless = Lossless(lambda: rates.bytes_per_s)
    return Envelope(integrity=config.integrity, keyring=keyring, lossless=lossless)


def _total_bytes(place: TierConfig) -> int:
    if place.kind != "disk":
        return memory_bytes()
    path = Path(place.path).expanduser().absolute()
    while not os.path.exists(path):  # unlike `Path.exists`, it raises for no path
        path = path.parent
    return shutil.disk_usage(path).total


def memory_bytes() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def policy_of(
    config: Config, kind: str, capacity_bytes: int, make: Callable[[], Policy] | None = None
) -> Policy:
    """Return the policy of a place; with quotas, tenants are numbered as in the configuration.

    Args:
        config: Names the policy and the quotas.
        kind: Kind of the place.
        capacity_bytes: Capacity of the place.
        make: Makes the policy instead.

    Raises:
        ConfigError: A policy or an option is unknown, or the quotas reserve more than there is.
    """
    if make is None:
        name, options = config.selection(kind)
        make = partial(warming, name, **options)
    if not config.quotas:
        return make()
    shares = [parse_quota(quota, kind, capacity_bytes) for quota in config.quotas.values()]
    kept = sum(reserve for reserve, _ in shares)
    if kept > capacity_bytes:
        raise ConfigError(
            f"quotas reserve {format_size(kept)} of a {kind} place of "
            f"{format_size(capacity_bytes)}",
            "Reserve less, or give the place more bytes",
        )
    quotas = [Quota(reserve, inf if limit is None else limit) for reserve, limit in shares]
    return Tenants(make, dict(enumerate(quotas)))
