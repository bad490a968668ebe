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
    from flowkv.cache.kv import KV as KV
    from flowkv.cache.sequence import NEVER as NEVER
    from flowkv.cache.sequence import SOON as SOON
    from flowkv.cache.sequence import Retain as Retain
    from flowkv.cache.sequence import Sequence as Sequence
    from flowkv.cache.step import Step as Step
    from flowkv.core.config import Config as Config
    from flowkv.core.errors import ExperimentalWarning as ExperimentalWarning
    from flowkv.core.errors import FlowKVError as FlowKVError
    from flowkv.core.geometry import Geometry as Geometry
    from flowkv.core.geometry import LayerGroup as LayerGroup
    from flowkv.core.keys import Namespace as Namespace
    from flowkv.core.keys import Salt as Salt
    from flowkv.core.keys import Shard as Shard
    from flowkv.engine.engine import Engine as Engine
    from flowkv.engine.request import Answer as Answer
    from flowkv.engine.request import Completion as Completion
    from flowkv.engine.request import Request as Request
    from flowkv.hooks.attention import attention as attention
    from flowkv.hooks.attention import intercept as intercept
    from flowkv.hooks.graphs import graphed as graphed
    from flowkv.hooks.huggingface.attach import attach as attach
    from flowkv.hooks.huggingface.attach import verify as verify
    from flowkv.policy.base import Lease as Lease
    from flowkv.policy.base import Policy as Policy
    from flowkv.tensors.embedding import attach_embedding as attach_embedding
    from flowkv.tensors.memo import memo as memo
    from flowkv.tensors.weights import attach_weights as attach_weights
    from flowkv.tiers.base import Tier as Tier

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
    "memo",
    "sim",
    "testing",
    "verify",
]

_HOMES = {
    "KV": "flowkv.cache.kv",
    "NEVER": "flowkv.cache.sequence",
    "SOON": "flowkv.cache.sequence",
    "Answer": "flowkv.engine.request",
    "Completion": "flowkv.engine.request",
    "Config": "flowkv.core.config",
    "Engine": "flowkv.engine.engine",
    "ExperimentalWarning": "flowkv.core.errors",
    "FlowKVError": "flowkv.core.errors",
    "Geometry": "flowkv.core.geometry",
    "LayerGroup": "flowkv.core.geometry",
    "Lease": "flowkv.policy.base",
    "Namespace": "flowkv.core.keys",
    "Policy": "flowkv.policy.base",
    "Request": "flowkv.engine.request",
    "Retain": "flowkv.cache.sequence",
    "Salt": "flowkv.core.keys",
    "Sequence": "flowkv.cache.sequence",
    "Shard": "flowkv.core.keys",
    "Step": "flowkv.cache.step",
    "Tier": "flowkv.tiers.base",
    "attach": "flowkv.hooks.huggingface",
    "attach_embedding": "flowkv.tensors.embedding",
    "attach_weights": "flowkv.tensors.weights",
    "attention": "flowkv.hooks.attention",
    "graphed": "flowkv.hooks.graphs",
    "intercept": "flowkv.hooks.attention",
    "kernels": "flowkv.kernels",
    "memo": "flowkv.tensors.memo",
    "sim": "flowkv.sim",
    "testing": "flowkv.testing",
    "verify": "flowkv.hooks.huggingface",
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
