"""The `flowkv` command: parsing, JSON, warnings, what becomes of errors, and the plain verbs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

import flowkv
from flowkv.cli import sim
from flowkv.cli.arguments import (
    AddVerb,
    Misused,
    Parser,
    adder,
    count,
    model_arguments,
    trace_argument,
)
from flowkv.core.config import format_size, load_config
from flowkv.core.errors import ConfigError, FlowKVError, MissingDependencyError
from flowkv.demo.run import DemoFailed
from flowkv.report.page import check_installed
from flowkv.report.screen import Screen, one_line
from flowkv.report.words import seconds
from flowkv.tiers.envelope import Keyring

if TYPE_CHECKING:
    from flowkv.tiers.disk.inspect import FrameShare, Inspection, ScrubReport

REPORT = "flowkv-report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `flowkv`; returns its exit status.

    Args:
        arguments: Words behind `flowkv`; default those of the process.
    """
    return run(_parser(), arguments)


def run(parser: Parser, arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status and never raises for a reason outside itself.

    Args:
        parser: Of its arguments; each verb says in `run` what it does.
        arguments: Words behind the command; default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json, debug = "--json" in words, "--debug" in words
    if arguments is None:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        given = parser.parse_args(words)
        # Whatever a library prints belongs to standard error: standard output is the result.
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
    except Misused as error:
        return _complain(as_json, f"{error}", usage=error.usage)
    except FlowKVError as error:
        if debug:
            traceback.print_exc()
        return _complain(as_json, str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough, as in `flowkv inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        kind = "" if isinstance(error, DemoFailed) else f"{type(error).__name__}: "
        text = f"Something unexpected happened: {kind}{error}".rstrip(".")
        hint = "" if debug else ". Run again with --debug for details"
        return _complain(as_json, f"{text}{hint}.", status=1)


def _terminated(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)  # unwinds, so that processes and temporary directories are cleaned up


def _complain(as_json: bool, text: str, *, usage: str = "", status: int = 2) -> int:
    print(f"{usage}flowkv: {text}", file=sys.stderr)
    if as_json:
        _print_json({"error": text}, sys.stdout)
    return status


def _print_json(result: Any, stream: Any) -> None:
    # msgspec writes NaN as null, which JSON knows.
    stream.write(msgspec.json.encode(result, enc_hook=str).decode() + "\n")
    stream.flush()


@contextlib.contextmanager
def _plain_warnings(debug: bool) -> Iterator[None]:
    """Shows FlowKV's own warnings as sentences, and others only to those who debug."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if debug or category is UserWarning:
            print(f"flowkv: note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _parser() -> Parser:
    parser = Parser(
        prog="flowkv",
        description="A paged, tiered, shared and persistent key/value cache for any PyTorch model.",
        epilog="flowkv VERB --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"flowkv {flowkv.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (_add_demo, _add_generate, _add_stores, _add_doctor):
        add(adder(verbs))
    sim.add_verbs(verbs)
    return parser


# `flowkv demo`.


def _add_demo(verb: AddVerb) -> None:
    parser = verb("demo", _demo, "see prompts survive a restart, on a trained model")
    model_arguments(parser, required=False)
    parser.option("--store", "DIR[:SIZE]", "default a temporary directory", default="")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    about = f"default {REPORT}; needs the extra `report`, without which there is none"
    parser.option("--report", "FILE", about, type=Path)
    trace_argument(parser)
    parser.option("--context", "N", "tokens of the longest prompt", type=count)
    for flag, default, about in (
        ("--turns", 4, "of the conversation"),
        ("--rows", 3, "of the batch"),
        ("--repeats", 3, "behind a median"),
        ("--max-new-tokens", 24, "of an answer"),
    ):
        parser.option(flag, "N", f"{about}; default %(default)s", type=count, default=default)


def _demo(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.data import tiny_path
    from flowkv.demo.findings import DemoPlan, DemoSizes
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


# `flowkv generate`: prompts of a file, answered with a store on disk.


def _add_generate(verb: AddVerb) -> None:
    parser = verb("generate", _generate, "answer prompts with a store on disk")
    model_arguments(parser, required=True)
    about = 'a prompt per line, or JSON lines with {"prompt": ...}; - for standard input'
    parser.option("--prompts", "FILE", about, required=True)
    parser.option("--store", "DIR[:SIZE]", "made if need be", required=True)
    parser.option("--max-new-tokens", "N", "default %(default)s", type=count, default=64)
    trace_argument(parser)


def _generate(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    prompts = read_prompts(given.prompts)
    load_config(disk=given.store)
    with screen.progress("loading the model"):
        import torch

        from flowkv.demo.timing import Reuse, timed_generate
        from flowkv.hooks.huggingface.load import load_model

        if given.threads:
            torch.set_num_threads(given.threads)
        loaded = load_model(given.model, dtype=given.dtype, device=given.device or None)
    answers = []
    with contextlib.ExitStack() as stack:
        kv = flowkv.attach(loaded.model, disk=given.store)
        stack.callback(kv.close)
        if given.trace:
            stack.enter_context(kv.trace(given.trace))
        for number, prompt in enumerate(prompts, 1):
            tokens, before = loaded.encode(prompt), Reuse.of(kv)
            timing = timed_generate(loaded.model, [tokens], max_new_tokens=given.max_new_tokens)
            (new,) = timing.answers
            answer = {
                "prompt": prompt,
                "answer": loaded.decode(new),
                "prompt_tokens": len(tokens),
                "tokens_reused": Reuse.of(kv).since(before).reused,
                "new_tokens": len(new),
                "ttft_s": timing.ttft_s,
                "tpot_s": timing.tpot_s,
            }
            answers.append(answer)
            screen.say(f"{number}. {one_line(prompt)}", style="bold")
            screen.say(answer["answer"])
            reused = f"{answer['tokens_reused']:,} of {len(tokens):,} tokens reused"
            screen.say(f"{reused}, first token after {seconds(timing.ttft_s)}\n", style="dim")
        kv.flush()
        stats = kv.stats()
    result = {name: stats[name] for name in ("tokens_reused", "hit_rate", "tiers")}
    return 0, {"answers": answers, **result, "device": str(loaded.model.device)}


def read_prompts(name: str) -> list[str]:
    r"""Prompts of a file: one per line, or JSON lines with {"prompt": "..."}.

    Args:
        name: The file; "-" for standard input. It is read as JSON lines if it ends in ".jsonl", or
            if its first line is a JSON object.

    Raises:
        ConfigError: It cannot be read, holds no prompt, or a line is malformed.
    """
    lines = [(i, line) for i, line in enumerate(_text(name).splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{name} holds no prompt", "Write one per line")
    if name.endswith(".jsonl") or isinstance(_parsed(lines[0][1]), dict):
        return [_prompt(name, number, line) for number, line in lines]
    return [line for _, line in lines]


def _text(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror or error})", "Correct the path of the prompts"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start})", "Save the prompts as UTF-8"
        ) from error


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _prompt(name: str, number: int, line: str) -> str:
    found = _parsed(line)
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(
            f"line {number} of {name} is no JSON object with a text `prompt`",
            'Write {"prompt": "..."} on every line',
        )
    return prompt


# `flowkv inspect` and `flowkv scrub`: what lies in the directory of a disk tier.


def _add_stores(verb: AddVerb) -> None:
    show = verb("inspect", _inspect, "show what a store holds")
    check = verb("scrub", _scrub, "check every frame of a store")
    for added in (show, check):
        added.add_argument("directory", type=Path, metavar="DIR", help="directory of a disk tier")
    change = check.add_mutually_exclusive_group()
    change.add_argument(
        "--drop",
        metavar="NAMESPACE",
        help="erase the frames of one model: the first digits of its namespace, its name, or"
        " 'unknown' for all that no model in use has named; nobody may have the store open",
    )
    change.add_argument(
        "--repair",
        action="store_true",
        help="drop damaged frames, find those that a damaged journal lost, and write it anew;"
        " nobody may have the store open",
    )
    check.option("--config", "FILE", "has the secret of encrypted frames, as TOML", type=Path)


def _inspect(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.tiers.disk.inspect import inspect

    found = inspect(given.directory)
    rows = _rows({f"kind {name[:16]}": one for name, one in found.kinds.items()})
    rows += _rows({f"codec {name[:16]}": one for name, one in found.codecs.items()})
    rows += _namespaces(found)
    rows.append(["all frames", f"{found.frames:,}", format_size(found.bytes)])
    screen.table(["", "frames", "bytes"], rows, title=f"Store {given.directory.absolute()}")
    full = f"{format_size(found.disk_bytes)} of {format_size(found.capacity_bytes)}"
    owner = "in use by a process" if found.owned else "in use by nobody"
    screen.say(f"Format {found.format}, {full} on disk, {owner}.")
    for frames, what in ((found.encrypted, "encrypted"), (found.compressed, "compressed")):
        if frames:
            screen.say(f"{frames:,} frames are {what}.")
    if not found.readable:
        screen.say("This version of FlowKV does not read that format.", style="yellow")
    if found.journal_lost:
        screen.say("Its journal is lost: the frames were found in their slots.", style="yellow")
    elif found.bad_pages:
        text = f"{found.bad_pages} pages of its journal are damaged: frames may be missing above."
        screen.say(text, style="yellow")
    return 0, {"directory": str(given.directory), **msgspec.structs.asdict(found)}


def _rows(shares: dict[str, FrameShare]) -> list[list[str]]:
    return [[name, f"{one.frames:,}", format_size(one.bytes)] for name, one in shares.items()]


def _namespaces(found: Inspection | ScrubReport) -> list[list[str]]:
    """A row for each namespace: what `--drop` takes, and the model, if any said its name."""
    names, shares = found.names, found.namespaces
    return _rows({f"namespace {d[:16]} ({names.get(d, 'unknown')})": s for d, s in shares.items()})


def _drop(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.tiers.disk.inspect import drop

    report = drop(given.directory, given.drop, keyring=_keyring(given.config))
    screen.say(f"{report.frames:,} frames, {format_size(report.bytes)}, were erased.")
    return 0, {"directory": str(given.directory), **msgspec.structs.asdict(report)}


def _scrub(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.tiers.disk.inspect import RepairReport, ScrubReport, repair, scrub

    if given.drop is not None:
        return _drop(given, screen)

    keyring = _keyring(given.config)
    check = repair if given.repair else scrub
    with screen.progress("repairing" if given.repair else "checking") as tell:
        report = check(
            given.directory,
            lambda done, total: tell(done, total, f"{done:,} frames"),
            keyring=keyring,
        )
    if isinstance(report, ScrubReport) and report.namespaces:
        screen.table(["", "frames", "bytes"], _namespaces(report))
    rate = report.bytes / report.seconds if report.seconds else 0.0
    screen.say(
        f"{report.frames:,} frames, {format_size(report.bytes)} in {report.seconds:.2f} s"
        f" ({format_size(int(rate))}/s)."
    )
    if report.locked:
        text = f"{report.locked:,} are encrypted, and no secret given opens them: see --config."
        screen.say(text, style="yellow")
    if isinstance(report, RepairReport) and (report.bad or report.recovered):
        text = f"{report.bad:,} damaged ones were dropped, {report.recovered:,} lost ones found."
        screen.say(text, style="yellow")
    elif report.bad:
        text = f"{report.bad:,} are damaged. None will be served: their prompts are computed again."
        screen.say(text, style="red bold")
    elif not report.locked:
        screen.say("All are sound.", style="green")
    return int(report.bad > 0), {
        "directory": str(given.directory),
        **msgspec.structs.asdict(report),
    }


def _keyring(path: Path | None) -> Keyring | None:
    config = load_config(path)
    wanted = config.integrity == "aead" or config.secret
    return Keyring(config.secret_bytes) if wanted else None


# `flowkv doctor`.


def _add_doctor(verb: AddVerb) -> None:
    doctor = verb("doctor", _doctor, "show what this machine offers")
    doctor.option("--store", "DIR", "look at its disk", type=Path, default=Path())


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
