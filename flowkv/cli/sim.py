"""`flowkv sim`: replay traces through policies, characterise them, and record new ones."""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import re
import runpy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import flowkv
from flowkv.cli.arguments import AddVerb, adder, count, names
from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED
from flowkv.report.charts import MOST_CURVES, Curves
from flowkv.report.page import Figures, Section, Table, check_installed, write_report
from flowkv.report.screen import Screen

if TYPE_CHECKING:
    from flowkv.sim.replay import Result
    from flowkv.sim.trace import Trace

# `flowkv sim replay` and `sweep`: replay traces of requests through policies.

SIZES = ("0.5%", "1%", "2%", "5%", "10%", "30%")
POLICIES = ("lru", "auto", "opt")

TRACE = "a file (JSON lines as Mooncake writes them, a recording, .npz), a folder of sessions as"
TRACE += " kv-cache-tester and AgentX publish them (Weka format), or a generator: chat,"
TRACE += " agents, rag, bursts, drift, mix, scan, cyclic, markov; with options: agents:seed=3"


def _add_replays(verb: AddVerb) -> None:
    one = verb("replay", _sweep, "replay a trace through policies")
    one.add_argument("traces", nargs=1, metavar="TRACE", help=TRACE)
    many = verb("sweep", _sweep, "replay several traces through policies")
    many.add_argument("traces", nargs="+", metavar="TRACE", help=TRACE)
    several = "names of the catalogue, or classes in files (mine.py:Sieve); default"
    several += f" {','.join(POLICIES)}, with --tiers all but opt"
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
        about = "room is made before a request's blocks come, and these stay while it runs"
        parser.add_argument("--held", action="store_true", help=about)
        about = "bring blocks before they are asked for"
        parser.add_argument("--prefetch", action="store_true", help=about)
        about = "prefetch by a Markov chain over the order of chains"
        more: Any = {"action": "store_const", "dest": "prefetch", "const": "markov"}
        parser.add_argument("--markov", help=about, **more)
        about = "places below the first, as dram:5%%,disk:30%%:kv8, or none; repeat it to compare"
        parser.option("--tiers", "A,B", about, type=names, action="append", default=[])
        about = (
            "with --tiers: blocks that leave memory for disk and remote, by all, second-touch, auto"
        )
        parser.option("--admit", "A,B", about, type=names, default=["all"])
        about, codecs = "of the first place with --tiers; default raw", ("raw", "kv8", "kv4")
        parser.add_argument("--codec", choices=codecs, default="raw", help=about)
        about = "adds times and prices: h100, h200, b200, mi300x or laptop"
        parser.add_argument("--hardware", help=about)
        about = "1b, 8b (the default), 70b or a hybrid of flowkv.sim.hardware; for these"
        parser.add_argument("--model", default="8b", help=about)
        about = "where a hybrid saves its states: auto, newest, tail, ends, junctions or interval"
        parser.option("--states", "RULE", about)
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
    from flowkv.sim.replay import admission_of, tier_from

    stacks = [[] if tiers == ["none"] else tiers for tiers in given.tiers] or [[]]
    policies = given.policy or [name for name in POLICIES if name != "opt" or not any(stacks)]
    makers = dict[str, Any]()
    for text in dict.fromkeys(policies):  # refuses wrong names before the first replay
        name, maker = _policy(text)
        makers[text if name in makers else name] = maker
    for tiers in stacks:
        below = [tier_from(text) for text in tiers]
        for rule in given.admit:
            admission_of(rule, below)
    if given.jobs > 1 and not all(isinstance(maker, str) for maker in makers.values()):
        raise ConfigError("a policy of a file runs in this process only", "Leave out --jobs")
    if given.html is not None:
        if given.html.is_dir():
            raise ConfigError(f"{given.html} is a directory", "Name a file in it")
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
    told["held"] = given.held
    results = [
        result
        for trace in traces
        for tiers in stacks
        for admit in given.admit
        for result in _results(given, trace, tiers, admit, makers, told, named=len(stacks) > 1)
    ]
    for trace in traces:
        own = [result for result in results if result.trace == trace.name]
        title = f"{trace.name}: {len(trace):,} requests, {len(trace.blocks):,} blocks asked for,"
        title += f" {trace.unique:,} different"
        _show(screen, _REPLAYS, own, title)
        if "states" in own[0].extra:
            _show(screen, _STATES, own, "States of recurrent layers")
        if given.admit != ["all"]:
            _show(screen, _WRITES, own, "Writes to lasting places")
        if "hardware" in own[0].extra:
            title = f"Times and prices on {own[0].extra['hardware']}, a model of both"
            _show(screen, _priced(own), own, title)
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


