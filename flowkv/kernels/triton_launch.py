"""How a Triton kernel is launched: on the tensors' device, with what that device has to offer."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from flowkv.core.geometry import ITEMSIZE
from flowkv.core.layout import GRANULE_BYTES, PageLayout


def interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter (TRITON_INTERPRET=1 when it was imported)."""
    return isinstance(kernel, InterpretedFunction)


class Traits(NamedTuple):
    """What tile sizes and grids depend on.

    Attributes:
        major: Compute capability, before the point.
        processors: Streaming multiprocessors.
        shared_bytes: Shared memory that one program may use.
    """

    major: int
    processors: int
    shared_bytes: int


@cache
def traits(device: torch.device) -> Traits:
    """Traits of a device; without one (interpreter), few processors, so that grids stay small."""
    if device.type != "cuda":
        return Traits(9, 4, 227 << 10)
    found = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Traits(found.major, found.multi_processor_count, shared_bytes)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument, a tensor.

    FP fusion is asked for by name: its default differs between versions of Triton.
    """
    constants.setdefault("enable_fp_fusion", True)
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **constants)
    else:
        kernel[grid](*args, **constants)


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
