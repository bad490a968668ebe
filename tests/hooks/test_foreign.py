"""Ways in which a model computes something else under its old name: all of them are shut.

An attack makes a model in one of two states and switches between them by something that code can
reach. The model is served through a cache, within a process and over one directory: its answers are
a plain model's in every state, whatever was answered before in another one. A model with code that
is no library's is foreign: it shares nothing, and `kv.stats()` says why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.utils.operations import convert_outputs_to_fp32
from transformers import DynamicCache
from transformers.models.llama import modeling_llama as LLAMA
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.quantization_config import QuantizationMethod

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.hooks.tabled import NAME, as_library
from tests.inside import Identity, computation, fingerprint_of_weights

pytestmark = pytest.mark.filterwarnings("ignore:FlowKV shares nothing")
Model = Any
PROMPT = models.prompt(60)


def mlp(model: Model) -> Any:
    return model.model.layers[0].mlp


# An attack gives (make a model in a state, put a model into a state). What is of the process is
# put there by both; what is of the model is made anew.
Attack = Callable[[], tuple[Callable[[float], Model], Callable[[Model, float], None]]]
Put = Callable[[Model, float], object]


def of_model(put: Put, make: Callable[[], Model] = models.short) -> Attack:
    """An attack by something that is put into a model, or into the process."""

    def made(value: float) -> Model:
        model = make()
        put(model, value)
        return model.eval()

    return lambda: (made, put)


# ---- code of the user's: such a model is foreign


class Steering:
    scale = 1.0

    def hook(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * self.scale

    __call__ = hook


class Times(torch.nn.Module):
    """An MLP, times a number of this module."""

    scale = 1.0

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def times() -> Model:
    model = models.short()
    model.model.layers[0].mlp = Times(mlp(model))
    return model


class Louder(LLAMA.LlamaMLP):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Called:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


STEERING = Steering()


def scaled(module: Any, args: Any, out: torch.Tensor, strength: list[float] = [1.0]) -> Any:  # noqa: B006
    return out * strength[0]


def hooked(hook: Any) -> Callable[[], Model]:
    def make() -> Model:
        model = models.short()
        mlp(model).register_forward_hook(hook)
        return model

    return make


def steer(model: Model, value: float) -> None:
    STEERING.scale = value


def hook_within(decorator: Callable[[Any], Any]) -> Attack:
    """An attack by a hook within code of a package whose own hooks only move data."""

    def put(model: Model, value: float) -> None:
        mlp(model)._forward_hooks.clear()
        mlp(model).register_forward_hook(decorator(lambda m, a, out: out * value))

    return of_model(put)


def put_globally(model: Model, value: float) -> None:
    for handle in GLOBALLY:
        handle.remove()
    owner = type(mlp(model))

    def loud(module: Any, args: Any, out: Any) -> Any:
        return out * value if type(module) is owner else None

    GLOBALLY[:] = [torch.nn.modules.module.register_module_forward_hook(loud)]


GLOBALLY: list[Any] = []


def put_moved(model: Model, value: float) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Scaling(hooks.ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output * value

    hooks.add_hook_to_module(mlp(model), Scaling())


def traced(value: float) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        constant = torch.full((1,), value)
        return torch.jit.trace(lambda x: x * constant, torch.ones(1))


def forward_of_its_own(around: Callable[[Any], Any] = lambda function: function) -> Put:
    def put(model: Model, value: float) -> None:
        module, plain = mlp(model), LLAMA.LlamaMLP.forward
        module.forward = around(lambda x: plain(module, x) * value)

    return put


def attribute(make: Callable[[float], Any]) -> Put:
    """Puts something in the place of the activation."""

    def put(model: Model, value: float) -> None:
        del mlp(model).act_fn
        mlp(model).act_fn = make(value)

    return put


OWN: dict[str, Attack] = {
    "bound_hook": of_model(steer, hooked(STEERING.hook)),
    "object_hook": of_model(steer, hooked(STEERING)),
    "partial_hook": of_model(
        steer, hooked(functools.partial(lambda s, m, a, o: o * s.scale, STEERING))
    ),
    "hook_with_a_default": of_model(
        lambda m, v: operator.setitem(scaled.__defaults__[0], 0, v), hooked(scaled)
    ),
    "hook_in_a_decorator_of_transformers": hook_within(deprecate_kwarg("of_old", version="99.0.0")),
    "hook_in_an_object_of_accelerate": hook_within(convert_outputs_to_fp32),
    "hook_in_a_mode_of_torch": hook_within(torch.inference_mode()),
    "global_hook": of_model(put_globally),
    "hook_of_accelerate": of_model(put_moved),
    "module": of_model(lambda m, v: setattr(mlp(m), "scale", v), times),
    "class_of_a_module": of_model(lambda m, v: setattr(Times, "scale", v), times),
    "subclass": of_model(
        lambda m, v: (setattr(mlp(m), "__class__", Louder), setattr(mlp(m), "scale", v))
    ),
    "forward": of_model(forward_of_its_own()),
    "forward_in_a_mode_of_torch": of_model(forward_of_its_own(torch.no_grad())),
    "function": of_model(attribute(lambda v: lambda x: x * v)),
    "object": of_model(attribute(Called)),
    "method": of_model(attribute(lambda v: Called(v).__call__)),
    "partial": of_model(attribute(lambda v: functools.partial(lambda a, x: a * x, v))),
    "reader": of_model(attribute(lambda v: operator.methodcaller("mul", v))),
    "traced_function": of_model(attribute(traced)),
}

# ---- what the name of a model of libraries covers


def put_bound(model: Model, value: float) -> None:
    factor = vars(mlp(model)).get("factor")
    if factor is None:
        factor = mlp(model).factor = torch.tensor(1.0)
        attribute(lambda v: factor.mul)(model, value)
    factor.fill_(value)


NAMED: dict[str, Attack] = {
    "bound_method_of_a_tensor": of_model(put_bound),
    "number": of_model(lambda m, v: setattr(m.model.layers[0].self_attn, "scaling", abs(v))),
    "partial_of_torch": of_model(
        attribute(
            lambda v: functools.partial(torch.nn.functional.leaky_relu, negative_slope=abs(v))
        )
    ),
    "function_of_torch": of_model(attribute(lambda v: torch.neg if v == 1.0 else torch.exp)),
    "module_of_torch": of_model(attribute(lambda v: torch.nn.Hardtanh(-abs(v), abs(v)))),
}


def of_library(put: Callable[[Any, float], object]) -> Attack:
    """An attack on what code of a library reads beside its own text."""

    def build() -> Any:
        sys.modules.pop(NAME, None)
        module = as_library()

        def made(value: float) -> Model:
            model = models.causal("llama")
            model.model.layers[0].mlp = module.Tabled(mlp(model))
            put(module, value)
            return model.eval()

        return made, lambda model, value: put(module, value)

    return build


def chosen(module: Any, value: float) -> None:
    module.CHOSEN.clear()
    module.CHOSEN.add(value)


SET: list[tuple[Any, str, Any]] = []
"""Members that attacks have set, and what was there."""
ABSENT = object()


def put_member(owner: Any, name: str, made: Any) -> None:
    SET.append((owner, name, vars(owner).get(name, ABSENT)))
    if made is not ABSENT:
        setattr(owner, name, made)
    elif name in vars(owner):
        delattr(owner, name)


def member(owner: Any, name: str, make: Callable[[float], Any]) -> Attack:
    """An attack by a member of a class or module that code of libraries reads."""
    return of_model(lambda model, value: put_member(owner, name, make(value)))


def later(owner: Callable[[Any], Any], make: Callable[[float], Any] = float) -> Attack:
    """An attack by a member of a class that code of libraries reads where it is there."""
    return of_library(
        lambda module, v: put_member(owner(module), "later", ABSENT if v == 1.0 else make(v))
    )


NAMED |= {
    "dict": of_library(lambda module, v: module.MAPPED.update(scale=v)),
    "ordered": of_library(lambda module, v: module.ORDERED.update(scale=v)),
    "list": of_library(lambda module, v: operator.setitem(module.LISTED, 0, v)),
    "nested": of_library(lambda module, v: operator.setitem(module.NESTED["scale"]["of"][0], 0, v)),
    "set": of_library(chosen),
    "defaults": of_library(lambda m, v: setattr(m.by_default, "__defaults__", (v,))),
    "keyword": of_library(lambda m, v: setattr(m.by_default, "__kwdefaults__", {"again": v})),
    "number_of_a_class": of_library(lambda m, v: setattr(m.Tabled, "level", v)),
    "tensor_of_a_class": of_library(lambda m, v: setattr(m.Tabled, "level", torch.tensor(v))),
    "partial_of_a_class": of_library(
        lambda m, v: setattr(m.Tabled, "scaled", staticmethod(functools.partial(torch.mul, v)))
    ),
    "added_later": later(lambda module: module.Tabled),
    "added_later_to_torch": later(lambda module: torch.nn.Module),
    "added_later_to_a_layer": later(lambda module: torch.nn.Linear),
    "added_later_to_parameters": later(lambda module: torch.nn.Parameter),
}


class Said(property):
    """A property that returns a value of its own."""

    value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


def said(value: float) -> Said:
    made = Said(lambda self: 1.0)
    made.value = value
    return made


# ---- code in the place of a library's


def louder(plain: Any) -> Any:
    return lambda *args, **kwargs: plain(*args, **kwargs) * -3.0


def cached_by_another(plain: Any) -> Any:
    """A cached function that says that it wraps the plain one."""
    return functools.wraps(plain)(functools.lru_cache(louder(plain)))


def patched(owner: Any, name: str, other: Callable[[Any], Any] = louder) -> Attack:
    plain = vars(owner).get(name, getattr(owner, name))
    own = plain if name in vars(owner) else ABSENT
    return member(owner, name, lambda v: own if v == 1.0 else other(plain))


def chosen_registry(value: float) -> Any:
    """Return a registry of transformers, with an attention of ours in one of two states."""
    registry = type(LLAMA.ALL_ATTENTION_FUNCTIONS)()
    if value != 1.0:
        sdpa = registry["sdpa"]

        def loud(*args: Any, **kwargs: Any) -> Any:
            out, weights = sdpa(*args, **kwargs)
            return out * value, weights

        registry["sdpa"] = loud
    return registry


def recompile(model: Model, value: float, plain: Any = LLAMA.rotate_half.__code__) -> None:
    LLAMA.rotate_half.__code__ = plain if value == 1.0 else (lambda x: x).__code__


OVERRIDES: list[Any] = []


def overridden(
    name: str, function: Callable[[float], Any], key: str = "CPU", *, torchs: bool = False
) -> Attack:
    """An attack by an operator, which torch itself has overridden before if `torchs`."""

    def override(model: Model, value: float) -> None:
        if value != 1.0 and len(OVERRIDES) > torchs:
            return  # torch forgets an override that is made again, see docs/explain/exactness.md
        restore_operators()
        if torchs:
            code = compile("library = Library('aten', 'IMPL')", torch._refs.__file__, "exec")
            exec(code, made := {"Library": torch.library.Library})
            OVERRIDES.append(made["library"])
            OVERRIDES[0].impl(name, function(1.0), "CPU")
        if value != 1.0:
            OVERRIDES.append(torch.library.Library("aten", "IMPL"))
            OVERRIDES[-1].impl(name, function(value), key)

    return of_model(override)


def restore_operators() -> None:
    while OVERRIDES:
        OVERRIDES.pop()._destroy()


def override_by_name(model: Model, value: float) -> None:
    restore_operators()
    if value != 1.0:
        torch.library.impl("aten::silu", "cpu", silu(value))
        OVERRIDES.append(torch.library._keep_alive.pop())


def silu(value: float) -> Any:
    return lambda x: x * torch.sigmoid(x) * value


def linear(value: float) -> Any:
    return lambda x, weight, bias=None: torch.matmul(x, weight.t()) * value


def attend(value: float) -> Any:
    return lambda q, *beside, **named: (q * value, q[..., 0])


PATCHED: dict[str, Attack] = {
    "method": of_library(lambda m, v: setattr(m.Tabled, "factor", lambda self: v)),
    "property": of_library(lambda m, v: setattr(m.Tabled, "level", property(lambda self: v))),
    "classmethod": of_library(lambda m, v: setattr(m.Tabled, "factor", classmethod(lambda _: v))),
    "property_of_another_class": of_library(lambda m, v: setattr(m.Tabled, "level", said(v))),
    "property_added_later": later(lambda m: m.Tabled, lambda v: property(lambda self: v)),
    "global": of_library(lambda m, v: setattr(m, "by_default", lambda: v)),
    "silu": patched(torch.nn.functional, "silu"),
    "linear": patched(torch.nn.Linear, "forward"),
    "call": patched(torch.nn.Module, "_call_impl", functools.partialmethod),
    "transpose": patched(torch.Tensor, "transpose"),
    "rotate_half": patched(LLAMA, "rotate_half", cached_by_another),
    "object_of_torch_for_a_function": patched(
        LLAMA, "rotate_half", lambda plain: torch.nn.Hardtanh(-3.0, 3.0)
    ),
    "function_of_torch_for_a_method": patched(LLAMA.LlamaMLP, "forward", lambda plain: torch.neg),
    "method_of_another_class": patched(
        LLAMA.LlamaMLP, "forward", lambda plain: torch.nn.Identity.forward
    ),
    "decorator_of_torch": member(
        LLAMA.LlamaMLP,
        "forward",
        lambda v, plain=LLAMA.LlamaMLP.forward: torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=v != 1.0
        )(plain),
    ),
    "registry_of_attention": member(LLAMA, "ALL_ATTENTION_FUNCTIONS", chosen_registry),
    "method_of_a_registry": patched(
        type(LLAMA.ALL_ATTENTION_FUNCTIONS),
        "get_interface",
        lambda plain: lambda *args: chosen_registry(-3.0)["sdpa"],
    ),
    "recompiled": of_model(recompile),
    "operator": overridden("silu", silu),
    "operator_by_name": of_model(override_by_name),
    "operator_within": overridden("_scaled_dot_product_flash_attention_for_cpu", attend),
    "operator_that_torch_overrides": overridden("silu", silu, torchs=True),
    "operator_of_all_devices": overridden("linear", linear, "CompositeImplicitAutograd"),
    "operator_without_a_key": overridden("linear", linear, ""),
}
ATTACKS = {
    f"{kind}_{name}": attack
    for kind, attacks in (("own", OWN), ("named", NAMED), ("patched", PATCHED))
    for name, attack in attacks.items()
}


def collide() -> tuple[str, str]:
    """Two texts whose order in a set is that in which they were added."""
    texts = [f"text{n}" for n in range(64)]
    return next(
        pair for pair in itertools.combinations(texts, 2) if [*set(pair)] != [*set(pair[::-1])]
    )


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What attacks put into the process is taken back."""
    yield
    while SET:
        owner, name, value = SET.pop()
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
    STEERING.scale = Times.scale = 1.0
    sys.modules.pop(NAME, None)
    for handle in GLOBALLY:
        handle.remove()
    GLOBALLY.clear()


