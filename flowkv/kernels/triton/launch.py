"""How a Triton kernel is launched: on the tensors' device, with what that device has to offer."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import GRANULE_BYTES, PageLayout
from flowkv.kernels.triton.direct import SITES, hooked, site_of, watched


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


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument, a tensor.

    Neither waits for the device nor allocates, so it can be captured in a CUDA graph. FP fusion is
    asked for by name: its default differs between versions of Triton.

    Args:
        kernel: A function under `triton.jit`, constants behind its other parameters.
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
    site = SITES.get(id(kernel)) or site_of(kernel, args)
    if not site.direct or hooked(kernel):
        official(kernel, grid, args, constants)
        return
    active = driver.active
    device = index if index >= 0 else active.get_current_device()
    try:
        key = site.key(device, constants, *args)
        if key[0]:
            key = site.exact(key, args)
        handle = site.handles.get(key) or site.adopt(key)
    except (AttributeError, TypeError):  # other kinds of arguments, or a constant without a hash
        official(kernel, grid, args, constants)
        return
    if handle is None:
        if site.fits(args):
            site.keep(key, watched(kernel, grid, args, constants))
        else:
            official(kernel, grid, args, constants)
        return
    handle.run(
        *(*grid, 1, 1)[:3],
        active.get_current_stream(device),
        *handle.head,
        *args,
        *handle.constants,
    )


def official(kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> Any:
    """Run `kernel` as Triton documents it, on the current device; the compiled kernel."""
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
