"""Weights that are elsewhere, and models that change into something that cannot be tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.inside import PagedCache

pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate")  # up to 5.2x


def offload(model: Any, where: str, directory: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(directory), execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in model.parameters())


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("late", [False, True])
def test_an_offloaded_model_is_served(where: str, late: bool, tmp_path: Path) -> None:
    model, ids = models.causal("llama"), models.prompt(60)
    theirs = generate(model, 8, input_ids=ids)
    if not late:
        offload(model, where, tmp_path)
    with attached(model) as kv:
        generate(model, 8, input_ids=ids)
        if late:
            offload(model, where, tmp_path)
        known = reused(kv)
        for _ in range(2):
            ours = generate(model, 8, input_ids=ids)
            assert_same(ours, theirs)
            assert isinstance(ours.past_key_values, PagedCache)
            assert ours.past_key_values.layers[0].keys.device.type == "cpu"
        assert reused(kv) == known + (48 if late else 96)  # hooks put on later are a change


def test_an_offloaded_encoder_decoder(tmp_path: Path) -> None:
    model, ids = models.t5(), models.prompt(20)
    theirs = generate(model, 8, input_ids=ids)
    offload(model, "cpu", tmp_path)
    with attached(model):
        assert_same(generate(model, 8, input_ids=ids), theirs)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.usefixtures("all_is_loaded")
def test_offloaded_models_are_told_apart_by_their_weights(where: str, tmp_path: Path) -> None:
    """Also over a store; and each finds its own again."""
    ids, answers = models.prompt(60), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = models.causal("llama")
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(seed)
        answers.append(generate(model, 8, input_ids=ids))
        offload(model, where, tmp_path / str(seed))
        for known in (0, 48):
            with attached(model, disk=f"{tmp_path / 'kv'}:64MiB") as kv:
                assert_same(generate(model, 8, input_ids=ids), answers[-1])
                assert reused(kv) == known
    assert not torch.equal(answers[0].logits[0], answers[1].logits[0])


@pytest.mark.parametrize("explicit", [False, True])
def test_a_change_that_cannot_be_tried(explicit: bool) -> None:
    model, ids = models.causal("llama"), models.prompt(40)

    def picky(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] not in (1, 40):
            raise ValueError("not so few")

    with attached(model) as kv:
        generate(model, 4, input_ids=ids)
        model.double()
        model.register_forward_pre_hook(picky, with_kwargs=True, prepend=True)
        if explicit:
            with pytest.raises(flowkv.core.errors.StateError, match="cannot run a few tokens"):
                kv.cache(input_ids=ids)
        with pytest.warns(UserWarning, match="has changed") as warned:
            for _ in range(2):
                found = generate(model, 4, input_ids=ids)
        assert len(warned) == 1
        assert found.past_key_values.layers[0].keys.dtype is torch.float64
    assert_same(generate(model, 4, input_ids=ids), found)
