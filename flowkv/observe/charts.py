"""Charts of reports, as SVG: curves, distributions, requests over time, restores."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.observe.events import RestoreSpan
from flowkv.observe.metrics import Spread
from flowkv.observe.timeline import COMPUTING, PHASES, Meeting, Phase, RequestLane, Timeline

WIDTH, LEFT, RIGHT = 720, 92, 22
"""Of all pictures over time of a page, so that the same moment lies at the same place."""

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Scale(NamedTuple):
    """Where values of an axis lie in the picture.

    Attributes:
        low: Value at `first`.
        high: Value at `last`.
        first: Place of the lowest value.
        last: Place of the highest one.
    """

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        """Where a value lies, at the ends if it is outside."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return self.first + min(1.0, max(0.0, share)) * (self.last - self.first)


def round_step(length: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... that divides a length into at most `most` parts."""
    if not length > 0:
        return 1.0
    step = 10.0 ** math.floor(math.log10(length / most))
    return next(step * f for f in (1, 2, 5, 10, 20) if length / (step * f) <= most)


def binary_step(length: float, most: int) -> float:
    """The same of bytes: 1, 2, 4, ... times a power of 1024."""
    step = 1.0
    while length / step > most:
        step *= 2
    return step


def seconds(value: float) -> str:
    """A time for people: "2.5 ms"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 0.9995:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def amount(value: float) -> str:
    """Bytes for people: "1.5 MiB"."""
    unit = 0
    while abs(value) >= 1023.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_BYTES[unit]}"


def share(value: float) -> str:
    """A share for people: "42%"."""
    return f"{100 * value:.3g}%"


def plain(value: float) -> str:
    """A number for people: "1,200"."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def time_axis(scale: Scale, top: float, bottom: float) -> str:
    """Ticks and labels of an axis of seconds, with faint lines from `top` to `bottom`."""
    length = scale.high - scale.low
    unit, factor = ("s", 1.0) if length >= 2 else ("ms", 1e3)
    step, parts = round_step(length * factor, 9), []
    for number in range(int(length * factor / step + 1e-9) + 1):
        x = scale.at(scale.low + number * step / factor)
        said = f"{number * step:.4g}" + (f" {unit}" if number == 0 else "")
        parts.append(
            f'<line class="axis" x1="{x:.1f}" y1="{top:g}" x2="{x:.1f}" y2="{bottom + 5:g}"/>'
            f'<text class="v" x="{x:.1f}" y="{bottom + 19:g}" text-anchor="middle">{said}</text>'
        )
    return "".join(parts)


def value_axis(scale: Scale, step: float, said: Callable[[float], str]) -> str:
    """Lines and labels of an axis of values, at multiples of `step`."""
    parts = []
    for number in range(int(scale.high / step + 1e-9) + 1):
        y = scale.at(number * step)
        parts.append(
            f'<line class="axis" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
            f'<text class="v" x="{LEFT - 10}" y="{y + 4.5:.1f}" text-anchor="end">'
            f"{text(said(number * step))}</text>"
        )
    return "".join(parts)


def figure(caption: str, legend: dict[str, int], height: float, drawn: str) -> str:
    """A picture with its caption and its legend, name -> colour."""
    keys = "".join(f'<span><i class="s{c}"></i>{text(name)}</span>' for name, c in legend.items())
    return (
        f"<figure><figcaption>{text(caption)}</figcaption>"
        + (f'<div class="legend">{keys}</div>' if legend else "")
        + f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{text(caption)}">{drawn}</svg></div></figure>'
    )


def text(value: object) -> str:
    """Anything as escaped text."""
    return html.escape(str(value), quote=True)


# Curves over sizes: one SVG, axes and points, readable without colour by its dashes and table.

MOST_CURVES = 12

_WIDTH, _HEIGHT = 720, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 12, 48
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Curves:
    """Values over a size, one curve per name; the x axis is logarithmic unless told otherwise.

    Attributes:
        caption: What is shown.
        sizes: Ascending; positive if the axis is logarithmic.
        series: Name -> one value per size; one that is not finite is left out.
        x: What a size is, below the axis.
        dashed: Names whose curves are bounds, not results.
        colours: Name -> number of its colour, so that a name has one colour in all charts of a
            page; default their order.
        percent: Whether sizes and values are shares, shown as percent.
        log_x: Whether equal factors of sizes are equally far apart.
        log_y: The same of values, which must be positive then.
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


