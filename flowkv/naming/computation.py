"""Name of a model's computation beside its weights, and the reasons why some models have none.

A `Walk` visits the modules of a model and all objects that these refer to. It accepts few kinds of
objects: released code of known packages, numbers, texts, tensors, and tuples, lists and dicts of
them. Of these it records *leaves*, a path and a text each, and the name is a digest of all leaves,
the same in every process. Any other object, as code of the user's, makes the model *foreign*: no
name covers its computation, so none of its pages may be shared unless the user names it.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import inspect
import itertools
import logging
import operator
import os
import random
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
import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from flowkv.naming.fingerprint import TAKE, Weights, places_of, pointers_of, readable, versions_of

MISSING: Any = object()
_Read = Callable[[Any], Any]
_Pair = tuple[list[Any], list[Any]]
_CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CONTENT = operator.attrgetter("cell_contents")
_VALUES = operator.methodcaller("values")
_INSTANCE = operator.attrgetter("__class__", "__dict__")
_LINEAGE = operator.attrgetter("__mro__")
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
"""Types of values that are compared by value, not by identity."""
MOST_VALUES = 4096
"""Most values in containers of a model: all are compared whenever pages are published."""
_ROOT = "model"
_CONTAINERS = (tuple, list, set, frozenset, dict, OrderedDict)

LIBRARIES = frozenset(
    """torch transformers numpy flowkv accelerate peft bitsandbytes torchao optimum hqq
    compressed_tensors gptqmodel awq auto_round kernels flash_attn causal_conv1d mamba_ssm fla
    triton huggingface_hub safetensors tokenizers packaging tqdm regex typing_extensions
    kvpress""".split()
)
"""Packages with a release that stands for their code, while loaded code agrees with their files."""
_CHECKPOINTS = "transformers_modules"
"""Package in which transformers imports the code of checkpoints."""
_UNRELEASED = re.compile(r"(dev|a)\d{0,5}$")
"""End of a version that many commits share, such as `2.6.0a0`; nightly ones end with a date."""
_COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
_OWN = ("transformers", "accelerate", "flowkv")
"""Packages with hooks that only move data and record outputs; their releases are in the name."""
_MOVERS = frozenset({"AlignDevicesHook", "SequentialHook", "ModelHook"})
"""Classes of accelerate's hooks that only move data."""
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
"""Library modules: the globals of their functions are visited, because users patch them there."""
_DEEP_MODULES = frozenset(
    """torch torch.nn torch.nn.functional torch.fft torch.linalg torch.special torch.nn.modules
    math""".split()
)
"""Python modules whose members are visited where a visited module holds them."""
_STANDARD = frozenset(vars(torch.nn.Module()))
_READ = (torch.Tensor, torch.nn.Module)
"""Types of class members that a forward may find by a name that it builds (`get_parameter`)."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_TENSORS = ("_parameters", "_buffers")
_WATCHED = (*_HOOKS, *_TENSORS, "_modules")
_TEXTS = (torch.dtype, torch.Size, torch.layout, torch.memory_format)
"""Types of values with a text that is all of the value."""


def _cached(value: Any) -> list[Any]:
    """Return the function of an `lru_cache`, if its `__wrapped__`, which may be set, says so."""
    held = [each for each in gc.get_referents(value) if callable(each)]
    functions = [each for each in held if not isinstance(each, type)]  # results, the function
    return [each for each in functions[-1:] if each is value.__wrapped__]


_PARTS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    functools._lru_cache_wrapper: _cached,
    functools.partial: operator.attrgetter("func", "args", "keywords"),
    types.MethodType: operator.attrgetter("__func__", "__self__"),
    contextlib._GeneratorContextManager: operator.attrgetter("func", "args", "kwds"),
}
"""Types of objects of libraries around others, and how to read these."""
_SLOTS_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
"""Types of functions in C that are fully identified by their class and name."""
_OF_NUMPY = {id(f): f for f in vars(np).values() if isinstance(f, (np.ufunc, type(np.sort)))}
"""NumPy's own functions of types of which a user may make others, of Python code."""
_STILL = (object, os._Environ, inspect.Signature)
"""Types of objects that library code holds and that do not change what a model computes."""
_INERT = (logging.Logger, type(threading.Lock()), type(threading.RLock()), random.Random)
"""Types of objects that do not change results, where a library holds them."""
_CLASS_ITEMS = frozenset(
    """__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __static_attributes__ __firstlineno__ __slots__
    __match_args__ __dataclass_fields__ __dataclass_params__ __dataclass_transform__ __parameters__
    __orig_bases__ __validators__ __class_validators__ __abstractmethods__ _abc_impl __hash__
    __slotnames__ __init__ __new__ __init_subclass__ __del__ __reduce__ __reduce_ex__ __getstate__
    __setstate__ __deepcopy__ ___needs_generation_tag_patch""".split()
)
"""Attributes of classes that no forward runs; the last one is of the compiler's."""
_MARKS = frozenset(
    """_is_hf_initialized gradient_checkpointing _gradient_checkpointing_func _require_grads_hook
    _output_capturing_hooks_installed __deepcopy__ _is_torch_compile
    _is_accelerate_prepared""".split()
)
"""Attributes that libraries set on any module, without an effect on results."""
_OF_TENSORS = frozenset({"streamed_weight", "_wrapped_in", "_is_buffer", "persistent"})
"""Attributes of tensors, without an effect on results; torch drops those of buffers in `to`."""
_SWITCHED = frozenset({"_attn_implementation_internal", "_experts_implementation_internal"})
"""Settings that change during a call; the name has their values between calls."""

_NO_TRANSFORMERS = types.SimpleNamespace(
    BOOKKEEPING=frozenset(),
    CACHES=(),
    PreTrainedConfig=(),
    PreTrainedModel=(),
    chosen_functions=lambda model: [],
)


def transformers() -> Any:
    """Return the module `versions` of the Hugging Face door, or a stand-in without transformers.

    It is imported late: only that door imports transformers, and the door imports this module.
    """
    if "transformers" not in sys.modules:
        return _NO_TRANSFORMERS
    return importlib.import_module("flowkv.hooks.huggingface.versions")


