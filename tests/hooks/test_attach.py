"""`attach` itself: what it takes over, what it leaves alone, and no page outlives its truth."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import flowkv
from tests.clock import together
from tests.hooks import models
from tests.hooks.compare import PAST, assert_same, attached, filled, forward, generate, reused
from tests.inside import ConfigError, PagedCache, StateError, door_of, step


@pytest.fixture
def model() -> Any:
    return models.causal("llama")


def answer(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return generate(model, 12, input_ids=ids, **options).sequences


def natively(model: Any, *parts: torch.Tensor) -> torch.Tensor:
    """Logits behind the last of some tokens, over the model's own cache."""
    cache = DynamicCache(config=model.config)
    return [forward(model, part, cache) for part in parts][-1]


def mamba() -> Any:
    """A model without keys and values."""
    sizes = models.SMALL | dict(num_hidden_layers=2, state_size=8, time_step_rank=4)
    return models.sharpen(transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)))


def open_rows(kv: flowkv.KV) -> int:
    gc.collect()
    with kv.lock:
        return len(kv._open)


def fails(*_: Any) -> None:
    raise TypeError("this fails")


def test_the_kv_itself_is_no_cache_of_one_call(model: Any) -> None:
    given = {"input_ids": models.prompt(20)}
    with attached(model) as kv:
        for call in (model, partial(model.generate, max_new_tokens=2)):
            with pytest.raises(ConfigError, match=r"Pass kv\.cache\("):
                call(**given, past_key_values=kv)
        for name in ("get_seq_length", "no_such_field"):
            assert not hasattr(kv, name) and open_rows(kv) == 0


def test_an_error_within_a_property_names_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = property(lambda kv: kv.no_such_field)
    monkeypatch.setattr(flowkv.KV, "stats", broken)
    with flowkv.KV() as kv, pytest.raises(AttributeError, match="no_such_field"):
        _ = kv.stats


