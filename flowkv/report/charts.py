"""Charts of reports as SVG, drawn by matplotlib: curves, distributions, requests, restores.

Colours are names that the page resolves, light or dark, and no chart needs them: curves have
markers, phases of requests a height of their own. Any object with a `draw` can be part of a
`Section`.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from xml.etree import ElementTree as ET

import numpy as np

from flowkv.core.config import format_size
from flowkv.core.errors import ConfigError
from flowkv.observe.events import RestoreSpan
from flowkv.observe.metrics import Spread
from flowkv.observe.timeline import COMPUTING, PHASES, Phase, RequestLane, Timeline, joined
from flowkv.report.words import seconds, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CURVES = 12
"""Most curves of one chart."""

PALETTE: Mapping[str, tuple[str, str]] = {
    "page": ("#f6f7f9", "#12151c"),
    "card": ("#fffffe", "#1a1f29"),
    "note": ("#eef3fd", "#1d2738"),
    "ink": ("#1b2130", "#e8ecf3"),
    "soft": ("#5b6578", "#9aa5b8"),
    "line": ("#e2e6ed", "#2c3442"),
    "c0": ("#2f6fde", "#6ea0f7"),
    "c1": ("#0f9d8a", "#3cc4b0"),
    "c2": ("#d9822b", "#eba45c"),
    "c3": ("#8a55d7", "#b491f0"),
    "c4": ("#c9406f", "#ec7fa3"),
    "c5": ("#64748b", "#94a3b8"),
    "c6": ("#5f9e1f", "#96cf57"),
    "c7": ("#0e8fb8", "#54c3e6"),
    "c8": ("#a0522d", "#d29a76"),
    "c9": ("#b59b00", "#dcc845"),
    "c10": ("#d0453a", "#f08178"),
    "c11": ("#4b4fc4", "#9698f0"),
}
"""Colours in light and in dark; `c0` to `c11` are those of curves."""

WIDTH, _LEFT, _RIGHT = 720, 92, 14  # of all charts, so that equal times align
_MARKERS = dict(zip("os^DvPX*<>hp", "●■▲◆▼✚✖★◀▶⬢⬟", strict=True))  # matplotlib's -> in a legend
_SWATCH = "■"
_LIGHT = {name: light for name, (light, _) in PALETTE.items()}
_NAMES = {light: f"var(--{name})" for name, light in _LIGHT.items()}
_STYLE = Path(__file__).with_name("charts.mplstyle")
_drawing = threading.Lock()  # matplotlib's settings are global to the process


def palette_css() -> str:
    """Return the colours as properties of CSS, in light and in dark."""
    light, dark = (
        ";".join(f"--{name}:{shades[number]}" for name, shades in PALETTE.items())
        for number in (0, 1)
    )
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f":root{{color-scheme:light dark;{light};{_FONTS}}}\n{dark}"


_FONTS = (
    '--font:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif'
)


class LegendKey(NamedTuple):
    """Line of a legend.

    Attributes:
        name: Text of the line.
        colour: Number of its colour.
        mark: A character that looks like its marker.
    """

    name: str
    colour: int
    mark: str = _SWATCH


class Picture(NamedTuple):
    """Drawn chart.

    Attributes:
        caption: Title of the chart.
        legend: Its colours and markers.
        svg: The drawing, an `<svg>` element without names from elsewhere.
    """

    caption: str
    legend: Sequence[LegendKey]
    svg: str


class Chart(Protocol):
    """Object that can be drawn."""

    def draw(self) -> Picture:
        """Return the chart as a picture."""


@contextlib.contextmanager
def _sheet(height: float) -> Iterator[Figure]:
    """Yield a figure of some height, under the settings of its drawing."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with _drawing, style.context(["default", _STYLE]), warnings.catch_warnings():
        # The page has its own fonts: glyphs that matplotlib's font lacks are shown anyway.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield Figure(figsize=(WIDTH / 72, height / 72))


