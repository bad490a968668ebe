"""What the verbs' arguments have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from flowkv.report.screen import Screen

Run = Callable[[argparse.Namespace, Screen], tuple[int, Any]]
"""What a verb does: (arguments, where people read) -> (exit status, result of `--json`)."""

AddVerb = Callable[[str, Run, str], argparse.ArgumentParser]
"""Adds a verb: (name, what it does, help text)."""


class Misused(Exception):
    """The arguments are wrong.

    Args:
        usage: The usage of the verb.
        problem: What is wrong.
    """

    def __init__(self, usage: str, problem: str) -> None:
        super().__init__(problem)
        self.usage = usage


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `Misused` where others exit."""

    def error(self, message: str) -> NoReturn:
        """Raises what is wrong; called by `argparse`."""
        raise Misused(self.format_usage(), message)


def adder(verbs: Any) -> AddVerb:
    """What adds verbs with the options that all of them take.

    Args:
        verbs: What `add_subparsers` gave.
    """

    def verb(name: str, run: Run, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = verbs.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}."
        )
        added.add_argument("--json", action="store_true", help="print one JSON value")
        added.add_argument("--debug", action="store_true", help="show tracebacks and all warnings")
        added.set_defaults(run=run)
        return added

    return verb


def count(text: str) -> int:
    """Type of an argument: a count of 1 or more.

    Raises:
        ArgumentTypeError: If it is none.
    """
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of 1 or more")
    return value


def names(text: str) -> list[str]:
    """Type of an argument: names with commas between them.

    Raises:
        ArgumentTypeError: If there is none.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found
