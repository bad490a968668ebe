"""Report of a cache and its engines: collected while it is open, written when it is closed.

    with kv.report("serving.html"):
        engine.run(requests)

The report is one HTML file that loads nothing from elsewhere. Collecting takes about 30
microseconds per step of 64 rows (`bench/bench_observe.py`), and bounded memory for any duration.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flowkv.core.config import format_size
from flowkv.core.errors import ConfigError
from flowkv.observe.events import Bus
from flowkv.observe.metrics import Level
from flowkv.observe.timeline import COMPUTING, LATENCIES, OpenReport, Serving, Timeline, Timelines
from flowkv.report.charts import MOST_CURVES, Distributions, Gantt, Overlap, OverTime
from flowkv.report.page import Figures, Section, Source, Table, Text, check_installed, write_report
from flowkv.report.words import seconds, share

# Restores as a section of a report: the picture, key figures, and the work of each engine.


def restore_section(
    timeline: Timeline, *, title: str = "One restore, as it went", source: Source = "measured"
) -> Section:
    """Return a section on one restore: its computes, its loads, and where the two met.

    Args:
        timeline: The restore, of `Timelines`.
        title: Heading.
        source: Origin of the figures.
    """
    ended = timeline.ended
    return Section(
        title,
        _told(timeline),
        [
            Overlap(f"{ended.tokens:,} tokens of prefix in {seconds(ended.seconds)}", timeline),
            Figures(_figures(timeline)),
            Table(["engine", "tokens", "pieces", "MB", "busy, ms", "busy, %"], _rows(timeline)),
        ],
        source=source,
    )


def _told(timeline: Timeline) -> str:
    ended, met = timeline.ended, timeline.met
    tiers = " and ".join(timeline.names[name] for name in timeline.tiers) or "a tier"
    text = (
        "Tokens are computed from the front, upwards in the picture, and loaded from the back,"
        " downwards."
    )
    if met is not None:
        text += (
            f" Here the two met at token {met.token:,}: what lies above was loaded from {tiers}"
            " meanwhile."
        )
    elif ended.loaded_tokens:
        text += f" Here all of it was loaded from {tiers}."
    elif ended.computed_tokens:
        text += " Here all of it was computed."
    if any(span.engine == "suffix" for span in timeline.spans):
        text += " The new tokens behind the prefix were computed layer by layer, as layers came."
    if any(span.layers < timeline.layers for span in timeline.spans):
        text += " What came layer by layer is drawn as a band per layer, the first of them first."
    if ended.failed:
        text += f" {ended.failed:,} loads failed, and what they would have brought was computed."
    return text


def _figures(timeline: Timeline) -> list[tuple[str, object, str]]:
    ended = timeline.ended
    known = ended.tokens - ended.resident_tokens
    loaded = ended.loaded_tokens / known if known else 0.0
    both = timeline.overlap_s() / timeline.until_s if timeline.until_s else 0.0
    figures: list[tuple[str, object, str]] = [
        ("Computed", f"{ended.computed_tokens:,}", "tokens, from the front"),
        ("Loaded", f"{ended.loaded_tokens:,}", f"tokens, {loaded:.0%} of what was missing"),
        ("Both at work", f"{both:.0%}", "of the time"),
    ]
    if timeline.bound_ratio:
        note = "lower bound of any policy, at these rates"
        figures.append(("Of the bound", f"{timeline.bound_ratio:.2f}x", note))
    return figures


def _rows(timeline: Timeline) -> list[list[object]]:
    rows: list[list[object]] = []
    for engine in timeline.engines:
        spans = [span for span in timeline.spans if span.engine == engine]
        tokens = round(sum(span.tokens * span.layers for span in spans) / timeline.layers)
        n_mb = None if engine in COMPUTING else sum(span.n_bytes for span in spans) / 1e6
        busy_s = timeline.busy_s(engine)
        busy = busy_s / timeline.until_s if timeline.until_s else 0.0
        name = timeline.names[engine]
        rows.append([name, tokens, len(spans), n_mb, busy_s * 1e3, 100 * busy])
    return rows


# Sections of a report on how a cache and its engines served.

_SHOWN = {
    "First token": "ttft_s",
    "Between two tokens": "inter_token_s",
    "Wait for admission": "queue_s",
    "Whole request": "request_s",
}
_QUANTILES = ("p50", "p90", "p95", "p99", "max")


def serving_sections(
    serving: Serving,
    levels: Iterable[Level] = (),
    *,
    tenants: bool = False,
    source: Source = "measured",
) -> list[Section]:
    """Return sections on key figures, latencies, requests over time, memory, hits and losses.

    Sections without data are left out.

    Args:
        serving: Collected data.
        levels: Levels at the end, see `flowkv.cache.kv.levels`.
        tenants: Whether tenants are named.
        source: Origin of the figures.
    """
    levels = list(levels)
    told, by_place = serving.summary(), _by_place(levels)
    drawn = [
        ("In short", "", _headline(told)),
        ("Latencies", _LATENCIES, _latencies(serving, told)),
        ("Requests over time", _REQUESTS, _requests(serving)),
        ("Memory", _MEMORY, _memory(serving, by_place)),
        ("Reuse", _REUSE, _reuse(serving, told, by_place, tenants=tenants)),
        ("Beside K and V", _BESIDE, _beside(told)),
        ("Audits", _AUDITS, _audits(serving, levels)),
        ("Given up and failed", _TROUBLE, _trouble(serving, told)),
    ]
    return [Section(title, text, parts, source) for title, text, parts in drawn if parts]


_LATENCIES = "Bars count requests, or tokens, over a logarithmic axis: the newest 65,536."
_REQUESTS = "A row per request, in order of submission; below, how many there were at a time."
_MEMORY = "Bytes in use by place. Pages that are merely remembered give way when room is needed."
_AUDITS = "Restored pages that were computed again and compared; a mismatch is never served again."
_TROUBLE = "Evictions are everyday business where more is remembered than fits; the rest is not."
_BESIDE = "Results, rows of embeddings and weights: what was asked for, and what was there already."
_REUSE = "Where prompt tokens were found, and what was brought and kept for that."


def _headline(told: dict[str, Any]) -> list[Any]:
    over = sum(told["finished"].values())
    well = told["finished"].get("stop", 0) + told["finished"].get("length", 0)
    items: list[tuple[str, object, str]] = []
    if told["requests"]:
        rest = f"{well:,} finished" + (f", {over - well:,} called off" if over > well else "")
        items.append(("Requests", f"{told['requests']:,}", rest))
    if told["steps"]:
        made, rows = told["made_tokens"], told["rows"]
        items.append(("Tokens per second", told["tokens_per_s"], f"{made:,} in all"))
        items.append(("Rows in a step", f"{rows['mean']:.1f}", f"at most {rows['max']:g}"))
        used = told["kv_utilisation"]
        items.append(("KV in use", share(used["mean"]), f"at most {share(used['max'])}"))
    for label, name in (("First token", "ttft_s"), ("Between tokens", "inter_token_s")):
        if told[name]["count"]:
            p50, p99 = seconds(told[name]["p50"]), seconds(told[name]["p99"])
            items.append((label, p50, f"median; P99 {p99}"))
    if told["hit_rate"]:
        items.append(("Found", share(sum(told["hit_rate"].values())), "of prompt tokens"))
    if told["restore_s"]["count"]:
        whole = told["restore_s"]["mean"]
        hidden = told["restore_hidden_s"]["mean"] / whole if whole else 0.0
        items.append(("Restores hidden", share(hidden), "no request waited for that part"))
    return [Figures(items)] if items else []


def _latencies(serving: Serving, told: dict[str, Any]) -> list[Any]:
    known = [name for name in LATENCIES if told[name]["count"]]
    if not known:
        return []
    rows = [
        [LATENCIES[name], told[name]["count"], *(seconds(told[name][q]) for q in _QUANTILES)]
        for name in known
    ]
    shown = {title: serving.spreads[name] for title, name in _SHOWN.items() if name in known}
    columns = ["time", "count", "P50", "P90", "P95", "P99", "max"]
    pictures = [Distributions("How they are spread", shown)] if shown else []
    return [*pictures, Table(columns, rows)]


def _requests(serving: Serving) -> list[Any]:
    series, open_ = serving.series, serving.lanes.under_way(serving.now_s)
    over = [lane for lane in serving.lanes if lane.ended is not None]
    lanes = sorted([*over, *open_], key=lambda lane: lane.request)
    if not lanes and not any(name in series.names for name in ("rows", "made")):
        return []
    begun_s = min([*(lane.started_s for lane in lanes), series.started_s])
    ends = [piece.stop_s for lane in lanes for piece in lane.pieces]
    until_s = max([*ends, series.started_s + series.cells * series.cell_s]) - begun_s
    parts: list[Any] = []
    if lanes:
        chosen = "" if serving.lanes.stride == 1 else f", every {serving.lanes.stride}th of them"
        parts.append(Gantt(f"Requests{chosen}", lanes, begun_s, until_s))
    offset_s = series.started_s - begun_s
    times_s = [offset_s + at_s for at_s in series.times_s]
    crowd = {"running": "rows", "waiting": "waiting", "set aside": "aside"}
    there = {name: series.level(key) for name, key in crowd.items() if key in series.names}
    if there:
        kept = {name: values for name, values in there.items() if any(v > 0 for v in values)}
        colours = {"running": 1, "waiting": 5, "set aside": 2}
        parts.append(OverTime("At a time", times_s, kept or there, until_s, colours=colours))
        rates = {"New tokens per second": ("made", 1), "Prompt tokens per second": ("prefill", 0)}
        for caption, (key, colour) in rates.items():
            middles_s, rate = series.rate(key)
            shown_s = [offset_s + at_s for at_s in middles_s]
            name = "made" if key == "made" else "computed"
            parts.append(
                OverTime(caption, shown_s, {name: rate}, until_s, colours={name: colour}, height=84)
            )
    return parts


def _memory(serving: Serving, by_place: dict[str, dict[str, float]]) -> list[Any]:
    series, parts = serving.series, list[Any]()
    places = serving.places()[:MOST_CURVES]
    until_s = series.cells * series.cell_s
    if "kv" in series.names:
        used = {"pages in use": series.level("kv")}
        caption = "Device pages in use"
        parts.append(OverTime(caption, series.times_s, used, until_s, "%", most=1.0))
    if places and series.cells > 1:
        curves = {place: series.level(place) for place in places}
        caption = "Bytes by place, on top of each other"
        parts.append(OverTime(caption, series.times_s, curves, until_s, "bytes", stacked=True))
    rows: list[list[object]] = []
    for place, held in by_place.items():
        kind = "device" if "device_used_bytes" in held else "tier"
        here, most = held[f"{kind}_used_bytes"], held[f"{kind}_capacity_bytes"]
        room = _bytes(most) if most < 2**60 else "no limit"
        fragmented = share(held["device_fragmentation"]) if kind == "device" else None
        loaded = _bytes(held["tier_loaded_bytes_total"]) if kind == "tier" else None
        written = _bytes(serving.moves.total("stored_bytes_total", tier=place))
        breaker = next((n[3:] for n, value in held.items() if n.startswith("is ") and value), None)
        rows.append([place, _bytes(here), room, fragmented, loaded, written, breaker])
    columns = ["place", "in use", "of", "fragmented", "loaded", "written", "breaker"]
    return [*parts, Table(columns, rows)] if rows else parts


def _reuse(
    serving: Serving, told: dict[str, Any], by_place: dict[str, dict[str, float]], *, tenants: bool
) -> list[Any]:
    moves, parts = serving.moves, list[Any]()
    found = moves.by("hit_tokens_total", "tier")
    missed = moves.total("miss_tokens_total")
    if known := sum(found.values()) + missed:
        rows: list[list[object]] = [
            [tier, int(tokens), share(tokens / known)] for tier, tokens in found.items()
        ]
        rows.append(["nowhere: computed", int(missed), share(missed / known)])
        parts.append(Table(["found in", "prompt tokens", "share"], rows))
    rows = []
    for place, held in by_place.items():
        used, wasted = (held.get(f"prefetch_{end}_bytes_total", 0) for end in ("used", "wasted"))
        if used or wasted:
            rows.append([place, _bytes(used), _bytes(wasted), share(used / (used + wasted))])
    if rows:
        parts.append(Table(["brought early from", "used", "wasted", "precision"], rows))
    asked = told["tenants"]
    if len(asked) > 1:
        rows = []
        for number, (name, one) in enumerate(asked.items(), 1):
            tokens = sum(one["hit_tokens"].values()) + one["miss_tokens"]
            rows.append([name if tenants else f"tenant {number}", tokens, share(one["hit_rate"])])
        parts.append(Table(["tenant", "prompt tokens", "found"], rows))
    return parts


def _beside(told: dict[str, Any]) -> list[Any]:
    rows: list[list[object]] = []
    for what, of in told["beside"].items():
        asked, found = int(of["asked"]), int(of["found"])
        read = None if what == "results" else _bytes(of["read_bytes"])
        rows.append([what, asked, found, share(found / asked), read])
    return [Table(["what", "asked for", "found", "share", "read"], rows)] if rows else []


def _audits(serving: Serving, levels: list[Level]) -> list[Any]:
    audited = serving.moves.by("audited_pages_total", "tier")
    if not audited:
        return []
    told = {level.name: level.value for level in levels}
    since = "since the cache was opened"
    wrong, worst = told.get("audit_mismatches_total", 0), told.get("audit_worst", 0.0)
    figures: list[tuple[str, object, str]] = [
        ("Mismatches", f"{wrong:g}", since),
        ("Greatest error", share(worst), "of what is allowed, of sound pages"),
    ]
    rows = [[tier, int(pages)] for tier, pages in audited.items()]
    return [Figures(figures), Table(["restored from", "pages compared"], rows)]


def _trouble(serving: Serving, told_of: dict[str, Any]) -> list[Any]:
    rows: list[list[object]] = []
    for name, _, _, series in serving.moves.families():
        if name in _GIVEN_UP:
            for labels, value in series:
                told = dict(labels)
                why = told.get("reason") or told.get("operation")
                rows.append([_GIVEN_UP[name], told["tier"], why, value])
    for reason, number in told_of["finished"].items():
        if reason not in ("stop", "length"):
            rows.append(["requests", None, reason, number])
    how = {"kept": "pages kept", "dropped": "pages dropped"}
    rows += [["preemptions", None, how[way], n] for way, n in told_of["preempted"].items() if n]
    return [Table(["what", "where", "why", "how many"], rows)] if rows else []


_GIVEN_UP = {
    "evicted_pages_total": "pages evicted",
    "failed_items_total": "operations failed",
    "quarantined_total": "pages quarantined",
}


def _by_place(levels: Iterable[Level]) -> dict[str, dict[str, float]]:
    """Return levels by device or tier, and by name; the state of a breaker by its name."""
    places: dict[str, dict[str, float]] = {}
    for level in levels:
        place = level.labels.get("device") or level.labels.get("tier")
        if place:
            state = level.labels.get("state")
            places.setdefault(place, {})[f"is {state}" if state else level.name] = level.value
    return {place: held for place, held in places.items() if any("used" in name for name in held)}


def _bytes(value: float) -> str:
    return format_size(round(value))


class Account(OpenReport):
    """Report as one HTML file.

    Args:
        path: The HTML file; an old one is replaced. Whether it can be written is checked at once.
        bus: `KV.bus`.
        levels: Returns current levels, see `flowkv.cache.kv.levels`.
        title: Heading of the report.
        tenants: Whether tenants are named in it.
        source: Origin of the figures.

    Raises:
        ConfigError: The file cannot be made.
        MissingDependencyError: Without the extra `report`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        bus: Bus,
        levels: Callable[[], Iterable[Level]] = tuple,
        *,
        title: str = "How it was served",
        tenants: bool = False,
        source: Source = "measured",
    ) -> None:
        self.path = Path(path).absolute()  # programs change directory before it is written
        self._title, self._tenants, self._source = title, tenants, source
        if not self.path.parent.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise ConfigError(
                f"a report cannot be written to {self.path}",
                "Name a file in a directory that can be written",
            )
        check_installed()
        self._levels, self._last = levels, list[Level]()
        self._begun = datetime.datetime.now().astimezone()
        self._restores = Timelines(bus, most=1)
        self.serving = Serving(bus, levels=levels)

    def sections(self) -> list[Section]:
        """Return the sections of the report, as of now."""
        levels = self._last if self.closed else list(self._levels())
        sections = serving_sections(
            self.serving, levels, tenants=self._tenants, source=self._source
        )
        longest = self._restores.longest
        if longest is not None:
            title = "The longest restore, as it went"
            sections.append(restore_section(longest, title=title, source=self._source))
        nothing = "Nothing happened on this cache while the report was open."
        return sections or [Section("Nothing to show", parts=[Text(nothing)])]

    def write(self) -> Path:
        """Write the report as of now; return its path.

        Raises:
            OSError: The file cannot be written.
        """
        collected_s = self.serving.summary()["seconds"]
        lead = f"{collected_s:,.1f} seconds from {self._begun:%Y-%m-%d %H:%M:%S %Z} on"
        python = platform.python_version()
        footer = f"FlowKV on {platform.machine()}, {os.cpu_count()} cores, Python {python}."
        return write_report(self.path, self._title, self.sections(), lead=lead, footer=footer)

    def close(self) -> None:
        """Stop collecting and write the report. Safe to call again.

        Raises:
            OSError: The file cannot be written.
        """
        if self.closed:
            return
        self._last = list(self._levels())
        self.closed = True
        self.serving.close()
        self._restores.close()
        self.write()

    def __repr__(self) -> str:
        told = self.serving.summary()
        return f"<flowkv.Account: {told['requests']} requests, {told['steps']} steps>"
