"""SGLang's own controller and pools on a CPU: what a server builds, built by hand.

Modules that SGLang imports for GPUs and images, and does not use here, are stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import transformers.models.auto.processing_auto  # noqa: F401 (asks which of them are there)

_UNUSED = ("IPython", "torchvision", "decord", "sgl_kernel", "flashinfer", "openai", "uvloop")


class _Unused(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] in _MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module = _Unused(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


_MISSING = {name for name in _UNUSED if importlib.util.find_spec(name) is None}
sys.meta_path.append(_Finder())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.cache_controller import (  # noqa: E402
    HiCacheController,
    get_storage_hash_str,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402

LAYERS, HEADS, DIM, PAGE, PAGES = 4, 3, 64, 64, 8
TOKENS = PAGES * PAGE
SLOTS = 2048
HASHES: list[str] = get_storage_hash_str(list(range(TOKENS)), None, page_size=PAGE)


def config(directory: Path, *, v1: bool = True, **options: Any) -> dict[str, Any]:
    """What `--hicache-storage-backend-extra-config` says."""
    return {
        "backend_name": "flowkv",
        "module_path": "flowkv.connect.sglang",
        "class_name": "FlowKVStorage",
        "interface_v1": int(v1),
        "flowkv": {"places": f"disk:{directory}:64MiB", "weights": "commit 1", **options},
    }


def storage_config(extra: dict[str, Any], **changes: Any) -> Any:
    said: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "model",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**said, **changes})


def device_pool(dtype: torch.dtype = torch.float32) -> Any:
    return MHATokenToKVPool(
        size=SLOTS,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def host_pool(layout: str, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
    device = device or device_pool(dtype)
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
    )


def page_of(n: int, pool: Any) -> torch.Tensor:
    """What page n holds, flat."""
    size = pool.get_dummy_flat_data_page().numel()
    return torch.randn(size, generator=torch.Generator().manual_seed(n)).to(pool.dtype)


def fill(pool: Any, at: torch.Tensor, names: Sequence[int]) -> None:
    for i, n in enumerate(names):
        pool.set_from_flat_data_page(int(at[i * pool.page_size]), page_of(n, pool))


def holds(pool: Any, at: torch.Tensor, names: Sequence[int]) -> bool:
    return all(
        torch.equal(pool.get_data_page(int(at[i * pool.page_size])).flatten(), page_of(n, pool))
        for i, n in enumerate(names)
    )


def controller(extra: dict[str, Any], layout: str) -> Any:
    """SGLang's controller with its threads, over a storage."""
    if not dist.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo")
    ranks = ("tp", "pp", "attn_dcp", "attn_cp", "attn_tp", "attn_dp")
    sizes = {f"{name}_size": 1 for name in (*ranks, "dp", "moe_dp")}
    runtime_context.get_parallel()._stamp.update(
        {f"{name}_rank": 0 for name in ranks}, enable_dp_attention=False, **sizes
    )
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]
    device = device_pool()
    return HiCacheController(
        PagedTokenToKVPoolAllocator(SLOTS, PAGE, torch.float32, "cpu", device, False),
        host_pool(layout, device=device),
        PAGE,
        dist.group.WORLD,
        threading.Event(),
        attn_tp_group=dist.group.WORLD,
        write_policy="write_through",
        io_backend="direct",
        storage_backend="dynamic",
        model_name="model",
        storage_backend_extra_config=extra,
        prefetch_threshold=PAGE,
    )


def backed_up(control: Any) -> int:
    """Backs up all pages; how many tokens SGLang says are stored."""
    at = control.mem_pool_host.alloc(TOKENS)
    fill(control.mem_pool_host, at, range(PAGES))
    control.write_storage(at, list(range(TOKENS)), HASHES)
    return int(control.ack_backup_queue.get(timeout=60).completed_tokens)


def restored(control: Any) -> tuple[int, bool]:
    """Prefetches all pages; how many tokens SGLang says came, and whether those are right."""
    control.prefetch("r", list(range(TOKENS)))
    operation = control.prefetch_hit_queue.get(timeout=60)
    n = operation.storage_hit_count
    if not n:
        return 0, True
    at = operation.host_indices = control.mem_pool_host.alloc(n)
    control.prefetch_buffer.put(operation)
    done, told = 0, control.ack_prefetch_queue.get(timeout=60)
    while not told.completed_req:
        done = told.completed_tokens
        told = control.ack_prefetch_queue.get(timeout=60)
    return done, holds(control.mem_pool_host, at, range(done // PAGE))


def write(directory: str, layout: str, v1: bool) -> None:
    """In a process of its own: what a test finds there."""
    control = controller(config(Path(directory), v1=v1), layout)
    assert backed_up(control) == TOKENS
    control.detach_storage_backend()
    sys.stdout.flush()
    os._exit(0)  # its threads wait for ever
