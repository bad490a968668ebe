"""The `flowkv` command: results, refusals, and that nobody ever sees a traceback unasked."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import flowkv
from flowkv import FlowKVError, cli
from flowkv.data import tiny_path
from flowkv.tiers import FrameInfo, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import (
    ConfigError,
    UnsupportedModelError,
    command,
    doctor,
    errors,
    read_prompts,
    screen,
    timed_generate,
    words,
)
from tests.observe.chrome import read_chrome

ROOT = Path(__file__).resolve().parents[1]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must be refused; return what it says."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def as_json(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict:
    """Run a command with --json; return its one object."""
    assert cli.main([*words, "--json"]) == status
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and out.endswith("\n")
    assert "Traceback" not in err
    return json.loads(out)


# ---- arguments


@pytest.mark.parametrize("words", [[], ["fly"], ["demo", "--context", "many"], ["inspect"]])
def test_misuse_shows_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *words)
    assert said.startswith("usage: flowkv")
    assert "flowkv: " in said


def test_a_closed_output_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as `>&-` leaves it
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "no readable store" in capsys.readouterr().err
    sys.stdout.close()


def test_misuse_in_a_script_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no count" in as_json(capsys, "demo", "--rows", "0", status=2)["error"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"flowkv {flowkv.__version__}\n"


VERBS = ["demo", "generate", "serve", "inspect", "scrub", "doctor"]
VERBS += [f"sim {verb}" for verb in ("replay", "sweep", "characterise", "record")]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([*verb.split(), "--help"])
    assert done.value.code == 0
    assert "--json" in capsys.readouterr().out


# ---- what goes wrong


def break_doctor(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(_directory: object) -> None:
        raise error

    monkeypatch.setattr(doctor, "examine", broken)


def test_the_unexpected_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_doctor(monkeypatch, ZeroDivisionError("division by zero"))
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "flowkv: Something unexpected happened: ZeroDivisionError: division by zero."
        " Run again with --debug for details.\n"
    )
    assert cli.main(["doctor", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_known_errors_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_doctor(monkeypatch, ConfigError("this is wrong", "Do that"))
    assert refused(capsys, "doctor") == "flowkv: this is wrong. Do that.\n"
    assert as_json(capsys, "doctor", status=2) == {"error": "this is wrong. Do that."}


def test_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    break_doctor(monkeypatch, KeyboardInterrupt())
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_interruption_of_imports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "flowkv.cli.command")
    monkeypatch.setattr(sys, "meta_path", [Mock(find_spec=Mock(side_effect=KeyboardInterrupt))])
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("words", ["--help", "--version", "doctor --json"])
def test_a_full_disk_is_an_error(words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-u", "-m", "flowkv.cli", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=-1, text=True, cwd=ROOT, check=False)
    told = [" No space left " in done.stderr, "Traceback" in done.stderr]
    assert (done.returncode, *told) == (1, True, False)


def test_warnings_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with command._plain_warnings(debug=False):
            warnings.warn("the store is read only", stacklevel=1)
            warnings.warn("of no interest", FutureWarning, stacklevel=1)
    assert capsys.readouterr().err == "flowkv: note: the store is read only\n"


def test_a_reader_may_leave_early() -> None:
    program = "import sys; from flowkv.cli import main; sys.exit(main())"
    shell = f"{sys.executable} -c {program!r} doctor | true"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr


# ---- generate


@pytest.mark.usefixtures("all_is_loaded")
def test_a_second_run_reuses_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "flowkv" / "core" / "errors.py").read_text()
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text[:300]}, {"prompt": text[:300] + "# and more"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    words = ["generate", "--model", str(tiny_path()), "--prompts", str(prompts)]
    words += ["--store", f"{tmp_path / 'kv'}:64MiB", "--max-new-tokens", "6", "--threads", "1"]
    threads = torch.get_num_threads()
    try:
        first = as_json(capsys, *words)
        second = as_json(capsys, *words, "--trace", str(tmp_path / "trace.json"))
        assert cli.main(words) == 0
    finally:
        torch.set_num_threads(threads)
    assert [a["answer"] for a in first["answers"]] == [a["answer"] for a in second["answers"]]
    # All but the last token from disk, and what comes behind the answer.
    assert [a["tokens_reused"] for a in first["answers"]] == [0, 300]
    assert [a["tokens_reused"] for a in second["answers"]] == [299, 309]
    assert second["tokens_reused"] == 608 and second["hit_rate"] > 0.9
    (tier,) = second["tiers"].values()
    assert tier["kind"] == "disk" and tier["loaded_bytes"] > 0
    shown = capsys.readouterr().out
    assert "309 of 310 tokens reused" in shown and first["answers"][0]["answer"] in shown
    seen = read_chrome((tmp_path / "trace.json").read_text())
    steps = [instant for instant in seen.instants if instant.track == "steps"]
    assert len(steps) >= 2 * 6, "one for every token"


def test_prompts_of_one_call_have_one_length() -> None:
    with pytest.raises(ConfigError, match="empty or differ"):
        timed_generate(None, [[1], [1, 2]], max_new_tokens=1)
    with pytest.raises(ConfigError, match="empty or differ"):
        timed_generate(None, [[]], max_new_tokens=1)


# ---- stores


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store of three frames."""
    path = tmp_path / "kv"
    tier = DiskTier(path, 16 << 20)
    info = FrameInfo(
        *("page", 0, 0, b"layout".ljust(16), bytes(32), b"model".ljust(32)), *(0, 64, 4096)
    )
    bodies = [bytes([number]) * 8192 for number in (1, 2, 3)]
    wishes = [Store(bytes([n]) * 32, info, memoryview(body)) for n, body in enumerate(bodies)]
    tier.submit_store(wishes)
    answers = []
    while len(answers) < len(wishes):
        answers += tier.poll(1.0)
    assert {answer.outcome for answer in answers} == {Outcome.STORED}
    tier.close()
    return path


