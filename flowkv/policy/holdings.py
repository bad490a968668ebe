"""What a place of several tenants knows: whose each block is, and how that is carried over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from flowkv.policy.base import Policy, Slots, Visit
from flowkv.policy.order.image import seal, unseal
from flowkv.policy.quota import Account, Quota
from flowkv.policy.tenancy import Tenancy, accounts_of, models_of, tenancy_of

SHARED = 1 << 62
"""The account of all tenants without a quota."""


class Holdings(Policy):
    """Accounts, owners and pins of `flowkv.policy.tenants.Tenants`.

    Args:
        make: Makes a policy for one tenant.
        quotas: Tenant -> quota.
        default: Quota of all others.
    """

    name = "tenants"

    def __init__(
        self,
        make: Callable[[], Policy],
        quotas: Mapping[int, Quota] | None = None,
        default: Quota = Quota(),  # noqa: B008, frozen
    ) -> None:
        self._make, self._quotas, self._default = make, dict(quotas or {}), default
        self._accounts: dict[int, Account] = {}
        self._owner: dict[int, int] = {}
        self._here: dict[int, tuple[int, int]] = {}  # resident slot -> its parent, its bytes
        self._below: dict[int, set[int]] = {}  # resident children
        self._pins: Counter[int] = Counter()
        self._requests: dict[int, int] = {}
        self._untold: tuple[int, Slots, Visit] | None = None
        self._models: dict[int, bytes] = {}  # brought, for tenants that are not known yet
        self._digest, self._now = 0, -(1 << 61)

    @property
    def reserved_bytes(self) -> int:
        """Sum of all reserves."""
        return sum(quota.reserve_bytes for quota in self._quotas.values())

    def used_bytes(self, tenant: int) -> int:
        """Bytes of a tenant's resident blocks, or of all whose quota is the default."""
        account = self._accounts.get(self._payer(tenant))
        return account.used if account is not None else 0

    # ---- carrying it over

    def save_model(self) -> bytes:
        """What the tenants' policies have learned, each for itself, for `load_model` elsewhere."""
        learned = {tenant: account.learned() for tenant, account in self._accounts.items()}
        known = {tenant: model for tenant, model in learned.items() if model}
        return msgspec.msgpack.encode(self._models | known)

    def load_model(self, saved: bytes) -> None:
        """Starts warm: each tenant with what it had learned itself, and with nobody else's.

        Raises:
            ConfigError: If it is damaged or of another version.
        """
        models = models_of(saved)
        for tenant in models.keys() & self._accounts.keys():
            self._accounts[tenant].learn(models.pop(tenant))
        self._models = models

    def snapshot(self) -> bytes:
        """See `Policy.snapshot`. Of all tenants, with the snapshots of their policies."""
        untold = self._untold
        tenancy = Tenancy(
            accounts=[(t, a.policy.snapshot(), a.largest) for t, a in self._accounts.items()],
            owner=list(self._owner.items()),
            here=[(slot, *rest) for slot, rest in self._here.items()],
            pins=list(self._pins.items()),
            requests=list(self._requests.items()),
            untold=None if untold is None else (untold[0], untold[1].tolist(), untold[2]),
            digest=self._digest,
            now=self._now,
        )
        return seal(self.name, None, {"tenancy": tenancy, "models": self._models})

    def restore(self, snapshot: bytes) -> None:
        """See `Policy.restore`. Nothing has changed if it is refused."""
        values = unseal(snapshot, self.name, None)
        found = tenancy_of(values)
        heir = object.__new__(type(self))
        Holdings.__init__(heir, self._make, self._quotas, self._default)
        heir._models = models_of(msgspec.msgpack.encode(values.get("models")))
        heir._owner = dict(found.owner)
        heir._here = {slot: (parent, n_bytes) for slot, parent, n_bytes in found.here}
        for slot, parent, _ in found.here:
            if parent >= 0:
                heir._below.setdefault(parent, set()).add(slot)
        heir._pins, heir._requests = Counter(dict(found.pins)), dict(found.requests)
        if found.untold is not None:
            now, slots, visit = found.untold
            heir._untold = now, np.array(slots, np.int64), Visit(*visit)
        heir._digest, heir._now = found.digest, found.now
        heir._accounts = accounts_of(found, self._make, self._quota)
        vars(self).update(vars(heir))

    # ---- parts

    def _clock(self, now_ns: int) -> int:
        """The time; never less than before, for a policy that is made only now as well."""
        self._now = max(now_ns, self._now)
        return self._now

    def _account(self, tenant: int) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(self._make(), self._quota(tenant))
            if tenant in self._models:
                account.learn(self._models.pop(tenant))
        return account

    def _payer(self, tenant: int) -> int:
        """The account of a tenant: its own where it has a quota; all others share one."""
        own = tenant in self._quotas or self._default != Quota()
        return tenant if own else SHARED

    def _quota(self, tenant: int) -> Quota:
        return self._quotas.get(tenant, self._default)

    def _parts(self, slots: Slots) -> list[tuple[int, Slots]]:
        """The slots of each tenant that owns some, in order; unknown ones belong to nobody."""
        owners = [self._owner.get(s, -1) for s in slots.tolist()]
        kinds = sorted(set(owners) - {-1})
        if len(kinds) == 1 and -1 not in owners:
            return [(kinds[0], slots)]
        each = np.array(owners, np.int64)
        return [(t, slots[each == t]) for t in kinds]

    def _of(self, tenant: int, slots: Slots) -> Slots:
        return np.array([s for s in slots.tolist() if self._owner.get(s) == tenant], np.int64)

    def _tell(self, tenant: int, account: Account) -> None:
        """The request whose blocks nobody owned is this tenant's."""
        if self._untold is not None:
            then, slots, visit = self._untold
            self._untold = None
            if visit.request >= 0:
                self._requests[visit.request] = tenant
            account.policy.access(then, slots, visit)

    def _hand_over(self, slot: int, tenant: int) -> None:
        """A slot that is not resident belongs to this tenant now, and so do its pins."""
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
                for child in self._below.pop(s, ()):  # a root, also if the number comes back
                    self._here[child] = -1, self._here[child][1]
                account = self._accounts[self._owner[s]]
                account.used -= n_bytes
                account.count -= 1
