"""The wheel and the sdist as a stranger has them: built, installed outside the clone, and used."""

from __future__ import annotations

import ast
import email
import email.message
import fcntl
import os
import re
import stat
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import flowkv
from tests.test_docs import DOCS, ROOT, blocks
from tests.test_testing import CHECK, POLICY

EXTRAS = "hf,cli,report,testing"
SMALL = "--context 160 --turns 2 --rows 1 --repeats 1 --max-new-tokens 4".split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

TYPED = """
from typing import Any, assert_type

import torch

import flowkv
from flowkv.core.errors import ConfigError
from flowkv.kernels import checksum
from flowkv.policy.by_score import ByScore
from flowkv.sim import Result, generate, replay
from flowkv.testing import MemoryTier


class Oldest(ByScore):
    name = "oldest"


def serve(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    kv = flowkv.attach(model, host="1GiB", disk="./kv:1GiB", policy=Oldest)
    assert_type(kv, flowkv.KV)
    assert_type(kv.stats(), dict[str, Any])
    assert_type(kv.metrics.prometheus(), str)
    with kv.open(prompt, tenant="a") as seq:
        assert_type(seq, flowkv.Sequence)
        assert_type(seq.length, int)
    with flowkv.Engine(model, kv, max_rows=4) as engine:
        answer = engine.submit(prompt, max_new_tokens=3)
        assert_type(answer, flowkv.Answer)
        assert_type(answer.result(), flowkv.Completion)
        return answer.result().tokens


tier: flowkv.Tier = MemoryTier(1 << 20)
geometry = flowkv.Geometry.uniform(layers=1, kv_heads=1, head_dim=8)
assert_type(geometry, flowkv.Geometry)
assert_type(checksum(torch.zeros(2, dtype=torch.int32), 2), torch.Tensor)
try:
    kv = flowkv.KV(geometry, tiers=[tier])
except ConfigError as error:
    print(error)
"""

WRONG = """
import flowkv
from flowkv.kernels import checksum

flowkv.KV("geometry")  # wrong
flowkv.LayerGroup(layers="all")  # wrong
flowkv.Geometry.uniform(layers=1, kv_heads=1, head_dim=8).grups  # wrong
flowkv.Request(prompt=[1], max_new_tokens="3")  # wrong
checksum(3)  # wrong
tier: flowkv.Tier = object()  # wrong
"""


