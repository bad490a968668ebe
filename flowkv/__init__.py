"""FlowKV: a key/value cache for any PyTorch model; paged, tiered, shared and persistent.

    kv = flowkv.attach(model, disk="./kv:20GiB")     # Hugging Face: nothing else changes
    model.generate(**inputs)                         # prompts seen before are restored

Importing this package does no work: every name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flowkv.cache import above

if TYPE_CHECKING:
    from flowkv import kernels as kernels
    from flowkv import sim as sim
    from flowkv import testing as testing
    from flowkv.cache.kv import KV
    from flowkv.cache.sequence import NEVER, SOON, Sequence
    from flowkv.cache.step import Step
    from flowkv.core.config import Config
    from flowkv.core.errors import ExperimentalWarning, FlowKVError
    from flowkv.core.geometry import Geometry, LayerGroup
    from flowkv.core.keys import Namespace, Salt, Shard
    from flowkv.engine.engine import Engine
    from flowkv.engine.request import Answer, Completion, Request
    from flowkv.hooks.attention import attention, intercept
    from flowkv.hooks.graphs import graphed
    from flowkv.hooks.huggingface.attach import attach, verify
    from flowkv.hooks.huggingface.load import LoadedModel, load
    from flowkv.policy.base import Lease, Policy, Retain
    from flowkv.tensors.embedding import attach_embedding
    from flowkv.tensors.memo import memo
    from flowkv.tensors.weights import attach_weights
    from flowkv.tiers.base import Tier

__version__ = "0.2.0"

__all__ = [
    "KV",
    "NEVER",
    "SOON",
    "Answer",
    "Completion",
    "Config",
    "Engine",
    "ExperimentalWarning",
    "FlowKVError",
    "Geometry",
    "LayerGroup",
    "Lease",
    "LoadedModel",
    "Namespace",
    "Policy",
    "Request",
    "Retain",
    "Salt",
    "Sequence",
    "Shard",
    "Step",
    "Tier",
    "attach",
    "attach_embedding",
    "attach_weights",
    "attention",
    "graphed",
    "intercept",
    "kernels",
    "load",
    "memo",
    "sim",
    "testing",
    "verify",
]

_HOMES = {
    name: home
    for home, names in {
        "flowkv.cache.kv": "KV",
        "flowkv.cache.sequence": "NEVER SOON Sequence",
        "flowkv.cache.step": "Step",
        "flowkv.core.config": "Config",
        "flowkv.core.errors": "ExperimentalWarning FlowKVError",
        "flowkv.core.geometry": "Geometry LayerGroup",
        "flowkv.core.keys": "Namespace Salt Shard",
        "flowkv.engine.engine": "Engine",
        "flowkv.engine.request": "Answer Completion Request",
        "flowkv.hooks.attention": "attention intercept",
        "flowkv.hooks.graphs": "graphed",
        "flowkv.hooks.huggingface": "attach verify",
        "flowkv.hooks.huggingface.load": "LoadedModel load",
        "flowkv.kernels": "kernels",
        "flowkv.policy.base": "Lease Policy Retain",
        "flowkv.sim": "sim",
        "flowkv.tensors.embedding": "attach_embedding",
        "flowkv.tensors.memo": "memo",
        "flowkv.tensors.weights": "attach_weights",
        "flowkv.testing": "testing",
        "flowkv.tiers.base": "Tier",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flowkv' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home == f"flowkv.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def _open_cache(*args: Any, **inputs: Any) -> Any:
    from flowkv.hooks.huggingface import make_cache

    return make_cache(*args, **inputs)


def _open_report(*args: Any, **options: Any) -> Any:
    from flowkv.report.account import Account

    return Account(*args, **options)


above.open_cache, above.open_report = _open_cache, _open_report


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
