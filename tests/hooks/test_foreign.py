"""Ways in which a model computes something else under its old name: all of them are shut.

An attack makes a model in one of two states and switches between them by something that code can
reach. The model is served through a cache, within a process and over one directory: its answers are
a plain model's in every state, whatever was answered before in another one. A model that reaches
what no name can say is foreign: it shares nothing, and `kv.stats()` says why.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import enum
import functools
import importlib.util
import io
import itertools
import logging
import math
import operator
import os
import queue
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from os import getenv as asked
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.utils.operations import convert_outputs_to_fp32
from transformers import DynamicCache
from transformers.models.llama import modeling_llama
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.quantization_config import QuantizationMethod

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.inside import Identity, computation, memory_words

pytestmark = pytest.mark.filterwarnings("ignore:FlowKV shares nothing")
Model = Any
PROMPT = models.prompt(60)
VALUES = (1.0, -3.0)


class Times(torch.nn.Module):
    """An MLP, times what a function makes of this module."""

    def __init__(self, inner: torch.nn.Module, factor: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor(self)


def times(factor: Callable[[Any], Any], **attributes: Any) -> Model:
    model = models.short()
    model.model.layers[0].mlp = module = Times(model.model.layers[0].mlp, factor)
    for name, value in attributes.items():
        setattr(module, name, value)
    return model.eval()


def mlp(model: Model) -> Any:
    return model.model.layers[0].mlp


# An attack gives (make a model in a state, put a model into a state). What is of the process is
# put there by both; what is of the model is made anew.
Attack = Callable[[], tuple[Callable[[float], Model], Callable[[Model, float], None]]]
ATTACKS: dict[str, Attack] = {}
NAMED: set[str] = set()
"""Attacks on what is in the name: these models are not foreign, and share what is theirs."""


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


def named(function: Attack) -> Attack:
    NAMED.add(function.__name__)
    return attack(function)


def held(make: Callable[[], Any], read: Callable[[Any], Any], put: Callable[[Any, float], Any]):
    """An attack by an object that a function closes over, one for each model."""

    def build() -> Any:
        objects: dict[int, Any] = {}

        def made(value: float) -> Model:
            thing = make()
            put(thing, value)
            model = times(lambda module: read(thing))
            objects[id(model)] = thing
            model.__dict__["name_or_path_of_a_test"] = 0
            return model

        return made, lambda model, value: put(objects[id(model)], value)

    return build


def of_process(read: Callable[[Any], Any], put: Callable[[float], Any]):
    """An attack by something that there is once in a process."""

    def build() -> Any:
        def made(value: float) -> Model:
            put(value)
            return times(read)

        return made, lambda model, value: put(value)

    return build


def of_module(read: Callable[[Any], Any], put: Callable[[Any, float], Any]):
    """An attack by an attribute of a module."""

    def build() -> Any:
        def made(value: float) -> Model:
            model = times(read, held=0, order=set())
            put(mlp(model), value)
            return model

        return made, lambda model, value: put(mlp(model), value)

    return build


def attribute(name: str = "scale") -> Callable[[Any, float], None]:
    return lambda thing, value: setattr(thing, name, value)


class Plain:
    scale = 1.0


class Slots:
    __slots__ = ("scale",)


class Called:
    scale = 1.0

    def __call__(self, module: Any) -> float:
        return self.scale


class Controller(threading.Thread):
    scale = 1.0


class Data(dict):
    scale = 1.0


@dataclasses.dataclass
class Record:
    scale: float = 1.0


class Level(enum.Enum):
    LOW = 1


class Free(enum.Enum):
    LOW = [1.0]  # noqa: RUF012


class Lazy(types.ModuleType):
    @property
    def scale(self) -> float:
        return self.kept


def lazily() -> types.ModuleType:
    module = types.ModuleType("lazy_of_a_test")
    module.__getattr__ = lambda name: module.__dict__["kept"][name]  # type: ignore[method-assign]
    return module


def from_generator(cell: list[float]) -> Iterator[float]:
    while True:
        yield cell[0]


def put_first(thing: Any, value: float) -> None:
    thing[0] = value


OBJECTS: dict[str, Any] = {
    "object": held(Plain, lambda s: s.scale, attribute()),
    "slots": held(Slots, lambda s: s.scale, attribute()),
    "namespace": held(types.SimpleNamespace, lambda s: s.scale, attribute()),
    "dataclass": held(Record, lambda s: s.scale, attribute()),
    "thread": held(Controller, lambda s: s.scale, attribute()),
    "dict_subclass": held(Data, lambda s: s.scale, attribute()),
    "python_module": held(lambda: types.ModuleType("m"), lambda s: s.scale, attribute()),
    "module_in_a_dict": held(
        lambda: {"m": types.ModuleType("m")},
        lambda s: s["m"].scale,
        lambda s, v: setattr(s["m"], "scale", v),
    ),
    "module_property": held(lambda: Lazy("m"), lambda s: s.scale, attribute("kept")),
    "module_getattr": held(
        lazily, lambda s: s.scale, lambda s, v: setattr(s, "kept", {"scale": v})
    ),
    "logger": held(
        lambda: logging.Logger("of a test"),
        lambda s: VALUES[s.level > 20],
        lambda s, v: s.setLevel(10 if v == 1.0 else 30),
    ),
    "event": held(
        threading.Event,
        lambda s: VALUES[s.is_set()],
        lambda s, v: s.clear() if v == 1.0 else s.set(),
    ),
    "thread_local": held(threading.local, lambda s: s.scale, attribute()),
    "context_variable": held(
        lambda: contextvars.ContextVar("k"), lambda s: s.get(), lambda s, v: s.set(v)
    ),
    "queue": held(
        queue.SimpleQueue,
        lambda s: VALUES[not s.empty()],
        lambda s, v: s.put(1) if v != 1.0 else [s.get() for _ in range(s.qsize())],
    ),
    "array": held(lambda: np.ones(1), lambda s: float(s[0]), put_first),
    "bytearray": held(
        lambda: bytearray(1), lambda s: VALUES[s[0]], lambda s, v: put_first(s, int(v != 1.0))
    ),
    "ctypes": held(lambda: ctypes.c_float(1.0), lambda s: s.value, attribute("value")),
    "deque": held(lambda: collections.deque([1.0]), lambda s: s[0], put_first),
    "file_object": held(
        io.StringIO, lambda s: float(s.getvalue()), lambda s, v: (s.seek(0), s.write(f"{v:5.1f}"))
    ),
    "tensor_attribute": held(lambda: torch.ones(1), lambda s: s.scale, attribute()),
    "function_attribute": held(lambda: lambda: 1.0, lambda s: s.scale, attribute()),
    "reader_by_name": held(
        lambda: [Plain(), operator.attrgetter("scale")],
        lambda s: s[1](s[0]),
        lambda s, v: setattr(s[0], "scale", v),
    ),
    "universal_function": held(
        lambda: [0.0], lambda s: float(np.frompyfunc(lambda x: s[0], 1, 1)(1.0)), put_first
    ),
    "generator": held(
        lambda: (cell := [1.0], from_generator(cell)),
        lambda s: next(s[1]),
        lambda s, v: put_first(s[0], v),
    ),
}
ATTACKS |= OBJECTS

# What is in the name, as it is plain: a number, a list, a tensor.
PLAINS: dict[str, Any] = {
    "a_list": held(lambda: [1.0], lambda s: s[0], put_first),
    "a_dict": held(dict, lambda s: s["k"], lambda s, v: s.__setitem__("k", v)),
    "a_tensor": held(lambda: torch.ones(1), lambda s: s, lambda s, v: s.fill_(v)),
    "a_nested_list": held(lambda: [[1.0]], lambda s: s[0][0], lambda s, v: put_first(s[0], v)),
}
ATTACKS |= PLAINS
NAMED |= PLAINS.keys()

SETTING = 1.0
TABLE = {"scale": 1.0}
SETTINGS = sys.modules[__name__]


def put_global(value: float) -> None:
    global SETTING
    SETTING = value


KEY, TEMPLATE = "SETTING", "{.factor.__globals__[SETTING]}"
ELSEWHERE: dict[str, Any] = {
    "a_global": of_process(lambda m: SETTING, put_global),
    "a_table": of_process(lambda m: TABLE["scale"], lambda v: TABLE.update(scale=v)),
}
ATTACKS |= ELSEWHERE
NAMED |= ELSEWHERE.keys()


def by_import(module: Any) -> float:
    import settings_of_a_test

    return settings_of_a_test.scale


def put_module(value: float) -> None:
    made = sys.modules.setdefault("settings_of_a_test", types.ModuleType("settings_of_a_test"))
    made.scale = value


def put_environment(value: float) -> None:
    os.environ["SCALE_OF_A_TEST"] = str(value)


@functools.cache
def remembered() -> float:
    return SETTING


def put_remembered(value: float) -> None:
    put_global(value)
    remembered.cache_clear()


VARIABLE = contextvars.ContextVar("of_a_test", default=1.0)
LOCAL = threading.local()


def put_builtin(value: float) -> None:
    builtins.scale_of_a_test = value


FAR: dict[str, Any] = {
    "import": of_process(by_import, put_module),
    "import_module": of_process(
        lambda m: importlib.import_module("settings_of_a_test").scale, put_module
    ),
    "sys_modules": of_process(lambda m: sys.modules["settings_of_a_test"].scale, put_module),
    "getattr": of_process(lambda m: getattr(SETTINGS, KEY), put_global),
    "vars": of_process(lambda m: vars(SETTINGS)["SETTING"], put_global),
    "globals": of_process(lambda m: globals()[KEY], put_global),
    "frame": of_process(lambda m: sys._getframe().f_globals[KEY], put_global),
    "function_globals": of_process(lambda m: put_global.__globals__[KEY], put_global),
    "format": of_process(
        lambda m: float(TEMPLATE.format(m)),
        put_global,
    ),
    "eval": of_process(lambda m: eval("SETTING"), put_global),
    "getenv": of_process(lambda m: float(os.getenv("SCALE_OF_A_TEST", "1")), put_environment),
    "getenv_by_another_name": of_process(
        lambda m: float(asked("SCALE_OF_A_TEST", "1")), put_environment
    ),
    "getenv_partial": of_process(
        functools.partial(
            lambda get, m: float(get()), functools.partial(os.getenv, "SCALE_OF_A_TEST")
        ),
        put_environment,
    ),
    "getenv_without_gradients": of_process(
        functools.partial(
            lambda get, m: float(get("SCALE_OF_A_TEST", "1")), torch.no_grad()(os.getenv)
        ),
        put_environment,
    ),
    "getenv_dispatched": of_process(
        functools.partial(
            lambda get, m: float(get("SCALE_OF_A_TEST", "1")),
            torch._jit_internal.boolean_dispatch("n", 2, False, lambda *n: n, os.getenv, "", "get"),
        ),
        put_environment,
    ),
    "environ": of_process(lambda m: float(os.environ["SCALE_OF_" + "A_TEST"]), put_environment),
    "cached": of_process(lambda m: remembered(), put_remembered),
    "global_object": of_process(lambda m: Plain.scale, lambda v: setattr(Plain, "scale", v)),
    "context": of_process(lambda m: VARIABLE.get(), VARIABLE.set),
    "local": of_process(lambda m: getattr(LOCAL, "k", 1.0), lambda v: setattr(LOCAL, "k", v)),
    "builtin": of_process(lambda m: scale_of_a_test, put_builtin),  # noqa: F821
    "threads": of_process(
        lambda m: VALUES[torch.is_anomaly_enabled()],
        lambda v: torch.autograd.set_detect_anomaly(v != 1.0),
    ),
}
ATTACKS |= FAR


class Marked(Times):
    """A module whose class has members that code elsewhere reads."""

    level = 1.0

    def factor_of(self) -> float:
        return 1.0


def put_level(value: float) -> None:
    Marked.level = value


def put_method(value: float) -> None:
    Marked.factor_of = (lambda self: 1.0) if value == 1.0 else (lambda self: -3.0)  # type: ignore[method-assign]


class Loud(torch.nn.Module):
    """A class that another one inherits from."""

    loud = 1.0


class Mixed(Loud, Marked):
    """A module with members of two classes."""


class Parent(Marked):
    """A module whose forward reads a member of the class of another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.inner.level


