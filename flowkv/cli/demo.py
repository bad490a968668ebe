"""`flowkv demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from flowkv.cli.arguments import AddVerb, count
from flowkv.cli.generate import model_arguments, trace_argument
from flowkv.core.config import load_config
from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.report.page import check_installed
from flowkv.report.screen import Screen

REPORT = "flowkv-report.html"


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    _demo_arguments(verb("demo", _demo, "see prompts survive a restart, on a trained model"))


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser, required=False)
    parser.add_argument(
        "--store", default="", metavar="DIR[:SIZE]", help="default a temporary directory"
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=f"default {REPORT}; needs the extra `report`, without which there is none",
    )
    trace_argument(parser)
    parser.add_argument(
        "--context", type=count, default=0, metavar="N", help="tokens of the longest prompt"
    )
    for flag, default, about in (
        ("--turns", 4, "of the conversation"),
        ("--rows", 3, "of the batch"),
        ("--repeats", 3, "behind a median"),
        ("--max-new-tokens", 24, "of an answer"),
    ):
        about += "; default %(default)s"
        parser.add_argument(flag, type=count, default=default, metavar="N", help=about)


def _demo(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.data import tiny_path
    from flowkv.demo.records import DemoPlan, DemoSizes
    from flowkv.demo.run import run_demo

    if given.turns < 2:
        raise ConfigError("a conversation of one turn has no past", "Give --turns 2 or more")
    load_config(disk=given.store or None)  # better before a model is loaded than after it
    report = given.report or Path(REPORT)
    try:
        check_installed()
    except MissingDependencyError as error:
        if given.report:
            raise
        report = None
        screen.say(f"Note: {error} The demo goes on without one.", style="yellow")
    sizes = DemoSizes(turns=given.turns, rows=given.rows, answer=given.max_new_tokens)
    if given.context:
        sizes = msgspec.structs.replace(sizes, context=given.context)
    plan = DemoPlan(
        model=given.model or str(tiny_path()),
        store=given.store,
        sizes=sizes,
        repeats=given.repeats,
        dtype=given.dtype,
        device=given.device,
        threads=given.threads,
        trace=str(given.trace.absolute()) if given.trace else "",
    )
    summary = run_demo(plan, screen, report=report, keep=given.keep, debug=given.debug)
    return (0 if summary.tokens_identical else 1), summary
