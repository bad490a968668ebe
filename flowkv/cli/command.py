"""The `flowkv` command: parsing, JSON, warnings, error handling, and every verb."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

import flowkv
from flowkv.cli import doctor
from flowkv.cli.arguments import (
    AddVerb,
    Misused,
    Parser,
    adder,
    count,
    model_arguments,
    names,
    trace_argument,
)
from flowkv.core.config import format_size, load_config
from flowkv.core.errors import ConfigError, FlowKVError, MissingDependencyError
from flowkv.core.files import MALFORMED, open_regular
from flowkv.demo.run import DemoFailed
from flowkv.report.charts import MOST_CURVES, Curves
from flowkv.report.page import Figures, Section, Table, check_installed, write_report
from flowkv.report.screen import Screen, one_line
from flowkv.report.words import seconds
from flowkv.tiers.envelope import Keyring

if TYPE_CHECKING:
    from flowkv.sim.replay import Result
    from flowkv.sim.trace import Trace
    from flowkv.tiers.disk.inspect import FrameShare, Inspection, ScrubReport

REPORT = "flowkv-report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `flowkv`, and return its exit status.

    Args:
        arguments: Words behind `flowkv`; default those of the process.
    """
    return run(_parser(), arguments)


def run(parser: Parser, arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; raise nothing for errors of the command itself.

    Args:
        parser: Parser of its arguments; each verb sets its function as `run`.
        arguments: Words behind the command; default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json, debug = "--json" in words, "--debug" in words
    if arguments is None:
        signal.signal(signal.SIGTERM, _terminated)
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
    except Misused as error:
        return _complain(as_json, f"{error}", usage=error.usage)
    except FlowKVError as error:
        if debug:
            traceback.print_exc()
        return _complain(as_json, str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
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


def _terminated(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)  # unwinds, so that processes and temporary directories are cleaned up


def _complain(as_json: bool, text: str, *, usage: str = "", status: int = 2) -> int:
    print(f"{usage}flowkv: {text}", file=sys.stderr)
    if as_json:
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


def _parser() -> Parser:
    parser = Parser(
        prog="flowkv",
        description="A paged, tiered, shared and persistent key/value cache for any PyTorch model.",
        epilog="flowkv VERB --help tells more.",
    )
    parser.add_argument("--version", action="version", version=f"flowkv {flowkv.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (_add_demo, _add_generate, _add_stores, doctor.add_verb):
        add(adder(verbs))
    _add_sim(verbs)
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
    for name, (tiny, other, of) in _AMOUNTS.items():
        about = f"of {of}; default {tiny}, with --model {other}"
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


# `flowkv generate`: answers prompts of a file with a store on disk.


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
            answer: dict[str, Any] = {
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
    r"""Return the prompts of a file: one per line, or JSON lines with {"prompt": "..."}.

    Lines end with "\n" or "\r\n", not with any other line end of Unicode; a byte order mark before
    the first one is left out.

    Args:
        name: The file; "-" for standard input. The file is read as JSON lines if its name ends in
            ".jsonl", or if its first line is a JSON object.

    Raises:
        ConfigError: The file cannot be read, has no prompt, or a line is malformed.
    """
    every = enumerate(_text(name).replace("\r\n", "\n").split("\n"), 1)
    lines = [(number, line) for number, line in every if line.strip()]
    if not lines:
        raise ConfigError(f"{name} holds no prompt", "Write one per line")
    if name.endswith(".jsonl") or isinstance(_parsed(lines[0][1]), dict):
        return [_prompt(name, number, line) for number, line in lines]
    return [line for _, line in lines]


def _text(name: str) -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read()
        else:
            with open_regular(Path(name).expanduser()) as file:
                data = file.read()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start})", "Save the prompts as UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be read ({getattr(error, 'strerror', None) or error})",
            "Correct the path of the prompts, or pass - for standard input",
        ) from error


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except MALFORMED:
        return None


def _prompt(name: str, number: int, line: str) -> str:
    found = _parsed(line)
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt or any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ConfigError(  # half a surrogate pair is no text
            f"line {number} of {name} is no JSON object with a text `prompt`",
            'Write {"prompt": "..."} on every line',
        )
    return prompt


# `flowkv inspect` and `flowkv scrub`: show, check and repair the directory of a disk tier.


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
        " 'unknown' for all that no model in use has named; no process may have the store open",
    )
    change.add_argument(
        "--repair",
        action="store_true",
        help="drop damaged frames, find those that a damaged journal lost, and write it again;"
        " no process may have the store open",
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
    owner = "in use by a process" if found.owned else "not in use"
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
    """Return a row for each namespace: its digits for `--drop`, and the model's name if known."""
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


# `flowkv sim replay` and `sweep`: replay traces of requests through policies.

SIZES = ("0.5%", "1%", "2%", "5%", "10%", "30%")
POLICIES = ("lru", "auto", "opt")

TRACE = "a file (JSON lines as Mooncake writes them, a recording, .npz), or a generator: chat,"
TRACE += " agents, rag, bursts, drift, mix, scan, cyclic, markov; with options: agents:seed=3"


def _add_replays(verb: AddVerb) -> None:
    one = verb("replay", _sweep, "replay a trace through policies")
    one.add_argument("traces", nargs=1, metavar="TRACE", help=TRACE)
    many = verb("sweep", _sweep, "replay several traces through policies")
    many.add_argument("traces", nargs="+", metavar="TRACE", help=TRACE)
    several = f"names of the catalogue; default {','.join(POLICIES)}, with --tiers all but opt"
    room = "room, as shares of the trace's different blocks; default"
    sure = "the application predicts when each conversation goes on, with an error whose logarithm"
    for parser in (one, many):
        parser.option("--policy", "A,B", several, type=names)
        about = f"{room} {','.join(SIZES).replace('%', '%%')}"
        parser.option("--sizes", "X%,Y%", about, type=names, default=list(SIZES))
        about = f"{sure} has this standard deviation, such as 0.5"
        parser.option("--hints", "SIGMA", about, type=float)
        about = "requests are known S seconds before"
        parser.option("--queue", "S", about, type=float, default=0.0)
        about = "bring blocks before they are asked for"
        parser.add_argument("--prefetch", action="store_true", help=about)
        about = "prefetch by a Markov chain over the order of chains"
        more: Any = {"action": "store_const", "dest": "prefetch", "const": "markov"}
        parser.add_argument("--markov", help=about, **more)
        about = (
            "places below the first, such as dram:5%%,disk:30%%:kv8, or none; may be given several"
        )
        about += " times, to be compared"
        parser.option("--tiers", "A,B", about, type=names, action="append", default=[])
        about = "of the first place with --tiers: raw, kv8 or kv4"
        parser.add_argument("--codec", default="raw", help=about)
        about = "adds times and prices: h100, h200, b200, mi300x or laptop"
        parser.add_argument("--hardware", help=about)
        about = "1b, 8b (the default) or 70b; for these"
        parser.add_argument("--model", default="8b", help=about)
        parser.option("--jobs", "N", "replays at a time; default 1", type=count, default=1)
        parser.option("--html", "FILE", "write a report with curves", type=Path)


def load_trace(text: str) -> Trace:
    """Load the trace of a file, or generate one: "agents", "agents:seed=3,requests=99".

    Raises:
        ConfigError: The text is neither a file nor a generator.
    """
    from flowkv.sim import generate, read_trace
    from flowkv.sim.generate import KINDS

    kind, _, options = text.partition(":")
    if Path(text).exists() or (kind not in KINDS and not _GENERATOR.fullmatch(text)):
        return read_trace(text)
    told = dict(map(_option, filter(None, options.split(","))))
    return msgspec.structs.replace(generate(kind, **told), name=text)


_GENERATOR = re.compile(r"[a-z]+(:.*)?")


def _option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), msgspec.json.decode(value)
    except MALFORMED:
        raise ConfigError(
            f"{text!r} is no option of a generator", "Write options as seed=3,requests=2000"
        ) from None