def marked(factor: Callable[[Any], Any], put: Callable[[float], None], kind: Any = Marked) -> Any:
    def made(value: float) -> Model:
        put(value)
        model = models.short()
        layer: Any = model.model.layers[0]
        layer.mlp = kind(layer.mlp, factor)
        return model.eval()

    return made, lambda model, value: put(value)


@attack
def number_of_a_class_that_a_function_reads() -> Any:
    return marked(lambda module: module.level, put_level)


@attack
def method_of_a_class_that_a_function_calls() -> Any:
    return marked(lambda module: module.factor_of(), put_method)


@attack
def number_of_a_class_that_a_hook_reads() -> Any:
    made, put = marked(lambda module: 1.0, put_level)

    def hooked(value: float) -> Model:
        model = made(value)
        mlp(model).register_forward_hook(lambda module, args, out: out * module.level)
        return model

    return hooked, put


@attack
def number_of_a_class_that_a_parent_reads() -> Any:
    def nested(inner: torch.nn.Module, factor: Any) -> Any:
        return Parent(Marked(inner, lambda module: 1.0), factor)

    return marked(lambda module: 1.0, put_level, nested)


SET: list[tuple[Any, str, Any]] = []
"""Members that attacks have set on classes, and what was there."""
ABSENT = object()


