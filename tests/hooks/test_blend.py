"""Documents behind another beginning: found, turned, mended, never taken for the exact thing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import flowkv
from bench.sparsified import Paged
from flowkv import Salt
from flowkv.hooks.blend import Blender, KeyTurn
from flowkv.policy.blend import BLEND_RULES, BlendRule, FirstTokens, ValueDeviation, make_blend_rule
from tests.hooks import models
from tests.hooks.compare import attached, generate, reused
from tests.hooks.test_restore import Slow, on
from tests.inside import CapacityError, ConfigError, GeometryError, Rewrite, StateError, door_of

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {name: value for name, value in models.SMALL.items() if name != "eos_token_id"}
SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def small(kind: str, **more: Any) -> Any:
    """A random model of an architecture, by the prefix of its classes."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SMALL | {"eos_token_id": 2} | more)
    name = "ForCausalLM" if kind != "GPT2" else "LMHeadModel"
    return getattr(transformers, f"{kind}{name}")(config).eval()


MADE = {
    "llama": lambda: models.causal("llama"),
    "qwen3": lambda: models.causal("qwen3"),
    "interleaved": lambda: small("Cohere"),
    "part of a head": lambda: small("Phi", partial_rotary_factor=0.5),
    "interleaved part of a head": lambda: small("Glm", head_dim=16),
    "no grouped queries": lambda: small("GPTNeoX"),
    "llama3": lambda: small("Llama", rope_parameters=LLAMA3),
    "yarn": lambda: small("Llama", rope_parameters=SCALED | {"rope_type": "yarn"}),
}


@pytest.fixture
def model() -> Any:
    return models.causal("llama")


@contextmanager
def blending(model: Any, recompute: Any = "values", **options: Any) -> Iterator[flowkv.KV]:
    with pytest.warns(flowkv.ExperimentalWarning, match="blend"):
        given = {"gpu": "64MiB", "page_size": 16} | options
        given = {name: value for name, value in given.items() if value is not None}
        kv = flowkv.attach(model, reuse="blend", recompute=recompute, **given)
    with kv:
        yield kv


def draw(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 250, (count,), generator=generator)


DOCUMENTS = [draw(150, 1), draw(203, 2), draw(90, 3)]
PROMPT = torch.cat([draw(20, 4), DOCUMENTS[1], draw(7, 5), DOCUMENTS[0], DOCUMENTS[2], draw(30, 6)])
LISTS = [document.tolist() for document in DOCUMENTS]


