"""Every generating architecture of the installed transformers, tiny and random: `pytest -m matrix`.

What cannot be built small is skipped with its reason. Takes some minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.hooks import models
from tests.hooks.compare import attached, generate, reused
from tests.hooks.matrix import KINDS, alone, judge
from tests.inside import Identity, door_of

RECORDED = Path(__file__).parents[2] / "bench" / "results" / "architectures.json"
"""Outcomes of the release in docs/guides/huggingface.md."""


def tiny(name: str) -> torch.nn.Module:
    """Return a causal model of this type with a few thousand parameters a layer."""
    return alone("causal", name)[0]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in KINDS for n in sorted(KINDS[k])])
def test_gives_its_own_tokens(kind: str, name: str) -> None:
    outcome = judge(kind, name)
    if outcome.same is None:
        pytest.skip(outcome.why)
    assert outcome.same
    served = {tuple(row[:2]) for row in json.loads(RECORDED.read_text())["rows"] if row[4]}
    assert outcome.reused or (kind, name) not in served, "it was served before"


NAMES = """
import json, sys, warnings
import torch
from tests.conftest import poisoned
warnings.simplefilter("ignore")
torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)  # as tests have
torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)
from tests.hooks.compare import attached
from tests.hooks.test_matrix import named, tiny
found = {}
for name in sys.argv[1:]:
    try:
        model = tiny(name)
        with attached(model):
            found[name] = named(model)
    except Exception:
        pass
print(json.dumps(found))
"""


def named(model: torch.nn.Module) -> str:
    """The name that pages of an attached model have; "" where attach leaves it alone."""
    door = door_of(model)
    return door.identity.namespace.digest().hex() if door is not None else ""


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest) -> dict[str, str]:
    """Names that another process gives, where sets and dicts of text have another order."""
    tests = [t for t in request.session.items if t.name.startswith("test_keeps_its_name")]
    done = subprocess.run(
        [sys.executable, "-c", NAMES, *(test.callspec.params["name"] for test in tests)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_keeps_its_name(name: str, elsewhere: dict[str, str], tmp_path: Path) -> None:
    """In another process, after it was served, and so over a store after a restart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, prompt = tiny(name), models.prompt(70)
            generate(model, input_ids=prompt)
        except Exception as error:
            pytest.skip(f"cannot be built small: {type(error).__name__}: {str(error)[:80]}")
        place, reuse = f"{tmp_path}/kv:64MiB", []
        assert Identity(model).foreign == ""
        with attached(model, disk=place) as kv:
            assert named(model) == elsewhere[name]
            for _ in range(2):
                generate(model, input_ids=prompt)
            reuse.append(reused(kv))
        again = tiny(name)
        with attached(again, disk=place) as kv:
            generate(again, input_ids=prompt)
            reuse.append(reused(kv))
        with attached(model):
            assert named(model) == elsewhere[name]
    # Behind a window, the last page may be computed rather than loaded.
    assert reuse[0] - 16 <= reuse[1] <= reuse[0] and (reuse[1] > 0) == (reuse[0] > 0)
