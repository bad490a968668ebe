"""Models quantised by bitsandbytes and torchao: known kinds, whose prompts are found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
PROMPT = models.prompt(60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    shape = models.GROUPED | {"hidden_size": 64, "intermediate_size": 128}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    models.sharpen(model).save_pretrained(path)
    return path


def bits(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**options)


def int8_weights() -> Any:
    torchao = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())


KINDS = {
    "bitsandbytes int8": lambda: bits(load_in_8bit=True),
    "bitsandbytes nf4": lambda: bits(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "bitsandbytes fp4": lambda: bits(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32
    ),
    "torchao int8": int8_weights,
}


def load(checkpoint: Path, kind: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=KINDS[kind](), device_map="cpu", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used before"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_quantised_model_are_found_again(
    checkpoint: Path, kind: str, used: bool
) -> None:
    model = load(checkpoint, kind)
    if used:
        generate(model, 1, input_ids=PROMPT[:, :9])
    with attached(model) as kv:
        first = generate(model, 4, input_ids=PROMPT)
        assert kv.stats()["foreign"] == "" and reused(kv) == 0
        assert_same(generate(model, 4, input_ids=PROMPT), first)
        assert reused(kv) >= 48
    assert_same(generate(model, 4, input_ids=PROMPT), first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_quantised_model_finds_its_pages_and_no_others(
    checkpoint: Path, kind: str, tmp_path: Path
) -> None:
    for n, other in enumerate((False, False, True)):
        model = load(checkpoint, kind)
        if other:  # another checkpoint, quantised alike
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(1.5)
        plain = generate(model, 4, input_ids=PROMPT)
        with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
            assert_same(generate(model, 4, input_ids=PROMPT), plain)
            assert bool(reused(kv)) == (n == 1)