class TestTheModel:
    def test_is_logged_when_it_is_attached(
        self, model: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "flowkv"):
            flowkv.attach(model, gpu="16MiB").close()
            model.other = object()
            with pytest.warns(UserWarning, match="other: a builtins.object"):
                flowkv.attach(model, gpu="16MiB").close()
        shared, foreign = (one.getMessage() for one in caplog.records if "attached" in one.msg)
        assert re.fullmatch(
            r"LlamaForCausalLM attached in \d+\.\d s: [\d.]+[KM]iB of weights, "
            "layers read by pages, pages shared",
            shared,
        )
        assert foreign.endswith("pages not shared")

    def test_is_as_before_after_detach(self, model: Any) -> None:
        before = model.config._attn_implementation
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
        with attached(model):
            answer(model, models.prompt(40))
        assert model.config._attn_implementation == before
        assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
        assert "flowkv" not in str(model.config.to_dict())

    @pytest.mark.parametrize("said", ["cache", "past_key_values", "cache past_key_values"])
    def test_of_a_later_transformers_calls_its_cache_otherwise(self, model: Any, said: str) -> None:
        """As from 5.24 on, where both names are taken, and the newer one goes before the other."""
        before, prompt = type(model), models.prompt(100)

        class Later(before):  # type: ignore[misc,valid-type]
            def forward(
                self, input_ids: Any, cache: Any = None, logits_to_keep: int = 0, **more: Any
            ) -> Any:
                more |= {PAST: cache, "logits_to_keep": logits_to_keep}
                return super().forward(input_ids, **more)

        expected = answer(model, prompt)
        model.__class__ = Later
        try:
            with attached(model, revision="later") as kv, torch.no_grad():
                for known in (False, True):
                    given = {name: DynamicCache(config=model.config) for name in said.split()}
                    out = model(prompt, use_cache=True, logits_to_keep=1, **given)
                    first, *others = given.values()
                    assert getattr(out, PAST) is first and isinstance(first, PagedCache)
                    assert not any(isinstance(other, PagedCache) for other in others)
                    assert torch.equal(out.logits[:, -1].argmax(-1), expected[:, 100])
                    assert (reused(kv) > 0) == known
        finally:
            model.__class__ = before

    @pytest.mark.parametrize("either", [False, True])
    def test_has_a_forward_of_an_earlier_transformers(self, model: Any, either: bool) -> None:
        """From 5.24 on `generate` calls the cache `cache`, also where a forward does not."""
        before, prompt = type(model), models.prompt(100)

        class Former(before):  # type: ignore[misc,valid-type]
            def forward(self, input_ids: Any, past_key_values: Any = None, **more: Any) -> Any:
                return super().forward(input_ids, past_key_values=past_key_values, **more)

        class Either(before):  # type: ignore[misc,valid-type]
            def forward(
                self, input_ids: Any, past_key_values: Any = None, cache: Any = None, **more: Any
            ) -> Any:
                more[PAST] = past_key_values if cache is None else cache
                return super().forward(input_ids, **more)

        expected = answer(model, prompt)
        model.__class__ = Either if either else Former
        try:
            with attached(model, revision="former") as kv:
                assert torch.equal(answer(model, prompt), expected)
                assert torch.equal(answer(model, prompt), expected)
                assert reused(kv) > 0
                names, own = door_of(model).names, DynamicCache(config=model.config)
                names.other = "past_key_values" if names.cache == "cache" else "cache"
                with torch.no_grad():
                    model(prompt, past_key_values=own, cache=None, use_cache=True, logits_to_keep=1)
                assert isinstance(own, PagedCache)
        finally:
            model.__class__ = before

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    @pytest.mark.filterwarnings("ignore:FlowKV (leaves this call|shares nothing)")
    def test_says_what_it_said(self, model: Any, implementation: str) -> None:
        model.set_attn_implementation(implementation)
        with attached(model):
            seen = [module.config._attn_implementation for module in (model, model.model)]
            assert seen == [implementation] * 2
            answer(model, models.prompt(40))
            with pytest.raises(TypeError):
                model.generate(models.prompt(40), max_new_tokens=2, logits_processor=[fails])
            with pytest.raises(TypeError), torch.no_grad():
                model.model.layers[1].register_forward_pre_hook(fails)
                model.generate(models.prompt(40), max_new_tokens=2)
            assert model.config._attn_implementation == implementation
            assert "flowkv" not in repr(copy.deepcopy(model.config.__dict__))
            if implementation == "eager":
                model.config.output_attentions = True

    def test_reads_another_attention_when_it_is_told_to(self, model: Any) -> None:
        ids = models.prompt(60)
        theirs = answer(model, ids)
        with attached(model) as kv:
            for implementation in ("eager", "sdpa"):
                model.set_attn_implementation(implementation)
                assert torch.equal(answer(model, ids), theirs)
                assert torch.equal(answer(model, ids), theirs)
                assert model.config._attn_implementation == implementation
            assert reused(kv) > 0

    def test_compiles_without_a_break(self, model: Any) -> None:
        ids = models.prompt(20)
        with torch.no_grad(), attached(model):
            theirs = model(ids, use_cache=False).logits
            torch.compiler.reset()
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            assert torch.allclose(compiled(ids, use_cache=False).logits, theirs, atol=1e-5)

    def test_is_attached_once(self, model: Any) -> None:
        with attached(model), pytest.raises(StateError, match="already"):
            flowkv.attach(model)
        with attached(model):
            pass

    @pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates annotations at once")
    def test_names_in_annotations_need_no_value(self, model: Any) -> None:
        space = dict[str, Any](Base=type(model))
        text = """class Mine(Base):
            def forward(self, input_ids: Missing, **given):
                return super().forward(input_ids, **given)"""
        exec(compile(text, "<text>", "exec", dont_inherit=True), space)
        model.__class__ = space["Mine"]
        with attached(model, revision="1"), torch.no_grad():
            model(models.prompt(20), past_key_values=DynamicCache(config=model.config))

    def test_must_be_one_of_transformers(self) -> None:
        with pytest.raises(ConfigError, match=r"flowkv\.KV\(geometry\)"):
            flowkv.attach(torch.nn.Linear(2, 2))

    def test_has_a_revision_in_text(self) -> None:
        with pytest.raises(ConfigError, match=r"revision=3\. Use text"):
            flowkv.attach(models.causal("llama"), revision=3)  # type: ignore[arg-type]

    def test_without_keys_and_values_keeps_its_own_cache(self) -> None:
        model, ids = mamba(), models.prompt(20)
        theirs = answer(model, ids)
        with pytest.warns(UserWarning, match="own cache"):
            kv = flowkv.attach(model)
        assert torch.equal(answer(model, ids), theirs)
        kv.close()

    @pytest.mark.parametrize("around", [False, True])
    def test_a_copy_is_a_plain_model(self, model: Any, around: bool) -> None:
        ids, before = models.prompt(60), model.config._attn_implementation
        theirs, seen = answer(model, ids), list[str]()
        model.register_forward_pre_hook(lambda *_: seen.append("mine"))
        with attached(model, revision="hooked") as kv:
            answer(model, ids)
            twin = copy.deepcopy(torch.nn.Sequential(model))[0] if around else copy.deepcopy(model)
            known = reused(kv)
            assert len(twin._forward_pre_hooks) == 1, "the other one is FlowKV's"
            assert not twin._forward_hooks
            assert not twin._forward_hooks_with_kwargs
            assert not twin._forward_hooks_always_called
            assert not twin._forward_pre_hooks_with_kwargs
            assert vars(twin).keys() == vars(model).keys() - {
                "__deepcopy__",
                "__reduce_ex__",
                "compile",
            }
            assert twin.config._attn_implementation == before
            named = {m.config._attn_implementation for m in twin.modules() if hasattr(m, "config")}
            assert named == {before}
            assert torch.equal(answer(twin, ids), theirs)
            assert reused(kv) == known, "the copy is not attached"
            with torch.no_grad():
                twin.model.layers[0].mlp.up_proj.weight.mul_(1.5)
            other = answer(twin, ids)
            assert not torch.equal(other, theirs)
            for _ in range(3):  # the copy has written to `seen`, as if somebody else had
                assert torch.equal(answer(model, ids), theirs)
            assert reused(kv) > known
            again = copy.deepcopy(twin)
        assert "__deepcopy__" not in vars(model)
        for one in (twin, again):
            assert torch.equal(answer(one, ids), other)
        with attached(twin, revision="hooked too"):
            assert torch.equal(answer(twin, ids), other)

    def test_a_wrapper_that_passes_on_what_it_lacks_is_copied_itself(self) -> None:
        """As PEFT's models do: they would find what copies the model inside."""

        class Wrapper(torch.nn.Module):
            def __init__(self, inner: torch.nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def __getattr__(self, name: str) -> Any:
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(super().__getattr__("inner"), name)

        model = models.causal("llama")
        with attached(model):
            twin = copy.deepcopy(Wrapper(model))
            assert type(twin) is Wrapper and twin.inner is not model
            assert not twin.inner._forward_hooks and "__reduce_ex__" not in vars(twin.inner)

    @pytest.mark.parametrize("kind", ["getstate", "reduce", "reduce_ex"])
    def test_a_class_says_how_it_is_copied(self, kind: str) -> None:
        cls: Any = {"getstate": _Locked, "reduce": _Rebuilt, "reduce_ex": _RebuiltFor}[kind]
        model = cls(models.causal("llama").config).eval()
        model.lock = threading.Lock() if kind == "getstate" else None
        ids = models.prompt(40)
        theirs = answer(model, ids)

        def check() -> None:
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert type(twin) is cls and torch.equal(answer(twin, ids), theirs)
                assert not twin._forward_hooks and "__reduce_ex__" not in vars(twin)
                assert kind == "getstate" or twin.told == "made again"

        check()
        with attached(model, revision="with a class of its own"):
            assert torch.equal(answer(model, ids), theirs)
            check()
        check()

    def test_a_copy_of_what_holds_its_cache_holds_none(self, model: Any) -> None:
        ids = models.prompt(40)
        theirs = answer(model, ids)
        with attached(model) as kv:
            model.kv, model.model.kept = kv, [kv]
            twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        twins += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in twins:
            assert twin.kv is None and twin.model.kept == [None]
            assert torch.equal(answer(twin, ids), theirs)

    def test_an_exporter_sees_the_prompts_and_caches_of_the_model(self, model: Any) -> None:
        """An exporter copies the arguments of forwards, casts them, and traces the model."""
        exporters = pytest.importorskip("transformers.exporters.utils")
        ids = models.prompt(40)

        def recorded() -> list[dict[str, Any]]:
            parts = exporters.decompose_prefill_decode(model, {"input_ids": ids})
            return [parts[name][1] for name in ("prefill", "decode")]

        theirs = recorded()
        with attached(model) as kv:
            answer(model, ids)
            ours, known = recorded(), reused(kv)
            assert torch.equal(answer(model, ids), answer(model, ids)) and reused(kv) > known
        for own, their in zip(ours, theirs, strict=True):
            assert torch.equal(own["input_ids"], their["input_ids"])
            cache, expected = own[PAST], their[PAST]
            assert type(cache) is DynamicCache
            assert cache.get_seq_length() == expected.get_seq_length()
            exporters.cast_leaf_tensors(own, dtype=torch.float32, device=torch.device("cpu"))
        assert torch.equal(ours[1][PAST].layers[0].keys, theirs[1][PAST].layers[0].keys)

    def test_a_copy_can_be_saved(self, model: Any, tmp_path: Path) -> None:
        ids, before = models.prompt(40), model.config._attn_implementation
        theirs = answer(model, ids)
        kv = flowkv.attach(model, gpu="64MiB", page_size=16)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        made = getattr(generate(model, 4, input_ids=ids), PAST)
        kept = pickle.loads(pickle.dumps(made))
        assert type(kept) is DynamicCache
        assert torch.equal(kept.layers[0].keys, made.layers[0].keys)
        configs = [copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))]
        kv.close()
        twins.append(copy.deepcopy(model))
        for twin in twins:
            assert torch.equal(answer(pickle.loads(pickle.dumps(twin)), ids), theirs)
            torch.save(twin, tmp_path / "model.pt")
            loaded = torch.load(tmp_path / "model.pt", weights_only=False)
            assert torch.equal(answer(loaded, ids), theirs)
            twin.save_pretrained(tmp_path)
            assert torch.equal(answer(type(model).from_pretrained(tmp_path), ids), theirs)
        for config in configs:
            assert type(config._attn_implementation) is str
            assert config._attn_implementation == before

    def test_is_not_kept_alive(self) -> None:
        model = models.causal("llama")  # a fixture would keep it
        kv = flowkv.attach(model, gpu="64MiB", page_size=16)
        answer(model, models.prompt(40))
        gone: list[bool] = []
        model.witness = _Witness(gone)
        del model
        gc.collect()
        assert gone == [True]
        kv.close()


