"""What a model computes beside its weights: code, settings, hooks, and everything they refer to.

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
import copyreg
import dis
import enum
import functools
import hashlib
import inspect
import itertools
import logging
import operator
import sys
import threading
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module

from flowkv.hooks.huggingface.versions import (
    BOOKKEEPING,
    PreTrainedConfig,
    chosen_functions,
    library_version,
    settings,
)
from flowkv.hooks.huggingface.weights import Weights, readable

COMPILED = "compiled"
_PROCESS = uuid.uuid4().hex
_COUNTER = itertools.count(1)
_MISSING: Any = object()
_ROOT = "model"
_MOST_LEAVES = 200_000
_LONG = 64
"""Longer lists and dicts of plain values are one leaf."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
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
_WATCHED = (*_HOOKS, "_parameters", "_buffers", "_modules")
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
_RANDOM = frozenset({"random", "numpy.random", "secrets"})


class Walk:
    """One look at what a model computes.

    Attributes:
        leaves: Path and text of everything in the name.
        tensors: Parameters, buffers and other tensors, by path.
        held: Containers and objects in attributes of modules, by path.
        unnamed: Paths of what cannot be named: it has a number that nobody has again.
        foreign: What is neither torch's nor transformers' and takes part.
        random: Code is seen that draws random numbers behind torch's back.
        compiled: Parts are compiled by `torch.compile`.
        training: Submodules are in training mode.

    Args:
        model: The model.
        written: Paths that the model's own forward writes, and the leaves that stand for them.
        passing: Suffix of buffers that every forward rewrites; "" for none.
        numbers: Numbers of unnamed objects, by id; kept by the caller from walk to walk.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        written: Mapping[str, tuple[tuple[str, str], ...]],
        passing: str,
        numbers: dict[Any, tuple[Any, Any]],
    ) -> None:
        self.leaves: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.held: dict[str, Any] = {}
        self.unnamed: list[str] = []
        self.foreign: list[str] = []
        self.random = self.compiled = self.training = False
        self._written, self._passing, self._numbers = dict(written), passing, numbers
        self._library = False  # what is looked at is a library's own
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []
        self._labels: dict[str, int] = {}
        self._members_seen: set[tuple[int, int]] = set()
        self._modules: list[Callable[[], bool]] = []
        self._checks: list[Callable[[], bool]] = []
        self._items: list[tuple[Mapping[str, Any], str, Any]] = []
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 10_000))
        try:
            self._module(_ROOT, model)
            self._environment(model)
        finally:
            sys.setrecursionlimit(limit)

    @property
    def digest(self) -> str:
        """Hex digest of all leaves."""
        state = hashlib.sha256(b"flowkv.computation/1")
        for path, text in sorted(self.leaves.items()):
            line = f"{path}\0{text}".encode("utf-8", "surrogatepass")
            state.update(len(line).to_bytes(4, "little") + line)
        return state.hexdigest()

    def same(self) -> bool:
        """Whether everything that was met is still there; what tensors hold is not read."""
        return (
            _flags() == self._precision
            and all(check() for check in self._modules)
            and all(
                (found := holder.get(key, _MISSING)) is value or _equal(found, value)
                for holder, key, value in self._items
            )
            and all(check() for check in self._checks)
        )

    def forget(self) -> None:
        """Lets go of a model that is gone."""
        for held in (self._modules, self._checks, self._items, self._kept):
            held.clear()
        self.tensors.clear()
        self.held.clear()

    # ---- leaves

    def _leaf(self, path: str, text: str) -> None:
        if path in self._written:
            self.leaves |= self._written[path]
            return
        if len(self.leaves) >= _MOST_LEAVES:
            self._unname("model", "too much to look at", self)
            return
        self.leaves[path] = text

    def _unname(self, path: str, why: str, what: Any) -> None:
        """Gives something a number that nobody has again; what a library keeps is its release's."""
        if self._library:
            self.leaves[path] = _name(type(what))
            return
        known = self._numbers.get(id(what))
        if known is None or known[0] is not what:
            known = self._numbers[id(what)] = (what, next(_COUNTER))
        self.unnamed.append(f"{path}: {why}")
        self.leaves[path] = f"unnamed {_PROCESS} {known[1]}"

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
        held, children = module.__dict__, module._modules
        self._leaf(path, f"module {self._class(type(module))}")
        self._leaf(f"{path}/training", str(module.training))
        self.training |= module.training
        forward = held.get("forward")
        compiled = held.get("_compiled_call_impl") is not None or "_orig_mod" in children
        self.compiled |= compiled or hasattr(forward, "_torchdynamo_orig_callable")
        if isinstance(module, torch.jit.ScriptModule):
            self._leaf(f"{path}/code", str(getattr(module, "code", "")))
        kind: Any = type(module)
        for name in _stores(kind):
            self._written.setdefault(f"{path}.{name}", ())
        for name in held:  # encodings that depend on length keep what they were before, as well
            if self._passing and name.endswith((self._passing, "max_seq_len_cached")):
                self._written.setdefault(f"{path}.{name}", ())
        every = [*held, *held["_buffers"], *held["_parameters"]]
        free = {name for name in every if f"{path}.{name}" in self._written}
        for kind in ("_parameters", "_buffers"):  # made anew by every forward
            free |= {n for n, t in held[kind].items() if _offloaded(module, n, t) is not None}
        own = {
            name: value
            for name, value in held.items()
            if name not in _STANDARD and name not in BOOKKEEPING and name not in free
        }
        for name in free:
            self.leaves |= self._written.get(f"{path}.{name}", ())
        for name, value in own.items():
            self._attribute(f"{path}.{name}", module, name, value)
            if type(value) not in _PLAIN:
                self.held[f"{path}.{name}"] = value
        for kind in ("_parameters", "_buffers"):
            for name, tensor in held[kind].items():
                if not (self._passing and name.endswith(self._passing)):
                    self._stored(f"{path}.{name}", module, name, tensor)
        self._hooks(path, held)
        self._watch_module(module, own, free)
        for name, child in children.items():
            if child is None:
                self._leaf(f"{path}.{name}", "no module")
            else:
                self._module(f"{path}.{name}", child)
        self._leaf(f"{path}/children", " ".join(children))

    def _attribute(self, path: str, module: torch.nn.Module, name: str, value: Any) -> None:
        if name == "forward" and _root(value) in _OWN:  # accelerate's, around the model's own
            original = module.__dict__.get("_old_forward")
            if getattr(original, "__func__", None) is not type(module).forward:
                self._value(path, original)
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
            known = self._numbers.get((id(where), name))
            if known is None or known[0] is not where:
                known = self._numbers[id(where), name] = (where, Weights().read({"": held}))
            self._leaf(path, f"offloaded {known[1]}")

    def _hooks(self, path: str, held: dict[str, Any]) -> None:
        for kind in _HOOKS:
            foreign = [(k, h) for k, h in held[kind].items() if _root(h) not in _OWN]
            for i, (key, hook) in enumerate(foreign):
                self.foreign.append(f"{path}/{kind}/{i}")
                flags = [flag for flag in _HOOK_FLAGS if key in held[flag]]
                self._leaf(f"{path}/{kind}/{i}/flags", " ".join(flags))
                self._value(f"{path}/{kind}/{i}", hook)

    def _watch_module(self, module: torch.nn.Module, own: dict[str, Any], free: set[str]) -> None:
        held, items, training = module.__dict__, tuple(own.items()), module.training
        size = len(held.keys() - free)
        containers = [
            (name, tuple(held[name]), tuple(held[name].values())) for name in _WATCHED if held[name]
        ]
        empty = [name for name in _WATCHED if not held[name]]
        passing = self._passing

        def same() -> bool:
            if held["training"] is not training:
                return False
            if len(held) != size + sum(name in held for name in free):
                return False
            for name, value in items:
                found = held.get(name, _MISSING)
                if found is not value and not _equal(found, value):
                    return False
            for name in empty:
                if held[name]:
                    return False
            for name, keys, values in containers:
                now = held[name]
                if len(now) != len(keys):
                    return False
                if all(map(_is, now.values(), values)) and tuple(now) == keys:
                    continue
                if not _only(now, keys, values, passing, free):
                    return False
            return True

        self._modules.append(same)

    # ---- values

    def _value(self, path: str, value: Any) -> None:
        if path in self._written:
            self.leaves |= self._written[path]
            return
        kind = type(value)
        if kind in _PLAIN:
            self._leaf(path, f"{kind.__name__} {value!r}")
        elif isinstance(value, enum.Enum):
            self._leaf(path, f"{_name(kind)} {value.name}")
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._array(path, value)
        elif isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif isinstance(value, torch.device):
            self._leaf(path, "device")  # the same model has the same name wherever it lies
        elif isinstance(value, (inspect.Signature, types.GenericAlias, types.UnionType)):
            self._leaf(path, str(value))
        elif isinstance(value, (torch.dtype, torch.Size, torch.layout, torch.memory_format, range)):
            self._leaf(path, repr(value))
        elif isinstance(value, PreTrainedConfig):
            self._config(path, value)
        elif isinstance(value, _INERT):
            self._leaf(path, _name(kind))
        elif isinstance(value, torch.Generator):
            self.random = True
            self._leaf(path, "generator")
        elif isinstance(value, type):
            self._leaf(path, f"class {self._class(value)}")
        elif callable(value) and self._callable(path, value):
            pass
        elif isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            self._container(path, value)
        else:
            self._object(path, value)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        if readable(tensor):
            self.tensors[path] = tensor
            self._leaf(path, "tensor")
        else:
            self._unname(path, f"a tensor of type {type(tensor).__name__}", tensor)

    def _array(self, path: str, array: Any) -> None:
        try:
            self.tensors[path] = torch.from_numpy(np.asarray(array))
            self._leaf(path, f"array {array.dtype} {array.shape}")
        except TypeError:  # a dtype that torch does not have
            if array.dtype.hasobject:
                self._value(path, array.tolist())
            else:
                content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
                self._leaf(path, f"array {array.dtype} {array.shape} {content}")

    def _config(self, path: str, config: Any) -> None:
        if self._visited(path, config, path):
            return
        text = settings(config)
        self._leaf(path, f"config {text}")
        frozen = {name: _frozen(value) for name, value in vars(config).items()}

        def same() -> bool:
            now = vars(config)
            try:
                return now == frozen or settings(config) == text
            except Exception:
                return False

        self._checks.append(same)

    def _container(self, path: str, value: Any) -> None:
        if self._visited(path, value, path):
            return
        kind = type(value)
        self._leaf(path, f"{_name(kind)} {len(value) if not isinstance(value, Mapping) else ''}")
        free: set[Any] = set()
        if isinstance(value, Mapping):
            try:
                items = {_key(key): item for key, item in value.items()}
            except Exception:  # a mapping that cannot be listed
                self._unname(path, f"a {kind.__name__} that cannot be listed", value)
                return
            if len(items) > _LONG and all(type(item) in _PLAIN for item in items.values()):
                self._leaf(f"{path}/all", _short(repr(sorted(items.items()))))
            else:
                for key, item in items.items():
                    self._value(f"{path}[{key}]", item)
            free = {key for key in value if f"{path}[{_key(key)}]" in self._written}
        elif isinstance(value, (set, frozenset)):
            self._leaf(f"{path}/all", _short(repr(sorted(map(_key, value)))))
            if not all(type(item) in _PLAIN for item in value):
                self._unname(f"{path}/all", "a set of objects", value)
        elif len(value) > _LONG and all(type(item) in _PLAIN for item in value):
            self._leaf(f"{path}/all", _short(repr(list(value))))
        else:
            for i, item in enumerate(value):
                self._value(f"{path}[{i}]", item)
        if type(value) not in (tuple, frozenset):
            self._checks.append(_unchanged(value, free))
        if hasattr(value, "__dict__") and vars(value):
            self._attributes(path, value)

    def _object(self, path: str, value: Any) -> None:
        if self._visited(path, value, path):
            return
        kind = type(value)
        self._leaf(path, f"object {self._class(kind)}")
        slots = [s for c in kind.__mro__ for s in _slots(c) if hasattr(value, s)]
        if hasattr(value, "__dict__") or slots:
            if hasattr(value, "__dict__"):
                self._attributes(path, value)
            for name in slots:
                self._value(f"{path}.{name}", getattr(value, name))
                self._checks.append(_unchanged_slot(value, name, getattr(value, name)))
            return
        try:
            reduced = _reduced(value)
        except Exception:  # whatever it raises: it cannot be looked into
            self._unname(path, f"a {kind.__name__}", value)
            return
        if isinstance(reduced, str):
            self._leaf(f"{path}/reduced", reduced)
        elif isinstance(reduced, tuple):
            for i, part in enumerate(reduced):
                if isinstance(part, Iterator):
                    part = list(part)
                self._value(f"{path}/reduced[{i}]", part)
        else:
            self._unname(path, f"a {kind.__name__}", value)

    def _attributes(self, path: str, value: Any) -> None:
        held = vars(value)
        free = {name for name in held if f"{path}.{name}" in self._written}
        for name, item in list(held.items()):
            self._value(f"{path}.{name}", item)
        self._checks.append(_unchanged(held, free))

    # ---- code

    def _callable(self, path: str, value: Any) -> bool:
        """Names a function or what stands for one; False if it is an object like any other."""
        if isinstance(value, types.FunctionType):
            self._leaf(path, f"function {self._function(value)}")
        elif isinstance(value, types.MethodType):
            self._value(f"{path}/function", value.__func__)
            self._value(f"{path}/self", value.__self__)
        elif isinstance(value, functools.partial):
            self._value(f"{path}/func", value.func)
            self._value(f"{path}/args", value.args)
            self._value(f"{path}/keywords", value.keywords)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self._builtin(path, value)
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._leaf(path, f"op {value}")
        elif isinstance(value, torch.jit.ScriptFunction):
            self._leaf(path, f"script {value.code}")
        else:
            inner = _wrapped(value)
            if inner is None:
                return False
            self._value(f"{path}/wrapped", inner)
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
        if not library:
            self.foreign.append(label)
        self._leaf(label, _code(code))
        self._value(f"{label}/defaults", function.__defaults__)
        self._value(f"{label}/kwdefaults", function.__kwdefaults__)
        defaults, keywords = function.__defaults__, function.__kwdefaults__
        around, self._library = self._library, library

        def same() -> bool:
            return (
                function.__code__ is code
                and function.__defaults__ is defaults
                and function.__kwdefaults__ is keywords
            )

        self._checks.append(same)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                content = None
            self._value(f"{label}/{name}", content)
            self._checks.append(_unchanged_cell(cell, content))
        if not library or module.startswith(_DEEP):
            self._globals(function, library=library)
        self._library = around
        return label

    def _globals(self, function: types.FunctionType, *, library: bool) -> None:
        names, space = _names(function.__code__), function.__globals__
        for name in sorted(names):
            if name in space:
                self._global(str(function.__module__), space, name, names, library)
            elif name in vars(builtins):
                self._items.append((vars(builtins), name, vars(builtins)[name]))

    def _global(
        self, module: str, space: Mapping[str, Any], name: str, names: frozenset[str], library: bool
    ) -> None:
        """Something that code names, among the globals of a Python module."""
        path, value = f"<{module}>:{name}", space[name]
        new = path not in self.leaves
        if new:
            self._items.append((space, name, value))
        if isinstance(value, types.ModuleType):
            self._leaf(path, f"python module {value.__name__}")
            self._members(value, names, library)
        elif not new:
            pass
        elif isinstance(value, type):
            self._leaf(path, f"class {self._class(value) if _written(value) else _name(value)}")
        elif isinstance(value, types.FunctionType):
            self._leaf(path, f"function {self._function(value)}")
        elif isinstance(value, types.BuiltinFunctionType):
            self._builtin(path, value)
        elif library and (
            isinstance(value, (Mapping, list, set))
            or (type(value) not in _PLAIN and not _written(value))
        ):
            self._leaf(path, _name(type(value)))  # tables and caches are their release's
        else:
            self._value(path, value)

    def _members(self, module: types.ModuleType, names: frozenset[str], library: bool) -> None:
        """What code names of a module, such as the functions of `torch.nn.functional`."""
        if not library and module.__name__ in _RANDOM:
            self.random = True
        if _standard(module.__name__):
            return
        if (id(module), id(names)) in self._members_seen:
            return
        self._members_seen.add((id(module), id(names)))
        foreign = module.__name__.partition(".")[0] not in _LIBRARIES
        space = vars(module)
        for name in sorted(names & space.keys()):
            self._global(module.__name__, space, name, names, library or not foreign)

    def _class(self, cls: type) -> str:
        """Writes a class and the code that it may run down; its label."""
        known = self._seen.get(id(cls))
        if known is not None:
            return known
        base = f"<{_name(cls)}>"
        self._visited(base, cls, base)
        label = self._seen[id(cls)]
        if _standard(cls.__module__):
            return label
        lineage = [c for c in cls.__mro__ if c is not object and not _standard(c.__module__)]
        self._leaf(label, " ".join(_name(c) for c in cls.__mro__))
        todo = {"forward", "__call__"} if issubclass(cls, torch.nn.Module) else set[str]()
        for owner in lineage:
            if _root(owner) not in _LIBRARIES:
                self.foreign.append(label)
                todo |= {
                    name
                    for name, value in vars(owner).items()
                    if name not in _CLASS_ITEMS and name not in BOOKKEEPING
                }
            self._checks.append(_same_length(owner))
        done = set[str]()
        while todo:
            name = min(todo)
            todo.discard(name)
            done.add(name)
            home = next((c for c in lineage if name in vars(c)), None)
            if home is None:
                continue
            value = vars(home)[name]
            self._items.append((vars(home), name, value))
            path = f"{label}.{name}"
            functions = list(_functions(value))
            if functions:
                named = [self._function(f) for f in functions]
                self._leaf(path, f"{type(value).__name__} {named}")
                for function in functions:
                    todo |= (_names(function.__code__) | _inner(function)) - done
            elif isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                self._leaf(path, "slot")
            elif _root(home) in _LIBRARIES and type(value) not in _PLAIN:
                self._leaf(path, _name(type(value)))
            else:
                self._value(path, value)
        return label

    # ---- around the model

    def _environment(self, model: torch.nn.Module) -> None:
        self._leaf("python", f"{sys.version_info.major}.{sys.version_info.minor}")
        self._leaf("torch", library_version(torch))
        self._precision = _flags()
        for name, value in self._precision:
            self._leaf(f"torch/{name}", str(value))
        for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            hooks = getattr(torch_module, kind)
            foreign = [hook for hook in hooks.values() if _root(hook) not in _OWN]
            for i, hook in enumerate(foreign):
                self.foreign.append(f"{kind}/{i}")
                self._value(f"{kind}/{i}", hook)
            self._checks.append(_unchanged(hooks, set()))
        chosen = chosen_functions(model)
        for registry, name, function in chosen:
            self._value(f"{type(registry).__name__} {name}", function)
        self._checks.append(lambda: all(r.get(name) is f for r, name, f in chosen))