ASKED = [  # the states within a process, then those of later ones
    pytest.param((1.0, -3.0, 1.0), (-3.0,), id="once"),
    pytest.param((1.0, 1.0, -3.0, -3.0, 1.0), (-3.0, 1.0), id="twice", marks=pytest.mark.thorough),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("within", "later"), ASKED)
@pytest.mark.parametrize("name", ATTACKS)
def test_within_a_process_and_over_a_directory(name: str, within, later, tmp_path) -> None:
    made, put = ATTACKS[name]()
    store = f"{tmp_path}/kv:64MiB"
    model, plain = made(1.0), made(1.0)
    answers: dict[float, Any] = {}

    def asked(kv: flowkv.KV, value: float) -> None:
        put(model, value)
        put(plain, value)
        answers[value] = generate(plain, 2, input_ids=PROMPT)
        before = reused(kv)
        assert_same(generate(model, 2, input_ids=PROMPT), answers[value])
        if kv.stats()["foreign"]:
            assert reused(kv) == before
        assert not name.startswith("own") or kv.stats()["foreign"]

    try:
        with attached(model, disk=store) as kv:
            for value in within:
                asked(kv, value)
            if name.startswith("named"):
                assert kv.stats()["foreign"] == "" and reused(kv) > 0
        put(model, 1.0)
        computation._SEEN.clear()  # an override that was seen counts for the whole process
        for value in later:
            model = made(1.0)
            put(model, value)
            with attached(model, disk=store) as kv:
                asked(kv, value)
            if name.startswith("named"):
                assert kv.stats()["foreign"] == ""
            put(model, 1.0)
    finally:
        put(model, 1.0)
        restore_operators()
        computation._SEEN.clear()
    if name != "patched_call":
        assert not torch.equal(answers[1.0].logits[0], answers[-3.0].logits[0]), "nothing changes"