def member(
    owner: Any, name: str, read: Callable[[Any], Any], make: Callable[[float], Any] = float
) -> Attack:
    """An attack by a member of a class; `ABSENT` takes it from the class."""

    def put(value: float) -> None:
        SET.append((owner, name, vars(owner).get(name, ABSENT)))
        if (made := make(value)) is not ABSENT:
            setattr(owner, name, made)
        elif name in vars(owner):
            delattr(owner, name)

    return lambda: marked(read, put, Mixed)


def later(module: Any) -> float:
    try:
        return module.later_level
    except AttributeError:
        return 1.0


def quarter(module: Any) -> Any:
    return module.inner.down_proj.weight.level_of_a_test


class Said(property):
    """A property that returns a value of its own."""

    value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


class SaidOnce(functools.cached_property):
    """A cached property that returns a value of its own, and caches nothing."""

    value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


class SaidByNone(staticmethod):
    """A static method that returns a value of its own."""

    value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.value


def saying(kind: Any) -> Callable[[float], Any]:
    def make(value: float) -> Any:
        made = kind(lambda *args: 1.0)
        made.value = value
        return made

    return make


class Setter:
    """An object that is called where an attribute is set."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, owner: Any, value: float) -> None:
        owner.__dict__["was_set"] = value * self.value


def set_and_read(module: Any) -> float:
    module.level_of_a_test = 1.0
    return module.was_set


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


def in_half(value: float) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=value != 1.0)(PLAIN_MLP)


def by_name(module: Any) -> Any:
    return module.get_parameter("inner.level" + "_of_a_test")


LLAMA: Any = transformers.models.llama.modeling_llama
PLAIN_MLP = LLAMA.LlamaMLP.forward
PLAIN_CHOICE = type(LLAMA.ALL_ATTENTION_FUNCTIONS).get_interface
CLASSES: dict[str, Attack] = {
    "property": member(
        Marked,
        "level_of_a_test",
        lambda m: m.level_of_a_test,
        lambda v: property((lambda m: 1.0) if v == 1.0 else (lambda m: -3.0)),
    ),
    "classmethod": member(
        Marked,
        "level_of_a_test",
        lambda m: m.level_of_a_test(),
        lambda v: classmethod((lambda cls: 1.0) if v == 1.0 else (lambda cls: -3.0)),
    ),
    "tensor_of_a_class": member(
        Marked, "level_of_a_test", lambda m: m.level_of_a_test, lambda v: torch.tensor([v])
    ),
    "base_class": member(Loud, "loud", lambda m: m.loud),
    "added_later": member(Marked, "later_level", later, lambda v: ABSENT if v == 1.0 else v),
    "added_later_to_torch": member(
        torch.nn.Module, "later_level", later, lambda v: ABSENT if v == 1.0 else v
    ),
    "class_of_parameters": member(torch.nn.Parameter, "level_of_a_test", quarter),
    "class_of_a_layer": member(
        torch.nn.Linear, "level_of_a_test", lambda m: m.inner.down_proj.level_of_a_test
    ),
    "class_of_transformers": member(
        LLAMA.LlamaMLP, "level_of_a_test", lambda m: m.inner.level_of_a_test
    ),
    "list_of_transformers": member(
        LLAMA.LlamaMLP, "level_of_a_test", lambda m: m.inner.level_of_a_test[0], lambda v: [v]
    ),
    "list_of_settings": member(
        transformers.LlamaConfig,
        "level_of_a_test",
        lambda m: m.inner.config.level_of_a_test[0],
        lambda v: [v],
    ),
    "operator": member(
        LLAMA.LlamaMLP,
        "__mul__",
        lambda m: m.inner * 1.0,
        lambda v: (lambda m, o: o) if v == 1.0 else (lambda m, o: o * -3.0),
    ),
    "property_of_another_class": member(
        Marked, "level_of_a_test", lambda m: m.level_of_a_test, saying(Said)
    ),
    "cached_property_of_another_class": member(
        Marked, "level_of_a_test", lambda m: m.level_of_a_test, saying(SaidOnce)
    ),
    "static_method_of_another_class": member(
        Marked, "level_of_a_test", lambda m: m.level_of_a_test, saying(SaidByNone)
    ),
    "setter_of_a_property": member(
        Marked,
        "level_of_a_test",
        set_and_read,
        lambda v: property(lambda m: 1.0, Setter(v)),
    ),
    "parameter_of_a_class_by_a_made_name": member(
        LLAMA.LlamaMLP,
        "level_of_a_test",
        by_name,
        lambda v: torch.nn.Parameter(torch.tensor([v])),
    ),
    "registry_of_attention": member(
        LLAMA, "ALL_ATTENTION_FUNCTIONS", lambda m: 1.0, chosen_registry
    ),
    "method_of_a_registry": member(
        type(LLAMA.ALL_ATTENTION_FUNCTIONS),
        "get_interface",
        lambda m: 1.0,
        lambda v: PLAIN_CHOICE if v == 1.0 else lambda *args: chosen_registry(v)["sdpa"],
    ),
    "decorator_of_torch": member(LLAMA.LlamaMLP, "forward", lambda m: 1.0, in_half),
    "object_of_torch_for_a_function": member(
        LLAMA, "rotate_half", lambda m: 1.0, lambda v: torch.nn.Hardtanh(-abs(v), abs(v))
    ),
    "function_of_torch": member(
        LLAMA.LlamaMLP,
        "forward",
        lambda m: 1.0,
        lambda v, plain=LLAMA.LlamaMLP.forward: plain if v == 1.0 else torch.neg,
    ),
}
ATTACKS |= CLASSES


def put_partial(value: float) -> None:
    slope = functools.partial(torch.nn.functional.leaky_relu, negative_slope=value)
    Marked.scaled = staticmethod(slope)  # type: ignore[attr-defined]


@attack
def argument_of_a_partial_on_a_class() -> Any:
    def made(value: float) -> Model:
        put_partial(value)
        return marked(lambda module: module.scaled(-torch.ones(1)), lambda _: None)[0](value)

    return made, lambda model, value: put_partial(value)


@attack
def impure_function_on_a_class() -> Any:
    """A function of Python's that reads the process, called through a class."""

    class Asking(Marked):
        asked = staticmethod(os.getenv)

    return marked(lambda m: float(m.asked("SCALE_OF_A_TEST", "1.0")), put_environment, Asking)


