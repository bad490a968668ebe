"""Whatever a value holds is in the name: keys, order and attributes; or it makes the model foreign.

Each case gives a module something to hold, and edits it. The edited model has another name; built
again, it has the same one.
"""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import dataclasses
import enum
import functools
import http
import io
import json
import os
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from flowkv import LayerGroup
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, foreign, generate, reused
from tests.hooks.test_identity import ROOT, Edit, mlp_of
from tests.inside import ForwardHook, Identity

pytestmark = pytest.mark.filterwarnings("ignore:FlowKV")
functional: Any = torch.nn.functional


def differ(one: Identity, other: Identity) -> bool:
    """Whether two states of a model share nothing: by their names, or because one has none."""
    return bool(one.foreign or other.foreign or one.namespace != other.namespace)


def holding(held: Any) -> Any:
    model = models.short()
    model.model.layers[1].mlp.held = held
    return model


class Mode(enum.Enum):
    PLAIN = 1
    LOUD = 2


class Gain(float):
    """A number with a number beside it."""

    more = 1.0


class Word(str):
    pass


class Row(list):
    __slots__ = ("factor",)


@dataclasses.dataclass(frozen=True)
class Place:
    layer: int
    head: int


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_float), ("y", ctypes.c_float))


class Marked(torch.Tensor):
    """A tensor of another class, with storage as any other."""


class One:
    def factor(self) -> float:
        return 1.0


