"""`flowkv sim`: what is simulated, never measured."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import flowkv
from flowkv.cli.arguments import AddVerb, adder, count, names
from flowkv.core.config import parse_size
from flowkv.core.errors import ConfigError
from flowkv.report.charts import MOST_CURVES
from flowkv.report.screen import Screen

if TYPE_CHECKING:
    from flowkv.sim.character import Character, Percentiles
    from flowkv.sim.hierarchy import ExperimentRow
    from flowkv.sim.replay import Result
    from flowkv.sim.trace import Trace


# `flowkv sim replay` and `sweep`: traces of requests, through policies.

SIZES = ("0.5%", "1%", "2%", "5%", "10%", "30%")
POLICIES = ("lru", "auto", "opt")

TRACE = "a file (JSON lines as Mooncake writes them, a recording, .npz), or a generator: chat,"
TRACE += " agents, rag, bursts, drift, mix, scan, cyclic, markov; with options: agents:seed=3"


def add_replays(verb: AddVerb) -> None:
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
    from flowkv.report.page import check_installed
    from flowkv.report.replay import write_replay_report

    if given.policy is None:
        given.policy = [name for name in POLICIES if name != "opt" or not given.tiers]
    for name in given.policy:
        make_policy(name)  # better refused now than after the first replays
    if given.html is not None and not given.html.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {given.html}", "Make it first")
    if given.html is not None:
        check_installed()
    if given.html is not None and len(given.policy) > MOST_CURVES:
        raise ConfigError(
            f"{len(given.policy)} curves cannot be told apart",
            f"With --html, give {MOST_CURVES} policies at most",
        )
    traces = _load_all(given.traces)
    results = _results(given, traces)
    for trace in traces:
        own = [result for result in results if result.trace == trace.name]
        screen.table(_COLUMNS, list(map(_replays_cells, own)), title=_title(trace))
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
    from flowkv.sim.replay import ReplaySettings, share_of, sweep

    shares = {size: share_of(size) for size in given.sizes}
    told = ReplaySettings(hints=given.hints, queue_s=given.queue, prefetch=given.prefetch)
    bound = ReplaySettings(hints=None, queue_s=0.0, prefetch=False)  # needs to be told nothing
    common = ReplaySettings(hardware=given.hardware, model=given.model)
    if given.tiers:
        common |= ReplaySettings(tiers=given.tiers, codec=given.codec)
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


def _replays_cells(result: Result) -> list[str]:
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


# `flowkv sim characterise`: what a trace is like, before any policy.


def add_characterise(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("characterise", _characterise, "show what a trace is like, before any policy")
    added.add_argument("trace", metavar="TRACE", help=TRACE)


def _characterise(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.sim.character import characterise

    with Screen(to_stderr=True).progress("looking"):
        found = characterise(load_trace(given.trace))
    screen.table(["", ""], _facts(found), title=f"Trace {found.trace}")
    spreads = {
        "blocks per request": found.blocks_per_request,
        "to the next turn, s": found.gap_s,
        "to a block's next use, s": found.reuse_s,
        "... in requests": found.reuse_requests,
        "... in blocks of an LRU stack": found.stack_distance,
    }
    rows = [[name, *_percentiles(spread)] for name, spread in spreads.items()]
    screen.table(["", "p10", "p50", "p90", "p99"], rows, title="Percentiles")
    columns = [f"{100 * size:.4g}%" for size in found.lru]
    ratios = [f"{100 * ratio:.1f}%" for ratio in found.lru.values()]
    screen.table(["size", *columns], [["lru", *ratios]], title="Hit ratio of leaf-first LRU")
    columns = [f"{window:g} s" for window in found.working_set]
    blocks = [f"{count:,.0f}" for count in found.working_set.values()]
    screen.table(["window", *columns], [["blocks", *blocks]], title="Working set, mean")
    columns = [f"turn {turn}" for turn in found.returns]
    shares = [f"{share:.0%}" for share in found.returns.values()]
    screen.table(["", *columns], [["goes on", *shares]], title="Conversations that go on")
    return 0, found


def _facts(found: Character) -> list[list[str]]:
    return [
        ["requests", f"{found.requests:,}"],
        ["known sessions, tenants", f"{found.sessions:,}, {found.tenants:,}"],
        ["from the first to the last", f"{found.span_s:,.0f} s"],
        [
            "between requests, mean and variation",
            f"{found.arrival_s:.3g} s, {found.arrival_cv:.2f}",
        ],
        ["blocks asked for, different ones", f"{found.blocks:,}, {found.unique:,}"],
        ["tokens of a block", f"{found.block_tokens:,}"],
        ["hit ratio with room for everything", f"{found.infinite_hit_ratio:.1%}"],
        ["different blocks used only once", f"{found.used_once:.1%}"],
        ["uses that fall on the top 1% of them", f"{found.top_share:.1%}"],
        ["requests that continue an earlier one", f"{found.extending:.1%}"],
    ]


def _percentiles(spread: Percentiles) -> list[str]:
    return [f"{value:,.4g}" for value in (spread.p10, spread.p50, spread.p90, spread.p99)]


# `flowkv sim hierarchy`: the memory-hierarchy experiment.

_RULES = {
    "published": "By the rules that were published",
    "strict": "By strict rules: every byte takes its turn on a shared channel",
    "pressure": "Strict, with an HBM too small for the context",
}


def add_hierarchy(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb(
        "hierarchy",
        _hierarchy,
        "decode over SRAM, HBM, CXL and DRAM: a published table, and better",
    )
    added.add_argument(
        "--policy",
        type=names,
        default=["lru", "auto"],
        metavar="A,B",
        help="what decides who leaves SRAM and HBM; default lru,auto",
    )
    added.add_argument(
        "--machine",
        default="kvflow",
        metavar="NAME",
        help="kvflow (as published, the default), h100, h200, b200 or mi300x",
    )
    added.add_argument(
        "--trace", type=Path, metavar="FILE", help="steps as JSON lines; default the published ones"
    )
    added.add_argument(
        "--sram", default="32MiB", metavar="SIZE", help="under strict rules; default %(default)s"
    )
    added.add_argument(
        "--hbm", default="2GiB", metavar="SIZE", help="of the last rows; default %(default)s"
    )


def _hierarchy(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    from flowkv.sim.hierarchy import MACHINES, read_workload, run_experiment

    if given.machine not in MACHINES:
        raise ConfigError(f"there is no machine {given.machine!r}", f"Use {', '.join(MACHINES)}")
    sizes = [parse_size(given.sram), parse_size(given.hbm)]
    if not all(sizes):
        raise ConfigError("a memory of 0 bytes holds nothing", "Give --sram and --hbm a size")
    workload = read_workload(given.trace) if given.trace else None
    with Screen(to_stderr=True).progress("simulating") as tell:
        rows = run_experiment(
            workload,
            MACHINES[given.machine],
            policies=given.policy,
            sram_bytes=sizes[0],
            pressure_bytes=sizes[1],
            tell=tell,
        )
    for rules, title in _RULES.items():
        shown = [row for row in rows if row.rules == rules]
        apart = any(row.exposed_decode_ns for row in shown)
        columns = ["", "HBM MB", "CXL MB", "exposed ms", *["decode ms"] * apart]
        columns += ["total ms", "SRAM", "$/Mtok"]
        screen.table(columns, [_cells(row, apart) for row in shown], title=title)
    screen.say(
        "Simulated. Exposed: compute waited for bytes; decode: for decoding, where that is counted"
        " apart. kvflow: rebuilt from its rules. No plan can undercut a floor."
    )
    return 0, rows


def _cells(row: ExperimentRow, apart: bool) -> list[str]:
    """A line of the table; `apart` has a column for waiting for decoding."""
    price = row.usd_per_million_tokens
    return [
        row.plan if row.source == "flowkv" else f"{row.source}: {row.plan}",
        _mb(row.hbm_read_bytes),
        _mb(row.cxl_read_bytes),
        _ms(row.exposed_ns),
        *[_ms(row.exposed_decode_ns)] * apart,
        _ms(row.total_ns),
        "-" if row.sram_hit_rate is None else f"{row.sram_hit_rate:.1%}",
        "-" if price is None else f"{price:.5f}",
    ]


def _mb(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / 1e6:,.1f}"


def _ms(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.4f}"


def add_verbs(verbs: Any) -> None:
    """Adds the verb, with verbs of its own, to what `add_subparsers` gave."""
    sim = verbs.add_parser(
        "sim",
        help="simulate caches, on traces and on a memory hierarchy",
        description="Simulates caches; nothing here is a measurement.",
        epilog="flowkv sim VERB --help tells more.",
    )
    verb = adder(sim.add_subparsers(title="verbs", metavar="VERB", required=True))
    add_replays(verb)
    add_characterise(verb)
    add_hierarchy(verb)
