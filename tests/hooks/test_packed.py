"""Rows packed into one forward of an unmodified model answer as each of them does alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.masking_utils import causal_mask_function

from flowkv import Request
from flowkv.hooks.huggingface import make_runner_parts
from tests.cache.toy import settle
from tests.fixture_model import load_tiny, stdlib_text
from tests.hooks import models
from tests.hooks.compare import attached, generate, reused
from tests.hooks.serving import runner_of, serve
from tests.hooks.tabled import as_library
from tests.hooks.test_restore import restoring, stored
from tests.inside import (
    CapacityError,
    ConfigError,
    MaskRecipe,
    Packing,
    PaddedRunner,
    Runner,
    StateError,
    Step,
    TokenError,
    Unpackable,
    UnsupportedModelError,
    door_of,
)

PACKED = ["gemma3", "gpt_oss", "llama", "mistral", "qwen3"]
APART = {
    "bloom": "takes no position",
    "deepseek_v3": "keys and values itself",
    "falcon": "not chosen by configuration",
    "falcon_h1": "recurrent state",
    "qwen3_next": "recurrent state",
}
NEW = 6


def _prompts() -> list[list[int]]:
    found = [models.prompt(n, seed=n)[0].tolist() for n in (1, 5, 60, 33)]
    return [*found, found[2][:48] + found[3][:10]]


def _alone(model: torch.nn.Module, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    every = [generate(model, new, input_ids=torch.tensor([prompt])) for prompt in prompts]
    return [one.sequences[0, -new:].tolist() for one in every]


def _open(runner: Runner, tokens: list[int], **fields: Any) -> Any:
    request = Request(prompt=tokens, **fields)
    return runner.open(request, np.asarray(tokens, np.uint32), wait=True)


def _give(runner: Runner, row: Any, tokens: list[int]) -> torch.Tensor:
    return runner.step([row], [np.asarray(tokens, np.uint32)])


# ---- the same tokens


@pytest.mark.parametrize("name", [*PACKED, *APART])
def test_ragged_steps_give_the_tokens_of_generate(name: str) -> None:
    model, prompts = models.causal(name), _prompts()
    wanted = _alone(model, prompts)
    with attached(model) as kv:
        parts = make_runner_parts(model, kv)
        assert (parts.forward is not None) is (name in PACKED)
        assert APART.get(name, "") in parts.reason and bool(parts.reason) is (name in APART)
        runner = runner_of(parts, kv)
        assert runner.together is (name not in models.HYBRID)
        for seed in (0, 1):  # the second time, prefixes are known
            assert serve(runner, prompts, NEW, seed=seed) == wanted
        if name not in models.HYBRID:  # those go on only where they ended
            assert reused(kv) > 0
        assert kv.stats()["sequences"] == 0


@pytest.mark.parametrize("name", ["gpt_oss", "mistral"])
def test_packable_models_can_run_otherwise_too(name: str) -> None:
    model, prompts = models.causal(name), _prompts()
    wanted = _alone(model, prompts)
    with attached(model) as kv:
        parts = make_runner_parts(model, kv)
        assert isinstance(parts.apart, PaddedRunner) and parts.apart.together
        door = door_of(model)
        assert door is not None
        for runner in (parts.apart, PaddedRunner(model, kv, door, together=False)):
            assert serve(runner, prompts, NEW) == wanted


def test_logits_are_those_of_generate_but_for_the_order_of_additions() -> None:
    model = load_tiny()
    text = list(stdlib_text(4000))
    prompts = [text[at : at + n] for at, n in ((0, 200), (700, 90), (100, 300), (2000, 31))]
    found: dict[tuple[int, int], torch.Tensor] = {}
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        served = serve(runner, prompts, NEW, chunk=100, logits=found)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])  # its zeros are text, not padding
        own = generate(model, NEW, input_ids=ids, attention_mask=torch.ones_like(ids))
        assert served[row] == own.sequences[0, len(prompt) :].tolist()
        for made, logits in enumerate(own.logits):
            torch.testing.assert_close(found[row, made], logits[0], atol=2e-4, rtol=2e-4)


def _check_packed(model: Any) -> None:
    """It is packed, and every row has the tokens of `generate` alone."""
    prompts = _prompts()
    wanted = _alone(model, prompts)
    with attached(model) as kv:
        parts = make_runner_parts(model, kv)
        assert parts.forward is not None
        assert serve(runner_of(parts, kv), prompts, NEW) == wanted


def test_eager_models_are_packed_too() -> None:
    model = models.causal("llama")
    model.set_attn_implementation("eager")
    _check_packed(model)


def test_a_capped_model_is_packed() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **models.GROUPED,
        sliding_window=24,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        attn_implementation="eager",
    )
    _check_packed(models.sharpen(transformers.Gemma2ForCausalLM(config)))


def test_experts_are_packed() -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **models.GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    )
    _check_packed(models.sharpen(transformers.MixtralForCausalLM(config)))


def test_text_of_a_vision_model_is_packed_and_images_are_refused() -> None:
    model, prompts = models.llava(), _prompts()
    wanted = _alone(model, prompts)
    with attached(model) as kv:
        parts = make_runner_parts(model, kv)
        assert parts.forward is not None
        assert serve(runner_of(parts, kv), prompts, NEW) == wanted
        parts.check(np.array(prompts[0], np.uint32), {"temperature": 0.5, "use_cache": True})
        with pytest.raises(TokenError, match=r"image_token.*Call generate"):
            parts.check(np.array([7, models.IMAGE_TOKEN], np.uint32), {})
        for name in ("pixel_values", "attention_mask", "token_type_ids"):
            with pytest.raises(UnsupportedModelError, match=rf"{name}.*Call generate"):
                parts.check(np.array([7], np.uint32), {name: 1})


# ---- pages that others made


def test_prefixes_are_shared_with_generate() -> None:
    model, prompt = models.causal("llama"), models.prompt(70)
    with attached(model) as kv:
        first = generate(model, input_ids=prompt).sequences
        runner = runner_of(make_runner_parts(model, kv), kv)
        text = first[0].tolist()
        before = reused(kv)
        row = _open(runner, text)
        assert row.seq.length == 80 and reused(kv) - before == 80
        assert _give(runner, row, text[80:]).argmax() == _alone(model, [text], 1)[0][0]
        row.close()
        more = [*text, *models.prompt(40, seed=9)[0].tolist()]
        serve(runner, [more], 1)
        before = reused(kv)
        generate(model, 1, input_ids=torch.tensor([more]))
        assert reused(kv) - before == 128


@pytest.mark.parametrize("name", ["mistral", "bloom"])
def test_a_prefix_on_its_way_is_computed_and_waited_for(name: str) -> None:
    model, prompt = models.causal(name), models.prompt(150)
    text = prompt[0].tolist()
    wanted = _alone(model, [text])
    with restoring(model, stored(model, {"input_ids": prompt})) as (kv, _, seen):
        runner = runner_of(make_runner_parts(model, kv), kv)
        row = runner.open(Request(prompt=text), np.asarray(text, np.uint32), wait=False)
        coming = row.seq.restoration
        assert coming is not None and coming.tokens == 144 and row.seq.length < 144
        while count := coming.next(40):
            _give(runner, row, text[row.seq.length :][:count])
        length = coming.settle()
        assert length == 144 and not seen.ended
        made = [int(_give(runner, row, text[length:]).argmax())]
        coming.finish(ok=True)
        while len(made) < NEW:
            made.append(int(_give(runner, row, made[-1:]).argmax()))
        row.close()
        assert made == wanted[0]
        assert seen.sum("computed_tokens") == 64 and seen.sum("loaded_tokens") > 0


# ---- a model that changes


@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize("change", ["weights", "training", "training a while", "back again"])
def test_what_a_changed_model_computes_is_not_published(name: str, change: str) -> None:
    model, text = models.causal(name), models.prompt(70)[0].tolist()
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        row = _open(runner, text)
        _give(runner, row, text[:20])
        weight = model.get_input_embeddings().weight
        if change.startswith("training"):
            model.train()
        else:
            with torch.no_grad():
                weight.mul_(1.5)
        if change == "training a while":  # no page becomes full meanwhile
            _give(runner, row, text[20:25])
            model.eval()
        _give(runner, row, text[row.seq.length : 40])
        if change == "back again":
            with torch.no_grad():
                weight.div_(1.5)
            _open(runner, models.prompt(20, seed=4)[0].tolist()).close()  # notices it
        _give(runner, row, text[40:])
        row.close()
        model.eval()
        seen = runner.open(Request(prompt=text), np.asarray(text, np.uint32), wait=True)
        assert seen.seq.length <= (0 if change == "weights" else 16)
        seen.close()


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_what_a_setting_changed_for_one_step_is_not_published(name: str) -> None:
    model, text = models.causal(name), models.prompt(70)[0].tolist()
    layer = model.model.layers[0] if name == "llama" else model.transformer.h[0]
    scaled = as_library().Times(layer.input_layernorm, model.config).eval()
    layer.input_layernorm = scaled
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        row = _open(runner, text)
        _give(runner, row, text[:20])
        settle(kv)
        scaled.scale = 3.0
        _give(runner, row, text[20:25])  # no page becomes full meanwhile
        scaled.scale = 1.0
        _give(runner, row, text[25:])
        row.close()
        assert kv.stats()["foreign"] == ""
        seen = runner.open(Request(prompt=text), np.asarray(text, np.uint32), wait=True)
        assert seen.seq.length == 16
        seen.close()


def test_rows_of_a_model_that_moved_are_refused() -> None:
    model, text = models.causal("llama"), models.prompt(40)[0].tolist()
    with attached(model) as kv:
        parts = make_runner_parts(model, kv)
        runner = runner_of(parts, kv)
        old = _open(runner, text)
        _give(runner, old, text[:20])
        model.double()
        new = _open(runner, text)
        with pytest.raises(StateError, match=r"moved to another dtype.*Submit"):
            _give(runner, old, text[20:])
        assert _give(runner, new, text).dtype == torch.float64
        for row in (old, new):
            row.close()


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_autocast_of_the_caller_changes_nothing(name: str) -> None:
    model, prompts = models.causal(name), _prompts()
    wanted = _alone(model, prompts)
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert serve(runner, prompts, NEW) == wanted


def test_generate_runs_beside_it() -> None:
    model, prompts = models.causal("gemma3"), _prompts()
    wanted = _alone(model, prompts)
    beside: list[list[list[int]]] = []
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        user = threading.Thread(target=lambda: beside.append(_alone(model, prompts)))
        user.start()
        assert serve(runner, prompts, NEW) == wanted
        user.join()
        assert beside == [wanted]


# ---- what cannot be served, or not packed


def test_a_model_that_is_not_attached_here_is_refused() -> None:
    model, other = models.causal("llama"), models.causal("qwen3")
    with attached(model) as kv, attached(other) as others:
        for kind, cache in ((model, others), (other, kv)):
            with pytest.raises(ConfigError, match=r"not attached.*flowkv\.attach"):
                make_runner_parts(kind, cache)
        kv.detach()
        with pytest.raises(ConfigError, match="not attached"):
            make_runner_parts(model, kv)


def test_a_model_with_an_encoder_is_refused() -> None:
    model = models.t5()
    with attached(model) as kv, pytest.raises(UnsupportedModelError, match="encoder"):
        make_runner_parts(model, kv)


def test_a_compiled_model_is_refused() -> None:
    model = models.causal("llama")
    with attached(model) as kv:
        model.model.layers[0].mlp.compile(backend="eager")
        with pytest.raises(UnsupportedModelError, match="compiled"):
            make_runner_parts(model, kv)


def test_positions_end_where_rows_would_disturb_each_other() -> None:
    torch.manual_seed(0)
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    scaled = models.GROUPED | dict(max_position_embeddings=64)
    config = transformers.LlamaConfig(**scaled, rope_parameters=rope)
    model = models.sharpen(transformers.LlamaForCausalLM(config))
    with attached(model) as kv:
        assert make_runner_parts(model, kv).positions == 63
    tiny = load_tiny()
    with attached(tiny) as kv:
        parts = make_runner_parts(tiny, kv)
        assert (parts.positions, parts.vocabulary) == (4096, 256)


class _Mixing(torch.nn.Module):
    """An attention layer's projection that looks at its neighbours in the row."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y + 0.5 * y.roll(1, dims=1).tril(0) if x.shape[1] > 1 else y


