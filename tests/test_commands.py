"""Every command that a page, or a docstring, tells somebody to run can be run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench import __main__ as bench_command
from tests.inside import Misused
from tests.inside import command as cli_command

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [path for room in ("flowkv", "bench", "tests") for path in (ROOT / room).rglob("*.py")]
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "tests").glob("*.sh")), ROOT / "pyproject.toml"]

STARTS = re.compile(
    r"(?:^[ \t#]*(?:\$ )?|`|&& )"  # a line of its own, a span of code, or behind another command
    r"((?:[A-Z_]+=\S+ +)*(?:\.venv\w*/bin/)?(?:python3? -m |pytest |flowkv (?=[a-z]))[^`\n&]*)",
    re.MULTILINE,
)
PLACEHOLDERS = {"DIR": ".", "FILE": "file.json", "COMMAND": "hold", "TRACE": "trace.jsonl"}
INSTALLS = {"venv", "pip", "build", "ruff", "mypy"}
"""Modules of others, which are not ours to check."""


class Command(NamedTuple):
    """What somebody is told to run.

    Attributes:
        place: The file that tells it.
        words: Of the command, from the program's name on.
    """

    place: Path
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def texts() -> Iterator[tuple[Path, str]]:
    """Pages, scripts, and the docstrings of all code."""
    for path in (*PAGES, *SCRIPTS):
        yield path, path.read_text()
    for path in SOURCES:
        source = path.read_text()
        if STARTS.search(source) is None:  # parsing all of them takes seconds
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield path, ast.get_docstring(node) or ""


def spelled(text: str) -> tuple[str, ...]:
    """The words of a command, without what stands around them: comments, choices, `...`."""
    text = re.sub(r"(\s{2,}|\s+#|\s+&& |\s*[,:;] |\s*\().*", "", text).strip(" .,:;)&")
    text = re.sub(r"[\[\]]|\.\.\.", " ", text)
    text = re.sub(r"(?<=\w)\|\w+", "", text)  # one of several
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe of prose
        return ()
    words = [PLACEHOLDERS.get(word, word) for word in words]
    while words and "=" in words[0]:
        words = words[1:]
    return tuple(words)


def commands() -> list[Command]:
    """All of them, each once."""
    found = {}
    for path, text in texts():
        for match in STARTS.finditer(text):
            words = spelled(match[1])
            if words:
                words = (Path(words[0]).name.replace("python3", "python"), *words[1:])
                found.setdefault(words, Command(path, words))
    return list(found.values())


COMMANDS = commands()
MODULES = [
    command
    for command in COMMANDS
    if command.words[:2] == ("python", "-m") and command.words[2] not in {*INSTALLS, "pytest"}
]
PYTESTS = [
    (command, command.words[3:] if command.words[0] == "python" else command.words[1:])
    for command in COMMANDS
    if command.words[0] == "pytest" or command.words[:3] == ("python", "-m", "pytest")
]
FLOWKVS = [command for command in COMMANDS if command.words[0] == "flowkv"]


def told(command: Command) -> str:
    return f"{command.place.relative_to(ROOT)}: {command.text}"


def helped(module: str) -> str:
    """What a module says for `--help`; "" if it reads no options."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
        assert spec is not None, f"{module} cannot be run"
    source = Path(str(spec.origin)).read_text()
    assert '__name__ == "__main__"' in source, f"{module} does nothing when it is run"
    if "ArgumentParser(" not in source:
        return ""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [module, "--help"])
        for name in (module, f"{module}.__main__"):  # another test may have imported it
            patch.delitem(sys.modules, name, raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    return said.getvalue()


def test_there_are_commands_of_every_kind() -> None:
    assert len(MODULES) > 25 and len(PYTESTS) > 8 and len(FLOWKVS) > 25
    texts = {command.text for command in COMMANDS}
    assert "python -m pytest bench --benchmark-group-by=group" in texts
    assert any(text.startswith("python -m tests") for text in texts)
    assert spelled("X=1 python -m a [--b 2] [--c x|y] F ...   # d") == (
        *("python", "-m", "a", "--b", "2", "--c", "x", "F"),
    )


@pytest.mark.parametrize("module", sorted({command.words[2] for command in MODULES}))
def test_modules_can_be_run_and_know_their_options(module: str) -> None:
    mine = [command for command in MODULES if command.words[2] == module]
    if module in ("tests", "bench"):  # pytest's, and the verbs' below
        return
    said = helped(module)
    for command in mine:
        for word in command.words[3:]:
            option = re.match(r"--?[a-z][\w-]*", word)
            assert option is None or re.search(rf"(?<![\w-]){option[0]}\b", said), told(command)


@pytest.mark.parametrize(
    ("parser", "told_words"),
    [
        (cli_command.make_parser(), [(c, c.words[1:]) for c in FLOWKVS]),
        (bench_command.parser(), [(c, c.words[3:]) for c in MODULES if c.words[2] == "bench"]),
    ],
    ids=["flowkv", "bench"],
)
def test_verbs_of_the_command_line_parse(
    parser: argparse.ArgumentParser, told_words: list[tuple[Command, tuple[str, ...]]]
) -> None:
    assert told_words
    for command, given in told_words:
        words = list(given)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                parser.parse_args(words)
        except Misused as error:  # as in a headline, or in prose
            assert re.search(r"required|expected one argument", str(error)), (
                f"{told(command)}: {error}"
            )


COLLECT = """
import contextlib, io, json, sys
import pytest

told = {}
for number, words in enumerate(json.load(sys.stdin)):
    class Count:
        items = 0
        def pytest_collection_modifyitems(self, items):
            pass
        def pytest_collection_finish(self, session):
            self.items = len(session.items)
    count, said = Count(), io.StringIO()
    with contextlib.redirect_stdout(said):
        options = ["--collect-only", "-q", "-p", "no:cacheprovider"]
        code = pytest.main([*words, *options], plugins=[count])
    told[number] = [int(code), count.items, said.getvalue()[-2000:]]
print(json.dumps(told))
"""


def narrowed(words: tuple[str, ...]) -> list[str]:
    """The same command; one that chooses by a mark looks into files alone that have it."""
    if words[0] != "-m":
        return [*words]
    _, mark, *places = words
    files = (path for place in places or ["tests"] for path in sorted((ROOT / place).rglob("*.py")))
    return ["-m", mark, *(str(path) for path in files if f"mark.{mark}" in path.read_text())]


@pytest.mark.thorough
def test_pytest_collects_a_test_for_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT],
        input=json.dumps([narrowed(words) for _, words in PYTESTS]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for number, (command, _) in enumerate(PYTESTS):
        code, items, said = found[str(number)]
        assert code == 0 and items > 0, f"{told(command)}: exit {code}, {items} tests\n{said}"
