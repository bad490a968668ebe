"""The `flowkv` command: parsing, JSON, warnings and error handling of all verbs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

import flowkv
from flowkv.cli import calibrate, demo, doctor, generate, serve, sim, stores
from flowkv.cli.arguments import Misused, Parser, adder
from flowkv.core.errors import FlowKVError
from flowkv.demo.run import DemoFailed
from flowkv.report.screen import Screen


def run(parser: Parser, arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; raise nothing for errors of the command itself.

    Args:
        parser: Parser of its arguments; each verb sets its function as `run`.
        arguments: Words behind the command; default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json, debug = "--json" in words, "--debug" in words
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed, as by `>&-`
    if arguments is None:
        # Unwinds, so that processes and temporary directories are cleaned up.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        given = parser.parse_args(words)
        # Output of libraries belongs to standard error: standard output is the result.
        result_stream = sys.stdout
        with contextlib.ExitStack() as stack:
            if as_json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            stack.enter_context(_plain_warnings(debug))
            status, result = given.run(given, Screen(to_stderr=as_json))
        if as_json:
            _print_json(result, result_stream)
        sys.stdout.flush()
        return int(status)
    except (Misused, FlowKVError) as error:
        if debug:
            traceback.print_exc()
        return _complain(as_json, str(error), usage=getattr(error, "usage", ""))
    except BrokenPipeError:  # the reader has closed the pipe, as in `flowkv inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        kind = "" if isinstance(error, DemoFailed) else f"{type(error).__name__}: "
        text = f"Something unexpected happened: {kind}{error}".rstrip(".")
        hint = "" if debug else ". Run again with --debug for details"
        return _complain(as_json, f"{text}{hint}.", status=1)


def _complain(as_json: bool, text: str, *, usage: str = "", status: int = 2) -> int:
    print(f"{usage}flowkv: {text}", file=sys.stderr)
    if as_json:
        with contextlib.suppress(OSError):  # a full disk may be the error itself
            _print_json({"error": text}, sys.stdout)
    return status


def _print_json(result: Any, stream: Any) -> None:
    try:  # msgspec writes NaN as null, which is valid JSON
        text = msgspec.json.encode(result, enc_hook=str).decode()
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # as \uXXXX, which every stream takes
        text = json.dumps(msgspec.to_builtins(result, enc_hook=str))
    stream.write(text + "\n")
    stream.flush()


@contextlib.contextmanager
def _plain_warnings(debug: bool) -> Iterator[None]:
    """Show FlowKV's own warnings as sentences, and all other warnings only with `--debug`."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if debug or category is UserWarning:
            print(f"flowkv: note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def make_parser() -> Parser:
    """Return the parser of all verbs."""
    parser = Parser(
        prog="flowkv",
        description="A paged, tiered, shared and persistent key/value cache for any PyTorch model.",
        epilog="flowkv VERB --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"flowkv {flowkv.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    verb = adder(verbs)
    for module in (demo, generate, serve, calibrate):
        module.add_verb(verb)
    stores.add_verbs(verb)
    doctor.add_verb(verb)
    sim.add_verbs(verbs)
    return parser
