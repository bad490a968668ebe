"""How a Triton kernel is launched: on the tensors' device, with what that device has to offer."""

from __future__ import annotations

import threading
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.knobs
from triton.runtime.interpreter import InterpretedFunction

from flowkv.core import compiling
from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import GRANULE_BYTES, PageLayout


def interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter (TRITON_INTERPRET=1 when it was imported)."""
    return isinstance(kernel, InterpretedFunction)


class Traits(NamedTuple):
    """What tile sizes and grids depend on.

    Attributes:
        major: Compute capability, before the point; 0 of devices that are not NVIDIA's.
        processors: Streaming multiprocessors.
        shared_bytes: Shared memory that one program may use.
        ptx: Whether kernels may hold inline PTX: not in the interpreter, not for AMD.
    """

    major: int
    processors: int
    shared_bytes: int
    ptx: bool


INTERPRETED = Traits(9, 4, 227 << 10, ptx=False)
"""Traits of no device: few processors, so that grids stay small."""


@cache
def traits(device: torch.device) -> Traits:
    """Traits of a device."""
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    ptx = torch.version.hip is None
    return Traits(found.major if ptx else 0, found.multi_processor_count, shared_bytes, ptx)


_THREAD = threading.local()
_OTHERS: list[Any] = [None]
"""Who else hears when Triton compiles."""


@cache
def _warn() -> None:
    """Before the first launch: warns of a Triton that compiles badly."""
    if triton.__version__.startswith("3.8."):
        warnings.warn(
            "Triton 3.8 compiles 4-bit kernels so that registers spill. "
            "Use Triton 3.7 or 3.9, or no codec smaller than kv8",
            stacklevel=4,
        )


def _hear(*args: Any, **given: Any) -> Any:
    """Triton says that it is about to compile, but of no end that comes whatever happens.

    That is the end of the launch, which also loads what was compiled.
    """
    if getattr(_THREAD, "hearing", False):  # whoever hears, too, passes it on to us
        return None
    if getattr(_THREAD, "launching", False) and not _THREAD.compiling:
        _THREAD.compiling = True
        compiling.begin()
    _THREAD.hearing = True
    try:
        return _OTHERS[0](*args, **given) if _OTHERS[0] is not None else None
    finally:
        _THREAD.hearing = False


def _listen() -> None:
    """Hears when Triton compiles, also after others took the hook for themselves."""
    there: Any = triton.knobs.runtime.jit_cache_hook
    if there is not _hear:
        _OTHERS[0] = there
        triton.knobs.runtime.jit_cache_hook = _hear


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument, a tensor.

    Neither waits for the device nor allocates, so it can be captured in a CUDA graph. FP fusion is
    asked for by name: its default differs between versions of Triton.

    Args:
        kernel: A function under `triton.jit`.
        grid: Programs along up to three dimensions.
        *args: All parameters but the constants.
        **constants: The constants, and options of the compiler.
    """
    constants.setdefault("enable_fp_fusion", True)
    index = args[0].get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, grid, *args, **constants)
        return
    _warn()
    _listen()
    _THREAD.launching, _THREAD.compiling = True, False
    try:
        run_kernel(kernel, grid, args, constants)
    finally:
        _THREAD.launching = False
        if _THREAD.compiling:
            compiling.end()


def run_kernel(kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> Any:
    """The launch itself, on the current device; the compiled kernel."""
    return kernel[grid](*args, **constants)


def padded(size: int) -> int:
    """The extent of a block that covers `size` elements of a dot operand: a power of two, >= 16."""
    return max(16, triton.next_power_of_2(size))


@cache
def strides(layout: PageLayout) -> dict[str, int]:
    """The constants by which kernels find an element: dims, and strides in elements.

    Constants, not arguments: they tell the compiler the alignment of what it loads.
    """
    item = ITEMSIZE[layout.dtype]
    return {
        "HEAD_DIM": layout.head_dim,
        "VALUE_DIM": layout.value_dim,
        "D": padded(layout.head_dim),
        "DV": padded(layout.value_dim),
        "PAGE": layout.page_size,
        "GRANULE": GRANULE_BYTES // item,
        "VALUES": layout.v_offset_bytes // item,
        "RUN": layout.run_bytes // item,
        "STRIPE": layout.stripe_stride_bytes // item,
    }
