"""Quotas: one policy per tenant, with a reserve that other tenants cannot take, and a limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED
from flowkv.policy.base import NO_SLOTS, NO_VISIT, Learner, Policy, Slots, Visit, counts_pins

# Quotas of tenants, and their holdings.


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quota of a tenant: a guaranteed reserve, and a limit.

    Attributes:
        reserve_bytes: Bytes below which other tenants cannot evict its blocks.
        limit_bytes: Bytes above which `shed` evicts its blocks.
    """

    reserve_bytes: int = 0
    limit_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_bytes <= self.limit_bytes:
            raise ConfigError(
                f"a reserve of {self.reserve_bytes} bytes under a limit of {self.limit_bytes}",
                "Use 0 <= reserve_bytes <= limit_bytes",
            )


class TenantAccount:
    """Holdings of one tenant.

    Args:
        policy: Orders the tenant's blocks.
        quota: Quota of the tenant.

    Attributes:
        used: Bytes of resident blocks.
        count: Number of resident blocks.
        largest: Bytes of the largest block so far.
        pins: Whether the policy supports pins.
    """

    def __init__(self, policy: Policy, quota: Quota) -> None:
        self.policy, self.quota = policy, quota
        self.used = self.count = 0
        self.largest = 1
        self.pins = counts_pins(policy)

    def load_model(self, saved: bytes) -> None:
        """Load a model that the policy learned elsewhere, if the policy learns."""
        if isinstance(self.policy, Learner):
            self.policy.load_model(saved)

    @property
    def spare(self) -> int:
        """Bytes above the quota's reserve."""
        return self.used - self.quota.reserve_bytes

    @property
    def excess(self) -> float:
        """Bytes above the quota's limit."""
        return self.used - self.quota.limit_bytes


def chains_above(slots: Iterable[int], here: Mapping[int, tuple[int, int]]) -> set[int]:
    """Return the resident slots among these and above them; `here` is slot -> (parent, bytes)."""
    found: set[int] = set()
    for first in slots:
        s = first
        while s in here and s not in found:
            found.add(s)
            s = here[s][0]
    return found


SHARED = 1 << 62
"""Account of all tenants without a quota."""

MASK = (1 << 64) - 1


