"""The `Policy` base class: an order over slot ids, without I/O, torch or a clock of its own.

Who drives a policy owns identity and residency: it numbers blocks with small integers (*slots*),
tells the policy of one place what happens there, and asks which to give up. A slot names the same
block until `forget`, also while that block lies elsewhere or nowhere (a *ghost*): so a policy may
remember, and learn from what it should have kept. The same object runs in the simulator, in the
runtime and inside other engines' plug-in points (DESIGN D8). Parents are optional knowledge: where
they are known, a block is given up after its descendants, as a rule of choice.

A policy of your own needs the abstract methods; the others have a default that does nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, did_you_mean

Slots = NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, np.int64)

NEVER_NS = np.iinfo(np.int64).max
"""As `eta_ns`: will not be used again. `0` is soon."""

UNKNOWN_STOP, TOOL_USE, TURN_END, CUT_OFF = 0, 1, 2, 3
"""Why a response ended: not said; it calls a tool; the turn is over; length limit or abort."""


class Visit(NamedTuple):
    """The facts known about a request when it arrives; every field may be left out.

    Attributes:
        request: The driver's number for it, not used by another request that is under way; -1 if
            nothing more will be said about it.
        session: The application's conversation, any 62-bit number; -1 if unknown.
        tokens: Input tokens; 0 if unknown.
        blocks: Blocks of the whole request, known ones or not; 0 if unknown.
        tenant: Whose it is; -1 if unknown.
    """

    request: int = -1
    session: int = -1
    tokens: int = 0
    blocks: int = 0
    tenant: int = -1


NO_VISIT = Visit()


class Policy(ABC):
    """Decides what one place keeps. Deterministic: equal calls give equal answers and digests.

    `now_ns` never decreases from call to call; a smaller one is treated as the last one seen.
    Arrays that are passed in are neither kept nor written.

    Attributes:
        name: Its name in the catalogue.
    """

    name: str = ""

    # ---- what happens

    @abstractmethod
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
        """Blocks became resident here, root to leaf; `parents[i]` is a slot or -1.

        Counts as an access, unless one was counted at the same `now_ns` already.

        Args:
            now_ns: Time.
            slots: Blocks. One that was resident is accessed, and takes its parent if it has none.
            parents: Their parents.
            n_bytes: Bytes of each.
            cost_ns: Time to compute each of them anew; 0 if unknown.
            lease: Lease class, or a lease; see `LeaseConfig`.
            tenant: Whose they are.
        """

    @abstractmethod
    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """A request uses these known blocks, root to leaf.

        Those not resident here are ghosts, or lie elsewhere; an order ignores them, a learner need
        not. `insert` of the blocks that the request adds, and of those that come back for it,
        follows at the same or a later time.
        """

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Blocks left for another reason than `evict`. Slots not resident are ignored."""

    def forget(self, slots: Slots) -> None:
        """Nobody knows these blocks any more: their slots may name others next. Not resident."""

    def complete(
        self, now_ns: int, request: int, *, stop: int = UNKNOWN_STOP, output_tokens: int = 0
    ) -> None:
        """A request ended: what could only be known now. An unknown number is ignored."""

    def abort(self, now_ns: int, request: int) -> None:
        """A request that was enqueued or accessed will not go on. Unknown numbers are ignored."""

    def pin(self, slots: Slots) -> None:
        """Blocks, resident or not, must not be given up until as many `unpin`; nests."""
        raise NotImplementedError

    def unpin(self, slots: Slots) -> None:
        """Ends one `pin` of each."""
        raise NotImplementedError

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """The application expects the next use of this chain in about `eta_ns`.

        Holds until the chain's last block is used again.

        Args:
            now_ns: Time.
            slots: A chain, root to leaf, resident or not; the hint is about its last block, and
                through it about those above.
            eta_ns: Time from now; `NEVER_NS` for never, 0 for soon.
            sigma: Standard deviation of the natural logarithm of the error.
        """

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """A queued request will use this chain: certain, until its `access` or `abort`."""

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """All present blocks of a tenant became stale: as expired as by a lease, at once."""

    # ---- what is decided

    @abstractmethod
    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Chooses and removes `n` victims, none pinned or protected; None, nothing changed, else.

        Victims come in the order in which they go.
        """

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Gives up to `n` victims to a prefetch: only what is worth less than that.

        Args:
            now_ns: Time.
            n: Most victims.
            rate: Uses a second that are expected of what comes, in the unit of `wanted`; infinite
                if its use is certain. Nothing goes whose own is not below that.
            protected: See `evict`.

        Returns:
            Victims, in the order in which they go. The default, for policies that expect no rates:
            all or none for what is certain, and none for anything else.
        """
        found = self.evict(now_ns, n, protected) if rate == np.inf else None
        return NO_SLOTS.copy() if found is None else found

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Which of these (not resident) blocks are worth their bytes here. Default: all."""
        return np.ones(len(slots), np.bool_)

    def expired(self, now_ns: int) -> Slots:
        """Resident blocks whose lease has run out: never a hit again, reclaimed first."""
        return NO_SLOTS.copy()

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Up to `n` ends of chains that are not resident and worth bringing here, best first.

        Returns:
            Slots of the deepest blocks, and their priorities, comparable with `priority`.
        """
        return NO_SLOTS.copy(), np.empty(0)

    @abstractmethod
    def priority(self, slot: int) -> float:
        """Smaller is given up earlier; -inf for a slot that is not resident."""

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """The slot that `evict` of one would give up, for comparisons; -1 if there is none.

        The default looks at every resident block, and knows of neither pins nor children.
        """
        free = set(self.resident()).difference(protected)
        return min(free, key=lambda slot: (self.priority(slot), slot), default=-1)

    @abstractmethod
    def resident(self) -> Sequence[int]:
        """Slots it believes to be resident, in no particular order."""

    @abstractmethod
    def digest(self) -> int:
        """64-bit rolling hash of every decision so far."""


