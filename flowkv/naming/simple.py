"""Rules for small user code, such that a digest of it names all that it computes.

Code is read by its instructions. It may use its arguments, globals and closures of known kinds,
torch's functions of tensors, and a few builtins. It may not import, write globals, look attributes
up by computed names, or reach state elsewhere.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch

BUILTINS = frozenset(
    """None True False Ellipsis NotImplemented abs all any bool complex dict divmod enumerate filter
    float frozenset int isinstance len list map max min ord pow range
    reversed round set slice sorted
    str sum super tuple zip ArithmeticError AssertionError AttributeError Exception IndexError
    KeyError LookupError NotImplementedError RuntimeError StopIteration TypeError ValueError
    ZeroDivisionError""".split()
)
"""Builtins that are deterministic, and reach nothing but their arguments."""
MODULES = frozenset(
    """torch torch.nn torch.nn.functional torch.fft torch.linalg torch.special torch.nn.modules
    math""".split()
)
"""Python modules with members that code may use if they are `pure`."""
_BARRED_STEPS = {
    "IMPORT_NAME": "imports",
    "IMPORT_STAR": "imports",
    "STORE_GLOBAL": "writes the global",
    "DELETE_GLOBAL": "deletes the global",
    "LOAD_BUILD_CLASS": "makes a class",
    "MATCH_CLASS": "matches a class",
}
_BARRED = frozenset(
    """grad data numpy storage untyped_storage data_ptr apply_ map_ grad_fn f_globals f_locals
    gi_frame cr_frame tb_frame func_globals format format_map seed initial_seed share_memory_ set_
    resize_ _grad _base _version requires_grad is_leaf storage_offset as_strided as_strided_
    state_dict is_inference is_shared is_set_to is_pinned""".split()
)
"""Attributes that lead to state outside of any name, or to writes that are not counted."""
_BARRED_TORCH = frozenset(
    """from_file frombuffer from_dlpack load save seed initial_seed set_rng_state get_rng_state
    set_default_dtype set_default_device set_flush_denormal set_num_threads get_num_threads
    get_num_interop_threads is_grad_enabled is_inference_mode_enabled get_device get_default_dtype
    is_autocast_enabled as_strided is_inference""".split()
)
_TORCH_HOMES = (
    *("torch.functional", "torch.nn.functional", "torch._VF"),
    *("torch.fft", "torch.linalg", "torch.special"),
)
CLASSES = (
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device, torch.no_grad),
    *(torch.inference_mode, torch.enable_grad),
)


def pure(value: Any) -> bool:
    """Return whether a function or class of torch or `math` computes from its arguments alone."""
    if isinstance(value, type):
        return value in CLASSES or (
            issubclass(value, torch.nn.Module) and value.__module__.startswith("torch.nn.modules.")
        )
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__")) in _TORCH_HOMES
    name = value.__name__
    if getattr(value, "__module__", None) == "math":
        return True
    functions: Any = torch._C._VariableFunctions
    known = getattr(functions, name, None) is value
    known = known or str(value.__module__).startswith("torch._C._")
    return known and name not in _BARRED_TORCH


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and those of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.lru_cache(maxsize=4096)
def uses(code: types.CodeType) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return the forbidden operations and the globals of user code.

    Returns:
        (forbidden operation, its object, ()) or ("", a global, attributes read from it), each once.
    """
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for part in codes(code):
        steps = [s for s in dis.get_instructions(part) if s.opname not in _SILENT]
        for at, step in enumerate(steps):
            name = str(step.argval)
            if (why := _BARRED_STEPS.get(step.opname)) is not None:
                found.append(
                    (why, name if "GLOBAL" in step.opname or "IMPORT" in step.opname else "", ())
                )
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                chain = []
                for after in steps[at + 1 :]:
                    if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                        break
                    chain.append(str(after.argval))
                found.append(("", name, tuple(chain)))
            elif "ATTR" in step.opname or step.opname == "LOAD_METHOD":
                name = name[-1] if isinstance(step.argval, tuple) else name
                if name in _BARRED or (name.startswith("__") and name.endswith("__")):
                    found.append(("reads", name, ()))
    return tuple(dict.fromkeys(found))


_SILENT = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL", "RESUME"})


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