def draw_curves(chart: Curves) -> str:
    """The figure as HTML.

    Raises:
        ConfigError: If a curve lacks values, sizes do not ascend, there are too many curves, or a
            value has no logarithm.
    """
    _check(chart)
    ticks = _log_ticks(chart) if chart.log_y else _ticks(chart)
    drawn = [_y_axis(chart, ticks), _x_axis(chart)]
    colours = {name: chart.colours.get(name, i) for i, name in enumerate(chart.series)}
    for name, values in chart.series.items():
        number = colours[name]
        points = [
            (_x(chart, size), _y(chart, ticks, value), size, value)
            for size, value in zip(chart.sizes, values, strict=True)
            if math.isfinite(value)
        ]
        dash = ' stroke-dasharray="6 4"' if name in chart.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        drawn.append(f'<polyline class="l l{number}" points="{path}"{dash}/>')
        drawn += [
            f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"><title>'
            f"{_text(name)}, {_label(size, chart.percent)}: {_value(value, chart.percent)}"
            "</title></circle>"
            for x, y, size, value in points
        ]
    legend = "".join(
        f'<span><i class="s{number}"></i>{_text(name)}</span>' for name, number in colours.items()
    )
    return (
        f"<figure><figcaption>{_text(chart.caption)}</figcaption>"
        f'<div class="legend">{legend}</div>'
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{_text(chart.caption)}">{"".join(drawn)}</svg></div></figure>'
    )


def _check(chart: Curves) -> None:
    colours = chart.colours.values()
    if not 1 <= len(chart.series) <= MOST_CURVES or max(colours, default=0) >= MOST_CURVES:
        raise ConfigError(
            f"chart {chart.caption!r} has {len(chart.series)} curves", f"Show 1 to {MOST_CURVES}"
        )
    sizes = list(chart.sizes)
    least = 0 if chart.log_x else -math.inf
    if not sizes or sizes[0] <= least or sizes != sorted(set(sizes)):
        raise ConfigError(
            f"sizes of chart {chart.caption!r} do not ascend, or not from above 0", "Sort them"
        )
    if any(len(values) != len(sizes) for values in chart.series.values()):
        raise ConfigError(f"chart {chart.caption!r} lacks values", "Give every size one value")
    if chart.log_y and not all(value > 0 for value in _finite(chart)):
        raise ConfigError(f"chart {chart.caption!r} has values without a logarithm", "Leave 0 out")


def _finite(chart: Curves) -> list[float]:
    return [v for vs in chart.series.values() for v in vs if math.isfinite(v)]


def _ticks(chart: Curves) -> list[float]:
    """Values of the lines of a linear axis, lowest first; the first and last are its ends."""
    values = _finite(chart)
    top, bottom = max([*values, 0.0]), min([*values, 0.0])
    span = top - bottom or 1.0
    step = next((s for s in _STEPS if span / s <= 6), span / 5)
    low, high = math.floor(bottom / step) * step, math.ceil((top or span) / step) * step
    return [low + number * step for number in range(round((high - low) / step) + 1)]


def _log_ticks(chart: Curves) -> list[float]:
    """The same of a logarithmic axis: 1, 2 and 5 of every decade, or 1 alone where that is much."""
    values = _finite(chart) or [1.0]
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    leading = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [lead * 10.0**decade for decade in decades for lead in leading]
    first = max((i for i, tick in enumerate(ticks) if tick <= min(values)), default=0)
    last = min(i for i, tick in enumerate([*ticks, math.inf]) if tick >= max(values))
    return ticks[first : max(last, first + 1) + 1]


def _x(chart: Curves, size: float) -> float:
    def scale(value: float) -> float:
        return math.log(value) if chart.log_x else value

    first, last = scale(chart.sizes[0]), scale(chart.sizes[-1])
    share = (scale(size) - first) / (last - first) if last > first else 0.5
    return _LEFT + 14 + share * (_WIDTH - _LEFT - _RIGHT - 28)