def _plane(figure: Figure, top: float, height: float, **options: Any) -> Axes:
    """Add axes over the width of a figure, `top` units below its upper end."""
    whole = figure.get_figheight() * 72
    width = (WIDTH - _LEFT - _RIGHT) / WIDTH
    where = (_LEFT / WIDTH, 1 - (top + height) / whole, width, height / whole)
    return figure.add_axes(where, **options)


def _say(artist: Any, text: str) -> None:
    """Show a text where the pointer is on an artist."""
    artist.set_gid(_SAID + text)


_SAID = "said "  # begins the id of an artist with a tooltip, until the drawing is finished
_FONT = re.compile(r"'DejaVu Sans'[^;]*")
_COLOUR = re.compile("#[0-9a-f]{6}")
_UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _picture(caption: str, legend: Sequence[LegendKey], figure: Figure) -> Picture:
    """Return the figure as an SVG element of a page: colours by name, and no unused id."""
    import matplotlib
    from matplotlib.text import Text

    for artist in figure.findobj():
        artist.set_clip_on(False)  # everything is inside
        artist.set_gid(_printable(artist.get_gid() or ""))
        if isinstance(artist, Text):
            artist.set_text(_printable(artist.get_text()))
    file, caption = io.StringIO(), _printable(caption)
    with matplotlib.rc_context({"svg.hashsalt": caption}):  # one page, one id for one element
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    root = ET.fromstring(file.getvalue())
    for element in root.iter():
        for name in list(element.attrib):  # HTML has no namespaces
            element.attrib[name.rpartition("}")[2]] = element.attrib.pop(name)
        element.tag = element.tag.rpartition("}")[2]
    used = {element.get("href", "")[1:] for element in root.iter("use")}
    for parent in list(root.iter()):
        for element in list(parent):
            if element.tag == "metadata" or element.find("style") is not None:
                parent.remove(element)
        if parent.get("id") not in used:
            said = parent.attrib.pop("id", "")
            if said.startswith(_SAID):
                title = ET.Element("title")
                title.text = said.removeprefix(_SAID)
                parent.insert(0, title)
        if style := parent.get("style"):
            style = _COLOUR.sub(lambda found: _NAMES.get(found[0], found[0]), style)
            parent.set("style", _FONT.sub("var(--font)", style))
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": caption}
    return Picture(caption, legend, ET.tostring(root, encoding="unicode"))


