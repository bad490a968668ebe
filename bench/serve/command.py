"""`python -m bench serve`: many requests at once, beside what transformers does alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.promised import show_promises
from flowkv.cli.arguments import AddVerb, count, model_arguments, names
from flowkv.core.errors import ConfigError
from flowkv.report.screen import Screen

if TYPE_CHECKING:
    from bench.serve.protocol import Plan
    from bench.serve.run import Report

_EXACT = ("tokens", "swap")
"""Groups of findings that are no times: missing one is a failure."""


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("serve", _serve, "serve many requests at once, beside transformers alone")
    model_arguments(added, required=False)
    _load_arguments(added)
    added.add_argument("--out", type=Path, metavar="FILE", help="write all of it as JSON, too")


def _load_arguments(added: argparse.ArgumentParser) -> None:
    added.add_argument("--shape", default="", help="random weights of a published shape")
    added.add_argument("--part", type=names, metavar="A,B", help="of the protocol; default all")
    added.add_argument(
        "--full", action="store_true", help="more requests, repetitions and schedules"
    )
    added.add_argument(
        "--concurrency", type=numbers(count), metavar="N,M", help="clients at once; 1 to 16, 100"
    )
    added.add_argument(
        "--scheduler", type=names, metavar="A,B", help="one for all parts, or several to compare"
    )
    added.add_argument("--baseline", type=names, metavar="A,B", help="default: all four")
    added.add_argument(
        "--lengths",
        metavar="KIND",
        help="chat, code, mixed, azure-chat or azure-code (of FLOWKV_TRACES), or as in 512+64",
    )
    added.add_argument(
        "--prefix-share",
        type=numbers(percent),
        metavar="P,Q",
        help="percent of prompts; part prefix",
    )
    added.add_argument(
        "--page-size",
        type=numbers(count),
        metavar="N,M",
        help="tokens of a page: one for all parts, or several to compare",
    )
    added.add_argument("--token-budget", type=count, metavar="N", help="most tokens of a step")
    added.add_argument("--context", type=count, metavar="N", help="most tokens of a request")
    added.add_argument("--requests", type=count, metavar="N", help="of each load, at least")
    added.add_argument("--repeats", type=count, metavar="N", help="of each system and load")
    added.add_argument("--soak", type=count, metavar="N", help="tokens of the longest answers")
    added.add_argument("--pool", default="", metavar="SIZE", help="of the device's pages")


def numbers(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Type of an argument: several of a type with commas between them."""

    def several(text: str) -> list[Any]:
        return [one(part) for part in names(text)]

    return several


def percent(text: str) -> float:
    """Type of an argument: a percentage, as a share.

    Raises:
        ArgumentTypeError: If it is none.
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage")
    return share


def _serve(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.out is not None and not given.out.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {given.out}", "Make it first")
    plan = _plan(given)
    import torch

    from bench.serve.ground import Ground
    from bench.serve.run import measure_serving

    if given.threads:
        torch.set_num_threads(given.threads)
    with screen.progress("loading the model"):
        ground = Ground(
            given.model, shape=given.shape, dtype=given.dtype, device=given.device, pool=given.pool
        )
    with Screen(to_stderr=True).progress("serving (measured)") as tell:
        report = measure_serving(ground, plan, tell)
    _show(screen, report)
    if given.out is not None:
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(_kept(report)), indent=1))
    wrong = [f for f in report.findings if f.group in _EXACT and f.met is False]
    return int(bool(wrong)), report.rows


def _plan(given: argparse.Namespace) -> Plan:
    from bench.serve.ground import Setting
    from bench.serve.protocol import Plan

    told = {
        "parts": given.part,
        "concurrency": given.concurrency,
        "schedulers": given.scheduler,
        "baselines": given.baseline,
        "lengths": given.lengths,
        "prefix_shares": given.prefix_share,
        "page_sizes": given.page_size,
        "context": given.context,
        "requests": given.requests,
        "repetitions": given.repeats,
        "soak_tokens": given.soak,
    }
    chosen = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in told.items()
        if value is not None
    }
    full: dict[str, Any] = {"requests": 48, "repetitions": 5, "swaps": 1000} if given.full else {}
    own = {
        "token_budget": given.token_budget,
        "page_size": _single(given.page_size),
        "scheduler": _single(given.scheduler),
    }
    setting = Setting(**{name: value for name, value in own.items() if value})
    return Plan(**{**full, **chosen}, setting=setting)


def _single(values: list[Any] | None) -> Any:
    return values[0] if values is not None and len(values) == 1 else None


def _kept(report: Report) -> dict[str, Any]:
    found = [{**msgspec.structs.asdict(f), "met": f.met} for f in report.findings]
    return {**msgspec.structs.asdict(report), "findings": found}


def _show(screen: Screen, report: Report) -> None:
    from bench.serve.promise import GROUPS
    from bench.serve.protocol import PARTS
    from bench.serve.row import COLUMNS, cells

    for part in dict.fromkeys(row.part for row in report.rows):
        own = [cells(row) for row in report.rows if row.part == part]
        screen.table(COLUMNS, own, title=f"{PARTS[part]}, measured")
    found = [{**msgspec.structs.asdict(f), "met": f.met} for f in report.findings]
    show_promises(screen, GROUPS, found, "on")
    for reason in report.advice.reasons:
        screen.say(f"Recommended here: {reason}.", style="green")