def _y(chart: Curves, ticks: Sequence[float], value: float) -> float:
    low, high = ticks[0], ticks[-1]
    if chart.log_y:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _y_axis(chart: Curves, ticks: Sequence[float]) -> str:
    parts = []
    for value in ticks:
        y = _y(chart, ticks, value)
        parts.append(
            f'<line class="axis" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
            f'<text class="v" x="{_LEFT - 10}" y="{y + 4.5:.1f}" text-anchor="end">'
            f"{_label(value, chart.percent)}</text>"
        )
    return "".join(parts)


def _x_axis(chart: Curves) -> str:
    bottom, parts, last = _HEIGHT - _BOTTOM, [], -math.inf
    for size in chart.sizes:
        x = _x(chart, size)
        if x - last < 44:  # labels would overlap
            continue
        last = x
        parts.append(
            f'<text class="v" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">'
            f"{_label(size, chart.percent)}</text>"
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="v" x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{_text(chart.x)}</text>"
    )
    return "".join(parts)


def _label(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.4g}%"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.2f}%" if percent else f"{value:.4g}"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


# How times are spread, side by side: bars over a logarithmic axis, with the quantiles marked.

_BARS, _COLUMNS = 30, 2
_GAP, _HIGH, _PLANE, _TITLE, _AXIS = 36, 176, 84, 58, 34
_MARKS = {"P50": 0.5, "P95": 0.95, "P99": 0.99}


