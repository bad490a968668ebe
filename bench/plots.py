"""Plots of the documentation, as files that show alike wherever they are embedded."""

from __future__ import annotations

import math
from html import escape
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from bench.restore.row import OURS, Row
from flowkv.policy.restore import Span
from flowkv.report.charts import MOST_CURVES, WIDTH, Curves, palette_css
from flowkv.sim.restore import GPUS, SHAPES, Modelled, asked, lower_bound

MODEL, GPU, GBPS, TOKENS = "Llama-3.1-8B", "H100", 40.0, 30720
BOUND = "bound"
_BOUND_COLOUR = 5  # grey
_LINE = 22
_NARROW = 480  # readable on a phone, where wider pictures shrink


def plots(results: dict[str, Any]) -> dict[str, str]:
    """Every plot, by its path below `docs`."""
    rows = msgspec.convert(results.get("restore_cpu", {}).get("rows", []), list[Row])
    drawn = {"explain/restore-bound.svg": picture(split())}
    if rows:
        drawn["explain/restore-lengths.svg"] = picture(lengths(rows))
    if "real_cpu" in results:
        drawn["first-token.svg"] = bars(results["real_cpu"])
    return drawn


def bars(report: dict[str, Any]) -> str:
    """Seconds to the first token of a real model: alone, asked again, in the next process."""
    rows = {
        (row["what"], row.get("tokens")): row for part in report["parts"].values() for row in part
    }
    lines, y = [], 56 + _LINE
    for tokens in (2048, 4000):
        again, later = rows["ttft, asked again", tokens], rows["ttft, restarted", tokens]
        scale = (_NARROW - 40) / rows["ttft, asked again", 4000]["plain_ms"][1]
        y += _LINE
        lines.append(f'<text x="20" y="{y}" style="font-weight:600">{tokens:,} tokens</text>')
        y += 4
        for name, (least, ms, most), colour in (
            ("the model alone", again["plain_ms"], "soft"),
            ("asked again", again["attached_ms"], "c0"),
            ("in the next process, from disk", later["attached_ms"], "c1"),
        ):
            y += _LINE
            said = f"{ms / 1e3:.2f} s ({least / 1e3:.2f} to {most / 1e3:.2f})"
            lines.append(
                f'<text x="20" y="{y}">{name}</text>'
                f'<text x="{_NARROW - 20}" y="{y}" style="text-anchor:end">{said}</text>'
                f'<rect x="20" y="{y + 6}" width="{max(scale * ms, 1):.1f}" height="10" rx="2"'
                f' style="fill:var(--{colour})"/>'
            )
            y += _LINE - 6
        y += 8
    about = "SmolLM2-135M in float32, two CPU cores; medians (least to most)"
    lines.append(f'<text x="20" y="54" style="fill:var(--soft)">{about}</text>')
    return _card(y, "Time to the first token", "".join(lines), _NARROW)


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
        {BOUND: _BOUND_COLOUR},
        percent=False,
        log_x=False,
    )


def lengths(rows: list[Row]) -> Curves:
    """Return the time over the bound against length, by policy."""
    paper = [row for row in rows if row.part == "paper"]
    sizes, series = sorted({row.tokens for row in paper}), dict[str, list[float]]()
    for name in dict.fromkeys(row.policy for row in paper):
        found = ([r.bound_ratio for r in paper if (r.policy, r.tokens) == (name, n)] for n in sizes)
        series[name] = [median(ratios) if ratios else math.nan for ratios in found]
    free = [number for number in range(MOST_CURVES) if number != _BOUND_COLOUR]
    order = dict.fromkeys((OURS, *series))
    return Curves(
        "Time to the first token over the bound (108 cells, medians; simulated)",
        sizes,
        {**series, BOUND: [1.0] * len(sizes)},
        "tokens of the prefix",
        [BOUND],
        {**dict(zip(order, free, strict=False)), BOUND: _BOUND_COLOUR},
        percent=False,
        log_y=True,
    )


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
    legend_line = f'<text style="fill:var(--soft)">{"".join(legend)}</text>'
    return _card(height, drawn.caption, legend_line + drawing)


def _card(height: int, caption: str, inside: str, width: int = WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f"<style>{palette_css()}\ntext{{font:13px var(--font);fill:var(--ink)}}</style>"
        f'<rect width="{width}" height="{height}" rx="10" style="fill:var(--card)"/>'
        f'<text x="20" y="32" style="font-weight:600">{escape(caption)}</text>{inside}</svg>\n'
    )
