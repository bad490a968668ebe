"""The parser of the command line, and arguments that several verbs take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flowkv.core.errors import ConfigError
from flowkv.core.files import open_regular
from flowkv.report.screen import Screen

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.load import LoadedModel

Run = Callable[[argparse.Namespace, Screen], tuple[int, Any]]
"""Function of a verb: (arguments, screen) -> (exit status, result of `--json`)."""

AddVerb = Callable[[str, Run, str], "Parser"]
"""Function that adds a verb: (name, function of the verb, help text)."""


class Misused(Exception):
    """Error of wrong arguments.

    Args:
        usage: The usage of the verb.
        problem: The problem with the arguments.
    """

    def __init__(self, usage: str, problem: str) -> None:
        super().__init__(problem)
        self.usage = usage


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `Misused` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `Misused` with a message; called by `argparse`."""
        raise Misused(self.format_usage(), message)

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file or sys.stderr, flush=True)  # argparse hides errors

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; of a verb, refuse what is unknown with its own usage."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def option(self, flag: str, metavar: str, about: str, **more: Any) -> None:
        """Add an option with a value; `more` as of `add_argument`."""
        self.add_argument(flag, metavar=metavar, help=about, **more)


def adder(verbs: Any) -> AddVerb:
    """Return a function that adds verbs with their common options.

    Args:
        verbs: Result of `add_subparsers`.
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
    """Parse an argument as a count of 1 or more.

    Raises:
        ArgumentTypeError: The text is no such count.
    """
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of 1 or more")
    return value


def names(text: str) -> list[str]:
    """Parse an argument as names with commas between them.

    Raises:
        ArgumentTypeError: The text has no name.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def model_arguments(parser: Parser, *, required: bool) -> None:
    """Add the options that choose a model, its dtype and its device."""
    about = "folder or Hugging Face id of a causal language model, or smollm2"
    about += "" if required else "; default a tiny one that comes with FlowKV"
    dtypes = ("float32", "bfloat16", "float16")
    parser.option("--model", "PATH_OR_ID", about, required=required, default="")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="default %(default)s")
    parser.add_argument("--device", default="", help="default the GPU if there is one, else cpu")
    parser.add_argument("--threads", type=count, default=0, help="threads of torch")


def load_model(given: argparse.Namespace, screen: Screen) -> LoadedModel:
    """Load the model that the options of `model_arguments` choose."""
    with screen.progress("loading the model"):
        import torch

        from flowkv.hooks.huggingface.load import load

        if given.threads:
            torch.set_num_threads(given.threads)
        return load(given.model, dtype=given.dtype, device=given.device or None)


def read_text(name: str) -> str:
    """Return a text of a file in UTF-8; "-" for standard input.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        if name == "-":
            data = sys.stdin.buffer.read()
        else:
            with open_regular(Path(name).expanduser()) as file:
                data = file.read()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start})", "Save it as UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be read ({getattr(error, 'strerror', None) or error})",
            "Correct the path, or pass - for standard input",
        ) from error


def trace_argument(parser: Parser) -> None:
    """Add the option that writes a trace."""
    about = "write a Chrome trace of what was computed and loaded when, for Perfetto"
    parser.option("--trace", "FILE", about, type=Path)
