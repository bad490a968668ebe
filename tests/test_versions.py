"""The versions that are promised, tested and shown are the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import versions
from tests.test_docs import DOCS, ROOT


def test_the_oldest_are_the_lower_bounds() -> None:
    pins = dict(pin.split("==") for pin in versions.SETS["oldest"].pins)
    assert {"torch", "numba", "transformers", "msgspec", "hypothesis"} <= pins.keys()
    readme = (ROOT / "README.md").read_text()
    assert f"torch {pins['torch']} or newer" in readme
    assert f"transformers {pins['transformers']} to" in readme
    assert min(one.python for one in versions.SETS.values()) in readme


def test_the_page_shows_every_set() -> None:
    shown = re.findall(r"^\| ([a-z][\w.-]*) \| 3\.\d+", (DOCS / "install.md").read_text(), re.M)
    assert shown == list(versions.SETS)


def test_the_smoke_set_is_there() -> None:
    for path in versions.SMOKE:
        assert (ROOT / re.sub(r"::.*", "", path)).exists()
    named = re.findall(r"docs/[\w/-]+\.md|tests/policy/[\w/]+\.py", " ".join(versions.SMOKE))
    text = "".join((ROOT / path).read_text() for path in named)
    for check in ("policy", "tier", "codec", "scheduler", "restore_policy"):
        assert f"check_{check}(" in text


def test_pins_are_what_pip_reads() -> None:
    command = [sys.executable, "-m", "tests.versions", "--pins", "oldest"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == list(versions.SETS["oldest"].pins)


def test_what_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.shutil, "which", lambda name: None)
    assert "not tested: no Python 3.14 here" in versions.row("newest-3.14", tmp_path)
