"""Curves: where points lie, what is refused, and that nothing is loaded or left unescaped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from typing import Literal

import pytest

from tests.inside import MOST_CURVES, ConfigError, Curves, OverTime, Section, render_report
from tests.report.drawn import Drawn


def test_points_lie_where_their_values_are() -> None:
    chart = Curves("c", [0.01, 0.1, 1.0], {"a": [0.0, 0.5, 1.0], "b": [1.0, 1.0, 1.0]})
    rising, flat = Drawn(chart).lines()
    (x0, y0), (x1, y1), (x2, y2) = rising
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2), "decades are equally far apart"
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y2, "up is more"
    assert [y for _, y in flat] == [y2] * 3


def test_equal_factors_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    chart = Curves("c", [1.0, 2.0, 3.0], {"a": [0.03, 0.3, 3.0]}, percent=False, log_y=True)
    ((x0, y0), (x1, y1), (x2, y2)) = Drawn(chart).lines()[0]
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y2
    assert x1 - x0 > x2 - x1, "sizes are logarithmic, too"
    shown = Drawn(chart).labels("end")
    assert {"0.05", "0.1", "0.2", "0.5", "1", "2"} <= set(shown)
    plain = Drawn(dataclasses.replace(chart, log_x=False))
    (x0, _), (x1, _), (x2, _) = plain.lines()[0]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


@pytest.mark.parametrize("values", [[1.0, 1.0], [10.0, 10.0], [5.0, 5.0], [1e-4, 1e4], [math.nan]])
def test_a_logarithmic_axis_always_has_two_ends(values: list[float]) -> None:
    sizes = [float(i + 1) for i in range(len(values))]
    drawn = Drawn(Curves("c", sizes, {"a": values}, percent=False, log_y=True))
    assert len(drawn.labels("end")) >= 1
    assert all(0 < y < drawn.height for curve in drawn.lines() for _, y in curve)


def test_negative_values_have_room() -> None:
    chart = Curves("c", [1.0, 2.0], {"a": [-0.3, 0.4]}, percent=False)
    ((_, low), (_, high)) = Drawn(chart).lines()[0]
    assert 0 < high < low < 280
    assert "-0.4" in Drawn(chart).labels("end")


def test_what_is_not_finite_is_left_out() -> None:
    chart = Curves("c", [1.0, 2.0, 3.0], {"a": [0.1, math.nan, 0.3]})
    assert [len(curve) for curve in Drawn(chart).lines()] == [2]


def test_bounds_are_dashed_and_names_escaped() -> None:
    chart = Curves("<c>", [1.0, 2.0], {"opt": [1.0, 1.0], "<b>": [0.0, 0.0]}, dashed=["opt"])
    page = render_report("t", [Section("s", parts=[chart])])
    assert page.count("stroke-dasharray") == 1
    assert "<b>" not in page and "<c>" not in page and "&lt;b&gt;" in page


def test_labels_do_not_overlap() -> None:
    sizes = [0.005 * 1.01**i for i in range(60)]
    labels = [x for x, _ in Drawn(Curves("c", sizes, {"a": [0.5] * 60})).labels("middle").values()]
    assert len(labels) > 2 and all(b - a >= 40 for a, b in itertools.pairwise(sorted(labels)))


@pytest.mark.parametrize(
    ("sizes", "series", "said"),
    [
        ([1.0], {}, "0 curves"),
        ([1.0], {str(i): [0.0] for i in range(MOST_CURVES + 1)}, "13 curves"),
        *(([], {"a": []}, "do not ascend"), ([2.0, 1.0], {"a": [0, 0]}, "do not ascend")),
        *(([0.0, 1.0], {"a": [0, 0]}, "do not ascend"), ([1.0, 2.0], {"a": [0]}, "lacks values")),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    sizes: list[float], series: dict[str, list[float]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Curves("c", sizes, series)


def test_no_logarithm_of_nothing_and_no_colour_beyond() -> None:
    with pytest.raises(ConfigError, match="without a logarithm"):
        Curves("c", [1.0], {"a": [0.0]}, log_y=True)
    with pytest.raises(ConfigError, match="colours beyond"):
        Curves("c", [1.0], {"a": [0.0]}, colours={"a": MOST_CURVES})


def test_every_curve_has_a_colour_and_a_marker_of_its_own() -> None:
    series = {f"p{i}": [0.1 * i] for i in range(MOST_CURVES)}
    chart = Curves("c", [0.5], series)
    legend = chart.draw().legend
    assert [key.name for key in legend] == list(series)
    assert len({key.mark for key in legend}) == len({key.colour for key in legend}) == MOST_CURVES
    page = render_report("t", [Section("s", parts=[chart])])
    for i in range(MOST_CURVES):
        assert page.count(f"--c{i}:") == 2, "in light and in dark"
        assert f"fill: var(--c{i})" in page and f"color:var(--c{i})" in page


@pytest.mark.parametrize("name", ["a$b$", "$x", "\x00\x1b[2J", "日本語", "\ud800"])
def test_names_are_shown_as_they_are(name: str) -> None:
    (key,) = Drawn(Curves(name, [1.0, 2.0], {name: [0.1, 0.2]}, name)).picture.legend
    assert key.name == name


@pytest.mark.parametrize("unit", ["", "%", "bytes"])
@pytest.mark.parametrize("values", [[0.0, 0.0], [math.nan, 0.0], [2.0**40]])
def test_an_axis_has_two_ends_where_nothing_happened(
    unit: Literal["", "%", "bytes"], values: list[float]
) -> None:
    chart = OverTime("c", [float(i) for i in range(len(values))], {"a": values}, unit=unit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Drawn(chart)