# What configurations of policies have in common.

HalfLife = Annotated[float, Meta(ge=0.0, le=30 * 86_400.0)]
Duration = Annotated[float, Meta(gt=0.0)]
LONGEST_S = 10 * 365 * 86_400.0


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration of a policy: plain values, comparable and serialisable."""


DEFAULT_RANK = 35


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lease of a block: how long it may stay, and what goes before it.

    Attributes:
        lease_s: Seconds after the last access; over ten years is no lease.
        max_age_s: Seconds after it became resident, whatever is accessed; likewise.
        rank: 0 to 100. All blocks of lower rank are given up before any of a higher one.
        rank_s: Seconds after which the rank falls back to the default, 35.
    """

    lease_s: Duration = math.inf
    max_age_s: Duration = math.inf
    rank: Annotated[int, Meta(ge=0, le=100)] = DEFAULT_RANK
    rank_s: Duration = math.inf


LEASES: dict[str, Lease] = {
    "turn_end": Lease(1800.0),
    "tool_wait": Lease(1800.0),
    "pinned_prefix": Lease(),
    "one_shot": Lease(60.0, 600.0),
    "ephemeral": Lease(60.0, 60.0),
}


class LeaseConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of every leaf-first policy: how long blocks may stay.

    Attributes:
        lease_s: Lease of the default class. Infinite by default, since a page on disk should be
            found again next week; 600 suits device memory and 1800 host memory where space is to be
            given back (94 % and 99 % of the hits on published chat, 98 % and 99 % on agents).
        max_age_s: Maximum age of the default class.
        leases: More classes, or other values for known ones: name -> `Lease` or
            `{"lease_s": ..., "max_age_s": ..., "rank": ..., "rank_s": ...}`. Built in: turn_end and
            tool_wait (lease 1800 s), pinned_prefix (none), one_shot (60 s, at most 600 s old),
            ephemeral (60 s old at most).
    """

    lease_s: Duration = math.inf
    max_age_s: Duration = math.inf
    leases: dict[str, Lease] = {}

    def classes(self) -> dict[str, Lease]:
        """All lease classes by name, the default class under ""."""
        return {**LEASES, "": Lease(self.lease_s, self.max_age_s), **self.leases}


class LruConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Leaf-first LRU has nothing but leases to set."""


class ArcConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """ARC has nothing but leases to set."""


class LfuTtlConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `LfuTtl`.

    Attributes:
        tau_s: Half-life of the access count in seconds, at most 30 days; 0 is LRU. About the time
            between two turns of the traffic: seconds for agents, minutes for people.
    """

    tau_s: HalfLife = 15.0


class HazardConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`HazardIndex` learns what it needs; it has nothing but leases to set."""


class CostAwareConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `CostAware`.

    Attributes:
        tau_s: Half-life of the access count in seconds, above 0 and at most 30 days.
        ns_per_byte: Cost of computing a byte anew, where an insert does not say. An 8-billion model
            that prefills 10,000 tokens a second needs about 1.
        alpha: How much the cost per byte matters: a count is multiplied by its power of `alpha`. 0
            is `LfuTtl`.
    """

    tau_s: Annotated[float, Meta(gt=0.0, le=30 * 86_400.0)] = 15.0
    ns_per_byte: Annotated[float, Meta(gt=0.0, lt=1e15)] = 1.0
    alpha: Annotated[float, Meta(ge=0.0, le=16.0)] = 1.0


C = TypeVar("C", bound=PolicyConfig)


def configure(kind: type[C], name: str, options: Mapping[str, object]) -> C:
    """Checks the options of a policy.

    Args:
        kind: Its configuration class.
        name: The policy's name, for messages.
        options: Field -> value, as a user wrote them.

    Returns:
        The configuration.

    Raises:
        ConfigError: If a field is unknown or a value does not fit it.
    """
    try:
        return msgspec.convert(dict(options), type=kind, from_attributes=True)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "'").replace(" - at '$.", " - in '")
    fields = ", ".join(field.name for field in msgspec.structs.fields(kind))
    raise ConfigError(
        f"policy {name!r}: {problem}",
        f"Its fields are {fields}; see {kind.__name__}" if fields else "Pass no options",
    )


T = TypeVar("T")


def made(
    given: object,
    catalogue: Mapping[str, Callable[..., T]],
    kind: type[T],
    what: str,
    options: Mapping[str, object],
) -> T:
    """An object from its name in a catalogue, or the object that was given.

    Args:
        given: A name or an object.
        catalogue: Name -> what makes one.
        kind: What an object must be.
        what: The same in words, for messages.
        options: For `catalogue[given]`; none with an object.

    Raises:
        ConfigError: The name or an option is unknown, or the object is of another kind.
    """
    if isinstance(given, str):
        if given not in catalogue:
            hint = did_you_mean(given, catalogue)
            raise ConfigError(
                f"there is no {what} {given!r}", f"{hint}Use one of {', '.join(catalogue)}"
            )
        try:
            return catalogue[given](**options)
        except TypeError as error:
            raise ConfigError(
                f"{what} {given!r} does not take these options ({error})",
                "See its class for what it takes",
            ) from None
    if not isinstance(given, kind):
        raise ConfigError(
            f"{given!r} is no {what}",
            f"Pass a name ({', '.join(catalogue)}) or an object of a {kind.__name__}",
        )
    if options:
        raise ConfigError(
            f"{what} {getattr(given, 'name', '')!r} is an object already, "
            f"and {', '.join(options)} came with it",
            "Configure the object where it is made",
        )
    return given
