"""The documentation's Python runs: every page is one program, block after block.

A block fenced as ```` ```python ```` is executed, all blocks of a page in one namespace. One fenced
as ```` ```python { .no-run } ```` needs what a test machine has not (a big model, a server, a GPU);
it must still compile.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from flowkv import KV
from flowkv.data import tiny_path
from tests.inside import Products

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = (ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "examples/README.md"))
LINKING = [*PAGES, *OTHERS]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+) *python\b(?P<info>[^\n`]*)\n"
    r"(?P<code>.*?)^(?P=indent)(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of Python, and where its first line stands in its page."""

    page: Path
    line: int
    runs: bool
    code: str

    def compiled(self) -> object:
        """Return the block's code object, with the line numbers of the page."""
        tree = ast.increment_lineno(ast.parse(self.code, str(self.page)), self.line - 1)
        return compile(tree, str(self.page), "exec")


def blocks(page: Path, text: str) -> list[Block]:
    """Return the page's Python blocks, freed from the indentation of lists and tabs."""
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("code")) + 1,
            runs=not re.search(r"\bno-run\b", match["info"]),
            code=re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
        )
        for match in FENCE.finditer(text)
    ]


EXAMPLES = {  # docstrings that have some, by the names of their classes and functions
    node.name: text
    for source in sorted((ROOT / "flowkv").rglob("*.py"))
    if ">>> " in (code := source.read_text())
    for node in ast.walk(ast.parse(code))
    if isinstance(node, ast.ClassDef | ast.FunctionDef)
    and ">>> " in (text := ast.get_docstring(node) or "")
}


@pytest.mark.parametrize("name", EXAMPLES)
@torch.no_grad()
def test_an_example_of_the_reference_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "guides" / "own-model.md"
    own, geometry, *_ = (block.code for block in blocks(page, page.read_text()))
    torchs = "nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
    space: dict[str, Any] = {"Products": Products, "tiny_path": tiny_path}
    exec(own.replace("flowkv.attention(q, k, v, layer=layer)", torchs), space)
    space["unchanged"] = space["model"]
    exec(own + geometry.replace('"disk:./kv:1GiB"', ""), space)
    with space["kv"] as kv, kv.open([1, 2, 3]) as seq:
        for step in kv.prefill([seq]):
            space["model"](step.tokens, step.positions)
        space |= {"seq": seq, "tokens": [4, 5], "encoder": nn.Linear(2, 3)}
        space |= {"pixel_values": torch.zeros(4, 2)}
        space |= {"inputs": {"input_ids": torch.tensor([[1]]), "max_new_tokens": 2}}
        if name in ("attach", "verify"):
            space["model"] = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
        for example in doctest.DocTestParser().get_examples(EXAMPLES[name]):
            said = io.StringIO()
            if not example.options.get(doctest.SKIP):
                with contextlib.redirect_stdout(said):
                    exec(compile(example.source, name, "single"), space)
                assert said.getvalue() == example.want
        for made in ("kv", "encoder"):
            getattr(space[made], "close", int)()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks(page, page.read_text()):
        code = block.compiled()
        if block.runs:
            exec(code, namespace)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`\n]+`", "", page.read_text())  # `kernel[grid](...)` is no link
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_that_the_site_includes_link_to_addresses_only() -> None:
    """Such a page has two places, and a relative link leads somewhere from one of them alone."""
    included = {
        name for page in PAGES for name in re.findall(r'^--8<-- "(.+)"$', page.read_text(), re.M)
    }
    assert {"CHANGELOG.md", "SECURITY.md"} <= included
    for name in included:
        prose = re.sub(r"`[^`\n]+`", "", (ROOT / name).read_text())
        assert not re.findall(r"\]\((?!https?://|#)([^)]+)", prose), name


def linked(page: Path) -> set[Path]:
    """Pages of the documentation that a page links to."""
    targets = re.findall(r"\]\(([\w/.-]+\.md)", page.read_text())
    return {(page.parent / target).resolve() for target in targets} & set(PAGES[1:])