def test_overrides_that_torch_makes_itself_are_no_edit(monkeypatch) -> None:
    registry = pytest.importorskip("torch._native.registry")
    model = models.short().eval()
    name = computation.Walk(model, "", {}).digest

    def node(function: Any) -> Any:
        return types.SimpleNamespace(op_symbol="silu", dispatch_key="CPU", impl_fn=function)

    nodes = [node(torch.nn.functional.silu)]
    monkeypatch.setitem(registry._graphs, ("silu", "CPU"), nodes)
    monkeypatch.setattr(torch.library, "_impls", torch.library._impls | {"aten/silu/CPU"})
    monkeypatch.setattr(computation, "_SEEN", set())
    walk = computation.Walk(model, "", {})
    assert walk.digest == name and not walk.foreign and walk.same()
    assert walk._compare(worded=False) is operator.is_  # without a call for each value
    nodes.append(node(print))
    assert not walk.same() and "silu" in computation.Walk(model, "", {}).foreign


def test_a_foreign_model_says_why_once_and_what_to_pass() -> None:
    model = times()
    with pytest.warns(UserWarning, match='revision="') as said:
        kv = flowkv.attach(model, gpu="64MiB", page_size=16)
    for _ in range(2):
        generate(model, 4, input_ids=PROMPT)
    assert sum("shares nothing" in str(one.message) for one in said) == 1
    why = kv.stats()["foreign"]
    assert why == f"model.model.layers.0.mlp: code of your own: the class {__name__}.Times"
    assert why in str(kv.explain(PROMPT[0]))
    kv.close()


