"""Places as policies see them, and opening of the tiers and policies of a configuration.

A `Ledger` decides the content of places. In an engine's cache, or in a tier with vanishing frames,
that is decided elsewhere: for its driver, a `KeyedPolicy` turns keys into slots, and keeps departed
blocks known as ghosts for a while. Needs no torch, for engine
connectors.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowkv.core.clock import Clock
from flowkv.core.config import Config, TierConfig, format_size, parse_quota
from flowkv.core.errors import ConfigError
from flowkv.policy import CATALOGUE, base
from flowkv.policy.base import DEFAULT_RANK, NO_VISIT, Lease, Policy, Slots, Visit, counts_pins
from flowkv.policy.order.leaf import as_slots
from flowkv.policy.restore.costs import Rates
from flowkv.policy.tenants import Quota, Tenants
from flowkv.policy.warming import warming
from flowkv.tiers import Envelope, open_tier
from flowkv.tiers.base import UNBOUNDED, Tier

LEAST_GHOSTS = 1 << 10
GHOSTS_PER_RESIDENT = 4
_LEAST_S = 1e-9


class Numbered(Protocol):
    """Anything that policies know by a slot."""

    slot: int


class PolicyPlace:
    """A policy and the slots that are protected from it. Not thread-safe.

    Blocks are held and let go far more often than room is made, and mostly both between two
    evictions: so pins reach the policy only just before it chooses, and only as changes. A policy
    that does not count pins gets all of them with every choice.

    Args:
        name: Name of the device or tier.
        kind: "gpu", "host", "disk" or "remote".
        policy: Eviction policy of the place.

    Attributes:
        held: Slots that must not be evicted.
        overdue: Held slots with an expired lease, as of the last `expired`.
    """

    __slots__ = ("_changed", "_counts", "_told", "held", "kind", "name", "overdue", "policy")

    def __init__(self, name: str, kind: str, policy: Policy) -> None:
        self.name, self.kind, self.policy = name, kind, policy
        self.held: dict[int, None] = {}
        self.overdue = list[int]()
        self._counts = counts_pins(policy)
        self._told: dict[int, None] = {}
        self._changed: dict[int, None] = {}

    def hold(self, *slots: int) -> None:
        """Protect slots, resident or not, until `let_go`."""
        for slot in slots:
            if slot not in self.held:
                self.held[slot] = self._changed[slot] = None

    def let_go(self, *slots: int) -> None:
        """End the protection of slots."""
        for slot in slots:
            if slot in self.held:
                del self.held[slot]
                self._changed[slot] = None

    def remove(self, block: Numbered) -> None:
        """Remove a block from the policy, which did not choose it as a victim."""
        self.policy.remove(as_slots([block.slot]))

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Return `n` victims of the policy, none of them protected, or None."""
        return self.policy.evict(now_ns, n, self._guarded(protected))

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return up to `n` absent ends of chains that are worth prefetching here, best first."""
        self._guarded()  # a chain is compared with the next victim
        return self.policy.wanted(now_ns, n)

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Return up to `n` victims that are worth less than a prefetch."""
        return self.policy.displace(now_ns, n, rate, self._guarded(protected))

    def expired(self, now_ns: int) -> list[int]:
        """Remove and return the unprotected slots of which the lease has run out here."""
        found, held = self.policy.expired(now_ns).tolist(), self.held
        slots, self.overdue = [s for s in found if s not in held], [s for s in found if s in held]
        self.policy.remove(as_slots(slots))
        return slots

    def surplus(self, now_ns: int) -> list[int]:
        """Remove and return victims among the slots of tenants that exceed their quotas."""
        some = self.policy if isinstance(self.policy, Tenants) else None
        return [*some.shed(now_ns, self._guarded()).tolist()] if some is not None else []

    def forget(self, slots: Sequence[int]) -> None:
        """Forget these slots entirely; the numbers may be reused for other blocks."""
        self.let_go(*slots)
        self._guarded()
        self.policy.forget(as_slots(slots))

    def _guarded(self, protected: Collection[int] = ()) -> Collection[int]:
        """Report changed pins to the policy; return the slots that it may not choose besides."""
        if not self._counts:
            return {*self.held, *protected} if protected else self.held
        if self._changed:
            pins = [slot for slot in self._changed if slot in self.held and slot not in self._told]
            ends = [slot for slot in self._changed if slot in self._told and slot not in self.held]
            self._changed.clear()
            if pins:
                self.policy.pin(as_slots(pins))
                self._told.update(dict.fromkeys(pins))
            if ends:
                self.policy.unpin(as_slots(ends))
                for slot in ends:
                    del self._told[slot]
        return protected