class Stranger:
    """An environment in a directory of its own, and a home that was empty.

    Args:
        place: The directory.
    """

    def __init__(self, place: Path) -> None:
        self.work, self.home, self.prefix = place / "work", place / "home", place / "env"
        self.bin = self.prefix / "bin"
        ours = ("PYTHON", "XDG_", "NUMBA_", "FLOWKV_", "VIRTUAL_ENV", "COVERAGE", "PYTEST")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.environment |= {"HOME": str(self.home), "PATH": f"{self.bin}:{os.environ['PATH']}"}

    @property
    def packages(self) -> Path:
        """Where packages are installed."""
        (found,) = self.prefix.glob("lib/python*/site-packages")
        return found

    def run(self, *command: str | Path, code: int = 0, **environment: str) -> str:
        """What a command prints, which ends as it should; `environment` is added to its own."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.work,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == code, done.stdout[-4000:]
        return done.stdout

    def make(self, *words: str | Path) -> None:
        """Makes it, and has pip install these."""
        self.work.mkdir(parents=True)
        self.home.mkdir()
        venv.create(self.prefix, with_pip=True)
        self.install("-c", ROOT / "constraints.txt", *words)

    def install(self, *words: str | Path) -> None:
        """Runs pip, with the cache and the configuration of who tests."""
        self.run(self.bin / "pip", "install", "-q", *words, HOME=os.environ.get("HOME", ""))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all workers of this run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def once(place: Path, make: Callable[[Path], None]) -> Path:
    """A directory that the first who asks for it fills; the others wait."""
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.mkdir()
            make(place)
            (place / "made").touch()
    assert (place / "made").exists(), "who made it failed"
    return place


def build(place: Path) -> None:
    tool = [sys.executable, "-m", "build", "--outdir", str(place), str(ROOT)]
    done = subprocess.run(tool, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def artifacts(shared: Path) -> dict[str, Path]:
    out = once(shared / "artifacts", build)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="session")
def wheel(artifacts: dict[str, Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(artifacts["wheel"])


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(wheel.read(name).decode())


@pytest.fixture(scope="session")
def stranger(artifacts: dict[str, Path], shared: Path) -> Stranger:
    """Who installed the wheel, with all that it needs."""

    def make(place: Path) -> None:
        Stranger(place).make(f"{artifacts['wheel']}[{EXTRAS}]")

    return Stranger(once(shared / "from-wheel", make))


# ---- what is in them


def test_the_wheel_is_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    kept = {"__pycache__", ".DS_Store"}
    files = [p for p in (ROOT / "flowkv").rglob("*") if p.is_file() and not kept & set(p.parts)]
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert there == {path.relative_to(ROOT).as_posix() for path in files}
    assert "flowkv/py.typed" in there
    weights = {one.filename: one.compress_size for one in wheel.infolist()}
    assert 1 << 20 < weights.pop("flowkv/data/tiny/model.safetensors") < 2 << 20
    assert sum(weights.values()) < 3 << 20


def test_one_version_is_told_everywhere() -> None:
    version, text = PROJECT["version"], Path.read_text
    assert flowkv.__version__ == version
    assert f"\nversion: {version}\n" in text(ROOT / "CITATION.cff")
    _, released, *_ = re.findall(r"^## \[(.+?)\]", text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert released == version
    minor = version.rpartition(".")[0]
    assert text(DOCS / "whats-new.md").startswith(f"# What {minor} brings")
    pages = [ROOT / "README.md", DOCS / "install.md", DOCS / "quickstart.md"]
    pages += [DOCS / "guides" / f"{engine}.md" for engine in ("vllm", "lmcache", "sglang")]
    told = [re.findall(r"flowkv-([\d.]+)-py3", text(page)) for page in pages]
    assert told == [[version]] * 6, "the package index has no flowkv yet"
    flow = text(ROOT / ".github" / "workflows" / "release.yml")
    assert "flowkv.__version__" in flow and "gh release create" in flow
    assert 'mike deploy --push --update-aliases "${GITHUB_REF_NAME#v}" latest' in flow
    site = text(ROOT / "mkdocs.yml")
    assert f"\ncopyright: FlowKV {version}\n" in site and "version: { provider: mike }" in site


def test_no_file_of_it_imports_what_it_lacks(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        for node in ast.walk(ast.parse(wheel.read(name))) if name.endswith(".py") else ():
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert module.partition(".")[0] not in {"bench", "tests", "conftest"}, name


def test_an_index_can_show_it(wheel: zipfile.ZipFile) -> None:
    told = metadata(wheel)
    for field in ("Summary", "Keywords", "License-Expression", "License-File", "Author"):
        assert told[field], field
    assert told["Requires-Python"] == PROJECT["requires-python"]
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload() == (ROOT / "README.md").read_text()
    assert set(told.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    classifiers = told.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not any(text.startswith("License ::") for text in classifiers)  # the expression says it


def test_the_sdist_has_what_its_own_tests_need(artifacts: dict[str, Path]) -> None:
    with tarfile.open(artifacts["sdist"]) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no clone: what belongs to it is not known")
    missing = set(listed.stdout.splitlines()) - there
    assert {path for path in missing if not path.startswith(".")} == set()


# ---- used


@pytest.fixture(scope="session", params=["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
def installed(
    request: pytest.FixtureRequest, artifacts: dict[str, Path], stranger: Stranger, shared: Path
) -> Stranger:
    """Either; what the sdist needs besides is that of the other environment."""

    def make(place: Path) -> None:
        made = Stranger(place)
        made.make("--no-deps", artifacts["sdist"])
        (made.packages / "others.pth").write_text(f"{stranger.packages}\n")

    return stranger if request.param == "wheel" else Stranger(once(shared / "from-sdist", make))


def test_it_is_what_was_installed(installed: Stranger) -> None:
    said = installed.run(installed.bin / "python", "-c", "import flowkv; print(flowkv.__file__)")
    assert Path(said.strip()) == installed.packages / "flowkv" / "__init__.py"
    assert installed.run(installed.bin / "flowkv", "--version") == f"flowkv {PROJECT['version']}\n"


def test_the_demo(installed: Stranger) -> None:
    said = installed.run(installed.bin / "flowkv", "demo", *SMALL)
    assert "All answers are identical to those without FlowKV." in said


def test_the_quickstart(installed: Stranger) -> None:
    page = DOCS / "quickstart.md"
    program = "\n".join(block.code for block in blocks(page, page.read_text()) if block.runs)
    (installed.work / "quickstart.py").write_text(program)
    installed.run(installed.bin / "python", "-W", "error", "quickstart.py")


def test_a_policy_of_ones_own(installed: Stranger) -> None:
    (installed.work / "tiny_policy.py").write_text(POLICY)
    (installed.work / "check.py").write_text(CHECK)
    assert installed.run(installed.bin / "python", "check.py").endswith("checked\n")


def test_compiled_code_lies_in_the_users_own_directory(installed: Stranger) -> None:
    call = "_split(*[np.zeros(2, np.uint8)] * 3)"
    program = f"import numpy as np\nfrom flowkv.tiers.lossless import _split\n{call}"
    python = installed.bin / "python"
    installed.run(python, "-c", program)
    compiled = installed.home / ".cache" / "flowkv" / "compiled"
    assert list(compiled.rglob("*.nbi"))
    assert not list(installed.prefix.rglob("*.nb[ic]"))
    for path in (compiled, compiled.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700

    def ours() -> dict[Path, int]:  # processes of lowest priority may compile others meanwhile
        return {path: path.stat().st_mtime_ns for path in compiled.rglob("lossless*")}

    before = ours()
    installed.run(python, "-c", program, HOME="/dev/null")
    assert before and ours() == before


# ---- types


def mypy(stranger: Stranger, name: str, code: int) -> str:
    python = stranger.bin / "python"
    tool = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
    return stranger.run(*tool, "--cache-dir", stranger.home / "mypy", name, code=code)


def pyright(stranger: Stranger, name: str, code: int) -> str:
    tool = [sys.executable, "-m", "pyright"]
    try:  # the package brings the tool by npm, when it is first used
        subprocess.run([*tool, "--version"], check=True, capture_output=True, timeout=300)
    except (subprocess.SubprocessError, OSError):
        pytest.skip("NOT TESTED: types under pyright, which cannot be had here (it needs Node.js)")
    home = os.environ.get("HOME", "")
    return stranger.run(*tool, "--pythonpath", stranger.bin / "python", name, code=code, HOME=home)


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_the_types_that_are_shipped(
    stranger: Stranger, checker: Callable[[Stranger, str, int], str]
) -> None:
    (stranger.work / "typed.py").write_text(TYPED)
    checker(stranger, "typed.py", 0)
    (stranger.work / "wrong.py").write_text(WRONG)
    told = checker(stranger, "wrong.py", 1)
    lines = {int(number) for number in re.findall(r"wrong\.py:(\d+)", told)}
    assert lines == {n for n, line in enumerate(WRONG.splitlines(), 1) if "# wrong" in line}, told
