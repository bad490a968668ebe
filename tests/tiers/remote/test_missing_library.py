"""A wheel without the system's libraries: a skip, or an error, that says which package helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inside import errors

ROOT = Path(__file__).resolve().parents[3]
SAYS = "libibverbs.so.1: cannot open shared object file: No such file or directory"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Where a Mooncake lies that the system's loader does not load."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mooncake_master").touch()
    (package / "store.py").write_text(f"raise ImportError({SAYS!r})\n")
    return tmp_path


def run(wheel: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(wheel), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_the_tests_of_mooncake_are_skipped(wheel: Path) -> None:
    module = Path(__file__).with_name("test_mooncake.py")
    done = run(wheel, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(module))
    assert done.returncode in (0, 5), done.stdout + done.stderr
    assert "1 skipped" in done.stdout and "error" not in done.stdout.partition("[1]")[0].lower()
    assert SAYS in done.stdout and "apt-get install lib" in done.stdout


def test_the_tier_says_which_package_helps(wheel: Path) -> None:
    program = "from flowkv.tiers import open_tier; open_tier('mooncake', path='mooncake://h')"
    done = run(wheel, "-c", program)
    said = done.stderr.strip().rpartition("\n")[2]
    assert "MissingLibraryError" in said and SAYS in said and "apt-get install lib" in said
    assert "pip install" not in said


def test_libraries_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors.missing(["libc.so.6"]) == []
    assert errors.missing(["libc.so.6", "libflowkv-none.so.1"]) == ["libflowkv-none.so.1"]
    assert errors.remedy(["libnuma.so.1", "libcurl.so.4"]) == "apt-get install libnuma1 libcurl4"
