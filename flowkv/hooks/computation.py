"""A model's computation beside its weights: code, settings, hooks, and all that they refer to.

A `Walk` goes from the modules through whatever decides what they compute: their classes and the
code of what these run, numbers, strings, lists and tensors in attributes, instance methods, hooks
with their closures, module globals that the code names, the registered attention function, flags of
precision. It writes down *leaves*, a path and a text each, of which a name is made that is the same
in every process; the tensors it meets; and what must still be there for the name to hold.

What cannot be looked into (an object of C without a way to reduce it) gets the next number of a
counter: nobody ever has that name again, and it stays out of lasting tiers.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextvars
import copyreg
import dis
import enum
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import logging
import multiprocessing.synchronize
import operator
import os
import random
import sys
import sysconfig
import threading
import time
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch.nn.modules import module as torch_module

from flowkv.hooks.fingerprint import Weights, readable

MISSING: Any = object()
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
"""Types of values that are compared, not told by identity."""
LONG = 64
"""Longer lists and dicts of plain values are one leaf."""
_PROCESS = uuid.uuid4().hex
_COUNTER = itertools.count(1)
_ROOT = "model"
_MOST_LEAVES = 200_000
_DEEPEST = 100

_OWN = ("transformers", "accelerate", "flowkv")
"""Their hooks and instance methods move data and record outputs; their releases are in the name."""
_TOOLS = frozenset({"packaging", "huggingface_hub", "safetensors", "tokenizers", "tqdm", "regex"})
_LIBRARIES = _TOOLS | {"torch", "transformers", "numpy", "flowkv", "accelerate", "peft"}
_DEEP = (
    "torch.nn.modules.",
    "transformers.activations",
    "transformers.integrations.",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.modeling_rope_utils",
    "transformers.models.",
)
"""Library modules whose functions' globals are followed: others patch them there."""
_STANDARD = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_TENSORS = ("_parameters", "_buffers")
_WATCHED = (*_HOOKS, *_TENSORS, "_modules")
_INERT = (
    logging.Logger,
    weakref.ref,
    weakref.ProxyType,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
    threading.Event,
    threading.Condition,
    torch.cuda.Stream,
    torch.cuda.Event,
    types.ModuleType,
)
"""Objects that decide nothing about numbers."""
_WORKERS = (concurrent.futures.Executor, threading.Thread, multiprocessing.synchronize.SemLock)
"""They run what others give them; what that is shows where it is given."""
_BOUND = {"func": "func", "args": "args", "keywords": "keywords"}
_MADE_OF: dict[type, dict[str, str]] = {
    property: {"fget": "fget", "fset": "fset"},
    staticmethod: {"function": "__func__"},
    classmethod: {"function": "__func__"},
    types.MethodType: {"function": "__func__", "self": "__self__"},
    functools.partial: _BOUND,
    functools.partialmethod: _BOUND,
}
"""Objects of Python's that are their parts: labels of these, and the attributes that hold them."""
_TEXTS = (
    *(inspect.Signature, types.GenericAlias, types.UnionType, range),
    *(torch.dtype, torch.Size, torch.layout, torch.memory_format),
)
"""Values that are what they say."""
_ELSEWHERE = (weakref.ref, threading.local, threading.Event, contextvars.ContextVar)
_PLAIN_BASES = (int, float, complex, str, bytes)
_COMPILERS = frozenset({"numba", "triton", "torch"})
_RANDOM = frozenset({"random", "numpy.random", "secrets"})
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
_CLOCKS = (
    *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"),
    *("process_time", "process_time_ns"),
)


_NO_TRANSFORMERS = types.SimpleNamespace(
    BOOKKEEPING=frozenset(),
    CACHES=(),
    PreTrainedConfig=(),
    PreTrainedModel=(),
    chosen_functions=lambda model: [],
    library_release=str,
)


def transformers() -> Any:
    """What is known of transformers' releases; while it is not loaded, nothing that is met is its.

    Only its own door imports it, and that stands on this module.
    """
    if "transformers" not in sys.modules:
        return _NO_TRANSFORMERS
    return importlib.import_module("flowkv.hooks.huggingface.versions")


class Written(dict[str, tuple[tuple[str, str], ...]]):
    """Paths that forwards write, and the leaves that stand for them in the name.

    Attributes:
        grown: Mappings to which forwards add keys, by path: the keys that were there before.
    """

    def __init__(self, other: Mapping[str, tuple[tuple[str, str], ...]] | None = None) -> None:
        super().__init__(other or {})
        self.grown: dict[str, frozenset[str]] = dict(getattr(other, "grown", {}))


