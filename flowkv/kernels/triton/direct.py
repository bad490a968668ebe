"""Launching compiled Triton kernels without asking Triton which one is meant.

`kernel[grid](...)` finds out the type of every argument and looks the compiled kernel up by a
string: 10 to 20 microseconds of Python, as long as a short kernel runs. Here the same question is
answered by a tuple, and the compiled kernel's own launcher is called. What decides which kernel is
compiled: the device, the constants, dtypes of tensors, and whether they begin at a multiple of 16
bytes; of integers, whether they are wider than 32 bits and, unless `do_not_specialize`, whether
they are 1 or divisible by 16.

That launcher is private to Triton. So a handle is kept only for versions that the tests know, on
NVIDIA's devices (kernels for AMD's depend on more), and once Triton itself was seen to call it with
just the arguments that a handle would pass. All else, and every launch while launch hooks are set,
goes the documented way.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from functools import cache
from operator import is_
from types import NoneType
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flowkv.core import compiling

KNOWN = frozenset({(3, 6), (3, 7), (3, 8), (3, 9)})
"""Versions of Triton whose launchers the tests have called."""

MOST_HANDLES = 4096
"""Of one kernel, before all are forgotten: strides of any size would fill the memory."""

_HEAD = 9  # grid, stream, function, packed metadata, launch metadata, two hooks; then arguments
_INT32 = 1 << 31
_KINDS = (torch.Tensor, int, float, bool, NoneType)
_LOCK = threading.RLock()


class Handle(NamedTuple):
    """A compiled kernel, loaded: its launcher, and what that is given.

    Attributes:
        run: Called with the grid, the stream, `head`, the arguments of a launch, `constants`.
        head: The loaded binary and its metadata; no metadata of the launch, no hooks.
        constants: What the launcher expects in place of the kernel's constants.
    """

    run: Callable[..., None]
    head: tuple[Any, ...]
    constants: tuple[Any, ...]


class Site:
    """One kernel: how keys are made of its arguments, and its handles.

    Attributes:
        kernel: Kept, since sites are found by its `id`.
        direct: Whether it may have handles at all.
        key: `(device, constants, *args)` to all that decides which compiled kernel serves a call,
            and more; a first element other than 0 asks for `exact`.
        handles: By key.
        by_class: The same with just so much of the integers in a key as kernels depend on.
    """

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel, self.direct = kernel, False
        self.handles: dict[tuple[Any, ...], Handle] = {}
        self.by_class: dict[tuple[Any, ...], Handle] = {}
        if known() and isinstance(kernel, JITFunction):
            named, behind = kernel.params[: len(args)], kernel.params[len(args) :]
            # Arguments first, constants behind them: a launcher's arguments are just these two.
            self.direct = (
                not any(param.is_constexpr for param in named)
                and all(param.is_constexpr for param in behind)
                and all(isinstance(x, _KINDS) for x in args)
            )
            self.tensors = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
            self.integers = [i for i, x in enumerate(args) if type(x) is int]
            special = [i for i in self.integers if not kernel.params[i].do_not_specialize]
            self.specials = slice(1, 1 + len(special))
            self.key = _key(len(args), self.tensors, self.integers, special)

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether tensors stand where keys look for them."""
        return all(isinstance(x, torch.Tensor) == (i in self.tensors) for i, x in enumerate(args))

    def exact(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A key that tells which tensors are not aligned, and which integers are wide."""
        aligned = [args[i].data_ptr() & 15 == 0 for i in self.tensors]
        widths = [
            (x >= -_INT32) + (x >= _INT32) + (x >> 63 > 0) for x in (args[i] for i in self.integers)
        ]
        return *key, *aligned, *widths

    def adopt(self, key: tuple[Any, ...]) -> Handle | None:
        """The handle of a new key whose integers lead to a kernel that is known."""
        handle = self.by_class.get(self._class(key))
        if handle is not None:
            self._remember(key, handle)
        return handle

    def keep(self, key: tuple[Any, ...], handle: Handle | None) -> None:
        """Remember what serves a key; None: Triton's launcher is not called as handles call it."""
        if handle is None:
            self.direct = False
        else:
            self.by_class[self._class(key)] = handle
            self._remember(key, handle)

    def _remember(self, key: tuple[Any, ...], handle: Handle) -> None:
        if len(self.handles) >= MOST_HANDLES:
            self.handles.clear()
        self.handles[key] = handle

    def _class(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """A key with just so much of its integers as the compiled kernel depends on."""
        special = [(x == 1, x % 16 == 0) for x in key[self.specials]]
        return *special, key[0], *key[self.specials.stop :]


def _key(count: int, tensors: list[int], integers: list[int], special: list[int]) -> Any:
    """The function that makes keys, as source: without loops it takes half the time."""
    names = [f"x{i}" for i in range(count)]
    numbers = [f"type({name})" for i, name in enumerate(names) if i not in tensors]
    address = "|".join(f"x{i}.data_ptr()" for i in tensors)
    wide = "|".join(f"x{i}" for i in integers) or "0"
    parts = [
        f"({address}) & 15 | ({wide}) >> 31",
        *(f"x{i}" for i in special),
        "device",
        *(f"x{i}.dtype" for i in tensors),
        *numbers,
        "*constants",
        "*constants.values()",
    ]
    return eval(f"lambda device, constants, {', '.join(names)}: ({', '.join(parts)})")


SITES: dict[int, Site] = {}
"""By the `id` of their kernels."""


def site_of(kernel: Any, args: tuple[Any, ...]) -> Site:
    """The site of a kernel, made for its first arguments."""
    return SITES.setdefault(id(kernel), Site(kernel, args))


@cache
def known() -> bool:
    """Whether this Triton's launchers are known; warns of a version that compiles badly."""
    version = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
    if version == (3, 8):
        warnings.warn(
            "Triton 3.8 compiles 4-bit kernels so that registers spill. "
            "Use Triton 3.7 or 3.9, or no codec smaller than kv8",
            stacklevel=5,
        )
    return version in KNOWN and torch.version.hip is None


def hooked(kernel: Any) -> bool:
    """Whether somebody wants to hear of each launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        kernel.pre_run_hooks
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


def watched(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> Handle | None:
    """Launch once, the documented way, watching what Triton calls; a handle that does the same."""
    seen: list[tuple[Any, ...]] = []
    with _LOCK:
        with compiling.around():
            compiled = kernel.warmup(*args, grid=grid, **constants)
            loaded = getattr(compiled, "run", None)  # asking for it loads the kernel
        launcher: Callable[..., None] | None = loaded and getattr(compiled, "_run", None)
        if launcher is None:
            kernel[grid](*args, **constants)
            return None

        def spy(*given: Any) -> None:
            seen.append(given)
            launcher(*given)

        compiled._run = spy
        try:
            kernel[grid](*args, **constants)
        finally:
            compiled._run = launcher
    active, runtime = driver.active, knobs.runtime
    stream = active.get_current_stream(active.get_current_device())
    binary = compiled.function, compiled.packed_metadata
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    for given in seen if len(seen) == 1 else ():
        head, tail = given[:_HEAD], given[_HEAD:]
        if (
            len(tail) == len(kernel.params)
            and all(map(_same, head[:6], (*(*grid, 1, 1)[:3], stream, *binary)))
            and all(map(is_, head[7:], hooks))
            and all(map(is_, tail, args))
        ):
            return Handle(launcher, (*binary, None, None, None), tail[len(args) :])
    return None


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)
