"""Reports are whole, self-contained and escaped, whatever they are asked to show."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from tests.inside import (
    Bars,
    ConfigError,
    Curves,
    Figures,
    MissingDependencyError,
    Section,
    Table,
    Text,
    render_report,
    write_report,
)
from tests.inside import page_Part as Part

VOID = {"meta", "line", "rect", "br"}


class Reader(HTMLParser):
    """Collects the text by element, and checks that elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def sample(word: str = "disk") -> list[Section]:
    return [
        Section(
            word,
            word,
            source="measured",
            parts=[
                Figures([(word, 31936, word), ("share", 0.98765, ""), ("seen", None, "")]),
                Bars(word, [word, "b"], {word: [1.0, 0.5], "x": [math.nan, 0]}, unit=word),
                Table([word, "n"], [[word, 1234567], [word, None]], caption=word),
                Text(word),
            ],
        )
    ]


def test_everything_is_shown() -> None:
    reader = read(render_report("A title", sample(), lead="A lead", footer="A footer"))
    assert reader.of("title")[0] == reader.of("h1")[0] == "A title"
    assert reader.of("h2") == ["disk"]
    assert reader.of("b") == ["31,936", "0.988", "\N{EN DASH}"]
    assert reader.of("td") == ["disk", "1,234,567", "disk", "\N{EN DASH}"]
    assert reader.of("footer") == ["A footer"]
    assert "measured" in reader.of("span")
    assert ("th", "class", "n") in reader.attributes  # a column of numbers


@pytest.mark.parametrize("word", ["<script>alert(1)</script>", "a & b", "\"'>", "</svg></style>"])
def test_everything_is_escaped(word: str) -> None:
    page = render_report(word, sample(word), lead=word, footer=word)
    reader = read(page)
    assert word not in page.replace("<style>", "").replace("</style>", "", 1) or word == "a & b"
    assert {tag for tag, _ in reader.texts}.isdisjoint({"script"})
    assert reader.of("h1") == reader.of("h2") == [word]


@given(st.text(max_size=30))
def test_any_text_keeps_the_page_whole(word: str) -> None:
    read(render_report(word, sample(word)))


def test_nothing_is_loaded_from_anywhere() -> None:
    curves = Curves("c", [1.0, 2.0], {"a": [0.1, 0.2]})
    page = render_report("t", [*sample(), Section("s", parts=[curves])])
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|//|url\(|@import|<script|<img|<link|src=", page)
    assert {target[0] for target in re.findall(r'href="([^"]*)"', page)} == {"#"}


def bars_of(chart: Bars) -> list[float]:
    page = render_report("t", [Section("s", parts=[chart])])
    return list(map(float, re.findall(r'<i style="width:([0-9.]+)%', page)))


def test_bars_are_to_scale() -> None:
    labels = ["a", "a rather long label of a bar that is not cut anywhere", "c"]
    chart = Bars("c", labels, {"s": [4.0, 1.0, 0.0], "t": [2.0, math.inf, 123456.7]}, unit="tokens")
    widths = bars_of(chart)
    assert len(widths) == 5, "what is not finite has no bar"
    assert widths[-1] == max(widths) == 100
    assert bars_of(Bars("c", ["a", "b"], {"": [4.0, 1.0]})) == [100, 25]
    page = render_report("t", [Section("s", parts=[chart])])
    assert labels[1] in page and "123,457 tokens" in page


def test_empty_things() -> None:
    parts = [Figures([]), Table(["a"], []), Bars("c", [], {"s": []}), Bars("z", ["a"], {"s": [0]})]
    read(render_report("t", [Section("s", parts=parts)]))
    read(render_report("t", []))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table(["a", "b"], [[1]]),
        lambda: Bars("c", ["a"], {"s": [1, 2]}),
        lambda: Bars("c", ["a"], {}),
        lambda: Bars("c", ["a"], {str(i): [1] for i in range(7)}),
        lambda: Bars("c", ["a"], {"s": [-1]}),
    ],
)
def test_crooked_parts_are_refused(make: Callable[[], Part]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_the_extra_it_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else there(name)
    )
    with pytest.raises(MissingDependencyError, match=r"pip install 'flowkv\[report\]'"):
        write_report(tmp_path / "r.html", "t", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (12345, "12,345"), (-5, "-5"), (2.0, "2"), (1234.6, "1,235")),
        *((999.96, "1,000"), (0.00012345, "0.000123"), (1.2e-7, "1.20e-07"), (True, "yes")),
        *(("8GiB", "8GiB"), (-math.inf, "\N{EN DASH}")),
    ],
)
def test_numbers(value: object, shown: str) -> None:
    page = render_report("t", [Section("s", parts=[Table(["a"], [[value]])])])
    assert read(page).of("td") == [shown]


class Drawless:
    """No part of a report."""


def test_writing_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_report(path, "Ünïcode", sample()) == path
    assert path.read_text(encoding="utf-8") == render_report("Ünïcode", sample())
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(UndefinedError):
        write_report(path, "t", [Section("s", parts=[Drawless()])])  # type: ignore[list-item]
    with pytest.raises(OSError):
        write_report(tmp_path / "no" / "report.html", "t", [])
    assert "Ünïcode" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]