def test_inspect_counts(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "inspect", str(store))
    assert (found["frames"], found["bytes"], found["owned"]) == (3, 3 * 8192, False)
    assert found["codecs"]["raw"] == {"frames": 3, "bytes": 3 * 8192}
    assert cli.main(["inspect", str(store)]) == 0
    assert "kind page" in capsys.readouterr().out


def test_scrub_passes_what_is_sound(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "scrub", str(store))
    assert (found["frames"], found["bad"]) == (3, 0)
    assert found["bytes"] >= 3 * 8192 and found["seconds"] >= 0
    assert cli.main(["scrub", str(store)]) == 0
    assert "All are sound" in capsys.readouterr().out


@pytest.fixture
def damaged(store: Path) -> Path:
    """The store, with a flipped bit in the second frame."""
    (slab,) = store.glob("slab-*")
    data = bytearray(slab.read_bytes())
    data[data.index(b"\x02" * 8192) + 100] ^= 4
    slab.write_bytes(data)
    return store


def test_scrub_fails_on_a_flipped_bit(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "scrub", str(damaged), status=1)["bad"] == 1
    assert cli.main(["scrub", str(damaged)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_repair_drops_what_is_damaged(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "scrub", str(damaged), "--repair", status=1)
    assert (found["frames"], found["bad"], found["recovered"]) == (2, 1, 0)
    assert cli.main(["scrub", str(damaged), "--repair"]) == 0
    assert "All are sound" in capsys.readouterr().out
    owner = DiskTier(damaged, 16 << 20)
    assert cli.main(["scrub", str(damaged), "--repair"]) == 2
    owner.close()
    assert "another cache of this process owns" in capsys.readouterr().err


def test_frames_are_listed_by_model_and_dropped(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old,) = as_json(capsys, "inspect", str(store))["namespaces"]
    tier = DiskTier(store, 16 << 20)
    tier.bind(bytes(31) + b"x", "my-model@3")
    for verb in ("inspect", "scrub"):
        assert cli.main([verb, str(store)]) == 0
        assert f"{old[:16]} (unknown)" in capsys.readouterr().out
    assert cli.main(["scrub", str(store), "--drop", old[:16]]) == 2
    assert "another process owns" in capsys.readouterr().err
    tier.bind(bytes.fromhex(old), "my-model@2")
    tier.close()
    for verb in ("inspect", "scrub"):
        found = as_json(capsys, verb, str(store))
        assert found["names"][old] == "my-model@2"
        assert found["namespaces"] == {old: {"frames": 3, "bytes": 3 * 8192}}
        assert cli.main([verb, str(store)]) == 0
        assert f"{old[:16]} (my-model@2)" in capsys.readouterr().out
    assert cli.main(["scrub", str(store), "--drop", "my-model@3"]) == 2
    assert "no frames of the namespace 'my-model@3'" in capsys.readouterr().err
    assert cli.main(["scrub", str(store), "--drop", "unknown", "--repair"]) == 2
    capsys.readouterr()
    found = as_json(capsys, "scrub", str(store), "--drop", old[:16])
    assert (found["frames"], found["namespaces"]) == (3, [old])
    assert as_json(capsys, "inspect", str(store))["frames"] == 0
    assert b"\x02" * 64 not in b"".join(path.read_bytes() for path in store.glob("slab-*"))


def test_the_directory_is_named_in_full(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store)
    assert cli.main(["inspect", "."]) == 0
    assert str(store) in capsys.readouterr().out.replace("\n", "")
    assert cli.main(["inspect", ".."]) == 2
    assert ".." not in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["inspect", "scrub"])
def test_a_directory_that_is_no_store(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter.txt").write_text("Dear store")
    for place in (tmp_path, tmp_path / "none", tmp_path / "letter.txt"):
        assert str(place) in refused(capsys, verb, str(place))
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_options_of_the_server_are_not_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "serve").endswith("are required: PATH_OR_ID\n")


# ---- doctor


def test_doctor_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("torch", "numba", "C compiler", "io_uring", "disk", "locked memory"):
        assert name in out


def test_doctor_for_scripts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = as_json(capsys, "doctor", "--store", str(tmp_path / "not" / "there"))
    assert found["ok"] and found["flowkv"] == flowkv.__version__
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert by_name["processor"]["data"]["cores"] >= 1
    assert by_name["disk"]["data"]["directory"] == str(tmp_path)
    assert isinstance(by_name["io_uring"]["data"]["available"], bool)
    assert {finding["state"] for finding in found["findings"]} <= {"ok", "note", "warn", "bad"}


def test_doctor_compiles_what_first_calls_would(capsys: pytest.CaptureFixture[str]) -> None:
    *_, last = as_json(capsys, "doctor", "--compile")["findings"]
    assert (last["name"], last["state"]) == ("compiled code", "ok") and last["data"]["cpu_s"] > 0


@pytest.mark.parametrize(
    ("version", "oldest", "is_older"),
    [
        *(("2.13.0+cpu", "2.11", False), ("2.9.1", "2.11", True), ("3.8.0.dev1", "3.8", False)),
        *(("5", "5", False), ("2.10.0rc1", "2.10.1", True)),
    ],
)
def test_versions_compare_as_numbers(version: str, oldest: str, is_older: bool) -> None:
    assert doctor.older(version, oldest) is is_older


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.4.0", "triton": "3.8.0", "transformers": ""}
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: versions.get(name, real(name)))
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["torch"].state == "bad" and "too old" in found["torch"].value
    assert found["triton"].state == "ok"  # its code for 4-bit codecs does not spill
    assert found["transformers"].advice == "pip install 'flowkv[hf]'"


