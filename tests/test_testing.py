"""`flowkv.testing` as a user has it: beside the library, pytest and Hypothesis only."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""

POLICY = """
import numpy as np
from flowkv.policy.by_score import ByScore

class Frequent(ByScore):
    name = "frequent"

    def score(self, now_ns, use):
        return np.log2(1.0 + use.uses)
"""

CHECK = """
from flowkv.testing import check_policy
from tiny_policy import Frequent

check_policy(Frequent, max_examples=3, steps=10)
print("checked")
"""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def installed() -> dict[str, set[str]]:
    """Return the distributions that each module that can be imported comes from."""
    return {module: set(map(plain, named)) for module, named in packages_distributions().items()}


def modules_of(extra: str) -> set[str]:
    """What can be imported of the distributions that an extra names."""
    wanted = set()
    for line in EXTRAS[extra]:
        name = re.match(r"[\w.-]+", line)[0]
        if name == "flowkv":
            others = re.search(r"\[(.*?)\]", line)[1].split(",")
            wanted |= {module for other in others for module in modules_of(other)}
        else:
            wanted |= {module for module, named in installed().items() if plain(name) in named}
    return wanted


def run(home: Path, code: str, blocked: set[str]) -> subprocess.CompletedProcess[str]:
    (home / "tiny_policy.py").write_text(POLICY)
    program = f"blocked = {sorted(blocked)!r}\n{BLOCK}\nsys.path.insert(0, {str(home)!r})\n{code}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


def test_it_needs_pytest_and_hypothesis_of_all_that_development_needs(tmp_path: Path) -> None:
    blocked = modules_of("dev") - modules_of("testing")
    assert {"transformers", "rich", "xdist", "mypy", "redis"} <= blocked
    assert not {"hypothesis", "pytest", "flowkv", "numpy", "torch"} & blocked
    done = run(tmp_path, CHECK, blocked)
    assert (done.returncode, done.stdout) == (0, "checked\n"), done.stderr


CHECKS = "policy codec scheduler restore_policy sparsifier tier".split()


def test_the_error_names_what_is_needed(tmp_path: Path) -> None:
    code = """
for check in checks:
    try:
        exec(f"from flowkv.testing import {check}")
    except ImportError as error:
        print(check, error)
"""
    checks = [f"check_{what}" for what in CHECKS]
    done = run(tmp_path, f"checks = {checks!r}\n{code}", {"hypothesis"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("flowkv.testing needs pytest and hypothesis") == len(checks)
    assert done.stdout.count("pip install 'flowkv[testing]'") == len(checks)
    assert re.findall("^check_[a-z_]+", done.stdout, re.MULTILINE) == checks


def test_tiers_that_misbehave_need_neither(tmp_path: Path) -> None:
    code = "from flowkv.testing import FlakyTier, MemoryTier"
    done = run(tmp_path, code, {"hypothesis", "pytest"})
    assert done.returncode == 0, done.stderr


PLAIN_INSTALL = """
import importlib, pkgutil
import torch, flowkv
from flowkv.core.errors import MissingDependencyError

rooms = "core compiled kernels.cpu policy residency sim tiers cache engine observe hooks.attention"
for room in rooms.split():
    room = importlib.import_module(f"flowkv.{room}")
    for module in pkgutil.walk_packages(getattr(room, "__path__", []), f"{room.__name__}."):
        try:
            importlib.import_module(module.name)
        except MissingDependencyError:
            print("needs an extra:", module.name)
geometry = flowkv.Geometry.uniform(layers=1, kv_heads=1, head_dim=8)
try:
    secret = dict(integrity="aead", secret="ab" * 32)
    flowkv.KV(geometry, tiers=["host:1MiB", "disk:store:16MiB"], namespace="x", **secret)
except MissingDependencyError as error:
    print(error)
flowkv.KV(geometry, tiers=["host:1MiB", "disk:store:16MiB"], namespace="x").close()
"""


def test_a_plain_install_has_all_that_needs_no_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extras = {name for extra in EXTRAS for name in modules_of(extra)}
    needed = {
        module
        for line in PROJECT["dependencies"]
        for module, named in installed().items()
        if plain(re.match(r"[\w.-]+", line)[0]) in named
    }
    done = run(tmp_path, PLAIN_INSTALL, extras - needed)
    assert done.returncode == 0, done.stderr[-3000:]
    *modules, refusal = done.stdout.splitlines()
    assert "flowkv[aead]" in refusal
    assert {line.rpartition(".")[2] for line in modules} <= {
        *("objects", "redis", "mooncake", "nixl", "otel", "prometheus"),
    }
