"""Mllama: layers that read an image only, and have no keys in prompts of text."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.inside import PagedCache

from . import matrix, models
from .compare import assert_same, attached, generate, reused, turns

pytestmark = pytest.mark.skipif(models.OLD, reason="another cache")
LAYER = 3
"""Number of the layer that reads images."""


@pytest.fixture(scope="module")
def model() -> Any:
    model = matrix.build("image", "mllama")
    with torch.no_grad():  # gates are zero in a fresh model: no image would matter
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(1.0)
    assert LAYER in model.config.text_config.cross_attention_layers
    return model


def image(length: int, seed: int, *, masked: bool = True) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    mask = torch.ones(1, length, 1, 4, dtype=torch.long)
    return dict(
        **dict(cross_attention_mask=mask) if masked else {},
        pixel_values=torch.randn(1, 1, 4, 3, 56, 56, generator=seeded),
        aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long),
        aspect_ratio_mask=torch.ones(1, 1, 4, dtype=torch.long),
    )


def test_texts_are_served(model: Any) -> None:
    prompt, first, longer, second = turns(model, 8)
    beams = generate(model, 8, input_ids=prompt, num_beams=3)
    with attached(model) as kv:
        assert_same(generate(model, 8, input_ids=prompt), first)
        for _ in range(2):
            assert_same(generate(model, 8, input_ids=longer), second)
        assert reused(kv) == 77 + 92
        again = generate(model, 8, input_ids=prompt, num_beams=3)
        assert torch.equal(again.sequences, beams.sequences)


@pytest.mark.parametrize("masked", [True, False])
def test_images_are_left_to_the_model(model: Any, *, masked: bool) -> None:
    prompt, why = models.prompt(70), "cross_attention_mask" if masked else "read its images"
    alone = generate(model, 8, input_ids=prompt)
    images = [image(70, seed, masked=masked) for seed in (1, 2)]
    theirs = [generate(model, 8, input_ids=prompt, **one) for one in images]
    assert not torch.equal(theirs[0].logits[0], theirs[1].logits[0]), (
        "images do not matter: no test"
    )
    with attached(model) as kv:
        generate(model, 8, input_ids=prompt)
        before = reused(kv)
        with pytest.warns(UserWarning, match=why):
            assert_same(generate(model, 8, input_ids=prompt, **images[0]), theirs[0])
        for one, want in zip(images, theirs, strict=True):
            assert_same(generate(model, 8, input_ids=prompt, **one), want)
        assert reused(kv) == before
        assert_same(generate(model, 8, input_ids=prompt), alone)
        with pytest.raises(flowkv.FlowKVError, match=why):
            kv.cache(input_ids=prompt, **images[0])


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_layer_alone_is_native(model: Any, way: Any, *, kept: bool) -> None:
    """Keys for the copy reach neither the layer nor its cache, whose pages are reused."""
    prompt, keys = models.prompt(40), torch.ones(1, 2, 5, 16)
    with torch.no_grad(), attached(model) as kv:
        cache = DynamicCache(config=model.config.get_text_config())
        native = type(cache.layers[LAYER])
        want = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        layer = cache.layers[LAYER]
        if not kept:
            del cache
        twin = way(layer)
        assert type(twin) is native and vars(twin).keys() == vars(native()).keys()
        assert twin.get_seq_length() == 0 and twin.update(keys, keys)[0].shape == keys.shape
        assert twin.get_seq_length() == 5 and layer.get_seq_length() == 0
        assert not kept or isinstance(cache, PagedCache)
        again = DynamicCache(config=model.config.get_text_config())
        found = model(prompt, past_key_values=again, logits_to_keep=1).logits
        torch.testing.assert_close(found, want, atol=2e-4, rtol=2e-4)
        assert reused(kv) == 39


def _kept(cache: Any) -> Any:
    return cache


def _pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("change", [_kept, copy.deepcopy, _pickled])
def test_a_layer_that_gets_keys_later(model: Any, change: Any) -> None:
    """The cache leaves its pages, copies alike, and nothing computed with the layer is kept."""
    prompt, more = models.prompt(40), models.prompt(9, seed=5)
    keys = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(3))
    native = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        model(prompt, past_key_values=native)
        native.layers[LAYER].update(keys, keys)
        want = model(more, past_key_values=native).logits
        with attached(model):
            cache = DynamicCache(config=model.config.get_text_config())
            model(prompt, past_key_values=cache, logits_to_keep=1)
            assert isinstance(cache, PagedCache)
            cache = change(cache)
            cache.layers[LAYER].update(keys, keys)
            found = model(more, past_key_values=cache).logits
            assert type(cache) is DynamicCache
            torch.testing.assert_close(found, want, atol=2e-4, rtol=2e-4)