def test_links_lead_from_the_first_page_to_every_page() -> None:
    first = DOCS / "index.md"
    assert len(linked(first)) <= 30, "it is no list of all pages: the site has a navigation"
    reached, new = set[Path](), {first}
    while new:
        reached |= new
        new = set().union(*map(linked, new)) - reached
    assert reached == set(PAGES[1:])


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(p.relative_to(ROOT / "docs").as_posix() for p in PAGES[1:])


def test_the_reference_lists_every_method_of_a_cache() -> None:
    public = {name: member for name, member in vars(KV).items() if not name.startswith("_")}
    methods = {name for name, member in public.items() if callable(member)}
    assert len(methods) <= 36, "what only hooks need is no method of a cache"
    text = (ROOT / "docs" / "reference.md").read_text()
    table, rest = text.split("| method |")[1].split("Its properties are", 1)
    listed = [
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", row[: row.find("|", 1)])
    ]
    assert sorted(listed) == sorted(methods)
    properties = {name for name, member in public.items() if isinstance(member, property)}
    assert set(re.findall(r"`(\w+)`\s\(", rest.split(":::")[0])) == properties


def test_the_reference_has_one_entry_for_each_public_name() -> None:
    public = re.findall(r"^(?:class|def) (flowkv[\w.]+)", (DOCS / "surface.txt").read_text(), re.M)
    pages = [DOCS / "reference.md", *sorted((DOCS / "reference").glob("*.md"))]
    entries = [
        name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    ]
    assert sorted(entries) == sorted(public)


def test_the_tour_and_the_how_tos_name_what_is_there() -> None:
    pages = (DOCS / "explain" / "layout.md", ROOT / "CONTRIBUTING.md")
    defined: dict[Path, set[str]] = {}
    for source in (ROOT / "flowkv").rglob("*.py"):
        names = defined[source] = set()
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                inner = (part for part in node.body if isinstance(part, ast.FunctionDef))
                names.update(f"{node.name}.{part.name}" for part in inner)
    for page in pages:
        text = page.read_text()
        for path in re.findall(r"`([\w/]+/[\w/]+\.py)`", text):
            assert (ROOT / path).is_file() or (ROOT / "flowkv" / path).is_file(), (page.name, path)
        for path, name in re.findall(r"`([\w/]+/[\w/]+\.py)`, `([\w.]+)`", text):
            assert name in defined[ROOT / "flowkv" / path], (page.name, path, name)
        known = set().union(*defined.values())
        for name in re.findall(r"`([A-Z]\w+\.\w+)`", text):
            assert name in known, (page.name, name)


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    first, *versions = re.split(r"^## ", text, flags=re.MULTILINE)
    assert first.startswith("# Changelog\n") and versions[0].startswith("[Unreleased]\n")
    for version in versions:
        told = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert set(told) <= kinds and len(told) == len(set(told)), (version.splitlines()[0], told)
    assert "- Fixed:" not in text, "it belongs under Fixed"


def test_the_workflow_runs_what_is_told_here() -> None:
    flow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    told = re.findall(r"- run: (\S.*)", flow)
    assert ".ci/run --whole" in told
    assert "mkdocs build --strict" in (ROOT / ".ci" / "run").read_text()
    assert "bandit -q -c pyproject.toml -r flowkv" in told


def test_promises_of_security_are_proven() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    proof = text.split("## Proof")[1]
    assert len(named) == len(re.findall(r"`tests/[^`]+`", proof)) >= 20
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


def test_failures_of_others_are_held_by_tests_that_exist() -> None:
    named = re.findall(r"`(test_\w+)`", (DOCS / "explain" / "failures.md").read_text())
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 10 and not [one for one in named if f"def {one}(" not in tests]


def test_collector_sees_blocks() -> None:
    text = (
        "a\n\n```python\nx = 1\n```\n\n"
        "- b\n\n  ```python { .no-run }\n  y = (\n      2)\n  ```\n"
        "```bash\nz\n```\n"
    )
    first, second = blocks(ROOT / "page.md", text)
    assert (first.line, first.runs, first.code) == (4, True, "x = 1\n")
    assert (second.line, second.runs, second.code) == (10, False, "y = (\n    2)\n")


def test_collector_reports_page_and_line() -> None:
    (block,) = blocks(ROOT / "page.md", "\n\n```python\nok = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as failure:
        exec(block.compiled())
    assert failure.traceback[-1].lineno + 1 == 5