def _flags() -> tuple[tuple[str, Any], ...]:
    """Flags of precision, which change what the same code computes."""
    return (
        ("matmul", _flag(torch.get_float32_matmul_precision)),
        ("tf32", _flag(lambda: torch.backends.cuda.matmul.allow_tf32)),
        ("cudnn", _flag(lambda: torch.backends.cudnn.allow_tf32)),
        ("fp16", _flag(lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)),
        ("bf16", _flag(lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)),
        ("mkldnn", _flag(_mkldnn_precision)),
        ("dtype", _flag(torch.get_default_dtype)),
    )


def _mkldnn_precision() -> Any:
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul.fp32_precision


def _flag(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, RuntimeError):  # not in this build, or old and new flags are mixed
        return None


_CLASS_ITEMS = frozenset(
    """__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __static_attributes__ __firstlineno__ __slots__
    __match_args__ __dataclass_fields__ __dataclass_params__ __parameters__ __orig_bases__
    __abstractmethods__ _abc_impl __hash__""".split()
)
_is = operator.is_


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _root(value: Any) -> str:
    """The package in which something was written."""
    inner = value
    while isinstance(inner, (functools.partial, types.MethodType)):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    module = getattr(inner, "__module__", None)
    if not isinstance(module, str):
        module = type(inner).__module__
    return module.partition(".")[0]