def _sweep(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.policy import make_policy

    stacks = [[] if tiers == ["none"] else tiers for tiers in given.tiers] or [[]]
    policies = given.policy or [name for name in POLICIES if name != "opt" or not any(stacks)]
    for name in policies:
        make_policy(name)  # refuses wrong names before the first replay
    if given.html is not None:
        if not given.html.absolute().parent.is_dir():
            raise ConfigError(f"there is no directory for {given.html}", "Make it first")
        check_installed()
        if (curves := len(policies) * len(stacks)) > MOST_CURVES:
            raise ConfigError(
                f"{curves} curves cannot be told apart",
                f"With --html, give {MOST_CURVES} policies at most, of all --tiers together",
            )
    found = {text: load_trace(text) for text in given.traces}
    called = [trace.name for trace in found.values()]
    traces = [
        msgspec.structs.replace(trace, name=text) if called.count(trace.name) > 1 else trace
        for text, trace in found.items()
    ]
    told = {"hints": given.hints, "queue_s": given.queue, "prefetch": given.prefetch}
    results = [
        result
        for trace in traces
        for tiers in stacks
        for result in _results(given, trace, tiers, policies, told, named=len(stacks) > 1)
    ]
    for trace in traces:
        own = [result for result in results if result.trace == trace.name]
        title = f"{trace.name}: {len(trace):,} requests, {len(trace.blocks):,} blocks asked for,"
        title += f" {trace.unique:,} different"
        screen.table(_COLUMNS, list(map(_replays_cells, own)), title=title)
        if "hardware" in own[0].extra:
            title = f"Times and prices on {own[0].extra['hardware']}, a model of both"
            screen.table(*_priced(own), title=title)
    screen.say(
        "Simulated. Closure: 0 is lru, 1 is opt. Traffic: blocks loaded again and prefetched, over"
        " those of lru. Precision: of the prefetched blocks, those that were used."
    )
    if given.html is not None:
        footer = f"FlowKV {flowkv.__version__}, Python {platform.python_version()}."
        write_replay_report(given.html.absolute(), results, footer=footer)
        screen.say(f"Report: {given.html.absolute()}")
    # For scripts: the policy by its name alone, with its hints in fields of their own.
    names = [result.policy.partition("+")[0] for result in results]
    return 0, [
        {**result.row(), "policy": name, **(_UNTOLD if name == "opt" else told)}
        for name, result in zip(names, results, strict=True)
    ]


_UNTOLD = {"hints": None, "queue_s": 0.0, "prefetch": False}  # the bound needs no hints


def _results(
    given: argparse.Namespace,
    trace: Trace,
    tiers: Sequence[str],
    policies: Sequence[str],
    told: dict[str, Any],
    *,
    named: bool,
) -> list[Result]:
    """Replay a trace with all policies at all sizes, with progress on standard error.

    Args:
        given: The arguments.
        trace: The trace.
        tiers: The places below the first.
        policies: Names of policies.
        told: Hints, queue and prefetch options of the policies.
        named: Name the tiers in the results.
    """
    from flowkv.sim.replay import share_of, sweep

    shares = {size: share_of(size) for size in given.sizes}
    hardware = given.hardware or ("h100" if named else None)  # tiers are compared by times
    common: dict[str, Any] = {"hardware": hardware, "model": given.model}
    if tiers:
        common |= {"tiers": tiers, "codec": given.codec}
    words = {"hints": given.hints is not None, "queue": given.queue > 0, "prefetch": given.prefetch}
    beyond = "".join(f"+{word}" for word, said in words.items() if said)
    below = f"+{','.join(tiers)}" if named and tiers else ""
    each: Any = {name: _UNTOLD if name == "opt" else told for name in policies}
    jobs = [(size, name) for size in shares for name in each]
    results: list[Result] = []
    with Screen(to_stderr=True).progress("replaying") as tell:

        def show(share: float) -> None:
            size, name = jobs[min(len(results), len(jobs) - 1)]
            done = round(1000 * (len(results) + share))
            tell(done, 1000 * len(jobs), f"{trace.name} {name}{below} {size}")

        def done(_done: int, _all: int, result: Result) -> None:
            size, name = jobs[len(results)]
            label = (name if name == "opt" else name + beyond) + below
            extra = {**result.extra, "tiers": ",".join(tiers)} if named else result.extra
            results.append(
                msgspec.structs.replace(result, policy=label, size=shares[size], extra=extra)
            )
            show(0.0)

        if given.jobs == 1:
            common["progress"] = lambda done, total: show(done / total)
        show(0.0)
        sweep(trace, each, shares, processes=given.jobs, done=done, **common)
    return results


_COLUMNS = ["policy", "size", "blocks", "prefix hits", "closure", "traffic", "precision", "M/s"]


def _replays_cells(result: Result) -> list[str]:
    traffic = result.load_traffic_vs_lru
    return [
        result.policy,
        f"{100 * result.size:.4g}%",
        f"{result.pages:,}",
        f"{100 * result.prefix_hit_ratio:.2f}%",
        _or_dash(result.closure, ".3f"),
        "-" if traffic is None else f"{traffic:.3f}x",
        _or_dash(result.prefetch_precision, ".0%"),
        f"{result.blocks_per_s / 1e6:.1f}",
    ]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _priced(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the times and prices that a hardware model adds."""
    places = _places(results)
    columns = ["policy", "size", *(f"from {name[10:]}" for name in places)]
    columns += ["TTFT ms, mean", "p99", "without", "$/Mtok"]
    lines = []
    for result in results:
        extra: dict[str, Any] = result.extra
        times = [extra[f"ttft_ms_{name}"] for name in ("mean", "p99", "mean_without")]
        lines.append(
            [
                result.policy,
                f"{100 * result.size:.4g}%",
                *(_or_dash(extra.get(name), ".1%") for name in places),
                *(f"{value:,.1f}" for value in times),
                f"{extra['dollars_per_million_tokens']:.4f}",
            ]
        )
    return columns, lines


def _places(results: Sequence[Result]) -> list[str]:
    """Return the names of fields with the share of each place in the hits."""
    found = dict.fromkeys(name for result in results for name in result.extra)
    return [name for name in found if name.startswith("hit_ratio_")]


# Report of replays in one HTML file: hit ratio, closure and times by size, and tables.

BOUND = "opt"
BASE = "lru"


def write_replay_report(path: Path, rows: Sequence[Result], *, footer: str = "") -> Path:
    """Write the report, and return its path.

    Args:
        path: The HTML file.
        rows: Results of replays, on one trace or several.
        footer: Versions, machine, date.

    Raises:
        ConfigError: There are more policies than distinguishable curves.
        OSError: The file cannot be written.
    """
    traces = list(dict.fromkeys(row.trace for row in rows))
    colours = {name: n for n, name in enumerate(dict.fromkeys(row.policy for row in rows))}
    title = "Replays of policies" if len(traces) > 1 else f"Replays of policies on {traces[0]}"
    sections: list[Section] = []
    for trace in traces:
        sections += _replay_sections(trace, [row for row in rows if row.trace == trace], colours)
    lead = (
        "Requests of a trace, replayed through the policy objects that the cache uses. A hit is a"
        " block in the leading run of blocks that are there when a request arrives."
    )
    return write_report(path, title, sections, lead=lead, footer=footer)


def _replay_sections(
    trace: str, rows: Sequence[Result], colours: Mapping[str, int]
) -> tuple[Section, Section]:
    """Return curves over sizes, and a table per figure with a row a policy and a column a size."""
    sizes = sorted({row.size for row in rows})
    at = {(row.policy, row.size): row.row() for row in rows}
    shown = sorted({row.policy for row in rows}, key=colours.__getitem__)

    def values(name: str, field: str) -> list[Any]:
        return [at.get((name, size), {}).get(field) for size in sizes]

    def curves(caption: str, field: str, names: Sequence[str]) -> Curves:
        lines = {
            name: [math.nan if value is None else value for value in values(name, field)]
            for name in names
        }
        x = "room, as a share of the trace's different blocks"
        return Curves(caption, sizes, lines, x, [BOUND], colours)

    found = {name: [v for v in values(name, "closure") if v is not None] for name in shown}
    means = [(sum(v) / len(v), n, len(v)) for n, v in found.items() if v and n not in (BOUND, BASE)]
    parts: list[Figures | Curves] = [curves("Prefix hit ratio", "prefix_hit_ratio", shown)]
    if means:
        best = [
            (name, f"{mean:.2f}", f"mean closure of {'one size' if n == 1 else f'{n} sizes'}")
            for mean, name, n in sorted(means, reverse=True)[:3]
        ]
        caption = "Closure: how much of the way from leaf-first LRU to Belady"
        names = [name for name in shown if found[name] and name not in (BOUND, BASE)]
        parts = [Figures(best), *parts, curves(caption, "closure", names)]
    places = _places(rows)
    if places:
        caption = f"Mean time to the first token that is saved, on {rows[0].extra['hardware']}"
        parts.append(curves(caption, "ttft_saved_ratio", shown))
    columns = ["policy", *(f"{100 * size:.4g}%" for size in sizes)]
    tables = []
    for caption, field, digits, unit in (
        ("Blocks that fit, in all places", "pages", 0, 1),
        ("Prefix hit ratio, percent", "prefix_hit_ratio", 2, 100.0),
        *((f"Hits from {name[10:]}, percent of all blocks", name, 2, 100.0) for name in places),
        ("Mean time to the first token, ms", "ttft_ms_mean", 1, 1.0),
        ("Mean time to the first token without a cache, ms", "ttft_ms_mean_without", 1, 1.0),
        ("Saved time to the first token, percent", "ttft_saved_ratio", 1, 100.0),
        ("99th percentile of the time to the first token, ms", "ttft_ms_p99", 1, 1.0),
        *((f"GiB read from {n[10:]}", n.replace("hit_ratio", "read_gib"), 1, 1.0) for n in places),
        *((f"GiB of room in {n[10:]}", n.replace("hit_ratio", "room_gib"), 1, 1.0) for n in places),
        ("Dollars a million tokens, at assumed prices", "dollars_per_million_tokens", 4, 1.0),
        ("Closure", "closure", 3, 1.0),
        ("Blocks loaded again and prefetched, over those of lru", "load_traffic_vs_lru", 3, 1.0),
        ("Prefetched blocks that were used, percent", "prefetch_precision", 0, 100.0),
        ("Million blocks replayed per second (measured)", "blocks_per_s", 1, 1e-6),
    ):
        lines = [
            [name, *(_rounded(v, unit, digits) for v in values(name, field))] for name in shown
        ]
        if lines := [line for line in lines if any(line[1:])]:
            tables.append(Table(columns, lines, caption))
    return (
        Section(trace, parts=parts, source="simulated"),
        Section(f"{trace}, in figures", parts=tables, source="simulated"),
    )


def _rounded(value: float | None, unit: float, digits: int) -> str | None:
    return None if value is None else f"{unit * value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


# `flowkv sim characterise`: statistics of a trace, without any policy.


def _add_characterise(verb: AddVerb) -> None:
    added = verb("characterise", _characterise, "show what a trace is like, before any policy")
    added.add_argument("trace", metavar="TRACE", help=TRACE)


def _characterise(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.sim.character import characterise

    with Screen(to_stderr=True).progress("looking"):
        found = characterise(load_trace(given.trace))
    facts = {
        "requests": f"{found.requests:,}",
        "known sessions, tenants": f"{found.sessions:,}, {found.tenants:,}",
        "from the first to the last": f"{found.span_s:,.0f} s",
        "between requests, mean and variation": f"{found.arrival_s:.3g} s, {found.arrival_cv:.2f}",
        "blocks asked for, different ones": f"{found.blocks:,}, {found.unique:,}",
        "tokens of a block": f"{found.block_tokens:,}",
        "hit ratio with room for everything": f"{found.infinite_hit_ratio:.1%}",
        "different blocks used only once": f"{found.used_once:.1%}",
        "uses that fall on the top 1% of them": f"{found.top_share:.1%}",
        "requests that continue an earlier one": f"{found.extending:.1%}",
    }
    screen.table(["", ""], [[*fact] for fact in facts.items()], title=f"Trace {found.trace}")
    spreads = {
        "blocks per request": found.blocks_per_request,
        "to the next turn, s": found.gap_s,
        "to a block's next use, s": found.reuse_s,
        "... in requests": found.reuse_requests,
        "... in blocks of an LRU stack": found.stack_distance,
    }
    rows = [
        [name, *(f"{value:,.4g}" for value in (spread.p10, spread.p50, spread.p90, spread.p99))]
        for name, spread in spreads.items()
    ]
    screen.table(["", "p10", "p50", "p90", "p99"], rows, title="Percentiles")
    ratios = {f"{100 * size:.4g}%": f"{100 * ratio:.1f}%" for size, ratio in found.lru.items()}
    windows = {f"{window:g} s": f"{blocks:,.0f}" for window, blocks in found.working_set.items()}
    turns = {f"turn {turn}": f"{share:.0%}" for turn, share in found.returns.items()}
    for title, corner, label, cells in (
        ("Hit ratio of leaf-first LRU", "size", "lru", ratios),
        ("Working set, mean", "window", "blocks", windows),
        ("Conversations that go on", "", "goes on", turns),
    ):
        screen.table([corner, *cells], [[label, *cells.values()]], title=title)
    return 0, found


# `flowkv sim record`: records a trace of an engine in production, from its KV events.

ENGINES = ("vllm", "sglang", "dynamo", "flowkv")


def _add_record(verb: AddVerb) -> None:
    added = verb("record", _record, "write a trace of an engine that runs, from its KV events")
    engines = "vllm, sglang, dynamo or flowkv: what publishes the events"
    added.add_argument("engine", choices=ENGINES, metavar="ENGINE", help=engines)
    about = "where, such as tcp://localhost:5557; several where an engine has several publishers"
    added.add_argument("endpoints", nargs="+", metavar="ENDPOINT", help=about)
    added.option("--out", "FILE", "the trace, for sim replay", type=Path, required=True)
    about = "where the engine answers for events that were missed, one for each endpoint"
    added.option("--replay", "A,B", about, type=names, default=[])
    added.option("--topic", "TEXT", "only events of this topic", default="")
    added.option("--seconds", "S", "how long; default until Ctrl-C", type=float, default=math.inf)


def _record(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.connect.events import EventSubscription, Recorder

    replays = given.replay or [""] * len(given.endpoints)
    if len(replays) != len(given.endpoints):
        raise ConfigError(
            f"{len(given.endpoints)} endpoints and {len(replays)} addresses in --replay",
            "Give one for each, or none",
        )
    if given.out.is_dir() or not given.out.absolute().parent.is_dir():
        raise ConfigError(f"the trace {given.out} cannot be written", "Choose another --out")
    end_s, batches = time.monotonic() + given.seconds, 0
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(Recorder(given.out))
        sources = [
            stack.enter_context(EventSubscription(endpoint, replay=replay, topic=given.topic))
            for endpoint, replay in zip(given.endpoints, replays, strict=True)
        ]
        tell = stack.enter_context(Screen(to_stderr=True).progress("recording"))
        with contextlib.suppress(KeyboardInterrupt):
            while (left_s := end_s - time.monotonic()) > 0:
                for source in sources:
                    found = source.poll(min(0.5 / len(sources), max(0.0, left_s)))
                    recorder.feed(found)
                    batches += len(found)
                tell(0, 0, f"{recorder.requests:,} requests of {batches:,} batches")
        lost = sum(source.lost for source in sources)
        recorder.close()
    said = {"requests": recorder.requests, "batches": batches, "lost": lost}
    screen.say(f"{recorder.requests:,} requests of {batches:,} batches of events: {given.out}")
    if lost:
        screen.say(f"{lost:,} batches were lost: some requests are missing, or too short.")
    if not batches:
        screen.say("Nothing came. Does the engine publish events there? vLLM: --kv-events-config")
    return 0 if batches else 1, said


def _add_sim(verbs: Any) -> None:
    sim = verbs.add_parser(
        "sim",
        help="simulate caches on traces",
        description="Simulates caches; nothing here is a measurement.",
        epilog="flowkv sim VERB --help tells more.",
    )
    verb = adder(sim.add_subparsers(title="verbs", metavar="VERB", required=True))
    for add in (_add_replays, _add_characterise, _add_record):
        add(verb)
