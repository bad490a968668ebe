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
    """Values over a size, one curve per name; the x axis is logarithmic.

    Attributes:
        caption: What is shown.
        sizes: Positive, ascending.
        series: Name -> one value per size; one that is not finite is left out.
        x: What a size is, below the axis.
        dashed: Names whose curves are bounds, not results.
        colours: Name -> number of its colour, so that a name has one colour in all charts of a
            page; default their order.
        percent: Whether sizes and values are shares, shown as percent.
    """

    caption: str
    sizes: Sequence[float]
    series: Mapping[str, Sequence[float]]
    x: str = ""
    dashed: Sequence[str] = ()
    colours: Mapping[str, int] = field(default_factory=dict)
    percent: bool = True


def draw_curves(chart: Curves) -> str:
    """The figure as HTML.

    Raises:
        ConfigError: If a curve lacks values, sizes do not ascend, or there are too many curves.
    """
    _check(chart)
    low, high, step = _range(chart)
    drawn = [_y_axis(low, high, step, chart.percent), _x_axis(chart)]
    colours = {name: chart.colours.get(name, i) for i, name in enumerate(chart.series)}
    for name, values in chart.series.items():
        number = colours[name]
        points = [
            (_x(chart.sizes, size), _y(low, high, value), size, value)
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
    if not sizes or sizes[0] <= 0 or sizes != sorted(set(sizes)):
        raise ConfigError(
            f"sizes of chart {chart.caption!r} do not ascend from above 0", "Sort them"
        )
    if any(len(values) != len(sizes) for values in chart.series.values()):
        raise ConfigError(f"chart {chart.caption!r} lacks values", "Give every size one value")


def _range(chart: Curves) -> tuple[float, float, float]:
    """Lowest and highest value of the axis, and the step between its lines."""
    values = [v for vs in chart.series.values() for v in vs if math.isfinite(v)]
    top, bottom = max([*values, 0.0]), min([*values, 0.0])
    span = top - bottom or 1.0
    step = next((s for s in _STEPS if span / s <= 6), span / 5)
    return math.floor(bottom / step) * step, math.ceil((top or span) / step) * step, step


def _x(sizes: Sequence[float], size: float) -> float:
    first, last = math.log(sizes[0]), math.log(sizes[-1])
    share = (math.log(size) - first) / (last - first) if last > first else 0.5
    return _LEFT + 14 + share * (_WIDTH - _LEFT - _RIGHT - 28)


def _y(low: float, high: float, value: float) -> float:
    return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _y_axis(low: float, high: float, step: float, percent: bool) -> str:
    parts = []
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        y = _y(low, high, value)
        parts.append(
            f'<line class="axis" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
            f'<text class="v" x="{_LEFT - 10}" y="{y + 4.5:.1f}" text-anchor="end">'
            f"{_label(value, percent)}</text>"
        )
    return "".join(parts)


def _x_axis(chart: Curves) -> str:
    bottom, parts, last = _HEIGHT - _BOTTOM, [], -math.inf
    for size in chart.sizes:
        x = _x(chart.sizes, size)
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
    return f"{100 * value:.4g}%" if percent else f"{value:.4g}"


def _value(value: float, percent: bool) -> str:
    return f"{100 * value:.2f}%" if percent else f"{value:.4g}"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
