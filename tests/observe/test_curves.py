"""Curves: where points lie, what is refused, and that nothing is loaded or left unescaped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest

from flowkv.core.errors import ConfigError
from flowkv.observe.charts import MOST_CURVES, Curves, draw_curves
from flowkv.observe.report import Section, render_report


def points(svg: str) -> list[list[tuple[float, float]]]:
    """The points of every curve."""
    return [
        [tuple(map(float, point.split(","))) for point in found.split()]
        for found in re.findall(r'<polyline[^>]* points="([^"]*)"', svg)
    ]


def test_points_lie_where_their_values_are() -> None:
    chart = Curves("c", [0.01, 0.1, 1.0], {"a": [0.0, 0.5, 1.0], "b": [1.0, 1.0, 1.0]})
    rising, flat = points(draw_curves(chart))
    (x0, y0), (x1, y1), (x2, y2) = rising
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2), "decades are equally far apart"
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y2, "up is more"
    assert [y for _, y in flat] == [y2] * 3


def test_equal_factors_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    chart = Curves("c", [1.0, 2.0, 3.0], {"a": [0.03, 0.3, 3.0]}, percent=False, log_y=True)
    ((x0, y0), (x1, y1), (x2, y2)) = points(draw_curves(chart))[0]
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y2
    assert x1 - x0 > x2 - x1, "sizes are logarithmic, too"
    svg = draw_curves(chart)
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == [
        *("0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5")
    ]
    plain = draw_curves(dataclasses.replace(chart, log_x=False))
    (x0, _), (x1, _), (x2, _) = points(plain)[0]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


@pytest.mark.parametrize("values", [[1.0, 1.0], [10.0, 10.0], [5.0, 5.0], [1e-4, 1e4], [math.nan]])
def test_a_logarithmic_axis_always_has_two_ends(values: list[float]) -> None:
    sizes = [float(i + 1) for i in range(len(values))]
    svg = draw_curves(Curves("c", sizes, {"a": values}, percent=False, log_y=True))
    assert len(re.findall(r'text-anchor="end">', svg)) >= 2
    assert all(0 < y < 330 for curve in points(svg) for _, y in curve)


def test_negative_values_have_room() -> None:
    chart = Curves("c", [1.0, 2.0], {"a": [-0.3, 0.4]}, percent=False)
    ((_, low), (_, high)) = points(draw_curves(chart))[0]
    assert 0 < high < low < 330
    assert ">-0.4<" in draw_curves(chart).replace("\N{MINUS SIGN}", "-")


def test_what_is_not_finite_is_left_out() -> None:
    chart = Curves("c", [1.0, 2.0, 3.0], {"a": [0.1, math.nan, 0.3]})
    assert [len(curve) for curve in points(draw_curves(chart))] == [2]


def test_bounds_are_dashed_and_names_escaped() -> None:
    svg = draw_curves(Curves("<c>", [1.0], {"opt": [1.0], "<b>": [0.0]}, dashed=["opt"]))
    assert svg.count("stroke-dasharray") == 1
    assert "<b>" not in svg and "<c>" not in svg and "&lt;b&gt;" in svg


def test_labels_do_not_overlap() -> None:
    sizes = [0.005 * 1.01**i for i in range(60)]
    svg = draw_curves(Curves("c", sizes, {"a": [0.5] * 60}))
    labels = [float(x) for x in re.findall(r'x="([0-9.]+)" y="302"', svg)]
    assert len(labels) > 2 and all(b - a >= 44 for a, b in itertools.pairwise(labels))


@pytest.mark.parametrize(
    ("chart", "said"),
    [
        (Curves("c", [1.0], {}), "0 curves"),
        (Curves("c", [1.0], {str(i): [0.0] for i in range(MOST_CURVES + 1)}), "13 curves"),
        (Curves("c", [], {"a": []}), "do not ascend"),
        (Curves("c", [2.0, 1.0], {"a": [0, 0]}), "do not ascend"),
        (Curves("c", [0.0, 1.0], {"a": [0, 0]}), "do not ascend"),
        (Curves("c", [1.0, 2.0], {"a": [0]}), "lacks values"),
        (Curves("c", [1.0], {"a": [0.0]}, log_y=True), "without a logarithm"),
    ],
)
def test_what_cannot_be_drawn_is_refused(chart: Curves, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw_curves(chart)


def test_every_curve_has_a_colour_in_the_report() -> None:
    series = {f"p{i}": [0.1 * i] for i in range(MOST_CURVES)}
    page = render_report("t", [Section("s", parts=[Curves("c", [0.5], series)])])
    for i in range(MOST_CURVES):
        assert page.count(f"--c{i}:") == 2 and f".l{i}{{" in page and f".s{i}{{" in page