def test_a_model_whose_rows_mix_is_found_out() -> None:
    model = models.causal("llama")
    with attached(model, revision="mixing") as kv:
        assert make_runner_parts(model, kv).forward is not None
        layer = model.model.layers[2].self_attn
        layer.o_proj = _Mixing(layer.o_proj)
        with pytest.raises(UnsupportedModelError, match="does not continue"):
            make_runner_parts(model, kv)


class _Crowded(_Mixing):
    """A layer in which parts of prompts share something, and single tokens do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return torch.lerp(y, y.mean(0, keepdim=True), 0.5) if x.shape[1] > 1 else y


def test_a_model_whose_prompts_mix_beside_each_other_runs_apart() -> None:
    model, prompts = models.causal("bloom"), _prompts()
    layer = model.transformer.h[2].mlp
    layer.dense_h_to_4h = _Crowded(layer.dense_h_to_4h)
    wanted = _alone(model, prompts)
    with attached(model, revision="crowded") as kv:
        assert serve(make_runner_parts(model, kv).apart, prompts, NEW) == wanted


def test_a_model_that_computes_with_its_mask_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = models.causal("llama"), _prompts()
    own = type(model.model.layers[0]).forward

    def looks(self: Any, hidden: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask.clone()
        return own(self, hidden, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", looks)
    wanted = _alone(model, prompts)
    with attached(model, revision="tests") as kv:
        parts = make_runner_parts(model, kv)
        assert parts.forward is None and "computes with its mask" in parts.reason
        assert serve(parts.apart, prompts, NEW) == wanted


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes down the masks that models have transformers make in packed forwards."""
    made, own = list[str](), Packing.mask

    def mask(self: Packing, previous: str, arguments: dict[str, Any]) -> MaskRecipe:
        made.append(previous)
        return own(self, previous, arguments)

    monkeypatch.setattr(Packing, "mask", mask)
    return made


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_mask_that_all_layers_share_is_given(name: str, masks: list[str]) -> None:
    model, text = models.causal(name), models.prompt(40)[0].tolist()
    wanted = _alone(model, [text], 1)
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        row = _open(runner, text)
        masks.clear()
        assert int(_give(runner, row, text).argmax()) == wanted[0][0]
        assert bool(masks) is (name == "gemma3")  # some of its layers have a window
        row.close()


