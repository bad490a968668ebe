"""`cache_control` of chat messages, as Anthropic's clients send it, as spans of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, compress, count
from operator import ne
from typing import Any, NamedTuple

from flowkv.policy.base import EPHEMERAL, EPHEMERAL_S, Retain

_KEY = "cache_control"
_MOST = 4
"""Breakpoints of a request that count, as of Anthropic: the last ones."""

_MARK = "\ue000"  # of Unicode's private use


class CacheControl(NamedTuple):
    """Breakpoints of a prompt as spans of its tokens.

    Attributes:
        retain: Spans for `retain=` of `KV.cache`, `KV.open` or `flowkv.Request`.
        dropped: Breakpoints of no effect: of an unknown kind, too many, or without a place in the
            prompt's text.
        tokens: Tokens before the last breakpoint; 0 without one.
    """

    retain: tuple[Retain, ...] = ()
    dropped: int = 0
    tokens: int = 0


def cache_control(
    messages: Sequence[Any],
    tokenizer: Any,
    ids: Sequence[int],
    prepare: Callable[[list[Any]], list[Any]] = list,
    /,
    *,
    tools: Sequence[Any] | None = None,
    **template: Any,
) -> CacheControl:
    """Find the tokens before each breakpoint of a chat.

    A breakpoint is `"cache_control": {"type": "ephemeral", "ttl": "5m"}` (or "1h") on a message, on
    a text part of one, or on a tool; all tokens up to it are retained for that time, counted from
    each request. Its place in the text is where rendering begins to differ if a mark stands there,
    so that any template will do.

    Args:
        messages: The messages, as the client sent them.
        tokenizer: The tokenizer, with a chat template.
        ids: Token ids of the rendered chat; breakpoints are dropped if it renders to others.
        prepare: Turns messages into those that the template takes.
        tools: Tools, as the client sent them.
        **template: Further arguments of `apply_chat_template`, such as `add_generation_prompt`.
    """
    tools = tools or []
    found = list(_breakpoints(messages, tools))
    if not found:
        return CacheControl()

    def render(chat: Sequence[Any], known: Sequence[Any]) -> str:
        more = {"tools": without_hints(known) or None, "tokenize": False, **template}
        return str(tokenizer.apply_chat_template(prepare(without_hints(chat)), **more))

    stops = list[tuple[int, float]]()
    try:
        whole = render(messages, tools)
        words = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ends = list(accumulate((end for _, end in words["offset_mapping"]), max))
        same = list(words["input_ids"]) == list(ids)
    except Exception:  # a template may raise anything, and so may a tokenizer without offsets
        same = False
    for place in found[-_MOST:] if same else ():
        with suppress(Exception):
            other = render(*_marked(messages, tools, place))
            at = next(compress(count(), map(ne, whole, other)), len(whole))
            if place.seconds and other != whole and (stop := bisect_right(ends, at)):
                stops.append((stop, place.seconds))
    stops.sort()
    spans, start = list[Retain](), 0
    for number, (stop, _) in enumerate(stops):
        if stop > start:
            longest = max(seconds for _, seconds in stops[number:])
            spans.append(Retain(start, stop, EPHEMERAL, longest))
            start = stop
    return CacheControl(tuple(spans), len(found) - len(stops), start)


def without_hints(values: Sequence[Any]) -> list[Any]:
    """Return messages or tools without `cache_control`, in themselves and in their parts."""
    return [_without(value) for value in values]


def _without(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    plain = {name: each for name, each in value.items() if name != _KEY}
    if isinstance(plain.get("content"), list):
        plain["content"] = without_hints(plain["content"])
    if "function" in plain:
        plain["function"] = _without(plain["function"])
    return plain


def _hint(value: Any) -> Any:
    """Return the `cache_control` of a message, part or tool, or of a tool's function; or None."""
    if not isinstance(value, Mapping):
        return None
    return value.get(_KEY) or _hint(value.get("function"))


class _Place(NamedTuple):
    """Place of a breakpoint.

    Attributes:
        seconds: Its time; 0.0 if it is of an unknown kind.
        message: Number of the message; -1 for a tool.
        part: Number of the part or tool; -1 for a whole message.
    """

    seconds: float
    message: int
    part: int


def _breakpoints(messages: Sequence[Any], tools: Sequence[Any]) -> Iterator[_Place]:
    """Yield the breakpoints in the order of the prompt, tools first."""
    for message, values in enumerate([tools, *(each.get("content") for each in messages)], -1):
        for part, value in enumerate(values if isinstance(values, list) else ()):
            if hint := _hint(value):
                yield _Place(_seconds(hint), message, part)
        if message >= 0 and (hint := _hint(messages[message])):
            yield _Place(_seconds(hint), message, -1)


def _seconds(hint: Any) -> float:
    known = isinstance(hint, Mapping) and hint.get("type") == "ephemeral"
    return EPHEMERAL_S.get(str(hint.get("ttl") or "5m"), 0.0) if known else 0.0


def _marked(
    messages: Sequence[Any], tools: Sequence[Any], place: _Place
) -> tuple[list[Any], list[Any]]:
    """Return messages and tools with a mark behind a breakpoint.

    Raises:
        LookupError: There is no text that it could stand behind.
        TypeError: Likewise.
    """
    _, at, part = place
    if at < 0:
        function = {"name": _MARK, "description": "", "parameters": {}}
        mark = {"type": "function", "function": function}
        return [*messages], [*tools[: part + 1], mark, *tools[part + 1 :]]
    message = dict(messages[at])
    if isinstance(message["content"], list):
        parts = message["content"] = [*message["content"]]
        parts[part] = {**parts[part], "text": parts[part]["text"] + _MARK}
    else:
        message["content"] += _MARK
    return [*messages[:at], message, *messages[at + 1 :]], [*tools]