@pytest.mark.usefixtures("all_is_loaded")
def test_a_revision_names_it(tmp_path) -> None:
    """Over a restart, and another revision is another name."""
    for revision, known in (("a", False), ("a", True), ("b", False), ("a", True)):
        model = times()
        with attached(model, disk=f"{tmp_path}/kv:64MiB", revision=revision) as kv:
            generate(model, 4, input_ids=PROMPT)
            assert bool(reused(kv)) == known


def an_attribute_of(part: str, name: str) -> Callable[[Model], Callable[[bool], None]]:
    def changes(model: Model) -> Callable[[bool], None]:
        module = getattr(model.model.layers[0], part)
        usual = getattr(module, name)
        return lambda back: setattr(module, name, usual if back else 5.0)

    return changes


def the_configuration(model: Model) -> Callable[[bool], None]:
    layers = model.config.num_hidden_layers
    return lambda back: setattr(model.config, "num_hidden_layers", layers if back else 1)


WITHIN_A_PAGE = {
    "variance_epsilon": an_attribute_of("input_layernorm", "variance_epsilon"),
    "scaling": an_attribute_of("self_attn", "scaling"),
    "configuration": the_configuration,
}


def test_names_do_not_depend_on_the_order_of_sets_that_libraries_hold() -> None:
    made, _ = NAMED["set"]()
    names = set()
    for pair in (collide(), collide()[::-1]):
        model = made(1.0)
        table = as_library().CHOSEN
        table.clear()
        model.config.texts = set()
        for text in pair:
            table.add(text)
            model.config.texts.add(text)
        identity = Identity(model)
        assert not identity.foreign
        names.add(identity.namespace)
    assert len(names) == 1


