"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flowkv
from tests import __main__ as command
from tests import conftest, inside
from tests.calls import uncollected
from tests.inside import MissingDependencyError, MissingLibraryError

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flowkv"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Bloom the model, not Bloom the filter.
MODEL_NAME = re.compile(
    r"(?<![a-z])(llama|qwen|gemma|mistral|deepseek|falcon|bloom(?![ _-]?filter)"
    r"|whisper|llava|gpt_?oss)",
    re.IGNORECASE,
)
MAY_NAME_MODELS = ("hooks", "data", "demo", "demo.py")
SHAPES_OF_MODELS = {"sim/hardware.py", "sim/restore.py"}  # tables of what published models cost

UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "pd.read_pickle"}


def name(path: Path) -> str:
    """Return a short, stable id for a source file."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    with uncollected():
        return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree, in the order of `ast.walk`."""
    with uncollected():
        return list(ast.walk(parsed(path)))


def imported(path: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports, anywhere in it."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_files_are_named_after_their_subject() -> None:
    """After the noun that each is about."""
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert not [name(source) for source in SOURCES if source.stem in vague]


def test_models_are_named_only_at_their_door() -> None:
    found = []
    for source in SOURCES:
        inside = source.relative_to(PACKAGE)
        if inside.parts[0] in MAY_NAME_MODELS or inside.as_posix() in SHAPES_OF_MODELS:
            continue
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if MODEL_NAME.search(line):
                found.append(f"{name(source)}:{number} names a model: {line.strip()}")
    assert not found


def test_no_bytes_are_trusted() -> None:
    found = []
    for source in SOURCES:
        found += [f"{name(source)} imports {one}" for one in imported(source) & UNSAFE_MODULES]
        for node in nodes(source):
            if isinstance(node, ast.Call):
                place, called = f"{name(source)}:{node.lineno}", dotted(node.func)
                loose = [k for k in node.keywords if k.arg == "allow_pickle"]
                if called in UNSAFE_CALLS:
                    found.append(f"{place} calls {called}")
                if not all(getattr(k.value, "value", True) is False for k in loose):
                    found.append(f"{place} allows pickles")
    assert not found


def dotted(node: ast.expr) -> str:
    """Return the dotted name that an expression is; "" if it is none."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_pure_rooms_need_no_tensors() -> None:
    """The import contracts say it for whole graphs; this names the files."""
    pure = [
        one for one in SOURCES if one.relative_to(PACKAGE).parts[0] in {"core", "policy", "sim"}
    ]
    assert not [name(one) for one in pure if imported(one) & {"torch", "triton"}]


def modules() -> dict[str, Path]:
    """Return the files of all modules of the package by the modules' names."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    return {n.removesuffix(".__init__"): path for path, n in names.items()}


def imports(trees: dict[str, Path]) -> dict[str, set[str]]:
    """Return what each module imports of the package, also late or for annotations only."""
    found: dict[str, set[str]] = {name: set() for name in trees}
    for name, path in trees.items():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name] |= {inner if inner in trees else node.module} & trees.keys()
            elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
                named = (getattr(one, "value", None) for one in node.args)
                found[name] |= {one for one in named if isinstance(one, str)} & trees.keys()
        found[name].discard(name)
    return found


def test_no_import_circles() -> None:
    graph, done = imports(modules()), set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join(path[path.index(name) :])} -> {name}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_public_class_name_means_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name for name, found in homes.items() if len(found) > 1} == set()