def _standard(module: Any) -> bool:
    return str(module).partition(".")[0] in sys.stdlib_module_names


def _reduced(value: Any) -> Any:
    """What an object of C is made of, as `copy` and `pickle` ask for it."""
    if isinstance(value, torch.ScriptObject):
        return (value.__getstate__(),)
    reducer = copyreg.dispatch_table.get(type(value))
    return value.__reduce_ex__(2) if reducer is None else reducer(value)


def _written(value: Any) -> bool:
    """Whether something comes from neither Python nor a library whose release is in the name."""
    return not _standard(_root(value)) and _root(value) not in _LIBRARIES


def _equal(a: Any, b: Any) -> bool:
    """Whether two plain values are one; anything else is told by identity."""
    return type(a) is type(b) and type(a) in _PLAIN and bool(a == b)


def _key(key: Any) -> str:
    return f"{type(key).__name__} {key!r}" if type(key) in _PLAIN else _name(type(key))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _offloaded(module: torch.nn.Module, name: str, tensor: Any) -> Any:
    """The map in which accelerate keeps a tensor of a module; None if it lies in the module."""
    where = getattr(module.__dict__.get("_hf_hook"), "weights_map", None)
    if tensor is None or not tensor.is_meta or where is None or name not in where:
        return None
    return where


