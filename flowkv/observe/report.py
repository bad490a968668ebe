"""Reports as one HTML file: key figures, tables, bars and curves, readable offline and in print.

    write_report("report.html", "Restoring a chat", [
        Section("Result", source="measured", parts=[
            Figures([("Speed-up", "3.4x", "over recomputing")]),
            Bars("Time to first token", ["recompute", "restore"], {"": [1.9, 0.56]}, unit="s"),
            Table(["tier", "hits"], [["host", 12], ["disk", 3]]),
        ]),
    ])

Everything is escaped, and the file loads nothing: no script, no font, no image from elsewhere.
"""

from __future__ import annotations

import html
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from flowkv.core.errors import ConfigError
from flowkv.observe.charts import MOST_CURVES, Curves, Overlap, draw_curves, draw_overlap

_WIDTH, _BAR, _GAP, _VALUE = 720, 18, 12, 104
_COLOURS = 6

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2130;--soft:#5b6578;
--line:#e2e6ed;--c0:#2f6fde;--c1:#0f9d8a;--c2:#d9822b;--c3:#8a55d7;--c4:#c9406f;--c5:#64748b;--note:#eef3fd;
--c6:#5f9e1f;--c7:#0e8fb8;--c8:#a0522d;--c9:#b59b00;--c10:#d0453a;--c11:#4b4fc4}
@media(prefers-color-scheme:dark){:root{--page:#12151c;--card:#1a1f29;--ink:#e8ecf3;--soft:#9aa5b8;
--line:#2c3442;--c0:#6ea0f7;--c1:#3cc4b0;--c2:#eba45c;--c3:#b491f0;--c4:#ec7fa3;--c5:#94a3b8;
--note:#1d2738;--c6:#96cf57;--c7:#54c3e6;--c8:#d29a76;--c9:#dcc845;--c10:#f08178;--c11:#9698f0}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}
main{max-width:820px;margin:0 auto;padding:48px 20px 64px}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 6px;letter-spacing:-.015em}
h2{font-size:1.2rem;line-height:1.3;margin:0;letter-spacing:-.005em}
p{margin:10px 0 0}.lead{color:var(--soft);margin:0 0 8px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:22px 26px 26px;margin-top:22px}
header.part{display:flex;gap:12px;align-items:center;justify-content:space-between}
.source{font-size:.75rem;font-weight:600;padding:2px 10px;border-radius:99px;white-space:nowrap;
color:var(--soft);border:1px solid var(--line)}
.source.measured{color:var(--c1);border-color:currentColor}
.source.simulated,.source.emulated{color:var(--c2);border-color:currentColor}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:20px;
margin:20px 0 0;padding:0;list-style:none}
.figures li{border-left:3px solid var(--c0);padding-left:14px;min-width:0}
.figures span{display:block;color:var(--soft);font-size:.84rem;line-height:1.4}
.figures b{display:block;font-size:1.75rem;line-height:1.3;font-weight:650;letter-spacing:-.02em;
overflow-wrap:anywhere}
figure{margin:24px 0 0}figcaption,caption{font-weight:600;text-align:left;padding:0 0 10px;
font-size:1rem}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;margin-top:24px}
th,td{padding:8px 12px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th:first-child,td:first-child{padding-left:0}th:last-child,td:last-child{padding-right:0}
th{color:var(--soft);font-weight:600;font-size:.82rem}
tbody tr:last-child td{border-bottom:0}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
svg{display:block;width:100%;min-width:600px;height:auto}
svg text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
fill:var(--ink)}
svg .v{fill:var(--soft);font-variant-numeric:tabular-nums}
svg .axis{stroke:var(--line)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 10px;font-size:.86rem;color:var(--soft)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
.s0{fill:var(--c0);background:var(--c0)}.s1{fill:var(--c1);background:var(--c1)}
.s2{fill:var(--c2);background:var(--c2)}.s3{fill:var(--c3);background:var(--c3)}
.s4{fill:var(--c4);background:var(--c4)}.s5{fill:var(--c5);background:var(--c5)}
svg .l{fill:none;stroke-width:2.2;stroke-linejoin:round}
svg circle.met{fill:var(--card);stroke:var(--ink);stroke-width:2.2}
svg .area{fill-opacity:.22}
svg .mark{fill:none;stroke:var(--ink);stroke-opacity:.55;stroke-width:1.2;stroke-dasharray:3 3}
svg text.t{font-weight:600}svg text.q{font-size:12px;font-variant-numeric:tabular-nums}
svg text.met{font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px}
pre{background:var(--note);border-radius:8px;padding:14px 16px;overflow-x:auto;margin:20px 0 0;
font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
footer{color:var(--soft);font-size:.84rem;margin-top:26px}
@media(max-width:520px){main{padding:28px 14px}section{padding:18px 16px 20px}}
@media print{body{background:#fff}section{break-inside:avoid;border-color:#ccc}}
"""
STYLE += "".join(f".l{i}{{stroke:var(--c{i})}}" for i in range(MOST_CURVES))
STYLE += "".join(
    f".s{i}{{fill:var(--c{i});background:var(--c{i})}}" for i in range(_COLOURS, MOST_CURVES)
)


@dataclass(frozen=True)
class Figures:
    """Key figures: (label, value, note) each; values are shown large."""

    items: Sequence[tuple[str, object, str]]


@dataclass(frozen=True)
class Table:
    """Rows under column names. Numbers are formatted and aligned right; None is shown as a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero: one per label, or one per label and series.

    Attributes:
        caption: What is shown.
        labels: One per row.
        series: Name -> one value per label; a value that is not finite is shown as a dash.
        unit: Written behind every value.
    """

    caption: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    unit: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph, or a block of code or log output if `mono`."""

    text: str
    mono: bool = False


class Picture(Protocol):
    """Whatever draws itself: `OverTime`, `Distributions`, `Gantt`."""

    def draw(self) -> str:
        """The figure as HTML, of classes that `STYLE` knows."""
        ...


Part = Figures | Table | Bars | Curves | Overlap | Text | Picture
"""What a section can show."""


@dataclass(frozen=True)
class Section:
    """One card of the report.

    Attributes:
        title: Its heading.
        text: A paragraph below the heading.
        parts: What it shows, in order.
        source: How its figures came about, shown beside the heading; "" where it has none.
    """

    title: str
    text: str = ""
    parts: Sequence[Part] = field(default_factory=tuple)
    source: Literal["", "measured", "simulated", "emulated"] = ""


def write_report(
    path: str | os.PathLike[str],
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    footer: str = "",
) -> Path:
    """Writes the report and returns its path; a reader never sees half of it.

    Args:
        path: The HTML file; an existing one is replaced.
        title: Heading and window title.
        sections: The cards, in order.
        lead: One sentence below the title.
        footer: Machine, versions, date: whatever makes the figures reproducible.

    Raises:
        ConfigError: A chart or table is not rectangular, or has too many series.
        OSError: The file cannot be written.
    """
    path = Path(path)
    page = render_report(title, sections, lead=lead, footer=footer)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(page)
        Path(temporary).chmod(0o644)  # mkstemp makes it private; a report is to be shown around
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def render_report(
    title: str, sections: Sequence[Section], *, lead: str = "", footer: str = ""
) -> str:
    """The report as HTML text; arguments as for `write_report`."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>"
    )
    body = [f"<body><main><h1>{_text(title)}</h1>"]
    if lead:
        body.append(f'<p class="lead">{_text(lead)}</p>')
    for section in sections:
        badge = f'<span class="source {section.source}">{section.source}</span>'
        body.append(
            f'<section><header class="part"><h2>{_text(section.title)}</h2>'
            f"{badge if section.source else ''}</header>"
        )
        if section.text:
            body.append(f"<p>{_text(section.text)}</p>")
        body += map(_part, section.parts)
        body.append("</section>")
    if footer:
        body.append(f"<footer>{_text(footer)}</footer>")
    return head + "\n".join(body) + "</main></body></html>\n"


def _part(part: Part) -> str:
    match part:
        case Figures(items):
            shown = (
                f"<li><span>{_text(label)}</span><b>{_text(_format(value))}</b>"
                f"<span>{_text(note)}</span></li>"
                for label, value, note in items
            )
            return f'<ul class="figures">{"".join(shown)}</ul>'
        case Table():
            return _table(part)
        case Bars():
            return _bars(part)
        case Curves():
            return draw_curves(part)
        case Overlap():
            return draw_overlap(part)
        case Text(text, mono):
            return f"<pre>{_text(text)}</pre>" if mono else f"<p>{_text(text)}</p>"
        case _:
            return part.draw()


def _table(table: Table) -> str:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ConfigError(
                f"a row of {len(row)} cells below {len(table.columns)} columns",
                "Give every row one cell per column",
            )
    classes = []
    for cells in zip(*table.rows, strict=True):
        # Text such as "2.5GiB" or "3.4x" is read as a number, too.
        numeric = all(c is None or _reads_as_number(c) for c in cells)
        classes.append(' class="n"' if numeric else "")
    classes += [""] * (len(table.columns) - len(classes))
    heads = zip(classes, table.columns, strict=True)
    head = "".join(f'<th scope="col"{kind}>{_text(name)}</th>' for kind, name in heads)
    body = []
    for row in table.rows:
        filled = zip(classes, row, strict=True)
        body.append("".join(f"<td{kind}>{_text(_format(c))}</td>" for kind, c in filled))
    caption = f"<caption>{_text(table.caption)}</caption>" if table.caption else ""
    rows = "".join(f"<tr>{cells}</tr>\n" for cells in body)
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _bars(chart: Bars) -> str:
    if any(len(values) != len(chart.labels) for values in chart.series.values()):
        raise ConfigError(f"chart {chart.caption!r} lacks values", "Give every label one value")
    if not 1 <= len(chart.series) <= _COLOURS:
        raise ConfigError(
            f"chart {chart.caption!r} has {len(chart.series)} series", f"Show 1 to {_COLOURS}"
        )
    if any(v < 0 for values in chart.series.values() for v in values):
        raise ConfigError(f"chart {chart.caption!r} has a negative bar", "Show it as a table")
    left = min(260, 16 + max((7.4 * len(label) for label in chart.labels), default=0))
    room = _WIDTH - left - _VALUE
    largest = max((v for vs in chart.series.values() for v in vs if math.isfinite(v)), default=0)
    step = _BAR * len(chart.series) + 2 * (len(chart.series) - 1) + _GAP
    height = step * len(chart.labels)
    drawn = [f'<line class="axis" x1="{left:g}" y1="0" x2="{left:g}" y2="{height}"/>']
    for row, label in enumerate(chart.labels):
        top = row * step + _GAP / 2
        middle = top + (step - _GAP) / 2 + 4.5
        short = label if 7.4 * len(label) <= 244 else label[:31].rstrip() + "…"
        drawn.append(
            f'<text x="{left - 12:g}" y="{middle:g}" text-anchor="end">{_text(short)}'
            f"<title>{_text(label)}</title></text>"
        )
        for i, values in enumerate(chart.series.values()):
            value, y = values[row], top + i * (_BAR + 2)
            width, shown = 0.0, _format(value)
            if math.isfinite(value):
                width = room * value / largest if largest else 0.0
                shown += chart.unit if chart.unit in ("", "%", "x") else f" {chart.unit}"
                drawn.append(
                    f'<rect class="s{i}" x="{left:g}" y="{y:g}" width="{max(width, 1.5):.1f}" '
                    f'height="{_BAR}" rx="3"/>'
                )
            drawn.append(
                f'<text class="v" x="{left + width + 9:.1f}" y="{y + _BAR / 2 + 4.5:g}">'
                f"{_text(shown)}</text>"
            )
    legend = "".join(
        f'<span><i class="s{i}"></i>{_text(name)}</span>' for i, name in enumerate(chart.series)
    )
    legend = f'<div class="legend">{legend}</div>' if len(chart.series) > 1 else ""
    return (
        f"<figure><figcaption>{_text(chart.caption)}</figcaption>{legend}"
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{_text(chart.caption)}">{"".join(drawn)}</svg></div></figure>'
    )


def _reads_as_number(value: object) -> bool:
    return _is_number(value) or _format(value).lstrip("-\N{MINUS SIGN}")[:1].isdigit()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(value: object) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value != int(value):
        size = abs(value)
        if size >= 100:
            return f"{value:,.0f}"
        return f"{value:.3g}" if size >= 1e-4 else f"{value:.2e}"
    return f"{int(value):,}" if isinstance(value, int | float) else str(value)


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