class Tenants(Policy):
    """Policy of several tenants: evicts from the tenant with the least loss, within quotas.

    Tenants above their limit lose blocks first, the furthest above before the others. Then goes
    the block of smallest priority among the next victims of all tenants' policies. No eviction may
    take a tenant below its reserve, be it by a part of its largest block: so reserves are best
    whole numbers of blocks, and must fit the place together.

    A block belongs to the tenant that it was inserted for, until `forget`. A request belongs to
    the tenant that it names, else of its first known block, else of the blocks that it inserts.
    Tenants without a quota of any kind share one policy.

    Args:
        make: Factory of a tenant's policy.
        quotas: Tenant -> quota.
    """

    name = "tenants"

    def __init__(
        self, make: Callable[[], Policy], quotas: Mapping[int, Quota] | None = None
    ) -> None:
        self._make, self._quotas = make, dict(quotas or {})
        self._accounts: dict[int, TenantAccount] = {}
        self._owner: dict[int, int] = {}
        self._queued: dict[int, Slots] = {}  # of requests without an owned block
        self._here: dict[int, tuple[int, int]] = {}  # resident slot -> its parent, its bytes
        self._below: dict[int, set[int]] = {}  # resident children
        self._pins: Counter[int] = Counter()
        self._requests: dict[int, int] = {}
        self._untold: tuple[int, Slots, Visit] | None = None
        self._models: dict[int, bytes] = {}  # loaded, for tenants without an account yet
        self._digest, self._now = 0, -(1 << 61)

    @property
    def reserved_bytes(self) -> int:
        """Sum of all tenants' reserves, in bytes."""
        return sum(quota.reserve_bytes for quota in self._quotas.values())

    def used_bytes(self, tenant: int) -> int:
        """Return the bytes of a tenant's account: its own, or the one of all without a quota."""
        account = self._accounts.get(self._payer(tenant))
        return account.used if account is not None else 0

    def excess_bytes(self, tenant: int) -> float:
        """Return the bytes of a tenant above its limit; negative below it."""
        account = self._accounts.get(self._payer(tenant))
        return -math.inf if account is None else account.excess

    # ---- carrying it over

    def save_model(self) -> bytes:
        """Return the learned models of all tenants' policies, for `load_model` elsewhere."""
        policies = {tenant: account.policy for tenant, account in self._accounts.items()}
        learned = {t: p.save_model() for t, p in policies.items() if isinstance(p, Learner)}
        known = {tenant: model for tenant, model in learned.items() if model}
        return msgspec.msgpack.encode(self._models | known)

    def load_model(self, saved: bytes) -> None:
        """Load saved models, each only into the policy of the same tenant.

        Raises:
            ConfigError: The bytes are damaged or of another version.
        """
        try:
            models = msgspec.msgpack.decode(saved, type=dict[int, bytes])
        except MALFORMED as error:
            raise ConfigError(
                f"these are no models of tenants ({error})", "Start without them"
            ) from None
        for tenant in models.keys() & self._accounts.keys():
            self._accounts[tenant].load_model(models.pop(tenant))
        self._models = models

    # ---- what happens

    def insert(self, now_ns: int, slots: Slots, parents: Slots, **said: Any) -> None:
        """Add blocks of a tenant; those of another one remain its own and are accessed."""
        now_ns, payer = self._clock(now_ns), self._payer(said.get("tenant", 0))
        account, n_bytes = self._account(payer), said.get("n_bytes", 1)
        if len(slots):
            self._tell(payer, account)
        owner, here = self._owner, self._here
        for s, p in zip(slots.tolist(), parents.tolist(), strict=True):
            if s not in here and owner.get(s) != payer:
                self._hand_over(s, payer)
            parent = p if p in here and owner[p] == owner[s] and p != s else -1
            if s not in here:
                here[s] = parent, n_bytes
                account.used += n_bytes
                account.count += 1
                account.largest = max(account.largest, n_bytes)
            elif here[s][0] not in here:
                here[s] = parent, here[s][1]
            if here[s][0] >= 0:
                self._below.setdefault(here[s][0], set()).add(s)
        mine = np.array([owner[s] == payer for s in slots.tolist()], np.bool_)
        account.policy.insert(now_ns, slots[mine], parents[mine], **said)
        for t, theirs in self._parts(slots[~mine]):
            self._accounts[t].policy.access(now_ns, theirs)
        self._tell_queued(now_ns)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf."""
        now_ns = self._clock(now_ns)
        parts = self._parts(slots)
        self._untold = None
        if visit.tenant >= 0:
            first = self._payer(visit.tenant)
            if all(t != first for t, _ in parts):
                parts.append((first, NO_SLOTS))
        elif not parts:
            self._untold = now_ns, slots.copy(), visit
            return
        else:
            first = next(self._owner[s] for s in slots.tolist() if s in self._owner)
        self._account(first)
        if visit.request >= 0:
            self._requests[visit.request] = first
            self._queued.pop(visit.request, None)
        for t, theirs in parts:
            if t == first:
                strange = [s for s in slots.tolist() if self._owner.get(s, first) == first]
                self._accounts[t].policy.access(now_ns, np.array(strange, np.int64), visit)
            else:
                self._accounts[t].policy.access(now_ns, theirs)

    def remove(self, slots: Slots) -> None:
        """Remove blocks that left for another reason than `evict`."""
        for t, theirs in self._parts(slots):
            self._accounts[t].policy.remove(theirs)
        self._drop(slots)

    def forget(self, slots: Slots) -> None:
        """Forget slots that are not resident; the numbers may be reused for other blocks."""
        gone = np.array([s for s in slots.tolist() if s not in self._here], np.int64)
        for account in self._accounts.values():  # a policy may know a block of another tenant
            account.policy.forget(gone)
        for s in gone.tolist():
            self._owner.pop(s, None)
        for request, queued in self._queued.items():
            self._queued[request] = queued[~np.isin(queued, gone)]
        if self._untold is not None:
            then, told, visit = self._untold
            self._untold = then, told[~np.isin(told, gone)], visit

    def complete(self, now_ns: int, request: int, *, stop: int = 0, output_tokens: int = 0) -> None:
        """Record the end of a request, and why it ended."""
        now_ns = self._clock(now_ns)
        account = self._accounts.get(self._requests.pop(request, -1))
        if account is not None:
            account.policy.complete(now_ns, request, stop=stop, output_tokens=output_tokens)

    def abort(self, now_ns: int, request: int) -> None:
        """Cancel a request that was enqueued or accessed."""
        now_ns = self._clock(now_ns)
        self._queued.pop(request, None)
        account = self._accounts.get(self._requests.pop(request, -1))
        if account is not None:
            account.policy.abort(now_ns, request)

    def pin(self, slots: Slots) -> None:
        """Pin blocks, resident or not, against eviction until as many `unpin`; nests."""
        self._pins.update(slots.tolist())
        for t, theirs in self._parts(slots):
            if self._accounts[t].pins:
                self._accounts[t].policy.pin(theirs)

    def unpin(self, slots: Slots) -> None:
        """Release one `pin` of each block."""
        pinned = np.array([s for s in slots.tolist() if self._pins[s] > 0], np.int64)
        self._pins -= Counter(pinned.tolist())  # drops counts of zero
        for t, theirs in self._parts(pinned):
            if self._accounts[t].pins:
                self._accounts[t].policy.unpin(theirs)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects the next use of this chain in about `eta_ns`.

        The hint goes to the policy of the last block's tenant.
        """
        now_ns = self._clock(now_ns)
        tenant = self._owner.get(int(slots[-1])) if len(slots) else None
        if tenant is not None:
            mine = [s for s in slots.tolist() if self._owner.get(s) == tenant]
            self._accounts[tenant].policy.hint(now_ns, np.array(mine, np.int64), eta_ns, sigma)

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """Record that a queued request will use this chain, until its `access` or `abort`.

        It goes to the policy of the tenant that owns the chain's last owned block, once there is
        one.
        """
        now_ns = self._clock(now_ns)
        self.abort(now_ns, request)
        self._queued[request] = slots.copy()
        self._tell_queued(now_ns)

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """Expire all present blocks of a tenant at once, as if their leases had run out."""
        now_ns = self._clock(now_ns)
        account = self._accounts.get(self._payer(tenant))
        if account is not None:
            account.policy.invalidate(now_ns, tenant)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Remove and return `n` victims, none pinned or protected; else None, with nothing changed.

        None also where `n` victims would take a tenant below its reserve.
        """
        if n < 0:
            raise ConfigError(f"cannot evict {n} blocks", "Ask for none or more")
        self._clock(now_ns)
        guarded = {int(s) for s in protected}
        can = self._evictable(guarded)
        if n > sum(can.values()):
            return None
        return self._answer(self._gather(can, n, guarded, math.nan))

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Evict up to `n` victims for a prefetch: only blocks worth less than those it brings.

        It stops at the reserves, as `evict`; blocks above a limit go in any case.
        """
        self._clock(now_ns)
        guarded = {int(s) for s in protected}
        victims = self._gather(self._evictable(guarded), n, guarded, rate)
        return self._answer(victims) if victims else NO_SLOTS.copy()

    def shed(self, now_ns: int, protected: Collection[int] = ()) -> Slots:
        """Evict blocks until every tenant is within its limit, as far as pins allow."""
        now_ns = self._clock(now_ns)
        victims: list[int] = []
        guarded = {int(s) for s in protected}
        for tenant, account in self._accounts.items():
            while account.excess > 0:
                took = self._take(tenant, 1, guarded)
                if not took:
                    break
                victims += took
        return self._answer(victims) if victims else NO_SLOTS.copy()

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Return which of these non-resident blocks are worth their bytes here.

        Blocks without a known owner are admitted.
        """
        now_ns = self._clock(now_ns)
        answer = np.ones(len(slots), np.bool_)
        owners = np.array([self._owner.get(s, -1) for s in slots.tolist()], np.int64)
        for t in np.unique(owners[owners >= 0]).tolist():
            answer[owners == t] = self._accounts[t].policy.admit(now_ns, slots[owners == t])
        return answer

    def expired(self, now_ns: int) -> Slots:
        """Return resident blocks with an expired lease: they never hit again and go first."""
        now_ns = self._clock(now_ns)
        parts = [account.policy.expired(now_ns) for account in self._accounts.values()]
        return np.concatenate([NO_SLOTS, *parts])

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return up to `n` ends of non-resident chains that are worth prefetching, best first."""
        now_ns = self._clock(now_ns)
        parts = [account.policy.wanted(now_ns, n) for account in self._accounts.values()]
        slots = np.concatenate([NO_SLOTS, *(part[0] for part in parts)])
        worth = np.concatenate([np.empty(0), *(part[1] for part in parts)])
        best = np.argsort(-worth, kind="stable")[:n]
        return slots[best], worth[best]

    def priority(self, slot: int) -> float:
        """Return the priority of a slot: smaller is evicted earlier; -inf if it is not resident.

        Quotas are not part of it.
        """
        tenant = self._owner.get(slot)
        return -math.inf if tenant is None else self._accounts[tenant].policy.priority(slot)

    def resident(self) -> Sequence[int]:
        """Return the slots that the policy records as resident, in no particular order."""
        return list(self._here)

    def digest(self) -> int:
        """Return a 64-bit rolling hash of the decisions, the tenants' policies included."""
        value = self._digest
        for account in self._accounts.values():
            value = (value * 0x9E37_79B9_7F4A_7C15 ^ account.policy.digest()) & MASK
        return value

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """Return the slot that `evict` of one would choose, for comparisons; -1 if none."""
        now_ns = self._clock(now_ns)
        guarded = {int(s) for s in protected}
        can = self._evictable(guarded)
        if not can:
            return -1
        account = self._accounts[self._poorest(can, guarded)]
        return account.policy.weakest(self._now, self._shield(account, guarded))

    # ---- parts

    def _evictable(self, guarded: Collection[int]) -> dict[int, int]:
        """Return how many blocks each tenant can give up leaf by leaf, down to its reserve."""
        stuck = Counter(self._owner[s] for s in chains_above((*self._pins, *guarded), self._here))
        can = {}
        for tenant, account in self._accounts.items():
            free = account.count - stuck[tenant]
            if account.quota.reserve_bytes:
                free = min(free, max(0, account.spare // account.largest))
            if free > 0:
                can[tenant] = free
        return can

    def _gather(self, can: dict[int, int], n: int, guarded: set[int], rate: float) -> list[int]:
        """Take up to `n` victims, one by one from the tenant in turn; see `_take`."""
        victims: list[int] = []
        while len(victims) < n and can:
            tenant = self._poorest(can, guarded)
            alone = len(can) == 1 and math.isnan(rate)
            took = self._take(tenant, n - len(victims) if alone else 1, guarded, rate)
            victims += took
            can[tenant] -= len(took)
            if not took or can[tenant] <= 0:
                del can[tenant]
        return victims

    def _poorest(self, can: Collection[int], guarded: set[int]) -> int:
        """Return which of these tenants loses the next block."""
        if len(can) == 1:
            return next(iter(can))

        def turn(tenant: int) -> tuple[float, ...]:
            account = self._accounts[tenant]
            if account.excess > 0:
                return 0, -account.excess, tenant
            slot = account.policy.weakest(self._now, self._shield(account, guarded))
            return 1, account.policy.priority(slot), tenant

        return min(can, key=turn)

    def _shield(self, account: TenantAccount, guarded: set[int]) -> set[int]:
        """Return the slots that a tenant's policy must not evict."""
        return guarded if account.pins else guarded | set(self._pins)

    def _take(self, tenant: int, n: int, guarded: set[int], rate: float = math.nan) -> list[int]:
        """Take some victims of one tenant; none if it has no more to give.

        With a `rate`, only blocks worth less than that, unless the tenant is above its limit.
        """
        account = self._accounts[tenant]
        shield = self._shield(account, guarded)
        got: Slots | None
        if math.isnan(rate) or account.excess > 0:
            got = account.policy.evict(self._now, n, shield)
        else:
            got = account.policy.displace(self._now, n, rate, shield)
        if got is None:
            return []
        self._drop(got)
        took: list[int] = got.tolist()
        return took

    def _answer(self, victims: list[int]) -> Slots:
        for s in (len(victims), *victims):
            self._digest = ((self._digest ^ s + 1) * 0xBF58_476D_1CE4_E5B9 + 1) & MASK
        return np.array(victims, np.int64)

    def _clock(self, now_ns: int) -> int:
        """Advance the clock and return the time; it never decreases for any tenant's policy."""
        self._now = max(now_ns, self._now)
        return self._now

    def _account(self, tenant: int) -> TenantAccount:
        account = self._accounts.get(tenant)
        if account is None:
            quota = self._quotas.get(tenant, Quota())
            account = self._accounts[tenant] = TenantAccount(self._make(), quota)
            if tenant in self._models:
                account.load_model(self._models.pop(tenant))
        return account

    def _payer(self, tenant: int) -> int:
        """Return the account of a tenant: its own where it has a quota, else the shared one."""
        return tenant if tenant in self._quotas else SHARED

    def _parts(self, slots: Slots) -> list[tuple[int, Slots]]:
        """Return the slots of each owning tenant, in order; slots without an owner are left out."""
        owners = [self._owner.get(s, -1) for s in slots.tolist()]
        kinds = sorted(set(owners) - {-1})
        if len(kinds) == 1 and -1 not in owners:
            return [(kinds[0], slots)]
        each = np.array(owners, np.int64)
        return [(t, slots[each == t]) for t in kinds]

    def _tell_queued(self, now_ns: int) -> None:
        """Enqueue queued requests with an owned block at the policy of that block's tenant."""
        for request, slots in list(self._queued.items()):
            owners = [self._owner[s] for s in slots.tolist() if s in self._owner]
            if owners:
                tenant = self._requests[request] = owners[-1]
                chain = [s for s in slots.tolist() if self._owner.get(s, tenant) == tenant]
                del self._queued[request]
                policy = self._accounts[tenant].policy
                policy.enqueue(now_ns, request, np.array(chain, np.int64))

    def _tell(self, tenant: int, account: TenantAccount) -> None:
        """Pass the last access without an owned block to this tenant, which inserts for it."""
        if self._untold is not None:
            then, slots, visit = self._untold
            self._untold = None
            if visit.request >= 0:
                self._requests[visit.request] = tenant
            account.policy.access(then, slots, visit)

    def _hand_over(self, slot: int, tenant: int) -> None:
        """Give a slot that is not resident, and its pins, to this tenant."""
        one, pins = np.array([slot]), self._pins[slot]
        old = self._accounts.get(self._owner.get(slot, -1))
        if old is not None:
            for _ in range(pins if old.pins else 0):
                old.policy.unpin(one)
            old.policy.forget(one)
        self._owner[slot] = tenant
        for _ in range(pins if self._accounts[tenant].pins else 0):
            self._accounts[tenant].policy.pin(one)

    def _drop(self, slots: Slots) -> None:
        for s in slots.tolist():
            if s in self._here:
                parent, n_bytes = self._here.pop(s)
                if parent in self._below:
                    self._below[parent].discard(s)
                for child in self._below.pop(s, ()):  # a root, also if the slot is reused
                    self._here[child] = -1, self._here[child][1]
                account = self._accounts[self._owner[s]]
                account.used -= n_bytes
                account.count -= 1
