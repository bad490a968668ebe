"""Tables of promises beside what was measured, on a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowkv.report.screen import Screen

_STATES = {True: "ok", False: "bad", None: "note"}
_WORDS = {True: "met", False: "missed", None: "-"}


def show_promises(
    screen: Screen, groups: Mapping[str, str], findings: Sequence[Mapping[str, Any]], on: str
) -> None:
    """A table for each group of findings that has some.

    Args:
        screen: Where people read.
        groups: Titles, by name.
        findings: Fields of `Finding`, and `met`.
        on: Heading of what each was found on.
    """
    columns = ["", on, "target", "figure", "", "note"]
    for group, title in groups.items():
        found = [f for f in findings if f["group"] == group]
        if found:
            states = [_STATES[f["met"]] for f in found]
            screen.say(title, style="bold")
            screen.table(columns, list(map(_cells, found)), numbers=False, states=states)


def _cells(finding: Mapping[str, Any]) -> list[str]:
    return [
        *(finding["what"], finding["trace"], f"{finding['sense']} {_figure(finding['target'])}"),
        *(_figure(finding["measured"]), _WORDS[finding["met"]], finding["note"]),
    ]


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