class _Passing(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **given: Any) -> Any:
        return super().forward(*args, **given)


def test_a_forward_that_passes_its_arguments_on() -> None:
    """From transformers 5.24 on, generate calls the cache `cache` without looking at parameters."""
    model, ids = models.sharpen(_Passing(models.causal("llama").config)), models.prompt(60)
    theirs = generate(model, 4, input_ids=ids)
    with attached(model, revision="1") as kv:
        for _ in range(2):
            assert_same(generate(model, 4, input_ids=ids), theirs)
        assert reused(kv) > 0


class _Locked(transformers.LlamaForCausalLM):
    def __getstate__(self) -> Any:
        return {name: held for name, held in vars(self).items() if name != "lock"}


def _again(cls: Any, config: Any, weights: Any) -> Any:
    model = cls(config).eval()
    model.load_state_dict(weights)
    model.told = "made again"
    return model


class _Rebuilt(transformers.LlamaForCausalLM):
    def __reduce__(self) -> Any:
        return _again, (type(self), self.config, dict(self.state_dict()))


class _RebuiltFor(transformers.LlamaForCausalLM):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (type(self), self.config, dict(self.state_dict()))


class _Witness:
    def __init__(self, gone: list[bool]) -> None:
        self.gone = gone

    def __del__(self) -> None:
        self.gone.append(True)


