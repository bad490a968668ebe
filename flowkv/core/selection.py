"""Which policy a place has and with which options, and what each tenant may take of the place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from flowkv.core.errors import ConfigError, did_you_mean
from flowkv.core.sizes import parse_size

PLACE_KINDS = ("gpu", "host", "disk", "remote")
"""Kinds of places that options and quotas may name; "remote" is every one behind a URI."""

_PAIR = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(\S+)\s*")
_WORDS = {"true": True, "false": False}


class Selection(NamedTuple):
    """A policy by name, and the fields of its configuration."""

    name: str
    options: Mapping[str, object]


def parse_policy(text: str) -> Selection:
    """A policy as people write it: "lru", or "lfu-ttl:tau_s=30,lease_s=600".

    Raises:
        ConfigError: The text is something else.
    """
    name, colon, rest = text.partition(":")
    options: dict[str, object] = {}
    for part in rest.split(",") if colon else ():
        pair = _PAIR.fullmatch(part)
        if pair is None:
            raise ConfigError(f"policy {text!r}", 'Write it like "lfu-ttl:tau_s=30,lease_s=600"')
        options[pair[1]] = _value(pair[2])
    if not name.strip():
        raise ConfigError("the name is empty", 'Use "auto" or a name of the catalogue')
    return Selection(name.strip(), options)


def _value(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def check_kinds(options: Mapping[str, object]) -> None:
    """Makes sure that options of single places name kinds of places.

    Raises:
        ConfigError: One holds options under another name.
    """
    for kind, value in options.items():
        if isinstance(value, Mapping) and kind not in (*PLACE_KINDS, "leases"):
            raise _unknown(kind)


def options_of(options: Mapping[str, object], kind: str) -> dict[str, object]:
    """The options of a place: those of all places, and those of its kind laid over them."""
    found = {name: value for name, value in options.items() if name not in PLACE_KINDS}
    own = options.get(kind if kind in PLACE_KINDS else "remote", {})
    return found | dict(own) if isinstance(own, Mapping) else found


def parse_quota(
    quota: str | Mapping[str, str], kind: str, total_bytes: int | None
) -> tuple[int, int | None]:
    """What a tenant may take of a place.

    Args:
        quota: "2GiB:8GiB" reserves 2 GiB and allows 8 GiB at most; either side may be empty, and
            "8GiB" alone is the most. Shares ("10%:50%") are of the place. Or one such text for
            each kind of place.
        kind: Of the place.
        total_bytes: Its capacity; None if shares are only to be checked.

    Returns:
        Bytes that others never take from it, and the most that it holds, None for no limit.

    Raises:
        ConfigError: The text is something else, or reserves more than it allows.
    """
    if isinstance(quota, Mapping):
        for name in quota:
            if name not in PLACE_KINDS:
                raise _unknown(name)
        quota = quota.get(kind if kind in PLACE_KINDS else "remote", "")
    reserve, limit = quota.split(":", 1) if ":" in quota else ("", quota)
    total = 1 << 62 if total_bytes is None else total_bytes
    kept = parse_size(reserve, total_bytes=total) if reserve.strip() else 0
    most = parse_size(limit, total_bytes=total) if limit.strip() else None
    if most is not None and kept > most:
        raise ConfigError(
            f"quota {quota!r} reserves more than it allows", 'Write "RESERVE:LIMIT", as "2GiB:8GiB"'
        )
    return kept, most


def _unknown(kind: str) -> ConfigError:
    close = "gpu" if kind in ("device", "cpu", "cuda") else ""
    hint = f"Did you mean {close!r}? " if close else did_you_mean(kind, PLACE_KINDS)
    return ConfigError(
        f"{kind!r} is no kind of place", f"{hint}Use one of {', '.join(PLACE_KINDS)}"
    )
