"""Reports as one HTML file: key figures, tables, bars and charts, readable offline and in print.

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

import functools
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.core.files import replacing
from flowkv.report.charts import Chart, palette_css

_MOST_BARS = 6  # per label

Source = Literal["", "measured", "simulated", "emulated"]
"""Origin of figures; "" without figures."""


@dataclass(frozen=True)
class Figures:
    """Key figures: (label, value, note) each; values are shown large."""

    items: Sequence[tuple[str, object, str]]


@dataclass(frozen=True)
class Table:
    """Table of rows under column names. Numbers are aligned right; None is shown as a dash.

    Raises:
        ConfigError: A row has not one cell per column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ConfigError(
                    f"a row of {len(row)} cells below {len(self.columns)} columns",
                    "Give every row one cell per column",
                )

    def numeric(self) -> list[bool]:
        """Return whether each column is numeric; "2.5GiB" or "3.4x" counts as a number."""
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.columns)
        return [bool(cells) and all(map(_reads_as_number, cells)) for cells in columns]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero: one per label, or one per label and series.

    Attributes:
        caption: Title of the chart.
        labels: One per row.
        series: Name -> one value per label; a value that is not finite is shown as a dash.
        unit: Unit, written behind every value.

    Raises:
        ConfigError: A series lacks values, one is negative, or there are too many series.
    """

    caption: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    unit: str = ""

    def __post_init__(self) -> None:
        series = self.series.values()
        if any(len(values) != len(self.labels) for values in series):
            raise ConfigError(f"chart {self.caption!r} lacks values", "Give every label one value")
        if not 1 <= len(series) <= _MOST_BARS:
            raise ConfigError(
                f"chart {self.caption!r} has {len(series)} series", f"Show 1 to {_MOST_BARS}"
            )
        if any(value < 0 for values in series for value in values):
            raise ConfigError(f"chart {self.caption!r} has a negative bar", "Show it as a table")

    def rows(self) -> list[tuple[str, list[tuple[float | None, str]]]]:
        """Return each label with its bars: percent of the longest, if any, and value."""
        finite = [v for values in self.series.values() for v in values if math.isfinite(v)]
        most = max(finite, default=0) or 1
        unit = self.unit if self.unit in ("", "%", "x") else f" {self.unit}"
        rows = []
        for label, *values in zip(self.labels, *self.series.values(), strict=True):
            there = [100 * value / most if math.isfinite(value) else None for value in values]
            said = [formatted(v) + unit if math.isfinite(v) else formatted(v) for v in values]
            rows.append((label, list(zip(there, said, strict=True))))
        return rows


@dataclass(frozen=True)
class Text:
    """Paragraph."""

    text: str


Part = Figures | Table | Bars | Text | Chart
"""Content of a section."""


@dataclass(frozen=True)
class Section:
    """Card of the report.

    Attributes:
        title: Heading.
        text: A paragraph below the heading.
        parts: Contents, in order.
        source: Origin of its figures, shown beside the heading; "" without figures.
    """

    title: str
    text: str = ""
    parts: Sequence[Part] = field(default_factory=tuple)
    source: Source = ""


def check_installed() -> None:
    """Check the libraries for reports, before the work rather than after it.

    Raises:
        MissingDependencyError: A library that reports need is not installed.
    """
    if missing := [n for n in ("jinja2", "matplotlib") if importlib.util.find_spec(n) is None]:
        raise MissingDependencyError("A report", "report", " and ".join(missing))


def write_report(
    path: str | os.PathLike[str],
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    footer: str = "",
) -> Path:
    """Write the report and return its path; a reader never sees half of it.

    Args:
        path: The HTML file; an existing one is replaced.
        title: Heading and window title.
        sections: The cards, in order.
        lead: One sentence below the title.
        footer: Machine, versions, date: facts that make the figures reproducible.

    Raises:
        MissingDependencyError: Without the extra `report`.
        OSError: The file cannot be written.
    """
    path = Path(path)
    page = render_report(title, sections, lead=lead, footer=footer)
    with replacing(path) as file:
        os.fchmod(file.fileno(), 0o644)  # a report is meant to be shared, whatever the umask
        file.write(page.encode(errors="replace"))
    return path


def render_report(
    title: str, sections: Sequence[Section], *, lead: str = "", footer: str = ""
) -> str:
    """Return the report as HTML text; arguments and errors as for `write_report`."""
    check_installed()
    page = _template()
    return str(page.render(title=title, sections=sections, lead=lead, footer=footer)) + "\n"


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["formatted"] = formatted
    environment.filters["kind"] = lambda part: type(part).__name__
    environment.globals["palette_css"] = palette_css()
    return environment.get_template("page.html")


def formatted(value: object) -> str:
    """Return a cell's text: three digits of a fraction, thousands apart, a dash for no value."""
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


def _reads_as_number(value: object) -> bool:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return True
    return formatted(value).lstrip("-\N{MINUS SIGN}")[:1].isdigit()