def test_common_functions_of_libraries_are_known() -> None:
    model = models.short()
    layer = mlp(model)
    layer.forward = torch.no_grad()(layer.forward)
    renamed = dict.fromkeys(("co_name", "co_qualname"), "no_grad")  # as torch does from 2.15 on
    layer.forward.__code__ = layer.forward.__code__.replace(**renamed)
    layer.exp = np.exp
    torch.vmap(torch.addr)(torch.ones(2, 2, 2), torch.ones(2, 2), torch.ones(2, 2))
    assert Identity(model).foreign == ""


def test_a_result_of_a_cached_function_is_not_the_function(monkeypatch) -> None:
    plain = LLAMA.rotate_half
    other = functools.lru_cache(maxsize=2)(lambda x: plain if x is None else plain(x) * -3.0)
    assert other(None) is plain
    monkeypatch.setattr(LLAMA, "rotate_half", functools.wraps(plain)(other))
    assert "rotate_half" in Identity(models.short()).foreign


def test_functions_that_numpy_makes_are_foreign(monkeypatch) -> None:
    made = np.frompyfunc(lambda number: number * -3.0, 1, 1)
    monkeypatch.setattr(LLAMA, "rotate_half", made)
    monkeypatch.setattr(np, made.__name__, made, raising=False)
    assert "rotate_half" in Identity(models.short()).foreign


