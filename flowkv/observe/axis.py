"""Axes of pictures over time: where things lie, round steps, and values as people read them."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import NamedTuple

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
