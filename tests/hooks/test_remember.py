"""Encoders of attached models remember what they computed, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import flowkv
from flowkv.connect import Keeper
from tests.hooks import models


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take longer than such small encoders, and a machine may be busy."""
    monkeypatch.setattr(Keeper, "worth", lambda *_: True)
    monkeypatch.setattr("flowkv.tensors.memo._LEAST_S", 5.0)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=256,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=256,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).eval()


def text(*seeds: int) -> dict[str, torch.Tensor]:
    rows = [torch.randint(5, 200, (24,), generator=torch.Generator().manual_seed(s)) for s in seeds]
    ids = torch.stack(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def images(*seeds: int) -> dict[str, torch.Tensor]:
    ids = models.prompt(60).repeat(len(seeds), 1)
    ids[:, 20 : 20 + models.IMAGE_PATCHES] = models.IMAGE_TOKEN
    each = [torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return {"input_ids": ids, "pixel_values": torch.stack(each)}


CASES: list[Any] = [
    pytest.param(models.t5, lambda model: model.get_encoder(), text, id="t5"),
    pytest.param(bart, lambda model: model.get_encoder(), text, id="bart"),
    pytest.param(
        models.llava, lambda model: model.get_encoder(modality="image"), images, id="llava"
    ),
]


def rows_counted(encoder: Any) -> list[int]:
    """Rows that the encoder's layers compute."""
    counts: list[int] = []
    inner = next(m for m in encoder.modules() if isinstance(m, torch.nn.Linear))
    inner.register_forward_pre_hook(_Counting(counts))
    return counts


class _Counting:
    __module__ = "flowkv.testing"  # hooks of which are in no name

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __call__(self, module: Any, args: Any) -> None:
        self.counts.append(len(args[0]))


def generate(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False
    )
    return tokens


@pytest.mark.parametrize(("build", "encoder_of", "inputs"), CASES)
def test_rows_seen_before_are_not_encoded_again(
    build: Callable[[], Any], encoder_of: Callable[[Any], Any], inputs: Any, tmp_path: Path
) -> None:
    model = build()
    expected = {seeds: generate(model, inputs(*seeds)) for seeds in ((1, 2), (2, 3), (3,))}
    counts = rows_counted(encoder_of(model))
    places = [f"disk:{tmp_path}/memo:64MiB"]
    for seeds in ((1, 2), (2, 3), (3,)):
        # Another cache, as after a restart: no prompt is known to it.
        with flowkv.attach(model, gpu="16MiB", host="0", page_size=16, memo=places) as kv:
            counts.clear()
            assert torch.equal(generate(model, inputs(*seeds)), expected[seeds])
            assert sum(counts) == {(1, 2): 2, (2, 3): 1, (3,): 0}[seeds]
            assert kv.stats()["events"]["remembered_rows_total"]
    assert "forward" not in vars(encoder_of(model))


@pytest.mark.parametrize(("build", "encoder_of", "inputs"), CASES)
def test_it_is_in_no_name(
    build: Callable[[], Any], encoder_of: Callable[[Any], Any], inputs: Any
) -> None:
    model = build()
    with flowkv.attach(model, gpu="16MiB", host="0", page_size=16) as kv:
        plain = kv.namespace
    with flowkv.attach(model, gpu="16MiB", host="0", page_size=16, memo="host:1MiB") as kv:
        assert kv.namespace == plain


def test_what_a_tenant_forgets_goes_from_encoders_too(tmp_path: Path) -> None:
    model = models.t5()
    counts = rows_counted(model.get_encoder())
    options = {"gpu": "16MiB", "host": "0", "page_size": 16, "tenant": "ann"}
    places = [f"disk:{tmp_path}/memo:64MiB"]
    with flowkv.attach(model, memo=places, **options) as kv:
        generate(model, text(1))
    with flowkv.attach(model, memo=places, **options) as kv:
        counts.clear()
        kv.forget(tenant="bob")
        generate(model, text(1))
        assert counts == []
        assert kv.forget() >= 1
        generate(model, text(1))
        assert sum(counts) == 1
    kv.close()


def test_a_changed_encoder_encodes_anew() -> None:
    model = models.t5()
    counts = rows_counted(model.get_encoder())
    with flowkv.attach(model, gpu="16MiB", host="0", page_size=16, memo="host:8MiB"):
        before = generate(model, text(1))
        counts.clear()
        assert torch.equal(generate(model, text(1)), before)
        assert counts == []
        with torch.no_grad():
            model.get_encoder().block[0].layer[0].SelfAttention.v.weight.neg_()
        generate(model, text(1))
        assert sum(counts) == 1