def _policy(text: str) -> tuple[str, Any]:
    """Return the name of a policy, and that name or the class in a file: "mine.py:Sieve".

    Raises:
        ConfigError: There is no such policy, or it cannot be made.
    """
    from flowkv.policy import make_policy

    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        make_policy(text)
        return text, text
    try:
        maker = runpy.run_path(path)[name]
        make_policy(maker())
    except (Exception, SystemExit) as error:
        remedy = "Write the path of a Python file and a class in it, such as mine.py:Sieve"
        cause = f"{type(error).__name__}: {error}".rstrip(".")
        cause = f"it has no {name}" if error.args == (name,) else cause
        raise ConfigError(f"policy {text} cannot be made ({cause})", remedy) from error
    return name, maker


_UNTOLD = {"hints": None, "queue_s": 0.0, "prefetch": False, "held": False}  # of the bound


def _results(
    given: argparse.Namespace,
    trace: Trace,
    tiers: Sequence[str],
    admit: str,
    makers: dict[str, Any],
    told: dict[str, Any],
    *,
    named: bool,
) -> list[Result]:
    """Replay a trace with all policies at all sizes, with progress on standard error.

    Args:
        given: The arguments.
        trace: The trace.
        tiers: The places below the first.
        admit: Rule of write admission.
        makers: Names of policies, with what makes each.
        told: Hints, queue and prefetch options of the policies.
        named: Name the tiers in the results.
    """
    from flowkv.sim.replay import share_of, sweep

    shares = {size: share_of(size) for size in given.sizes}
    hardware = given.hardware or ("h100" if named else None)  # tiers are compared by times
    common: dict[str, Any] = {
        "hardware": hardware, "model": given.model, "states": given.states, "admit": admit
    }  # fmt: skip
    if tiers:
        common |= {"tiers": tiers, "codec": given.codec}
    words = {"hints": given.hints is not None, "queue": given.queue > 0, "prefetch": given.prefetch}
    words["held"] = given.held
    beyond = "".join(f"+{word}" for word, said in words.items() if said)
    below = f"+{','.join(tiers)}" if named and tiers else ""
    below += f"+{admit}" if admit != "all" else ""
    each: Any = {make: _UNTOLD if name == "opt" else told for name, make in makers.items()}
    jobs = [(size, name) for size in shares for name in makers]
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


_Columns = dict[str, Callable[[Any], str]]
"""Headings of a table, and what a result shows below each."""


def _extra(name: str, form: str) -> Callable[[Any], str]:
    return lambda one: _or_dash(one.extra.get(name), form)


_RESULT: _Columns = {"policy": lambda one: one.policy, "size": lambda one: f"{100 * one.size:.4g}%"}
_REPLAYS: _Columns = _RESULT | {
    "blocks": lambda one: f"{one.pages:,}",
    "prefix hits": lambda one: f"{one.prefix_hit_ratio:.2%}",
    "closure": lambda one: _or_dash(one.closure, ".3f"),
    "traffic": lambda one: _or_dash(one.load_traffic_vs_lru, ".3f", "x"),
    "precision": lambda one: _or_dash(one.prefetch_precision, ".0%"),
    "M/s": lambda one: f"{one.blocks_per_s / 1e6:.1f}",
}
_WRITES: _Columns = _RESULT | {
    "prefix hits": lambda one: f"{one.prefix_hit_ratio:.2%}",
    "written, of the blocks": lambda one: f"{_written(one.extra):,}",
    "declined": lambda one: f"{one.extra.get('declined') or 0:,}",
}
_STATES: _Columns = _RESULT | {
    "states": lambda one: f"{one.extra['states']}",
    "hits of attention's": lambda one: _or_dash(_of_attention(one), ".2%"),
    "their bytes": _extra("states_share", ".2%"),
    "stops a request": _extra("stops_per_request", ".2f"),
}


def _show(screen: Screen, columns: _Columns, results: Sequence[Result], title: str) -> None:
    rows = [[cell(one) for cell in columns.values()] for one in results]
    screen.table(list(columns), rows, title=title)


def _written(extra: Mapping[str, Any]) -> int:
    return sum(int(extra.get(f"written_{name}") or 0) for name in ("disk", "remote"))


def _of_attention(one: Result) -> float | None:
    whole = float(one.extra["attention_hit_ratio"] or 0.0)
    return one.prefix_hit_ratio / whole if whole else None


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def _priced(results: Sequence[Result]) -> _Columns:
    """Return the columns of the times and prices that a hardware model adds."""
    columns = dict(_RESULT)
    columns |= {f"from {name[10:]}": _extra(name, ".1%") for name in _places(results)}
    for title, name in (("TTFT ms, mean", "mean"), ("p99", "p99"), ("without", "mean_without")):
        columns[title] = _extra(f"ttft_ms_{name}", ",.1f")
    columns["$/Mtok"] = _extra("dollars_per_million_tokens", ".4f")
    return columns


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


def add_verbs(verbs: Any) -> None:
    """Add the verbs of `flowkv sim`."""
    sim = verbs.add_parser(
        "sim",
        help="simulate caches on traces",
        description="Simulates caches; nothing here is a measurement.",
        epilog="flowkv sim VERB --help tells more.",
    )
    verb = adder(sim.add_subparsers(title="verbs", metavar="VERB", required=True))
    for add in (_add_replays, _add_characterise, _add_record):
        add(verb)
