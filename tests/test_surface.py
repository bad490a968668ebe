"""What users may rely on is in a file of the tree, and guides keep to it."""

from __future__ import annotations

import ast
import importlib
import re
from difflib import unified_diff

import pytest

from tests import surface
from tests.test_docs import DOCS, PAGES, blocks

FOR_USERS = [page for page in PAGES if page.parent.name != "explain"]
"""Chapters that explain look inside."""


def test_a_change_of_it_is_seen() -> None:
    held = surface.FILE.read_text().splitlines()
    changed = "\n".join(unified_diff(held, surface.surface().splitlines(), n=0, lineterm=""))
    assert not changed, (
        f"{changed}\nWhat users rely on changed (docs/stability.md). If it is meant: "
        "`python -m tests.surface`, a line in CHANGELOG.md, and what is to go is deprecated first."
    )


def test_guides_use_what_is_public() -> None:
    public = {*surface.public_paths(surface.load()), *surface.MODULES}
    code = [(page, block.code) for page in FOR_USERS for block in blocks(page, page.read_text())]
    assert code
    for page, text in code:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flowkv"):
                for name in node.names:
                    path = f"{node.module}.{name.name}"
                    assert path in public, f"{page.name} imports {path}, see tests/surface.py"
            elif isinstance(node, ast.Import):
                ours = {a.name for a in node.names if a.name.startswith("flowkv")}
                assert ours <= {"flowkv", *surface.MODULES}, f"{page.name} imports {ours}"


@pytest.mark.parametrize("module", surface.MODULES)
def test_what_is_promised_is_there(module: str) -> None:
    if module == "flowkv.connect.ray":
        pytest.importorskip("ray")
    found = importlib.import_module(module)
    for name in found.__all__:
        assert getattr(found, name) is not None, f"{module}.{name}"


def test_the_page_names_the_formats_with_their_versions() -> None:
    table = (DOCS / "stability.md").read_text().split("## What formats promise")[1].split("##")[0]
    cells = re.findall(r"^\|[^|]+\| ([\d, ]+) \|", table, re.MULTILINE)
    told = [number for cell in cells for number in cell.split(", ")]
    held = surface.FILE.read_text().split("# Formats")[1]
    assert sorted(told) == sorted(re.findall(r"(\d+)(?:$|(?:\\n)?')", held, re.MULTILINE))
