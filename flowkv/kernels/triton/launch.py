"""Launching of Triton kernels on the tensors' device, with that device's traits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, reduce
from operator import attrgetter, gt, itemgetter, or_
from types import NoneType
from typing import Any, NamedTuple

import torch
import triton
import triton.knobs
from triton.runtime.interpreter import InterpretedFunction

from flowkv.compiled import compiling
from flowkv.core.geometry import CODECS, GRANULE_BYTES, ITEMSIZE, PageLayout


def interpreted(kernel: Any) -> bool:
    """Return whether a kernel runs in Triton's interpreter (TRITON_INTERPRET=1 at its import)."""
    return isinstance(kernel, InterpretedFunction)


class Traits(NamedTuple):
    """Traits of a device on which tile sizes and grids depend.

    Attributes:
        major: Compute capability, before the point; 0 for devices that are not NVIDIA's.
        processors: Streaming multiprocessors.
        shared_bytes: Shared memory that one program may use.
        ptx: Whether kernels may hold inline PTX: not in the interpreter, not for AMD.
    """

    major: int
    processors: int
    shared_bytes: int
    ptx: bool


INTERPRETED = Traits(9, 4, 227 << 10, ptx=False)
"""Traits of the interpreter: few processors, so that grids stay small."""


@cache
def traits(device: torch.device) -> Traits:
    """Return the traits of a device."""
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    ptx = torch.version.hip is None
    return Traits(found.major if ptx else 0, found.multi_processor_count, shared_bytes, ptx)


_THREAD = threading.local()
_OTHERS: list[Any] = [None]
"""The hook that was set before `_hear`; it is called as well."""


def _hear(*args: Any, **given: Any) -> Any:
    """Announce a compilation when Triton's hook reports that it is about to compile.

    Triton reports no end that is certain to come. The end is that of the launch, which also loads
    the compiled code.
    """
    if getattr(_THREAD, "hearing", False):  # another hook that wraps this one passed the call back
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
    """Set the hook for compilations, also after another caller has replaced it."""
    there: Any = triton.knobs.runtime.jit_cache_hook
    if there is not _hear:
        _OTHERS[0] = there
        triton.knobs.runtime.jit_cache_hook = _hear


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument, a tensor.

    The call neither waits for the device nor allocates, so it can be captured in a CUDA graph. FP
    fusion is set explicitly: its default differs between versions of Triton. Programs have 4 warps
    by default.

    Args:
        kernel: A function under `triton.jit`.
        grid: Programs along up to three dimensions.
        *args: All parameters but the constants.
        **constants: The constants, and options of the compiler.
    """
    constants = {"num_warps": 4, "enable_fp_fusion": True, **constants}
    index = args[0].get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            run_kernel(kernel, grid, args, constants)
    else:
        run_kernel(kernel, grid, args, constants)


def run_kernel(kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> Any:
    """Launch on the current device, prepared where possible; return the compiled kernel."""
    kinds = tuple(map(type, args))
    at = id(kernel), kinds
    site = _SITES.get(at) or _SITES.setdefault(at, Site(kernel, kinds))
    key = site.key(args, constants)
    if key is None or changed(kernel):
        return ask(kernel, grid, args, constants)
    prepared = site.prepared.get(key)
    if prepared is None or not prepared.holds(kernel, key[0]):
        compiled = ask(kernel, grid, args, constants)
        site.prepare(key, compiled, constants)
        return compiled
    stream = triton.runtime.driver.active.get_current_stream(key[0])
    compiled, run, binary, behind = prepared[:4]
    try:
        run(*(*grid, 1, 1)[:3], stream, *binary, None, None, None, *args, *behind)
    except TypeError:  # a launcher with another signature, which has launched nothing
        site.fits = False
        return ask(kernel, grid, args, constants)
    return compiled


def ask(kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> Any:
    """Launch by Triton's public call, announcing compilations; return the compiled kernel."""
    _listen()
    _THREAD.launching, _THREAD.compiling = True, False
    try:
        return kernel[grid](*args, **constants)
    finally:
        _THREAD.launching = False
        if _THREAD.compiling:
            compiling.end()


# Prepared launches.
#
# `kernel[grid](...)` determines the type of each argument, and finds the compiled kernel by a
# string: tens of microseconds of Python. Here a tuple finds the kernel, and its launcher is called
# as Triton calls it. The tuple is at least as specific as Triton's string: of a tensor, its dtype
# and whether it begins at a multiple of 16 bytes; of an integer, unless `do_not_specialize`,
# whether it is 1 or divisible by 16; of all other arguments the type; all constants and options.
# Where Triton would check more, each launch goes through Triton: on AMD's devices, for integers
# that are negative or wider than 31 bits, while hooks or switches of Triton are set, and in
# untested versions.

