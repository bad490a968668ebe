"""Captured decode steps answer as the model does, and are dropped when it changes."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor

import flowkv
from tests import inside
from tests.clock import together
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.hooks.recorder import WAITS, LaunchRecorder, recorded
from tests.inside import GraphedForward, Later, graphs, shape_of

PROMPT = models.prompt(20)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where models run: on a CPU, where recordings stand in for graphs, and on a GPU."""
    return str(request.param)


def capturing(device: str) -> AbstractContextManager[Any]:
    """What captures steps on a device: a GPU needs nobody's help."""
    return recorded() if device == "cpu" else nullcontext()


def both(name: str, device: str) -> tuple[Any, Any]:
    """A model that is to be attached, and its twin."""
    return models.causal(name).to(device), models.causal(name).to(device)


def moved(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """Inputs of a model, on its device."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def counts(kv: flowkv.KV) -> tuple[int, int]:
    found = kv.stats()["graphs"]
    return found["captured"], found["replayed"]


WAYS: dict[str, dict[str, Any]] = {
    "one": dict(input_ids=PROMPT),
    "batch": models.padded(*(models.prompt(n, seed) for seed, n in enumerate((20, 9, 14)))),
    "beams": dict(input_ids=PROMPT, num_beams=3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("qwen3", "mistral", "gpt_oss")),
        "gemma3",
    ],
)
def test_replays_answer_as_the_model(name: str, way: str, device: str) -> None:
    """Pages turn over, windows slide, shapes grow; padding and beams have rows of their own."""
    (model, twin), given = both(name, device), moved(WAYS[way], device)
    with capturing(device), attached(model) as kv:
        assert_same(generate(model, 30, **given), generate(twin, 30, **given))
        captured, replayed = counts(kv)
        if (name, way, device) == ("gpt_oss", "beams", "cuda"):
            # Experts of beams stay `grouped_mm`, which counts on the host what is no bfloat16.
            assert "run eagerly" in kv.explain(PROMPT[0]).decoding
            return
        assert captured == 2 and replayed >= 20, kv.explain(PROMPT[0]).decoding
        assert not kv.stats()["graphs"]["eager"]
        said = str(kv.explain(PROMPT[0]))
        assert said.endswith(f"; 2 steps were captured, {replayed} replayed")
        assert_same(generate(model, 30, **given), generate(twin, 30, **given))
        assert counts(kv)[1] >= replayed + 25  # of known prompts, by the same graphs
        assert counts(kv)[0] == captured
        if device == "cpu":
            every_token_is_a_replay(kv, model, twin, given)


def every_token_is_a_replay(kv: flowkv.KV, model: Any, twin: Any, given: dict[str, Any]) -> None:
    """Ask a prompt that was asked twice again: its first token is a replay, too."""
    for length in (1, 12):
        replayed, known = counts(kv)[1], reused(kv)
        assert_same(generate(model, length, **given), generate(twin, length, **given))
        assert counts(kv)[1] == replayed + length and reused(kv) > known


class Decoding(LogitsProcessor):
    """Has experts computed otherwise from the first new token on, as `generate` does on a GPU."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.model.set_experts_implementation("batched_mm")
        return scores


def test_experts_that_are_computed_otherwise_while_generate_decodes() -> None:
    """Steps are captured, and what they filled is known to later prompts."""

    def decoded(model: Any, new: int, ids: torch.Tensor) -> Any:
        assert model.get_experts_implementation() == {"": "grouped_mm"}
        try:
            return generate(model, new, input_ids=ids, logits_processor=[Decoding(model)])
        finally:
            model.set_experts_implementation("grouped_mm")

    model, twin = both("gpt_oss", "cpu")
    with recorded(), attached(model) as kv:
        namespace, found = kv.namespace, decoded(model, 40, PROMPT)
        assert_same(found, decoded(twin, 40, PROMPT))
        assert counts(kv)[1] > 25, kv.explain(PROMPT[0]).decoding
        before = kv.stats()["tokens_reused"]
        assert_same(*(decoded(each, 8, found.sequences) for each in (model, twin)))
        assert kv.stats()["tokens_reused"] - before >= 48 and kv.namespace == namespace


@pytest.mark.parametrize(
    "options",
    [
        dict(codec="kv8", recent_tokens=0),
        dict(codec="auto", page_size=64, recent_tokens=0, warm_tokens=0),
    ],
    ids=["kv8", "auto"],
)
def test_encoded_pages(options: dict[str, Any], device: str) -> None:
    """Pages are sealed between replays, which read them from then on, in the same steps."""
    answers = []
    ids = models.prompt(options.get("page_size", 16) * 3 // 2).to(device)
    for graphs_of in ("off", "auto"):
        model = models.causal("llama").to(device)
        kept = dict(write_back=False, graphs=graphs_of, **options)
        late = behind(Device()) if device == "cpu" else nullcontext()
        with capturing(device), late, attached(model, **kept) as kv:
            answers.append(generate(model, 60, input_ids=ids))
            replayed = counts(kv)[1]
            generate(model, 1, input_ids=answers[-1].sequences)
            full = (ids.shape[1] + 59) // kv.page_size * kv.page_size
            assert kv.stats()["tokens_reused"] >= full, "what was filled is not known"
    assert replayed > 40
    assert_same(*answers)


def test_inference_mode_and_without_in_turns(device: str) -> None:
    (model, twin), given = both("llama", device), moved(WAYS["one"], device)
    with capturing(device), attached(model) as kv:
        for mode in (torch.inference_mode, nullcontext, torch.inference_mode):
            with mode():
                assert_same(generate(model, 12, **given), generate(twin, 12, **given))
        assert counts(kv)[1] > 25


def served(
    engine: flowkv.Engine, prompts: list[list[int]], lengths: tuple[int, ...]
) -> list[flowkv.Completion]:
    """Completions by an engine's own thread, which gets all requests before its first step."""
    each = zip(prompts, lengths, strict=True)
    return asyncio.run(engine.arun([flowkv.Request(prompt=p, max_new_tokens=n) for p, n in each]))


def test_rows_that_come_and_go_in_an_engine(device: str) -> None:
    model, twin = both("llama", device)
    prompts = [models.prompt(n, seed=n)[0].tolist() for n in (5, 30, 12, 18, 7)]
    lengths = (20, 8, 25, 12, 16)
    with capturing(device), attached(model) as kv, flowkv.Engine(model, kv, max_rows=4) as engine:
        answers = served(engine, prompts, lengths)
        for ids, length, answer in zip(prompts, lengths, answers, strict=True):
            given = torch.tensor([ids], device=device)
            wanted = generate(twin, length, input_ids=given).sequences[0, len(ids) :]
            assert list(answer.tokens) == wanted.tolist()
        assert counts(kv)[1] > 10


def test_tokens_that_only_the_device_knows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine replays a step over them, waits for nothing in it, and reads them afterwards."""
    model, twin = both("llama", device)
    prompts = [models.prompt(n, seed=n)[0].tolist() for n in (30, 12, 18)]
    lengths, waits, own = (40, 31, 40), list[str](), inside.engine_engine.follow
    followed = list[int]()

    def follow(runner: Any, parts: Any, ids: torch.Tensor) -> Any:
        followed.append(len(parts))
        assert ids.device.type == device
        with Watched(waits):
            return own(runner, parts, ids)

    replays = LaunchRecorder.replay

    def apart(self: LaunchRecorder) -> None:
        with torch._C._DisableTorchDispatch():
            replays(self)

    monkeypatch.setattr(inside.engine_engine, "follow", follow)
    monkeypatch.setattr(inside.engine_engine, "runs_behind", lambda logits: True)
    monkeypatch.setattr(inside.door, "modes", partial(inside.door.modes, own=False))
    monkeypatch.setattr(LaunchRecorder, "replay", apart)
    with capturing(device), attached(model) as kv, flowkv.Engine(model, kv, max_rows=4) as engine:
        answers = served(engine, prompts, lengths)
        for ids, length, answer in zip(prompts, lengths, answers, strict=True):
            given = torch.tensor([ids], device=device)
            wanted = generate(twin, length, input_ids=given).sequences[0, len(ids) :]
            assert list(answer.tokens) == wanted.tolist()
        assert counts(kv)[1] > 20 and len(followed) > 30 and set(followed) >= {3, 2}
        # Captures compare logits, twice where they are padded.
        assert len(waits) <= 2 * counts(kv)[0] or device != "cpu", waits
        known = kv.stats()["blocks"]
        assert known >= sum(
            (len(ids) + n - 1) // 16 for ids, n in zip(prompts, lengths, strict=True)
        )


class Nano(torch.nn.Module):
    """A model of one's own: attention that is FlowKV's, in `layers` layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(64, 32)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(layers))
        self.place = torch.nn.Embedding(256, 32)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tokens, positions = (x.to(self.embed.weight.device) for x in (tokens, positions))
        x = self.embed(tokens) + self.place(positions)
        for i, qkv in enumerate(self.qkv):
            q, k, v = qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            x = x + flowkv.attention(q, k, v, layer=i).transpose(1, 2).reshape(x.shape)
        return x @ self.embed.weight.T


class Latents(Nano):
    """The same over latents (MLA): one key for all heads, of which a part is the value."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.query, self.key = torch.nn.Linear(32, 4 * 24), torch.nn.Linear(32, 24)
        self.value = torch.nn.Linear(4 * 16, 32)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        q = self.query(x).view(*x.shape[:2], 4, 24).transpose(1, 2)
        out = flowkv.attention(q, self.key(x)[:, None], None, layer=0).transpose(1, 2)
        return (x + self.value(out.reshape(*x.shape[:2], 64))) @ self.embed.weight.T


def latents(page_size: int) -> flowkv.Geometry:
    """That of `Latents`."""
    group = flowkv.LayerGroup(
        layers=(0,), kv_heads=1, head_dim=24, value_dim=16, dtype="float32", kind="latent"
    )
    return flowkv.Geometry(groups=(group,), page_size=page_size)


def geometry(
    layers: int, page_size: int, window: int | None = None, device: str = "cpu"
) -> flowkv.Geometry:
    """That of `Nano`."""
    group = flowkv.LayerGroup(
        layers=tuple(range(layers)),
        kv_heads=2,
        head_dim=16,
        value_dim=16,
        dtype="float32",
        kind="full" if window is None else "sliding",
        window=window,
        device=device,
    )
    return flowkv.Geometry(groups=(group,), page_size=page_size)


def decoded(
    run: Callable[..., torch.Tensor], kv: flowkv.KV, rows: list[int], most: int = 3
) -> list[torch.Tensor]:
    """What a model answers in steps of so many of its rows, behind their prompts."""
    found = []
    with torch.no_grad():
        seqs = [kv.open([*range(5 + i, 15 + 2 * i)], reuse=False) for i in range(most)]
        for step in kv.prefill(seqs):
            run(step.tokens, step.positions)
        for turn, count in enumerate(rows):
            with kv.step(seqs[:count], [[turn % 60]] * count) as step:
                found.append(run(step.tokens, step.positions))
        for seq in seqs:
            seq.close()
    return found


def test_a_model_of_ones_own(device: str) -> None:
    model = Nano().to(device)
    place = device if device == "cpu" else f"{device}:0"

    with capturing(device), flowkv.KV(geometry(2, 16, device=place), gpu="8MiB") as kv:
        rows = [3 - turn // 25 for turn in range(40)]
        wanted = decoded(model, kv, rows)
        graphed = flowkv.graphed(model, kv)
        found = decoded(graphed, kv, rows)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
        assert counts(kv)[1] > 20
        model.qkv[0].weight.data = model.qkv[0].weight.data * 0.5  # another tensor
        for a, b in zip(decoded(graphed, kv, rows), decoded(model, kv, rows), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("change", ["precision", "dropout"])
def test_a_switch_between_two_steps_of_a_model_of_ones_own(change: str) -> None:
    before, model, replayed = torch.get_float32_matmul_precision(), Nano(), list[int]()
    model.drop = torch.nn.Dropout(0.0)
    with recorded(), flowkv.KV(geometry(2, 16), gpu="8MiB") as kv, torch.no_grad():
        run, seq = flowkv.graphed(model.eval(), kv), kv.open([5, 6, 7], reuse=False)
        try:
            for turn in range(12):
                if turn == 8 and change == "precision":
                    torch.set_float32_matmul_precision("medium")
                elif turn == 8:
                    model.drop.train()
                with kv.step([seq], [[turn]] if turn else [[5, 6, 7]]) as step:
                    run(step.tokens, step.positions)
                replayed.append(counts(kv)[1])
        finally:
            torch.set_float32_matmul_precision(before)
    assert replayed[7] > replayed[6]
    assert replayed[8] == replayed[7]  # as the model computes now
    assert replayed[11] > replayed[8]


@pytest.mark.thorough
def test_launches_of_triton() -> None:
    """In a process of its own, since Triton decides on its import whether it interprets."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    path = Path(__file__).with_name("interpreted_graphs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        command, env=env, cwd=path.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# What changes


def swapped(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight * 0.5)


def data(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.data = layer.weight.data * 0.5


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(0.5)


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: out * 0.5)


def patched(model: Any) -> None:
    own = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: own(x) * 0.5


def another_module(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def softer(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.01


@pytest.mark.parametrize(
    "change", [swapped, data, in_place, hooked, patched, another_module, softer]
)
@pytest.mark.filterwarnings("ignore:FlowKV shares nothing")
def test_a_change_between_two_tokens(change: Callable[[Any], None], device: str) -> None:
    """The next token is the changed model's, and so are all behind it."""
    model, twin = both("llama", device)

    def step_by_step(each: Any) -> list[torch.Tensor]:
        logits, cache, ids = [], None, PROMPT.to(device)
        with torch.no_grad():
            for turn in range(24):
                if turn == 12:
                    change(each)
                cache = cache or DynamicCache(config=each.config)
                out = each(
                    input_ids=ids,
                    position_ids=torch.arange(20 + turn, device=device)[None, -ids.shape[1] :],
                    past_key_values=cache,
                    logits_to_keep=1,
                )
                logits.append(out.logits[:, -1])
                ids = logits[-1].argmax(-1)[None]
        return logits

    with capturing(device), attached(model) as kv:
        found = step_by_step(model)
        assert counts(kv)[1] >= 5
        for ours, theirs in zip(found, step_by_step(twin), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


class Doubling(TorchDispatchMode):
    """Doubles what matrix products give."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        out: torch.Tensor = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.mm.default else out


@pytest.mark.parametrize("mode", [Doubling, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_mode_is_obeyed(mode: Callable[[], Any]) -> None:
    model, twin = models.causal("llama"), models.causal("llama")
    answers = []
    with recorded(), attached(model):
        for each in (model, twin):
            out = generate(each, 12, input_ids=PROMPT)
            again = dict(past_key_values=out.past_key_values, position_ids=torch.tensor([[31]]))
            with mode(), torch.no_grad():
                answers.append(each(input_ids=out.sequences[:, -1:], **again).logits)
    torch.testing.assert_close(*answers, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states"])
@pytest.mark.filterwarnings("ignore:FlowKV computes prompts whose hidden states")
def test_what_a_graph_does_not_give(asked: str) -> None:
    model = models.causal("llama")
    model.set_attn_implementation("eager")
    with recorded(), attached(model) as kv:
        out = generate(model, 12, input_ids=PROMPT, **{asked: True})
        assert len(out[asked.removeprefix("output_")]) == 12
        assert counts(kv) == (0, 0)


def test_a_mask_that_hides_tokens_is_obeyed_once_there_are_graphs(device: str) -> None:
    """It is compared while the graph runs, whose answer is not used then."""
    model, twin = both("llama", device)
    answers = []
    with capturing(device), attached(model) as kv:
        for each in (model, twin):
            out = generate(each, 12, input_ids=PROMPT.to(device))
            mask = torch.ones(1, 32, dtype=torch.long, device=device)
            mask[0, 5:15] = 0
            place = torch.tensor([[31]], device=device)
            given = dict(past_key_values=out.past_key_values, position_ids=place)
            with torch.no_grad():
                logits = each(input_ids=out.sequences[:, -1:], attention_mask=mask, **given).logits
            answers.append(logits)
            assert counts(kv)[1] > 5
        assert not torch.allclose(answers[0], out.logits[-1][None], atol=1e-2)
    torch.testing.assert_close(*answers, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("asked", [dict(output_router_logits=True), dict(use_cache=False)])
def test_more_than_logits_is_asked_for_once_there_are_graphs(
    asked: dict[str, bool], device: str
) -> None:
    model, twin = both("gpt_oss", device)
    answers = []
    with capturing(device), attached(model) as kv:
        for each in (model, twin):
            out = generate(each, 10, input_ids=PROMPT.to(device))
            place = torch.tensor([[29]], device=device)
            given = dict(past_key_values=out.past_key_values, position_ids=place)
            replayed = counts(kv)[1]
            with torch.no_grad():
                answers.append(each(input_ids=out.sequences[:, -1:], **given, **asked))
            assert counts(kv)[1] == replayed > 0, kv.explain(PROMPT[0]).decoding
    ours, theirs = answers
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=2e-4, atol=2e-4)


# Limits


def test_a_capture_that_fails_leaves_steps_eager() -> None:
    model, twin = models.causal("llama"), models.causal("llama")

    class Failing(LaunchRecorder):
        def record(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
            raise RuntimeError("operation not permitted when stream is capturing")

    with recorded() as made, attached(model) as kv, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recorder_of", lambda device: made.append(Failing()) or made[-1])
        assert_same(generate(model, 30, input_ids=PROMPT), generate(twin, 30, input_ids=PROMPT))
        assert "not permitted" in kv.stats()["graphs"]["eager"] and counts(kv) == (0, 0)
        assert sum(isinstance(one, Failing) for one in made) == 1  # it is not tried again


def test_a_replay_that_fails_leaves_steps_eager() -> None:
    model, twin = models.causal("llama"), models.causal("llama")

    class Failing(LaunchRecorder):
        left = 4

        def replay(self) -> None:
            self.left -= 1
            if not self.left:
                raise RuntimeError("an illegal instruction was encountered")
            super().replay()

    with recorded(), attached(model) as kv, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recorder_of", lambda device: Failing())
        assert_same(generate(model, 20, input_ids=PROMPT), generate(twin, 20, input_ids=PROMPT))
        assert "illegal" in kv.stats()["graphs"]["eager"]


def test_a_captured_step_that_answers_otherwise_is_not_used() -> None:
    model, twin = models.causal("llama"), models.causal("llama")

    class Wrong(LaunchRecorder):
        def replay(self) -> None:
            super().replay()
            self.calls[-1][3].mul_(1.5)

    with recorded(), attached(model) as kv, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recorder_of", lambda device: Wrong())
        assert_same(generate(model, 30, input_ids=PROMPT), generate(twin, 30, input_ids=PROMPT))
        assert "other logits" in kv.stats()["graphs"]["eager"]


class Scaling(Nano):
    """All tokens of a step share a scale where one is far from what this model has."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        for i, qkv in enumerate(self.qkv):
            q, k, v = qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            seen = flowkv.attention(q, k, v, layer=i).transpose(1, 2).reshape(x.shape)
            x = x + seen / (seen.abs().amax() / 100).clamp(min=1)
        return x @ self.embed.weight.T


@pytest.mark.parametrize("rows", [[3] * 6, [4] * 6 + [3] * 6])
def test_rows_of_no_token_change_no_scale_of_others(rows: list[int]) -> None:
    """Three rows run eagerly, not beside a fourth, of which kernels write nothing."""
    model = Scaling()
    with recorded(), flowkv.KV(geometry(2, 16), gpu="8MiB") as kv:
        wanted = decoded(model, kv, rows, 4)
        for a, b in zip(decoded(flowkv.graphed(model, kv), kv, rows, 4), wanted, strict=True):
            torch.testing.assert_close(a, b)
        assert "other logits" in kv.stats()["graphs"]["eager"]


def test_a_graph_that_was_never_padded_serves_no_fewer_rows() -> None:
    model, twin = models.causal("llama"), models.causal("llama")
    with recorded(), attached(model) as kv:
        for count, captured in ((4, 1), (3, 2), (4, 2), (3, 2)):
            given = dict(input_ids=torch.cat([models.prompt(20, seed=n) for n in range(count)]))
            assert_same(generate(model, 8, **given), generate(twin, 8, **given))
            assert counts(kv)[0] == captured


def test_a_prompt_that_is_not_captured_leaves_the_graphs_of_decode_steps() -> None:
    model, twin = models.causal("llama"), models.causal("llama")

    class Long(LaunchRecorder):
        def record(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
            out = super().record(run)
            if out.shape[1] > 1 or any(
                isinstance(a, torch.Tensor) and a.shape == (1, 32, 64)
                for call in self.calls
                for a in call[1]
            ):
                raise RuntimeError("a long step is not permitted")
            return out

    with recorded(), attached(model) as kv, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recorder_of", lambda device: Long())
        generate(model, 8, input_ids=PROMPT)
        for seed in range(4):
            given = dict(input_ids=models.prompt(30, seed=seed + 1))
            assert_same(generate(model, 8, **given), generate(twin, 8, **given))
        found, said = kv.stats()["graphs"], kv.explain(PROMPT[0]).decoding
        assert not found["eager"] and "not permitted" in found["prompts"]
        assert found["replayed"] > 20 and "short prompts run eagerly: a step cannot" in said


@pytest.mark.parametrize("name", ["falcon", "deepseek_v3"])
def test_a_model_that_attends_itself_is_not_captured(name: str) -> None:
    model, twin = models.causal(name), models.causal(name)
    with recorded(), attached(model) as kv:
        assert_same(generate(model, 12, input_ids=PROMPT), generate(twin, 12, input_ids=PROMPT))
        assert counts(kv) == (0, 0)
        assert "computes with keys and values itself" in kv.stats()["graphs"]["eager"]
        assert "run eagerly: the model computes with keys" in kv.explain(PROMPT[0]).decoding


def test_a_model_that_keeps_states_says_why_it_is_not_captured() -> None:
    with recorded(), attached(models.causal("falcon_h1")) as kv:
        assert "keeps recurrent states" in kv.explain(PROMPT[0]).decoding


@pytest.mark.parametrize(
    ("size", "why"), [("off", 'graphs="off"'), (0, "takes more than the 0 bytes")]
)
def test_memory_is_bounded(size: Any, why: str) -> None:
    model, twin = models.causal("llama"), models.causal("llama")
    with recorded(), attached(model, graphs=size) as kv:
        assert_same(generate(model, 20, input_ids=PROMPT), generate(twin, 20, input_ids=PROMPT))
        assert why in kv.stats()["graphs"]["eager"] and kv.stats()["graphs"]["bytes"] == 0


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    model = models.causal("llama")
    with recorded(), attached(model) as kv:
        for _ in range(2):
            generate(model, 30, input_ids=PROMPT)
        assert kv.stats()["graphs"]["captured"] == 2 and kv.stats()["graphs"]["bytes"] == 1


def test_detached_models_are_as_before() -> None:
    model = models.causal("llama")
    with recorded(), attached(model):
        assert "forward" in vars(model)
    assert "forward" not in vars(model)


def test_threads_share_graphs(device: str) -> None:
    model, twin = both("llama", device)
    prompts = [models.prompt(18, seed=n).to(device) for n in range(3)]
    wanted = [generate(twin, 25, input_ids=ids) for ids in prompts]
    found: dict[int, Any] = {}
    with capturing(device), attached(model) as kv:

        def run(number: int) -> None:
            found[number] = generate(model, 25, input_ids=prompts[number])

        run(0)  # captured by one: others replay while it does
        together(*(partial(run, n) for n in range(3)))
        assert counts(kv)[1] > 50
    for number, answer in enumerate(wanted):
        assert_same(found[number], answer)


@pytest.mark.parametrize(
    ("rows", "new", "pages", "wanted"),
    [
        *((1, 1, 1, (1, 1, 1)), (3, 1, 1, (4, 1, 1)), (9, 1, 2, (16, 1, 2))),
        *((33, 1, 3, (48, 1, 4)), (60, 1, 5, (60, 1, 8))),
        *((1, 2, 1, (1, 32, 1)), (1, 33, 3, (1, 64, 4)), (1, 512, 9, (1, 512, 16))),
    ],
)
def test_shapes(rows: int, new: int, pages: int, wanted: tuple[int, int, int]) -> None:
    assert shape_of(rows, new, pages, 60) == wanted


# What a replayed step costs the host

MOST_CALLS = 60
"""Functions of FlowKV's own that run in a replayed step, however many layers there are."""


class Watched(TorchDispatchMode):
    """Notes the operations beside a recording, and into `waits` those that wait for a device."""

    names_flowkv_pages = True

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            self.waits.append(str(func))
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Device:
    """A device that runs behind the host: what it was given is done once a token was read.

    Attributes:
        given: Steps that it was given.
        done: Those that it has done.
        waits: Who waited for it in each forward that was a replay.
    """

    def __init__(self) -> None:
        self.given = self.done = 0
        self.waits: list[list[str]] = []


@contextmanager
def waiting(device: Device, waits: list[str]) -> Iterator[None]:
    """Steps are replayed by a device that runs behind; reads of what it has not done are noted."""

    class Copy(Later):
        def __init__(self, *values: torch.Tensor | None) -> None:
            super().__init__(*values)
            self.after, self.asks = device.given, any(v is not None for v in values)

        @property
        def ready(self) -> bool:
            return not self.asks

        def result(self) -> list[torch.Tensor | None]:
            if self.asks and device.done < self.after == device.given:
                waits.append("a copy")  # with nothing behind it that the device could do
            return super().result()

    def replay(self: LaunchRecorder) -> None:
        device.given += 1
        with torch._C._DisableTorchDispatch():
            replays(self)

    replays = LaunchRecorder.replay
    with pytest.MonkeyPatch.context() as patch:
        for module in (inside.seal, inside.rows):
            patch.setattr(module, "Later", Copy)
        patch.setattr(LaunchRecorder, "replay", replay)
        patch.setattr(inside.door, "modes", partial(inside.door.modes, own=False))
        yield


@contextmanager
def behind(device: Device) -> Iterator[None]:
    """What forwards that are replayed read of such a device is noted, forward by forward."""
    waits: list[str] = []
    hook = inside.door.ForwardHook
    own_before, own_after, replayed = hook.before, hook.after, [False]

    def before(*given: Any) -> Any:
        waits.clear()
        device.done = device.given  # the caller has read the last step's token
        with Watched(waits):
            found = own_before(*given)
        replayed[0] = device.given > device.done
        return found

    def after(*given: Any) -> None:
        with Watched(waits):
            own_after(*given)
        if replayed[0]:
            device.waits.append([*waits])

    with waiting(device, waits), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, "before", before)
        patch.setattr(hook, "after", after)
        yield


STORIES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "raw": (dict(input_ids=PROMPT), {}, 300),
    "padded": (WAYS["batch"], {}, 50),
    "kv8": (dict(input_ids=PROMPT), dict(codec="kv8", recent_tokens=0), 150),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_replayed_step_waits_for_nothing(story: str) -> None:
    """From the first look at its arguments to the pages that it fills, are checked and sealed."""
    given, options, length = STORIES[story]
    model, device = models.short(), Device()
    with recorded(), behind(device), attached(model, **options) as kv:
        generate(model, length, **given)
        blocks = kv.stats()["blocks"]
    assert len(device.waits) == counts(kv)[1] > length - 30 and blocks >= length // 16 - 1
    assert not any(device.waits), next(filter(None, device.waits))


class Reading(Later):
    """Tokens on their way to an engine: its device has done what was given before, once read."""

    device: Device

    def __init__(self, *values: torch.Tensor | None) -> None:
        super().__init__(*values)
        self.after = self.device.given

    def result(self) -> list[torch.Tensor | None]:
        self.device.done = max(self.device.done, self.after)
        return super().result()


@pytest.mark.thorough
def test_turns_of_an_engine_wait_for_tokens_alone_while_rows_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows end, others join in the same buckets, pages fill and leave: 300 replays by few graphs.

    A turn may wait for the step before the one that its device was given last.
    """
    (model, twin), device = both("llama", "cpu"), Device()
    prompts = [models.prompt(4 + n % 11, seed=n)[0].tolist() for n in range(72)]
    lengths = [24 + 7 * n % 37 for n in range(72)]
    loop, runner = inside.engine_engine.Loop, inside.PackedRunner
    turn, step, rows, captures = loop.turn, runner.step, list[int](), list[int]()
    eager, waits = [0], list[str]()

    def watched(self: Any) -> None:
        given, before = device.given, eager[0]
        waits.clear()
        with Watched(waits):
            turn(self)
        if device.given > given and eager[0] == before:
            device.waits.append([*waits])
            captures.append(counts(kv)[0])

    def stepped(self: Any, some: Any, tokens: Any) -> torch.Tensor:
        replayed = counts(kv)[1]
        found = step(self, some, tokens)
        eager[0] += counts(kv)[1] == replayed
        rows.append(len(some))
        return found

    monkeypatch.setattr(Reading, "device", device, raising=False)
    monkeypatch.setattr(inside.sampling, "Later", Reading)
    monkeypatch.setattr(inside.engine_engine, "runs_behind", lambda logits: True)
    monkeypatch.setattr(loop, "turn", watched)
    monkeypatch.setattr(runner, "step", stepped)
    small = dict(gpu="1600KiB", write_back=False)
    with waiting(device, waits), recorded() as made, attached(model, **small) as kv:
        with flowkv.Engine(model, kv, max_rows=8) as engine:
            each = zip(prompts, lengths, strict=True)
            answers = [engine.submit(ids, max_new_tokens=length) for ids, length in each]
            found = [list(answer.result().tokens) for answer in answers]
        left = kv.stats()["events"]['evicted_pages_total{reason="space",tier="device"}']
    for n in range(0, len(prompts), 6):
        wanted = generate(twin, lengths[n], input_ids=torch.tensor([prompts[n]])).sequences
        assert found[n] == wanted[0, len(prompts[n]) :].tolist()
    assert len(device.waits) >= 300
    assert sum(a < b for a, b in itertools.pairwise(rows)) >= 20, "rows that join"
    assert left > 50, "pages that leave a full device"
    middle = captures[len(captures) // 4 : -len(captures) // 4]
    assert {*middle} == {captures[len(captures) // 2]} and len(made) <= 12, captures
    assert not any(device.waits), next(filter(None, device.waits))


def test_a_replay_is_copies_and_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies into the buffers, what was recorded, a copy of the logits."""
    own, seen = GraphedForward.replay, Counter[str]()
    replays = LaunchRecorder.replay

    def watched(self: GraphedForward, *args: Any) -> Any:
        with Watched([]) as mode:
            found = own(self, *args)
        seen.update(mode.seen)
        return found

    def apart(self: LaunchRecorder) -> None:
        with torch._C._DisableTorchDispatch():
            replays(self)

    monkeypatch.setattr(GraphedForward, "replay", watched)
    monkeypatch.setattr(LaunchRecorder, "replay", apart)
    model = models.short()
    with recorded(), attached(model) as kv:
        generate(model, 60, input_ids=PROMPT)
        steps = counts(kv)[1]
    assert steps > 40
    assert seen["clone"] == steps and seen["copy_"] <= 6 * steps
    assert seen.keys() <= {"clone", "copy_", "slice", "select", "view", "detach"}


def test_copies_are_joined_under_the_lock_before_a_replay() -> None:
    """Other threads may queue some meanwhile."""
    model, held = models.short(), list[bool]()
    with recorded(), attached(model) as kv:
        (pool,) = kv.planner.store.pools.values()
        copies: Any = SimpleNamespace(reuse=int, free=lambda *_: None)
        copies.join = lambda: held.append(kv.planner.guard._is_owned())
        pool.copies = copies
        generate(model, 12, input_ids=PROMPT)
        pool.copies = None
        assert all(held) and len(held) >= counts(kv)[1] > 5


@contextmanager
def own_calls(counted: list[Counter[str]]) -> Iterator[None]:
    """Counts the functions of FlowKV's own that each forward runs, but for what a recorder does."""
    replays = LaunchRecorder.replay

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and "/flowkv/" in frame.f_code.co_filename:
            if frame.f_code.co_qualname == "ForwardHook.before":
                counted.append(Counter())
            if counted:
                counted[-1][frame.f_code.co_qualname] += 1

    def apart(self: LaunchRecorder) -> None:
        sys.setprofile(None)
        replays(self)
        sys.setprofile(profile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchRecorder, "replay", apart)
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize("way", ["one", "batch"])
def test_calls_of_a_replayed_step(way: str) -> None:
    usual = []
    for layers in (2, 4):
        torch.manual_seed(0)
        shape = models.GROUPED | dict(num_hidden_layers=layers)
        model, counted = LlamaForCausalLM(LlamaConfig(**shape)).eval(), list[Counter[str]]()
        with recorded(), attached(model), own_calls(counted):
            generate(model, 24, **WAYS[way])
        usual.append(counted[-2])
        assert usual[-1]["GraphedForward.replay"] == 1
        assert usual[-1].total() <= MOST_CALLS, usual[-1].most_common()
    assert usual[0] == usual[1]


def test_weights_that_are_read_as_needed(tmp_path: Path) -> None:
    """What moves weights between modules is not captured."""
    model, twin = models.causal("llama"), models.causal("llama")
    weights = flowkv.attach_weights(model, budget="60%", disk=str(tmp_path))
    with recorded(), attached(model) as kv:
        assert_same(generate(model, 12, input_ids=PROMPT), generate(twin, 12, input_ids=PROMPT))
        assert counts(kv) == (0, 0)
    weights.close()


@pytest.mark.parametrize("engine", [False, True])
def test_no_graph_is_kept_of_a_model_that_changed_for_some_steps(engine: bool) -> None:
    class Changed(LogitsProcessor):
        def __init__(self, model: Any, first: int, last: int) -> None:
            self.norm, self.steps, self.span = (
                model.model.layers[0].input_layernorm,
                0,
                (first, last),
            )
            self.usual = self.norm.variance_epsilon

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            if self.steps in self.span:
                self.norm.variance_epsilon = 5.0 if self.steps == self.span[0] else self.usual
            return scores

    for first, last in ((1, 8), (2, 12), (5, 20)):
        model, twin = models.short(), models.short()
        ids = models.prompt(20)
        want = generate(twin, 30, input_ids=ids, logits_processor=[Changed(twin, first, last)])
        with recorded(), attached(model) as kv:
            processors = [Changed(model, first, last)]
            if not engine:
                assert_same(generate(model, 30, input_ids=ids, logits_processor=processors), want)
            else:
                with flowkv.Engine(model, kv, max_rows=4) as serving:
                    options = {"logits_processor": processors}
                    job = serving.submit(ids[0].tolist(), max_new_tokens=30, options=options)
                    assert list(job.result().tokens) == want.sequences[0, 20:].tolist()
            assert counts(kv)[1] > 3
