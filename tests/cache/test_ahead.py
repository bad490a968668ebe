"""Kernels compiled ahead of use: by one process for each geometry on a GPU, told by a mark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowkv import Geometry, kernels
from tests.hooks import models
from tests.hooks.compare import attached, generate
from tests.inside import ahead, compile_process, dispatch, doctor

CPU = Geometry.uniform(layers=2, kv_heads=2, head_dim=64, page_size=64)
GPU = Geometry.uniform(layers=2, kv_heads=2, head_dim=64, page_size=64, device="cuda:0")


class Begun:
    """A process that compiles nothing."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.options, self.calls = command, options, list[str]()

    def terminate(self) -> None:
        self.calls.append("terminate")

    def wait(self) -> None:
        self.calls.append("wait")

    def __enter__(self) -> Begun:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Begun]:
    """Processes that were begun, where no GPU need be."""
    found = list[Begun]()

    def popen(*given: Any, **options: Any) -> Begun:
        found.append(Begun(*given, **options))
        return found[-1]

    monkeypatch.setattr(compile_process.subprocess, "Popen", popen)
    monkeypatch.setattr(ahead.Kernels, "mark", lambda kernels: tmp_path / "mark")
    monkeypatch.setattr(compile_process, "_RUNNING", [])
    return found


def test_a_process_of_its_own_is_given_the_geometry(begun: list[Begun], tmp_path: Path) -> None:
    process = ahead.begin(GPU, "kv8", 4)
    assert begun == [process]
    python, flag, first, lock, module, text = process.command
    assert (python, flag, first) == (sys.executable, "-m", "flowkv.compiled.compile_process")
    assert (lock, module) == (str(tmp_path / "mark.lock"), "flowkv.cache.ahead")
    given = msgspec.json.decode(text, type=ahead.Kernels)
    assert given == ahead.Kernels(GPU, "kv8", 4)
    compile_process.end()
    assert process.calls == ["terminate", "wait"] and not compile_process._RUNNING


def test_models_of_other_depths_share_a_mark() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")

    def mark(layers: int, head_dim: int) -> Path:
        shape = Geometry.uniform(layers=layers, kv_heads=2, head_dim=head_dim, page_size=64)
        return ahead.Kernels(shape, "raw", 4).mark()

    assert mark(2, 64) == mark(32, 64) != mark(2, 128)


def test_nothing_is_begun_where_nothing_is_to_be_compiled(
    begun: list[Begun], tmp_path: Path
) -> None:
    assert ahead.begin(CPU, "raw", 4) is ahead.begin(GPU, "raw", 0) is None
    (tmp_path / "mark").touch()
    assert ahead.begin(GPU, "raw", 4) is None and not begun


@pytest.mark.parametrize("codec", ["raw", "kv8"])
def test_kernels_are_used_as_a_model_uses_them(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and without a mark: all that a prompt runs, and runs when it comes again."""
    marked, calls = list[object](), set[tuple[str, ...]]()
    own = dispatch.resolve

    def resolve(op: str, codec: str, backend: str) -> Any:
        def call(*given: Any) -> Any:
            codecs = (codec,) if op != "transcode" else (given[3].codec, given[4].codec)
            calls.add((op, *codecs))
            return own(op, codec, backend)(*given)

        return call

    monkeypatch.setattr(dispatch, "resolve", resolve)
    monkeypatch.setattr(kernels, "prepare_decode", lambda *_: None)  # as on a GPU
    monkeypatch.setattr(ahead.Kernels, "mark", marked.append)
    shape = Geometry.uniform(layers=1, kv_heads=2, head_dim=64, page_size=16)
    ahead.main(msgspec.json.encode(ahead.Kernels(shape, codec, 4)).decode())
    compiled, prompt = set(calls), models.prompt(48)
    assert not marked
    with attached(model := models.causal("llama"), codec=codec, recent_tokens=0):
        calls.clear()
        for _ in range(2):  # the last token runs, of a page that is full and known
            generate(model, 20, input_ids=prompt)
    calls.discard(("checksum", "any"))  # of weights
    assert calls <= compiled and (codec == "raw" or ("transcode", codec, "raw") in calls)


def test_attach_begins_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(ahead, "begin", lambda *given: asked.append(given))
    with attached(models.causal("llama"), codec="kv8") as kv:
        assert asked == [(kv.geometry, "kv8", 4)]


def test_doctor_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, order = list[Any](), list[str]()

    class Process(Begun):
        def wait(self) -> None:
            order.append("wait")

    def begin(*given: Any) -> Process | None:
        asked.append(given)
        order.append("begin")
        return None if len(asked) == 1 else Process([])

    monkeypatch.setattr(ahead, "begin", begin)
    doctor._compile_for_gpu()
    assert not asked, "there is no GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    doctor._compile_for_gpu()
    count = len(asked)
    assert (order.count("begin"), order.count("wait")) == (count, count - 1)
    assert {given[0].groups[0].device for given in asked} == {"cuda:0"}