class TestAChangedModel:
    """Same tokens, other weights: nothing known may be used, whatever way they changed.

    Other modules, hooks, and weights written by numpy are in `test_identity`.
    """

    def check(self, model: Any, change: Any, back: Any = None, revision: str = "") -> None:
        ids = models.prompt(60)
        before = answer(model, ids)
        with attached(model, revision=revision) as kv:
            assert torch.equal(answer(model, ids), before)
            assert torch.equal(answer(model, ids), before)
            known = reused(kv)
            assert known == 48
            change()
            door = door_of(model)
            with door.aside():
                theirs = answer(model, ids)
            assert not torch.equal(theirs, before), "the change changes nothing: no test"
            assert torch.equal(answer(model, ids), theirs)
            assert reused(kv) == known
            assert torch.equal(answer(model, ids), theirs)
            assert reused(kv) == known + 48, "the changed model's own pages are used"
            if back is not None:
                back()
                assert torch.equal(answer(model, ids), before)

    def test_in_place(self, model: Any) -> None:
        weight = model.model.layers[1].self_attn.v_proj.weight
        old = weight.detach().clone()

        def change() -> None:
            with torch.no_grad():
                weight.mul_(-1)

        def back() -> None:
            with torch.no_grad():
                weight.copy_(old)

        self.check(model, change, back)

    def test_behind_torchs_back(self, model: Any) -> None:
        self.check(model, lambda: model.model.layers[1].self_attn.v_proj.weight.data.mul_(-1))

    def test_by_a_new_parameter(self, model: Any) -> None:
        layer = model.model.layers[0].self_attn.k_proj
        new = torch.nn.Parameter(layer.weight.detach() * -1)
        self.check(model, lambda: setattr(layer, "weight", new))

    def test_by_loading(self, model: Any) -> None:
        torch.manual_seed(9)
        other = models.sharpen(type(model)(model.config)).state_dict()
        self.check(model, lambda: model.load_state_dict(other))

    def test_by_adapters(self, model: Any) -> None:
        layer = model.model.layers[1].self_attn
        layer.v_proj = _Adapted(layer.v_proj)
        self.check(
            model,
            lambda: setattr(layer.v_proj, "active_adapter", "b"),
            lambda: setattr(layer.v_proj, "active_adapter", "a"),
            revision="adapted",
        )

    def test_by_an_adapter_that_the_model_names(self, model: Any) -> None:
        layer = model.model.layers[1].self_attn
        layer.v_proj = adapted = _Adapted(layer.v_proj)
        adapted.__dict__["chosen"] = adapted.__dict__.pop("active_adapter")
        adapted.of = lambda: adapted.chosen
        model.active_adapters = lambda: [adapted.chosen]
        self.check(model, lambda: setattr(adapted, "chosen", "b"), revision="adapted")

    def test_in_the_middle_of_a_sequence(self, model: Any) -> None:
        """Pages that old and new weights filled together are nobody's."""
        ids, weight = models.prompt(60), model.model.layers[1].self_attn.v_proj.weight
        theirs = answer(model, ids)
        with attached(model):
            cache = filled(model, ids[:, :20])
            assert isinstance(cache, PagedCache)
            with torch.no_grad():
                weight.mul_(-1)
            forward(model, ids[:, 20:], cache)
            with torch.no_grad():
                weight.mul_(-1)
            assert torch.equal(answer(model, ids), theirs)

    def test_moved_to_another_dtype_and_back(self, model: Any) -> None:
        ids = models.prompt(60)
        before = answer(model, ids)
        with attached(model) as kv:
            answer(model, ids)
            model.double().float()
            assert torch.equal(answer(model, ids), before)
            model.double()
            assert torch.equal(answer(model, ids), before)
            again = generate(model, 12, input_ids=ids)
            assert getattr(again, PAST).layers[0].keys.dtype is torch.float64
            model.float()
            count = reused(kv)
            assert torch.equal(answer(model, ids), before)
            assert reused(kv) == count, "its pages went with its geometry"

    def test_in_training(self, model: Any) -> None:
        ids = models.prompt(40)
        theirs = answer(model, ids)
        with attached(model) as kv:
            answer(model, ids)
            count = reused(kv)
            model.train()
            assert type(filled(model, ids)) is DynamicCache
            model(input_ids=ids, labels=ids).loss.backward()
            assert model.model.layers[0].self_attn.k_proj.weight.grad is not None
            model.eval()
            assert reused(kv) == count
            assert torch.equal(answer(model, ids), theirs)


