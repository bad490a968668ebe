"""The GPU bench runs without a GPU as far as it can, and the page of figures shows its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import bench_ring, render
from bench.gpu import whole

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_shows_the_results() -> None:
    written = render.files(render.load())
    stale = [path.name for path, text in written.items() if path.read_text() != text]
    assert not stale, "run python -m bench.render"
    pages = "".join(path.read_text() for path in render.PAGES)
    for name in render.BLOCKS:
        assert pages.count(f"<!-- begin: {name} -->") == pages.count(f"<!-- end: {name} -->") == 1


def test_the_first_page_has_few_figures() -> None:
    first = render.render(render.PAGES[0].read_text(), render.load())
    lines = [line for line in first.splitlines() if line.startswith("|")]
    assert 10 <= len(lines) - 2 * sum(line.startswith("|---") for line in lines) <= 15


def gpu_report() -> dict[str, Any]:
    """What a GPU might have said."""
    rivals = {
        "FlashInfer": {"us": 150.0, "times": 1.2},
        "FlashInfer, tensor cores": {"us": 137.5, "times": 1.1},
        "vLLM Triton int4": {"us": 200.0, "times": 1.6},
        "torch SDPA": {"skipped": "It would need padding or a mask."},
    }
    results = [
        {"case": "decode 32 x 4k", "us": 125.0, "of_read_ceiling": 0.913, "rivals": rivals},
        {"case": "decode 32 x 4k kv4c", "us": 40.0, "times": 3.125},
        {"case": "transcode raw to kv8", "us": 9.0, "of_copy_ceiling": 0.8},
        {"case": "transcode raw to kv4c", "us": 9.0, "of_copy_ceiling": 0.71},
        {"case": "decode 1 x 128k", "wrong": True},
        {"case": "copy pages", "failed": "OutOfMemoryError: no"},
    ]
    ceilings = {"read_bytes_s": 4.5e12, "copy_bytes_s": 4.3e12, "bfloat16_flop_s": 7.9e14}
    facts = {"device": "GPU X", "label": "measured", "date": "2026-01-02"}
    versions = {"torch": "2.13.0", "triton": "3.7.1"}
    return facts | versions | {"ceilings": ceilings, "results": results}


def test_measured_figures_stand_beside_their_targets() -> None:
    text = render.targets({"gpu-x": gpu_report()})
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "| GPU X |" in lines["what"]
    assert "91%" in lines["bf16 decode 32 x 4k, share of read bandwidth"]
    assert "3.12x" in lines["kv4c decode 32 x 4k, against bf16"]
    assert "| 1.1x |" in lines["bf16 decode 32 x 4k, against FlashInfer"], "the faster of the two"
    assert "| 5x |" in lines["kv4c decode 32 x 4k, against vLLM Triton int4"]
    assert "71%" in lines["seal and transcode, share of copy bandwidth"], "the worst of all"
    measured = sum(line.startswith("| ") for line in text.splitlines()) - 1
    missing = len(render.goals(render.Device(None))) - measured
    assert text.endswith(f"\n\n{missing} more targets are not measured yet.")
    assert "decode 1 x 128k" not in text


def test_what_was_not_measured_is_said_to_be_so() -> None:
    lines = render.targets({}).splitlines()[2:]
    assert len(lines) > 20 and all(line.endswith(f"| {render.NOT_YET} |") for line in lines)
    assert render.gpu({}) == "No GPU has run this yet."
    assert render.quality({}) == "Not measured yet."


def test_wrong_and_failed_cases_are_shown() -> None:
    text = render.gpu({"gpu-x": gpu_report()})
    assert "| decode 1 x 128k | **wrong** |" in text
    assert "| copy pages | OutOfMemoryError: no |" in text
    assert "- torch SDPA: It would need padding or a mask." in text
    assert "reads 4.50 TB/s" in text and "vLLM Triton int4 1.6x" in text


class Asked(render.Device):
    """A device that notes which cases are asked for."""

    def __init__(self, report: None) -> None:
        super().__init__(report)
        self.names, self.beginnings = set(), set()

    def of(self, case: str, name: str = "us") -> float | None:
        self.names.add(case)
        return super().of(case, name)

    def rival(self, case: str, *names: str) -> float | None:
        self.names.add(case)
        return super().rival(case, *names)

    def lowest(self, beginning: str, name: str) -> float | None:
        self.beginnings.add(beginning)
        return super().lowest(beginning, name)


def test_the_gpu_bench_walks_every_case_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    head, *rows = map(json.loads, done.stdout.splitlines())
    assert head["label"] == "dry run" and all(row["ran"] for row in rows)
    said = {row["case"] for row in rows}
    asked = Asked(None)
    render.goals(asked)
    assert asked.names <= said and len(asked.names) > 12
    assert all(any(case.startswith(x) for case in said) for x in asked.beginnings)
    assert {figure.of.split("/")[0] for figure in kernel_figures()} <= said
    assert not (tmp_path / "out").exists(), "a dry run leaves no results behind"


def kernel_figures() -> list[whole.Figure]:
    """Lines of a whole run's table about kernels alone."""
    kinds = ("_ceiling", "/times")
    return [figure for figure in whole.TABLE if figure.of.endswith(kinds)]


