"""A Triton driver for GPUs that are not there: compiles as for a device, launches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flowkv.kernels.triton import launch as triton_launch
from flowkv.kernels.triton.launch import Traits

ARCHES = {
    "sm_80": Traits(8, 108, 163 << 10, ptx=True),
    "sm_89": Traits(8, 128, 99 << 10, ptx=True),
    "sm_90": Traits(9, 132, 227 << 10, ptx=True),
    "sm_100": Traits(10, 148, 227 << 10, ptx=True),
    "gfx942": Traits(0, 304, 64 << 10, ptx=False),
}
"""What the kernels are compiled for: A100, L4, H100 and H200, B200, MI300X."""


class Launch(NamedTuple):
    """One launch that was not made."""

    kernel: str
    grid: tuple[int, ...]
    constants: dict[str, Any]
    compiled: Any
    function: Any
    args: tuple[Any, ...]


class NoDevice:
    """A driver for one architecture.

    Attributes:
        launcher_cls: Makes of a kernel's source and metadata what is called in place of its
            launcher.
    """

    def __init__(self, arch: str, launcher: Callable[[Any, Any], Any] | None = None) -> None:
        self.arch, self.utils, self.number = arch, self, list(ARCHES).index(arch)
        self.launcher_cls = launcher or (lambda source, metadata: lambda *args: None)
        self.target = (
            GPUTarget("cuda", int(arch[3:]), 32)
            if arch.startswith("sm_")
            else GPUTarget("hip", arch, 64)
        )
        self.binary_ext = "cubin" if self.target.backend == "cuda" else "hsaco"

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024

    def unload_module(self, *args: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 1 << 30,  # what is too much is said of all kernels, not of the first
            "multiprocessor_count": ARCHES[self.arch].processors,
            "max_num_regs": 65536,
            "warpSize": self.target.warp_size,
        }

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number  # kernels are cached by device

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> None: ...

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@contextmanager
def active(device: NoDevice) -> Iterator[NoDevice]:
    """Make Triton take this for its device. Without a real one it stays: kernels are unloaded."""
    driver.set_active(device)
    try:
        yield device
    finally:
        if torch.cuda.is_available():
            driver.reset_active()


@contextmanager
def no_device(arch: str, ptx: bool = True) -> Iterator[list[Launch]]:
    """Compile every launch made inside for `arch`, from tensors on the CPU, and make none.

    Args:
        arch: One of `ARCHES`.
        ptx: False leaves inline PTX out, as everywhere but on NVIDIA's devices.

    Yields:
        The launches, as they come.
    """
    launches: list[Launch] = []
    known = ARCHES[arch]

    def run_kernel(kernel: Any, grid: Any, args: Any, constants: dict[str, Any]) -> Any:
        if not known.ptx:
            constants = {name: x for name, x in constants.items() if name != "maxnreg"}
        compiled = kernel[grid](*args, **constants)
        launches.append(Launch(kernel.__name__, grid, constants, compiled, kernel, args))
        return compiled

    given = known._replace(ptx=ptx and known.ptx)
    with (
        active(NoDevice(arch)),
        mock.patch.object(triton_launch, "INTERPRETED", given),
        mock.patch.object(triton_launch, "run_kernel", run_kernel),
    ):
        triton_launch.traits.cache_clear()
        try:
            yield launches
        finally:
            triton_launch.traits.cache_clear()
