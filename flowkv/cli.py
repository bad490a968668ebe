"""The `flowkv` command: demo, generate, inspect, scrub, doctor.

Results go to standard output, everything else to standard error; `--json` prints exactly one JSON
object. Exit status: 0 done, 1 the answer is bad news (tokens differ, frames are damaged) or
something unexpected, 2 wrong use or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

import flowkv
from flowkv.core.config import load_config
from flowkv.core.errors import ConfigError, FlowKVError
from flowkv.core.sizes import format_size
from flowkv.demo.run import DemoFailed
from flowkv.demo.show import Screen, one_line, seconds
from flowkv.tiers.keyring import Keyring

_DTYPES = ("float32", "bfloat16", "float16")


class _Misused(Exception):
    """The arguments are wrong."""

    def __init__(self, usage: str, problem: str) -> None:
        super().__init__(problem)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Misused(self.format_usage(), message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status and never raises for a reason outside itself.

    Args:
        arguments: Words behind `flowkv`; default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json, debug = "--json" in words, "--debug" in words
    if arguments is None:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        given = _parser().parse_args(words)
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
    except _Misused as error:
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


# ---- arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="flowkv",
        description="A paged, tiered, shared and persistent key/value cache for any PyTorch model.",
        epilog="flowkv VERB --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"flowkv {flowkv.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Callable[..., tuple[int, Any]], text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.add_argument("--json", action="store_true", help="print one JSON object")
        added.add_argument("--debug", action="store_true", help="show tracebacks and all warnings")
        added.set_defaults(run=run)
        return added

    _demo_arguments(verb("demo", _demo, "see prompts survive a restart, on a trained model"))
    _generate_arguments(verb("generate", _generate, "answer prompts with a store on disk"))
    for name, run, text in (
        ("inspect", _inspect, "show what a store holds"),
        ("scrub", _scrub, "check every frame of a store"),
    ):
        added = verb(name, run, text)
        added.add_argument("directory", type=Path, metavar="DIR", help="directory of a disk tier")
        if name == "scrub":
            _scrub_arguments(added)
    doctor = verb("doctor", _doctor, "show what this machine offers")
    doctor.add_argument(
        "--store", type=Path, default=Path(), metavar="DIR", help="look at its disk"
    )
    return parser


def _scrub_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repair",
        action="store_true",
        help="drop damaged frames, find those that a damaged journal lost, and write it anew;"
        " nobody may have the store open",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="has the secret of encrypted frames, as TOML"
    )


def _model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    about = "folder or Hugging Face id of a causal language model"
    about += "" if required else "; default a tiny one that comes with FlowKV"
    parser.add_argument("--model", required=required, default="", metavar="PATH_OR_ID", help=about)
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default %(default)s")
    parser.add_argument("--device", default="", help="default the GPU if there is one, else cpu")
    parser.add_argument("--threads", type=_count, default=0, help="threads of torch")


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser, required=False)
    parser.add_argument(
        "--store", default="", metavar="DIR[:SIZE]", help="default a temporary directory"
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("flowkv-report.html"),
        metavar="FILE",
        help="default %(default)s",
    )
    parser.add_argument(
        "--context", type=_count, default=0, metavar="N", help="tokens of the longest prompt"
    )
    for flag, default, about in (
        ("--turns", 4, "of the conversation"),
        ("--rows", 3, "of the batch"),
        ("--repeats", 3, "behind a median"),
        ("--max-new-tokens", 24, "of an answer"),
    ):
        about += "; default %(default)s"
        parser.add_argument(flag, type=_count, default=default, metavar="N", help=about)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser, required=True)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help='a prompt per line, or JSON lines with {"prompt": ...}; - for standard input',
    )
    parser.add_argument("--store", required=True, metavar="DIR[:SIZE]", help="made if need be")
    parser.add_argument(
        "--max-new-tokens", type=_count, default=64, metavar="N", help="default %(default)s"
    )


def _count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r} is no count of 1 or more")
    return value


# ---- verbs


def _demo(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.data import tiny_path
    from flowkv.demo.records import Plan
    from flowkv.demo.run import run_demo
    from flowkv.demo.workload import Sizes

    if given.turns < 2:
        raise ConfigError("a conversation of one turn has no past", "Give --turns 2 or more")
    load_config(disk=given.store or None)  # better before a model is loaded than after it
    sizes = Sizes(turns=given.turns, rows=given.rows, answer=given.max_new_tokens)
    if given.context:
        sizes = msgspec.structs.replace(sizes, context=given.context)
    plan = Plan(
        model=given.model or str(tiny_path()),
        store=given.store,
        sizes=sizes,
        repeats=given.repeats,
        dtype=given.dtype,
        device=given.device,
        threads=given.threads,
    )
    summary = run_demo(plan, screen, report=given.report, keep=given.keep, debug=given.debug)
    return (0 if summary.tokens_identical else 1), summary


def _generate(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.measure.answer import answer_all, read_prompts

    prompts = read_prompts(given.prompts)
    load_config(disk=given.store)
    with screen.progress("loading the model"):
        import torch

        from flowkv.hooks.huggingface.load import load_model

        if given.threads:
            torch.set_num_threads(given.threads)
        loaded = load_model(given.model, dtype=given.dtype, device=given.device or None)
    kv = flowkv.attach(loaded.model, disk=given.store)
    try:
        answers = []
        for number, answer in enumerate(
            answer_all(loaded, kv, prompts, max_new_tokens=given.max_new_tokens), 1
        ):
            answers.append(answer)
            screen.say(f"{number}. {one_line(answer.prompt)}", style="bold")
            screen.say(answer.answer)
            screen.say(
                f"{answer.tokens_reused:,} of {answer.prompt_tokens:,} tokens reused, first token"
                f" after {seconds(answer.ttft_s)}\n",
                style="dim",
            )
        kv.flush()
        stats = kv.stats()
    finally:
        kv.close()
    result = {
        "answers": answers,
        "tokens_reused": stats["tokens_reused"],
        "hit_rate": stats["hit_rate"],
        "tiers": stats["tiers"],
        "device": str(loaded.model.device),
    }
    return 0, result


def _inspect(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.tiers.disk.inspect import inspect

    found = inspect(given.directory)
    shares = {"kind": found.kinds, "codec": found.codecs, "namespace": found.namespaces}
    rows = [
        [f"{label} {name[:16]}", f"{share.frames:,}", format_size(share.bytes)]
        for label, group in shares.items()
        for name, share in group.items()
    ]
    rows.append(["all frames", f"{found.frames:,}", format_size(found.bytes)])
    screen.table(["", "frames", "bytes"], rows, title=f"Store {given.directory.absolute()}")
    full = f"{format_size(found.disk_bytes)} of {format_size(found.capacity_bytes)}"
    owner = "in use by a process" if found.owned else "in use by nobody"
    screen.say(f"Format {found.format}, {full} on disk, {owner}.")
    for count, what in ((found.encrypted, "encrypted"), (found.compressed, "compressed")):
        if count:
            screen.say(f"{count:,} frames are {what}.")
    if not found.readable:
        screen.say("This version of FlowKV does not read that format.", style="yellow")
    if found.journal_lost:
        screen.say("Its journal is lost: the frames were found in their slots.", style="yellow")
    elif found.bad_pages:
        text = f"{found.bad_pages} pages of its journal are damaged: frames may be missing above."
        screen.say(text, style="yellow")
    return 0, {"directory": str(given.directory), **msgspec.structs.asdict(found)}


def _scrub(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.tiers.disk.inspect import scrub
    from flowkv.tiers.disk.repair import RepairReport, repair

    keyring = _keyring(given.config)
    check = repair if given.repair else scrub
    with screen.progress("repairing" if given.repair else "checking") as tell:
        report = check(
            given.directory,
            lambda done, total: tell(done, total, f"{done:,} frames"),
            keyring=keyring,
        )
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


if __name__ == "__main__":
    sys.exit(main())
