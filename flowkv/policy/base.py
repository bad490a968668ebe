"""The `Policy` base class: an order over slot ids, without I/O, torch or a clock of its own.

The caller owns identity and residency: it numbers blocks with small integers (*slots*), notifies
the policy of one place (a tier or the device pool) of each event there, and asks for victims. A
slot names the same block until `forget`, also while that block is resident elsewhere or nowhere
(a *ghost*), so a policy may remember blocks and learn which of them it evicted too early. The same
object runs in the simulator, in the cache and behind the plug-in points of other engines (DESIGN
D8). Parents are optional: where they are known, a block is evicted after its descendants.

A policy of your own needs the abstract methods; the others have a default that does nothing.
`Retain` says how long spans of a prompt stay, and before which others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, did_you_mean

Slots = NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, np.int64)

NEVER_NS = np.iinfo(np.int64).max
"""An `eta_ns` for blocks that will not be used again; 0 means soon."""

UNKNOWN_STOP, TOOL_USE, TURN_END, CUT_OFF = 0, 1, 2, 3
"""Why a response ended: unknown; a tool call; the end of the turn; length limit or abort."""


class Visit(NamedTuple):
    """The known facts about a request when it arrives; every field may be left out.

    Attributes:
        request: The caller's number of the request, unique among requests under way; -1 if no later
            call will refer to it.
        session: The application's conversation, any 62-bit number; -1 if unknown.
        tokens: Input tokens; 0 if unknown.
        blocks: Blocks of the whole request, known ones or not; 0 if unknown.
        tenant: Tenant of the request; -1 if unknown.
    """

    request: int = -1
    session: int = -1
    tokens: int = 0
    blocks: int = 0
    tenant: int = -1


NO_VISIT = Visit()


class Policy(ABC):
    """Eviction order of one place.

    Its rules, which `flowkv.testing.check_policy` checks on random stories:

    - Equal calls give equal answers and equal digests; the digest changes with every eviction. A
      query, and a refused eviction, change nothing.
    - Time never runs backwards: a `now_ns` below the last one seen counts as that one.
    - Victims are resident, distinct, neither pinned nor protected, and as many as asked for. An
      eviction is refused only if fewer blocks can go one after the other, each behind its resident
      children (if the policy goes leaf by leaf).
    - Where parents are known, a block goes after its resident children.
    - Expired and invalid blocks go first. They stay resident until they go, and expired until they
      are inserted again.
    - Then the smallest `priority` goes first. No priority is NaN; it is -inf where the slot is not
      resident, and only there.
    - Blocks of a queued request go after all others; of those without a hint or a queued request,
      lower ranks go before higher ones.
    - Children of a removed block stay, as roots. A slot that was forgotten may return as another
      block, which has none of the children of the last one.
    - Arguments are neither kept nor written, and an answer is the caller's to write to.
    - `displace` takes no live block whose `priority` is its rate or more, if that is finite.
    - A learned model brings no blocks; equal models of equal policies give equal answers.
    - Slots and requests that are unknown are ignored. Nothing is raised.

    Methods that are not overridden are not used: without `pin` nothing is ever pinned.

    Attributes:
        name: Name in the catalogue.
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
        """Add blocks that became resident, root to leaf; `parents[i]` is a slot or -1.

        An insert counts as an access, unless one was counted at the same `now_ns` already.

        Args:
            now_ns: Time.
            slots: Blocks. A resident block is accessed, and takes its parent if it has none.
            parents: Parent of each block.
            n_bytes: Bytes of each block.
            cost_ns: Time to recompute each block; 0 if unknown.
            lease: Lease class, or a lease; see `LeaseConfig`.
            tenant: Tenant that owns the blocks.
        """

    @abstractmethod
    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        """Record that a request uses these known blocks, root to leaf.

        Blocks that are not resident here are ghosts, or resident elsewhere; an order ignores them,
        a learner need not. `insert` of the blocks that the request adds or restores follows at the
        same or a later time.
        """

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Remove blocks that left for another reason than `evict`; ignore non-resident slots."""

    def forget(self, slots: Slots) -> None:
        """Forget slots that are not resident; the numbers may be reused for other blocks."""

    def complete(
        self, now_ns: int, request: int, *, stop: int = UNKNOWN_STOP, output_tokens: int = 0
    ) -> None:
        """Record the end of a request, and why it ended; ignore an unknown number."""

    def abort(self, now_ns: int, request: int) -> None:
        """Cancel a request that was enqueued or accessed; ignore an unknown number."""

    def pin(self, slots: Slots) -> None:
        """Pin blocks, resident or not, against eviction until as many `unpin`; nests."""
        raise NotImplementedError

    def unpin(self, slots: Slots) -> None:
        """Release one `pin` of each block."""
        raise NotImplementedError

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        """Record that the application expects the next use of this chain in about `eta_ns`.

        The hint holds until the chain's last block is used again.

        Args:
            now_ns: Time.
            slots: A chain, root to leaf, resident or not; the hint is about its last block, and
                through that block about those above.
            eta_ns: Time from now; `NEVER_NS` for never, 0 for soon.
            sigma: Standard deviation of the natural logarithm of the error.
        """

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        """Record that a queued request will use this chain, until its `access` or `abort`."""

    def invalidate(self, now_ns: int, tenant: int) -> None:
        """Expire all present blocks of a tenant at once, as if their leases had run out."""

    # ---- what is decided

    @abstractmethod
    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        """Remove and return `n` victims, none pinned or protected; None if there are fewer.

        Victims are in eviction order. If the answer is None, nothing has changed.
        """

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        """Evict up to `n` victims for a prefetch: only blocks worth less than those it brings.

        Args:
            now_ns: Time.
            n: Most victims.
            rate: Expected uses per second of the prefetched blocks, in the unit of `wanted`;
                infinite if their use is certain. Only blocks with a smaller rate are evicted.
            protected: See `evict`.

        Returns:
            Victims, in eviction order. The default, for policies that expect no rates: `n` or none
            for a certain use, and none for any other.
        """
        found = self.evict(now_ns, n, protected) if rate == np.inf else None
        return NO_SLOTS.copy() if found is None else found

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        """Return which of these non-resident blocks are worth their bytes here. Default: all."""
        return np.ones(len(slots), np.bool_)

    def expired(self, now_ns: int) -> Slots:
        """Return resident blocks with an expired lease: they never hit again and go first."""
        return NO_SLOTS.copy()

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        """Return up to `n` ends of non-resident chains that are worth prefetching, best first.

        Returns:
            Slots of the deepest blocks, and their priorities, comparable with `priority`.
        """
        return NO_SLOTS.copy(), np.empty(0)

    @abstractmethod
    def priority(self, slot: int) -> float:
        """Return the priority of a slot: smaller is evicted earlier; -inf if it is not resident."""

    def weakest(self, now_ns: int, protected: Collection[int] = ()) -> int:
        """Return the slot that `evict` of one would choose, for comparisons; -1 if there is none.

        The default looks at every resident block, and considers neither pins nor children.
        """
        free = set(self.resident()).difference(protected)
        return min(free, key=lambda slot: (self.priority(slot), slot), default=-1)

    @abstractmethod
    def resident(self) -> Sequence[int]:
        """Return the slots that the policy records as resident, in no particular order."""

    @abstractmethod
    def digest(self) -> int:
        """Return a 64-bit rolling hash of every decision so far."""


@runtime_checkable
class Learner(Protocol):
    """Policy that can start from the learned model of another one of its kind."""

    def save_model(self) -> bytes:
        """Return the learned model; empty if there is none."""

    def load_model(self, saved: bytes) -> None:
        """Start from a saved model that is not empty: a weak prior that observations outweigh."""


def counts_pins(policy: Policy) -> bool:
    """Return whether a policy counts pins, so that it need not be given the pinned slots."""
    kind = type(policy)
    return kind.pin is not Policy.pin and kind.unpin is not Policy.unpin


# Configuration that policies share.

HalfLife = Annotated[float, Meta(ge=0.0, le=30 * 86_400.0)]
Duration = Annotated[float, Meta(gt=0.0)]
LONGEST_S = 10 * 365 * 86_400.0


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration of a policy: plain values, comparable and serialisable."""