def test_a_model_that_looks_at_what_it_is_given_as_mask_has_it_made(
    monkeypatch: pytest.MonkeyPatch, masks: list[str]
) -> None:
    model, prompts = models.causal("llama"), _prompts()
    own = type(model.model).forward

    def looks(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask.clone()
        return own(self, input_ids, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", looks)
    wanted = _alone(model, prompts)
    with attached(model, revision="tests") as kv:
        parts = make_runner_parts(model, kv)
        assert parts.forward is not None
        masks.clear()
        assert serve(runner_of(parts, kv), prompts, NEW) == wanted
        assert masks


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_beginning_of_a_lone_row_is_computed_as_the_model_does(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = load_tiny(), list(stdlib_text(160))
    model.set_attn_implementation(attention)
    with torch.no_grad():
        whole = model(torch.tensor([text]), logits_to_keep=1).logits[0]
        front = model(torch.tensor([text[:100]]), logits_to_keep=1).logits[0]
    reads, own = list[int](), Step.read

    def read(self: Step, layer: int, *args: Any, **how: Any) -> torch.Tensor:
        reads.append(layer)
        return own(self, layer, *args, **how)

    monkeypatch.setattr(Step, "read", read)
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        row, other = _open(runner, text), _open(runner, text[::-1])
        reads.clear()
        found = _give(runner, row, text[:100])
        if attention == "sdpa":
            assert not reads and torch.equal(found, front)
        else:  # its function needs a mask that says what is causal
            assert reads
            torch.testing.assert_close(found, front, atol=2e-4, rtol=2e-4)
        reads.clear()
        torch.testing.assert_close(_give(runner, row, text[100:]), whole, atol=2e-4, rtol=2e-4)
        assert reads  # it has a past now
        reads.clear()
        row.close()
        row = _open(runner, text[1:])
        given = [np.asarray(one, np.uint32) for one in (text[1:20], text[::-1][:9])]
        runner.step([row, other], given)
        assert reads  # two rows that begin beside each other do not see each other
        row.close()
        other.close()


def test_a_row_whose_states_are_half_way_is_not_gone_on_with() -> None:
    model, text = models.causal("qwen3_next"), models.prompt(40)[0].tolist()
    with attached(model) as kv:
        runner = make_runner_parts(model, kv).apart
        row = _open(runner, text)
        _give(runner, row, text[:20])

        def fail(*_: Any) -> None:
            raise ValueError("a fault")

        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="a fault"):
            _give(runner, row, text[20:])
        handle.remove()
        assert row.seq.length == 20
        with pytest.raises(StateError, match=r"recurrent states.*Submit"):
            _give(runner, row, text[20:])
        row.close()
        assert serve(runner, [text], NEW) == _alone(model, [text])


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_step_that_fails_moves_no_row(name: str) -> None:
    model, text = models.causal(name), models.prompt(40)[0].tolist()
    wanted = _alone(model, [text])
    with attached(model) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        row = _open(runner, text)
        _give(runner, row, text[:20])
        last = list(model.modules())[-1]
        handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _give(runner, row, text[20:])
        handle.remove()
        assert row.seq.length == 20
        made = [int(_give(runner, row, text[20:]).argmax())]
        while len(made) < NEW:
            made.append(int(_give(runner, row, made[-1:]).argmax()))
        row.close()
        assert made == wanted[0]


def _three(model: torch.nn.Module, kv: Any, texts: list[list[int]]) -> tuple[Runner, list[Any]]:
    runner = runner_of(make_runner_parts(model, kv), kv)
    rows = [_open(runner, text) for text in texts]
    runner.step(rows, [np.asarray(text[:10], np.uint32) for text in texts])
    return runner, rows


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_step_happens_for_all_of_its_rows_or_for_none(name: str) -> None:
    model = models.causal(name)
    texts = [models.prompt(30, seed=seed)[0].tolist() for seed in (1, 2, 3)]
    wanted = _alone(model, texts, 1)
    with attached(model) as kv:
        runner, rows = _three(model, kv, texts)
        parts = [
            np.asarray(text[10 : 10 + n], np.uint32)
            for text, n in zip(texts, (1, 5, 1), strict=True)
        ]
        runs: list[int] = []

        def fail(module: Any, args: Any, output: Any) -> None:
            runs.append(1)
            if len(runs) == (2 if name == "bloom" else 1):  # its second rectangle
                raise ValueError("a fault")

        handle = model.get_input_embeddings().register_forward_hook(fail)
        with pytest.raises(ValueError, match="a fault"):
            runner.step(rows, parts)
        handle.remove()
        assert [row.seq.length for row in rows] == [10, 10, 10]
        assert [row.seq.known for row in rows] == [30, 30, 30]
        found = runner.step(rows, [np.asarray(text[10:], np.uint32) for text in texts])
        assert [[int(x)] for x in found.argmax(-1)] == wanted
        for row in rows:
            row.close()


def test_a_layer_that_some_rows_leave_out_moves_no_row() -> None:
    model = models.causal("bloom")
    texts = [models.prompt(30, seed=seed)[0].tolist() for seed in (1, 2, 3)]
    with attached(model) as kv:
        runner, rows = _three(model, kv, texts)
        layer = model.transformer.h[2].self_attention
        own = layer.forward

        def forward(hidden: torch.Tensor, *args: Any, **given: Any) -> Any:
            return (hidden, None) if hidden.shape[1] == 7 else own(hidden, *args, **given)

        layer.forward = forward
        parts = [
            np.asarray(text[10 : 10 + n], np.uint32)
            for text, n in zip(texts, (5, 7, 5), strict=True)
        ]
        with pytest.raises(StateError, match=r"layers \[2\]"):
            runner.step(rows, parts)
        assert [row.seq.length for row in rows] == [10, 10, 10]
        for row in rows:
            row.close()


@pytest.mark.parametrize("name", ["llama", "bloom", "qwen3_next"])
def test_a_step_that_does_not_fit_moves_no_row(name: str) -> None:
    model = models.causal(name)
    text = models.prompt(60)[0].tolist()
    wanted = _alone(model, [text], 1)
    with attached(model, gpu="1MiB", page_size=16) as kv:
        runner = runner_of(make_runner_parts(model, kv), kv)
        row = _open(runner, text)
        _give(runner, row, text[:20])
        fillers = []
        with pytest.raises(CapacityError):
            while True:
                fillers.append(_open(runner, [9] * 64))
                fillers[-1].seq.publishable = False
                _give(runner, fillers[-1], [9] * 64)
        with pytest.raises(CapacityError):
            while True:
                _give(runner, fillers[0], [9] * 16)
        assert row.seq.length == 20
        for filler in fillers:
            filler.close()
        assert int(_give(runner, row, text[20:]).argmax()) == wanted[0][0]
        row.close()


# ---- masks and views by themselves


def test_a_mask_is_only_described() -> None:
    model = load_tiny()
    with attached(model) as kv, kv.open([1, 2, 3]) as seq:
        step = kv.step([seq], [[1, 2, 3]])
        packing = Packing(step)
        mask = packing.mask("sdpa", {"mask_function": causal_mask_function})
        assert mask.shape == (1, 1, 3, 3) and mask.window is None
        assert "window=None" in repr(mask)
        moved = mask.to("meta")
        assert type(moved) is MaskRecipe and moved.device.type == "meta"
        with pytest.raises(Unpackable, match="computes with its mask"):
            mask.clone()
        for given in (
            {"mask_function": lambda *_: True},
            {"mask_function": causal_mask_function, "attention_mask": torch.ones(1, 3)},
            {"mask_function": causal_mask_function, "use_vmap": True},
        ):
            with pytest.raises(Unpackable, match="mask"):
                packing.mask("sdpa", given)
        step.rollback()


def test_attention_that_is_not_plainly_a_rows_own_is_refused() -> None:
    model = load_tiny()
    with attached(model) as kv, kv.open([1, 2, 3]) as seq:
        door = door_of(model)
        assert door is not None
        placed, plain = door.plan.placed[0], {"mask_function": causal_mask_function}
        step = kv.step([seq], [[1, 2, 3]])
        packing, obeyed = Packing(step), frozenset({"scaling", "dropout", "is_causal"})
        q, k, v = (torch.randn(1, heads, 3, 64) for heads in (4, 2, 2))
        for bad in (k[:, :1], k.double(), k[:, :, :2]):
            with pytest.raises(Unpackable, match="layer 0 has keys"):
                packing.write(placed, None, bad, v)
            with pytest.raises(Unpackable, match="layer 0 has values"):
                packing.write(placed, None, k, bad)
        packing.write(placed, None, k, v)
        mask = packing.mask("sdpa", plain)
        assert packing.mask("sdpa", plain) is mask

        def attend(query: Any = q, key: Any = k, value: Any = v, seen: Any = mask, **given: Any):
            return packing.attend(query, key, value, seen, given, obeyed)

        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.2, enable_gqa=True
        )
        found = attend(scaling=0.2, dropout=0.0, position_bias=None)
        torch.testing.assert_close(found.transpose(1, 2), wanted)
        windowed = MaskRecipe(mask.build, mask.arguments, 2, torch.bool)
        another = MaskRecipe(lambda **_: None, mask.arguments, None, torch.bool)
        for changed in (
            *(dict(key=k.clone()), dict(value=v.clone()), dict(seen=None)),
            *(dict(seen=torch.ones(1, 1, 3, 3)), dict(seen=windowed), dict(seen=another)),
            *(dict(query=q[:, :, :2]), dict(query=q[:, :3]), dict(dropout=0.1)),
            *(dict(is_causal=False), dict(position_bias=q)),
        ):
            with pytest.raises(Unpackable, match=r"packed.*run by itself"):
                attend(**changed)
        step.rollback()


def test_a_cache_of_a_packed_forward_is_of_no_use_afterwards() -> None:
    model = load_tiny()
    with attached(model) as kv:
        parts = make_runner_parts(model, kv)
        assert parts.forward is not None
        with kv.open([1, 2, 3]) as seq, kv.step([seq], [[1, 2, 3]]) as step:
            parts.forward(step, torch.tensor([2]))
            cache = parts.forward._call._cache
        k = torch.zeros(1, 2, 3, 64)
        with pytest.raises(StateError, match="over"):
            cache.update(k, k, 0)