def _rank_only(lease: Lease) -> bool:
    """Return whether a lease has no time of expiry: then it leaves that of a block as it is."""
    return lease.lease_s == lease.max_age_s == math.inf


def device_lease(config: Config, lease: str | Lease) -> Lease:
    """Return the lease of a class, as the configured policy of devices defines it."""
    if isinstance(lease, Lease) and not _rank_only(lease):
        return lease
    name, options = config.selection("gpu")
    checked: Any = base.configure(CATALOGUE[name].config, name, options)
    classes: dict[str, Lease] = checked.classes()
    return classes.get(lease, Lease()) if isinstance(lease, str) else classes[""]


class KeyedPolicy:
    """Content of one place, by key, and its order of eviction. Not thread-safe.

    Args:
        policy: A fresh policy, not shared.

    Attributes:
        policy: The same, for queries.
        largest_bytes: Bytes of the largest block so far.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self.largest_bytes = policy, 1
        self._place = PolicyPlace("", "", policy)
        self._slots: dict[bytes, int] = {}  # slots of residents and of ghosts
        self._keys: dict[int, bytes] = {}
        self._here: dict[bytes, dict[str, Any]] = {}  # with the terms of its insert
        self._terms: dict[str, Any] = {}  # of the last insert, one object for equal ones
        self._ends: dict[bytes, float] = {}  # time when a rank above the default falls
        self._ghosts: dict[bytes, None] = {}  # the oldest first
        self._pins: Counter[bytes] = Counter()
        self._free: list[int] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._here

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._here)

    def insert(
        self,
        now_ns: int,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        *,
        n_bytes: int = 1,
        lease: str | Lease = "",
        **said: Any,
    ) -> None:
        """Insert blocks, root to leaf.

        Args:
            now_ns: Time.
            keys: Keys of the blocks; one that is resident is accessed.
            parents: The key of each block's parent; an unknown one counts as none.
            n_bytes: Bytes of each.
            lease: Lease of each.
            **said: Further arguments of `Policy.insert`.
        """
        slots = [self._slot(key) for key in keys]
        above = [self._slots.get(parent, -1) for parent in parents]
        said["n_bytes"] = n_bytes
        if said != self._terms:
            self._terms = said
        for key in keys:
            self._here.setdefault(key, self._terms)
            self._ghosts.pop(key, None)
        self.largest_bytes = max(self.largest_bytes, n_bytes)
        later = isinstance(lease, Lease) and lease.rank >= DEFAULT_RANK and _rank_only(lease)
        first = "" if later else lease  # with the default class's time of expiry
        self.policy.insert(now_ns, as_slots(slots), as_slots(above), lease=first, **said)
        if later:
            self.retain(now_ns, dict.fromkeys(keys, lease))
        self._lend(now_ns, keys, lease)
        self._lay_ghosts()

    def retain(self, now_ns: int, leases: Mapping[bytes, str | Lease]) -> None:
        """Record the use of blocks, and that they stay for a lease at least; skip absent ones."""
        here = ((key, (lease, self._here[key])) for key, lease in leases.items() if key in self)
        for (lease, said), run in groupby(here, lambda each: each[1]):
            keys = [key for key, _ in run]
            above = np.full(len(keys), -1)
            if isinstance(lease, Lease) and _rank_only(lease):
                lease = replace(lease, lease_s=_LEAST_S, max_age_s=_LEAST_S)
            self.policy.insert(now_ns, as_slots(self._known(keys)), above, lease=lease, **said)
            self._lend(now_ns, keys, lease)

    def retained_bytes(self, now_ns: int) -> int:
        """Return the bytes of the blocks with a rank above the default; O(their number)."""
        return sum(self._here[key]["n_bytes"] for key, end in self._ends.items() if end > now_ns)

    def access(self, now_ns: int, keys: Iterable[bytes], visit: Visit = NO_VISIT) -> None:
        """Record a request's use of blocks, root to leaf; absent ones become ghosts."""
        asked = list(keys)
        for key in asked:
            if key not in self._slots:
                self._slot(key)
                self._ghosts[key] = None
        if asked:
            self.policy.access(now_ns, as_slots(self._known(asked)), visit)
            self._lay_ghosts()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks that left for another reason than `evict`; absent ones are skipped."""
        gone = [key for key in dict.fromkeys(keys) if key in self._here]
        self.policy.remove(as_slots(self._known(gone)))
        self._left(gone)

    def pin(self, keys: Collection[bytes]) -> None:
        """Pin known blocks until as many `unpin`; nests."""
        self._pins.update(keys)
        self._place.hold(*self._known(keys))

    def unpin(self, keys: Collection[bytes]) -> None:
        """End one `pin` of each block."""
        for key in keys:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            elif self._pins.pop(key, 0):
                self._place.let_go(self._slots.get(key, -1))

    def evict(self, now_ns: int, n: int, protected: Iterable[bytes] = ()) -> list[bytes] | None:
        """Evict `n` blocks, none of them pinned or protected; do nothing if there are fewer.

        Leaves go first; an evictable block above a pinned one may be evicted all the same.

        Returns:
            The keys of the evicted blocks, or None.
        """
        place, kept = self._place, {*self._known(protected)}
        if (victims := place.evict(now_ns, n, kept)) is not None:
            return self._gave_up(victims.tolist())
        kept |= place.held.keys()
        here = [slot for slot in self._known(self._here) if slot not in kept]
        if len(here) < n or isinstance(self.policy, Tenants):  # reserves of other tenants
            return None
        chosen = sorted(here, key=self.policy.priority)[:n]
        self.policy.remove(as_slots(chosen))
        return self._gave_up(chosen)

    def shed(self, now_ns: int) -> list[bytes]:
        """Evict expired blocks, and those above the limits of tenants."""
        return self._gave_up([*self._place.expired(now_ns), *self._place.surplus(now_ns)])

    def _lend(self, now_ns: int, keys: Iterable[bytes], lease: str | Lease) -> None:
        if isinstance(lease, Lease) and lease.rank > DEFAULT_RANK:
            end = now_ns + lease.rank_s * 1e9
            self._ends.update((key, max(end, self._ends.get(key, 0.0))) for key in keys)

    def _slot(self, key: bytes) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[key], self._keys[slot] = slot, key
        return slot

    def _known(self, keys: Iterable[bytes]) -> list[int]:
        return [self._slots[key] for key in keys if key in self._slots]

    def _gave_up(self, victims: Iterable[int]) -> list[bytes]:
        gone = [self._keys[slot] for slot in victims]
        self._left(gone)
        return gone

    def _left(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del self._here[key]
            self._ends.pop(key, None)
            self._ghosts[key] = None
        self._lay_ghosts()

    def _lay_ghosts(self) -> None:
        """Forget the oldest ghosts, if there are too many; pinned ones stay."""
        excess = len(self._ghosts) - max(LEAST_GHOSTS, GHOSTS_PER_RESIDENT * len(self._here))
        if excess <= 0:
            return
        laid = [key for key in self._ghosts if not self._pins[key]][:excess]
        self._place.forget(self._known(laid))
        for key in laid:
            del self._ghosts[key]
            slot = self._slots.pop(key)
            del self._keys[slot]
            self._free.append(slot)


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
        from flowkv.tiers.frame import Keyring

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