class Walk:
    """Record of everything that a model's computation depends on, at one moment.

    Attributes:
        leaves: Path and text of everything in the name.
        tensors: Parameters, buffers and other tensors, by path.
        foreign: Why no name covers the model's computation, as a path and the object there; the
            first reason only, "" for none.
        own: Paths of hooks and forwards of single modules, which may be any code.
        compiled: Parts are compiled by `torch.compile`.
        training: Submodules are in training mode.
        pretrained: Submodules are of transformers; their results depend on its release.

    Args:
        model: The model.
        passing: Suffix of buffers that every forward rewrites; "" for none.
        offloaded: Digests of tensors in files, by map and name; kept by the caller.
    """

    def __init__(self, model: Any, passing: str, offloaded: dict[Any, tuple[Any, str]]) -> None:
        self.leaves: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.foreign = ""
        self.own: list[str] = []
        self.compiled = self.training = self.pretrained = False
        self._passing, self._offloads = passing, offloaded
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []  # keeps visited objects alive, so that ids stay unique
        self._labels: dict[str, int] = {}
        self._spaces: dict[int, tuple[Any, dict[str, Any]]] = {}  # values of names, by mapping
        self._members: set[tuple[int, frozenset[str]]] = set()
        self._names: set[str] = set()  # that visited code mentions
        self._owners: dict[Any, str] = {}  # visited classes and their bases, with labels
        self._roots: set[str] = set()
        self._values = 0
        self._passed: list[tuple[Any, str]] = []
        # By reader, and whether the object has words that change with it: the visited objects, and
        # the values that the reader returned, one or several for each. All objects of a reader are
        # read at once, without a line of Python for each.
        self._ones: dict[tuple[_Read, bool], _Pair] = {}
        self._many: dict[tuple[_Read, bool], _Pair] = {}
        versions = self._versions = list[int]()  # addresses; then pointers, with what they hold
        pointers = self._pointers = list[tuple[int, int]]()
        self._module(_ROOT, model)
        self._environment(model)
        self._releases()
        self._watch_spaces()
        self._places = places_of([*dict.fromkeys(versions), *(at for at, _ in pointers)])
        self._held = np.array([value for _, value in pointers], np.int64)
        del self._versions, self._pointers
        self._words: Any = None  # while all words are these, the worded objects are the same
        self._columns = [self._column(worded) for worded in (False, True)]

    @property
    def digest(self) -> str:
        """Return the hex digest of all leaves."""
        # Earlier ones named pages that were computed wrongly (SECURITY.md, advisories).
        state = hashlib.sha256(b"flowkv.computation/9")
        for path, text in sorted(self.leaves.items()):
            line = f"{path}\0{text}".encode("utf-8", "surrogatepass")
            state.update(len(line).to_bytes(4, "little") + line)
        return state.hexdigest()

    @functools.cached_property
    def kind(self) -> str:
        """Return a digest of all leaves, in which nonzero floats count without their values."""
        state = hashlib.sha256(self.foreign.encode("utf-8", "replace"))
        for path, text in sorted(self.leaves.items()):
            amount = text.startswith("float ") and text not in ("float 0.0", "float -0.0")
            state.update(f"{path}\0{'float' if amount else text}\0".encode("utf-8", "replace"))
        return state.hexdigest()

    def same(self) -> bool:
        """Return whether all watched objects are the same; the content of tensors is not read."""
        try:
            words = TAKE(self._places)
            if self._words is None or not np.array_equal(words, self._words):
                self._words = None
                alike = self._compare(worded=True)
                if alike is None:
                    return False
                # Versions of before the comparison: the next look sees what changed meanwhile. No
                # words stand for an object that is equal only, for it may change unseen.
                if alike is operator.is_:
                    words[len(words) - len(self._held) :] = self._held
                    self._words = words
            return self._compare(worded=False) is not None
        except Exception:  # a watched object or attribute is gone
            return False

    def _compare(self, *, worded: bool) -> Callable[[Any, Any], bool] | None:
        """Return how the watched values of objects with words, or of those without, are the same.

        Returns:
            `operator.is_`, `_alike` if some are equal only, or None if some differ.
        """
        ones, many, known = self._columns[worded]
        flat = itertools.chain.from_iterable
        for alike in (operator.is_, _alike):
            values = itertools.chain(flat(map(map, *ones)), flat(flat(map(map, *many))))
            # With an end mark, a longer reading differs.
            if all(map(alike, itertools.chain(values, (self,)), known)):
                return alike
        return None

    def _column(self, worded: bool) -> tuple[_Pair, _Pair, list[Any]]:
        """Return readers and objects, with one and with several values, and all values known."""
        chosen = [
            [(read, *column) for (read, has), column in kept.items() if has == worded]
            for kept in (self._ones, self._many)
        ]
        known = itertools.chain(*(known for kinds in chosen for *_, known in kinds))
        ones, many = (([r for r, *_ in kinds], [t for _, t, _ in kinds]) for kinds in chosen)
        return ones, many, [*known, self]

    def settled(self) -> bool:
        """Return whether buffers that forwards rewrite have the values of a fresh model."""
        return all(_settled(module, name) for module, name in self._passed)

    def forget(self) -> None:
        """Release all visited objects, after the model is gone."""
        self._places, self._words = self._places[:0], None  # before the objects there
        held: list[Any] = [self._ones, self._many, self._kept, self._passed]
        for each in (*held, self._columns, self.tensors):
            each.clear()

    # ---- watched values, and rejected ones

    def _watch(self, read: Callable[[], Iterable[Any]]) -> None:
        """Watch the values that a function returns: `same` calls it again and compares them."""
        self._watch_all(operator.call, read)

    def _watch_one(self, read: _Read, thing: Any) -> None:
        """Watch the value that `read` returns of an object."""
        self._keep(self._ones, read, thing, [read(thing)])

    def _watch_all(self, read: _Read, thing: Any) -> None:
        """Watch the values that `read` returns of an object."""
        self._keep(self._many, read, thing, read(thing))

    def _keep(self, kept: dict[Any, _Pair], read: _Read, thing: Any, values: Iterable[Any]) -> None:
        """Keep an object and its values, beside those with words if it has any."""
        values = [*values]
        versions = _versions_of(read, thing)
        pointers = pointers_of(thing, values) if read in (_CODE, _CONTENT, _INSTANCE) else []
        self._versions += versions
        self._pointers += pointers
        things, known = kept.setdefault((read, bool(versions or pointers)), ([], []))
        things.append(thing)
        known += values

    def _watch_mapping(self, held: Mapping[str, Any]) -> None:
        """Watch all keys and values of a mapping, and their order."""
        self._watch_one(len, held)
        if held:
            self._watch_all(tuple, held)
            self._watch_all(_VALUES, held)

    def _watch_names(self, space: Any, names: Iterable[str]) -> None:
        """Record the values of names in a mapping, or their absence, for `_watch_spaces`."""
        held = vars(space) if isinstance(space, type) else space
        _, known = self._spaces.setdefault(id(space), (held, {}))
        for name in names:
            known.setdefault(name, held.get(name, MISSING))

    def _watch_spaces(self) -> None:
        """Watch all recorded values of names."""
        for space, meant in self._spaces.values():
            present = [name for name, value in meant.items() if value is not MISSING]
            absent = frozenset(name for name, value in meant.items() if value is MISSING)
            if present:  # with one name, a getter gives no tuple
                get = functools.partial(operator.itemgetter(*present, present[0]), space)
                values = [*map(meant.get, present), meant[present[0]]]
                self._keep(self._many, operator.call, get, values)
            if absent and isinstance(space, dict):  # one that changes often has no words for this
                self._watch_one(operator.call, functools.partial(space.keys().isdisjoint, absent))
            elif absent:
                self._watch_one(operator.call, functools.partial(_lacks, absent, space))

    def _reject(self, path: str, why: str) -> None:
        self.foreign = self.foreign or f"{path}: {why}"

    def _visited(self, path: str, what: Any) -> bool:
        """Return whether an object was visited before; its leaf then refers to the first path."""
        first = self._seen.get(id(what))
        if first is not None:
            self.leaves[path] = f"=> {first}"
            return True
        self._seen[id(what)] = path
        if path != _ROOT:  # the walk does not keep the model alive
            self._kept.append(what)
        return False

    def _label(self, base: str, what: Any) -> str:
        """Return a label that no other function or class of this walk has."""
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
            self._reject(path, f"a {cls.__name__}, compiled by TorchScript or unlike other modules")
            self.training |= bool(getattr(module, "training", False))
            return
        self.leaves[path] = f"module {self._class(path, cls)}"
        training = module.training and not _modeless(module)
        self.leaves[f"{path}/training"] = str(training)
        self.training |= training
        compiled = held.get("_compiled_call_impl") is not None or "_orig_mod" in held["_modules"]
        self.compiled |= compiled or hasattr(held.get("forward"), "_torchdynamo_orig_callable")
        books = issubclass(cls, transformers().PreTrainedModel) or _root(cls) == "peft"
        self.pretrained |= books
        free = self._free(module)
        skipped = _MARKS.union(_STANDARD, free, transformers().BOOKKEEPING if books else ())
        own = [name for name in held if name not in skipped]
        for name in own:
            self._attribute(f"{path}.{name}", module, name, held[name])
        for kind in _TENSORS:
            for name, tensor in held[kind].items():
                if name not in free:
                    self._stored(f"{path}.{name}", module, name, tensor)
        self._hooks(path, held)
        self._watch_module(path, module, own, free)
        for name, child in held["_modules"].items():
            if child is not None:
                self._module(f"{path}.{name}", child)
        self.leaves[f"{path}/children"] = " ".join(
            name if child is not None else f"{name}-" for name, child in held["_modules"].items()
        )

    def _free(self, module: torch.nn.Module) -> frozenset[str]:
        """Return the attributes of a module that forwards rewrite, as RoPE by length does."""
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

    def _watch_module(self, path: str, module: Any, own: list[str], free: frozenset[str]) -> None:
        held = module.__dict__
        # The containers, the mode and the module's own attributes are compared.
        names = [*_WATCHED, *own]
        if "training" in held and not _modeless(module):  # a compiled one stores it elsewhere
            names.append("training")
        self._watch(functools.partial(operator.itemgetter(*names), held))
        self._watch_all(_INSTANCE, weakref.proxy(module) if path == _ROOT else module)
        self._watch_one((lambda d: len(d.keys() - free)) if free else len, held)
        moving = [n for k in _TENSORS for n, t in held[k].items() if _offload(module, n, t)]
        skip = free.union(moving)
        for space in [held[name] for name in _WATCHED]:
            if space and skip:
                self._watch(functools.partial(_beside, skip, space))
            else:
                self._watch_mapping(space)

    def _attribute(self, path: str, module: torch.nn.Module, name: str, value: Any) -> None:
        if name == "_hf_hook":
            self._mover(path, value)
            return
        placed = _root(value) in ("accelerate", "flowkv")  # a wrapper of the model's own
        inner = _around(module, value) if name == "forward" and placed else None
        given = value if inner is None else inner
        same = isinstance(given, types.MethodType) and given.__self__ is module
        if same and given.__func__ is getattr(type(module), name, None):
            return  # what the class gives, as where a patch was taken back
        if name == "forward" and inner is None:
            self._called(path, value)
        elif not (
            (name == "_old_forward" and "_hf_hook" in vars(module))
            or (name == "_call_impl" and placed)  # streamed weights
            or (name == "_flat_weight_refs" and isinstance(module, torch.nn.RNNBase))  # to its own
        ):
            self._value(path, given)

    def _mover(self, path: str, hook: Any) -> None:
        """Record a hook of accelerate's, or reject one that may do more than move data."""
        cls = type(hook)
        changed = any(callable(value) for value in vars(hook).values())
        if _root(cls) != "accelerate" or cls.__name__ not in _MOVERS or changed:
            self._reject(path, f"a hook of class {_name(cls)}")
            return
        self.leaves[path] = f"hook {self._class(path, cls)}"
        if hasattr(hook, "hooks"):
            self._watch_one(operator.attrgetter("hooks"), hook)
        for i, one in enumerate(getattr(hook, "hooks", ())):
            self._mover(f"{path}[{i}]", one)

    def _stored(self, path: str, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """Record a parameter or buffer, also one that accelerate has offloaded."""
        where = _offload(module, name, tensor)
        if where is None:
            self._value(path, tensor)
        elif (held := where[name]) is where[name]:
            self._value(path, held)
        else:  # each access reads files: the digest is kept
            known = self._offloads.get((id(where), name))
            if known is None or known[0] is not where:
                known = where, Weights().read({"": held})
                self._offloads[id(where), name] = known
            self.leaves[path] = f"offloaded {known[1]}"

    def _hooks(self, path: str, held: Mapping[str, Any]) -> None:
        for kind in _HOOKS:
            others = [(key, hook) for key, hook in held[kind].items() if not _moves(hook)]
            for i, (key, hook) in enumerate(others):
                flags = [flag for flag in _HOOK_FLAGS if key in held[flag]]
                self.leaves[f"{path}/{kind}/{i}/flags"] = " ".join(flags)
                self._called(f"{path}/{kind}/{i}", hook)
            for flag in _HOOK_FLAGS if others else ():
                self._watch_mapping(held[flag])

    def _called(self, path: str, hook: Any) -> None:
        """Record a hook, or a forward of one module, or reject one that no library made."""
        self.own.append(path)
        self._value(path, hook)
        if _root(hook) not in LIBRARIES:
            self._reject(path, "code of your own")

    # ---- values

    def _value(self, path: str, value: Any) -> None:
        """Record a value that code may read, or reject a value of no known kind."""
        try:
            if not self._plain(path, value) and not self._known_object(path, value):
                self._reject(path, f"a {_name(type(value))}")
        except RecursionError:
            self._reject(path, f"a {type(value).__name__} that is nested too deeply")
        except Exception as error:  # an odd object makes the model foreign, but must not raise
            self._reject(path, f"a {type(value).__name__} that raises {type(error).__name__}")

    def _plain(self, path: str, value: Any) -> bool:
        """Record numbers, texts, tensors, modules and containers; False for any other value."""
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
            self.leaves[path] = "device"  # a model has the same name on every device
        elif kind in _TEXTS:
            self.leaves[path] = str(value)
        elif isinstance(value, transformers().PreTrainedConfig):
            self._config(path, value)
        else:
            return False
        return True

    def _known_object(self, path: str, value: Any) -> bool:
        """Record code, and objects of known packages; False for any other value."""
        kind: Any = type(value)
        if isinstance(value, types.FunctionType):
            self.leaves[path] = f"function {self._function(path, value)}"
        elif isinstance(value, type):
            self.leaves[path] = f"class {self._class(path, value)}"
        elif isinstance(value, types.BuiltinFunctionType):
            return self._builtin(path, value)
        elif kind in (types.MethodType, functools.partial):
            self._watch_all(_PARTS[kind], value)
            for i, part in enumerate(_PARTS[kind](value)):
                self._value(f"{path}/{i}", part)
        elif id(value) in _OF_NUMPY:
            self.leaves[path] = f"{_name(kind)} {value.__name__}"
        elif isinstance(value, _INERT) or _ours(value):
            self.leaves[path] = _name(kind)
        elif isinstance(value, enum.Enum) and self._released(kind):
            self.leaves[path] = f"{self._class(path, kind)} {value.name}"
        elif not self._released(kind) or _standard(kind.__module__):
            return False
        elif _in_c(kind) is object:
            self._object(path, value, self._value)
        else:
            return False
        return True

    def _object(self, path: str, value: Any, look: Callable[[str, Any], None]) -> None:
        """Record an object of a known package by its class and its attributes."""
        if self._visited(path, value):
            return
        kind = type(value)
        self.leaves[path] = f"object {self._class(path, kind)}"
        members = [item for cls in kind.__mro__ for item in vars(cls).items()]
        slots = [name for name, one in members if isinstance(one, types.MemberDescriptorType)]
        held = getattr(value, "__dict__", {})
        for name in (*held, *slots):
            look(f"{path}.{name}", getattr(value, name, None))
        if slots:
            self._watch(lambda: [getattr(value, name, None) for name in slots])
        if held:
            self._watch_all(_INSTANCE, value)
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
                self._watch_one(len, value)
                self._watch_all(tuple, value)
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
        for owner in kind.__mro__[: kind.__mro__.index(torch.Tensor)]:
            self._owners.setdefault(owner, f"<{_name(owner)}>")
        beside = tensor.__dict__
        names = sorted(beside.keys() - _OF_TENSORS - transformers().BOOKKEEPING)
        if not (names and self._visited(f"{path}/beside", tensor)):
            for name in names:
                self._value(f"{path}.{name}", beside[name])
            self._watch_mapping(beside)

    def _config(self, path: str, config: Any) -> None:
        if self._visited(path, config):
            return
        library, held = transformers(), vars(config)
        frozen = _unswitched({name: _frozen(value) for name, value in held.items()})
        try:
            text = library.settings(config)
        except Exception:  # some settings have no text: they are recorded one by one
            text = ""
        self.leaves[path] = f"config {self._class(path, type(config))} {text}"
        for name, value in held.items():
            if (not text or not library.settled(value)) and name not in library.UNIMPORTANT:
                self._value(f"{path}.{name}", value)

        def same() -> bool:
            if vars(config) == frozen or _unswitched(vars(config)) == frozen:
                return True
            return bool(text) and not self.foreign and bool(library.settings(config) == text)

        self._watch_one(operator.call, same)

    # ---- code

    def _function(self, path: str, function: types.FunctionType) -> str:
        """Record a function's code and all objects that it refers to; return its label."""
        known = self._seen.get(id(function))
        if known is not None:
            return known
        home = str(function.__globals__.get("__name__"))
        library = _genuine(function)
        label = self._label(f"<{home}.{_filed(function.__code__, home).co_qualname}>", function)
        self._watch_all(_CODE, function)
        if function.__kwdefaults__ is not None:
            self._watch_mapping(function.__kwdefaults__)
        if library:
            self._release_of(label, home)
        elif _released_name(home):
            self._reject(label.strip("<>"), "patched")
            return label
        else:
            self._reject(path, f"code of your own: {label}")
            self.leaves[label] = text_of(function.__code__)
        look = self._shipped if library else self._value
        for part in ("__defaults__", "__kwdefaults__"):
            look(f"{label}/{part}", getattr(function, part))
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            content = _content_of(cell)
            self._watch_one(_content_of if content is MISSING else _CONTENT, cell)
            if not isinstance(content, types.ModuleType) and content is not MISSING:
                look(f"{label}/{name}", content)
        if library and home.startswith(_DEEP):
            self._globals(function)
        return label

    def _shipped(self, path: str, value: Any) -> None:
        """Record an object that library code refers to, or reject one patched or of no known kind.

        A user may put any object there, in the place of the library's own.
        """
        kind: Any = type(value)
        if issubclass(kind, _CONTAINERS) and (kind in _CONTAINERS or self._released(kind)):
            self._table(path, value)
        elif self._plain(path, value):
            pass
        elif isinstance(value, types.FunctionType):
            if _genuine(value):
                self.leaves[path] = f"function {self._function(path, value)}"
            elif not _generated(value):
                self._reject(path.replace(">:", ".").strip("<>"), "patched")
        elif isinstance(value, types.BuiltinFunctionType):
            if not self._builtin(path, value) and value.__module__:
                self._release_of(path, value.__module__)
        elif isinstance(value, type):
            self._shipped_class(path, value)
        elif kind in _PARTS:
            self._wrapper(path, value)
        elif kind in _SLOTS_IN_C or id(value) in _OF_NUMPY:
            owner = getattr(value, "__objclass__", "")
            self.leaves[path] = f"{_name(kind)} {owner} {value.__name__}"
        elif kind in _STILL or isinstance(value, _INERT) or _ours(value):
            self.leaves[path] = _name(kind)
        elif self._released(kind) and _in_c(kind) is object:
            self._object(path, value, self._shipped)
        elif not self._known_object(path, value):
            self._reject(path, f"a {_name(kind)}")

    def _wrapper(self, path: str, value: Any) -> None:
        """Record the objects that an object of a library is around."""
        read = _PARTS[type(value)]
        parts = [*read(value)]
        if not parts:
            self._reject(path, "a cached function with the __wrapped__ of another one")
        if read is not _cached:  # whose function stays the same
            self._watch_all(read, value)
        for i, part in enumerate(parts):
            self._shipped(f"{path}/{i}", part)

    def _table(self, path: str, value: Any) -> None:
        """Record a table or the defaults of library code, with all that they hold."""
        kind: Any = type(value)
        if len(value) > _TABLE:
            self._reject(path, f"a {kind.__name__} of {len(value):,} values")
        elif kind is tuple or not self._visited(path, value):
            mapping, unordered = issubclass(kind, dict), kind in (set, frozenset)
            entries: Iterable[tuple[Any, Any]] = value.items() if mapping else enumerate(value)
            said = list[str]()
            for i, (key, item) in enumerate([*entries]):
                named = key if isinstance(key, type) else type(key)
                place = getattr(item, "__qualname__", "") if unordered else key_text(key)
                place = place or _name(named) + f"#{i}" * mapping
                if type(item) in PLAIN:
                    said.append(f"{place} {type(item).__name__} {item!r}")
                else:
                    self._shipped(f"{path}[{place}]", item)
            self.leaves[path] = f"{_name(kind)} {sorted(said) if unordered else said}"
            if mapping:
                self._watch_mapping(value)
            elif unordered:
                self._watch_one(functools.partial(operator.eq, frozenset(value)), value)
            elif not isinstance(value, tuple):
                self._watch_one(len, value)
                self._watch_all(tuple, value)

    def _shipped_class(self, path: str, cls: Any) -> None:
        self.leaves[path] = f"class {_name(cls)}"
        for owner in cls.__mro__:
            if _name(owner).startswith(_DEEP):
                self._owners.setdefault(owner, f"<{_name(owner)}>")
        if not _standard(cls.__module__) and not _released_name(cls.__module__):
            self._release_of(path, cls.__module__)

    def _globals(self, function: types.FunctionType) -> None:
        """Record the globals and builtins that a library's function names."""
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
        if not isinstance(value, types.ModuleType):
            if path not in self.leaves:
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
            elif space[name].__name__ in _DEEP_MODULES and space[name] is not value:
                self._global(f"<{value.__name__}>:{name}", space[name], names)

    def _released_builtin(self, name: str) -> None:
        """Check that a builtin is Python's own."""
        value = vars(builtins)[name]
        self._watch_names(vars(builtins), [name])
        own = type(value) in PLAIN or getattr(value, "__module__", "builtins") == "builtins"
        own |= name in ("open", "exit", "quit", "copyright", "credits", "license")
        if isinstance(value, (types.BuiltinFunctionType, type)) and value.__name__ != name:
            own &= name in ("EnvironmentError", "IOError", "WindowsError")
        if not own or isinstance(value, types.FunctionType):
            self._reject(f"<builtins>:{name}", "patched")

    def _builtin(self, path: str, value: Any) -> bool:
        """Record a function in C; False if it is bound to an object of no known kind."""
        owner = getattr(value, "__self__", None)
        module = str(getattr(value, "__module__", None) or "")
        self.leaves[path] = f"builtin {module}.{value.__qualname__}"
        made = type(owner).__name__.startswith("pybind11")  # holds what the function is
        if owner is None or made or isinstance(owner, (types.ModuleType, type)):
            root = module.partition(".")[0] or _root(owner)
            return not root or root in LIBRARIES or _standard(root)
        self._value(f"{path}/self", owner)
        return True

    def _class(self, path: str, cls: Any) -> str:
        """Record a class and the code that it may run; return its label."""
        known = self._seen.get(id(cls))
        if known is not None:
            return known
        label = self._label(f"<{_name(cls)}>", cls)
        if _of_python(cls):
            return label
        self._watch_one(_LINEAGE, cls)
        lineage = [c for c in cls.__mro__ if not _of_python(c)]
        for i, owner in enumerate(lineage):
            self._owners.setdefault(owner, f"{label}/{i}")
        self.leaves[label] = " ".join(_name(c) for c in cls.__mro__)
        todo = {"forward", "__call__"} if issubclass(cls, torch.nn.Module) else set[str]()
        for owner in lineage:
            if self._released(owner):
                self._release_of(label, owner.__module__)
                if not issubclass(owner, torch.nn.Module):
                    todo |= vars(owner).keys() - _CLASS_ITEMS
                continue
            self._reject(path, f"code of your own: the class {_name(owner)}")
            if not issubclass(owner, torch.nn.Module) or type(owner) is not type:
                return label
        named = set[str]().union(*map(vars, lineage)) - _CLASS_ITEMS
        done, todo = set[str](), todo & named
        while todo:
            name = min(todo)
            done.add(name)
            home = next(c for c in lineage if name in vars(c))
            todo |= self._member(path, f"{label}.{name}", home, name) & named
            todo -= done
        return label

    def _member(self, path: str, label: str, home: Any, name: str) -> set[str]:
        """Record an attribute of a class; return the names in its code."""
        value = vars(home)[name]
        self._watch_names(home, [name])
        library, kind = self._released(home), type(value)
        if isinstance(value, tuple(_WRAPPERS)) and kind not in _WRAPPERS:
            self._class(f"{label}/kind", kind)
        parts, found, mentioned = [*_parts(value)], list[str](), set[str]()
        for i, part in enumerate(parts):
            if not isinstance(part, types.FunctionType):
                if part is not value:
                    (self._shipped if library else self._value)(f"{label}/{i}", part)
            elif library and not _genuine(part) and not _generated(part):
                self._reject(label.strip("<>"), "patched")
            elif not _generated(part):
                found.append(self._function(path, part))
                mentioned |= _inner(part)
        if parts[:1] != [value] or isinstance(value, types.FunctionType):
            self.leaves[label] = f"{kind.__name__} {found}"
        elif library and type(value) in PLAIN:
            self.leaves[label] = f"{type(value).__name__} {value!r}"
        elif not (library and _as_in_its_file(home, name)):
            (self._shipped if library else self._value)(label, value)
        return mentioned

    def _elsewhere(self) -> None:
        """Record the members of visited classes that any visited code names, and their absence.

        Those of a library's class are in no leaf if they are as in its file: the release stands for
        them.
        """
        seen, done = (-1, -1), set[tuple[Any, str]]()
        while seen != (seen := (len(self._names), len(self._owners))):
            for owner, label in [*self._owners.items()]:
                held, library, names = vars(owner), self._released(owner), {*self._names}
                _, known = self._spaces.get(id(owner), (None, {}))
                if issubclass(owner, torch.nn.Module) or owner.__module__ == "torch.nn.parameter":
                    names |= {n for n in held if n.startswith("__")}
                names |= {n for n, v in held.items() if isinstance(v, _READ)}
                names -= _CLASS_ITEMS
                for name in sorted(names & held.keys()):
                    new = name not in known and not (library and _as_in_its_file(owner, name))
                    if new and (owner, name) not in done:
                        done.add((owner, name))
                        self._member(label, f"{label}.{name}", owner, name)
                self._watch_names(owner, names)
        for owner in self._owners:
            self._watch_one(operator.call, functools.partial(_size, vars(owner)))

    # ---- packages

    def _released(self, cls: Any) -> bool:
        """Return whether a class is of a package with a release that stands for its code."""
        return _of_python(cls) or (_released_name(cls.__module__) and not _standard(cls.__module__))

    def _release_of(self, path: str, module: str) -> None:
        """Record a package that takes part, by its release or by the text of its files."""
        root = module.partition(".")[0]
        if _standard(module):
            return
        if root != _CHECKPOINTS:
            self._roots.add(root)
            if _UNRELEASED.search(_release(root)):
                self.leaves[f"<{module}>/text"] = _text_of(module)
            return
        commit = _COMMIT.search(module) or _COMMIT.search(str(_file_of(module)))
        if commit is None:
            self._reject(path, f"{module}: code of a checkpoint that was loaded without a commit")
        self.leaves[f"<{module}>/text"] = f"{commit and commit[0]} {_text_of(module)}"

    def _releases(self) -> None:
        for root in sorted(self._roots - {"flowkv"}):
            release = _release(root)
            self.leaves[f"release {root}"] = release
            if not release:
                self._reject(root, "a package without a release")

    def _environment(self, model: torch.nn.Module) -> None:
        self.leaves["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        self._roots.add("torch")
        self.leaves |= {f"torch/{name}": str(value) for name, value in switches()[:-1]}
        self._watch_one(operator.call, switches)
        if parametrize._cache_enabled:
            self._reject("torch.nn.utils.parametrize.cached()", "it may keep old weights")
        for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
            hooks = getattr(torch_module, kind)
            for i, hook in enumerate(hook for hook in hooks.values() if not _moves(hook)):
                self._called(f"{kind}/{i}", hook)
            self._watch(functools.partial(list, hooks.values()))
        library = transformers() if self.pretrained else _NO_TRANSFORMERS
        for cls in library.CACHES:  # FlowKV's classes replace these
            for owner in [c for c in cls.__mro__ if "update" in vars(c)]:
                self._member(_name(cls), f"<{_name(owner)}>.update", owner, "update")
        for registry, name, function in library.chosen_functions(model):
            self._value(f"{type(registry).__name__} {name}", function)
            self._watch_one(registry.get, name)
        self._elsewhere()
        every = vars(torch.Tensor)
        self._watch_one(len, every)
        named = [n for n in every if n in self._names or n.startswith("__")]
        for name in sorted(set(named) - _CLASS_ITEMS):
            own = _TENSOR.get(name) is every[name] and _root(every[name]) in ("torch", "builtins")
            own |= isinstance(every[name], types.FunctionType) and _genuine(every[name])
            if not own:
                self._reject(f"torch.Tensor.{name}", "patched")
            self._watch_names(torch.Tensor, [name])
        kinds = {tensor.device.type.upper() for tensor in self.tensors.values()}
        self._watch_mapping(native := _native())
        for nodes in native.values():
            self._watch_all(tuple, nodes)
        impls = [override.split("/") for override in [*torch.library._impls]]
        used = [(f"aten::{name}", k) for lib, name, k in impls if lib == "aten" and k in kinds]
        if used:
            self._watch(lambda: [sys.intern(repr(_KERNEL(*one))) for one in used])
        if found := _overrides():
            self._reject(f"torch.library: {min(found)}", "an override of an operator of torch's")


_TENSOR = dict(vars(torch.Tensor))
"""Attributes of `torch.Tensor` at import."""
_TABLE = 256
"""Most values in a table of a library's that code of a model reads."""
_TINY, _HALF = sys.float_info.min, 0.5


_PLACES = {
    "tf32": "backends.cuda.matmul.allow_tf32",
    "cudnn": "backends.cudnn.allow_tf32",
    "fp16": "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "bf16": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "mkldnn": "backends.mkldnn.matmul.fp32_precision",
    "grouped": "backends.cuda.matmul.prefer_cublaslt_grouped_gemm",
    "cached": "nn.utils.parametrize._cache_enabled",
    "fill": "utils.deterministic.fill_uninitialized_memory",
}
_FLAGS: dict[str, Callable[[], Any]] = {
    "matmul": torch.get_float32_matmul_precision,
    "dtype": torch.get_default_dtype,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "ahead": lambda: operator.methodcaller("aot_enabled")(torch._native),
    **{name: functools.partial(operator.attrgetter(at), torch) for name, at in _PLACES.items()},
}
"""The switches that change what the same code computes."""


def switches() -> tuple[tuple[str, Any], ...]:
    """Read the switches, and how many operators are overridden; equal readings are one object.

    A switch is None where a build lacks it, or its old and new forms are mixed.
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
    """Return torch's operators that Python code outside torch overrides.

    An operator stays in the set for good: torch may lose its entry when an override is repeated.
    """
    for node in itertools.chain(*_native().values()):
        if any(_root(value) != "torch" for value in vars(node).values() if callable(value)):
            _SEEN.add(f"aten/{node.op_symbol}/{node.dispatch_key}")
    for override in [*torch.library._impls]:
        library, name, key = override.split("/")
        if library == "aten" and key != "Meta":  # of all keys, for some stand for others
            files = re.findall(r": registered at (.*):\d", torch._C._dispatch_dump(f"aten::{name}"))
            if not all(map(_TORCHS, files)):
                _SEEN.add(override)
    return _SEEN


def _native() -> dict[Any, list[Any]]:
    """Return torch's own overrides by operator and key: one object for each, active or not."""
    return getattr(sys.modules.get("torch._native.registry"), "_graphs", {})


_SEEN: set[str] = set()
_KERNEL: Any = torch._C._dispatch_get_computed_kernel_for_dispatch_key  # type: ignore[attr-defined]
"""Return the kernel of an operator for a key; its text has the place where it was registered."""
_TORCHS = re.compile(
    rf"{re.escape(str(Path(torch.__file__).parent))}/(?!library\.py|_library/|_custom_op)"
    r"|.*\.(cpp|cc|cu|cuh|h|mm)$"
).match
"""Files in which torch registers operators, neither for others nor in Python."""


# ---- code


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and those of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that code mentions, attributes included."""
    found = set[str]()
    for part in codes(code):
        found.update(part.co_names)
        found.update(c for c in part.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def text_of(code: types.CodeType) -> str:
    """Return a digest of code, the same in every process."""
    state = hashlib.sha256(code.co_code)
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    state.update(repr((counts, code.co_names, code.co_varnames, code.co_freevars)).encode())
    state.update(getattr(code, "co_exceptiontable", b""))
    for constant in code.co_consts:
        inner = isinstance(constant, types.CodeType)
        text = text_of(constant) if inner else _constant(constant)
        state.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return state.hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, (tuple, frozenset)):
        items = [_constant(item) for item in value]
        order = sorted(items) if isinstance(value, frozenset) else items
        return f"{type(value).__name__}({','.join(order)})"
    return f"{type(value).__name__} {value!r}"


@functools.cache
def _standard(module: Any) -> bool:
    """Return whether a module is Python's own, and no file of the user's with such a name."""
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
    """Return the code of a library's file by qualified name, read anew by its loader."""
    found: dict[str, tuple[types.CodeType, ...]] = {}
    with contextlib.suppress(Exception):  # the module has no file, or one without code
        loader: Any = sys.modules[module].__spec__.loader  # type: ignore[union-attr]
        for code in codes(loader.get_code(module)):
            found[code.co_qualname] = (*found.get(code.co_qualname, ()), code)
    return found


_GENUINE: dict[int, types.CodeType] = {}
"""Code that agrees with its file, by id; kept alive, so that ids stay unique."""


_NAMELESS = operator.attrgetter(
    *"""co_code co_consts co_names co_freevars co_flags co_argcount co_posonlyargcount
    co_kwonlyargcount co_exceptiontable""".split()
)
"""What code computes with."""


def _filed(code: types.CodeType, home: str) -> types.CodeType:
    """Return the equal code of a file, by its own names: torch 2.15's decorators rename code."""
    every = _codes_of(home).values() if home == "torch.utils._contextlib" else ()
    return next((x for x in itertools.chain(*every) if _NAMELESS(x) == _NAMELESS(code)), code)


def _genuine(function: types.FunctionType) -> bool:
    """Return whether a function is a library's or Python's, with the code in its file."""
    space: Any = function.__globals__
    home = str(space.get("__name__"))
    module = sys.modules.get(home)
    if module is None or vars(module) is not space or not _released_name(home):
        return False
    code = _filed(function.__code__, home)
    if _GENUINE.get(id(code)) is not code:
        if code not in _codes_of(home).get(code.co_qualname, ()):
            return False
        _GENUINE[id(code)] = code
    return True


def _as_in_its_file(owner: Any, name: str) -> bool:
    """Return whether a member of a library's class is as the class's file makes it."""
    value, body = vars(owner)[name], _body(owner.__module__, owner.__qualname__)
    if functions := [f for f in _parts(value) if isinstance(f, types.FunctionType)]:
        homes = (f"{_name(owner)}.{name}", *_GIVEN)
        return all(_generated(f) or (_genuine(f) and _holds(f, homes)) for f in functions)
    if body.get(name) is MISSING or name == "config_class":  # which transformers sets
        return isinstance(value, _COMPUTED) or value is torch._C._disabled_torch_function_impl
    same = name in body and type(body[name]) is type(value) and repr(body[name]) == repr(value)
    return same or isinstance(value, (owner, *_DESCRIPTORS))


_GIVEN = (
    "huggingface_hub.dataclasses.strict.<locals>.wrap.<locals>.validate",
    "transformers.integrations.moe._default_apply_gate",
)
"""Methods that decorators give to classes."""
_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    type(inspect.FullArgSpec.args),  # of a named tuple
)
_COMPUTED = (*_CONTAINERS, *_DESCRIPTORS, type)
"""Types of members that code of a class's body computes."""


def _holds(function: types.FunctionType, homes: tuple[str, ...]) -> bool:
    """Return whether a function, or one that it wraps, was defined at one of some places."""
    inner = [function, *map(_content_of, function.__closure__ or ())]
    return any(
        f"{f.__globals__.get('__name__')}.{f.__code__.co_qualname}" in homes and _genuine(f)
        for f in inner
        if isinstance(f, types.FunctionType)
    )


@functools.cache
def _body(module: str, qualname: str) -> dict[str, Any]:
    """Return the names that a class's body in its file sets, with constants, or else `MISSING`."""
    found = dict[str, Any]()
    for code in _codes_of(module).get(qualname, ()):
        for before, step in itertools.pairwise(dis.get_instructions(code)):
            if step.opname == "STORE_NAME":
                constant = before.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
                found[step.argval] = before.argval if constant else MISSING
    return found


def _generated(function: types.FunctionType) -> bool:
    """Return whether Python generated a method of a class, as for a dataclass."""
    code, space = function.__code__, function.__globals__
    home = sys.modules.get(str(space.get("__name__")))
    made = code.co_filename.startswith("<") and code.co_name.startswith("__")
    return made and home is not None and vars(home) is space and _released_name(home.__name__)


def _root(value: Any) -> str:
    """Return the package of a value; "" for a function that is not genuine code of its module."""
    inner = value
    while isinstance(inner, (functools.partial, types.MethodType)):
        if isinstance(inner, types.MethodType):
            kind = type(inner.__self__)  # a door, even if its methods are counted or traced
            if _ours(inner.__self__) and any(inner.__func__ is one for one in vars(kind).values()):
                return "flowkv"
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    if isinstance(inner, types.FunctionType):
        return str(inner.__globals__.get("__name__")).partition(".")[0] if _genuine(inner) else ""
    module = getattr(inner, "__module__", None)
    return (module if isinstance(module, str) else type(inner).__module__).partition(".")[0]


def _moves(hook: Any) -> bool:
    """Return whether a hook is of `_OWN` packages, with all functions and objects within it."""
    todo, seen = [hook], set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, types.FunctionType):
            if not _genuine(each):
                return False
            todo += map(_content_of, each.__closure__ or ())
        elif type(each) in _PARTS and _root(each) != "flowkv":  # a door may be counted or traced
            if not (parts := _PARTS[type(each)](each)):
                return False
            todo += parts
        elif not _released_name((each if isinstance(each, type) else type(each)).__module__):
            return False
        elif isinstance(each, _CONTAINERS):
            todo += each.values() if isinstance(each, dict) else each
        elif not isinstance(each, (type, types.ModuleType, *_READ)):
            todo += getattr(each, "__dict__", {}).values()
    return _root(hook) in _OWN


