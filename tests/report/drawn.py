"""A chart as drawn: places of its shapes, their tooltips, and its texts."""

from __future__ import annotations

import re
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tests.inside import Chart


class Shape(NamedTuple):
    """Something with a tooltip, and the box that it covers."""

    said: str
    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top


class Drawn:
    """A chart, which is well-formed and lies within its frame."""

    def __init__(self, chart: Chart) -> None:
        self.picture = chart.draw()
        self.root = ET.fromstring(self.picture.svg)
        _, _, self.width, self.height = map(float, self.root.attrib["viewBox"].split())
        kept = {id(path) for defs in self.root.iter("defs") for path in defs.iter()}
        self.paths = [path for path in self.root.iter("path") if id(path) not in kept]
        for path in self.paths:
            for x, y in points(path):
                assert -3 <= x <= self.width + 3 and -3 <= y <= self.height + 3, path.attrib
        for text in self.root.iter("text"):
            assert -3 <= float(text.attrib["x"]) <= self.width + 3, text.text
            assert 0 <= float(text.attrib["y"]) <= self.height, text.text

    @property
    def shapes(self) -> list[Shape]:
        found = []
        for group in self.root.iter("g"):
            title = group.find("title")
            if title is not None:
                corners = [at for path in group.findall("path") for at in points(path)]
                # a collection is a path that is used where it lies
                corners += [at for d in group.findall("defs/path") if not corners
                            for at in points(d, float(self.height))]  # fmt: skip
                across, down = zip(*(corners or [(0.0, 0.0)]), strict=True)
                box = min(across), min(down), max(across), max(down)
                found.append(Shape(title.text or "", *box))
        return found

    @property
    def texts(self) -> list[str]:
        return [text.text or "" for text in self.root.iter("text")]

    def labels(self, anchor: str) -> dict[str, tuple[float, float]]:
        """Texts of an axis, and where they are: "middle" of x, "end" of y."""
        return {
            text.text or "": (float(text.attrib["x"]), float(text.attrib["y"]))
            for text in self.root.iter("text")
            if f"text-anchor: {anchor}" in text.attrib["style"]
        }

    def lines(self) -> list[list[tuple[float, float]]]:
        """The points of every curve."""
        return [
            points(path)
            for path in self.paths
            if "stroke: var(--c" in path.attrib["style"] and "fill: none" in path.attrib["style"]
            and len(points(path)) > 1
        ]  # fmt: skip


def points(path: ET.Element, below: float = 0.0) -> list[tuple[float, float]]:
    numbers = list(map(float, re.findall(r"-?\d+(?:\.\d+)?", path.attrib["d"])))
    return [(x, y + below) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]


def curves(page: str) -> int:
    """How many lines there are that are not of an axis."""
    return len(re.findall(r'<path d="M [^"]* L [^"]*" style="fill: none; [^"]*var\(--c', page))