@dataclass(frozen=True)
class Distributions:
    """Spreads of times.

    Attributes:
        caption: What is shown.
        spreads: Name -> the spread, in seconds; those that are empty are left out.
    """

    caption: str
    spreads: Mapping[str, Spread]

    def draw(self) -> str:
        """The figure as HTML; "" if all spreads are empty."""
        there = {name: spread for name, spread in self.spreads.items() if spread.count}
        if not there:
            return ""
        width = (WIDTH - _GAP * (_COLUMNS - 1)) / _COLUMNS
        rows, drawn = -(-len(there) // _COLUMNS), []
        for number, (name, spread) in enumerate(there.items()):
            row, column = divmod(number, _COLUMNS)
            place = f"translate({column * (width + _GAP):g} {row * (_HIGH + 14):g})"
            panel = "".join(_panel(name, spread, width, number % 6))
            drawn.append(f'<g transform="{place}">{panel}</g>')
        return figure(self.caption, {}, rows * (_HIGH + 14) - 14, "".join(drawn))


def _panel(name: str, spread: Spread, width: float, colour: int) -> Iterator[str]:
    low, high = _ends(spread)
    across = Scale(math.log(low), math.log(high), 0.0, width)
    bottom = _TITLE + _PLANE
    yield (
        f'<text class="t" x="0" y="14">{text(name)}</text>'
        f'<text class="v" x="{width:g}" y="14" text-anchor="end">{spread.count:,}</text>'
    )
    bars = _bars(spread, across)
    up = Scale(0, max(bars), 0, _PLANE)
    for number, held in enumerate(bars):
        if held:
            left, high_ = width / _BARS * number, max(1.5, up.at(held))
            yield (
                f'<rect class="s{colour}" x="{left + 0.75:.1f}" y="{bottom - high_:.1f}" '
                f'width="{width / _BARS - 1.5:.1f}" height="{high_:.1f}" rx="1.5" '
                f'fill-opacity=".8"><title>{held:,} of {spread.count:,}</title></rect>'
            )
    yield f'<line class="axis" x1="0" y1="{bottom}" x2="{width:g}" y2="{bottom}"/>'
    yield from _distributions_ticks(low, high, across, bottom)
    yield from _quantiles(spread, across, bottom)


def _ends(spread: Spread) -> tuple[float, float]:
    """Bounds of the axis: at least a factor of three apart, so that noise does not fill it."""
    first = next(spread.buckets(), None)
    low = max(first.low if first else 1e-9, spread.most * 1e-6, 1e-9)
    high = max(spread.most, low) * 1.02
    if high / low < 3:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(3), middle * math.sqrt(3)
    return low, high


def _bars(spread: Spread, across: Scale) -> list[int]:
    """How many values each bar has; those below the axis are in the first."""
    bars = [0] * _BARS
    bars[0] += spread.zeros
    length = across.high - across.low
    for bucket in spread.buckets():
        middle = (math.log(bucket.low) + math.log(bucket.high)) / 2
        bars[min(_BARS - 1, max(0, int((middle - across.low) / length * _BARS)))] += bucket.held
    return bars


def _distributions_ticks(low: float, high: float, across: Scale, bottom: float) -> Iterator[str]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    for value in (lead * 10.0**decade for decade in decades for lead in leads):
        if low <= value <= high:
            x = across.at(math.log(value))
            anchor = "start" if x < 14 else "end" if x > across.last - 18 else "middle"
            yield (
                f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>'
                f'<text class="v" x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">'
                f"{seconds(value)}</text>"
            )


def _quantiles(spread: Spread, across: Scale, bottom: float) -> Iterator[str]:
    """A line at each, and beside one another what they are."""
    values = {name: spread.quantile(q) for name, q in _MARKS.items()}
    places = [across.at(math.log(value)) if value > 0 else 0.0 for value in values.values()]
    labels = [f"{name} {seconds(value)}" for name, value in values.items()]
    widths = [7.2 * len(label) for label in labels]
    lefts = _apart([x - width / 2 for x, width in zip(places, widths, strict=True)], widths, across)
    for x, left, width, label in zip(places, lefts, widths, labels, strict=True):
        yield (
            f'<polyline class="mark" points="{left + width / 2:.1f},37 {x:.1f},50 '
            f'{x:.1f},{bottom}"/><text class="q" x="{left + width / 2:.1f}" y="33" '
            f'text-anchor="middle">{text(label)}</text>'
        )


def _apart(lefts: list[float], widths: list[float], across: Scale) -> list[float]:
    """Labels in a row that neither overlap nor leave the picture: there is room for all."""
    free = across.first
    for number, width in enumerate(widths):
        lefts[number] = max(lefts[number], free)
        free = lefts[number] + width + 8
    free = across.last
    for number in reversed(range(len(widths))):
        lefts[number] = min(lefts[number], free - widths[number])
        free = lefts[number] - 8
    return lefts


# Requests as bars over time: how long each waited, was prefilled, decoded, was set aside.

_GANTT_TOP, _GANTT_AXIS, _MOST_HIGH, _LABELLED = 6, 30, 430, 11
_COLOURS: dict[Phase, int] = {"queued": 5, "prefill": 0, "decode": 1, "aside": 2}
_NAMES: dict[Phase, str] = {
    "queued": "waiting",
    "prefill": "until the first token",
    "decode": "further tokens",
    "aside": "set aside",
}
_SHADES: dict[Phase, float] = {"queued": 0.4, "prefill": 0.95, "decode": 0.9, "aside": 0.6}


@dataclass(frozen=True)
class Gantt:
    """Requests over time, a row each.

    Attributes:
        caption: What is shown.
        lanes: The requests, in order of submission.
        started_s: Left end of the picture, of the clock of the lanes.
        until_s: Its length.
    """

    caption: str
    lanes: Sequence[RequestLane]
    started_s: float
    until_s: float

    def draw(self) -> str:
        """The figure as HTML."""
        pitch = min(16.0, max(3.0, _MOST_HIGH / max(1, len(self.lanes))))
        bottom = _GANTT_TOP + pitch * len(self.lanes)
        across = Scale(0.0, self.until_s, LEFT, WIDTH - RIGHT)
        drawn = [time_axis(across, _GANTT_TOP, bottom)]
        last = -1e9
        for number, lane in enumerate(self.lanes):
            top = _GANTT_TOP + pitch * number
            if top - last >= _LABELLED:
                last = top
                drawn.append(
                    f'<text class="v" x="{LEFT - 10}" y="{top + pitch / 2 + 4.5:.1f}" '
                    f'text-anchor="end">{lane.request:,}</text>'
                )
            drawn += self._lane(lane, across, top, pitch)
        seen = {piece.phase for lane in self.lanes for piece in lane.pieces}
        legend = {_NAMES[phase]: _COLOURS[phase] for phase in PHASES if phase in seen}
        if any(_broken(lane) for lane in self.lanes):
            legend["cancelled, late or failed"] = 4
        return figure(self.caption, legend, bottom + _GANTT_AXIS, "".join(drawn))

    def _lane(self, lane: RequestLane, across: Scale, top: float, pitch: float) -> Iterator[str]:
        high = max(1.5, pitch - (3 if pitch > 8 else 1))
        for phase, first_s, stop_s in lane.pieces:
            left, right = (across.at(at - self.started_s) for at in (first_s, stop_s))
            said = f"request {lane.request}: {_NAMES[phase]}, {seconds(stop_s - first_s)}"
            yield (
                f'<rect class="s{_COLOURS[phase]}" x="{left:.1f}" y="{top + 1:.1f}" '
                f'width="{max(0.6, right - left):.1f}" height="{high:.1f}" '
                f'fill-opacity="{_SHADES[phase]}"><title>{text(said)}</title></rect>'
            )
        if lane.ended is not None and _broken(lane):
            x = across.at(lane.ended.started_s + lane.ended.seconds - self.started_s)
            said = f"request {lane.request}: {lane.ended.reason}"
            yield (
                f'<rect class="s4" x="{x - 1.5:.1f}" y="{top:.1f}" width="4" '
                f'height="{high + 2:.1f}" rx="1"><title>{text(said)}</title></rect>'
            )


def _broken(lane: RequestLane) -> bool:
    return lane.ended is not None and lane.ended.reason not in ("stop", "length")


# Curves over time: lines, or areas on top of each other.

MOST = 12
"""Curves of one picture."""

_OVERTIME_TOP, _OVERTIME_AXIS = 10, 30
_SAID: dict[str, Callable[[float], str]] = {
    "": plain,
    "%": share,
    "bytes": amount,
    "s": seconds,
}


@dataclass(frozen=True)
class OverTime:
    """Values over time.

    Attributes:
        caption: What is shown.
        times_s: Ascending, from 0 on.
        curves: Name -> one value per time, none negative; NaN where there is none.
        until_s: Right end of the picture; default the last time.
        unit: "" for counts, "%" for shares, "bytes" or "s".
        stacked: Areas on top of each other, the first one lowest.
        most: The axis reaches at least this.
        colours: Name -> number of its colour; default their order.
        height: Of the plane.
    """

    caption: str
    times_s: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    until_s: float = 0.0
    unit: Literal["", "%", "bytes", "s"] = ""
    stacked: bool = False
    most: float = 0.0
    colours: Mapping[str, int] = field(default_factory=dict)
    height: int = 130

    def draw(self) -> str:
        """The figure as HTML.

        Raises:
            ConfigError: A curve lacks values, or there are too many curves.
        """
        self._check()
        colours = {name: self.colours.get(name, n) for n, name in enumerate(self.curves)}
        layers = _stack(self.curves) if self.stacked else dict(self.curves)
        highest = max([self.most, *_overtime_finite(layers)], default=0.0)
        step = (binary_step if self.unit == "bytes" else round_step)(highest, 4)
        bottom = _OVERTIME_TOP + self.height
        until_s = self.until_s or max(self.times_s, default=1.0)
        across = Scale(0.0, until_s, LEFT, WIDTH - RIGHT)
        top = max(step, math.ceil(highest / step - 1e-9) * step)
        up = Scale(0.0, top, bottom, _OVERTIME_TOP)
        said = _SAID[self.unit]
        drawn = [value_axis(up, step, said), time_axis(across, _OVERTIME_TOP, bottom)]
        if self.stacked:
            floor: Sequence[float] = [0.0] * len(self.times_s)
            for name, values in layers.items():
                drawn.append(self._area(floor, values, colours[name], (across, up)))
                floor = values
        drawn += [
            self._line(name, layers[name], colours[name], (across, up)) for name in self.curves
        ]
        return figure(self.caption, colours, bottom + _OVERTIME_AXIS, "".join(drawn))

    def _check(self) -> None:
        if not 1 <= len(self.curves) <= MOST:
            raise ConfigError(
                f"picture {self.caption!r} has {len(self.curves)} curves", f"Show 1 to {MOST}"
            )
        if any(len(values) != len(self.times_s) for values in self.curves.values()):
            raise ConfigError(f"picture {self.caption!r} lacks values", "Give every time one value")

    def _points(self, values: Sequence[float], across: Scale, up: Scale) -> list[list[str]]:
        """Places of the values, in pieces where there are some."""
        pieces: list[list[str]] = [[]]
        for time_s, value in zip(self.times_s, values, strict=True):
            if math.isfinite(value):
                pieces[-1].append(f"{across.at(time_s):.1f},{up.at(value):.1f}")
            elif pieces[-1]:
                pieces.append([])
        return [piece for piece in pieces if piece]

    def _area(
        self,
        floor: Sequence[float],
        values: Sequence[float],
        colour: int,
        scales: tuple[Scale, Scale],
    ) -> str:
        above = " ".join(point for piece in self._points(values, *scales) for point in piece)
        below = [point for piece in self._points(floor, *scales) for point in piece]
        return f'<polygon class="area s{colour}" points="{above} {" ".join(reversed(below))}"/>'

    def _line(
        self, name: str, values: Sequence[float], colour: int, scales: tuple[Scale, Scale]
    ) -> str:
        own = [value for value in self.curves[name] if math.isfinite(value)]
        said = _SAID[self.unit]
        most = f": at most {said(max(own))}" if own else ""
        return "".join(
            f'<polyline class="l l{colour}" points="{" ".join(piece)}">'
            f"<title>{text(name + most)}</title></polyline>"
            for piece in self._points(values, *scales)
        )


def _stack(curves: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    below: list[float] | None = None
    stacked: dict[str, Sequence[float]] = {}
    for name, values in curves.items():
        known = [value if math.isfinite(value) else 0.0 for value in values]
        below = known if below is None else [a + b for a, b in zip(below, known, strict=True)]
        stacked[name] = below
    return stacked


def _overtime_finite(curves: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for values in curves.values() for value in values if math.isfinite(value)]


# A restore as a picture: tokens over time, computed from the front, loaded from the back.
#
# Above, each piece covers the tokens that it brought while it was under way; the two stairs meet.
# Below, each engine has a bar of the time in which it worked.

_OVERLAP_WIDTH, _OVERLAP_LEFT, _OVERLAP_RIGHT, _OVERLAP_TOP = 720, 92, 22, 20
_OVERLAP_X1 = _OVERLAP_WIDTH - _OVERLAP_RIGHT
_OVERLAP_PLANE, _LANE, _OVERLAP_GAP, _OVERLAP_AXIS = 230, 16, 10, 40
_ROOM = _OVERLAP_WIDTH - _OVERLAP_LEFT - _OVERLAP_RIGHT
_OVERLAP_COLOURS = {"compute": 0, "suffix": 3}
_TIER_COLOURS = (1, 2, 4, 6, 7, 8)


@dataclass(frozen=True)
class Overlap:
    """The timeline of one restore.

    Attributes:
        caption: What is shown.
        timeline: The restore.
    """

    caption: str
    timeline: Timeline


def draw_overlap(chart: Overlap) -> str:
    """The figure as HTML."""
    drawing = _Drawing(chart.timeline)
    legend = "".join(
        f'<span><i class="s{number}"></i>{_text(name)}</span>'
        for name, number in drawing.legend().items()
    )
    return (
        f"<figure><figcaption>{_text(chart.caption)}</figcaption>"
        f'<div class="legend">{legend}</div>'
        f'<div class="scroll"><svg viewBox="0 0 {_OVERLAP_WIDTH} {drawing.height}" role="img" '
        f'aria-label="{_text(chart.timeline.describe())}">{"".join(drawing.parts())}</svg>'
        "</div></figure>"
    )


class _Box(NamedTuple):
    """A rectangle of the picture, in its units."""

    left: float
    top: float
    width: float
    height: float


class _Drawing:
    """Where things lie in the picture."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.engines = timeline, timeline.engines
        self.layers, self.bound_s = timeline.layers, timeline.bound_s
        self.until_s = max(timeline.until_s, 1e-9)
        spans = timeline.spans
        self.tokens = max([timeline.ended.tokens, *(s.token + s.tokens for s in spans)]) or 1
        colours = iter(_TIER_COLOURS * (1 + len(self.engines)))
        self.colours = {
            e: _OVERLAP_COLOURS[e] if e in _OVERLAP_COLOURS else next(colours) for e in self.engines
        }
        self.lanes = _OVERLAP_TOP + _OVERLAP_PLANE + _OVERLAP_GAP
        self.height = self.lanes + len(self.engines) * (_LANE + _OVERLAP_GAP) + _OVERLAP_AXIS

    def legend(self) -> dict[str, int]:
        named = {"compute": "computed", "suffix": "computed behind it"}
        names = self.timeline.names
        legend = {named.get(e, f"loaded from {names[e]}"): self.colours[e] for e in self.engines}
        return legend | ({"there already": 5} if self.timeline.ended.resident_tokens else {})

    def parts(self) -> list[str]:
        ended, met = self.timeline.ended, self.timeline.met
        parts = [self._axes()]
        if ended.resident_tokens:
            box = self._box((0.0, self.until_s), (0, ended.resident_tokens))
            parts.append(_rect(5, box, 0.35, "there already"))
        parts += self._pieces()
        for number, engine in enumerate(self.engines):
            parts += self._lane(self.lanes + number * (_LANE + _OVERLAP_GAP), engine)
        if self.bound_s:
            parts.append(self._mark(self.bound_s, "lower bound"))
        if met is not None:
            parts.append(self._meeting(met))
        return parts

    def _x(self, at_s: float) -> float:
        return round(2 * (_OVERLAP_LEFT + _ROOM * at_s / self.until_s)) / 2

    def _y(self, token: float) -> float:
        return round(2 * (_OVERLAP_TOP + _OVERLAP_PLANE * (1 - token / self.tokens))) / 2

    def _pieces(self) -> Iterator[str]:
        """Half a pixel is as fine as it gets: what lies on the same ones is drawn once."""
        found: dict[tuple[str, _Box], RestoreSpan] = {}
        for span in self.timeline.spans:
            box = self._box(self.timeline.at(span), self._band(span))
            found.setdefault((span.engine, box), span)
        for (engine, box), span in found.items():
            part = f", layer {span.layer}" if span.layers == 1 < self.layers else ""
            tokens = f"tokens {span.token:,} to {span.token + span.tokens:,}"
            yield _rect(self.colours[engine], box, 0.85, f"{engine}: {tokens}{part}")

    def _band(self, span: RestoreSpan) -> tuple[float, float]:
        """The tokens of a piece; of one that is some layers only, their share of the height."""
        first, size = span.token, span.tokens / self.layers
        if span.engine in COMPUTING:  # upwards
            return first + size * span.layer, first + size * (span.layer + span.layers)
        stop = first + span.tokens
        return stop - size * (span.layer + span.layers), stop - size * span.layer

    def _box(self, when: tuple[float, float], where: tuple[float, float]) -> _Box:
        left, right = map(self._x, when)
        low, high = map(self._y, where)
        return _Box(left, high, max(right - left, 1), max(low - high, 1))

    def _lane(self, top: float, engine: str) -> list[str]:
        busy_s = self.timeline.busy_s(engine)
        share = 100 * busy_s / self.until_s
        name = self.timeline.names[engine]
        name = name if len(name) <= 11 else f"{name[:10]}…"
        parts = [
            f'<text x="{_OVERLAP_LEFT - 10}" y="{top + 12.5:g}" text-anchor="end">{_text(name)}'
            f"<title>{_text(engine)}: {share:.0f}% busy</title></text>",
            f'<line class="axis" x1="{_OVERLAP_LEFT}" y1="{top + _LANE:g}" x2="{_OVERLAP_X1}" '
            f'y2="{top + _LANE:g}"/>',
        ]
        worked = dict.fromkeys(
            (self._x(first), max(self._x(stop), self._x(first) + 1))
            for first, stop in (
                self.timeline.at(s) for s in self.timeline.spans if s.engine == engine
            )
        )
        parts += [
            f'<rect class="s{self.colours[engine]}" x="{left:g}" y="{top:g}" '
            f'width="{right - left:g}" height="{_LANE}"/>'
            for left, right in _joined(worked)
        ]
        return parts

    def _axes(self) -> str:
        bottom, parts = self.height - _OVERLAP_AXIS, []
        for token in (0, self.timeline.ended.tokens):
            y = self._y(token)
            parts.append(
                f'<line class="axis" x1="{_OVERLAP_LEFT}" y1="{y:g}" x2="{_OVERLAP_X1}" '
                f'y2="{y:g}"/>'
                f'<text class="v" x="{_OVERLAP_LEFT - 10}" y="{y + 4.5:g}" text-anchor="end">'
                f"{token:,}</text>"
            )
        middle = _OVERLAP_TOP + _OVERLAP_PLANE / 2 + 4.5
        parts.append(
            f'<text class="v" x="{_OVERLAP_LEFT - 10}" y="{middle}" text-anchor="end">token</text>'
        )
        unit, name = (1.0, "seconds") if self.until_s >= 5 else (1e3, "milliseconds")
        step = _step(self.until_s * unit)
        for number in range(int(self.until_s * unit / step) + 1):
            x = self._x(number * step / unit)
            parts.append(
                f'<line class="axis" x1="{x:g}" y1="{bottom - 4:g}" x2="{x:g}" y2="{bottom:g}"/>'
                f'<text class="v" x="{x:g}" y="{bottom + 16:g}" text-anchor="middle">'
                f"{number * step:.4g}</text>"
            )
        parts.append(
            f'<text class="v" x="{_OVERLAP_LEFT + _ROOM / 2:g}" y="{bottom + 34:g}" '
            f'text-anchor="middle">{name}</text>'
        )
        return "".join(parts)

    def _mark(self, at_s: float, said: str) -> str:
        x = self._x(at_s)
        return (
            f'<line class="l l5" x1="{x:g}" y1="{_OVERLAP_TOP - 4}" x2="{x:g}" '
            f'y2="{self.height - _OVERLAP_AXIS:g}" stroke-dasharray="5 4"/>'
            f'<text class="v" x="{min(x, _OVERLAP_X1):g}" y="{_OVERLAP_TOP - 8}" text-anchor="end">'
            f"{_text(said)}</text>"
        )

    def _meeting(self, met: Meeting) -> str:
        # Behind the stairs, to their right, there is room above a low meeting and below a high one.
        x, y = self._x(met.at_s), self._y(met.token)
        low = y > _OVERLAP_TOP + _OVERLAP_PLANE / 2
        at = _OVERLAP_TOP + _OVERLAP_PLANE * (0.28 if low else 0.8)
        edge = min(x + 80, _OVERLAP_X1)
        left = edge < _OVERLAP_LEFT + 200  # it would leave the picture
        anchor, beside = ("start", x + 8) if left else ("end", edge)
        return (
            f'<line class="l l5" x1="{x:g}" y1="{at + (6 if low else -14):g}" x2="{x:g}" '
            f'y2="{y:g}" stroke-width="1"/><circle class="met" cx="{x:g}" cy="{y:g}" r="5.5"/>'
            f'<text class="met" x="{beside:g}" y="{at:g}" text-anchor="{anchor}">'
            f"met at token {met.token:,}, {brief(met.at_s)}</text>"
        )


def _rect(colour: int, box: _Box, shade: float, said: str) -> str:
    return (
        f'<rect class="s{colour}" x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" '
        f'height="{box.height:g}" fill-opacity="{shade:.2f}"><title>{_text(said)}</title></rect>'
    )


def brief(seconds: float) -> str:
    """A time for people: "2.5 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _joined(pieces: dict[tuple[float, float], None]) -> list[tuple[float, float]]:
    """Intervals without those that touch: fewer rectangles, and no seams between them."""
    joined: list[tuple[float, float]] = []
    for left, right in sorted(pieces):
        if joined and left <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(right, joined[-1][1]))
        else:
            joined.append((left, right))
    return joined


def _step(length: float) -> float:
    """A round step that divides a length into four to ten parts."""
    step = 1e-6
    while True:
        for factor in (1.0, 2.0, 5.0):
            if length / (step * factor) <= 9:
                return step * factor
        step *= 10
