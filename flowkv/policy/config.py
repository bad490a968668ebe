"""Configuration of the policies: checked structs whose errors name the field and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from flowkv.core.errors import ConfigError

HalfLife = Annotated[float, Meta(ge=0.0, le=30 * 86_400.0)]
Duration = Annotated[float, Meta(gt=0.0)]
LONGEST_S = 10 * 365 * 86_400.0


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration of a policy: plain values, comparable and serialisable."""


class LruConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Leaf-first LRU has nothing to set."""


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a block may stay: until its last access + `lease_s`, or its birth + `max_age_s`.

    Attributes:
        lease_s: Seconds after the last access; over ten years is no lease.
        max_age_s: Seconds after it became resident, whatever is accessed; likewise.
    """

    lease_s: Duration = math.inf
    max_age_s: Duration = math.inf


LEASES: dict[str, Lease] = {
    "turn_end": Lease(1800.0),
    "tool_wait": Lease(1800.0),
    "pinned_prefix": Lease(),
    "one_shot": Lease(60.0, 600.0),
    "ephemeral": Lease(60.0, 60.0),
}


class LfuTtlConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `LfuTtl` can be told.

    Attributes:
        tau_s: Half-life of the access count in seconds, at most 30 days; 0 is LRU. About the time
            between two turns of the traffic: seconds for agents, minutes for people.
        lease_s: Lease of the default class. Infinite by default, since a page on disk should be
            found again next week; 600 suits device memory and 1800 host memory where space is to be
            given back (94 % and 99 % of the hits on published chat, 98 % and 99 % on agents).
        max_age_s: Maximum age of the default class.
        leases: More classes, or other values for known ones: name -> `Lease` or
            `{"lease_s": ..., "max_age_s": ...}`. Built in: turn_end and tool_wait (lease 1800 s),
            pinned_prefix (none), one_shot (60 s, at most 600 s old), ephemeral (60 s old at most).
    """

    tau_s: HalfLife = 15.0
    lease_s: Duration = math.inf
    max_age_s: Duration = math.inf
    leases: dict[str, Lease] = {}

    def classes(self) -> dict[str, Lease]:
        """All lease classes by name, the default class under ""."""
        return {**LEASES, "": Lease(self.lease_s, self.max_age_s), **self.leases}


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