class _Adapted(torch.nn.Module):
    """A linear layer with two switchable additions, named as adapter libraries name theirs."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        shape = base.weight.shape
        self.deltas = torch.nn.ParameterDict(
            {"a": torch.zeros(shape), "b": torch.randn(shape, generator=torch.Generator())}
        )
        self.active_adapter = "a"
        self.of = lambda: self.active_adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + torch.nn.functional.linear(x, self.deltas[self.of()])


class TestCopies:
    def test_a_copied_cache_goes_its_own_way(self, model: Any) -> None:
        ids = models.prompt(50)
        tails = [models.prompt(9, seed=3), models.prompt(9, seed=4)]
        wanted = []
        for tail in tails:
            cache = filled(model, ids)
            wanted.append([forward(model, token, cache) for token in tail.split(1, 1)])
        with attached(model) as kv:
            cache = filled(model, ids)
            twin = copy.deepcopy(cache)
            third = copy.copy(cache)
            for a, b, one, other in zip(*wanted, *(t.split(1, 1) for t in tails), strict=True):
                assert torch.allclose(forward(model, one, cache), a, atol=1e-4)
                assert torch.allclose(forward(model, other, twin), b, atol=1e-4)
            assert cache.get_seq_length() == twin.get_seq_length() == 59
            assert third.get_seq_length() == 50
            del cache, twin, third
            assert open_rows(kv) == 0

    def test_a_copied_recurrent_cache(self) -> None:
        model, ids = models.causal("falcon_h1"), models.prompt(30)
        tail = models.prompt(4, seed=3)
        wanted = natively(model, ids, tail)
        with attached(model):
            cache = filled(model, ids)
            twin = copy.deepcopy(cache)
            forward(model, models.prompt(4, seed=9), cache)
            assert torch.allclose(forward(model, tail, twin), wanted, atol=1e-4)


class TestThreads:
    def test_generate_in_two_threads(self, model: Any) -> None:
        shared = models.prompt(48)
        prompts = [torch.cat([shared, models.prompt(20, seed=s)], 1) for s in range(6)]
        theirs = [answer(model, ids) for ids in prompts]

        def work(mine: list[int]) -> None:
            for index in mine * 2:
                assert torch.equal(answer(model, prompts[index]), theirs[index])

        with attached(model) as kv:
            together(*(partial(work, [i, i + 2, i + 4]) for i in (0, 1)))
            assert reused(kv) > 0
            assert open_rows(kv) == 0


class TestOwnCaches:
    def test_a_loop_of_ones_own(self, model: Any) -> None:
        """The object that the caller made is the one that fills."""
        ids = models.prompt(40)
        theirs = answer(model, ids)
        with attached(model) as kv:
            for turn in range(2):
                past, tokens = DynamicCache(config=model.config), ids
                for _ in range(12):
                    fresh = tokens[:, past.get_seq_length() :]
                    token = forward(model, fresh, past).argmax(-1, keepdim=True)
                    tokens = torch.cat([tokens, token], 1)
                assert torch.equal(tokens, theirs)
                assert past.get_seq_length() == 51
                assert reused(kv) == 32 * turn

    def test_given_to_generate_stays_what_it_is(self, model: Any) -> None:
        ids = models.prompt(40)
        theirs = answer(model, ids)
        with attached(model):
            past = DynamicCache(config=model.config)
            with pytest.warns(UserWarning, match="generate was given a DynamicCache"):
                first = answer(model, ids, **{PAST: past})
            assert torch.equal(first, theirs)
            assert type(past) is DynamicCache
            assert past.get_seq_length() == 51

    def test_all_logits_wanted(self, model: Any) -> None:
        ids = models.prompt(40)
        with torch.no_grad():
            theirs = model(ids).logits
            with attached(model):
                answer(model, ids)
                cache = DynamicCache(config=model.config)
                assert torch.equal(model(ids, **{PAST: cache}).logits, theirs)

    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_operations_of_a_cache(self, name: str) -> None:
        """Whatever generation does to a cache, it holds what the native one does."""
        model = models.causal(name)
        ids = torch.cat([models.prompt(40), models.prompt(40, seed=2)])
        mask = torch.ones_like(ids)
        mask[1, :7] = 0

        def run(cache: Any) -> list[torch.Tensor]:
            found = []

            def look() -> None:
                found.append(torch.tensor(cache.get_seq_length()))
                columns = torch.arange(cache.layers[0].keys.shape[2])
                for layer in cache.layers:
                    seen = columns >= len(columns) - 20
                    found.extend((layer.keys[:, :, seen], layer.values[:, :, seen]))

            def step(tokens: torch.Tensor) -> None:
                nonlocal mask_now
                mask_now = torch.cat([mask_now, torch.ones_like(tokens)], 1)
                positions = (mask_now.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
                given = dict(attention_mask=mask_now, position_ids=positions)
                found.append(forward(model, tokens, cache, **given))

            mask_now = mask[:, :0]
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            forward(model, ids, cache, attention_mask=mask, position_ids=positions)
            mask_now = mask
            look()
            cache.reorder_cache(torch.tensor([1, 1]))
            mask_now = mask_now[[1, 1]]
            step(torch.tensor([[9], [11]]))
            cache.batch_repeat_interleave(2)
            mask_now = mask_now.repeat_interleave(2, 0)
            step(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]))
            cache.batch_select_indices(torch.tensor([0, 3]))
            mask_now = mask_now[[0, 3]]
            look()
            if name == "llama":
                cache.crop(-2)
                mask_now = mask_now[:, :-2]
            cache.crop(0) if name == "llama" else None
            step(torch.tensor([[21], [22]]))
            look()
            return found

        theirs = run(DynamicCache(config=model.config))
        with attached(model) as kv:
            ours = run(DynamicCache(config=model.config))
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == b.shape
                assert torch.allclose(a.float(), b.float(), atol=1e-4)
            assert open_rows(kv) == 0

    @pytest.mark.parametrize("left", [0, 5, 37])
    def test_a_cut_through_a_padding(self, model: Any, left: int) -> None:
        """Columns behind a cut are tokens of every row whose mask shows them."""
        ids = torch.cat([models.prompt(40), models.prompt(40, seed=2)])
        mask = torch.ones_like(ids)
        mask[1, :38] = 0
        more = torch.cat([models.prompt(3, seed=3), models.prompt(3, seed=4)])

        def run() -> torch.Tensor:
            cache = DynamicCache(config=model.config)
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            forward(model, ids, cache, attention_mask=mask, position_ids=positions)
            cache.crop(left - 40)
            now = torch.cat([mask[:, :left], torch.ones_like(more)], 1)
            positions = (now.cumsum(1) - 1).clamp_min(0)[:, left:]
            return forward(model, more, cache, attention_mask=now, position_ids=positions)

        theirs = run()
        with attached(model):
            assert torch.allclose(run(), theirs, atol=1e-4)

    @pytest.mark.parametrize("form", ["ones", "none", "short", "4-D"])
    @pytest.mark.parametrize("new", [1, 3])
    def test_a_mask_that_shows_padding_later(self, model: Any, form: str, new: int) -> None:
        """No page holds its K and V: the forward is refused, and the cache stays as it was."""
        ids, more = torch.cat([models.prompt(40), models.prompt(40, 2)]), torch.ones(2, new).long()
        hides = models.pad_rows(ids, 0, 7)["attention_mask"]
        masks = dict(ones=torch.ones(2, 40 + new), none=None, short=more)
        masks["4-D"] = torch.ones(2, 1, new, 40 + new).tril(40).bool()

        def run(shows: Any = False) -> torch.Tensor:
            cache = filled(model, ids, attention_mask=hides)
            if shows is not False:
                with pytest.raises(flowkv.FlowKVError, match="padding to this cache"):
                    forward(model, more, cache, attention_mask=shows)
            return forward(model, more, cache, attention_mask=torch.cat([hides, more], 1))

        theirs = run()
        with attached(model):
            assert torch.allclose(run(masks[form]), theirs, atol=1e-4)

    @pytest.mark.parametrize("name", ["llama", "lfm2"])
    def test_detach_in_a_forward_of_another_thread(self, name: str) -> None:
        """The forward ends as it began; the next ones go on behind it, attached again or not."""
        model, ids = models.causal(name), models.prompt(40)
        wanted, found = answer(model, ids), list[torch.Tensor]()
        met, gone, again = (threading.Event() for _ in range(3))

        def stop(*_: Any) -> None:
            if threading.current_thread() is thread and met.is_set() is False:
                met.set()
                gone.wait(1.0)

        def wait(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            again.wait(60.0)
            return torch.zeros(len(ids), dtype=torch.bool)

        thread = threading.Thread(
            target=lambda: found.append(answer(model, ids, stopping_criteria=[wait]))
        )
        kv = flowkv.attach(model, gpu="64MiB", page_size=16, revision="stops")
        handle = model.model.layers[-1].register_forward_hook(stop)
        thread.start()
        assert met.wait(20.0)
        kv.detach()
        gone.set()
        handle.remove()
        with attached(model):
            again.set()
            thread.join(60.0)
            assert torch.equal(found[0], wanted)
        assert model.config._attn_implementation == "sdpa"
        assert not model._forward_hooks and "forward" not in vars(model)
        kv.close()

    @pytest.mark.parametrize("name", ["llama", "falcon_h1"])
    @pytest.mark.parametrize("end", [flowkv.KV.detach, flowkv.KV.close])
    def test_after_detach_and_after_close(self, name: str, end: Any) -> None:
        model, ids, token = models.causal(name), models.prompt(40), torch.tensor([[7]])
        wanted = natively(model, ids, token)
        kv = flowkv.attach(model, gpu="64MiB", page_size=16)
        cache = filled(model, ids)
        twin = copy.deepcopy(cache)
        end(kv)
        assert torch.allclose(forward(model, token, cache), wanted, atol=1e-4)
        kv.close()
        assert torch.allclose(forward(model, token, twin), wanted, atol=1e-4)
        assert torch.isfinite(forward(model, token, cache)).all()

    def test_a_forward_that_fails_can_be_repeated(self, model: Any) -> None:
        ids, token = models.prompt(40), torch.tensor([[7]])
        wanted = natively(model, ids, token)

        class Broken(Exception):
            pass

        def fail(*_: object) -> None:
            raise Broken

        with attached(model) as kv:
            cache = filled(model, ids)
            handle = model.model.layers[2].register_forward_pre_hook(fail)
            with pytest.raises(Broken):
                forward(model, token, cache)
            handle.remove()
            assert torch.allclose(forward(model, token, cache), wanted, atol=1e-4)
            del cache
            assert open_rows(kv) == 0

    @pytest.mark.parametrize("known", [0, 48])
    def test_a_forward_past_the_hook_goes_on_natively(self, model: Any, known: int) -> None:
        """As of an inner module that is called by itself: nothing of it is published."""
        ids, more = models.prompt(60), models.prompt(40, seed=3)
        own = filled(model, ids)
        with torch.no_grad():
            wanted = model.model(more, **{PAST: own}).last_hidden_state
        with attached(model) as kv:
            if known:
                answer(model, ids)
            cache = kv.cache(input_ids=ids) if known else DynamicCache(config=model.config)
            if known:
                assert cache.reused == known
                forward(model, ids[:, known:], cache)
            else:
                forward(model, ids, cache)
            with torch.no_grad():
                found = model.model(more, **{PAST: cache}).last_hidden_state
            assert torch.allclose(found, wanted, atol=1e-4)
            assert type(cache) is DynamicCache and cache.get_seq_length() == 100
            assert open_rows(kv) == 0

    def test_a_cache_of_no_model_has_none_for_a_call(self) -> None:
        geometry = flowkv.Geometry.uniform(layers=4, kv_heads=2, head_dim=16, page_size=16)
        kv = flowkv.KV(geometry, namespace="llama@0", gpu="64MiB")
        with kv, pytest.raises(ConfigError, match=r"no model.*flowkv\.attach"):
            kv.cache(input_ids=models.prompt(60))


HOLES = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
HOLES[..., 5:9] = False
HOLES |= torch.eye(40, dtype=torch.bool)
OWN = {
    "a mask": dict(attention_mask=HOLES),
    "positions": dict(position_ids=torch.arange(40)[None] * 2),
    "padding without positions": dict(attention_mask=(torch.arange(40) >= 11).long()[None]),
}


class TestInputs:
    """Only what token ids say is reused; everything else is computed as ever."""

    @pytest.mark.parametrize("given", OWN.values(), ids=OWN.keys())
    def test_of_ones_own(self, model: Any, given: dict[str, torch.Tensor]) -> None:
        ids = models.prompt(40)
        with torch.no_grad():
            theirs = model(ids, logits_to_keep=1, **given).logits
        with attached(model):
            answer(model, ids)
            for _ in range(2):
                with warnings.catch_warnings(record=True):
                    warnings.simplefilter("always")
                    ours = forward(model, ids, **given)
                assert torch.allclose(ours, theirs[:, -1], atol=1e-4)

    def test_positions_that_begin_behind_a_padding(self) -> None:
        """`generate` of RoBERTa's kinds counts from 0, their forward from 1: pages are of one."""
        model = models.roberta()
        ids, caches = models.prompt(40), [DynamicCache(config=model.config) for _ in range(2)]
        theirs, plain = generate(model, 2, input_ids=ids), forward(model, ids, caches[0])
        assert not torch.allclose(plain, theirs.logits[0], atol=1e-3)
        with attached(model) as kv, pytest.warns(UserWarning, match="do not count from 0"):
            assert torch.allclose(forward(model, ids, caches[1]), plain, atol=1e-5)
            for _ in range(2):
                made = kv.cache(input_ids=ids)  # for `generate`, or for a loop without positions
                assert torch.allclose(forward(model, ids, made), plain, atol=1e-5)
                assert_same(generate(model, 2, input_ids=ids), theirs)
            assert reused(kv)

    @torch.no_grad()
    def test_padding_of_a_cache_made_beforehand(self, model: Any) -> None:
        """`generate` counts the tokens of a row, and a loop without positions all columns."""
        ids = torch.cat([models.prompt(40), models.prompt(40, 2)])
        mask = torch.ones_like(ids)
        mask[1, :11] = 0
        given = dict(input_ids=ids, attention_mask=mask)
        theirs = generate(model, 2, **given)
        with attached(model, page_size=8) as kv:
            for _ in range(2):
                model(**given, past_key_values=kv.cache(**given), logits_to_keep=1)
                assert_same(generate(model, 2, **given, past_key_values=kv.cache(**given)), theirs)

    def test_no_cache_is_made_for_them(self, model: Any) -> None:
        ids, positions = models.prompt(40), torch.arange(40)[None] + 5
        with attached(model) as kv:
            generate(model, 1, input_ids=ids)
            with pytest.raises(StateError, match="positions do not count"):
                kv.cache(input_ids=ids, position_ids=positions)

    def test_warns_once(self, model: Any) -> None:
        ids, positions = models.prompt(40), torch.arange(40)[None] * 2
        with attached(model), pytest.warns(UserWarning, match="positions") as warned:
            for _ in range(3):
                cache = DynamicCache(config=model.config)
                forward(model, ids, cache, position_ids=positions)
        assert len(warned) == 1

    def test_unusual_positions_later_are_not_published(self, model: Any) -> None:
        ids = models.prompt(60)
        theirs = answer(model, ids)
        with attached(model):
            cache = filled(model, ids[:, :10])
            forward(model, ids[:, 10:], cache, position_ids=torch.arange(50)[None] * 3)
            assert torch.equal(answer(model, ids), theirs)

    def test_a_buffer_that_is_written_again(self, model: Any) -> None:
        """A loop may put every next token into the same tensor."""
        ids = models.prompt(60)
        theirs = answer(model, ids)
        with attached(model) as kv:
            cache, token = DynamicCache(config=model.config), torch.zeros(1, 1, dtype=torch.long)
            forward(model, ids[:, :10], cache)
            for column in range(10, 60):
                token.copy_(ids[:, column : column + 1])
                forward(model, token, cache)
            assert torch.equal(answer(model, ids), theirs)
            assert reused(kv) == 48

    def test_autocast(self, model: Any) -> None:
        ids = models.prompt(40)
        theirs = answer(model, ids)
        with attached(model):
            with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
                out = generate(model, 4, input_ids=ids)
            assert type(getattr(out, PAST)) is DynamicCache
            assert torch.equal(answer(model, ids), theirs)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("part", ["forward", "layers"])
    def test_compiled_parts_keep_the_native_cache(self, model: Any, part: str) -> None:
        ids = models.prompt(40)
        theirs = generate(model, 2, input_ids=ids).sequences
        torch._dynamo.reset()
        with attached(model) as kv:
            generate(model, 2, input_ids=ids)
            if part == "forward":
                model.forward = torch.compile(model.forward, backend="eager")
            else:
                for layer in model.model.layers:
                    layer.compile(backend="eager")
            out = generate(model, 2, input_ids=ids)
            assert torch.equal(out.sequences, theirs)
            assert type(getattr(out, PAST)) is DynamicCache
            assert reused(kv) == 0
        torch._dynamo.reset()

    @pytest.mark.filterwarnings("ignore")
    def test_a_cache_of_another_model(self, model: Any) -> None:
        ids, other = models.prompt(40), models.causal("llama")
        wanted = forward(other, ids, DynamicCache(config=other.config))
        with attached(model) as kv, attached(other):
            cache = kv.cache(input_ids=ids)
            assert torch.allclose(forward(other, ids, cache), wanted, atol=1e-4)

    def test_inference_mode(self, model: Any) -> None:
        ids = models.prompt(40)
        theirs = answer(model, ids)
        with attached(model) as kv:
            with torch.inference_mode():
                assert torch.equal(answer(model, ids), theirs)
                assert torch.equal(answer(model, ids), theirs)
            assert torch.equal(answer(model, ids), theirs)
            assert reused(kv) == 64

    def test_pages_made_in_inference_mode(self) -> None:
        model, ids = models.causal("llama").bfloat16(), models.prompt(40)
        theirs = answer(model, ids)
        with torch.inference_mode():
            kv = flowkv.attach(model, gpu="1MiB", page_size=8)  # whose stripes have padding
        assert torch.equal(answer(model, ids), theirs)
        assert torch.equal(answer(model, ids), theirs)
        assert reused(kv) > 0
        kv.close()