def test_doctor_looks_for_what_the_project_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(doctor.EXTRAS) == {*extras} - {"dev"}
    asked = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    bounds = (re.match(r"([\w-]+).*>=([\d.]+)", line) for line in asked)
    oldest = dict(found.groups() for found in bounds if found)
    monkeypatch.setattr(doctor, "version_of", lambda name: "0")
    seen = {one.name: one.value for one in doctor.examine() if "older than" in one.value}
    assert len(seen) >= 18
    for name, value in seen.items():
        assert f"older than {oldest[name]} " in f"{value} "


@pytest.mark.parametrize("name", ["mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"])
def test_doctor_names_the_package_of_a_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, there = doctor.version_of, {"libnuma.so.1", "libcurl.so.4", "librdmacm.so.1"}
    other = f"{doctor.EXTRAS['mooncake'][0]}-non-cuda" if name.endswith("engine") else name[:-9]
    versions = {name: "0.3.13", other: ""}
    monkeypatch.setattr(doctor, "version_of", lambda one: versions.get(one, real(one)))
    monkeypatch.setattr(errors, "_loads", there.__contains__)
    found = {finding.name: finding for finding in doctor.examine()}[name]
    assert found.state == "warn" and found.data["missing"] == ["libibverbs.so.1"]
    assert found.advice == "As root: apt-get install libibverbs1"
    monkeypatch.setattr(errors, "_loads", {*there, "libibverbs.so.1"}.__contains__)
    assert {finding.name: finding for finding in doctor.examine()}[name].state == "ok"


def test_a_strange_machine_is_still_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: str) -> str:
        return "HugePages_Total: what\nMemTotal"

    monkeypatch.setattr(doctor, "_read", broken)
    assert {"torch", "io_uring", "rich"} <= {finding.name for finding in doctor.examine()}


# ---- prompts and models


