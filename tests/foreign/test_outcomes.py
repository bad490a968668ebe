"""What the runner reads from its plugin and from a checkout, and what it says of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.__main__ import KINDS, MODELS, Outcome, Row, go_on, read, reason, release_of


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


def test_the_test_in_which_a_run_was_stopped_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results"
    lines = [json.dumps(one) for one in ({"started": "a"}, line("a", "passed"), {"started": "b"})]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    go_on(path)
    assert list(read(path).tests) == ["a"]
    go_on(path)
    assert list(read(path).tests) == ["a"]


def test_a_failure_behind_a_pass_counts(tmp_path: Path) -> None:
    lines = line("a", "passed"), line("a", "failed", "teardown"), {"counts": {"models": 2}}
    found = written(tmp_path / "results", {"started": "a"}, *lines)
    assert (found.of("passed"), found.of("failed"), found.ended) == ([], ["a"], True)
    assert found.counts == {"models": 2}


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        *(("Skipped: hub", "hub"), ("Skipped: test is slow", "hub")),
        *(("Skipped: test requires CUDA", "gpu"), ("Skipped: test requires Timm", "package")),
        ("Skipped: Prompt learning does not support merging", "other"),
    ],
)
def test_skips_have_a_reason(why: str, kind: str) -> None:
    assert reason({"why": why}) == kind


@pytest.mark.parametrize(
    ("named", "release"), [("5.16.0.dev0", "5.17.0"), ("5.17.0", "5.17.0"), ("5.23.1", "5.23.1")]
)
def test_a_checkout_runs_with_the_nearest_release_that_is_supported(
    tmp_path: Path, named: str, release: str
) -> None:
    (tmp_path / "setup.py").write_text(f'setup(\n    version="{named}",\n)\n', encoding="utf-8")
    assert release_of(tmp_path) == release


def test_a_checkout_without_a_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("setup()", encoding="utf-8")
    with pytest.raises(SystemExit, match="give --transformers"):
        release_of(tmp_path)


def test_a_file_without_an_attached_model_says_so() -> None:
    plain = Outcome({"a": line("a", "passed"), "b": line("b", "skipped", "Skipped: hub")})
    row = Row("file", plain, Outcome({"a": line("a", "failed")}), ["a"], [], [], 1.0, 2.0)
    assert "nothing was attached" in str(row) and "new failures 1" in str(row)
    assert "only with FlowKV: a" in str(row)
    row.attached.counts.update({"models attached": 2})
    assert "2 models attached" in str(row) and "nothing was attached" not in str(row)


def test_no_file_is_run_twice() -> None:
    assert len({*MODELS, *KINDS}) == len(MODELS) + len(KINDS)
