"""Drawings of restores, and the report about them."""

from __future__ import annotations

import re

import pytest

from tests.inside import Overlap, Section, Timeline, render_report, restore_section
from tests.observe.test_timeline import ended, met, span
from tests.report.drawn import Drawn, Shape


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"computed_tokens": 0, "resident_tokens": 0}, "all of it was loaded from disk"),
        ({"loaded_tokens": 0}, "all of it was computed"),
    ],
)
def test_one_engine_alone_meets_nobody(fields: dict[str, int], said: str) -> None:
    timeline = met(**fields)
    assert timeline.met is None and timeline.bound_ratio == 0
    assert "met" not in timeline.describe()
    page = render_report("r", [restore_section(timeline)])
    assert said in page and "met at" not in page and "bound" not in page


def of(drawn: Drawn, said: str) -> list[Shape]:
    return [shape for shape in drawn.shapes if shape.said.startswith(said)]


def test_pieces_lie_where_their_tokens_and_times_are() -> None:
    drawn = Drawn(Overlap("c", met(bound_s=0.03)))
    (there,), (computed,) = of(drawn, "there already"), of(drawn, "compute: tokens")
    early, late = sorted(of(drawn, "disk: tokens"), key=lambda shape: shape.left)
    assert all(s.left >= 92 and s.right <= 706.5 for s in (there, computed, late, early))
    assert computed.bottom == pytest.approx(there.top, abs=0.6), "computed from what was there on"
    assert early.bottom == pytest.approx(late.top, abs=0.6)
    assert late.bottom == pytest.approx(computed.top, abs=0.6)
    assert early.left == computed.left < late.left
    assert computed.width == pytest.approx(1.5 * early.width, abs=1)
    first, second = of(drawn, "suffix: tokens")
    assert first.height < 10 > second.height, "a band per layer"
    assert first.top > second.top, "the first layer is the lowest"
    assert "layer 0" in first.said and "layer 1" in second.said
    assert {"compute: 50% busy", "disk: 67% busy"} <= {s.said for s in drawn.shapes}
    lanes = [s for s in drawn.shapes if "busy" in s.said]
    assert len(lanes) == 3 and lanes[0].bottom < lanes[1].top
    assert lanes[2].width == pytest.approx(late.right - early.left, abs=1), "one bar, no seam"
    (circle,) = (u for u in drawn.root.iter("use") if "stroke-width: 2.2" in u.attrib["style"])
    assert float(circle.attrib["y"]) == pytest.approx(computed.top, abs=0.6)
    assert float(circle.attrib["x"]) == pytest.approx(late.right, abs=0.6)
    assert {"lower bound", "met at token 256, 40 ms"} <= set(drawn.texts)


def test_a_bound_that_was_beaten_is_not_shown() -> None:
    assert "bound" not in render_report("r", [restore_section(met(bound_s=0.061))])


@pytest.mark.parametrize("seconds", [2e-6, 0.06, 3.0, 4000.0])
def test_labels_of_the_axis_fit(seconds: float) -> None:
    drawn = Drawn(Overlap("c", Timeline(ended=ended(seconds=seconds), spans=())))
    labels = [said for said in drawn.labels("middle") if said[0].isdigit()]
    assert 4 <= len(labels) <= 11
    assert ("milliseconds" in drawn.texts) == (seconds < 2) == ("seconds" not in drawn.texts)


@pytest.mark.thorough
def test_ten_thousand_pieces_are_no_burden() -> None:
    stripes = [
        span("disk", n / 900, (n + 1) / 900, token=512 - n // 32, tokens=1, layer=n % 32, layers=1)
        for n in range(10_000)
    ]
    drawn = Drawn(Overlap("c", Timeline(ended=ended(), spans=tuple(stripes))))
    assert 300 < len(drawn.shapes) < 2500


def test_everything_is_escaped() -> None:
    timeline = met()
    odd = span("<b>&'\"", 1, 2)
    timeline = Timeline(ended=timeline.ended, spans=(*timeline.spans, odd))
    page = render_report("r", [restore_section(timeline, title="<i>", source="emulated")])
    assert "<b>&" not in page and "<h2><i>" not in page
    assert "&lt;i&gt;" in page and "&lt;b&gt;" in page
    assert "<path" in page and 'class="source emulated"' in page


def test_the_section_tells_it_in_words_and_numbers() -> None:
    page = render_report("r", [restore_section(met(bound_s=0.05, failed=3))])
    assert "Here the two met at token 256" in page and "3 loads failed" in page
    assert "57% of what was missing" in page and "1.20x" in page
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells[:6] == ["compute", "192", "1", "\N{EN DASH}", "30", "50"]
    assert cells[12:] == ["disk", "256", "2", "3", "40", "66.7"]
    assert 'class="source measured"' in page


def test_nothing_at_all_can_be_drawn() -> None:
    bare = ended(tokens=0, computed_tokens=0, loaded_tokens=0, resident_tokens=0, seconds=0.0)
    section = restore_section(Timeline(ended=bare, spans=()))
    assert isinstance(section, Section) and "<path" in render_report("r", [section])
