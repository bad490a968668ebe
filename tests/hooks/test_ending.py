"""Caches of models that end: with their model, before it, or when a cell is run again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

import flowkv
from tests.hooks import models
from tests.hooks.compare import generate, reused
from tests.inside import REAPER, StateError, seal

PLACE = "16MiB"


def cell(model: Any, path: Path, **options: Any) -> flowkv.KV:
    return flowkv.attach(model, disk=f"{path}:{PLACE}", page_size=16, **options)


def answer(model: Any) -> None:
    generate(model, 2, input_ids=models.prompt(100))


def writable(kv: flowkv.KV) -> bool:
    (tier,) = kv.stats()["tiers"].values()
    return bool(tier["writable"])


def test_a_closed_cache_goes_while_its_model_lives() -> None:
    model, left, ends = models.causal("llama"), list[weakref.ref[Any]](), list[int]()
    for _ in range(2):
        kv = flowkv.attach(model, gpu=PLACE, page_size=16)
        answer(model)
        assert kv.planner is not None
        left += map(weakref.ref, (kv, kv.planner.store, *kv.planner.store.pools.values()))
        kv.close()
        del kv
        gc.collect()
        ends.append(len(weakref.finalize._registry))
    assert [one() for one in left] == [None] * 6
    assert ends[1] <= ends[0], "a model keeps something of each former cache"


def test_a_cache_goes_with_its_model() -> None:
    model = models.causal("llama")
    kv = flowkv.attach(model, gpu=PLACE, page_size=16)
    answer(model)
    left = [weakref.ref(one) for one in (model, kv)]
    del model, kv
    gc.collect()
    assert [one() for one in left] == [None, None]


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("codec", ["raw", "kv8"])
@pytest.mark.parametrize("end", [flowkv.KV.close, flowkv.KV.detach])
def test_what_a_device_is_still_asked_for_is_stored(
    end: Any, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full pages of weights that have to be proven, right behind the step that filled them."""

    class Late(seal.Later):  # type: ignore[misc,name-defined]
        ready = False

    monkeypatch.setattr(seal, "Later", Late)
    monkeypatch.setattr("flowkv.naming.identity.SMALL_BYTES", 0)
    model, prompt = models.short(), models.prompt(64)
    kv = cell(model, tmp_path, codec=codec, recent_tokens=0)
    generate(model, 1, input_ids=prompt)
    end(kv)
    kv.close()
    kv = cell(model, tmp_path, codec=codec, recent_tokens=0)
    with kv.open([*prompt[0].tolist(), 1]) as seq:
        assert seq.length == 64
    kv.close()


@pytest.mark.usefixtures("all_is_loaded")
def test_a_cell_that_is_run_again(tmp_path: Path) -> None:
    model = models.causal("llama")
    kv = cell(model, tmp_path)
    answer(model)
    model = models.causal("llama")  # the first one is gone, and its cache is not
    heir = cell(model, tmp_path)
    assert writable(heir) and not writable(kv)
    answer(model)
    assert reused(heir) >= 64
    kv = heir
    gc.collect()
    REAPER.join(30.0)
    assert writable(kv)
    kv.close()


@pytest.mark.usefixtures("all_is_loaded")
def test_a_model_that_is_attached_again(tmp_path: Path) -> None:
    model = models.causal("llama")
    kv = cell(model, tmp_path)
    answer(model)
    with pytest.raises(StateError, match="a FlowKV cache already"):
        cell(model, tmp_path)
    assert writable(kv)
    kv.detach()  # the remedy that the error names
    heir = cell(model, tmp_path)
    assert writable(heir) and not writable(kv)
    answer(model)
    assert reused(heir) >= 64
    heir.close()
    kv.close()


def test_two_models_at_a_time(tmp_path: Path) -> None:
    first, second = models.causal("llama"), models.causal("llama")
    kv = cell(first, tmp_path)
    with pytest.warns(UserWarning, match=r"another cache of this process \(of .*Llama.*\) owns"):
        reader = cell(second, tmp_path)
    assert writable(kv) and not writable(reader)
    kv.close()
    answer(second)
    assert writable(reader)
    reader.close()
