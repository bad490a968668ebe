"""Configuration of the policies: checked structs whose errors name the field and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from flowkv.core.errors import ConfigError, did_you_mean

HalfLife = Annotated[float, Meta(ge=0.0, le=30 * 86_400.0)]
Duration = Annotated[float, Meta(gt=0.0)]
LONGEST_S = 10 * 365 * 86_400.0


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration of a policy: plain values, comparable and serialisable."""


DEFAULT_RANK = 35


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a block may stay, and what goes before it.

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
    """What every leaf-first policy can be told: how long blocks may stay.

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
    """What `LfuTtl` can be told.

    Attributes:
        tau_s: Half-life of the access count in seconds, at most 30 days; 0 is LRU. About the time
            between two turns of the traffic: seconds for agents, minutes for people.
    """

    tau_s: HalfLife = 15.0


class HazardConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`HazardIndex` learns what it needs; it has nothing but leases to set."""


class CyclicConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `Cyclic` can be told.

    Attributes:
        streaming: Blocks of room that the circle streams through; as many as are in flight at once.
        cycle: True if blocks are used in a circle, False if not, None to find out.
    """

    streaming: Annotated[int, Meta(ge=1, le=1 << 20)] = 2
    cycle: bool | None = None


class HedgeConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `Hedge` can be told; there is rarely a reason.

    Attributes:
        taus_s: Half-lives of the access counts that are tried, in seconds, beside LRU and the
            learned index. Each has a shadow of the place's own size.
    """

    taus_s: Annotated[tuple[HalfLife, ...], Meta(max_length=7)] = (120.0,)


class CostAwareConfig(LeaseConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `CostAware` can be told.

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