class Decorated:
    """A decorator that is an object, as many are."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.factor = 1.0

    def __call__(self) -> float:
        return self.factor


def one() -> float:
    return 1.0


def marked_function() -> Callable[[], float]:
    def function() -> float:
        return 1.0

    function.factor = 1.0  # type: ignore[attr-defined]
    return function


def marked_tensor() -> torch.Tensor:
    tensor: Any = torch.ones(1)
    tensor.factor = 1.0
    return tensor


def put(key: Any, value: Any) -> Callable[[Any], object]:
    return lambda state: state.__setitem__(key, value)


def attribute(name: str, value: Any) -> Callable[[Any], object]:
    return lambda state: setattr(state, name, value)


# What a module holds, and an edit of it.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "tuples": (lambda: {(0, 1): 1.0, (1, 0): 1.0}, put((0, 1), 2.0)),
    "tuples_of_tuples": (lambda: {(0, (1, "a")): 1.0, (0, (1, "b")): 1.0}, put((0, (1, "a")), 2.0)),
    "dtypes": (lambda: {torch.float32: 1.0, torch.float64: 1.0}, put(torch.float32, 2.0)),
    "many_tuples": (lambda: {(i, 0): 1.0 for i in range(100)}, put((40, 0), 2.0)),
    "order": (lambda: {"a": "add", "b": "mul"}, lambda s: s.update({"a": s.pop("a")})),
    "ordered_dict": (
        lambda: collections.OrderedDict(a="add", b="mul"),
        lambda s: s.move_to_end("a"),
    ),
    "long_dict": (
        lambda: {i: "add" if i % 2 else "mul" for i in range(70)},
        lambda s: s.update({1: s.pop(1)}),
    ),
    "order_of_tuples": (
        lambda: {(0,): "add", (1,): "mul"},
        lambda s: s.update({(0,): s.pop((0,))}),
    ),
    "nested": (lambda: [[1.0], [{"a": [1.0]}]], lambda s: put(0, 2.0)(s[1][0]["a"])),
    "set": (lambda: {1.0, 2.0}, lambda s: s.add(3.0)),
    "zeros": (lambda: [0.0], put(0, -0.0)),
    "numbers": (lambda: [1], put(0, True)),
    "enum": (lambda: [http.HTTPStatus.OK], put(0, http.HTTPStatus.GONE)),
    "tensor": (lambda: torch.ones(1), lambda s: s.fill_(2.0)),
    "attribute_of_tensor": (marked_tensor, attribute("factor", 2.0)),
    "new_attribute_of_tensor": (lambda: torch.ones(1), attribute("factor", 2.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_value_holds_is_in_the_name(name: str) -> None:
    make, edit = CASES[name]
    held = make()
    model = holding(held)
    first = Identity(model)
    assert not first.foreign and Identity(holding(make())).namespace == first.namespace
    edit(held)
    assert not first.same(model)
    edited = Identity(model)
    assert not edited.foreign and edited.namespace != first.namespace


class Described:
    """Keeps descriptors in an instance."""

    def __init__(self) -> None:
        self.plain, self.made = property(lambda self: 1.0), staticmethod(one)


OTHERS: dict[str, Callable[[], Any]] = {
    "keys that are enums": lambda: {Mode.PLAIN: 1.0},
    "keys that are classes": lambda: {One: 1.0},
    "keys that are functions": lambda: {one: 1.0},
    "keys that are objects": lambda: {Place(0, 1): 1.0},
    "keys of a class of text": lambda: {Word("a"): 1.0},
    "a set of tuples": lambda: {(0, 1), (1, 2)},
    "a frozenset of tuples": lambda: frozenset({("a", 1), ("b", None)}),
    "a set of classes": lambda: {torch.nn.Linear, torch.nn.Tanh},
    "a set of functions": lambda: {one, marked_function},
    "a set of enums": lambda: {Mode.PLAIN, Mode.LOUD},
    "a class of number": lambda: Gain(1.0),
    "such a number in a dict": lambda: {"g": Gain(1.0)},
    "a class of text": lambda: {"g": Word("a")},
    "a class of list": lambda: Row([1.0]),
    "a structure of C": lambda: Point(1.0, 1.0),
    "a masked array": lambda: np.ma.masked_array([1.0, 2.0], mask=[False, True]),
    "an array of objects": lambda: np.array([1.0, None], dtype=object),
    "an array of text": lambda: np.array(["a", "bb"]),
    "an array of records": lambda: np.ones(2, np.dtype([("a", "f4"), ("b", "i8")])),
    "a dict with a default": lambda: collections.defaultdict(lambda: 1.0),
    "bytes in memory": lambda: io.BytesIO(b"\1\1"),
    "text in memory": lambda: io.StringIO("a"),
    "an array of Python's": lambda: array.array("d", [1.0]),
    "a view of memory": lambda: memoryview(bytearray(b"\1")),
    "a class of tensor": lambda: torch.ones(1).as_subclass(Marked),
    "an object": One,
    "a plain object": object,
    "descriptors": Described,
    "a function with attributes": marked_function,
    "a decorator": lambda: Decorated(one),
    "a value of FlowKV": lambda: [LayerGroup(layers=(0,), kv_heads=1, head_dim=8, value_dim=8)],
    "a pool of threads": lambda: ThreadPoolExecutor(1),
    "a partial method": lambda: functools.partialmethod(one, 1),
    "a class method": lambda: classmethod(one),
    "a slice": lambda: slice(1, 2),
    "a proxy of a dict": lambda: types.MappingProxyType({(1, 2): 3}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_value_of_another_kind_makes_its_model_foreign(kind: str) -> None:
    """What foreign models answer is tried in `test_foreign`."""
    model = holding(OTHERS[kind]())
    identity = Identity(model)
    assert identity.foreign.startswith("model.model.layers.1.mlp.held") and identity.same(model)


PROGRAM = """
import json
from flowkv.naming.identity import Identity
from tests.hooks.test_identity_contents import CASES, holding
found = [Identity(holding(make())) for make, edit in CASES.values()]
print(json.dumps([one.foreign and "foreign" or one.namespace.digest().hex() for one in found]))
"""


@pytest.mark.thorough
def test_contents_have_one_name_in_every_process() -> None:
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [a == b for a, b in zip(*found, strict=True)] == [True] * len(CASES)


# ---- nothing raises


class Cross:
    """Raises wherever it is touched."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare")

    def __hash__(self) -> int:
        return 1

    def __reduce_ex__(self, protocol: Any) -> str:
        raise RuntimeError("do not look")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("do not ask")


class CrossMapping(collections.UserDict):
    """Cannot be listed, and raises when it is asked."""

    def __iter__(self) -> Any:
        raise RuntimeError("do not list")

    def __len__(self) -> int:
        raise RuntimeError("do not count")


class CrossList(list):
    def __iter__(self) -> Any:
        raise RuntimeError("do not list")


def cross_array() -> Any:
    made = np.empty(1, dtype=object)
    made[0] = Cross()
    return made


