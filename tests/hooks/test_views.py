"""Tensors without storage: any operation sees the dense tensor, moving a recipe keeps it one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from tests.hooks import models
from tests.hooks.compare import attached
from tests.hooks.recorder import recorded
from tests.inside import (
    MaskRecipe,
    PagedView,
    StateError,
    mask,
    overlay_window,
    place_layers,
    read_layer,
)


class TestPagedView:
    @pytest.fixture
    def view(self) -> Any:
        """Keys of 21 tokens as the second of two forwards gets them, and the native ones."""
        model, ids = models.causal("llama"), models.prompt(21)
        caught = []
        own = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=own)
            with attached(model):
                cache = DynamicCache(config=model.config)
                model(ids[:, :18], past_key_values=cache, logits_to_keep=1)
                layer = cache.layers[1]
                update = layer.update
                layer.update = lambda *given, **more: (
                    caught.append(update(*given, **more)) or caught[-1]
                )
                handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
                    lambda *_: caught.append([solid.clone() for solid in map(_dense, caught[0])])
                )
                model(ids[:, 18:], past_key_values=cache, logits_to_keep=1)
                handle.remove()
                yield caught, own.layers[1], cache

    def test_has_the_shape_and_the_content(self, view: Any) -> None:
        (views, copies), native, _ = view
        for found, copied, wanted in zip(views, copies, (native.keys, native.values), strict=True):
            assert type(found) is PagedView
            assert found.shape == wanted.shape
            assert found.dtype == wanted.dtype
            assert type(copied) is torch.Tensor
            assert torch.allclose(copied, wanted, atol=1e-5)

    def test_operations_give_plain_tensors(self, view: Any) -> None:
        (views, copies), _, cache = view
        keys = views[0]
        for ours, theirs in (
            (keys * 2, copies[0] * 2),
            (keys[:, :, -4:].sum(-1), copies[0][:, :, -4:].sum(-1)),
            (torch.matmul(keys, keys.transpose(2, 3)), copies[0] @ copies[0].transpose(2, 3)),
            (torch.cat([keys, keys], 1), torch.cat([copies[0]] * 2, 1)),
        ):
            assert type(ours) is torch.Tensor
            assert torch.allclose(ours, theirs)
        assert not cache.layers[1].placed.in_pages, "later forwards hand this layer tensors"


def _dense(view: PagedView) -> torch.Tensor:
    return view.dense()


class TestKeptViews:
    """Views that a caller keeps are never changed under it."""

    def forwards(self, model: Any, ids: torch.Tensor, kept: list[Any]) -> Any:
        """Keep the keys and values that each layer gets in the second of two forwards."""
        cache = DynamicCache(config=model.config)
        model(ids[:, :18], past_key_values=cache, logits_to_keep=1)
        for layer in cache.layers:
            own = layer.update
            layer.update = lambda *given, own=own, **more: (
                kept.append(own(*given, **more)) or kept[-1]
            )
        model(ids[:, 18:19], past_key_values=cache, logits_to_keep=1)
        for layer in cache.layers:
            del layer.update
        return cache

    def test_each_layer_has_views_of_its_own(self) -> None:
        model, ids = models.causal("llama"), models.prompt(20)
        own, kept = DynamicCache(config=model.config), list[Any]()
        with torch.no_grad():
            model(ids[:, :19], past_key_values=own)
            with attached(model):
                cache = self.forwards(model, ids, kept)
                assert len(kept) == len(cache.layers) > 1
                for pair, layer in zip(kept, own.layers, strict=True):
                    for view, wanted in zip(pair, (layer.keys, layer.values), strict=True):
                        assert type(view) is PagedView
                        assert view.shape == wanted.shape
                        assert torch.allclose(view.dense(), wanted, atol=1e-5)

    @pytest.mark.parametrize("change", ["forward", "crop", "reorder", "edit"])
    def test_after_a_change_of_the_cache_they_are_refused(self, change: str) -> None:
        model, ids, kept = models.causal("llama"), models.prompt(20), list[Any]()
        with torch.no_grad(), attached(model):
            cache = self.forwards(model, ids, kept)
            if change == "forward":
                model(ids[:, 19:], past_key_values=cache, logits_to_keep=1)
            elif change == "crop":
                cache.crop(-1)
                model(ids[:, 19:], past_key_values=cache, logits_to_keep=1)
            elif change == "reorder":
                cache.batch_repeat_interleave(2)
            else:
                cache.layers[1].keys = cache.layers[1].keys * 2
            for view in kept[0]:
                with pytest.raises(StateError, match="an earlier forward"):
                    view.dense()
                with pytest.raises(StateError, match="an earlier forward"):
                    view + 1

    def test_after_a_replayed_step_they_are_refused(self) -> None:
        model, ids, kept = models.causal("llama"), models.prompt(44), list[Any]()
        with torch.no_grad(), recorded(), attached(model) as kv:
            cache = self.forwards(model, ids, [])
            layer = cache.layers[0]
            update = layer.update
            layer.update = lambda *given, **more: kept.append(update(*given, **more)) or kept[-1]
            for i in range(19, 44):  # the first steps of a shape call each layer
                before, replays = len(kept), kv.stats()["graphs"]["replayed"]
                model(
                    ids[:, i : i + 1],
                    position_ids=torch.tensor([[i]]),
                    past_key_values=cache,
                    logits_to_keep=1,
                )
                if len(kept) > before:
                    continue
                assert kv.stats()["graphs"]["replayed"] == replays + 1
                for view in kept[-1]:
                    with pytest.raises(StateError, match="an earlier forward"):
                        view.dense()
            assert replays > 5


class TestMaskRecipe:
    def given(self, function: Any = causal_mask_function, **changes: Any) -> dict[str, Any]:
        found = dict(
            batch_size=2,
            q_length=3,
            kv_length=8,
            q_offset=5,
            kv_offset=0,
            mask_function=function,
            attention_mask=None,
            allow_is_causal_skip=True,
            dtype=torch.float32,
            use_vmap=False,
            device=torch.device("cpu"),
        )
        return found | changes

    @pytest.mark.parametrize("window", [None, 4])
    def test_builds_what_the_model_would_have_built(self, window: int | None) -> None:
        function = sliding_window_causal_mask_function(window) if window else causal_mask_function
        given = self.given(function)
        recipe = mask("sdpa", **given)
        assert type(recipe) is MaskRecipe
        assert recipe.window == window
        wanted = sdpa_mask(**given)
        assert torch.equal(recipe.dense(), wanted)
        assert torch.equal(~recipe, ~wanted), "any operation builds it"
        floats = mask("eager", **given)
        assert floats.dtype == torch.float32
        assert torch.equal((floats + 0) == 0, wanted)

    def test_moves_without_being_built(self) -> None:
        moved = mask("sdpa", **self.given()).to("meta")
        assert type(moved) is MaskRecipe
        assert moved.device.type == "meta"
        assert mask("sdpa", **self.given()).to(torch.float32).dtype == torch.float32

    def test_no_cached_tokens_no_recipe(self) -> None:
        given = self.given(q_offset=0, q_length=8)
        assert mask("sdpa", **given) is None
        assert type(mask("eager", **given)) is torch.Tensor

    def test_other_patterns_are_built(self) -> None:
        def odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (key <= query) & (key % 2 == 0)

        assert type(mask("sdpa", **self.given(odd))) is torch.Tensor
        assert overlay_window(odd) is None
        assert overlay_window(sliding_window_causal_mask_function(7)) == 7


def test_layers_of_each_device_are_a_group() -> None:
    class Layer:
        def __init__(self, device: str) -> None:
            self.keys = torch.zeros(1, 2, 1, 16, device=device)
            self.values = torch.zeros(1, 2, 1, 8, device=device)

    specs = [read_layer("full_attention", {}) for _ in range(4)]
    specs.append(read_layer("sliding_attention", {"sliding_window": 9}))
    layers = [Layer("cpu"), Layer("cpu"), Layer("meta"), Layer("meta"), Layer("meta")]
    plan = place_layers(specs, layers, 16, in_pages=True)
    found = [(group.layers, group.device, group.window) for group in plan.geometry.groups]
    assert found == [((0, 1), "cpu", None), ((2, 3), "meta", None), ((4,), "meta", 9)]
    assert plan.placed[4].shape == (2, 16, 8, torch.float32, torch.device("meta"))
