"""Curves over time: lines, or areas on top of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flowkv.core.errors import ConfigError
from flowkv.observe import axis
from flowkv.observe.axis import LEFT, RIGHT, WIDTH, Scale

MOST = 12
"""Curves of one picture."""

_TOP, _AXIS = 10, 30
_SAID: dict[str, Callable[[float], str]] = {
    "": axis.plain,
    "%": axis.share,
    "bytes": axis.amount,
    "s": axis.seconds,
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
        highest = max([self.most, *_finite(layers)], default=0.0)
        step = (axis.binary_step if self.unit == "bytes" else axis.round_step)(highest, 4)
        bottom = _TOP + self.height
        until_s = self.until_s or max(self.times_s, default=1.0)
        across = Scale(0.0, until_s, LEFT, WIDTH - RIGHT)
        top = max(step, math.ceil(highest / step - 1e-9) * step)
        up = Scale(0.0, top, bottom, _TOP)
        said = _SAID[self.unit]
        drawn = [axis.value_axis(up, step, said), axis.time_axis(across, _TOP, bottom)]
        if self.stacked:
            floor: Sequence[float] = [0.0] * len(self.times_s)
            for name, values in layers.items():
                drawn.append(self._area(floor, values, colours[name], (across, up)))
                floor = values
        drawn += [
            self._line(name, layers[name], colours[name], (across, up)) for name in self.curves
        ]
        return axis.figure(self.caption, colours, bottom + _AXIS, "".join(drawn))

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
            f"<title>{axis.text(name + most)}</title></polyline>"
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


def _finite(curves: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for values in curves.values() for value in values if math.isfinite(value)]
