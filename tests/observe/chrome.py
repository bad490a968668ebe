"""Reads a trace as viewers do, and refuses what they would drop, misplace or complain about.

The format: "Trace Event Format", JSON array form, whose closing bracket may be missing.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_METADATA = {
    "process_name": str,
    "process_sort_index": int,
    "thread_name": str,
    "thread_sort_index": int,
}


class Slice(NamedTuple):
    """A piece of a track, in nanoseconds from the trace's begin."""

    group: str
    track: str
    name: str
    first: int
    stop: int
    args: dict[str, Any]
    number: int


class Chrome(NamedTuple):
    """What a viewer shows."""

    slices: list[Slice]
    instants: list[Slice]
    levels: list[Slice]

    def on(self, group: str) -> list[Slice]:
        return [piece for piece in self.slices if piece.group == group]

    def tracks(self, group: str) -> set[str]:
        return {piece.track for piece in self.on(group)}


def read_chrome(text: str) -> Chrome:
    """Parses and checks a trace, also one that was never closed."""
    if not text.rstrip().endswith("]"):
        text += "]"
    lines = json.loads(text, parse_constant=_refuse)
    assert isinstance(lines, list)
    groups, tracks = dict[int, str](), dict[tuple[int, int], str]()
    shown = Chrome([], [], [])
    for line in lines:
        assert isinstance(line["pid"], int) and isinstance(line["tid"], int)
        assert line["pid"] > 0 and line["tid"] > 0
        args = line["args"]
        if line["ph"] == "M":
            kind = "name" if line["name"].endswith("_name") else "sort_index"
            assert type(args[kind]) is _METADATA[line["name"]]
            if line["name"] == "process_name":
                assert groups.setdefault(line["pid"], args["name"]) == args["name"]
            elif line["name"] == "thread_name":
                assert (line["pid"], line["tid"]) not in tracks, "a track is named once"
                tracks[line["pid"], line["tid"]] = args["name"]
            continue
        where = groups[line["pid"]], tracks[line["pid"], line["tid"]]  # named before it is used
        first = _ns(line["ts"])
        assert first >= 0 and line["name"]
        if line["ph"] == "C":
            assert args and all(type(value) in (int, float) for value in args.values())
            shown.levels.append(Slice(*where, line["name"], first, first, args, line["tid"]))
            continue
        assert line["cat"]
        if line["ph"] == "X":
            stop = first + _ns(line["dur"])
            assert stop > first
            shown.slices.append(Slice(*where, line["name"], first, stop, args, line["tid"]))
        else:
            assert (line["ph"], line["s"]) == ("i", "t") and "dur" not in line
            shown.instants.append(Slice(*where, line["name"], first, first, args, line["tid"]))
    ids = [number for _, number in tracks]
    assert len(ids) == len(set(ids)), "a viewer may take equal numbers for one track"
    _check_nesting(shown.slices)
    return shown


def _check_nesting(slices: list[Slice]) -> None:
    """Slices of a track lie one behind the other or one in the other: they never cross."""
    stacks: dict[int, list[int]] = {}
    for piece in sorted(slices, key=lambda s: (s.first, -s.stop)):
        stack = stacks.setdefault(piece.number, [])
        while stack and stack[-1] <= piece.first:
            stack.pop()
        assert not stack or piece.stop <= stack[-1], f"{piece} crosses another one"
        stack.append(piece.stop)


def _ns(microseconds: float) -> int:
    assert isinstance(microseconds, int | float) and not isinstance(microseconds, bool)
    whole = round(microseconds * 1e3)
    assert abs(microseconds * 1e3 - whole) < 1e-2, "viewers keep nanoseconds"
    return whole


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