KNOWN = frozenset({"3.6", "3.7", "3.8", "3.9"})
"""Versions of Triton with keys and launchers that were compared with these."""

_KINDS = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, NoneType})
_DTYPE, _ADDRESS = attrgetter("dtype"), torch.Tensor.data_ptr

Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def _pick(which: Iterable[bool]) -> Pick:
    """Return a function that takes some of a call's arguments."""
    chosen = [i for i, taken in enumerate(which) if taken]
    first = chosen[0] if chosen else 0
    return itemgetter(*chosen) if len(chosen) > 1 else itemgetter(slice(first, first + len(chosen)))


class Prepared(NamedTuple):
    """Compiled kernel, with the operands of its launch beside a call's arguments.

    Attributes:
        compiled: The kernel.
        run: Launcher of the kernel.
        binary: The loaded function, and its metadata.
        behind: Constants, behind the arguments of a call.
        known: Triton's cache of this kernel for its device; replaced when Triton clears it.
        names: Values of modules that were compiled into it: (namespace, name, value).
    """

    compiled: Any
    run: Callable[..., None]
    binary: tuple[Any, Any]
    behind: tuple[Any, ...]
    known: Any
    names: tuple[tuple[dict[str, Any], str, Any], ...]

    def holds(self, kernel: Any, device: int) -> bool:
        """Return whether Triton would still launch this kernel; else it recompiles or raises."""
        for there, name, value in self.names:
            if there.get(name) is not value:
                return False
        return self.known is kernel.device_caches.get(device)


class Site:
    """Launches of one kernel with arguments of the same types.

    Attributes:
        kernel: The kernel, referenced since sites are found by its `id`.
        fits: Whether launches can be prepared.
        tensors: Takes the tensors of a call's arguments.
        integers: Takes the integers.
        special: Takes the integers with values that decide the compilation.
        behind: Names of the constants, which follow the arguments.
        prepared: Prepared launches, by key.
    """

    def __init__(self, kernel: Any, kinds: tuple[type, ...]) -> None:
        known = ".".join(triton.__version__.split(".")[:2]) in KNOWN and not interpreted(kernel)
        self.kernel, self.prepared = kernel, dict[tuple[Any, ...], Prepared]()
        params = kernel.params if known and _KINDS.issuperset(kinds) else []
        constant = [param.is_constexpr for param in params]
        self.behind = [param.name for param in params if param.is_constexpr]
        self.fits = constant == [False] * len(kinds) + [True] * len(self.behind)
        whole = [kind is int for kind in kinds]
        exempt = [param.do_not_specialize for param in params]
        self.tensors = _pick(issubclass(kind, torch.Tensor) for kind in kinds)
        self.integers = _pick(whole)
        self.special = _pick(map(gt, whole, exempt))

    def key(self, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return the key of the compiled kernel for a call; None if only Triton can find it."""
        if not self.fits or reduce(or_, self.integers(args), 0) >> 31:
            return None
        tensors, device, aligned = self.tensors(args), args[0].get_device(), None
        if reduce(or_, map(_ADDRESS, tensors)) & 15:
            aligned = tuple(x.data_ptr() & 15 == 0 for x in tensors)
        values = constants.values()
        return (
            device if device >= 0 else triton.runtime.driver.active.get_current_device(),
            aligned,
            *[-1 if x == 1 else x & 15 == 0 for x in self.special(args)],
            *map(_DTYPE, tensors),
            *constants,
            *values,
            *map(type, values),
        )

    def prepare(self, key: tuple[Any, ...], compiled: Any, constants: dict[str, Any]) -> None:
        """Store the launch that served a call, if it serves all calls with the same key."""
        kernel, whole = self.kernel, type(compiled) is triton.compiler.CompiledKernel
        given = whole and all(name in constants for name in self.behind)
        if given and compiled.metadata.target.backend == "cuda":
            used = kernel.used_global_vals.items()
            self.prepared[key] = Prepared(
                compiled,
                compiled.run,
                (compiled.function, compiled.packed_metadata),
                tuple(constants[name] for name in self.behind),
                kernel.device_caches.get(key[0]),
                tuple((there, name, there.get(name)) for (name, _), (_, there) in used),
            )


_SITES: dict[tuple[Any, ...], Site] = {}


def changed(kernel: Any) -> bool:
    """Return whether hooks or switches of Triton require kernels or launches of their own."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        runtime.debug
        or kernel.debug
        or kernel.pre_run_hooks
        or triton.knobs.compilation.instrumentation_mode
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or getattr(runtime, "add_stages_inspection_hook", None)
    )


