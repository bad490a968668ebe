"""The fixture model is what its card says, and it notices the loss of a far page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from flowkv.data import tiny_path
from tests.fixture_model import (
    CopyBits,
    Logits,
    load_tiny,
    second_copy_bits,
    stdlib_text,
    validation_bits,
)

pytest.importorskip("transformers")

Page: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Damage: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Page]

PERIOD = 128
LOST = slice(32, 48)  # 16 tokens of the first copy, 96 and more behind where they are needed

# The card's figures are of one Python's source and of more windows.
BAND_BITS = 0.15


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_tiny()


@pytest.fixture(scope="module")
def logits(model: torch.nn.Module) -> Logits:
    return lambda ids: model(ids, use_cache=False).logits


def card_figures(row: str) -> list[float]:
    """Read the numbers of a row of the model card's tables."""
    card = (tiny_path() / "README.md").read_text()
    (line,) = re.findall(rf"^\| {row} \|(.*)\|$", card, re.MULTILINE)
    return [float(cell) for cell in line.split("|")]


def test_it_is_small_and_complete(model: torch.nn.Module) -> None:
    assert 790_000 < sum(weight.numel() for weight in model.parameters()) < 820_000
    assert (tiny_path() / "model.safetensors").stat().st_size < 1_700_000
    config = model.config
    assert (config.head_dim, config.num_key_value_heads, config.pad_token_id) == (64, 2, 0)
    assert config.eos_token_id is None  # nothing ends a generation early


def test_stdlib_text_is_source_and_bounded() -> None:
    text = stdlib_text(20_000)
    assert len(text) == 20_000
    assert b"def " in text
    with pytest.raises(ValueError, match="ask for at most"):
        stdlib_text(1 << 30)


def test_uniform_guess_costs_eight_bits() -> None:
    def guess(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, 256)

    assert validation_bits(guess, windows=3, length=33) == pytest.approx(8)
    assert second_copy_bits(guess, windows=3, period=33) == pytest.approx((8, 8))


def test_validation_bits_are_the_cards(logits: Logits) -> None:
    (expected,) = card_figures("windows of 512 bytes")
    assert validation_bits(logits, windows=48) == pytest.approx(expected, abs=BAND_BITS)


def test_second_copy_bits_are_the_cards(logits: Logits) -> None:
    first, second = card_figures(f"repeated after {PERIOD} bytes")
    copy = second_copy_bits(logits, windows=64, period=PERIOD)
    assert copy == pytest.approx((first, second), abs=BAND_BITS)
    assert copy.second < copy.first - 1.2, "nothing is copied: a far page could be lost unnoticed"


def test_copies_reach_beyond_the_nearest_pages(logits: Logits) -> None:
    copy = second_copy_bits(logits, windows=8, period=512)
    assert copy.second < copy.first - 0.5


def zeroed(keys: torch.Tensor, values: torch.Tensor) -> Page:
    return torch.zeros_like(keys), torch.zeros_like(values)


def of_another_row(keys: torch.Tensor, values: torch.Tensor) -> Page:
    return keys.roll(1, 0), values.roll(1, 0)


def values_of_other_tokens(keys: torch.Tensor, values: torch.Tensor) -> Page:
    return keys, values.flip(2)  # of both: no damage, as attention knows no order of tokens


def intact(keys: torch.Tensor, values: torch.Tensor) -> Page:
    return keys, values


def through_cache(model: torch.nn.Module, damage: Damage) -> Logits:
    """Return the model as a callable that damages `LOST` before it reads the second copy."""
    from transformers import DynamicCache

    def logits(ids: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        head = model(ids[:, :PERIOD], past_key_values=cache).logits
        for layer in cache.layers:
            page = layer.keys[:, :, LOST].clone(), layer.values[:, :, LOST].clone()
            layer.keys[:, :, LOST], layer.values[:, :, LOST] = damage(*page)
        tail = model(ids[:, PERIOD:], past_key_values=cache).logits
        return torch.cat([head, tail], 1)

    return logits


def measure(candidate: Logits) -> CopyBits:
    return second_copy_bits(candidate, windows=16, period=PERIOD)


@pytest.fixture(scope="module")
def whole(model: torch.nn.Module, logits: Logits) -> CopyBits:
    found = measure(through_cache(model, intact))
    assert found == pytest.approx(measure(logits), abs=1e-4), "the cache itself is exact"
    return found


@pytest.mark.parametrize("damage", [zeroed, of_another_row, values_of_other_tokens])
def test_one_lost_far_page_shows(model: torch.nn.Module, whole: CopyBits, damage: Damage) -> None:
    lost = measure(through_cache(model, damage))
    assert lost.first == pytest.approx(whole.first, abs=1e-4)
    assert lost.second > whole.second + 0.1
