"""A restore as a picture: tokens over time, computed from the front, loaded from the back.

Above, each piece covers the tokens that it brought while it was under way; the two stairs meet.
Below, each engine has a bar of the time in which it worked.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flowkv.observe.events import RestoreSpan
from flowkv.observe.timeline import COMPUTING, Meeting, Timeline

_WIDTH, _LEFT, _RIGHT, _TOP = 720, 92, 22, 20
_PLANE, _LANE, _GAP, _AXIS = 230, 16, 10, 40
_ROOM = _WIDTH - _LEFT - _RIGHT
_COLOURS = {"compute": 0, "suffix": 3}
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
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {drawing.height}" role="img" '
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
        self.colours = {e: _COLOURS[e] if e in _COLOURS else next(colours) for e in self.engines}
        self.lanes = _TOP + _PLANE + _GAP
        self.height = self.lanes + len(self.engines) * (_LANE + _GAP) + _AXIS

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
            parts += self._lane(self.lanes + number * (_LANE + _GAP), engine)
        if self.bound_s:
            parts.append(self._mark(self.bound_s, "lower bound"))
        if met is not None:
            parts.append(self._meeting(met))
        return parts

    def _x(self, at_s: float) -> float:
        return round(2 * (_LEFT + _ROOM * at_s / self.until_s)) / 2

    def _y(self, token: float) -> float:
        return round(2 * (_TOP + _PLANE * (1 - token / self.tokens))) / 2

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
            f'<text x="{_LEFT - 10}" y="{top + 12.5:g}" text-anchor="end">{_text(name)}'
            f"<title>{_text(engine)}: {share:.0f}% busy</title></text>",
            f'<line class="axis" x1="{_LEFT}" y1="{top + _LANE:g}" x2="{_WIDTH - _RIGHT}" '
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
        bottom, parts = self.height - _AXIS, []
        for token in (0, self.timeline.ended.tokens):
            y = self._y(token)
            parts.append(
                f'<line class="axis" x1="{_LEFT}" y1="{y:g}" x2="{_WIDTH - _RIGHT}" y2="{y:g}"/>'
                f'<text class="v" x="{_LEFT - 10}" y="{y + 4.5:g}" text-anchor="end">'
                f"{token:,}</text>"
            )
        middle = _TOP + _PLANE / 2 + 4.5
        parts.append(
            f'<text class="v" x="{_LEFT - 10}" y="{middle}" text-anchor="end">token</text>'
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
            f'<text class="v" x="{_LEFT + _ROOM / 2:g}" y="{bottom + 34:g}" text-anchor="middle">'
            f"{name}</text>"
        )
        return "".join(parts)

    def _mark(self, at_s: float, said: str) -> str:
        x = self._x(at_s)
        return (
            f'<line class="l l5" x1="{x:g}" y1="{_TOP - 4}" x2="{x:g}" '
            f'y2="{self.height - _AXIS:g}" stroke-dasharray="5 4"/>'
            f'<text class="v" x="{min(x, _WIDTH - _RIGHT):g}" y="{_TOP - 8}" text-anchor="end">'
            f"{_text(said)}</text>"
        )

    def _meeting(self, met: Meeting) -> str:
        # Behind the stairs, to their right, there is room above a low meeting and below a high one.
        x, y = self._x(met.at_s), self._y(met.token)
        low = y > _TOP + _PLANE / 2
        at = _TOP + _PLANE * (0.28 if low else 0.8)
        edge = min(x + 80, _WIDTH - _RIGHT)
        left = edge < _LEFT + 200  # it would leave the picture
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


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
