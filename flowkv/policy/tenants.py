"""Quotas: one policy per tenant, a reserve that others cannot touch, and a limit for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import NO_SLOTS, NO_VISIT, Slots, Visit
from flowkv.policy.config import Lease
from flowkv.policy.holdings import Holdings
from flowkv.policy.quota import Account, chains_above, evictable

MASK = (1 << 64) - 1


class Tenants(Holdings):
    """Gives up what the tenants' own policies would, from the tenant whose loss is least.

    Tenants above their limit go first, the one that is furthest above. Then the block of smallest
    priority among those that the tenants' policies would give up next. Nothing of a tenant goes
    that would take it below its reserve, be it by a part of its largest block: so reserves are best
    whole numbers of blocks, and must fit the place together.

    A block belongs to the tenant that it was inserted for, until `forget`. A request belongs to
    the tenant that it names, else of its first known block, else of the blocks that it inserts.
    Tenants without a quota of any kind share one policy.

    Args:
        make: Makes a policy for one tenant.
        quotas: Tenant -> quota.
        default: Quota of all others.
    """

    # ---- what happens

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
        """See `Policy.insert`."""
        now_ns, payer = self._clock(now_ns), self._payer(tenant)
        account = self._account(payer)
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
        said = {"n_bytes": n_bytes, "cost_ns": cost_ns, "lease": lease, "tenant": tenant}
        account.policy.insert(now_ns, slots[mine], parents[mine], **said)  # type: ignore[arg-type]
        for t, theirs in self._parts(slots[~mine]):
            self._accounts[t].policy.access(now_ns, theirs)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """See `Policy.access`."""
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
        for t, theirs in parts:
            if t == first:
                strange = [s for s in slots.tolist() if self._owner.get(s, first) == first]
                self._accounts[t].policy.access(now_ns, np.array(strange, np.int64), visit)
            else:
                self._accounts[t].policy.access(now_ns, theirs)

    def remove(self, slots: Slots) -> None:
        """See `Policy.remove`."""
        for t, theirs in self._parts(slots):
            self._accounts[t].policy.remove(theirs)
        self._drop(slots)

    def forget(self, slots: Slots) -> None:
        """See `Policy.forget`."""
        gone = np.array([s for s in slots.tolist() if s not in self._here], np.int64)
        for account in self._accounts.values():  # one may know of a block that it does not own
            account.policy.forget(gone)
        for s in gone.tolist():
            self._owner.pop(s, None)
        if self._untold is not None:
            then, told, visit = self._untold
            self._untold = then, told[~np.isin(told, gone)], visit

    def complete(self, now_ns: int, request: int, *, stop: int = 0, output_tokens: int = 0) -> None:
        """See `Policy.complete`."""
        now_ns = self._clock(now_ns)
        account = self._accounts.get(self._requests.pop(request, -1))
        if account is not None:
            account.policy.complete(now_ns, request, stop=stop, output_tokens=output_tokens)

    def abort(self, now_ns: int, request: int) -> None:
        """See `Policy.abort`."""
        now_ns = self._clock(now_ns)
        account = self._accounts.get(self._requests.pop(request, -1))
        if account is not None:
            account.policy.abort(now_ns, request)

    def pin(self, slots: Slots) -> None:
        """See `Policy.pin`."""
        self._pins.update(slots.tolist())
        for t, theirs in self._parts(slots):
            if self._accounts[t].pins:
                self._accounts[t].policy.pin(theirs)

    def unpin(self, slots: Slots) -> None:
        """See `Policy.unpin`."""
        pinned = np.array([s for s in slots.tolist() if self._pins[s] > 0], np.int64)
        self._pins -= Counter(pinned.tolist())  # drops what is at zero
        for t, theirs in self._parts(pinned):
            if self._accounts[t].pins:
                self._accounts[t].policy.unpin(theirs)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """See `Policy.hint`. Told to whom the last block belongs."""
        now_ns = self._clock(now_ns)
        tenant = self._owner.get(int(slots[-1])) if len(slots) else None
        if tenant is not None:
            self._accounts[tenant].policy.hint(now_ns, self._of(tenant, slots), eta_ns, sigma)

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """See `Policy.enqueue`. Told to whom the last block belongs."""
        now_ns = self._clock(now_ns)
        self.abort(now_ns, request)
        tenant = self._owner.get(int(slots[-1])) if len(slots) else None
        if tenant is not None:
            self._requests[request] = tenant
            self._accounts[tenant].policy.enqueue(now_ns, request, self._of(tenant, slots))

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """See `Policy.invalidate`."""
        now_ns = self._clock(now_ns)
        account = self._accounts.get(self._payer(tenant))
        if account is not None:
            account.policy.invalidate(now_ns, tenant)

    # ---- what is decided

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """See `Policy.evict`. None also where more would touch somebody's reserve."""
        if n < 0:
            raise ConfigError(f"cannot evict {n} blocks", "Ask for none or more")
        now_ns = self._clock(now_ns)
        guarded = {int(s) for s in protected}
        can = self._evictable(guarded)
        if n > sum(can.values()):
            return None
        victims: list[int] = []
        while len(victims) < n:
            tenant = self._poorest(can, guarded)
            took = self._take(tenant, 1 if len(can) > 1 else n - len(victims), guarded)
            victims += took
            can[tenant] -= len(took)
            if can[tenant] <= 0:
                del can[tenant]
        return self._answer(victims)

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """See `Policy.displace`. Down to the reserves, as `evict`; and what is above a limit."""
        now_ns = self._clock(now_ns)
        guarded = {int(s) for s in protected}
        can = self._evictable(guarded)
        victims: list[int] = []
        while len(victims) < n and can:
            tenant = self._poorest(can, guarded)
            took = self._take(tenant, 1, guarded, rate)
            victims += took
            can[tenant] -= len(took)
            if not took or can[tenant] <= 0:
                del can[tenant]
        return self._answer(victims) if victims else NO_SLOTS.copy()

    def shed(self, now_ns: int, protected: Collection[int] = ()) -> Slots:
        """Gives up what tenants have above their limits, as far as it may go."""
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
        """See `Policy.admit`. Blocks that nobody is known to own are admitted."""
        now_ns = self._clock(now_ns)
        answer = np.ones(len(slots), np.bool_)
        owners = np.array([self._owner.get(s, -1) for s in slots.tolist()], np.int64)
        for t in np.unique(owners[owners >= 0]).tolist():
            answer[owners == t] = self._accounts[t].policy.admit(now_ns, slots[owners == t])
        return answer

    def expired(self, now_ns: int) -> Slots:
        """See `Policy.expired`."""
        now_ns = self._clock(now_ns)
        parts = [account.policy.expired(now_ns) for account in self._accounts.values()]
        return np.concatenate([NO_SLOTS, *parts])

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """See `Policy.wanted`."""
        now_ns = self._clock(now_ns)
        parts = [account.policy.wanted(now_ns, n) for account in self._accounts.values()]
        slots = np.concatenate([NO_SLOTS, *(part[0] for part in parts)])
        worth = np.concatenate([np.empty(0), *(part[1] for part in parts)])
        best = np.argsort(-worth, kind="stable")[:n]
        return slots[best], worth[best]

    def priority(self, slot: int) -> float:
        """See `Policy.priority`. Quotas are not in it."""
        tenant = self._owner.get(slot)
        return -math.inf if tenant is None else self._accounts[tenant].policy.priority(slot)

    def resident(self) -> Sequence[int]:
        """See `Policy.resident`."""
        return list(self._here)

    def digest(self) -> int:
        """64-bit rolling hash of the decisions, those of the tenants' policies included."""
        value = self._digest
        for account in self._accounts.values():
            value = (value * 0x9E37_79B9_7F4A_7C15 ^ account.policy.digest()) & MASK
        return value

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """See `Policy.weakest`."""
        now_ns = self._clock(now_ns)
        guarded = {int(s) for s in protected}
        can = self._evictable(guarded)
        if not can:
            return -1
        account = self._accounts[self._poorest(can, guarded)]
        return account.policy.weakest(self._now, self._shield(account, guarded))

    # ---- parts

    def _evictable(self, guarded: Collection[int]) -> dict[int, int]:
        """Blocks that each tenant can give up leaf by leaf and may, down to its reserve."""
        stuck = chains_above((*self._pins, *guarded), self._here)
        return evictable(self._accounts, Counter(self._owner[s] for s in stuck))

    def _poorest(self, can: Collection[int], guarded: set[int]) -> int:
        """Whose turn it is to lose a block, of these tenants."""
        if len(can) == 1:
            return next(iter(can))

        def turn(tenant: int) -> tuple[float, ...]:
            account = self._accounts[tenant]
            if account.excess > 0:
                return 0, -account.excess, tenant
            slot = account.policy.weakest(self._now, self._shield(account, guarded))
            return 1, account.policy.priority(slot), tenant

        return min(can, key=turn)

    def _shield(self, account: Account, guarded: set[int]) -> set[int]:
        """What a tenant's policy must be told not to give up."""
        return guarded if account.pins else guarded | set(self._pins)

    def _take(self, tenant: int, n: int, guarded: set[int], rate: float = math.nan) -> list[int]:
        """Some victims of one tenant, worth less than `rate` if that is given and it may have them.

        None if it has no more to give.
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