def power(size: int) -> int:
    """Return the least power of two that is no less than `size`, from 1 on."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """Return the extent of a block that covers `size` elements of a dot operand, at least 16."""
    return max(16, power(size))


class Constants(NamedTuple):
    """Constants of a kernel; each kernel sets those that it reads, all others keep their defaults.

    They are one value, not many parameters: device functions pass it on, and a launch hashes it
    once. Offsets and strides are constants, not arguments: the compiler derives the alignment of
    loads from them. Strides and offsets count elements, of sealed pages bytes.

    Attributes:
        HEAD_DIM: Dims of a key.
        VALUE_DIM: Dims of a value.
        D: Extent of a block that covers a key, of sealed pages a line of its bytes.
        DV: Extent of a block that covers a value.
        REST: Extent of a block that covers the dims of a latent key outside its value.
        PAGE: Tokens of a page.
        GRANULE: Elements of a granule of the arena.
        VALUES: Offset of V in a run.
        K_SCALES: Offset of the scales of K in a run.
        V_SCALES: Offset of the scales of V in a run.
        RUN: Stride from one KV head to the next.
        STRIPE: Stride from one layer to the next.
        CODEC: Number of the pages' codec in `CODECS`.
        K_BITS: Bits of an element of K.
        V_BITS: Bits of an element of V.
        CHANNELS: Whether scales of K belong to channels.
        ITEM: Bytes of a raw element.
        BF16: Whether raw elements are bfloat16, which travels as int16.
        TILE: Tokens of a tile.
        PARTS: Parts of a tile.
        STAGES: Stages of the pipelined loop.
        HEADS: KV heads.
        GROUP: Query heads of a KV head.
        FEW: Most new tokens of a row that has few.
        ROWS: Extent of a block that covers the rows of the batch.
        COLUMNS: Extent of a block that covers the query rows of few new tokens.
        BLOCK: Query rows, pages, heads or tokens that a program takes at once.
        MIN_PAGES: Least pages of a share or chunk.
        UNITS: Most units of a row, cut independently of other rows; 0 for shares.
        SPLIT: Whether a block's pages are cut into chunks.
        SEGMENTS: Partials that are merged at once.
        WINDOW: Tokens seen, 0 for all.
        SOFTCAP: Whether there is a softcap.
        SINKS: Whether there are sinks.
        ALIBI: Whether there are slopes.
        TREE: Whether bits stand in for the causal rule among new tokens.
        CAUSAL: Whether positions are compared at all.
        LSE: Whether normalisers are written.
        LISTED: Whether pages are those of a list (`task.Lists`).
        LISTS: Number of lists.
        SEALED: Whether pages may be sealed.
        MASS: Tiles of a page in the stored masses; 0 for none.
        WARPS: Warps of a program.
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


@lru_cache(maxsize=4096)
def given(shape: Constants, *parts: Any, **constants: Any) -> Constants:
    """Replace some constants; equal results are one object, since making them takes time.

    Args:
        shape: Constants of a layout.
        *parts: Named tuples of further constants.
        **constants: More constants, by name.
    """
    for part in parts:
        shape = shape._replace(**part._asdict())
    return shape._replace(**constants)


def _strides(layout: PageLayout, unit: int) -> Constants:
    """Return the offsets and strides of pages, in units of so many bytes."""
    return Constants(
        HEAD_DIM=layout.head_dim,
        PAGE=layout.page_size,
        GRANULE=GRANULE_BYTES // unit,
        VALUES=layout.v_offset_bytes // unit,
        RUN=layout.run_bytes // unit,
        STRIPE=layout.stripe_stride_bytes // unit,
    )


@cache
def strides(layout: PageLayout) -> Constants:
    """Return the offsets and strides of raw pages."""
    dims = padded(layout.head_dim), padded(layout.value_dim)
    shape = _strides(layout, ITEMSIZE[layout.dtype])
    return shape._replace(VALUE_DIM=layout.stored_value_dim, D=dims[0], DV=dims[1])


@cache
def coded(layout: PageLayout) -> Constants:
    """Return the offsets and strides, in bytes, of pages of any codec."""
    return _strides(layout, 1)._replace(
        VALUE_DIM=layout.value_dim,
        K_SCALES=layout.k_scale_offset_bytes,
        V_SCALES=layout.v_scale_offset_bytes,
        CODEC=CODECS.index(layout.codec),
        K_BITS=layout.spec.k_bits or 8 * ITEMSIZE[layout.dtype],
        V_BITS=layout.spec.v_bits or 8 * ITEMSIZE[layout.dtype],
        ITEM=ITEMSIZE[layout.dtype],
        BF16=layout.dtype == "bfloat16",
    )
