"""Hints of requests about the retention of their prompts, in the forms that engines pass on.

FlowKV's own form is the entry "flowkv" of vLLM's `kv_transfer_params`: one span, or a list of them,
with `start`, `stop`, `priority`, and `ttl` ("5m", "1h", or seconds) or `until` (Unix time); the
`cache_control` of Anthropic's clients is such a span. The other form is the action `kv.retain` in a
message of `kv_hints`, with vLLM's `directives` or Dynamo's fields.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.policy.base import DEFAULT_RANK, EPHEMERAL, EPHEMERAL_S, Retain

_MOST = 128  # spans of a request
_LONGEST = 300  # characters of a problem
_SPAN = {"start": "start", "stop": "stop", "priority": "priority", "ttl": "for_s"}
_DIRECTIVE = {"start": "start", "end": "stop", "priority": "priority", "duration": "for_s"}
_ACTION = {"priority": "priority", "ttl_seconds": "for_s"}
_Read = Callable[[Any, float], list[Any]]


class Retention(NamedTuple):
    """Retention that a request asks for.

    Attributes:
        spans: Spans of its tokens.
        dropped: Number of hints without effect: malformed, of an unknown kind, or too many.
        problem: What is wrong with the first of those.
    """

    spans: tuple[Retain, ...] = ()
    dropped: int = 0
    problem: str = ""


def hint_of(params: Any, message: Any = None, now_s: float = 0.0) -> Retention:
    """Translate the hints of a request; those that cannot be used are dropped, and counted.

    Args:
        params: The request's `kv_transfer_params`; a message may be in them, as "kv_hint".
        message: Its `kv_hints`.
        now_s: Unix time.
    """
    said = params if isinstance(params, Mapping) else {}
    todo: list[tuple[_Read, Any]] = [(_own, one) for one in _listed(said.get("flowkv") or [])]
    todo += [(_actions, one) for one in (message, said.get("kv_hint")) if one is not None]
    spans, dropped, problem = list[Retain](), 0, ""
    for read, value in todo:  # which grows by actions
        try:
            for found in read(value, now_s):
                (spans if isinstance(found, Retain) else todo).append(found)
            if len(spans) > _MOST:
                raise ConfigError(f"more than {_MOST} spans", "Join them")
        except Exception as error:  # of any value that a client may send
            dropped += 1
            problem = problem or _described(value, error)
        if len(spans) > _MOST:
            break
    return Retention(tuple(spans[:_MOST]), dropped, problem)


def _listed(value: Any) -> list[Any]:
    return value[: _MOST + 1] if isinstance(value, list) else [value]


def _described(value: Any, error: Exception) -> str:
    try:
        return f"{reprlib.repr(value)}: {error}"[:_LONGEST]
    except Exception as unsaid:  # of integers with more digits than Python prints
        return f"{type(unsaid).__name__} of {type(value).__name__}"


def _own(value: Any, now_s: float) -> list[Any]:
    said = {"priority": EPHEMERAL} | {name: v for name, v in value.items() if v is not None}
    if said.get("type") == "ephemeral":
        said = {"ttl": "5m"} | said
        del said["type"]
    if "until" in said:
        said["ttl"] = said.pop("until") - now_s
    if isinstance(said.get("ttl"), str):
        said["ttl"] = EPHEMERAL_S[said["ttl"]]
    return [_span(said, _SPAN)]


def _actions(message: Any, now_s: float) -> list[Any]:
    said = message if isinstance(message, Mapping) else msgspec.to_builtins(message)
    return [(_action, one) for one in _listed(said["actions"])]


def _action(value: Any, now_s: float) -> list[Any]:
    """Return what an action retains: its lowest priority is 0, that of all other tokens."""
    if value["action_type"] != "kv.retain":
        return []
    if value["action_version"].partition(".")[0] != "1":
        raise ConfigError("an unknown version of kv.retain", "Use 1.0")
    said = dict(value["payload"])
    if "directives" in said:  # those for answers select nothing: only prompts are offloaded
        found = [one for one in _listed(said["directives"]) if not one.get("covers_output")]
        spans = [_span(one, _DIRECTIVE) for one in found]
    elif said.pop("include_current_request", None):
        spans = [_span({name: said[name] for name in _ACTION.keys() & said.keys()}, _ACTION)]
    else:
        raise ConfigError("blocks of other requests", "Include the current request")
    ranks = [DEFAULT_RANK - span.priority * (DEFAULT_RANK - 100) // 100 for span in spans]
    return [msgspec.structs.replace(span, priority=r) for span, r in zip(spans, ranks, strict=True)]


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
