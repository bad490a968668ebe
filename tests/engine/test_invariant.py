"""Batch-invariant steps: bits do not depend on what else is computed, nor on when or in what parts.

The same schedules without the mode give other bits, so these tests can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import flowkv
from flowkv import Completion, Engine, Request
from flowkv.hooks.huggingface import make_runner_parts
from tests.engine.nano import VOCABULARY, Nano, make_kv
from tests.engine.schedules import Traced, alone, at_random
from tests.fixture_model import load_tiny
from tests.hooks import models
from tests.hooks.compare import attached
from tests.inside import (
    UNEVEN,
    ConfigError,
    Fixed,
    Forward,
    Products,
    UnsupportedModelError,
    invariant,
    marked,
    own_model,
)
from tests.inside import engine_invariant as products

NEW = 6


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- products


@given(
    rows=st.integers(1, 150),
    inner=st.sampled_from([1, 7, 64, 130, 515]),
    columns=st.sampled_from([1, 5, 64, 200]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    turned=st.booleans(),
    skip=st.integers(0, 3),
)
@settings(max_examples=40)
def test_rows_of_products_are_those_of_rows_alone(
    rows: int, inner: int, columns: int, dtype: torch.dtype, turned: bool, skip: int
) -> None:
    x = torch.randn(rows + skip, inner).to(dtype)[skip:]
    weight = torch.randn(columns, inner).t() if turned else torch.randn(inner, columns)
    weight, bias = weight.to(dtype), torch.randn(columns).to(dtype)
    multiply = Products()
    whole = multiply(x, weight, bias)
    torch.testing.assert_close(whole, torch.addmm(bias, x, weight))
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(multiply(x[row : row + 1], weight, bias)[0], whole[row])


def test_wide_products_differ_without_blocks() -> None:
    x, weight = torch.randn(64, 515), torch.randn(515, 200)
    assert not torch.equal(torch.mm(x, weight)[:1], torch.mm(x[:1], weight))


def test_sizes_that_do_not_agree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_size(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return torch.mm(x, weight) * (1.0 + 0.1 * (x.shape[0] >= 64))

    monkeypatch.setattr(products, "_product", by_size)
    multiply, x, weight = Products(), torch.randn(80, 8), torch.randn(8, 8)
    assert torch.equal(multiply(x, weight)[:3], multiply(x[:3], weight))

    def by_place(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return torch.mm(x, weight) + torch.arange(x.shape[0])[:, None]

    monkeypatch.setattr(products, "_product", by_place)
    multiply = Products()
    assert torch.equal(multiply(x, weight)[40], multiply(x[40:41], weight)[0])


# ---- other functions

WAYS: dict[str, Any] = {
    "celu": functional.celu,
    "elu": functional.elu,
    "exp2": torch.exp2,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "glu": functional.glu,
    "mish": functional.mish,
    "pow": lambda x: x.abs().pow(1.5),
    "operator": lambda x: x.abs() ** 0.3,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "selu": functional.selu,
    "sigmoid": lambda x: x.sigmoid(),
    "silu": functional.silu,
    "silu_in_place": lambda x: functional.silu(x.clone(), inplace=True),
    "sigmoid_in_place": lambda x: x.clone().sigmoid_(),
    "of_a_part": lambda x: functional.silu(x.chunk(2, -1)[0]),
    "softplus": functional.softplus,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "einsum": lambda x: torch.einsum("nd,de->ne", x, SQUARE[: x.shape[1], :70].to(x.dtype)),
    "columns": lambda x: (SQUARE[:70, : x.shape[1]].to(x.dtype) @ x.T).T,
    "vector": lambda x: x.abs() @ SQUARE[0, : x.shape[1]].abs().to(x.dtype),
    "vector_added": lambda x: torch.addmv(
        x[:, 0].abs(), x.abs(), SQUARE[0, : x.shape[1]].abs().to(x.dtype)
    ),
    "linear_vector": lambda x: functional.linear(
        x.abs(), SQUARE[0, : x.shape[1]].abs().to(x.dtype)
    ),
    "batches": lambda x: torch.bmm(
        torch.stack([x, -x]), SQUARE[: x.shape[1], :80].to(x.dtype).expand(2, -1, -1)
    )[0],
}
SQUARE = torch.randn(1540, 1540, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_of_tokens_do_not_look_at_others(name: str, dtype: torch.dtype) -> None:
    run, mode = WAYS[name], Fixed()
    with threads(3):
        for width in (38, 512):
            x = torch.randn(203, width).to(dtype)
            with mode:
                whole = run(x)
                parts = [(at, n, run(x[at : at + n].clone())) for at, n in ((0, 1), (5, 43))]
            torch.testing.assert_close(whole, run(x), equal_nan=True)
            for at, n, part in parts:
                assert torch.equal(part, whole[at : at + n])


def test_every_uneven_function_is_tried() -> None:
    assert UNEVEN - {"swish"} <= set(WAYS)


# ---- models


def odd() -> Any:
    """A model whose widths no vector length divides."""
    config = transformers.LlamaConfig(
        **models.GROUPED | dict(hidden_size=36, intermediate_size=101, head_dim=10)
    )
    torch.manual_seed(0)
    return models.sharpen(transformers.LlamaForCausalLM(config))


MODELS: dict[str, Any] = {
    "fixture": load_tiny,
    "experts_and_sinks": lambda: models.causal("gpt_oss"),
    "sliding": lambda: models.causal("gemma3"),
    "odd": odd,
    "bfloat16": lambda: models.causal("mistral").bfloat16(),
}


def texts(count: int = 5, seed: int = 0) -> list[Any]:
    """Prompts, some of which begin alike."""
    draw = np.random.default_rng(seed)
    common = draw.integers(5, 250, 40)
    own = [draw.integers(5, 250, draw.integers(1, 60)) for _ in range(count)]
    return [np.concatenate([common[: draw.integers(0, 41)], each]) for each in own]


def unequal(kv: flowkv.KV, forward: Forward, prompts: list[Any], seeds: range, salt: Any) -> int:
    """Logits that differ between random schedules and being alone; how many there are."""
    wanted = {}
    for number in range(len(prompts)):
        kv.forget()
        traced = Traced(kv, forward, prompts, NEW, salt)
        alone(traced, number)
        wanted[number] = traced.logits[number]
        assert traced.reused == 0
    wrong = reused = 0
    for seed in seeds:
        if seed % 2:
            kv.forget()
        traced = Traced(kv, forward, prompts, NEW, salt)
        at_random(traced, seed)
        reused += traced.reused
        for number, lines in traced.logits.items():
            pairs = zip(lines, wanted[number], strict=True)
            wrong += sum(not torch.equal(a, b) for a, b in pairs)
    assert reused > 0
    return wrong


@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_same_bits_in_any_schedule(name: str) -> None:
    model = MODELS[name]().eval()
    with attached(model, host="32MiB") as kv:
        forward = make_runner_parts(model, kv).forward
        assert forward is not None
        assert unequal(kv, invariant(forward), texts(), range(2), marked) == 0


def test_and_other_bits_without() -> None:
    model = load_tiny().eval()
    with attached(model, host="32MiB") as kv:
        forward = make_runner_parts(model, kv).forward
        assert forward is not None
        assert unequal(kv, forward, texts(), range(2), lambda request: request) > 0


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_in_many_schedules(name: str) -> None:
    model = MODELS[name]().eval()
    with attached(model, host="32MiB") as kv, threads(2):
        forward = make_runner_parts(model, kv).forward
        assert forward is not None
        assert unequal(kv, invariant(forward), texts(8), range(40), marked) == 0


def test_your_own_model() -> None:
    with make_kv() as kv:
        forward = invariant(own_model(Nano()))
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, VOCABULARY, draw.integers(1, 40)) for _ in range(5)]
        assert unequal(kv, forward, prompts, range(3), marked) == 0


# ---- engines


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    done: list[Completion] = engine.run(requests)
    return [one.tokens for one in done]


def test_an_engine_samples_the_same_whatever_else_it_serves() -> None:
    options = dict(do_sample=True, temperature=1.5, top_p=0.95)
    asked = [
        Request(prompt=text, max_new_tokens=8, seed=number, options=options)
        for number, text in enumerate(texts(6))
    ]
    model = load_tiny().eval()
    with attached(model, host="32MiB") as kv:
        with Engine(model, kv, invariant=True) as engine:
            wanted = [run(engine, [request])[0] for request in asked]
        kv.forget()
        with Engine(model, kv, invariant=True, max_rows=4, token_budget=9) as engine:
            assert run(engine, asked) == wanted


def test_pages_are_not_shared_with_other_steps() -> None:
    model, text = load_tiny().eval(), np.arange(5, 105)
    with attached(model, host="32MiB") as kv:
        model.generate(torch.from_numpy(text)[None], max_new_tokens=2, do_sample=False)
        with Engine(model, kv, invariant=True) as engine:
            first, second = (engine.run([text], max_new_tokens=2)[0] for _ in range(2))
        assert first.reused_tokens == 0
        assert second.reused_tokens >= 96 - 16


def test_refused_where_it_cannot_be() -> None:
    model = models.causal("falcon")
    with attached(model) as kv, pytest.raises(UnsupportedModelError, match="invariant"):
        Engine(model, kv, invariant=True)
    model = load_tiny().eval()
    with attached(model, codec="kv8") as kv, pytest.raises(ConfigError, match="raw"):
        Engine(model, kv, invariant=True)


def test_results_within_fixed_steps_are_not_remembered_for_others() -> None:
    """Pages of such requests have a name of their own; results of `memo` do not."""
    encoder, x = torch.nn.Linear(16, 16).eval(), torch.rand(4, 16)
    remembered = flowkv.memo(encoder, places="host:16MiB")
    with torch.no_grad():
        with Fixed():
            remembered(x)
        assert sum(remembered.stats()["declined"].values()) == 1
        assert torch.equal(remembered(x), encoder(x))
        assert remembered.stats()["computed"] == 4
    remembered.close()
