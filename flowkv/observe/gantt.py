"""Requests as bars over time: how long each waited, was prefilled, decoded, was set aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowkv.observe import axis
from flowkv.observe.axis import LEFT, RIGHT, WIDTH, Scale
from flowkv.observe.lanes import PHASES, Lane, Phase

_TOP, _AXIS, _MOST_HIGH, _LABELLED = 6, 30, 430, 11
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
    lanes: Sequence[Lane]
    started_s: float
    until_s: float

    def draw(self) -> str:
        """The figure as HTML."""
        pitch = min(16.0, max(3.0, _MOST_HIGH / max(1, len(self.lanes))))
        bottom = _TOP + pitch * len(self.lanes)
        across = Scale(0.0, self.until_s, LEFT, WIDTH - RIGHT)
        drawn = [axis.time_axis(across, _TOP, bottom)]
        last = -1e9
        for number, lane in enumerate(self.lanes):
            top = _TOP + pitch * number
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
        return axis.figure(self.caption, legend, bottom + _AXIS, "".join(drawn))

    def _lane(self, lane: Lane, across: Scale, top: float, pitch: float) -> Iterator[str]:
        high = max(1.5, pitch - (3 if pitch > 8 else 1))
        for phase, first_s, stop_s in lane.pieces:
            left, right = (across.at(at - self.started_s) for at in (first_s, stop_s))
            said = f"request {lane.request}: {_NAMES[phase]}, {axis.seconds(stop_s - first_s)}"
            yield (
                f'<rect class="s{_COLOURS[phase]}" x="{left:.1f}" y="{top + 1:.1f}" '
                f'width="{max(0.6, right - left):.1f}" height="{high:.1f}" '
                f'fill-opacity="{_SHADES[phase]}"><title>{axis.text(said)}</title></rect>'
            )
        if lane.ended is not None and _broken(lane):
            x = across.at(lane.ended.started_s + lane.ended.seconds - self.started_s)
            said = f"request {lane.request}: {lane.ended.reason}"
            yield (
                f'<rect class="s4" x="{x - 1.5:.1f}" y="{top:.1f}" width="4" '
                f'height="{high + 2:.1f}" rx="1"><title>{axis.text(said)}</title></rect>'
            )


def _broken(lane: Lane) -> bool:
    return lane.ended is not None and lane.ended.reason not in ("stop", "length")