def test_a_case_of_the_gpu_has_one_goal() -> None:
    """The table of a whole run and the promises in the docs judge a case alike."""
    goals = {what: goal for what, goal, *_ in render.goals(render.Device(None))}
    said = {figure.what: figure.goal.removeprefix(">= ") for figure in whole.TABLE}
    for case in (whole.A, whole.B):
        share = float(said[f"{case}, of read ceiling"])
        assert goals[f"bf16 {case}, share of read bandwidth"] == f"at least {share:.0%}"
    for codec in ("kv8", "k8v4", "kv4c", "kv4h"):
        least = said[f"{whole.A} {codec}: raw over it"]
        assert goals[f"{codec} {whole.A}, against bf16"] == f"at least {least}x"


def test_moved_pages_are_judged_by_the_link() -> None:
    ways = ("pages of 2048 KiB out, of the link", "pages of 2048 KiB back, of the link")
    figures = [figure for figure in whole.TABLE if figure.what in ways]
    rows = [
        {"case": f"pages of 2048 KiB {way}", "of_link": share}
        for way, share in (("out", 0.1), ("back", 0.8))
    ]
    shown = whole.table({"results": [], "rows": rows, "parts": []})
    for figure, share in zip(figures, ("0.1", "0.8"), strict=True):
        (line,) = (line for line in shown.splitlines() if line.startswith(figure.what))
        assert figure.goal == ">= .85" and share in line.split()


@pytest.mark.timeout(1500)
def test_a_whole_run_goes_through_every_part_without_a_gpu(tmp_path: Path) -> None:
    """One command: each part comes to its end, and each line of the table finds its figures."""
    pytest.importorskip("transformers", reason="transformers is not installed here")
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.gpu", "--whole", "--dry-run", "--seconds", "1300"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (file,) = tmp_path.iterdir()
    report = json.loads(file.read_text())
    ran = {part["part"].split()[0] for part in report["parts"]}
    assert ran == set(whole.SECONDS) and report["label"] == "dry run"
    rows = report["results"] + report["rows"]
    assert not [row for row in rows if row.get("wrong") or row.get("failed")]
    cases = whole.cases_of(report)
    assert "skipped" in cases["generate_batch"]
    assert cases["attached: threads, decoding"]["samples"]["leaves"]
    wants_a_gpu = ("generate_batch", "without graphs")
    for figure in whole.TABLE:
        if figure in kernel_figures() or any(
            case in figure.of + figure.over for case in wants_a_gpu
        ):
            continue
        paths = [path for path in (figure.of, figure.over) if path]
        assert None not in [whole.found(cases, path) for path in paths], figure
    assert whole.table(report) in done.stdout


CHILD = """
import json, sys, time
def say(**fields): print(json.dumps(fields), flush=True)
print("no row at all")
say(facts={"device": "GPU X"})
for name in sys.argv[1].split(","):
    say(begin=name)
    say(part=name, row={"case": f"first of {name}"})
    if name == "plain": time.sleep(60)
    if name == "attached": sys.exit("the device is gone")
    if name == "pressure": say(part=name, failed="ValueError: no")
    say(end=name, s=0.5)
"""


def test_what_hangs_dies_or_fails_in_a_whole_run_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(whole.SECONDS, "plain", 1.0)
    child = (sys.executable, "-c", CHILD)
    run = whole.Whole(tmp_path, 30.0, dry=False, child=child)
    names = ["kernels", "plain", "attached", "pressure", "engine"]
    run._parts(names)
    report = json.loads((tmp_path / "gpu-gpu-x.json").read_text())
    assert report == run.report
    failed = {part["part"]: part.get("failed") for part in report["parts"]}
    assert list(failed) == names and failed["kernels"] is failed["engine"] is None
    assert failed["plain"] == "It was stopped after 1 s."
    assert failed["attached"] == "Exit status 1: the device is gone"
    assert failed["pressure"] == "ValueError: no"
    assert [row["case"] for row in report["results"]] == ["first of kernels"]
    assert [row["case"] for row in report["rows"]] == [f"first of {name}" for name in names[1:]]
    shown = whole.table(report)
    assert "GPU X" in shown and "attached: 0 s FAILED: Exit status 1" in shown


def test_parts_for_which_there_is_no_time_are_said_to_be_so(tmp_path: Path) -> None:
    run = whole.Whole(tmp_path, 0.0, dry=False, child=("false",))
    run._parts(["plain", "static"])
    assert [part["failed"] for part in run.report["parts"]] == ["There was no time left."] * 2
    assert len(whole.table(run.report).splitlines()) == 1 + len(whole.TABLE) + 2


def test_without_a_gpu_and_not_dry_it_says_so() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.gpu"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--dry-run" in done.stderr


def test_huge_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring bench reserves some for fio, where it may, and leaves the machine as it was."""
    file = tmp_path / "nr_hugepages"
    monkeypatch.setattr(bench_ring, "HUGE_PAGES", file)
    with bench_ring.huge_pages(16) as memory:
        assert memory == "mmap"  # not allowed
    file.write_text("3")
    with pytest.raises(ZeroDivisionError), bench_ring.huge_pages(16) as memory:
        assert (memory, file.read_text()) == ("shmhuge", "19")
        raise ZeroDivisionError
    assert file.read_text() == "3"