DEFAULT_RANK = 35


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lease of a block: how long it may stay, and its rank in eviction.

    Attributes:
        lease_s: Seconds after the last access; over ten years is no lease.
        max_age_s: Seconds after the block became resident, accessed or not; likewise.
        rank: 0 to 100. All blocks of lower rank are evicted before any of a higher one.
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
            found again next week; 600 suits device memory and 1800 host memory where space is
            scarce (94 % and 99 % of the hits on published chat, 98 % and 99 % on agents).
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
        """Return all lease classes by name, the default class under ""."""
        return {**LEASES, "": Lease(self.lease_s, self.max_age_s), **self.leases}


class LruConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of leaf-first LRU: leases only."""


class ArcConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of ARC: leases only."""


class LfuTtlConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `LfuTtl`.

    Attributes:
        tau_s: Half-life of the access count in seconds, at most 30 days; 0 is LRU. About the time
            between two turns of the traffic: seconds for agents, minutes for people.
    """

    tau_s: HalfLife = 15.0


class HazardConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `HazardIndex`: leases only, since it learns the rest."""


class CostAwareConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `CostAware`.

    Attributes:
        tau_s: Half-life of the access count in seconds, above 0 and at most 30 days.
        ns_per_byte: Cost of recomputing a byte, where an insert gives none. An 8-billion model
            that prefills 10,000 tokens a second needs about 1.
        alpha: Weight of the cost per byte: a count is multiplied by that cost to the power of
            `alpha`. 0 is `LfuTtl`.
    """

    tau_s: Annotated[float, Meta(gt=0.0, le=30 * 86_400.0)] = 15.0
    ns_per_byte: Annotated[float, Meta(gt=0.0, lt=1e15)] = 1.0
    alpha: Annotated[float, Meta(ge=0.0, le=16.0)] = 1.0


C = TypeVar("C", bound=PolicyConfig)


def configure(kind: type[C], name: str, options: Mapping[str, object]) -> C:
    """Convert options to a policy's configuration, checked.

    Args:
        kind: Configuration class.
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
        f"options of {name!r}: {problem}",
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
    """Return a new object by its name in a catalogue, or the object that was given.

    Args:
        given: A name or an object.
        catalogue: Name -> factory.
        kind: Class that an object must have.
        what: Noun for the class, for messages.
        options: Arguments for `catalogue[given]`; none with an object.

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
                "Pass only arguments of its class",
            ) from None
    if not isinstance(given, kind):
        raise ConfigError(
            f"{given!r} is no {what}",
            f"Pass a name ({', '.join(catalogue)}) or an object of a {kind.__name__}",
        )
    if options:
        raise ConfigError(
            f"{what} {getattr(given, 'name', '')!r} is an object already, "
            f"so {', '.join(options)} cannot apply",
            "Configure the object where it is made",
        )
    return given


EPHEMERAL = 80
"""Priority of the pages before a breakpoint of `cache_control`."""

EPHEMERAL_S = {"5m": 300.0, "1h": 3600.0}
"""Seconds of the times that `cache_control` knows."""


class Retain(msgspec.Struct, frozen=True):
    """Retention of the pages of a span of tokens.

    A page belongs to a span that contains one of its tokens; if several do, the highest priority
    counts.

    Attributes:
        start: First token of the span.
        stop: First token behind it; None for the end of the sequence, however long it grows.
        priority: 0 to 100: pages of lower priority are evicted first. The default is 35.
        for_s: Seconds after which the priority is the default again.
    """

    start: int
    stop: int | None = None
    priority: int = DEFAULT_RANK
    for_s: float = math.inf

    def __post_init__(self) -> None:
        stop = self.start + 1 if self.stop is None else self.stop
        if not 0 <= self.start < stop:
            raise ConfigError(
                f"a span of tokens from {self.start} to {self.stop}", "Let it hold a token or more"
            )
        if not 0 <= self.priority <= 100 or not self.for_s > 0:
            raise ConfigError(
                f"priority {self.priority} for {self.for_s} seconds",
                "Use a priority from 0 to 100, and a time above 0",
            )


def lease_of(retain: Iterable[Retain], start: int, stop: int) -> Lease | None:
    """Return the lease of a page of the tokens from `start` to `stop`; None if no span has any."""
    spans = [r for r in retain if r.start < stop and (r.stop is None or start < r.stop)]
    if not spans:
        return None
    best = max(spans, key=lambda span: (span.priority, span.for_s))
    return Lease(rank=best.priority, rank_s=best.for_s)