@attack
def class_without_a_module() -> Any:
    """A base class that `exec` made, with Python's builtins as its module."""
    space: dict[str, Any] = {}
    exec("class Nameless:\n    level_of_a_test = 1.0", space)
    mixed = type("MixedAgain", (space["Nameless"], Marked), {})

    def put(value: float) -> None:
        space["Nameless"].level_of_a_test = value

    return marked(lambda module: module.level_of_a_test, put, mixed)


@attack
def bound_method_of_a_tensor() -> Any:
    factor = torch.tensor(1.0)

    def made(value: float) -> Model:
        factor.fill_(value)
        model = models.short()
        del mlp(model).act_fn
        mlp(model).act_fn = factor.mul
        return model.eval()

    return made, lambda model, value: factor.fill_(value)


NAMED |= {"bound_method_of_a_tensor"}


def put_order(module: Any, value: float) -> None:
    module.order.clear()
    for number in (0, 8) if value == 1.0 else (8, 0):  # equal sets, in another order
        module.order.add(number)


def collide() -> tuple[str, str]:
    """Two texts whose order in a set is that in which they were added."""
    texts = [f"text{n}" for n in range(64)]
    return next(
        pair for pair in itertools.combinations(texts, 2) if [*set(pair)] != [*set(pair[::-1])]
    )


def put_texts(module: Any, value: float) -> None:
    pair = collide()
    module.held, module.order = pair[0], set()
    for text in pair if value == 1.0 else pair[::-1]:
        module.order.add(text)