METHOD_NAMES = 24
"""Names of methods that more than four classes use, each for something of its own."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_methods(node: ast.ClassDef) -> dict[str, Function]:
    """Return the methods and properties that a class defines without a leading underscore."""
    found = (one for one in node.body if isinstance(one, Function))
    return {one.name: one for one in found if not one.name.startswith("_")}


def fits(method: Function, promised: Function) -> bool:
    """Return whether a method can be called just as a protocol's method of the same name."""
    own, its = method.args, promised.args
    names, wanted = [one.arg for one in own.args], [one.arg for one in its.args]
    keywords, asked = ({one.arg for one in args.kwonlyargs} for args in (own, its))
    free = {
        one.arg for one, default in zip(own.kwonlyargs, own.kw_defaults, strict=True) if default
    }
    properties = ("property" in map(dotted, each.decorator_list) for each in (method, promised))
    return (
        len({*properties}) == 1
        and names[: len(wanted)] == wanted
        and len(names) - len(own.defaults) <= len(wanted)
        and (asked <= {*keywords, *names} or own.kwarg is not None)
        and keywords - free <= asked
    )


def meanings(trees: dict[str, ast.ClassDef]) -> dict[str, list[str]]:
    """Return the classes with a meaning of their own for a method name, by that name.

    A class has none where it has the method from a base, or as a protocol declares it.
    """
    bases = {
        name: {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        for name, node in trees.items()
    }
    methods = {name: public_methods(node) for name, node in trees.items()}
    protocols = [name for name in trees if bases[name] & {"Protocol", "ABC"}]

    def above(name: str) -> set[str]:
        known = bases[name] & trees.keys() - {name}
        return known.union(*map(above, known))

    found: dict[str, list[str]] = {}
    for name in trees.keys() - {*protocols}:
        inherited = {method for base in above(name) for method in methods[base]}
        for method, own in methods[name].items():
            promised = [methods[one][method] for one in protocols if method in methods[one]]
            if method not in inherited and not any(fits(own, one) for one in promised):
                found.setdefault(method, []).append(name)
    return found


def test_a_method_name_means_one_thing() -> None:
    """What many classes mean by a name is in a protocol, so that readers can guess it."""
    trees = {
        node.name: node
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }
    many = {method: sorted(of) for method, of in meanings(trees).items() if len(of) > 4}
    worst = sorted(many.items(), key=lambda each: (-len(each[1]), each[0]))[:9]
    said = "; ".join(f"{method} ({', '.join(of)})" for method, of in worst)
    assert len(many) <= METHOD_NAMES, (
        f"{len(many)} method names have a meaning of their own in more than four classes: rename "
        f"yours by what it does, or declare it in a protocol and keep to its parameters. {said}"
    )
    assert len(many) == METHOD_NAMES, f"only {len(many)} names are left: hold that (METHOD_NAMES)"


MOST_METHODS, LARGER = 25, {"KV", "DiskStore", "Planner", "Tenants"}
"""Most public methods of a class, and the classes that still have more."""


def test_a_class_has_few_public_methods() -> None:
    """A part of a class that has a subject of its own is a class, which callers use."""
    classes = (node for path in SOURCES for node in nodes(path) if isinstance(node, ast.ClassDef))
    found = {node.name: len(public_methods(node)) for node in classes}
    many = {name: count for name, count in found.items() if count > MOST_METHODS}
    assert many.keys() <= LARGER, f"{many}: give what has a subject of its own a class"


def test_a_method_of_a_protocol_is_known_by_its_parameters() -> None:
    text = """
class Place(Protocol):
    def load(self, key, *, late): ...
class Child(Place):
    def load(self, anything): ...
class Alike:
    def load(self, key, more=0, *, late, sure=1): ...
class Open:
    def load(self, key, **options): ...
class Other:
    def load(self, path, *, late): ...
class Eager:
    def load(self, key, more, *, late): ...
class Short:
    def load(self, key): ...
class Value:
    @property
    def load(self): ...
class Heir(Other):
    def load(self, path, *, late): ...
"""
    trees = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert sorted(meanings(trees)["load"]) == ["Eager", "Other", "Short", "Value"]


def test_a_class_lives_in_one_file() -> None:
    """A base with one subclass, in another file, is a class that was cut in two."""
    trees = modules()
    classes = {
        node.name: (name, node)
        for name, path in trees.items()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    }
    subclasses: dict[str, list[str]] = {}
    for name, node in classes.values():
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes:
                subclasses.setdefault(base.id, []).append(f"{name}.{node.name}")
    bases = {id(base) for _, node in classes.values() for base in node.bases}
    used = {
        node.id if isinstance(node, ast.Name) else node.value
        for path in trees.values()
        for node in nodes(path)
        if isinstance(node, ast.Name | ast.Constant) and id(node) not in bases
    }
    for base, found in subclasses.items():
        home, node = classes[base]
        alone = len(found) == 1 and not found[0].startswith(f"{home}.")
        protocol = "Protocol" in map(ast.unparse, node.bases)
        assert not alone or protocol or base in used, (
            f"{home}.{base} is only what {found[0]} begins with"
        )


def test_public_names() -> None:
    public = flowkv.__all__
    # Constants, classes, then functions: the order that ruff's RUF022 keeps.
    kinds = sorted(set(public), key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n))
    assert list(public) == kinds, "__all__ is sorted, each name once"
    assert not [n for n in public if not hasattr(flowkv, n)]
    assert set(public) <= set(dir(flowkv))


