"""Launching of Triton kernels: on the tensors' device, with what that device has to offer."""

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
from flowkv.core.geometry import CODECS, GRANULE_BYTES, ITEMSIZE, PageLayout


def interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter (TRITON_INTERPRET=1 when it was imported)."""
    return isinstance(kernel, InterpretedFunction)


class Traits(NamedTuple):
    """The traits of a device on which tile sizes and grids depend.

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


class Constants(NamedTuple):
    """Constants of a kernel; each is given those that it reads, all others are left out.

    One value, not a parameter for each: what calls what passes it on, and a launch hashes it once.
    Where elements lie are constants, not arguments: they tell the compiler the alignment of what it
    loads. Strides and offsets are elements, of sealed pages bytes.

    Attributes:
        HEAD_DIM: Dims of a key.
        VALUE_DIM: Dims of a value.
        D: Extent of a block that covers a key, of sealed pages a line of its bytes.
        DV: Extent of a block that covers a value.
        REST: Of the dims of a latent key that are no value.
        PAGE: Tokens of a page.
        GRANULE: Of the arena.
        VALUES: Where V begins in a run.
        K_SCALES: Where the scales of K begin in a run.
        V_SCALES: Where the scales of V begin in a run.
        RUN: From one KV head to the next.
        STRIPE: From one layer to the next.
        CODEC: Number of the pages' codec in `CODECS`.
        K_BITS: Of an element of K.
        V_BITS: Of an element of V.
        CHANNELS: Whether scales of K belong to channels.
        ITEM: Bytes of a raw element.
        BF16: Whether raw elements are bfloat16, which travels as int16.
        TILE: Tokens of a tile.
        PARTS: Into which a tile is cut.
        STAGES: Of the pipelined loop.
        HEADS: KV heads.
        GROUP: Query heads of a KV head.
        FEW: Most new tokens of a row that has few.
        ROWS: Extent of a block that covers the rows of the batch.
        COLUMNS: Extent of a block that covers the query rows of few new tokens.
        BLOCK: Query rows, pages, heads or tokens that a program takes at once.
        MIN_PAGES: Pages of a share or chunk, at least.
        UNITS: Into which a row is cut whatever the others are; 0 for shares.
        SPLIT: Whether a block's pages are cut into chunks.
        SEGMENTS: Partials that are merged at once.
        WINDOW: Tokens seen, 0 for all.
        SOFTCAP: Whether there is a softcap.
        SINKS: Whether there are sinks.
        ALIBI: Whether there are slopes.
        TREE: Whether bits stand in for the causal rule among new tokens.
        CAUSAL: Whether positions are compared at all.
        LSE: Whether normalisers are asked for.
        LISTED: Whether pages are those of a list (`task.Lists`).
        LISTS: Lists that there are.
        SEALED: Whether pages may be sealed.
        MASS: Tiles of a page whose weights are stored; 0 for none.
        WARPS: Of a program.
        ASM: Whether to use inline PTX.
        UPCAST: Whether to compute in float32: the interpreter's bfloat16 is wrong.
    """

    HEAD_DIM: int = 0
    VALUE_DIM: int = 0
    D: int = 0
    DV: int = 0
    REST: int = 0
    PAGE: int = 0
    GRANULE: int = 0
    VALUES: int = 0
    K_SCALES: int = 0
    V_SCALES: int = 0
    RUN: int = 0
    STRIPE: int = 0
    CODEC: int = 0
    K_BITS: int = 0
    V_BITS: int = 0
    CHANNELS: bool = False
    ITEM: int = 0
    BF16: bool = False
    TILE: int = 0
    PARTS: int = 0
    STAGES: int = 0
    HEADS: int = 0
    GROUP: int = 0
    FEW: int = 0
    ROWS: int = 0
    COLUMNS: int = 0
    BLOCK: int = 0
    MIN_PAGES: int = 0
    UNITS: int = 0
    SPLIT: bool = False
    SEGMENTS: int = 0
    WINDOW: int = 0
    SOFTCAP: bool = False
    SINKS: bool = False
    ALIBI: bool = False
    TREE: bool = False
    CAUSAL: bool = False
    LSE: bool = False
    LISTED: bool = False
    LISTS: int = 0
    SEALED: bool = False
    MASS: int = 0
    WARPS: int = 0
    ASM: bool = False
    UPCAST: bool = False

    @property
    def TILES(self) -> int:
        """Tiles of a page."""
        return -(-self.PAGE // self.TILE)


@cache
def strides(layout: PageLayout) -> Constants:
    """Where the elements of raw pages lie."""
    item = ITEMSIZE[layout.dtype]
    return Constants(
        HEAD_DIM=layout.head_dim,
        VALUE_DIM=layout.stored_value_dim,
        D=padded(layout.head_dim),
        DV=padded(layout.value_dim),
        PAGE=layout.page_size,
        GRANULE=GRANULE_BYTES // item,
        VALUES=layout.v_offset_bytes // item,
        RUN=layout.run_bytes // item,
        STRIPE=layout.stripe_stride_bytes // item,
    )


@cache
def coded(layout: PageLayout) -> Constants:
    """Where the bytes of pages of any codec lie."""
    return Constants(
        HEAD_DIM=layout.head_dim,
        VALUE_DIM=layout.value_dim,
        PAGE=layout.page_size,
        GRANULE=GRANULE_BYTES,
        VALUES=layout.v_offset_bytes,
        K_SCALES=layout.k_scale_offset_bytes,
        V_SCALES=layout.v_scale_offset_bytes,
        RUN=layout.run_bytes,
        STRIPE=layout.stripe_stride_bytes,
        CODEC=CODECS.index(layout.codec),
        ITEM=ITEMSIZE[layout.dtype],
        BF16=layout.dtype == "bfloat16",
    )
