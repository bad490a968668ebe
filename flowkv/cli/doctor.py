"""`flowkv doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import flowkv
from flowkv.cli.arguments import AddVerb
from flowkv.report.screen import Screen


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    doctor = verb("doctor", _doctor, "show what this machine offers")
    doctor.add_argument(
        "--store", type=Path, default=Path(), metavar="DIR", help="look at its disk"
    )


def _doctor(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.observe.doctor import examine

    findings = examine(given.store)
    states = [finding.state for finding in findings]
    marks = {"ok": "ok", "note": "-", "warn": "!", "bad": "BAD"}
    advice = [f"\n-> {f.advice}" if f.advice else "" for f in findings]
    rows = [[marks[f.state], f.name, f.value + a] for f, a in zip(findings, advice, strict=True)]
    title = f"FlowKV {flowkv.__version__} on this machine"
    screen.table(["", "what", "found"], rows, title=title, numbers=False, states=states)
    bad = states.count("bad")
    if bad:
        screen.say("FlowKV does not work here before that is repaired.", style="red bold")
    result = {
        "flowkv": flowkv.__version__,
        "ok": not bad,
        "warnings": states.count("warn"),
        "findings": [{**f._asdict(), "data": dict(f.data)} for f in findings],
    }
    return (1 if bad else 0), result
