"""The `Policy` protocol over the compiled order, and the simple policies on top of it.

They are recency (`LRU`), decayed frequency (`LfuTtl`), adaptive replacement (`ARC`) and time saved
per byte (`CostAware`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import (
    LONGEST_S,
    NEVER_NS,
    NO_SLOTS,
    NO_VISIT,
    ArcConfig,
    CostAwareConfig,
    Lease,
    LeaseConfig,
    LfuTtlConfig,
    LruConfig,
    Policy,
    Slots,
    Visit,
    configure,
)
from flowkv.policy.order import compiled

FIRST_CAPACITY = 1024
TENANT_LIMIT = 1 << 24


def as_slots(slots: object) -> Slots:
    """Return a contiguous, writable int64 vector, the one type of the compiled calls."""
    if type(slots) is np.ndarray and slots.dtype == np.int64 and slots.ndim == 1:
        flags = slots.flags
        return slots if flags.c_contiguous and flags.writeable else slots.copy()
    if isinstance(slots, Collection) and not isinstance(slots, (Sequence, np.ndarray)):
        return np.fromiter(slots, np.int64, len(slots)) if slots else NO_SLOTS
    return np.array(slots, dtype=np.int64).reshape(-1)


class LeafOrder(Policy):
    """Policy that evicts leaves only: a block goes after all its resident children.

    Among the leaves, in this order: the expired; those hinted never to be used again; the others by
    rank (`Lease`), then by key; those that a queued request will use. Of equals the deepest goes
    first, then the smallest slot. The depth of a block is fixed when it is inserted: one more than
    its parent's, or, without a resident parent, its place in the array, since arrays run from root
    to leaf. So the blocks of one request go deepest first even where no parent is known.

    *Key.* The static key of a decayed access count (`compiled.static_key`). The count of a block
    outlives its residence until `forget`. Several inserts and an access at one `now_ns` are one
    access; two accesses are two.

    *Hints.* A block that is expected back in `eta_ns` competes as one that has been unused for the
    remaining time; once the time has passed, as one that was used at that time. `sigma` is not
    needed. A block above several chains goes by the earliest hint. `NEVER_NS` holds for the chain's
    last block and those above it that no other chain uses. A hint ends with the block's next use.

    *Leases.* A block expires at min(last access + lease, birth + max age) of its class, a parent
    not before its resident children. No access revives it, only `insert` does, which begins a new
    life; an expired parent is no parent. An insert that names a lease for a block that is resident
    already prolongs its lease and raises its rank, and never the opposite; of equal ranks the
    longer time counts.

    Children of a removed parent stay resident, as roots. A resident block that is inserted again
    takes the given parent if it has none. Memory: 128 bytes per slot number up to the largest one
    used, 16 per leaf, and 16 where leases or hints are used.

    Args:
        tau_ns: Half-life of a block's access count in nanoseconds; 0 for recency alone.
        leases: Lease classes.
    """

    name = "leaf-order"

    def __init__(self, tau_ns: int = 0, leases: LeaseConfig | None = None) -> None:
        self.config = leases or LeaseConfig()
        self._state = np.zeros(compiled.LISTS + compiled.TENANTS + 1, np.int64)
        self._state[compiled.CLOCK] = -compiled.CLOCK_LIMIT
        self._state[compiled.TAU] = tau_ns
        heaps = np.zeros((compiled.HEAPS, 0, 2), np.int64)
        self._order: tuple[NDArray[Any], ...] = np.zeros(0, compiled.NODE), heaps, self._state
        self._queued: dict[int, Slots] = {}
        self._grow(FIRST_CAPACITY)
        classes = self.config.classes().items()
        self._leases = {name: _numbers(lease, name != "") for name, lease in classes}

    def _welcome(self, tenant: int) -> None:
        """Make room for the list of a tenant's blocks."""
        if not 0 <= tenant < TENANT_LIMIT:
            raise ConfigError(f"tenant {tenant}", "Number tenants densely from 0")
        old = self._state
        self._state = np.zeros(compiled.LISTS + compiled.TENANTS + 2 * (tenant + 1), np.int64)
        self._state[: len(old)] = old
        self._order = (*self._order[:2], self._state)

    def _grow(self, room: int) -> None:
        """Make room for slots below `room`: double, so that growing costs O(1) per slot."""
        old, new = len(self._order[0]), max(room, 2 * len(self._order[0]))
        nodes, heaps = np.zeros(new, compiled.NODE), np.zeros((compiled.HEAPS, new, 2), np.int64)
        nodes[:old], heaps[:, :old] = self._order[:2]
        nodes["place"][old:] = nodes["due"][old:] = -1
        self._order = nodes, heaps, self._state

    def _call(self, kernel: Callable[..., None], slots: Slots, *said: object) -> None:
        """Make a compiled call about slots that may be new, after making room for them."""
        self._fit(slots)
        kernel(*self._order, slots, *said)

    def _fit(self, slots: Slots) -> Slots:
        """Return the valid slot numbers among these, and make room for them."""
        room = compiled.room_for(len(self._order[0]), slots)
        if room < 0:
            slots = slots[(slots >= 0) & (slots < compiled.SLOT_LIMIT)]
            room = compiled.room_for(len(self._order[0]), slots)
        if room > 0:
            self._grow(room)
        return slots

    def insert(
        self,
        now_ns: int,
        slots: Slots,
        parents: Slots,
        *,
        n_bytes: int = 1,
        cost_ns: int = 0,
        lease: str | Lease = "",
        tenant: int = 0,
    ) -> None:
        """Add blocks that became resident, root to leaf; `parents[i]` is a slot or -1.

        All blocks count alike, regardless of `n_bytes`.

        Raises:
            ConfigError: The arrays differ in length or hold an invalid slot number, or the lease
                class is unknown.
        """
        slots, parents = as_slots(slots), as_slots(parents)
        terms, extra = self.terms(slots, parents, lease, tenant), self._extra(n_bytes, cost_ns)
        room = compiled.room_for(len(self._order[0]), slots)
        if room < 0:
            raise no_slot()
        if room > 0:
            self._grow(room)
        self._insert(slots, parents, terms, (now_ns, tenant, extra))

    def terms(self, slots: Slots, parents: Slots, lease: str | Lease, tenant: int) -> Slots:
        """Return the lease of an insert as a vector, after its arrays and tenant are checked.

        Raises:
            ConfigError: The arrays differ in length, or the lease class or tenant is unknown.
        """
        if len(slots) != len(parents):
            raise ConfigError(
                f"insert got {len(slots)} slots and {len(parents)} parents",
                "Pass one parent per slot, -1 where it is unknown",
            )
        if not 0 <= tenant < len(self._state) - compiled.LISTS - compiled.TENANTS:
            self._welcome(tenant)
        return self._lease(lease)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf.

        For blocks that are not resident, only hints end.
        """
        compiled.access(*self._order, as_slots(slots), now_ns)
        if self._queued and visit.request in self._queued:
            compiled.queue(*self._order, self._queued.pop(visit.request), -1)

    def remove(self, slots: Slots) -> None:
        """Remove blocks that left for another reason than `evict`.

        Children of a removed block stay, as roots.
        """
        compiled.remove(*self._order, as_slots(slots))

    def forget(self, slots: Slots) -> None:
        """Forget slots that are not resident; the numbers may be reused for other blocks.

        Their counts and hints end; resident blocks are ignored.
        """
        compiled.forget(*self._order, as_slots(slots))

    def abort(self, now_ns: int, request: int) -> None:
        """Cancel a request that was enqueued."""
        if request in self._queued:
            compiled.queue(*self._order, self._queued.pop(request), -1)

    def pin(self, slots: Slots) -> None:
        """Pin blocks, resident or not, against eviction until as many `unpin`; nests.

        Blocks above a pinned block stay as well, while both are resident.
        """
        self._call(compiled.pin, as_slots(slots), 1)

    def unpin(self, slots: Slots) -> None:
        """Release one `pin` of each block. Slots that are not pinned are ignored."""
        compiled.pin(*self._order, as_slots(slots), -1)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects the next use of this chain in about `eta_ns`.

        The effect is described in the notes of this class.
        """
        self._call(compiled.hint, as_slots(slots), now_ns, min(eta_ns, NEVER_NS))

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """Record that a queued request will use this chain, until its `access` or `abort`.

        A repeated `enqueue` of a request replaces its chain.
        """
        self.abort(now_ns, request)
        slots = as_slots(slots).copy()
        self._call(compiled.queue, slots, 1)
        self._queued[request] = slots

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """Expire all present blocks of a tenant at once, as if their leases had run out.

        O(1) here; the next call that decides does the rest, once per block.
        """
        if not 0 <= tenant < len(self._state) - compiled.LISTS - compiled.TENANTS:
            tenant = -1  # an unknown tenant has no blocks; only the clock advances
        self._tick(now_ns)
        if tenant >= 0:
            compiled.invalidate(*self._order, now_ns, tenant)

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Admit all blocks: these policies choose victims only."""
        self._tick(now_ns)
        return np.ones(len(slots), np.bool_)

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Remove and return `n` victims, none pinned or protected; else None, with nothing changed.

        Victims are in eviction order, children before parents.

        None if fewer than `n` blocks are neither pinned or protected, nor above such a block. For
        blocks in use beyond one call, pins are better: they cost an eviction nothing.

        Raises:
            ConfigError: If `n` is negative.
        """
        if n < 0:
            raise ConfigError(f"cannot evict {n} blocks", "Ask for none or more")
        if n > self._state[compiled.COUNT]:
            n = int(self._state[compiled.COUNT]) + 1  # fails as well, with a smaller array
        victims = np.empty(n, np.int64)
        return victims if self._evict(as_slots(protected), victims, now_ns) else None

    def expired(self, now_ns: int) -> Slots:
        """Return resident blocks with an expired lease: they never hit again and go first.

        Ascending; they stay until removed, evicted or inserted again.
        """
        count = self._tick(now_ns)
        if count == 0:
            return np.empty(0, np.int64)
        out = np.empty(count, np.int64)
        compiled.members(self._order[0], self._state, compiled.RUN_OUT, out)
        out.sort()
        compiled.record(self._state, out)
        return out

    def priority(self, slot: int) -> float:
        """Return the priority of a slot: smaller is evicted earlier; -inf if it is not resident.

        It is as of the last call; classes other than the default lie far off.
        """
        nodes = self._order[0]
        if not 0 <= slot < len(nodes) or nodes[slot]["birth"] == 0:
            return -np.inf
        if self._state[compiled.STALE]:
            self._tick(int(self._state[compiled.CLOCK]))
        return self._worth(slot)

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """Return the slot that `evict` of one would choose, for comparisons; -1 if there is none.

        O(1), and as long for each protected block as for a pin.
        """
        return int(compiled.peek(*self._order, as_slots(protected), now_ns))

    def resident(self) -> Sequence[int]:
        """Return the resident slots, ascending."""
        return [*np.flatnonzero(self._order[0]["birth"]).tolist()]

    def digest(self) -> int:
        """Return a 64-bit rolling hash of `evict`'s answers and `expired`'s non-empty ones."""
        return int(self._state[compiled.DIGEST]) & 0xFFFF_FFFF_FFFF_FFFF

    def __len__(self) -> int:
        return int(self._state[compiled.COUNT])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} resident, {self._state[compiled.BIRTHS]} ever)"

    # ---- compiled calls that a learned order answers otherwise

    def _insert(
        self, slots: Slots, parents: Slots, terms: Slots, said: tuple[int, int, int]
    ) -> None:
        """Insert blocks, whose slots there is room for."""
        compiled.insert(*self._order, slots, parents, terms, said)

    def _evict(self, guarded: Slots, victims: Slots, now_ns: int) -> bool:
        """Fill `victims`, or return False with no slot touched."""
        return bool(compiled.evict(*self._order, guarded, victims, now_ns))

    def _tick(self, now_ns: int) -> int:
        """Advance the clock; return how many blocks have run out."""
        return int(compiled.tick(*self._order, now_ns))

    def _worth(self, slot: int) -> float:
        """Return the static key of a resident block, in nanoseconds."""
        return float(compiled.worth(self._order[0], self._state, slot))

    def _extra(self, n_bytes: int, cost_ns: int) -> int:
        """Return the term that a block's worth adds to its key."""
        return 0

    def seldom(self) -> list[Callable[[], object]]:
        """Return calls that compile code which traffic reaches late; they spoil the policy."""
        return []

    def _lease(self, lease: str | Lease) -> Slots:
        """Return a lease as the compiled calls take it."""
        if isinstance(lease, Lease):
            return _numbers(lease, True)
        try:
            return self._leases[lease]
        except KeyError:
            known = ", ".join(sorted(filter(None, self._leases)))
            raise ConfigError(
                f"policy {self.name!r} knows no lease class {lease!r}",
                f"Use one of {known}, or define it with leases=",
            ) from None


