"""Hints of requests about the retention of their prompts, in the forms that engines pass on.

FlowKV's own form is the entry "flowkv" of vLLM's `kv_transfer_params`: one span, or a list of them,
with `start`, `stop`, `priority`, and `ttl` ("5m", "1h", or seconds) or `until` (Unix time); the
`cache_control` of Anthropic's clients is such a span. The other form is the action `kv.retain` of
`kv_hints`, with vLLM's `directives` or with Dynamo's fields.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.base import DEFAULT_RANK
from flowkv.policy.retention import EPHEMERAL, EPHEMERAL_S, Retain

_MOST = 128  # spans of a request
_OWN = {name: name for name in ("start", "stop", "priority")} | {"ttl": "for_s"}
_ACTION = {"start": "start", "end": "stop", "priority": "priority"} | dict.fromkeys(
    ("duration", "ttl_seconds"), "for_s"
)


class Hint(NamedTuple):
    """Retention that a request asks for.

    Attributes:
        retain: Spans of its tokens.
        dropped: Number of spans without effect: malformed, unknown, or too many.
        problem: What is wrong with the first of those.
    """

    retain: tuple[Retain, ...] = ()
    dropped: int = 0
    problem: str = ""


def hint_of(params: Any, envelope: Any = None, now_s: float = 0.0) -> Hint:
    """Translate the hints of a request; values that cannot be used are dropped, and counted.

    Args:
        params: The request's `kv_transfer_params`.
        envelope: Its `kv_hints`.
        now_s: Unix time.
    """
    spans, dropped, problem = list[Retain](), 0, ""
    for number, (value, own) in enumerate(_said(params, envelope)):
        try:
            if number == _MOST:
                raise ConfigError(f"more than {_MOST} spans", "Join them")
            spans.append(_own(value, now_s) if own else _action(value))
        except Exception as error:  # of any value that a client may send
            dropped += 1
            problem = problem or f"{reprlib.repr(value)}: {error}"
        if number == _MOST:
            break
    return Hint(tuple(spans), dropped, problem)


def _said(params: Any, envelope: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the spans of a request as they are, and whether each has FlowKV's own form."""
    if isinstance(params, Mapping):
        yield from ((each, True) for each in _listed(params.get("flowkv") or []))
    for action in getattr(envelope, "actions", ()):
        if action.action_type == "kv.retain":
            first, _, _ = action.action_version.partition(".")
            known = action.payload if first == "1" else {"action_version": action.action_version}
            yield from ((each, False) for each in _listed(known.get("directives", known)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _own(value: Any, now_s: float) -> Retain:
    said = {"priority": EPHEMERAL} | value
    if said.get("type") == "ephemeral":
        said = {"ttl": "5m"} | said
        del said["type"]
    if "until" in said:
        said["ttl"] = said.pop("until") - now_s
    if isinstance(said.get("ttl"), str):
        said["ttl"] = EPHEMERAL_S[said["ttl"]]
    return _span(said, _OWN)


def _action(value: Any) -> Retain:
    """Return a span that protects tokens by its priority; 0 is the default of other tokens."""
    said = dict(value)
    if "block_hashes" in said:
        if said.pop("include_current_request", False) is not True:
            raise ConfigError("blocks of other requests", "Include the current request")
        del said["block_hashes"]
        said.pop("execute_at", None)
    span = _span(said, _ACTION)
    rank = DEFAULT_RANK - (span.priority * (DEFAULT_RANK - 100)) // 100
    return msgspec.structs.replace(span, priority=rank)


def _span(said: Mapping[str, Any], names: Mapping[str, str]) -> Retain:
    """Return the span of these fields.

    Raises:
        ConfigError: A field is unknown, or its value is out of range.
        LookupError: There is no priority.
        msgspec.ValidationError: A value is of another type.
    """
    if unknown := sorted(said.keys() - names.keys()):
        raise ConfigError(f"there is no field {unknown[0]!r}", f"Use {', '.join(names)}")
    fields = {"start": 0, "priority": said["priority"]}
    fields |= {names[name]: value for name, value in said.items() if value is not None}
    return msgspec.convert(fields, Retain)