def test_tables_by_objects_of_a_library_have_names_by_their_order(monkeypatch) -> None:
    model, plain, factors = models.short(), LLAMA.rotate_half, torch.ones(2).unbind()
    factors[1].fill_(-3.0)
    names = set()
    for values in (factors, factors[::-1]):
        table = dict(zip(QuantizationMethod, values, strict=False))
        monkeypatch.setattr(LLAMA, "rotate_half", functools.partial(plain, table))
        names.add(Identity(model).namespace)
    assert len(names) == 2


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("place", WITHIN_A_PAGE)
def test_a_setting_that_changes_and_comes_back_within_a_page(
    place: str, words: bool, tmp_path, monkeypatch
) -> None:
    """A model of libraries alone, changed between two steps of one call, and changed back."""
    if place == "configuration" and transformers.__version__.startswith(
        ("5.17.", "5.18.", "5.19.")
    ):
        pytest.skip("layers with fewer tokens than the first one get a mask that does not fit")
    if not words:  # as on releases of Python whose memory has another form
        monkeypatch.setattr(fingerprint_of_weights, "SUPPORTED", False)

    def changing(model: Model) -> Any:
        change, steps = WITHIN_A_PAGE[place](model), [0]

        def process(ids: Any, scores: torch.Tensor) -> torch.Tensor:
            steps[0] += 1
            if steps[0] in (10, 15):
                change(steps[0] == 15)
            return scores

        return [process]

    model, plain = models.short(), models.short()
    with attached(model, disk=f"{tmp_path}/kv:64MiB", page_size=16) as kv:
        said = generate(model, 26, input_ids=PROMPT, logits_processor=changing(model))
        assert_same(said, generate(plain, 26, input_ids=PROMPT, logits_processor=changing(plain)))
        for _ in range(2):
            found = generate(model, 4, input_ids=said.sequences)
            assert_same(found, generate(plain, 4, input_ids=said.sequences))
        assert reused(kv)


