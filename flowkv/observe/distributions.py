"""How times are spread, side by side: bars over a logarithmic axis, with the quantiles marked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowkv.observe import axis
from flowkv.observe.axis import WIDTH, Scale
from flowkv.observe.spread import Spread

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
        return axis.figure(self.caption, {}, rows * (_HIGH + 14) - 14, "".join(drawn))


def _panel(name: str, spread: Spread, width: float, colour: int) -> Iterator[str]:
    low, high = _ends(spread)
    across = Scale(math.log(low), math.log(high), 0.0, width)
    bottom = _TITLE + _PLANE
    yield (
        f'<text class="t" x="0" y="14">{axis.text(name)}</text>'
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
    yield from _ticks(low, high, across, bottom)
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


def _ticks(low: float, high: float, across: Scale, bottom: float) -> Iterator[str]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    for value in (lead * 10.0**decade for decade in decades for lead in leads):
        if low <= value <= high:
            x = across.at(math.log(value))
            anchor = "start" if x < 14 else "end" if x > across.last - 18 else "middle"
            yield (
                f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>'
                f'<text class="v" x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">'
                f"{axis.seconds(value)}</text>"
            )


def _quantiles(spread: Spread, across: Scale, bottom: float) -> Iterator[str]:
    """A line at each, and beside one another what they are."""
    values = {name: spread.quantile(q) for name, q in _MARKS.items()}
    places = [across.at(math.log(value)) if value > 0 else 0.0 for value in values.values()]
    labels = [f"{name} {axis.seconds(value)}" for name, value in values.items()]
    widths = [7.2 * len(label) for label in labels]
    lefts = _apart([x - width / 2 for x, width in zip(places, widths, strict=True)], widths, across)
    for x, left, width, label in zip(places, lefts, widths, labels, strict=True):
        yield (
            f'<polyline class="mark" points="{left + width / 2:.1f},37 {x:.1f},50 '
            f'{x:.1f},{bottom}"/><text class="q" x="{left + width / 2:.1f}" y="33" '
            f'text-anchor="middle">{axis.text(label)}</text>'
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
