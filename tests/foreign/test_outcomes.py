"""Outcomes that the runner reads from what its plugin wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.__main__ import Outcome, read, reason


def written(path: Path, *lines: dict[str, Any]) -> Outcome:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return read(path)


def line(test: str, outcome: str, why: str = "") -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "why": why, "s": 0.1}


def test_a_test_that_ends_the_interpreter_has_crashed_and_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results"
    found = written(path, {"started": "a"}, line("a", "passed"), {"started": "b"})
    assert (found.of("passed"), found.of("crashed"), found.ended) == (["a"], ["b"], False)
    assert read(path).of("crashed") == ["b"]
    assert [json.loads(text).get("test") for text in path.read_text().splitlines()][-1] == "b"


def test_a_failure_behind_a_pass_counts(tmp_path: Path) -> None:
    lines = line("a", "passed"), line("a", "failed", "teardown"), {"counts": {"models": 2}}
    found = written(tmp_path / "results", {"started": "a"}, *lines)
    assert (found.of("passed"), found.of("failed"), found.ended) == ([], ["a"], True)
    assert found.counts == {"models": 2}


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        ("Skipped: hub", "hub"),
        ("Skipped: test is slow", "hub"),
        ("Skipped: test requires CUDA", "gpu"),
        ("Skipped: test requires Timm", "package"),
        ("Skipped: Prompt learning does not support merging", "other"),
    ],
)
def test_skips_have_a_reason(why: str, kind: str) -> None:
    assert reason({"why": why}) == kind
