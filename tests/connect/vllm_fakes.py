"""Fakes of what FlowKV uses of vLLM 0.32, by name and signature, where that is not installed."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import sys
import time
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    _state: dict[type, Any] = field(default_factory=dict, init=False)
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict, init=False)

    def set_state(self, val: Any) -> None:
        self._state[type(val)] = val

    def get_state(self, cls: type) -> Any:
        return self._state.get(cls)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    removal_expected: bool = False


@dataclass(frozen=True)
class Metadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        assert primary_kv_view.strides is not None
        self.block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type


class CachePolicy:
    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity


class ChunkStatus(ctypes.Structure):
    _fields_ = [("ref_cnt", ctypes.c_int32), ("chunk_id", ctypes.c_int64)]

    def __init__(self, chunk_id: int) -> None:
        super().__init__()
        self.ref_cnt, self.chunk_id = -1, chunk_id


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(self, name: str, by: float = 1, labelvalues: Any = ()) -> None:
        self.values[name, labelvalues] = self.values.get((name, labelvalues), 0) + by

    def set_gauge(self, name: str, value: float, labelvalues: Any = ()) -> None:
        self.values[name, labelvalues] = value


class FileMapper:
    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def from_offloading_spec(cls, root_dir: str, spec: Any, blocks_per_file: int = 1) -> FileMapper:
        groups = [list(group.layer_names) for group in spec.config.groups]
        return cls(
            {
                "model_name": spec.config.model.name,
                "dtype": spec.config.model.dtype,
                "blocks_per_file": blocks_per_file,
                "kv_cache_groups": groups,
            }
        )

    def get_run_config(self) -> dict[str, Any]:
        return dict(self._fields)


def sha256_cbor(seed: Any) -> bytes:
    return hashlib.sha256(repr(seed).encode()).digest()


def install() -> None:
    """Puts modules of vLLM's names into `sys.modules`."""
    offload = {
        **{kind.__name__: kind for kind in (Medium, Locality, LookupResult, ReqContext)},
        "OffloadingCounterMetadata": Metadata,
        "OffloadingGaugeMetadata": Metadata,
        "OffloadingEvent": OffloadingEvent,
        "RequestOffloadingContext": RequestOffloadingContext,
    }
    hashes = {"NONE_HASH": sha256_cbor("seed"), "_NONE_HASH_SEED": "seed"}
    metrics = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
    contents: dict[str, dict[str, Any]] = {
        metrics: {"OffloadingConnectorStats": OffloadingConnectorStats},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(device_name="fake", is_cpu=lambda: True)
        },
        "vllm.utils.hashing": {"sha256_cbor": sha256_cbor},
        "vllm.v1.core.kv_cache_utils": hashes,
        "vllm.v1.kv_offload.base": offload,
        "vllm.v1.kv_offload.cpu.policies.base": {
            "CachePolicy": CachePolicy,
            "ChunkStatus": ChunkStatus,
        },
        "vllm.v1.kv_offload.file_mapper": {"FileMapper": FileMapper},
        "vllm.v1.kv_offload.tiering.base": {
            "JobResult": JobResult,
            "SecondaryTierManager": SecondaryTierManager,
            "TransferJob": TransferJob,
        },
        "vllm.version": {"__version__": "0.32.0"},
    }
    for name, names in contents.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            if path not in sys.modules:
                sys.modules[path] = ModuleType(path)
                if n > 1:
                    setattr(sys.modules[".".join(parts[: n - 1])], parts[n - 1], sys.modules[path])
        vars(sys.modules[name]).update(names)