@pytest.mark.parametrize("module", ["flowkv", "flowkv.cli.command", "flowkv.demo.run"])
def test_import_does_no_work(module: str) -> None:
    heavy = ["torch", "transformers", "numba", "triton", "rich"]
    program = f"import sys, {module}; print(*(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == ""


IMPORTS = """
import importlib, os, sys, torch, transformers, numba, flowkv
for module in sys.argv[1:]:
    before = len(os.listdir("/proc/self/task"))
    try:
        importlib.import_module(module)
    except (ImportError, flowkv.FlowKVError):  # of an engine that is not installed
        continue
    if len(os.listdir("/proc/self/task")) > before:
        print(module)
"""


LEFT_OUT = "__main__", ".mooncake"  # Mooncake has threads of its own


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_imports_start_no_thread() -> None:
    """After threads of OpenMP began, a process that is forked waits in torch without end."""
    files = sorted(PACKAGE.rglob("*.py"))
    modules = [name(path).removesuffix(".py").replace("/", ".") for path in files]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *(m for m in modules if not m.endswith(LEFT_OUT))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_helpers_skip_whole_modules_too() -> None:
    """Whoever calls them may do so while a module is collected, where a bare skip is an error."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name.startswith("test_"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and dotted(node.func) == "pytest.skip":
                allowed = [k for k in node.keywords if k.arg == "allow_module_level"]
                assert allowed, f"{name(path)}:{node.lineno} skips without allow_module_level"


def test_public_packages_say_what_they_are() -> None:
    for init in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(parsed(init)), f"{name(init)} has no docstring"
    assert (PACKAGE / "py.typed").is_file()


def test_dev_extra_and_dev_group_are_one_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    extra = project["project"]["optional-dependencies"]["dev"]
    assert sorted(extra) == sorted(
        [
            "flowkv[hf,cli,report,aead,object,redis,metrics,otel,events]",
            *groups["lint"],
            *groups["test"],
            *groups["servers"],
        ]
    )


def test_fast_and_thorough_tests_are_all_tests() -> None:
    for listed in (conftest.THOROUGH, conftest.WHOLE_PAGES):
        assert all((ROOT / "tests" / path).is_file() for path in listed)
        assert len(set(listed)) == len(listed)
    for path, _, function in (one.partition("::") for one in conftest.SAMPLED):
        assert f"def {function}(" in (ROOT / "tests" / path).read_text()
        cases = [conftest.left_out(f"tests/{path}::{function}[{n}]") for n in range(40)]
        assert {False, True} == set(cases) and not conftest.left_out(f"tests/{path}::other[0]")
    usual = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert usual["addopts"][-1] == command.SETS["--all"]
    assert command.SETS[""] == f"{command.USUAL} and not thorough"
    assert command.SETS["--thorough"] == f"{command.USUAL} and thorough"
    assert "python -m tests --thorough" in (ROOT / ".ci" / "run").read_text()
    assert "python -m tests --all" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "chosen", "rest", "stages"),
    [
        ([], "", [f"--deselect={path}" for path in command.HOUSE], 6),
        (["-k", "x"], "", ["-k", "x"], 5),
        (["--all"], "--all", [f"--deselect={path}" for path in command.HOUSE], 6),
        (["tests/core", "--thorough"], "--thorough", ["tests/core"], 1),
    ],
)
def test_the_test_command_runs_what_it_is_asked_for(
    words: list[str], chosen: str, rest: list[str], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(command, "run", lambda name, line, quiet: ran.append(line))
    command.main(words)
    assert len(ran) == stages
    assert ran[-1] == [*command.PYTEST, "-m", command.SETS[chosen], *rest]
    assert (command.TYPES in ran) == (chosen != "--thorough")
    house = [*command.PYTEST, "-m", command.SETS[chosen], *command.HOUSE]
    assert (house in ran) == (stages == 6)
    assert all((ROOT / path.split("::")[0]).exists() for path in command.HOUSE)
    assert f"def {command.HOUSE[0].split('::')[1]}(" in (ROOT / "tests" / "test_cli.py").read_text()


def test_a_stage_that_fails_ends_what_runs_beside_it(capfd: pytest.CaptureFixture[str]) -> None:
    python = [sys.executable, "-c"]
    started = time.monotonic()
    with (
        pytest.raises(SystemExit) as ended,
        command.beside("types", [*python, "import time; time.sleep(600)"]),
    ):
        while not command.RUNNING:
            time.sleep(0.01)
        command.run("style", [*python, "print('why'); raise SystemExit(3)"], quiet=True)
    assert ended.value.code == 3 and time.monotonic() - started < 300
    found = capfd.readouterr()
    assert "why" in found.err and not command.RUNNING
    assert [line.split()[:2] for line in found.out.splitlines()] == [
        ["style", "FAILED"],
        ["types", "ended"],
    ]


def test_what_runs_beside_others_fails_with_its_output(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(SystemExit),
        command.beside(
            "types", [sys.executable, "-c", "print('why'); raise SystemExit(1)"]
        ) as types,
    ):
        types()
    assert "why" in capfd.readouterr().err


def test_a_failure_is_shown_when_it_comes() -> None:
    lines: list[str] = []
    screen = SimpleNamespace(ensure_newline=lambda: None, write_line=lines.append)
    plugins = SimpleNamespace(get_plugin={"terminalreporter": screen}.get)
    shown = conftest.Failures(SimpleNamespace(pluginmanager=plugins))  # type: ignore[arg-type]
    shown.pytest_runtest_logreport(SimpleNamespace(failed=False))  # type: ignore[arg-type]
    assert not lines
    report = SimpleNamespace(failed=True, nodeid="tests/test_x.py::test", longreprtext="why")
    shown.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    assert lines == ["FAILED tests/test_x.py::test", "why"]


def test_files_that_a_mark_leaves_out_are_not_imported() -> None:
    def left(path: str, chosen: str) -> bool:
        config = SimpleNamespace(option=SimpleNamespace(markexpr=command.SETS[chosen]), args=[])
        config.getoption = lambda name: "1/1"
        return bool(conftest.pytest_ignore_collect(ROOT / "tests" / path, config))  # type: ignore[arg-type]

    some = conftest.THOROUGH[0]
    assert left(some, "") and not left(some, "--all") and not left(some, "--thorough")
    assert left("core/test_keys.py", "--thorough") and not left("core/test_keys.py", "")
    assert not left("conftest.py", "--thorough") and not left("core", "--thorough")


def test_parts_of_measured_files_take_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {f"{room}/test_{n}.py": [n % 13, n % 7] for room in "ab" for n in range(60)}
    monkeypatch.setattr(conftest, "read_seconds", lambda: seconds)
    conftest.parts_of.cache_clear()
    for chosen, among in (("", ["tests/a", "tests/b/test_9.py::test"]), ("--thorough", ["tests"])):
        option = SimpleNamespace(markexpr=command.SETS[chosen])
        config: Any = SimpleNamespace(option=option, args=among, getoption=lambda _: "2/3")
        takes = [*conftest.BESIDE] if chosen else [0.0] * 3
        for path, row in seconds.items():
            part = conftest.part_of(conftest.TESTS / path, config)
            asked = chosen or path.startswith("a") or path == "b/test_9.py"
            assert (part is not None) == bool(asked and row[bool(chosen)])
            takes[(part or 1) - 1] += row[bool(chosen)] if part else 0
        assert max(takes) - min(takes) <= 1
    conftest.parts_of.cache_clear()


def test_parts_are_all_tests_and_share_what_is_made_once() -> None:
    seeds = SimpleNamespace(scope="function", baseid="tests")

    def item(name: str, scope: str) -> Any:
        path = name.split("::", maxsplit=1)[0]
        fixtures = {"made": [SimpleNamespace(scope=scope, baseid=path)], "seeds": [seeds]}
        return SimpleNamespace(nodeid=name, _fixtureinfo=SimpleNamespace(name2fixturedefs=fixtures))

    names = [f"tests/{file}.py::test[{n}]" for file in "ab" for n in range(100)]
    for parts in (1, 2, 3, 7):
        alone = [conftest.drawn_part_of(item(name, "function"), parts) for name in names]
        assert set(alone) == set(range(1, parts + 1))
        for scope in ("module", "session"):
            together = [conftest.drawn_part_of(item(name, scope), parts) for name in names]
            assert len(set(together[:100])) == len(set(together[100:])) == 1


def test_readme_commands_are_single_lines() -> None:
    readme = (ROOT / "README.md").read_text()
    for marker in ("demo-command", "test-command"):
        (command,) = re.findall(rf"<!-- {marker} -->\n+```[a-z]*\n(.*?)\n```", readme, re.DOTALL)
        assert "\n" not in command
        assert "constraints.txt" in command


TESTS = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "inside.py"]


def test_internals_are_named_in_one_place() -> None:
    """What is in no `__all__` is imported from `tests.inside`, so that a move changes one file."""
    wanted, found = re.compile(r"^\s*from flowkv\.", re.MULTILINE), []
    for test in TESTS:
        if "foreign" in test.parts or not wanted.search(test.read_text()):
            continue
        for node in nodes(test):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flowkv."):
                offered = getattr(importlib.import_module(str(node.module)), "__all__", ())
                hidden = [a.name for a in node.names if a.name not in offered]
                found += [f"{name(test)}: {node.module} does not offer {one}" for one in hidden]
    assert not found


def test_what_tests_look_at_is_there() -> None:
    """Modules of optional libraries are read where these are missing, as on a fresh machine."""
    for shown, (module, there) in inside._PLACES.items():
        try:
            getattr(inside, shown)
        except (MissingDependencyError, MissingLibraryError):
            home = ROOT.joinpath(*module.split("."))
            if not (home / f"{there}.py").is_file():
                text = home.with_suffix(".py").read_text()
                assert re.search(rf"^(class|def) {there}\b", text, re.MULTILINE), shown


def code_lines(source: Path) -> int:
    """Return the lines of a file that are neither blank, comments nor docstrings."""
    documented = set[int]()
    for node in nodes(source):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            documented |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines = enumerate(source.read_text().splitlines(), 1)
    return sum(
        n not in documented and bool(line.strip()) and not line.lstrip().startswith("#")
        for n, line in lines
    )


def test_the_package_does_not_grow() -> None:
    """Hold the total by the last line of `lines.txt`: another line there says why it changes."""
    total = sum(map(code_lines, SOURCES))
    *_, last = (ROOT / "tests" / "lines.txt").read_text().splitlines()
    most = int(last.split()[0])
    assert total <= most, f"{total} code lines: take some out, or say why in tests/lines.txt"
    assert total > most - 300, f"{total} code lines: hold that by a line in tests/lines.txt"