def _ours(value: Any) -> bool:
    """Return whether a value is a part of a cache, which does not change a model's results."""
    kind: Any = type(value)
    if kind.__module__.partition(".")[0] != "flowkv":
        return False
    made: Any = getattr(kind, "__dataclass_params__", None)
    frozen = made is not None and made.frozen
    return not (frozen or isinstance(value, (torch.nn.Module, tuple, enum.Enum, msgspec.Struct)))


@functools.cache
def _release(root: str) -> str:
    """Return the release of a package, without a local suffix; "" if it has none."""
    for name in (root, f"{root}.quanto"):
        if found := getattr(sys.modules.get(name), "__version__", ""):
            return str(found).partition("+")[0]
    try:
        return importlib.metadata.version(root.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


@functools.cache
def _text_of(module: str) -> str:
    """Return a digest of all Python files in the folder of a module."""
    state = hashlib.sha256()
    for path in sorted(Path(str(_file_of(module))).parent.glob("*.py")):
        text = path.read_bytes()
        state.update(f"{path.name} {len(text)}\0".encode() + text)
    return state.hexdigest()


def code_of(cls: type) -> str:
    """Return the release and text of a library's class; "" if loaded code differs from its file."""
    home, root = cls.__module__, cls.__module__.partition(".")[0]
    members = vars(cls).keys() - _CLASS_ITEMS - {"__repr__", "__replace__"}
    beside = [f for f in vars(sys.modules[home]).values() if isinstance(f, types.FunctionType)]
    same = all(map(_genuine, beside)) and all(_as_in_its_file(cls, name) for name in members)
    same &= not any(isinstance(value, functools.partialmethod) for value in vars(cls).values())
    return f"{_release(root)} {_text_of(root)} {_text_of(home)}" if same else ""


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _of_python(cls: Any) -> bool:
    """Return whether a class is of Python's own library, and no module of torch's."""
    if not _standard(cls.__module__) or issubclass(cls, torch.nn.Module):
        return False
    if not cls.__flags__ & _MADE_BY_CODE:
        return True
    path, module = cls.__qualname__.split("."), sys.modules.get(cls.__module__)
    return functools.reduce(lambda one, name: getattr(one, name, None), path, module) is cls


_MADE_BY_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _in_c(cls: type) -> Any:
    """Return the first base class in C, in which objects may hold more than attributes."""
    new = {c: getattr(vars(c).get("__new__"), "__self__", None) for c in cls.__mro__}
    return next(c for c in new if not c.__flags__ & _MADE_BY_CODE or new[c] is c)


def _size(held: Mapping[str, Any]) -> int:
    """Return the number of a class's attributes, without those that other code adds."""
    return len(held) - sum(map(held.__contains__, _ADDED))


# By copies of objects, by looks at annotations, and by the compiler.
_ADDED = (
    *("__slotnames__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
    "___needs_generation_tag_patch",
)


def _lacks(names: frozenset[str], held: Mapping[str, Any]) -> bool:
    return held.keys().isdisjoint(names)


_WRAPPERS: dict[Any, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.partial: ("func", "args", "keywords"),
}
"""Types of class attributes around functions; their subclasses may do more than call these."""


def _parts(value: Any) -> Iterator[Any]:
    """Yield the functions and arguments inside a class attribute, or itself if it wraps nothing."""
    kind = next((kind for kind in type(value).__mro__ if kind in _WRAPPERS), None)
    if kind is None:
        yield value
        return
    yield type(value).__name__
    for name in _WRAPPERS[kind]:
        if (inner := getattr(value, name)) is not None:
            yield from _parts(inner)


def _inner(function: types.FunctionType) -> set[str]:
    """Return the names in a function and in the functions of its closure."""
    every = [function]
    for one in every:
        held = map(_content_of, one.__closure__ or ())
        every += [f for f in held if isinstance(f, types.FunctionType) and f not in every]
    return set[str]().union(*(names_of(one.__code__) for one in every))


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# ---- changes to modules by accelerate, and by encodings that depend on length


def _around(module: torch.nn.Module, forward: Any) -> Any:
    """Return the forward that one of accelerate's or FlowKV's wraps; None if it wraps none."""
    around = getattr(getattr(forward, "__self__", forward), "around", None)
    return vars(module).get("_old_forward", around)


def _modeless(module: torch.nn.Module) -> bool:
    """Return whether a module is an activation of transformers'; models share some of these."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module).__module__ == "transformers.activations" and not changed


def _offload(module: torch.nn.Module, name: str, tensor: Any) -> Any:
    """Return accelerate's map with an offloaded tensor; None if the module itself holds it."""
    where = getattr(module.__dict__.get("_hf_hook"), "weights_map", None)
    there = where is not None and tensor is not None and tensor.is_meta and name in where
    return where if there else None


def _versions_of(read: _Read, thing: Any) -> list[int]:
    """Return addresses of versions that change with what is read of an object, if there are.

    Readers of dicts return keys and values alone; those that are called without an object read the
    last argument of a `functools.partial`.
    """
    if read is operator.call:
        thing = thing.args[-1] if type(thing) is functools.partial else None
        return versions_of(thing) if type(thing) in (dict, types.MappingProxyType) else []
    return versions_of(thing)


def _beside(names: frozenset[str], held: Mapping[str, Any]) -> list[Any]:
    """Return the keys and values of a mapping without some names."""
    return [each for name, value in held.items() if name not in names for each in (name, value)]


def _settled(module: weakref.ref[Any], name: str) -> bool:
    """Return whether frequencies are the original ones, or the next forward resets them."""
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
    """Return the whole value of a mapping's key as text; None for objects without such a text."""
    kind = type(key)
    if kind in PLAIN:
        return f"{kind.__name__} {key!r}"
    if kind is tuple:
        parts = [key_text(item) for item in key]
        return None if None in parts else f"tuple {parts!r}"
    return repr(key) if kind in (torch.dtype, torch.device, torch.Size) else None


def _alike(a: Any, b: Any) -> bool:
    """Return whether two readings gave the same object, or equal numbers or texts."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is dict:  # default values by name
        return _alike(tuple(a.items()), tuple(b.items()))
    if type(a) in (tuple, frozenset):  # equal sets may have other orders
        return len(a) == len(b) and all(map(_alike, a, b))
    return repr(a) == repr(b) if type(a) in PLAIN else type(a) in _TEXTS and bool(a == b)


def _unswitched(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with their values between calls."""
    lasting = transformers().lasting
    own = {name: lasting(held[name]) for name in _SWITCHED if isinstance(held.get(name), str)}
    return {**held, **own}


def _frozen(value: Any) -> Any:
    """Copy nested containers; the copy equals them until an item is replaced."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_frozen(item) for item in value)
    return set(value) if type(value) is set else value