def by_order(module: Any) -> Any:
    first = 1.0
    for number in module.order:
        first = first * 3.0 if number == 0 else first - 4.0
    return first


def put_tied(module: Any, value: float) -> None:
    module.first = torch.nn.Parameter(torch.ones(1))
    module.second = module.first if value != 1.0 else torch.nn.Parameter(torch.ones(1))


def put_tensors(module: Any, value: float) -> None:
    module._buffers.clear()
    for name in ("one", "two") if value == 1.0 else ("two", "one"):
        module.register_buffer(name, torch.tensor([1.0 if name == "one" else -3.0]))


def put_kind(module: Any, value: float) -> None:
    module._parameters.pop("extra", None)
    module._buffers.pop("extra", None)
    if value == 1.0:
        module.register_buffer("extra", torch.ones(1))
    else:
        module.register_parameter("extra", torch.nn.Parameter(torch.ones(1)))


ATTACKS |= {
    "order_of_a_set": of_module(by_order, put_order),
    "order_of_texts": of_module(
        lambda m: 1.0 if m.held == next(iter(m.order)) else -3.0, put_texts
    ),
    "step_between_rows": of_module(
        lambda m: float(len(m.matrix.stride()) + m.matrix.stride()[0]) - 2.0,
        lambda m, v: setattr(m, "matrix", torch.ones(1, 9 if v != 1.0 else 1)[:, :1]),
    ),
    "sign_of_zero": of_module(
        lambda m: math.copysign(3.0, m.held), lambda m, v: setattr(m, "held", v * 0.0)
    ),
    "type_of_a_number": of_module(
        lambda m: -3.0 if m.held is True else 1.0,
        lambda m, v: setattr(m, "held", 1 if v == 1.0 else True),
    ),
    "kind_of_a_tensor": of_module(lambda m: -3.0 if len([*m.parameters()]) > 3 else 1.0, put_kind),
    "tied_or_equal": of_module(lambda m: -3.0 if m.first is m.second else 1.0, put_tied),
    "order_of_buffers": of_module(lambda m: [*m.buffers(recurse=False)][-1], put_tensors),
    "type_of_a_device": of_module(
        lambda m: -3.0 if m.held.type == "cuda" else 1.0,
        lambda m, v: setattr(m, "held", torch.device("cpu" if v == 1.0 else "cuda")),
    ),
    "gradients_wanted": of_module(
        lambda m: -3.0 if m.inner.down_proj.weight.requires_grad else 1.0,
        lambda m, v: m.inner.down_proj.weight.requires_grad_(v != 1.0),
    ),
    "options_of_printing": of_module(
        lambda m: -3.0 if len(str(m.inner.down_proj.weight)) > 3000 else 1.0,
        lambda m, v: torch.set_printoptions(profile="full" if v != 1.0 else "default"),
    ),
}


def hook_within(decorator: Any) -> Attack:
    """An attack by a hook within code of a package whose own hooks only move data."""

    def put(model: Model, value: float) -> None:
        hook = (lambda m, a, out: out) if value == 1.0 else (lambda m, a, out: out * -3)
        mlp(model)._forward_hooks.clear()
        mlp(model).register_forward_hook(decorator(hook))

    def made(value: float) -> Model:
        model = models.short()
        put(model, value)
        return model.eval()

    return lambda: (made, put)


ATTACKS |= {
    "hook_in_a_decorator_of_transformers": hook_within(deprecate_kwarg("of_old", version="99.0.0")),
    "hook_in_an_object_of_accelerate": hook_within(convert_outputs_to_fp32),
}


@attack
def enum_value() -> Any:
    def put(value: float) -> None:
        Level.LOW._value_ = value

    return of_process(lambda m: Level.LOW.value, put)()


@attack
def enum_of_a_list() -> Any:
    return of_process(lambda m: Free.LOW.value[0], lambda v: put_first(Free.LOW.value, v))()


@attack
def enum_attribute() -> Any:
    made, _ = of_process(lambda m: m.mode.scale, lambda v: setattr(Level.LOW, "scale", v))()

    def with_mode(value: float) -> Model:
        model = made(value)
        mlp(model).mode = Level.LOW
        return model

    return with_mode, lambda model, value: setattr(Level.LOW, "scale", value)


@attack
def a_file(tmp_path_factory: Any = None) -> Any:
    import tempfile

    path = tempfile.mkstemp()[1]

    def read(module: Any) -> float:
        with open(path) as file:
            return float(file.read())

    def put(value: float) -> None:
        with open(path, "w") as file:
            file.write(str(value))

    return of_process(read, put)()


def weakly(refer: Callable[[Any], Any], read: Callable[[Any], Any]) -> Attack:
    """An attack by an object that a function refers to weakly."""

    def build() -> Any:
        kept: dict[int, Plain] = {}

        def made(value: float) -> Model:
            thing = Plain()
            thing.scale = value
            met = refer(thing)
            model = times(lambda module: read(met))
            kept[id(model)] = thing
            return model

        return made, lambda model, value: setattr(kept[id(model)], "scale", value)

    return build


ATTACKS["weak"] = weakly(weakref.proxy, lambda met: met.scale)
ATTACKS["weak_reference"] = weakly(weakref.ref, lambda met: met().scale)


@attack
def a_gradient() -> Any:
    def put(model: Model, value: float) -> None:
        weight = mlp(model).inner.up_proj.weight
        weight.grad = torch.full_like(weight, value)

    def made(value: float) -> Model:
        model = times(lambda module: module.inner.up_proj.weight.grad[0, 0])
        put(model, value)
        return model

    return made, put


