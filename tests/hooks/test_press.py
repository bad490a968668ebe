"""Prompts that a press of kvpress prunes: its own answer, stored and shared under its name."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, foreign, generate, reused
from tests.hooks.test_sparsify import distinct
from tests.inside import ConfigError, Press, StateError, with_positions

NEW = 6
LOADED: dict[float, float] = {}
"""What presses load, by what they ask for."""
LIBRARY = importlib.util.find_spec("kvpress") is not None
needs_library = pytest.mark.skipif(not LIBRARY, reason="kvpress is not installed")


@dataclass
class Stub:
    """A press by kvpress's protocol: in each head it keeps the tokens with the shortest keys.

    Attributes:
        compression_ratio: The part that is dropped.
        scale: Factor of the values, as merging presses change them.
        loads: What it loads for a model, as presses do that were trained.
        odd: How it leaves what pages cannot hold: "", "layers", "masks", "none", "nan" or "raises".
    """

    compression_ratio: float = 0.5
    scale: float = 1.0
    odd: str = ""
    held: list[Any] = field(default_factory=list)
    loads: float = 0.0
    loaded: Any = None

    def compress(
        self, module: Any, hidden: Any, keys: Any, values: Any, weights: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Return what is left of keys and values `[1, Hk, S, D]`."""
        assert kwargs["cache_position"][-1] + 1 == hidden.shape[1]
        if self.odd == "raises":
            raise AssertionError("too short a prompt")
        count = int(keys.shape[2] * (1 - self.compression_ratio))
        count += module.layer_idx if self.odd == "layers" else 0
        if self.odd == "masks":
            module.masked_key_indices = ([0], [0], [0])
        if self.odd == "none":
            return keys, values
        kept = (-keys.norm(dim=-1)).topk(count, -1).indices[..., None].expand(-1, -1, -1, 16)
        values = values * (torch.nan if self.odd == "nan" else self.scale)
        return keys.gather(2, kept), values.gather(2, kept)

    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        columns = kwargs["hidden_states"].shape[1]
        if columns == layer.keys.shape[2]:
            found = layer.keys, layer.values
            layer.keys, layer.values = self.compress(
                module, kwargs["hidden_states"], *found, None, kwargs
            )
        return output

    @contextmanager
    def __call__(self, model: Any) -> Any:
        """Prune what a prefill inside of the block leaves."""
        self.loaded = torch.full((3,), LOADED.get(self.loads, 0.0))
        handles = []
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb
            handles.append(layer.self_attn.register_forward_hook(self._after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Answer:
    """Tokens and logits, as `generate` returns them."""

    def __init__(self, ids: torch.Tensor, logits: list[torch.Tensor]) -> None:
        self.logits = logits
        self.sequences = torch.cat([ids, *(one.argmax(-1)[None] for one in logits)], 1)


@torch.no_grad()
def alone(
    model: Any, press: Any, ids: torch.Tensor, question: torch.Tensor | None = None
) -> Answer:
    """What kvpress answers: a plain prefill under the press, then greedy tokens without it."""
    model = copy.deepcopy(model)  # the press leaves submodules behind
    cache, given, logits = DynamicCache(), ids, []
    with with_positions(model), press(model):
        out = model(ids, past_key_values=cache).logits[:, -1]
    end = ids.shape[1]
    if question is not None:
        places = torch.arange(end, end + question.shape[1])[None]
        out = model(question, past_key_values=cache, position_ids=places).logits[:, -1]
        end, given = end + question.shape[1], torch.cat([ids, question], 1)
    for at in range(NEW):
        logits.append(out)
        if at < NEW - 1:
            places = torch.tensor([[end + at]])
            token = out.argmax(-1)[None]
            out = model(token, past_key_values=cache, position_ids=places).logits[:, -1]
    return Answer(given, logits)


def ask(model: Any, kv: flowkv.KV, ids: torch.Tensor, question: torch.Tensor) -> Any:
    """What `generate` answers to a question behind a context."""
    cache = kv.cache(input_ids=ids)
    found = generate(model, NEW, input_ids=torch.cat([ids, question], 1), past_key_values=cache)
    cache.close()
    return found


@pytest.fixture
def model() -> Any:
    return models.causal("llama")


QUESTIONS = distinct(9, 2), distinct(14, 3)


@pytest.mark.parametrize("length", [100, 128, 131])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_answer_is_the_press_s_own(model: Any, length: int, scale: float) -> None:
    ids, press = distinct(length), Stub(0.6, scale)
    wanted = alone(model, press, ids)
    behind = [alone(model, press, ids, question) for question in QUESTIONS]
    exact = generate(model, NEW, input_ids=ids)
    with attached(model, sparsify=press) as kv:
        for _ in range(2):
            assert_same(generate(model, NEW, input_ids=ids), wanted)
            for question, one in zip(QUESTIONS, behind, strict=True):
                assert_same(ask(model, kv, ids, question), one)
        assert not foreign(kv)
    assert any(not torch.equal(a, b) for a, b in zip(exact.logits, wanted.logits, strict=True))
    assert_same(generate(model, NEW, input_ids=ids), exact)


def presses(kv: flowkv.KV, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every run of a press on a prompt appends the prompt's tokens."""
    runs, run = list[int](), Press.prefill

    def counted(press: Press, door: Any, ids: torch.Tensor) -> Any:
        runs.append(ids.shape[1])
        return run(press, door, ids)

    monkeypatch.setattr(Press, "prefill", counted)
    return runs


def test_a_context_is_pressed_once_and_shared(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, other = distinct(140), distinct(140, 5)
    with attached(model, sparsify=Stub(0.6)) as kv:
        runs = presses(kv, monkeypatch)
        open_ones = [kv.cache(input_ids=ids) for _ in QUESTIONS]
        for question, cache in zip(QUESTIONS, open_ones, strict=True):
            whole = torch.cat([ids, question], 1)
            generate(model, NEW, input_ids=whole, past_key_values=cache)
        assert runs == [140]
        assert reused(kv) == 140, "by the second question"
        assert [cache.reused for cache in open_ones] == [0, 140]
        first, second = (cache.rows.seqs[0] for cache in open_ones)
        shared = [a for a, b in zip(first.blocks[0], second.blocks[0], strict=True) if a and a is b]
        assert len(shared) == 56 // 16, "all pages that the 56 tokens fill"
        assert first.dropped == second.dropped == 140 - 56
        for cache in open_ones:
            cache.close()
        ask(model, kv, other, QUESTIONS[0])
        assert runs == [140, 140], "another context has another name"


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("tiers", [{}, {"codec": "kv8"}])
def test_another_cache_finds_it(
    model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, tiers: dict[str, Any]
) -> None:
    ids, place = distinct(140), f"{tmp_path}/kv:64MiB"
    with attached(model, sparsify=Stub(0.6), disk=place, **tiers) as kv:
        first = [ask(model, kv, ids, question) for question in QUESTIONS]
        kv.flush()
    with attached(model, sparsify=Stub(0.6), disk=place, **tiers) as kv:
        runs = presses(kv, monkeypatch)
        for question, one in zip(QUESTIONS, first, strict=True):
            assert_same(ask(model, kv, ids, question), one, 2e-2 if tiers else 2e-4)
            if not tiers:
                assert_same(one, alone(model, Stub(0.6), ids, question))
        assert not runs
        assert reused(kv) == 280
    exact = generate(model, NEW, input_ids=ids)
    for press in (Stub(0.5), Stub(0.6, 0.5)):
        with attached(model, sparsify=press, disk=place, **tiers) as kv:
            runs = presses(kv, monkeypatch)
            found = ask(model, kv, ids, QUESTIONS[0])
            assert runs, "what another press left is not read"
            if not tiers:
                assert_same(found, alone(model, press, ids, QUESTIONS[0]))
            kv.flush()
    with attached(model, disk=place, **tiers) as kv:
        assert_same(generate(model, NEW, input_ids=ids), exact, 2e-2 if tiers else 2e-4)
        assert reused(kv) == 0, "nor by exact requests"


def test_other_tenants_and_private_models_do_not_share(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, whole = distinct(140), torch.cat([distinct(140), QUESTIONS[0]], 1)
    with attached(model, sparsify=Stub(0.6)) as kv:
        runs = presses(kv, monkeypatch)
        for tenant in ("ann", "bob", "ann"):
            cache = kv.cache(input_ids=ids, tenant=tenant)
            generate(model, NEW, input_ids=whole, past_key_values=cache)
            cache.close()
        assert runs == [140, 140]


@pytest.mark.usefixtures("all_is_loaded")
def test_what_is_forgotten_is_gone(
    model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, place = distinct(140), f"{tmp_path}/kv:64MiB"
    for prefix in (140, 30):
        with attached(model, sparsify=Stub(0.6), disk=place) as kv:
            runs = presses(kv, monkeypatch)
            ask(model, kv, ids, QUESTIONS[0])
            assert runs == [140]
            assert kv.stats()["blocks"]
            kv.flush()
            kv.forget(ids[0, :prefix].tolist())
            assert kv.stats()["blocks"] == 0
            ask(model, kv, ids, QUESTIONS[0])
            assert runs == [140, 140]
            kv.forget(ids[0].tolist())


def test_a_copy_goes_on_by_itself(model: Any) -> None:
    ids = distinct(140)
    wanted = [alone(model, Stub(0.6), ids, question) for question in QUESTIONS]
    with attached(model, sparsify=Stub(0.6)) as kv, torch.no_grad():
        cache = kv.cache(input_ids=ids)
        model(ids, past_key_values=cache, logits_to_keep=1)
        for question, one in zip(QUESTIONS, wanted, strict=True):
            twin = copy.deepcopy(cache)
            found = [model(question, past_key_values=twin).logits[:, -1]]
            again = copy.deepcopy(twin)
            for step in (twin, again):
                out = model(found[0].argmax(-1)[None], past_key_values=step).logits[:, -1]
                assert_same(Answer(ids, [*found, out]), Answer(ids, one.logits[:2]))
                step.close()
        cache.close()


def test_threads_do_not_see_the_press(model: Any) -> None:
    ids, other = distinct(140), distinct(200, 7)
    wanted, question = alone(model, Stub(0.6), ids, QUESTIONS[0]), alone(model, Stub(0.6), other)
    with attached(model, sparsify=Stub(0.6)) as kv, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, model, kv, ids, QUESTIONS[0]) for _ in range(4)]
        plain = [pool.submit(generate, model, NEW, input_ids=other) for _ in range(4)]
        for one in asked:
            assert_same(one.result(), wanted)
        for one in plain:
            assert_same(one.result(), question)


def test_padded_rows_and_beams(model: Any) -> None:
    short, long = distinct(90, 4), distinct(130)
    rows = torch.cat([torch.nn.functional.pad(short, (40, 0)), long])
    mask = torch.cat([torch.nn.functional.pad(short * 0 + 1, (40, 0)), long * 0 + 1])
    wanted = [alone(model, Stub(0.6), ids) for ids in (short, long)]
    with attached(model, sparsify=Stub(0.6)) as kv:
        found = generate(model, NEW, input_ids=rows, attention_mask=mask)
        for row, one in enumerate(wanted):
            logits = [step[row : row + 1] for step in found.logits]
            ids = (short, long)[row]
            tail = found.sequences[row : row + 1, 130:]
            assert torch.equal(tail, one.sequences[:, ids.shape[1] :])
            for a, b in zip(logits, one.logits, strict=True):
                assert torch.allclose(a, b, atol=2e-4 * float(b.abs().max()))
        cache = kv.cache(input_ids=long)
        beams = generate(model, NEW, input_ids=long, num_beams=3, past_key_values=cache)
        assert beams.sequences.shape == (1, 136)
        cache.close()


def test_what_a_press_does_not_see_is_left_whole(model: Any) -> None:
    ids = distinct(100)
    with attached(model, sparsify=Stub(0.6)) as kv:
        cache = kv.cache(input_ids=ids)
        with torch.no_grad(), pytest.raises(StateError, match="logits_to_keep=1"):
            model(torch.cat([ids, QUESTIONS[0]], 1), past_key_values=cache)
        other = torch.cat([distinct(100, 8), QUESTIONS[0]], 1)
        with pytest.raises(StateError, match="the same context"):
            generate(model, NEW, input_ids=other, past_key_values=cache)
        cache.close()
    exact = generate(model, NEW, input_ids=ids)
    press = Stub(0.6)
    with attached(model, sparsify=press) as kv:
        kv_press = model._forward_pre_hooks  # the press fails once it is attached
        assert kv_press
        held = next(iter(kv_press.values())).__self__.sparsifier
        held.given.odd = "raises"
        with pytest.warns(UserWarning, match="keeps all tokens.*too short a prompt"):
            assert_same(generate(model, NEW, input_ids=ids), exact)


@pytest.mark.parametrize(
    ("press", "words"),
    [
        (Stub(odd="layers"), "keeps 128 to 131 tokens, by layer"),
        (Stub(odd="masks"), "masks other keys in each head"),
        (Stub(odd="none"), "drops no token"),
        (Stub(odd="nan"), "not finite"),
        (Stub(odd="raises"), "failed on 256 tokens: AssertionError: too short"),
        (Stub(held=[object()]), "a press with a object has no name"),
        ("kvpress.NoSuchPress:0.5", "kvpress cannot be imported|makes no press"),
        ("kvpress.KnormPress", "kvpress cannot be imported|makes no press"),
    ],
)
def test_what_pages_cannot_hold_is_refused(model: Any, press: Any, words: str) -> None:
    before = dict(vars(model.model.layers[0].self_attn))
    with pytest.raises(ConfigError, match=words):
        flowkv.attach(model, sparsify=press, gpu="4MiB", page_size=16)
    assert not model._forward_hooks
    assert vars(model.model.layers[0].self_attn).keys() == before.keys()


def test_settings_name_a_press() -> None:
    ones = [
        Stub(),
        Stub(0.25),
        Stub(scale=2.0),
        Stub(held=[1]),
        Stub(held=[(1,)]),
        Stub(held=["1"]),
        Stub(held=[Stub()]),
        Stub(held=[torch.zeros(3)]),
        Stub(held=[torch.zeros(3).double()]),
    ]
    ids = np.arange(50, dtype=np.uint32)
    names = {Press(one).salt(ids).digest for one in ones} | {Press(Stub()).salt(ids + 1).digest}
    assert len(names) == len(ones) + 1
    assert Press(Stub()).salt(ids) == Press(Stub()).salt(ids.copy())


def test_what_a_press_loads_names_it(
    model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, place, ran = distinct(140), f"{tmp_path}/kv:64MiB", list[int]()
    for content in (1.0, 2.0):
        monkeypatch.setitem(LOADED, 7.0, content)
        with attached(model, sparsify=Stub(0.6, loads=7.0), disk=place) as kv:
            runs = presses(kv, monkeypatch)
            ask(model, kv, ids, QUESTIONS[0])
            ran += runs
            kv.flush()
    assert ran == [140, 140]


REAL = """
import sys
import torch, flowkv
from flowkv.core.errors import FlowKVError
from tests.hooks import models
from tests.hooks.test_press import NEW, QUESTIONS, alone, ask, assert_same, attached, distinct
from tests.hooks.test_press import foreign, generate, reused

ids, place, again = distinct(200), sys.argv[1], sys.argv[2] == "again"
model = models.causal("llama")
with attached(model):  # kvpress wraps what is registered when it is imported
    before = generate(model, NEW, input_ids=ids)
    import kvpress
    assert_same(generate(model, NEW, input_ids=ids), before)
makers = {
    "knorm": lambda: kvpress.KnormPress(0.6),
    "snapkv": lambda: kvpress.SnapKVPress(0.6),
    "expected": lambda: kvpress.ExpectedAttentionPress(0.6),
    "streaming": lambda: kvpress.StreamingLLMPress(0.6),
    "tova": lambda: kvpress.TOVAPress(0.6),
    "keydiff": lambda: kvpress.KeyDiffPress(0.6),
    "lagkv": lambda: kvpress.LagKVPress(0.6),
    "block": lambda: kvpress.BlockPress(kvpress.KeyDiffPress(0.6), block_size=64),
    "merging": lambda: kvpress.MergingPress(kvpress.KnormPress(0.6)),
    "by name": lambda: "kvpress.KeyDiffPress:0.6",
}
for name, make in makers.items():
    model, press = models.causal("llama"), make()
    own = kvpress.KeyDiffPress(1 - 0.6) if isinstance(press, str) else press
    wanted = [alone(model, own, ids, question) for question in QUESTIONS]
    first = alone(model, own, ids)
    with attached(model, sparsify=press, disk=place) as kv:
        assert not foreign(kv), foreign(kv)
        for question, one in zip(QUESTIONS, wanted, strict=True):
            assert_same(ask(model, kv, ids, question), one, 1e-4)
        assert reused(kv) == 400 if again else 200, (name, reused(kv))
        assert_same(generate(model, NEW, input_ids=ids), first, 1e-4)
        kv.flush()
    for odd in (kvpress.AdaKVPress(kvpress.KnormPress(0.6)), kvpress.PyramidKVPress(0.4),
                kvpress.KeyRerotationPress(kvpress.KnormPress(0.6)), kvpress.KnormPress(0.0),
                kvpress.DecodingPress(kvpress.KnormPress(0.5))):
        if name != "knorm":
            break
        try:
            flowkv.attach(model, sparsify=odd, gpu="4MiB", page_size=16)
        except FlowKVError as error:
            print(error)
        else:
            raise SystemExit(f"{odd} was not refused")
"""


@needs_library
def test_the_library_s_own_presses_in_two_processes(tmp_path: Any) -> None:
    for turn in ("first", "again"):
        given = [sys.executable, "-c", REAL, f"{tmp_path}/kv:64MiB", turn]
        subprocess.run(given, check=True)
