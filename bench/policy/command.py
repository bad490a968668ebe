"""`python -m bench policy`: what is promised of policies, beside what is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from bench.policy.finding import GROUPS
from bench.promised import show_promises
from flowkv.cli.arguments import AddVerb
from flowkv.core.errors import ConfigError
from flowkv.report.screen import Screen


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    policy = verb("policy", _policy, "measure policies, prefetch and the simulator")
    policy.add_argument(
        "--quick", action="store_true", help="beginnings of traces only; judges nothing"
    )
    policy.add_argument("--out", type=Path, metavar="FILE", help="write the result there, too")


def _policy(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from bench.policy.run import measure_policies

    if given.out is not None and not given.out.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {given.out}", "Make it first")
    with Screen(to_stderr=True).progress("measuring") as tell:
        report = measure_policies(quick=given.quick, tell=tell)
    if not report.public:
        screen.say(
            "FLOWKV_TRACES is not set: generated traces only. The targets were set on public ones.",
            style="yellow",
        )
    show_promises(screen, GROUPS, report.findings, "trace")
    counts = report.summary
    screen.say(
        f"{counts['met']} targets met, {counts['missed']} missed, {counts['not_measured']} not"
        f" measured.{' A quick run judges nothing.' if given.quick else ''}"
    )
    if given.out is not None:
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return int(counts["missed"] > 0 and not given.quick), report