def test_a_trial_uses_up_no_random_numbers() -> None:
    class Drawing(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return x + torch.randn_like(x)

    model, plain = models.short(), models.short()
    with attached(model):
        generate(model, 2, input_ids=PROMPT)
        for each in (model, plain):
            each.model.layers[0].mlp = Drawing(each.model.layers[0].mlp)
        answers = []
        for each in (model, plain):
            torch.manual_seed(3)
            answers.append(generate(each, 4, input_ids=PROMPT))
    assert_same(*answers)


def test_ids_of_another_class_are_not_shared() -> None:
    class Shifted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            plain = super().__torch_function__(function, kinds, args, kwargs or {})
            return plain + 1 if function is torch.nn.functional.embedding else plain

    model, plain = models.short(), models.short()
    with attached(model), torch.no_grad():
        first = model(input_ids=PROMPT.as_subclass(Shifted), past_key_values=DynamicCache())
        own = plain(input_ids=PROMPT.as_subclass(Shifted), past_key_values=DynamicCache())
        assert torch.equal(first.logits, own.logits)
        assert_same(*(generate(each, 4, input_ids=PROMPT) for each in (model, plain)))


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_activations_that_wrap_tensors_stay_in_the_models_cache(part: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    answers = []
    for attach in (attached, lambda model: contextlib.nullcontext()):
        model = models.short()
        layer = getattr(model.model.layers[0].self_attn, part)
        weight = layer.weight
        wrapped = torch.nn.Parameter(TwoTensor(weight.data, weight.data), requires_grad=False)
        layer.weight = wrapped
        with attach(model):
            answers.append(generate(model, 4, input_ids=PROMPT))
    assert torch.equal(*(answer.sequences for answer in answers))


def test_an_enum_of_a_quantiser_is_known() -> None:
    """Such a value lies in the configuration of quantised models; its class has slots in C."""
    model = models.short()
    method: Any = transformers.utils.quantization_config.QuantizationMethod
    model.model.layers[0].mlp.quantised_by = method.TORCHAO
    with attached(model) as kv:
        generate(model, 2, input_ids=PROMPT)
        generate(model, 2, input_ids=PROMPT)
        assert kv.stats()["foreign"] == "" and reused(kv)


def test_a_hook_that_comes_and_goes() -> None:
    """Pages from before are not used while it is there, and are behind it."""
    model, thing = models.short(), Steering()
    plain = generate(model, 4, input_ids=PROMPT)
    with attached(model) as kv:
        for _ in range(2):
            generate(model, 4, input_ids=PROMPT)
        had = reused(kv)
        assert had > 0
        handle = mlp(model).register_forward_hook(lambda m, a, out: out * thing.scale)
        thing.scale = -3.0
        other = generate(model, 4, input_ids=PROMPT)
        assert reused(kv) == had and "code of your own" in kv.stats()["foreign"]
        handle.remove()
        assert_same(generate(model, 4, input_ids=PROMPT), plain)
        assert reused(kv) > had and kv.stats()["foreign"] == ""
    assert not torch.equal(plain.logits[0], other.logits[0])


def test_a_table_of_a_library_that_is_too_long_is_foreign() -> None:
    made, _ = of_library(lambda module, value: module.LISTED.extend([1.0] * 1000))()
    with attached(made(1.0)) as kv:
        assert "LISTED: a list of 1,001 values" in kv.stats()["foreign"]


def test_too_much_to_look_at_is_foreign() -> None:
    model = models.short()
    mlp(model).kept = list(range(100_000))
    with attached(model) as kv:
        assert "more than" in kv.stats()["foreign"]


CHECKPOINT = """
from transformers import LlamaForCausalLM
SCALE = {scale}
class Own(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * SCALE
        return out
"""


@pytest.mark.parametrize("commit", ["a" * 40, ""])
def test_code_of_a_checkpoint_is_named_by_its_text_and_commit(commit: str, tmp_path) -> None:
    names = []
    for scale in (1.0, 2.0, 1.0):
        folder = tmp_path / str(len(names)) / (commit or "local")
        folder.mkdir(parents=True)
        (folder / "modeling_own.py").write_text(CHECKPOINT.format(scale=scale))
        name = f"transformers_modules.try{len(names)}.{commit or 'local'}.modeling_own"
        spec: Any = importlib.util.spec_from_file_location(name, folder / "modeling_own.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        model = models.sharpen(module.Own(transformers.LlamaConfig(**models.GROUPED)))
        found = Identity(model)
        assert ("without a commit" in found.foreign) is not bool(commit)
        names.append([t for p, t in found._walk.leaves.items() if p.endswith("/text")])
        del sys.modules[name]
    assert names[0] == names[2] != names[1]
