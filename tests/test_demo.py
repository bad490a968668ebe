"""The demo: its prompts, what its figures amount to, and the whole of it, small."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path

import msgspec
import pytest

from flowkv import cli
from tests.inside import (
    ConfigError,
    DemoCase,
    DemoPlan,
    DemoSizes,
    Findings,
    Inspection,
    RestoreEnded,
    Sample,
    Timeline,
    WatchedRestore,
    build_workload,
    demo_findings,
    run,
    summarise,
)
from tests.observe.chrome import read_chrome

SMALL = DemoSizes(context=384, turns=3, rows=2, answer=8)


def encode(text: str) -> list[int]:
    """Bytes after a token that begins every text, as many tokenizers have one."""
    return [256, *text.encode()]


# ---- prompts


def test_prompts_have_their_sizes() -> None:
    work = build_workload(encode, SMALL)
    talk = len(work.opening) + sum(len(q) + SMALL.answer for q in work.questions)
    assert talk == SMALL.context
    assert len(work.questions) == SMALL.turns - 1
    assert {len(row) for row in work.batch} == {SMALL.shared + SMALL.ending}
    assert [len(rows[0]) for rows in work.warm_up] == [SMALL.context, len(work.batch[0])]


def test_only_the_batch_shares_its_beginning() -> None:
    work = build_workload(encode, SMALL)
    first, second = work.batch
    assert first[: SMALL.shared] == second[: SMALL.shared]
    assert first[SMALL.shared :] != second[SMALL.shared :]
    starts = [work.opening, work.batch[0], *(rows[0] for rows in work.warm_up)]
    assert len({tuple(start[:64]) for start in starts}) == len(starts)


def test_no_text_begins_in_the_middle() -> None:
    work = build_workload(encode, SMALL)
    parts = [work.opening, *work.questions, *work.batch]
    assert not any(256 in part for part in parts)


def test_prompts_are_the_same_in_both_processes() -> None:
    assert build_workload(encode, SMALL) == build_workload(encode, SMALL)


def chat(said: list[dict[str, str]]) -> str:
    turns = [f"<{one['role']}>{one['content'].strip()}</>" for one in said]
    return "".join(turns) + "<assistant>"


def test_a_model_that_chats_is_asked_about_a_page() -> None:
    sizes = DemoSizes(context=1200, turns=3, rows=2, answer=8)
    work = build_workload(encode, sizes, chat=chat)
    opening = bytes(work.opening).decode()
    assert opening.startswith("<user>---\nlicense") and "byte-level Llama" in opening
    assert opening.endswith(f"\n\n{work.asked[0]}</><assistant>")
    follow = [bytes(question).decode() for question in work.questions]
    assert follow == [f"</><user>{said}</><assistant>" for said in work.asked[1:3]]
    talk = len(work.opening) + sum(len(q) + sizes.answer for q in work.questions)
    assert talk == sizes.context == len(work.warm_up[0][0])
    rows = [bytes(row).decode() for row in work.batch]
    assert len({len(row) for row in rows}) == 1 and opening[:64] not in rows[0]
    for row, said in zip(rows, work.asked[3:], strict=True):
        assert row.endswith(f"\n{said}</><assistant>") and "byte-level Llama" in row
    assert [len(row) for row in work.warm_up[1]] == [len(row) for row in work.batch]
    with pytest.raises(ConfigError, match="--context"):
        build_workload(encode, sizes, chat=lambda said: 1200 * "!" + chat(said))


@pytest.mark.parametrize(
    ("sizes", "most", "complaint"),
    [
        (DemoSizes(context=4096, answer=24), 4096, "--context 4072"),
        (DemoSizes(context=64, turns=9, answer=24), None, "too short for 9 turns"),
    ],
)
def test_sizes_that_do_not_fit(sizes: DemoSizes, most: int | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_workload(encode, sizes, most_tokens=most)


# ---- figures


def sample(way: str, case: str, ttft_s: float, **fields: object) -> Sample:
    return Sample(way=way, case=case, ttft_s=ttft_s, tpot_s=0.01, **fields)


def findings(second: list[Sample]) -> tuple[Findings, Findings]:
    """What two processes could have found, on a conversation of one turn and a batch."""
    cases = [DemoCase("talk", [[1, 2, 3, 4]], [[5]]), DemoCase("batch", [[1, 2]] * 2, [[3], [3]])]
    machine = {"device": "cpu", "pid": 1}
    first = [sample("cold", case.name, t) for case in cases for t in (3.0, 1.0, 2.0)]
    stored = Findings(samples=first, pool_bytes=10, machine=machine, cases=cases)
    return stored, Findings(samples=second, pool_bytes=10, machine={**machine, "pid": 2})


def test_figures_are_medians_of_the_right_samples() -> None:
    disk = {"seen": 4, "reused": 3, "loaded_bytes": {"disk": 100}}
    second = [sample("recompute", "talk", 2.0), sample("disk", "talk", 0.5, **disk)]
    second += [sample("disk", "talk", 0.25, **disk), sample("disk", "batch", 0.1, **disk)]
    summary = summarise(DemoPlan(model="m", store=""), *findings(second))
    assert summary.ttft_cold_s == 2.0
    assert summary.ttft_restored_s == 0.375
    assert summary.cases[0].speedup == pytest.approx(2.0 / 0.375)
    assert (summary.tokens_reused, summary.hit_rate) == (6, 0.75), "asked once, not twice"
    assert summary.restored_from == {"disk": 200}
    assert summary.tokens_identical
    assert math.isnan(summary.ttft_again_s), "what was not measured is no figure"


def test_restores_say_how_they_came_about() -> None:
    ended = {"request": 1, "tokens": 256, "resident_tokens": 0, "computed_tokens": 64}
    ended |= {"loaded_tokens": 192, "n_bytes": 9, "started_s": 5.0, "seconds": 0.5}
    timeline = Timeline(ended=RestoreEnded(**ended), spans=())
    stored, restored = findings([sample("disk", "talk", 0.1)])
    restored.restores = [
        WatchedRestore(timeline=timeline),
        WatchedRestore(timeline=timeline, bytes_per_s=2e7),
    ]
    again = msgspec.json.decode(msgspec.json.encode(restored), type=Findings)
    assert again == restored, "the processes tell each other all of it"
    plain, slow = summarise(DemoPlan(model="m", store=""), stored, again).restores
    assert plain.startswith("measured: 256 tokens in 500.0 ms, 64 computed, 192 loaded")
    assert slow.startswith("from a disk of 20 MB/s, emulated: 256 tokens")
    sections = [demo_findings._restore(watched) for watched in again.restores]
    assert [section.source for section in sections] == ["measured", "emulated"]
    assert "20 MB/s" in sections[1].title


def test_one_wrong_token_is_told() -> None:
    summary = summarise(
        DemoPlan(model="m", store=""), *findings([sample("disk", "batch", 0.1, identical=False)])
    )
    assert not summary.tokens_identical
    assert [case.identical for case in summary.cases] == [True, False]


# ---- the whole of it

WORDS = [
    *("--context", "448", "--turns", "2", "--rows", "2"),
    *("--max-new-tokens", "8", "--repeats", "1", "--threads", "1"),
]


def test_second_process_answers_from_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, store = tmp_path / "report.html", tmp_path / "kv"
    trace = tmp_path / "trace.json"
    words = ["demo", "--json", "--store", f"{store}:256MiB", "--report", str(report)]
    words += ["--trace", str(trace), *WORDS]
    status = cli.main(words)
    out, err = capsys.readouterr()
    assert status == 0, err
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["tokens_identical"] is True
    assert found["tokens_reused"] > 448 and 0.5 < found["hit_rate"] < 1
    assert found["restored_from"]["disk"] > 0
    assert found["ttft_cold_s"] > 0 and found["ttft_restored_s"] > 0
    assert found["device"] and found["store_was_new"]
    first, second = found["processes"]
    assert len({first, second, os.getpid()}) == 3
    assert Path(found["store"]) == store and store.is_dir()
    page = Path(found["report"]).read_text()
    assert found["report"] == str(report)
    assert "measured" in page and "Tokens identical" in page
    assert "How it was restored" in page and "emulated" in page
    assert [said.partition(" ")[0] for said in found["restores"]] == ["measured:", "from"]
    assert all("computed" in said or "loaded" in said for said in found["restores"])
    restores = read_chrome(trace.read_text()).on("restores")
    assert len(restores) >= 2
    loaded = [one.args["n_bytes"] for one in restores]  # nothing where computing was faster
    assert sum(loaded) > 0 and min(loaded) >= 0
    assert "Time to the first token" in err, "people read on standard error"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[Findings, Findings]:
    """What the two processes say, which are not started."""
    pair = findings([sample("disk", "talk", 0.1)])
    machine = {
        "device_name": "x",
        "threads": 1,
        "dtype": "float32",
        "parameters": 1,
        "wait_policy": "",
    }
    pair[1].machine |= {**machine, "flowkv": "", "torch": "", "python": ""}
    phases = iter(pair)
    monkeypatch.setattr(run, "_phase", lambda *_, **__: next(phases))
    monkeypatch.setattr(run, "inspect", lambda _directory: Inspection(format=1))
    return pair


def test_wrong_tokens_fail_the_command(
    told: tuple[Findings, Findings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told[1].samples[0].identical = False
    assert cli.main(["demo", "--report", str(tmp_path / "r.html")]) == 1
    assert "Some answers differ" in capsys.readouterr().out


def test_without_the_extra_there_is_no_report(
    told: tuple[Findings, Findings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--report", str(tmp_path / "r.html")]) == 2
    assert "pip install 'flowkv[report]'" in capsys.readouterr().err
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "pip install 'flowkv[report]'" in out and "goes on without one" in out
    assert "Report:" not in out and not list(tmp_path.iterdir())


def test_what_a_process_cannot_do_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, report = str(tmp_path / "none"), str(tmp_path / "r.html")
    assert cli.main(["demo", "--model", model, "--report", report, *WORDS]) == 2
    err = capsys.readouterr().err
    assert f"there is no folder {model}" in err and "Traceback" not in err


@pytest.mark.parametrize("flag", ["--report", "--trace"])
def test_reports_need_a_place(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", flag, str(tmp_path / "none" / "r.html")]) == 2
    assert flag in capsys.readouterr().err


def test_temporary_directories_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.tempfile, "tempdir", str(tmp_path))
    with run._directories("", keep=False) as (work, store):
        assert work.is_dir() and Path(store).is_dir()
    assert not list(tmp_path.iterdir())
    with run._directories("", keep=True) as (_, store):
        pass
    assert list(tmp_path.iterdir()) == [Path(store)]
    with run._directories(str(tmp_path / "mine"), keep=False) as (_, store):
        (tmp_path / "mine").mkdir()
    assert (tmp_path / "mine").is_dir()
