"""How a cache and its engines served, as sections of a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from flowkv.observe import axis
from flowkv.observe.distributions import Distributions
from flowkv.observe.gantt import Gantt
from flowkv.observe.lanes import Lane
from flowkv.observe.overtime import MOST, OverTime
from flowkv.observe.report import Figures, Section, Table
from flowkv.observe.rules import Level
from flowkv.observe.serving import LATENCIES, Serving

Source = Literal["measured", "simulated", "emulated"]

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
    """Key figures, latencies, requests over time, memory, and what was found and lost.

    Sections about which nothing is known are left out.

    Args:
        serving: What was collected.
        levels: How things are at the end, see `runtime.levels`.
        tenants: Whether tenants are named.
        source: How it came about.
    """
    levels = list(levels)
    told, by_place = serving.summary(), _by_place(levels)
    drawn = [
        ("In short", "", _headline(told)),
        ("Latencies", _LATENCIES, _latencies(serving, told)),
        ("Requests over time", _REQUESTS, _requests(serving)),
        ("Memory", _MEMORY, _memory(serving, by_place)),
        ("Reuse", _REUSE, _reuse(serving, told, by_place, tenants=tenants)),
        ("Audits", _AUDITS, _audits(serving, levels)),
        ("Given up and failed", _TROUBLE, _trouble(serving)),
    ]
    return [Section(title, text, parts, source) for title, text, parts in drawn if parts]


_LATENCIES = "Bars count requests, or tokens, over a logarithmic axis; quantiles are within 1%."
_REQUESTS = "A row per request, in order of submission; below, how many there were at a time."
_MEMORY = "Bytes in use by place. Pages that are merely remembered give way when room is needed."
_AUDITS = "Restored pages that were computed again and compared; a mismatch is never served again."
_TROUBLE = "Evictions are everyday business where more is remembered than fits; the rest is not."
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
        items.append(("Tokens per second", _count(told["tokens_per_s"]), f"{made:,} in all"))
        items.append(("Rows in a step", f"{rows['mean']:.1f}", f"at most {rows['max']:g}"))
        used = told["kv_utilisation"]
        items.append(("KV in use", axis.share(used["mean"]), f"at most {axis.share(used['max'])}"))
    for label, name in (("First token", "ttft_s"), ("Between tokens", "inter_token_s")):
        if told[name]["count"]:
            p50, p99 = axis.seconds(told[name]["p50"]), axis.seconds(told[name]["p99"])
            items.append((label, p50, f"median; P99 {p99}"))
    if told["hit_rate"]:
        items.append(("Found", axis.share(sum(told["hit_rate"].values())), "of prompt tokens"))
    if told["restore_s"]["count"]:
        whole = told["restore_s"]["mean"]
        hidden = told["restore_hidden_s"]["mean"] / whole if whole else 0.0
        items.append(("Restores hidden", axis.share(hidden), "nobody waited for that part"))
    return [Figures(items)] if items else []


def _latencies(serving: Serving, told: dict[str, Any]) -> list[Any]:
    known = [name for name in LATENCIES if told[name]["count"]]
    if not known:
        return []
    rows = [
        [LATENCIES[name], told[name]["count"], *(axis.seconds(told[name][q]) for q in _QUANTILES)]
        for name in known
    ]
    shown = {title: serving.spreads[name] for title, name in _SHOWN.items()}
    picture = Distributions("How they are spread", shown)
    columns = ["time", "count", "P50", "P90", "P95", "P99", "max"]
    return [*([picture] if picture.draw() else []), Table(columns, rows)]


def _requests(serving: Serving) -> list[Any]:
    series, lanes = serving.series, _lanes(serving)
    if not lanes and not any(name in series.names for name in ("rows", "made")):
        return []
    begun_s = min([lane.started_s for lane in lanes], default=series.started_s)
    begun_s = min(begun_s, series.started_s)
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


def _lanes(serving: Serving) -> list[Lane]:
    over = [lane for lane in serving.lanes if lane.ended is not None]
    open_ = serving.lanes.under_way(serving.now_s)
    return sorted([*over, *open_], key=lambda lane: lane.request)


def _memory(serving: Serving, by_place: dict[str, dict[str, float]]) -> list[Any]:
    series, parts = serving.series, list[Any]()
    places = serving.places()[:MOST]
    until_s = series.cells * series.cell_s
    if "kv" in series.names:
        used = {"pages in use": series.level("kv")}
        caption = "Device pages in use"
        parts.append(OverTime(caption, series.times_s, used, until_s, "%", most=1.0))
    if places and series.cells > 1:
        curves = {place: series.level(place) for place in places}
        caption = "Bytes by place, on top of each other"
        parts.append(OverTime(caption, series.times_s, curves, until_s, "bytes", stacked=True))
    rows = [
        [
            place,
            axis.amount(held[f"{kind}_used_bytes"]),
            _capacity(held[f"{kind}_capacity_bytes"]),
            axis.share(held["device_fragmentation"]) if kind == "device" else None,
            axis.amount(held["tier_loaded_bytes_total"]) if kind == "tier" else None,
            axis.amount(serving.moves.total("stored_bytes_total", tier=place)),
            _breaker(held),
        ]
        for place, held in by_place.items()
        for kind in ("device" if "device_used_bytes" in held else "tier",)
    ]
    columns = ["place", "in use", "of", "fragmented", "loaded", "written", "breaker"]
    return [*parts, Table(columns, rows)] if rows else parts


def _reuse(
    serving: Serving,
    told: dict[str, Any],
    by_place: dict[str, dict[str, float]],
    *,
    tenants: bool,
) -> list[Any]:
    moves, parts = serving.moves, list[Any]()
    found = moves.by("hit_tokens_total", "tier")
    missed = moves.total("miss_tokens_total")
    if known := sum(found.values()) + missed:
        rows: list[list[object]] = [
            [tier, int(tokens), axis.share(tokens / known)] for tier, tokens in found.items()
        ]
        rows.append(["nowhere: computed", int(missed), axis.share(missed / known)])
        parts.append(Table(["found in", "prompt tokens", "share"], rows))
    early = {
        place: (held["prefetch_used_bytes_total"], held["prefetch_wasted_bytes_total"])
        for place, held in by_place.items()
        if held.get("prefetch_used_bytes_total") or held.get("prefetch_wasted_bytes_total")
    }
    if early:
        rows = [
            [place, axis.amount(used), axis.amount(wasted), axis.share(used / (used + wasted))]
            for place, (used, wasted) in early.items()
        ]
        parts.append(Table(["brought early from", "used", "wasted", "precision"], rows))
    asked = told["tenants"]
    if len(asked) > 1:
        rows = [
            [name if tenants else f"tenant {number}", *_tenant(asked[name])]
            for number, name in enumerate(asked, 1)
        ]
        parts.append(Table(["tenant", "prompt tokens", "found"], rows))
    return parts


def _tenant(report: dict[str, Any]) -> list[object]:
    tokens = sum(report["hit_tokens"].values()) + report["miss_tokens"]
    return [tokens, axis.share(report["hit_rate"])]


def _audits(serving: Serving, levels: list[Level]) -> list[Any]:
    audited = serving.moves.by("audited_pages_total", "tier")
    if not audited:
        return []
    told = {level.name: level.value for level in levels}
    since = "since the cache was opened"
    wrong, worst = told.get("audit_mismatches_total", 0), told.get("audit_worst", 0.0)
    figures: list[tuple[str, object, str]] = [
        ("Mismatches", f"{wrong:g}", since),
        ("Greatest error", axis.share(worst), "of what is allowed, of sound pages"),
    ]
    rows = [[tier, int(pages)] for tier, pages in audited.items()]
    return [Figures(figures), Table(["restored from", "pages compared"], rows)]


def _trouble(serving: Serving) -> list[Any]:
    rows: list[list[object]] = []
    for name, _, _, series in serving.moves.families():
        if name in _GIVEN_UP:
            for labels, value in series:
                told = dict(labels)
                why = told.get("reason") or told.get("operation")
                rows.append([_GIVEN_UP[name], told["tier"], why, value])
    told_of = serving.summary()
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
    """Levels by device or tier, and by name; the state of a breaker by its name."""
    places: dict[str, dict[str, float]] = {}
    for level in levels:
        place = level.labels.get("device") or level.labels.get("tier")
        if place:
            state = level.labels.get("state")
            places.setdefault(place, {})[f"is {state}" if state else level.name] = level.value
    return {place: held for place, held in places.items() if any("used" in name for name in held)}


def _breaker(held: dict[str, float]) -> str | None:
    states = [name[3:] for name, value in held.items() if name.startswith("is ") and value]
    return states[0] if states else None


def _capacity(n_bytes: float) -> str:
    return axis.amount(n_bytes) if n_bytes < 2**60 else "no limit"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