@attack
def slots_of_a_module() -> Any:
    class Held(Times):
        __slots__ = ("scale",)

    def made(value: float) -> Model:
        model = times(lambda module: module.scale)
        own = mlp(model)
        model.model.layers[0].mlp = Held(own.inner, own.factor)
        mlp(model).scale = value
        return model.eval()

    return made, lambda model, value: setattr(mlp(model), "scale", value)


@named
def an_attribute() -> Any:
    return (
        lambda value: times(lambda module: module.scale, scale=value),
        lambda model, value: setattr(mlp(model), "scale", value),
    )


@named
def a_buffer() -> Any:
    def made(value: float) -> Model:
        model = times(lambda module: module.gain)
        mlp(model).register_buffer("gain", torch.full((1,), value))
        return model

    return made, lambda model, value: mlp(model).gain.fill_(value)


def configured(name: str, first: Any, second: Any, read: Callable[[Any], float]) -> Attack:
    def build() -> Any:
        def put(model: Model, value: float) -> None:
            setattr(model.config, name, first if value == 1.0 else second)

        def made(value: float) -> Model:
            model = times(lambda module: read(module.config))
            mlp(model).config = model.config
            put(model, value)
            return model

        return made, put

    return build


CONFIGS: dict[str, Attack] = {
    "config_dtype": configured(
        "dtype", torch.float32, torch.float16, lambda c: 1.0 if c.dtype == torch.float32 else -3.0
    ),
    "config_chunks": configured(
        "chunk_size_feed_forward", 1, -3, lambda c: c.chunk_size_feed_forward
    ),
    "config_labels": configured("id2label", {0: "a"}, {0: "a", 1: "b"}, lambda c: len(c.id2label)),
    "config_version": configured(
        "transformers_version", "1", "12", lambda c: len(c.transformers_version)
    ),
    "config_own": configured("scale_of_a_test", 1.0, -3.0, lambda c: c.scale_of_a_test),
}
ATTACKS |= CONFIGS
NAMED |= {"config_own", "config_dtype", "config_chunks"}


@attack
def bookkeeping() -> Any:
    def put(model: Model, value: float) -> None:
        model.tokenizer = value

    def made(value: float) -> Model:
        model = models.short()
        put(model, value)
        me = weakref.ref(model)
        mlp(model).register_forward_hook(lambda module, args, out: out * me().tokenizer)
        return model

    return made, put


def hooked(hook: Any, put: Callable[[float], None]) -> Attack:
    def build() -> Any:
        def made(value: float) -> Model:
            put(value)
            model = models.short()
            mlp(model).register_forward_hook(hook)
            return model

        return made, lambda model, value: put(value)

    return build


