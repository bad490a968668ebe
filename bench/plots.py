"""Plots of the documentation, as files that show alike wherever they are embedded."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec

from bench.restore.report import BOUND, ratios
from bench.restore.row import Row
from flowkv.observe.charts import Curves, draw_curves
from flowkv.observe.report import STYLE
from flowkv.policy.restore import Span
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, lower_bound

MODEL, GPU, GBPS, TOKENS = "Llama-3.1-8B", "H100", 40.0, 30720
_WIDTH, _LINE = 720, 22


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
    figure = draw_curves(chart)
    drawing = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"[^>]*>(.*)</svg>', figure, re.DOTALL)
    assert drawing
    legend, x, y = [], 20, 44 + _LINE
    for name, number in {
        name: chart.colours.get(name, i) for i, name in enumerate(chart.series)
    }.items():
        wide = 26 + round(7.6 * len(name))
        if x + wide > _WIDTH:
            x, y = 20, y + _LINE
        legend.append(
            f'<rect class="s{number}" x="{x}" y="{y - 10}" width="10" height="10" rx="3"/>'
            f'<text class="v" x="{x + 17}" y="{y}">{name}</text>'
        )
        x += wide + 8
    top = y + 12
    height = top + int(drawing[2]) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">'
        f"<style>{STYLE}svg{{min-width:0}}.h{{font-weight:600}}</style>"
        f'<rect width="{_WIDTH}" height="{height}" rx="10" style="fill:var(--card)"/>'
        f'<text class="h" x="20" y="32">{chart.caption}</text>{"".join(legend)}'
        f'<g transform="translate(0 {top})">{drawing[3]}</g></svg>\n'
    )
