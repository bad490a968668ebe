"""`flowkv sim`: tables, rows for scripts, refusals."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from flowkv import KV, cli
from flowkv.connect.events import EventPublisher
from flowkv.sim import generate, replay
from tests.cache.toy import PAGE, make_kv, published, simple
from tests.inside import ConfigError
from tests.report.drawn import curves
from tests.test_cli import refused


def shown(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """Run a command; return its standard output."""
    assert cli.main(words) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out


def rows(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> list[dict]:
    """Run a command with --json; return the list that it prints."""
    out = shown(capsys, *words, "--json", status=status)
    assert out.count("\n") == 1 and out.endswith("\n")
    found = json.loads(out)
    assert isinstance(found, list)
    return found


def test_sim_alone_shows_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: flowkv sim" in refused(capsys, "sim")


CHAT, AGENTS = "chat:requests=200", "agents:requests=60,seed=3"
FIELDS = {
    *("policy", "size", "pages", "prefix_hit_ratio", "closure", "load_traffic_vs_lru"),
    *("prefetch_precision", "blocks_per_s"),
}


def test_a_policy_of_a_file_is_replayed_and_drawn(capsys, tmp_path: Path) -> None:
    file, page = tmp_path / "mine.py", tmp_path / "r.html"
    file.write_text(
        "from flowkv.policy import make_policy\nclass Mine:\n"
        "    def __new__(cls): return make_policy('lru')\n"
    )
    words = [CHAT, "--policy", f"lru,{file}:Mine", "--sizes", "5%"]
    lru, mine = rows(capsys, "sim", "replay", *words, "--html", str(page))
    assert mine["policy"] == "Mine" and ">Mine<" in page.read_text()
    assert mine["prefix_hit_ratio"] == lru["prefix_hit_ratio"] > 0
    other = file.with_name("other.py")
    other.write_text(file.read_text())
    both = f"{file}:Mine,{other}:Mine,{file}:Mine"
    found = rows(capsys, "sim", "replay", CHAT, "--policy", both, "--sizes", "5%")
    assert [row["policy"] for row in found] == ["Mine", f"{other}:Mine"]
    assert "this process only" in refused(capsys, "sim", "replay", *words, "--jobs", "2")


def test_replay_gives_a_row_per_policy_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "sim", "replay", CHAT, "--policy", "lru,auto,opt", "--sizes", "1%,10%")
    assert [(row["policy"], row["size"]) for row in found] == [
        (name, size) for size in (0.01, 0.1) for name in ("lru", "auto", "opt")
    ]
    assert all(row.keys() >= FIELDS for row in found)
    for row in found:
        assert row["closure"] in {"lru": [0.0], "opt": [1.0]}.get(row["policy"], [row["closure"]])
        assert row["trace"] == CHAT and row["source"] == "simulated" and row["blocks_per_s"] > 0
    trace = generate("chat", requests=200)
    hits = replay(trace, "lru", size=0.1).prefix_hit_ratio
    assert found[3]["prefix_hit_ratio"] == hits


def test_what_the_policy_is_told_stands_in_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", "lru,opt", "--sizes", "2%", "--hints", "0.5", "--queue", "1"]
    told, bound = rows(capsys, "sim", "replay", AGENTS, *words, "--prefetch")
    assert (told["policy"], told["hints"], told["queue_s"], told["prefetch"]) == (
        "lru", 0.5, 1.0, True,
    )  # fmt: skip
    assert (bound["policy"], bound["hints"], bound["prefetch"]) == ("opt", None, False)
    assert bound["closure"] == 1.0 and bound["prefetched"] == 0


def test_the_blocks_of_a_request_may_be_held(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", "hazard,opt", "--sizes", "2%", "--held"]
    held, bound = rows(capsys, "sim", "replay", AGENTS, *words)
    trace = generate("agents", requests=60, seed=3)
    assert held["digest"] == replay(trace, "hazard", size=0.02, held=True).digest
    assert held["digest"] != replay(trace, "hazard", size=0.02).digest
    assert (held["held"], bound["held"], bound["closure"]) == (True, False, 1.0)


def test_prefetches_by_a_markov_chain_are_those_of_the_library(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "cyclic:requests=200,blocks=32,per_s=10 --policy hazard --sizes 30% --markov"
    (found,) = rows(capsys, "sim", "replay", *words.split())
    trace = generate("cyclic", requests=200, blocks=32, per_s=10)
    off, policy, markov = (
        replay(trace, "hazard", size=0.3, prefetch=wish) for wish in (False, True, "markov")
    )
    assert found["prefetch"] == "markov" and found["prefetched"] == markov.prefetched > 0
    assert found["digest"] == markov.digest != policy.digest
    assert found["prefix_hit_ratio"] > off.prefix_hit_ratio
    with pytest.raises(ConfigError, match="learned"):
        replay(trace, "lru", size=0.3, prefetch="psychic")


def test_replay_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "sim", "replay", AGENTS, "--sizes", "5%", "--hints", "0.5")
    assert "lru+hints" in out and "auto+hints" in out and "opt+" not in out
    assert "60 requests" in out and "Simulated." in out


def test_sweep_walks_traces_and_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.html"
    words = [CHAT, AGENTS, CHAT, "--sizes", "2%,20%", "--policy", "lru,opt", "--html", str(file)]
    found = rows(capsys, "sim", "sweep", *words)
    assert [row["trace"] for row in found] == [CHAT] * 4 + [AGENTS] * 4
    page = file.read_text()
    assert f"<h2>{CHAT}</h2>" in page and f"<h2>{AGENTS}</h2>" in page
    assert curves(page) == 4


def test_replays_in_other_processes_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", "replay", AGENTS, "--sizes", "2%,20%", "--policy", "lru"]
    one, two = rows(capsys, *words), rows(capsys, *words, "--jobs", "2")
    assert [row["digest"] for row in one] == [row["digest"] for row in two]


def test_tiers_and_hardware_add_times_and_prices(capsys: pytest.CaptureFixture[str]) -> None:
    words = [AGENTS, "--sizes", "5%", "--tiers", "dram:20%,disk:100%:kv8", "--hardware", "h200"]
    found = rows(capsys, "sim", "replay", *words)
    assert [row["policy"] for row in found] == ["lru", "auto"], "no optimum of several places"
    for row in found:
        assert row["hardware"] == "h200" and row["closure"] is None
        parts = sum(row[f"hit_ratio_{place}"] for place in ("hbm", "dram", "disk"))
        assert parts == pytest.approx(row["prefix_hit_ratio"])
        assert 0 < row["ttft_ms_mean"] < row["ttft_ms_mean_without"]
    out = shown(capsys, "sim", "replay", AGENTS, "--sizes", "5%", "--hardware", "laptop")
    assert "from hbm" in out and "$/Mtok" in out and "opt" in out


def test_one_report_compares_room_tiers_and_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.html"
    words = [AGENTS, "--policy", "lru,auto", "--sizes", "5%,10%", "--tiers", "none"]
    words += ["--tiers", "disk:100%:kv8", "--html", str(file)]
    found = rows(capsys, "sim", "replay", *words)
    assert [(row["policy"], row["tiers"], row["size"]) for row in found] == [
        (name, tiers, size)
        for tiers in ("", "disk:100%:kv8")
        for size in (0.05, 0.1)
        for name in ("lru", "auto")
    ]
    assert all(row["hardware"] == "h100" for row in found), "times are comparable"
    alone, beside = found[:4], found[4:]
    for one, other in zip(alone, beside, strict=True):
        assert "hit_ratio_disk" not in one and other["hit_ratio_disk"] > 0
        assert other["prefix_hit_ratio"] > one["prefix_hit_ratio"]
        assert other["ttft_ms_mean"] < one["ttft_ms_mean"]
    page = file.read_text()
    for row in found:
        assert (
            f"{row['ttft_ms_mean']:.1f}" in page and f"{100 * row['prefix_hit_ratio']:.2f}" in page
        )
    for row in beside:
        assert f"{row['read_gib_disk']:.1f}" in page and row["policy"] + "+disk:100%:kv8" in page
    assert "GiB read from disk" in page and curves(page) == 4 + 1 + 4
    assert "policies at most" in refused(
        capsys, "sim", "replay", *words, *["--tiers", "disk:50%"] * 5
    )


def test_files_of_one_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / folder / "t.jsonl" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(
            '{"timestamp": 0, "hash_ids": [1, 2]}\n{"timestamp": 9, "hash_ids": [1, 2, 3]}\n'
        )
    words = ["--sizes", "50%", "--policy", "lru"]
    found = rows(capsys, "sim", "sweep", *map(str, paths), *words)
    assert [row["trace"] for row in found] == list(map(str, paths))
    (alone,) = rows(capsys, "sim", "replay", str(paths[0]), *words)
    assert alone["trace"] == "t"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chatt"], "Did you mean 'chat'?"),
        (["none.jsonl"], "the trace none.jsonl cannot be read"),
        (["chat:speed=3"], "options of 'chat': Object contains unknown field 'speed'"),
        (["chat:seed"], "Write options as seed=3"),
        (["chat", "--policy", "magic"], "no policy 'magic'. Use one of"),
        (["chat", "--policy", "none.py:Mine"], "none.py:Mine cannot be made (FileNotFoundError"),
        (["chat", "--policy", f"{__file__}:Mine"], "cannot be made (it has no Mine)"),
        (["chat", "--sizes", "much"], "no share of a trace's blocks. Use"),
        (["chat", "--sizes", "5"], "Did you mean 5%? For 5 times the blocks write 500%"),
        (["chat:requests=9", "--hints", "-1"], "hints with an error of -1.0"),
        (["chat:requests=9", "--queue", "-1"], "is no time. Use"),
        (["chat", "--html", "/none/r.html"], "no directory for /none/r.html. Make it first"),
        (["chat", "--html", "/"], "/ is a directory. Name a file in it"),
        (["chat", "--codec", "zip"], "invalid choice: 'zip'"),
        (["chat", "--prices"], "usage: flowkv sim replay"),
        (["chat", "--jobs", "0"], "no count"),
        (["chat", "--html", "r.html", "--policy", "lru," * 13], "12 policies at most"),
        (["chat:requests=9", "--hardware", "abacus"], "Use one of h100"),
        (["chat:requests=9", "--tiers", "attic:5%"], "Its places are"),
        # Before the trace is read, and before other rules and tiers are replayed.
        (["none.jsonl", "--tiers", "disk:9%", "--admit", "all,foo"], "admission 'foo'. Use one of"),
        (["none.jsonl", "--admit", "all,auto"], "'auto' without a place that lasts. Add one"),
        (
            ["none.jsonl", "--tiers", "disk:9%", "--tiers", "dram:9%", "--admit", "auto"],
            "'auto' without a place that lasts. Add one",
        ),
        (["none.jsonl", "--tiers", "disk:9%", "--tiers", "disk"], "'disk' is no tier. Write"),
    ],
)
def test_replay_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "sim", "replay", *words)


def test_a_policy_whose_file_exits_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(0)")
    said = refused(capsys, "sim", "replay", "chat", "--policy", f"{tmp_path}/ends.py:Mine")
    assert "ends.py:Mine cannot be made (SystemExit: 0)" in said


def test_characterise_prints_and_gives_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "sim", "characterise", CHAT)
    assert "hit ratio with room for everything" in out and "Working set" in out
    found = json.loads(shown(capsys, "sim", "characterise", CHAT, "--json"))
    assert (found["trace"], found["requests"]) == (CHAT, 200)
    assert found["lru"]["1.0"] == pytest.approx(found["infinite_hit_ratio"])


def test_record_writes_a_trace_that_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zmq")
    out, kv = tmp_path / "trace", make_kv(simple(), pages=512)
    with kv, EventPublisher(kv, "tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher:
        for n in range(40):
            published(kv, [n % 7, *range(3 * PAGE)])
        words = ["sim", "record", "flowkv", publisher.endpoint, "--replay", publisher.replay]
        words += ["--out", str(out), "--seconds"]
        asking = threading.Thread(target=ask_for_a_while, args=(kv,))
        asking.start()
        said = json.loads(shown(capsys, *words, "8", "--json"))
        asking.join()
    assert said["lost"] == 0 and said["requests"] >= 8
    rows = json.loads(shown(capsys, "sim", "replay", str(out), "--sizes", "50%", "--json"))
    assert {row["policy"] for row in rows} == {"lru", "auto", "opt"}


def ask_for_a_while(kv: KV) -> None:
    """Goes on as production does, while somebody comes to record it."""
    for n in range(60):
        published(kv, [100 + n, *range(PAGE)])
        time.sleep(0.1)


def test_record_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    out = ["--out", str(tmp_path / "trace")]
    here = ["sim", "record", "vllm", "tcp://127.0.0.1:1"]
    assert "Give one for each" in refused(capsys, *here, *out, "--replay", "tcp://a:1,tcp://b:2")
    assert "Choose another --out" in refused(capsys, *here, "--out", str(tmp_path))
    assert "no address" in refused(capsys, "sim", "record", "vllm", "nowhere", *out)
    assert "invalid choice" in refused(capsys, "sim", "record", "abacus", "tcp://a:1", *out)
    assert cli.main([*here, *out, "--seconds", "0.1"]) == 1
    assert "Nothing came" in capsys.readouterr().out


def test_replays_compare_rules_of_write_admission(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", "replay", "chat:requests=600", "--policy", "lru", "--sizes", "5%"]
    assert cli.main([*words, "--tiers", "disk:100%", "--admit", "all,second-touch"]) == 0
    said = capsys.readouterr().out
    assert "Writes to lasting places" in said and "lru+second-touch" in said