def endless() -> list[Any]:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    return deep


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        *(Cross, CrossMapping, lambda: CrossList([1]), lambda: {Cross(): 1}, lambda: {Cross()}),
        *(lambda: [Cross(), Cross()], endless, lambda: torch.empty(2, device="meta")),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        *(lambda: torch.ones(2).to_mkldnn(), lambda: torch.ones(2, 2).to_sparse_csc()),
        lambda: torch.empty(2, dtype=torch.bits8),
        *(lambda: np.array(["2020-01-01"], dtype="M8[D]"), cross_array, lambda: (x for x in ())),
        *(lambda: ctypes.pointer(ctypes.c_int(1)), sys._getframe),
        lambda: types.MappingProxyType({(1, 2): 3}),
        lambda: torch.jit.script(torch.nn.Linear(2, 2)),
        lambda: torch.nn.Linear.__new__(torch.nn.Linear),
    ],
)
def test_whatever_a_model_refers_to_it_is_served(make: Callable[[], Any]) -> None:
    model, prompt = models.short(), models.prompt(60)
    held = make()
    plain = generate(model, 4, input_ids=prompt)
    model.model.layers[1].mlp.__dict__["kept"] = held
    with attached(model) as kv:
        for _ in range(2):
            assert_same(generate(model, 4, input_ids=prompt), plain)
        assert foreign(kv) or reused(kv) == 48


class Times(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


def scripted(layer: Any, factor: float) -> None:
    layer.mlp.down_proj = torch.jit.script(Times(layer.mlp.down_proj, factor).eval())


def traced(layer: Any, factor: float) -> None:
    layer.mlp = torch.jit.trace(Times(layer.mlp, factor).eval(), torch.zeros(1, 3, 64))


def frozen(layer: Any, factor: float) -> None:
    traced(layer, factor)
    layer.mlp = torch.jit.freeze(layer.mlp)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [scripted, traced, frozen])
def test_modules_that_torch_compiled(make: Callable[..., None]) -> None:
    prompt, names, answers = models.prompt(60), [], []
    for factor in (1.0, 2.0, 1.0):
        model = models.short()
        make(model.model.layers[1], factor)
        names.append(Identity(model))
        answers.append(generate(model, 4, input_ids=prompt))
    assert all(name.foreign for name in names)
    model = models.short()
    with attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        make(model.model.layers[1], 2.0)
        for _ in range(2):
            assert_same(generate(model, 4, input_ids=prompt), answers[1])
        assert foreign(kv) or reused(kv) == 48


# ---- edits of modules and of what others own