class TestWarnings:
    """One each, the first time, wherever nothing can be reused; the answer is the model's own."""

    @pytest.mark.parametrize(
        ("said", "how"),
        [
            ("a StaticCache", dict(cache_implementation="static")),
            ("generate was given a DynamicCache", {PAST: DynamicCache}),
            ("hidden states are wanted", dict(output_hidden_states=True)),
        ],
    )
    def test_of_generate(self, model: Any, said: str, how: dict[str, Any]) -> None:
        ids = models.prompt(40)

        def run() -> torch.Tensor:
            made = {k: v() if v is DynamicCache else v for k, v in how.items()}
            return answer(model, ids, **made)

        theirs = run()
        with attached(model) as kv:
            with pytest.warns(UserWarning, match=said) as warned:
                for _ in range(2):
                    assert torch.equal(run(), theirs)
            assert len(warned) == 1
            answer(model, ids)
            answer(model, ids)
            assert reused(kv) > 0

    @pytest.mark.parametrize(
        "case", ["autocast", "gradients", "filled", "no cache", "offloaded", "layers"]
    )
    def test_of_a_forward(self, model: Any, case: str) -> None:
        ids = models.prompt(40)

        def run() -> torch.Tensor:
            cache: Any = DynamicCache(config=model.config)
            given = dict(input_ids=ids, **{PAST: cache}, use_cache=True, logits_to_keep=1)
            if case == "filled":
                cache.update(*torch.randn(2, 1, 2, 3, 16).unbind(), 0)
                for index in range(1, 4):
                    cache.update(*torch.ones(2, 1, 2, 3, 16).unbind(), index)
                cache.layers[0].keys.fill_(1)
                cache.layers[0].values.fill_(1)
            elif case == "no cache":
                del given[PAST]
            elif case == "offloaded":
                cache.offloading, cache.only_non_sliding = True, True
                cache.update = lambda k, v, i, *_, **__: cache.layers[i].update(k, v)
            elif case == "layers":
                cache.layers.append(copy.deepcopy(cache.layers[0]))
            mixed = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
            with torch.set_grad_enabled(case == "gradients"), mixed:
                first = model(**given).logits.detach()
                given |= dict(input_ids=ids[:, :1])
                return torch.cat([first, model(**given).logits.detach()])

        theirs = run()
        with attached(model):
            with pytest.warns(UserWarning, match=case) as warned:
                for _ in range(2):
                    assert torch.equal(run(), theirs)
            assert len(warned) == 1

    def test_nobody_is_bothered_who_wants_no_reuse(self, model: Any) -> None:
        ids = models.prompt(40)
        with attached(model):
            model.train()
            model(ids)
            model.eval()
            with torch.no_grad():
                model(ids, use_cache=False)
                model(ids, **{PAST: DynamicCache(config=model.config)})
            answer(model, ids, use_cache=False)
            out = generate(model, 3, input_ids=ids)
            getattr(out, PAST).layers[0].keys.mul_(2)
            forward(model, ids[:, :1], getattr(out, PAST))
            forward(model, ids[:, :1], getattr(out, PAST))


