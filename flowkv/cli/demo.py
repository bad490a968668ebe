"""`flowkv demo`: a trained model whose prompts survive a restart."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from flowkv.cli.arguments import AddVerb, count, model_arguments, trace_argument
from flowkv.core.config import load_config
from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.report.page import check_installed
from flowkv.report.screen import Screen

REPORT = "flowkv-report.html"


def add_verb(verb: AddVerb) -> None:
    """Add the verb `demo`."""
    parser = verb("demo", _demo, "see prompts survive a restart, on a trained model")
    model_arguments(parser, required=False)
    parser.option("--store", "DIR[:SIZE]", "default a temporary directory", default="")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    about = f"default {REPORT}; needs the extra `report`, without which there is none"
    parser.option("--report", "FILE", about, type=Path)
    trace_argument(parser)
    parser.option("--context", "N", "tokens of the longest prompt", type=count)
    for name, (tiny, other, of) in _AMOUNTS.items():
        about = f"of {of}; default {tiny}, or {other} with --model"
        parser.option(f"--{name.replace('_', '-')}", "N", about, type=count)


_AMOUNTS = {
    "turns": (4, 3, "the conversation"),
    "rows": (3, 2, "the batch"),
    "repeats": (3, 1, "each measurement"),
    "max_new_tokens": (24, 40, "an answer"),
}


def _demo(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.data import tiny_path
    from flowkv.demo.findings import DemoPlan, DemoSizes
    from flowkv.demo.run import run_demo

    for name, amounts in _AMOUNTS.items():
        if getattr(given, name) is None:
            setattr(given, name, amounts[bool(given.model)])
    if given.turns < 2:
        raise ConfigError("a conversation of one turn has no past", "Give --turns 2 or more")
    load_config(disk=given.store or None)  # checks the place before a model is loaded
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
