"""Plots of the documentation, as files that show alike wherever they are embedded."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from bench.restore.report import BOUND, ratios
from bench.restore.row import Row
from flowkv.policy.restore import Span
from flowkv.report.charts import WIDTH, Curves, palette_css
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, lower_bound

MODEL, GPU, GBPS, TOKENS = "Llama-3.1-8B", "H100", 40.0, 30720
_LINE = 22


def plots(results: dict[str, Any]) -> dict[str, str]:
    """Every plot, by its path below `docs`."""
    rows = msgspec.convert(results.get("restore_cpu", {}).get("rows", []), list[Row])
    drawn = {"explain/restore-bound.svg": picture(split())}
    if rows:
        drawn["explain/restore-lengths.svg"] = picture(lengths(rows))
    return drawn


def split() -> Curves:
    """What both engines need, against how much of the prefix is computed."""
    shape = SHAPES[MODEL]
    costs, request = Modelled(shape, GPUS[GPU], GBPS).ideal, asked(shape, TOKENS)
    steps = [float(TOKENS * i // 24) for i in range(25)]
    computing, loading = [], []
    for step in steps:
        first = round(step)
        prefix_s = costs.compute_s(request, shape.layers, Span(0, first))
        computing.append(prefix_s + costs.suffix_s(request))
        loading.append(costs.load_s(request, 0, (TOKENS - first) * shape.layers))
    best = lower_bound(request, costs)
    return Curves(
        f"Seconds that each engine works ({MODEL}, {GPU}, {GBPS:.0f} Gbps; simulated)",
        steps,
        {
            "computes the first tokens, and the suffix": computing,
            "loads the rest": loading,
            BOUND: [best] * len(steps),
        },
        f"tokens computed, of {TOKENS:,}",
        [BOUND],
        {BOUND: 5},
        percent=False,
        log_x=False,
    )


def lengths(rows: list[Row]) -> Curves:
    """Time over the bound against length, by policy."""
    own = [row for row in rows if (row.engine, row.part) == ("virtual", "paper")]
    caption = "Time to the first token over the bound (108 cells, medians; simulated)"
    return dataclasses.replace(ratios(own), caption=caption)


def picture(chart: Curves) -> str:
    """A chart as an SVG file: its caption, what its curves are, and the curves."""
    drawn = chart.draw()
    legend, x, y = [], 20, 44 + _LINE
    for key in drawn.legend:
        wide = 26 + round(7.6 * len(key.name))
        if x + wide > WIDTH:
            x, y = 20, y + _LINE
        legend.append(
            f'<tspan x="{x}" y="{y}" style="fill:var(--c{key.colour})">{key.mark}</tspan>'
            f'<tspan x="{x + 17}" y="{y}">{escape(key.name)}</tspan>'
        )
        x += wide + 8
    top = y + 12
    *_, width, high = ET.fromstring(drawn.svg).attrib["viewBox"].split()
    height = top + round(float(high)) + 8
    drawing = drawn.svg.replace("<svg", f'<svg y="{top}" width="{width}" height="{high}"', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
        f"<style>{palette_css()}\ntext{{font:13px var(--font);fill:var(--ink)}}</style>"
        f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill:var(--card)"/>'
        f'<text x="20" y="32" style="font-weight:600">{escape(drawn.caption)}</text>'
        f'<text style="fill:var(--soft)">{"".join(legend)}</text>{drawing}</svg>\n'
    )
