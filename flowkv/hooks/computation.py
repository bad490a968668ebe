"""A model's computation beside its weights: what can be named of it, and why the rest cannot.

A `Walk` goes over the modules of a model and all that these refer to. It knows few kinds of things:
code of known packages as it was released, small code of the user's own (`simple`), numbers, texts,
tensors, and tuples, lists and dicts of them. Of these it writes down *leaves*, a path and a text
each, of which a name is made that is the same in every process. Anything else makes the model
*foreign*: no name says what it computes, so nothing of it may be shared.
"""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import logging
import operator
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch.nn.modules import module as torch_module

from flowkv.hooks.fingerprint import Weights, readable
from flowkv.hooks.simple import BUILTINS, MODULES, codes, names_of, pure, text_of, uses

MISSING: Any = object()
_Read = Callable[[Any], Any]
_CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CONTENT = operator.attrgetter("cell_contents")
_VALUES = operator.methodcaller("values")
_CLASS = operator.attrgetter("__class__")
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
"""Types of values that are compared, not told by identity."""
MOST_VALUES = 4096
"""Values in containers of a model, at most: all are looked at whenever pages become known."""
_ROOT = "model"
_CONTAINERS = (tuple, list, set, frozenset, dict, OrderedDict)

LIBRARIES = frozenset(
    """torch transformers numpy flowkv accelerate peft bitsandbytes torchao optimum hqq
    compressed_tensors gptqmodel awq auto_round kernels flash_attn causal_conv1d mamba_ssm fla
    triton huggingface_hub safetensors tokenizers packaging tqdm regex typing_extensions""".split()
)
"""Packages whose code is what their release says, as long as it is what their files say."""
_CHECKPOINTS = "transformers_modules"
"""Where transformers puts code that came with a checkpoint."""
_COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
_OWN = ("transformers", "accelerate", "flowkv")
"""Their hooks and instance methods move data and record outputs; their releases are in the name."""
_MOVERS = frozenset({"AlignDevicesHook", "SequentialHook", "ModelHook"})
"""Hooks of accelerate's that only move data."""
_DEEP = (
    "torch.nn.modules.",
    "transformers.activations",
    "transformers.integrations.",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.modeling_rope_utils",
    "transformers.models.",
    _CHECKPOINTS,
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
_TEXTS = (torch.dtype, torch.Size, torch.layout, torch.memory_format)
"""Values that are what they say."""
_INERT = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
"""Objects that say nothing about numbers, where a library keeps them."""
_CLASS_ITEMS = frozenset(
    """__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __static_attributes__ __firstlineno__ __slots__
    __match_args__ __dataclass_fields__ __dataclass_params__ __parameters__ __orig_bases__
    __abstractmethods__ _abc_impl __hash__ __slotnames__ __init__ __new__
    __init_subclass__ __del__ __reduce__ __reduce_ex__ __getstate__ __setstate__
    __deepcopy__""".split()
)
"""Attributes of classes that no forward runs."""
_MARKS = frozenset(
    """_is_hf_initialized gradient_checkpointing _gradient_checkpointing_func _require_grads_hook
    _output_capturing_hooks_installed __deepcopy__""".split()
)
"""Attributes that transformers gives to every module; they decide nothing."""
_UNSAID = _MARKS | {"_hf_hook", "_old_forward"} | _STANDARD - {"training", *_TENSORS, "_modules"}
"""Attributes of modules that are in no name."""
_SWITCHED = frozenset({"_attn_implementation_internal", "_experts_implementation_internal"})
"""Settings that change for the time of a call; the name has them as they are between calls."""

_NO_TRANSFORMERS = types.SimpleNamespace(
    BOOKKEEPING=frozenset(),
    CACHES=(),
    PreTrainedConfig=(),
    PreTrainedModel=(),
    chosen_functions=lambda model: [],
    library_release=str,
)


def transformers() -> Any:
    """Return what is known of transformers' releases; of none while it is not loaded.

    Only its own door imports it, and that stands on this module.
    """
    if "transformers" not in sys.modules:
        return _NO_TRANSFORMERS
    return importlib.import_module("flowkv.hooks.huggingface.versions")


class Walk:
    """One look at what a model computes.

    Attributes:
        leaves: Path and text of everything in the name.
        tensors: Parameters, buffers and other tensors, by path.
        foreign: Why no name says what the model computes, as a path and what lies there; the
            first reason only, "" for none.
        own: Code that takes part and is no library's.
        compiled: Parts are compiled by `torch.compile`.
        training: Submodules are in training mode.
        pretrained: Submodules are of transformers, whose release is a part of what they compute.

    Args:
        model: The model.
        passing: Suffix of buffers that every forward rewrites; "" for none.
        offloaded: What was read of tensors in files, by map and name; kept by the caller.
    """

    def __init__(self, model: Any, passing: str, offloaded: dict[Any, tuple[Any, str]]) -> None:
        self.leaves: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.foreign = ""
        self.own: list[str] = []
        self.compiled = self.training = self.pretrained = False
        self._passing, self._offloads = passing, offloaded
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no other object gets an id that was seen
        self._labels: dict[str, int] = {}
        self._spaces: dict[int, tuple[Any, dict[str, Any]]] = {}  # what names meant, by mapping
        self._members: set[tuple[int, frozenset[str]]] = set()
        self._names: set[str] = set()
        self._roots: set[str] = set()
        self._values = 0
        self._passed: list[tuple[Any, str]] = []
        self._configs: list[tuple[str, Any]] = []
        self._inert: list[tuple[str, Any]] = []  # what libraries alone may look at
        # By what reads them: the things that were met, and what was read of them, one value of
        # each or several. All of a kind are read in one go, without a line of Python for each.
        self._ones: dict[_Read, tuple[list[Any], list[Any]]] = {}
        self._many: dict[_Read, tuple[list[Any], list[Any]]] = {}
        self._empty: list[Any] = []  # mappings that must stay empty
        self._watch_one(any, self._empty)
        self._module(_ROOT, model)
        self._environment(model)
        self._releases()
        self._watch_spaces()
        kinds = *self._ones.values(), *self._many.values()
        self._columns = [
            (tuple(kept), [things for things, _ in kept.values()])
            for kept in (self._ones, self._many)
        ]
        self._known = [*itertools.chain(*(known for _, known in kinds)), self]

    @property
    def digest(self) -> str:
        """Hex digest of all leaves."""
        # 1 named pages that were computed wrongly in place of lost ones (SECURITY.md, advisories).
        state = hashlib.sha256(b"flowkv.computation/2")
        for path, text in sorted(self.leaves.items()):
            line = f"{path}\0{text}".encode("utf-8", "surrogatepass")
            state.update(len(line).to_bytes(4, "little") + line)
        return state.hexdigest()

    @functools.cached_property
    def kind(self) -> str:
        """Digest of all leaves but numbers with fractions: how much, not what."""
        state = hashlib.sha256(self.foreign.encode("utf-8", "replace"))
        for path, text in sorted(self.leaves.items()):
            amount = text.startswith("float ") and text not in ("float 0.0", "float -0.0")
            state.update(f"{path}\0{'float' if amount else text}\0".encode("utf-8", "replace"))
        return state.hexdigest()

    def same(self) -> bool:
        """Return whether all that was met is still there; what tensors hold is not read."""
        try:
            if all(map(operator.is_, self._now(), self._known)):
                return True
            return all(map(_alike, self._now(), self._known))
        except Exception:  # something is gone
            return False

    def _now(self) -> Iterator[Any]:
        """Read all that is watched, and at the end what is none of it."""
        ones, many = self._columns
        flat = itertools.chain.from_iterable
        return itertools.chain(flat(map(map, *ones)), flat(flat(map(map, *many))), (self,))

    def settled(self) -> bool:
        """Return whether buffers that forwards rewrite hold what they are made from."""
        return all(_settled(module, name) for module, name in self._passed)

    def forget(self) -> None:
        """Release a model that is gone."""
        held: list[Any] = [self._ones, self._many, self._empty, self._kept, self._passed]
        for each in (*held, self._columns, self._known, self.tensors):
            each.clear()

    # ---- what is watched, and what cannot be named

    def _watch(self, read: Callable[[], Iterable[Any]]) -> None:
        """Compare, whenever it is asked whether all is as it was, the things that are read."""
        self._watch_all(operator.call, read)

    def _watch_one(self, read: _Read, thing: Any) -> None:
        """Compare what is read of a thing."""
        things, known = self._ones.setdefault(read, ([], []))
        things.append(thing)
        known.append(read(thing))

    def _watch_all(self, read: _Read, thing: Any) -> None:
        """Compare the several things that are read of one."""
        things, known = self._many.setdefault(read, ([], []))
        things.append(thing)
        known.extend(read(thing))

    def _watch_mapping(self, held: Mapping[str, Any]) -> None:
        """Compare all that a mapping holds, and its order."""
        self._watch_one(len, held)
        self._watch_all(tuple, held)
        self._watch_all(_VALUES, held)

    def _watch_names(self, space: Any, names: Iterable[str]) -> None:
        """Watch what names mean in a mapping, or that they mean nothing."""
        held = vars(space) if isinstance(space, type) else space
        _, known = self._spaces.setdefault(id(space), (held, {}))
        for name in names:
            if name not in known:
                known[name] = held.get(name, MISSING)

    def _watch_spaces(self) -> None:
        """Watch what names were found to mean."""
        gets, known = self._many.setdefault(operator.call, ([], []))
        for space, meant in self._spaces.values():
            present = [name for name, value in meant.items() if value is not MISSING]
            absent = frozenset(name for name, value in meant.items() if value is MISSING)
            if present:  # with one name, a getter gives no tuple
                gets.append(functools.partial(operator.itemgetter(*present, present[0]), space))
                known += [*map(meant.get, present), meant[present[0]]]
            if absent:
                self._watch_one(operator.call, functools.partial(space.keys().isdisjoint, absent))

    def _reject(self, path: str, why: str) -> None:
        self.foreign = self.foreign or f"{path}: {why}"

    def _visited(self, path: str, what: Any) -> bool:
        """Return whether something was met before, and then is named by where."""
        first = self._seen.get(id(what))
        if first is not None:
            self.leaves[path] = f"=> {first}"
            return True
        self._seen[id(what)] = path
        if path != _ROOT:  # the walk does not keep the model alive
            self._kept.append(what)
        return False

    def _label(self, base: str, what: Any) -> str:
        """A label that no other function or class of this walk has."""
        count = self._labels[base] = self._labels.get(base, 0) + 1
        label = self._seen[id(what)] = base if count == 1 else f"{base}#{count}"
        self._kept.append(what)
        return label

    # ---- modules

    def _module(self, path: str, module: torch.nn.Module) -> None:
        if self._visited(path, module):
            return
        held, cls = module.__dict__, cast("Any", type(module))
        if not all(isinstance(held.get(kind), dict) for kind in _WATCHED):
            self._reject(
                path, f"a {cls.__name__}, compiled by TorchScript or without what modules have"
            )
            self.training |= bool(getattr(module, "training", False))
            return
        self.leaves[path] = f"module {self._class(path, cls)}"
        self.leaves[f"{path}/training"] = str(module.training)
        self.training |= module.training
        compiled = held.get("_compiled_call_impl") is not None or "_orig_mod" in held["_modules"]
        self.compiled |= compiled or hasattr(held.get("forward"), "_torchdynamo_orig_callable")
        books = _keeps_books(cls)
        self.pretrained |= books
        free = self._free(module)
        skipped = (transformers().BOOKKEEPING if books else _MARKS) | _STANDARD | free
        own = [name for name in held if name not in skipped]
        for name in own:
            self._attribute(f"{path}.{name}", module, name, held[name])
        for kind in _TENSORS:
            for name, tensor in held[kind].items():
                if name not in free:
                    self._stored(f"{path}.{name}", module, name, tensor)
        self._hooks(path, held)
        self._watch_module(module, own, free)
        for name, child in held["_modules"].items():
            if child is not None:
                self._module(f"{path}.{name}", child)
        self.leaves[f"{path}/children"] = " ".join(
            name if child is not None else f"{name}-" for name, child in held["_modules"].items()
        )

    def _free(self, module: torch.nn.Module) -> frozenset[str]:
        """Names of a module that a forward rewrites: those of encodings that depend on length."""
        names = [*module.__dict__, *module._buffers]
        if not self._passing or _root(type(module)) not in LIBRARIES:
            return frozenset()
        free = [
            name
            for name in names
            if name.endswith((self._passing, "max_seq_len_cached"))
            and not name.endswith(f"original_{self._passing}")
        ]
        me = weakref.ref(module)
        self._passed += [(me, name) for name in free if name.endswith(self._passing)]
        return frozenset(free)

    def _watch_module(self, module: Any, own: list[str], free: frozenset[str]) -> None:
        held = module.__dict__
        # What is there to be seen: the containers, whether it trains, and its own attributes.
        names = [*_WATCHED, *own]
        if "training" in held:  # a compiled module has it elsewhere
            names.append("training")
        self._watch(functools.partial(operator.itemgetter(*names), held))
        self._watch_one(_CLASS, weakref.proxy(module))
        self._watch_one((lambda d: len(d.keys() - free)) if free else len, held)
        moving = [n for k in _TENSORS for n, t in held[k].items() if _offload(module, n, t)]
        skip = free.union(moving)
        for space in [held[name] for name in _WATCHED]:
            if not space:
                self._empty.append(space)
            elif skip:
                self._watch(functools.partial(_beside, skip, space))
            else:
                self._watch_mapping(space)

    def _attribute(self, path: str, module: torch.nn.Module, name: str, value: Any) -> None:
        if name == "_hf_hook":
            self._mover(path, value)
            return
        if name == "_old_forward" and "_hf_hook" in vars(module):
            return
        placed = _root(value) in ("accelerate", "flowkv")  # around the model's own
        if placed and name == "_call_impl":  # streamed weights
            return
        original = _around(module, value) if name == "forward" and placed else None
        if original is None:
            if name == "forward":
                self.own.append(path)
            self._value(path, value)
        elif getattr(original, "__func__", None) is not type(module).forward:
            self._value(path, original)

    def _mover(self, path: str, hook: Any) -> None:
        """A hook of accelerate's, which only moves data if it is of a known class."""
        cls = type(hook)
        if _root(cls) != "accelerate" or cls.__name__ not in _MOVERS:
            self._reject(path, f"a hook of class {_name(cls)}")
            return
        self.leaves[path] = f"hook {self._class(path, cls)}"
        for i, one in enumerate(getattr(hook, "hooks", ())):
            self._mover(f"{path}[{i}]", one)

    def _stored(self, path: str, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """A parameter or buffer, wherever accelerate keeps it."""
        where = _offload(module, name, tensor)
        if where is None:
            self._value(path, tensor)
        elif (held := where[name]) is where[name]:
            self._value(path, held)
        else:  # read from files anew each time: once is enough
            known = self._offloads.get((id(where), name))
            if known is None or known[0] is not where:
                known = where, Weights().read({"": held})
                self._offloads[id(where), name] = known
            self.leaves[path] = f"offloaded {known[1]}"

    def _hooks(self, path: str, held: Mapping[str, Any]) -> None:
        for kind in _HOOKS:
            others = [(key, hook) for key, hook in held[kind].items() if _root(hook) not in _OWN]
            for i, (key, hook) in enumerate(others):
                self.own.append(f"{path}/{kind}/{i}")
                flags = [flag for flag in _HOOK_FLAGS if key in held[flag]]
                self.leaves[f"{path}/{kind}/{i}/flags"] = " ".join(flags)
                self._value(f"{path}/{kind}/{i}", hook)

    # ---- values

    def _value(self, path: str, value: Any) -> None:
        """Write down a value that code may read, or reject what is of no known kind."""
        try:
            if not self._plain(path, value) and not self._known_object(path, value):
                self._reject(path, f"a {_name(type(value))}")
        except RecursionError:
            self._reject(path, f"a {type(value).__name__} that is nested too deep")
        except Exception as error:  # nothing that is met may keep a model from being served
            self._reject(path, f"a {type(value).__name__} that raises {type(error).__name__}")

    def _plain(self, path: str, value: Any) -> bool:
        """Write down numbers, texts, tensors, modules and containers; False for anything else."""
        kind: Any = type(value)
        if kind in PLAIN:
            self.leaves[path] = f"{kind.__name__} {value!r}"
        elif kind in _CONTAINERS:
            self._container(path, value)
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif kind is torch.device:
            self.leaves[path] = "device"  # the same model has the same name wherever it lies
        elif kind in _TEXTS:
            self.leaves[path] = str(value)
        elif isinstance(value, transformers().PreTrainedConfig):
            self._config(path, value)
        else:
            return False
        return True

    def _known_object(self, path: str, value: Any) -> bool:
        """Write down code, and objects of known packages; False for anything else."""
        kind: Any = type(value)
        if isinstance(value, types.FunctionType):
            self.leaves[path] = f"function {self._function(path, value)}"
            if _genuine(value):
                self._callable(path, value)
        elif isinstance(value, type):
            self.leaves[path] = f"class {self._class(path, value)}"
            self._callable(path, value)
        elif isinstance(value, types.BuiltinFunctionType):
            self._callable(path, value)
            return self._builtin(path, value)
        elif isinstance(value, types.MethodType):
            self._value(f"{path}/function", value.__func__)
            self._value(f"{path}/self", value.__self__)
        elif kind is functools.partial:
            for name in ("func", "args", "keywords"):
                self._value(f"{path}/{name}", getattr(value, name))
        elif isinstance(value, _INERT) or _ours(value):
            self.leaves[path] = _name(kind)
            self._inert.append((path, value))
        elif not self._released(kind) or _standard(kind.__module__):
            return False
        elif isinstance(value, enum.Enum):
            self.leaves[path] = f"{self._class(path, kind)} {value.name}"
        elif _in_c(kind) is object:
            self._object(path, value)
        else:
            return False
        return True

    def _callable(self, path: str, value: Any) -> None:
        """A function or class of a library's: what is not pure, the user's code may not call."""
        if not pure(value) and not self._deep(value):
            self._inert.append((path, value))

    def _object(self, path: str, value: Any) -> None:
        """An object of a known package: its class and its attributes."""
        if self._visited(path, value):
            return
        kind = type(value)
        self.leaves[path] = f"object {self._class(path, kind)}"
        slots = [name for cls in kind.__mro__ for name in _slots(cls)]
        held = getattr(value, "__dict__", {})
        for name in (*held, *slots):
            self._value(f"{path}.{name}", getattr(value, name, None))
        if slots:
            self._watch(lambda: [getattr(value, name, None) for name in slots])
        if held:
            self._watch_mapping(held)

    def _container(self, path: str, value: Any) -> None:
        if self._visited(path, value):
            return
        kind: Any = type(value)
        self._values += len(value)
        if self._values > MOST_VALUES:
            self._reject(path, f"more than {MOST_VALUES:,} values to look at")
            return
        if kind in (set, frozenset):
            if all(type(item) in PLAIN for item in value):
                self.leaves[path] = f"{kind.__name__} {sorted(map(repr, value))}"
                first = frozenset(value)
                self._watch_one(operator.call, lambda: value == first)
            else:
                self._reject(path, f"a {kind.__name__} of objects")
            return
        mapping = issubclass(kind, dict)
        items = list(value.items()) if mapping else list(enumerate(value))
        keys = [key_text(key) for key, _ in items] if mapping else []
        if None in keys:
            self._reject(path, f"a {kind.__name__} whose keys are objects")
            return
        self.leaves[path] = f"{kind.__name__} {keys if mapping else len(items)}"
        for i, (_, item) in enumerate(items):
            self._value(f"{path}[{keys[i] if mapping else i}]", item)
        if mapping:
            self._watch_mapping(value)
        elif kind is list:
            self._watch(lambda: value)

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        kind: Any = type(tensor)
        if not readable(tensor):
            self._reject(path, f"a tensor of class {_name(kind)} that cannot be read")
            return
        if _root(kind) != "torch" and not self._released(kind):
            self._reject(path, f"a tensor of class {_name(kind)}")
        self.tensors[path] = tensor
        self.leaves[path] = "tensor" if _root(kind) == "torch" else f"tensor {_name(kind)}"
        beside = tensor.__dict__
        if beside and not self._visited(f"{path}/beside", tensor):
            books = {*transformers().BOOKKEEPING, "streamed_weight", "_wrapped_in"}
            for name in sorted(beside.keys() - books):
                self._value(f"{path}.{name}", beside[name])
            self._watch_mapping(beside)
        elif not beside:
            self._empty.append(beside)

    def _config(self, path: str, config: Any) -> None:
        if self._visited(path, config):
            return
        library, held = transformers(), vars(config)
        frozen = _unswitched({name: _frozen(value) for name, value in held.items()})
        try:
            text = library.settings(config)
        except Exception:  # some of its settings are for each layer
            text = ""
        self.leaves[path] = f"config {self._class(path, type(config))} {text}"
        for name, value in held.items():
            if (not text or not library.settled(value)) and name not in library.UNIMPORTANT:
                self._value(f"{path}.{name}", value)
        self._configs.append((path, config))

        def same() -> bool:
            if vars(config) == frozen or _unswitched(vars(config)) == frozen:
                return True
            return bool(text) and not self.own and bool(library.settings(config) == text)

        self._watch_one(operator.call, same)

    # ---- code

    def _function(self, path: str, function: types.FunctionType) -> str:
        """Write down a function's code and all that it refers to; return its label."""
        known = self._seen.get(id(function))
        if known is not None:
            return known
        home = str(function.__globals__.get("__name__"))
        library = _genuine(function)
        label = self._label(f"<{home}.{function.__code__.co_qualname}>", function)
        self._watch_all(_CODE, function)
        if function.__kwdefaults__ is not None:
            self._watch_mapping(function.__kwdefaults__)
        if library:
            self._release_of(label, home)
        elif _released_name(home):
            self._reject(label.strip("<>"), "patched")
            return label
        else:
            self.own.append(label)
            self.leaves[label] = text_of(function.__code__)
            if function.__dict__.keys() - {"__wrapped__"}:
                self._reject(path, f"attributes of the function {label}")
        look = self._shipped if library else self._value
        for part in ("__defaults__", "__kwdefaults__"):
            look(f"{label}/{part}", getattr(function, part))
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            content = _content_of(cell)
            self._watch_one(_content_of if content is MISSING else _CONTENT, cell)
            if isinstance(content, types.ModuleType) or content is MISSING:
                if not library:
                    self._reject(f"{path}: closure", f"{name} is a Python module")
            elif library:
                look(f"{label}/{name}", content)
            else:
                self._reached(path, "closure over", f"{label}/{name}", content)
        if not library:
            self._simple(path, label, function)
        elif home.startswith(_DEEP):
            self._globals(function)
        return label

    def _reached(self, path: str, how: str, label: str, value: Any) -> None:
        """Something that a function of the user's reaches: a reason says where the function is."""
        before = self.foreign
        self._value(label, value)
        if self.foreign and not before:
            self.foreign = f"{path}: {how} {self.foreign.partition(': ')[2]} ({label})"

    def _simple(self, path: str, label: str, function: types.FunctionType) -> None:
        """See that all that a function of the user's can reach is in the name."""
        space = function.__globals__
        if getattr(function, "__builtins__", None) is not vars(builtins):
            self._reject(path, f"{label} has builtins of its own")
            return
        names = names_of(function.__code__)
        self._names |= names
        barred = names & (_UNSAID | transformers().BOOKKEEPING)
        if barred:
            self._reject(path, f"{label} reads {min(barred)}")
        for kind, name, chain in uses(function.__code__):
            if kind:
                self._reject(path, f"{label} {kind} {name}".rstrip())
            elif name not in space:
                self._watch_names(space, [name])
                if name not in BUILTINS:
                    self._reject(path, f"{label} uses {name}")
                self._released_builtin(name)
            else:
                self._watch_names(space, [name])
                self._chain(path, label, space[name], name, chain)

    def _chain(self, path: str, label: str, value: Any, name: str, chain: tuple[str, ...]) -> None:
        """A global of a user's function, and what it is asked for if it is a Python module."""
        said = name
        while isinstance(value, types.ModuleType):
            home = value.__name__
            genuine = type(value) is types.ModuleType and sys.modules.get(home) is value
            if home not in MODULES or not genuine or not chain or chain[0] not in vars(value):
                self._reject(path, f"{label} uses the module {home}")
                return
            self._watch_names(vars(value), [chain[0]])
            said, value, chain = f"{home}.{chain[0]}", vars(value)[chain[0]], chain[1:]
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            library = not isinstance(value, types.FunctionType) or _genuine(value)
            if library and not pure(value) and not self._deep(value):
                self._reject(path, f"{label} uses {said}")
                return
        self._reached(path, "global", f"{label}:{said}", value)

    def _deep(self, value: Any) -> bool:
        """Whether code is followed on as a model's own is."""
        module = str(getattr(value, "__module__", ""))
        return module.startswith(_DEEP) or (isinstance(value, type) and not _released_name(module))

    def _shipped(self, path: str, value: Any) -> None:
        """What code of a library refers to: only what was put in its place is looked for."""
        kind: Any = type(value)
        if isinstance(value, types.FunctionType):
            if _genuine(value):
                self.leaves[path] = f"function {self._function(path, value)}"
            elif not _generated(value):
                self._reject(path.replace(">:", ".").strip("<>"), "patched")
        elif isinstance(value, types.BuiltinFunctionType):
            if not self._builtin(path, value) and value.__module__:
                self._release_of(path, value.__module__)
        elif kind in PLAIN:
            self.leaves[path] = f"{kind.__name__} {value!r}"
        elif isinstance(value, type):
            self._shipped_class(path, value)
        elif isinstance(value, types.MethodType):
            self._shipped(path, value.__func__)
        elif kind is functools.partial:
            self._shipped(f"{path}/func", value.func)
            for key, item in (*enumerate(value.args), *value.keywords.items()):
                look = self._value if isinstance(item, torch.Tensor) else self._shipped
                look(f"{path}[{key!r}]", item)
        elif isinstance(value, torch.nn.Module):
            self._class(path, kind)
        elif kind in _CONTAINERS:
            self._table(path, value)
        else:
            self._shipped_class(path, kind)

    def _table(self, path: str, value: Any) -> None:
        """A table of a library's, or defaults: numbers and code, which others may have changed."""
        kind: Any = type(value)
        if len(value) > _TABLE:
            self._reject(path, f"a {kind.__name__} of {len(value):,} values")
        elif kind is tuple or not self._visited(path, value):
            mapping, unordered = issubclass(kind, dict), kind in (set, frozenset)
            entries: Iterable[tuple[Any, Any]] = value.items() if mapping else enumerate(value)
            said = list[str]()
            for key, item in list(entries):
                named = key if isinstance(key, type) else type(key)
                place = "" if unordered else key_text(key) or _name(named)
                if type(item) in PLAIN:
                    said.append(f"{place} {type(item).__name__} {item!r}")
                elif isinstance(item, (types.FunctionType, type, *_CONTAINERS, torch.Tensor)):
                    look = self._value if isinstance(item, torch.Tensor) else self._shipped
                    look(f"{path}[{place}]", item)
            self.leaves[path] = f"{kind.__name__} {sorted(said) if unordered else said}"
            if mapping:
                self._watch_mapping(value)
            elif unordered:
                self._watch_one(functools.partial(operator.eq, frozenset(value)), value)
            elif kind is not tuple:
                self._watch_one(len, value)
                self._watch_all(tuple, value)

    def _shipped_class(self, path: str, cls: Any) -> None:
        self.leaves[path] = f"class {_name(cls)}"
        if not _standard(cls.__module__) and not _released_name(cls.__module__):
            self._release_of(path, cls.__module__)

    def _globals(self, function: types.FunctionType) -> None:
        """What code of a library names, among the globals of its module."""
        space, names = function.__globals__, names_of(function.__code__)
        home = str(space.get("__name__"))
        self._names |= names
        self._watch_names(space, sorted(names & (space.keys() | vars(builtins).keys())))
        for name in sorted(names):
            if name in space:
                self._global(f"<{home}>:{name}", space[name], names)
            elif name in vars(builtins):
                self._released_builtin(name)

    def _global(self, path: str, value: Any, names: frozenset[str]) -> None:
        if path in self.leaves:
            if not isinstance(value, types.ModuleType):
                return
        elif not isinstance(value, types.ModuleType):
            self._shipped(path, value)
            return
        self.leaves[path] = f"python module {value.__name__}"
        if (id(value), names) in self._members:
            return
        self._members.add((id(value), names))
        space = vars(value)
        found = sorted(names & space.keys())
        self._watch_names(space, found)
        for name in found:
            if not isinstance(space[name], types.ModuleType):
                inner = f"<{value.__name__}>:{name}"
                if inner not in self.leaves:
                    self._shipped(inner, space[name])
            elif space[name].__name__ in MODULES and space[name] is not value:
                self._global(f"<{value.__name__}>:{name}", space[name], names)

    def _released_builtin(self, name: str) -> None:
        """See that a builtin is Python's own."""
        value = vars(builtins)[name]
        self._watch_names(vars(builtins), [name])
        own = type(value) in PLAIN or getattr(value, "__module__", "builtins") == "builtins"
        if not own and name not in ("open", "exit", "quit", "copyright", "credits", "license"):
            self._reject(f"<builtins>:{name}", "patched")
        elif isinstance(value, (types.BuiltinFunctionType, type)) and value.__name__ != name:
            if name not in ("EnvironmentError", "IOError", "WindowsError"):
                self._reject(f"<builtins>:{name}", "patched")
        elif isinstance(value, types.FunctionType):
            self._reject(f"<builtins>:{name}", "patched")

    def _builtin(self, path: str, value: Any) -> bool:
        """A function of C; False if it is bound to an object of no known kind."""
        owner = getattr(value, "__self__", None)
        module = str(getattr(value, "__module__", None) or "")
        self.leaves[path] = f"builtin {module}.{value.__qualname__}"
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            root = module.partition(".")[0] or _root(owner)
            return not root or root in LIBRARIES or _standard(root)
        return _root(type(owner)) in LIBRARIES

    def _class(self, path: str, cls: Any) -> str:
        """Write down a class and the code that it may run; return its label."""
        known = self._seen.get(id(cls))
        if known is not None:
            return known
        label = self._label(f"<{_name(cls)}>", cls)
        if _of_python(cls):
            return label
        lineage = [c for c in cls.__mro__ if not _of_python(c)]
        self.leaves[label] = " ".join(_name(c) for c in cls.__mro__)
        todo = {"forward", "__call__"} if issubclass(cls, torch.nn.Module) else set[str]()
        for owner in lineage:
            if self._released(owner):
                self._release_of(label, owner.__module__)
                if not issubclass(owner, torch.nn.Module):
                    todo |= vars(owner).keys() - _CLASS_ITEMS
                continue
            if not issubclass(owner, torch.nn.Module) or type(owner) is not type:
                self._reject(path, f"the class {_name(owner)}")
                return label
            self.own.append(label)
            todo |= {"extra_repr", "__repr__", "__str__"}
            self._watch_one(_size, owner)
            todo |= {n for n in vars(owner) if n.startswith("__") and n not in _CLASS_ITEMS}
            todo |= {"__slots__"} & vars(owner).keys()
        named = set[str]().union(*map(vars, lineage)) - (_CLASS_ITEMS - {"__slots__"})
        done, todo = set[str](), todo & named
        while todo:
            name = min(todo)
            done.add(name)
            home = next(c for c in lineage if name in vars(c))
            todo |= self._member(path, f"{label}.{name}", home, name) & named
            todo -= done
        return label

    def _member(self, path: str, label: str, home: Any, name: str) -> set[str]:
        """An attribute of a class; returns the names that its code mentions."""
        value = vars(home)[name]
        self._watch_names(home, [name])
        library = self._released(home)
        functions = list(_functions(value))
        mentioned = set[str]()
        if functions:
            found = []
            for function in functions:
                if library and not _genuine(function) and not _generated(function):
                    self._reject(label.strip("<>"), "patched")
                    continue
                if not _generated(function):
                    found.append(self._function(path, function))
                    mentioned |= names_of(function.__code__) | _inner(function)
            self.leaves[label] = f"{type(value).__name__} {found}"
        elif name == "__slots__" and not library:
            self._reject(path, f"slots of the class {_name(home)}")
        elif library:
            if type(value) in PLAIN:
                self.leaves[label] = f"{type(value).__name__} {value!r}"
        elif name != "__slots__":
            self._value(label, value)
        return mentioned

    # ---- packages

    def _released(self, cls: Any) -> bool:
        """Whether a class is of a package whose code is what its release says."""
        return _of_python(cls) or (_released_name(cls.__module__) and not _standard(cls.__module__))

    def _release_of(self, path: str, module: str) -> None:
        """Note a package that takes part: its release, or its files, are in the name."""
        root = module.partition(".")[0]
        if _standard(module):
            return
        if root != _CHECKPOINTS:
            self._roots.add(root)
            return
        commit = _COMMIT.search(module) or _COMMIT.search(str(_file_of(module)))
        if commit is None:
            self._reject(path, f"{module}: code of a checkpoint that was loaded without a commit")
        self.leaves[f"<{module}>/text"] = f"{commit and commit[0]} {_text_of(module)}"

    def _releases(self) -> None:
        if self.own and self._inert:
            path, value = self._inert[0]
            named = hasattr(value, "__qualname__")
            self._reject(path, f"{_name(value)}" if named else f"a {_name(type(value))}")
        for root in sorted(self._roots - {"flowkv"}):
            release = _release(root)
            self.leaves[f"release {root}"] = release
            if not release:
                self._reject(root, "a package that names no release of it")
        if self.own:  # which may read what no code of transformers' does
            for path, config in self._configs:  # grows: configurations hold others
                for name in sorted(vars(config).keys() - _SWITCHED):
                    self._value(f"{path}.{name}", vars(config)[name])

    def _environment(self, model: torch.nn.Module) -> None:
        self.leaves["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        self._roots.add("torch")
        for name, value in _flags()[:-1]:
            self.leaves[f"torch/{name}"] = str(value)
        self._watch_one(operator.call, _flags)
        for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            hooks = getattr(torch_module, kind)
            for i, hook in enumerate(hook for hook in hooks.values() if _root(hook) not in _OWN):
                self.own.append(f"{kind}/{i}")
                self._value(f"{kind}/{i}", hook)
            self._watch(functools.partial(list, hooks.values()))
        every = vars(torch.Tensor)
        self._watch_one(len, every)
        named = [n for n in every if n in self._names or n.startswith("__")]
        for name in sorted(set(named) - _CLASS_ITEMS):
            own = _TENSOR.get(name) is every[name] and _root(every[name]) in ("torch", "builtins")
            if not own and isinstance(every[name], types.FunctionType):
                own = _genuine(every[name])
            if not own:
                self._reject(f"torch.Tensor.{name}", "patched")
            self._watch_names(torch.Tensor, [name])
        overrides = _overrides()
        if overrides:
            self._reject(
                f"torch.library: {min(overrides)}", "an override of an operator of torch's"
            )
        library = transformers() if self.pretrained else _NO_TRANSFORMERS
        for cls in library.CACHES:  # FlowKV's own stand in for theirs
            for owner in [c for c in cls.__mro__ if "update" in vars(c)]:
                self._member(_name(cls), f"<{_name(owner)}>.update", owner, "update")
        for registry, name, function in library.chosen_functions(model):
            self._value(f"{type(registry).__name__} {name}", function)
            self._watch_one(registry.get, name)


_TENSOR = dict(vars(torch.Tensor))
"""What every tensor can do, as torch brings it."""
_TABLE = 256
"""Values in a table of a library's that code of a model reads, at most."""
_TINY, _HALF = sys.float_info.min, 0.5


_FLAGS: dict[str, Callable[[], Any]] = {
    "matmul": torch.get_float32_matmul_precision,
    "tf32": functools.partial(getattr, torch.backends.cuda.matmul, "allow_tf32"),
    "cudnn": functools.partial(getattr, torch.backends.cudnn, "allow_tf32"),
    **{
        kind: functools.partial(
            getattr, torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction"
        )
        for kind in ("fp16", "bf16")
    },
    "mkldnn": functools.partial(
        operator.attrgetter("matmul.fp32_precision"), torch.backends.mkldnn
    ),
    "dtype": torch.get_default_dtype,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "fill": functools.partial(
        getattr, torch.utils.deterministic, "fill_uninitialized_memory", None
    ),
}
"""The switches that change what the same code computes."""


def _flags() -> tuple[tuple[str, Any], ...]:
    """Read the switches, and how many operators have other code; like readings are one object.

    A switch is None where a build lacks it, or old and new ones are mixed.
    """
    found: list[tuple[str, Any]] = [("denormals", _TINY * _HALF != 0.0)]  # of the calling thread
    for name, read in _FLAGS.items():
        try:
            found.append((name, read()))
        except (AttributeError, RuntimeError):
            found.append((name, None))
    flags = *found, ("overrides", len(torch.library._impls))
    return _READINGS.setdefault(flags, flags)


_READINGS: dict[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]] = {}


def _overrides() -> set[str]:
    """Operators of torch's that Python code computes otherwise; torch has some for other devices.

    One that was seen counts for good: torch may forget one that is made again.
    """
    found = [name for name in torch.library._impls if name.startswith("aten/")]
    _SEEN.update(
        n for n in found if not n.startswith("aten/_") and n.rpartition("/")[2] not in _APART
    )
    return _SEEN


_SEEN: set[str] = set()


_APART = frozenset({"Meta", "MPS", "AutogradMeta", "Python", "Functionalize"})


# ---- what is a library's own


@functools.cache
def _standard(module: Any) -> bool:
    """Whether a module is Python's own, and no file of the user's that is called like one."""
    root = str(module).partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or _STANDARD_PLACES[0]
    return root in sys.stdlib_module_names and str(file).startswith(_STANDARD_PLACES)


_STANDARD_PLACES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


@functools.cache
def _released_name(module: str) -> bool:
    root = str(module).partition(".")[0]
    return root in LIBRARIES or root == _CHECKPOINTS or (root != "__main__" and _standard(root))


@functools.cache
def _codes_of(module: str) -> Mapping[str, tuple[types.CodeType, ...]]:
    """The code of a library's file by qualified name, read anew."""
    found: dict[str, tuple[types.CodeType, ...]] = {}
    try:
        loader: Any = sys.modules[module].__spec__.loader  # type: ignore[union-attr]
        for code in codes(loader.get_code(module)):
            found[code.co_qualname] = (*found.get(code.co_qualname, ()), code)
    except Exception:  # no file, or none with code
        return {}
    return found


_GENUINE: dict[int, types.CodeType] = {}
"""Code that was found in its file, by id; kept, so that no other code gets that id."""


def _genuine(function: types.FunctionType) -> bool:
    """Return whether a function is a library's or Python's, as its file says it."""
    space: Any = function.__globals__
    home = str(space.get("__name__"))
    module = sys.modules.get(home)
    if module is None or vars(module) is not space or not _released_name(home):
        return False
    code = function.__code__
    if _GENUINE.get(id(code)) is code:
        return True
    if code not in _codes_of(home).get(code.co_qualname, ()):
        return False
    _GENUINE[id(code)] = code
    return True


def _generated(function: types.FunctionType) -> bool:
    """Whether Python made a method of a class, as for a dataclass."""
    code, space = function.__code__, function.__globals__
    home = sys.modules.get(str(space.get("__name__")))
    made = code.co_filename.startswith("<") and code.co_name.startswith("__")
    return made and home is not None and vars(home) is space and _released_name(home.__name__)


def _root(value: Any) -> str:
    """The package in which something was written; "" for what only says that it is a library's."""
    inner = value
    while isinstance(inner, (functools.partial, types.MethodType)):
        if isinstance(inner, types.MethodType):
            kind = type(inner.__self__)  # a door, whatever counts or traces what its class does
            if _ours(inner.__self__) and any(inner.__func__ is one for one in vars(kind).values()):
                return "flowkv"
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    if isinstance(inner, types.FunctionType):
        return str(inner.__globals__.get("__name__")).partition(".")[0] if _genuine(inner) else ""
    module = getattr(inner, "__module__", None)
    if not isinstance(module, str):
        module = type(inner).__module__
    return module.partition(".")[0]


def _ours(value: Any) -> bool:
    """Whether it is a cache or a part of one, which says nothing about what a model computes."""
    kind: Any = type(value)
    if kind.__module__.partition(".")[0] != "flowkv":
        return False
    made: Any = getattr(kind, "__dataclass_params__", None)
    frozen = made is not None and made.frozen
    return not (frozen or isinstance(value, (torch.nn.Module, tuple, enum.Enum, msgspec.Struct)))


@functools.cache
def _release(root: str) -> str:
    """The release of a package."""
    loaded = [sys.modules.get(name) for name in (root, f"{root}.quanto")]
    for module in loaded:
        if found := getattr(module, "__version__", ""):
            return str(found).partition("+")[0]
    try:
        return importlib.metadata.version(root.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


@functools.cache
def _text_of(module: str) -> str:
    """Digest of the text of all files that lie beside a module's."""
    state = hashlib.sha256()
    for path in sorted(Path(str(_file_of(module))).parent.glob("*.py")):
        text = path.read_bytes()
        state.update(f"{path.name} {len(text)}\0".encode() + text)
    return state.hexdigest()


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _of_python(cls: Any) -> bool:
    """Whether a class is of Python's own library, which has no modules of torch's."""
    return _standard(cls.__module__) and not issubclass(cls, torch.nn.Module)


def _keeps_books(cls: type) -> bool:
    """Whether attributes of a class have the meanings that `BOOKKEEPING` says."""
    return issubclass(cls, transformers().PreTrainedModel) or _root(cls) == "peft"


def _in_c(cls: type) -> Any:
    """The class in C that a class is built on, in which its objects may keep more."""
    return next((c for c in cls.__mro__ if _own_new(c)), object)


def _own_new(cls: type) -> bool:
    new = vars(cls).get("__new__")
    return isinstance(new, types.BuiltinFunctionType) and new.__self__ is cls


def _size(cls: type) -> int:
    """How many attributes a class has, but what Python notes when one is copied first."""
    return len(vars(cls)) - ("__slotnames__" in vars(cls))


def _slots(cls: type) -> tuple[str, ...]:
    return tuple(n for n, v in vars(cls).items() if isinstance(v, types.MemberDescriptorType))


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


def _inner(function: types.FunctionType) -> set[str]:
    """Names that functions inside a decorated one refer to."""
    found, todo, seen = set[str](), [function], set[int]()
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        found |= names_of(current.__code__)
        for cell in current.__closure__ or ():
            if isinstance(content := _content_of(cell), types.FunctionType):
                todo.append(content)
    return found


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# ---- what accelerate, and encodings that depend on length, do to modules


def _around(module: torch.nn.Module, forward: Any) -> Any:
    """The forward that one of accelerate's, or of FlowKV's, stands in for; None if it does not."""
    own = vars(module).get("_old_forward")
    return (
        own if own is not None else getattr(getattr(forward, "__self__", forward), "around", None)
    )


def _offload(module: torch.nn.Module, name: str, tensor: Any) -> Any:
    """The map in which accelerate keeps a tensor of a module; None if it lies in the module."""
    where = getattr(module.__dict__.get("_hf_hook"), "weights_map", None)
    if tensor is None or not tensor.is_meta or where is None or name not in where:
        return None
    return where


def _beside(names: frozenset[str], held: Mapping[str, Any]) -> list[Any]:
    """Return what a mapping holds beside some names."""
    return [each for name, value in held.items() if name not in names for each in (name, value)]


def _settled(module: weakref.ref[Any], name: str) -> bool:
    """Whether frequencies are those that they are made from, or the next forward makes them so."""
    held = module()
    if held is None or "long_" in name:
        return True
    prefix = name.removesuffix("inv_freq")
    kinds = getattr(held, "rope_type", "")
    kind = kinds.get(prefix.rstrip("_"), "") if isinstance(kinds, dict) else kinds
    if kind == "longrope":
        return True  # each forward chooses by its own length
    now = getattr(held, name, None)
    first = getattr(held, f"{prefix}original_inv_freq", None)
    grown = getattr(held, f"{prefix}max_seq_len_cached", 0) or 0
    most = getattr(held, "original_max_seq_len", 0) or 0
    return first is None or now is None or grown > most or torch.equal(now, first)


# ---- comparing


def key_text(key: Any) -> str | None:
    """All that a key of a mapping is, as text; None for objects, which have more to them."""
    kind = type(key)
    if kind in PLAIN:
        return f"{kind.__name__} {key!r}"
    if kind is tuple:
        parts = [key_text(item) for item in key]
        return None if None in parts else f"tuple {parts!r}"
    return repr(key) if kind in (torch.dtype, torch.device, torch.Size) else None


def _alike(a: Any, b: Any) -> bool:
    """Whether two readings gave the very same thing, or equal numbers or texts."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, frozenset, dict):
        if type(a) is tuple:
            return len(a) == len(b) and all(map(_alike, a, b))
        if type(a) is dict:  # default values by name
            return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
        return bool(a == b)
    return type(a) in (*PLAIN, *_TEXTS) and (bool(a == b) or repr(a) == repr(b) == "nan")


def _unswitched(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are between calls."""
    lasting = transformers().lasting
    own = {name: lasting(held[name]) for name in _SWITCHED if isinstance(held.get(name), str)}
    return {**held, **own}


def _frozen(value: Any) -> Any:
    """A copy of nested containers, which equals them while nothing in them was replaced."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_frozen(item) for item in value)
    return set(value) if type(value) is set else value
