"""The parser of the command line, and arguments that several verbs take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from flowkv.report.screen import Screen

Run = Callable[[argparse.Namespace, Screen], tuple[int, Any]]
"""What a verb does: (arguments, where people read) -> (exit status, result of `--json`)."""

AddVerb = Callable[[str, Run, str], "Parser"]
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

    def option(self, flag: str, metavar: str, about: str, **more: Any) -> None:
        """Adds an option that takes a value; `more` as of `add_argument`."""
        self.add_argument(flag, metavar=metavar, help=about, **more)


def adder(verbs: Any) -> AddVerb:
    """What adds verbs with the options that all of them take.

    Args:
        verbs: What `add_subparsers` gave.
    """

    def verb(name: str, run: Run, text: str) -> Parser:
        about = f"{text[0].upper()}{text[1:]}."
        added: Parser = verbs.add_parser(name, help=text, description=about)
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


def model_arguments(parser: Parser, *, required: bool) -> None:
    """Adds what says which model, and where it is computed."""
    about = "folder or Hugging Face id of a causal language model, or smollm2"
    about += "" if required else "; default a tiny one that comes with FlowKV"
    dtypes = ("float32", "bfloat16", "float16")
    parser.option("--model", "PATH_OR_ID", about, required=required, default="")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="default %(default)s")
    parser.add_argument("--device", default="", help="default the GPU if there is one, else cpu")
    parser.add_argument("--threads", type=count, default=0, help="threads of torch")


def trace_argument(parser: Parser) -> None:
    """Adds what has a trace written."""
    about = "write a Chrome trace of what was computed and loaded when, for Perfetto"
    parser.option("--trace", "FILE", about, type=Path)
