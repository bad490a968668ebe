"""`flowkv sim replay` and `sweep`: traces of requests, through policies."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import flowkv
from flowkv.cli.arguments import AddVerb, count, names
from flowkv.core.errors import ConfigError
from flowkv.demo.show import Screen
from flowkv.observe.curves import MOST_CURVES

if TYPE_CHECKING:
    from flowkv.sim.result import Result
    from flowkv.sim.trace import Trace

SIZES = ("0.5%", "1%", "2%", "5%", "10%", "30%")
POLICIES = ("lru", "auto", "opt")

TRACE = "a file (JSON lines as Mooncake writes them, a recording, .npz), or a generator: chat,"
TRACE += " agents, rag, bursts, drift, mix, scan, cyclic, markov; with options: agents:seed=3"


def add_verbs(verb: AddVerb) -> None:
    """Adds the verbs."""
    one = verb("replay", _replay, "replay a trace through policies")
    one.add_argument("trace", metavar="TRACE", help=TRACE)
    many = verb("sweep", _sweep, "replay several traces through policies")
    many.add_argument("traces", nargs="+", metavar="TRACE", help=TRACE)
    for added in (one, many):
        _replay_arguments(added)


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        type=names,
        metavar="A,B",
        help=f"names of the catalogue; default {','.join(POLICIES)}, with --tiers all but opt",
    )
    parser.add_argument(
        "--sizes",
        type=names,
        default=list(SIZES),
        metavar="X%,Y%",
        help=f"room, as shares of the trace's different blocks; default"
        f" {','.join(SIZES).replace('%', '%%')}",
    )
    parser.add_argument(
        "--hints",
        type=float,
        metavar="SIGMA",
        help="the application says when each conversation goes on, off by a factor whose logarithm"
        " has this standard deviation, such as 0.5",
    )
    parser.add_argument(
        "--queue", type=float, default=0.0, metavar="S", help="requests are known S seconds before"
    )
    parser.add_argument(
        "--prefetch", action="store_true", help="bring blocks before they are asked for"
    )
    parser.add_argument(
        "--tiers",
        type=names,
        default=[],
        metavar="A,B",
        help="places below the first, such as dram:5%%,disk:30%%:kv8",
    )
    parser.add_argument(
        "--codec", default="raw", help="of the first place with --tiers: raw, kv8 or kv4"
    )
    parser.add_argument(
        "--hardware", help="adds times and prices: h100, h200, b200, mi300x or laptop"
    )
    parser.add_argument("--model", default="8b", help="1b, 8b (the default) or 70b; for these")
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="replays at a time; default 1"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with curves")


def load_trace(text: str) -> Trace:
    """A trace from the name of a file, or of a generator: "agents", "agents:seed=3,requests=99".

    Raises:
        ConfigError: If it is neither.
    """
    from flowkv.sim import generate, read_trace
    from flowkv.sim.generate import KINDS

    kind, _, options = text.partition(":")
    if Path(text).exists() or (kind not in KINDS and not _GENERATOR.fullmatch(text)):
        return read_trace(text)
    told = dict(map(_option, filter(None, options.split(","))))
    return msgspec.structs.replace(generate(kind, **told), name=text)


def _load_all(texts: Sequence[str]) -> list[Trace]:
    """Each once, under names that differ."""
    traces = {text: load_trace(text) for text in texts}
    names = [trace.name for trace in traces.values()]
    return [
        msgspec.structs.replace(trace, name=text) if names.count(trace.name) > 1 else trace
        for text, trace in traces.items()
    ]


_GENERATOR = re.compile(r"[a-z]+(:.*)?")


def _option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), msgspec.json.decode(value)
    except msgspec.DecodeError:
        raise ConfigError(
            f"{text!r} is no option of a generator", "Write options as seed=3,requests=2000"
        ) from None


def _replay(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    given.traces = [given.trace]
    return _sweep(given, screen)


def _sweep(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.policy import make_policy
    from flowkv.sim.report import write_replay_report

    if given.policy is None:
        given.policy = [name for name in POLICIES if name != "opt" or not given.tiers]
    for name in given.policy:
        make_policy(name)  # better refused now than after the first replays
    if given.html is not None and not given.html.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {given.html}", "Make it first")
    if given.html is not None and len(given.policy) > MOST_CURVES:
        raise ConfigError(
            f"{len(given.policy)} curves cannot be told apart",
            f"With --html, give {MOST_CURVES} policies at most",
        )
    traces = _load_all(given.traces)
    results = _results(given, traces)
    for trace in traces:
        own = [result for result in results if result.trace == trace.name]
        screen.table(_COLUMNS, list(map(_cells, own)), title=_title(trace))
        if own[0].extra:
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
    return 0, [_row(given, result) for result in results]


def _row(given: argparse.Namespace, result: Result) -> dict[str, Any]:
    """A result for `--json`: the policy by its name alone, and what it was told beside it."""
    name = result.policy.partition("+")[0]
    told = {"hints": given.hints, "queue_s": given.queue, "prefetch": given.prefetch}
    untold = {"hints": None, "queue_s": 0.0, "prefetch": False}
    return {**result.row(), "policy": name, **(untold if name == "opt" else told)}


def _results(given: argparse.Namespace, traces: Sequence[Trace]) -> list[Result]:
    """Replays all traces with all policies at all sizes, with progress on standard error."""
    from flowkv.sim.replay import Settings
    from flowkv.sim.sizes import share_of
    from flowkv.sim.sweep import sweep

    shares = {size: share_of(size) for size in given.sizes}
    told = Settings(hints=given.hints, queue_s=given.queue, prefetch=given.prefetch)
    bound = Settings(hints=None, queue_s=0.0, prefetch=False)  # needs to be told nothing
    common = Settings(hardware=given.hardware, model=given.model)
    if given.tiers:
        common |= Settings(tiers=given.tiers, codec=given.codec)
    beyond = ["hints"] * (given.hints is not None) + ["queue"] * (given.queue > 0)
    beyond += ["prefetch"] * given.prefetch
    policies = {name: bound if name == "opt" else told for name in given.policy}
    jobs = [(trace, size, name) for trace in traces for size in shares for name in policies]
    results: list[Result] = []
    with Screen(to_stderr=True).progress("replaying") as tell:

        def show(share: float) -> None:
            at = min(len(results), len(jobs) - 1)
            trace, size, name = jobs[at]
            tell(
                round(1000 * (len(results) + share)),
                1000 * len(jobs),
                f"{trace.name} {name} {size}",
            )

        def done(_done: int, _all: int, result: Result) -> None:
            _, size, name = jobs[len(results)]
            label = f"{name}{'+'.join(['', *beyond]) if name != 'opt' else ''}"
            results.append(msgspec.structs.replace(result, policy=label, size=shares[size]))
            show(0.0)

        if given.jobs == 1:
            common["progress"] = lambda done, total: show(done / total)
        for trace in traces:
            show(0.0)
            sweep(trace, policies, shares, processes=given.jobs, done=done, **common)
    return results


_COLUMNS = ["policy", "size", "blocks", "prefix hits", "closure", "traffic", "precision", "M/s"]


def _cells(result: Result) -> list[str]:
    closure, traffic = result.closure, result.load_traffic_vs_lru
    precision = result.prefetch_precision
    return [
        result.policy,
        f"{100 * result.size:.4g}%",
        f"{result.pages:,}",
        f"{100 * result.prefix_hit_ratio:.2f}%",
        "-" if closure is None else f"{closure:.3f}",
        "-" if traffic is None else f"{traffic:.3f}x",
        "-" if precision is None else f"{precision:.0%}",
        f"{result.blocks_per_s / 1e6:.1f}",
    ]


def _priced(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines of what a model of the hardware adds."""
    places = [name for name in results[0].extra if name.startswith("hit_ratio_")]
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
                *(f"{extra[name]:.1%}" for name in places),
                *(f"{value:,.1f}" for value in times),
                f"{extra['dollars_per_million_tokens']:.4f}",
            ]
        )
    return columns, lines


def _title(trace: Trace) -> str:
    return (
        f"{trace.name}: {len(trace):,} requests, {len(trace.blocks):,} blocks asked for,"
        f" {trace.unique:,} different"
    )