def test_prompts_by_line_and_as_json_lines(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\n\n  two \n")
    lines.write_text('{"prompt": "one\\ntwo"}\n{"prompt": "three", "id": 3}\n')
    assert read_prompts(str(plain)) == ["one", "  two "]
    assert read_prompts(str(lines)) == ["one\ntwo", "three"]


NO_ENDS = ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_of_prompts_end_as_files_have_it(tmp_path: Path, end: str, mark: str) -> None:
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts"
    prompts = [f"one{odd}more" for odd in NO_ENDS] + ["caf\u00e9 \ufeff", "two"]
    plain.write_bytes((mark + end.join(prompts) + end).encode())
    assert read_prompts(str(plain)) == prompts
    said = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    lines.write_bytes((mark + end.join(said)).encode())
    assert read_prompts(str(lines)) == prompts
    lines.rename(tmp_path / "prompts.jsonl")
    assert read_prompts(str(tmp_path / "prompts.jsonl")) == prompts


@pytest.mark.parametrize("coding", ["ascii", "latin-1", "utf-8", "cp1252"])
def test_every_stream_takes_the_result(coding: str) -> None:
    said = {"text": "caf\u00e9 \u4f60\U0001f600 \u2028", "half": "\ud800", "n": 1}
    for result in (said, {key: said[key] for key in ("text", "n")}):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=coding)
        command._print_json(result, stream)
        assert json.loads(raw.getvalue().decode(coding)) == result


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        *((b"", "holds no prompt"), (b"\n \n", "holds no prompt"), (b"\xff\xfe", "not UTF-8")),
        *((b'{"prompt": "one"}\nplain\n', "line 2"), (b'{"prompt": 7}\n', "line 1")),
        (b'{"text": "x"}\n', "line 1"),
    ],
)
def test_bad_prompts(
    content: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    words = ("generate", "--model", str(tiny_path()), "--store", str(tmp_path / "kv"))
    assert complaint in refused(capsys, *words, "--prompts", str(file))
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("store", ["kv:200", "kv:7XiB", "s3://bucket/kv", __file__])
def test_bad_stores(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").write_text("x")
    words = ("generate", "--model", "none", "--prompts", str(tmp_path / "p"), "--store", store)
    assert "`disk`" in refused(capsys, *words), "before the model is looked for"
    assert "`disk`" in refused(capsys, "demo", "--store", store)


def test_prompts_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("generate", "--model", str(tiny_path()), "--store", str(tmp_path / "kv"))
    assert "Correct the path" in refused(capsys, *words, "--prompts", str(tmp_path / "none"))


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "abacus"}')
    (tmp_path / "mute").mkdir()
    config = json.loads((tiny_path() / "config.json").read_text())
    (tmp_path / "mute" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text(json.dumps(config))
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\0" * 40)
    for name, complaint in {
        str(tmp_path / "none"): "there is no folder",
        str(tmp_path / "file"): "is a file",
        str(tmp_path): "no config.json",
        str(tmp_path / "mute"): "no tokenizer",
        str(tmp_path / "torn"): "cannot be loaded",
        "not a name": "the hub has no|has no model",
        " ": "empty",
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            flowkv.load(name)
    with pytest.raises(UnsupportedModelError, match="no causal language model"):
        flowkv.load(tmp_path / "strange")
    with pytest.raises(ConfigError, match="device 'abacus' cannot be used"):
        flowkv.load(tiny_path(), device="abacus")
    with pytest.raises(ConfigError, match="dtype"):
        flowkv.load(tiny_path(), dtype="int3")


def test_a_model_of_bytes() -> None:
    loaded = flowkv.load(tiny_path(), device="cpu")
    assert not loaded.model.training
    assert loaded.decode(loaded.encode("grün")) == "grün"
    assert loaded.decode([0xFF]) == "\N{REPLACEMENT CHARACTER}"


# ---- what people see


def test_tables_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen.importlib.util, "find_spec", lambda _name: None)
    shown = screen.Screen()
    shown.table(["way", "time"], [["cold", "421 ms"], ["restored", "9 ms"]], title="TTFT")
    shown.say("done", style="bold")
    with shown.progress("first") as tell:
        tell(1, 2, "loading")
    out = capsys.readouterr().out.splitlines()
    assert out[1:5] == ["TTFT", "way         time", "cold      421 ms", "restored    9 ms"]
    assert out[6] == "done"
    assert out[7] == "first: 1/2 loading"


def test_tables_in_a_pipe_are_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "60")
    screen.Screen().table(["", "found"], [["disk", "word " * 40]], numbers=False)
    assert max(map(len, capsys.readouterr().out.splitlines())) == 60


def test_tables_with_rich_show_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen.Screen().table(["a"], [["flowkv[hf]"]])
    assert "flowkv[hf]" in capsys.readouterr().out


def test_a_model_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen.Screen().say("a\x1b[2Jb\r\nc")
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.2e-5, "42 µs"), (0.0042, "4.2 ms"), (0.42, "420 ms"), (4.2, "4.2 s"), (float("nan"), "-")],
)
def test_times_for_people(value: float, text: str) -> None:
    assert words.seconds(value) == text


def test_flowkv_errors_are_never_swallowed_as_unexpected() -> None:
    assert issubclass(ConfigError, FlowKVError)
