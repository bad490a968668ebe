"""vLLM's Triton attention without vLLM: its `vllm/v1/attention/ops` on the path is enough.

Where vLLM itself is installed, that is used. Else the few names that the kernels import from the
rest of it are stood in for; put the folder that holds `vllm/` on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_KERNEL = "vllm.v1.attention.ops.triton_unified_attention"


class KVQuantMode(IntEnum):
    """Modes of which the kernels know something."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def load() -> tuple[Any, Any]:
    """(unified_attention, KVQuantMode).

    Raises:
        ImportError: The kernels are nowhere, or are other kernels.
    """
    if _KERNEL not in sys.modules and not _whole():
        _stand_in(_folder())
    kernel = importlib.import_module(_KERNEL).unified_attention
    return kernel, importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode


def _whole() -> bool:
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def _folder() -> Path:
    for entry in sys.path:
        folder = Path(entry, "vllm")
        if (folder / "v1" / "attention" / "ops").is_dir():
            return folder
    raise ImportError("no vllm on the path")


def _stand_in(folder: Path) -> None:
    import triton
    import triton.language as tl

    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops", "vllm.utils"):
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    none = SimpleNamespace(debug=print, info=print, warning=print, debug_once=lambda *args: None)
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cuda=lambda: True,
        is_device_capability_family=lambda family: False,
        has_device_capability=lambda capability: True,
    )
    names: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: none},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.math_utils": {"largest_power_of_2_divisor": lambda n: n & -n},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }
    for name, content in names.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, module)
