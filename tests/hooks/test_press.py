"""Prompts that a press of kvpress prunes: its own answer, stored and shared under its name."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.cache.audit import audit
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, foreign, generate, reused
from tests.hooks.test_long_rope import llama
from tests.hooks.test_sparsify import distinct
from tests.inside import ConfigError, Press, StateError, rows_Rows, with_positions, words_of

NEW = 6
LIBRARY = importlib.util.find_spec("kvpress") is not None
needs_library = pytest.mark.skipif(not LIBRARY, reason="kvpress is not installed")


def _stub() -> Any:
    """Load the stub as kvpress: FlowKV shares nothing of other presses."""
    with pytest.MonkeyPatch.context() as patch:
        place = Path(__file__).with_name("press_stub.py")
        spec = importlib.util.spec_from_file_location("kvpress", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "kvpress", module)
        spec.loader.exec_module(module)
    return module


STUB = _stub()
Stub = STUB.Stub


@pytest.fixture(autouse=True)
def stub_is_kvpress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", STUB)


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
    for again in (False, True):
        with attached(model, sparsify=Stub(0.6), disk=place) as kv:
            runs = presses(kv, monkeypatch)
            if not again:
                ask(model, kv, ids, QUESTIONS[0])
                assert runs == [140]
                assert kv.stats()["blocks"]
                kv.flush()
                runs.clear()
            kv.forget(ids[0].tolist())
            assert kv.stats()["blocks"] == 0
            ask(model, kv, ids, QUESTIONS[0])
            assert runs == [140]
            kv.flush()


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
    wanted = [alone(model, Stub(0.6), ids) for ids in (short, long)]
    with attached(model, sparsify=Stub(0.6)) as kv:
        found = generate(model, NEW, **models.padded(short, long))
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
        (Stub(held=[threading.Lock()]), "cannot be copied: TypeError"),
        (Stub, "is no sparsifier"),
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
        *(Stub(), Stub(0.25), Stub(scale=2.0), Stub(held=[1]), Stub(held=[(1,)])),
        *(Stub(held=["1"]), Stub(held=[Stub()]), Stub(held=[torch.zeros(3)])),
        *(Stub(held=[torch.zeros(3).double()]), Stub(held=[torch.zeros(()).bfloat16()])),
    ]
    assert len({words_of(one) for one in ones} - {b""}) == len(ones)
    press, ids = Press(Stub()), np.arange(50, dtype=np.uint32)
    assert press.salt(ids).digest != press.salt(ids + 1).digest
    press.words = words_of(press.given)
    assert press.salt(ids) == press.salt(ids.copy()) != Press(Stub()).salt(ids)


def user(**members: Any) -> Any:
    """A press of a user's own class."""
    return type("User", (Stub,), members)(0.6)