def _only(now: Mapping[str, Any], keys: Any, values: Any, passing: str, free: set[str]) -> bool:
    """Whether tensors differ only where every forward rewrites them."""
    known = dict(zip(keys, values, strict=True))
    return all(
        value is known.get(name, _MISSING) or (passing and name.endswith(passing)) or name in free
        for name, value in now.items()
    )


def _frozen(value: Any) -> Any:
    """A copy of nested containers, which equals them while nothing in them was replaced."""
    if type(value) in (dict, OrderedDict, defaultdict):
        return {key: _frozen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_frozen(item) for item in value)
    return set(value) if type(value) is set else value


def _unchanged(container: Any, free: set[Any]) -> Callable[[], bool]:
    """Asks whether a container holds the very things that it holds now."""
    if isinstance(container, Mapping):
        known = {key: item for key, item in container.items() if key not in free}

        def same() -> bool:
            if len(container) != len(known) + sum(key in container for key in free):
                return False
            return all(
                (found := container.get(key, _MISSING)) is item or _equal(found, item)
                for key, item in known.items()
            )

        return same
    items = tuple(container)
    if isinstance(container, (set, frozenset)):
        return lambda: container == set(items)

    def same_items() -> bool:
        return len(container) == len(items) and all(
            a is b or _equal(a, b) for a, b in zip(container, items, strict=True)
        )

    return same_items


def _unchanged_cell(cell: types.CellType, content: Any) -> Callable[[], bool]:
    def same() -> bool:
        try:
            found = cell.cell_contents
        except ValueError:
            return content is None
        return found is content or _equal(found, content)

    return same


def _unchanged_slot(value: Any, name: str, content: Any) -> Callable[[], bool]:
    def same() -> bool:
        found = getattr(value, name, _MISSING)
        return found is content or _equal(found, content)

    return same


def _same_length(cls: type) -> Callable[[], bool]:
    space, size = vars(cls), len(vars(cls))
    return lambda: len(space) == size


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions that a class attribute stands for."""
    if isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, property):
        for function in (value.fget, value.fset):
            if function is not None:
                yield from _functions(function)
    elif isinstance(value, functools.cached_property):
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
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if isinstance(content, types.FunctionType):
                todo.append(content)
    return found