class Walk:
    """One look at what a model computes.

    What was met is watched: a reading of something, and what it gave. `same` reads again.

    Attributes:
        leaves: Path and text of everything in the name.
        tensors: Parameters, buffers and other tensors, by path.
        held: Containers and objects, by path.
        spots: What asks for what is at a path that forwards write, by path.
        mappings: Keys of mappings, by path.
        configs: Configurations and what was in them, by path.
        rings: Paths of queues, whose items move when one is added.
        unnamed: Paths of what cannot be named: it has a number that nobody has again.
        foreign: What is neither torch's nor transformers' and takes part.
        random: Code is seen that draws random numbers behind torch's back.
        compiled: Parts are compiled by `torch.compile`.
        training: Submodules are in training mode.
        pretrained: Submodules are of transformers, whose release is a part of what they compute.

    Args:
        model: The model.
        written: Paths that the model's own forward writes, and the leaves that stand for them.
        passing: Suffix of buffers that every forward rewrites; "" for none.
        numbers: Numbers of unnamed objects, by id; kept by the caller from walk to walk.
        part: A path and what is there, to look at nothing else.
    """

    def __init__(
        self,
        model: Any,
        written: Mapping[str, tuple[tuple[str, str], ...]],
        passing: str,
        numbers: dict[Any, tuple[Any, Any]],
        *,
        part: tuple[str, Any] | None = None,
    ) -> None:
        self.leaves: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.held: dict[str, Any] = {}
        self.spots: dict[str, Callable[[], Any]] = {}
        self.mappings: dict[str, frozenset[str]] = {}
        self.configs: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.rings: set[str] = set()
        self.unnamed: list[str] = []
        self.foreign: list[str] = []
        self.random = self.compiled = self.training = self.pretrained = False
        self._written, self._passing, self._numbers = Written(written), passing, numbers
        self._unused: set[str] = set()
        self._foreign_names: frozenset[str] = frozenset()
        self._library = False  # what is looked at is a library's own
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []
        self._labels: dict[str, int] = {}
        self._members_seen: set[tuple[int, int]] = set()
        self._asked: set[tuple[int, str]] = set()
        self._named: set[str] = set()
        self._places: dict[int, str] | None = None
        self._spaces: dict[str, Any] = {}
        self._modules: list[Callable[[], bool]] = []
        # By reading, and how deep its answers are compared: of what, and what it gave.
        self._watched: dict[tuple[Any, int], tuple[list[tuple[Any, ...]], list[Any]]] = {}
        self._tree: torch.nn.Module | None = model
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 10_000))
        try:
            if part is None:
                self._module(_ROOT, model)
                self._environment(model)
                self.random |= any(name in self._foreign_names for name in self._unused)
            else:
                self._value(*part)
        finally:
            self._tree = None
            sys.setrecursionlimit(limit)

    @property
    def digest(self) -> str:
        """Hex digest of all leaves."""
        # 1 named pages that were computed wrongly in place of lost ones (SECURITY.md, advisories).
        state = hashlib.sha256(b"flowkv.computation/2")
        for path, text in sorted(self.leaves.items()):
            line = f"{path}\0{text}".encode("utf-8", "surrogatepass")
            state.update(len(line).to_bytes(4, "little") + line)
        return state.hexdigest()

    @property
    def libraries(self) -> dict[str, str]:
        """The leaves of torch's and transformers' own code, and of what was put in its place."""
        own = ("<torch.", "<transformers.")
        return {path: text for path, text in self.leaves.items() if path.startswith(own)}

    @functools.cached_property
    def kind(self) -> str:
        """Digest of all leaves but numbers with fractions and events: how much and when, not what.

        Whoever waits for an event is told by a trial as well, and would not wait for the call.
        """
        state = hashlib.sha256()
        for path, text in sorted(self.leaves.items()):
            if path.endswith("/set"):
                continue
            amount = text.startswith("float ") and text not in ("float 0.0", "float -0.0")
            state.update(f"{path}\0{'float' if amount else text}\0".encode("utf-8", "replace"))
        return state.hexdigest()

    def frequencies(self) -> Iterator[tuple[str, Any, Any]]:
        """(path, what is there, what it is made from) of encodings that depend on length."""
        for path, get in self.spots.items():
            ending = self._passing
            original = self.tensors.get(f"{path.removesuffix(ending)}original_{ending}")
            if ending and path.endswith(ending) and "long_" not in path and original is not None:
                yield path, get(), original

    def same(self) -> bool:
        """Whether everything that was met is still there; what tensors hold is not read."""
        try:
            return all(check() for check in self._modules) and all(
                _alike([*itertools.starmap(read, subjects)], known, depth + 1)
                for (read, depth), (subjects, known) in self._watched.items()
            )
        except Exception:  # whatever an object raises that is asked: another look tells
            return False

    def forget(self) -> None:
        """Lets go of a model that is gone."""
        mappings = self.spots, self.configs, self.tensors, self.held, self._watched
        for held in (*mappings, self._modules, self._kept):
            held.clear()

    # ---- what is watched

    def _watch(self, read: Callable[..., Any], *subject: Any, depth: int = 0) -> None:
        """Reads something, now and whenever it is asked whether all is as it was.

        Args:
            read: Gives the very thing, or an equal number or text, as long as nothing changed.
            *subject: What it reads.
            depth: How deep the lists, tuples and dicts that it gives are made anew each time.
        """
        subjects, known = self._watched.setdefault((read, depth), ([], []))
        known.append(read(*subject))
        subjects.append(subject)

    def _spot(self, path: str, read: Callable[..., Any], *subject: Any) -> bool:
        """Whether a place is one that forwards write; then it is remembered how to look there."""
        if path not in self._written:
            return False
        self.leaves |= self._written[path]
        self.spots.setdefault(path, functools.partial(read, *subject))
        return True

    def _part(self, path: str, read: Callable[..., Any], *subject: Any) -> None:
        """What is read of something: named, and watched unless forwards write it."""
        found = read(*subject)
        if found is not MISSING:
            self._value(path, found)
        if not self._spot(path, read, *subject):
            self._watch(read, *subject)

    def _space(self, path: str, read: Callable[..., Any], *subject: Any) -> None:
        """Named things in a mapping that is read; others may come and go."""
        held = read(*subject)
        for name, item in list(held.items()):
            self._value(f"{path}.{name}", item)
            self._spot(f"{path}.{name}", lambda name=name: read(*subject).get(name, MISSING))
        self._contents(self._free(path, held), None, read, *subject)

    def _contents(
        self,
        free: set[Any],
        grown: frozenset[str] | None,
        read: Callable[..., Any],
        *subject: Any,
    ) -> None:
        """Watches that a container holds the very things that it holds now.

        Args:
            free: Keys or places that forwards write.
            grown: The only keys that matter, if forwards add others.
            read: Gives the container.
            *subject: What it reads.
        """

        def now() -> dict[Any, Any]:
            held = items_of(read(*subject))
            if grown is not None:
                return {k: v for k, v in held.items() if _key(k) in grown and k not in free}
            return {k: v for k, v in held.items() if k not in free} if free else held

        held = read(*subject)
        # A mapping of its own kind may make what it gives anew each time.
        own = isinstance(held, Mapping) and type(held).get is not dict.get
        self._watch(now, depth=_DEEPEST if own else 1)

    def _free(self, path: str, names: Iterable[str]) -> set[str]:
        """Attributes of what is at a path that forwards write."""
        return {name for name in names if f"{path}.{name}" in self._written}

    # ---- leaves

    def _numbered(self, key: Any, what: Any, make: Callable[[], Any]) -> Any:
        """What was made of something in an earlier walk, or is made now."""
        known = self._numbers.get(key)
        if known is None or known[0] is not what:
            known = self._numbers[key] = (what, make())
        return known[1]

    def _leaf(self, path: str, text: str) -> None:
        if path in self._written:
            self.leaves |= self._written[path]
        elif len(self.leaves) >= _MOST_LEAVES:
            self._unname("model", "too much to look at", self)
        else:
            self.leaves[path] = text

    def _unname(self, path: str, why: str, what: Any) -> None:
        """Gives something a number that nobody has again; what a library keeps is its release's."""
        if self._library:
            self.leaves[path] = _name(type(what))
            return
        number = self._numbered(id(what), what, lambda: next(_COUNTER))
        self.unnamed.append(f"{path}: {why}")
        self.leaves[path] = f"unnamed {_PROCESS} {number}"

    def _visited(self, path: str, what: Any, label: str) -> bool:
        """Whether something was met before, and then is named by where; else it is from now on."""
        first = self._seen.get(id(what))
        if first is not None:
            self._leaf(path, f"=> {first}")
            return True
        count = self._labels[label] = self._labels.get(label, 0) + 1
        self._seen[id(what)] = label if count == 1 else f"{label}#{count}"
        if path != _ROOT:  # nobody keeps the model alive by looking at it
            self._kept.append(what)
        return False

    # ---- modules

    def _module(self, path: str, module: torch.nn.Module) -> None:
        if self._visited(path, module, path):
            return
        held = module.__dict__
        if not all(isinstance(held.get(kind), dict) for kind in _WATCHED):
            self._compiled_module(path, module)
            return
        children = module._modules
        cls: Any = type(module)
        self._leaf(path, f"module {self._class(cls)}")
        if path == _ROOT:  # not kept alive
            self._watch(_type_of, weakref.ref(module))
        else:
            self._watch(type, module)
        self._leaf(f"{path}/training", str(module.training))
        self.training |= module.training
        compiled = held.get("_compiled_call_impl") is not None or "_orig_mod" in children
        self.compiled |= compiled or hasattr(held.get("forward"), "_torchdynamo_orig_callable")
        for name in _stores(cls):
            if not settles(held.get(name)):
                self._written.setdefault(f"{path}.{name}", ())
        for name in (*held, *held["_buffers"]):  # what encodings that depend on length rewrite
            passes = self._passing and name.endswith((self._passing, "max_seq_len_cached"))
            if passes and not name.endswith(f"original_{self._passing}"):
                self._written.setdefault(f"{path}.{name}", ())
        tensors = [item for kind in _TENSORS for item in held[kind].items()]
        free = self._free(path, [*held, *held["_buffers"], *held["_parameters"]])
        free |= {name for name, t in tensors if _offloaded(module, name, t) is not None}
        books = _keeps_books(cls)
        self.pretrained |= books
        skipped = (transformers().BOOKKEEPING if books else _MARKS) | _STANDARD | free
        own = {name: value for name, value in held.items() if name not in skipped}
        for name in free:
            self._spot(f"{path}.{name}", _attribute_of, held, name)
        for name, value in own.items():
            self._attribute(f"{path}.{name}", module, name, value)
            if type(value) not in PLAIN:
                self.held[f"{path}.{name}"] = value
        for name, tensor in tensors:
            self._stored(f"{path}.{name}", module, name, tensor)
        self._hooks(path, held)
        self._modules.append(_module_stays(held, own, free))
        for name, child in children.items():
            if child is None:
                self._leaf(f"{path}.{name}", "no module")
            else:
                self._child(f"{path}.{name}", child)
        self._leaf(f"{path}/children", " ".join(children))

    def _child(self, path: str, module: torch.nn.Module) -> None:
        try:
            self._module(path, module)
        except Exception as error:
            self._unname(
                path, f"a {type(module).__name__} that raises {type(error).__name__}", module
            )

    def _compiled_module(self, path: str, module: torch.nn.Module) -> None:
        """A module that TorchScript compiled or traced: its code and what that reads."""
        if not isinstance(module, torch.jit.ScriptModule):
            self._unname(path, f"a {type(module).__name__} without what modules have", module)
            return
        script: Any = getattr(module, "_actual_script_module", module)
        methods = [(name, script._c._get_method(name)) for name in script._c._method_names()]
        self._leaf(path, f"script {_name(type(module))}")
        training = bool(getattr(module, "training", False))  # frozen ones have none
        self._leaf(f"{path}/training", str(training))
        self.training |= training
        self.foreign.append(path)
        for name, method in methods:
            code, constants = method.code_with_constants
            self._leaf(f"{path}/{name}/code", code)
            constants = getattr(constants, "const_mapping", constants)
            for key, constant in sorted(constants.items()):
                self._value(f"{path}/{name}/{key}", constant)
        read = {n.s("name") for _, m in methods for n in m.graph.findAllNodes("prim::GetAttr")}
        names = sorted(name for name in read if script._c.hasattr(name))

        def state() -> list[Any]:
            own = [(name, script._c.getattr(name)) for name in names]
            own = [(n, v) for n, v in own if not isinstance(v, torch._C.ScriptModule)]
            tensors = [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
            inner = list(module.named_children())
            return [*own, *tensors, *inner, ("training", getattr(module, "training", False))]

        for name, value in state():
            if isinstance(value, torch.nn.Module):
                self._child(f"{path}.{name}", value)
            else:
                self._value(f"{path}.{name}", value)
        self._hooks(path, module.__dict__)
        for kind in _HOOKS:
            self._contents(set(), None, module.__dict__.get, kind)
        self._watch(state, depth=_DEEPEST)

    def _attribute(self, path: str, module: torch.nn.Module, name: str, value: Any) -> None:
        placed = _root(value) in ("accelerate", "flowkv")  # around the model's own
        original = _around(module, value) if name == "forward" and placed else None
        if original is not None:
            if getattr(original, "__func__", None) is not type(module).forward:
                self._value(path, original)
        elif isinstance(value, _GENERATORS) and _root(type(module)) in _LIBRARIES:
            self._leaf(path, "generator")  # of use only to who names it
            self.random |= name in _names(type(module).forward.__code__)
            self._unused.add(name)
        elif not (name == "_hf_hook" or (name == "_old_forward" and "_hf_hook" in vars(module))):
            if name == "forward":
                self.foreign.append(path)
            self._value(path, value)

    def _stored(self, path: str, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """A parameter or buffer, wherever accelerate keeps it."""
        where = _offloaded(module, name, tensor)
        if where is None:
            self._value(path, tensor)
        elif (held := where[name]) is where[name]:
            self._value(path, held)
        else:  # read from files anew each time: once is enough
            read = self._numbered((id(where), name), where, lambda: Weights().read({"": held}))
            self._leaf(path, f"offloaded {read}")

    def _hooks(self, path: str, held: dict[str, Any]) -> None:
        for kind in _HOOKS:
            foreign = [(k, h) for k, h in held[kind].items() if _root(h) not in _OWN]
            for i, (key, hook) in enumerate(foreign):
                self.foreign.append(f"{path}/{kind}/{i}")
                flags = [flag for flag in _HOOK_FLAGS if key in held[flag]]
                self._leaf(f"{path}/{kind}/{i}/flags", " ".join(flags))
                self._value(f"{path}/{kind}/{i}", hook)

    # ---- values

    def _value(self, path: str, value: Any) -> None:
        if path in self._written:
            self.leaves |= self._written[path]
            return
        try:
            self._look(path, value)
        except Exception as error:  # nothing that is met may keep a model from being served
            self._unname(
                path, f"a {type(value).__name__} that raises {type(error).__name__}", value
            )

    def _look(self, path: str, value: Any) -> None:  # noqa: PLR0912 (one branch for each kind)
        kind: Any = type(value)
        if kind not in PLAIN and "/reduced" not in path:  # which is made anew each time
            self.held.setdefault(path, value)
        if kind in PLAIN:
            self._leaf(path, f"{kind.__name__} {value!r}")
        elif isinstance(value, enum.Enum):
            self._leaf(path, f"{_name(kind)} {value.name}")
        elif isinstance(value, _PLAIN_BASES) and not isinstance(value, np.generic):
            base: Any = next(base for base in _PLAIN_BASES if isinstance(value, base))
            self._leaf(path, f"{self._class(kind)} {base.__repr__(value)}")
            if not self._visited(f"{path}/held", value, path):
                self._held(path, value)
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._array(path, value)
        elif isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif isinstance(value, torch.device):
            self._leaf(path, "device")  # the same model has the same name wherever it lies
        elif isinstance(value, _TEXTS):
            self._leaf(path, str(value))
        elif isinstance(value, transformers().PreTrainedConfig):
            self._config(path, value)
        elif not self._library and isinstance(value, _ELSEWHERE):
            self._elsewhere(path, value)
        elif isinstance(value, (*_INERT, *_WORKERS)):
            self._leaf(path, _name(kind))
        elif _ours(value):  # what a cache knows says nothing; what somebody put beside it may
            self._leaf(path, _name(kind))
            if hasattr(value, "__dict__") and not self._visited(f"{path}/held", value, path):
                self._space(path, _without, vars(value), _assigned(kind))
        elif isinstance(value, _GENERATORS):
            self.random = True
            self._leaf(path, "generator")
        elif isinstance(value, type):
            self._leaf(path, f"class {self._class(value)}")
        elif parts := next((p for k, p in _MADE_OF.items() if isinstance(value, k)), None):
            if not isinstance(value, (types.MethodType, functools.partial)):
                self._leaf(path, _name(kind))
            for label, name in parts.items():
                self._value(f"{path}/{label}", getattr(value, name))
        elif callable(value) and self._callable(path, value):
            pass
        elif isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            self._container(path, value)
        else:
            self._object(path, value)

    def _elsewhere(self, path: str, value: Any) -> None:
        """What is kept for a thread, a context, or by somebody else."""
        if isinstance(value, weakref.ref):
            self._leaf(path, "weak reference")
            kept, found = len(self._kept), value()
            self._value(f"{path}/referent", found)
            self.held.pop(f"{path}/referent", None)
            del self._kept[kept:]  # nobody keeps it alive by looking at it
            self._watch(lambda: id(value()))
        elif isinstance(value, threading.local):
            self._leaf(path, _name(type(value)))
            self._space(path, vars, value)  # of the thread that asks
        elif isinstance(value, threading.Event):
            self._part(f"{path}/set", value.is_set)
        else:
            self._part(f"{path}/content", value.get, MISSING)

    def _variables(self, code: types.CodeType) -> None:
        """Variables of the environment that code names; all of them if it names none."""
        texts = {
            text
            for part in _codes(code)
            for text in part.co_consts
            if isinstance(text, str) and text.replace("_", "").isalnum()
        }
        for text in sorted(texts):
            found = os.environ.get(text, MISSING)
            self._leaf(f"<environ>:{text}", "none" if found is MISSING else found)
            self._watch(_get, os.environ, text)
        if not texts & os.environ.keys():
            self._leaf("<environ>", _short(repr(sorted(os.environ.items()))))
            self._watch(dict, os.environ, depth=1)

    def _held(self, path: str, value: Any) -> None:
        """Class, attributes and slots of an object."""
        self._watch(type, value)
        if hasattr(value, "__dict__"):
            self._space(path, vars, value)
        for name in [s for c in type(value).__mro__ for s in _slots(c)]:
            self._part(f"{path}.{name}", getattr, value, name, MISSING)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        kind = type(tensor)
        if readable(tensor):
            self.tensors[path] = tensor
            self._leaf(path, "tensor" if _root(kind) == "torch" else f"tensor {self._class(kind)}")
        else:
            one = self._numbered((id(tensor), _count(tensor)), tensor, object)
            self._unname(path, f"a tensor of type {kind.__name__}", one)
            self._watch(_count, tensor, depth=1)
        beside = tensor.__dict__
        self._watch(len, beside)
        books = {*transformers().BOOKKEEPING, "streamed_weight"}
        if beside.keys() - books:
            self._space(path, _without, beside, books)

    def _array(self, path: str, array: Any) -> None:
        plain, layout = np.asarray(array), _layout_of(array)
        self._watch(_layout_of, array, depth=2)
        head = f"array {array.dtype} {array.shape}"
        if plain.dtype.hasobject:
            self._leaf(path, head)
            self._value(f"{path}/items", list(plain.flat))
            self._watch(lambda: list(plain.flat), depth=1)
        else:
            turned = tuple(slice(None, None, -1 if step < 0 else 1) for step in plain.strides)
            view = plain[turned] if plain.ndim else plain
            if not view.dtype.isnative and view.dtype.names is None:
                view = view.view(view.dtype.newbyteorder("="))
            try:
                # The same tensor over the same array from walk to walk: its content is compared.
                key = "array", id(array), layout
                same = self._numbered(key, array, lambda: torch.from_numpy(view))
                self.tensors[path] = same
                turns = "".join("-" if step < 0 else "+" for step in plain.strides)
                self._leaf(path, f"{head} {turns}")
            except (TypeError, ValueError):  # a dtype that torch does not have
                self._leaf(path, f"{head} {hashlib.sha256(plain.tobytes()).hexdigest()}")
                self._watch(plain.tobytes)
        if type(array) is not np.ndarray and hasattr(array, "__dict__"):
            self._space(path, vars, array)

    def _config(self, path: str, config: Any) -> None:
        if self._visited(path, config, path):
            return
        held = vars(config)
        free = self._free(path, held)
        for name in free:
            self._spot(f"{path}.{name}", _get, held, name)
        try:
            text = _settings(config, free)
        except Exception:  # something in it cannot be copied
            text = ""
        self._leaf(path, f"config {self._class(type(config))} {text}")
        for name, value in held.items():
            if name not in free and (not transformers().settled(value) or not text):
                self._value(f"{path}.{name}", value)
        frozen = {name: _frozen(value) for name, value in held.items()}
        self.configs[path] = config, frozen
        self._watch(lambda: vars(config) == frozen or _settings(config, free) == text)

    def _container(self, path: str, value: Any) -> None:
        if self._visited(path, value, path):
            return
        kind, mapping = type(value), isinstance(value, Mapping)
        label = self._class(kind) if _written(kind) else _name(kind)
        self._leaf(path, f"{label} {'' if mapping else len(value)}")
        free, grown = set[Any](), self._written.grown.get(path) if mapping else None
        if isinstance(value, (set, frozenset)):
            self._set(path, value)
        else:
            try:
                items = items_of(value)
            except Exception:  # a mapping that cannot be listed
                self._unname(path, f"a {kind.__name__} that cannot be listed", value)
                return
            labels: list[Any] = self._keys(path, items) if mapping else [*range(len(items))]
            named = [(label, *item) for label, item in zip(labels, items.items(), strict=True)]
            if mapping:
                self.mappings[path] = frozenset(labels)
            if grown is not None:  # a forward adds to it: other keys than those are its own
                self.spots[f"{path}/new"] = functools.partial(_others, value, grown)
                named = [each for each in named if each[0] in grown]
            if len(named) > LONG and all(type(item) in PLAIN for _, _, item in named):
                pairs = [(label, item) for label, _, item in named]
                self._leaf(f"{path}/all", _short(repr(pairs if mapping else [*items.values()])))
            else:
                for label, _, item in named:
                    self._value(f"{path}[{label}]", item)
            for label, key, _ in named:
                if self._spot(f"{path}[{label}]", _item_of, value, key):
                    free.add(key)
            if mapping and grown is None and not self._library:
                self._order(path, value, [each for each in named if each[1] not in free], free)
        if kind not in (tuple, frozenset):
            self._contents(free, grown, _itself, value)
        if isinstance(value, defaultdict):
            self._part(f"{path}/factory", getattr, value, "default_factory")
        elif isinstance(value, deque):
            self.rings.add(path)
            self._leaf(f"{path}/maxlen", str(value.maxlen))
        if kind.__module__ not in ("builtins", "collections"):
            self._held(path, value)

    def _keys(self, path: str, keys: Iterable[Any]) -> list[str]:
        """A label for each key, no two alike; what a label does not say is written down."""
        labels, counts = [], dict[str, int]()
        for key in keys:
            label = _key(key) or _title(key)
            if isinstance(key, torch.nn.Module):  # where it lies in the model; "" if it does not
                if self._places is None:
                    tree: Any = self._tree
                    self._places = {id(each): name for name, each in tree.named_modules()}
                label = f"module {self._places.get(id(key), '')}"
            count = counts[label] = counts.get(label, 0) + 1
            if count > 1:
                label = f"{label}#{count}"
            if _key(key) is None:
                self._value(f"{path}/key {label}", key)
            labels.append(label)
        return labels

    def _order(self, path: str, value: Any, named: list[Any], free: set[Any]) -> None:
        """The order in which a mapping lists its keys, which code may follow."""
        if len(named) > 1 and f"{path}/order" not in self._written:
            self._leaf(f"{path}/order", _short(repr([label for label, _, _ in named])))
            self._watch(lambda: [key for key in value if key not in free], depth=1)

    def _set(self, path: str, value: Any) -> None:
        members = sorted(((_key(item) or _title(item), item) for item in value), key=_first)
        self._leaf(f"{path}/all", _short(repr([label for label, _ in members])))
        vague = [(label, item) for label, item in members if _key(item) is None]
        if len({label for label, _ in vague}) < len(vague):
            self._unname(f"{path}/all", "a set of objects of one kind", value)
            return
        for label, item in vague:
            self._value(f"{path}[{label}]", item)

    def _object(self, path: str, value: Any) -> None:
        if self._visited(path, value, path):
            return
        kind = type(value)
        self._leaf(path, f"object {self._class(kind)}")
        self._held(path, value)
        in_c = _in_c(kind)
        if in_c is object and (hasattr(value, "__dict__") or any(map(_slots, kind.__mro__))):
            return
        try:
            content = _bytes_of(value)
        except Exception:  # no buffer
            self._reduced(path, value, watched=in_c is not object and not self._library)
        else:
            self._leaf(f"{path}/bytes", f"{len(content)} {hashlib.sha256(content).hexdigest()}")
            if f"{path}/bytes" not in self._written:
                self._watch(_bytes_of, value)

    def _reduced(self, path: str, value: Any, *, watched: bool) -> None:
        """What an object is made of, as `copy` and `pickle` ask for it."""
        try:
            reduced = _reduced(value)
        except Exception:  # whatever it raises: it cannot be looked into
            if not isinstance(value, io.IOBase):  # a file says nothing of what is computed
                self._unname(path, f"a {type(value).__name__}", value)
            return
        if watched and not any(known.startswith(f"{path}/reduced") for known in self._written):
            self._watch(lambda: _settled(_reduced(value)), depth=_DEEPEST)
        if isinstance(reduced, str):
            self._leaf(f"{path}/reduced", reduced)
        else:
            for i, part in enumerate(reduced):
                part = list(part) if isinstance(part, Iterator) else part
                self._value(f"{path}/reduced[{i}]", part)

    # ---- code

    def _callable(self, path: str, value: Any) -> bool:
        """Names a function or what stands for one; False if it is an object like any other."""
        if isinstance(value, types.FunctionType):
            self._leaf(path, f"function {self._function(value)}")
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self._builtin(path, value)
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._leaf(path, f"op {value}")
        elif isinstance(value, torch.jit.ScriptFunction):
            self._leaf(path, f"script {value.code}")
        elif (inner := _wrapped(value)) is not None:
            self._value(f"{path}/wrapped", inner)
            return _in_c(type(value)) is not object or _root(type(value)) in _COMPILERS
        else:
            return False
        return True

    def _builtin(self, path: str, value: Any) -> None:
        self._leaf(path, f"builtin {getattr(value, '__module__', '')}.{value.__qualname__}")
        owner = getattr(value, "__self__", None)
        bound = owner is not None and not isinstance(owner, (types.ModuleType, type))
        if bound and not type(owner).__module__.startswith("pybind11"):
            self._value(f"{path}/self", owner)

    def _function(self, function: types.FunctionType) -> str:
        """Writes a function's code and all that it refers to down; its label."""
        known = self._seen.get(id(function))
        if known is not None:
            return known
        module, code = str(function.__module__), function.__code__
        base = f"<{module}.{function.__qualname__}>"
        self._visited(base, function, base)
        label = self._seen[id(function)]
        library = module.partition(".")[0] in _LIBRARIES or _standard(module)
        library = library and _genuine(function)
        self._leaf(label, _code(code))
        self._value(f"{label}/defaults", function.__defaults__)
        self._value(f"{label}/kwdefaults", function.__kwdefaults__)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._watch(getattr, function, name)
        around, self._library = self._library, library
        if not library:  # `__wrapped__` is in a cell, where it is called
            self.foreign.append(label)
            self._space(label, _without, vars(function), ("__wrapped__",))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            content = _content_of(cell)
            if isinstance(content, types.ModuleType):
                self._members(content, _names(code), library)
            self._part(f"{label}/{name}", _content_of, cell)
        if not library or module.startswith(_DEEP):
            self._globals(function, library=library)
        if not library:
            self._foreign_code(function)
        self._library = around
        return label

    def _foreign_code(self, function: types.FunctionType) -> None:
        """What code that is no library's does when it runs."""
        code = function.__code__
        self._foreign_names |= _names(code)
        for name in sorted(_mentioned(code, "IMPORT_NAME")):
            found = sys.modules.get(name)
            self._leaf(f"<{name}>", "not imported yet" if found is None else "python module")
            if found is not None:
                self._members(found, _names(code), library=False)
            self._ask(sys.modules, name)
        if not _names(code).isdisjoint(("environ", "getenv", "environb")):
            self._variables(code)
        draws = not _names(code).isdisjoint(("urandom", "getrandom"))
        self.random |= draws or (_clock(function) and _answers(code))

    def _globals(self, function: types.FunctionType, *, library: bool) -> None:
        names, space = _names(function.__code__), function.__globals__
        loaded = _mentioned(function.__code__, "LOAD_GLOBAL", "LOAD_NAME")  # not as attributes
        self._named |= names
        home = str(space.get("__name__"))  # which `functools.wraps` does not change
        count = 1
        while self._spaces.setdefault(home, space) is not space:
            count += 1
            home = f"{home.partition('#')[0]}#{count}"
        for name in sorted(names):
            builtin = name in vars(builtins)
            if name in space:
                self._global(home, space, name, names, library)
                continue
            if builtin:
                self._ask(vars(builtins), name)
            if builtin if library else name in loaded:
                self._ask(space, name)  # once it is there, it means something

    def _global(
        self, module: str, space: Mapping[str, Any], name: str, names: frozenset[str], library: bool
    ) -> None:
        """Something that code names, among the globals of a Python module."""
        path, value = f"<{module}>:{name}", space[name]
        if self._spot(path, _get, space, name):
            return
        self.random |= not self._library and isinstance(value, _GENERATORS)
        known = path in self.leaves
        self._ask(space, name)
        if isinstance(value, types.ModuleType):
            self._leaf(path, f"python module {value.__name__}")
            self._members(value, names, library)
        elif known:
            pass
        elif isinstance(value, type):
            self._leaf(path, f"class {self._class(value) if _written(value) else _name(value)}")
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            self._callable(path, value)
        elif (
            library
            and not isinstance(value, functools.partial)
            and _defined(module, name)
            and (
                isinstance(value, (Mapping, list, set))
                or (type(value) not in PLAIN and not _written(value))
            )
        ):
            self._leaf(path, _name(type(value)))  # tables and caches are their release's
        else:
            self._value(path, value)

    def _ask(self, space: Mapping[str, Any], name: str) -> None:
        """Watches what a name means, or that it means nothing."""
        if (id(space), name) not in self._asked:
            self._asked.add((id(space), name))
            self._watch(_get, space, name)

    def _members(self, module: types.ModuleType, names: frozenset[str], library: bool) -> None:
        """What code names of a module, such as the functions of `torch.nn.functional`."""
        self.random |= not self._library and module.__name__ in _RANDOM
        met = id(module), id(names)
        if _standard(module.__name__) or met in self._members_seen:
            return
        self._members_seen.add(met)
        foreign = module.__name__.partition(".")[0] not in _LIBRARIES
        space = vars(module)
        for name in sorted(names & space.keys()):
            self._global(module.__name__, space, name, names, library or not foreign)
        if foreign and not library and type(module) is types.ModuleType:
            for name in names - space.keys() if "__getattr__" not in space else ():
                self._ask(space, name)

    def _class(self, cls: type) -> str:
        """Writes a class and the code that it may run down; its label."""
        known = self._seen.get(id(cls))
        if known is not None:
            return known
        base = f"<{_name(cls)}>"
        self._visited(base, cls, base)
        label = self._seen[id(cls)]
        if _of_python(cls):
            return label
        lineage = [c for c in cls.__mro__ if c is not object and not _of_python(c)]
        self._leaf(label, " ".join(_name(c) for c in cls.__mro__))
        todo = {"forward", "__call__"} if issubclass(cls, torch.nn.Module) else set[str]()
        if type(cls) is not type and not _of_python(type(cls)):
            self._leaf(f"{label}/made by", self._class(type(cls)))
        for owner in lineage:
            if _root(owner) not in _LIBRARIES or not _own_code(owner):
                self.foreign.append(label)
                books = transformers().BOOKKEEPING if _keeps_books(owner) else frozenset()
                skipped = _CLASS_ITEMS | books
                todo |= vars(owner).keys() - skipped
            self._watch(_size, owner)
        done = set[str]()
        while todo:
            name = min(todo)
            todo.discard(name)
            done.add(name)
            home = next((c for c in lineage if name in vars(c)), None)
            if home is None:
                continue
            value = vars(home)[name]
            path = f"{label}.{name}"
            if self._spot(path, _get, vars(home), name):
                continue
            self._watch(_get, vars(home), name)
            functions = list(_functions(value))
            if functions:
                named = [self._function(f) for f in functions]
                self._leaf(path, f"{type(value).__name__} {named}")
                if isinstance(value, (functools.partialmethod, functools.partial)):
                    self._value(f"{path}/bound", (value.func, value.args, value.keywords))
                for function in functions:
                    todo |= (_names(function.__code__) | _inner(function)) - done
            elif isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                self._leaf(path, "slot")
            elif type(value).__module__ == "_ctypes":  # where a field of a structure lies
                self._leaf(path, repr(value))
            elif (
                _root(home) in _LIBRARIES
                and type(value) not in PLAIN
                and _defined(home.__module__, name)
            ):
                self._leaf(path, _name(type(value)))
            else:
                self._value(path, value)
        return label

    # ---- around the model

    def _environment(self, model: torch.nn.Module) -> None:
        self._leaf("python", f"{sys.version_info.major}.{sys.version_info.minor}")
        self._leaf("torch", str(torch.__version__).partition("+")[0])
        for name, value in _flags().items():
            self._leaf(f"torch/{name}", str(value))
        self._watch(_flags, depth=1)
        for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            hooks = getattr(torch_module, kind)
            foreign = [hook for hook in hooks.values() if _root(hook) not in _OWN]
            for i, hook in enumerate(foreign):
                self.foreign.append(f"{kind}/{i}")
                self._value(f"{kind}/{i}", hook)
            self._contents(set(), None, _itself, hooks)
        every = vars(torch.Tensor)
        for name, value in every.items():
            own = _TENSOR.get(name) is value and _root(value) in ("torch", "builtins")
            if name in self._named or (name.startswith("__") and name not in _CLASS_ITEMS):
                self._watch(_get, every, name)
                if not own:
                    self._value(f"torch.Tensor.{name}", value)
        self._watch(_size, torch.Tensor)
        library = transformers() if self.pretrained else _NO_TRANSFORMERS
        for cls in library.CACHES:  # FlowKV's own stand in for theirs
            self._part(f"{cls.__name__}.update", getattr, cls, "update")
        for registry, name, _ in library.chosen_functions(model):
            self._part(f"{type(registry).__name__} {name}", registry.get, name)


_TENSOR = dict(vars(torch.Tensor))
"""What every tensor can do, as torch brings it."""


def _flags() -> dict[str, Any]:
    """Flags of precision, which change what the same code computes."""
    matmul, mkldnn = torch.backends.cuda.matmul, cast("Any", torch.backends.mkldnn)
    return {
        "matmul": _flag(torch.get_float32_matmul_precision),
        "tf32": _flag(lambda: matmul.allow_tf32),
        "cudnn": _flag(lambda: torch.backends.cudnn.allow_tf32),
        "fp16": _flag(lambda: matmul.allow_fp16_reduced_precision_reduction),
        "bf16": _flag(lambda: matmul.allow_bf16_reduced_precision_reduction),
        "mkldnn": _flag(lambda: mkldnn.matmul.fp32_precision),
        "dtype": _flag(torch.get_default_dtype),
    }


def _flag(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, RuntimeError):  # not in this build, or old and new flags are mixed
        return None


_CLASS_ITEMS = frozenset(
    """__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __static_attributes__ __firstlineno__ __slots__
    __match_args__ __dataclass_fields__ __dataclass_params__ __parameters__ __orig_bases__
    __abstractmethods__ _abc_impl __hash__ __slotnames__""".split()
)
_is = operator.is_


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _ours(value: Any) -> bool:
    """Whether it is a cache or a part of one, which says nothing about what a model computes."""
    kind: Any = type(value)
    if kind.__module__.partition(".")[0] != "flowkv":
        return False
    made: Any = getattr(kind, "__dataclass_params__", None)
    frozen = made is not None and made.frozen
    return not (frozen or isinstance(value, (torch.nn.Module, tuple, enum.Enum, msgspec.Struct)))


@functools.cache
def _assigned(cls: Any) -> frozenset[str]:
    """Attributes that a class's own methods assign to something, or keep what they computed in."""
    found = set[str]()
    for name, value in itertools.chain.from_iterable(vars(c).items() for c in cls.__mro__):
        if isinstance(value, functools.cached_property):
            found.add(name)
        for function in _functions(value):
            found |= _mentioned(function.__code__, "STORE_ATTR")
    return frozenset(found)


def _layout_of(array: Any) -> tuple[Any, ...]:
    """How an array's elements lie, and where."""
    return array.shape, array.strides, array.dtype, array.__array_interface__["data"][0]


def _root(value: Any) -> str:
    """The package in which something was written."""
    inner = value
    while isinstance(inner, (functools.partial, types.MethodType)):
        if isinstance(inner, types.MethodType):
            kind = type(inner.__self__)  # a door, whoever counts or traces what its class does
            if _ours(inner.__self__) and any(inner.__func__ is one for one in vars(kind).values()):
                return "flowkv"
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    if isinstance(inner, types.FunctionType) and not _genuine(inner):
        return ""
    module = getattr(inner, "__module__", None)
    if not isinstance(module, str):
        module = type(inner).__module__
    return module.partition(".")[0]


def _genuine(function: types.FunctionType) -> bool:
    """Whether a function that says it is a library's, or Python's, was written there."""
    space: Any = function.__globals__
    home = str(space.get("__name__"))
    if not (home.partition(".")[0] in _LIBRARIES | _HELPERS or _standard(home)):
        return False
    file = getattr(sys.modules.get(home.partition(".")[0]), "__file__", None)
    known = sys.modules.get(home)
    if known is None or vars(known) is not space:
        return False
    return not _standard(home) or file is None or str(file).startswith(_STANDARD_PLACES)


_HELPERS = frozenset({"typing_extensions", "triton", "numba"})
_STANDARD_PLACES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def _standard(module: Any) -> bool:
    return str(module).partition(".")[0] in sys.stdlib_module_names


def _of_python(cls: type) -> bool:
    """Whether a class is of Python's own library."""
    return _standard(cls.__module__) and _own_code(cls)


def _own_code(cls: type) -> bool:
    """Whether no method of a class says that it is a library's, and is not."""
    return all(
        _genuine(value)
        for value in vars(cls).values()
        if isinstance(value, types.FunctionType) and value.__qualname__.startswith(cls.__qualname__)
    )


def _reduced(value: Any) -> Any:
    """What an object of C is made of, as `copy` and `pickle` ask for it."""
    if isinstance(value, torch.ScriptObject):
        return (value.__getstate__(),)
    reducer = copyreg.dispatch_table.get(type(value))
    return value.__reduce_ex__(2) if reducer is None else reducer(value)


def _settled(reduced: Any) -> Any:
    """What an object was reduced to, with iterators read out, apart from what changes later."""
    if isinstance(reduced, tuple):
        return tuple(_settled(part) for part in reduced)
    if isinstance(reduced, Iterator):
        return list(reduced)
    return _frozen(reduced)


def _in_c(cls: type) -> Any:
    """The class in C that a class is built on, in which its objects may keep more."""
    return next((c for c in cls.__mro__ if _own_new(c)), object)


def _own_new(cls: type) -> bool:
    new = vars(cls).get("__new__")
    return isinstance(new, types.BuiltinFunctionType) and new.__self__ is cls


def _count(tensor: torch.Tensor) -> tuple[int, int]:
    """How often a tensor was written to, and where it lies; as far as it says so."""
    found = []
    for read in (lambda: tensor._version, tensor.data_ptr):
        try:
            found.append(int(read()))
        except Exception:
            found.append(-1)
    return found[0], found[1]


def _keeps_books(cls: type) -> bool:
    """Whether attributes of a class have the meanings that `BOOKKEEPING` says."""
    return issubclass(cls, transformers().PreTrainedModel) or _root(cls) == "peft"


_MARKS = frozenset(
    """_is_hf_initialized gradient_checkpointing _gradient_checkpointing_func _require_grads_hook
    _output_capturing_hooks_installed __deepcopy__""".split()
)
"""Attributes that transformers gives to every module; they decide nothing."""


@functools.cache
def _source(module: str) -> types.CodeType | None:
    """What a library's module runs when it is imported; None if nobody knows what that names."""
    try:
        spec = importlib.util.find_spec(module)
        loader: Any = spec.loader if spec is not None else None
        code: types.CodeType = loader.get_code(module)
        steps = list(dis.get_instructions(code))  # stars are imported nowhere else
    except Exception:  # no source
        return None
    stars = {"IMPORT_STAR", "INTRINSIC_IMPORT_STAR"}
    return None if any({step.opname, step.argrepr} & stars for step in steps) else code


def _defined(module: str, name: str) -> bool:
    """Whether a library's module, or its classes, gives a name something itself."""
    code = _source(module)
    stores = "STORE_NAME", "STORE_GLOBAL", "STORE_ATTR"
    return code is None or any(  # without source, whatever lies there is its release's
        name in part.co_names and name in _operands(part, *stores) for part in _codes(code)
    )


def _written(value: Any) -> bool:
    """Whether something comes from neither Python nor a library whose release is in the name."""
    return not _standard(_root(value)) and _root(value) not in _LIBRARIES


def _equal(a: Any, b: Any) -> bool:
    """Whether two plain values are one; anything else is told by identity."""
    return type(a) is type(b) and type(a) in PLAIN and bool(a == b)


def _key(key: Any) -> str | None:
    """All that a key of a mapping is, as text; None for objects, which have more to them."""
    kind = type(key)
    if kind in PLAIN:
        return f"{kind.__name__} {key!r}"
    if isinstance(key, enum.Enum):
        return f"{_name(kind)} {key.name}"
    if kind in (tuple, frozenset):
        parts = [_key(item) for item in key]
        if any(part is None for part in parts):
            return None
        order = sorted(map(str, parts)) if kind is frozenset else parts
        return f"{kind.__name__} {order!r}"
    if isinstance(key, (torch.dtype, torch.device, torch.Size)):
        return repr(key)
    return None


def _title(key: Any) -> str:
    """What an object is called, which may not be all that it is."""
    named = isinstance(key, (type, types.FunctionType, types.BuiltinFunctionType))
    return f"{_name(type(key))} {_name(key) if named else ''}"


_first = operator.itemgetter(0)
key_text = _key


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    own = f"_{cls.__name__.lstrip('_')}"  # as Python writes private names
    return tuple(
        own + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )


def _around(module: torch.nn.Module, forward: Any) -> Any:
    """The forward that one of accelerate's, or of FlowKV's, stands in for; None if it does not."""
    own = vars(module).get("_old_forward")
    return own if own is not None else getattr(getattr(forward, "__self__", None), "around", None)


def _offloaded(module: torch.nn.Module, name: str, tensor: Any) -> Any:
    """The map in which accelerate keeps a tensor of a module; None if it lies in the module."""
    where = getattr(module.__dict__.get("_hf_hook"), "weights_map", None)
    if tensor is None or not tensor.is_meta or where is None or name not in where:
        return None
    return where


def _alike(a: Any, b: Any, depth: int) -> bool:
    """Whether two readings gave the very same things, in containers down to some depth."""
    if a is b or _equal(a, b):
        return True
    if depth == 0 or type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and (
            all(map(operator.is_, a, b))
            or all(_alike(x, y, depth - 1) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(x, b[key], depth - 1) for key, x in a.items())
    if isinstance(a, (bytearray, set, frozenset, str, bytes, int, float)):
        return bool(a == b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return False


def _frozen(value: Any) -> Any:
    """A copy of nested containers, which equals them while nothing in them was replaced."""
    if type(value) in (dict, OrderedDict, defaultdict):
        return {key: _frozen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_frozen(item) for item in value)
    return set(value) if type(value) is set else value


def _module_stays(
    held: dict[str, Any], own: Mapping[str, Any], free: set[str]
) -> Callable[[], bool]:
    """Asks whether a module is as it is now, quickly: a decode step pays for this.

    Args:
        held: Its attributes.
        own: Those that are in the name.
        free: Names that forwards write.
    """
    items, training, size = tuple(own.items()), held.get("training"), len(held.keys() - free)
    empty = [kind for kind in _WATCHED if not held[kind]]
    spaces = [(k, tuple(held[k]), tuple(held[k].values())) for k in _WATCHED if held[k]]

    def same() -> bool:
        if held.get("training") is not training:
            return False
        if len(held) != size and len(held) - size != sum(name in held for name in free):
            return False
        for name, value in items:
            found = held.get(name, MISSING)
            if found is not value and not _equal(found, value):
                return False
        for kind in empty:
            if held[kind]:
                return False
        for kind, names, values in spaces:
            now = held[kind]
            if tuple(now) == names and all(map(_is, now.values(), values)):
                continue
            if kind not in _TENSORS or len(now) != len(names):  # others run in their order
                return False
            known = dict(zip(names, values, strict=True))
            if any(known.get(n, MISSING) is not t and n not in free for n, t in now.items()):
                return False
        return True

    return same


def items_of(held: Any) -> dict[Any, Any]:
    """What a container holds, by key or place."""
    if isinstance(held, Mapping):
        return dict(held.items())
    return dict.fromkeys(held) if isinstance(held, (set, frozenset)) else dict(enumerate(held))


def _without(held: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: item for name, item in held.items() if name not in names}


def _get(space: Mapping[str, Any], name: str) -> Any:
    return space.get(name, MISSING)


def _itself(value: Any) -> Any:
    return value


def _type_of(model: weakref.ref[Any]) -> type:
    return type(model())


def _bytes_of(value: Any) -> bytes:
    return bytes(memoryview(value))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.cache
def _operands(code: types.CodeType, *operations: str) -> frozenset[str]:
    """Names that some operations of code are about, but for the functions and classes in it."""
    steps = dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname in operations)


def _mentioned(code: types.CodeType, *operations: str) -> frozenset[str]:
    """Names that some operations of code are about."""
    return frozenset().union(*(_operands(part, *operations) for part in _codes(code)))


def _clock(function: types.FunctionType) -> bool:
    """Whether a function asks what time it is."""
    names, space = _names(function.__code__), function.__globals__
    if any(getattr(space.get(name), "__module__", "") == "time" for name in names & space.keys()):
        return True
    clock = any(space.get(name) is time for name in names) or "time" in _mentioned(
        function.__code__, "IMPORT_NAME"
    )
    return clock and not names.isdisjoint(_CLOCKS)


def _answers(code: types.CodeType) -> bool:
    """Whether a function gives something back, and does not only record."""
    if code.co_name == "<lambda>":
        return _names(code).isdisjoint(("append", "add", "put", "update", "__setitem__"))
    last = None
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_VALUE" and not (
            last is not None and last.opname == "LOAD_CONST" and last.argval is None
        ):
            return True
        last = step
    return False


def settles(value: Any) -> bool:
    """Whether an attribute is no cache of a forward: a number or text, which it sets only once."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return type(value) in (bool, float, complex, str)


def _settings(config: Any, free: set[str]) -> str:
    """The settings of a configuration without those that forwards write."""
    text = transformers().settings(config)
    if not free:
        return text
    held = {name: value for name, value in json.loads(text).items() if name not in free}
    return json.dumps(held, sort_keys=True, separators=(",", ":"))


def _attribute_of(held: Mapping[str, Any], name: str) -> Any:
    for space in (held, held["_buffers"], held["_parameters"]):
        if name in space:
            return space[name]
    return MISSING


def _others(mapping: Mapping[Any, Any], known: frozenset[str]) -> Any:
    """What is in a mapping under other keys than those; only how much, if that is a lot."""
    if len(mapping) > len(known) + LONG:
        return len(mapping)
    return {key: item for key, item in list(mapping.items()) if _key(key) not in known}


def _item_of(held: Any, key: Any) -> Any:
    try:  # not `get`: mappings of their own kind may make one
        return held[key] if not isinstance(held, Mapping) or key in held else MISSING
    except Exception:  # whatever such a mapping raises, or a sequence that is shorter
        return MISSING


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _size(cls: type) -> int:
    """How many attributes a class has, but what Python notes when one is copied first."""
    return len(vars(cls)) - ("__slotnames__" in vars(cls))


_AROUND = (functools.cached_property, functools.partialmethod, functools.partial)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions that a class attribute stands for."""
    if isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, property):
        for function in (value.fget, value.fset):
            if function is not None:
                yield from _functions(function)
    elif isinstance(value, _AROUND):
        yield from _functions(value.func)
    elif isinstance(value, types.FunctionType):
        yield value


def _wrapped(value: Any) -> Any:
    """The Python function inside a compiled or cached one; None if there is none."""
    for name in ("py_func", "__wrapped__"):
        if isinstance(inner := getattr(value, name, None), types.FunctionType):
            return inner
    if type(value).__module__.partition(".")[0] == "triton":
        return getattr(value, "fn", None)
    return None


@functools.cache
def _stores(cls: Any) -> frozenset[str]:
    """Attributes that a module's forward assigns to itself, by the code of its own class."""
    found, done, todo = set[str](), set[str](), {"forward"}
    lineage = [c for c in cls.__mro__ if issubclass(c, torch.nn.Module) and _root(c) != "torch"]
    while todo:
        name = todo.pop()
        done.add(name)
        home = next((c for c in lineage if name in vars(c)), None)
        if home is None or name == "__init__":
            continue
        for function in _functions(vars(home)[name]):
            code = function.__code__
            for last, step in itertools.pairwise(dis.get_instructions(code)):
                to_self = last.opname.startswith("LOAD_FAST") and code.co_varnames[:1] == (
                    last.argval,
                )
                if step.opname == "STORE_ATTR" and to_self:
                    found.add(step.argval)
            todo |= _names(code) - done
    return frozenset(found)


_CODES: dict[int, tuple[types.CodeType, str, frozenset[str]]] = {}
"""Digest and names by code object; the objects are kept, so that no other gets their id."""


def _read_code(code: types.CodeType) -> tuple[types.CodeType, str, frozenset[str]]:
    known = _CODES.get(id(code))
    if known is None:
        state, names = hashlib.sha256(), set(code.co_names)
        state.update(code.co_code)
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        state.update(repr((counts, code.co_names, code.co_varnames, code.co_freevars)).encode())
        state.update(getattr(code, "co_exceptiontable", b""))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                _, digest, inner = _read_code(constant)
                names |= inner
                state.update(digest.encode())
            else:
                state.update(_constant(constant).encode("utf-8", "surrogatepass"))
                if isinstance(constant, str) and constant.isidentifier():
                    names.add(constant)  # getattr(self, "name")
        known = _CODES[id(code)] = (code, state.hexdigest(), frozenset(names))
    return known


def _constant(value: Any) -> str:
    if isinstance(value, (tuple, frozenset)):
        items = [_constant(item) for item in value]
        order = sorted(items) if isinstance(value, frozenset) else items
        return f"{type(value).__name__}({','.join(order)})"
    return f"{type(value).__name__} {value!r}"


def _code(code: types.CodeType) -> str:
    return _read_code(code)[1]


def _names(code: types.CodeType) -> frozenset[str]:
    return _read_code(code)[2]


def _inner(function: types.FunctionType) -> set[str]:
    """Names that functions inside a decorated one refer to."""
    found, todo, seen = set[str](), [function], set[int]()
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        found |= _names(current.__code__)
        for cell in current.__closure__ or ():
            if isinstance(content := _content_of(cell), types.FunctionType):
                todo.append(content)
    return found