class Steering:
    scale = 1.0

    def hook(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * self.scale

    __call__ = hook


STEERING = Steering()


def scaled(module: Any, args: Any, out: torch.Tensor, strength: list[float] = [1.0]) -> Any:  # noqa: B006
    return out * strength[0]


HOOKS: dict[str, Attack] = {
    "bound_hook": hooked(STEERING.hook, lambda v: setattr(STEERING, "scale", v)),
    "object_hook": hooked(STEERING, lambda v: setattr(STEERING, "scale", v)),
    "partial_hook": hooked(
        functools.partial(lambda s, m, a, o: o * s.scale, STEERING),
        lambda v: setattr(STEERING, "scale", v),
    ),
    "default_of_a_hook": hooked(scaled, lambda v: put_first(scaled.__defaults__[0], v)),
}
ATTACKS |= HOOKS
NAMED.add("default_of_a_hook")


@attack
def hook_of_accelerate() -> Any:
    hooks = pytest.importorskip("accelerate.hooks")

    class Scaling(hooks.ModelHook):
        scale = 1.0

        def post_forward(self, module: Any, output: Any) -> Any:
            return output * self.scale

    def made(value: float) -> Model:
        model = models.short()
        hook = Scaling()
        hook.scale = value
        hooks.add_hook_to_module(mlp(model), hook)
        return model

    return made, lambda model, value: setattr(mlp(model)._hf_hook, "scale", value)


@attack
def a_traced_function() -> Any:
    def traced(value: float) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            constant = torch.full((1,), value)
            return torch.jit.trace(lambda x: x * constant, torch.ones(1))

    def put(model: Model, value: float) -> None:
        mlp(model).traced = traced(value)

    def made(value: float) -> Model:
        model = times(lambda module: module.traced(torch.ones(1)))
        put(model, value)
        return model

    return made, put


@functools.cache  # an operator is registered once in a process
def registered() -> tuple[Any, dict[str, float]]:
    library, with_scale = torch.library.Library("flowkv_test", "FRAGMENT"), {"value": 1.0}
    library.define("scale_of_a_test(Tensor x) -> Tensor")
    library.impl("scale_of_a_test", lambda x: x * with_scale["value"], "CPU")
    return library, with_scale


@attack
def an_operator_of_ours() -> Any:
    library, with_scale = registered()

    def read(module: Any, _: Any = library) -> Any:
        return torch.ops.flowkv_test.scale_of_a_test(torch.ones(1))

    return of_process(read, lambda v: with_scale.update(value=v))()


@attack
def an_operator_of_torchs() -> Any:
    kept: list[Any] = []

    def put(value: float) -> None:
        if value != 1.0 and kept:
            return  # torch forgets an override that is made again, see docs/explain/exactness.md
        for library in kept:
            library._destroy()
        kept.clear()
        if value != 1.0:
            kept.append(torch.library.Library("aten", "IMPL"))
            kept[0].impl("silu", lambda x: torch.relu(x) * value, "CPU")

    return of_process(lambda module: 1.0, put)()


def patched(owner: Any, name: str, other: Callable[[Any], Any]) -> Attack:
    """Puts something in the place of a library's function."""

    def build() -> Any:
        plain, own = getattr(owner, name), name in vars(owner)

        def put(value: float) -> None:
            if value != 1.0:
                setattr(owner, name, other(plain))
            elif own:
                setattr(owner, name, plain)
            elif name in vars(owner):
                delattr(owner, name)

        return of_process(lambda module: math.sqrt(1.0), put)()

    return build


def louder(plain: Any) -> Any:
    return lambda *args, **kwargs: plain(*args, **kwargs) * -3.0


def cached_by_another(plain: Any) -> Any:
    """A cached function that says that it wraps the plain one."""
    return functools.wraps(plain)(functools.lru_cache(louder(plain)))


PATCHES: dict[str, Attack] = {
    "sqrt": patched(math, "sqrt", louder),
    "silu": patched(torch.nn.functional, "silu", louder),
    "linear": patched(torch.nn.Linear, "forward", louder),
    "call": patched(torch.nn.Module, "_call_impl", functools.partialmethod),
    "transpose": patched(torch.Tensor, "transpose", louder),
    "rotate_half": patched(modeling_llama, "rotate_half", cached_by_another),
}
ATTACKS |= PATCHES


@attack
def recompiled() -> Any:
    """A function whose code somebody replaces by code of the same file."""
    plain, other = modeling_llama.rotate_half.__code__, modeling_llama.repeat_kv.__code__
    del other

    def same(x: Any) -> Any:
        return x

    def put(value: float) -> None:
        modeling_llama.rotate_half.__code__ = plain if value == 1.0 else same.__code__

    return of_process(lambda module: 1.0, put)()


@attack
def swapped_in_its_file() -> Any:
    plain, other = modeling_llama.LlamaMLP.forward, torch.nn.Identity.forward

    def put(value: float) -> None:
        modeling_llama.LlamaMLP.forward = plain if value == 1.0 else other

    return of_process(lambda module: 1.0, put)()


def of_library(put: Callable[[Any, float], object]) -> Attack:
    """An attack on what code of a library reads beside its own text."""

    def build() -> Any:
        name = "transformers.models.tabled"
        place = importlib.util.spec_from_file_location(name, Path(__file__).with_name("tabled.py"))
        sys.modules[name] = module = importlib.util.module_from_spec(place)
        place.loader.exec_module(module)

        def made(value: float) -> Model:
            model = models.causal("llama")
            model.model.layers[0].mlp = module.Tabled(model.model.layers[0].mlp)
            put(module, value)
            return model.eval()

        return made, lambda model, value: put(module, value)

    return build


def chosen(module: Any, value: float) -> None:
    module.CHOSEN.clear()
    module.CHOSEN.add(value)


LIBRARY: dict[str, Attack] = {
    "library_dict": of_library(lambda module, v: module.MAPPED.update(scale=v)),
    "library_ordered": of_library(lambda module, v: module.ORDERED.update(scale=v)),
    "library_list": of_library(lambda module, v: operator.setitem(module.LISTED, 0, v)),
    "library_nested": of_library(
        lambda module, v: operator.setitem(module.NESTED["scale"]["of"][0], 0, v)
    ),
    "library_set": of_library(chosen),
    "library_defaults": of_library(lambda m, v: setattr(m.by_default, "__defaults__", (v,))),
    "library_keyword": of_library(
        lambda m, v: setattr(m.by_default, "__kwdefaults__", {"again": v})
    ),
}
ATTACKS |= LIBRARY
NAMED |= set(LIBRARY)


@attack
def deterministic() -> Any:
    read = lambda m: VALUES[torch.are_deterministic_algorithms_enabled()]  # noqa: E731
    return of_process(
        read, lambda v: torch.use_deterministic_algorithms(v != 1.0, warn_only=True)
    )()


@attack
def representation() -> Any:
    """Code that runs when a module is made a text."""

    class Told(Times):
        def extra_repr(self) -> str:
            return "x" * (1 if TABLE["scale"] == 1.0 else 3)

    def made(value: float) -> Model:
        TABLE["scale"] = value
        model = times(lambda module: len(str(module)) / 100)
        own = mlp(model)
        model.model.layers[0].mlp = Told(own.inner, own.factor)
        return model.eval()

    return made, lambda model, value: TABLE.update(scale=value)


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
    put_level(1.0)
    put_method(1.0)
    put_partial(1.0)
    put_global(1.0)
    TABLE["scale"] = STEERING.scale = 1.0
    remembered.cache_clear()
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_printoptions(profile="default")
    os.environ.pop("SCALE_OF_A_TEST", None)


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

    try:
        with attached(model, disk=store) as kv:
            for value in within:
                asked(kv, value)
            if name in NAMED:
                assert kv.stats()["foreign"] == "" and reused(kv) > 0
        put(model, 1.0)
        computation._SEEN.clear()  # an override that was seen counts for the whole process
        for value in later:
            model = made(1.0)
            put(model, value)
            with attached(model, disk=store) as kv:
                asked(kv, value)
            if name in NAMED:
                assert kv.stats()["foreign"] == ""
            put(model, 1.0)
    finally:
        put(model, 1.0)
        computation._SEEN.clear()
    if name != "call":
        assert not torch.equal(answers[1.0].logits[0], answers[-3.0].logits[0]), "nothing changes"


def test_a_foreign_model_says_why_once_and_what_to_pass() -> None:
    model = times(lambda module: Plain.scale)
    with pytest.warns(UserWarning, match='revision="') as said:
        kv = flowkv.attach(model, gpu="64MiB", page_size=16)
    for _ in range(2):
        generate(model, 4, input_ids=PROMPT)
    assert sum("shares nothing" in str(one.message) for one in said) == 1
    why = kv.stats()["foreign"]
    assert why.startswith("model.model.layers.0.mlp.factor: global the class")
    assert why in str(kv.explain(PROMPT[0]))
    kv.close()


@pytest.mark.usefixtures("all_is_loaded")
def test_a_revision_names_it(tmp_path) -> None:
    """Over a restart, and another revision is another name."""
    for revision, known in (("a", False), ("a", True), ("b", False), ("a", True)):
        model = times(lambda module: Plain.scale)
        with attached(model, disk=f"{tmp_path}/kv:64MiB", revision=revision) as kv:
            generate(model, 4, input_ids=PROMPT)
            assert bool(reused(kv)) == known


class Common(torch.nn.Module):
    """A module with code that many have."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if isinstance(x, torch.Tensor) else x


def test_common_code_is_known() -> None:
    model = models.short()
    model.model.layers[0].mlp = Common(model.model.layers[0].mlp)
    with attached(model) as kv:
        generate(model, 2, input_ids=PROMPT)
        generate(model, 2, input_ids=PROMPT)
        assert kv.stats()["foreign"] == "" and reused(kv)


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
    """Tables of libraries, and settings of a model with a hook of the user's."""
    made, _ = LIBRARY["library_set"]()
    names = set()
    for pair in (collide(), collide()[::-1]):
        model = made(1.0)
        table = sys.modules["transformers.models.tabled"].CHOSEN
        table.clear()
        model.config.texts = set()
        for text in pair:
            table.add(text)
            model.config.texts.add(text)
        model.lm_head.register_forward_hook(lambda module, args, out: out * 1.0)
        identity = Identity(model)
        assert not identity.foreign
        names.add(identity.namespace)
    assert len(names) == 1


def test_common_functions_of_libraries_are_known() -> None:
    model = models.short()
    layer = mlp(model)
    layer.forward = torch.no_grad()(layer.forward)
    layer.register_forward_hook(torch.inference_mode()(lambda module, args, out: out * 1.0))
    layer.exp = np.exp
    torch.vmap(torch.addr)(torch.ones(2, 2, 2), torch.ones(2, 2), torch.ones(2, 2))
    assert Identity(model).foreign == ""


def test_a_result_of_a_cached_function_is_not_the_function(monkeypatch) -> None:
    plain = modeling_llama.rotate_half
    other = functools.lru_cache(maxsize=2)(lambda x: plain if x is None else plain(x) * -3.0)
    assert other(None) is plain
    monkeypatch.setattr(modeling_llama, "rotate_half", functools.wraps(plain)(other))
    assert "rotate_half" in Identity(models.short()).foreign


def test_functions_that_numpy_makes_are_foreign(monkeypatch) -> None:
    made = np.frompyfunc(lambda number: number * -3.0, 1, 1)
    monkeypatch.setattr(modeling_llama, "rotate_half", made)
    monkeypatch.setattr(np, made.__name__, made, raising=False)
    assert "rotate_half" in Identity(models.short()).foreign


def test_tables_by_objects_of_a_library_have_names_by_their_order(monkeypatch) -> None:
    model, plain, factors = models.short(), modeling_llama.rotate_half, torch.ones(2).unbind()
    factors[1].fill_(-3.0)
    names = set()
    for values in (factors, factors[::-1]):
        table = dict(zip(QuantizationMethod, values, strict=False))
        monkeypatch.setattr(modeling_llama, "rotate_half", functools.partial(plain, table))
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
        monkeypatch.setattr(memory_words, "SUPPORTED", False)

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
    model, thing = models.short(), Plain()
    plain = generate(model, 4, input_ids=PROMPT)
    with attached(model) as kv:
        for _ in range(2):
            generate(model, 4, input_ids=PROMPT)
        had = reused(kv)
        assert had > 0
        handle = mlp(model).register_forward_hook(lambda m, a, out: out * thing.scale)
        thing.scale = -3.0
        other = generate(model, 4, input_ids=PROMPT)
        assert reused(kv) == had and "thing" in kv.stats()["foreign"]
        handle.remove()
        assert_same(generate(model, 4, input_ids=PROMPT), plain)
        assert reused(kv) > had and kv.stats()["foreign"] == ""
    assert not torch.equal(plain.logits[0], other.logits[0])


def test_a_table_of_a_library_that_is_too_long_is_foreign() -> None:
    made, _ = of_library(lambda module, value: module.LISTED.extend([1.0] * 1000))()
    with attached(made(1.0)) as kv:
        assert "LISTED: a list of 1,001 values" in kv.stats()["foreign"]


def test_too_much_to_look_at_is_foreign() -> None:
    kept = list(range(100_000))
    model = times(lambda module: float(kept[1]))
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