class TestCapacity:
    def test_a_pool_too_small_for_the_prompt(self, model: Any) -> None:
        ids = models.prompt(400)
        theirs = answer(model, ids)
        with attached(model, gpu="256KiB"), pytest.warns(UserWarning, match="fit") as warned:
            for _ in range(2):
                assert torch.equal(answer(model, ids), theirs)
        assert len(warned) == 1

    @pytest.mark.parametrize("explicit", [False, True])
    def test_what_is_known_stays_when_a_prompt_is_refused(self, model: Any, explicit: bool) -> None:
        ids, long = models.prompt(60), torch.cat([models.prompt(60), models.prompt(400)], 1)
        theirs, beyond = answer(model, ids), answer(model, long)
        with attached(model, gpu="256KiB") as kv:
            answer(model, ids)
            for prompt in (long, models.prompt(400, seed=3)):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    given = dict(**{PAST: kv.cache(input_ids=prompt)}) if explicit else {}
                    found = answer(model, prompt, **given)
                assert prompt is not long or torch.equal(found, beyond)
            known = reused(kv)
            assert torch.equal(answer(model, ids), theirs)
            assert reused(kv) == known + 48
            assert kv.stats()["events"].get("evicted", 0) == 0

    @pytest.mark.parametrize("name", ["llama", "mistral", "falcon_h1"])
    def test_a_pool_that_fills_while_generating(self, name: str) -> None:
        model, ids = models.causal(name), models.prompt(60)
        theirs = generate(model, 200, input_ids=ids)
        with attached(model, gpu="256KiB"), pytest.warns(UserWarning, match="fit"):
            ours = generate(model, 200, input_ids=ids)
        assert_same(ours, theirs)
        assert type(getattr(ours, PAST)) is DynamicCache

    def test_keys_of_another_dtype_are_kept_natively(self, model: Any) -> None:
        ids, tail = models.prompt(40), models.prompt(6, seed=2)
        theirs = answer(model, ids)
        with attached(model):
            cache = filled(model, ids)
            layer = cache.layers[1]
            old = layer.keys
            k, v = torch.randn(1, 2, 6, 16).double(), torch.randn(1, 2, 6, 16).double()
            found, _ = layer.update(k, v)
            assert found.shape == (1, 2, 46, 16)
            assert torch.allclose(found[:, :, :40].float(), old)
            assert torch.equal(found[:, :, 40:], k)
            cache.crop(-6)
            del tail
            assert torch.equal(answer(model, ids), theirs)