def last(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    """Logits behind a prompt, with a fresh cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        out = model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].detach()


def blocks(kv: flowkv.KV) -> int:
    return int(kv.stats()["blocks"])


@pytest.fixture
def self_made() -> Iterator[Any]:
    shape = flowkv.Geometry.uniform(layers=4, kv_heads=2, head_dim=64, page_size=16)
    with flowkv.KV(shape, namespace="own", gpu="64MiB") as kv:
        yield kv, Paged()


class TestAnswers:
    @pytest.mark.parametrize("name", MADE)
    def test_are_exact_where_all_is_computed_again(self, name: str) -> None:
        """Whatever kind of RoPE it is: what is computed lands where it belongs, and sees it all."""
        model = MADE[name]()
        exact = last(model, PROMPT)
        with blending(model, 1.0) as kv:
            kv.learn(LISTS)
            found = last(model, PROMPT)
            assert kv.stats()["blend"]["documents"] == 3
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-4 * float(exact.abs().max()))

    @pytest.mark.parametrize("name", MADE)
    def test_turned_keys_of_the_first_layer_are_exact(self, name: str) -> None:
        """They depend on a token and its position alone. A forgotten turn shows nowhere else so."""
        model, exact, ours = MADE[name](), DynamicCache(), DynamicCache()
        last(model, PROMPT, exact)
        with blending(model, "first:0") as kv:
            kv.learn(LISTS)
            last(model, PROMPT, ours)
            for kind in ("keys", "values"):
                mine, theirs = (getattr(cache.layers[0], kind) for cache in (ours, exact))
                torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
                deep, deeper = (getattr(cache.layers[-1], kind) for cache in (ours, exact))
                assert not torch.allclose(deep, deeper, atol=1e-4)

    def test_come_nearer_with_every_token_that_is_computed_again(self) -> None:
        """The deviation from exact keys and values falls with the share; at 1 it is gone."""
        model, far = models.causal("llama"), []
        exact = DynamicCache()
        last(model, PROMPT, exact)
        for share in (0.0, 0.15, 0.5, 1.0):
            ours = DynamicCache()
            with blending(model, share) as kv:
                kv.learn(LISTS)
                last(model, PROMPT, ours)
                pairs = zip(ours.layers, exact.layers, strict=True)
                far.append(sum(float((a.values - b.values).square().sum()) for a, b in pairs))
        assert far == sorted(far, reverse=True)
        assert far[-1] < 1e-6 * far[0]

    def test_of_padded_batches_and_beams(self, model: Any) -> None:
        """Rows end at one column, whatever of each is known; beams go on from blended pages."""
        rows = [PROMPT, torch.cat([draw(40, 8), DOCUMENTS[2], draw(33, 9)])]
        for options in ({}, {"num_beams": 2}):
            given = models.padded(*(row[None] for row in rows)) | options
            theirs = generate(model, 8, **given).sequences
            with blending(model, 1.0) as kv:
                kv.learn(LISTS)
                assert torch.equal(generate(model, 8, **given).sequences, theirs)
                assert kv.stats()["blend"]["documents"] == 4 * options.get("num_beams", 1)

    def test_of_an_engine(self, model: Any) -> None:
        prompts = [PROMPT.tolist(), draw(60, 11).tolist(), [*LISTS[1], *draw(9, 12).tolist()]]
        theirs = [generate(model, 8, input_ids=torch.tensor([p])).sequences[0] for p in prompts]
        with blending(model, 1.0) as kv:
            kv.learn(LISTS)
            with flowkv.Engine(model, kv, max_rows=4) as engine:
                found = engine.run(prompts, max_new_tokens=8)
            for prompt, one, expected in zip(prompts, found, theirs, strict=True):
                assert [*prompt, *one.tokens] == expected.tolist()
            assert kv.stats()["blend"]["documents"] == 4
            with pytest.raises(ConfigError, match="invariant"):
                flowkv.Engine(model, kv, invariant=True)


def test_of_ones_own_model(self_made: Any) -> None:
    """Whose attention is `flowkv.attention`: a `Blender` of its own, by hand."""
    kv, model = self_made
    turn = KeyTurn(10_000.0 ** (-np.arange(0, 64, 2) / 64))
    prompt, found = PROMPT.tolist(), []
    for rule in (None, ValueDeviation(1.0), FirstTokens(16)):
        with kv.open(prompt, reuse=False) as seq:
            if rule is not None:
                blender = Blender(
                    kv,
                    lambda step, last: model(step.tokens, step.positions)[0, last],
                    dict.fromkeys(range(4), turn),
                    lead=1,
                    rule=rule,
                )
                blender.learn(LISTS)
                assert blender.blend(seq, len(prompt) - 1) == len(prompt) - 30
            else:
                seq.publishable = False
            for step in kv.prefill([seq]):
                logits = model(step.tokens, step.positions)[0, -1]
            found.append(logits)
    exact, again, near = found
    torch.testing.assert_close(again, exact, rtol=0, atol=1e-4 * float(exact.abs().max()))
    assert float((near - exact).abs().max()) > 1e-4
    assert kv.stats()["blend"]["documents"] == 6


def test_documents_before_the_first_salt_are_taken(self_made: Any) -> None:
    """Those behind it depend on more than their tokens, at whatever position it lies."""
    kv, model = self_made
    blender = Blender(
        kv,
        lambda step, last: model(step.tokens, step.positions)[0, last],
        dict.fromkeys(range(4), KeyTurn(10_000.0 ** (-np.arange(0, 64, 2) / 64))),
        lead=1,
        rule=FirstTokens(16),
    )
    blender.learn([LISTS[2]])
    # The document lies at tokens 150 to 240, and its own pages hold 96.
    prompt, taken = [*draw(150, 4).tolist(), *LISTS[2], *draw(30, 6).tolist()], []
    for position in (0, 120, 200, 240, 260):
        with kv.open(prompt, salts=[Salt(position, bytes(32))], reuse=False) as seq:
            taken.append(blender.blend(seq, len(prompt) - 1))
    assert taken == [0, 0, 200, 240, 240]


class TestTheExactThing:
    def test_is_what_prompts_without_documents_get(self, model: Any) -> None:
        plain = torch.cat([draw(300, 20), draw(40, 21)])
        exact, theirs = last(model, plain), generate(model, 8, input_ids=plain[None])
        with blending(model, 0.15) as kv:
            kv.learn(LISTS)
            assert torch.allclose(last(model, plain), exact, atol=1e-5)
            again = generate(model, 8, input_ids=plain[None])
            assert torch.equal(again.sequences, theirs.sequences)
            assert reused(kv) > 250
            assert kv.stats()["blend"]["documents"] == 0

    def test_is_never_made_of_blended_pages(self, tmp_path: Path) -> None:
        """Neither in this cache nor in others on the same directory; not by answers either."""
        model, disk = models.causal("llama"), f"{tmp_path}:64MiB"
        theirs = generate(model, 40, input_ids=PROMPT[None]).sequences
        with blending(model, "first:0", disk=disk) as kv:
            kv.learn(LISTS)
            before = blocks(kv)
            longer = generate(model, 40, input_ids=PROMPT[None]).sequences
            generate(model, 8, input_ids=longer)
            assert not torch.equal(longer, theirs)
            assert blocks(kv) == before + 1  # what stands before the first document, exact
            assert kv.flush()
        with attached(model, disk=disk) as kv:
            assert torch.equal(generate(model, 40, input_ids=PROMPT[None]).sequences, theirs)

    def test_comes_first_where_a_beginning_is_known(self, model: Any) -> None:
        """What an exact cache knows of a prompt is taken as it is; documents only behind it."""
        begins = torch.cat([draw(64, 30), DOCUMENTS[0]])
        with blending(model, "first:0") as kv:
            last(model, begins)  # nothing is learned yet: it is exact
            kv.learn(LISTS)
            exact = last(model, torch.cat([begins, draw(5, 31)]))
            assert kv.stats()["blend"]["documents"] == 0
        assert torch.allclose(last(model, torch.cat([begins, draw(5, 31)])), exact, atol=1e-5)


class TestDocuments:
    def test_are_computed_once(self, tmp_path: Path) -> None:
        """By this process, or one before it."""
        model, disk = models.causal("llama"), f"{tmp_path}:64MiB"
        with blending(model, 0.15, disk=disk) as kv:
            assert kv.learn(LISTS) > sum(map(len, LISTS))
            assert kv.learn(LISTS) == 0
            exact = last(model, PROMPT)
        with blending(model, 0.15, disk=disk) as kv:
            assert kv.learn(LISTS) == 0
            assert torch.allclose(last(model, PROMPT), exact, atol=1e-5)
            assert kv.stats()["blend"]["taken_tokens"] > 300

    def test_belong_to_a_tenant(self, model: Any) -> None:
        with blending(model, 0.15, tenant="ours") as kv:
            kv.learn(LISTS, tenant="theirs")
            exact = last(model, PROMPT)
            assert kv.stats()["blend"]["documents"] == 0
        assert torch.allclose(last(model, PROMPT), exact, atol=1e-5)

    def test_of_other_weights_are_not_taken(self, model: Any) -> None:
        with blending(model, "first:0") as kv:
            kv.learn(LISTS)
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
            found = last(model, PROMPT)
            assert kv.stats()["blend"]["documents"] == 0
            assert kv.learn(LISTS) > 0
            last(model, PROMPT[5:])  # of the whole prompt, all is known exactly by now
            assert kv.stats()["blend"]["documents"] == 3
        assert torch.allclose(last(model, PROMPT), found, atol=1e-5)

    def test_short_ones_are_computed(self) -> None:
        with blending(models.causal("llama")) as kv:
            assert kv.learn([[7, 8, 9]]) == 0

    def test_without_room_for_them_all_is_computed(self, model: Any) -> None:
        exact = last(model, PROMPT)
        with blending(model, "first:0", gpu="640KiB", host="16MiB") as kv:
            kv.learn(LISTS)
            with pytest.warns(UserWarning, match="blends nothing"):
                found = last(model, PROMPT)
            assert torch.allclose(found, exact, atol=1e-4)


class Wrong(BlendRule):
    """Chooses what is not there."""

    name = "wrong"

    def choose(self, sizes: Any, deviation: Any) -> Any:
        return np.ones(3)


def lines(kv: flowkv.KV) -> int:
    gc.collect()
    with kv.lock:
        return len(kv._open)


class TestWhatGoesWrong:
    def test_a_failing_rule_leaves_no_row_behind(self, model: Any) -> None:
        exact = last(model, PROMPT)
        with blending(model, Wrong(), max_rows=8) as kv:
            kv.learn(LISTS)
            for _ in range(10):
                with pytest.raises(GeometryError, match="truth value"):
                    last(model, PROMPT)
            assert lines(kv) == 0
            door_of(model).blending.now().rule = make_blend_rule(1.0)
            assert torch.allclose(last(model, PROMPT), exact, atol=1e-4)

    def test_a_failing_model_leaves_no_row_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = models.causal("llama")
        exact = last(model, PROMPT)

        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of something")

        with blending(model, 0.3) as kv:
            kv.learn(LISTS)
            with monkeypatch.context() as patched:
                patched.setattr(Rewrite, "read", fails)
                for _ in range(3):
                    with pytest.raises(RuntimeError, match="out of something"):
                        last(model, PROMPT)
            assert lines(kv) == 0
            near = last(model, PROMPT)
            assert float((near - exact).abs().max()) > 1e-4

    @pytest.mark.parametrize(
        "options", [dict(output_hidden_states=True), dict(logits_to_keep=450), {}]
    )
    def test_all_that_is_asked_for_is_there(self, options: dict[str, Any], model: Any) -> None:
        """Where a call wants something of every token, none is skipped."""
        given = dict(use_cache=True, **options)
        with torch.no_grad():
            theirs = model(PROMPT[None], past_key_values=DynamicCache(), **given)
            with blending(model, 1.0) as kv:
                kv.learn(LISTS)
                ours = model(PROMPT[None], past_key_values=DynamicCache(), **given)
        assert ours.logits.shape == theirs.logits.shape
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-4)

    def test_a_prefix_that_does_not_come_is_computed(self) -> None:
        model, before = models.causal("llama"), draw(320, 50)
        prompt = torch.cat([before, DOCUMENTS[0], draw(20, 51)])
        tier = Slow()
        with on(model, tier) as kv:
            last(model, before)
            assert kv.flush()
            frames = dict(tier.inner.frames)
        exact = last(model, prompt)
        tier = Slow(frames, every=3, lose=0.0)
        with blending(model, 1.0, gpu=None, tiers=["gpu:64MiB", tier], prefetch="off") as kv:
            kv.learn(LISTS)
            tier.lose = 0.3
            assert torch.allclose(last(model, prompt), exact, atol=1e-4)
            assert kv.stats()["blend"]["documents"] == 1
            assert lines(kv) == 0

    def test_a_row_without_documents_costs_the_others_nothing(self, model: Any) -> None:
        """All columns are computed for it: so they are exact for the others, too."""
        rows = torch.stack([PROMPT, draw(len(PROMPT), 60)])
        theirs = generate(model, 8, input_ids=rows)
        with blending(model, "first:0") as kv:
            kv.learn(LISTS)
            assert torch.equal(generate(model, 8, input_ids=rows).sequences, theirs.sequences)
            assert kv.stats()["blend"]["documents"] == 0

    @pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
    def test_rows_that_find_no_room_on_the_way_are_exact(
        self, monkeypatch: pytest.MonkeyPatch, failing: set[int], model: Any
    ) -> None:
        """What was computed of them before their documents stays; rows end where each has come."""
        first, second = draw(20, 90), draw(70, 91)
        rows = [torch.cat([first, DOCUMENTS[0], draw(9, 92)]), torch.cat([second, DOCUMENTS[0]])]
        given = models.padded(*(row[None] for row in rows))
        given = {name: torch.nn.functional.pad(x, (3, 0)) for name, x in given.items()}
        theirs = generate(model, 8, **given).sequences
        inner, calls = Blender._blend, []

        def short(self: Blender, *given: Any) -> int:
            calls.append(len(calls))
            if calls[-1] in failing:
                raise CapacityError("no room", "Have some")
            return inner(self, *given)

        monkeypatch.setattr(Blender, "_blend", short)
        with blending(model, 1.0) as kv:
            kv.learn(LISTS)
            with pytest.warns(UserWarning, match="blends nothing"):
                ours = generate(model, 8, **given).sequences
            assert torch.equal(ours, theirs)
            assert len(calls) == 2

    @pytest.mark.parametrize("engine", [False, True])
    def test_a_beginning_before_documents_is_shared_exactly(self, engine: bool) -> None:
        model, before = models.causal("llama"), draw(200, 70)
        with blending(model, 0.15) as kv:
            kv.learn(LISTS)
            for n, document in enumerate(DOCUMENTS):
                prompt = torch.cat([before, document, draw(10, 71 + n)])
                seen = reused(kv)
                if engine:
                    with flowkv.Engine(model, kv) as served:
                        served.run([prompt.tolist()], max_new_tokens=2)
                else:
                    last(model, prompt)
                assert (reused(kv) - seen >= 192) == (n > 0)
        with attached(model) as kv:
            exact = last(model, before)
        assert torch.allclose(last(model, before), exact, atol=1e-5)

    def test_a_document_is_forgotten_by_its_own_tokens(self, model: Any) -> None:
        with blending(model, 0.15) as kv:
            kv.learn(LISTS)
            assert kv.forget(LISTS[0]) > 0
            assert len(door_of(model).blending.now()._known) == 2
            last(model, PROMPT)
            assert kv.stats()["blend"]["documents"] == 2
            assert kv.learn(LISTS) > len(LISTS[0])
            kv.forget()
            last(model, PROMPT[5:])
            assert kv.stats()["blend"]["documents"] == 2

    def test_a_document_is_forgotten_by_each_tenant_and_of_former_processes(
        self, tmp_path: Path
    ) -> None:
        model, document, disk = models.causal("llama"), LISTS[0], f"{tmp_path / 'kv'}:64MiB"
        with blending(model, 0.15, disk=disk) as kv:
            for tenant in ("ours", "theirs"):
                kv.learn([document], tenant=tenant)
            erased = kv.forget(document, tenant="ours")
            assert erased > 0 and kv.forget(document, tenant="theirs") == erased
            kv.learn([document])
        with blending(model, 0.15, disk=disk) as kv:
            assert kv.forget(document) == erased

    def test_what_the_model_computes_otherwise_is_not_learned(self, model: Any) -> None:
        with blending(model) as kv:
            model.train()
            with pytest.raises(StateError, match=r"model.eval\(\)"):
                kv.learn(LISTS)
            model.eval()
            assert kv.learn(LISTS) > 0

    def test_documents_that_nest_and_repeat(self) -> None:
        """A longer one that nobody knows hides no shorter one; one at several places is one row."""
        model, inner = models.causal("llama"), DOCUMENTS[0]
        longer = torch.cat([inner, draw(40, 80)])
        prompt = torch.cat([draw(9, 81), longer, draw(5, 82), inner, inner, draw(9, 83)])
        exact = last(model, prompt)
        with blending(model, 1.0, max_rows=4, tenant="ours") as kv:
            kv.learn([inner.tolist()])
            kv.learn([longer.tolist()], tenant="theirs")
            assert torch.allclose(last(model, prompt), exact, atol=1e-4)
            assert kv.stats()["blend"]["documents"] == 3
            assert kv.stats()["tokens_seen"] < 2 * len(prompt) + 2 * len(longer) + 300


class TestWhatIsNotServed:
    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda: models.causal("mistral"), "layers that are sliding"),
            (lambda: models.causal("falcon_h1"), "recurrent"),
            (lambda: models.causal("bloom"), "no position of each token"),
            (lambda: models.causal("deepseek_v3"), "computes with keys and values itself"),
            (models.t5, "an encoder-decoder"),
            (lambda: small("GPT2"), "keys of layer 0 do not rotate"),
            (
                lambda: small("Llama", rope_parameters=SCALED | {"rope_type": "dynamic"}),
                "RoPE 'dynamic'",
            ),
        ],
    )
    def test_is_refused_in_words(self, make: Any, problem: str) -> None:
        model = make()
        with pytest.warns(flowkv.ExperimentalWarning), pytest.raises(ConfigError, match=problem):
            flowkv.attach(model, reuse="blend", gpu="64MiB", page_size=16)
        assert not any("ForwardHook" in str(hook) for hook in model._forward_hooks.values())

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (dict(reuse="blended"), "reuse='blended'"),
            (dict(reads="pages"), "reads='pages'. Pass"),
            (dict(reuse="blend", recompute="middle"), "no blend rule 'middle'"),
            (dict(reuse="blend", recompute="first:1.5"), "first:1.5"),
            (dict(reuse="blend", recompute="first:inf"), "first:inf"),
            (dict(reuse="blend", recompute="first:nan"), "first:nan"),
            (dict(reuse="blend", recompute="values:nan"), "values:nan"),
            (dict(reuse="blend", recompute="values:much"), "has no numeric amount"),
            (dict(reuse="blend", recompute=1.5), "from 0 to 1"),
            (dict(reuse="blend", sparsify="latest:0.5"), "keep their own tokens"),
            (dict(reuse="blend", overflow=True, host="16MiB"), "keep their own tokens"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_odd_options_are_refused(self, options: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            flowkv.attach(models.causal("llama"), gpu="64MiB", page_size=16, **options)

    def test_exact_caches_learn_no_documents(self) -> None:
        with attached(models.causal("llama")) as kv, pytest.raises(StateError, match="exactly"):
            kv.learn(LISTS)


class TestRules:
    @given(
        st.sampled_from(sorted(BLEND_RULES)),
        st.lists(st.integers(1, 60), min_size=1, max_size=5),
        st.integers(0, 100),
    )
    def test_choose_what_they_say(self, name: str, sizes: list[int], percent: int) -> None:
        count, rule = (
            sum(sizes),
            make_blend_rule(f"{name}:{percent}" if name == "first" else percent / 100),
        )
        deviation = np.random.default_rng(count).random(count)
        found = rule.chosen(sizes, deviation)
        if name == "first":
            ends = np.cumsum(sizes)
            parts = [found[e - s : e] for s, e in zip(sizes, ends, strict=True)]
            assert [int(part.sum()) for part in parts] == [min(percent, s) for s in sizes]
            assert all(part[: int(part.sum())].all() for part in parts)
        else:
            assert found.sum() == int(np.ceil(percent / 100 * count))
            if 0 < found.sum() < count:
                assert deviation[found].min() >= deviation[~found].max()

    def test_one_of_ones_own_is_taken_and_checked(self) -> None:
        class Odd(BlendRule):
            name = "odd"

            def choose(self, sizes: Any, deviation: Any) -> Any:
                return np.arange(sum(sizes)) % 2 == 1

        model = models.causal("llama")
        with blending(model, Odd()) as kv:
            kv.learn(LISTS)
            last(model, PROMPT)
            assert kv.stats()["blend"]["taken_tokens"] > 200


@given(st.data())
def test_documents_are_found_wherever_they_stand(data: st.DataObject) -> None:
    """The longest that fits, from left to right, none over another, against a plain search."""
    blender = Blender(None, None, {}, 1, make_blend_rule("first"))  # type: ignore[arg-type]
    symbols = st.integers(2, 3)  # few, so that documents begin alike
    made = data.draw(st.lists(st.lists(symbols, min_size=32, max_size=40), min_size=1, max_size=4))
    documents = [np.array(one, np.uint32) for one in made]
    for document in documents:
        blender.note(document)
    parts = data.draw(
        st.lists(st.one_of(st.sampled_from(made), st.lists(symbols, max_size=9)), max_size=5)
    )
    prompt = np.array([token for part in parts for token in part], np.uint32)
    first = data.draw(st.integers(0, len(prompt)))
    at, expected = first, list[tuple[int, int]]()
    while at <= len(prompt) - 32:
        left = prompt[at:]
        fits = [d for d in documents if np.array_equal(d[: len(left)], left[: len(d)])]
        if not fits:
            at += 1
            continue
        count = min(max(map(len, fits)), len(left))
        expected.append((at, count))
        at += count
    found = blender.find(prompt, first)
    assert [(place.first, place.count) for place in found] == expected
    for place in found:
        part = prompt[place.first : place.first + place.count]
        assert np.array_equal(place.text[: place.count], part)


def test_documents_learned_longest_ago_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.hooks.blend.MOST_TOKENS", 200)
    blender = Blender(None, None, {}, 1, make_blend_rule("first"))  # type: ignore[arg-type]
    documents = [np.full(40, number, np.uint32) for number in range(9)]
    for document in (*documents[:5], documents[0], *documents[5:]):
        blender.note(document)
    known = [number for number in range(9) if blender.find(documents[number])]
    assert known == [0, 5, 6, 7, 8] and len(blender._known) == 5