def no_slot() -> ConfigError:
    """Return the error for an invalid slot number."""
    return ConfigError(
        f"slot numbers must lie in 0..{compiled.SLOT_LIMIT - 1}",
        "Number the blocks of a tier densely from 0",
    )


def _numbers(lease: Lease, explicit: bool) -> Slots:
    """Return a lease as a vector: lease, maximum age, rank, rank time, explicit."""
    times = (_ns(lease.lease_s), _ns(lease.max_age_s), lease.rank, _ns(lease.rank_s), explicit)
    return np.array(times, np.int64)


def _ns(seconds: float) -> int:
    return compiled.NEVER if seconds > LONGEST_S else max(1, round(seconds * 1e9))


class LRU(LeafOrder):
    """Policy that evicts the leaf with the oldest last request.

    The rule of SGLang's radix cache and of vLLM's reversed free list. All blocks of one request
    (one `now_ns`) are equally recent; ties go deepest first, then smallest slot.

    Args:
        **options: Fields of `LruConfig`: leases.
    """

    name = "lru"

    def __init__(self, **options: object) -> None:
        super().__init__(leases=configure(LruConfig, self.name, options))


class LfuTtl(LeafOrder):
    """Policy that evicts, among the leaves, expired blocks first and then the least frequent.

    *Frequency.* An access counts 1 and halves every `tau_s` seconds: c <- 1 + c * 2^(-dt/tau), the
    "combined recency and frequency" of LRFU (Lee et al., IEEE ToC 2001), kept as one static integer
    key. tau -> 0 is LRU, large tau is LFU. The count of a block outlives its residence until
    `forget`. Prefix hit ratio in replays of published traces, at 1 % of all blocks:

    | trace | LRU | tau 5 s | tau 15 s | tau 120 s |
    |---|---|---|---|---|
    | coding agents | .494 | .504 | .550 | .553 |
    | chat | .052 | .053 | .054 | .101 |
    | short agent runs | .489 | .477 | .412 | .227 |

    So the default is short; a half-life that does not fit costs more than a fitting one earns.

    *Leases.* A block expires at min(last access + lease, birth + max age) of its class, a parent
    not before its resident children. Expired blocks are reclaimed before any live one; no access
    revives them, only `insert` does, which begins a new life (an expired parent is no parent).
    Leases are for privacy, staleness and freeing memory. They do not raise the hit ratio,
    ageing does; a *short* lease after tool calls lowered it by ten points.

    Classes: "" (the default class), "turn_end", "tool_wait", "pinned_prefix", "one_shot",
    "ephemeral", and those of `leases=`. See `LfuTtlConfig` for their values.

    Args:
        **options: Fields of `LfuTtlConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "lfu-ttl"

    def __init__(self, **options: object) -> None:
        config = configure(LfuTtlConfig, self.name, options)
        super().__init__(round(config.tau_s * 1e9), config)


class ARC(LeafOrder):
    """Policy that evicts the longest unused leaf of the recency list or of the frequency list.

    The rule of vLLM's offloading (`ARCOffloadingManager`), after Megiddo and Modha (FAST 2003): T1
    holds blocks used once, T2 blocks used again, B1 and B2 record the blocks evicted from them. A
    use of a block in B1 raises the target size of T1 by max(1, |B2| // |B1|), one of B2 lowers it
    by max(1, |B1| // |B2|). A victim is taken from T1 while it has at least its target size. A
    block that comes back begins in T1. Each of B1 and B2 is at most as long as the cache is large,
    which is the largest number of blocks that an eviction has left.

    Differences to vLLM: only leaves are victims, so that no block stays resident without its
    prefix; of one request the deepest goes first; where the list in turn has no evictable leaf,
    the other gives one.

    Args:
        **options: Fields of `ArcConfig`: leases.
    """

    name = "arc"

    def __init__(self, **options: object) -> None:
        super().__init__(leases=configure(ArcConfig, self.name, options))
        self._state[compiled.MODE] = compiled.ARC


_MOST_EXTRA = compiled.CLOCK_LIMIT >> 2


class CostAware(LeafOrder):
    """Policy that evicts the leaf that saves least: count * (cost / bytes) ** alpha.

    For blocks of unequal kinds, such as pages of several codecs, state snapshots beside pages, or
    late tokens, which cost more than early ones. Where cost is in proportion to size, and where it
    is unknown, it is `LfuTtl`.

    The idea is that of GreedyDual-Size with frequency (Cao and Irani, USITS 1997; Cherkasova, HP
    Labs 1998), and of Marconi for prefixes (Pan et al., arXiv 2411.19379: recency, and work saved
    per byte). Those age by raising a floor at each eviction, or recompute a score; here counts
    decay with time, so that the product is one static key: K + alpha * tau * log2(cost / bytes)
    orders blocks by the product at every time.

    Args:
        **options: Fields of `CostAwareConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "cost-aware"

    def __init__(self, **options: object) -> None:
        config = configure(CostAwareConfig, self.name, options)
        tau_ns = max(1, round(config.tau_s * 1e9))
        super().__init__(tau_ns, config)
        self._scale, self._ns_per_byte = config.alpha * tau_ns, config.ns_per_byte

    def _extra(self, n_bytes: int, cost_ns: int) -> int:
        """Return half-life * alpha * log2 of the cost per byte, in nanoseconds."""
        per_byte = cost_ns / max(n_bytes, 1) if cost_ns > 0 else self._ns_per_byte
        extra = round(self._scale * compiled.log2(per_byte))
        return max(-_MOST_EXTRA, min(_MOST_EXTRA, extra))