@pytest.mark.parametrize(
    "press",
    [
        *(user(), pytest.param(Stub(0.6, held=[user()]), marks=pytest.mark.thorough)),
        *(Stub(0.6, held=[{"a": object()}]), Stub(0.6, draws="torch")),
        pytest.param(Stub(0.6, draws="numpy"), marks=pytest.mark.thorough),
        Stub(0.6, draws="random"),
    ],
)
def test_other_presses_share_nothing(
    model: Any, press: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, place, ran = distinct(140), f"{tmp_path}/kv:64MiB", list[int]()
    for _ in range(2):
        with pytest.warns(UserWarning, match="shares nothing"):
            kv = flowkv.attach(model, sparsify=press, gpu="64MiB", page_size=16, disk=place)
        runs = presses(kv, monkeypatch)
        found = [ask(model, kv, ids, QUESTIONS[0]) for _ in range(2)]
        if not press.draws:
            for one in found:
                assert_same(one, alone(model, press, ids, QUESTIONS[0]))
        assert not reused(kv)
        ran += runs
        kv.flush()
        kv.close()
    assert ran == [140] * 4


def traced(method: Any) -> Any:
    """A method that calls another one."""

    def call(self: Any, *args: Any) -> Any:
        return method(self, *args)

    return call


@pytest.mark.parametrize("name", ["compress", "_after", "helper", "loads"])
@pytest.mark.parametrize("wrap", [traced, partialmethod])
def test_what_changes_after_attach_is_not_shared(
    model: Any, name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = distinct(140)
    with attached(model, sparsify=Stub(0.6, loads=7.0)) as kv:
        runs = presses(kv, monkeypatch)
        ask(model, kv, ids, QUESTIONS[0])
        if name == "loads":
            monkeypatch.setitem(STUB.LOADED, 7.0, 3.0)
            kv.forget(ids[0].tolist())
        elif name == "helper":
            monkeypatch.setattr(STUB, "helper", lambda values: values * 3.0)
        else:
            monkeypatch.setattr(Stub, name, wrap(getattr(Stub, name)))
        wanted = alone(model, Stub(0.6), ids, QUESTIONS[0])
        for _ in range(2):
            assert_same(ask(model, kv, ids, QUESTIONS[0]), wanted)
        assert runs == [140] * 3
        assert not reused(kv)


def test_what_a_press_loads_names_it(
    model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, place, ran = distinct(140), f"{tmp_path}/kv:64MiB", list[int]()
    for content in (1.0, 2.0):
        monkeypatch.setitem(STUB.LOADED, 7.0, content)
        with attached(model, sparsify=Stub(0.6, loads=7.0), disk=place) as kv:
            runs = presses(kv, monkeypatch)
            ask(model, kv, ids, QUESTIONS[0])
            ran += runs
            kv.flush()
    assert ran == [140, 140]


class KeyRerotationPress(Stub):  # type: ignore[misc, valid-type]
    """A press with the name of one that moves keys."""


class Moving(KeyRerotationPress):
    """A press that inherits from it."""


@pytest.mark.parametrize("press", [Moving(), Stub(held=[{"a": [Moving()]}])])
def test_presses_that_move_keys_are_refused_wherever_they_are(model: Any, press: Any) -> None:
    with pytest.raises(ConfigError, match="KeyRerotationPress gives keys new positions"):
        flowkv.attach(model, sparsify=press)


@torch.no_grad()
@pytest.mark.parametrize("cropped", [False, True])
def test_tokens_of_a_context_are_not_skipped_unseen(model: Any, cropped: bool) -> None:
    ids, other, question = distinct(140), distinct(140, 5), QUESTIONS[0]
    rest = torch.cat([other[:, 100:], question], 1)
    with attached(model, sparsify=Stub(0.6)) as kv:
        cache = kv.cache(input_ids=ids)
        if cropped:
            model(ids, past_key_values=cache)
            cache.crop(100)
        else:
            model(torch.cat([ids[:, :100], other[:, 100:120]], 1), past_key_values=cache)
            rest = rest[:, 20:]
        with pytest.raises(StateError, match="has others"):
            model(rest, past_key_values=cache, logits_to_keep=1)
        cache.close()


def test_weights_that_change_under_an_open_cache(model: Any) -> None:
    ids, question = distinct(140), QUESTIONS[0]
    whole = torch.cat([ids, question], 1)
    with attached(model, sparsify=Stub(0.6)) as kv:
        ask(model, kv, ids, question)
        cache = kv.cache(input_ids=ids)
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
        exact = generate(copy.deepcopy(model), NEW, input_ids=whole)
        with pytest.warns(UserWarning, match="the model changed"):
            assert_same(generate(model, NEW, input_ids=whole, past_key_values=cache), exact)
        cache.close()
        wanted = alone(model, Stub(0.6), ids, question)
        assert_same(ask(model, kv, ids, question), wanted)


@torch.no_grad()
def test_odd_positions_and_embeddings(model: Any) -> None:
    ids = torch.cat([distinct(140), QUESTIONS[0]], 1)
    embeds = model.get_input_embeddings()(ids).detach()
    exact = generate(model, NEW, inputs_embeds=embeds)
    with attached(model, sparsify=Stub(0.6)) as kv:
        cache = kv.cache(input_ids=ids[:, :140])
        odd = {"position_ids": torch.arange(149)[None] * 2, "logits_to_keep": 1}
        with pytest.raises(StateError, match="moves them"):
            model(ids, past_key_values=cache, **odd)
        with pytest.warns(UserWarning, match="keeps all tokens"):
            found = generate(model, NEW, inputs_embeds=embeds, past_key_values=cache)
        assert_same(found, exact)
        cache.close()


def test_padded_rows_without_positions_stay_whole(model: Any) -> None:
    rows = torch.nn.functional.pad(distinct(140), (10, 0))
    mask, question = (rows * 0).index_fill(1, torch.arange(10, 150), 1), QUESTIONS[0]
    seen = torch.cat([mask, question * 0 + 1], 1)
    given = {"input_ids": torch.cat([rows, question], 1), "attention_mask": seen}
    exact = generate(model, NEW, **given)
    with attached(model, sparsify=Stub(0.6)) as kv:
        cache = kv.cache(input_ids=rows, attention_mask=mask)
        with pytest.warns(UserWarning, match="has no position_ids"):
            assert_same(generate(model, NEW, **given, past_key_values=cache), exact)
        cache.close()


def test_prompts_beyond_the_length_of_dynamic_rope_stay_whole() -> None:
    torch.manual_seed(0)
    model, ids = llama("dynamic").eval(), distinct(140)
    exact = generate(model, NEW, input_ids=torch.cat([ids, QUESTIONS[0]], 1))
    with (
        attached(model, sparsify=Stub(0.6)) as kv,
        pytest.warns(UserWarning, match="positions depend on length"),
    ):
        assert_same(ask(model, kv, ids, QUESTIONS[0]), exact)


def test_an_interrupted_press_runs_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, question = distinct(140), QUESTIONS[0]
    whole, wanted = torch.cat([ids, question], 1), alone(model, Stub(0.6), ids, question)
    with attached(model, sparsify=Stub(0.6)) as kv:
        cache = kv.cache(input_ids=ids)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(STUB, "helper", lambda values: (_ for _ in ()).throw(KeyboardInterrupt))
            generate(model, NEW, input_ids=whole, past_key_values=cache)
        assert_same(generate(model, NEW, input_ids=whole, past_key_values=cache), wanted)
        cache.close()


def test_an_interrupted_replacement_ends_the_cache(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, question = distinct(140), QUESTIONS[0]
    whole = torch.cat([ids, question], 1)
    with attached(model, sparsify=Stub(0.6)) as kv:
        cache = kv.cache(input_ids=ids)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(rows_Rows, "rebase", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            generate(model, NEW, input_ids=whole, past_key_values=cache)
        with pytest.raises(StateError, match="closed"):
            generate(model, NEW, input_ids=whole, past_key_values=cache)
        audit(kv)


def test_a_context_that_is_forgotten_while_it_is_pressed_is_not_stored(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, run = distinct(140), Press.prefill
    with attached(model, sparsify=Stub(0.6)) as kv:

        def forgotten(press: Press, door: Any, given: torch.Tensor) -> Any:
            kv.forget(ids[0].tolist())
            return run(press, door, given)

        with monkeypatch.context() as patch:
            patch.setattr(Press, "prefill", forgotten)
            ask(model, kv, ids, QUESTIONS[0])
        assert kv.stats()["blocks"] == 0
        ask(model, kv, ids, QUESTIONS[0])
        assert kv.stats()["blocks"], "as usual afterwards"


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


@pytest.mark.parametrize("called", ["past_key_values", "cache"])
def test_presses_read_the_cache_by_its_former_name(called: str) -> None:
    """Transformers calls it `cache` from 5.24 on, and warns of the former name as an argument."""

    class Layer(torch.nn.Module):
        layer_idx = 0

        def forward(self, hidden_states: Any, **given: Any) -> set[str]:
            return set(given)

    model, cache, read = torch.nn.Module(), DynamicCache(), []
    model.self_attn = Layer()
    model.self_attn.register_forward_hook(
        lambda module, args, given, out: read.append(given["past_key_values"]), with_kwargs=True
    )
    with with_positions(model):
        given = {"hidden_states": torch.zeros(1, 3, 4), called: cache}
        assert model.self_attn(**given) == {called, "cache_position"}
    assert read == [cache]