class TestVerify:
    def test_says_how_a_model_is_served(self, model: Any) -> None:
        before = model.config._attn_implementation
        report = flowkv.verify(model)
        assert report
        assert report.layers == ("pages",) * 4
        assert [case.reused > 0 for case in report.cases] == [False, True, True]
        assert report.max_difference < 1e-3
        assert "same tokens" in str(report)
        assert model.config._attn_implementation == before
        assert not model._forward_hooks
        assert not model._forward_pre_hooks

    def test_beside_a_cache(self, model: Any) -> None:
        ids = models.prompt(60)
        theirs = answer(model, ids)
        with attached(model) as kv:
            answer(model, ids)
            seen = kv.tokens_seen
            assert flowkv.verify(model)
            assert kv.tokens_seen == seen
            assert torch.equal(answer(model, ids), theirs)
            assert reused(kv) == 48

    def test_dense_layers_and_their_reason(self) -> None:
        report = flowkv.verify(models.causal("bloom"))
        assert report
        assert set(report.layers) == {"dense"}
        assert report.reasons

    def test_two_at_once_and_an_attach(self, model: Any) -> None:
        reports: list[object] = []
        threads = [
            threading.Thread(target=lambda: reports.append(flowkv.verify(model))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        with attached(model):
            for thread in threads:
                thread.join()
        assert len(reports) == 2
        assert all(reports)
        assert model.config._attn_implementation == "sdpa"

    def test_refuses(self) -> None:
        report = flowkv.verify(mamba())
        assert not report
        assert "no layer keeps keys and values" in report.reasons[0]
        assert "refused" in report.verdict


@pytest.mark.parametrize(("name", "beams"), [("llama", 4), ("gemma3", 1), ("gpt_oss", 4)])
def test_a_prefix_that_rows_share_is_read_once_for_all(
    name: str, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rows of a batch, and by beams; with windows, sinks and caps."""
    model, twin = models.causal(name), models.causal(name)
    once, many = models.prompt(200), range(1 if beams > 1 else 3)
    ids = torch.cat([torch.cat([once, models.prompt(9, seed=n)], 1) for n in many])
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=beams)
    calls, own = list[int](), step.kernels.cascade_attention
    monkeypatch.setattr(step, "LEAST_TOKENS", 64)
    monkeypatch.setattr(
        step.kernels, "cascade_attention", lambda *a, **k: calls.append(0) or own(*a, **k)
    )
    wanted = generate(twin, 6, **given)
    with attached(model) as kv:
        for known in (False, True):
            calls.clear()
            assert_same(generate(model, 6, **given), wanted, 1e-5)
            assert calls or not (known or beams > 1)
        assert reused(kv)