class Loud(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2.0


def modules_in_another_order(model: Any) -> None:
    held = mlp_of(model)._modules
    held["up_proj"] = held.pop("up_proj")


def weights_of_other_numbers(model: Any) -> None:
    with torch.no_grad():
        mlp_of(model).up_proj.weight.mul_(2.0)


EDITS: dict[str, Callable[[Any], object]] = {
    "modules_in_another_order": modules_in_another_order,
    "class_of_an_activation": lambda m: setattr(mlp_of(m).act_fn, "__class__", torch.nn.Tanh),
    "class_of_a_layer": lambda m: setattr(mlp_of(m).down_proj, "__class__", Loud),
    "attribute_of_a_weight": lambda m: setattr(mlp_of(m).down_proj.weight, "factor", 2.0),
    "attribute": lambda m: setattr(mlp_of(m), "factor", 2.0),
    "weights": weights_of_other_numbers,
    "nested_setting": lambda m: put("dtype", 2.0)(m.config.own),
    "tensor_of_the_configuration": lambda m: put(1000, 2.0)(m.config.gains),
    "other_tensor_of_the_configuration": lambda m: setattr(m.config, "gains", torch.zeros(2000)),
    "object_of_the_configuration": lambda m: setattr(m.config, "box", Decorated(one)),
}


def configured() -> Any:
    model = models.short()
    model.config.own, model.config.gains = {"dtype": 1.0}, torch.ones(2000)
    return model


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_module_is_another_name(edit: str) -> None:
    model = configured()
    first = Identity(model)
    assert not first.foreign and Identity(configured()).namespace == first.namespace
    EDITS[edit](model)
    assert not first.same(model)
    assert differ(first, Identity(model))


PLAIN_MLP = modeling_llama.LlamaMLP.forward
PLAIN_ROTARY = modeling_llama.apply_rotary_pos_emb


def turned(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1, *, factor: float) -> Any:
    return PLAIN_ROTARY(q * factor, k, cos, sin)


def scaled(self: Any, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return PLAIN_MLP(self, x) * factor


def gained(self: Any, x: torch.Tensor) -> torch.Tensor:
    return PLAIN_MLP(self, x) * self.gains[0]


def partial_function(factor: float) -> Edit:
    leaky = functools.partial(functional.leaky_relu, negative_slope=factor)
    return patch.object(functional, "silu", leaky)


def partial_of_its_own(factor: float) -> Edit:
    partial = functools.partial(turned, factor=factor)
    return patch.object(modeling_llama, "apply_rotary_pos_emb", partial)


def partial_method(factor: float) -> Edit:
    method = functools.partialmethod(scaled, factor=factor)
    return patch.object(modeling_llama.LlamaMLP, "forward", method)


def list_of_a_class(factor: float) -> Edit:
    members = dict(gains=[factor, 1.0], forward=gained)
    return patch.multiple(modeling_llama.LlamaMLP, create=True, **members)


def tensor_of_a_class(factor: float) -> Edit:
    members = dict(gains=torch.tensor([factor]), forward=gained)
    return patch.multiple(modeling_llama.LlamaMLP, create=True, **members)


def from_globals(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * FACTORS["a"]  # noqa: F821


@contextmanager
def dict_of_a_module(factor: float) -> Iterator[None]:
    forward = types.FunctionType(from_globals.__code__, vars(modeling_llama), "forward")
    forward.__module__ = modeling_llama.__name__
    table = patch.object(modeling_llama, "FACTORS", {"a": factor}, create=True)
    with table, patch.object(modeling_llama.LlamaMLP, "forward", forward):
        yield


def wrapped_function(factor: float) -> Edit:
    @functools.wraps(PLAIN_MLP)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return PLAIN_MLP(self, x) * factor

    return patch.object(modeling_llama.LlamaMLP, "forward", forward)


PLACES = [
    *(partial_function, partial_of_its_own, partial_method, list_of_a_class, tensor_of_a_class),
    *(dict_of_a_module, wrapped_function),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_is_placed_in_a_library_is_named_by_content(place: Callable[[float], Edit]) -> None:
    """Two values that differ have two names and answers, and one value one name."""
    names, answers, prompt = [], [], models.prompt(60)
    for factor in (2.0, 5.0, 2.0):
        model = models.short()
        with place(factor):
            names.append(Identity(model))
            answers.append(generate(model, 4, input_ids=prompt))
    assert differ(names[0], names[1])
    assert names[0].foreign or names[0].namespace == names[2].namespace
    model = models.short()
    with place(2.0), attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        assert_same(generate(model, 4, input_ids=prompt), answers[0])
        assert foreign(kv) or reused(kv) == 48
        with place(5.0):
            for _ in range(2):
                assert_same(generate(model, 4, input_ids=prompt), answers[1])


def test_forwards_of_a_library_in_an_instance() -> None:
    prompt, forwards = models.prompt(60), [PLAIN_MLP, modeling_phi3.Phi3MLP.forward]

    def made() -> Any:
        model = models.short()
        mlp = model.model.layers[1].mlp
        torch.manual_seed(3)
        mlp.gate_up_proj = torch.nn.Linear(64, 2 * mlp.up_proj.out_features).eval()
        mlp.activation_fn = mlp.act_fn
        return model, mlp

    names, answers = [], []
    for forward in (*forwards, *forwards):
        model, mlp = made()
        mlp.forward = types.MethodType(forward, mlp)
        names.append(Identity(model).namespace)
        answers.append(generate(model, 4, input_ids=prompt))
    assert names[:2] == names[2:]
    assert names[0] != names[1]
    model, mlp = made()
    with attached(model):
        for forward, theirs in zip(forwards, answers, strict=False):
            mlp.forward = types.MethodType(forward, mlp)
            for _ in range(2):
                assert_same(generate(model, 4, input_ids=prompt), theirs)


@pytest.mark.parametrize("name", ["code", "test.layers", "transformers.own", "torch"])
def test_code_that_has_the_name_of_another_module(name: str) -> None:
    """A script called `code.py`, say."""
    model, space = models.short(), {"__name__": name}
    exec("def hook(module, args, out):\n    return out", space)
    model.model.layers[1].mlp.register_forward_hook(space["hook"])
    assert Identity(model).foreign


# ---- caches, and what somebody does later


def test_a_door_that_somebody_traces_is_in_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks hold all that FlowKV knows of the model: a name of that would be nobody's."""
    name, after, seen = Identity(models.short()).namespace, ForwardHook.after, []

    def traced(self: ForwardHook, *arguments: Any) -> Any:
        seen.append(self)
        return after(self, *arguments)

    monkeypatch.setattr(ForwardHook, "after", traced)
    model = models.short()
    with attached(model):
        generate(model, 2, input_ids=models.prompt(60))
        assert seen
        assert Identity(model).namespace == name


def test_a_function_that_is_bound_to_something_of_flowkv_is_foreign() -> None:
    model = models.short()

    def doubled(held: Any, module: Any, given: Any, out: Any) -> Any:
        return out * 2

    with attached(models.short()) as kv:
        model.model.layers[0].mlp.register_forward_hook(types.MethodType(doubled, kv))
        assert Identity(model).foreign


@pytest.mark.parametrize("kept", ["attribute", "list", "closure"])
def test_a_model_that_holds_its_cache_is_named_without_it(kept: str) -> None:
    """What a cache knows is as large as the cache, and says nothing of what is computed."""
    model = models.short()
    with attached(model) as kv:
        if kept == "attribute":
            model.kv = kv
        elif kept == "list":
            model.model.held = [(weakref.ref(model), kv)]
        else:
            forward = model.model.layers[0].mlp.forward
            model.model.layers[0].mlp.forward = lambda x: forward(x) if kv else None
        found = [Identity(model) for _ in range(2)]
        assert bool(found[0].foreign) == (kept != "attribute")
        generate(model, 2, input_ids=models.prompt(60))
        before = kv.stats()["tokens_reused"]
        generate(model, 2, input_ids=models.prompt(60))
        assert foreign(kv) or kv.stats()["tokens_reused"] > before
        assert Identity(model).namespace == found[0].namespace == found[1].namespace


@pytest.mark.parametrize("bound", [False, True])
def test_what_somebody_keeps_on_a_cache_is_foreign(bound: bool) -> None:
    model = models.short()
    with attached(model) as kv:
        kv.factor = 1.0

        def scaled(held: Any, module: Any, given: Any, out: Any) -> Any:
            return out * held.factor

        hook = types.MethodType(scaled, kv) if bound else lambda *given: scaled(kv, *given)
        model.model.layers[0].mlp.register_forward_hook(hook)
        assert Identity(model).foreign


def test_a_cache_that_somebody_makes_hold_itself_is_named() -> None:
    model = models.short()
    with attached(model) as kv:
        kv.me, model.kv = kv, kv
        identity = Identity(model)
        assert identity.same(model)
        assert Identity(model).namespace == identity.namespace


def test_a_method_of_all_tensors_that_is_replaced_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, power = models.short(), torch.Tensor.pow
    identity = Identity(model)
    monkeypatch.setattr(torch.Tensor, "pow", lambda x, *given: power(x, *given) * 4)
    assert not identity.same(model)
    assert differ(identity, Identity(model))
    monkeypatch.undo()
    assert identity.same(model) and Identity(model).namespace == identity.namespace


def test_weights_that_are_read_as_another_type_are_noticed() -> None:
    model, prompt = models.short().to(torch.bfloat16), models.prompt(60)
    with attached(model) as kv:
        for _ in range(2):
            generate(model, 4, input_ids=prompt)
        before = kv.stats()["tokens_reused"]
        for parameter in model.parameters():
            parameter.data = parameter.data.view(torch.float16)
        generate(model, 4, input_ids=prompt)
        assert kv.stats()["tokens_reused"] == before


def test_copying_and_pickling_leave_no_trace_in_a_name() -> None:
    """Python notes on a class how its objects are copied, when the first of them is."""
    model = models.short()
    for cls in (torch.Tensor, modeling_llama.LlamaMLP):
        if "__slotnames__" in vars(cls):
            del cls.__slotnames__
    identity = Identity(model)
    for something in (torch.zeros(1), model):
        copy.copy(something)
        copy.deepcopy(something)
        pickle.dumps(torch.zeros(1))
    assert "__slotnames__" in vars(torch.Tensor)
    assert Identity(model).namespace == identity.namespace