def _printable(text: str) -> str:
    """Return text without characters that XML cannot hold."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _colour(number: int) -> str:
    return _LIGHT[f"c{number}"]


def _finite(series: Iterable[Sequence[float]]) -> list[float]:
    return [value for values in series for value in values if math.isfinite(value)]


def _check(caption: str, length: int, series: Mapping[str, Sequence[float]]) -> None:
    if not 1 <= len(series) <= MOST_CURVES:
        raise ConfigError(f"chart {caption!r} has {len(series)} curves", f"Show 1 to {MOST_CURVES}")
    if any(len(values) != length for values in series.values()):
        raise ConfigError(f"chart {caption!r} lacks values", f"Give every curve {length} values")


# Curves over sizes.


@dataclass(frozen=True)
class Curves:
    """Chart of values over a size, one curve per name; by default over a logarithmic x axis.

    Attributes:
        caption: Title of the chart.
        sizes: Ascending; positive if the axis is logarithmic.
        series: Name -> one value per size; values that are not finite are left out.
        x: Label of the x axis.
        dashed: Names of curves that are bounds, not results.
        colours: Name -> number of its colour, so that a name has one colour in all charts of a
            page; default their order.
        percent: Whether sizes and values are shares, shown as percent.
        log_x: Whether the x axis is logarithmic.
        log_y: Whether the y axis is logarithmic; values must be positive then.

    Raises:
        ConfigError: A curve lacks values, sizes do not ascend, there are too many curves, or a
            value has no logarithm.
    """

    caption: str
    sizes: Sequence[float]
    series: Mapping[str, Sequence[float]]
    x: str = ""
    dashed: Sequence[str] = ()
    colours: Mapping[str, int] = field(default_factory=dict)
    percent: bool = True
    log_x: bool = True
    log_y: bool = False

    def __post_init__(self) -> None:
        sizes, least = list(self.sizes), 0 if self.log_x else -math.inf
        if not sizes or sizes[0] <= least or sizes != sorted(set(sizes)):
            raise ConfigError(
                f"sizes of chart {self.caption!r} do not ascend, or not from above 0", "Sort them"
            )
        _check(self.caption, len(sizes), self.series)
        if max(self.colours.values(), default=0) >= MOST_CURVES:
            raise ConfigError(f"chart {self.caption!r} has colours beyond 11", "Use 0 to 11")
        if self.log_y and not all(value > 0 for value in _finite(self.series.values())):
            raise ConfigError(
                f"chart {self.caption!r} has values without a logarithm", "Leave 0 out"
            )

    def draw(self) -> Picture:
        """Draw the curves as a picture."""
        with _sheet(320) as figure:
            axes = _plane(figure, 10, 258)
            if self.log_x:
                axes.set_xscale("log")
            self._x_axis(axes)
            self._y_axis(axes)
            marks = list(_MARKERS)
            legend = []
            for place, (name, values) in enumerate(self.series.items()):
                number = self.colours.get(name, place)
                dash, mark = "--" if name in self.dashed else "-", marks[number]
                there = [at for at in zip(self.sizes, values, strict=True) if math.isfinite(at[1])]
                axes.plot([x for x, _ in there], [y for _, y in there], dash, color=_colour(number))
                for size, value in there:
                    (point,) = axes.plot(size, value, color=_colour(number), marker=mark)
                    _say(point, f"{name}, {self._label(size)}: {self._value(value)}")
                legend.append(LegendKey(name, number, _MARKERS[mark]))
            return _picture(self.caption, legend, figure)

    def _x_axis(self, axes: Axes) -> None:
        """Label each size that has room for a label, in the font of a phone, too."""
        scale = math.log if self.log_x else float
        first, last = scale(self.sizes[0]), scale(self.sizes[-1])
        room, shown, before = WIDTH - _LEFT - _RIGHT, list[float](), -math.inf
        for size in self.sizes:
            at = room * (scale(size) - first) / (last - first) if last > first else 0.0
            if at - before >= 80:
                shown.append(size)
                before = at
        axes.set_xticks(shown, [self._label(size) for size in shown])
        axes.set_xticks([], minor=True)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(self.x)

    def _y_axis(self, axes: Axes) -> None:
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

        values = _finite(self.series.values()) or [1.0]
        low, high = min(values), max(values)
        if self.log_y:
            wide = high / low > 1e3
            axes.set_yscale("log")
            axes.set_ylim(low / 1.5, high * 1.5)
            axes.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(min(low, 0), max(high, 0))
            axes.set_yticks(ticks)
            axes.set_ylim(ticks[0], ticks[-1])
        axes.yaxis.set_major_formatter(lambda value, _: self._label(value))

    def _label(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.4g}%"
        least = 1_000 if self.sizes[-1] >= 10_000 else 10_000  # alike on one axis
        return f"{value:,.0f}" if abs(value) >= least else f"{value:.4g}"

    def _value(self, value: float) -> str:
        return f"{100 * value:.2f}%" if self.percent else f"{value:.4g}"


# Distributions of times, one below the other: bars over a logarithmic axis, with marked quantiles.

_BARS = 30
_QUANTILES = {"P50": (0.5, "-"), "P95": (0.95, "--"), "P99": (0.99, ":")}


@dataclass(frozen=True)
class Distributions:
    """Chart of distributions of times.

    Attributes:
        caption: Title of the chart.
        spreads: Name -> the spread, in seconds, none of them empty.
    """

    caption: str
    spreads: Mapping[str, Spread]

    def draw(self) -> Picture:
        """Draw the distributions as a picture."""
        with _sheet(156 * (rows := len(self.spreads))) as figure:
            figure.subplots_adjust(0.01, 0.18 / rows, 0.99, 1 - 0.36 / rows, hspace=1.2)
            for number, (name, spread) in enumerate(self.spreads.items()):
                axes = figure.add_subplot(rows, 1, number + 1)
                _draw_spread(axes, spread, _colour(number % 6))
                said = (f"{q} {seconds(spread.quantile(at))}" for q, (at, _) in _QUANTILES.items())
                axes.set_title(name, pad=32)
                axes.set_title(f"{spread.count:,}", loc="right", pad=32, fontweight=400,
                               color=_LIGHT["soft"])  # fmt: skip
                axes.text(0, 1.1, " · ".join(said), transform=axes.transAxes, fontsize=12)
            return _picture(self.caption, [], figure)


def _draw_spread(axes: Axes, spread: Spread, colour: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = spread_ends(spread)
    edges = np.geomspace(low, high, _BARS + 1)
    counts, _ = np.histogram(np.clip(spread.newest, edges[0], edges[-1]), edges)
    held = counts.tolist()  # values below are in the first bar
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.grid(visible=False)
    bars = axes.bar(edges[:-1], held, np.diff(edges) * 0.88, align="edge", color=colour, alpha=0.85)
    for bar, count in zip(bars, held, strict=True):
        _say(bar, f"{count:,} of {len(spread.newest):,}")
    axes.set_yticks([])
    subs = (1,) if high / low > 100 else (1, 2, 5)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value))
    for at, dash in _QUANTILES.values():
        place = min(max(spread.quantile(at), low), high)
        axes.axvline(place, color=_LIGHT["ink"], linestyle=dash, linewidth=1.2, alpha=0.6)


def spread_ends(spread: Spread) -> tuple[float, float]:
    """Return the bounds of an axis, at least a factor of three apart: noise must not fill it."""
    first = min((value for value in spread.newest if value > 0), default=0.0)
    low = max(first, spread.most * 1e-6, 1e-9)
    high = max(spread.most, low) * 1.02
    if high / low < 3:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(3), middle * math.sqrt(3)
    return low, high


# Charts over time.


def _time_axis(axes: Axes, until_s: float) -> float:
    """Prepare an axis from 0 on; return the factor from seconds to its unit."""
    from matplotlib.ticker import MaxNLocator

    factor, unit = (1.0, "seconds") if until_s >= 2 else (1e3, "milliseconds")
    axes.set_xlim(0, (until_s or 1e-9) * factor)
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axes.set_xlabel(unit)
    return factor


_PHASES: dict[Phase, tuple[str, int, float]] = {  # name, colour, height
    "queued": ("waiting", 5, 0.3),
    "prefill": ("until the first token", 0, 0.55),
    "decode": ("further tokens", 1, 0.8),
    "aside": ("set aside", 2, 0.3),
}


@dataclass(frozen=True)
class Gantt:
    """Chart of requests over time, a row each: waiting is a thin bar, computing a high one.

    Attributes:
        caption: Title of the chart.
        lanes: The requests, in order of submission.
        started_s: Left end of the picture, by the clock of the lanes.
        until_s: Length of the picture.
    """

    caption: str
    lanes: Sequence[RequestLane]
    started_s: float
    until_s: float

    def draw(self) -> Picture:
        """Draw the requests as a picture."""
        height = min(16.0, max(3.0, 430 / max(1, len(self.lanes)))) * len(self.lanes)
        with _sheet(height + 52) as figure:
            axes = _plane(figure, 6, height)
            factor = _time_axis(axes, self.until_s)
            axes.grid(visible=False, axis="y")
            axes.set_ylim(max(1, len(self.lanes)) - 0.5, -0.5)
            every = max(1, math.ceil(11 * len(self.lanes) / height)) if height else 1
            labelled = range(0, len(self.lanes), every)
            axes.set_yticks(labelled, [f"{self.lanes[row].request:,}" for row in labelled])
            bars = []
            for row, lane in enumerate(self.lanes):
                for phase, first_s, stop_s in lane.pieces:
                    name, colour, high = _PHASES[phase]
                    said = f"request {lane.request}: {name}, {seconds(stop_s - first_s)}"
                    bars.append((row, first_s, stop_s, colour, high, said))
                if (ended := lane.ended) is not None and _broken(lane):
                    at_s = ended.started_s + ended.seconds
                    said = f"request {lane.request}: {ended.reason}"
                    bars.append((row, at_s, at_s + 0.006 * self.until_s, 4, 1.0, said))
            for row, *when, colour, high, said in bars:
                first_s, stop_s = (min(self.until_s, max(0, at - self.started_s)) for at in when)
                width = max(stop_s - first_s, 0.001 * self.until_s)
                left = min(first_s, self.until_s - width) * factor
                (patch,) = axes.barh(row, width * factor, high, left, color=_colour(colour))
                _say(patch, said)
            seen = {piece.phase for lane in self.lanes for piece in lane.pieces}
            legend = [LegendKey(*_PHASES[phase][:2]) for phase in PHASES if phase in seen]
            if any(map(_broken, self.lanes)):
                legend.append(LegendKey("cancelled, late or failed", 4))
            return _picture(self.caption, legend, figure)


def _broken(lane: RequestLane) -> bool:
    return lane.ended is not None and lane.ended.reason not in ("stop", "length")


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_UNITS: dict[str, Callable[[float], str]] = {
    "": _count,
    "%": share,
    "bytes": lambda value: format_size(round(value)),
}


@dataclass(frozen=True)
class OverTime:
    """Chart of values over time.

    Attributes:
        caption: Title of the chart.
        times_s: Ascending, from 0 on.
        curves: Name -> one value per time, none negative; NaN for a missing one.
        until_s: Right end of the picture; default the last time.
        unit: "" for counts, "%" for shares, or "bytes".
        stacked: Whether curves are areas on top of each other, the first one lowest.
        most: Least upper end of the axis.
        colours: Name -> number of its colour; default their order.
        height: Height of the plane.

    Raises:
        ConfigError: A curve lacks values, or there are too many curves.
    """

    caption: str
    times_s: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    until_s: float = 0.0
    unit: Literal["", "%", "bytes"] = ""
    stacked: bool = False
    most: float = 0.0
    colours: Mapping[str, int] = field(default_factory=dict)
    height: int = 130

    def __post_init__(self) -> None:
        _check(self.caption, len(self.times_s), self.curves)

    def draw(self) -> Picture:
        """Draw the values as a picture."""
        said, marks, several = _UNITS[self.unit], list(_MARKERS), len(self.curves) > 1
        numbers = {name: self.colours.get(name, n) for n, name in enumerate(self.curves)}
        shown: dict[str, Any] = {name: np.array(v, float) for name, v in self.curves.items()}
        if self.stacked:
            heights = np.cumsum([np.nan_to_num(values) for values in shown.values()], axis=0)
            shown = dict(zip(shown, heights, strict=True))
        highest = max([self.most, *_finite(shown.values())], default=0.0)
        with _sheet(self.height + 56) as figure:
            axes = _plane(figure, 10, self.height)
            factor = _time_axis(axes, self.until_s or max(self.times_s, default=1.0))
            times = [at_s * factor for at_s in self.times_s]
            floor: Any = np.zeros(len(times))
            for name, values in shown.items():
                colour, mark = _colour(numbers[name]), marks[numbers[name]]
                if self.stacked:
                    axes.fill_between(times, floor, values, color=colour, alpha=0.22)
                    floor = values
                (line,) = axes.plot(times, values, color=colour)
                if several:
                    line.set(marker=mark, markevery=(20 * numbers[name] % 80, 80))  # apart
                own = _finite([self.curves[name]])
                _say(line, f"{name}: at most {said(max(own))}" if own else name)
            self._y_axis(axes, highest)
            axes.yaxis.set_major_formatter(lambda value, _: said(value))
            legend = [
                LegendKey(name, n, _MARKERS[marks[n]] if several else _SWATCH)
                for name, n in numbers.items()
            ]
            return _picture(self.caption, legend, figure)

    def _y_axis(self, axes: Axes, highest: float) -> None:
        from matplotlib.ticker import MaxNLocator

        if self.unit == "bytes":
            step = 2.0 ** max(0, math.ceil(math.log2(highest / 4 or 1)))
            ticks = np.arange(0, (highest or step) + step, step).tolist()
        else:
            ticks = list(MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(0, highest or 1.0))
        axes.set_yticks(ticks)
        axes.set_ylim(0, ticks[-1])


# A restore as a picture: tokens over time, computed from the front, loaded from the back.
#
# Above, each piece covers its tokens during the time that it was under way; the two stairs meet.
# Below, each engine has a bar of the time in which it worked.

_PLANE, _LANE = 230, 26
_ENGINES = {"compute": 0, "suffix": 3}
_TIERS = (1, 2, 4, 6, 7, 8)


@dataclass(frozen=True)
class Overlap:
    """Chart of one restore's timeline.

    Attributes:
        caption: Title of the chart.
        timeline: The restore.
    """

    caption: str
    timeline: Timeline

    def draw(self) -> Picture:
        """Draw the restore as a picture."""
        timeline, engines = self.timeline, self.timeline.engines
        free = iter(_TIERS * (1 + len(engines)))
        colours = {e: _ENGINES[e] if e in _ENGINES else next(free) for e in engines}
        lanes = _LANE * len(engines)
        with _sheet(_PLANE + lanes + 76) as figure:
            plane = _plane(figure, 20, _PLANE)
            below = _plane(figure, _PLANE + 26, max(lanes, 1), sharex=plane)
            until_s = max(timeline.until_s, 1e-9)
            factor = _time_axis(below, until_s)
            plane.tick_params(bottom=False, labelbottom=False)
            self._pieces(plane, colours, factor)
            self._lanes(below, colours, factor)
            if timeline.bound_s:
                at = timeline.bound_s * factor
                for axes in (plane, below):
                    axes.axvline(at, color=_colour(5), linestyle="--", linewidth=1.6)
                share = timeline.bound_s / until_s
                side = "right" if share > 0.85 else "left" if share < 0.15 else "center"
                plane.set_title("lower bound", x=share, pad=6, loc="center", ha=side,
                                fontweight=400, color=_LIGHT["soft"])  # fmt: skip
            self._meeting(plane, factor, until_s)
            return _picture(self.caption, self._legend(colours), figure)

    def _legend(self, colours: Mapping[str, int]) -> list[LegendKey]:
        named = {"compute": "computed", "suffix": "computed behind it"}
        names = self.timeline.names
        keys = [LegendKey(named.get(e, f"loaded from {names[e]}"), n) for e, n in colours.items()]
        there = [LegendKey("there already", 5)] if self.timeline.ended.resident_tokens else []
        return keys + there

    def _pieces(self, axes: Axes, colours: Mapping[str, int], factor: float) -> None:
        from matplotlib.patches import Rectangle

        timeline, ended = self.timeline, self.timeline.ended
        tokens = max([ended.tokens, *(s.token + s.tokens for s in timeline.spans)]) or 1
        axes.set_ylim(0, tokens)
        axes.set_yticks([0, ended.tokens], ["0", f"{ended.tokens:,}"])
        axes.set_ylabel("token")
        until_s = max(timeline.until_s, 1e-9)
        pixel_s, pixel = until_s / (WIDTH - _LEFT - _RIGHT), tokens / _PLANE
        if ended.resident_tokens:
            there = Rectangle((0, 0), until_s * factor, ended.resident_tokens)
            there.set(color=_colour(5), alpha=0.35)
            _say(axes.add_patch(there), "there already")
        # A pixel is the finest unit: pieces on the same pixels are drawn once.
        found: dict[tuple[object, ...], RestoreSpan] = {}
        for span in timeline.spans:
            corners = zip((*timeline.at(span), *_band(span, timeline.layers)),
                          (pixel_s, pixel_s, pixel, pixel), strict=True)  # fmt: skip
            found.setdefault((span.engine, *(round(at / one) for at, one in corners)), span)
        for span in found.values():
            (first_s, stop_s), (low, high) = timeline.at(span), _band(span, timeline.layers)
            width, height = max(stop_s - first_s, pixel_s), max(high - low, pixel)
            piece = Rectangle((min(first_s, until_s - width) * factor, low), width * factor, height)
            piece.set(color=_colour(colours[span.engine]), alpha=0.85)
            part = f", layer {span.layer}" if span.layers == 1 < timeline.layers else ""
            said = f"{span.engine}: tokens {span.token:,} to {span.token + span.tokens:,}{part}"
            _say(axes.add_patch(piece), said)

    def _lanes(self, axes: Axes, colours: Mapping[str, int], factor: float) -> None:
        timeline = self.timeline
        names = [timeline.names[engine] for engine in colours]
        short = [name if len(name) <= 11 else f"{name[:10]}…" for name in names]
        axes.set_ylim(max(1, len(colours)) - 0.5, -0.5)
        axes.set_yticks(range(len(colours)), short)
        axes.tick_params(axis="y", labelcolor=_LIGHT["ink"])
        for row, (engine, number) in enumerate(colours.items()):
            pieces = joined(timeline.at(s) for s in timeline.spans if s.engine == engine)
            bars = [(first_s * factor, (stop_s - first_s) * factor) for first_s, stop_s in pieces]
            busy = 100 * timeline.busy_s(engine) / max(timeline.until_s, 1e-9)
            drawn = axes.broken_barh(bars, (row - 0.3, 0.6), color=_colour(number))
            _say(drawn, f"{engine}: {busy:.0f}% busy")

    def _meeting(self, axes: Axes, factor: float, until_s: float) -> None:
        met = self.timeline.met
        if met is None:
            return
        # Behind the stairs, to their right, there is room above a low meeting and below a high one.
        low = met.token < axes.get_ylim()[1] / 2
        left = met.at_s < until_s / 2
        axes.annotate(
            f"met at token {met.token:,}, {seconds(met.at_s)}",
            (met.at_s * factor, met.token),
            xytext=(8 if left else 40 if met.at_s < 0.9 * until_s else 0, 60 if low else -80),
            textcoords="offset points",
            ha="left" if left else "right",
            weight="bold",
            arrowprops={"arrowstyle": "-", "linewidth": 1, "color": _LIGHT["c5"]},
            bbox={"facecolor": _LIGHT["card"], "pad": 2},
        )
        axes.plot(met.at_s * factor, met.token, "o", color=_LIGHT["card"], markersize=10,
                  markeredgecolor=_LIGHT["ink"], markeredgewidth=2.2)  # fmt: skip


def _band(span: RestoreSpan, layers: int) -> tuple[float, float]:
    """Return the tokens of a piece; for a piece of some layers only, their share of the height."""
    first, size = span.token, span.tokens / layers
    if span.engine in COMPUTING:  # upwards
        return first + size * span.layer, first + size * (span.layer + span.layers)
    stop = first + span.tokens
    return stop - size * (span.layer + span.layers), stop - size * span.layer
