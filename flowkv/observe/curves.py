"""Curves over sizes: one SVG, axes and points, readable without colour by its dashes and table."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowkv.core.errors import ConfigError

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
